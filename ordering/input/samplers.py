"""Orders as objects of Grain's: a dataset of one epoch, and a sampler for its data loader."""

import os

import numpy as np

from ordering.input.pipeline import step_indices
from ordering.input.steps import order_hash, step_source
from syncopate import plans


def map_dataset(
    source,
    orders,
    *,
    units_per_step: int,
    unit_size: int = 1,
    num_units: int | None = None,
    total: int | None = None,
    batched: bool = True,
):
    """A Grain `MapDataset` of one epoch, in the sequence of its orders.

    Element t is the batch of step t. Grain's processes (`to_iter_dataset().mp_prefetch`) take turns
    in whole elements, so that any number of them reads the same batches, and `get_state` is right
    at every one. Maps of single examples belong to the source, which may be a `MapDataset` too.

    Args:
      source, orders, units_per_step, unit_size, num_units, total: as in `step_source`.
      batched: False for single examples, which `.batch(B S).batch(W)` makes steps (`.batch(B S)`
        for an order int[M]). Then B must divide the units of several workers.

    Returns:
      A `grain.MapDataset` whose `repeat` and `shuffle` are refused, as elements past its end are.

    Raises:
      ValueError: for a source, orders or sizes that do not fit.
      ImportError: if Grain is not installed.

    Example:
      >>> import numpy as np, ordering
      >>> dataset = ordering.input.map_dataset(np.arange(4) * 10, [2, 0, 3, 1], units_per_step=2)
      >>> [batch.tolist() for batch in dataset]
      [[20, 0], [30, 10]]

    References:
      Grain's datasets, https://google-grain.readthedocs.io/en/latest/
    """
    _grain()
    from ordering.input.grain_dataset import EpochDataset

    steps = step_source(
        source,
        orders,
        units_per_step=units_per_step,
        unit_size=unit_size,
        num_units=num_units,
        total=total,
    )
    left_over = steps.indices.size % steps.batch_size
    if not batched and (steps.workers or 1) > 1 and left_over:
        raise ValueError(
            f"batched=False with {left_over // steps.workers} examples of each worker in the last "
            f"step, and {units_per_step * unit_size} before: calls of batch would give one worker "
            "another one's examples. Pass batched=True, or units_per_step that divides the units."
        )
    return EpochDataset(steps, batched)


# So many elements of a process hold two neighbours, whichever of its threads asks first: k threads
# keep at most k - 1 waiting. Grain has 16 of them unless told otherwise.
ENOUGH = 32


class GrainSampler:
    """What `grain_sampler` returns: `sampler[i]` is a `grain.RecordMetadata`.

    Example: see `grain_sampler`.
    """

    def __init__(self, indices: np.ndarray, batch_size: int, worker_count: int, seed: int | None):
        grain = _grain()
        self._hash, self._workers, self._seed = order_hash(indices), worker_count, seed
        place = np.arange(indices.size)
        if worker_count > 1:
            # Process k reads elements k, k + n, ... and batches those: its batches are k, k + n, ..
            process, number = place % worker_count, place // worker_count
            batch, inside = number // batch_size, number % batch_size
            place = (batch * worker_count + process) * batch_size + inside
        self._places, self._keys = place, indices[place]
        self._shard_options = grain.sharding.NoSharding()  # where DataLoader is given none
        self._record, self._made_in, self._seen = grain.RecordMetadata, os.getpid(), []

    def __len__(self) -> int:
        return self._keys.size

    def __getitem__(self, index: int):
        if not 0 <= index < self._keys.size:
            raise IndexError(f"element {index} of an epoch of {self._keys.size} examples.")
        self._check_process(index)
        rng = None
        if self._seed is not None:
            key = (self._seed << 32) + int(self._places[index])
            rng = np.random.Generator(np.random.Philox(key=key))
        return self._record(index=index, record_key=int(self._keys[index]), rng=rng)

    def _check_process(self, index):
        """Elements of one process are n apart: others say that DataLoader has another n."""
        here = os.getpid() == self._made_in
        if (here and self._workers <= 1) or len(self._seen) == ENOUGH:
            return
        self._seen = [*self._seen, index]
        gaps = np.diff(np.unique(self._seen))
        nearest = gaps.min() if gaps.size else self._workers
        wrong = here or not self._workers or (gaps % self._workers).any()
        if wrong or (len(self._seen) == ENOUGH and nearest != self._workers):
            raise RuntimeError(
                f"this sampler was made for worker_count={self._workers}, and DataLoader reads it "
                f"{'in no process' if here else 'in another number of processes'}: examples would "
                "land in other batches. Pass the same worker_count to both; map_dataset and "
                "step_source read right with any."
            )

    def __repr__(self) -> str:
        """Names the order: Grain compares these where a state is restored."""
        return f"GrainSampler({len(self)} examples, {self._hash}, worker_count={self._workers})"


