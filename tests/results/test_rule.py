"""The rule of verdicts: every word, its interval at every look, and the seeds it would take."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiments.results import rule, statistics
from experiments.results.rule import NOTHING, Effect, Gain, NoGain, seeds_needed, word_of

CLEAR = np.array([0.9, 1.0, 1.1])  # interval 0.64 to 1.36 at the first look
inf = math.inf


def seen(values, **fields):
    return Effect(dict(enumerate(values)), lambda _: "seen", "points", **fields)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.1, 1.0, "reproduced"),  # reaches what was published
        (0.5, 0.9, "reproduced"),  # half of it at least
        (0.49, 0.99, "smaller"),
        (1e-9, 0.3, "smaller"),
        (0.0, 0.49, "none of that size"),
        (-inf, 0.0, "none of that size"),
        (0.0, 0.5, "undecided"),
        (-inf, inf, "undecided"),
        (-2.0, -1e-9, "opposite"),
        (-inf, -inf, "opposite"),
        (inf, inf, "reproduced"),
    ],
)
def test_an_interval_has_its_word_at_the_boundaries(low, high, word):
    assert word_of(low, high, 1.0) == word
    unpublished = "reproduced" if word == "smaller" else word
    assert word_of(low, high, 1.0, published=False) == unpublished


BOUND = st.floats(allow_nan=False)


@given(BOUND, BOUND, st.floats(1e-6, 1e6), BOUND, BOUND)
def test_every_interval_has_exactly_one_word_and_a_narrower_one_decides_no_less(a, b, size, c, d):
    low, high = min(a, b), max(a, b)
    conditions = {
        "reproduced": low > 0 and (high >= size or low >= size / 2),
        "smaller": low > 0 and high < size and low < size / 2,
        "none of that size": low <= 0 <= high and high < size / 2,
        "undecided": low <= 0 and high >= size / 2,
        "opposite": high < 0,
    }
    word = word_of(low, high, size)
    assert [name for name, holds in conditions.items() if holds] == [word]
    inner = sorted(float(np.clip(v, low, high)) for v in (c, d))
    assert word == "undecided" or word_of(*inner, size) != "undecided"


@pytest.mark.parametrize(
    ("effect", "size", "verdict"),
    [
        (seen(CLEAR), 0.0, "reproduced"),
        (seen(CLEAR), 1.3, "reproduced"),
        (seen(CLEAR), 1.4, "smaller"),
        (seen(CLEAR, controls={"unzip": CLEAR / 3}), 1.0, "reproduced"),
        (seen(CLEAR, controls={"unzip": CLEAR, "id": -CLEAR}), 1.0, "reproduced; unzip as well"),
        (seen(CLEAR, controls={"a": CLEAR, "b": CLEAR}), 2.0, "smaller; a, b as well"),
        (seen(CLEAR - 1), 1.0, "none of that size"),
        (seen(CLEAR - 1), 0.0, "undecided"),  # of half a point, which would matter
        (seen([0.0, 1.0, 2.0]), 1.0, "undecided"),
        (seen(-CLEAR), 1.0, "opposite"),
        (seen([1.0, 1.0]), 0.0, "not run; 2 of 3 seeds"),
        (NOTHING, 0.0, "not run; 0 of 3 seeds"),
        (seen([], instead=(rule.UNDECIDED, "it diverges")), 0.0, "undecided; it diverges"),
        (seen([inf] * 7, censored=True), 1.0, "reproduced"),
        (seen([inf] * 6, censored=True), 1.0, "undecided"),
        (seen([inf] * 7, censored=True, controls={"c": np.array([inf] * 4 + [-inf] * 3)}), 1.0,
         "reproduced; c as well"),
        (seen([0.0] * 7, censored=True), 1.0, "none of that size"),
    ],
)  # fmt: skip
def test_an_effect_has_its_verdict(effect, size, verdict):
    found = Gain(lambda: effect, size)(1)
    assert found.words == verdict
    assert found.word in rule.VERDICTS
    if len(effect.values) >= 3:
        assert (found.text, found.seeds) == ("seen", len(effect.values))
        assert found.low <= found.mean <= found.high
        assert found.size == (size or 0.5)


@pytest.mark.parametrize(
    ("gone", "there", "verdict"),
    [
        (CLEAR / 5, CLEAR, "reproduced"),
        (-CLEAR, CLEAR, "reproduced"),
        (CLEAR, CLEAR, "opposite; a gain is left"),
        ([0.0, 0.2, 0.7], CLEAR, "undecided"),
        (CLEAR / 5, CLEAR - 1, "undecided; no gain to lose"),
        (CLEAR / 5, [1.0], "not run; 1 of 3 seeds"),
    ],
)
def test_that_a_gain_has_gone_has_its_verdict(gone, there, verdict):
    judge = NoGain(lambda run: seen(gone), than=lambda run: seen(there))
    found = judge(1, None)
    assert found.words == verdict
    assert (found.needed is not None) == (verdict == "undecided")


def test_intervals_are_at_the_level_of_their_look_and_levels_sum_to_what_all_may_miss():
    levels = [rule.level(look) for look in range(1, 10_001)]
    assert levels == sorted(levels, reverse=True) and levels[0] == 0.025
    assert 0.0499 < math.fsum(levels) < 0.05
    for look in (1, 2, 5):
        found = Gain(lambda: seen(CLEAR), 1.0)(look)
        known = stats.t.interval(1 - rule.level(look), 2, 1.0, stats.sem(CLEAR))
        np.testing.assert_allclose((found.low, found.high), known)


def test_seeds_that_a_median_needs():
    level, size = rule.level(2), 0.1
    for values, word in (([inf, inf, 0.5], "reproduced"), ([-inf, -inf, -1.0], "opposite")):
        needed = seeds_needed(seen(values, censored=True), size, 0.0, level)
        for seeds in (needed - 1, needed):
            _, low, high = statistics.median_interval(np.resize(values, seeds), level)
            assert (word_of(low, high, size) == word) == (seeds == needed)
        many = seen(values * 9, censored=True)  # more than that are there
        assert seeds_needed(many, size, 0.0, level) == 28
    assert seeds_needed(seen([inf, -inf], censored=True), size, 0.0, level) is None


@pytest.mark.parametrize("level", [0.05, 0.05 / 6])
@pytest.mark.parametrize("count", [1, 3, 6, 7, 12, 40])
def test_the_interval_of_a_median_is_of_order_statistics(count, level):
    values = np.random.default_rng(count).normal(size=count)
    median, low, high = statistics.median_interval(values, level)
    assert median == np.median(values)
    # The narrowest pair of order statistics that misses on a side with half the level at most.
    ranks = [r for r in range(1, count // 2 + 1) if stats.binom.cdf(r - 1, count, 0.5) <= level / 2]
    ordered = np.sort(values)
    known = (ordered[max(ranks) - 1], ordered[-max(ranks)]) if ranks else (-inf, inf)
    assert (low, high) == known


@pytest.mark.parametrize(
    ("values", "median"),
    [([inf, -inf], 0.0), ([inf, 1.0], inf), ([-inf, -inf, 2.0], -inf), ([1.0, 2.0], 1.5)],
)
def test_a_median_knows_infinities(values, median):
    assert statistics.median(values) == median


@pytest.mark.parametrize("deviation", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("level", [0.025, 0.05 / 12])
def test_needed_seeds_are_the_fewest_whose_interval_is_narrower(deviation, level):
    effect = seen(np.array([-1.0, 0.0, 1.0]) * deviation)
    needed = seeds_needed(effect, 1.0, 0.1, level)
    halves = [statistics.half_width(deviation, n, level) for n in range(2, needed + 1)]
    assert [n for n, half in enumerate(halves, 2) if half < 0.1] == [needed]


@given(st.floats(-0.4, 0.9), st.floats(0.05, 3), st.integers(1, 4))
def test_what_is_undecided_needs_more_seeds_and_then_is_decided(mean, deviation, look):
    values = mean + deviation * np.array([-1.0, 0.0, 1.0])
    found = Gain(lambda: seen(values), 1.0)(look)
    if found.word == "undecided":
        assert found.needed > 3
        half = statistics.half_width(np.std(values, ddof=1), found.needed, rule.level(look + 1))
        assert word_of(found.mean - half, found.mean + half, 1.0) != "undecided"


def test_what_cannot_be_foreseen_is_unknown():
    for values, distance in (([1.0], 1.0), (CLEAR, 0.0), (CLEAR, 1e-9)):
        assert seeds_needed(seen(values), 1.0, distance, 0.05) is None


@pytest.mark.parametrize("draw", ["normal", "arrivals"])
def test_looking_again_at_nothing_finds_something_seldom(draw):
    """Of 2,000 sequences without an effect, those decided for or against at any of five looks."""
    random, counts, total = np.random.default_rng(0), (3, 6, 12, 24, 48), 2000
    if draw == "normal":
        drawn = random.normal(size=(total, counts[-1]))
    else:  # seeds of which one arm may never arrive
        drawn = random.choice([-inf, -1.0, 1.0, inf], size=(total, counts[-1]))
    judge, wrong = Gain(lambda values: seen(values, censored=draw != "normal"), 1.0), 0
    for values in drawn:
        words = {judge(look, values[:count]).word for look, count in enumerate(counts, 1)}
        wrong += bool(words & {"reproduced", "smaller", "opposite"})
    allowed = total * 0.05 + 3 * math.sqrt(total * 0.05 * 0.95)
    assert 0 < wrong <= allowed  # the test sees what it looks for
