"""What compilers say of a program for devices that need not be there.

Both compilers come from PyPI and ask for no device. libtpu knows its chips by name; XLA's CUDA
compiler is told what a GPU is. Counts are the compilers' own, of one device and of a call with one
step: the body of every loop counts once.
"""

import contextlib
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from local_opt.workers import AXIS
from syncopate.refusals import UserError

GIB = 2**30
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
    platform: str  # as JAX names it
    modules: tuple[str, ...]  # one of them compiles
    extra: str  # of this package, which installs one
    topology: Callable  # (name of the chip, shape, chip) -> arguments of get_topology_desc
    options: Mapping  # of every compilation
    plans: bool  # refuses what does not fit, and knows the peak; else all buffers are there at once


class Chip(NamedTuple):
    memory: int  # bytes of one device, as published
    compiler: Compiler
    details: str = ""  # what the compiler does not know by the name, as text of a protobuf


def _of_tpus(name: str, shape: str, chip: Chip) -> dict:
    if shape == "1":  # else a host has four chips
        return {"topology_name": f"{name}:1x1x1", "chips_per_host_bounds": (1, 1, 1)}
    return {"topology_name": f"{name}:{shape}"}


def _of_gpus(name: str, shape: str, chip: Chip) -> dict:
    """XLA's shape is partitions x hosts x GPUs of a host."""
    count = int(shape) if shape.isdecimal() else 0
    hosts = math.ceil(count / PER_HOST)
    if not count or (hosts > 1 and count % PER_HOST):
        raise UserError(f"GPUs are counted, and hosts have {PER_HOST} of them")
    target = (
        f'gpu_device_info {{ {chip.details} device_memory_size: {chip.memory} }} '
        'platform_name: "CUDA" runtime_version { major: 12 minor: 8 } '
        f'dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{name.upper()}"'
    )  # fmt: skip
    shape = f"1x{hosts}x{count // hosts}"
    return {"topology_name": name, "topology": shape, "target_config": target}


