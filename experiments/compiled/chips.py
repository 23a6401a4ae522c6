"""The chips that programs are compiled for, and the compilers that do it without one.

Both compilers come from PyPI and ask for no device. libtpu knows its chips by name; XLA's CUDA
compiler is told what a GPU is.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

GIB = 2**30
SQUARES = ("1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
HOSTS = ("1", "2", "4", "8", "16", "32", "64")
PER_HOST = 8  # GPUs


class Compiler(NamedTuple):
    """Fields:
    platform: as JAX names it.
    modules: one of them compiles; install: how it comes.
    topology: `(name of the chip, shape, chip) -> arguments of get_topology_desc`.
    options: of every compilation.
    plans: a device's memory, so that it refuses what does not fit, and knows the peak; else all
      buffers of a program are there at once.
    """

    platform: str
    modules: tuple[str, ...]
    install: str
    topology: Callable
    options: Mapping
    plans: bool


class Chip(NamedTuple):
    """As published."""

    hbm: int  # bytes of one chip
    devices: int  # of JAX, on one chip
    shapes: tuple[str, ...]  # usual ones of a slice, to propose
    compiler: Compiler
    details: Mapping = {}  # what the compiler does not know by the name

    @property
    def memory(self) -> int:
        """Bytes of one device."""
        return self.hbm // self.devices


def _of_tpus(name: str, shape: str, chip: Chip) -> dict:
    if shape == "1":  # else a host has four chips
        return {"topology_name": f"{name}:1x1x1", "chips_per_host_bounds": (1, 1, 1)}
    return {"topology_name": f"{name}:{shape}"}


def _of_gpus(name: str, shape: str, chip: Chip) -> dict:
    """XLA's shape is partitions x hosts x GPUs of a host."""
    count = int(shape) if shape.isdecimal() else 0
    hosts = math.ceil(count / PER_HOST)
    if not count or (hosts > 1 and count % PER_HOST):
        raise ValueError(f"GPUs are counted, and hosts have {PER_HOST} of them")
    return {
        "topology_name": name,
        "topology": f"1x{hosts}x{count // hosts}",
        "target_config": _as_proto(
            {
                "gpu_device_info": {**chip.details, "device_memory_size": chip.memory},
                "platform_name": "CUDA",
                "runtime_version": {"major": 12, "minor": 8},
                "dnn_version_info": {"major": 9, "minor": 8},
                "device_description_str": name.upper(),
            }
        ),
    }


def _as_proto(fields: Mapping) -> str:
    """Protobuf's text format.

    Example:
      >>> _as_proto({"name": "CUDA", "version": {"major": 12}})
      'name: "CUDA" version { major: 12 }'
    """
    return " ".join(
        f"{name} {{ {_as_proto(value)} }}"
        if isinstance(value, Mapping)
        else f"{name}: {json.dumps(value)}"
        for name, value in fields.items()
    )


LIBTPU = Compiler("tpu", ("libtpu",), 'pip install -e ".[topology]"', _of_tpus, {}, True)
CUDA = Compiler(
    "cuda",
    ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    'pip install -e ".[topology_gpu]"',
    _of_gpus,
    # Kernels are chosen by timing them, or by Triton's table of timings: both need the GPU.
    {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
    False,
)

# GpuDeviceInfoProto of XLA. Of the SXM5 board by NVIDIA's data sheet: multiprocessors, bandwidth,
# clock and caches; of compute capability 9.0 by the CUDA programming guide: all limits.
H100 = {
    "cuda_compute_capability": {"major": 9, "minor": 0},
    "core_count": 132,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.98,
    "memory_bandwidth": 3_350_000_000_000,
    "l2_cache_size": 50 * 2**20,
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "threads_per_core_limit": 2048,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "registers_per_block_limit": 2**16,
    "registers_per_core_limit": 2**16,
    "shared_memory_per_block": 48 * 2**10,
    "shared_memory_per_block_optin": 227 * 2**10,
    "shared_memory_per_core": 228 * 2**10,
}

CHIPS = {
    "v2": Chip(16 * GIB, 2, SQUARES, LIBTPU),
    "v3": Chip(32 * GIB, 2, SQUARES, LIBTPU),
    "v4": Chip(32 * GIB, 2, CUBES, LIBTPU),
    "v5e": Chip(16 * GIB, 1, SQUARES, LIBTPU),
    "v5p": Chip(95 * GIB, 1, CUBES, LIBTPU),
    "v6e": Chip(32 * GIB, 1, SQUARES, LIBTPU),
    "h100": Chip(80 * 10**9, 1, HOSTS, CUDA, H100),
}
