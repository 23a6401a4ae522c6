r"""Compiles a run for TPUs or GPUs that are not there: memory, collectives, and whether it fits.

    python -m benchmarks.topologies --topology=v5e:4x4 -- experiments.train --task=digits \
        --workers=16 --echo=fixed

prints what `--dry_run` does, and every program of the run compiled at its full size for a slice of
TPUs or GPUs, a device for each worker: see docs/use/accelerators.md. Both compilers come from PyPI
and need no device. libtpu knows its chips by name; XLA's CUDA compiler gets a description of the
GPU. Counts are those of the compilers, for one device and a call with one step: the body of a loop
counts once.
"""

import contextlib
import importlib
import importlib.util
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh

import syncopate
from benchmarks.hlo import Collective, collectives_of
from experiments.compare import commands, cost, runs
from experiments.compare.study import Study, define_flags
from experiments.data.base import Recipe, Task
from experiments.report.tables import markdown, show_bytes
from syncopate.command import with_presets
from syncopate.refusals import UserError
from syncopate.unstable import compilation_cache, topologies
from syncopate.workers import AXIS

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
    plans: bool  # refuses what does not fit, and knows the peak; else all buffers are added up


class Chip(NamedTuple):
    memory: int  # bytes of one device, as published
    compiler: Compiler
    details: str = ""  # what the name does not tell the compiler, as text of a protobuf


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
        f"gpu_device_info {{ {chip.details} device_memory_size: {chip.memory} }} "
        'platform_name: "CUDA" runtime_version { major: 12 minor: 8 } '
        f'dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{name.upper()}"'
    )
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

# GpuDeviceInfoProto of XLA. NVIDIA's data sheet of the SXM5 board has multiprocessors, bandwidth,
# clock and caches; the CUDA programming guide has all limits of compute capability 9.0.
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
    """Keeps JAX from looking for accelerators, and libtpu quiet; call it before JAX starts."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")


def slice_of(name: str, workers: int) -> tuple[Mesh, Chip]:
    """The devices of a topology CHIP:SHAPE (chips per axis), one for each worker."""
    parts = re.fullmatch(r"(\w+):(\d+(?:x\d+){0,2})", name)
    if parts is None or parts[1] not in CHIPS:
        raise UserError(
            f"--topology is {name}: pass CHIP:SHAPE, such as v5e:4x4 or h100:8. Programs are "
            f"compiled for the chips {', '.join(CHIPS)} alone."
        )
    chip = CHIPS[parts[1]]
    compiler = chip.compiler
    if not any(map(importlib.util.find_spec, compiler.modules)):
        raise UserError(
            f"--topology is {name}, and {' or '.join(compiler.modules)}, which compiles for it, is "
            f"not installed: {syncopate.install(compiler.extra)}."
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


class Compiled(NamedTuple):
    """A program of one device."""

    # Bytes. Donated arrays count as arguments and as outputs. The peak is that of the device's
    # memory alone, and temporaries include those that never leave the core.
    memory: dict[str, int]
    counted: dict[str, float | None]  # flops and bytes accessed, where XLA counts them
    collectives: list[Collective]
    seconds: float  # to compile


class Refused(NamedTuple):
    """A program that does not fit into the memory."""

    why: str


def compile_or_refuse(lowered: jax.stages.Lowered, chip: Chip) -> Compiled | Refused:
    start = time.perf_counter()
    try:
        with uncached():
            program = lowered.compile(compiler_options=dict(chip.compiler.options) or None)
    except jax.errors.JaxRuntimeError as error:
        if lacks := re.search(r"Ran out of memory.*", str(error)):
            return Refused(lacks[0])
        raise
    seconds = time.perf_counter() - start
    stats, analysis = program.memory_analysis(), program.cost_analysis() or {}
    planned, total = chip.compiler.plans, cost.buffer_bytes(program)
    if not planned and total > chip.memory:
        return Refused(f"Its buffers take {show_bytes(total)} of {show_bytes(chip.memory)}.")
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "donated": stats.alias_size_in_bytes,
        "peak": stats.peak_memory_in_bytes * planned or total,
    }
    counted = {name: analysis.get(name) for name in ("flops", "bytes accessed")}
    return Compiled(memory, counted, collectives_of(program.as_text()), seconds)


@contextlib.contextmanager
def uncached():
    """Compiles anew: JAX cannot read programs for absent devices back from its cache on disk."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # else JAX keeps its first answer to whether there is a cache
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def report(task: Task, recipe: Recipe, study: Study, values, topology: str) -> str:
    """Markdown: a dry run, and what every program takes and sends on a slice of chips."""
    mesh, chip = slice_of(topology, recipe.workers)
    rows, compiled = [], {}
    for arm, shapes, row in cost.rows_of_arms(task, recipe, study, values, mesh):
        order, rule, _ = arm.rows
        keys = [(order, rule.rounds, name) for name in shapes.programs]  # arms share programs
        if row["steps"] == row["loads"]:
            keys.remove((order, rule.rounds, "echoed step"))
        for key in keys:
            if key not in compiled:
                program = compile_or_refuse(shapes.programs[key[-1]](), chip)
                compiled[key] = key[-1], arm.label, shapes, program
        rows.append(row | {"peak of a device": _peak([compiled[k][-1] for k in keys], chip)})
    facts = cost.facts_table(task, recipe, study, **_slice_facts(task, topology, mesh, chip))
    return "\n\n".join([facts, markdown(rows), *_details(compiled.values(), chip)])


