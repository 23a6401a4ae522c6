"""An iterator over all epochs of a source, which keeps the state of the order."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Key, PyTree

from ordering import base, steps
from ordering.base import Ordering, State
from ordering.data.batches import EpochBatches, Load, Position, Reader, Sizes
from ordering.data.loader import Prefetch, check_steps, prefetch_to_device, representable
from ordering.data.place import (
    ReadState,
    check_digest,
    check_place,
    copied,
    counts_of,
    digest_of,
    part_of,
    restore,
    unwrap,
)
from ordering.data.reading import read_pipeline, read_source, sizes_of
from ordering.data.sources import as_source
from syncopate import plans
from syncopate.workers import AXIS, Workers


class Epochs(Reader):
    """Batches of all epochs; see `read_epochs`. As a context manager it closes its threads.

    `wait()` returns when `next` would return at once, and raises what it would raise.

    Attributes:
      order_state: state of the order after the last step, for a step that calls `order.observe`.
      observes: whether the order observes gradients, so that every step must call `observe`.
      observed: whether the last batch needs no further `observe`.
      epoch: the epoch of the last batch.
      loads: the number of batches returned since the run began.
      epoch_ended: whether the last batch was the last of its epoch.
      last: the position of the last batch, None before the first.
      around: the state of `echo.repeat` from which the run goes on, until `repeat` has taken it.
    """

    around: Any = None

    def __init__(
        self,
        load: Load,
        sizes: Sizes,
        order: Ordering,
        workers: Workers,
        state: ReadState,
        num_epochs: int | None,
        ahead: int,
        batch: int = 0,
        unit_size: int = 1,
    ):
        start = Position(int(state.epoch), int(state.units), batch, int(state.loads))
        super().__init__(order, load, sizes, start, num_epochs=num_epochs, ahead=ahead)
        self.order_state, self.unit_size, self.last = state.order, unit_size, None
        self._workers, self._programs = workers, order.programs(workers)
        self.observes = order.observes
        self.observed = True  # the last batch
        self._shift = int(steps.Least(state.order.epoch)) - start.epoch  # as it was used before

    def observe(self, rows: PyTree) -> None:
        """Observes the gradients of the last batch's units.

        Args:
          rows: the rows from `per_example_grads` or `sketched_grads`, leaves [B, ...]; for several
            workers [W, B, ...].

        Raises:
          ValueError: if the batch has been observed, or if the gradients do not fit its units.
        """
        if self.observes and self.observed:
            raise ValueError(
                "observe was called before a batch was read, or twice for one: call it once after "
                "each step."
            )
        check_rows(rows)
        self.advance(self._programs.observe(self.order_state, rows))

    def advance(self, order_state: State) -> None:
        """Adopts the state from a step that observed the last batch itself.

        Args:
          order_state: the result of `order.observe`, and `order.sync`, for `order_state`.

        Raises:
          ValueError: for a state of another order.
        """
        expected = jax.tree.structure(self.order_state)
        if jax.tree.structure(order_state) != expected:
            raise ValueError(
                f"advance got a {type(order_state).__name__}: pass the result of order.observe "
                "for reads.order_state."
            )
        self.order_state, self.observed = order_state, True

    def sync(self) -> None:
        """Exchanges data that a coordinated order has deferred; call it at syncs of the workers."""
        self.order_state = self._programs.sync(self.order_state)

    def state(self) -> ReadState:
        """The state to resume from: `read_epochs(..., state=)` of the same order continues there.

        A batch that has not been observed yet is read again. Keys are saved as their data. The
        digest says what the state is a place in; the state of another order is refused by it.

        Returns:
          A tree of new arrays: the order's state, epoch, units and loads, and a digest.
        """
        at = self._batches.position() if self.observed else self._last
        digest = digest_of(self._order, self.unit_size, at.unit)
        counts = map(np.asarray, (at.epoch, at.unit, at.loads, digest))
        return ReadState(self._copy_of_order(), *counts)

    def _copy_of_order(self):
        state = copied(self.order_state)
        # The one state of all workers belongs to no device: each process can save it.
        return jax.device_get(state) if self._order.computed else state

    # What `echo.repeat` needs beside `state`, `last`, `around`, `observes` and `unit_size`: the
    # last batch of a saved run once more, how many units a batch may have, and their axis.

    def load_again(self, unit: int, batch: int) -> Iterator:
        """A loader of the batch before the reader's place, which began at this unit and batch.

        The reader stays where it is.
        """
        place = self._batches.position()
        start = Position(place.epoch, unit, batch, place.loads - 1)
        batches = EpochBatches(self._load, self._sizes, start)
        if not 0 <= unit < self._sizes.num_units or batches.position(1) != place:
            raise ValueError(
                f"the last batch began at unit {unit}, and does not end at unit {place.unit} now: "
                "pass units_per_step as when it was read."
            )
        batches.open(self._order.units(self.order_state, unit), self._sizes.window)
        return cast(Iterator, batches.loader())

    def units_of_batches(self) -> set[int]:
        """The numbers of units that a worker's batches have, until the end of an epoch."""
        sizes, left = self._sizes, self._sizes.num_units - self._batches.position().unit
        units = sizes.window, sizes.num_units % sizes.window, left % sizes.window
        return {n // sizes.least for n in units} - {0}

    @property
    def unit_axis(self) -> int:
        """The axis of the units in a batch, which follows that of the workers."""
        return 0 if self._workers.count is None else 1

    def __next__(self) -> PyTree[jax.Array]:
        batch = super().__next__()
        self.observed, self.last = not self.observes, self._last
        return batch

    def newest_state(self) -> State:
        return self.order_state

    def end_epoch(self) -> None:
        self.order_state = self._programs.next_epoch(self.order_state)

    def check_epoch(self, epoch: int) -> None:
        if epoch != self._shift + self.epoch:
            raise ValueError(
                f"epoch {self.epoch} begins, and the order is in epoch {epoch - self._shift}: "
                "leave next_epoch to the reader, which calls it between two epochs."
            )

    def check_step(self) -> None:
        if self.around is not None:
            raise ValueError(
                "state is of ordering.echo.repeat: pass the reader to repeat, with the plan of the "
                "run."
            )
        if not self.observed:
            raise ValueError(
                f"batch {self.loads - 1} was not observed: call reads.observe(rows) after its step "
                "(or reads.advance(order_state)), or read with an order that looks at no gradients."
            )


def check_rows(rows: PyTree) -> None:
    """Raises ValueError unless it is a tree of arrays."""
    if not all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(rows)):
        raise ValueError(
            f"rows is {rows!r:.200}: pass the tree of arrays that per_example_grads or "
            "sketched_grads gave."
        )


