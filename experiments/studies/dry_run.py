"""What a study would cost at its full size: shapes, plans and the compiled step, nothing allocated.

`--dry_run` on an experiment builds the model's and the data's shapes and all plans, lowers the step
of one worker, compiles it unless told not to, and prints what is known before the run. Memory is
that of one worker's program on a device of its own, as XLA lays it out for the backend at hand; the
collectives' buffers are not in it. The forecast assumes a device that computes --device_teraflops,
of the operations that XLA counts in a gradient, and a link of --gigabits; it leaves out evaluation,
balancing, and the launch of a step, which is most of a small one. Loads of a policy that decides
online are those of a simulated clock.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import local_opt
from experiments.results.tables import markdown
from experiments.studies.cost import operations, order_traffic, price
from experiments.studies.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.tasks.base import Recipe, Task
from experiments.training.config import config_of, plans_of, size_of, sizes_of
from experiments.training.parts import (
    num_params,
    order_setting,
    parts_of,
    sketch_size,
    start_of,
    steps_of,
)
from experiments.training.step import TrainState
from local_opt import runners
from ordering.echo import echo_forecast

GIGA, TERA, HOUR = 1e9, 1e12, 3600.0
WINDOWS = 50  # of a priced run


class Assumed(NamedTuple):
    """What a forecast takes for granted."""

    compiles: bool = True
    device_flops: float = 50 * TERA  # per second
    gigabits: float = 25.0  # of a worker's link, per second
    machines: tuple = ()  # of `cost.machines`: a column of priced time each


def dry_run(task: Task, recipe: Recipe, study, given: Assumed) -> str:
    """Markdown: the facts of the task, and what every arm would cost, at every speed of the input.

    Args:
      task: may be abstract; recipe: in which setting.
      study: what has `arms` by name, as a `Study`, and `speeds` R of the input, or ().
    """
    one_batch = _shapes(task.train, recipe.units_per_step * recipe.unit_size)
    step_seconds = _gradient_flops(task.model, one_batch) / given.device_flops
    memory, rows = {}, []
    for speed in study.speeds or (None,):
        for arm in study.arms.values():
            kind = (arm.order, SYNC_RULES[arm.sync].rounds, arm.proximal)
            if kind not in memory:
                memory[kind] = _memory(task, recipe, arm, given)
            row = _row(task, recipe, arm, speed, step_seconds, given)
            rows.append(row | {"memory of a worker": memory[kind]})
    return f"{markdown(_facts(task, recipe))}\n\n{markdown(rows)}"


def _row(task, recipe, arm, speed, step_seconds, given) -> dict:
    order, echo = ORDERS[arm.order], ECHO_POLICIES[arm.echo]
    sizes = sizes_of(task, recipe, deals=order.deals)
    config = config_of(recipe, sizes, seed=0, speed=speed)
    plans = plans_of(config, SYNC_RULES[arm.sync], echo, rate=1.0)
    timed = {"load_seconds": (speed or 1) * step_seconds, "step_seconds": step_seconds}
    seconds = plans.total_steps * step_seconds
    if speed is not None or echo.online:
        forecast = echo_forecast(plans.echo, **timed)
        echo_plan, seconds = forecast.plan, forecast.total_seconds
    else:
        echo_plan = plans.echo
    rounds = echo_plan.loads if plans.sync is None else plans.sync.rounds
    in_step = SYNC_RULES[arm.sync].rounds is local_opt.parallel_rounds
    traffic = order_traffic(order, sizes, num_params(task.model), sync_in_step=in_step)
    allreduces = rounds + traffic(echo_plan.loads)
    ring = local_opt.sync_bytes(num_params(task.model), num_workers=sizes.workers)
    ends = np.linspace(0, plans.total_steps, WINDOWS + 1).astype(int)[1:]
    windows = [
        {"step": t, "loads": n, "allreduces": allreduces}
        for t, n in zip(ends, echo_plan.loads_before(ends), strict=True)
    ]
    return ({} if speed is None else {"R": f"{speed:g}"}) | {
        "arm": arm.label,
        "steps": plans.total_steps,
        "loads": echo_plan.loads,
        "rounds": rounds,
        "volume": f"{rounds / plans.total_steps:.3%}",
        "sent per worker": _bytes(ring * allreduces),
        "state of the order": _bytes(order_bytes(task, order, sizes, in_step)),
        "forecast": _hours(seconds, ring * allreduces * 8 / (given.gigabits * GIGA)),
    } | {machine.label: f"{price(windows, machine):.0f}" for machine in given.machines}  # fmt: skip


def _memory(task, recipe, arm, given) -> str:
    if not given.compiles:
        return "not compiled"
    strength = arm.proximal * recipe.proximal
    rounds = SYNC_RULES[arm.sync].rounds
    lowered = lower_step(task, recipe, ORDERS[arm.order], rounds, proximal=strength)
    found = lowered.compile().memory_analysis()
    return _bytes(
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )


def order_bytes(task, order, sizes, sync_in_step) -> float:
    """Of one worker's state."""
    made, size = order.make(order_setting(sizes, sync_in_step)), sketch_size(order, task.model)
    like = jax.ShapeDtypeStruct((size,), jnp.float32) if size else _params(task.model)
    init = runners.simulate(
        lambda key, params: (made.init(key, params),), owned_in=(True, False), owned_out=(True,)
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), sizes.workers))
    state = jax.eval_shape(init, keys, like)
    return _tree_bytes(state) / sizes.workers


