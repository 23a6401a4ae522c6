"""The cost of a run, computed before it: traffic, time on a machine, programs, and a dry run.

`--dry_run` on an experiment builds the model's and the data's shapes and all plans, lowers the step
of one worker, compiles it unless told not to, and prints what is known before the run. Memory is
that of one worker's program on a device of its own, as XLA lays it out for the backend at hand; the
collectives' buffers are not in it. The forecast assumes a device that computes --device_teraflops,
of the operations that XLA counts in a gradient (the body of a loop once), and a link of --gigabits;
it leaves out evaluation, balancing, and the launch of a step, which is most of a small one. A
policy that decides online is taken to load as often as the input allows.

With --topology the programs are compiled for a slice of TPUs or GPUs instead, a device for each
worker, which need not be there: see docs/use/accelerators.md. Both compilers come from PyPI and ask
for no device. libtpu knows its chips by name; XLA's CUDA compiler is told what a GPU is. Counts are
the compilers' own, of one device and of a call with one step: every loop's body counts once.
"""

import contextlib
import functools
import importlib.util
import math
import os
import re
import time as clock
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import local_opt
import syncopate
from experiments.cluster.devices import replicated_sharding, worker_sharding
from experiments.compare.arms import Order, SyncRule, left_out, plans_of
from experiments.data.base import Recipe, Task
from experiments.report.statistics import volume
from experiments.report.tables import markdown, show_bytes
from experiments.trainer.config import UNITS, Sizes, num_params, size_of, sizes_of
from experiments.trainer.program import mapped, state_shapes, steps_of
from experiments.trainer.step import TrainState, epoch_end_of, sync_of, worker_of
from local_opt.costs import KINDS
from ordering.kernel import BLOCK
from ordering.pairs import slice_size
from syncopate.mesh import is_key
from syncopate.refusals import UserError
from syncopate.unstable import compilation_cache, topologies
from syncopate.workers import AXIS

TERA, HOUR = 1e12, 3600.0


# What is sent, and how long it takes.


def traffic(
    task: Task, order: Order, rule: SyncRule, sizes: Sizes, sync_in_step: bool
) -> Callable[[int, int], float]:
    """`(rounds, loads) -> what a worker has sent`, in all-reduces of the task's parameters.

    A sync sends one, or the share of it that compression leaves; orders send as of `order_traffic`.
    """
    size = num_params(task.model)
    of_order = order_traffic(order, sizes, size, sync_in_step=sync_in_step)
    sent = functools.partial(local_opt.costs.sync_bytes, size, num_workers=sizes.workers)
    narrow = rule.compressor is not None and sizes.workers > 1
    share = sent(compress=rule.compressor()) / sent() if narrow else 1
    return lambda rounds, loads: share * rounds + of_order(loads)


