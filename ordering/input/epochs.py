"""An iterator over all epochs, which reads ahead across their boundaries."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ordering import base
from ordering.base import State
from ordering.input.loader import Loader, LoadError, load_ahead
from ordering.input.sources import Steps, check_read_whole, reader
from syncopate import plans

Load = Callable[[np.ndarray, int, int], Loader]


class Layout(NamedTuple):
    """How the units of an epoch become steps: so many units of a worker are read at once, which
    are the batches of `batches` steps. Where fewer units are left they are those of `last`."""

    num_units: int
    units: int
    batches: int = 1
    last: int = 1

    def steps(self, units: int) -> int:
        """The steps of so many first units."""
        return units // self.units * self.batches + (self.last if units % self.units else 0)

    def units_before(self, step: int) -> int:
        """The first unit that is read for a step."""
        return step // self.batches * self.units


class Front(NamedTuple):
    """The first steps of the next epoch, which are loaded while this one ends."""

    num_steps: int = 0
    loader: Loader | None = None


class Epochs(Iterator, contextlib.AbstractContextManager):
    """Batches of all epochs; see `read_epochs`. As a context manager it closes its threads.

    `wait()` returns when `next` would return at once, and raises what it would raise.

    Attributes:
      epoch, step: position of the next batch; at an epoch's end `step` is the number of its steps.
      epoch_ended: whether the last batch was the last of its epoch: after its step, call the
        order's `next_epoch`.
    """

    def __init__(
        self, load: Load, live: Callable, layout: Layout, num_epochs, ahead, first_load, first_epoch
    ):
        self._load, self._live, self._layout = load, live, layout
        self._num_epochs, self._ahead, self._first_epoch = num_epochs, ahead, first_epoch
        self._steps = layout.steps(layout.num_units)
        self.epoch, self.step = divmod(first_load, self._steps)
        self.epoch_ended, self._opened, self._front = False, False, Front()
        self._next: Front | None = None
        self._rest: Loader | None = None
        self._order: Any = None
        self._early: Any = None

    @property
    def load(self) -> int:
        """Number of the next batch over all epochs; `first_load` of a run that resumes here."""
        return self.epoch * self._steps + self.step

    def __next__(self) -> PyTree[jax.Array]:
        self.wait()
        batch = next(cast(Loader, self._loader()))
        self.step += 1
        self.epoch_ended = self.step == self._steps
        return batch

    def wait(self) -> None:
        """Waits until `next` returns at once; raises what it would raise."""
        if self.epoch_ended:
            self._end_epoch()
        if self._num_epochs is not None and self.epoch >= self._num_epochs:
            raise StopIteration
        with jax.transfer_guard("allow"):
            self._begin_step()
        loader = cast(Loader, self._loader())
        try:
            loader.wait()
        except StopIteration:
            raise LoadError(
                self.load,
                f"is missing: the source ended in an epoch of {self._steps} steps, or was closed. "
                "Give one batch for each of them.",
            ) from None
        if loader.load != self.load:
            raise LoadError(
                self.load, "was lost, as next was interrupted: resume the run from this load."
            )

    def _begin_step(self):
        if self._order is None:
            state = checked_state(self._live)
            if state.current.shape[-1] != (num_units := self._layout.num_units):
                raise ValueError(
                    f"live gives an order of {state.current.shape[-1]} units, after {num_units}: "
                    "make another read_epochs for another order."
                )
            self._order = _copies(state.current, *epoch_of(state))
        # With two steps in front, wait for the order only when the device has the first to do.
        if not self._opened and (self.step or self._front.num_steps < 2):
            self._open_rest(*map(np.asarray, self._order))
        self._look_ahead()

    def ready(self) -> bool:
        """Whether the next batch is on the device, or its loading has not begun."""
        front = self._next or Front()
        loader = front.loader if self.epoch_ended else self._loader()
        return loader is None or loader.ready()

    def close(self) -> None:
        """Ends the threads that load."""
        for reads in (self._front.loader, self._rest, self._next and self._next.loader):
            if reads is not None:
                reads.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_epoch(self):
        self._front = self._next or Front()
        self._order = self._early = self._next = self._rest = None
        self.epoch, self.step, self.epoch_ended, self._opened = self.epoch + 1, 0, False, False

    def _open_rest(self, order, *epochs):
        """Loads the steps after the front; ValueError if the order is not this epoch's."""
        self.check_order(self.epoch, *epochs)
        first = self._front.num_steps or self.step
        if first < self._steps:
            rest = order[..., self._layout.units_before(first) :]
            self._rest = self._load(rest, first, self.epoch)
        self._opened = True

    def check_order(self, epoch: int, *found: ArrayLike) -> None:
        """Raises ValueError unless the orders, which were `found` in an epoch, are in this one."""
        for orders_in in found:
            if (orders_in := np.unique(orders_in) - self._first_epoch).tolist() != [epoch]:
                raise ValueError(
                    f"epoch {epoch - 1} has been read, and the state has the order of epoch "
                    f"{', '.join(map(str, orders_in))}: call the order's next_epoch once, after "
                    "the step for which epoch_ended is True."
                )

    def _loader(self):
        return self._front.loader if self.step < self._front.num_steps else self._rest

    def _look_ahead(self):
        """Copies what is known of the next epoch, and loads it a step later: no wait for either."""
        is_last = self._num_epochs is not None and self.epoch + 1 >= self._num_epochs
        if self._early is None:
            if self.step >= self._steps - 1 - self._ahead:
                state = self._live()
                self._early = _copies(state.left, state.next)
        elif self._next is None and not is_last:
            self._next = self._open_front()

    def _open_front(self):
        """Loads the steps of the next epoch that all workers have already decided."""
        left, following = (np.asarray(array) for array in self._early)
        left, layout = int(left.min()), self._layout
        known = left if left >= layout.num_units else left - left % layout.units
        if not known:
            return Front()
        return Front(layout.steps(known), self._load(following[..., :known], 0, self.epoch + 1))


