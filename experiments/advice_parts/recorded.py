"""What every combination of the three decisions took to one loss, in the recorded factorials."""

import os
import re
from typing import NamedTuple

import numpy as np

from experiments.results import archive, records
from experiments.results.factorial import FACTORS
from experiments.results.statistics import reached, target_of
from experiments.training.config import Sizes

NAME = re.compile(r"map_(?P<task>[a-z0-9]+)_(?P<workers>\d+)x(?P<units>\d+)_e(?P<uses>\d+)")
SLOW = re.compile(r"slow_(?P<task>[a-z0-9]+)_e(?P<uses>\d+)")
PLAIN = "none"


class Combination(NamedTuple):
    """Which of the decisions are taken."""

    order: bool = False
    local: bool = False
    uses: int = 1  # of a batch

    @property
    def label(self) -> str:
        taken = [
            *(["order"] if self.order else []),
            *(["local steps"] if self.local else []),
            *([f"{self.uses} uses"] if self.uses > 1 else []),
        ]
        return " + ".join(taken) or PLAIN

    @property
    def decisions(self) -> int:
        return self.order + self.local + (self.uses > 1)


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
    """Whether a recorded run of this name is a factorial of this page."""
    return bool(NAME.fullmatch(name) or SLOW.fullmatch(name))


def load(folder: os.PathLike = archive.FOLDER) -> list[Factorial]:
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
    return list(found.values())


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
    settings = records.read_json(os.path.join(folder, name, "settings.json"))
    target, taken, order = target_of(comparison), {}, None
    for combination, (of, rate) in _arrivals(comparison, uses).items():
        order = of[0]["order"] if combination.order else order
        columns = (np.array([at[c] for at in of], float) for c in ("step", "loads", "rounds"))
        taken[combination] = Taken(*columns, rate)
    longest = max(comparison.records, key=lambda r: r["loads"])  # one that diverged has none
    loads_per_epoch = round(longest["loads"] / longest["epoch"])
    per_step = int(settings["units_per_step"])
    sizes = Sizes(
        int(settings["workers"]), loads_per_epoch * per_step, per_step, int(settings["unit_size"])
    )
    return Factorial(task, sizes, order, target, taken)