def read_epochs(
    source: PyTree[ArrayLike] | Sequence | Callable[[np.ndarray, int, int], Iterable],
    order: Ordering,
    key: Key[jax.Array, ""],
    *,
    like: PyTree = None,
    workers: int | Mesh | None = None,
    axis_name: str = AXIS,
    unit_size: int = 1,
    num_epochs: int | None = None,
    state: ReadState | PyTree | None = None,
    ahead: int = 2,
    depth: int = 2,
    timeout: float | None = None,
    sharding: jax.sharding.Sharding | PyTree | None = None,
) -> Epochs:
    """Reads batches, epoch after epoch, in an order that the iterator keeps.

    Call `reads.observe(rows)` after every step, with the gradients of its units. An order that uses
    no gradients needs no call. Between two epochs the next order becomes the current one. Loading
    of its known part starts `ahead` steps before the end of the epoch.

    Args:
      source: as in `as_source`; or your own pipeline, a function `(indices, first_step, epoch) ->
        batches`. It reads the examples `indices`, int64[n], from `first_step` of that epoch on, and
        returns an iterable with one batch of W B S examples per step. A thread reads it and copies
        to the device (`prefetch_to_device`).
      order: an order; its `units_per_step` units, B, make a worker's batch.
      key: one key, for the first order.
      like, workers, axis_name: as in `init_workers`.
      unit_size: S >= 1, consecutive examples per unit. Worker w owns the units w M to w M + M - 1.
      num_epochs: >= 0, epochs of the whole run; None for no end.
      state: where to continue: the result of `Epochs.state`, or the dicts and lists that a
        checkpoint makes of it. The order may have another units_per_step.
      ahead: >= 1, how many steps before an epoch's end the next one starts loading.
      depth, timeout: as in `prefetch_to_device`.
      sharding: as in `prefetch_to_device`. None for the default device, or with a mesh for the
        devices of its workers.

    Returns:
      An `Epochs` iterator. Batches of several workers have leaves [W, B S, ...]; each process reads
      only the rows of its own workers.

    Raises:
      ValueError: for a source, an order or a state that do not fit each other; from `next`, if the
        last batch was not observed.
      LoadError: from `next`, with the number of the load that failed, hangs or is missing.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> order = ordering.pair_balance(6, units_per_step=4)
      >>> reads = ordering.data.read_epochs(
      ...     jnp.arange(6.0), order, jax.random.key(0), like=jnp.zeros(1), num_epochs=2
      ... )
      >>> for batch in reads:
      ...     print(batch.shape)  # a step of the training
      ...     reads.observe(batch[:, None])  # the gradients of its units
      (4,)
      (2,)
      (4,)
      (2,)
    """
    plans.check_whole("ahead", ahead, 1)
    if num_epochs is not None:
        plans.check_whole("num_epochs", num_epochs, 0)
    base.check_order(order)
    of_all = base.workers_of(workers, axis_name)
    first = first_state(order, key, like, of_all)
    sizes, unit_size = sizes_of(order, of_all), plans.check_whole("unit_size", unit_size, 1)
    place, (state, around) = ReadState(first), unwrap(state)
    if state is not None:
        counts = counts_of(state, ("epoch", "units", "loads"))
        check_place(counts["units"], order, sizes)
        check_digest(state, order, unit_size, counts["units"])
        restored = restore(first, part_of(state, "order"), ".order")
        place = ReadState(restored, counts["epoch"], counts["units"], counts["loads"])
    sharding = of_all.sharding if sharding is None else sharding
    if callable(source) and not hasattr(source, "__getitem__"):
        read = read_pipeline(source, order, of_all, unit_size)
    else:
        examples = as_source(source)
        read = read_source(examples, order, of_all, unit_size)
        check_steps(examples, _shapes(sizes, of_all, unit_size), sharding)

    def load(units, first_step, epoch, number):
        batches = read(units, first_step, epoch)
        return on_devices(batches, sharding, depth=depth, timeout=timeout, first_load=number)

    reads = Epochs(load, sizes, order, of_all, place, num_epochs, ahead, unit_size=unit_size)
    reads.around = around
    return reads


