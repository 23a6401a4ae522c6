"""The steps of an epoch: which examples an order names, and a source of whole steps by number."""

import zlib

import jax
import numpy as np

from ordering import base
from ordering.input.sources import reader
from syncopate import plans


def step_indices(
    orders,
    *,
    units_per_step: int,
    unit_size: int = 1,
    num_units: int | None = None,
    total: int | None = None,
) -> tuple[np.ndarray, int]:
    """The examples that orders name: by step, then worker, then unit, then example of the unit.

    Worker w owns the units w M .. w M + M - 1 of the source; unit u is the examples
    u S .. u S + S - 1. The last step of an epoch has the M mod B units left over.

    Args:
      orders: int[M] or int[W, M], one permutation of 0 .. M - 1 per worker; or, with
        `num_units`, a slice [.., m] of such orders that starts at a step.
      units_per_step: B in [1, M], units per worker and step.
      unit_size: S >= 1, neighbouring examples in one unit.
      num_units: M, where `orders` is a slice.
      total: where units of the whole source are dealt to the workers (`ordering.dealt`), how many
        these are; orders then name units in [0, total), and none twice among these workers.

    Returns:
      `(indices, batch_size)`: int64[W m S], and W B S, the examples of a whole step: `batches`
      of that size are the steps.

    Raises:
      ValueError: if a worker's units are out of range or named twice, or a size does not fit.

    Example:
      >>> import ordering
      >>> indices, batch_size = ordering.input.step_indices(
      ...     [[2, 0, 1], [1, 0, 2]], units_per_step=2
      ... )
      >>> indices.tolist(), batch_size
      ([2, 0, 4, 3, 1, 5], 4)
    """
    orders = np.atleast_2d(whole_numbers("orders", orders, ndims=(1, 2)))
    workers, length = orders.shape
    num_units = length if num_units is None else num_units
    base.check_units_per_step(num_units, units_per_step)
    if not plans.is_whole(unit_size) or unit_size < 1:
        raise ValueError(f"unit_size is {unit_size!r}: pass a whole number of at least 1.")
    ranked = np.sort(orders if total is None else orders.reshape(1, -1), axis=1)
    most = num_units if total is None else total
    if not ((ranked >= 0) & (ranked < most)).all() or (np.diff(ranked, axis=1) == 0).any():
        whose = "each worker's order of its own units; for a slice of an order also num_units"
        raise ValueError(
            f"orders of shape {orders.shape} do not name each unit of 0 .. {most - 1} at most "
            f"once. Pass {whose if total is None else 'the orders of one epoch, and their total'}."
        )
    units = orders if total is not None else orders + num_units * np.arange(workers)[:, None]
    whole = length - length % units_per_step
    steps = units[:, :whole].reshape(workers, -1, units_per_step).swapaxes(0, 1)
    units = np.concatenate([steps.reshape(-1), units[:, whole:].reshape(-1)])
    indices = units[:, None] * unit_size + np.arange(unit_size)
    return indices.reshape(-1), workers * units_per_step * unit_size


def whole_numbers(name, value, ndims):
    value = np.asarray(value)
    if value.ndim not in ndims or (value.size and not np.issubdtype(value.dtype, np.integer)):
        raise ValueError(
            f"{name} is {value.dtype}{list(value.shape)}: pass whole numbers with "
            f"{' or '.join(map(str, ndims))} axes."
        )
    return value.astype(np.int64)


class Steps:
    """The steps of an epoch by number: element t is the batch of step t, for loaders of any kind.

    Leaves are [W, B S, ...] for orders int[W, M], and [B S, ...] for an order int[M]. It can be
    pickled where its source can, so that processes of a loader read it.

    Args:
      source: as `reader` takes it; arrays on a device are copied to the host, for a process that
        reads must not ask JAX for a device.
      orders and sizes: as of `step_indices`.
    """

    def __init__(self, source, orders, **sizes):
        self.indices, self.batch_size = step_indices(orders, **sizes)
        self.workers = np.shape(orders)[0] if np.ndim(orders) == 2 else None
        if isinstance(source, np.ndarray | jax.Array | dict | tuple):
            reader(source)  # what is no source is refused before it is copied
            source = jax.tree.map(np.asarray, source)
        self.source = source
        num_examples, self._read = reader(source)
        if self.indices.size and self.indices.max() >= num_examples:
            raise ValueError(
                f"the order names example {self.indices.max()}, and the source has {num_examples}: "
                "all workers' examples lie in one source, worker w's from w M unit_size on. Pass a "
                "source of them all, or another unit_size."
            )

    def __len__(self) -> int:
        return -(-self.indices.size // self.batch_size)

    def __getitem__(self, step: int):
        step = int(step)
        if not 0 <= step < len(self):
            raise IndexError(
                f"step {step} of an epoch of {len(self)} steps: the next epoch has another order. "
                "Call next_epoch, and read what it gives."
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
        return f"Steps({len(self)} steps, {order_hash(self.indices)})"


def order_hash(indices: np.ndarray) -> str:
    """Eight letters that tell orders apart, in states and messages."""
    return f"{zlib.crc32(np.ascontiguousarray(indices, np.int64).tobytes()):08x}"
