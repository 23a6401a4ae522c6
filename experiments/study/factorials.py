"""What every combination of the three decisions took to one loss, in the recorded factorials.

And what it takes on a machine: which combination is best there, and how sure that is.
"""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.cluster import files
from experiments.results import archive
from experiments.results.factorial import FACTORS
from experiments.results.statistics import interval, intervals, reached, target_of
from experiments.study.cost import Machine, order_traffic, time
from experiments.study.tables import ORDERS
from experiments.training.config import Sizes

NAME = re.compile(r"map_(?P<task>[a-z0-9]+)_(?P<workers>\d+)x(?P<units>\d+)_e(?P<uses>\d+)")
SLOW = re.compile(r"slow_(?P<task>[a-z0-9]+)_e(?P<uses>\d+)")


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
    """What a combination took to the target: float64[seeds], an entry per seed in one order."""

    steps: np.ndarray
    loads: np.ndarray
    rounds: np.ndarray
    rate: float  # the learning rate, the combination's own best


class Factorial(NamedTuple):
    """One task at one size of the batch per worker.

    Fields:
      task: its name; sizes: of the runs; order: a name of ORDERS, that of combinations with one.
      target: of the training loss; taken: by combination.
    """

    task: str
    sizes: Sizes
    order: str
    target: float
    taken: dict[Combination, Taken]

    @property
    def size(self) -> str:
        return f"{self.sizes.workers} x {self.sizes.units_per_step}"


def is_name(name: str) -> bool:
    """Whether a recorded run of this name is a factorial of this module."""
    return bool(NAME.fullmatch(name) or SLOW.fullmatch(name))


@functools.cache
def load(folder: os.PathLike = archive.FOLDER) -> tuple[Factorial, ...]:
    """The recorded factorials, those of several uses of a batch joined.

    A combination that never arrives with some seed is left out.
    """
    found: dict[tuple[str, str, str], Factorial] = {}
    for name in sorted(os.listdir(folder)):
        if not (match := NAME.fullmatch(name)):
            continue
        own = _one(name, folder, match["task"], int(match["uses"]))
        known = found.setdefault(tuple(match.groups()[:3]), own)
        if known.target != own.target:
            raise ValueError(
                f"{name} has the target {own.target:g}, and the same setting with other uses of a "
                f"batch {known.target:g}: record both with one --target."
            )
        for combination, taken in own.taken.items():
            known.taken.setdefault(combination, taken)
    return tuple(found.values())


def measured(folder: os.PathLike = archive.FOLDER) -> dict[str, dict[Combination, np.ndarray]]:
    """{task: {combination: seconds[seeds] to the target}} of runs with slow loads and syncs."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if match := SLOW.fullmatch(name):
            arrived = _arrivals(archive.load(name, folder), int(match["uses"]))
            found[match["task"]] = {
                combination: np.array([at["seconds"] for at in of])
                for combination, (of, _) in arrived.items()
            }
    return found


def _arrivals(comparison, uses) -> dict[Combination, tuple[list, float]]:
    """The records at the target, one per seed, and the rate, of those that always arrive."""
    target, speed, found = target_of(comparison), comparison.speeds[0], {}
    plain = next(iter(comparison.baseline(speed).runs.values()))[-1]  # a record
    for own in comparison.at(speed):
        of = [reached(run, comparison.criterion, target) for run in own.runs.values()]
        if of and None not in of:
            order, sync, echo = (of[0][name] != plain[name] for name in FACTORS)
            found[Combination(order, sync, uses if echo else 1)] = of, own.rate
    return found


def _one(name, folder, task, uses) -> Factorial:
    comparison = archive.load(name, folder)
    settings = files.read_json(os.path.join(folder, name, "settings.json"))
    target, taken, order = target_of(comparison), {}, None
    for combination, (of, rate) in _arrivals(comparison, uses).items():
        order = of[0]["order"] if combination.order else order
        columns = (np.array([at[c] for at in of], float) for c in ("step", "loads", "rounds"))
        taken[combination] = Taken(*columns, rate)
    longest = max(comparison.records, key=lambda r: r["loads"])  # one that diverged has none
    loads_per_epoch = round(longest["loads"] / longest["epoch"])
    workers, per_step, size = (
        int(settings[name]) for name in ("workers", "units_per_step", "unit_size")
    )
    return Factorial(task, Sizes(workers, loads_per_epoch * per_step, per_step, size), order,
                     target, taken)  # fmt: skip


def near(known: Sequence[Factorial], units_per_step: int) -> list[Factorial]:
    """Those whose units per worker and step are nearest, by ratio."""

    def far(found):
        return abs(np.log(found.sizes.units_per_step / units_per_step))

    least = min(map(far, known), default=0.0)
    return [found for found in known if far(found) == least]


# On a machine.


class Choice(NamedTuple):
    """The best combination on a machine, and how sure that is.

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
    traffic = order_traffic(ORDERS[found.order], found.sizes, machine.parameters)
    result = {}
    for combination, (steps, loads, rounds, _) in found.taken.items():
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


def regrets(known: Sequence[Factorial], machine: Machine) -> list[dict]:
    """Of every factorial: what the others of its size recommend, against the best of its own."""
    rows = []
    for found in known:
        others = [f for f in known if f.size == found.size and f.task != found.task]
        if not others:
            continue
        own = {c: log.mean() for c, log in logs_of(machine, found).items()}
        told = {c: logs for c, logs in predict(machine, others).items() if c in own}
        advised, best = best_of(told).best, min(own, key=own.get)
        rows.append({
            "task": found.task, "size": found.size, "advised": advised.label,
            "best": best.label, "regret": float(np.exp(own[advised] - own[best]) - 1),
        })  # fmt: skip
    return rows


class Map(NamedTuple):
    """Over a grid [loads, syncs].

    Fields:
      kind: int, the decisions of the best combination, in KINDS; sure: bool, whether the 95 %
        interval over seeds tells it from all that decide otherwise; times: how many times as fast
        as none.
    """

    kind: np.ndarray
    sure: np.ndarray
    times: np.ndarray


KINDS = [Combination(order, local, uses) for order in (False, True) for local in (False, True)
         for uses in (1, 2)]  # fmt: skip


def kind_of(combination: Combination) -> int:
    """Its place in KINDS, which do not ask how often a batch is used."""
    return KINDS.index(combination._replace(uses=min(combination.uses, 2)))


def map_of(found: Factorial, machine: Machine) -> Map:
    """The best combinations on a machine whose load and sync are arrays [loads, syncs, 1]."""
    logs = logs_of(machine, found)
    means = {c: log.mean(axis=-1) for c, log in logs.items()}
    best = np.argmin(np.stack([*means.values()]), axis=0)
    chosen = np.choose(best[..., None], [*logs.values()])
    kinds = np.array([kind_of(c) for c in logs])
    sure = np.ones(best.shape, bool)
    for combination, log in logs.items():
        other = kinds[best] != kind_of(combination)
        mean, half = intervals(log - chosen)
        sure &= ~other | (mean > half)
    return Map(kinds[best], sure, np.exp(means[NONE] - np.choose(best, [*means.values()])))
