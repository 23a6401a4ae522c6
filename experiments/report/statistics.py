"""Comparisons: arms at their own best learning rates, and their costs up to a target.

A run is the list of its records by step.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.data.metrics import METRICS

TUNING, REPORTED = ("run", "tune"), ("run", "report")  # phases
LOSS, ABOVE = "train/loss", "train/above_optimum"
AVERAGED = "/averaged"  # ends the names of scalars of averaged weights
Run = Sequence[Mapping]


class Criterion(NamedTuple):
    """The criterion that chooses a learning rate."""

    scalar: str = LOSS  # on the tuning split
    lower: bool = True  # whether less of it is better
    when: str = "last"  # value, "lowest" point of the mean over seeds, or fewest steps to "target"
    target: float | None = None  # of the scalar, for when="target"


class Chosen(NamedTuple):
    """An arm at its own best learning rate, at one speed of the input."""

    arm: str
    label: str
    speed: float | None
    rate: float | None  # None where a run diverged at every rate
    runs: Mapping[int, Run]  # by seed, of the reported phase
    tried: tuple[float, ...]  # learning rates, ascending, as those that diverged
    diverged: tuple[float, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The data of tables and pictures."""

    records: Sequence[Mapping]  # of whole runs
    arms: Mapping[str, str]  # {name: label}, the baseline first
    criterion: Criterion
    speeds: tuple  # of the input, or (None,)
    chosen: Mapping[tuple, Chosen]  # {(arm, speed): Chosen} of those that have run, as the arms
    plans: Mapping[str, Any]  # {arm: SyncPlan}, where they are known before the run
    averaged: Any = None  # the same of averaged weights, where they were recorded

    def at(self, speed: float | None = None) -> list[Chosen]:
        return [one for (_, s), one in self.chosen.items() if s == speed]

    def baseline(self, speed: float | None = None) -> Chosen | None:
        return self.chosen.get((next(iter(self.arms)), speed))


def compare(records, arms: Mapping[str, str], criterion: Criterion, plans=None) -> Comparison:
    """Every arm at its own best rate, at every speed; of averaged weights, at the best for them."""
    records, chosen = list(records), {}
    speeds = sorted({r["speed"] for r in records} - {None}) or [None]
    for speed, (arm, label) in itertools.product(speeds, arms.items()):
        if tried := runs_of(records, arm, speed):
            rate, out = best_rate(records, arm, speed, criterion), diverged(records, arm, speed)
            runs = dict(sorted(runs_of(records, arm, speed, REPORTED).get(rate, {}).items()))
            chosen[arm, speed] = Chosen(arm, label, speed, rate, runs, tuple(sorted(tried)), out)
    averaged = [
        compare([r for r in records if each.scalar in r or r.get("diverged")], arms, each, plans)
        for each in criteria(criterion, records)[1:]
    ]
    return Comparison(
        records, dict(arms), criterion, tuple(speeds), chosen, dict(plans or {}), *averaged
    )


def criteria(criterion: Criterion, records) -> list[Criterion]:
    """The criterion, and that of averaged weights where they were recorded."""
    averaged = criterion._replace(scalar=criterion.scalar + AVERAGED)
    return [criterion, *[averaged] * any(averaged.scalar in r for r in records)]


def runs_of(records, arm, speed=None, phases=TUNING) -> dict[float, dict[int, list]]:
    """{learning rate: {seed: run}} of an arm at a speed."""
    runs = {}
    for r in records:
        if r["arm"] == arm and r["speed"] == speed and r["phase"] in phases:
            runs.setdefault(r["learning_rate"], {}).setdefault(r["seed"], []).append(r)
    for run in (run for by_seed in runs.values() for run in by_seed.values()):
        run.sort(key=lambda r: r["step"])
    return runs


def diverged(records, arm: str, speed: float | None = None) -> tuple[float, ...]:
    """The learning rates at which a run of the arm diverged, ascending."""
    of_arm = (r for r in records if r["arm"] == arm and r["speed"] == speed)
    return tuple(sorted({r["learning_rate"] for r in of_arm if r.get("diverged")}))


def tuned(records, arm: str, speed: float | None = None) -> dict[float, dict[int, Run]]:
    """As `runs_of`, without the rates at which a seed diverged."""
    out = diverged(records, arm, speed)
    return {rate: runs for rate, runs in runs_of(records, arm, speed).items() if rate not in out}


def finalists(records, arm: str, speed, criterion: Criterion) -> list[float]:
    """The learning rates of seed 0, the best first."""
    first = {rate: runs[0] for rate, runs in tuned(records, arm, speed).items() if 0 in runs}
    return sorted(first, key=lambda rate: score([first[rate]], criterion))


def best_rate(records, arm: str, speed, criterion: Criterion) -> float | None:
    """The best learning rate; None where all diverged.

    A rate is out if another one that ran with more seeds is as good on the seeds that both have.
    Those that are left are compared on the seeds that all of them have, so that a further seed of
    one rate alone decides nothing.
    """
    runs = tuned(records, arm, speed)

    def score_on(rate, seeds):
        return score([runs[rate][seed] for seed in seeds or runs[rate]], criterion)

    def beaten(rate):
        more = {other: by_seed.keys() & runs[rate] for other, by_seed in runs.items()
                if len(by_seed) > len(runs[rate])}  # fmt: skip
        return any(both and score_on(other, both) <= score_on(rate, both)
                   for other, both in more.items())  # fmt: skip

    left = [rate for rate in runs if not beaten(rate)]
    shared = set.intersection(*(set(runs[rate]) for rate in left)) if left else set()
    return min(left, key=lambda rate: score_on(rate, shared), default=None)