def _copies(*arrays):
    """Copies on their way to the host, as a step may donate the state itself."""
    copies = [jnp.copy(array) for array in arrays]
    for copy in copies:
        copy.copy_to_host_async()
    return copies


def epoch_of(state: State) -> list[np.ndarray]:
    """The epoch in which the orders are; of an order of one's own that counts none, nothing."""
    return [state.epoch] if hasattr(state, "epoch") else []


def first_epoch_of(state: State, layout: Layout, first_load: int, num_epochs: int | None) -> int:
    """The epoch of the orders in the first epoch of a reader; ValueError for another place."""
    epoch, step = divmod(first_load, layout.steps(layout.num_units))
    is_over = num_epochs is not None and epoch >= num_epochs
    for found in map(np.unique, map(np.asarray, epoch_of(state))):
        if not first_load:  # the orders may have been used before
            return int(found[0])
        position, read = np.unique(getattr(state, "position", 0)), layout.units_before(step)
        # None where orders rest, and all where workers were resized.
        is_part = (position > 0) & (position < layout.num_units)
        if not is_over and ((found != epoch).any() or (position != read)[is_part].any()):
            raise ValueError(
                f"first_load is {first_load}, unit {read} of epoch {epoch} with {layout.units} "
                f"units per step, and live gives the orders of epoch {found[0]}, of which "
                f"{position[0]} units were observed: pass the load that was saved with this state, "
                "or, after another units_per_step, the one before which as many units are read."
            )
    return 0


def checked_state(live) -> State:
    """The state that `live` returns; ValueError if it is none."""
    plans.check_function("live", live)
    state = live()
    if not hasattr(state, "current"):
        raise ValueError(f"live gives a {type(state).__name__}: pass lambda: state.")
    return cast(State, state)


