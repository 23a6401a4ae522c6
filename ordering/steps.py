"""The units of all workers step after step, from orders that are stored on their devices."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from ordering.indices import Indices


def in_steps(
    orders: Any,
    units_per_step: int,
    *,
    num_units: int | None = None,
    total: int | None = None,
    start: int = 0,
) -> Indices:
    """The units of orders [M] or [W, M]: B of worker 0, B of worker 1, .., then the next step's.

    A last step may be shorter. Units of worker w are numbered from w M on, unless the orders name
    units of all workers, below `total`. The orders are copied: a step may donate them. The first
    `start` units of all workers are left out. `num_units` is M, if the orders are slices.
    """
    workers, length = (1, *np.shape(orders))[-2:]
    function = _Steps(orders, units_per_step, num_units or length, total, start // workers)
    return Indices(function, workers * length - start)


class _Steps:
    """`places -> units`; the orders are on their way to the host until they are read."""

    def __init__(self, orders: Any, step: int, num_units: int, total: int | None, first: int):
        self._workers, length = (1, *np.shape(orders))[-2:]
        self._length, self._step, self._first = length - first, step, first
        self._num_units, self._total, self._copies = num_units, total, _copies(orders)

    def __getstate__(self):
        return {**self.__dict__, "_rows": self._rows, "_copies": []}

    @functools.cached_property
    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The orders [w, M] of this process's workers; each worker's row, w for others."""
        parts = [(first, np.atleast_2d(jax.device_get(part))) for first, part in self._copies]
        firsts, rows = zip(*parts, strict=True)
        number = np.concatenate([np.arange(len(r)) + f for f, r in zip(firsts, rows, strict=True)])
        row_of = np.full(self._workers, len(number))
        row_of[number] = np.arange(len(number))
        return np.concatenate(rows), row_of

    def __call__(self, places: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        step, rest = np.divmod(places, self._workers * self._step)
        size = np.minimum(self._step, self._length - step * self._step)
        worker, unit = np.divmod(rest, size)
        rows, row_of = self._rows
        units = rows[row_of[worker], self._first + step * self._step + unit].astype(np.int64)
        check_range(units, self._total or self._num_units)
        return units if self._total else units + self._num_units * worker


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
    # Where a user's guard refuses it, `jax.device_get` asks explicitly, and then waits.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        copy.copy_to_host_async()
    return copy


def check_range(units: np.ndarray, most: int) -> None:
    """Raises ValueError unless all units are below `most`."""
    if units.size and not 0 <= units.min() <= units.max() < most:
        outside = units[(units < 0) | (units >= most)][0]
        raise ValueError(
            f"orders name the unit {outside}, outside 0 .. {most - 1}: pass each worker's order of "
            "its own units, or the total of all."
        )


def check_units_of(units: np.ndarray, most: int) -> None:
    """Raises ValueError unless units, [n], are below `most` and different."""
    check_range(units, most)
    if _repeats(units, most):
        raise ValueError(
            f"orders name one of the units 0 .. {most - 1} twice: pass each worker's order of its "
            "own units, or the total of all."
        )


def _repeats(units: np.ndarray, most: int) -> bool:
    """Whether a unit of 0 .. most - 1 occurs twice."""
    if 64 * len(units) < most:  # sorting a few units is cheaper than marking all
        return bool((np.diff(np.sort(units)) == 0).any())
    seen = np.zeros(most, bool)
    seen[units] = True
    return int(np.count_nonzero(seen)) < len(units)
