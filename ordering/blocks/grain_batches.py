"""The batches of an epoch of blocks as a Grain dataset. Grain is imported only when it is used."""

import functools
from typing import TYPE_CHECKING, Any

from ordering.blocks.windows import Windows, batches_of
from ordering.input.grain_epoch import imported
from ordering.input.steps import check_epoch
from syncopate import plans

if TYPE_CHECKING:
    import grain


def grain_dataset(
    epoch: Windows, *, options: "grain.MultiprocessingOptions | None" = None
) -> "grain.IterDataset":
    """The batches of one epoch as a Grain `IterDataset`, for loops that hold Grain's iterators.

    Processes read whole windows. The state of an iterator is the number of its next batch, and of
    which order: it is exact after each batch, and restores with any number of processes.

    Args:
      epoch: of `windows`.
      options: Grain's, for reading in processes; None to read in this one.

    Returns:
      A `grain.IterDataset` of `(records, places)`. Loops over all epochs, which read ahead across
      their ends, take `read_blocks` with a Grain loader as `readers`.

    Raises:
      ValueError: for no epoch of windows; from an iterator's `set_state`, for the state of
        another order.
      ImportError: if Grain is not installed.

    Examples:
      >>> import numpy as np, ordering
      >>> blocks = ordering.blocks.split(np.arange(4), unit_size=2)
      >>> epoch = ordering.blocks.windows(
      ...     blocks, [1, 0], window=2, batch_size=2, epoch=0, shuffle=False
      ... )
      >>> batches = iter(ordering.blocks.grain_dataset(epoch))
      >>> next(batches)[0].tolist(), batches.get_state()["batch"]
      ([2, 3], 1)

    References:
      Grain's checkpoints, https://google-grain.readthedocs.io/en/latest/
    """
    if not isinstance(epoch, Windows):
        raise ValueError(f"epoch is a {type(epoch).__name__}: pass what windows returned.")
    return _classes()(epoch, options)


@functools.cache
def _classes() -> type:
    grain = imported()

    class BlockIterator(grain.DatasetIterator):
        """Batches from a place on; another place opens other readers."""

        def __init__(self, epoch: Windows, options: Any):
            super().__init__()
            self._epoch, self._options = epoch, options
            self._open(0)

        def _open(self, batch: int) -> None:
            self._batch = batch
            window, skipped = divmod(batch, self._epoch.batches)
            read = grain.MapDataset.source(self._epoch)[window:].to_iter_dataset()
            if self._options is not None:
                read = read.mp_prefetch(self._options)
            self._batches = batches_of(read, first_batch=skipped)

        def __next__(self):
            batch = next(self._batches)
            self._batch += 1
            return batch

        def get_state(self) -> dict:
            return {"order": self._epoch.mark, "batch": self._batch}

        def set_state(self, state: dict) -> None:
            check_epoch(state, {"order": self._epoch.mark})
            self._open(plans.check_whole("the state's batch", state.get("batch"), 0))

    class BlockDataset(grain.IterDataset):
        def __init__(self, epoch: Windows, options: Any):
            super().__init__()
            self._of = epoch, options

        def __iter__(self):
            return BlockIterator(*self._of)

    return BlockDataset
