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
from collections import defaultdict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import local_opt
from experiments.results.tables import markdown, show_bytes
from experiments.study.chips import CHIPS, Slice, slice_of
from experiments.study.compile import (
    Compiled,
    Refused,
    Shapes,
    buffer_bytes,
    compile_or_refuse,
    lower_step,
    shapes_of,
    tree_bytes,
)
from experiments.study.cost import operations, price, run_of, traffic
from experiments.study.tables import ORDERS
from experiments.study.trainer import left_out, rows_of
from experiments.tasks.base import Recipe, Task
from experiments.training.config import num_params, size_of
from local_opt.forecast import sync_seconds

TERA, HOUR = 1e12, 3600.0
WINDOWS = 50  # of a priced run


class Assumed(NamedTuple):
    """What a forecast takes for granted."""

    compiles: bool = True
    device_flops: float = 50 * TERA  # per second
    gigabits: float = 25.0  # of a worker's link, per second
    machines: tuple = ()  # of `cost.machines`: a column of priced time each
    topology: str | None = None  # as of `chips.slice_of`; None: the backend at hand
    reads: bool = False  # batches are handed over there; else the data stay on the devices


def assumed(values, machines: tuple = ()) -> Assumed:
    """What flags, parsed ones, say of it."""
    flops, reads = values.device_teraflops * TERA, values.input != "device"
    return Assumed(values.compile, flops, values.gigabits, machines, values.topology, reads)


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
    facts = _facts(task, recipe)
    made = _Programs(task, recipe, given, on)
    rows = []
    for speed in study.speeds or (None,):
        for arm in study.arms.values():
            run = run_of(task, recipe, rows_of(arm), speed, step_seconds)
            shapes = made.shapes(arm)
            rows.append(_row(task, arm, speed, run, shapes, given) | made.cell(arm, run))
    if on is not None:
        facts["slice"] = f"{on.name}, {on.mesh.size} x {on.kind}, a worker each"
        facts["memory of a device"] = show_bytes(on.chip.memory)
        held = tree_bytes(dict(task.train))
        share = show_bytes(held / recipe.workers)
        facts["training set on a device"] = f"{share}; dealt, {show_bytes(held)}"
    facts = [*facts.items(), *(("left out", text) for text in left_out(study, task, recipe))]
    facts = [{"what": name, "value": value} for name, value in facts]
    return "\n\n".join([markdown(facts), markdown(rows), *made.details()])


def _row(task, arm, speed, run, shapes: Shapes, given) -> dict:
    order, rule, _ = rows_of(arm)
    size, sizes = num_params(task.model), run.sizes
    sent = traffic(order, rule, sizes, size, sync_in_step=shapes.sync_in_step)
    allreduces = sent(run.rounds, run.echo.loads)
    ring = local_opt.sync_bytes(size, num_workers=sizes.workers)
    link = {"num_workers": sizes.workers, "gigabits_per_second": given.gigabits}
    ends = np.linspace(0, run.steps, WINDOWS + 1).astype(int)[1:]
    loads = run.echo.loads_before(ends)
    synced = run.plans.sync and np.searchsorted(run.plans.sync.ends, ends, side="right")
    windows = [
        {"step": t, "loads": n, "allreduces": sent(int(k), int(n))}
        for t, n, k in zip(ends, loads, loads if synced is None else synced, strict=True)
    ]
    return (
        ({} if speed is None else {"R": f"{speed:g}"})
        | {
            "arm": arm.label,
            "steps": run.steps,
            "loads": run.echo.loads,
            "rounds": run.rounds,
            "volume": f"{run.rounds / run.steps:.3%}",
            "sent per worker": show_bytes(ring * allreduces),
            "state of the order": show_bytes(shapes.bytes_of("orders")),
            "forecast": _hours(run.seconds, sync_seconds(size, **link) * allreduces),
        }
        | {machine.label: f"{price(windows, machine):.0f}" for machine in given.machines}
    )


