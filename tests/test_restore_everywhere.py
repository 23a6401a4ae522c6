"""From the checkpoint of any step the rest is bitwise the run that was never stopped.

pytest -m slow -n 0 tests/test_restore_everywhere.py      # every row of every table, every step

Every row of the three tables is in at least one case, unlike paired with unlike. A run of 60 steps
is saved after every one of them; from each, `training.run.train` goes on to the end, and its
records and last state are compared with those of a run that saved nothing. States are kept in
memory, and of every case those of a few steps go through files too; of a few cases all do.
"""

import contextlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.training import checkpoint, loop, run
from ordering.echo import measured
from tests.little_run import STREAMED, assert_same, built, plans_of, timeless, trained
from tests.test_one_loop import STEPS

EVALUATED = range(5, STEPS, 5)
IN_FILES = (1, 5, 29, 44, STEPS - 1)  # of every case


def cases():
    """(order, sync, echo): all rows, as often as the longest table asks for."""
    tables = [list(rows) for rows in (ORDERS, SYNC_RULES, ECHO_POLICIES)]
    count = max(map(len, tables))
    # Neighbours of a table are alike: the others go on by another stride.
    found = [
        tuple(rows[i * stride % len(rows)] for rows, stride in zip(tables, (1, 7, 3), strict=True))
        for i in range(count)
    ]
    return [*found, ("cd_grab", "every_load", "measured")]


FEW = [("cd_grab", "qsr", "diffusion_cosine"), ("rr", "accumulate", "fixed")]


def prepared(order, sync, echo, monkeypatch):
    """(program, plans, and those in which what is decided online is known)."""
    if not ECHO_POLICIES[echo].online:
        plans = plans_of(sync, echo)
        return built(order, sync), plans, lambda outcome: plans
    # Input that is ready by coins of a seed, as in a machine whose loader is late now and then.
    coins = iter(np.random.default_rng(2).random(100_000))
    monkeypatch.setattr(loop, "ready_everywhere", lambda ready: next(coins) < 0.4)
    plans = plans_of(sync, echo)

    def known(outcome):
        policy = measured(total_steps=STEPS, max_factor=12, decided=outcome.decided)
        return plans._replace(echo=policy)

    return built(order, sync, **STREAMED), plans, known


class InMemory:
    """In place of checkpoints: all states of a run, and the one that is gone on from."""

    def __init__(self, monkeypatch):
        self.saved, self.latest = {}, 0
        monkeypatch.setattr(checkpoint, "save", self.save)
        monkeypatch.setattr(checkpoint, "restore", self.restore)
        monkeypatch.setattr(checkpoint, "settled", lambda folder: self.latest)
        monkeypatch.setattr(checkpoint, "opened", lambda folder: contextlib.nullcontext())

    def save(self, manager, plans, at, state, seen, **about):
        self.saved[at.step] = at, jax.tree.map(jnp.copy, state), seen

    def restore(self, manager, plans, start, *, about=None):
        at, state, seen = self.saved[self.latest]
        known = at.decided if plans.echo.online else ()
        assert at == loop.resumed(plans, self.latest, known)
        return at, jax.tree.map(jnp.copy, state), seen


def whole_run(order, sync, echo, monkeypatch):
    """The run that saves nothing: (program, its plans, outcome, records)."""
    program, plans, known = prepared(order, sync, echo, monkeypatch)
    outcome, records = trained(program, plans, evaluate_at=EVALUATED)
    assert outcome.step == STEPS and outcome.ended and len(records) == STEPS // 5
    return program, known(outcome), outcome, timeless(records)


def check_rest(program, plans, whole, records, folder, step):
    outcome, rest = trained(
        program, plans, evaluate_at=EVALUATED, saving=run.Saving(str(folder), every=0)
    )
    assert_same(outcome.state, whole.state)
    assert outcome.decided == whole.decided
    assert timeless(rest) == [r for r in records if r["step"] > step]


def check_all_from_memory(case, steps, monkeypatch):
    program, plans, whole, records = whole_run(*case, monkeypatch)
    with monkeypatch.context() as patch:
        memory = InMemory(patch)
        saving = run.Saving("nowhere", every=1)
        trained(program, plans, evaluate_at=EVALUATED, saving=saving)
        assert sorted(memory.saved) == [*range(1, STEPS)]
        for memory.latest in steps:
            check_rest(program, plans, whole, records, "nowhere", memory.latest)


def check_from_files(case, steps, folder, monkeypatch, **options):
    program, plans, whole, records = whole_run(*case, monkeypatch)
    program = built(*case[:2], **options) if options else program
    if options:  # sums over devices are of another order
        whole, records = trained(program, plans, evaluate_at=EVALUATED)
        records = timeless(records)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "KEPT", STEPS)
        trained(program, plans, evaluate_at=EVALUATED, saving=run.Saving(str(folder), every=1))
    assert checkpoint.steps_of(folder) == [*range(STEPS - 1, 0, -1)]
    for step in steps:
        alone = folder.with_name(f"from {step}")
        shutil.copytree(folder / str(step), alone / str(step))
        check_rest(program, plans, whole, records, alone, step)
        shutil.rmtree(alone)


def test_every_row_of_every_table_is_in_a_case():
    for number, rows in enumerate((ORDERS, SYNC_RULES, ECHO_POLICIES)):
        assert {case[number] for case in cases()} == set(rows)


@pytest.mark.parametrize("case", FEW, ids="+".join)
def test_a_run_goes_on_from_its_steps(case, monkeypatch):
    check_all_from_memory(case, range(1, STEPS, 4), monkeypatch)


def test_a_run_goes_on_from_the_checkpoints_of_its_steps(tmp_path, monkeypatch):
    check_from_files(FEW[0], IN_FILES[::2], tmp_path / "all", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids="+".join)
def test_every_run_goes_on_from_every_step(case, tmp_path, monkeypatch):
    check_all_from_memory(case, range(1, STEPS), monkeypatch)
    check_from_files(case, IN_FILES, tmp_path / "all", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [False, True], ids=["vmap", "mesh"])
def test_every_step_has_a_checkpoint_that_goes_on(mesh, tmp_path, monkeypatch):
    options = {"mesh": True} if mesh else {}
    check_from_files(FEW[0], range(1, STEPS), tmp_path / "all", monkeypatch, **options)
