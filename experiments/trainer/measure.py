"""Evaluations: at which steps, and their losses, metrics and parallel herding bounds."""

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import local_opt
import ordering.data
from experiments.data.base import Recipe, Task, size_of
from experiments.data.metrics import CHUNK, METRICS, sum_chunks
from experiments.trainer import pipeline
from experiments.trainer.config import Sizes
from experiments.trainer.program import Program
from ordering.trees import flat, tree_size
from syncopate.refusals import UserError

BATCHES = 16  # of training data, from which moments of normalisation layers are estimated
BOUNDS = ("bound/linf", "bound/l2")
HELD = 2**16  # numbers of the gradients that a herding bound holds at once, or one gradient
PART = "train_examples"  # in records: whose loss "train/loss" is, where it is not that of all


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


class Scalars(NamedTuple):
    """What the records of a run say of its model.

    `begin: (step, T, state) -> finish` dispatches what is measured, and `finish() -> scalars` by
    name waits for it.
    """

    at: Callable[[int], Iterable[int]] = lambda total: ()  # T -> steps; 0 is the start
    begin: Callable = lambda step, total, state: dict
    prepare: Sequence[Callable] = ()  # without arguments: they compile what `begin` needs first


def scalars_of(
    task: Task, recipe: Recipe, *, halves: bool = False, metrics: Collection[str] = ()
) -> Callable:
    """`program -> Scalars`; halves, metrics: as of `sets_of`."""
    measure, prepare = evaluator(task, recipe, halves=halves, metrics=metrics)
    tests = ["valid", "test"] if halves else ["test"]
    compiled = functools.cache(functools.partial(order_bounds, task.model))  # one for all orders

    def of(built: Program):
        bounds, data = bounds_of(task, recipe, built, compiled)
        averages_at = averaged_models(built)
        every, size = recipe.bound_every * built.sizes.loads_per_epoch, size_of(task.train)
        part = train_size(task, halves=halves)

        def dispatched(step, total, state):
            params, bound = model_of(built, state.params), None
            measured = measure(params)
            if bounds and (step == total or not step % every):
                bound = bounds(params, state.orders.current, data)

            def finish():
                scalars = measured()
                if recipe.average:
                    averages = averages_at(state, step, total)
                    scalars |= averaged(lambda *of: measure(*of)(), averages, tests)
                if bound is not None:
                    scalars |= dict(zip(BOUNDS, pipeline.on_host(bound).tolist(), strict=True))
                return scalars | ({PART: part} if part < size else {})

            return finish

        def begin(step, total, state):
            if built.sharding is None:
                return dispatched(step, total, state)
            # The model is read from all devices, which waits for them.
            return lambda: dispatched(step, total, state)()

        params = _model_shapes(built)
        jobs = [functools.partial(job, params) for job in prepare]
        if built.worker.sides.params == "worker":
            mean = mean_of(built.sizes.weights)
            jobs.append(lambda: mean.lower(built.shapes.params).compile())
        if bounds:
            orders = built.shapes.orders.current
            jobs.append(lambda: bounds.lower(params, orders, data).compile())
        at = functools.partial(evaluation_steps, recipe, built.sizes)
        return Scalars(at, begin, [functools.cache(job) for job in jobs])

    return of


@functools.cache
def mean_of(weights: tuple[float, ...] | None) -> Callable:
    """The compiled mean over workers of a tree [W, ...], with their weights."""
    if weights is None:
        return jax.jit(local_opt.mean_over_workers)
    shares = np.asarray(weights, np.float32) / np.sum(weights, dtype=np.float32)

    def mean(x):  # exact where all workers are equal
        moved = (x - x[:1]).astype(jnp.float32)
        return (x[0] + jnp.tensordot(shares, moved, 1)).astype(x.dtype)

    return jax.jit(lambda tree: jax.tree.map(mean, tree))


def model_of(built: Program, tree):
    """The model, of all workers' parameters, or of averages of them.

    It is on the host of every process if workers are devices of a mesh. Elsewhere it may be the
    state's own memory, which the next steps use again.
    """
    tree = mean_of(built.sizes.weights)(tree) if built.worker.sides.params == "worker" else tree
    return tree if built.sharding is None else pipeline.on_host(tree)


def averaged_models(built: Program) -> Callable:
    """`(state, t, T) -> {name: the model averaged over t steps of T}`, each as of `model_of`."""
    average = jax.jit(built.worker.averages.update)
    return lambda state, t, total: model_of(built, average(state.averages, state.params, t, total))


def _model_shapes(built):
    """Of `model_of`, and where it lies."""
    params = built.shapes.params
    where = jax.tree.leaves(params)[0].sharding if built.sharding is None else None
    mean = mean_of(built.sizes.weights)
    shapes = jax.eval_shape(mean, params) if built.worker.sides.params == "worker" else params
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)


