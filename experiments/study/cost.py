"""The cost of a run, computed before it: traffic, time on a machine, programs, and a dry run.

`--dry_run` on an experiment builds the model's and the data's shapes and all plans, lowers the step
of one worker, compiles it unless told not to, and prints what is known before the run. Memory is
that of one worker's program on a device of its own, as XLA lays it out for the backend at hand; the
collectives' buffers are not in it. The forecast assumes a device that computes --device_teraflops,
of the operations that XLA counts in a gradient (the body of a loop once), and a link of --gigabits;
it leaves out evaluation, balancing, and the launch of a step, which is most of a small one. Loads
of a policy that decides online are those of a simulated clock.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

import local_opt
from experiments.cluster.devices import owned_sharding, shared_sharding
from experiments.results.statistics import volume
from experiments.results.tables import markdown, show_bytes
from experiments.study.tables import Order, SyncRule, left_out, plans_of
from experiments.tasks.base import Recipe, Task
from experiments.training.config import UNITS, Sizes, num_params, size_of, sizes_of
from experiments.training.program import lifted, state_shapes, steps_of
from experiments.training.step import TrainState, epoch_end_of, sync_of, worker_of
from ordering.echo.plans import EchoPlan, Measured
from ordering.kernel import BLOCK
from ordering.pairs import slice_size
from syncopate.mesh import is_key

TERA, HOUR = 1e12, 3600.0


# What is sent, and how long it takes.


def traffic(
    task: Task, order: Order, rule: SyncRule, sizes: Sizes, sync_in_step: bool
) -> Callable[[int, int], float]:
    """`(rounds, loads) -> what a worker has sent`, in all-reduces of the task's parameters.

    A sync sends one, or the share of it that its wire or its fragments leave.

    Args:
      order, sizes, sync_in_step: as of `order_traffic`; rule: a row of SYNC_RULES.
    """
    size = num_params(task.model)
    of_order = order_traffic(order, sizes, size, sync_in_step=sync_in_step)
    sent = functools.partial(local_opt.sync_bytes, size, num_workers=sizes.workers)
    share = sent(wire=rule.wire()) / sent() if rule.wire and sizes.workers > 1 else 1
    share /= rule.fragments
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

    Args:
      order: a row of ORDERS; sizes: of the run; num_params: D, of the model.
      sync_in_step: whether the mean gradient is taken in every step.

    Example:
      >>> from experiments.study.tables import row_of
      >>> from experiments.training.config import Sizes
      >>> sizes = Sizes(workers=8, num_units=10, units_per_step=1, unit_size=16)
      >>> round(order_traffic(row_of("order", "cd_grab"), sizes, 10**6)(10), 5)
      5.00296
      >>> round(order_traffic(row_of("order", "cd_grab+sketch1024"), sizes, 10**6)(10), 5)
      0.02048
      >>> order_traffic(row_of("order", "rr"), sizes, 10**6)(10)
      0.0
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
    told = math.ceil(sizes.num_units // 2 / 8) if order.deals == UNITS and workers > 1 else 0
    epoch = sent[-1] + told * workers / (8 * num_params)
    if order.scaled and not order.sketch and not sync_in_step and workers > 1:
        epoch += 1

    def allreduces(loads: int) -> float:
        epochs, rest = divmod(loads, sizes.loads_per_epoch)
        return float(epochs * epoch + sent[rest])

    return allreduces


def _step_traffic(sizes: Sizes, num_params: int, size: int) -> float:
    """The same of one fresh step of an exact order, with `size` units per worker.

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
    """The times of a run's parts on a machine, in seconds or any other unit.

    Numbers, or arrays that broadcast.

    Fields:
      step: of computation; load: of reading a batch, beside the steps.
      sync: of an all-reduce of the parameters, which nothing hides; latency: its share that does
        not depend on the bytes.
      ordered: how many times longer a fresh step is with an order; parameters: D, of the model.
      label: for people.
    """

    step: Any = 1.0
    load: Any = 0.0
    sync: Any = 0.0
    latency: Any = 0.0
    ordered: float = 1.0
    parameters: float = 1.0
    label: str = ""


def machines(load: float, sync: float) -> list[Machine]:
    """The four machines whose input or network may be slow, in steps of computation."""
    return [
        Machine(label="fast input, fast network"),
        Machine(load=load, label=f"load {load:g} steps"),
        Machine(sync=sync, label=f"sync {sync:g} steps"),
        Machine(load=load, sync=sync, label=f"load {load:g}, sync {sync:g} steps"),
    ]


