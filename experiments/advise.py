r"""Recommends which of the three decisions to use on your machine, for your task.

    python -m experiments.advise --workers=4 --units_per_step=16  # digits: a minute
    python -m experiments.advise --task=cifar10 --data_dir=DIR --gigabits=10

It measures for about a minute, on one worker: a step, the same step with an order, and the time to
load a batch from the task's own source. With --run=mesh it also measures the network, as an
all-reduce of the parameters over the devices of one or several processes. Otherwise each value of
--gigabits is one network, which a sync uses by --efficiency, after --latency: how far such times
are from measured ones is in docs/results/measured_syncs.md. --maxtext=base.yml takes the network
and H from a config of MaxText, and says how much of the time such a run computes.

Then the time of every combination of decisions in the recorded factorials is modelled
(runs/map.json; those with the nearest number of units per worker and step). The command prints
the fastest one, and which others are statistically tied with it. To use your own task, add a file
to experiments/data/.
"""

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags as absl_flags

import syncopate
from experiments import entry, files, forecast
from experiments.compare import flags
from experiments.compare.arms import row_of
from experiments.data.base import SPEED
from experiments.report import tables
from experiments.report.statistics import interval
from experiments.trainer.config import Sizes, num_params
from syncopate.refusals import UserError

# The order and the H of local steps in the recorded runs.
ORDER, PERIOD = "cd_grab+sketch256+dealt", 24
STEPS, REPEATS = 64, 5  # of each timing
GIGABITS, LATENCY = (1.0, 10.0, 100.0, 400.0), 3e-5  # networks; seconds of a sync beside its bytes


class Combination(NamedTuple):
    """Which of the decisions are taken."""

    order: bool = False
    local: bool = False
    uses: int = 1  # of a batch

    @property
    def label(self) -> str:
        taken = ["order"] * self.order + ["local steps"] * self.local
        return " + ".join(taken + [f"{self.uses} uses"] * (self.uses > 1)) or "none"

    @property
    def decisions(self) -> int:
        return self.order + self.local + (self.uses > 1)


NONE = Combination()


class Factorial(NamedTuple):
    """One task at one size of the batch per worker."""

    task: str
    sizes: Sizes
    # (steps, loads, rounds) to the target at the best rate, float64[3, seeds]: of combinations that
    # arrive with all seeds.
    taken: dict[Combination, np.ndarray]


def load() -> list[Factorial]:
    """The recorded factorials experiments/runs/map_*, joined by task, size and target."""
    content = files.read_json(os.path.join(os.path.dirname(__file__), "runs", "map.json"))
    return [
        Factorial(
            row["task"],
            Sizes(*row["sizes"]),
            {Combination(*arm["of"]): np.array(arm["to"], float) for arm in row["taken"]},
        )
        for row in content["factorials"]
    ]


def near(tasks: Sequence[Factorial], units_per_step: int) -> list[Factorial]:
    """Those whose units per worker and step are nearest, by ratio."""

    def far(task):
        return abs(np.log(task.sizes.units_per_step / units_per_step))

    least = min(map(far, tasks), default=0.0)
    return [task for task in tasks if far(task) == least]


def logs_of(machine, task: Factorial) -> dict[Combination, np.ndarray]:
    """log(time to the target) of every combination, [..., seeds], on machines [..., 1]."""
    from experiments.compare.cost import order_traffic, run_time

    traffic = order_traffic(row_of("order", ORDER), task.sizes, machine.parameters)
    result = {}
    for combination, (steps, loads, rounds) in task.taken.items():
        sent = np.array([traffic(int(n)) for n in loads]) if combination.order else 0.0
        sums = {"rounds": rounds, "sent": sent, "ordered": combination.order}
        result[combination] = np.log(run_time(machine, steps=steps, loads=loads, **sums))
    return result


def best_of(logs: Mapping[Combination, np.ndarray]) -> tuple[Combination, list[Combination]]:
    """The best combination by logarithms of times, float64[n] each, paired; and its rivals.

    Those are what the 95 % interval does not tell from it.
    """
    best = min(logs, key=lambda c: (logs[c].mean(), c.decisions))
    behind = {c: np.subtract(*interval(logs[c] - logs[best])) for c in logs if c != best}
    return best, [c for c, least in behind.items() if not least > 0]


def predict(machine, tasks: Sequence[Factorial]) -> dict[Combination, np.ndarray]:
    """log(time / time of none) of every combination that all have, float64[tasks]."""
    logs = [{c: log.mean(axis=-1) for c, log in logs_of(machine, f).items()} for f in tasks]
    common = [c for c in logs[0] if all(c in of for of in logs)]
    return {c: np.array([of[c] - of[NONE] for of in logs]) for c in common}


def define_flags(values: absl_flags.FlagValues) -> None:
    flags.define(values, "task", "setting", "processes", task="digits")
    with flags.shown(values):
        text = "Gb/s of a worker's network, if it is not measured"
        flags.define_list(values, SPEED, "gigabits", [*GIGABITS], text)
    forecast.define_network(values, LATENCY)


def order_ratio(task, recipe) -> float:
    """Time of a fresh step with the order over one without, timed side by side; at least 1."""
    from experiments import timing

    short = recipe._replace(total_steps=STEPS, warmup_steps=0, bound_every=0)
    calls, _ = timing.training_calls(
        task, short, {"plain": ("rr+dealt", "parallel"), "order": (ORDER, "parallel")}
    )
    seconds = timing.medians(calls, REPEATS)
    return max(1.0, seconds["order"] / seconds["plain"])


