"""What a run would cost at its full size: shapes, plans and the compiled step, nothing allocated.

`--dry_run` on an experiment builds the model's and the data's shapes and all plans, lowers the
step of one worker, compiles it unless told not to, and prints what is known before the run.
Memory is that of one worker's program on a device of its own, as XLA lays it out for the backend
at hand; the collectives' buffers are not in it. The forecast assumes a device that computes
--device_teraflops, of the operations that XLA counts in a gradient, and a link of --gigabits; it
leaves out evaluation, balancing, and the launch of a step, which is most of a small one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import flags

import local_opt
import ordering
from experiments import echo_arms, local_training, round_work, training
from experiments.compare import markdown
from experiments.evaluate import size_of
from experiments.flag_values import definer
from experiments.flops import operations
from experiments.methods import METHODS
from experiments.partition import partition_shapes
from experiments.sync_rules import RULES
from experiments.tasks import Recipe, Task
from local_opt import runners
from models import Model

GIGA, TERA, HOUR = 1e9, 1e12, 3600.0


class Assumed(NamedTuple):
    """What a forecast takes for granted."""

    compiles: bool
    device_flops: float  # per second
    gigabits: float  # of a worker's link, per second


def define_flags(values: flags.FlagValues) -> None:
    define = definer(values)
    define(flags.DEFINE_bool, "dry_run", False, "print what the run would cost, and stop")
    define(flags.DEFINE_bool, "compile", True, "compile the step in a dry run, to know its memory")
    define(flags.DEFINE_float, "device_teraflops", 50.0, "per second, assumed by a dry run",
           lower_bound=1e-3)  # fmt: skip
    define(flags.DEFINE_float, "gigabits", 25.0, "of a worker's link, assumed by a dry run",
           lower_bound=1e-3)  # fmt: skip


def assumed(values: flags.FlagValues) -> Assumed:
    return Assumed(values.compile, values.device_teraflops * TERA, values.gigabits)


def of_orders(task: Task, recipe: Recipe, orders: Sequence[str], given: Assumed) -> str:
    """The dry run of `experiments.cd_grab`: a row per order."""
    one = recipe._replace(workers=1)
    share = size_of(task.train) // recipe.workers
    owned = task._replace(train=_shapes(task.train, share))
    rows = []
    for name in orders:
        parts = training.parts_of(owned, METHODS[name], one, runners.simulate, simulated=False)
        units = partition_shapes(owned.train, 1, recipe.unit_size)
        state, states = jax.eval_shape(lambda p=parts: p.init(0, 0.1))
        example = (state, states, units, jax.eval_shape(lambda: jax.random.key(0)))
        lowered = training.lowered_epoch(parts, runners.simulate, example)
        steps = -(-parts.num_units // recipe.units_per_step)
        rows.append(
            {
                "order": METHODS[name].label,
                "steps per epoch": steps,
                "steps": steps * recipe.epochs,
                "state of the order": _size(_bytes(states)),
                "memory of a worker": _memory(lowered, given),
            }
        )
    batch = _shapes(task.train, recipe.units_per_step * recipe.unit_size)
    flops = _gradient_flops(task.model, batch)
    seconds = flops / given.device_flops
    steps = rows[0]["steps"]
    sent = local_opt.ring_bytes(_parameters(task.model), num_workers=recipe.workers)
    facts = _facts(task) | {
        "workers": recipe.workers,
        "units per worker": share // recipe.unit_size,
        "examples per step": recipe.workers * recipe.units_per_step * recipe.unit_size,
        "optimizer": f"{recipe.optimizer}, lr {_list(recipe.learning_rates)}, {recipe.schedule}",
        "rounds": f"{steps}, one per step: volume 100 %",
        "loads": f"{steps}, one per step",
        "sent per worker": _size(sent * steps),
        "forecast": _hours(steps * seconds, steps * sent * 8 / (given.gigabits * GIGA)),
    }
    return f"{_table(facts)}\n\n{markdown(rows)}"


def of_rules(
    task: Task, setup: local_training.Setup, plans: dict[str, local_opt.SyncPlan], given: Assumed
) -> str:
    """The dry run of `experiments.qsr`: a row per rule."""
    batch = _shapes(task.train, setup.batch_size)
    flops = _gradient_flops(task.model, batch)
    memory = {}
    rows = []
    for name, plan in plans.items():
        kind = RULES[name].rounds
        if kind not in memory:
            rounds = kind(local_training.inner_optimizer(setup), axis_name=runners.AXIS)
            memory[kind] = _memory(_lowered_step(task.model, rounds, batch), given)
        cost = local_opt.forecast(
            plan,
            num_params=_parameters(task.model),
            num_workers=setup.workers,
            step_seconds=flops / given.device_flops,
            gigabits_per_second=given.gigabits,
        )
        rows.append(
            {
                "rule": RULES[name].label,
                "rounds": plan.rounds,
                "volume": f"{plan.volume:.3%}",
                "H": f"{plan.periods.min()} to {plan.periods.max()}",
                "sent per worker": _size(cost.sent_bytes),
                "memory of a worker": memory[kind],
                "forecast": _hours(cost.compute_seconds, cost.total_seconds - cost.compute_seconds),
            }
        )
    examples = setup.workers * setup.batch_size
    facts = _facts(task) | {
        "workers": setup.workers,
        "examples per step": examples,
        "optimizer": setup.optimizer,
        "steps": setup.total_steps,
        "epochs": f"{setup.total_steps * examples / size_of(task.train):.1f}",
        "loads": f"{setup.total_steps}, one per step",
    }
    return f"{_table(facts)}\n\n{markdown(rows)}"


def of_arms(task: Task, recipe, settings: dict[float, echo_arms.Setting], given: Assumed) -> str:
    """The dry run of `experiments.echoing`: a row per arm and loading speed R.

    The loads of a measured policy are those of the simulated clock.
    """
    batch = _shapes(task.train, recipe.batch_size)
    step_seconds = _gradient_flops(task.model, batch) / given.device_flops
    sent = local_opt.ring_bytes(_parameters(task.model), num_workers=recipe.workers)
    memory, rows = {}, []
    for speed, setting in settings.items():
        for name in recipe.arms:
            arm = echo_arms.ARMS[name]
            kind = (arm.rounds, arm.proximal)
            if kind not in memory:
                anchor = ordering.echo.proximal_anchor(arm.proximal * recipe.proximal)
                inner = local_training.inner_optimizer(recipe)
                inner = optax.chain(anchor, inner) if arm.proximal else inner
                rounds = arm.rounds(inner, axis_name=runners.AXIS)
                memory[kind] = _memory(_lowered_step(task.model, rounds, batch), given)
            forecast = ordering.echo.echo_forecast(
                arm.policy(setting), step_seconds=step_seconds, load_seconds=speed * step_seconds
            )
            rounds = forecast.loads if arm.sync is None else arm.sync(setting).rounds
            link = rounds * sent * 8 / (given.gigabits * GIGA)
            rows.append(
                {
                    "R": f"{speed:g}",
                    "arm": arm.label,
                    "steps": setting.total_steps,
                    "loads": forecast.loads,
                    "rounds": rounds,
                    "volume": f"{rounds / setting.total_steps:.1%}",
                    "sent per worker": _size(sent * rounds),
                    "memory of a worker": memory[kind],
                    "forecast": _hours(forecast.total_seconds, link),
                }
            )
    facts = _facts(task) | {
        "workers": recipe.workers,
        "examples per step": recipe.workers * recipe.batch_size,
        "optimizer": f"{recipe.optimizer}, lr {_list(recipe.rates)}",
        "target": f"{recipe.metric} {recipe.target:g}",
    }
    return f"{_table(facts)}\n\n{markdown(rows)}"


def _lowered_step(model: Model, rounds: local_opt.Rounds, batch) -> jax.stages.Lowered:
    """The step of one worker, without the sync."""
    step = round_work.worker_step(model, rounds)
    params = jax.eval_shape(model.init, jax.random.key(0))
    state = jax.eval_shape(rounds.init, params)

    def one(params, state, batch, rate, fresh):
        return step(params, state, batch, jax.random.key(0), rate=rate, fresh=fresh)

    rate, fresh = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.bool_))
    return jax.jit(one, donate_argnums=(0, 1)).lower(params, state, batch, rate, fresh)


def _gradient_flops(model: Model, batch) -> float:
    """Operations of one worker's gradient."""
    params = jax.eval_shape(model.init, jax.random.key(0))

    def mean_loss(params, batch):
        return jnp.mean(model.loss(params, batch, jax.random.key(0)))

    return operations(jax.grad(mean_loss), params, batch)


