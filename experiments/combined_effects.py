"""Main effects and interactions of the factorial, with intervals over seeds."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.combined_runs import (
    FACTORS,
    Arm,
    above_optimum,
    metric_of,
    objective,
    reached,
    target_of,
)
from experiments.compare import interval
from experiments.metrics import METRICS


class Response(NamedTuple):
    """What effects are estimated of.

    Fields:
      label: for people.
      value: `(run, target) -> float`, of all records of one seed.
      relative: whether effects are factors; else differences.
    """

    label: str
    value: Callable[[Sequence[dict], float], float]
    relative: bool = True


def responses(all_records: Sequence[dict]) -> list[Response]:
    metric = metric_of(all_records)
    points = metric == "accuracy"
    above = above_optimum(all_records)

    def tested(run, target):
        return run[-1][f"test_{metric}"] * (100 if points else 1)

    return [
        Response(f"last train loss{above}", lambda run, target: objective(run[-1])),
        Response(METRICS[metric].label + (" / points" if points else ""), tested, not points),
        *(
            Response(f"{label} to the target", lambda run, target, n=name: reached(run, target)[n])
            for name, label in (
                ("step", "steps"), ("loads", "loads"), ("sent", "volume"), ("seconds", "seconds"),
            )
        ),
    ]  # fmt: skip


class Effect(NamedTuple):
    factors: tuple[str, ...]  # one for a main effect, more for an interaction
    mean: float
    half_width: float  # of the 95 % interval over seeds


def effects(values: np.ndarray) -> list[Effect]:
    """Main effects and interactions of a two-level factorial, paired by seed.

    effect(S) = 2 / 2^k sum over cells of y times the product over S of (-1 at the first level, +1
    at the second): for one factor the mean change from the first level to the second; for two, half
    the difference that the second makes to the change by the first.

    Args:
      values: float[2, ..., 2, seeds], an axis per factor of `FACTORS`.

    Returns:
      An effect per subset of the factors, the small ones first.

    Example:
      >>> import numpy as np
      >>> y = np.zeros((2, 2, 2, 3))
      >>> y[1] = 1.0  # the order alone matters
      >>> [e.mean for e in effects(y)]
      [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    count, found = values.ndim - 1, []
    for size in range(1, count + 1):
        for axes in itertools.combinations(range(count), size):
            signs = np.ones(values.shape[:-1])
            for axis in axes:
                shape = [2 if a == axis else 1 for a in range(count)]
                signs = signs * np.array([-1.0, 1.0]).reshape(shape)
            per_seed = 2 / 2**count * np.tensordot(signs, values, count)
            found.append(Effect(tuple(FACTORS[a] for a in axes), *interval(per_seed)))
    return found


def effects_of(chosen: dict[Arm, list[list[dict]]], response: Response) -> list[Effect]:
    """The effects on a response, of logarithms where it is relative; arms in factorial order."""
    target = target_of(chosen)
    y = np.array([[response.value(run, target) for run in runs] for runs in chosen.values()])
    y = np.log(np.maximum(y, 1e-12)) if response.relative else y
    return effects(y.reshape(2, 2, 2, -1))


def shown(effect: Effect, relative: bool) -> str:
    """As "× 0.88 (0.86 to 0.90)", or a difference; bold where the interval leaves no effect out."""
    low, high = effect.mean - effect.half_width, effect.mean + effect.half_width
    if relative:
        text = f"× {math.exp(effect.mean):.2f}"
        if not math.isnan(low):
            text += f" ({math.exp(low):.2f} to {math.exp(high):.2f})"
    else:
        text = f"{effect.mean:+.2f}"
        if not math.isnan(low):
            text += f" ({low:+.2f} to {high:+.2f})"
    return f"**{text}**" if low * high > 0 else text
