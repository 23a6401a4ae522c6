"""Cost of every combination of the three decisions up to one loss, in the recorded factorials.

From it follows which combination is best on a machine, and how certain that is.
"""

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.cluster import files
from experiments.results import archive
from experiments.results.statistics import Comparison, interval, reached, target_of
from experiments.study.cost import Machine, order_traffic, time
from experiments.study.tables import row_of
from experiments.training.config import Sizes

FACTORS = ("order", "sync", "echo")  # fields of the records
NAME = re.compile(r"(map|slow)_(?P<task>[a-z0-9]+)(_\d+x\d+)?_e(?P<uses>\d+)")


class Combination(NamedTuple):
    """Which of the decisions are taken."""

    order: bool = False
    local: bool = False
    uses: int = 1  # of a batch

    @property
    def label(self) -> str:
        taken = ["order"] * self.order + ["local steps"] * self.local
        return " + ".join(taken + [f"{self.uses} uses"] * (self.uses > 1)) or "none"

    @property
    def decisions(self) -> int:
        return self.order + self.local + (self.uses > 1)


NONE = Combination()


class Taken(NamedTuple):
    """The costs of a combination up to the target, at its best rate: float64[seeds] each."""

    steps: np.ndarray
    loads: np.ndarray
    rounds: np.ndarray


class Factorial(NamedTuple):
    """One task at one size of the batch per worker.

    Fields:
      task: its name; sizes: of the runs; order: a name of ORDERS, that of combinations with one.
      taken: by combination, without those that never arrive with some seed.
    """

    task: str
    sizes: Sizes
    order: str
    taken: dict[Combination, Taken]

    @property
    def size(self) -> str:
        return f"{self.sizes.workers} x {self.sizes.units_per_step}"


@functools.cache
def load(folder: os.PathLike = archive.FOLDER) -> tuple[Factorial, ...]:
    """The recorded factorials, those with one target but other uses of a batch joined."""
    found: dict[tuple, Factorial] = {}
    for match, comparison in _recorded("map", folder):
        settings = files.read_json(os.path.join(folder, match[0], "settings.json"))
        own = _factorial(match, comparison, settings)
        known = found.setdefault((own.task, own.size, target_of(comparison)), own)
        known.taken.update(own.taken | known.taken)
    return tuple(found.values())


def _recorded(kind, folder) -> Iterator[tuple[re.Match, Comparison]]:
    for name in sorted(os.listdir(folder)):
        if (match := NAME.fullmatch(name)) and match[1] == kind:
            yield match, archive.load(name, folder)


def _arrivals(comparison, uses) -> Iterator[tuple[Combination, list[dict]]]:
    """The records at the target, one per seed, of combinations that always arrive."""
    speed, criterion = comparison.speeds[0], comparison.criterion
    plain = next(iter(comparison.baseline(speed).runs.values()))[-1]  # a record
    for own in comparison.at(speed):
        ends = [reached(run, criterion) for run in own.runs.values()]
        if ends and None not in ends:
            order, sync, echo = (ends[0][name] != plain[name] for name in FACTORS)
            yield Combination(order, sync, uses if echo else 1), ends


def _factorial(match, comparison, settings) -> Factorial:
    taken, order = {}, None
    for combination, ends in _arrivals(comparison, int(match["uses"])):
        order = ends[0]["order"] if combination.order else order
        columns = (np.array([at[c] for at in ends], float) for c in ("step", "loads", "rounds"))
        taken[combination] = Taken(*columns)
    longest = max(comparison.records, key=lambda r: r["loads"])  # one that diverged has none
    loads_per_epoch = round(longest["loads"] / longest["epoch"])
    named = ("workers", "units_per_step", "unit_size")
    workers, per_step, size = (int(settings[name]) for name in named)
    return Factorial(
        match["task"], Sizes(workers, loads_per_epoch * per_step, per_step, size), order, taken
    )


def near(known: Sequence[Factorial], units_per_step: int) -> list[Factorial]:
    """Those whose units per worker and step are nearest, by ratio."""

    def far(found):
        return abs(np.log(found.sizes.units_per_step / units_per_step))

    least = min(map(far, known), default=0.0)
    return [found for found in known if far(found) == least]


# On a machine.


class Choice(NamedTuple):
    """The best combination on a machine, and those it cannot be told apart from.

    Fields:
      best: the combination; times: how many times as fast as none of the decisions, as (mean, low,
        high) of the 95 % interval; rivals: those that the interval does not tell from the best.
    """

    best: Combination
    times: tuple[float, float, float]
    rivals: tuple[Combination, ...]


def logs_of(machine: Machine, found: Factorial) -> dict[Combination, np.ndarray]:
    """log(time to the target) of every combination, [..., seeds].

    Args:
      machine: numbers, or arrays [..., 1].
    """
    traffic = order_traffic(row_of("order", found.order), found.sizes, machine.parameters)
    result = {}
    for combination, (steps, loads, rounds) in found.taken.items():
        sent = np.array([traffic(int(n)) for n in loads]) if combination.order else 0.0
        own = {"rounds": rounds, "sent": sent, "ordered": combination.order}
        result[combination] = np.log(time(machine, steps=steps, loads=loads, **own))
    return result


def best_of(logs: Mapping[Combination, np.ndarray]) -> Choice:
    """The best combination by logarithms of times, float64[n] each, paired."""
    best = min(logs, key=lambda c: (logs[c].mean(), c.decisions))
    behind = {c: factor(logs[c] - logs[best]) for c in logs if c != best}
    rivals = tuple(c for c, (_, low, _) in behind.items() if not low > 1)
    return Choice(best, factor(logs[NONE] - logs[best]), rivals)


def predict(machine: Machine, known: Sequence[Factorial]) -> dict[Combination, np.ndarray]:
    """log(time / time of none) of every combination that all have, float64[tasks]."""
    logs = [{c: log.mean(axis=-1) for c, log in logs_of(machine, f).items()} for f in known]
    common = [c for c in logs[0] if all(c in of for of in logs)]
    return {c: np.array([of[c] - of[NONE] for of in logs]) for c in common}


def factor(differences: np.ndarray) -> tuple[float, float, float]:
    """A factor with its 95 % interval, from logarithms."""
    mean, half = interval(differences)
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))
