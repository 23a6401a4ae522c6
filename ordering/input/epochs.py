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
from ordering.input.sources import reader
from ordering.input.steps import Steps
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

    Attributes:
      epoch, step: position of the next batch; at an epoch's end `step` is the number of its steps.
      epoch_ended: whether the last batch was the last of its epoch: after its step, call the
        order's `next_epoch`.
    """

    def __init__(self, load: Load, live: Callable, layout: Layout, num_epochs, ahead, first_load):
        self._load, self._live, self._layout = load, live, layout
        self._num_epochs, self._ahead = num_epochs, ahead
        self._steps = layout.steps(layout.num_units)
        self.epoch, self.step = divmod(first_load, self._steps)
        self.epoch_ended, self._opened, self._front = False, False, Front()
        self._next: Front | None = None
        self._rest: Loader | None = None
        self._order: Any = None
        self._early: Any = None
        self._before: Any = None

    @property
    def load(self) -> int:
        """Number of the next batch over all epochs; `first_load` of a run that resumes here."""
        return self.epoch * self._steps + self.step

    def __next__(self) -> PyTree[jax.Array]:
        if self.epoch_ended:
            self._end_epoch()
        if self._num_epochs is not None and self.epoch >= self._num_epochs:
            raise StopIteration
        if self._order is None:
            current = checked_state(self._live).current
            if current.shape[-1] != (num_units := self._layout.num_units):
                raise ValueError(
                    f"live gives an order of {current.shape[-1]} units, after {num_units}: "
                    "make another read_epochs for another order."
                )
            (self._order,) = _copies(current)
        # With two steps in front, wait for the order only when the device has the first to do.
        if not self._opened and (self.step or self._front.num_steps < 2):
            self._open_rest(np.asarray(self._order))
        self._look_ahead()
        try:
            batch = next(cast(Loader, self._loader()))
        except StopIteration:
            raise LoadError(
                self.load,
                f"is missing: the source ended in an epoch of {self._steps} steps, or was closed. "
                "Give one batch for each of them.",
            ) from None
        self.step += 1
        self.epoch_ended = self.step == self._steps
        return batch

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
        self._before = (self.epoch, self._order, self._early)
        self._front = self._next or Front()
        self._order = self._early = self._next = self._rest = None
        self.epoch, self.step, self.epoch_ended, self._opened = self.epoch + 1, 0, False, False

    def _open_rest(self, order):
        """Loads the steps after the front; ValueError if the order is still that of before."""
        if self._before:
            _check_new(self._before, order)
        first = self._front.num_steps or self.step
        rest = order[..., self._layout.units_before(first) :]
        if rest.size:
            self._rest = self._load(rest, first, self.epoch)
        self._opened, self._before = True, None

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


def _check_new(before, order):
    """Raises ValueError for the order that has just been read, as `next_epoch` was forgotten."""
    epoch, last, early = before
    known = int(np.min(early[0])) if early else 0
    if early and known:
        new = np.array_equal(np.asarray(early[1])[..., :known], order[..., :known])
    else:  # an order of fewer than eight units may occur twice by chance
        new = order.shape[-1] < 8 or not np.array_equal(np.asarray(last), order)
    if not new:
        raise ValueError(
            f"epoch {epoch} has been read, and the state still has its order: call the order's "
            "next_epoch after the step for which epoch_ended is True."
        )


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
        it. At an epoch's end, save both after `next_epoch`.
      ahead: >= 1, steps before an epoch's end at which the next one begins to load.
      depth, timeout, sharding: as in `load_ahead`.

    Returns:
      An `Epochs` iterator. `epoch_ended` is True with the last batch of an epoch: after its step,
      call `next_epoch`. `load` is the number of the next batch over all epochs, `ready()` tells
      whether it is on the device, and `close()` ends the threads.

    Raises:
      ValueError: for a source or size that does not fit; from `next`, if `next_epoch` was not
        called.
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
    num_units = checked_state(live).current.shape[-1]
    layout = Layout(*base.check_units(num_units, units_per_step))
    if callable(source):
        plans.check_function("source", source, "orders", "first_step", "epoch")
    else:
        reader(source)  # raises now for an object that is no source

    def load(orders, first_step, epoch):
        if callable(source):
            batches: Any = source(orders, first_step, epoch)
        else:
            steps = Steps(
                source, orders, units_per_step=units_per_step, unit_size=unit_size,
                num_units=num_units, total=total,
            )  # fmt: skip
            batches = map(steps.__getitem__, range(len(steps)))
        first = epoch * layout.steps(num_units) + first_step
        return load_ahead(
            batches, depth=depth, timeout=timeout, sharding=sharding, first_load=first
        )

    return Epochs(load, live, layout, num_epochs, ahead, first_load)