def averaged(measure: Callable, averages: dict, tests: Sequence[str]) -> dict:
    """{"PART/NAME/averaged": float} of the average with the lowest training loss, and its name."""
    scalars = {name: measure(params, ["train"]) for name, params in averages.items()}
    best = min(scalars, key=lambda name: np.nan_to_num(scalars[name]["train/loss"], nan=np.inf))
    scalars = scalars[best] | measure(averages[best], tests)
    return {"average": best} | {f"{k}/averaged": value for k, value in scalars.items()}


def evaluator(
    task: Task, recipe: Recipe, *, halves: bool, metrics: Collection[str] = ()
) -> tuple[Callable, Sequence[Callable]]:
    """(`(params, parts) -> finish`, functions of the parameters' shapes that compile it).

    `finish() -> {"train/loss": float, "test/METRIC": float, ...}` is equal everywhere. The moments
    of normalisation layers are estimated first, on training inputs at these parameters.
    """
    sets, measures = sets_of(task, recipe, halves=halves, metrics=metrics)
    batch_size = recipe.workers * recipe.units_per_step * recipe.unit_size
    moments_at = moments(task.model, task.train, batch_size)
    in_memory = isinstance(task.train, dict) and isinstance(task.test, dict)
    optimum = functools.cache(task.optimum) if task.optimum else None

    def names_of(batches):
        return [(part, name) for part in measures if part in batches for name in measures[part]]

    @jax.jit
    def measured(params, statistics, batches):
        """float32[n], in the order of `names_of`: one array, which is fetched at once."""
        scalars = (
            measures[part][name](params, statistics, batches[part])
            for part, name in names_of(batches)
        )
        return jnp.stack([*scalars])

    def calls(batches_of: Mapping[str, Iterable]) -> Iterable[dict]:
        """{part: batch} of every call. Parts in memory are one batch each, measured together."""
        each = ({part: batch} for part, batches in batches_of.items() for batch in batches)
        return [functools.reduce(operator.or_, each)] if in_memory else each

    def begin(params, parts: Sequence[str] = tuple(sets)) -> Callable[[], dict]:
        statistics = moments_at(params)
        asked = calls({part: sets[part].batches() for part in parts})
        begun = ((measured(params, statistics, call), call) for call in asked)
        return functools.partial(finish, parts, list(begun) if in_memory else begun)

    def finish(parts, begun) -> dict:
        totals = {}
        for scalars, batches in begun:
            sizes = {part: size_of(batch) for part, batch in batches.items()}
            for (part, name), value in zip(names_of(batches), scalars.tolist(), strict=True):
                total, count = totals.get(f"{part}/{name}", (0.0, 0))
                totals[f"{part}/{name}"] = total + value * sizes[part], count + sizes[part]
        means = {
            key: METRICS[key.split("/")[1]].of_mean(total / count)
            for key, (total, count) in totals.items()
        }
        if optimum is not None and "train" in parts:
            means["train/above_optimum"] = means["train/loss"] - optimum()
        return means

    def compile_calls(params):
        statistics, where = None, jax.tree.leaves(params)[0].sharding
        if task.model.statistics is not None:
            moments_at.lower(params).compile()
            shapes = jax.eval_shape(moments_at, params)
            like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)  # noqa: E731
            statistics = jax.tree.map(like, shapes)
        for call in calls({part: examples.shapes() for part, examples in sets.items()}):
            measured.lower(params, statistics, call).compile()

    return begin, [compile_calls] + [lambda params: optimum()] * (optimum is not None)


def sets_of(
    task: Task, recipe: Recipe, *, halves: bool, metrics: Collection[str] = ()
) -> tuple[dict, dict]:
    """({part: Part}, {part: {name: its measure}}): what is measured, and on which examples.

    The names are "loss" in "train"; in the others the task's metric, that of a target, and
    `metrics`. Halves of the test set are "valid", the first, for tuning, and "test", the second.
    """
    tested = size_of(task.test)
    middle = tested // 2 if halves else 0
    sets = {"test": part_of(task.test, middle, 2 * middle or tested)}
    if halves:
        sets = {"valid": part_of(task.test, 0, middle)} | sets
    asked = {task.metric, *metrics} | ({recipe.metric} if recipe.target is not None else set())
    tested_by = {name: METRICS[name].measure(task.model) for name in METRICS if name in asked}
    check_metrics(task, {name: of for name, of in tested_by.items() if name != task.metric})
    measures = {"train": {"loss": mean_loss(task.model)}} | dict.fromkeys(sets, tested_by)
    return {"train": part_of(task.train, 0, train_size(task, halves=halves))} | sets, measures


def check_metrics(task: Task, measures: Mapping[str, Callable]) -> None:
    """Raises ValueError for a metric that predictions and labels of these shapes do not have."""
    shapes = part_of(task.test, 0, 1).shapes() if measures else []
    if not shapes:
        return
    params = jax.eval_shape(task.model.init, jax.random.key(0))
    moments = None
    if task.model.statistics is not None:
        moments = jax.eval_shape(task.model.statistics, params, shapes[0]["x"])
    for name, measure in measures.items():
        try:
            jax.eval_shape(measure, params, moments, shapes[0])
        except (IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"{METRICS[name].label} cannot be computed of {task.name}'s predictions and "
                f"labels ({error}): choose another --metric, or another metric in the study."
            ) from error


