"""An iterator over all epochs of blocks, which reads ahead and tells its position."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ordering.base import Ordering, State, scope_of
from ordering.blocks.position import checked, fixed
from ordering.blocks.split import Blocks
from ordering.blocks.windows import Windows, batches_of, num_batches, windows
from ordering.data.batches import Reader, Sizes, epoch_of
from ordering.data.loader import prefetch_to_device, spreading
from ordering.data.place import check_state
from syncopate import plans


class BlockEpochs(Reader):
    """What `read_blocks` returns: batches of all epochs, and where their windows end.

    Attributes:
      window_ended: whether the last batch was the last of its window.
      window_units: the number of blocks in the window of the last batch.
    """

    def __init__(self, fixed, load, sizes, live, first_epoch, **place: Any):
        super().__init__(load, sizes, **place)
        self._fixed, self._live, self._first_epoch = fixed, live, first_epoch
        self._followed = -1  # the last epoch whose end `after` has seen

    def live(self) -> State:
        return self._live()

    @property
    def step(self) -> int:
        """Position of the next batch; at an epoch's end the number of its steps."""
        return self._batches.step

    @property
    def load(self) -> int:
        """Number of the next batch over all epochs."""
        return self.epoch * self._batches.steps + self.step

    def after(self, order: Ordering, orders: State, *, axis_name: str | None = None) -> State:
        """The orders after a step: once at the end of an epoch those of the next, else the same."""
        if not self.epoch_ended or self._followed == self.epoch:
            return orders
        self._followed = self.epoch
        workers = None if orders.current.ndim == 1 else len(orders.current)
        scope = scope_of(workers, axis_name)
        with jax.transfer_guard("allow"):
            return jax.jit(scope.map(order.next_epoch))(orders)

    def check_order(self, *found: np.ndarray, epoch: int | None = None) -> None:
        epoch = self.epoch if epoch is None else epoch
        for orders_in in found:
            if (orders_in := np.unique(orders_in) - self._first_epoch).tolist() != [epoch]:
                raise ValueError(
                    f"epoch {epoch - 1} has been read, and the state has the order of epoch "
                    f"{', '.join(map(str, orders_in))}: call orders = reads.after(order, orders) "
                    "after every step, and next_epoch nowhere else."
                )

    @property
    def window_ended(self) -> bool:
        return self.epoch_ended or bool(self.step) and self.step % self._sizes.batches == 0

    @property
    def window_units(self) -> int:
        before = max(self.step - 1, 0) // self._sizes.batches * self._sizes.window
        return min(self._sizes.window, self._sizes.num_units - before)

    def position(self, orders: State | None = None) -> dict[str, Any]:
        """The position of the next batch, to be saved beside the parameters.

        Call it after `after`.

        Args:
          orders: the state of the order of all workers, if `live` gives those of this host.

        Returns:
          A dict of arrays: "orders", the newest state of the order; "epoch" and "step" of the next
          batch; "unit_size", "window", "batch_size", "seed", "filter", a digest of what `keep`
          keeps; and "files", the number of records and the digest of each.
        """
        epoch, step = divmod(self.load, self._batches.steps)
        orders = self._live() if orders is None else orders
        if self._num_epochs is None or epoch < self._num_epochs:
            with jax.transfer_guard("allow"):
                self.check_order(*epoch_of(orders), epoch=epoch)
        return self._fixed | {
            "orders": orders, "epoch": np.array(epoch), "step": np.array(step)
        }  # fmt: skip


