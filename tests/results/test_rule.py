"""The rule of verdicts: words, intervals at every look, and needed seeds."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiments.results import archive, rule, statistics
from experiments.results.effects import Measure
from experiments.results.rule import Claim, Effect, Interval, history, judge, level, word_of
from experiments.results.statistics import Criterion, compare

CLEAR = np.array([0.9, 1.0, 1.1])  # interval 0.64 to 1.36 at the first look
inf = math.inf


def seen(values, **fields):
    return Effect(dict(enumerate(values)), lambda _: "seen", "points", **fields)


def word(low, high, size, least=None):
    return word_of(Interval(math.nan, low, high), size, least or size)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
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
def test_intervals_at_the_boundaries_get_the_right_word(low, high, expected):
    assert word(low, high, 1.0) == expected
    assert word(low, high, 0.0, 1.0) == ("reproduced" if expected == "smaller" else expected)


BOUND = st.floats(allow_nan=False)


@given(BOUND, BOUND, st.floats(1e-6, 1e6), BOUND, BOUND)
def test_every_interval_has_one_word_and_narrower_ones_decide_more(a, b, size, c, d):
    low, high = min(a, b), max(a, b)
    conditions = {
        "reproduced": low > 0 and (high >= size or low >= size / 2),
        "smaller": low > 0 and high < size and low < size / 2,
        "none of that size": low <= 0 <= high and high < size / 2,
        "undecided": low <= 0 and high >= size / 2,
        "opposite": high < 0,
    }
    found = word(low, high, size)
    assert [name for name, holds in conditions.items() if holds] == [found]
    inner = sorted(float(np.clip(v, low, high)) for v in (c, d))
    assert found == "undecided" or word(*inner, size) != "undecided"


@pytest.mark.parametrize(
    ("effect", "size", "words"),
    [
        (seen(CLEAR), 0.0, "reproduced"),
        (seen(CLEAR), 1.3, "reproduced"),
        (seen(CLEAR), 1.4, "smaller"),
        (seen(CLEAR, controls={"unzip": 0.3}), 1.0, "reproduced"),
        (seen(CLEAR, controls={"unzip": 1.0, "id": -1.0}), 1.0, "reproduced; unzip as well"),
        (seen(CLEAR, controls={"a": 1.0, "b": 1.0}), 2.0, "smaller; a, b as well"),
        (seen(CLEAR - 1), 1.0, "none of that size"),
        (seen(CLEAR - 1), 0.0, "undecided"),  # of half a point, which would matter
        (seen([0.0, 1.0, 2.0]), 1.0, "undecided"),
        (seen(-CLEAR), 1.0, "opposite"),
        (seen([1.0, 1.0]), 0.0, "not run; 2 of 3 seeds"),
        (Effect(), 0.0, "not run; 0 of 3 seeds"),
        (seen([], instead=(rule.UNDECIDED, "it diverges")), 0.0, "undecided; it diverges"),
        (seen([inf] * 7, censored=True), 1.0, "reproduced"),
        (seen([inf] * 6, censored=True), 1.0, "undecided"),
        (seen([inf] * 7, censored=True, controls={"c": inf}), 1.0, "reproduced; c as well"),
        (seen([0.0] * 7, censored=True), 1.0, "none of that size"),
    ],
)
def test_an_effect_has_its_verdict(effect, size, words):
    found = judge(1, size, effect)
    assert found.words == words and found.word in rule.VERDICTS
    if len(effect.values) >= 3:
        assert (found.text, found.seeds, found.size) == ("seen", len(effect.values), size or 0.5)


@pytest.mark.parametrize(
    ("gone", "there", "words"),
    [
        (CLEAR / 5, CLEAR, "reproduced"),
        (-CLEAR, CLEAR, "reproduced"),
        (CLEAR, CLEAR, "opposite; a gain is left"),
        ([0.0, 0.2, 0.7], CLEAR, "undecided"),
        (CLEAR / 5, CLEAR - 1, "undecided; no gain to lose"),
        (CLEAR / 5, [1.0], "not run; 1 of 3 seeds"),
    ],
)
def test_a_vanished_gain_has_its_verdict(gone, there, words):
    found = judge(1, 0.0, seen(gone), seen(there))
    assert found.words == words
    assert (found.needed is not None) == (words == "undecided")


def test_intervals_have_the_level_of_their_look_and_errors_sum_to_5_percent():
    levels = [level(look) for look in range(1, 10_001)]
    assert levels == sorted(levels, reverse=True) and levels[0] == 0.025
    assert 0.0499 < math.fsum(levels) < 0.05
    for look in (1, 2, 5):
        found = judge(look, 1.0, seen(CLEAR)).found
        known = stats.t.interval(1 - level(look), 2, 1.0, stats.sem(CLEAR))
        np.testing.assert_allclose((found.low, found.high), known)


@pytest.mark.parametrize("level", [0.05, 0.05 / 6])
@pytest.mark.parametrize("count", [1, 3, 6, 7, 12, 40])
def test_the_interval_of_a_median_uses_order_statistics(count, level):
    values = np.random.default_rng(count).normal(size=count)
    median, low, high = statistics.median_interval(values, level)
    assert median == np.median(values)
    # The narrowest pair of order statistics that misses on a side with half the level at most.
    ranks = [r for r in range(1, count // 2 + 1) if stats.binom.cdf(r - 1, count, 0.5) <= level / 2]
    ordered = np.sort(values)
    known = (ordered[max(ranks) - 1], ordered[-max(ranks)]) if ranks else (-inf, inf)
    assert (low, high) == known


def test_a_median_accepts_infinities():
    known = (([inf, -inf], 0.0), ([inf, 1.0], inf), ([-inf, -inf, 2.0], -inf))
    assert all(statistics.median(values) == median for values, median in known)


@given(st.floats(-0.4, 0.9), st.floats(0.05, 3), st.integers(1, 4))
def test_needed_seeds_are_the_fewest_that_decide_at_the_next_look(mean, deviation, look):
    values = mean + deviation * np.array([-1.0, 0.0, 1.0])
    found = judge(look, 1.0, seen(values))
    if found.word == "undecided":
        for seeds in (found.needed - 1, found.needed):
            half = statistics.half_width(np.std(values, ddof=1), seeds, level(look + 1))
            later = word(found.found.mean - half, found.found.mean + half, 1.0)
            assert (later != "undecided") == (seeds == found.needed)


def test_seeds_needed_by_a_median_and_unknown_numbers():
    word_at = functools.partial(word_of, size=0.1, least=0.1)
    for values, expected in (([inf, inf, 0.5], "reproduced"), ([-inf, -inf, -1.0], "opposite")):
        needed = rule.seeds_needed(seen(values, censored=True), word_at, 2)
        for seeds in (needed - 1, needed):
            found = Interval(*statistics.median_interval(np.resize(values, seeds), level(2)))
            assert (word_at(found) == expected) == (seeds == needed)
        many = seen(values * 9, censored=True)  # more than that are there
        assert rule.seeds_needed(many, word_at, 2) == 28
    assert rule.seeds_needed(seen([inf, -inf], censored=True), word_at, 2) is None
    assert (
        rule.seeds_needed(seen(CLEAR - 1), functools.partial(word_of, size=0, least=0), 2) is None
    )


@pytest.mark.parametrize("draw", ["normal", "arrivals"])
def test_repeated_looks_at_no_effect_rarely_decide(draw):
    """The share of 2,000 sequences without an effect that any of five looks decides."""
    random, counts, total = np.random.default_rng(0), (3, 6, 12, 24, 48), 2000
    if draw == "normal":
        drawn = random.normal(size=(total, counts[-1]))
    else:  # seeds of which one arm may never arrive
        drawn = random.choice([-inf, -1.0, 1.0, inf], size=(total, counts[-1]))
    wrong = 0
    for values in drawn:
        found = (seen(values[:count], censored=draw != "normal") for count in counts)
        intervals = (effect.interval(level(look)) for look, effect in enumerate(found, 1))
        wrong += any(interval.low > 0 or interval.high < 0 for interval in intervals)
    allowed = total * 0.05 + 3 * math.sqrt(total * 0.05 * 0.95)
    assert 0 < wrong <= allowed  # the test sees what it looks for


# Looks at recorded runs.
ARMS = {"rr": "D-RR", "cd_grab": "CD-GraB"}
GAINS = [0.0, 3.0, 1.5, *9 * [2.0, 1.0]]  # points of accuracy, of each seed
CLAIM = Claim("higher", "2 points", ("one",), Measure("test/accuracy"), 2.0)


def rows_of(gains, rate=0.1):
    return [
        {"arm": arm, "speed": None, "learning_rate": rate, "seed": seed, "phase": "run",
         "step": 10, "seconds": 1.0, "train/loss": 1.0,
         "test/accuracy": 0.5 + gain / 100 * (arm == "cd_grab")}
        for arm in ARMS
        for seed, gain in enumerate(gains)
    ]  # fmt: skip


def looked(rows, looks=()):
    found = [{"seeds": seeds, "date": date} for seeds, date in looks]
    return compare(rows, ARMS, Criterion(when="lowest"))._replace(looks=found)


def test_the_verdict_is_that_of_the_latest_look_at_its_level():
    looks = [(2, "a"), (3, "a"), (12, "b"), (21, "c")]  # two seeds decide nothing, cost no level
    found = history(CLAIM, {"one": looked(rows_of(GAINS), looks)})
    assert [verdict.seeds for verdict in found] == [3, 12, 21]
    assert [verdict.word for verdict in found] == ["undecided", "reproduced", "reproduced"]
    assert found[1] == judge(2, 2.0, CLAIM.measure(looked(rows_of(GAINS[:12]))))
    (once,) = history(CLAIM, {"one": looked(rows_of(GAINS))})  # at the first look's level
    assert once.found.mean == found[-1].found.mean and once.found.low > found[-1].found.low


def test_a_look_without_new_data_does_not_count():
    known = {"one": looked(rows_of(GAINS[:6]) + rows_of(GAINS[:3], 0.2), [(3, "a"), (6, "b")])}
    same, more = (CLAIM._replace(measure=CLAIM.measure._replace(rate=rate)) for rate in (0.2, 0.1))
    assert [verdict.seeds for verdict in history(same, known)] == [3]
    assert [verdict.seeds for verdict in history(more, known)] == [3, 6]


@pytest.mark.parametrize(
    ("looks", "seeds"),
    [
        ([[(3, "a"), (9, "b")]], [(3,), (9,)]),
        ([[(3, "a")], [(5, "a"), (9, "b")]], [(3, 5), (3, 9)]),
        ([[(3, "a"), (4, "c")], [(5, "b"), (9, "c")]], [(3, 5), (4, 9)]),
        ([[(3, "a"), (4, "a")], [(5, "a")]], [(3, 5), (4, 5)]),
    ],
)
def test_a_look_at_one_run_of_a_claim_counts_for_the_claim(looks, seeds):
    runs = [looked(rows_of(GAINS), own) for own in looks]
    found = [tuple(len(c.records) // 2 for c in then) for then in archive.at_looks(runs)]
    assert found == seeds