def _facts(task: Task) -> dict:
    params = jax.eval_shape(task.model.init, jax.random.key(0))
    first = {name: f"{leaf.dtype}{list(leaf.shape[1:])}" for name, leaf in task.train.items()}
    logits = jax.eval_shape(_predict(task.model), params, _shapes(task.train, 2)["x"])
    return {
        "task": task.name,
        "training examples": f"{size_of(task.train):,}",
        "test examples": f"{size_of(task.test):,}",
        "an example": ", ".join(f"{name}: {shape}" for name, shape in first.items()),
        "predictions of an example": f"{logits.dtype}{list(logits.shape[1:])}",
        "parameters": f"{_parameters(task.model):,} ({_size(_bytes(params))})",
    }


def _predict(model):
    if model.statistics is None:
        return model.predict
    return lambda params, x: model.predict(params, x, model.statistics(params, x))


def _shapes(data, number):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype), data)


def _parameters(model):
    params = jax.eval_shape(model.init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _bytes(tree):
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if not keys(x))


def _memory(lowered, given):
    if not given.compiles:
        return "not compiled"
    found = lowered.compile().memory_analysis()
    return _size(
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )


def _size(number):
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _hours(compute, communicate):
    def show(seconds):
        return f"{seconds / HOUR:.3g} h" if seconds >= HOUR / 10 else f"{seconds:.3g} s"

    return show(compute) + (f" + {show(communicate)} of syncs" if communicate else "")


def _list(values):
    return ", ".join(f"{value:g}" for value in values)


def _table(facts):
    return markdown([{"what": name, "value": value} for name, value in facts.items()])
