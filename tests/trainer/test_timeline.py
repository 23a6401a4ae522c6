"""The run as arrays over its steps, its cuts, and the orders and loads that the host makes."""

import threading
import time
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from experiments.trainer import pipeline, timeline
from experiments.trainer.config import Plans, Sizes
from local_opt import SyncPlan
from ordering.echo import EchoPlan


class Case(NamedTuple):
    plans: Plans
    sizes: Sizes
    streams: bool
    sync_in_step: bool
    stops: frozenset


@st.composite
def cases(draw):
    total = draw(st.integers(1, 40))
    fresh = np.array([True, *draw(st.lists(st.booleans(), min_size=total - 1, max_size=total - 1))])
    starts = sorted({0} | draw(st.sets(st.integers(0, total - 1))))
    units = draw(st.integers(1, 11))
    sizes = Sizes(draw(st.integers(1, 3)), units, draw(st.integers(1, units)), 1)
    plans = Plans(SyncPlan(starts, total), EchoPlan(fresh), np.linspace(1, 0.1, total))
    stops = frozenset(draw(st.sets(st.integers(0, total + 3))))
    return Case(plans, sizes, draw(st.booleans()), draw(st.booleans()), stops)


def segments(case, most=10**6):
    """The segments of a run, none with more steps than `most`."""
    plans, sizes, *options = case
    options = dict(zip(Case._fields[2:], options, strict=True))
    line, results = timeline.timeline(plans, sizes, **options), []
    limit = lambda: (results[-1].stop if results else 0) + most  # noqa: E731
    for segment in timeline.planned(line, 0, limit):
        results.append(segment)
    return line, results


def by_hand(case):
    """(load, sync, epoch_end, rate of the round, units) of every step, one step after another."""
    plans, sizes = case.plans, case.sizes
    total, load, first, rows = plans.total_steps, -1, 0, []
    for t in range(total):
        load += int(plans.echo.fresh[t])
        new = t + 1 == total or bool(plans.echo.fresh[t + 1])
        sync = t + 1 == total or t + 1 in plans.sync.starts
        place = load % sizes.loads_per_epoch
        left = sizes.num_units - place * sizes.units_per_step
        ended = new and place + 1 == sizes.loads_per_epoch
        rows.append((load, sync, ended, plans.rates[first], min(sizes.units_per_step, left)))
        first = t + 1 if sync else first
    return [np.array(column) for column in zip(*rows, strict=True)]


@given(cases())
def test_the_timeline_is_what_happens_step_by_step(case):
    line = timeline.timeline(case.plans, case.sizes)
    load, sync, epoch_end, rate, units = by_hand(case)
    np.testing.assert_array_equal(line.load, load)
    np.testing.assert_array_equal(line.sync, sync)
    np.testing.assert_array_equal(line.epoch_end, epoch_end)
    np.testing.assert_array_equal(line.round_rate, rate.astype(np.float32))
    np.testing.assert_array_equal(line.units, units)


@given(cases(), st.integers(1, 9))
def test_segments_cover_the_run_and_the_host_stands_between_them(case, most):
    line, result = segments(case, most=most)
    covered = [t for s in result for t in range(s.start, s.stop)]
    assert covered == list(range(case.plans.total_steps))
    options = {"streams": case.streams, "sync_in_step": case.sync_in_step}
    kinds = timeline.kinds(case.plans, case.sizes, **options)
    assert kinds == {s.kind for s in segments(case._replace(stops=()))[1]}
    at = timeline.Progress()
    for s in result:
        inside = slice(s.start, s.stop - 1)  # not after the last step
        whole = slice(s.start, s.stop)
        assert not line.epoch_end[inside].any()
        assert case.sync_in_step or not line.sync[inside].any()
        assert not case.stops & set(range(s.start + 1, s.stop))
        assert not (case.streams and line.fresh[s.start + 1 : s.stop].any())
        assert set(line.fresh[whole]) == {s.kind.fresh} and set(line.units[whole]) == {s.kind.size}
        # A step of a segment takes the load that is as far from its first one.
        moved = np.arange(s.stop - s.start) * s.kind.fresh
        np.testing.assert_array_equal(line.load[whole], s.load + moved)
        assert s.kind.sync == (line.sync[s.stop - 1] and not case.sync_in_step)
        assert s.kind.epoch_end == line.epoch_end[s.stop - 1]
        assert s.rate == line.round_rate[s.stop - 1]
        at = timeline.after(at, s, online=False)
        rounds = np.count_nonzero(line.sync[: s.stop])
        assert at == (s.stop, line.load[s.stop - 1] + 1, rounds, *timeline.Progress()[3:])


# Time.


def test_the_clock_stands_still_and_so_does_who_sleeps_by_it():
    begun, clock, woken, moment = time.perf_counter(), pipeline.Clock(), threading.Event(), 1e-3

    def sleep():
        clock.sleep_until(moment)
        woken.set()

    sleeper = threading.Thread(target=sleep, daemon=True)
    with clock.stopped("an evaluation"):
        sleeper.start()
        assert not woken.wait(0.05)
    assert clock.now() < time.perf_counter() - begun - 0.05
    assert woken.wait(60)
    assert clock.now() >= moment


def test_a_load_takes_its_delay_by_the_clock_whoever_reads_it():
    clock = pipeline.Clock()
    begun, throttled = clock.now(), pipeline.Throttle(0.01, clock)
    ending, following = throttled([1, 2, 3]), throttled([4, 5])
    assert list(zip(ending, following)) == [(1, 4), (2, 5)]  # noqa: B905
    assert clock.now() - begun >= 0.05
