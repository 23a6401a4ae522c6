"""Comparisons as data frames: arms at their own best learning rates, and their costs to a target.

`Comparison.data` has a row per record. `frame` has a row per run, at one learning rate per arm.
pandas is imported where records become a frame: it takes half a second, and training needs none.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.data.metrics import METRICS

TUNING, REPORTED = ("run", "tune"), ("run", "report")  # phases
LOSS, ABOVE = "train/loss", "train/above_optimum"
AVERAGED = "/averaged"  # ends the names of scalars of averaged weights
COSTS = ("epoch", "step", "loads", "rounds", "allreduces", "seconds")


class Criterion(NamedTuple):
    """The criterion that chooses a learning rate."""

    scalar: str = LOSS  # on the tuning split
    lower: bool = True  # whether less of it is better
    when: str = "last"  # value, "lowest" point of the mean over seeds, or fewest steps to "target"
    target: float | None = None  # of the scalar, for when="target"


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen:
    """An arm at one of its learning rates, at one speed of the input."""

    arm: str
    label: str
    speed: float | None
    rate: float | None  # its best; None where a run diverged at every rate
    data: Any  # all rows of the arm at this speed
    runs: Any  # those with this rate, of the reported phase
    tried: tuple[float, ...]  # learning rates, ascending
    diverged: tuple[float, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The data of tables and pictures."""

    data: Any  # `data_of` the records of whole runs
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


def data_of(records):
    """A pandas.DataFrame with a row per record, by arm, seed and step.

    A scalar that is null was not finite: it counts as worse than every number.
    """
    import pandas

    records = [{"timed": True, "diverged": None} | record for record in records]
    data = pandas.DataFrame(records)
    for name in data.columns:
        if "/" in name or name == "drift":
            empty = np.flatnonzero(data[name].isna())  # null, or not measured
            null = [i for i in empty if name in records[i]]
            data[name] = data[name].astype(float)
            data.loc[null, name] = worst(name)
    return data.sort_values(["seed", "step"], kind="stable", ignore_index=True)


def worst(scalar: str) -> float:
    metric = METRICS.get(scalar.removesuffix(AVERAGED).split("/")[-1])
    return math.inf if metric is None or metric.lower else -math.inf


def compare(data, arms: Mapping[str, str], criterion: Criterion, plans=None) -> Comparison:
    """Every arm at its own best rate, at every speed; of averaged weights, at the best for them."""
    speeds, chosen = tuple(sorted(data.speed.dropna().unique().tolist())) or (None,), {}
    for speed in speeds:
        of_arms = dict(iter((data if speed is None else data[data.speed == speed]).groupby("arm")))
        for arm, label in arms.items():
            rows = of_arms.get(arm, data[:0])
            tried = tuple(sorted(rows.learning_rate[rows.phase.isin(TUNING)].unique().tolist()))
            if tried:
                rate = best_rate(rows, criterion)
                runs = runs_at(rows, rate)
                out = diverged(rows)
                chosen[arm, speed] = Chosen(arm, label, speed, rate, rows, runs, tried, out)
    averaged = [
        compare(data[data[each.scalar].notna() | data.diverged.notna()], arms, each, plans)
        for each in criteria(criterion, data)[1:]
    ]
    return Comparison(data, dict(arms), criterion, speeds, chosen, dict(plans or {}), *averaged)


def criteria(criterion: Criterion, data) -> list[Criterion]:
    """The criterion, and that of averaged weights where they were recorded."""
    averaged = criterion._replace(scalar=criterion.scalar + AVERAGED)
    return [criterion, *[averaged] * (averaged.scalar in data)]


# Of rows of one arm at one speed.
def runs_at(rows, rate: float | None, phases: Sequence[str] = REPORTED):
    """The rows with a learning rate, of these phases; none where it is None."""
    return rows[rows.phase.isin(phases) & (rows.learning_rate == rate)]


def diverged(rows) -> tuple[float, ...]:
    """The learning rates at which a run diverged, ascending."""
    return tuple(sorted(rows.learning_rate[rows.diverged.notna()].unique().tolist()))


def tuned(rows, criterion: Criterion):
    """The criterion's `curves`, without the rates at which a seed diverged."""
    kept = rows.phase.isin(TUNING) & ~rows.learning_rate.isin(diverged(rows))
    return curves(rows[kept], criterion.scalar)


def curves(rows, scalar: str):
    """A scalar [step, (learning rate, seed)]: a column per run; nan where it was not measured."""
    runs = ["learning_rate", "seed"]
    values = rows[["step", *runs]].assign(value=rows.get(scalar, math.nan))
    return values.pivot(index="step", columns=runs, values="value").sort_index(axis=1)


