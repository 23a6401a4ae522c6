"""What compiled programs hold, and compilers of devices that need not be there."""

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from local_opt.cost import KINDS
from local_opt.workers import AXIS
from syncopate.unstable import compilation_cache, topologies


class Compiler(NamedTuple):
    """A compiler of devices that need not be there."""

    platform: str  # as JAX names it
    modules: tuple[str, ...]  # one of them compiles
    extra: str  # of this package, which installs one
    topology: Callable  # (name of the chip, shape) -> arguments of get_topology_desc
    options: Mapping = {}  # of every compilation


def _of_tpus(name, shape):
    if shape == "1":  # else a host has four chips
        return {"topology_name": f"{name}:1x1x1", "chips_per_host_bounds": (1, 1, 1)}
    return {"topology_name": f"{name}:{shape}"}


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


def _of_gpus(name, shape):
    """XLA's shape is partitions x hosts x GPUs of a host."""
    target = (
        f'gpu_device_info {{ {H100} device_memory_size: 80000000000 }} '
        'platform_name: "CUDA" runtime_version { major: 12 minor: 8 } '
        'dnn_version_info { major: 9 minor: 8 } device_description_str: "H100"'
    )  # fmt: skip
    return {"topology_name": name, "topology": f"1x1x{shape}", "target_config": target}


CPU = Compiler("cpu", (), "", dict)
LIBTPU = Compiler("tpu", ("libtpu",), "topology", _of_tpus)
CUDA = Compiler(
    "cuda", ("jax_cuda12_plugin", "jax_cuda13_plugin"), "topology_gpu", _of_gpus,
    # Kernels are chosen by timing them, or by Triton's table of timings: both need the GPU.
    {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
)  # fmt: skip
COMPILERS = {"v5e": LIBTPU, "v6e": LIBTPU, "h100": CUDA}
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked: there is none outside Google Cloud
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a second process would be refused: nobody holds a chip
    # libtpu complains where these are not set; the name of the topology decides all the same.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_MIN_LOG_LEVEL": "3",
}


def devices_of(name, **options):
    """The devices of CHIP:SHAPE, chips per axis, such as v5e:4x4 or h100:8."""
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    chip, shape = name.split(":")
    described = COMPILERS[chip].topology(chip, shape) | options
    platform = COMPILERS[chip].platform
    return np.array(topologies.get_topology_desc(platform=platform, **described).devices)


def slice_of(name):
    """A mesh of one worker on each device of CHIP:SHAPE."""
    return Mesh(devices_of(name), (AXIS,))


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


@contextlib.contextmanager
def compilations():
    """The names of all that is compiled in the body."""
    found = []

    def listen(event, *_, **about):
        if event.endswith("backend_compile_duration"):
            found.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def marks_of(compiler):
    """Of a test that needs a compiler."""
    absent = not any(map(importlib.util.find_spec, compiler.modules))
    reason = f"{' or '.join(compiler.modules)} is not installed: extra {compiler.extra}"
    return [pytest.mark.topology, pytest.mark.skipif(absent, reason=reason)]


def compiled_by(compiler):
    """The same as a decorator, of a test that compiles as users do."""

    def mark(function):
        for each in [*marks_of(compiler), pytest.mark.usefixtures("optimised")]:
            function = each(function)
        return function

    return mark


def text_of(lowered, name="cpu"):
    """A program as a chip's compiler prints it."""
    options = dict(COMPILERS.get(name, CPU).options) or None
    with uncached():
        return lowered.compile(compiler_options=options).as_text()


def kinds(collectives):
    """{kind: bytes}."""
    found = {}
    for one in collectives:
        found[one.kind] = found.get(one.kind, 0) + one.bytes
    return found


def operations(text):
    """Kinds of its collectives, sorted."""
    return sorted(one.kind for one in collectives_of(text))


def types_of(one):
    """Types of the numbers that a collective gives, such as {"f32"}."""
    result = re.split(rf"\b(?:{'|'.join(KINDS)})", one.line.split(" = ", 1)[1])[0]
    return set(re.findall(r"\b([a-z]+\d+)\[", result))


def conditionals(text):
    """Lines of its conditionals."""
    return re.findall(r"^.* conditional\(.*$", text, re.M)


def donated(text):
    """How many arguments are handed on as outputs."""
    return re.search(r"input_output_alias=\{(.*?) \}", text)[1].count("alias)")


def groups_of(line):
    """Replica groups of a collective, in the three ways in which XLA prints them.

    Written out, as [shape]<=[iota]T(permutation), or as mesh['a'=2,'b'=4] {'b'}.
    """
    if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        axes = re.findall(r"'(\w+)'=(\d+)", match[1])
        reduced = re.findall(r"'(\w+)'", match[2])
        ids = np.arange(8).reshape([int(size) for _, size in axes])
        places = [i for i, (name, _) in enumerate(axes) if name in reduced]
        ids = np.moveaxis(ids, places, range(-len(places), 0))
        members = math.prod(ids.shape[-len(places) :])
        return sorted(sorted(row) for row in ids.reshape(-1, members).tolist())
    if match := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        rows = re.findall(r"\{([\d,]+)\}", match[1])
        return sorted(sorted(int(n) for n in row.split(",")) for row in rows)
    shape, iota, order = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line
    ).groups()
    ints = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    ids = np.arange(8).reshape(ints(iota))
    ids = ids.transpose(ints(order)) if order else ids
    return sorted(sorted(row) for row in ids.reshape(ints(shape)).tolist())


def lines_of(compiled, mesh):
    """(operation, bytes of its results, axes between whose devices it runs) of all collectives."""
    ids = np.arange(mesh.size).reshape(mesh.devices.shape)
    workers, inside = mesh.axis_names
    found = []
    for one in collectives_of(compiled.as_text()):
        groups = groups_of(one.line)
        (axes,) = {
            axes
            for axes, places in {
                workers: ids.T.tolist(),
                inside: ids.tolist(),
                "both": [ids.ravel().tolist()],
            }.items()
            if sorted(places) == groups
        }
        found.append((one.kind, one.bytes, axes))
    return sorted(found)