def first_state(order: Ordering, key: Any, like: PyTree, workers: Workers) -> State:
    """The first state of all workers; raises ValueError for one without the fields of an order."""
    of_mesh = workers.count if workers.mesh is None else workers.mesh
    first = base.init_workers(order, key, like, of_mesh, axis_name=workers.axis_name)
    needed = ("epoch",) if order.computed else ("current", "next", "left", "epoch")
    if missing := [name for name in needed if not hasattr(type(first), name)]:
        raise ValueError(
            f"the state of {type(order).__name__} has no {' and no '.join(missing)}: give it all "
            "fields that ordering.Ordering names; if no next order is known, left is zero."
        )
    return first


def _shapes(sizes: Sizes, workers: Workers, unit_size: int) -> list[tuple[int, ...]]:
    """The leading axes of the batches: of a step, and of an epoch's last step."""
    lead = () if workers.count is None else (workers.count,)
    last = sizes.num_units % sizes.window
    steps = {sizes.window, last if last >= sizes.least else sizes.window}
    return [(*lead, n // sizes.least * unit_size) for n in steps]


def on_devices(batches: Iterable, sharding: Any, **options: Any) -> Prefetch:
    """`prefetch_to_device`, also for devices of several processes."""
    if getattr(sharding, "is_fully_addressable", True):
        return prefetch_to_device(batches, sharding=sharding, **options)
    return prefetch_to_device(map(functools.partial(_of_processes, sharding), batches), **options)


def _of_processes(sharding, batch):
    """Arrays [W, ...] from the rows of each process's own workers; others stay as they are."""

    def make(x):
        if not getattr(x, "is_fully_addressable", True):
            return x
        return jax.make_array_from_process_local_data(sharding, np.array(x))  # a loader's buffer

    return jax.tree.map(make, representable(batch))
