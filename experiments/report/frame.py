"""Runs as a data frame, and the difference of two arms, paired by seed.

A frame has a row per (arm, seed) and a column per scalar, by its name: the value with which the run
ends, inf where that is not finite, nan where it was not measured. "to NAME" is the cost of that
name up to the comparison's target, inf where a run never arrives: "to step", "to seconds".
"""

import functools
import math
from collections.abc import Mapping

import numpy as np

from experiments.report import statistics
from experiments.report.statistics import AVERAGED, Chosen, Comparison

COSTS = ("epoch", "step", "loads", "rounds", "allreduces", "seconds")
FLOOR = {"to epoch": 1.0}  # less counts as this in ratios, since a target may be reached at once


@functools.lru_cache(maxsize=16)
def frame(comparison: Comparison, rate: str | float = "best", speed: float | None = None):
    """A pandas.DataFrame of the runs at one learning rate per arm.

    pandas is imported here, as that takes half a second and training has no use for it.

    Args:
      rate: a learning rate, or "best": the best; "fastest": with which an arm reaches the target
        first; "end": with the best last value; "baseline": the best of the baseline, or the own one
        of an arm that did not train with it.
    """
    import pandas

    rows = {}
    for chosen in comparison.at(speed):
        for seed, run in (runs := _runs_at(comparison, chosen, rate)).items():
            scalars = {k for r in run for k, v in r.items() if "/" in k or isinstance(v, float)}
            rows[chosen.arm, seed] = {k: statistics.last(run, k) for k in scalars.union(COSTS)}
            if not all(r.get("timed", True) for r in run):
                rows[chosen.arm, seed]["seconds"] = math.nan
        for cost in (cost for cost in COSTS if all(cost in run[-1] for run in runs.values())):
            for seed, value in statistics.spent(comparison, runs, cost).items():
                rows[chosen.arm, seed][f"to {cost}"] = value
    index = pandas.MultiIndex.from_tuples([*rows] or [("", 0)], names=("arm", "seed"))
    return pandas.DataFrame([*rows.values()] or [{}], index)


def measured(values: Mapping[str, Mapping[int, float]]):
    """A frame of {arm: {seed: value}}, whose column is "value"."""
    import pandas

    return pandas.concat({arm: pandas.Series(by_seed) for arm, by_seed in values.items()}).to_frame(
        "value"
    )


def _runs_at(comparison, chosen, rate):
    if rate == "best":
        return chosen.runs
    if rate == "fastest":
        has_target = math.isfinite(statistics.target_of(comparison))
        return statistics.fastest(comparison, chosen.arm)[1] if has_target else {}
    runs = statistics.tuned(comparison.records, chosen.arm, chosen.speed)
    if rate == "baseline":
        return runs.get(comparison.baseline(chosen.speed).rate, chosen.runs)
    if rate == "end":
        last = comparison.criterion._replace(when="last")
        rate = statistics.best_rate(comparison.records, chosen.arm, chosen.speed, last)
    return runs.get(rate, {})


def named(comparison: Comparison, scalar: str) -> str:
    """The column of a scalar, "metric" being what is reported of the test set.

    In a comparison of averaged weights theirs, if it was recorded.
    """
    scalar = f"test/{statistics.metric_of(comparison)}" if scalar == "metric" else scalar
    averaged = comparison.criterion.scalar.endswith(AVERAGED)
    averages = averaged and any(scalar + AVERAGED in r for r in comparison.records)
    return scalar + AVERAGED if averages else scalar


def column(table, arm: str, scalar: str):
    """A column of an arm, of the seeds that have it: a pandas.Series by seed."""
    if scalar in table and arm in table.index:
        return table.loc[arm, scalar].dropna()
    return table.iloc[:0].sum(axis=1).reset_index(drop=True)


def paired(table, arm: str, base: str, scalar: str, *, ratio: bool = False):
    """Arm less base in a frame, of every seed that has both: a pandas.Series by seed.

    A ratio is log(base / arm) instead, positive if the arm takes less, whose mean is the logarithm
    of the geometric mean. It is infinite where one of the two never arrives, nan where both do not.
    """
    after, before = column(table, arm, scalar).align(column(table, base, scalar), join="inner")
    if not ratio:
        return after - before
    floor = FLOOR.get(scalar, 1e-12)
    return np.log(before.clip(floor)) - np.log(after.clip(floor))


def ends(comparison: Comparison, chosen: Chosen, scalar: str, rate: str = "best"):
    """A column of an arm at one of its rates, as of `frame`."""
    return column(frame(comparison, rate, chosen.speed), chosen.arm, named(comparison, scalar))


def difference(comparison, chosen: Chosen, scalar: str, rate: str = "best", **options):
    """An arm `paired` with the baseline."""
    base, table = next(iter(comparison.arms)), frame(comparison, rate, chosen.speed)
    return paired(table, chosen.arm, base, named(comparison, scalar), **options)
