"""The rule of verdicts: from the interval of an effect, paired by seed, to what the data rule out.

`Gain` and `NoGain` are what a row of `claims.CLAIMS` claims: called with the number of the look and
with comparisons, they give a `Verdict`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.results import statistics

REPRODUCED, SMALLER, NONE = "reproduced", "smaller", "none of that size"
OPPOSITE, UNDECIDED = "opposite", "undecided"
UNTESTABLE, NOT_RUN = "not testable here", "not run"
VERDICTS = (REPRODUCED, SMALLER, NONE, OPPOSITE, UNDECIDED, UNTESTABLE, NOT_RUN)
LEAST_SEEDS = 3
MISSES = 0.05  # how often an interval may miss, over all looks at a claim together
MOST_SEEDS = 10**6  # beyond it, how many are needed is as good as unknown
MOST_FOR_MEDIAN = 500  # the same, where their effects are written down to tell


class Matters(NamedTuple):
    """The smallest effect that would matter to a user: ours, for where no size was published."""

    size: float  # as `Effect.values` count it
    words: str
    of: str  # what is measured


MATTERS = {
    "points": Matters(0.5, "0.5 points", "an accuracy"),
    "loss": Matters(math.log(1.01), "1 %", "a loss, or a metric as sMAPE and perplexity"),
    "cost": Matters(math.log(1.1), "10 %", "a cost: epochs, loads, seconds"),
}


class Interval(NamedTuple):
    mean: float  # or the median, where some seeds never arrive
    low: float
    high: float


class Effect(NamedTuple):
    """How much better one arm is than another.

    Fields:
      values: float64[seeds], positive as claimed: points, or logarithms of ratios.
      text: from its interval to what was seen, for people.
      kind: of `MATTERS`.
      controls: {label: values} of what should not have the effect.
      censored: whether some run never arrives at its target; values are then infinite, or 0 where
        neither arm arrives, and only their order says something.
      runs: (arm, speed, learning rate) of the runs compared; seeds: of the values.
      instead: (word, why) where there are runs, but no values.
    """

    values: np.ndarray
    text: Callable[[Interval], str] = lambda _: "-"
    kind: str = "loss"
    controls: Mapping[str, np.ndarray] = {}
    censored: bool = False
    runs: tuple[tuple, ...] = ()
    seeds: tuple[int, ...] = ()
    instead: tuple[str, str] | None = None


NOTHING = Effect(np.empty(0))


class Verdict(NamedTuple):
    """What the data say of a claim.

    Fields:
      word: of `VERDICTS`; text: what was seen.
      low, high, mean: of the effect, at the level of the look.
      size: what was published, else that of `MATTERS`; of `NoGain` the gain that should go.
      seeds: that were compared.
      needed: how many would decide at the next look, if mean and variance stay, or the effects'
        distribution where some seeds never arrive; None: unknown.
      note: what stands behind the word.
    """

    word: str
    text: str = "-"
    low: float = math.nan
    high: float = math.nan
    mean: float = math.nan
    size: float = math.nan
    seeds: int = 0
    needed: int | None = None
    note: str = ""

    @property
    def words(self) -> str:
        return "; ".join(filter(None, (self.word, self.note)))


def ratio(less: float, more: float) -> float:
    """The size of a published effect, as `values` count it."""
    return float(np.log(more / less))


def level(look: int) -> float:
    """How often the interval of the k-th look may miss: 0.05 / (k (k + 1)), 0.05 in all.

    Example:
      >>> level(1), level(2)
      (0.025, 0.008333333333333333)
    """
    return MISSES / (look * (look + 1))


def word_of(low: float, high: float, size: float, *, published: bool = True) -> str:
    """The verdict on an effect in [low, high], where one of this size > 0 was claimed.

    Args:
      published: whether the size was; without, a sign is all that was claimed.
    """
    if low > 0:
        half = high >= size or low >= size / 2  # so that the estimate is half of it at least
        return REPRODUCED if half or not published else SMALLER
    if high < 0:
        return OPPOSITE
    return NONE if high < size / 2 else UNDECIDED


def bounds(effect: Effect, level: float) -> Interval:
    """Of the mean by Student's t; of the median where some run never arrives."""
    if effect.censored:
        return Interval(*statistics.median_interval(effect.values, level))
    mean, half = statistics.interval(effect.values, level)
    return Interval(mean, mean - half, mean + half)


