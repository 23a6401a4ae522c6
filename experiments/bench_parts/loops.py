"""What does the loop cost? Microseconds per step of the training loop, by order and rule.

Digits with the published units: every other cost of a step is small, so that what the host does
between two segments shows. All arms take turns; times_first is against the first row.
"""

from absl import flags

from experiments.bench_parts.timing import medians, publish, training_calls
from experiments.studies.tables import ORDERS, SYNC_RULES
from experiments.tasks import TASKS

REPEATS = 9
EPOCHS = 20
ROWS = {
    f"{order} {sync}": (order, sync)
    for order in ("rr", "id_pair", "cd_grab")
    for sync in ("parallel", "accumulate", "qsr")
}


def main(values: flags.FlagValues) -> None:
    task = TASKS["digits"](None)
    arms = {name: ROWS[name] for name in values.rows or ROWS}
    recipe = task.recipe._replace(epochs=EPOCHS, schedule="cosine", floor=1e-3)
    calls, steps = training_calls(task, recipe, arms)
    found = medians(calls, values.repeats or REPEATS)
    first = next(iter(found.values()))
    publish([
        {"part": "loops", "order": ORDERS[arms[name][0]].label,
         "rule": SYNC_RULES[arms[name][1]].label, "us_per_step": round(seconds / steps * 1e6, 1),
         "times_first": round(seconds / first, 3)}
        for name, seconds in found.items()
    ], values.jsonl)  # fmt: skip
