"""Slices of chips that need not be there, and the compilers that compile for them without one.

Both compilers come from PyPI and ask for no device. libtpu knows its chips by name; XLA's CUDA
compiler is told what a GPU is.
"""

import importlib.util
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from local_opt.workers import AXIS

GIB = 2**30
SQUARES = ("1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
HOSTS = ("1", "2", "4", "8", "16", "32", "64")
PER_HOST = 8  # GPUs
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked: there is none outside Google Cloud
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a second process would be refused: nobody holds a chip
    # libtpu complains where these are not set; the name of the topology decides all the same.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_MIN_LOG_LEVEL": "3",
}


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
    details: str = ""  # what the compiler does not know by the name, as text of a protobuf

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
    target = (
        f'gpu_device_info {{ {chip.details} device_memory_size: {chip.memory} }} '
        'platform_name: "CUDA" runtime_version { major: 12 minor: 8 } '
        f'dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{name.upper()}"'
    )  # fmt: skip
    shape = f"1x{hosts}x{count // hosts}"
    return {"topology_name": name, "topology": shape, "target_config": target}


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
H100 = """
    cuda_compute_capability { major: 9 minor: 0 } core_count: 132 fpus_per_core: 128
    clock_rate_ghz: 1.98 memory_bandwidth: 3350000000000 l2_cache_size: 52428800
    threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
    thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
    block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
    registers_per_block_limit: 65536 registers_per_core_limit: 65536
    shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
    shared_memory_per_core: 233472
"""
CHIPS = {
    "v2": Chip(16 * GIB, 2, SQUARES, LIBTPU),
    "v3": Chip(32 * GIB, 2, SQUARES, LIBTPU),
    "v4": Chip(32 * GIB, 2, CUBES, LIBTPU),
    "v5e": Chip(16 * GIB, 1, SQUARES, LIBTPU),
    "v5p": Chip(95 * GIB, 1, CUBES, LIBTPU),
    "v6e": Chip(32 * GIB, 1, SQUARES, LIBTPU),
    "h100": Chip(80 * 10**9, 1, HOSTS, CUDA, H100),
}


class Slice(NamedTuple):
    """`mesh` is of all its devices, a worker each; `kind` is what they call themselves."""

    name: str
    kind: str
    mesh: Mesh
    chip: Chip


def stay_on_cpu() -> None:
    """Keeps JAX from looking for accelerators, before it looks for any; and libtpu quiet."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")


def slice_of(name: str, workers: int) -> Slice:
    """The slice of a topology, a device for each worker.

    Args:
      name: CHIP:SHAPE, a chip of CHIPS and its chips per axis, such as v5e:4x4 or h100:8.
      workers: W, of the run.

    Raises:
      ValueError: for a topology that does not exist, without its compiler, and for another number
        of workers than devices.
    """
    parts = re.fullmatch(r"(\w+):(\d+(?:x\d+){0,2})", name)
    if parts is None or parts[1] not in CHIPS:
        raise ValueError(
            f"--topology is {name}: a slice is CHIP:SHAPE, and chips are {', '.join(CHIPS)}, for "
            "which alone programs are compiled. Pass one such as v5e:4x4 or h100:8."
        )
    chip = CHIPS[parts[1]]
    compiler = chip.compiler
    if not any(map(importlib.util.find_spec, compiler.modules)):
        raise ValueError(
            f"--topology is {name}, and {' or '.join(compiler.modules)}, which compiles for it, is "
            f"not installed: {compiler.install}."
        )
    stay_on_cpu()
    try:
        described = compiler.topology(*parts.groups(), chip)
        devices = topologies.get_topology_desc(platform=compiler.platform, **described).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise ValueError(
            f"--topology is {name}, and there is no such slice ({error}): a {parts[1]} has shapes "
            f"such as {', '.join(chip.shapes)}. Pass one of them."
        ) from error
    if len(devices) != workers:
        raise ValueError(
            f"--workers is {workers} and {name} has {len(devices)} devices: every device runs one "
            f"worker. Pass --workers={len(devices)}, or another --topology."
        )
    return Slice(name, devices[0].device_kind, Mesh(np.array(devices), (AXIS,)), chip)
