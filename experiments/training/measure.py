"""Evaluations: at which steps, and their losses, metrics and herding bounds."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
import ordering.input
from experiments.tasks.base import Recipe, Task
from experiments.tasks.metrics import CHUNK, METRICS, predicting, sum_chunks
from experiments.training import input, placement
from experiments.training.config import Sizes, size_of
from ordering.rows import Rows, flat, tree_size

BATCHES = 16  # of training data, from which moments of normalisation layers are estimated
HELD = 2**16  # numbers of the gradients that a herding bound holds at once, or one gradient


def evaluation_steps(recipe: Recipe, sizes: Sizes, total: int) -> list[int]:
    """The steps after which a run is evaluated, always including the last one."""
    if recipe.evaluate_every is not None:
        steps = range(recipe.evaluate_every, total, recipe.evaluate_every)
    elif recipe.evaluations is not None:
        count = min(recipe.evaluations, total)
        steps = np.linspace(0, total, count + 1).astype(int)[1:].tolist()
    else:
        steps = range(0, total, sizes.loads_per_epoch)
    return sorted({*steps, total})


def scalars_of(task: Task, recipe: Recipe, *, halves: bool = False) -> Callable:
    """`(program, row of ORDERS) -> (step, T, state) -> scalars`.

    Args:
      halves: as of `evaluator`.
    """
    measure = evaluator(task, recipe, halves=halves)
    tests = ["valid", "test"] if halves else ["test"]
    compiled = functools.cache(functools.partial(order_bounds, task.model))  # one for all orders

    def of(built, order):
        bounds = bounds_of(task, recipe, built, order, compiled)
        every = recipe.bound_every * built.sizes.loads_per_epoch

        def scalars(step, total, state):
            params = built.mean_params(state)
            found = measure(params)
            if recipe.average:
                found |= averaged(measure, built.averaged(state, step), tests)
            if bounds and (step == total or not step % every):
                found |= bounds(params, state.orders.current)
            return found

        return scalars

    return of


def averaged(measure: Callable, averages: dict, tests: Sequence[str]) -> dict:
    """{"PART/NAME/averaged": float} of the average with the lowest training loss, and its name."""
    found = {name: measure(params, ["train"]) for name, params in averages.items()}
    best = min(found, key=lambda name: np.nan_to_num(found[name]["train/loss"], nan=np.inf))
    found = found[best] | measure(averages[best], tests)
    return {"average": best} | {f"{k}/averaged": value for k, value in found.items()}


def evaluator(task: Task, recipe: Recipe, *, halves: bool) -> Callable:
    """`(params, parts) -> {"train/loss": float, "test/METRIC": float, ...}`, equal everywhere.

    METRIC is the task's own and every metric marked `everywhere`. The moments of normalisation
    layers are estimated first, on training inputs at these parameters.

    Args:
      halves: split the test set into "valid", the first half, for tuning, and "test", the second.
        The training loss is then taken over as many examples, the first ones, as it is of a source.
    """
    size, tested = size_of(task.train), size_of(task.test)
    measured_on = tested if halves or not isinstance(task.train, dict) else size
    middle = tested // 2 if halves else 0
    sets = {"test": part_of(task.test, middle, 2 * middle or tested)}
    if halves:
        sets = {"valid": part_of(task.test, 0, middle)} | sets
    batch_size = recipe.workers * recipe.units_per_step * recipe.unit_size
    moments_at = moments(task.model, task.train, batch_size)
    asked = {task.metric} | ({recipe.metric} if recipe.target is not None else set())
    names = [name for name, metric in METRICS.items() if name in asked or metric.everywhere]
    tested_by = {name: METRICS[name].measure(task.model) for name in names}
    measures = {"train": {"loss": mean_loss(task.model)}} | dict.fromkeys(sets, tested_by)
    sets = {"train": part_of(task.train, 0, min(size, measured_on))} | sets
    in_memory = isinstance(task.train, dict) and isinstance(task.test, dict)
    optimum = functools.cache(task.optimum) if task.optimum else None  # when first asked for

    @jax.jit
    def measured(params, statistics, batches):
        return {
            part: {name: of(params, statistics, batch) for name, of in measures[part].items()}
            for part, batch in batches.items()
        }

    def run(params, parts: Sequence[str] = tuple(sets)) -> dict:
        statistics, totals = moments_at(params), {}
        calls = ({part: batch} for part in parts for batch in sets[part]())
        if in_memory:  # each part is one batch, and all are measured in one call
            calls = [{part: batch for call in calls for part, batch in call.items()}]
        for batches in calls:
            found = jax.device_get(measured(params, statistics, batches))
            for part, batch in batches.items():
                size = size_of(batch)
                for name, value in found[part].items():
                    total, count = totals.get(f"{part}/{name}", (0.0, 0))
                    totals[f"{part}/{name}"] = total + float(value) * size, count + size
        means = {name: total / count for name, (total, count) in totals.items()}
        if optimum is not None and "train" in parts:
            means["train/above_optimum"] = means["train/loss"] - optimum()
        return means

    return run


def part_of(data, start: int, stop: int) -> Callable:
    """`() -> iterator of batches`, the examples from `start` to `stop`.

    Arrays are placed on the device once, as one batch. A source is read every time, in pieces.
    """
    if isinstance(data, dict):
        part = jax.device_put(jax.tree.map(lambda x: x[start:stop], data))
        return lambda: iter([part])
    _, read = ordering.input.reader(data)
    starts = range(start, stop, CHUNK)
    return lambda: (read(np.arange(first, min(first + CHUNK, stop))) for first in starts)


def moments(model, train, batch_size: int) -> Callable:
    """`params -> statistics`, jitted: moments of the first training inputs at these parameters."""
    if model.statistics is None:
        return lambda params: None
    size, read = ordering.input.reader(train)
    count = max(1, min(BATCHES, size // batch_size))
    used = read(np.arange(min(count * batch_size, size)))["x"]
    batches = jax.device_put(used.reshape(count, -1, *used.shape[1:]))
    return jax.jit(lambda params: local_opt.reestimate(model.statistics, params, batches))


def mean_loss(model) -> Callable:
    """`(params, statistics, batch) -> float32[]`, jitted: the mean loss over a whole set.

    It includes the penalty on the parameters. For a model with statistics it is the cross-entropy
    of the model's predictions.
    """

    def loss(params, statistics, batch):
        def total(part):
            if model.statistics is None:
                return jnp.sum(model.loss(params, part, None))
            logits = predicting(model, params, statistics)(part["x"])
            return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, part["y"]))

        return sum_chunks(total, batch)

    return jax.jit(loss)


def bounds_of(task, recipe, built, order, compiled: Callable) -> Callable | None:
    """`(params, orders) -> the parallel herding bound`, or None if it is not asked for or
    units have no owner. `compiled` is a cache of `order_bounds` for the task's model."""
    if not recipe.bound_every or order.deals:
        return None
    sizes, data = built.sizes, built.data
    over = built.sharding.mesh if built.sharding else sizes.workers
    if data is None:
        owned = input.partition(task.train, sizes, built.source.units)
        data = placement.place(owned, built.sharding)
    bound = compiled(over, num_units=sizes.num_units)

    def measure(params, orders):
        found = placement.on_host(bound(params, orders, data))
        return {
            f"bound/{norm}": float(value) for norm, value in zip(("linf", "l2"), found, strict=True)
        }

    return measure


