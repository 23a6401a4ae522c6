"""From the checkpoint of any step the rest is bitwise the run that was never stopped.

pytest -m slow -n 0 tests/training/test_restore_everywhere.py      # every row, every step

Every row of the three tables is in at least one case, unlike paired with unlike. A run of 60 steps
is saved after every one of them; from each, `training.run.train` goes on to the end, and its
records and last state are compared with those of a run that saved nothing.
"""

import shutil

import numpy as np
import pytest

from experiments.study.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.training import checkpoint, loop, run
from ordering.echo import measured
from tests.little_run import STEPS, STREAMED, assert_same, built, plans_of, timeless, trained
from tests.words import each

EVALUATED = range(5, STEPS, 5)


def cases():
    """(order, sync, echo): all rows, as often as the longest table asks for."""
    tables = [each(rows) for rows in (ORDERS, SYNC_RULES, ECHO_POLICIES)]
    count = max(map(len, tables))
    # Neighbours of a table are alike: the others go on by another stride.
    found = [
        tuple(rows[i * stride % len(rows)] for rows, stride in zip(tables, (1, 5, 3), strict=True))
        for i in range(count)
    ]
    return [*found, ("cd_grab", "every_load", "measured")]


FEW = [("rr", "accumulate", "fixed")]  # test_resume has cd_grab, qsr and diffusion+cosine


def prepared(order, sync, echo, monkeypatch, **options):
    """(program, plans, and those in which what is decided online is known)."""
    if not ECHO_POLICIES[echo].online:
        plans = plans_of(sync, echo)
        return built(order, sync, **options), plans, lambda outcome: plans
    # Input that is ready by coins of a seed, as in a machine whose loader is late now and then.
    coins = iter(np.random.default_rng(2).random(100_000))
    monkeypatch.setattr(loop, "ready_everywhere", lambda ready: next(coins) < 0.4)
    plans = plans_of(sync, echo)

    def known(outcome):
        policy = measured(total_steps=STEPS, max_factor=12, decided=outcome.decided)
        return plans._replace(echo=policy)

    return built(order, sync, **STREAMED), plans, known


def check(case, folder, monkeypatch, every=1, **options):
    """Saves a run after every step, or every so many, and goes on from each."""
    program, plans, known = prepared(*case, monkeypatch, **options)
    whole, records = trained(program, plans, evaluate_at=EVALUATED)
    assert whole.step == STEPS and whole.ended and len(records) == STEPS // 5
    plans, records = known(whole), timeless(records)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "KEPT", STEPS)
        trained(program, plans, evaluate_at=EVALUATED, saving=run.Saving(str(folder), every=every))
    steps = range(every, STEPS, every)
    assert checkpoint.steps_of(folder) == [*reversed(steps)]
    for step in steps:
        alone = folder.with_name(f"from {step}")
        shutil.copytree(folder / str(step), alone / str(step))
        saving = run.Saving(str(alone), every=0)
        outcome, rest = trained(program, plans, evaluate_at=EVALUATED, saving=saving)
        assert_same(outcome.state, whole.state)
        assert outcome.decided == whole.decided
        assert timeless(rest) == [r for r in records if r["step"] > step]
        shutil.rmtree(alone)


def test_every_row_of_every_table_is_in_a_case():
    for number, rows in enumerate(map(each, (ORDERS, SYNC_RULES, ECHO_POLICIES))):
        assert {case[number] for case in cases()} == set(rows)


@pytest.mark.parametrize("case", FEW, ids="+".join)
def test_a_run_goes_on_from_its_steps(case, tmp_path, monkeypatch):
    check(case, tmp_path / "all", monkeypatch, every=13)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids="+".join)
def test_every_run_goes_on_from_every_step(case, tmp_path, monkeypatch):
    check(case, tmp_path / "all", monkeypatch)


@pytest.mark.slow
def test_a_run_on_a_mesh_goes_on_from_every_step(tmp_path, monkeypatch):
    check(("cd_grab", "qsr", "diffusion+cosine"), tmp_path / "all", monkeypatch, mesh=True)