def train_size(task: Task, *, halves: bool) -> int:
    """The number of first examples on which the training loss is measured.

    With halves, and of a source, they are at most as many as the test set has.
    """
    size = size_of(task.train)
    return min(size, size_of(task.test)) if halves or not isinstance(task.train, dict) else size


class Part(NamedTuple):
    """A part of the data."""

    batches: Callable  # () -> iterable of batches
    shapes: Callable  # () -> one batch of every size, or its shapes


def part_of(data, start: int, stop: int) -> Part:
    """The examples from `start` to `stop`.

    Arrays are placed on the device once, as one batch. A source is read every time, in pieces.
    """
    if isinstance(data, dict):
        part = jax.device_put(jax.tree.map(lambda x: x[start:stop], data))
        return Part(lambda: [part], lambda: [part])
    examples = ordering.data.as_source(data)
    starts = range(start, stop, CHUNK)

    def shapes():
        sizes = {min(CHUNK, stop - first) for first in starts}
        like = lambda x, size: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)  # noqa: E731
        one = examples[start : start + 1]
        return [jax.tree.map(functools.partial(like, size=size), one) for size in sizes]

    return Part(lambda: (examples[first : min(first + CHUNK, stop)] for first in starts), shapes)


def moments(model, train, batch_size: int) -> Callable:
    """`params -> statistics`, jitted: moments of the first training inputs at these parameters."""
    if model.statistics is None:
        return lambda params: None
    examples = ordering.data.as_source(train)
    count = max(1, min(BATCHES, len(examples) // batch_size))
    used = examples[: count * batch_size]["x"]
    cut = lambda x: x.reshape(count, -1, *x.shape[1:])  # noqa: E731
    batches = jax.device_put(jax.tree.map(cut, used))

    mean = lambda params: jax.lax.map(functools.partial(model.statistics, params), batches)  # noqa: E731
    return jax.jit(lambda params: jax.tree.map(lambda s: jnp.mean(s, axis=0), mean(params)))


def mean_loss(model) -> Callable:
    """`(params, statistics, batch) -> float32[]`: the mean loss, with the penalty, over a set.

    For a model with statistics it is the cross-entropy of the model's predictions.
    """
    if model.statistics is not None:
        return METRICS["loss"].measure(model)
    return lambda params, statistics, batch: sum_chunks(
        lambda part: jnp.sum(model.loss(params, part, None)), batch
    )


def bounds_of(task, recipe, built: Program, compiled: Callable) -> tuple[Callable | None, Any]:
    """(`order_bounds`, its data); the first is None if it is not asked for or units have no owner.
    `compiled` is a cache of `order_bounds` for the task's model."""
    if not recipe.bound_every or built.worker.row.deals:
        return None, None
    sizes, data = built.sizes, built.data
    over = built.sharding.mesh if built.sharding else sizes.workers
    if data is None:
        parts = pipeline.partition(task.train, sizes)
        data = pipeline.place(parts, built.sharding)
    return compiled(over, num_units=sizes.num_units, weights=sizes.weights), data


def order_bounds(
    model, over, *, num_units: int, weights: tuple[float, ...] | None = None
) -> Callable:
    """`(params, orders, data) -> float32[2]`: parallel herding bounds at fixed parameters.

    max over k of |sum_{j <= k} sum_w (g_{w, order_w(j)} - mean g)| in the norms L-infinity and
    L2, over all units of all workers. It passes over the data twice, and holds the gradients of a
    few units, summed over the workers. `over` is W or the workers' mesh; the data have leaves
    [W, M, unit_size, ...]. With `weights` g_w is multiplied by that of its worker.
    """
    weighing = 1.0 if weights is None else np.asarray(weights, np.float32)

    def losses(points, order, data, start):
        """The sum of a worker's losses over units from `start` on, each at its own `points`."""
        size = jax.tree.leaves(points)[0].shape[0]
        units = jax.lax.dynamic_slice_in_dim(order, start, size)
        of_unit = lambda point, unit: jnp.mean(model.loss(point, unit, jax.random.key(0)))  # noqa: E731
        return jnp.sum(jax.vmap(of_unit)(points, jax.tree.map(lambda x: x[units], data)))

    mapped = local_opt.map_workers(
        losses, over, in_specs=("replicated", "worker", "worker", "replicated"), out_specs="worker"
    )

    def bounds(params, orders, data):
        size = tree_size(params)
        at_once = min(num_units, max(1, HELD // size))
        whole = num_units // at_once * at_once

        def rows_of(start, count):
            """[count, D]: gradients of the units in these places, summed over the workers."""
            total = lambda points: jnp.sum(weighing * mapped(points, orders, data, start))  # noqa: E731
            points = jax.tree.map(lambda p: jnp.broadcast_to(p, (count, *p.shape)), params)
            return flat(jax.grad(total)(points))

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
