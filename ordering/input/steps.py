"""The examples that an order names in a source, and the steps of an epoch."""

import zlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from ordering import base
from ordering.input.sources import reader, whole_numbers
from syncopate import plans


def step_indices(
    orders: Int[ArrayLike, "*W M"] | Sequence,
    *,
    units_per_step: int,
    unit_size: int = 1,
    num_units: int | None = None,
    total: int | None = None,
) -> tuple[Int[np.ndarray, "n"], int]:
    """Indices of the examples that orders name, by step, worker, unit and example of the unit.

    Worker w owns the units w M to w M + M - 1 of the source, and unit u has the examples u S to
    u S + S - 1. If B does not divide M, the last step has the M mod B units that are left.

    Args:
      orders: int[M] or int[W, M], a permutation of 0 .. M - 1 for every worker; with `num_units`,
        a slice [.., m] of such orders that starts at a step.
      units_per_step: B in [1, M], units per worker and step.
      unit_size: S >= 1, consecutive examples per unit.
      num_units: M, if `orders` is a slice.
      total: number of units in the source, if they are dealt to the workers (`ordering.dealt`);
        orders then name units in [0, total), each at most once.

    Returns:
      `(indices, batch_size)`: int64[W m S], and W B S, the number of examples in a whole step.
      `batches(source, indices, batch_size=batch_size)` reads the steps.

    Raises:
      ValueError: if units are out of range or named twice, or a size does not fit.

    Examples:
      >>> import ordering
      >>> indices, batch_size = ordering.input.step_indices(
      ...     [[2, 0, 1], [1, 0, 2]], units_per_step=2
      ... )
      >>> indices.tolist(), batch_size
      ([2, 0, 4, 3, 1, 5], 4)
    """
    orders = np.atleast_2d(whole_numbers("orders", orders))
    workers, length = orders.shape
    owned = length if num_units is None else num_units
    owned, units_per_step = base.check_units(owned, units_per_step)
    unit_size = plans.check_whole("unit_size", unit_size, 1)
    total = None if total is None else plans.check_whole("total", total, 1)
    most = owned if total is None else total
    outside = length > owned or not ((orders >= 0) & (orders < most)).all()
    lists = orders if total is None else orders.reshape(1, -1)
    if outside or any(_repeats(units, most) for units in lists):
        whose = "each worker's order of its own units; for a slice of an order also num_units"
        whose = whose if total is None else "the orders of one epoch, and their total"
        raise ValueError(
            f"orders of shape {orders.shape} name a unit twice, or outside 0 .. {most - 1}, or "
            f"more than {owned} units: pass {whose}."
        )
    if total is None:
        np.add(orders, owned * np.arange(workers)[:, None], out=orders)  # our own copy
    whole, units = length - length % units_per_step, np.empty(orders.size, np.int64)
    steps = orders[:, :whole].reshape(workers, -1, units_per_step).swapaxes(0, 1)
    units[: workers * whole].reshape(steps.shape)[:] = steps
    units[workers * whole :] = orders[:, whole:].reshape(-1)
    if unit_size > 1:
        units = (units[:, None] * unit_size + np.arange(unit_size)).reshape(-1)
    return units, workers * units_per_step * unit_size


def check_read_whole(
    num_examples: int, shape: tuple[int, ...], *, units_per_step: int, unit_size: int = 1,
    num_units: int | None = None, total: int | None = None,
) -> None:  # fmt: skip
    """Raises ValueError if orders of this shape would never read a whole step of the examples.

    Less is left over where all steps are to have one size.
    """
    workers, length = (1, *shape)[-2:]
    owned = length if num_units is None else num_units
    unit_size = plans.check_whole("unit_size", unit_size, 1)
    units = workers * owned if total is None else plans.check_whole("total", total, 1)
    all_workers = units // owned  # of dealt orders, which may be on other hosts
    left_over = num_examples - units * unit_size
    if left_over >= all_workers * units_per_step * unit_size:
        raise ValueError(
            f"the source has {num_examples} examples, of which {left_over} would never be read, as "
            f"the orders name {units} units of {unit_size}: make orders for all of them, or leave "
            "them out of the source."
        )


def _repeats(units: np.ndarray, most: int) -> bool:
    """Whether a unit of 0 .. most - 1 occurs twice."""
    if 64 * len(units) < most:  # to sort a few is cheaper than a mark for everyone
        return bool((np.diff(np.sort(units)) == 0).any())
    seen = np.zeros(most, bool)
    seen[units] = True
    return int(np.count_nonzero(seen)) < len(units)


class Steps:
    """The batches of an epoch by step, from the arguments of `reader` and `step_indices`.

    Leaves are [W, B S, ...] for orders int[W, M], and [B S, ...] for an order int[M]. Reading uses
    no JAX device, so that any process can read.
    """

    def __init__(self, source: PyTree | Sequence, orders: ArrayLike | Sequence, **sizes):
        self.indices, self.batch_size = step_indices(orders, **sizes)
        self.epoch = epoch_mark(self.indices, self.batch_size)
        self.workers = np.shape(orders)[0] if np.ndim(orders) == 2 else None
        num_examples, self._read = reader(source)
        check_read_whole(num_examples, np.shape(orders), **sizes)
        if self.indices.size and self.indices.max() >= num_examples:
            raise ValueError(
                f"the order names example {self.indices.max()}, and the source has {num_examples}: "
                "pass a source of the examples of all workers, or another unit_size."
            )

    def __len__(self) -> int:
        return -(-self.indices.size // self.batch_size)

    def __getitem__(self, step: int) -> PyTree[np.ndarray]:
        step = int(step)
        if not 0 <= step < len(self):
            raise IndexError(
                f"there is no step {step} in an epoch of {len(self)} steps: the next epoch has "
                "another order. Call next_epoch, and read the order that it returns."
            )
        batch = self._read(self.indices[step * self.batch_size :][: self.batch_size])
        if self.workers is None:
            return batch
        return jax.tree.map(lambda x: x.reshape(self.workers, -1, *x.shape[1:]), batch)

    def __repr__(self) -> str:
        """Names the order, as `grain.DataLoader` compares these texts when it restores a state."""
        return f"Steps({len(self)} steps, {self.epoch['order']})"


def epoch_mark(indices: np.ndarray, batch_size: int) -> dict:
    """The part of a reader's state that tells which epoch it belongs to."""
    checksum = zlib.crc32(np.ascontiguousarray(indices, np.int64).data)
    return {"order": f"{checksum:08x}", "examples_per_step": batch_size}