def grain_sampler(
    orders,
    *,
    units_per_step: int,
    unit_size: int = 1,
    total: int | None = None,
    worker_count: int = 0,
    batch_size: int | None = None,
    seed: int | None = None,
) -> GrainSampler:
    """A sampler of one epoch for `grain.DataLoader`, in the sequence of its orders.

    DataLoader deals examples to its processes in turn, and every process makes batches of its own:
    under another sampler, two processes read other batches than one. With the number of processes
    n this one says example (j n + k) B + r where process k asks for example r of its batch j.

    Args:
      orders, units_per_step, unit_size, total: as in `ordering.input.step_indices`, the orders of
        one epoch.
      worker_count: n >= 0, the same as DataLoader's; above 1 it must divide the steps, all whole.
      batch_size: examples that one process batches, W B S if None: a whole step. 1 where the
        operations batch nothing.
      seed: of the generators for Grain's random maps, by the place in the sequence; another one
        in every epoch. None for none.

    Returns:
      A `GrainSampler`, with `len`. DataLoader's operations are maps of examples, then
      `grain.transforms.Batch(batch_size)`, whose leaves [W B S, ...] hold worker after worker.
      Leave its shard_options out: a host has the orders of its own workers.

    Raises:
      ValueError: for orders or sizes that do not fit.
      RuntimeError: from DataLoader, where it reads in another number of processes; of a multiple of
        n that shows in a process's 32nd example, so not in shorter epochs.
      ImportError: if Grain is not installed.

    Example:
      >>> import grain, ordering
      >>> sampler = ordering.input.grain_sampler([2, 0, 3, 1], units_per_step=2)
      >>> batch = [grain.transforms.Batch(2)]
      >>> loader = grain.DataLoader(data_source=range(4), sampler=sampler, operations=batch)
      >>> [batch.tolist() for batch in loader]
      [[2, 0], [3, 1]]

    References:
      Grain's data loader, https://google-grain.readthedocs.io/en/latest/
    """
    indices, step_size = step_indices(
        orders, units_per_step=units_per_step, unit_size=unit_size, total=total
    )
    if not plans.is_whole(worker_count) or worker_count < 0:
        raise ValueError(f"worker_count is {worker_count!r}: pass that of grain.DataLoader, >= 0.")
    if seed is not None and (not plans.is_whole(seed) or not 0 <= seed < 2**32):
        raise ValueError(f"seed is {seed!r}: pass a whole number in [0, 2 ** 32), or None.")
    batch_size = step_size if batch_size is None else batch_size
    if not plans.is_whole(batch_size) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}: pass the examples of a batch, >= 1.")
    if worker_count > 1 and batch_size > 1 and indices.size % (worker_count * batch_size):
        raise ValueError(
            f"worker_count is {worker_count}, with {indices.size} examples in batches of "
            f"{batch_size}: grain.DataLoader deals examples to processes, so that the last batches "
            "would be others. Pass a worker_count that divides the whole steps, 0 or 1; or use "
            "ordering.input.map_dataset, which takes any."
        )
    return GrainSampler(indices, batch_size, worker_count, seed)


def _grain():
    try:
        import grain
    except ImportError as error:
        raise ImportError("Grain cannot be imported: pip install grain.") from error
    return grain
