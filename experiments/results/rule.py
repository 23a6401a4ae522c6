"""The rule of verdicts: what the interval of an effect over seeds rules out."""

import functools
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
MOST_SEEDS = 10_000  # if more are needed, how many is as good as unknown
MISSES = 0.05  # how often an interval may miss, over all looks at a claim together


class Matters(NamedTuple):
    """The smallest effect that would matter to a user: ours, for where no size was published."""

    size: float  # as `Effect.values` count it
    words: str
    of: str  # what is measured


MATTERS = {
    "points": Matters(0.5, "0.5 points", "an accuracy"),
    "loss": Matters(math.log(1.01), "1 %", "a loss, or a metric as sMAPE and perplexity"),
    "cost": Matters(math.log(1.1), "10 %", "a cost: epochs, loads"),
}


class Interval(NamedTuple):
    mean: float  # or the median, where some seeds never arrive
    low: float
    high: float


class Again(NamedTuple):
    """What a further seed of both arms takes."""

    rates: tuple[float, ...] = ()  # at which both run
    seconds: float = math.nan


class Effect(NamedTuple):
    """How much better one arm is than another.

    Fields:
      values: {seed: positive as claimed}, points, or logarithms of ratios; where a run never
        arrives at its target infinite, or 0 where neither arm does, and only their order says
        something.
      text: from its interval to what was seen, for people.
      kind: of `MATTERS`.
      controls: {label: mean or median} of what should not have the effect.
      censored: whether some run never arrives.
      instead: (word, why) where there are runs, but no values.
      again: a further seed of it.
    """

    values: Mapping[int, float] = {}
    text: Callable[[Interval], str] = lambda interval: "-"
    kind: str = "loss"
    controls: Mapping[str, float] = {}
    censored: bool = False
    instead: tuple[str, str] | None = None
    again: Again = Again()

    def interval(self, level: float, seeds: int | None = None) -> Interval:
        """Of the mean by Student's t; of the median where some run never arrives.

        Args:
          level: how often it misses.
          seeds: as if there were so many, like these; None: of those that there are.
        """
        values = np.array([*self.values.values()], float)
        if self.censored:
            if seeds:
                values = np.sort(values)[np.arange(seeds) * len(values) // seeds]
            return Interval(*statistics.median_interval(values, level))
        mean, half = statistics.interval(values, level)
        if seeds:
            half = statistics.half_width(np.std(values, ddof=1), seeds, level)
        return Interval(mean, mean - half, mean + half)


class Verdict(NamedTuple):
    """The verdict on a claim.

    Fields:
      word: of `VERDICTS`; note: what stands behind it; text: what was seen.
      found: the interval of the effect, at the level of the look.
      size: what was published, else that of `MATTERS`, or the gain that should have gone.
      seeds: that were compared; needed: how many would decide at the next look, None: unknown.
      again: a further seed of it.
    """

    word: str
    note: str = ""
    text: str = "-"
    found: Interval = Interval(math.nan, math.nan, math.nan)
    size: float = math.nan
    seeds: int = 0
    needed: int | None = None
    again: Again = Again()

    @property
    def hours(self) -> float:
        """That the seeds which are missing take; nan: unknown."""
        return self.again.seconds * ((self.needed or math.nan) - self.seeds) / 3600

    @property
    def words(self) -> str:
        return "; ".join(filter(None, (self.word, self.note)))


def ratio(less: float, more: float) -> float:
    """The size of a published effect, as `Effect.values` count it."""
    return math.log(more / less)


def level(look: int) -> float:
    """How often the interval of the k-th look may miss: 0.05 / (k (k + 1)), 0.05 in all.

    Example:
      >>> level(1), level(2)
      (0.025, 0.008333333333333333)
    """
    return MISSES / (look * (look + 1))


def word_of(found: Interval, size: float, least: float) -> str:
    """The verdict on an effect in this interval.

    Args:
      size: what was claimed, 0 where only the sign was; least: the same, or what would matter.
    """
    if found.low > 0:
        half = found.low >= size / 2  # so that the estimate is half of it at least
        return REPRODUCED if half or found.high >= size else SMALLER
    if found.high < 0:
        return OPPOSITE
    return NONE if found.high < least / 2 else UNDECIDED


def word_of_gone(found: Interval, there: Interval) -> str:
    """The verdict on an effect that is claimed to have gone, where another one is there.

    Reproduced if its whole interval lies below half of what is there, opposite if above.
    """
    if there.low <= 0:
        return UNDECIDED
    if found.high < there.mean / 2:
        return REPRODUCED
    return OPPOSITE if found.low >= there.mean / 2 else UNDECIDED


def judge(look: int, size: float, effect: Effect, there: Effect | None = None) -> Verdict:
    """The verdict on an effect at the k-th look.

    Args:
      size: what was claimed, in the unit of `Effect.values`; 0 where only the sign was.
      there: of a claim that the effect has gone, one that has not.
    """
    for own in (effect, there or effect):
        seeds = len(own.values)
        if own.instead or seeds < LEAST_SEEDS:
            word, why = own.instead or (NOT_RUN, f"{seeds} of {LEAST_SEEDS} seeds")
            return Verdict(word, why, seeds=seeds)
    found, note = effect.interval(level(look)), ""
    if there is not None:
        known = there.interval(level(look))
        word_at, least = functools.partial(word_of_gone, there=known), known.mean
        if known.low <= 0:
            note = "no gain to lose"
        elif word_at(found) == OPPOSITE:
            note = "a gain is left"
    else:
        least = size or MATTERS[effect.kind].size
        word_at = functools.partial(word_of, size=size, least=least)
        also = [label for label, control in effect.controls.items() if control >= found.mean / 2]
        if also and found.low > 0:
            note = f"{', '.join(also)} as well"
    word, seeds = word_at(found), len(effect.values)
    needed = seeds_needed(effect, word_at, look + 1) if word == UNDECIDED else None
    return Verdict(word, note, effect.text(found), found, least, seeds, needed, effect.again)


def seeds_needed(effect: Effect, word_at: Callable[[Interval], str], look: int) -> int | None:
    """With how many seeds, if further ones are like these, the k-th look decides; None: unknown."""

    def decides(seeds):
        return word_at(effect.interval(level(look), seeds)) != UNDECIDED

    low = len(effect.values)
    high = low + 1
    while not decides(high):
        low, high = high, 2 * high
        if low >= MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


class Claim(NamedTuple):
    text: str  # of CD-GraB against D-RR, where it does not say more
    paper: str  # the published numbers; "-": no paper says it, it is ours
    runs: tuple[str, ...] = ()  # of `claims.RUNS`; the first one's command is shown
    measure: Callable[..., Effect] | None = None  # of the first one's comparison
    size: float = 0.0  # as of `judge`
    gone: Callable[..., Effect] | None = None  # of the last, an effect that is still there
    known: Verdict | None = None  # without any run
    setting: str = ""  # at which learning rate
    command: str = ""  # what shows it, where no recorded run does


def history(claim: Claim, recorded: Mapping[str, Comparison]) -> list[Verdict]:
    """The verdicts of all looks, the latest last, each at its level and of the seeds that it had.

    A look at which nothing of this claim had changed is none, nor is one with too few seeds.

    Args:
      recorded: comparisons by the names of runs.
    """
    if claim.known:
        return [claim.known]
    if not set(claim.runs) <= set(recorded):
        return [Verdict(NOT_RUN)]
    found, before = [], None
    for compared in archive.at_looks([recorded[name] for name in claim.runs]):
        effects = (claim.measure(compared[0]),)
        effects += (claim.gone(compared[-1]),) if claim.gone else ()
        values = [(effect.values, effect.instead) for effect in effects]
        if values != before:
            if found and found[-1].word == NOT_RUN:
                found.pop()
            found.append(judge(len(found) + 1, claim.size, *effects))
            before = values
    return found
