"""The programs of a run, lowered from shapes alone, and what a compiler says of each.

Nothing is read, placed or allocated, and no device need be there. Counts are XLA's and libtpu's
own, of one device and of a call with one step: the body of every loop counts once.
"""

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from experiments.study.chips import Chip
from experiments.study.words import Order
from experiments.tasks.base import Recipe, Task
from experiments.training.config import Sizes, size_of, sizes_of
from experiments.training.program import ends_of, state_shapes, steps_of
from experiments.training.step import TrainState, worker_of
from local_opt.workers import owned_sharding, shared_sharding


class Shapes(NamedTuple):
    """A run as the compiler sees it.

    Fields:
      state: all there is of it, as `jax.ShapeDtypeStruct`s that say where they live.
      step: fresh -> its steps between two events of the host, lowered: one loop of a length that
        the compiler does not know; end: (sync, epoch_end) -> what follows them, lowered.
      owned: which fields of the state have a worker axis; sizes: of the run.
      sync_in_step: workers meet in every step; ahead: orders look at nothing, and no epoch ends.
    """

    state: TrainState
    step: Callable[[bool], jax.stages.Lowered]
    end: Callable[[bool, bool], jax.stages.Lowered]
    owned: tuple[bool, ...]
    sizes: Sizes
    sync_in_step: bool
    ahead: bool

    def bytes_of(self, field: str) -> float:
        """Of a field of the state, on the device of one worker."""
        whole = tree_bytes(getattr(self.state, field))
        return whole / (self.sizes.workers if self.owned[TrainState._fields.index(field)] else 1)


def shapes_of(
    task: Task,
    recipe: Recipe,
    row: Order,
    rounds: Callable,
    *,
    mesh: jax.sharding.Mesh | None = None,
    reads: bool = True,
) -> Shapes:
    """The programs of a run of all workers.

    Args:
      task: may be abstract; recipe: in which setting.
      row: of ORDERS; rounds: `(inner optimizer, axis_name=) -> local_opt.Rounds`.
      mesh: a device per worker, which need not be there; None simulates all on one device.
      reads: batches are handed over by the host; False: the data stay on the devices.
    """
    sizes = sizes_of(task, recipe, deals=row.deals)
    worker = worker_of(task, recipe, row, rounds, sizes, on_mesh=mesh is not None)
    over, sides = mesh or sizes.workers, [whose == "owned" for whose in worker.sides]
    owned, shared = owned_sharding(mesh), shared_sharding(mesh)

    def placed(tree, own):
        where = owned if own else shared
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)

    state = TrainState(*map(placed, state_shapes(worker, task.model, over), sides))
    example = jax.tree.map(_one, dict(task.train))
    if reads or not row.deals:
        units = sizes.units_per_step if reads else sizes.num_units
        batch = placed(_with_axes(example, sizes.workers, units, sizes.unit_size), True)
    else:
        units = size_of(task.train) // sizes.unit_size
        batch = placed(_with_axes(example, units, sizes.unit_size), False)
    place, rate = (jax.ShapeDtypeStruct((), d, sharding=shared) for d in (jnp.int32, jnp.float32))
    rates = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=shared)  # how many changes no step
    steps, ends = steps_of(worker, over, reads=reads), ends_of(worker, over)

    def step(fresh: bool) -> jax.stages.Lowered:
        return steps(fresh, sizes.units_per_step).lower(state, batch, place, place, place, rates)

    return Shapes(
        state=state,
        step=step,
        end=lambda sync, epoch_end: ends(sync, epoch_end).lower(state, rate),
        owned=tuple(sides),
        sizes=sizes,
        sync_in_step=worker.rounds.in_step,
        ahead=not row.observes,
    )


def lower_step(task: Task, recipe: Recipe, row: Order, rounds: Callable) -> jax.stages.Lowered:
    """A fresh step of one worker on a device of its own, with what its order does, from shapes."""
    share = size_of(task.train) // recipe.workers
    train = {name: _with_axes(_one(x), share) for name, x in task.train.items()}
    one = task._replace(train=train)
    return shapes_of(one, recipe._replace(workers=1), row, rounds).step(True)


def _with_axes(tree, *axes):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), tree)


def _one(leaf):
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def tree_bytes(tree) -> int:
    """Of arrays or their shapes, without PRNG keys."""
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if not keys(x))


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

    @property
    def peak(self) -> int:
        return self.memory["peak"]


class Refused(NamedTuple):
    """A program that the memory does not hold: bytes that it needs, and those that it may have."""

    needed: float
    available: float


def compile_or_refuse(lowered: jax.stages.Lowered, chip: Chip) -> Compiled | Refused:
    """Compiles for a chip, and reads what there is to know."""
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
        "peak": getattr(stats, "peak_memory_in_bytes", 0) * planned or total,
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
    """What a compiler's message says of memory that does not suffice; None: it is about others.

    Example:
      >>> shortage("required for HLO temporaries (20.00G) exceeds available HBM (15.75G).")
      Refused(needed=21474836480.0, available=16911433728.0)
    """
    size = r"([\d.]+)([KMGTPE]?)B?"
    for pattern in (rf"\({size}\) exceeds available \w+ \({size}\)", rf"Used {size} of {size}"):
        if found := re.search(pattern, message):
            needed, unit, available, other = found.groups()
            return Refused(float(needed) * MEMORY[unit], float(available) * MEMORY[other])
    return None


def collectives_of(text: str) -> list[Collective]:
    """The collectives of scheduled HLO (`as_text`), each once; of one in two halves, its end."""
    instruction = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(%?([\w.\-]*)")
    # CUDA splits every collective in two, and says where nothing runs between them.
    blocking = {m[1] for m in re.finditer(r'%?([\w.\-]+) = [^\n]*"is_sync":true', text)}
    apart = set(re.findall(r" async-start\([^\n]*calls=%?([\w.\-]+)", text))
    found = []
    for name, lines in _computations(text):
        # libtpu spreads one over fusions: a start, those beside it, all of this name, and a done.
        ends = any('"AsyncCollectiveDone"' in line for line in lines)
        starts = any('"AsyncCollectiveStart"' in line for line in lines)
        if (starts or "async_collective" in name) and not ends:
            continue
        for line in lines:
            if not (match := instruction.match(line)):
                continue
            _, result, operation, operand = match.groups()
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
    lines = [line for name, lines in _computations(text) if name not in fused for line in lines]
    found = [int(match[1]) for line in lines if (match := estimated.search(line))]
    return sum(found) if found else None


def result_bytes(result: str) -> int:
    """Bytes of the arrays of a type, such as `(f32[4,5]{1,0:T(4,128)}, u32[])`; tokens have none.

    Example:
      >>> result_bytes("(f32[4,5]{1,0}, bf16[3], pred[], token[])")
      87
    """
    bits = 0
    for kind, width, shape in re.findall(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", result):
        each = 8 if kind == "pred" else int(width)
        bits += each * math.prod(int(n) for n in shape.split(",") if n)
    return -(-bits // 8)


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of each."""
    for part in re.split(r"\n(?=\S)", text):
        head, *lines = part.split("\n")
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{\s*$", head):
            yield start[1], lines
