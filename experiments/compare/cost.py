"""The cost of a run, computed before it: traffic, time on a machine, memory, and a dry run.

`--dry_run` on an experiment builds the model's and the data's shapes and all plans, lowers the step
of one worker, compiles it unless told not to, and prints what is known before the run. Memory is
that of one worker's program on a device of its own, as XLA lays it out for the backend at hand; the
collectives' buffers are not in it. The forecast assumes a device that computes --device_teraflops,
of the operations that XLA counts in a gradient (the body of a loop once), and a link of --gigabits;
it leaves out evaluation, balancing, and the launch of a step, which is most of a small one. A
policy that decides online is taken to load as often as the input allows.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import local_opt
from experiments.compare.arms import Arm
from experiments.compare.rows import Order, SyncRule
from experiments.data.base import Recipe, Task, size_of
from experiments.distributed.devices import replicated_sharding, worker_sharding
from experiments.report.tables import markdown, show_bytes
from experiments.trainer.config import UNITS, Sizes, left_out, num_params, plans_of, sizes_of
from experiments.trainer.program import mapped, state_shapes, steps_of
from experiments.trainer.step import TrainState, epoch_end_of, sync_of, worker_of
from ordering.pairs import slice_size
from ordering.signs import BLOCK
from syncopate.mesh import is_key

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
    for a pair. Sketches of k numbers are gathered, one for a pair: k W / 2 D of an all-reduce. An
    exact coordinated order exchanges the gradients of n units in every fresh step, n / 2
    all-reduces, and sums the inner products of its pairs over the workers. If rounds are local, a
    scaled order takes the mean of the second moments at an epoch's end; factors of these are not
    counted.

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
    signed = order.deals == UNITS and order.observes and workers > 1
    signs = math.ceil(sizes.num_units // 2 / 8) if signed else 0
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
    """The programs of a run of all workers, with the arguments of `program.build`.

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


def buffer_bytes(program: jax.stages.Compiled) -> int:
    """Bytes of all buffers of a program on one device; donated buffers count once."""
    stats = program.memory_analysis()
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes


# A dry run.


def dry_run(task: Task, recipe: Recipe, study, values) -> str:
    """Markdown: the facts of the task, and what every arm would cost, at every speed of the input.

    Args:
      task: may be abstract; study: what has `arms` and `speeds`, as a `Study`.
      values: parsed flags, of the group "forecast" and --input.
    """
    bytes_by = functools.cache(lambda *of: buffer_bytes(lower_step(task, recipe, *of).compile()))
    rows = []
    for arm, _, row in rows_of_arms(task, recipe, study, values):
        order, rule, _ = arm.rows
        about = show_bytes(bytes_by(order, rule.rounds)) if values.compile else "not compiled"
        rows.append(row | {"memory of a worker": about})
    return f"{facts_table(task, recipe, study)}\n\n{markdown(rows)}"


def rows_of_arms(
    task: Task, recipe: Recipe, study, values, mesh: jax.sharding.Mesh | None = None
) -> Iterator[tuple[Arm, Shapes, dict]]:
    """(arm, its shapes, what is known of it without compiling) at every speed of the input."""
    step_seconds = _gradient_flops(task, recipe) / (TERA * values.device_teraflops)
    reads = values.input != "device"
    shapes_by = functools.cache(functools.partial(shapes_of, task, recipe, mesh=mesh, reads=reads))
    for speed in study.speeds or (None,):
        for arm in study.arms.values():
            order, rule, _ = arm.rows
            shapes = shapes_by(order, rule.rounds)  # arms share programs
            row = _row(task, recipe, arm, speed, step_seconds, shapes, values.gigabits)
            yield arm, shapes, row


def facts_table(task: Task, recipe: Recipe, study, **more) -> str:
    """Markdown: the facts of a task, `more` of them by name, and what arms leave out."""
    rows = [{"what": what, "value": value} for what, value in (_facts(task, recipe) | more).items()]
    left = left_out(task, recipe, study.arms.values())
    return markdown([*rows, *({"what": "left out", "value": text} for text in left)])


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
        "volume": f"{sent / steps:.3%}",
        "sent per worker": show_bytes(sent * local_opt.costs.sync_bytes(size, **ring)),
        "state of the order": show_bytes(shapes.bytes_of("orders")),
        "forecast": _time(computed) + (f" + {_time(waited)} of syncs" if waited else ""),
    }


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
    if recipe.target is not None:
        facts["target"] = f"{recipe.metric} {recipe.target:g}"
    return facts


def _params(task):
    return jax.eval_shape(task.model.init, jax.random.key(0))


def _time(seconds: float) -> str:
    return f"{seconds / HOUR:.3g} h" if seconds >= HOUR / 10 else f"{seconds:.3g} s"
