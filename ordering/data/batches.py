"""The batches of all epochs, loaded ahead as far as the orders are known."""

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ordering.base import State
from ordering.data.loader import LoadError, Prefetch
from ordering.indices import Indices
from syncopate.unstable import multihost_utils

# (orders from a step on, that step, the epoch, the number of the first batch) -> its loader
Load = Callable[[np.ndarray, int, int, int], Prefetch]


class Sizes(NamedTuple):
    """An epoch of one worker: its units, how many are read at once, and the batches they make."""

    num_units: int
    window: int
    batches: int = 1
    last: int = 1  # batches of the last window, if it has fewer units
    least: int = 1  # units that a last window needs; fewer are left out

    def steps(self, units: int) -> int:
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
      epoch, loads: as of the next batch's `Position`.
      step, steps: number of the next batch in its epoch, and the number of all.
      opened: batches before this one have a loader.
    """

    def __init__(self, load: Load, sizes: Sizes, start: Position):
        self._load, self._sizes, self.epoch, self.loads = load, sizes, start.epoch, start.loads
        self._unit, self._first = start.unit, -(-start.unit // sizes.window) * sizes.batches
        self.step = self.opened = self._first + start.batch
        self.steps = self._first + sizes.steps(sizes.num_units - start.unit)
        self._loaders: collections.deque[tuple[int, Prefetch]] = collections.deque()  # by ends

    @property
    def position(self) -> Position:
        """Where the next batch is; at the end of the epoch no window has begun."""
        batch = 0 if self.ended else self.step % self._sizes.batches
        return Position(self.epoch, self._unit_of(self.step), batch, self.loads)

    def place_after(self) -> Position:
        """Where the batch after the next one is."""
        step, ended = self.step + 1, self.step + 1 == self.steps
        batch = 0 if ended else step % self._sizes.batches
        return Position(self.epoch, self._unit_of(step), batch, self.loads + 1)

    @property
    def ended(self) -> bool:
        return self.step == self.steps

    def _unit_of(self, step: int) -> int:
        windows = (step - self._first) // self._sizes.batches
        whole = self._unit + windows * self._sizes.window
        return self._sizes.num_units if step == self.steps else whole

    def open(self, orders: np.ndarray, num_final: int) -> None:
        """Starts loading the first `num_final` units of each order, as far as not yet started."""
        windows = (num_final - self._unit) // self._sizes.window
        whole = num_final >= self._sizes.num_units
        stop = self.steps if whole else self._first + windows * self._sizes.batches
        if stop > self.opened:
            part = slice(self._unit_of(self.opened), self._unit_of(stop))
            part = orders[part] if orders.ndim == 1 else orders[:, part]
            number = self.loads + self.opened - self.step
            self._loaders.append((stop, self._load(part, self.opened, self.epoch, number)))
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
        load: Load,
        sizes: Sizes,
        start: Position,
        *,
        num_epochs: int | None = None,
        ahead: int = 2,
    ):
        self._load, self._sizes, self._num_epochs, self._ahead = load, sizes, num_epochs, ahead
        self._batches = EpochBatches(load, sizes, start)
        self._last = start  # the position of the last batch
        self._following: EpochBatches | None = None
        self._order: Any = None  # a copy of this epoch's order on its way to the host
        self._early: Any = None  # a copy of the known part of the next order, likewise
        self._due = True  # the order is still to be loaded

    def newest_state(self) -> State:
        """The newest state of the orders of all workers."""
        raise NotImplementedError

    def end_epoch(self) -> None:
        """Called once between two epochs."""

    def current_order(self, state: State) -> list:
        """The order of this epoch, on its way to the host."""
        return _copies(state.current)

    def next_order(self, state: State) -> list:
        """The order of the next epoch and how many of its units are known, likewise."""
        return _copies(state.next, state.left)

    def check_step(self) -> None:
        """Raises ValueError if the next batch may not be asked for yet."""

    @property
    def epoch(self) -> int:
        """The epoch of the last batch; before the first batch, its epoch."""
        return self._batches.epoch

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
        with jax.transfer_guard("allow"):
            if self.epoch_ended:
                self.end_epoch()
                self._batches, self._following = self._next_batches(), None
                self._due, self._order, self._early = True, None, None
            self._begin_step()
        self._batches.wait()

    def __next__(self) -> PyTree[jax.Array]:
        self.wait()
        position = self._batches.position
        batch = self._batches.take()
        self._last = position
        return batch

    def ready(self) -> bool:
        """Whether the next batch is on the device, or its loading has not begun."""
        batches = self._following if self.epoch_ended else self._batches
        loader = batches and batches.loader()
        return loader is None or loader.ready()

    def close(self) -> None:
        """Ends the loading threads."""
        for batches in (self._batches, self._following):
            if batches is not None:
                batches.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_batches(self) -> EpochBatches:
        """The batches of the epoch after the present one."""
        now = self._batches
        start = Position(now.epoch + 1, loads=now.loads + now.steps - now.step)
        return self._following or EpochBatches(self._load, self._sizes, start)

    def _begin_step(self):
        if self._due and self._order is None:
            state = self.newest_state()
            self._order = [*self.current_order(state), *_copies(*epoch_of(state))]
        # Once two loads have started, wait for the order only while the device is busy.
        if self._due and (self._batches.step or self._batches.opened < 2):
            order, *epochs = map(on_host, self._order)
            self.check_order(*epochs)
            self._batches.open(order, self._sizes.num_units)
            self._due = False
        self._look_ahead()

    def check_order(self, *epochs_of_workers: np.ndarray) -> None:
        """Raises ValueError if the epoch in the orders' states is not this one."""

    def _look_ahead(self):
        """Copies the known part of the next order, and loads it a step later, without waiting."""
        now, units = self._batches, self._sizes.num_units
        if self._early is None:
            if now.step >= now.steps - 1 - self._ahead:
                self._early = self.next_order(self.newest_state())
        elif self._following is None and now.opened == now.steps:
            if self._num_epochs is None or now.epoch + 1 < self._num_epochs:
                orders, left = map(on_host, self._early)
                self._following = self._next_batches()
                self._following.open(orders, min(int(np.min(left)), units))


def _copies(*arrays):
    """Copies on their way to the host, as a step may donate the state itself."""
    copies = [jnp.copy(of_process(array)) for array in arrays]
    for copy in copies:
        copy.copy_to_host_async()
    return copies


def on_host(x: Any) -> Any:
    """An array in the host's memory; computed indices stay as they are."""
    return x if isinstance(x, Indices) else np.asarray(x)


def of_process(x: Any) -> Any:
    """The rows [w, ...] of this process's own workers, without a copy."""
    if getattr(x, "is_fully_addressable", True):
        return x
    return multihost_utils.global_array_to_host_local_array(x, x.sharding.mesh, x.sharding.spec)


def epoch_of(state: State) -> list[np.ndarray]:
    """The epoch that the orders are in; empty for a custom order that does not count epochs."""
    return [state.epoch] if hasattr(state, "epoch") else []
