"""An iterator over all epochs of blocks, which keeps the state of the order."""

import dataclasses
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
from ordering.data.epochs import Epochs, first_state, on_devices
from ordering.data.place import ReadState, copied, digest_of, unwrap
from ordering.data.reading import sizes_of, total_of, units_of
from syncopate import plans
from syncopate.workers import AXIS, Workers


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
        workers: Workers,
        start: BlockState,
        num_epochs: int | None,
    ):
        place, batch = ReadState(*start[:4]), int(start.batch)
        super().__init__(load, sizes, order, workers, place, num_epochs, sizes.batches, batch)
        self._start, self._sums, self._summed = start, start.sums, int(start.summed)
        self._sums_rows = self._summed > 0  # whether `observe` is called
        self._places = None  # of the records of the last batch

    @property
    def window_ended(self) -> bool:
        return self._places is not None and not self._batches.position().batch

    @property
    def window_units(self) -> int:
        units = min(self._sizes.window, self._sizes.num_units - self._last.unit)
        return units // self._sizes.least

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
        self._sums, ended = _add(self._workers, self._sums, rows, self._places), self.window_ended
        self._summed, self.observed = self._summed + 1, True
        if ended:
            units = self.window_units
            of_window = lambda x: jax.lax.slice_in_dim(x, 0, units, axis=self.unit_axis)  # noqa: E731
            sums = jax.tree.map(of_window, self._sums)
            self.advance(self._programs.observe(self.order_state, sums))

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
        at = self._last if self._is_left() else self._batches.position()
        counts = at.epoch, at.unit, at.loads, digest_of(self._order, 1, at.unit), at.batch
        counts = dict(zip(BlockState._fields[1:6], map(np.asarray, counts), strict=True))
        order, sums = self._copy_of_order(), copied(self._sums)
        return self._start._replace(
            order=order, sums=sums, summed=np.asarray(self._summed), **counts
        )

    def units_of_batches(self) -> set[int]:
        raise ValueError(
            "minibatches cut batches of read_epochs, and read_blocks observes the blocks of whole "
            "batches: pass it a smaller batch_size, or read with read_epochs."
        )

    def _is_left(self):
        """Whether the last batch is still to be observed, so that it is read again."""
        waits = self.observes and not self.observed
        return waits and (self._sums_rows or self.window_ended)

    def check_step(self) -> None:
        if not self.observed and (self._summed or self.window_ended):
            super().check_step()

    def __next__(self) -> PyTree[jax.Array]:
        batch = super().__next__()
        self._places = batch[1]
        return batch


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _add(workers: Workers, sums: PyTree, rows: PyTree, places: jax.Array) -> PyTree:
    """`add_gradients` of all workers."""
    return workers.map(add_gradients)(sums, rows, places)


def read_blocks(
    blocks: Blocks,
    order: Ordering,
    key: Key[jax.Array, ""],
    *,
    batch_size: int,
    like: PyTree = None,
    workers: int | Mesh | None = None,
    axis_name: str = AXIS,
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
    order = _with_window(order, window)
    of_all, window = base.workers_of(workers, axis_name), order.units_per_step
    sizes = _sizes(blocks, order, of_all, batch_size)
    first = first_state(order, key, like, of_all)
    shape = (window,) if of_all.count is None else (of_all.count, window)
    zeros = lambda x: jnp.zeros((*shape, *x.shape), jnp.float32, device=of_all.sharding)  # noqa: E731
    sums = jax.tree.map(zeros, like)
    about = window, batch_size, seed, blocks.unit_size, blocks.filter_digest
    n, about = np.asarray(0), [np.asarray(x) for x in about]  # nothing has been read
    start = BlockState(first, n, n, n, digest_of(order, 1, 0), n, n, sums, *about, blocks.digests)
    state, around = unwrap(state)
    if state is not None:
        start = position.restore(state, start, blocks, order, sizes)
    read, here = reading_by(readers), of_all.of_process
    sharding = of_all.sharding if sharding is None else sharding

    def load(units, first_step, epoch, number):
        mine = units_of(units, here, sizes, order)
        axis = None if of_all.count is None else len(here)
        windows = Windows(blocks, mine, axis, (window, batch_size), (seed, epoch))
        given = batches_of(read(windows), first_step % sizes.batches)
        return on_devices(given, sharding, depth=depth, timeout=timeout, first_load=number)

    reads = BlockEpochs(load, sizes, order, of_all, start, num_epochs)
    reads.around = around
    return reads


def _with_window(order: Ordering, window: int | None) -> Ordering:
    """The order with steps of a window, whose state is the same."""
    if window is None:
        return order
    window = plans.check_whole("window", window, 1, order.num_units)
    is_fixed = order.observes or order.step_units is not None  # as of a mixture
    if window != order.units_per_step and is_fixed:
        raise ValueError(
            f"window is {window}, and the order has steps of {order.units_per_step} units: make it "
            f"with units_per_step={window}, or a mixture with such a batch_size."
        )
    return dataclasses.replace(order, units_per_step=window)


def _sizes(blocks: Blocks, order: Ordering, workers: Workers, batch_size: int) -> Sizes:
    """An epoch of all workers; raises ValueError unless they share all blocks."""
    sizes = sizes_of(order, workers)
    if sizes.num_units % sizes.least:
        raise ValueError(
            f"the order names {sizes.num_units} units, and {sizes.least} workers cannot share them:"
            f" make blocks by split(multiple_of={sizes.least}), and an order of as many units."
        )
    if (total := total_of(order, sizes)) != len(blocks):
        raise ValueError(
            f"the order names {total} units, and there are {len(blocks)} blocks: make an order of "
            "as many units, for W workers of len(blocks) / W each."
        )
    counts = sizes.window, sizes.num_units % sizes.window
    batches, last = (num_batches(blocks, n // sizes.least, batch_size) for n in counts)
    return sizes._replace(batches=batches, last=last)
