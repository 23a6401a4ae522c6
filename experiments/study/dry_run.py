"""Forecasts the cost of a study at full size, from shapes, plans and the compiled step.

`--dry_run` on an experiment builds the model's and the data's shapes and all plans, lowers the step
of one worker, compiles it unless told not to, and prints what is known before the run. Memory is
that of one worker's program on a device of its own, as XLA lays it out for the backend at hand; the
collectives' buffers are not in it. The forecast assumes a device that computes --device_teraflops,
of the operations that XLA counts in a gradient (the body of a loop once), and a link of --gigabits;
it leaves out evaluation, balancing, and the launch of a step, which is most of a small one. Loads
of a policy that decides online are those of a simulated clock.

With --topology the programs are compiled for a slice of TPUs or GPUs instead, a device for each
worker: see docs/use/accelerators.md.
"""

import functools
from collections import defaultdict
from typing import NamedTuple

import jax
import jax.numpy as jnp

import local_opt
from experiments.results.statistics import volume
from experiments.results.tables import markdown, show_bytes
from experiments.study.compile import (
    CHIPS,
    Compiled,
    Refused,
    buffer_bytes,
    compile_or_refuse,
    slice_of,
)
from experiments.study.cost import Shapes, examples_of, lower_step, shapes_of, traffic, tree_bytes
from experiments.study.tables import left_out, plans_of
from experiments.tasks.base import Recipe, Task
from experiments.training.config import num_params, size_of
from local_opt.forecast import sync_seconds
from ordering import echo

TERA, HOUR = 1e12, 3600.0


class Assumed(NamedTuple):
    """The assumptions of a forecast."""

    compiles: bool = True
    device_flops: float = 50 * TERA  # per second
    gigabits: float = 25.0  # of a worker's link, per second
    topology: str | None = None  # as of `compile.slice_of`; None: the backend at hand
    reads: bool = False  # batches are handed over there; else the data stay on the devices


def assumed(values) -> Assumed:
    """The assumptions given by parsed flags."""
    flops, reads = values.device_teraflops * TERA, values.input != "device"
    return Assumed(values.compile, flops, values.gigabits, values.topology, reads)


class Listed(NamedTuple):
    """A program, the first arm that runs it, and the compiler's analysis."""

    program: str
    arm: str
    shapes: Shapes
    found: Compiled | Refused


def dry_run(task: Task, recipe: Recipe, study, given: Assumed) -> str:
    """Markdown: the facts of the task, and what every arm would cost, at every speed of the input.

    Args:
      task: may be abstract; recipe: in which setting.
      study: what has `arms` by name, as a `Study`, and `speeds` R of the input, or ().
    """
    mesh, chip = slice_of(given.topology, recipe.workers) if given.topology else (None, None)
    step_seconds = _gradient_flops(task, recipe) / given.device_flops
    shaped = functools.partial(shapes_of, task, recipe, mesh=mesh, reads=given.reads)
    shapes_by = functools.cache(shaped)
    bytes_by = functools.cache(lambda *own: buffer_bytes(lower_step(task, recipe, *own).compile()))
    rows, listed = [], {}
    for speed in study.speeds or (None,):
        for arm in study.arms.values():
            order, rule, _ = arm.rows
            own = order, rule.rounds  # arms share programs
            shapes = shapes_by(*own)
            row = _row(task, recipe, arm, speed, step_seconds, shapes, given)
            rows.append(row)
            if chip is None:
                known = show_bytes(bytes_by(*own)) if given.compiles else "not compiled"
                row["memory of a worker"] = known
                continue
            names = [*shapes.programs]
            if row["steps"] == row["loads"]:
                names.remove("echoed step")
            for name in names:
                if (*own, name) not in listed:
                    found = compile_or_refuse(shapes.programs[name](), chip)
                    listed[*own, name] = Listed(name, arm.label, shapes, found)
            row["peak of a device"] = _peak([listed[*own, name].found for name in names], chip)
    known = _facts(task, recipe) | ({} if chip is None else _slice_facts(task, given, mesh, chip))
    facts = [{"what": name, "value": value} for name, value in known.items()]
    left = left_out(study.arms.values(), task, recipe)
    facts += [{"what": "left out", "value": text} for text in left]
    return "\n\n".join([markdown(facts), markdown(rows), *_details(listed.values(), chip)])


def _row(task, recipe, arm, speed, step_seconds, shapes: Shapes, given: Assumed) -> dict:
    (order, rule, _), sizes = arm.rows, shapes.sizes
    plans = plans_of(task, recipe, arm, speed=speed)
    uses, seconds = plans.echo, plans.total_steps * step_seconds
    if speed is not None or uses.online:
        load_seconds = (speed or 1) * step_seconds
        found = echo.echo_forecast(uses, load_seconds=load_seconds, step_seconds=step_seconds)
        uses, seconds = found.plan, found.total_seconds
    rounds = uses.loads if plans.sync is None else plans.sync.rounds
    size, ring = num_params(task.model), {"num_workers": sizes.workers}
    sent = traffic(order, rule, sizes, size, sync_in_step=shapes.sync_in_step)(rounds, uses.loads)
    waited = sent * sync_seconds(size, **ring, gigabits_per_second=given.gigabits)
    return ({} if speed is None else {"R": f"{speed:g}"}) | {
        "arm": arm.label,
        "steps": plans.total_steps,
        "loads": uses.loads,
        "rounds": rounds,
        "volume": f"{volume({'allreduces': sent, 'step': plans.total_steps}):.3%}",
        "sent per worker": show_bytes(sent * local_opt.sync_bytes(size, **ring)),
        "state of the order": show_bytes(shapes.bytes_of("orders")),
        "forecast": _time(seconds) + (f" + {_time(waited)} of syncs" if waited else ""),
    }


