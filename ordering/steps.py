"""The units of all workers step after step, from orders that are stored on their devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from ordering.indices import Indices


def in_steps(orders: Any, units_per_step: int, total: int | None = None) -> Indices:
    """The units of orders [M] or [W, M]: B of worker 0, B of worker 1, .., then the next step's.

    A last step may be shorter. Units of worker w are numbered from w M on, unless the orders name
    units of all workers, below `total`. The orders are copied: a step may donate them.
    """
    workers, num_units = (1, *np.shape(orders))[-2:]
    return Indices(_Steps(orders, units_per_step, total), workers * num_units)


class _Steps:
    """`places -> units`; the orders are on their way to the host until they are read."""

    def __init__(self, orders: Any, units_per_step: int, total: int | None):
        (self._workers, self._num_units), self._step = (1, *np.shape(orders))[-2:], units_per_step
        self._total, self._copies = total, _copies(orders)

    def __getstate__(self):
        return {**self.__dict__, "_rows": self._rows, "_copies": []}

    @functools.cached_property
    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The units int64[w, M] of this process's workers; each worker's row, w for others."""
        parts = [(first, np.atleast_2d(jax.device_get(part))) for first, part in self._copies]
        firsts, rows = zip(*parts, strict=True)
        units = np.concatenate(rows).astype(np.int64)
        number = np.concatenate([np.arange(len(r)) + f for f, r in zip(firsts, rows, strict=True)])
        row_of = np.full(self._workers, len(units))
        row_of[number] = np.arange(len(units))
        if self._total is None:
            check_units_of(units, self._num_units)
            units += self._num_units * number[:, None]
        else:
            check_units_of(units.reshape(-1), self._total)
        return units, row_of

    def __call__(self, places: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        step, rest = np.divmod(places, self._workers * self._step)
        size = np.minimum(self._step, self._num_units - step * self._step)
        worker, unit = np.divmod(rest, size)
        rows, row_of = self._rows
        return rows[row_of[worker], step * self._step + unit]


def _copies(orders: Any) -> list[tuple[int, Any]]:
    """(first worker, copy of its order and the next ones) on the way to this process."""
    return [(first, on_its_way(part)) for first, part in of_process(orders)]


def of_process(array: Any) -> list[tuple[int, Any]]:
    """(first worker, rows) of the parts of an array [W, ...] that this process holds."""
    if getattr(array, "is_fully_addressable", True):
        return [(0, array)]
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return sorted(shards.items(), key=lambda part: part[0])


class Least:
    """The least of numbers [W] on their way to the host, as `int`."""

    def __init__(self, numbers: Any):
        self._copies = _copies(numbers)

    def __index__(self) -> int:
        return int(min(np.min(jax.device_get(part)) for _, part in self._copies))

    __int__ = __index__


def on_its_way(array: Any) -> Any:
    """A copy on its way to the host, as a step may donate the array itself."""
    if not isinstance(array, jax.Array):
        return np.array(array)
    copy = jnp.copy(array)
    copy.copy_to_host_async()
    return copy


def check_units_of(orders: np.ndarray, most: int) -> None:
    """Raises ValueError unless each of the orders, [n] or [W, n], names units below most once."""
    outside = orders.size and not 0 <= orders.min() <= orders.max() < most
    if outside or any(_repeats(units, most) for units in np.atleast_2d(orders)):
        raise ValueError(
            f"orders of shape {orders.shape} name a unit twice, or outside 0 .. {most - 1}: pass "
            "each worker's order of its own units, for a slice also num_units; or the orders of "
            "one epoch over the units of all workers, and their total."
        )


def _repeats(units: np.ndarray, most: int) -> bool:
    """Whether a unit of 0 .. most - 1 occurs twice."""
    if 64 * len(units) < most:  # sorting a few units is cheaper than marking all
        return bool((np.diff(np.sort(units)) == 0).any())
    seen = np.zeros(most, bool)
    seen[units] = True
    return int(np.count_nonzero(seen)) < len(units)
