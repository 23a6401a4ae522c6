"""What do runs side by side bring? Microseconds per run and step of n runs in one program.

Digits, whose steps are the shortest there are, and a perceptron of two layers; D-RR and CD-GraB.
All counts of a row take turns; times_alone is against one run alone, below 1 where they pay.
Aim: below 0.5 on an accelerator, whose small steps are launches; on a CPU they need not pay.
"""

import numpy as np
from absl import flags

from experiments.bench_parts.timing import medians, publish
from experiments.studies.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.tasks import TASKS
from experiments.training import beside, config, loop, program

REPEATS = 7
COUNTS = (1, 4, 16)
EPOCHS = 10
# Choices of digits, order, rule.
ROWS = {
    "softmax rr": ({}, "rr", "parallel"),
    "softmax cd_grab": ({}, "cd_grab", "parallel"),
    "mlp qsr": ({"model": "mlp", "width": 64}, "dealt", "qsr"),
}


def main(values: flags.FlagValues) -> None:
    found = []
    for name in values.rows or ROWS:
        calls, steps = calls_of(*ROWS[name])
        times = medians(calls, values.repeats or REPEATS)
        alone = times[1]
        found += [
            {"part": "beside", "row": name, "runs": count,
             "us_per_run_step": round(seconds / steps / count * 1e6, 1),
             "times_alone": round(seconds / count / alone, 3)}
            for count, seconds in times.items()
        ]  # fmt: skip
    publish(found, values.jsonl)


def calls_of(choices: dict, order: str, rule: str):
    """({runs: call}, steps of a call)."""
    task = TASKS["digits"](None, **choices)
    recipe = task.recipe._replace(epochs=EPOCHS, bound_every=0)
    row, sync = ORDERS[order], SYNC_RULES[rule]
    one = program.build(task, recipe, row, sync.rounds)
    several = beside.lifted(one)
    known = config.config_of(recipe, one.sizes, seed=0)
    plans = config.plans_of(known, sync, ECHO_POLICIES["none"], rate=0.1)

    def call_of(count):
        built, given, seed = several, plans, tuple(range(count))
        if count == 1:
            built, seed = one, 0
        else:
            given = plans._replace(rates=np.stack([plans.rates] * count))
        loop.warm_up(built, given, built.init(seed))
        return lambda: loop.run(
            built, given, built.init(seed), loop.Progress(), lambda at, state: state, seed=seed
        )[1]

    return {count: call_of(count) for count in COUNTS}, plans.total_steps