LIBTPU = Compiler("tpu", ("libtpu",), "topology", _of_tpus, {}, True)
CUDA = Compiler(
    "cuda",
    ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    "topology_gpu",
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
CHIPS = {  # those up to v4 are two devices each
    "v2": Chip(8 * GIB, LIBTPU),
    "v3": Chip(16 * GIB, LIBTPU),
    "v4": Chip(16 * GIB, LIBTPU),
    "v5e": Chip(16 * GIB, LIBTPU),
    "v5p": Chip(95 * GIB, LIBTPU),
    "v6e": Chip(32 * GIB, LIBTPU),
    "h100": Chip(80 * 10**9, CUDA, H100),
}


def stay_on_cpu() -> None:
    """Keeps JAX from looking for accelerators, before it looks for any; and libtpu quiet."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")


def slice_of(name: str, workers: int) -> tuple[Mesh, Chip]:
    """The devices of a topology CHIP:SHAPE (chips per axis), one for each worker."""
    parts = re.fullmatch(r"(\w+):(\d+(?:x\d+){0,2})", name)
    if parts is None or parts[1] not in CHIPS:
        raise UserError(
            f"--topology is {name}: a slice is CHIP:SHAPE, and chips are {', '.join(CHIPS)}, for "
            "which alone programs are compiled. Pass one such as v5e:4x4 or h100:8."
        )
    chip = CHIPS[parts[1]]
    compiler = chip.compiler
    if not any(map(importlib.util.find_spec, compiler.modules)):
        raise UserError(
            f"--topology is {name}, and {' or '.join(compiler.modules)}, which compiles for it, is "
            f'not installed: pip install -e ".[{compiler.extra}]".'
        )
    stay_on_cpu()
    try:
        described = compiler.topology(*parts.groups(), chip)
        devices = topologies.get_topology_desc(platform=compiler.platform, **described).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise UserError(
            f"--topology is {name}: no such slice ({error}). See docs/use/accelerators.md."
        ) from error
    if len(devices) != workers:
        raise UserError(
            f"--workers is {workers} and {name} has {len(devices)} devices: every device runs one "
            f"worker. Pass --workers={len(devices)}, or another --topology."
        )
    return Mesh(np.array(devices), (AXIS,)), chip


KINDS = (
    "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
MEMORY = {"": 1.0} | {letter: 1024.0**i for i, letter in enumerate("KMGTPE", 1)}


class Collective(NamedTuple):
    """An instruction of a compiled program.

    Fields:
      kind: of KINDS; bytes: of its result on one device, without the padding of tiles.
      asynchronous: the program computes between its start and its end.
      where: the computation that holds it; line: as printed.
    """

    kind: str
    bytes: int
    asynchronous: bool
    where: str
    line: str


class Compiled(NamedTuple):
    """A program of one device.

    Fields:
      memory: bytes; what is donated is argument and output. The peak is that of the device's memory
        alone, temporaries also those that never leave the core.
      counted: flops, bytes accessed and cycles, as XLA and libtpu count them, where they do.
      collectives: of its text; seconds: to compile.
    """

    memory: dict[str, int]
    counted: dict[str, float | None]
    collectives: list[Collective]
    seconds: float


class Refused(NamedTuple):
    """A program that the memory does not hold: bytes that it needs, and those that it may have."""

    needed: float
    available: float


def compile_or_refuse(lowered: jax.stages.Lowered, chip: Chip) -> Compiled | Refused:
    start = time.perf_counter()
    try:
        with uncached():
            program = lowered.compile(compiler_options=dict(chip.compiler.options) or None)
    except jax.errors.JaxRuntimeError as error:
        if (refused := shortage(str(error))) is None:
            raise
        return refused
    seconds = time.perf_counter() - start
    stats, cost, text = program.memory_analysis(), program.cost_analysis() or {}, program.as_text()
    planned, total = chip.compiler.plans, buffer_bytes(program)
    if not planned and total > chip.memory:
        return Refused(total, chip.memory)
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "donated": stats.alias_size_in_bytes,
        "peak": stats.peak_memory_in_bytes * planned or total,
    }
    counted = {name: cost.get(name) for name in ("flops", "bytes accessed")}
    counted["cycles"] = cycles_of(text)
    return Compiled(memory, counted, collectives_of(text), seconds)


def buffer_bytes(program: jax.stages.Compiled) -> int:
    """Of all buffers of a program on one device; what is donated counts once."""
    stats = program.memory_analysis()
    own = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + own + stats.temp_size_in_bytes


@contextlib.contextmanager
def uncached():
    """Compiles anew: JAX cannot read programs for absent devices back from its cache on disk."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # else it goes by what it found when it was first asked
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def shortage(message: str) -> Refused | None:
    """What a compiler's message says of memory that does not suffice; None: it is about others."""
    size = r"([\d.]+)([KMGTPE]?)B?"
    for pattern in (rf"\({size}\) exceeds available \w+ \({size}\)", rf"Used {size} of {size}"):
        if found := re.search(pattern, message):
            needed, unit, available, other = found.groups()
            return Refused(float(needed) * MEMORY[unit], float(available) * MEMORY[other])
    return None


def collectives_of(text: str) -> list[Collective]:
    """The collectives of scheduled HLO (`as_text`), each once; of one in two halves, its end."""
    instruction = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(%?([\w.\-]*)")
    # CUDA splits every collective in two, and says where nothing runs between them.
    blocking = {m[1] for m in re.finditer(r'%?([\w.\-]+) = [^\n]*"is_sync":true', text)}
    apart = set(re.findall(r" async-start\([^\n]*calls=%?([\w.\-]+)", text))
    found = []
    for name, lines in computations(text):
        # libtpu spreads one over fusions: a start, those beside it, all of this name, and a done.
        ends = any('"AsyncCollectiveDone"' in line for line in lines)
        starts = any('"AsyncCollectiveStart"' in line for line in lines)
        if (starts or "async_collective" in name) and not ends:
            continue
        for line in lines:
            if not (match := instruction.match(line)):
                continue
            result, operation, operand = match.groups()
            kind = operation.removesuffix("-done")
            if kind in KINDS:
                halves = kind != operation and operand not in blocking
                beside = halves or ends or name in apart
                found.append(Collective(kind, result_bytes(result), beside, name, line))
    return found


def cycles_of(text: str) -> int | None:
    """libtpu's estimates of all instructions of a program; None where there are none."""
    fused = set(re.findall(r" fusion\([^\n]*calls=%?([\w.\-]+)", text))
    estimated = re.compile(r'"estimated_cycles":"(\d+)"')
    lines = [line for name, lines in computations(text) if name not in fused for line in lines]
    found = [int(match[1]) for line in lines if (match := estimated.search(line))]
    return sum(found) if found else None


def result_bytes(result: str) -> int:
    """Of the arrays of a type, such as `(f32[4,5]{1,0:T(4,128)}, u32[])`; tokens have none."""
    bits = 0
    for kind, width, shape in re.findall(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", result):
        each = 8 if kind == "pred" else int(width)
        bits += each * math.prod(int(n) for n in shape.split(",") if n)
    return -(-bits // 8)


def computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of each."""
    for part in re.split(r"\n(?=\S)", text):
        head, *lines = part.split("\n")
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{\s*$", head):
            yield start[1], lines