def time(machine: Machine, *, steps, loads, rounds=0, sent=0, ordered: bool = False):
    """What so much of a run takes: max(steps + what is sent, loads).

    s (T + (o - 1) loads) + y rounds + (y - l) sent, or load loads if that is more: input is read
    beside everything else, and what is sent comes between the steps.

    Args:
      steps, loads, rounds: numbers, or arrays that broadcast.
      sent: besides the syncs, in all-reduces, without their latency; ordered: whether fresh steps
        observe an order.
    """
    longer = (machine.ordered - 1) * loads if ordered else 0
    sending = machine.sync * rounds + (machine.sync - machine.latency) * sent
    return np.maximum(machine.step * (steps + longer) + sending, machine.load * loads)


def price(run: Sequence[dict], machine: Machine) -> float:
    """Time up to the last of a run's records; between two records the slower part counts."""
    names = ("step", "loads", "allreduces")
    steps, loads, sent = (np.diff([r[name] for r in run], prepend=0) for name in names)
    return float(time(machine, steps=steps, loads=loads, sent=sent).sum())


# A batch that is late by fewer steps than this is on time: R steps of t_load / R seconds take as
# long as a load only up to rounding.
ROUNDING = 1e-6


def pace_of(
    policy: EchoPlan | Measured, load: Float[ArrayLike, "*n"], *, depth: int = 2
) -> tuple[EchoPlan, float]:
    """What a policy decides, and for how many steps' time it waits, if `load_ahead` loads for it.

    F_j = max(F_j-1, S_j-depth-1) + L_j;  S_j = max(F_j, S_j-1 + uses_j-1), in steps, where load j
    ends at F_j and is first used at S_j. `load` is L, a number or one for each load. The thread
    loads one batch at a time while the queue has a place, and holds one batch more. `measured`
    finds a batch ready in a step that starts at F_j or later. All steps take the same time.
    """
    fresh, each = np.empty(policy.total_steps, bool), np.broadcast_to(load, policy.total_steps)
    starts = []  # S_j
    finished = stall = 0.0  # F of the next load; F_0 = 0 starts the clock
    uses = 0
    for step in range(policy.total_steps):
        late = finished - (step + stall)
        ready = late <= ROUNDING
        fresh[step] = policy.decide(
            step, loads=len(starts), uses=uses, ready=lambda ready=ready: ready
        )
        if fresh[step]:
            stall += 0.0 if ready else late
            starts.append(step + stall)
            uses, freed = 0, len(starts) - depth - 1  # the load whose place the next one takes
            begin = max(finished, starts[freed]) if freed >= 0 else finished
            if len(starts) < len(each):
                finished = begin + each[len(starts)]
        uses += 1
    plan = policy if isinstance(policy, EchoPlan) else EchoPlan(fresh, "measured, simulated")
    return plan, float(stall)