def read_blocks(
    blocks: Blocks,
    live: Callable[[], State],
    *,
    window: int,
    batch_size: int,
    seed: int = 0,
    num_epochs: int | None = None,
    position: dict[str, Any] | None = None,
    readers: int | Callable[[Windows], Iterable] = 4,
    depth: int = 2,
    timeout: float | None = None,
    sharding: jax.sharding.Sharding | PyTree | None = None,
) -> BlockEpochs:
    """Batches of one epoch of blocks after the other, read ahead across the boundaries.

    A window is K blocks that follow each other in a worker's order. It is read by K requests while
    the window before it is used; its records are shuffled, and cut into T = ceil(K S / b) batches.
    Up to three windows are in memory. All batches follow from the orders, the seed and the
    position: not from the number of readers, nor from the hosts that share the workers.

    Args:
      blocks: of `split`.
      live: returns the newest state of the orders, which name blocks of all workers
        (`global_order`, `global_reshuffling`, any order of a single worker): of one worker, or of
        those of this host.
      window: K >= 1, blocks in a window; `units_per_step` of the order.
      batch_size: b >= 1, records of a worker in a batch.
      seed: >= 0, for the shuffles within windows.
      num_epochs: number of epochs; None for no end.
      position: where to go on, as `BlockEpochs.position` gave it; the beginning if None.
      readers: >= 1, threads that read blocks; or a function `windows -> iterable of windows`, which
        reads them by another loader, as Grain or PyTorch, in their sequence.
      depth, timeout, sharding: as in `ordering.data.prefetch_to_device`.

    Returns:
      An iterator of `(records, places)` on the device, leaves [W, b, ...], or [b, ...] of one
      worker. `places` holds for each record the place of its unit in the window, 0 .. K - 1. It is
      -1 for a record that only fills a batch, where a window has fewer than K S records: leave it
      out of the loss. After the step of a batch look at `window_ended`, where sums of the blocks'
      gradients are complete, and then call `orders = reads.after(order, orders)`. `position()` is
      what to save.

    Raises:
      ValueError: for sizes that do not fit; for a position of other files, which it names.
      LoadError: from `next`, if a block cannot be read.

    Examples:
      >>> import jax, numpy as np
      >>> from syncopate import ordering
      >>> blocks = ordering.blocks.split(np.arange(12), unit_size=3)
      >>> order = ordering.random_reshuffling(len(blocks))
      >>> state = order.init(jax.random.key(0), None)
      >>> reads = ordering.blocks.read_blocks(
      ...     blocks, lambda: state, window=2, batch_size=3, num_epochs=1
      ... )
      >>> sorted(int(i) for records, _ in reads for i in records) == list(range(12))
      True
    """
    if num_epochs is not None:
        plans.check_whole("num_epochs", num_epochs, 0)
    plans.check_function("live", live)
    state = live()
    check_state(state)
    with jax.transfer_guard("allow"):
        current = np.asarray(state.current)
    num_units = current.shape[-1]
    settings: dict[str, Any] = {"window": window, "batch_size": batch_size, "seed": seed}
    words = settings | {"num_units": num_units}
    whole = windows(blocks, current, epoch=0, **words)  # refuses wrong sizes
    window, batch_size = whole.window, whole.batch_size
    batches, last = (num_batches(blocks, n, batch_size) for n in (window, num_units % window))
    steps = num_units // window * batches + last
    own, epoch, step = fixed(blocks, **settings), 0, 0
    if position is not None:
        epoch, step = checked(position, own, blocks, steps, current)
    read = _reading(readers)

    def load(orders, first_step, epoch, number):
        found = read(windows(blocks, orders, epoch=epoch, **words))
        return prefetch_to_device(
            batches_of(found, first_step % batches), depth=depth, timeout=timeout,
            sharding=sharding, first_load=number,
        )  # fmt: skip

    first_epoch = min((int(np.min(x)) for x in epoch_of(state)), default=0) - epoch
    return BlockEpochs(
        own, load, Sizes(num_units, window, batches, last), live, first_epoch, epoch=epoch,
        unit=step // batches * window, skip=step % batches, loads=epoch * steps + step,
        num_epochs=num_epochs, ahead=batches,
    )  # fmt: skip


def _reading(readers: int | Callable) -> Callable[[Windows], Iterable]:
    """What reads the windows of an epoch; the next one is read while the last is used."""
    if callable(readers):
        return readers
    slots = threading.Semaphore(plans.check_whole("readers", readers, 1))  # of all epochs

    def read(epoch):
        with spreading(readers) as spread:

            def begin(number):
                put, jobs, finish = epoch.begin(number)

                def put_in_turn(job):
                    with slots:
                        put(job)

                return spread(put_in_turn, jobs), finish

            wait, finish = begin(0)
            for number in range(1, len(epoch) + 1):
                wait()
                found = finish()
                if number < len(epoch):
                    wait, finish = begin(number)
                yield found

    return read