def order_traffic(
    order: Order, sizes: Sizes, num_params: int, *, sync_in_step: bool = False
) -> Callable[[int], float]:
    """`loads -> what a worker has sent for its order after so many`, in all-reduces.

    Independent orders send nothing. Orders that are dealt send their signs at an epoch's end, a bit
    for a pair. Sketches of k numbers are gathered, one for a pair: k W / 2 D of an all-reduce. Of
    an exact coordinated order every fresh step exchanges the gradients of n units, n / 2
    all-reduces, and adds up the inner products of its pairs over the workers. Where rounds are
    local a scaled order takes the mean of the second moments at an epoch's end; what factors of
    them cost is not counted.

    Example:
      >>> from experiments.compare.arms import row_of
      >>> from experiments.trainer.config import Sizes
      >>> sizes = Sizes(workers=8, num_units=10, units_per_step=1, unit_size=16)
      >>> sketched = order_traffic(row_of("order", "cd_grab+sketch1024"), sizes, 10**6)
      >>> round(sketched(10), 5)
      0.02048
    """
    loads, workers = np.arange(sizes.loads_per_epoch + 1), sizes.workers
    units = np.minimum(loads * sizes.units_per_step, sizes.num_units)  # of an epoch, so far
    if workers == 1 or not order.coordinated:
        sent = np.zeros(len(loads))
    elif order.sketch:
        sent = units // 2 * min(order.sketch, num_params) * workers / 2 / num_params
    else:
        of_step = functools.partial(_step_traffic, sizes, num_params)
        whole, last = of_step(int(units[1])), of_step(int(units[-1] - units[-2]))
        sent = whole * loads
        sent[-1] += last - whole
    signs = math.ceil(sizes.num_units // 2 / 8) if order.deals == UNITS and workers > 1 else 0
    epoch = sent[-1] + signs * workers / (8 * num_params)
    if order.scaled and not order.sketch and not sync_in_step and workers > 1:
        epoch += 1

    def allreduces(loads: int) -> float:
        epochs, rest = divmod(loads, sizes.loads_per_epoch)
        return float(epochs * epoch + sent[rest])

    return allreduces


def _step_traffic(sizes: Sizes, num_params: int, size: int) -> float:
    """The all-reduces of an exact order in one fresh step, with `size` units per worker.

    An even number of units per step sends the differences of its pairs, an odd one all gradients.
    Pairs are signed in blocks of b, whose b (b + 1) products take one reduction.
    """
    splits = sizes.units_per_step % 2
    pairs = (size + splits) // 2
    rows = size if splits else pairs
    padded = slice_size(num_params, sizes.workers) * sizes.workers
    blocks, rest = divmod(pairs * sizes.workers, BLOCK)
    products = blocks * BLOCK * (BLOCK + 1) + rest * (rest + 1)
    return (rows / 2 * padded + products) / num_params


class Machine(NamedTuple):
    """The times of a run's parts in any unit: numbers, or arrays that broadcast."""

    step: Any = 1.0  # of computation
    load: Any = 0.0  # of reading a batch, beside the steps
    sync: Any = 0.0  # of an all-reduce of the parameters, which nothing hides
    latency: Any = 0.0  # its share that does not depend on the bytes
    ordered: float = 1.0  # how many times longer a fresh step is with an order
    parameters: float = 1.0  # D, of the model
    label: str = ""


def machines(load: float, sync: float) -> list[Machine]:
    """The four machines whose input or network may be slow, in steps of computation."""
    return [
        Machine(label="fast input, fast network"),
        Machine(load=load, label=f"load {load:g} steps"),
        Machine(sync=sync, label=f"sync {sync:g} steps"),
        Machine(load=load, sync=sync, label=f"load {load:g}, sync {sync:g} steps"),
    ]


def run_time(machine: Machine, *, steps, loads, rounds=0, sent=0, ordered: bool = False):
    """What so much of a run takes, whose syncs and all-reduces besides are `rounds` and `sent`.

    s (T + (o - 1) loads) + y rounds + (y - l) sent, or load loads if that is more: input is read
    beside everything else, and what is sent comes between the steps. o is 1 unless fresh steps
    observe an order, as `ordered` says.
    """
    longer = (machine.ordered - 1) * loads if ordered else 0
    sending = machine.sync * rounds + (machine.sync - machine.latency) * sent
    return np.maximum(machine.step * (steps + longer) + sending, machine.load * loads)


def recorded_run_time(run: Sequence[dict], machine: Machine) -> float:
    """Time up to the last of a run's records; between two records the slower part counts."""
    names = ("step", "loads", "allreduces")
    steps, loads, sent = (np.diff([r[name] for r in run], prepend=0) for name in names)
    return float(run_time(machine, steps=steps, loads=loads, sent=sent).sum())


class Shapes(NamedTuple):
    """The shapes and programs of a run, without reading, placing or allocating anything."""

    state: TrainState  # `jax.ShapeDtypeStruct`s that say where they live
    # What it compiles: functions that lower it. A step is one loop, of any length.
    programs: dict[str, Callable[[], jax.stages.Lowered]]
    per_worker: tuple[bool, ...]  # fields of the state that have a worker axis
    sizes: Sizes
    sync_in_step: bool  # workers meet in every step

    def bytes_of(self, field: str) -> float:
        """Bytes of a field of the state, on the device of one worker."""
        whole = tree_bytes(getattr(self.state, field))
        divided = self.per_worker[TrainState._fields.index(field)]
        return whole / (self.sizes.workers if divided else 1)


def shapes_of(
    task: Task,
    recipe: Recipe,
    row: Order,
    rounds: Callable,
    *,
    mesh: jax.sharding.Mesh | None = None,
    reads: bool = True,
) -> Shapes:
    """The programs of a run of all workers, with the arguments of `training.program.build`.

    The task may be abstract, and the devices of a mesh need not be there. If the host reads,
    batches are handed over; else the data stay on the devices.
    """
    sizes = sizes_of(task, recipe, deals=row.deals)
    worker = worker_of(task, recipe, row, rounds, sizes)
    over, per_worker = mesh or sizes.workers, tuple(word == "worker" for word in worker.sides)
    places = {True: worker_sharding(mesh), False: replicated_sharding(mesh)}

    def placed(tree, side, *axes):
        def one(x):
            return jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype, sharding=places[side])

        return jax.tree.map(one, tree)

    state = state_shapes(worker, over, places={"worker": places[True], "replicated": places[False]})
    unit = examples_of(task.train, sizes.unit_size)
    if row.deals and not reads:
        batch = placed(unit, False, size_of(task.train) // sizes.unit_size)
    else:
        units = sizes.units_per_step if reads else sizes.num_units
        batch = placed(unit, True, sizes.workers, units)
    place, rate = (placed(jax.ShapeDtypeStruct((), d), False) for d in (jnp.int32, jnp.float32))
    rates = placed(rate, False, 1)  # how many changes no step
    steps = steps_of(worker, over, reads=reads)
    sync = mapped(worker, over, sync_of(worker), "replicated", "replicated")
    epoch_end = mapped(worker, over, epoch_end_of(worker))

    def step(fresh):
        return steps(fresh, sizes.units_per_step).lower(state, batch, place, place, place, rates)

    programs = {"fresh step": lambda: step(True), "echoed step": lambda: step(False)}
    if not worker.rounds.in_step:
        programs["sync"] = lambda: sync.lower(state, rate, rate)
    if row.observes:  # else the host draws orders
        programs["epoch's end"] = lambda: epoch_end.lower(state)
    return Shapes(state, programs, per_worker, sizes, worker.rounds.in_step)


def lower_step(task: Task, recipe: Recipe, row: Order, rounds: Callable) -> jax.stages.Lowered:
    """A fresh step of one worker on a device of its own, with what its order does, from shapes."""
    one = task._replace(train=examples_of(task.train, size_of(task.train) // recipe.workers))
    return shapes_of(one, recipe._replace(workers=1), row, rounds).programs["fresh step"]()


def examples_of(data, number: int) -> dict:
    """Shapes of so many examples."""
    shape = lambda x: jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype)  # noqa: E731
    return {name: shape(x) for name, x in data.items()}


def tree_bytes(tree) -> int:
    """Of arrays or their shapes, without PRNG keys."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if not is_key(x))


# Programs, compiled for devices that need not be there.

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


class Collective(NamedTuple):
    """An instruction of a compiled program."""

    kind: str  # of KINDS
    bytes: int  # of its result on one device, without the padding of tiles
    asynchronous: bool  # the program computes between its start and its end
    where: str  # the computation that holds it
    line: str  # as printed


class Compiled(NamedTuple):
    """A program of one device."""

    # Bytes; what is donated is argument and output. The peak is that of the device's memory alone,
    # temporaries also those that never leave the core.
    memory: dict[str, int]
    counted: dict[str, float | None]  # flops and bytes accessed, where XLA counts them
    collectives: list[Collective]
    seconds: float  # to compile


class Refused(NamedTuple):
    """A program that the memory does not hold."""

    why: str


def compile_or_refuse(lowered: jax.stages.Lowered, chip: Chip) -> Compiled | Refused:
    start = clock.perf_counter()
    try:
        with uncached():
            program = lowered.compile(compiler_options=dict(chip.compiler.options) or None)
    except jax.errors.JaxRuntimeError as error:
        if lacks := re.search(r"Ran out of memory.*", str(error)):
            return Refused(lacks[0])
        raise
    seconds = clock.perf_counter() - start
    stats, cost = program.memory_analysis(), program.cost_analysis() or {}
    planned, total = chip.compiler.plans, buffer_bytes(program)
    if not planned and total > chip.memory:
        return Refused(f"Its buffers take {show_bytes(total)} of {show_bytes(chip.memory)}.")
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "donated": stats.alias_size_in_bytes,
        "peak": stats.peak_memory_in_bytes * planned or total,
    }
    counted = {name: cost.get(name) for name in ("flops", "bytes accessed")}
    return Compiled(memory, counted, collectives_of(program.as_text()), seconds)


def buffer_bytes(program: jax.stages.Compiled) -> int:
    """Bytes of all buffers of a program on one device; donated buffers count once."""
    stats = program.memory_analysis()
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes


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


def collectives_of(text: str) -> list[Collective]:
    """The collectives of scheduled HLO (`as_text`). A pair of start and done counts once."""
    instruction = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(%?([\w.\-]*)")
    # CUDA splits every collective in two, and says where nothing runs between them.
    blocking = {m[1] for m in re.finditer(r'%?([\w.\-]+) = [^\n]*"is_sync":true', text)}
    asynchronous = set(re.findall(r" async-start\([^\n]*calls=%?([\w.\-]+)", text))
    collectives = []
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
                beside = halves or ends or name in asynchronous
                collectives.append(Collective(kind, result_bytes(result), beside, name, line))
    return collectives


def result_bytes(result: str) -> int:
    """Bytes of an array type, such as `(f32[4,5]{1,0:T(4,128)}, u32[])`; tokens have none."""
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


# A dry run.


def dry_run(task: Task, recipe: Recipe, study, values) -> str:
    """Markdown: the facts of the task, and what every arm would cost, at every speed of the input.

    Args:
      task: may be abstract; study: what has `arms` and `speeds`, as a `Study`.
      values: parsed flags, of the group "forecast" and --input.
    """
    mesh, chip = slice_of(values.topology, recipe.workers) if values.topology else (None, None)
    step_seconds = _gradient_flops(task, recipe) / (TERA * values.device_teraflops)
    reads = values.input != "device"
    shapes_by = functools.cache(functools.partial(shapes_of, task, recipe, mesh=mesh, reads=reads))
    bytes_by = functools.cache(lambda *of: buffer_bytes(lower_step(task, recipe, *of).compile()))
    rows, listed = [], {}
    for speed in study.speeds or (None,):
        for arm in study.arms.values():
            order, rule, _ = arm.rows
            decisions = order, rule.rounds  # arms share programs
            shapes = shapes_by(*decisions)
            row = _row(task, recipe, arm, speed, step_seconds, shapes, values.gigabits)
            rows.append(row)
            if chip is None:
                about = show_bytes(bytes_by(*decisions)) if values.compile else "not compiled"
                row["memory of a worker"] = about
                continue
            names = [*shapes.programs]
            if row["steps"] == row["loads"]:
                names.remove("echoed step")
            for name in names:
                if (*decisions, name) not in listed:
                    compiled = compile_or_refuse(shapes.programs[name](), chip)
                    listed[*decisions, name] = name, arm.label, shapes, compiled
            row["peak of a device"] = _peak([listed[*decisions, name][-1] for name in names], chip)
    about = _facts(task, recipe)
    about |= {} if chip is None else _slice_facts(task, values.topology, mesh, chip)
    facts = [{"what": name, "value": value} for name, value in about.items()]
    left = left_out(study.arms.values(), task, recipe)
    facts += [{"what": "left out", "value": text} for text in left]
    return "\n\n".join([markdown(facts), markdown(rows), *_details(listed.values(), chip)])


def _row(task, recipe, arm, speed, step_seconds, shapes: Shapes, gigabits: float) -> dict:
    (order, rule, _), sizes = arm.rows, shapes.sizes
    plans = plans_of(task, recipe, arm, speed=speed)
    steps, echo, slowness = plans.total_steps, plans.echo, speed or 0
    loads = math.ceil(steps / max(1, slowness)) if echo.online else echo.loads
    rounds = loads if plans.sync is None else plans.sync.rounds
    computed = run_time(Machine(step_seconds, slowness * step_seconds), steps=steps, loads=loads)
    size, ring = num_params(task.model), {"num_workers": sizes.workers}
    sent = traffic(task, order, rule, sizes, shapes.sync_in_step)(rounds, loads)
    waited = sent * 8 * local_opt.costs.sync_bytes(size, **ring) / (1e9 * gigabits)
    return ({} if speed is None else {"R": f"{speed:g}"}) | {
        "arm": arm.label,
        "steps": steps,
        "loads": loads,
        "rounds": rounds,
        "volume": f"{volume({'allreduces': sent, 'step': steps}):.3%}",
        "sent per worker": show_bytes(sent * local_opt.costs.sync_bytes(size, **ring)),
        "state of the order": show_bytes(shapes.bytes_of("orders")),
        "forecast": _time(computed) + (f" + {_time(waited)} of syncs" if waited else ""),
    }


def _peak(programs, chip) -> str:
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
        f"Of the state {', '.join(state)}; the rest is data and what the program computes. Take a "
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


def _gradient_flops(task: Task, recipe: Recipe) -> float:
    """Operations of one worker's gradient, as XLA counts them before it optimises."""

    def mean_loss(params, batch):
        return jnp.mean(task.model.loss(params, batch, jax.random.key(0)))

    batch = examples_of(task.train, recipe.units_per_step * recipe.unit_size)
    return jax.jit(jax.grad(mean_loss)).lower(_params(task), batch).cost_analysis()["flops"]


def _facts(task: Task, recipe: Recipe) -> dict:
    model, params = task.model, _params(task)
    first = {name: f"{leaf.dtype}{list(leaf.shape[1:])}" for name, leaf in task.train.items()}
    predict = model.predict
    if model.statistics is not None:
        predict = lambda p, x: model.predict(p, x, model.statistics(p, x))  # noqa: E731
    logits = jax.eval_shape(predict, params, examples_of(task.train, 2)["x"])
    rates = ", ".join(f"{rate:g}" for rate in recipe.learning_rates)
    facts = {
        "task": task.name,
        "training examples": f"{size_of(task.train):,}",
        "test examples": f"{size_of(task.test):,}",
        "an example": ", ".join(f"{name}: {shape}" for name, shape in first.items()),
        "predictions of an example": f"{logits.dtype}{list(logits.shape[1:])}",
        "parameters": f"{num_params(model):,} ({show_bytes(tree_bytes(params))})",
        "workers": recipe.workers,
        "examples per step": recipe.workers * recipe.units_per_step * recipe.unit_size,
        "optimizer": f"{recipe.optimizer}, lr {rates}, {recipe.schedule}",
    }
    return facts if recipe.target is None else facts | {
        "target": f"{recipe.metric} {recipe.target:g}"
    }  # fmt: skip


def _slice_facts(task: Task, topology: str, mesh, chip) -> dict:
    kind, held = mesh.devices.flat[0].device_kind, tree_bytes(dict(task.train))
    return {
        "slice": f"{topology}, {mesh.size} x {kind}, a worker each",
        "memory of a device": show_bytes(chip.memory),
        "training set on a device": f"{show_bytes(held / mesh.size)}; dealt, {show_bytes(held)}",
    }


def _params(task):
    return jax.eval_shape(task.model.init, jax.random.key(0))


def _time(seconds: float) -> str:
    return f"{seconds / HOUR:.3g} h" if seconds >= HOUR / 10 else f"{seconds:.3g} s"
