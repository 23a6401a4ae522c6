"""From the units of all workers to their batches: the examples of each step of an epoch."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int

from ordering import base, steps
from ordering.base import Ordering
from ordering.data.batches import Sizes
from ordering.data.loader import check_batches
from ordering.data.sources import Source, whole_numbers
from ordering.indices import Indices
from syncopate import plans
from syncopate.workers import Workers

FEW = 2**12  # units that are computed at a time, in whole steps

# (units of all workers, first step, epoch) -> batches
Read = Callable[[Indices, int, int], Iterable]


def sizes_of(order: Ordering, workers: Workers) -> Sizes:
    """An epoch of all workers; raises ValueError if they cannot share a step."""
    count, step = workers.count or 1, order.units_per_step
    if not order.computed:
        return Sizes(count * order.num_units, count * step, count)
    if count * step > order.num_units:
        raise ValueError(
            f"a step of {count} workers with {step} units each exceeds the {order.num_units} units "
            "of an epoch: lower units_per_step."
        )
    if order.step_units not in (None, count * step):
        raise ValueError(
            f"the order is for {order.step_units // step} workers, and {count} read it: pass "
            f"workers={count} to plan.order."
        )
    return Sizes(order.num_units, count * step, count)


def total_of(order: Ordering, sizes: Sizes) -> int:
    """The units of the source."""
    return order.total or sizes.num_units


def read_source(source: Source, order: Ordering, workers: Workers, unit_size: int) -> Read:
    """Batches of this process's workers, from a source."""
    sizes = sizes_of(order, workers)
    total = total_of(order, sizes)
    if not 0 <= len(source) - total * unit_size < sizes.window * unit_size:
        raise ValueError(
            f"the source has {len(source)} examples, and the orders name {total} units of "
            f"{unit_size}: make orders for all examples, pass a source with the examples of all "
            "workers, or change unit_size. Leave out of the source what is not to be read."
        )
    here = workers.of_process
    size = len(here) * order.units_per_step * unit_size
    lead = () if workers.count is None else (len(here),)

    def batches(units, first_step, epoch):
        examples = examples_of(units_of(units, here, sizes, order), unit_size)
        many = size * max(1, FEW // size)
        for first in range(0, len(examples), many):
            some = np.asarray(examples[first : first + many])
            for start in range(0, len(some), size):
                batch = source[some[start : start + size]]
                yield jax.tree.map(lambda x: x.reshape(*lead, -1, *x.shape[1:]), batch)

    return batches


def read_pipeline(pipeline: Callable, order: Ordering, workers: Workers, unit_size: int) -> Read:
    """Batches of this process's workers, from a function `(indices, first step, epoch)`."""
    plans.check_function("source", pipeline, "indices", "first_step", "epoch")
    here, sizes = workers.of_process, sizes_of(order, workers)
    size = len(here) * order.units_per_step * unit_size

    def batches(units, first_step, epoch):
        indices = examples_of(units_of(units, here, sizes, order), unit_size)
        given = pipeline(indices if order.computed else np.asarray(indices), first_step, epoch)
        check_batches("batches", given)
        return _in_full(given, len(indices), size)

    return batches


def units_of(units: Indices, here: Any, sizes: Sizes, order: Ordering) -> Any:
    """The units that some workers read, from those of all, which are in whole windows.

    Those of an order that is stored are an array; raises ValueError if one comes twice.
    """
    window, count = sizes.window, sizes.least
    if len(here) < count:
        each, (whole, rest) = window // count, divmod(len(units), window)
        of_steps = window, each, whole, rest // count
        function = functools.partial(_of_some, units, np.asarray(here), of_steps)
        units = Indices(function, (whole * each + rest // count) * len(here))
    if order.computed:
        return units  # may be too many for an array
    stored = np.asarray(units)
    steps.check_units_of(stored, total_of(order, sizes))
    return stored


def _of_some(units, here, sizes, places):
    window, each, whole, last = sizes
    number, place = np.divmod(places, len(here) * each)
    size = np.where(number < whole, each, max(last, 1))
    worker, row = np.divmod(place, size)
    return units[number * window + here[worker] * size + row]


def examples_of(units: Indices | np.ndarray, unit_size: int) -> Any:
    """The examples of units, which have `unit_size` consecutive ones each."""
    if unit_size == 1:
        return units
    return Indices(functools.partial(_examples_at, units, unit_size), len(units) * unit_size)


def _examples_at(units, unit_size, places):
    number, example = np.divmod(places, unit_size)
    return units[number] * unit_size + example


def _in_full(batches: Iterable, total: int, size: int) -> Iterator:
    """The batches; raises ValueError unless there is one per step with all of its examples."""
    batches, more = iter(batches), object()
    for start in range(0, total, size):
        batch, needed = next(batches, more), min(size, total - start)
        if batch is more:
            return
        shapes = {np.shape(leaf) for leaf in jax.tree.leaves(batch)}
        if not any(needed in itertools.accumulate(shape, operator.mul) for shape in shapes):
            raise ValueError(
                f"the source gave a batch of shapes {shapes} for a step of {needed} examples: give "
                "one batch per step, with all of its examples; a unit of several takes unit_size=."
            )
        if start + size >= total and next(batches, more) is not more:
            raise ValueError(
                f"the source gave more than {-(-total // size)} batches for as many steps: give "
                "one batch per step, with all of its examples."
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
    unit_size = plans.check_whole("unit_size", unit_size, 1)
    if isinstance(orders, Indices):
        most = len(orders) or None  # of no units any step is whole
        units_per_step = plans.check_whole("units_per_step", units_per_step, 1, most)
        return cast(Any, examples_of(orders, unit_size)), units_per_step * unit_size
    orders = np.atleast_2d(whole_numbers("orders", orders))
    workers, length = orders.shape
    per_worker = length if num_units is None else num_units
    per_worker, units_per_step = base.check_units(per_worker, units_per_step)
    total = None if total is None else plans.check_whole("total", total, 1)
    if length > per_worker:
        raise ValueError(
            f"orders of shape {orders.shape} name a unit twice, or more than {per_worker} units: "
            "pass each worker's order of its own units; for a slice of an order also num_units."
        )
    units = np.asarray(steps.in_steps(orders, units_per_step, num_units=per_worker, total=total))
    steps.check_units_of(units, total or workers * per_worker)
    indices = np.asarray(examples_of(units, unit_size))
    return indices, workers * units_per_step * unit_size
