"""The batches of all epochs, loaded ahead as far as the orders are known."""

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
from jaxtyping import PyTree

from ordering import steps
from ordering.base import Ordering, State
from ordering.data.loader import LoadError, Prefetch
from ordering.indices import Indices

# (units from a step on, that step, the epoch, the number of the first batch) -> its loader
Load = Callable[[Indices, int, int, int], Prefetch]


class Sizes(NamedTuple):
    """An epoch of all workers: its units, how many are read at once, and the batches they make."""

    num_units: int
    window: int
    least: int = 1  # units that a last window needs, one of each worker; fewer are left out
    batches: int = 1
    last: int = 1  # batches of the last window, if it has fewer units

    def batches_of(self, units: int) -> int:
        """Batches of so many units, from the beginning of a window to the end of the epoch."""
        return units // self.window * self.batches + (units % self.window >= self.least) * self.last


class Position(NamedTuple):
    """Where a batch is in a run."""

    epoch: int
    unit: int = 0  # the first unit of its window; at the end of an epoch the number of units
    batch: int = 0  # its number in the window
    loads: int = 0  # its number in the run


class EpochBatches:
    """The batches of one epoch, which are loaded as its order becomes known.

    Attributes:
      start: the position of its first batch.
      loads: as of the next batch's `Position`.
      step, steps: number of the next batch in its epoch, and the number of all.
      opened: batches before this one have a loader.
    """

    def __init__(self, load: Load, sizes: Sizes, start: Position):
        self._load, self._sizes, self.start, self.loads = load, sizes, start, start.loads
        self._first = -(-start.unit // sizes.window) * sizes.batches
        self.step = self.opened = self._first + start.batch
        self.steps = self._first + sizes.batches_of(sizes.num_units - start.unit)
        self._loaders: collections.deque[tuple[int, Prefetch]] = collections.deque()  # by ends

    def position(self, later: int = 0) -> Position:
        """Where the next batch is, or a later one; at the end of the epoch no window has begun."""
        step = self.step + later
        ended = step == self.steps
        unit = self._sizes.num_units if ended else self.start.unit + self._units(step)
        batch = 0 if ended else step % self._sizes.batches
        return Position(self.start.epoch, unit, batch, self.loads + later)

    @property
    def ended(self) -> bool:
        return self.step == self.steps

    def _units(self, step: int) -> int:
        """Units from the start to the window of a step."""
        return (step - self._first) // self._sizes.batches * self._sizes.window

    def open(self, units: Indices, num_final: int) -> None:
        """Loads the steps of the first `num_final` units from the start on, if not yet begun."""
        size = self._sizes.num_units - self.start.unit
        left_out = size % self._sizes.window % self._sizes.least
        whole, end = num_final >= size, num_final // self._sizes.window * self._sizes.batches
        stop = self.steps if whole else self._first + end
        if stop > self.opened:
            end = size - left_out if whole else self._units(stop)
            part = units[self._units(self.opened) : end]
            number = self.loads + self.opened - self.step
            loader = self._load(part, self.opened, self.start.epoch, number)
            self._loaders.append((stop, loader))
            self.opened = stop

    def loader(self) -> Prefetch | None:
        """The loader of the next batch, if there is one yet."""
        while self._loaders and self._loaders[0][0] <= self.step:
            self._loaders.popleft()
        return self._loaders[0][1] if self._loaders else None

    def wait(self) -> None:
        """Waits until `take` returns at once; raises an error if there is no batch to come."""
        loader = cast(Prefetch, self.loader())
        try:
            loader.wait()
        except StopIteration:
            raise LoadError(
                self.loads,
                f"is missing: the source ended in an epoch of {self.steps} steps, or was closed. "
                "Give one batch for each of them.",
            ) from None
        if loader.load != self.loads:
            raise LoadError(
                self.loads, "was lost, as next was interrupted: resume the run from this load."
            )

    def take(self) -> PyTree[jax.Array]:
        """The next batch, after `wait`."""
        batch = next(cast(Prefetch, self.loader()))
        self.step, self.loads = self.step + 1, self.loads + 1
        return batch

    def close(self) -> None:
        for _, loader in self._loaders:
            loader.close()


class Reader(Iterator, contextlib.AbstractContextManager):
    """Batches of one epoch after the other, for the orders' state that `newest_state` returns.

    `wait()` returns when `next` would return at once, and raises what it would raise.
    """

    def __init__(
        self,
        order: Ordering,
        load: Load,
        sizes: Sizes,
        start: Position,
        *,
        num_epochs: int | None = None,
        ahead: int = 2,
    ):
        self._order, self._load, self._sizes = order, load, sizes
        self._num_epochs, self._ahead = num_epochs, ahead
        self._batches = EpochBatches(load, sizes, start)
        self._last = start  # the position of the last batch
        self._following: EpochBatches | None = None
        self._units: Any = None  # this epoch's, and its number in the state, until all are loaded
        self._next_units: Any = None  # those of the next epoch, and how many are final
        self._due = True  # not all of this epoch's steps are being loaded
        self._closed = False

    def newest_state(self) -> State:
        """The newest state of the orders of all workers."""
        raise NotImplementedError

    def end_epoch(self) -> None:
        """Called once between two epochs."""

    def check_epoch(self, epoch: int) -> None:
        """Raises ValueError if the epoch in the orders' state, at the begin of one, is not it."""

    def check_step(self) -> None:
        """Raises ValueError if the next batch may not be asked for yet."""

    @property
    def epoch(self) -> int:
        """The epoch of the last batch; before the first batch, its epoch."""
        return self._batches.start.epoch

    @property
    def loads(self) -> int:
        """Batches returned since the beginning of the run."""
        return self._batches.loads

    @property
    def epoch_ended(self) -> bool:
        """Whether the last batch was the last of its epoch."""
        return self._batches.ended

    def wait(self) -> None:
        """Waits until `next` returns at once; raises what it would raise."""
        self.check_step()
        if self._num_epochs is not None and self.epoch + self.epoch_ended >= self._num_epochs:
            raise StopIteration
        if self._closed:
            raise LoadError(self.loads, "was not read, as the reader was closed: make another one.")
        if self.epoch_ended:
            self.end_epoch()
            self._batches, self._following = self._next_batches(), None
            self._due, self._units, self._next_units = True, None, None
        if self._due:
            self._load_epoch()
        self._look_ahead()
        self._batches.wait()

    def __next__(self) -> PyTree[jax.Array]:
        self.wait()
        position = self._batches.position()
        batch = self._batches.take()
        self._last = position
        return batch

    def ready(self) -> bool:
        """Whether the next batch is on the device, or its loading has not begun."""
        batches = self._following if self.epoch_ended else self._batches
        loader = batches and batches.loader()
        return loader is None or loader.ready()

    def close(self) -> None:
        """Ends the loading threads; there are no further batches."""
        self._closed = True
        for batches in (self._batches, self._following):
            if batches is not None:
                batches.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_batches(self) -> EpochBatches:
        """The batches of the epoch after the present one."""
        now = self._batches
        start = Position(self.epoch + 1, loads=now.loads + now.steps - now.step)
        return self._following or EpochBatches(self._load, self._sizes, start)

    def _load_epoch(self):
        now = self._batches
        if self._units is None:
            state = self.newest_state()
            self._units = self._order.units(state, now.start.unit), steps.Least(state.epoch)
        # Once two loads have started, wait for the order only while the device is busy.
        if now.step or now.opened < 2:
            units, epoch = self._units
            self.check_epoch(int(epoch))
            now.open(units, self._sizes.num_units)
            self._due, self._units = False, None

    def _look_ahead(self):
        """Copies the known part of the next order, and loads it a step later, without waiting."""
        now = self._batches
        if self._next_units is None:
            if now.step >= now.steps - 1 - self._ahead:
                self._next_units = self._order.next_units(self.newest_state())
        elif self._following is None and now.opened == now.steps:
            if self._num_epochs is None or self.epoch + 1 < self._num_epochs:
                units, final = self._next_units
                self._following = self._next_batches()
                # Of a computed order the number is that of all workers, and all are final.
                self._following.open(units, int(final) * self._sizes.least)
