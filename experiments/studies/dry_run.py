"""What a study would cost at its full size: shapes, plans and the compiled step, nothing allocated.

`--dry_run` on an experiment builds the model's and the data's shapes and all plans, lowers the step
of one worker, compiles it unless told not to, and prints what is known before the run. Memory is
that of one worker's program on a device of its own, as XLA lays it out for the backend at hand; the
collectives' buffers are not in it. The forecast assumes a device that computes --device_teraflops,
of the operations that XLA counts in a gradient, and a link of --gigabits; it leaves out evaluation,
balancing, and the launch of a step, which is most of a small one. Loads of a policy that decides
online are those of a simulated clock.

With --topology the programs are compiled for a slice of TPUs or GPUs instead, a device for each
worker: see docs/topology.md.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import local_opt
from experiments.compiled.lowering import lower_step, tree_bytes
from experiments.compiled.programs import buffer_bytes
from experiments.compiled.slices import slice_of
from experiments.results.tables import markdown, show_bytes
from experiments.studies.cost import operations, price, traffic
from experiments.studies.on_slice import Calls, OnSlice
from experiments.studies.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.studies.trainer import left_out
from experiments.tasks.base import Recipe, Task
from experiments.training import loop, timeline
from experiments.training.config import (
    Plans,
    Sizes,
    config_of,
    plans_of,
    size_of,
    sizes_of,
)
from experiments.training.parts import num_params, order_setting, sketch_size
from local_opt import runners
from ordering.echo import EchoPlan, echo_forecast

GIGA, TERA, HOUR = 1e9, 1e12, 3600.0
WINDOWS = 50  # of a priced run


class Assumed(NamedTuple):
    """What a forecast takes for granted."""

    compiles: bool = True
    device_flops: float = 50 * TERA  # per second
    gigabits: float = 25.0  # of a worker's link, per second
    machines: tuple = ()  # of `cost.machines`: a column of priced time each
    topology: str | None = None  # as of `slices.slice_of`; None: the backend at hand
    reads: bool = False  # batches are handed over there; else the data stay on the devices


class Run(NamedTuple):
    """What is decided before a run, or by a simulated clock."""

    sizes: Sizes
    plans: Plans
    echo: EchoPlan
    rounds: int
    seconds: float  # of computation and of waiting for input

    @property
    def steps(self) -> int:
        return self.plans.total_steps


def dry_run(task: Task, recipe: Recipe, study, given: Assumed) -> str:
    """Markdown: the facts of the task, and what every arm would cost, at every speed of the input.

    Args:
      task: may be abstract; recipe: in which setting.
      study: what has `arms` by name, as a `Study`, and `speeds` R of the input, or ().

    Raises:
      ValueError: for a topology that does not exist or has another number of devices.
    """
    on = slice_of(given.topology, recipe.workers) if given.topology else None
    one_batch = _shapes(task.train, recipe.units_per_step * recipe.unit_size)
    step_seconds = _gradient_flops(task.model, one_batch) / given.device_flops
    run = functools.cache(functools.partial(run_of, task, recipe, step_seconds=step_seconds))
    runs = [(arm, speed) for speed in study.speeds or (None,) for arm in study.arms.values()]
    rows = [_row(task, recipe, *one, run(*one), given) for one in runs]
    facts = _facts(task, recipe)
    facts += [{"what": "left out", "value": text} for text in left_out(study, task, recipe)]
    if on is None:
        memory = functools.cache(functools.partial(_memory, task, recipe, given=given))
        cells = [
            {"memory of a worker": memory(arm.order, SYNC_RULES[arm.sync].rounds, arm.proximal)}
            for arm, _ in runs
        ]
        details = []
    else:
        calls = lambda arm, speed: calls_of(arm, run(arm, speed), given.reads)  # noqa: E731
        programs = OnSlice(task, recipe, on, calls, reads=given.reads)
        cells = [programs.cells(*one) for one in runs]
        facts, details = facts + programs.facts(), programs.details()
    rows = [row | more for row, more in zip(rows, cells, strict=True)]
    return "\n\n".join([markdown(facts), markdown(rows), *details])


def run_of(task, recipe, arm, speed, *, step_seconds) -> Run:
    """What is decided before the run of an arm, at a speed of the input or at none."""
    order, echo = ORDERS[arm.order], ECHO_POLICIES[arm.echo]
    sizes = sizes_of(task, recipe, deals=order.deals)
    config = config_of(recipe, sizes, seed=0, speed=speed)
    plans = plans_of(config, SYNC_RULES[arm.sync], echo, rate=1.0)
    echo_plan, seconds = plans.echo, plans.total_steps * step_seconds
    if speed is not None or echo.online:
        timed = {"load_seconds": (speed or 1) * step_seconds, "step_seconds": step_seconds}
        forecast = echo_forecast(plans.echo, **timed)
        echo_plan, seconds = forecast.plan, forecast.total_seconds
    rounds = echo_plan.loads if plans.sync is None else plans.sync.rounds
    return Run(sizes, plans, echo_plan, rounds, seconds)


def calls_of(arm, run: Run, reads: bool) -> Calls:
    """How often a run calls its programs: once for all steps between two events of the host."""
    line = timeline.timeline(run.plans, run.sizes, fresh=run.echo.fresh)
    in_step = SYNC_RULES[arm.sync].rounds is local_opt.parallel_rounds
    ends = timeline.cuts(line, run.sizes, streams=reads, sync_in_step=in_step)
    if run.plans.echo.online:
        ends = np.arange(1, run.steps + 1)
    starts = np.append(0, ends[:-1])
    calls = -(-(ends - starts) // loop.MOST)
    fresh = np.asarray(line.fresh)[starts]
    epochs = run.echo.loads // run.sizes.loads_per_epoch
    return Calls(
        run.steps, run.echo.loads, run.rounds, epochs,
        fresh=int(calls[fresh].sum()), echoed=int(calls[~fresh].sum()),
    )  # fmt: skip


def _row(task, recipe, arm, speed, run: Run, given) -> dict:
    order = ORDERS[arm.order]
    rule = SYNC_RULES[arm.sync]
    in_step = rule.rounds is local_opt.parallel_rounds
    sent = traffic(order, rule, run.sizes, num_params(task.model), sync_in_step=in_step)
    allreduces = sent(run.rounds, run.echo.loads)
    ring = local_opt.sync_bytes(num_params(task.model), num_workers=run.sizes.workers)
    ends = np.linspace(0, run.steps, WINDOWS + 1).astype(int)[1:]
    loads = run.echo.loads_before(ends)
    synced = run.plans.sync and np.searchsorted(run.plans.sync.ends, ends, side="right")
    rounds = loads if synced is None else synced
    windows = [
        {"step": t, "loads": n, "allreduces": sent(int(k), int(n))}
        for t, n, k in zip(ends, loads, rounds, strict=True)
    ]
    return ({} if speed is None else {"R": f"{speed:g}"}) | {
        "arm": arm.label,
        "steps": run.steps,
        "loads": run.echo.loads,
        "rounds": run.rounds,
        "volume": f"{run.rounds / run.steps:.3%}",
        "sent per worker": show_bytes(ring * allreduces),
        "state of the order": show_bytes(order_bytes(task, order, run.sizes, in_step)),
        "forecast": _hours(run.seconds, ring * allreduces * 8 / (given.gigabits * GIGA)),
    } | {machine.label: f"{price(windows, machine):.0f}" for machine in given.machines}  # fmt: skip


def _memory(task, recipe, order, rounds, proximal, *, given) -> str:
    if not given.compiles:
        return "not compiled"
    strength = proximal * recipe.proximal
    lowered = lower_step(task, recipe, ORDERS[order], rounds, proximal=strength)
    return show_bytes(buffer_bytes(lowered.compile()))


def order_bytes(task, order, sizes, sync_in_step) -> float:
    """Of one worker's state."""
    made, size = order.make(order_setting(sizes, sync_in_step)), sketch_size(order, task.model)
    like = jax.ShapeDtypeStruct((size,), jnp.float32) if size else _params(task.model)
    init = runners.simulate(
        lambda key, params: (made.init(key, params),), owned_in=(True, False), owned_out=(True,)
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), sizes.workers))
    state = jax.eval_shape(init, keys, like)
    return tree_bytes(state) / sizes.workers


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
        "parameters": f"{num_params(model):,} ({show_bytes(tree_bytes(params))})",
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


def _hours(compute, communicate):
    def show(seconds):
        return f"{seconds / HOUR:.3g} h" if seconds >= HOUR / 10 else f"{seconds:.3g} s"

    return show(compute) + (f" + {show(communicate)} of syncs" if communicate else "")