class _Programs:
    """Compiles the programs of arms, those that arms share once, and tells of all in the end."""

    def __init__(self, task: Task, recipe: Recipe, given: Assumed, on: Slice | None):
        self._task, self._recipe, self._given, self._on = task, recipe, given, on
        self._cached = functools.cache(self._shapes_of)
        self._found: dict[tuple, tuple[dict, Compiled | Refused, Shapes]] = {}
        self._memory: dict[tuple, str] = {}

    def shapes(self, arm) -> Shapes:
        return self._cached(*self._key(arm))

    def cell(self, arm, run) -> dict:
        """What the programs of an arm's run take of a device."""
        if self._on is None:
            return {"memory of a worker": self._of_a_worker(arm)}
        shapes = self.shapes(arm)
        asked = {
            "fresh step": lambda: shapes.step(True),
            "echoed step": run.steps > run.echo.loads and (lambda: shapes.step(False)),
            "sync": not shapes.sync_in_step and (lambda: shapes.end(True, False)),
            "epoch's end": not shapes.ahead and (lambda: shapes.end(False, True)),
        }
        found = [self._compiled(arm, name, lower) for name, lower in asked.items() if lower]
        if refused := [f for f in found if isinstance(f, Refused)]:
            return {"peak of a device": f"does not fit: {show_bytes(refused[0].needed)}"}
        peak = max(f.peak for f in found)
        return {"peak of a device": f"{show_bytes(peak)}, {peak / self._on.chip.memory:.1%}"}

    def details(self) -> list[str]:
        """Markdown: all programs that were compiled, what they send, and whether they fit."""
        fitting = [(name, f) for name, f, _ in self._found.values() if isinstance(f, Compiled)]
        programs = [name | _numbers(found) for name, found in fitting]
        sent = [name | row for name, found in fitting for row in _sent(found)]
        lacking = [_lacking(*one) for one in self._found.values() if isinstance(one[1], Refused)]
        if fitting and not lacking:
            peak = show_bytes(max(found.peak for _, found in fitting))
            lacking = [f"All programs fit: {peak} of {show_bytes(self._on.chip.memory)} at most."]
        return [*(markdown(rows) for rows in (programs, sent) if rows), *lacking]

    def _key(self, arm) -> tuple:
        return arm.order, rows_of(arm)[1].rounds

    def _shapes_of(self, order, rounds) -> Shapes:
        return shapes_of(
            self._task, self._recipe, ORDERS[order], rounds, reads=self._given.reads,
            mesh=self._on and self._on.mesh,
        )  # fmt: skip

    def _of_a_worker(self, arm) -> str:
        if not self._given.compiles:
            return "not compiled"
        if (key := self._key(arm)) not in self._memory:
            order, rule, _ = rows_of(arm)
            lowered = lower_step(self._task, self._recipe, order, rule.rounds)
            self._memory[key] = show_bytes(buffer_bytes(lowered.compile()))
        return self._memory[key]

    def _compiled(self, arm, name: str, lower) -> Compiled | Refused:
        if (key := (*self._key(arm), name)) not in self._found:
            found = compile_or_refuse(lower(), self._on.chip)
            self._found[key] = {"program": name, "arm": arm.label}, found, self.shapes(arm)
        return self._found[key][1]


def _lacking(name: dict, found: Refused, shapes: Shapes) -> str:
    """What is missing of memory, and what may be changed."""
    fields = {"parameters": "params", "the optimizer": "opt_state", "the order": "orders"}
    state = [f"{who} {show_bytes(shapes.bytes_of(field))}" for who, field in fields.items()]
    larger = [name for name, chip in CHIPS.items() if chip.memory > found.needed]
    return (
        f"{', '.join(name.values())}: does not fit. It needs {show_bytes(found.needed)} of "
        f"{show_bytes(found.available)}; {show_bytes(found.needed - found.available)} are missing. "
        f"Of the state {', '.join(state)}; the rest is data and what the program computes. Take a "
        "sketch for an exact order, --input=thread, a smaller --unit_size, --units_per_step or "
        f"model, or another chip: {', '.join(larger) or 'none is large enough'}."
    )


def _numbers(found: Compiled) -> dict:
    """Memory, operations and the time to compile, of one program on one device."""
    counted = {k: "-" if v is None else f"{v:.4g}" for k, v in found.counted.items()}
    memory = {name: show_bytes(count) for name, count in found.memory.items()}
    return memory | counted | {"compiled in": f"{found.seconds:.1f} s"}


def _sent(found: Compiled) -> list[dict]:
    """A row per kind of collectives: how many there are, and the bytes of all their results."""
    kinds = defaultdict(list)
    for one in found.collectives:
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


def _gradient_flops(model, batch) -> float:
    """Operations of one worker's gradient."""

    def mean_loss(params, batch):
        return jnp.mean(model.loss(params, batch, jax.random.key(0)))

    return operations(jax.grad(mean_loss), _params(model), batch)


def _facts(task: Task, recipe: Recipe) -> dict:
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
    return facts if recipe.target is None else facts | {
        "target": f"{recipe.metric} {recipe.target:g}"
    }  # fmt: skip


def _params(model):
    return jax.eval_shape(model.init, jax.random.key(0))


def _shapes(data, number):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype), data)


def _hours(compute, communicate):
    def show(seconds):
        return f"{seconds / HOUR:.3g} h" if seconds >= HOUR / 10 else f"{seconds:.3g} s"

    return show(compute) + (f" + {show(communicate)} of syncs" if communicate else "")
