r"""Which of the three decisions pay on your machine, for your task? Measures, then recommends.

    python -m experiments.advise --task=digits --workers=4 --units_per_step=16
    python -m experiments.advise --task=cifar10 --data_dir=DIR --gbps=10

Measures in about a minute, for one worker: a step, the same with an order, and a load of its batch
from the task's own source. With --run=mesh the network is measured too, by an all-reduce of the
parameters over its devices, of one or several processes; otherwise it is --gbps, one row for each.
Then prices what every combination of decisions took in the recorded factorials (experiments/runs,
those with the nearest number of units per worker and step), and prints the fastest, its price and
its doubt: over how many tasks it was fastest, and what cannot be told from it.

Your own task is a file in experiments/tasks/. Expected: docs/combined.md says how far the advice
was from the best of all combinations, for tasks that it did not know.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from absl import flags as absl_flags

from experiments import flags
from experiments.advice_parts import machines, recorded
from experiments.advice_parts.recorded import Combination
from experiments.bench_parts import echo, timing
from experiments.processes import distributed
from experiments.results import archive, tables
from experiments.training.parts import num_params
from local_opt import runners

PERIOD, STEPS, REPEATS = 24, 64, 5  # of the recorded local steps; of what is timed


def define_flags(values: absl_flags.FlagValues) -> None:
    flags.define(values, "task", "setting", "run", task="digits")
    define, listed = flags.definer(values), absl_flags.DEFINE_list
    define(listed, "gbps", ["1", "10", "100", "400"], "of a worker's network, where it is not here")
    define(absl_flags.DEFINE_float, "latency", 3e-5, "seconds of a sync, besides its bytes")
    define(absl_flags.DEFINE_string, "runs", str(archive.FOLDER), "folder of recorded factorials")


def order_ratio(task, recipe, order: str) -> float:
    """How many times longer a fresh step is with the order: side by side, at least 1."""
    short = recipe._replace(total_steps=STEPS, warmup_steps=0, bound_every=0)
    calls, _ = timing.training_calls(
        task, short, {"plain": ("dealt", "parallel"), "order": (order, "parallel")}
    )
    seconds = timing.medians(calls, REPEATS)
    return max(1.0, seconds["order"] / seconds["plain"])


def measured_sync(mesh, parameters: int) -> float:
    """Seconds of an all-reduce of float32 parameters over the mesh."""
    owned = runners.owned_sharding(mesh)
    mean = jax.jit(
        runners.over_mesh(mesh)(
            lambda x: (jax.lax.pmean(x, runners.AXIS),), owned_in=(True,), owned_out=(True,)
        )
    )
    workers = mesh.devices.size
    zeros = jax.jit(lambda: jnp.zeros((workers, parameters)), out_shardings=owned)()
    return timing.medians({"sync": lambda: mean(zeros)}, REPEATS)["sync"]


def machines_of(task, recipe, order, values) -> dict[str, machines.Machine]:
    """{network: machine}, from what was measured here."""
    speed, size = echo.measure(task, recipe), num_params(task.model)
    ordered = order_ratio(task, recipe, order)
    mesh = distributed.mesh_of(recipe.run, recipe.workers)
    if mesh is not None:
        syncs = {"measured": measured_sync(mesh, size)}
    else:
        syncs = {
            f"{gbps:g} Gb/s": machines.sync_seconds(
                size, recipe.workers, gbps=gbps, latency=values.latency
            )
            for gbps in flags.positive_numbers(values, "gbps")
        }
    return {
        name: machines.Machine(
            speed.step_seconds, speed.load_seconds, sync, size, min(values.latency, sync), ordered
        )
        for name, sync in syncs.items()
    }


def command_of(combination: Combination, order: str) -> str:
    """Flags of `experiments.train` that take these decisions, as they were recorded."""
    parts = [f"--order={order if combination.order else 'dealt'}"]
    parts += [f"--sync=constant --h_base={PERIOD}" if combination.local else "--sync=parallel"]
    if combination.uses > 1:
        parts.append(f"--echo=fixed --echo_factor={combination.uses}")
    return " ".join(parts)


def rows_of(machine: machines.Machine, known: Sequence[recorded.Factorial]) -> list[dict]:
    """A row per combination, the fastest first."""
    logs = machines.predict(machine, known)
    times = {c: machines.factor(-log) for c, log in logs.items()}
    return [
        {
            "decisions": c.label,
            "times as fast as none": "{:.2f} ({:.2f} to {:.2f})".format(*times[c]),
            "per task": ", ".join(
                f"{found.task} {np.exp(-x):.2f}" for found, x in zip(known, logs[c], strict=True)
            ),
        }
        for c in sorted(logs, key=lambda c: logs[c].mean())
    ]


def advice(name: str, machine: machines.Machine, known: Sequence[recorded.Factorial]) -> str:
    """What is recommended on a machine, in words."""
    choice = machines.best_of(machines.predict(machine, known))
    rivals = ", ".join(c.label for c in choice.rivals)
    doubt = f"Cannot be told from it: {rivals}." if rivals else "Nothing else comes near."
    mean, low, high = choice.times
    return (
        f"{name}: a load is {machine.load / machine.step:.2f} steps, a sync "
        f"{machine.sync / machine.step:.2f}. Take {choice.best.label}: {mean:.1f} times as fast as "
        f"none ({low:.1f} to {high:.1f}, 95 % over {len(known)} tasks). {doubt}\n"
        f"    {command_of(choice.best, known[0].order)}"
    )


def run(values: absl_flags.FlagValues) -> None:
    distributed.start(values)
    task, recipe = flags.setting_from_flags(values)
    known = machines.near(recorded.load(values.runs), recipe.units_per_step)
    if not known:
        raise app.UsageError(
            f"--runs is {values.runs!r}, which holds no map_TASK_WxB_eUSES: leave --runs unset."
        )
    found = machines_of(task, recipe, known[0].order, values)
    first = next(iter(found.values()))
    say = distributed.say
    say(
        f"{task.name}, {first.parameters:,} parameters, {recipe.workers} workers with "
        f"{recipe.units_per_step * recipe.unit_size} examples per step each. Measured: a step "
        f"{1e3 * first.step:.3g} ms, with an order {first.ordered:.2f} times that, a load "
        f"{1e3 * first.load:.3g} ms. Known: {', '.join(f.task for f in known)} at {known[0].size}."
    )
    for name, machine in found.items():
        say(f"\n{advice(name, machine, known)}\n\n{tables.markdown(rows_of(machine, known))}")


if __name__ == "__main__":
    define_flags(absl_flags.FLAGS)
    app.run(lambda argv: run(absl_flags.FLAGS))
