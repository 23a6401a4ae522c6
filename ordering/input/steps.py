"""The steps of an epoch by number: element t is the batch of step t, for loaders of any kind."""

import zlib

import jax
import numpy as np

from ordering.input.pipeline import step_indices
from ordering.input.sources import reader


class StepSource:
    """What `step_source` returns: `len(steps)` and `steps[t]`, the batch of step t.

    It can be pickled where its source can, so that processes of a loader read it.

    Example:
      >>> import numpy as np, ordering
      >>> steps = ordering.input.step_source(np.arange(3), [2, 0, 1], units_per_step=1)
      >>> steps[len(steps) - 1].tolist()
      [1]
    """

    def __init__(self, source, indices: np.ndarray, batch_size: int, workers: int | None):
        self.source, self.indices, self.batch_size = _of_host(source), indices, batch_size
        self.workers = workers
        num_examples, self._read = reader(self.source)
        if indices.size and indices.max() >= num_examples:
            raise ValueError(
                f"the order names example {indices.max()}, and the source has {num_examples}: all "
                "workers' examples lie in one source, worker w's from w M unit_size on. Pass a "
                "source of them all, or another unit_size."
            )

    def __len__(self) -> int:
        return -(-self.indices.size // self.batch_size)

    def __getitem__(self, step: int):
        step = int(step)
        if not 0 <= step < len(self):
            raise IndexError(
                f"step {step} of an epoch of {len(self)} steps: the next epoch has another order. "
                "Make it, by next_epoch, and a step_source of it."
            )
        batch = self._read(self.indices[step * self.batch_size :][: self.batch_size])
        if self.workers is None:
            return batch
        return jax.tree.map(lambda x: x.reshape(self.workers, -1, *x.shape[1:]), batch)

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_read"}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._read = reader(self.source)[1]

    def __repr__(self) -> str:
        """Names the order: Grain compares these where a state is restored."""
        return f"StepSource({len(self)} steps, {order_hash(self.indices)})"


def step_source(
    source,
    orders,
    *,
    units_per_step: int,
    unit_size: int = 1,
    num_units: int | None = None,
    total: int | None = None,
) -> StepSource:
    """The steps of an epoch, in a random-access source whose element t is the batch of step t.

    A loader that gives whole elements to its processes reads the right batches with any number of
    them: `grain.DataLoader(data_source=steps, sampler=grain.samplers.SequentialSampler(len(steps)),
    worker_count=4)`, or `torch.utils.data.DataLoader(steps, batch_size=None, num_workers=4)`.

    Args:
      source: as `ordering.input.batches` takes it, a Grain `MapDataset` with maps of its own
        included; arrays on a device are copied to the host.
      orders, units_per_step, unit_size, num_units, total: as in `ordering.input.step_indices`, the
        orders of one epoch, or a slice of them.

    Returns:
      `StepSource`: leaves [W, B S, ...] for orders int[W, M], and [B S, ...] for an order int[M];
      in the last step M mod B units where B does not divide M.

    Raises:
      ValueError: for a source, orders or sizes that do not fit.
      IndexError: from `steps[t]` behind the epoch's end.

    Example:
      >>> import numpy as np, ordering
      >>> orders = [[2, 0, 1], [1, 0, 2]]  # of two workers
      >>> steps = ordering.input.step_source(np.arange(6) * 10, orders, units_per_step=2)
      >>> [steps[t].tolist() for t in range(len(steps))]
      [[[20, 0], [40, 30]], [[10], [50]]]
    """
    indices, batch_size = step_indices(
        orders, units_per_step=units_per_step, unit_size=unit_size, num_units=num_units, total=total
    )
    shape = np.shape(orders)
    return StepSource(source, indices, batch_size, shape[0] if len(shape) == 2 else None)


def order_hash(indices: np.ndarray) -> str:
    """Eight letters that tell orders apart, in states and messages."""
    return f"{zlib.crc32(np.ascontiguousarray(indices, np.int64).tobytes()):08x}"


def _of_host(source):
    """A source whose arrays are NumPy's: a process that reads must not ask JAX for a device."""
    if isinstance(source, np.ndarray | jax.Array | dict | tuple):
        reader(source)  # what is no source is refused before it is copied
        return jax.tree.map(np.asarray, source)
    return source
