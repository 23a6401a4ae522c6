"""What does a manifest cost? Steps with a checkpoint every 50, with all leaves hashed and without.

Softmax regression on digits, whose steps are the shortest there are, and an MLP whose state is so
large that hashes take time. Without: orbax alone writes the same state. Every call
trains on, waits for its last checkpoint, and takes turns with the others; times_without is the
median over the turns of the ratio to orbax alone in the same turn, with the order statistics that
hold it with 95 %.
Aim: at most 1.02.
"""

import statistics
import tempfile

import jax
import numpy as np
from absl import flags, logging

from experiments.bench_parts.timing import in_turns, median_interval, publish
from experiments.studies.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.tasks import TASKS
from experiments.training import checkpoint, loop
from experiments.training.checkpoint import Evaluation
from experiments.training.config import config_of, plans_of
from experiments.training.program import build

REPEATS = 9
EVERY = 50  # steps
TASK = {"model": "mlp", "depth": 2}
# Choices of digits, workers, steps of a call.
ROWS = {
    "softmax": ({}, 32, 500),
    "mlp 1024": ({**TASK, "width": 1024}, 4, 100),
}


def main(values: flags.FlagValues) -> None:
    found = []
    logging.set_verbosity(logging.WARNING)  # orbax tells a checkpoint in forty lines
    for name in values.rows or ROWS:
        calls, steps, size = calls_of(*ROWS[name])
        times = in_turns(calls, values.repeats or REPEATS)
        for arm, seconds in times.items():
            ratios = np.divide(seconds, times["orbax alone"])
            ratio, low, high = median_interval(ratios)
            found.append({
                "part": "saves", "model": name, "state MB": round(size / 1e6, 1), "arm": arm,
                "us_per_step": round(statistics.median(seconds) / steps * 1e6, 1),
                "times_without": round(ratio, 3), "low": round(low, 3), "high": round(high, 3),
            })  # fmt: skip
    publish(found, values.jsonl)


def calls_of(choices: dict, workers: int, steps: int):
    """({arm: call}, steps of a call, bytes of the state)."""
    task = TASKS["digits"](None, **choices)
    recipe = task.recipe._replace(
        workers=workers, units_per_step=4, unit_size=1, epochs=None, total_steps=steps
    )
    rule = SYNC_RULES["qsr"]
    program = build(task, recipe, ORDERS["rr"], rule.rounds)
    config, rate = config_of(recipe, program.sizes, seed=0), recipe.learning_rates[0]
    plans = plans_of(config, rule, ECHO_POLICIES["none"], rate=rate)
    loop.warm_up(program, plans, program.init(0))
    saves = {"no saves": None, "orbax alone": plain, "with manifest": checkpoint.save}

    def call_of(save):
        def call():
            with tempfile.TemporaryDirectory() as folder, checkpoint.opened(folder) as manager:

                def hook(at, state):
                    if save is not None and at.step % EVERY == 0:
                        save(manager, plans, at, state, Evaluation())
                    return state

                start, stops = loop.Progress(), range(EVERY, steps + 1, EVERY)
                loop.run(program, plans, program.init(0), start, hook, seed=0, stops=stops)
                manager.wait_until_finished()

        return call

    size = sum(x.nbytes for x in jax.tree.leaves(program.init(0)))
    return {name: call_of(save) for name, save in saves.items()}, steps, size


def plain(manager, plans, at, state, seen) -> None:
    """A checkpoint without a manifest."""
    import orbax.checkpoint as ocp

    position = ocp.args.JsonSave({"evaluation": seen._asdict(), "plans": plans.digests()})
    args = ocp.args.Composite(state=ocp.args.StandardSave(state), position=position)
    manager.save(at.step, args=args)