def order_bounds(model, over, *, num_units: int) -> Callable:
    """`(params, orders, data) -> float32[2]`: parallel herding bounds at fixed parameters.

    max over k of |sum_{j <= k} sum_w (g_{w, order_w(j)} - mean g)| in the norms L-infinity and
    L2, over all units of all workers. It passes over the data twice, and holds the gradients of a
    few units, summed over the workers. `over` is W or the workers' mesh; the data have leaves
    [W, M, unit_size, ...].
    """

    def losses(points, order, data, start):
        """Of a worker: the sum of its units' losses from `start` on, each at its own `points`."""
        size = jax.tree.leaves(points)[0].shape[0]
        units = jax.lax.dynamic_slice_in_dim(order, start, size)
        of_unit = lambda point, unit: jnp.mean(model.loss(point, unit, jax.random.key(0)))  # noqa: E731
        return jnp.sum(jax.vmap(of_unit)(points, jax.tree.map(lambda x: x[units], data)))

    lifted = local_opt.lift(losses, over, inputs="shared owned owned shared", outputs="owned")

    def bounds(params, orders, data):
        size = tree_size(params)
        at_once = min(num_units, max(1, HELD // size))
        whole = num_units // at_once * at_once

        def rows_of(start, count):
            """[count, D]: gradients of the units in these places, summed over the workers."""
            total = lambda points: jnp.sum(lifted(points, orders, data, start))  # noqa: E731
            points = jax.tree.map(lambda p: jnp.broadcast_to(p, (count, *p.shape)), params)
            return flat(Rows.of(jax.grad(total)(points)))

        def fold(function, carry):
            """Folds `function(carry, rows)` over the places of an epoch."""
            step = lambda carry, start: (function(carry, rows_of(start, at_once)), None)  # noqa: E731
            carry, _ = jax.lax.scan(step, carry, jnp.arange(0, whole, at_once))
            rest = num_units - whole
            return function(carry, rows_of(whole, rest)) if rest else carry

        zeros = jnp.zeros(size)
        mean = fold(lambda total, rows: total + jnp.sum(rows, axis=0), zeros) / num_units

        def follow(carry, rows):
            prefix, bound = carry
            prefixes = prefix[None] + jnp.cumsum(rows - mean[None], axis=0)
            norms = [jnp.max(jnp.abs(prefixes)), jnp.sqrt(jnp.max(jnp.sum(prefixes**2, axis=1)))]
            return prefixes[-1], jnp.maximum(bound, jnp.stack(norms))

        return fold(follow, (zeros, jnp.zeros(2)))[1]

    return jax.jit(bounds)