def seeds_needed(effect: Effect, distance: float, level: float) -> int | None:
    """With how many seeds the interval is narrower than this, if mean and variance stay.

    Args:
      distance: of the mean from where it would be decided.
    """
    if effect.censored or len(effect.values) < 2 or not distance > 0:
        return None
    deviation = float(np.std(effect.values, ddof=1))

    return _least(lambda n: statistics.half_width(deviation, n, level) < distance, 1)


def _least(enough: Callable[[int], bool], known: int, most=MOST_SEEDS) -> int | None:
    """The least number above `known` that is enough, by bisection; None: none is known."""
    low, high = known, known + 1
    while not enough(high):
        low, high = high, 2 * high
        if low >= most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def seeds_for_median(effect: Effect, size: float, level: float) -> int | None:
    """With how many seeds the interval of the median decides, if all further ones are as these."""
    values = np.sort(effect.values)

    def decides(seeds):
        alike = values[np.arange(seeds) * len(values) // seeds]
        _, low, high = statistics.median_interval(alike, level)
        return word_of(low, high, size) != UNDECIDED

    return _least(decides, len(values), most=MOST_FOR_MEDIAN)


class Gain(NamedTuple):
    """Claims an effect.

    Fields:
      measure: `comparison -> Effect`.
      size: what was published, in the unit of `Effect.values`; 0 where only the sign was.
    """

    measure: Callable
    size: float = 0.0

    def asked(self, run: int, comparison) -> Sequence[tuple]:
        """(arm, speed, learning rate) of the runs that it compares in the n-th of its records."""
        del run
        return getattr(self.measure, "measure", self.measure)(comparison).runs

    def __call__(self, look: int, *runs) -> Verdict:
        effect = self.measure(*runs)
        if short := _too_little(effect):
            return short
        found, size = bounds(effect, level(look)), self.size or MATTERS[effect.kind].size
        word = word_of(found.low, found.high, size, published=self.size > 0)
        needed, note = None, ""
        if word == UNDECIDED:
            if effect.censored:
                needed = seeds_for_median(effect, size, level(look + 1))
            else:
                distance = max(found.mean, size / 2 - found.mean)
                needed = seeds_needed(effect, distance, level(look + 1))
        elif found.low > 0:
            shown = {k: _middle(values) for k, values in effect.controls.items()}
            as_well = [k for k, middle in shown.items() if middle >= found.mean / 2]
            note = f"{', '.join(as_well)} as well" if as_well else ""
        return _verdict(word, effect, found, size, needed=needed, note=note)


class NoGain(NamedTuple):
    """Claims that an effect has gone in the first run which is there in the last.

    Reproduced if its whole interval lies below half of what is there, opposite if above.

    Fields:
      measure, than: `comparison -> Effect`, of the first run and of the last.
    """

    measure: Callable
    than: Callable

    size = 0.0  # none was published

    def asked(self, run: int, comparison) -> Sequence[tuple]:
        """As of `Gain`."""
        return (self.than if run else self.measure)(comparison).runs

    def __call__(self, look: int, *runs) -> Verdict:
        effect, there = self.measure(runs[0]), self.than(runs[-1])
        if short := _too_little(effect) or _too_little(there):
            return short
        found, known = bounds(effect, level(look)), bounds(there, level(look))
        half = known.mean / 2
        if known.low <= 0:
            return _verdict(UNDECIDED, effect, found, known.mean, note="no gain to lose")
        if found.high < half:
            return _verdict(REPRODUCED, effect, found, known.mean)
        if found.low >= half:
            return _verdict(OPPOSITE, effect, found, known.mean, note="a gain is left")
        needed = seeds_needed(effect, abs(found.mean - half), level(look + 1))
        return _verdict(UNDECIDED, effect, found, known.mean, needed=needed)


def _verdict(word, effect, found, size, **fields) -> Verdict:
    mean, low, high = found
    seeds = len(effect.values)
    return Verdict(word, effect.text(found), low, high, mean, size, seeds, **fields)


def _middle(values) -> float:
    return statistics.median(values) if np.isinf(values).any() else float(np.mean(values))


def _too_little(effect: Effect) -> Verdict | None:
    seeds = len(effect.values)
    if effect.instead:
        word, why = effect.instead
        return Verdict(word, seeds=seeds, note=why)
    if seeds < LEAST_SEEDS:
        text = effect.text(bounds(effect, MISSES)) if seeds > 1 else "-"
        return Verdict(NOT_RUN, text, seeds=seeds, note=f"{seeds} of {LEAST_SEEDS} seeds")
    return None