def finalists(rows, criterion: Criterion) -> list[float]:
    """The learning rates of seed 0, the best first."""
    table = tuned(rows, criterion)
    first = table.loc[:, table.columns.get_level_values("seed") == 0]
    return sorted(first.columns.unique(0), key=lambda rate: score(first[rate], criterion))


def best_rate(rows, criterion: Criterion) -> float | None:
    """The best learning rate; None where all diverged.

    A rate is out if another one that ran with more seeds is as good on the seeds that both have.
    Those that are left are compared on the seeds that all of them have, so that a further seed of
    one rate alone decides nothing.
    """
    table = tuned(rows, criterion)
    of_rate = {rate: table[rate] for rate in table.columns.unique(0)}
    seeds = {rate: {*of_rate[rate]} for rate in of_rate}

    def score_on(rate, shared):
        return score(of_rate[rate][sorted(shared or seeds[rate])], criterion)

    def beaten(rate):
        more = [other for other in seeds if len(seeds[other]) > len(seeds[rate])]
        both = {other: seeds[other] & seeds[rate] for other in more}
        return any(s and score_on(other, s) <= score_on(rate, s) for other, s in both.items())

    left = [rate for rate in seeds if not beaten(rate)]
    shared = set.intersection(*(seeds[rate] for rate in left)) if left else set()
    return min(left, key=lambda rate: score_on(rate, shared), default=None)


def score(table, criterion: Criterion) -> tuple[float, float]:
    """(number of runs that miss the target, mean over seeds) of `curves`; less is better."""
    if criterion.when == "target":
        arrived = reached(table.to_numpy(), criterion)
        steps = table.index.to_numpy()[arrived.argmax(axis=0)][arrived.any(axis=0)]
        return len(arrived.T) - len(steps), float(steps.mean()) if len(steps) else 0.0
    values = lowest(table, criterion) if criterion.when == "lowest" else last(table)
    mean = float(values.mean()) * (1 if criterion.lower else -1)
    return 0, math.inf if math.isnan(mean) else mean


def reached(values, criterion: Criterion):
    return values <= criterion.target if criterion.lower else values >= criterion.target


def last(table) -> np.ndarray:
    """The last measured value of each of `curves`."""
    values = table.to_numpy()
    place = len(values) - 1 - np.argmax(~np.isnan(values[::-1]), axis=0)
    return values[place, np.arange(len(place))]


def lowest(table, criterion: Criterion) -> np.ndarray:
    """The values of `curves` at the best point of their mean over seeds."""
    values = table.to_numpy()
    mean = values.mean(axis=1) * (1 if criterion.lower else -1)
    return values[np.argmin(np.where(np.isnan(mean), math.inf, mean))]


def tested(criterion: Criterion) -> Criterion:
    """The criterion on the half of the test set that is reported."""
    return criterion._replace(scalar=criterion.scalar.replace("valid/", "test/"))


@functools.lru_cache(maxsize=64)
def target_of(comparison: Comparison) -> float:
    """The target that every arm must reach; not finite where there is none.

    The criterion's target; of when="lowest" the baseline's best; of "last" the worst of all last
    finite values, so that every arm that ends with one gets there with every seed.
    """
    criterion, base = comparison.criterion, comparison.baseline()
    if criterion.when == "target":
        return criterion.target
    if criterion.when == "lowest":
        runs = curves(base.runs, criterion.scalar)
        return float(lowest(runs, criterion).mean()) if len(runs) else math.nan
    runs = [one.runs for one in comparison.chosen.values() if len(one.runs)]
    ends = [end for rows in runs for end in last(curves(rows, criterion.scalar)).tolist()]
    return (max if criterion.lower else min)(filter(math.isfinite, ends), default=math.nan)


@functools.lru_cache(maxsize=256)
def at(comparison: Comparison, chosen: Chosen, rate: str | float = "best") -> Chosen:
    """The arm at another of its learning rates.

    Args:
      rate: a learning rate, or "best": the best; "fastest": with which an arm reaches the target
        first; "end": with the best last value; "baseline": the best of the baseline, or the
        arm's best if it did not train with that one.
    """
    if rate == "best":
        return chosen
    if rate == "baseline":
        rate = comparison.baseline(chosen.speed).rate
        rate = rate if rate in {*chosen.tried} - {*chosen.diverged} else chosen.rate
    elif rate == "end":
        rate = best_rate(chosen.data, comparison.criterion._replace(when="last"))
    elif rate == "fastest":
        goal = comparison.criterion._replace(when="target", target=target_of(comparison))
        rate = best_rate(chosen.data, goal) if math.isfinite(goal.target) else None
    rate = None if rate in chosen.diverged else rate
    return dataclasses.replace(chosen, rate=rate, runs=runs_at(chosen.data, rate))