def read_epochs(
    source: PyTree[ArrayLike] | Sequence | Callable[[np.ndarray, int, int], Iterable],
    live: Callable[[], State],
    *,
    units_per_step: int,
    unit_size: int = 1,
    total: int | None = None,
    num_epochs: int | None = None,
    first_load: int = 0,
    ahead: int = 2,
    depth: int = 2,
    timeout: float | None = None,
    sharding: jax.sharding.Sharding | PyTree | None = None,
) -> Epochs:
    """Batches of one epoch after the other, read ahead across the boundaries.

    `ahead` steps before an epoch ends, the steps of the next epoch that are already decided begin
    to load. The others follow when `next_epoch` has made their order.

    Args:
      source: as in `reader`; or a function `(orders, first_step, epoch) -> batches` that returns an
        iterable of the batches of a slice of that epoch's orders, int[.., m], which starts at
        `first_step`. A thread reads it and copies to the device (`load_ahead`).
      live: returns the newest state of the orders, of one worker or of all, from the loop.
      units_per_step: B in [1, M], units per worker and step.
      unit_size, total: as in `step_indices`, unless the source is a function.
      num_epochs: number of epochs; None for no end.
      first_load: >= 0, for a run that resumes from an orders' state: the `load` that was saved with
        it, counted from the first epoch of the orders. At an epoch's end, save both after
        `next_epoch`. With another units_per_step go on where an epoch ended, or at the load before
        which as many units are read: n A / B after n loads of A units.
      ahead: >= 1, steps before an epoch's end at which the next one begins to load.
      depth, timeout, sharding: as in `load_ahead`.

    Returns:
      An `Epochs` iterator. `epoch_ended` is True with the last batch of an epoch: after its step,
      call `next_epoch`. `load` is the number of the next batch over all epochs, `ready()` tells
      whether it is on the device, and `close()` ends the threads.

    Raises:
      ValueError: for a source or size that does not fit, a source of which a whole step or more
        would never be read, or orders that are not at `first_load`; from `next`, if `next_epoch`
        was not called, which an order of one's own shows by `epoch`.
      LoadError: from `next`, with the number of the load that failed, hangs or is missing.

    Examples:
      >>> import jax, numpy as np, ordering
      >>> order = ordering.random_reshuffling(6)
      >>> state = order.init(jax.random.key(0), None)
      >>> reads = ordering.input.read_epochs(
      ...     np.arange(6), lambda: state, units_per_step=4, num_epochs=2
      ... )
      >>> for batch in reads:
      ...     print(batch.shape)  # a step of the training
      ...     if reads.epoch_ended:
      ...         state = order.next_epoch(state)
      (4,)
      (2,)
      (4,)
      (2,)
    """
    plans.check_whole("ahead", ahead, 1)
    plans.check_whole("first_load", first_load, 0)
    if num_epochs is not None:
        plans.check_whole("num_epochs", num_epochs, 0)
    state = checked_state(live)
    num_units = state.current.shape[-1]
    layout = Layout(*base.check_units(num_units, units_per_step))
    with jax.transfer_guard("allow"):
        first_epoch = first_epoch_of(state, layout, first_load, num_epochs)
    sizes = {"units_per_step": units_per_step, "unit_size": unit_size, "total": total}
    if callable(source):
        plans.check_function("source", source, "orders", "first_step", "epoch")
    else:
        check_read_whole(reader(source)[0], state.current.shape, **sizes)

    def load(orders, first_step, epoch):
        if callable(source):
            batches: Any = source(orders, first_step, epoch)
        else:
            steps = Steps(source, orders, num_units=num_units, **sizes)
            batches = map(steps.__getitem__, range(len(steps)))
        first = epoch * layout.steps(num_units) + first_step
        return load_ahead(
            batches, depth=depth, timeout=timeout, sharding=sharding, first_load=first
        )

    return Epochs(load, live, layout, num_epochs, ahead, first_load, first_epoch)
