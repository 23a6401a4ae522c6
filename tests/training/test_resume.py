"""A run that was stopped, killed or measured ends as if it had not been."""

import contextlib

import jax
import numpy as np
import pytest

import local_opt
from experiments.cluster import processes
from experiments.training import checkpoint, loop, run
from ordering.echo import EchoPlan, measured
from tests.little_run import (
    STEPS,
    STREAMED,
    assert_same,
    built,
    compiled,
    plans_of,
    sums,
    timeless,
    trained,
)


class Killed(BaseException):
    pass


def stopping(step, signal=0):
    """In place of signals: the host looks at every step, and one of them stops or kills the run."""

    @contextlib.contextmanager
    def caught():
        steps = iter(range(1, STEPS))

        def ask(wants_to_save):
            if next(steps, None) != step:
                return 0, wants_to_save
            if not signal:
                raise Killed
            return signal, wants_to_save

        yield ask

    return caught


def stopped_at(monkeypatch, folder, prepared, plans, step, signal):
    """The records of a run that was stopped after a step and went on, and how it ended."""
    saving = run.Saving(str(folder), every=7, at_end=True)
    options = {"evaluate_at": range(5, STEPS, 5), "saving": saving}
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(loop, "LEAST", 1)
        patch.setattr(loop, "MOST", 1)
        patch.setattr(processes, "interrupts", stopping(step, signal))
        with contextlib.ExitStack() as stack:
            if not signal:
                stack.enter_context(pytest.raises(Killed))
            outcome = run.train(
                prepared, plans, seed=0, evaluate=sums, on_record=found.append, **options
            )
            assert (outcome.stopped, outcome.step) == (signal, step)
    at = max(checkpoint.steps_of(saving.folder), default=0)
    assert at == (step if signal else (step - 1) // 7 * 7)
    kept = [r for r in found if r["step"] <= at]  # as the studies do
    outcome, new = trained(prepared, plans, **options)
    return outcome, timeless(kept + new)


def test_a_run_killed_or_stopped_at_any_step_ends_bitwise_the_same(tmp_path, monkeypatch):
    plans = plans_of()
    whole, records = trained(built(), plans, evaluate_at=range(5, STEPS, 5))
    chosen = np.random.default_rng(6).choice(np.arange(1, STEPS), 4, replace=False)
    assert any(not plans.sync.syncs_after(s - 1) for s in chosen), "inside a round"
    assert any(plans.echo.loads_before(s) % 4 for s in chosen), "inside an epoch"
    assert any(not plans.echo.fresh[s] for s in chosen), "before an echoed step"
    before = compiled(built())
    for number, step in enumerate(chosen.tolist()):
        outcome, found = stopped_at(
            monkeypatch, tmp_path / str(step), built(), plans, step, signal=number % 2 * 15
        )
        assert (outcome.step, outcome.stopped) == (STEPS, 0)
        assert_same(outcome.state, whole.state)
        assert found == timeless(records)
    # A restored state is what the steps were compiled for.
    assert compiled(built()) == before
    # What has ended does nothing when it is called again.
    again, nothing = trained(
        built(), plans, saving=run.Saving(str(tmp_path / str(chosen[0])), at_end=True)
    )
    assert again.step == STEPS and not nothing
    assert_same(again.state, whole.state)


@pytest.mark.parametrize(
    "order,sync",
    [
        ("rr", "parallel"),
        ("cd_grab+sketch16+dealt", "qsr"),
        pytest.param("rr+dealt", "qsr", marks=pytest.mark.slow),
        pytest.param("cd_grab", "qsr", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_reads_goes_on_in_the_middle_of_an_epoch(tmp_path, monkeypatch, order, sync):
    prepared, plans = built(order, sync, **STREAMED), plans_of(sync)
    whole, records = trained(prepared, plans, evaluate_at=range(5, STEPS, 5))
    for step, signal in ((23, 15), (38, 0)):
        outcome, found = stopped_at(
            monkeypatch, tmp_path / str(step), prepared, plans, step, signal
        )
        assert_same(outcome.state, whole.state)
        assert found == timeless(records)


@pytest.fixture
def jittery(monkeypatch):
    """Input that is ready by coins of a seed; the loads are then the same on every machine."""
    coins = iter(np.random.default_rng(2).random(10_000))
    monkeypatch.setattr(loop, "ready_everywhere", lambda ready: next(coins) < 0.4)


def online(decided=()):
    return measured(total_steps=STEPS, max_factor=12, decided=decided)


def test_what_was_measured_is_recorded_resumed_and_replayed(tmp_path, monkeypatch, jittery):
    prepared = built(**STREAMED)
    plans = plans_of()._replace(echo=online())
    options = {"evaluate_at": range(5, STEPS, 5)}
    whole, records = trained(prepared, plans, **options)
    decided = np.array(whole.decided)
    plan = EchoPlan(decided, "measured")
    assert len(decided) == STEPS and 10 < plan.loads < 40 and plan.loads % 4
    assert records[-1]["load_steps"] == np.flatnonzero(decided).tolist()
    assert not any("load_steps" in r for r in records[:-1])
    # In one that is stopped the input is as it was; nothing else is told.
    known = plans._replace(echo=online(decided))
    for step, signal in ((17, 15), (44, 0)):
        outcome, found = stopped_at(
            monkeypatch, tmp_path / str(step), prepared, known, step, signal
        )
        assert outcome.decided == whole.decided
        assert_same(outcome.state, whole.state)
        assert found == timeless(records)
    replayed, found = trained(prepared, plans._replace(echo=plan), **options)
    assert_same(replayed.state, whole.state)
    records[-1].pop("load_steps")
    assert timeless(found) == timeless(records)


def test_where_loads_are_not_known_workers_meet_before_each(jittery):
    """Its rounds are those of one sync per load, each counted when the next load begins."""
    prepared = built(**STREAMED)
    plans = plans_of("every_load", "measured")
    assert plans.sync is None
    outcome, records = trained(prepared, plans, evaluate_at=range(1, STEPS))
    assert [r["step"] for r in records] == list(range(1, STEPS + 1)), "one record each"
    assert all(r["rounds"] == r["loads"] - 1 for r in records)
    fresh = np.array(outcome.decided)
    replay = plans._replace(echo=EchoPlan(fresh), sync=local_opt.sync_every_load(fresh))
    other, same = trained(prepared, replay, evaluate_at=range(1, STEPS))
    for r in same:
        r["rounds"] -= int(r["step"] == STEPS or fresh[r["step"]])
    for name in ("loads", "rounds", "train/batch_loss"):
        assert [r[name] for r in records] == [r[name] for r in same], name
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        prepared.mean_params(outcome.state), prepared.mean_params(other.state),
    )  # fmt: skip


def test_a_real_loader_decides_when_its_batches_are_ready():
    plans = plans_of(echo="measured")
    outcome, records = trained(built(**STREAMED), plans, delay=0.002)
    loads = int(np.sum(outcome.decided))
    assert records[-1]["loads"] == loads and len(outcome.decided) == STEPS
    assert records[-1]["seconds"] >= 0.002 * loads