class Shapes(NamedTuple):
    """The shapes and programs of a run, without reading, placing or allocating anything.

    Fields:
      state: all there is of it, as `jax.ShapeDtypeStruct`s that say where they live.
      programs: what it compiles, by name: the function that lowers it from shapes. A step is one
        loop of a length that the compiler does not know.
      owned: which fields of the state have a worker axis; sizes: of the run.
      sync_in_step: workers meet in every step.
    """

    state: TrainState
    programs: dict[str, Callable[[], jax.stages.Lowered]]
    owned: tuple[bool, ...]
    sizes: Sizes
    sync_in_step: bool

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
      task: may be abstract; the others up to mesh: as of `training.program.build`. The devices of
        a mesh need not be there.
      reads: batches are handed over by the host; False: the data stay on the devices.
    """
    sizes = sizes_of(task, recipe, deals=row.deals)
    worker = worker_of(task, recipe, row, rounds, sizes)
    over, owned = mesh or sizes.workers, tuple(whose == "owned" for whose in worker.sides)
    places = {True: owned_sharding(mesh), False: shared_sharding(mesh)}

    def placed(tree, own, *axes):
        def one(x):
            return jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype, sharding=places[own])

        return jax.tree.map(one, tree)

    state = state_shapes(worker, over, owned=places[True], shared=places[False])
    unit = examples_of(task.train, sizes.unit_size)
    if row.deals and not reads:
        batch = placed(unit, False, size_of(task.train) // sizes.unit_size)
    else:
        units = sizes.units_per_step if reads else sizes.num_units
        batch = placed(unit, True, sizes.workers, units)
    place, rate = (placed(jax.ShapeDtypeStruct((), d), False) for d in (jnp.int32, jnp.float32))
    rates = placed(rate, False, 1)  # how many changes no step
    steps = steps_of(worker, over, reads=reads)
    sync = lifted(worker, over, sync_of(worker), "shared", "shared")
    epoch_end = lifted(worker, over, epoch_end_of(worker))

    def step(fresh):
        return steps(fresh, sizes.units_per_step).lower(state, batch, place, place, place, rates)

    programs = {"fresh step": lambda: step(True), "echoed step": lambda: step(False)}
    if not worker.rounds.in_step:
        programs["sync"] = lambda: sync.lower(state, rate, rate)
    if row.observes:  # else the host draws orders
        programs["epoch's end"] = lambda: epoch_end.lower(state)
    return Shapes(state, programs, owned, sizes, worker.rounds.in_step)


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
    """Of all buffers of a program on one device; what is donated counts once."""
    stats = program.memory_analysis()
    own = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + own + stats.temp_size_in_bytes


# A dry run.


class Assumed(NamedTuple):
    """The assumptions of a forecast."""

    compiles: bool = True
    device_flops: float = 50 * TERA  # per second
    gigabits: float = 25.0  # of a worker's link, per second
    reads: bool = False  # batches are handed over there; else the data stay on the devices


def assumed(values) -> Assumed:
    """The assumptions given by parsed flags."""
    flops, reads = values.device_teraflops * TERA, values.input != "device"
    return Assumed(values.compile, flops, values.gigabits, reads)


def dry_run(task: Task, recipe: Recipe, study, given: Assumed) -> str:
    """Markdown: the facts of the task, and what every arm would cost, at every speed of the input.

    Args:
      task: may be abstract; recipe: in which setting.
      study: what has `arms` by name, as a `Study`, and `speeds` R of the input, or ().
    """
    step_seconds = _gradient_flops(task, recipe) / given.device_flops
    shapes_by = functools.cache(functools.partial(shapes_of, task, recipe, reads=given.reads))
    bytes_by = functools.cache(lambda *own: buffer_bytes(lower_step(task, recipe, *own).compile()))
    rows = []
    for speed in study.speeds or (None,):
        for arm in study.arms.values():
            order, rule, _ = arm.rows
            own = order, rule.rounds  # arms share programs
            row = _row(task, recipe, arm, speed, step_seconds, shapes_by(*own), given)
            known = show_bytes(bytes_by(*own)) if given.compiles else "not compiled"
            rows.append(row | {"memory of a worker": known})
    facts = [{"what": name, "value": value} for name, value in _facts(task, recipe).items()]
    left = left_out(study.arms.values(), task, recipe)
    facts += [{"what": "left out", "value": text} for text in left]
    return f"{markdown(facts)}\n\n{markdown(rows)}"


def _row(task, recipe, arm, speed, step_seconds, shapes: Shapes, given: Assumed) -> dict:
    (order, rule, _), sizes = arm.rows, shapes.sizes
    plans = plans_of(task, recipe, arm, speed=speed)
    uses, seconds = plans.echo, plans.total_steps * step_seconds
    if speed is not None or uses.online:
        uses, stall = pace_of(uses, speed or 1)
        seconds += stall * step_seconds
    rounds = uses.loads if plans.sync is None else plans.sync.rounds
    size, ring = num_params(task.model), {"num_workers": sizes.workers}
    sent = traffic(task, order, rule, sizes, shapes.sync_in_step)(rounds, uses.loads)
    waited = sent * 8 * local_opt.sync_bytes(size, **ring) / (1e9 * given.gigabits)
    return ({} if speed is None else {"R": f"{speed:g}"}) | {
        "arm": arm.label,
        "steps": plans.total_steps,
        "loads": uses.loads,
        "rounds": rounds,
        "volume": f"{volume({'allreduces': sent, 'step': plans.total_steps}):.3%}",
        "sent per worker": show_bytes(sent * local_opt.sync_bytes(size, **ring)),
        "state of the order": show_bytes(shapes.bytes_of("orders")),
        "forecast": _time(seconds) + (f" + {_time(waited)} of syncs" if waited else ""),
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
    return facts if recipe.target is None else facts | {
        "target": f"{recipe.metric} {recipe.target:g}"
    }  # fmt: skip


def _params(task):
    return jax.eval_shape(task.model.init, jax.random.key(0))


def _time(seconds: float) -> str:
    return f"{seconds / HOUR:.3g} h" if seconds >= HOUR / 10 else f"{seconds:.3g} s"
