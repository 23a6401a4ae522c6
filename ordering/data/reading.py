"""The batches of an epoch, in the sequence of the orders of all workers."""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ordering.base import Ordering, Scope
from ordering.data.loader import check_batches
from ordering.data.sources import as_source, check_units_of, step_indices
from ordering.indices import Indices
from syncopate import plans


def reading(
    source: Any, order: Ordering, scope: Scope, num_units: int, unit_size: int
) -> Callable[[np.ndarray, int, int], Iterable]:
    """`(orders, first step, epoch) -> batches` of this process's workers."""
    unit_size = plans.check_whole("unit_size", unit_size, 1)
    workers, window = scope.workers or 1, order.units_per_step
    total = order.total if order.is_global and order.total else workers * num_units
    here = workers_of_process(scope)
    first = 0 if order.is_global else num_units * here[:, None]  # each worker's first unit

    def pipeline(orders, first_step, epoch):
        if isinstance(orders, Indices):
            orders = _of_workers(orders, here, workers, window)
            indices, size = step_indices(
                orders, units_per_step=min(len(here) * window, len(orders)), unit_size=unit_size
            )
        else:
            orders = np.atleast_2d(orders) + first
            indices, size = step_indices(
                orders, num_units=num_units, units_per_step=window, unit_size=unit_size, total=total
            )
        sizes = [min(size, indices.size - i) for i in range(0, indices.size, size)]
        given = source(indices, first_step, epoch)
        check_batches("batches", given)
        return _in_full(given, sizes)

    if callable(source):
        plans.check_function("source", source, "indices", "first_step", "epoch")
        return pipeline
    examples = as_source(source)
    if not 0 <= len(examples) - total * unit_size < workers * window * unit_size:
        raise ValueError(
            f"the source has {len(examples)} examples, and the orders name {total} units of "
            f"{unit_size}: make orders for all examples, pass a source with the examples of all "
            "workers, or change unit_size. Leave out of the source what is not to be read."
        )

    def steps(orders):
        """The units int64[W, b] of every step, of this process's workers."""
        if isinstance(orders, Indices):
            mine = _of_workers(orders, here, workers, window)
            for start in range(0, len(mine), len(here) * window):
                units = np.asarray(mine[start : start + len(here) * window])
                yield units.reshape(len(here), -1)
            return
        if order.is_global:
            check_units_of(orders.reshape(-1), total)
        else:
            check_units_of(orders, num_units)
        rows = np.atleast_2d(orders)
        for start in range(0, rows.shape[1], window):
            yield rows[:, start : start + window].astype(np.int64) + first

    def batches(orders, first_step, epoch):
        for units in steps(orders):
            indices = units[..., None] * unit_size + np.arange(unit_size)
            batch = examples[indices.reshape(-1)]
            shape = () if scope.workers is None else indices.shape[:1]
            yield jax.tree.map(lambda x: x.reshape(*shape, -1, *x.shape[1:]), batch)  # noqa: B023

    return batches


def _of_workers(orders: Indices, here: np.ndarray, workers: int, window: int) -> Indices:
    """The units that some of the workers read of those of all, step after step."""
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


def workers_of_process(scope: Scope) -> np.ndarray:
    """The numbers of the workers whose devices belong to this process."""
    if scope.mesh is None:
        return np.arange(scope.workers or 1)
    axis, process = scope.mesh.axis_names.index(scope.axis_name), jax.process_index()
    devices = np.ndenumerate(scope.mesh.devices)
    return np.unique([at[axis] for at, device in devices if device.process_index == process])


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
