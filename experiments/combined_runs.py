"""The runs of the factorial: their arms, and the learning rate that is each arm's own."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.echo_policies import POLICIES
from experiments.methods import METHODS
from experiments.metrics import METRICS
from experiments.sync_rules import RULES

FINALISTS = 2
FACTORS = ("order", "sync", "echo")


class Arm(NamedTuple):
    order: str
    sync: str
    echo: str

    @property
    def label(self) -> str:
        names = METHODS[self.order].label, RULES[self.sync].label, POLICIES[self.echo].label
        return " + ".join(names)


class Run(NamedTuple):
    order: str
    sync: str
    echo: str
    learning_rate: float
    seed: int


def run_of(record: dict) -> Run:
    return Run(*(record[field] for field in Run._fields))


def arm_of(record: dict) -> Arm:
    return Arm(*(record[field] for field in FACTORS))


def whole_runs(done: Sequence[dict], total_steps: int) -> list[dict]:
    """The records of runs that reached their last step."""
    ended = {run_of(r) for r in done if r["step"] == total_steps}
    return [r for r in done if run_of(r) in ended]


def runs_per_arm(rates: int, seeds: int) -> int:
    return rates + min(FINALISTS, rates) * (seeds - 1)


def objective(record: dict) -> float:
    """What is compared: the train loss, above its minimum where that is known."""
    return record.get("suboptimality", record["train_loss"])


def _ends(all_records, arm):
    """{learning rate: {seed: last record}} of an arm, without rates at which a run diverged."""
    last, out = {}, set()
    for r in all_records:
        if arm_of(r) != arm:
            continue
        if r["diverged"]:
            out.add(r["learning_rate"])
        last.setdefault(r["learning_rate"], {})[r["seed"]] = r
    return {rate: by_seed for rate, by_seed in last.items() if rate not in out}


def finalists(all_records: Sequence[dict], arm: Arm) -> list[float]:
    """The rates with which seed 0 ends lowest."""
    ends = {rate: objective(by_seed[0]) for rate, by_seed in _ends(all_records, arm).items()}
    return sorted(ends, key=ends.get)[:FINALISTS]


def best_rate(all_records: Sequence[dict], arm: Arm) -> float | None:
    """The rate whose mean over seeds ends lowest, of those that ran with most seeds."""
    ends = _ends(all_records, arm)
    most = max(map(len, ends.values()), default=0)
    means = {
        rate: np.mean([objective(r) for r in by_seed.values()])
        for rate, by_seed in ends.items()
        if len(by_seed) == most
    }
    return min(means, key=means.get, default=None)


def at_best(all_records: Sequence[dict], arms: Sequence[Arm]) -> dict[Arm, list[list[dict]]]:
    """{arm: one list of records per seed}, at every arm's own best rate.

    Raises:
      ValueError: where an arm diverged at every rate, or has fewer seeds than another.
    """
    chosen = {}
    for arm in arms:
        rate = best_rate(all_records, arm)
        if rate is None:
            raise ValueError(
                f"{arm.label} has no learning rate at which it did not diverge: pass lower "
                "--learning_rates."
            )
        own = [r for r in all_records if arm_of(r) == arm and r["learning_rate"] == rate]
        seeds = sorted({r["seed"] for r in own})
        chosen[arm] = [[r for r in own if r["seed"] == seed] for seed in seeds]
    counts = {arm.label: len(runs) for arm, runs in chosen.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"the arms' best rates have runs of {counts} seeds, for others diverged: pass more and "
            "lower --learning_rates."
        )
    return chosen


def target_of(chosen: dict[Arm, list[list[dict]]]) -> float:
    """The highest of all last objectives: every arm gets there with every seed."""
    return max(objective(run[-1]) for runs in chosen.values() for run in runs)


def until(run: Sequence[dict], target: float) -> list[dict]:
    """The records of a run up to the first at or below the target."""
    first = next(i for i, r in enumerate(run) if objective(r) <= target)
    return list(run[: first + 1])


def reached(run: Sequence[dict], target: float) -> dict:
    """The first record of a run at or below the target."""
    return until(run, target)[-1]


def above_optimum(all_records: Sequence[dict]) -> str:
    """Words for what is compared, where the minimum of the train loss is known; else ""."""
    return " above the optimum" if "suboptimality" in all_records[0] else ""


def metric_of(all_records: Sequence[dict]) -> str:
    """The name of the metric that the test set measures."""
    names = set().union(*all_records)  # a run that diverged at once has none
    return next(name for name in METRICS if f"test_{name}" in names)
