"""A machine, the time of a combination on it, and which is best there."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import local_opt
from experiments.advice_parts.recorded import Combination, Factorial
from experiments.results.statistics import interval
from experiments.studies.cost import order_traffic
from experiments.studies.tables import ORDERS


class Machine(NamedTuple):
    """Seconds, or any other unit, of what a run is made of; numbers, or arrays that broadcast.

    Fields:
      step: of computation; load: of reading a batch, beside the steps.
      sync: of an all-reduce of the parameters, which nothing hides; latency: its share that does
        not depend on the bytes.
      parameters: D, of the model.
      ordered: how many times longer a fresh step is with the order.
    """

    step: Any
    load: Any
    sync: Any
    parameters: float
    latency: Any = 0.0
    ordered: float = 1.0


class Choice(NamedTuple):
    """The best combination on a machine, and how sure that is.

    Fields:
      best: the combination; times: how many times as fast as none of the decisions, as (mean, low,
        high) of the 95 % interval; rivals: those that the interval does not tell from the best.
    """

    best: Combination
    times: tuple[float, float, float]
    rivals: tuple[Combination, ...]


def times(machine: Machine, found: Factorial) -> dict[Combination, np.ndarray]:
    """The time of every combination to the target, [..., seeds].

    max(steps of computation + syncs + what the order sends, loads): input is read beside all of
    them, and what is sent comes between the steps.

    Args:
      machine: numbers, or arrays [..., 1].
    """
    traffic = order_traffic(ORDERS[found.order], found.sizes, machine.parameters)
    result = {}
    for combination, taken in found.taken.items():
        ordered = combination.order
        longer = (machine.ordered - 1) * taken.loads if ordered else 0.0
        computing = machine.step * (taken.steps + longer)
        sent = np.array([traffic(int(n)) if ordered else 0.0 for n in taken.loads])
        volume = machine.sync * taken.rounds + (machine.sync - machine.latency) * sent
        result[combination] = np.maximum(computing + volume, machine.load * taken.loads)
    return result


def best_of(logs: Mapping[Combination, np.ndarray]) -> Choice:
    """The best combination by logarithms of times, float64[n] each, paired."""
    best = min(logs, key=lambda c: (logs[c].mean(), c.decisions))
    behind = {c: factor(logs[c] - logs[best]) for c in logs if c != best}
    rivals = tuple(c for c, (_, low, _) in behind.items() if not low > 1)
    return Choice(best, factor(logs[Combination()] - logs[best]), rivals)


def choose(machine: Machine, found: Factorial) -> Choice:
    """The best combination of a recorded factorial on one machine, paired by seed."""
    return best_of({c: np.log(t) for c, t in times(machine, found).items()})


def predict(machine: Machine, known: Sequence[Factorial]) -> dict[Combination, np.ndarray]:
    """log(time / time of none) of every combination that all have, float64[tasks]."""
    logs = []
    for found in known:
        of = {c: np.log(t).mean(axis=-1) for c, t in times(machine, found).items()}
        logs.append({c: log - of[Combination()] for c, log in of.items()})
    common = [c for c in logs[0] if all(c in of for of in logs)]
    return {c: np.array([of[c] for of in logs]) for c in common}


def factor(differences: np.ndarray) -> tuple[float, float, float]:
    """A factor with its 95 % interval, from logarithms."""
    mean, half = interval(differences)
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))


def sync_seconds(parameters: float, workers: int, *, gbps: float, latency: float) -> float:
    """Of an all-reduce of float32 parameters, where a worker sends so many Gb/s."""
    sent = local_opt.sync_bytes(int(parameters), num_workers=workers)
    return latency + 8 * sent / (gbps * 1e9) if workers > 1 else 0.0


def near(known: Sequence[Factorial], units_per_step: int) -> list[Factorial]:
    """Those whose units per worker and step are nearest, by ratio."""

    def far(found):
        return abs(np.log(found.sizes.units_per_step / units_per_step))

    least = min(map(far, known), default=0.0)
    return [found for found in known if far(found) == least]
