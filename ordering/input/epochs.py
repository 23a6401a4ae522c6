"""One iterator over all epochs, which reads ahead across their boundaries."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ordering import base
from ordering.base import State
from ordering.input.loader import Loader, LoadError, load_ahead
from ordering.input.sources import Steps, check_at_least, reader

Load = Callable[[np.ndarray, int, int], Loader]


class Front(NamedTuple):
    """The first steps of the next epoch, loaded while this one ends."""

    num_steps: int = 0
    loader: Loader | None = None


class Epochs(Iterator):
    """What `read_epochs` returns; also a context manager, which closes its threads.

    Fields:
      epoch, step: where the next batch is, or, at an epoch's end, M / B rounded up.
      epoch_ended: whether the batch just given is the last of its epoch: after its step, call the
        order's `next_epoch`.
    """

    def __init__(self, load: Load, live: Callable, units_per_step, num_epochs, ahead, first_load):
        self._load, self._live, self._size = load, live, units_per_step
        self._num_epochs, self._ahead = num_epochs, ahead
        self._num_units = live().current.shape[-1]
        self._steps = -(-self._num_units // units_per_step)
        self.epoch, self.step = divmod(first_load, self._steps)
        self.epoch_ended, self._opened, self._front = False, False, Front()
        self._order = self._early = self._next = self._rest = self._before = None

    @property
    def load(self) -> int:
        """The number over all epochs of the next batch: `first_load` of a run that goes on."""
        return self.epoch * self._steps + self.step

    def __next__(self):
        if self.epoch_ended:
            self._end_epoch()
        if self._num_epochs is not None and self.epoch >= self._num_epochs:
            raise StopIteration
        if self._order is None:
            (self._order,) = _copies(self._live().current)
        # With two steps in front, the order is waited for when the device has work: the first.
        if not self._opened and (self.step or self._front.num_steps < 2):
            self._open_rest(np.asarray(self._order))
        self._look_ahead()
        try:
            batch = next(self._loader())
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
        """Whether `next` waits for no load: its batch is there, or none has begun to load."""
        front = self._next or Front()
        loader = front.loader if self.epoch_ended else self._loader()
        return loader is None or loader.ready()

    def close(self) -> None:
        """Ends the threads that load; nothing is read any more."""
        for reads in (self._front.loader, self._rest, self._next and self._next.loader):
            if reads is not None:
                reads.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _end_epoch(self):
        self._before = (self.epoch, self._order, self._early)
        self._front = self._next or Front()
        self._order = self._early = self._next = self._rest = None
        self.epoch, self.step, self.epoch_ended, self._opened = self.epoch + 1, 0, False, False

    def _open_rest(self, order):
        """Loads what follows the front, if this is the order of a new epoch."""
        if self._before is not None:
            _check_new(*self._before, order)
        first = self._front.num_steps or self.step
        rest = order[..., first * self._size :]
        if rest.size:
            self._rest = self._load(rest, first, self.epoch)
        self._opened, self._before = True, None

    def _loader(self):
        return self._front.loader if self.step < self._front.num_steps else self._rest

    def _look_ahead(self):
        """Copies what is known at one step, and opens it at the next: the host does not wait."""
        is_last = self._num_epochs is not None and self.epoch + 1 >= self._num_epochs
        if self._early is None:
            if self.step >= self._steps - 1 - self._ahead:
                state = self._live()
                self._early = _copies(state.left, state.next)
        elif self._next is None and not is_last:
            self._next = self._open_front()

    def _open_front(self):
        """Loads the steps of the next epoch that are already decided by all workers."""
        left, following = (np.asarray(array) for array in self._early)
        left = int(left.min())
        known = self._num_units if left >= self._num_units else left - left % self._size
        if not known:
            return Front()
        orders = following[..., :known]
        return Front(-(-known // self._size), self._load(orders, 0, self.epoch + 1))


def _copies(*arrays):
    """On their way to the host, for a step may donate the state itself."""
    copies = [jnp.copy(array) for array in arrays]
    for copy in copies:
        copy.copy_to_host_async()
    return copies


def _check_new(epoch, last, early, order):
    """Refuses the order that has just been read, which a forgotten `next_epoch` leaves."""
    known = 0 if early is None else int(np.min(early[0]))
    if known:
        new = np.array_equal(np.asarray(early[1])[..., :known], order[..., :known])
    else:  # of less than eight units, an order may come again by chance
        new = order.shape[-1] < 8 or not np.array_equal(np.asarray(last), order)
    if not new:
        raise ValueError(
            f"epoch {epoch} has been read, and the state's order is not that of the next: call "
            "the order's next_epoch after the step for which epoch_ended is True."
        )


def _state(live):
    """What `live` gives; ValueError unless it is an orders' state."""
    if not callable(live):
        wrong = f"live is a {type(live).__name__}"
    elif not hasattr(state := live(), "current"):
        wrong = f"live() is a {type(state).__name__}"
    else:
        return state
    raise ValueError(f"{wrong}: pass a function that gives the orders' state, as lambda: state.")


def read_epochs(
    source,
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
    sharding=None,
) -> Epochs:
    """The batches of epoch after epoch, read ahead across their boundaries.

    `ahead` steps before an epoch's end, those steps of the next one that are already decided are
    asked for, and are loaded while this one ends. The rest follows when its order is known: no
    order is read before it is made.

    Args:
      source: as `reader` takes it; or a function `(orders, first_step, epoch) -> batches`, an
        iterable: the slice orders, int[.., m], of that epoch starts at `first_step`. Either is read
        and copied to the device by a thread (`load_ahead`).
      live: gives the orders' newest state, of one worker or all, as the loop has it.
      units_per_step: B in [1, M], units per worker and step.
      unit_size, total: as in `step_indices`, for a source that is no function.
      num_epochs: after which the iterator ends; None for no end.
      first_load: >= 0, for a run that goes on from an orders' state: the `load` that was saved
        beside it, after `next_epoch` at an epoch's end.
      ahead: >= 1 steps, of an epoch's last, before whose end the next one is looked at.
      depth, timeout, sharding: as in `load_ahead`.

    Returns:
      `Epochs`, an iterator: `epoch_ended` is True with an epoch's last batch, after whose step the
      loop calls `next_epoch`. `load` is the number over all epochs of the next batch, `ready()`
      says whether it is there, and `close()` ends the reading.

    Raises:
      ValueError: for a source or size that cannot be; from `next`, where `next_epoch` was not
        called.
      LoadError: from `next`, with the number over all epochs of the load that failed or hangs.

    Example:
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
    check_at_least(1, ahead=ahead)
    check_at_least(0, num_epochs=num_epochs, first_load=first_load)
    num_units = _state(live).current.shape[-1]
    base.check_units_per_step(num_units, units_per_step)
    if not callable(source):
        reader(source)  # refuses what is no source now

    def load(orders, first_step, epoch):
        if callable(source):
            batches = source(orders, first_step, epoch)
        else:
            steps = Steps(
                source, orders, units_per_step=units_per_step, unit_size=unit_size,
                num_units=num_units, total=total,
            )  # fmt: skip
            batches = map(steps.__getitem__, range(len(steps)))
        first = epoch * -(-num_units // units_per_step) + first_step
        return load_ahead(
            batches, depth=depth, timeout=timeout, sharding=sharding, first_load=first
        )

    return Epochs(load, live, units_per_step, num_epochs, ahead, first_load)