# A row per run.
@functools.lru_cache(maxsize=64)
def frame(comparison: Comparison, rate: str | float = "best", speed: float | None = None):
    """A pandas.DataFrame of the runs at one learning rate per arm, as of `at`.

    It has a row per (arm, seed) and a column per scalar, with its value at the end of the run. That
    is inf or -inf if it was not finite, and nan if it was not measured. "to NAME" is the cost of
    that name up to the target, inf if the run never arrives; seconds are of timed runs.
    "lowest" is the objective, as of `named`, at the best point of its mean over seeds.
    """
    import pandas

    arms = [at(comparison, chosen, rate) for chosen in comparison.at(speed)]
    rows = pandas.concat([one.runs for one in arms])
    runs = rows.groupby(["arm", "seed"], sort=False)
    table = runs[[*rows.select_dtypes("number").columns.difference(["seed", "speed"])]].last()
    costs = [cost for cost in COSTS if cost in table]
    complete = table[costs].notna().groupby("arm").transform("all")
    table.loc[~runs.timed.all(), "seconds"] = math.nan
    goal = tested(comparison.criterion)._replace(target=target_of(comparison))
    for one in (one for one in arms if len(one.runs)):
        table.loc[one.arm, "lowest"] = lowest(curves(one.runs, goal.scalar), goal)
    if not math.isfinite(goal.target):
        return table
    first = rows[reached(rows.get(goal.scalar, rows.step * math.nan), goal)]
    first = first.drop_duplicates(["arm", "seed"]).set_index(["arm", "seed"])[costs]
    spent = first.reindex(table.index).fillna(math.inf).where(complete & table[costs].notna())
    return table.join(spent.add_prefix("to "))


def metric_of(comparison: Comparison) -> str:
    """The name of the metric that is reported: the criterion's, or what the task's test measures.

    The loss is used only if there is no other.
    """
    part, _, name = comparison.criterion.scalar.removesuffix(AVERAGED).partition("/")
    names = [name for name in METRICS if f"test/{name}" in comparison.data]
    return name if part == "valid" else min(names, key="loss".__eq__, default=name)


def named(comparison: Comparison, scalar: str) -> str:
    """The column of a scalar, "objective" being the criterion's, "metric" that of the test.

    Both are of what is reported. In a comparison of averaged weights it is the column of those, if
    there is one.
    """
    scalar = f"test/{metric_of(comparison)}" if scalar == "metric" else scalar
    scalar = tested(comparison.criterion).scalar if scalar == "objective" else scalar
    averaged = comparison.criterion.scalar.endswith(AVERAGED)
    return scalar + AVERAGED * (averaged and scalar + AVERAGED in comparison.data)


def column(table, arm: str, scalar: str):
    """A column of an arm, of the seeds that have it: a pandas.Series by seed."""
    if scalar in table and arm in table.index:
        return table.loc[arm, scalar].dropna()
    return table.iloc[:0].sum(axis=1).reset_index(drop=True)


def paired(table, arm: str, base: str, scalar: str, *, ratio: bool = False):
    """Arm less base in a frame, of every seed that has both, or their `ratio_of`: by seed."""
    after, before = column(table, arm, scalar), column(table, base, scalar)
    least = 1.0 if scalar == "to epoch" else 1e-12  # a target may be reached at once
    after, before = after.align(before, join="inner")
    return ratio_of(after, before, least) if ratio else after - before


def ratio_of(after, before, least: float = 1e-12):
    """log(before / after) by seed, positive if after is less: its mean gives the geometric mean.

    It is infinite where one of the two never arrives, nan where both do not.
    """
    after, before = after.align(before, join="inner")
    return np.log(before.clip(least)) - np.log(after.clip(least))


def interval(sample, level: float = 0.95) -> tuple[float, float]:
    """Mean and half width of an interval over seeds, 95 %, by Student's t; nan for one seed."""
    from scipy.special import stdtrit

    sample = np.asarray(list(sample), float)
    count = len(sample)
    if count < 2:
        return (float(sample[0]) if count else math.nan), math.nan
    if (sample == sample[0]).all():  # float64 would round their mean and deviation
        return float(sample[0]), 0.0
    deviation = np.std(sample, ddof=1) / math.sqrt(count)
    return float(np.mean(sample)), float(stdtrit(count - 1, (1 + level) / 2) * deviation)
