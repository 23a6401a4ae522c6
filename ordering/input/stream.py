"""One iterator over all epochs, which reads ahead across their boundaries and can be saved."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ordering import base
from ordering.base import State
from ordering.input.epochs import Read, prefetch_next_epoch, read_epoch
from ordering.input.loader import load_ahead
from ordering.input.steps import order_hash, step_source
from syncopate import plans


class Early(NamedTuple):
    """What is known of the next epoch: copies, for a step may donate the state itself."""

    left: object  # int32[...]
    next: object  # int32[.., M]


class Epochs(Iterator):
    """What `read_epochs` returns: an iterator with `epoch`, `step`, `epoch_ended` and a state.

    Fields:
      epoch, step: where the next batch is, or, at an epoch's end, M / B rounded up.
      epoch_ended: whether the batch just given is the last of its epoch: after its step, call the
        order's `next_epoch`.

    Example: see `read_epochs`.
    """

    def __init__(self, read: Read, live: Callable, units_per_step: int, num_epochs, ahead):
        self._read, self._live, self._size = read, live, units_per_step
        self._num_epochs, self._ahead = num_epochs, ahead
        self.epoch, self.step, self.epoch_ended = 0, 0, False
        self._forget()
        self._expected = None
        base.check_units_per_step(live().current.shape[-1], units_per_step)

    def __next__(self):
        if self._begun is not None:
            self._check_new(*self._begun)
            self._begun = None
        if self.epoch_ended:
            self._end_epoch()
        if self._num_epochs is not None and self.epoch >= self._num_epochs:
            raise StopIteration
        if self._batches is None:
            self._begin(self._live())
        self._look_ahead()
        batch = next(self._batches)
        self.step += 1
        self.epoch_ended = self.step == self._steps
        return batch

    def get_state(self) -> dict:
        """Where the next batch is, as JSON takes it; at an epoch's end after `next_epoch`."""
        state = self._live()
        epoch, step = self.epoch, self.step
        if self.epoch_ended:
            self._check_new(self.epoch, self._early, self._last, state.current)
            epoch, step = epoch + 1, 0
        return {"epoch": epoch, "step": step, "order": order_hash(np.asarray(state.current))}

    def set_state(self, state: dict) -> None:
        """Goes on from a state, with the orders' state saved at the same step in the loop."""
        self.epoch, self.step, self.epoch_ended = state["epoch"], state["step"], False
        self._forget()
        self._expected = state["order"]

    def _forget(self):
        self._batches = self._early = self._front = self._last = self._begun = None

    def _begin(self, state):
        orders = state.current
        self._steps = -(-orders.shape[-1] // self._size)
        if self.step or self._expected is not None:
            current = np.asarray(orders)
            if self._expected not in (None, order_hash(current)):
                raise ValueError(
                    f"the saved position is in the order {self._expected}, and the state's order "
                    f"is {order_hash(current)}: restore the orders' state of the same step first."
                )
            rest = current[..., self.step * self._size :]
            self._batches, self._expected = iter(self._read(rest, self.step)), None
        else:
            self._batches = read_epoch(self._read, state, self._front)
        orders = jnp.copy(orders)  # a step may donate the state
        orders.copy_to_host_async()
        if self._last is not None:  # compared at the next call, when the device has work
            self._begun = (self.epoch - 1, self._early, self._last, orders)
            if self._front is not None and self._front.num_steps < 2:  # read_epoch waits as well
                self._check_new(*self._begun)
        self._last, self._front, self._early = orders, None, None

    def _look_ahead(self):
        """Copies what is known at one step, and opens it at the next: the host does not wait."""
        is_last = self._num_epochs is not None and self.epoch + 1 >= self._num_epochs
        if self._early is not None and self._front is None and not is_last:
            self._front = prefetch_next_epoch(self._read, self._early, units_per_step=self._size)
        elif self._early is None and self.step >= self._steps - 1 - self._ahead:
            state = self._live()
            self._early = Early(jnp.copy(state.left), jnp.copy(state.next))
            for array in self._early:
                array.copy_to_host_async()

    def _end_epoch(self):
        self.epoch, self.step, self.epoch_ended, self._batches = self.epoch + 1, 0, False, None

    def _check_new(self, epoch, early, last, current):
        """Refuses the order that has just been read, which a forgotten `next_epoch` leaves."""
        current = np.asarray(current)
        known = 0 if early is None else int(np.min(early.left))
        if known:
            new = np.array_equal(np.asarray(early.next)[..., :known], current[..., :known])
        else:  # of less than eight units, an order may come again by chance
            new = current.shape[-1] < 8 or not np.array_equal(np.asarray(last), current)
        if not new:
            raise ValueError(
                f"epoch {epoch} has been read, and the state's order is not that of the next: call "
                "the order's next_epoch after the step for which epoch_ended is True."
            )


def read_epochs(
    source,
    live: Callable[[], State],
    *,
    units_per_step: int,
    unit_size: int = 1,
    total: int | None = None,
    num_epochs: int | None = None,
    ahead: int = 2,
    depth: int = 2,
    sharding=None,
) -> Epochs:
    """The batches of epoch after epoch, read ahead across their boundaries; its position is saved.

    `ahead` steps before an epoch's end, those steps of the next one that are already decided are
    asked for, and are loaded while this one ends. The rest follows when its order is known: no
    order is read before it is made.

    Args:
      source: as in `step_source`, read and copied to the device by a thread (`load_ahead`); or a
        function `(orders, first_step) -> batches` as in `prefetch_next_epoch`.
      live: gives the orders' newest state, of one worker or all, as the loop has it.
      units_per_step: B in [1, M], units per worker and step.
      unit_size, total: as in `step_indices`, for a source.
      num_epochs: after which the iterator ends; None for no end.
      ahead: >= 1 steps, of an epoch's last, before whose end the next one is looked at.
      depth, sharding: as in `load_ahead`, for a source.

    Returns:
      `Epochs`, an iterator: `epoch_ended` is True with an epoch's last batch, after whose step the
      loop calls `next_epoch`. `get_state()`, {"epoch", "step", "order"}, is saved beside the
      orders' state, and `set_state` goes on from there.

    Raises:
      ValueError: for a source or size that cannot be; from `next` and `get_state`, where
        `next_epoch` was not called; from `next`, where the restored order is another one.

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
    for name, value, least in (("ahead", ahead, 1), ("num_epochs", num_epochs, 0)):
        if value is not None and (not plans.is_whole(value) or value < least):
            raise ValueError(f"{name} is {value!r}: pass a whole number of at least {least}.")
    num_units = live().current.shape[-1]

    def read(orders, first_step):
        steps = step_source(
            source,
            orders,
            units_per_step=units_per_step,
            unit_size=unit_size,
            num_units=num_units,
            total=total,
        )
        return load_ahead(_each(steps), depth=depth, sharding=sharding, first_load=first_step)

    given = source if callable(source) else read
    return Epochs(given, live, units_per_step, num_epochs, ahead)


def _each(steps) -> Iterable:
    return (steps[t] for t in range(len(steps)))
