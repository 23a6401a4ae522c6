"""An iterator over all epochs of blocks, which keeps the state of the order."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Key, PyTree

from ordering import base
from ordering.base import Ordering, State
from ordering.blocks import position
from ordering.blocks.position import BlockState
from ordering.blocks.sums import add_gradients
from ordering.blocks.units import Blocks
from ordering.blocks.windows import Windows, batches_of, num_batches, reading_by
from ordering.data.batches import Sizes
from ordering.data.epochs import Epochs, copied, num_units_of, on_devices
from ordering.data.place import ReadState, check_place, restored, unwrap
from ordering.data.reading import check_orders, first_units, total_of
from ordering.resizing import redistributed
from syncopate import plans


class BlockEpochs(Epochs):
    """Batches of all epochs of blocks; see `read_blocks`. Like `Epochs`, with windows.

    Attributes:
      window_ended: whether the last batch was the last of its window.
      window_units: the number of blocks in the window of the last batch.
    """

    def __init__(
        self,
        load: Any,
        sizes: Sizes,
        order: Ordering,
        scope: base.Scope,
        start: BlockState,
        num_epochs: int | None,
    ):
        place = ReadState(*start[:4])
        super().__init__(
            load, sizes, order, scope, place, num_epochs, sizes.batches, int(start.batch)
        )
        self._start, self._sums, self._summed = start, start.sums, int(start.summed)
        self._sums_rows = self._summed > 0  # whether `observe` is called
        self._add = _adding(scope)
        self._places = None  # of the records of the last batch

    @property
    def window_ended(self) -> bool:
        return self._places is not None and not self._batches.position.batch

    @property
    def window_units(self) -> int:
        return min(self._sizes.window, self._sizes.num_units - self._last.unit)

    def observe(self, rows: PyTree) -> None:
        """Adds the gradients of the last batch's records to those of their blocks.

        At the end of a window, the order observes its blocks.

        Args:
          rows: the rows from `per_example_grads` or `sketched_grads`, leaves [b, ...]; for several
            workers [W, b, ...].

        Raises:
          ValueError: unless every batch of the window so far has been observed exactly once.
        """
        if not self.observes:
            return
        if self.observed or self._summed != self._last.batch:
            raise ValueError(
                f"observe was called {self._summed} times in this window, and "
                f"{self._last.batch + 1} of its batches were read: call it once after each step."
            )
        self._sums_rows = True
        with jax.transfer_guard("allow"):
            self._sums, ended = self._add(self._sums, rows, self._places), self.window_ended
            self._summed, self.observed = self._summed + 1, True
            if ended:
                axis, count = self.order_state.current.ndim - 1, self.window_units
                of_window = lambda x: jax.lax.slice_in_dim(x, 0, count, axis=axis)  # noqa: E731
                sums = jax.tree.map(of_window, self._sums)
                self.advance(self._order_of_all.observe(self.order_state, sums))

    def advance(self, order_state: State) -> None:
        """Adopts the state from a step that added the gradients itself (`add_gradients`).

        Call it if `window_ended`.

        Args:
          order_state: the result of `order.observe` for `order_state` and the window's sums.

        Raises:
          ValueError: for a state of another order, or inside a window.
        """
        if not self.window_ended:
            raise ValueError("advance was called inside a window: call it where window_ended.")
        super().advance(order_state)
        self._summed, self._sums = 0, jax.tree.map(jnp.zeros_like, self._sums)

    def state(self) -> BlockState:
        """The state to resume from: `read_blocks(..., state=)` of the same order continues there.

        A batch that has not been observed yet is read again. If the step adds the gradients itself,
        save its sums, too, or save when `window_ended`.

        Returns:
          A tree of new arrays: the order's state, the position, the sums of the window's blocks,
          the sizes, and digests of files and filters.
        """
        at = self._last if self._is_left() else self._batches.position
        order, sums = copied((self.order_state, self._sums))
        counts = at.epoch, at.unit * self._workers, at.loads, at.batch, self._summed
        counts = dict(zip(BlockState._fields[1:6], map(np.asarray, counts), strict=True))
        return self._start._replace(order=order, sums=sums, **counts)

    def units_of_batches(self) -> set[int]:
        raise ValueError(
            "minibatches cut batches of read_epochs, and read_blocks observes the blocks of whole "
            "batches: pass it a smaller batch_size, or read with read_epochs."
        )

    def _is_left(self):
        """Whether the last batch is still to be observed, so that it is read again."""
        waits = self.observes and not self.observed
        return waits and (self._sums_rows or self.window_ended)

    def computed_order(self, state: State, unit: int) -> np.ndarray:
        """The order of each worker, whose windows share the units of all from this unit on."""
        units, workers = np.asarray(super().computed_order(state, unit)), self._workers
        begun, rest = np.split(units, [unit * workers])
        windows = redistributed(rest[None], workers, workers * self._sizes.window)
        rows = np.concatenate([begun.reshape(workers, -1), windows], axis=1)
        rows = rows[self._scope.of_process]
        return rows[0] if self._scope.workers is None else rows

    def check_step(self) -> None:
        if not self.observed and (self._summed or self.window_ended):
            super().check_step()

    def __next__(self) -> PyTree[jax.Array]:
        batch = super().__next__()
        self._places = batch[1]
        return batch


@functools.lru_cache(64)
def _adding(scope: base.Scope) -> Callable:
    """`add_gradients` of all workers, compiled."""
    return jax.jit(scope.map(add_gradients), donate_argnums=0)


def read_blocks(
    blocks: Blocks,
    order: Ordering,
    key: Key[jax.Array, ""],
    *,
    batch_size: int,
    like: PyTree = None,
    workers: int | Mesh | None = None,
    axis_name: str | None = None,
    window: int | None = None,
    seed: int = 0,
    num_epochs: int | None = None,
    state: BlockState | PyTree | None = None,
    readers: int | Callable[[Windows], Iterable] = 4,
    depth: int = 2,
    timeout: float | None = None,
    sharding: jax.sharding.Sharding | PyTree | None = None,
) -> BlockEpochs:
    """Reads batches of blocks, epoch after epoch, in an order that the iterator keeps.

    A window is K blocks that follow each other in a worker's order. It is read by K requests while
    the window before it is used. Its records are shuffled and cut into T = ceil(K S / b) batches.
    Up to three windows are in memory. All batches depend only on the orders, the seed and the
    position, not on the number of readers or the processes that share the workers.

    Call `reads.observe(rows)` after every step, with the gradients of its records. At the end of a
    window, the order observes the sums of its blocks. An order that uses no gradients needs no
    call.

    Args:
      blocks: the result of `split`.
      order: an order with one unit per block, over the blocks of all workers (`global_order`,
        `global_reshuffling`) or over a worker's own.
      key: one key, for the first order.
      batch_size: b >= 1, records per worker and step.
      like, workers, axis_name: as in `init_workers`.
      window: K >= 1, blocks in a window; None for the order's `units_per_step`. If the order
        observes gradients, both must be equal.
      seed: in 0 .. 2^31 - 1, for the shuffles in windows.
      num_epochs: >= 0, epochs of the whole run; None for no end.
      state: where to continue: the result of `BlockEpochs.state`, or the dicts and lists that a
        checkpoint makes of it. If a window had ended, batch_size may differ.
      readers: how many threads read blocks; or a function `windows -> iterable` that reads a
        sequence of windows with another loader.
      depth, timeout: as in `prefetch_to_device`.
      sharding: as in `prefetch_to_device`. None for the default device, or with a mesh for the
        devices of its workers.

    Returns:
      A `BlockEpochs` iterator of `(records, places)` on the device, with leaves [W, b, ...], or
      [b, ...] for one worker. `places` holds for each record the place of its unit in the window,
      0 .. K - 1. If a window has fewer than K S records, the records that fill up a batch have
      place -1: leave them out of the loss. Save `state()`.

    Raises:
      ValueError: for sizes that do not fit, or a state of other files, which it names; from
        `next`, if the last batch was not observed.
      LoadError: from `next`, if a block cannot be read.

    Examples:
      >>> import jax, numpy as np
      >>> from syncopate import ordering
      >>> blocks = ordering.blocks.split(np.arange(12), unit_size=3)
      >>> order = ordering.random_reshuffling(len(blocks), units_per_step=2)
      >>> reads = ordering.blocks.read_blocks(
      ...     blocks, order, jax.random.key(0), batch_size=3, num_epochs=1
      ... )
      >>> sorted(int(i) for records, _ in reads for i in records) == list(range(12))
      True
    """
    if not isinstance(blocks, Blocks):
        raise ValueError(f"blocks is a {type(blocks).__name__}: pass what split returns.")
    if num_epochs is not None:
        plans.check_whole("num_epochs", num_epochs, 0)
    batch_size = plans.check_whole("batch_size", batch_size, 1)
    seed = plans.check_whole("seed", seed, 0, 2**31 - 1)  # fits an int32 of JAX
    base.check_order(order)
    scope = base.scope_of(workers, axis_name)
    first = base.init_workers(order, key, like, workers, axis_name=axis_name)
    num_units = _units_per_worker(order, first, scope)
    _check_units(blocks, order, scope, num_units)
    window = _window_of(order, first, window, num_units)
    batches, last = (num_batches(blocks, n, batch_size) for n in (window, num_units % window))
    with jax.transfer_guard("allow"):
        shape = (window,) if scope.workers is None else (scope.workers, window)
        sums = jax.tree.map(lambda x: jnp.zeros((*shape, *jnp.shape(x)), jnp.float32), like)
        n = np.asarray(0)  # nothing has been read
        about = window, batch_size, seed, blocks.unit_size, blocks.filter_digest
        about = [np.asarray(x) for x in about]
        start = BlockState(first, n, n, n, n, n, sums, *about, blocks.digests)
        state, around = unwrap(state)
        if state is not None:
            saved = restored(start, position.check(state, start, blocks))
            check_place(saved, num_units, scope.workers or 1, window, aligned=True)
            start = start._replace(**dict(zip(BlockState._fields[:7], saved, strict=False)))
    read, first_unit = reading_by(readers), first_units(order, scope, num_units)
    sharding = scope.sharding if sharding is None else sharding

    def load(orders, first_step, epoch, number):
        check_orders(orders, order, num_units, len(blocks))
        units, axes = np.atleast_2d(orders) + first_unit, (*orders.shape[:-1], batch_size)
        windows = Windows(blocks, units, (window, batch_size), (seed, epoch), axes)
        given = batches_of(read(windows), first_step % batches)
        return on_devices(given, sharding, depth=depth, timeout=timeout, first_load=number)

    sizes = Sizes(num_units, window, batches, last)
    reads = BlockEpochs(load, sizes, order, scope, start, num_epochs)
    reads.around = around
    return reads


def _units_per_worker(order, first, scope):
    workers, total = scope.workers or 1, num_units_of(order, first)
    if order.indices is None:
        return total
    if total % workers:
        raise ValueError(
            f"the order names {total} units, and {workers} workers cannot share them: make blocks "
            f"by split(multiple_of={workers}), and an order of as many units."
        )
    return total // workers


def _check_units(blocks, order, scope, num_units):
    total = total_of(order, scope, num_units)
    if total != len(blocks):
        raise ValueError(
            f"the order names {total} units, and there are {len(blocks)} blocks: make an order of "
            "as many units; for W workers, len(blocks) / W units each (split(multiple_of=W))."
        )


def _window_of(order, first, window, num_units):
    if window is None:
        return plans.check_whole("the order's units_per_step", order.units_per_step, 1, num_units)
    window = plans.check_whole("window", window, 1, num_units)
    if window != order.units_per_step and hasattr(first, "position"):
        raise ValueError(
            f"window is {window}, and the order observes {order.units_per_step} units at once: "
            f"make it with units_per_step={window}."
        )
    return window
