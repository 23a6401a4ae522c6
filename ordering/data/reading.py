"""From the orders of all workers to their batches: the examples of each step of an epoch."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int

from ordering import base
from ordering.base import Ordering, Scope
from ordering.data.loader import check_batches
from ordering.data.sources import Source, whole_numbers
from ordering.indices import Indices
from syncopate import plans


def read_source(
    source: Source, order: Ordering, scope: Scope, num_units: int, unit_size: int
) -> Callable[[np.ndarray, int, int], Iterable]:
    """`(orders, first step, epoch) -> batches` of this process's workers, from a source."""
    unit_size = plans.check_whole("unit_size", unit_size, 1)
    here, workers, window = scope.of_process, scope.workers or 1, order.units_per_step
    first, total = first_units(order, scope, num_units), total_of(order, scope, num_units)
    if not 0 <= len(source) - total * unit_size < workers * window * unit_size:
        raise ValueError(
            f"the source has {len(source)} examples, and the orders name {total} units of "
            f"{unit_size}: make orders for all examples, pass a source with the examples of all "
            "workers, or change unit_size. Leave out of the source what is not to be read."
        )

    def steps(orders):
        """The units int64[W, b] of every step."""
        if isinstance(orders, Indices):
            mine = _of_workers(orders, here, workers, window)
            for start in range(0, len(mine), len(here) * window):
                units = np.asarray(mine[start : start + len(here) * window])
                yield units.reshape(len(here), -1)
            return
        check_orders(orders, order, num_units, total)
        rows = np.atleast_2d(orders)
        for start in range(0, rows.shape[1], window):
            yield rows[:, start : start + window] + first

    def batches(orders, first_step, epoch):
        for units in steps(orders):
            indices = units[..., None] * unit_size + np.arange(unit_size)
            batch = source[indices.reshape(-1)]
            shape = () if scope.workers is None else indices.shape[:1]
            yield jax.tree.map(lambda x: x.reshape(*shape, -1, *x.shape[1:]), batch)  # noqa: B023

    return batches


def read_pipeline(
    pipeline: Callable, order: Ordering, scope: Scope, num_units: int, unit_size: int
) -> Callable[[np.ndarray, int, int], Iterable]:
    """As `read_source`, from a function `(indices, first step, epoch) -> batches`."""
    plans.check_function("source", pipeline, "indices", "first_step", "epoch")
    unit_size = plans.check_whole("unit_size", unit_size, 1)
    here, workers, window = scope.of_process, scope.workers or 1, order.units_per_step
    first, total = first_units(order, scope, num_units), total_of(order, scope, num_units)

    def batches(orders, first_step, epoch):
        if isinstance(orders, Indices):
            orders = _of_workers(orders, here, workers, window)
            sizes = {"units_per_step": min(len(here) * window, len(orders))}
        else:
            orders = np.atleast_2d(orders) + first
            sizes = {"units_per_step": window, "num_units": num_units, "total": total}
        indices, size = step_indices(orders, unit_size=unit_size, **sizes)
        given = pipeline(indices, first_step, epoch)
        check_batches("batches", given)
        return _in_full(given, [min(size, indices.size - i) for i in range(0, indices.size, size)])

    return batches


def total_of(order: Ordering, scope: Scope, num_units: int) -> int:
    """The units of the source."""
    return order.total if order.is_global and order.total else num_units * (scope.workers or 1)


def first_units(order: Ordering, scope: Scope, num_units: int) -> Int[np.ndarray, "w 1"]:
    """The source's number of each worker's first unit, for the workers of this process."""
    return (0 if order.is_global else num_units) * scope.of_process[:, None]


def check_orders(orders: np.ndarray, order: Ordering, num_units: int, total: int) -> None:
    """Raises ValueError unless orders name each of their units once."""
    if order.is_global:
        check_units_of(orders.reshape(-1), total)
    else:
        check_units_of(orders, num_units)


def _of_workers(orders: Indices, here: np.ndarray, workers: int, window: int) -> Indices:
    """The units that some of the workers read, step after step, from the units of all workers."""
    step, rows = workers * window, len(here) * window
    whole, rest = divmod(len(orders), step)
    last = rest // workers  # units per worker in a last, shorter step

    def units(places):
        number, place = np.divmod(places, rows)
        size = np.where(number < whole, window, max(last, 1))
        worker, row = np.divmod(place, size)
        return orders[number * step + here[worker] * size + row]

    if len(here) == workers:
        return orders[: len(orders) - rest % workers]
    return Indices(units, whole * rows + last * len(here))


