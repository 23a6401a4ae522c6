"""The rule of verdicts: from an effect, paired by seed, to one of five words.

`gain` and `no_gain` turn a measure (effects.py) into what a row of `claims.CLAIMS` holds: a
function from comparisons to (ours, verdict).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from experiments.results.statistics import interval

REPRODUCED, PARTLY, NOT = "reproduced", "partly", "not reproduced"
UNTESTABLE, NOT_RUN = "not testable here", "not run"
VERDICTS = (REPRODUCED, PARTLY, NOT, UNTESTABLE, NOT_RUN)
LEAST_SEEDS = 3


class Effect(NamedTuple):
    values: np.ndarray  # float64[seeds], positive as claimed: points, or logarithms of ratios
    text: str  # what was seen, for people
    controls: Mapping[str, np.ndarray] = {}  # {label: values} of what should not have the effect
    missing: str = ""  # why there are no values although there are runs


NOTHING = Effect(np.empty(0), "-")


def ratio(less: float, more: float) -> float:
    """The size of a published effect, as `values` count it."""
    return float(np.log(more / less))


def gain(measure: Callable, size: float = 0.0) -> Callable:
    """Claims an effect.

    Args:
      measure: `(*comparisons) -> Effect`.
      size: what was published, in the unit of `Effect.values`; 0 where only the sign was.
    """

    def judge(*runs):
        effect = measure(*runs)
        if short := _too_little(effect):
            return effect.text, short
        mean, half = interval(effect.values)
        as_well = [k for k, values in effect.controls.items() if np.mean(values) >= mean / 2]
        if mean + half < 0:
            return effect.text, f"{NOT}: the opposite"
        if mean - half <= 0:
            return effect.text, f"{NOT}: within the noise"
        if as_well:
            return effect.text, f"{PARTLY}: {', '.join(as_well)} as well"
        return effect.text, f"{PARTLY}: smaller" if mean < size / 2 else REPRODUCED

    return judge


def no_gain(measure: Callable, than: Callable) -> Callable:
    """Claims that an effect has gone in the first run which is there in the last."""

    def judge(*runs):
        effect, there = measure(runs[0]), than(runs[-1])
        if short := _too_little(effect) or _too_little(there):
            return effect.text, short
        (mean, half), (size, size_half) = interval(effect.values), interval(there.values)
        if size - size_half <= 0:
            return effect.text, f"{NOT}: no gain to lose"
        if mean + half < size / 2:
            return effect.text, REPRODUCED
        left = mean - half > 0 and mean >= size / 2
        return effect.text, f"{NOT}: a gain is left" if left else f"{PARTLY}: too noisy to tell"

    return judge


def _too_little(effect: Effect) -> str:
    if effect.missing:
        return f"{NOT}: {effect.missing}"
    seeds = len(effect.values)
    return "" if seeds >= LEAST_SEEDS else f"{NOT_RUN}: {seeds} of {LEAST_SEEDS} seeds"
