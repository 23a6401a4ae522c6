"""A run that was stopped, killed or measured ends bitwise as if it had not been.

pytest -m slow -n 0 tests/trainer/test_resume.py      # every row, every step

Every row of the three tables is in at least one case, unlike paired with unlike. A run of 60 steps
is saved after some or all of them; from each, `compile_and_train` goes on to the end, and its
records and last state are compared with those of a run that saved nothing.
"""

import contextlib
import shutil

import jax
import numpy as np
import pytest

import local_opt
from experiments.compare.arms import row_of
from experiments.compare.rows import TABLES
from experiments.distributed import processes
from experiments.trainer import checkpoint, pipeline, timeline, train
from ordering.echo import EchoPlan, adaptive
from tests.cases import mostly_slow
from tests.little_run import (
    STEPS,
    STREAMED,
    assert_same,
    built,
    compiled,
    plans_of,
    timeless,
    trained,
)
from tests.words import each

EVALUATED = range(5, STEPS, 5)


def cases():
    """(order, sync, echo): all rows, as often as the longest table asks for."""
    tables = [each(kind) for kind in TABLES]
    count = max(map(len, tables))
    # Neighbours of a table are alike: the others go on by another stride.
    return [
        tuple(rows[i * stride % len(rows)] for rows, stride in zip(tables, (1, 5, 3), strict=True))
        for i in range(count)
    ]


def test_every_row_of_every_table_is_in_a_case():
    for number, rows in enumerate(map(each, TABLES)):
        assert {case[number] for case in cases()} == set(rows)


def coins(patch):
    """Input that is ready by coins of a seed, as in a machine whose loader is late now and then."""
    drawn = iter(np.random.default_rng(2).random(100_000))
    patch.setattr(timeline, "ready_everywhere", lambda ready: next(drawn) < 0.4)


def online(decided=()):
    return adaptive(total_steps=STEPS, max_factor=12, decided=decided)


MANY = [(case, {}, 1) for case in cases()] + [
    (("cd_grab", "every_load", "measured"), STREAMED, 1),
    (("cd_grab", "qsr", "diffusion+cosine"), {"mesh": True}, 1),
]
FEW = [
    (("cd_grab+sketch16+scaled", "qsr", "none"), {}, 19),
    (
        ("cd_grab+sketch16+dealt", "qsr", "diffusion+cosine"),
        {**STREAMED, "average": ("epoch", "ema")},
        23,
    ),
    (("cd_grab", "qsr", "measured"), STREAMED, 17),
]


@pytest.mark.parametrize("case,options,every", mostly_slow([*FEW, *MANY], quick=FEW[1:]), ids=str)
def test_a_run_goes_on_from_its_steps(case, options, every, tmp_path, monkeypatch):
    order, sync, echo = case
    if row_of("echo", echo).online:
        options = STREAMED
        coins(monkeypatch)
    program, plans = built(order, sync, **options), plans_of(sync, echo)
    whole, records = trained(program, plans, evaluate_at=EVALUATED)
    assert whole.at.step == STEPS and whole.ended and len(records) == STEPS // 5
    if row_of("echo", echo).online:
        # In one that is stopped the input is as it was; nothing else is told.
        plans = plans._replace(echo=online(whole.at.decided))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "KEPT", STEPS)
        saving = {"folder": tmp_path / "all", "save_every": every}
        trained(program, plans, evaluate_at=EVALUATED, **saving)
    steps = range(every, STEPS, every)
    assert checkpoint.steps_of(tmp_path / "all") == [*reversed(steps)]
    for step in steps:
        alone = tmp_path / f"from {step}"
        shutil.copytree(tmp_path / "all" / str(step), alone / str(step))
        outcome, rest = trained(program, plans, evaluate_at=EVALUATED, folder=alone, save_every=0)
        assert_same(outcome.state, whole.state)
        assert outcome.at.decided == whole.at.decided
        assert timeless(rest) == [r for r in timeless(records) if r["step"] > step]
        shutil.rmtree(alone)


class Killed(BaseException):
    pass


def stopping(step, signal):
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