def score(runs: Sequence[Run], criterion: Criterion) -> tuple[float, float]:
    """(number of runs that miss the target, mean over seeds); less is better."""
    sign = 1 if criterion.lower else -1
    if criterion.when == "target":
        steps = [at["step"] for at in (reached(run, criterion) for run in runs) if at]
        return len(runs) - len(steps), float(np.mean(steps)) if steps else 0.0
    if criterion.when == "lowest":
        return 0, sign * float(lowest(runs, criterion).mean())
    return 0, sign * float(np.mean([last(run, criterion.scalar) for run in runs]))


def last(run: Run, name: str) -> float:
    """The last value of a scalar; nan if it was never measured.

    One that is not finite, null in the record, is worse than every number.
    """
    value = next((r[name] for r in reversed(run) if name in r), math.nan)
    metric = METRICS.get(name.removesuffix(AVERAGED).split("/")[-1])
    more = metric is not None and not metric.lower
    return value if value is not None else -math.inf if more else math.inf


def values(runs: Sequence[Run], name: str) -> np.ndarray:
    """float64[seeds, evaluations], up to the end of the shortest run; missing values are nan."""
    steps = sorted(set.intersection(*({r["step"] for r in run} for run in runs)))
    by_step = [{r["step"]: r.get(name) for r in run} for run in runs]
    return np.array([[of.get(step) for step in steps] for of in by_step], float)


def lowest(runs: Sequence[Run], criterion: Criterion) -> np.ndarray:
    """float64[seeds], at the best point of the mean over seeds."""
    curves = values(runs, criterion.scalar)
    mean = curves.mean(axis=0)
    if np.isnan(mean).all():
        return np.full(len(curves), math.inf if criterion.lower else -math.inf)
    return curves[:, np.nanargmin(mean if criterion.lower else -mean)]


def reached(run: Run, criterion: Criterion) -> Mapping | None:
    """The first record of a run at the criterion's target; None if there is none."""
    for r in run:
        value = r.get(criterion.scalar)
        if value is not None:
            if value <= criterion.target if criterion.lower else value >= criterion.target:
                return r
    return None


def tested(criterion: Criterion) -> Criterion:
    """The criterion on the half of the test set that is reported."""
    return criterion._replace(scalar=criterion.scalar.replace("valid/", "test/"))


def target_of(comparison: Comparison) -> float:
    """The target that every arm must reach; not finite where there is none.

    The criterion's target; of when="lowest" the baseline's best; of "last" the worst of all last
    finite values, so that every arm that ends with one gets there with every seed.
    """
    criterion = comparison.criterion
    if criterion.when == "target":
        return criterion.target
    if criterion.when == "lowest":
        base = [*comparison.baseline().runs.values()]
        return float(lowest(base, criterion).mean()) if base else math.nan
    worst = max if criterion.lower else min
    runs = [run for chosen in comparison.chosen.values() for run in chosen.runs.values()]
    ends = [last(run, criterion.scalar) for run in runs]
    return worst(filter(math.isfinite, ends), default=math.nan)


def timed(runs: Mapping[int, Run]) -> dict[int, Run]:
    """The runs whose seconds are comparable."""
    return {seed: run for seed, run in runs.items() if all(r.get("timed", True) for r in run)}


def spent(comparison: Comparison, runs: Mapping[int, Run], name: str) -> dict[int, float]:
    """{seed: cost of its run up to the target, by the reported scalar}; inf: never reached.

    {} where there is no target. "seconds" are those of `timed` runs.
    """
    runs = timed(runs) if name == "seconds" else runs
    criterion = tested(comparison.criterion)._replace(target=target_of(comparison))
    if not math.isfinite(criterion.target):
        return {}
    points = {seed: reached(run, criterion) for seed, run in runs.items()}
    return {seed: math.inf if at is None else at[name] for seed, at in points.items()}


def volume(record: Mapping) -> float:
    """What a run has sent up to a record, as a share of syncs in every step: all-reduces per step.

    Older records, none of a compressor, of fragments or of an order that sends, have rounds alone.
    """
    sent = record["allreduces"] if "allreduces" in record else record["rounds"]
    return sent / record["step"]


def fastest(comparison: Comparison, arm: str) -> tuple[float, dict]:
    """(rate, runs by seed) with which most seeds and then the fewest steps reach the target."""
    criterion = comparison.criterion._replace(when="target", target=target_of(comparison))
    best = best_rate(comparison.records, arm, None, criterion)
    return best, tuned(comparison.records, arm).get(best, {})


def interval(sample, level: float = 0.95) -> tuple[float, float]:
    """Mean and half width of an interval over seeds, 95 %, by Student's t; nan for one seed."""
    from scipy.special import stdtrit

    sample = np.asarray(list(sample), float)
    count = len(sample)
    if count < 2:
        return (float(sample[0]) if count else math.nan), math.nan
    if (sample == sample[0]).all():  # whose mean and deviation float64 rounds
        return float(sample[0]), 0.0
    deviation = np.std(sample, ddof=1) / math.sqrt(count)
    return float(np.mean(sample)), float(stdtrit(count - 1, (1 + level) / 2) * deviation)


def metric_of(comparison: Comparison) -> str:
    """The name of the metric that is reported: the criterion's, or what the task's test measures.

    The loss is used only if there is no other.
    """
    part, _, name = comparison.criterion.scalar.removesuffix(AVERAGED).partition("/")
    scalars = set().union(*comparison.records)
    names = [name for name in METRICS if f"test/{name}" in scalars]
    return name if part == "valid" else min(names, key="loss".__eq__)