def _gradient_flops(model, batch) -> float:
    """Operations of one worker's gradient."""

    def mean_loss(params, batch):
        return jnp.mean(model.loss(params, batch, jax.random.key(0)))

    return operations(jax.grad(mean_loss), _params(model), batch)


def _facts(task: Task, recipe: Recipe) -> list[dict]:
    model, params = task.model, _params(task.model)
    first = {name: f"{leaf.dtype}{list(leaf.shape[1:])}" for name, leaf in task.train.items()}
    predict = model.predict
    if model.statistics is not None:
        predict = lambda p, x: model.predict(p, x, model.statistics(p, x))  # noqa: E731
    logits = jax.eval_shape(predict, params, _shapes(task.train, 2)["x"])
    rates = ", ".join(f"{rate:g}" for rate in recipe.learning_rates)
    facts = {
        "task": task.name,
        "training examples": f"{size_of(task.train):,}",
        "test examples": f"{size_of(task.test):,}",
        "an example": ", ".join(f"{name}: {shape}" for name, shape in first.items()),
        "predictions of an example": f"{logits.dtype}{list(logits.shape[1:])}",
        "parameters": f"{num_params(model):,} ({_bytes(_tree_bytes(params))})",
        "workers": recipe.workers,
        "examples per step": recipe.workers * recipe.units_per_step * recipe.unit_size,
        "optimizer": f"{recipe.optimizer}, lr {rates}, {recipe.schedule}",
    }
    if recipe.target is not None:
        facts["target"] = f"{recipe.metric} {recipe.target:g}"
    return [{"what": name, "value": value} for name, value in facts.items()]


def _params(model):
    return jax.eval_shape(model.init, jax.random.key(0))


def _shapes(data, number):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype), data)


def _tree_bytes(tree):
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if not keys(x))


def _bytes(number):
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _hours(compute, communicate):
    def show(seconds):
        return f"{seconds / HOUR:.3g} h" if seconds >= HOUR / 10 else f"{seconds:.3g} s"

    return show(compute) + (f" + {show(communicate)} of syncs" if communicate else "")


def lower_step(
    task: Task, recipe: Recipe, row, rounds: Callable, *, proximal: float = 0.0
) -> jax.stages.Lowered:
    """A fresh step of one worker on a device of its own, with what its order does, from shapes."""
    share = size_of(task.train) // recipe.workers
    one = task._replace(
        train=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((share, *x.shape[1:]), x.dtype), dict(task.train)
        )
    )
    recipe = recipe._replace(workers=1)
    sizes = sizes_of(one, recipe, deals=row.deals)
    parts = parts_of(one, recipe, row, rounds, sizes, proximal=proximal)
    start = start_of(parts, runners.simulate)
    params = jax.eval_shape(task.model.init, jax.random.key(0))
    if parts.owned[0]:
        params = jax.tree.map(lambda p: jax.ShapeDtypeStruct((1, *p.shape), p.dtype), params)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    given = jax.ShapeDtypeStruct((1, sizes.num_units), jnp.int32) if row.on_host else None
    state = TrainState(*jax.eval_shape(start, params, keys, given, keys))
    shape = (1, sizes.units_per_step, sizes.unit_size)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*shape, *x.shape[1:]), x.dtype), one.train)
    place, rates = (jax.ShapeDtypeStruct(s, d) for s, d in (((), jnp.int32), ((1,), jnp.float32)))
    steps = steps_of(parts, runners.simulate, reads=True)(True, sizes.units_per_step)
    return steps.lower(state, batch, place, place, place, rates)