def _peak(programs: list[Compiled | Refused], chip: Chip) -> str:
    if any(isinstance(one, Refused) for one in programs):
        return "does not fit"
    peak = max(one.memory["peak"] for one in programs)
    return f"{show_bytes(peak)}, {peak / chip.memory:.1%}"


def _details(listed, chip) -> list[str]:
    """Markdown: all programs that were compiled, what they send, and whether they fit."""
    programs, sent, peaks, last = [], [], [], []
    for program, arm, shapes, compiled in listed:
        if isinstance(compiled, Refused):
            last.append(f"{program}, {arm}: does not fit. {compiled.why} {_taken(shapes, chip)}")
            continue
        name = {"program": program, "arm": arm}
        shown = {what: show_bytes(count) for what, count in compiled.memory.items()}
        shown |= {what: "-" if n is None else f"{n:.4g}" for what, n in compiled.counted.items()}
        programs.append(name | shown | {"compiled in": f"{compiled.seconds:.1f} s"})
        sent += [name | row for row in _sent(compiled.collectives)]
        peaks.append(compiled.memory["peak"])
    if peaks and not last:
        last = [f"All programs fit: {show_bytes(max(peaks))} of {show_bytes(chip.memory)} at most."]
    return [*(markdown(rows) for rows in (programs, sent) if rows), *last]


def _taken(shapes, chip) -> str:
    """The largest parts of memory, and which flags reduce them."""
    fields = {"parameters": "params", "the optimizer": "opt_state", "the order": "orders"}
    fields |= {"averages": "averages"} if shapes.state.averages else {}
    state = [f"{who} {show_bytes(shapes.bytes_of(field))}" for who, field in fields.items()]
    larger = [name for name, other in CHIPS.items() if other.memory > chip.memory]
    return (
        f"The state has {', '.join(state)}; the rest is data and what the program computes. Take a "
        "sketch for an exact order, --input=thread, a smaller --unit_size, --units_per_step or "
        f"model, or another chip: {', '.join(larger) or 'none is larger'}."
    )


def _sent(collectives) -> list[dict]:
    """A row per kind of collectives: how many there are, and the bytes of all their results."""
    kinds = defaultdict(list)
    for one in collectives:
        kinds[one.kind].append(one)
    return [
        {
            "collective": kind,
            "number": len(several),
            "bytes": show_bytes(sum(one.bytes for one in several)),
            "asynchronous": sum(one.asynchronous for one in several),
        }
        for kind, several in sorted(kinds.items())
    ]


def _slice_facts(task: Task, topology: str, mesh, chip) -> dict:
    kind, held = mesh.devices.flat[0].device_kind, cost.tree_bytes(dict(task.train))
    return {
        "slice": f"{topology}, {mesh.size} x {kind}, a worker each",
        "memory of a device": show_bytes(chip.memory),
        "training set on a device": f"{show_bytes(held / mesh.size)}; dealt, {show_bytes(held)}",
    }


def planned(name: str, arguments: list[str]) -> tuple[Task, Recipe, Study, flags.FlagValues]:
    """The task, recipe and arms of a command, such as experiments.train, and its parsed flags."""
    module, values = importlib.import_module(name), flags.FlagValues()
    is_study = hasattr(module, "STUDY")
    define_flags(module.STUDY, values) if is_study else module.define_flags(values)
    values([name, *with_presets(arguments), "--dry_run"])
    if is_study:
        task, recipe, _, study = commands.resolved_study(module.STUDY, values)
    else:
        task, recipe, study = runs.resolved_run(module.ALONE, values)
    return task, recipe, study, values


TOPOLOGY = flags.DEFINE_string("topology", None, "CHIP:SHAPE, as v5e:4x4 or h100:8")


def main(argv):
    if len(argv) < 2 or TOPOLOGY.value is None:
        raise app.UsageError("Pass --topology=v5e:4x4 -- experiments.train --workers=16 ...")
    stay_on_cpu()
    task, recipe, study, values = planned(argv[1], argv[2:])
    print(report(task, recipe, study, values, TOPOLOGY.value))


if __name__ == "__main__":
    app.run(main)
