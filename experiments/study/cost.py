"""The cost of a run, computed before it: traffic, time on a machine, and programs."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import local_opt
from experiments.study.tables import Order, SyncRule
from experiments.tasks.base import Recipe, Task
from experiments.training.config import UNITS, Sizes, size_of, sizes_of
from experiments.training.program import lifted, state_shapes, steps_of
from experiments.training.step import TrainState, epoch_end_of, sync_of, worker_of
from local_opt.workers import owned_sharding, shared_sharding
from ordering.exchange import slice_size
from ordering.kernel import BLOCK


def traffic(
    order: Order, rule: SyncRule, sizes: Sizes, num_params: int, *, sync_in_step: bool
) -> Callable[[int, int], float]:
    """`(rounds, loads) -> what a worker has sent`, in all-reduces of float32 parameters.

    A sync sends one, or the share of it that its wire or its fragments leave.

    Args:
      order, sizes, num_params, sync_in_step: as of `order_traffic`; rule: a row of SYNC_RULES.
    """
    of_order = order_traffic(order, sizes, num_params, sync_in_step=sync_in_step)
    sent = functools.partial(local_opt.sync_bytes, num_params, num_workers=sizes.workers)
    share = sent(wire=rule.wire) / sent() if rule.wire and sizes.workers > 1 else 1
    share /= rule.fragments
    return lambda rounds, loads: share * rounds + of_order(loads)


def order_traffic(
    order: Order, sizes: Sizes, num_params: int, *, sync_in_step: bool = False
) -> Callable[[int], float]:
    """`loads -> what a worker has sent for its order after so many`, in all-reduces.

    Independent orders send nothing. Orders that are dealt send their signs at an epoch's end, a bit
    for a pair. Sketches of k numbers are gathered, one for a pair: k W / 2 D of an all-reduce. Of
    an exact coordinated order every fresh step exchanges its rows, n / 2 all-reduces for n of them,
    and adds up the inner products of its pairs over the workers. With one unit per step, where
    workers meet in every step, the mean gradient comes out of the exchange of the rows, which then
    costs nothing. Where rounds are local a scaled order takes the mean of the second moments at an
    epoch's end; what factors of them cost is not counted.

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
        of_step = functools.partial(
            _step_traffic, sizes, num_params, sync_in_step and not order.scaled
        )
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


def _step_traffic(sizes: Sizes, num_params: int, sync_in_step: bool, size: int) -> float:
    """The same of one fresh step of an exact order, with `size` units per worker.

    An even number of units per step sends the differences of its pairs, an odd one all gradients.
    Pairs are signed in blocks of b, whose b (b + 1) products take one reduction.
    """
    splits = sizes.units_per_step % 2
    pairs = (size + splits) // 2
    rows = size if splits else pairs
    if sync_in_step and sizes.units_per_step == 1:
        rows -= 1  # the mean gradient, which comes out of the exchange
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

    @property
    def ratio(self) -> float:
        """R, the time of a load in steps."""
        return self.load / self.step


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
    worker = worker_of(task, recipe, row, rounds, sizes, on_mesh=mesh is not None)
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
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if not keys(x))
