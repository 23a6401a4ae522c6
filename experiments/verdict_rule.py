"""The rule of verdicts: from an effect, paired by seed, to one of five words.

`gain` and `no_gain` turn a measure (experiments/effects.py) into what a row of
`experiments.claims.CLAIMS` holds: a function from the records of runs to (ours, verdict).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from experiments.compare import interval

REPRODUCED, PARTLY, NOT = "reproduced", "partly", "not reproduced"
UNTESTABLE, NOT_RUN = "not testable here", "not run"
VERDICTS = (REPRODUCED, PARTLY, NOT, UNTESTABLE, NOT_RUN)
LEAST_SEEDS = 3


class Effect(NamedTuple):
    """Fields:
    values: float64[seeds], positive where it is as claimed: points, or logarithms of ratios.
    text: what was seen, for people.
    controls: {label: float64[seeds]}, what should not have the effect.
    missing: why there are no values although there are runs, or "".
    """

    values: np.ndarray
    text: str
    controls: Mapping[str, np.ndarray] = {}
    missing: str = ""


NOTHING = Effect(np.empty(0), "-")


def ratio(less: float, more: float) -> float:
    """The size of a published effect, as `values` count it."""
    return float(np.log(more / less))


def gain(measure: Callable, size: float = 0.0) -> Callable:
    """Claims an effect.

    Args:
      measure: `(*records) -> Effect`.
      size: what was published, in the unit of `Effect.values`; 0 where only the sign was.

    Returns:
      `(*records) -> (text, verdict)`.
    """

    def judge(*runs):
        effect = measure(*runs)
        if short := _too_little(effect):
            return effect.text, short
        mean, half = interval(effect.values)
        as_well = [k for k, values in effect.controls.items() if np.mean(values) >= mean / 2]
        if mean + half < 0:
            verdict = f"{NOT}: the opposite"
        elif mean - half <= 0:
            verdict = f"{NOT}: within the noise"
        elif as_well:
            verdict = f"{PARTLY}: {', '.join(as_well)} as well"
        elif mean < size / 2:
            verdict = f"{PARTLY}: smaller"
        else:
            verdict = REPRODUCED
        return effect.text, verdict

    return judge


def no_gain(measure: Callable, than: Callable) -> Callable:
    """Claims that an effect has gone which is there elsewhere.

    Args:
      measure: `(records) -> Effect`, of the first run: what should be gone.
      than: `(records) -> Effect`, of the last run: where it should be there.

    Returns:
      `(*records) -> (text, verdict)`.
    """

    def judge(*runs):
        effect, there = measure(runs[0]), than(runs[-1])
        if short := _too_little(effect) or _too_little(there):
            return effect.text, short
        mean, half = interval(effect.values)
        size, size_half = interval(there.values)
        if size - size_half <= 0:
            verdict = f"{NOT}: no gain to lose"
        elif mean + half < size / 2:
            verdict = REPRODUCED
        elif mean - half > 0 and mean >= size / 2:
            verdict = f"{NOT}: a gain is left"
        else:
            verdict = f"{PARTLY}: too noisy to tell"
        return effect.text, verdict

    return judge


def _too_little(effect: Effect) -> str:
    if effect.missing:
        return f"{NOT}: {effect.missing}"
    seeds = len(effect.values)
    return "" if seeds >= LEAST_SEEDS else f"{NOT_RUN}: {seeds} of {LEAST_SEEDS} seeds"
