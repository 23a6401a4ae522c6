"""An iterator over all epochs of a source, which keeps the state of the order."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Key, PyTree

from ordering import base
from ordering.base import Ordering, Scope, State
from ordering.data.batches import (
    EpochBatches,
    Load,
    Position,
    Reader,
    Sizes,
    epoch_of,
    of_process,
    on_host,
)
from ordering.data.loader import Prefetch, check_steps, prefetch_to_device, representable
from ordering.data.place import ReadState, check_place, key_data, restored, unwrap
from ordering.data.reading import read_pipeline, read_source
from ordering.data.sources import as_source
from syncopate import plans


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
        scope: Scope,
        state: ReadState,
        num_epochs: int | None,
        ahead: int,
        batch: int = 0,
        unit_size: int = 1,
    ):
        epoch, units, loads = map(int, state[1:4])
        # Units of a computed order are counted over all workers together, others per worker.
        self._workers = (scope.workers or 1) // sizes.least
        start = Position(epoch, units // self._workers, batch, loads)
        super().__init__(load, sizes, start, num_epochs=num_epochs, ahead=ahead)
        self.order_state, self._scope = state.order, scope
        self.unit_size, self.last = unit_size, None
        self._pure, self._order_of_all = order, base.compiled(order, scope)
        self.observes = hasattr(state.order, "position")
        self.observed = True  # the last batch
        self._shift = min((int(np.min(of_process(x))) for x in epoch_of(state.order)), default=0)
        self._shift -= epoch  # the order may have been used before

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
        with jax.transfer_guard("allow"):
            self.advance(self._order_of_all.observe(self.order_state, rows))

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
        with jax.transfer_guard("allow"):
            self.order_state = self._order_of_all.sync(self.order_state)

    def state(self) -> ReadState:
        """The state to resume from: `read_epochs(..., state=)` of the same order continues there.

        A batch that has not been observed yet is read again. Keys are saved as their data.

        Returns:
          A tree of new arrays: the order's state, epoch and units, and the run's counts.
        """
        at = self._batches.position if self.observed else self._last
        counts = at.epoch, at.unit * self._workers, at.loads
        return ReadState(copied(self.order_state), *map(np.asarray, counts))

    def load_again(self, unit: int, batch: int) -> Iterator:
        """A loader of the batch before the reader's place, which began at this unit and batch.

        The reader stays where it is.
        """
        place = self._batches.position
        start = Position(place.epoch, unit, batch, place.loads - 1)
        batches = EpochBatches(self._load, self._sizes, start)
        if not 0 <= unit < self._sizes.num_units or batches.place_after() != place:
            raise ValueError(
                f"the last batch began at unit {unit}, and does not end at unit {place.unit} now: "
                "pass units_per_step as when it was read."
            )
        with jax.transfer_guard("allow"):
            if self._pure.indices is None:
                [order] = super().current_order(self.order_state)
            else:
                order = self.computed_order(self.order_state, unit)
            batches.open(on_host(order), min(unit + self._sizes.window, self._sizes.num_units))
        return cast(Iterator, batches.loader())

    def units_of_batches(self) -> set[int]:
        """The numbers of units that a worker's batches have, until the end of an epoch."""
        sizes, left = self._sizes, self._sizes.num_units - self._batches.position.unit
        units = sizes.window, sizes.num_units % sizes.window, left % sizes.window
        return {n // sizes.least for n in units} - {0}

    @property
    def unit_axis(self) -> int:
        """The axis of the units in a batch, which follows that of the workers."""
        return 0 if self._scope.workers is None else 1

    def __next__(self) -> PyTree[jax.Array]:
        batch = super().__next__()
        self.observed, self.last = not self.observes, self._last
        return batch

    def newest_state(self) -> State:
        return self.order_state

    def end_epoch(self) -> None:
        self.order_state = self._order_of_all.next_epoch(self.order_state)

    def current_order(self, state: State) -> list:
        if self._pure.indices is None:
            return super().current_order(state)
        return [self.computed_order(state, self._batches.position.unit)]

    def next_order(self, state: State) -> list:
        if self._pure.indices is None:
            return super().next_order(state)
        return [self.computed_order(self._pure.next_epoch(state), 0), self._sizes.num_units]

    def computed_order(self, state: State, unit: int) -> Any:
        """The order of an epoch that is computed, to be read from this unit on."""
        del unit
        return cast(Callable, self._pure.indices)(state)

    def check_order(self, *epochs_of_workers: np.ndarray) -> None:
        for epochs in epochs_of_workers:
            if (np.asarray(epochs) != self._shift + self.epoch).any():
                raise ValueError(
                    f"epoch {self.epoch} begins, and the order is in epoch {np.max(epochs)}: "
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


@jax.transfer_guard("allow")
def copied(tree: PyTree) -> PyTree:
    """New arrays, which the next step cannot donate; keys become their data."""
    return jax.tree.map(lambda x: jnp.copy(key_data(x)), tree)


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
    axis_name: str | None = None,
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
    scope = base.scope_of(workers, axis_name)
    first = base.init_workers(order, key, like, workers, axis_name=axis_name)
    sizes = _sizes(order, first, scope)
    with jax.transfer_guard("allow"):
        place, (state, around) = ReadState(first), unwrap(state)
        if state is not None:
            place = restored(place, state)
            shared = 1 if order.indices else scope.workers or 1
            check_place(place, sizes.num_units, shared, sizes.window)
        if callable(source) and not hasattr(source, "__getitem__"):
            read = read_pipeline(source, order, scope, sizes.num_units, unit_size)
        else:
            examples = as_source(source)
            read = read_source(examples, order, scope, sizes.num_units, unit_size)
            check_steps(examples, _shapes(sizes, scope, unit_size), sharding)
            sharding = scope.sharding if sharding is None else sharding

    def load(orders, first_step, epoch, number):
        batches = read(orders, first_step, epoch)
        return on_devices(batches, sharding, depth=depth, timeout=timeout, first_load=number)

    reads = Epochs(load, sizes, order, scope, place, num_epochs, ahead, unit_size=unit_size)
    reads.around = around
    return reads


def num_units_of(order: Ordering, first: State) -> int:
    """The units of an epoch: of one worker, or for a computed order of all workers together.

    Raises ValueError for a state without the fields that a reader needs.
    """
    if order.indices is not None:
        return len(order.indices(first))
    missing = [name for name in ("current", "next", "left") if not hasattr(first, name)]
    if missing:
        raise ValueError(
            f"the order's state, a {type(first).__name__}, has no {' and no '.join(missing)}: give "
            "it all fields that ordering.Ordering requires. If the next order is not known yet, "
            "let next be a copy of current, and left zero."
        )
    return first.current.shape[-1]


def _sizes(order: Ordering, first: State, scope: Scope) -> Sizes:
    """An epoch of one worker, or for a computed order of all workers together."""
    workers, num_units = scope.workers or 1, num_units_of(order, first)
    if order.indices is None:
        return Sizes(*base.check_units(num_units, order.units_per_step))
    if workers * order.units_per_step > num_units:
        raise ValueError(
            f"a step of {workers} workers with {order.units_per_step} units each exceeds the "
            f"{num_units} units of an epoch: lower units_per_step."
        )
    return Sizes(num_units, workers * order.units_per_step, least=workers)


def _shapes(sizes: Sizes, scope: Scope, unit_size: int) -> list[tuple[int, ...]]:
    """The leading axes of the batches: of a step, and of an epoch's last step."""
    lead = () if scope.workers is None else (scope.workers,)
    last = sizes.num_units % sizes.window
    steps = {sizes.window, last if last >= sizes.least else sizes.window}
    return [(*lead, n // sizes.least * unit_size) for n in steps]


def on_devices(batches: Iterable, sharding: Any, **options: Any) -> Prefetch:
    """`prefetch_to_device`, also for devices of several processes."""
    if getattr(sharding, "is_fully_addressable", True):
        return prefetch_to_device(batches, sharding=sharding, **options)
    return prefetch_to_device(map(functools.partial(_of_processes, sharding), batches), **options)


def _of_processes(sharding, batch):
    """Arrays [W, ...] from the rows of each process's own workers."""
    make = functools.partial(jax.make_array_from_process_local_data, sharding)
    return jax.tree.map(lambda x: make(np.array(x)), representable(batch))  # a loader's buffer
