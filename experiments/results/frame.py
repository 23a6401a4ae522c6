"""Runs as a data frame, and the difference of two arms, paired by seed.

A frame has a row per (arm, seed) and a column per scalar, by its name: the value with which the run
ends, inf where that is not finite, nan where it was not measured. "to NAME" is the cost of that
name up to the comparison's target, inf where a run never arrives: "to step", "to seconds".
"""

import functools
import math

import numpy as np

from experiments.results import statistics
from experiments.results.statistics import AVERAGED, Chosen, Comparison

COSTS = ("epoch", "step", "loads", "rounds", "allreduces", "seconds")
FLOOR = {"to epoch": 1.0}  # less counts as this in ratios, since a target may be reached at once


@functools.lru_cache(maxsize=16)
def frame(comparison: Comparison, rate: str = "own", speed: float | None = None):
    """A pandas.DataFrame of the runs at one learning rate per arm.

    pandas is imported here, as that takes half a second and training has no use for it.

    Args:
      rate: "own": the best; "fastest": with which an arm reaches the target first; "baseline": the
        best of the baseline, or the own one of an arm that did not train with it.
    """
    import pandas

    rows = {}
    for own in comparison.at(speed):
        for seed, run in (runs := _runs_at(comparison, own, rate)).items():
            known = {k for r in run for k, v in r.items() if "/" in k or isinstance(v, float)}
            rows[own.arm, seed] = {k: statistics.last(run, k) for k in known.union(COSTS)}
            if not all(r.get("timed", True) for r in run):
                rows[own.arm, seed]["seconds"] = math.nan
        for cost in (cost for cost in COSTS if all(cost in run[-1] for run in runs.values())):
            for seed, value in statistics.spent(comparison, runs, cost).items():
                rows[own.arm, seed][f"to {cost}"] = value
    index = pandas.MultiIndex.from_tuples(rows or [("", 0)], names=("arm", "seed"))
    return pandas.DataFrame([*rows.values()] or [{}], index)


def _runs_at(comparison, own, rate):
    if rate == "fastest":
        known = math.isfinite(statistics.target_of(comparison))
        return statistics.fastest(comparison, own.arm)[1] if known else {}
    if rate == "baseline":
        runs = statistics.tuned(comparison.records, own.arm, own.speed)
        return runs.get(comparison.baseline(own.speed).rate, own.runs)
    return own.runs


def named(comparison: Comparison, scalar: str) -> str:
    """The column of a scalar, "metric" being what is reported of the test set.

    In a comparison of averaged weights theirs, if it was recorded.
    """
    scalar = f"test/{statistics.metric_of(comparison)}" if scalar == "metric" else scalar
    averaged = comparison.criterion.scalar.endswith(AVERAGED)
    known = averaged and any(scalar + AVERAGED in r for r in comparison.records)
    return scalar + AVERAGED if known else scalar


def paired(found, arm: str, base: str, scalar: str, *, ratio: bool = False) -> np.ndarray:
    """float64[seeds]: arm less base in a frame, of every seed that has both.

    `statistics.interval` gives the mean and its interval.

    Args:
      ratio: log(base / arm) instead, positive if the arm takes less: the mean is the logarithm of
        the geometric mean of the ratios. Infinite where one of the two never arrives, nan where
        neither does.
    """
    own, before = (_column(found, name, scalar) for name in (arm, base))
    if ratio:
        return statistics.log_ratios(before, own, floor=FLOOR.get(scalar, 1e-12))
    pairs = statistics.paired(own, before)
    with np.errstate(invalid="ignore"):
        return pairs[:, 0] - pairs[:, 1]


def _column(found, arm, scalar) -> dict[int, float]:
    if scalar not in found or arm not in found.index:
        return {}
    return found.loc[arm, scalar].dropna().to_dict()


def ends(comparison: Comparison, own: Chosen, scalar: str, rate: str = "own") -> dict[int, float]:
    """{seed: value} of an arm."""
    return _column(frame(comparison, rate, own.speed), own.arm, named(comparison, scalar))


def against(comparison, own: Chosen, scalar: str, rate: str = "own", **options) -> np.ndarray:
    """An arm `paired` with the baseline."""
    base, found = next(iter(comparison.arms)), frame(comparison, rate, own.speed)
    return paired(found, own.arm, base, named(comparison, scalar), **options)