def measured_sync(mesh, parameters: int) -> float:
    """Seconds of an all-reduce of float32 parameters over the mesh."""
    import jax
    import jax.numpy as jnp

    import local_opt
    from experiments import timing
    from experiments.distributed.devices import worker_sharding
    from syncopate.workers import AXIS

    sharding = worker_sharding(mesh)
    average = lambda x: jax.lax.pmean(x, AXIS)  # noqa: E731
    mean = jax.jit(local_opt.map_workers(average, mesh, in_specs="worker", out_specs="worker"))
    shape = mesh.devices.size, parameters
    zeros = jax.jit(lambda: jnp.zeros(shape), out_shardings=sharding)()
    return timing.medians({"sync": lambda: mean(zeros)}, REPEATS)["sync"]


def machines_of(task, recipe, values) -> list:
    """One machine per network, from the times measured here."""
    from experiments import timing
    from experiments.distributed import devices

    size, workers = num_params(task.model), recipe.workers
    mesh = devices.mesh_of(recipe.run, workers)
    given = [n for n in ("gigabits", "efficiency", "latency", "maxtext") if values[n].present]
    if mesh is not None and given:
        name = f"--{given[0]}"
        raise UserError(f"{name} is unused, as --run=mesh measures the network: leave one out.")
    ratio = order_ratio(task, recipe)  # which refuses sizes that do not fit
    here = timing.measure(task, recipe)._replace(ordered=ratio, parameters=size)
    if mesh is not None:
        syncs = {"measured": measured_sync(mesh, size)}
        latency = measured_sync(mesh, 1)
    else:
        sync = functools.partial(
            syncopate.local_opt.costs.sync_seconds,
            size,
            num_workers=workers,
            efficiency=values.efficiency,
            latency=values.latency,
        )
        syncs = {f"{speed:g} Gb/s": sync(gigabits=speed) for speed in values.gigabits}
        latency = values.latency
    return [
        here._replace(label=name, sync=sync, latency=min(latency, sync))
        for name, sync in syncs.items()
    ]


def computing(machine, period: int) -> float:
    """The share of its time that a run computes, with a sync after every `period` steps."""
    steps = period * machine.step
    return steps / (steps + machine.sync)


def command_of(combination: Combination) -> str:
    """Flags of `experiments.train` for these decisions, as they were recorded."""
    parts = [f"--order={ORDER if combination.order else 'rr+dealt'}"]
    parts += [f"--sync=constant --h_base={PERIOD}" if combination.local else "--sync=parallel"]
    if combination.uses > 1:
        parts.append(f"--echo=fixed --echo_factor={combination.uses}")
    return " ".join(parts)


def advice(machine, tasks: Sequence[Factorial]) -> str:
    """The recommendation for a machine, and a table of the combinations, fastest first."""
    logs = predict(machine, tasks)
    best, close = best_of(logs)
    mean, half = interval(-logs[best])
    mean, low, high = np.exp([mean, mean - half, mean + half])
    rivals = ", ".join(c.label for c in close)
    doubt = f"Statistically tied: {rivals}." if rivals else "No other combination is close."
    rows = [
        {
            "decisions": c.label,
            "speed-up over none": tables.times(-logs[c], exact=True),
            "per task": ", ".join(
                f"{task.task} {np.exp(-x):.2f}" for task, x in zip(tasks, logs[c], strict=True)
            ),
        }
        for c in sorted(logs, key=lambda c: logs[c].mean())
    ]
    gain = (
        f"{mean:.1f} times as fast as none ({low:.1f} to {high:.1f}, 95 % over {len(tasks)} tasks)"
    )
    text = f"Use {best.label}: {gain}. {doubt}\n    {command_of(best)}"
    if not low > 1:
        text = f"Nothing is shown to help{f': {best.label} is {gain}' if best != NONE else ''}."
    return (
        f"{machine.label}: a load takes {machine.load / machine.step:.2f} steps, a sync "
        f"{machine.sync / machine.step:.2f}. {text}\n\n{tables.markdown(rows)}"
    )


def run(values: absl_flags.FlagValues) -> None:
    from experiments import fingerprints
    from experiments.distributed import agreement, processes

    tasks, config = load(), forecast.take_maxtext(values)
    processes.start(values)
    task, recipe = flags.setting_from_flags(values)
    agreement.check(fingerprints.facts(values, fingerprints.data_hash(task)))
    processes.say("Measuring a load, and steps with and without an order", file=sys.stderr)
    tasks = near(tasks, recipe.units_per_step)
    machines = machines_of(task, recipe, values)
    first, each = machines[0], recipe.units_per_step * recipe.unit_size
    processes.say(
        f"{task.name}, {first.parameters:,} parameters, {recipe.workers} workers with {each} "
        f"examples per step each. Measured: {1e3 * first.step:.3g} ms for a step, "
        f"{first.ordered:.2f} times that with an order, {1e3 * first.load:.3g} ms for a load. "
        f"Recorded tasks: {', '.join(f.task for f in tasks)} at "
        f"{tasks[0].sizes.workers} x {tasks[0].sizes.units_per_step}."
    )
    for machine in machines:
        processes.say(f"\n{advice(machine, tasks)}")
        if config is not None:
            share, every = computing(machine, config.period), computing(machine, 1)
            processes.say(
                f"With diloco_sync_period = {config.period}, {share:.1%} of the time is "
                f"computation; with a sync in every step {every:.1%}."
            )


if __name__ == "__main__":
    entry.main(define_flags, run, defaults=flags.defaults)
