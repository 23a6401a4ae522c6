"""Clocks of workers that fail equal those of one event at a time, and closed forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import clocks, quorum, quorum_losses
from experiments.results import records
from experiments.results.statistics import interval
from tests import reference_quorum
from tests.studies import parsed

QUARTERS = st.integers(1, 16).map(lambda n: n / 4)  # which float64 adds up exactly
NEVER = np.full((1, 4, 1), np.inf)


@st.composite
def cases(draw):
    rounds, many, workers = (
        draw(st.integers(1, 5)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 4)),
    )
    work = np.reshape([draw(QUARTERS) for _ in range(rounds * many * workers)],
                      (rounds, many, workers))  # fmt: skip
    steps = np.reshape([draw(QUARTERS) for _ in range(many * workers * 6)], (many, workers, 6))
    failures = np.cumsum(steps, axis=-1)
    failures[..., draw(st.integers(1, 6)) :] = np.inf
    rule = {
        "pause": draw(QUARTERS | st.just(0.0)),
        "least": draw(st.integers(1, workers)),
        "grace": draw(QUARTERS | st.just(0.0)),
        "overlap": draw(st.sampled_from([0, 0.25, 0.75])),
    }
    return work, failures, rule


@given(cases())
def test_clocks_equal_those_of_one_event_at_a_time(case):
    work, failures, rule = case
    found = clocks.run(work, failures, **rule)
    for s in range(work.shape[1]):
        seconds, done, stepping = reference_quorum.run(work[:, s], failures[s], **rule)
        np.testing.assert_array_equal(found.seconds[:, s], seconds)
        np.testing.assert_array_equal(found.done[:, s], done)
        np.testing.assert_array_equal(found.stepping[s], stepping)


def test_a_quorum_of_all_is_the_longest_round_of_each():
    draw = np.random.default_rng(0)
    work = draw.uniform(1, 2, (30, 3, 4))
    failures = clocks.drawn(draw, 5.0, 100.0, (3, 4))
    found = clocks.run(work, failures, pause=2.0, least=4)
    ends = np.cumsum(work, axis=0)
    many = (failures < ends[..., None]).sum(-1)
    many = np.diff(many, axis=0, prepend=0)
    np.testing.assert_allclose(found.seconds, np.cumsum((work + 2.0 * many).max(-1), axis=0))
    assert (found.done == 1).all()


@pytest.mark.parametrize(
    "rule, length, goodput, done",
    [
        ({"least": 4}, 20.0, (1 + 3 * 0.5) / 4, 1.0),
        ({"least": 3}, 10.0, 1.0, 0.5),  # the slow one never ends a round
        ({"least": 3, "grace": 5.0}, 15.0, (1 + 3 * 2 / 3) / 4, 0.75),
        ({"least": 1, "grace": 99.0}, 20.0, (1 + 3 * 0.5) / 4, 1.0),
    ],
)
def test_one_slow_worker_without_failures(rule, length, goodput, done):
    work = np.tile([10.0, 10.0, 10.0, 20.0], (8, 1, 1))
    found = clocks.run(work, NEVER, pause=1.0, **rule)
    np.testing.assert_allclose(found.seconds[:, 0], length * np.arange(1, 9))
    np.testing.assert_allclose(found.goodput, goodput)
    np.testing.assert_allclose(found.done[:, 0, 3], done)
    if rule["least"] == 4:  # those that step on while they wait lose less
        ahead = clocks.run(work, NEVER, pause=1.0, overlap=0.25, **rule)
        np.testing.assert_allclose(ahead.goodput, (1 + 3 * (8 * 10 + 2.5) / 160) / 4)


def test_goodputs_under_poisson_failures_equal_the_formula():
    """1 / (1 + pause / every) for a learner that never waits."""
    draw = np.random.default_rng(0)
    work = np.full((200, 10, 4), 24.0)
    failures = clocks.drawn(draw, 100.0, 10_000.0, (10, 4))
    assert failures[..., -1].min() > 10_000
    found = clocks.run(work, failures, pause=25.0, least=1, grace=1.0, overlap=1 / 12)
    mean, half = interval(found.goodput)
    assert abs(mean - 0.8) < 0.005 + half and half < 0.01


def test_the_experiment_is_in_the_published_order(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quorum_losses, "BUDGET", 100.0)
    few = ("--rounds=60", "--repetitions=4", "--chips=600000,1200000", "--learners=2,8")
    few += ("--seeds=2", "--learning_rates=0.1", f"--output_dir={tmp_path}")
    quorum.main(parsed(quorum, *few))
    printed = capsys.readouterr().out
    assert "in the published order: 12 of 12 pairs" in printed
    for name in ("goodput", "in_time", "unequal", "losses"):
        assert (tmp_path / f"table_{name}.md").read_text() in printed
    page = (tmp_path / "report.html").read_text()
    assert "quorum.png" in page and "quorum_losses.png" in page
    found = records.read(tmp_path / records.METRICS)
    known = {(r["rule"], r["learners"], r["chips"]): r for r in found if r.get("chips")}
    assert len(known) == 6 * 2 and known["quorum", 8, 1_200_000]["published"] == 88
    own = [r for r in found if r.get("seed") is not None]
    assert len(own) == 5 * 2 and all(np.isfinite(r["loss"]).all() for r in own)
    with pytest.raises(ValueError, match="a learner needs a chip"):
        quorum.main(parsed(quorum, *few, "--chips=4"))
