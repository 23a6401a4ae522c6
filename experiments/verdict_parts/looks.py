"""Looks at recorded runs: which seeds a claim had at each, and what another seed would cost."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from experiments.results import archive, statistics
from experiments.results.statistics import Comparison


def of(comparison: Comparison) -> Sequence[Mapping]:
    """Those at a recorded run; of records that were never recorded, one with all seeds."""
    return comparison.looks or [{"seeds": archive.seeds_of(comparison.records), "date": ""}]


def states(looks: Sequence[Sequence[Mapping]]) -> list[tuple[int, ...]]:
    """How many seeds every run of a claim had at each look at the claim.

    A new look at any of its runs is one at the claim; those at several runs on one day are one.
    """
    now, found = {}, []
    for date in sorted({look["date"] for run in looks for look in run}):
        today = [[look["seeds"] for look in run if look["date"] == date] for run in looks]
        for each in itertools.zip_longest(*today):
            now |= {run: seeds for run, seeds in enumerate(each) if seeds is not None}
            if len(now) == len(looks):
                found.append(tuple(now[run] for run in range(len(looks))))
    return found or [()]


def first(comparison: Comparison, seeds: int) -> Comparison:
    """What was known with these seeds."""
    known = sorted({r["seed"] for r in comparison.records})
    if seeds >= len(known):
        return comparison
    kept = [r for r in comparison.records if r["seed"] in known[:seeds]]
    criterion, plans = comparison.criterion, comparison.plans
    return statistics.compare(kept, comparison.arms, criterion, plans)


def seconds_per_seed(comparison: Comparison, runs: Collection[tuple]) -> float | None:
    """Of all these runs (arm, speed, learning rate), in all phases, on the mean; None: unknown."""
    ends: dict[tuple, dict] = {}
    for r in comparison.records:
        own = r["arm"], r.get("speed"), r["learning_rate"]
        if own in runs:
            last = ends.setdefault((*own, r["phase"]), {})
            last[r["seed"]] = max(r.get("seconds", math.nan), last.get(r["seed"], 0.0))
    total = sum(float(np.mean([*of.values()])) for of in ends.values())
    return total if ends and math.isfinite(total) else None