def _peak(found, chip) -> str:
    if refused := [one for one in found if isinstance(one, Refused)]:
        return f"does not fit: {show_bytes(refused[0].needed)}"
    peak = max(one.memory["peak"] for one in found)
    return f"{show_bytes(peak)}, {peak / chip.memory:.1%}"


def _details(listed, chip) -> list[str]:
    """Markdown: all programs that were compiled, what they send, and whether they fit."""
    programs, sent, peaks, last = [], [], [], []
    for one in listed:
        if isinstance(one.found, Refused):
            last.append(_lacking(one, chip))
            continue
        name, found = {"program": one.program, "arm": one.arm}, one.found
        shown = {what: show_bytes(count) for what, count in found.memory.items()}
        shown |= {what: "-" if n is None else f"{n:.4g}" for what, n in found.counted.items()}
        programs.append(name | shown | {"compiled in": f"{found.seconds:.1f} s"})
        sent += [name | row for row in _sent(found.collectives)]
        peaks.append(found.memory["peak"])
    if peaks and not last:
        last = [f"All programs fit: {show_bytes(max(peaks))} of {show_bytes(chip.memory)} at most."]
    return [*(markdown(rows) for rows in (programs, sent) if rows), *last]


def _lacking(one: Listed, chip) -> str:
    """How much memory is missing, and which flags reduce it."""
    needed, available = one.found
    fields = {"parameters": "params", "the optimizer": "opt_state", "the order": "orders"}
    fields |= {"averages": "averages"} if one.shapes.state.averages else {}
    state = [f"{who} {show_bytes(one.shapes.bytes_of(field))}" for who, field in fields.items()]
    least = max(needed, chip.memory)
    larger = [name for name, other in CHIPS.items() if other.memory > least]
    return (
        f"{one.program}, {one.arm}: does not fit. It needs {show_bytes(needed)} of "
        f"{show_bytes(available)}; {show_bytes(needed - available)} are missing. "
        f"Of the state {', '.join(state)}; the rest is data and what the program computes. Take a "
        "sketch for an exact order, --input=thread, a smaller --unit_size, --units_per_step or "
        f"model, or another chip: {', '.join(larger) or 'none is large enough'}."
    )


def _sent(collectives) -> list[dict]:
    """A row per kind of collectives: how many there are, and the bytes of all their results."""
    kinds = defaultdict(list)
    for one in collectives:
        kinds[one.kind].append(one)
    return [
        {
            "collective": kind,
            "number": len(several),
            "bytes": show_bytes(sum(one.bytes for one in several)),
            "asynchronous": sum(one.asynchronous for one in several),
        }
        for kind, several in sorted(kinds.items())
    ]


def _gradient_flops(task: Task, recipe: Recipe) -> float:
    """Operations of one worker's gradient, as XLA counts them before it optimises."""

    def mean_loss(params, batch):
        return jnp.mean(task.model.loss(params, batch, jax.random.key(0)))

    batch = examples_of(task.train, recipe.units_per_step * recipe.unit_size)
    return jax.jit(jax.grad(mean_loss)).lower(_params(task), batch).cost_analysis()["flops"]


def _facts(task: Task, recipe: Recipe) -> dict:
    model, params = task.model, _params(task)
    first = {name: f"{leaf.dtype}{list(leaf.shape[1:])}" for name, leaf in task.train.items()}
    predict = model.predict
    if model.statistics is not None:
        predict = lambda p, x: model.predict(p, x, model.statistics(p, x))  # noqa: E731
    logits = jax.eval_shape(predict, params, examples_of(task.train, 2)["x"])
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
    return facts if recipe.target is None else facts | {
        "target": f"{recipe.metric} {recipe.target:g}"
    }  # fmt: skip


def _slice_facts(task: Task, given: Assumed, mesh, chip) -> dict:
    kind, held = mesh.devices.flat[0].device_kind, tree_bytes(dict(task.train))
    return {
        "slice": f"{given.topology}, {mesh.size} x {kind}, a worker each",
        "memory of a device": show_bytes(chip.memory),
        "training set on a device": f"{show_bytes(held / mesh.size)}; dealt, {show_bytes(held)}",
    }


def _params(task):
    return jax.eval_shape(task.model.init, jax.random.key(0))


def _time(seconds: float) -> str:
    return f"{seconds / HOUR:.3g} h" if seconds >= HOUR / 10 else f"{seconds:.3g} s"