def _in_full(batches: Iterable, sizes: Sequence[int]) -> Iterator:
    """The batches; raises ValueError unless there is one per step with all of its examples."""
    batches, more = iter(batches), object()
    for number, size in enumerate(sizes):
        batch = next(batches, more)
        if batch is more:
            return
        shapes = {np.shape(leaf) for leaf in jax.tree.leaves(batch)}
        if not any(size in itertools.accumulate(shape, operator.mul) for shape in shapes):
            raise ValueError(
                f"the source gave a batch of shapes {shapes} for a step of {size} examples: give "
                "one batch per step, with all of its examples; a unit of several takes unit_size=."
            )
        if number + 1 == len(sizes) and next(batches, more) is not more:
            raise ValueError(
                f"the source gave more than {len(sizes)} batches for as many steps: give one batch "
                "per step, with all of its examples."
            )
        yield batch


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
      orders: int[M] or int[W, M], a permutation of 0 .. M - 1 for every worker. With `num_units`, a
        slice [.., m] of such orders that starts at a step. Or `Indices`, the units of all workers
        step after step, for which `units_per_step` is W B.
      units_per_step: B in [1, M], units per worker and step.
      unit_size: S >= 1, consecutive examples per unit.
      num_units: M, if `orders` is a slice.
      total: number of units in the source, if they are assigned to the workers anew
        (`ordering.global_order`); orders then name units in [0, total), each at most once.

    Returns:
      `(indices, batch_size)`: int64[W m S], or `Indices`, and W B S, the number of examples in a
      whole step. `tf_dataset(source, indices).batch(batch_size)` reads the steps.

    Raises:
      ValueError: if units are out of range or named twice, or a size does not fit.

    Examples:
      >>> from syncopate import ordering
      >>> indices, batch_size = ordering.data.step_indices(
      ...     [[2, 0, 1], [1, 0, 2]], units_per_step=2
      ... )
      >>> indices.tolist(), batch_size
      ([2, 0, 4, 3, 1, 5], 4)
    """
    if isinstance(orders, Indices):
        unit_size = plans.check_whole("unit_size", unit_size, 1)
        units_per_step = plans.check_whole("units_per_step", units_per_step, 1, len(orders))
        return cast(Any, _examples_of(orders, unit_size)), units_per_step * unit_size
    orders = np.atleast_2d(whole_numbers("orders", orders))
    workers, length = orders.shape
    per_worker = length if num_units is None else num_units
    per_worker, units_per_step = base.check_units(per_worker, units_per_step)
    unit_size = plans.check_whole("unit_size", unit_size, 1)
    total = None if total is None else plans.check_whole("total", total, 1)
    if length > per_worker:
        raise ValueError(
            f"orders of shape {orders.shape} name a unit twice, or more than {per_worker} units: "
            "pass each worker's order of its own units; for a slice of an order also num_units."
        )
    check_units_of(orders if total is None else orders.reshape(-1), total or per_worker)
    if total is None:
        np.add(orders, per_worker * np.arange(workers)[:, None], out=orders)  # orders is a copy
    whole, units = length - length % units_per_step, np.empty(orders.size, np.int64)
    steps = orders[:, :whole].reshape(workers, -1, units_per_step).swapaxes(0, 1)
    units[: workers * whole].reshape(steps.shape)[:] = steps
    units[workers * whole :] = orders[:, whole:].reshape(-1)
    if unit_size > 1:
        units = (units[:, None] * unit_size + np.arange(unit_size)).reshape(-1)
    return units, workers * units_per_step * unit_size


def _examples_of(units: Indices, unit_size: int) -> Indices:
    """The examples of units that are computed."""
    if unit_size == 1:
        return units
    return Indices(functools.partial(_examples_at, units, unit_size), len(units) * unit_size)


def _examples_at(units, unit_size, places):
    number, example = np.divmod(places, unit_size)
    return units[number] * unit_size + example


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