def test_a_run_killed_or_stopped_at_any_step_ends_bitwise_the_same(tmp_path, monkeypatch):
    plans = plans_of()
    whole, records = trained(built(), plans, evaluate_at=EVALUATED)
    before = compiled(built())
    chosen = np.random.default_rng(9).choice(np.arange(1, STEPS), 2, replace=False).tolist()
    assert any(not plans.sync.syncs_after(s - 1) for s in chosen), "inside a round"
    assert any(plans.echo.loads_before(s) % 4 for s in chosen), "inside an epoch"
    assert any(not plans.echo.fresh[s] for s in chosen), "before an echoed step"
    for step, signal in zip(chosen, (0, 15), strict=True):
        folder, results = tmp_path / str(step), []
        options = {"evaluate_at": EVALUATED, "folder": folder, "save_every": 7, "save_at_end": True}
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(train.Pace, "limit", property(lambda pace: pace.step + 1))
            patch.setattr(processes, "interrupts", stopping(step, signal))
            outcome, _ = trained(built(), plans, on_record=results.append, **options)
            assert (outcome.stopped, outcome.at.step) == (signal, step)
        at = max(checkpoint.steps_of(folder), default=0)
        assert at == (step if signal else (step - 1) // 7 * 7)
        outcome, new = trained(built(), plans, **options)
        assert (outcome.at.step, outcome.stopped) == (STEPS, 0)
        assert_same(outcome.state, whole.state)
        kept = [r for r in results if r["step"] <= at]  # as the studies do
        assert timeless(kept + new) == timeless(records)
    # A restored state is what the steps were compiled for.
    assert compiled(built()) == before
    # What has ended does nothing when it is called again.
    again, nothing = trained(built(), plans, folder=folder, save_at_end=True)
    assert again.at.step == STEPS and not nothing
    assert_same(again.state, whole.state)


def test_what_was_measured_is_recorded_and_replayed(monkeypatch):
    coins(monkeypatch)
    prepared, plans = built(**STREAMED), plans_of()._replace(echo=online())
    whole, records = trained(prepared, plans, evaluate_at=EVALUATED)
    plan = EchoPlan(np.array(whole.at.decided), "measured")
    assert len(whole.at.decided) == STEPS and 10 < plan.loads < 40 and plan.loads % 4
    assert records[-1].pop("load_steps") == plan.load_steps.tolist()
    assert not any("load_steps" in r for r in records)
    replayed, recorded = trained(prepared, plans._replace(echo=plan), evaluate_at=EVALUATED)
    assert_same(replayed.state, whole.state)
    assert timeless(recorded) == timeless(records)


def test_where_loads_are_not_known_workers_meet_before_each(monkeypatch):
    """Its rounds are those of one sync per load, each counted when the next load begins or at T."""
    coins(monkeypatch)
    prepared = built(**STREAMED)
    plans = plans_of("every_load", "measured")
    assert plans.sync is None
    outcome, records = trained(prepared, plans, evaluate_at=range(1, STEPS))
    assert [r["step"] for r in records] == list(range(1, STEPS + 1)), "one record each"
    assert all(r["rounds"] == r["loads"] - (r["step"] < STEPS) for r in records)
    fresh = np.array(outcome.at.decided)
    sync = local_opt.SyncPlan(np.flatnonzero(fresh), len(fresh))
    replay = plans._replace(echo=EchoPlan(fresh), sync=sync)
    other, same = trained(prepared, replay, evaluate_at=range(1, STEPS))
    for r in same:
        r["rounds"] -= int(r["step"] < STEPS and fresh[r["step"]])
    for name in ("loads", "rounds", "train/batch_loss"):
        assert [r[name] for r in records] == [r[name] for r in same], name
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        outcome.state.params,
        other.state.params,
    )
    assert (outcome.at.loads, outcome.at.rounds) == (int(fresh.sum()), replay.sync.rounds)


def test_a_real_loader_decides_when_its_batches_are_ready():
    plans = plans_of(echo="measured")
    outcome, records = trained(built(**STREAMED), plans, slow=pipeline.Slow(0.002))
    loads = int(np.sum(outcome.at.decided))
    assert records[-1]["loads"] == loads and len(outcome.at.decided) == STEPS
    assert records[-1]["seconds"] >= 0.002 * loads
