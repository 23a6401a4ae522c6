"""The rule of verdicts: from the interval of an effect, paired by seed, to what the data rule out.

A `Claim` names recorded runs and what it says of them, a `Gain` or a `NoGain`: called with the
number of the look and with the comparisons, these give a `Verdict`.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from experiments.results import archive, statistics
from experiments.results.statistics import Comparison

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
      values: {seed: positive as claimed}, points, or logarithms of ratios; where a run never
        arrives at its target infinite, or 0 where neither arm does, and only their order says
        something.
      text: from its interval to what was seen, for people.
      kind: of `MATTERS`.
      controls: {label: values} of what should not have the effect.
      censored: whether some run never arrives.
      runs: for each of the comparisons, (arm, speed, learning rate) of what it compares.
      instead: (word, why) where there are runs, but no values.
    """

    values: Mapping[int, float]
    text: Callable[[Interval], str] = lambda _: "-"
    kind: str = "loss"
    controls: Mapping[str, np.ndarray] = {}
    censored: bool = False
    runs: tuple[tuple, ...] = ()
    instead: tuple[str, str] | None = None

    @property
    def each(self) -> np.ndarray:
        """float64[seeds]"""
        return np.array([*self.values.values()], float)


NOTHING = Effect({})


class Verdict(NamedTuple):
    """What the data say of a claim.

    Fields:
      word: of `VERDICTS`; text: what was seen.
      low, high, mean: of the effect, at the level of the look.
      size: what was published, else that of `MATTERS`; of `NoGain` the gain that should go.
      seeds: that were compared.
      needed: how many would decide at the next look, if mean and variance stay, or the effects'
        distribution where some seeds never arrive; None: unknown.
      note: what stands behind the word; runs: as of `Effect`.
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
    runs: tuple[tuple, ...] = ()

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
        return Interval(*statistics.median_interval(effect.each, level))
    mean, half = statistics.interval(effect.each, level)
    return Interval(mean, mean - half, mean + half)


def seeds_needed(effect: Effect, size: float, distance: float, level: float) -> int | None:
    """With how many seeds the interval of the next look decides; None: unknown.

    Args:
      size: what was claimed; distance: of the mean from where it would be decided.
      level: of the next look.
    """
    values = np.sort(effect.each)
    if effect.censored:  # if all further ones are as these

        def decides(seeds):
            alike = values[np.arange(seeds) * len(values) // seeds]
            _, low, high = statistics.median_interval(alike, level)
            return word_of(low, high, size) != UNDECIDED

        return _least(decides, len(values), MOST_FOR_MEDIAN)
    if len(values) < 2 or not distance > 0:
        return None
    deviation = float(np.std(values, ddof=1))
    return _least(lambda n: statistics.half_width(deviation, n, level) < distance, 1, MOST_SEEDS)


def _least(enough: Callable[[int], bool], known: int, most: int) -> int | None:
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


class Gain(NamedTuple):
    """Claims an effect.

    Fields:
      measure: `comparisons -> Effect`.
      size: what was published, in the unit of `Effect.values`; 0 where only the sign was.
    """

    measure: Callable[..., Effect]
    size: float = 0.0

    def __call__(self, look: int, *compared) -> Verdict:
        effect = self.measure(*compared)
        if short := _too_little(effect):
            return short
        found, size = bounds(effect, level(look)), self.size or MATTERS[effect.kind].size
        word = word_of(found.low, found.high, size, published=self.size > 0)
        needed, note = None, ""
        if word == UNDECIDED:
            distance = max(found.mean, size / 2 - found.mean)
            needed = seeds_needed(effect, size, distance, level(look + 1))
        elif found.low > 0:
            middles = {k: _middle(values) for k, values in effect.controls.items()}
            as_well = [k for k, middle in middles.items() if middle >= found.mean / 2]
            note = f"{', '.join(as_well)} as well" if as_well else ""
        return _verdict(word, effect, found, size, effect.runs, needed=needed, note=note)


class NoGain(NamedTuple):
    """Claims that an effect has gone in the first run which is there in the last.

    Reproduced if its whole interval lies below half of what is there, opposite if above.

    Fields:
      measure, than: `comparison -> Effect`, of the first run and of the last.
    """

    measure: Callable[..., Effect]
    than: Callable[..., Effect]

    size = 0.0  # none was published

    def __call__(self, look: int, *compared) -> Verdict:
        effect, there = self.measure(compared[0]), self.than(compared[-1])
        runs = effect.runs + there.runs * (len(compared) > 1)
        if short := _too_little(effect) or _too_little(there):
            return short._replace(runs=runs)
        found, known = bounds(effect, level(look)), bounds(there, level(look))
        half, needed, note = known.mean / 2, None, ""
        if known.low <= 0:
            word, note = UNDECIDED, "no gain to lose"
        elif found.high < half:
            word = REPRODUCED
        elif found.low >= half:
            word, note = OPPOSITE, "a gain is left"
        else:
            word, distance = UNDECIDED, abs(found.mean - half)
            if not effect.censored:
                needed = seeds_needed(effect, known.mean, distance, level(look + 1))
        return _verdict(word, effect, found, known.mean, runs, needed=needed, note=note)


def _verdict(word, effect, found, size, runs, **fields) -> Verdict:
    mean, low, high = found
    seeds = len(effect.values)
    return Verdict(word, effect.text(found), low, high, mean, size, seeds, runs=runs, **fields)


def _middle(values) -> float:
    return statistics.median(values) if np.isinf(values).any() else float(np.mean(values))


def _too_little(effect: Effect) -> Verdict | None:
    seeds = len(effect.values)
    if effect.instead:
        word, why = effect.instead
        return Verdict(word, seeds=seeds, note=why, runs=effect.runs)
    if seeds < LEAST_SEEDS:
        text = effect.text(bounds(effect, MISSES)) if seeds > 1 else "-"
        note = f"{seeds} of {LEAST_SEEDS} seeds"
        return Verdict(NOT_RUN, text, seeds=seeds, note=note, runs=effect.runs)
    return None


class Claim(NamedTuple):
    text: str  # of CD-GraB against D-RR, where it does not say more
    paper: str  # the published numbers; "-": no paper says it, it is ours
    runs: tuple[str, ...] = ()  # of `claims.RUNS`; the first one's command is shown
    judge: Callable | None = None  # `(look, *comparisons) -> Verdict`; None: not testable here
    scaled: str = ""  # what was scaled down, or is missing, where it is not what the run says
    setting: str = ""  # at which learning rate
    command: str = ""  # what shows it, where no recorded run does


def history(claim: Claim, recorded: Mapping[str, Comparison]) -> list[Verdict]:
    """The verdicts of all looks, the latest last, each at its level and of the seeds that it had.

    A look at which nothing of this claim had changed is none, nor is one with too few seeds.

    Args:
      recorded: comparisons by the names of runs.
    """
    if claim.judge is None:
        return [Verdict(UNTESTABLE)]
    if not set(claim.runs) <= set(recorded):
        return [Verdict(NOT_RUN)]
    found, compared = [], [recorded[name] for name in claim.runs]
    for seeds in archive.seeds_at_looks(compared):
        then = [archive.first_seeds(one, count) for one, count in zip(compared, seeds, strict=True)]
        if found and found[-1].word == NOT_RUN:
            found.pop()
        if not found or claim.judge(len(found), *then) != found[-1]:
            found.append(claim.judge(len(found) + 1, *then))
    return found
