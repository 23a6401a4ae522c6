"""`train --survive`: a run goes on without processes that have died.

pytest -m slow -n 0 tests/trainer/test_survive.py     # with compression, resumes: minutes
"""

import os
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import local_opt
from experiments.cluster import members, processes
from experiments.compare import arms, one_run
from experiments.trainer import checkpoint, program, step
from experiments.trainer.step import TrainState
from local_opt import elastic
from syncopate.workers import AXIS
from tests.commands import ROOT, environment, parsed, records, train_run
from tests.little_run import SETTING as LITTLE
from tests.little_run import WORKERS, built, plans_of, task, trained

# A module of `folder`: the last process of some dies before a step, when the others have gone on.
DYING = """
import os, runpy, signal, sys, time
from experiments.trainer import loop

last, dies, real = sys.argv.pop(1), int(sys.argv.pop(1)), loop.carry_out

def carry_out(program, state, segment, *rest):
    if f"--process_id={last}" in sys.argv and segment.start >= dies:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(program, state, segment, *rest)

loop.carry_out = carry_out
runpy.run_module("experiments.train", run_name="__main__", alter_sys=True)
"""
SETTING = [
    "--num_train=144", "--num_test=100", "--units_per_step=4", "--unit_size=1", "--order=rr",
    "--sync=constant", "--h_base=10", "--learning_rate=0.2", "--checkpoint_every=60",
]  # fmt: skip


def launched(folder, count, dies, *more, survive="--survive=2"):
    """(launch's error, which process 0 prints too) of a run of `count` processes."""
    folder.mkdir(exist_ok=True)
    (folder / "dying.py").write_text(DYING)
    environ = environment() | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "experiments.launch", f"--processes={count}", survive, "--"]
    command += ["dying", str(count - 1), str(dies), "--run=mesh", f"--workers={count}", *SETTING]
    command += [f"--output_dir={folder / 'run'}", *more]
    command = [word for word in command if word]
    done = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_two_processes_train_and_one_of_them_dies(tmp_path):
    text = launched(tmp_path, 2, 30, "--total_steps=60", "--evaluate_every=20")
    assert "Goes on from step 36 without worker 1, whose units are not visited" in text
    assert text.count("[launch] process 1 ended with exit code 137") == 1
    recorded = records(tmp_path / "run")
    syncs = [(r["step"], r["rounds"], r["members"]) for r in recorded]
    assert syncs == [(20, 2, [0, 1]), (40, 4, [0]), (60, 6, [0])] and recorded[-1]["ended"]
    assert recorded[-1]["train/loss"] < recorded[0]["train/loss"]
    plan = local_opt.constant(10, total_steps=60)  # as without a death
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_bytes() == (tmp_path / "run/sync_plan.json").read_bytes()
    path = str(tmp_path / "run" / "checkpoints" / "60")
    assert checkpoint.damage(path) is None
    with ocp.StandardCheckpointer() as reader:
        params = reader.restore(os.path.join(path, "state"))["params"]
    for leaf in jax.tree.leaves(params):
        np.testing.assert_array_equal(leaf[0], leaf[1])


@pytest.fixture
def begun(monkeypatch):
    """What `members` knows is forgotten."""
    for name in ("_gather", "_members", "step"):
        monkeypatch.setattr(members, name, getattr(members, name))


def test_a_run_without_a_death_has_the_same_bits(begun, monkeypatch):
    """Of one process with a device for each worker."""
    row, rule = arms.row_of("order", "rr"), arms.row_of("sync", "qsr")
    plain = built("rr", mesh=True)
    devices = jax.devices()[:WORKERS]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(jax, "local_device_count", lambda: WORKERS)
    outcome, recorded = trained(plain, plans_of())
    mesh = plain.sharding.mesh
    surviving = program.build(task(), LITTLE, row, rule.rounds, mesh=mesh, survives=True)
    other, again = trained(surviving, plans_of())
    assert [r.pop("members") for r in again] == len(recorded) * [[*range(WORKERS)]]
    strip = lambda records: [{**r, "seconds": 0} for r in records]  # noqa: E731
    assert strip(recorded) == strip(again) and members.step == plans_of().total_steps
    for x, y in zip(jax.tree.leaves(outcome.state.params), jax.tree.leaves(other.state.params),
                    strict=True):  # fmt: skip
        np.testing.assert_array_equal(x, y)


def test_a_second_run_in_a_process_has_not_come_back(begun, monkeypatch):
    """Where its first run has written to the coordinator's store."""
    calls, store = [], {}
    client = mock.Mock()
    client.key_value_set = lambda key, text, allow_overwrite: store.update({key: text})
    client.key_value_dir_get = lambda folder: [(k, v) for k, v in store.items() if folder in k]
    client.get_live_nodes = lambda nodes: calls.append(nodes) or {0: 7}
    for module in (elastic, members.coordination.unstable):
        monkeypatch.setattr(module, "coordination_client", lambda: client)
    for at in (10, 20):
        members.begin(lambda state: state, None)
        assert not members._gather.rejoined
        members.step = at
        members.barrier()
        assert members.exchanged([at, 1]) == [[at, 1]] and members.workers() == [*range(8)]
        (rows,) = members.gathered([jnp.arange(8.0)])
        np.testing.assert_array_equal(rows, np.arange(8))
    assert len(calls) == 2 * 3 + 1  # the first barrier of all asks twice


def test_the_rows_of_the_lost_are_those_of_the_first_with_keys_of_their_own(begun, monkeypatch):
    monkeypatch.setattr(members, "workers", lambda: [1, 3])
    keys = jax.random.split(jax.random.key(5), 2)
    rows = TrainState(jnp.array([4.0, 6.0]), (), jnp.array([[1, 0], [0, 1]]), keys, (), {}, ())
    actual = checkpoint._with_lost(rows, 4)
    np.testing.assert_array_equal(actual.params, [4, 4, 4, 6])
    np.testing.assert_array_equal(actual.orders, [[1, 0], [1, 0], [1, 0], [0, 1]])
    wanted = [jax.random.fold_in(keys[0], 0), keys[0], jax.random.fold_in(keys[0], 2), keys[1]]
    np.testing.assert_array_equal(actual.key, [*map(jax.random.key_data, wanted)])


@pytest.mark.parametrize("flags,why", [
    ("--sync=parallel", "--sync=parallel averages in every step"),
    ("--order=cd_grab", "adds up the gradients of all in every step; with --sketch=1024"),
    ("--order=rr --deal=dealt", "--deal and --cut give units anew to all"),
    ("--order=id_pair --scale=scaled --optimizer=adamw", "--scale takes the mean of all"),
    ("--order=cd_grab --sketch=64 --team=2", "--team=2 needs all of a team"),
    ("--correction=control", "--correction adds up to nothing over all alone"),
    ("--echo=measured", "--echo=measured asks all in every step"),
    ("--bound_every=1", "--bound_every adds up gradients of all"),
    ("--workers=3", "needs a worker on each of the 8 devices: pass --workers=8"),
])  # fmt: skip
def test_what_needs_all_workers_is_refused(monkeypatch, flags, why):
    from experiments import train
    from experiments.compare import flags as study_flags

    words = ["--order=rr", "--workers=8", "--run=mesh", "--survive=5", *flags.split()]
    values = parsed(train, *words)
    monkeypatch.setattr(processes, "several", lambda: True)
    recipe = study_flags.setting_from_flags(values)[1]
    rows = arms.arm_from_flags(values, "run").rows
    with pytest.raises(ValueError, match=why):
        one_run._check_survives(values, recipe, rows)
    if flags == "--workers=3":
        monkeypatch.setattr(processes, "several", lambda: False)
        with pytest.raises(ValueError, match="--survive is 5 in one process"):
            one_run._check_survives(values, recipe, rows)


def test_bounds_of_a_task_that_nobody_asked_for_are_left_out():
    from experiments import train

    recipe = mock.Mock(_replace=lambda **fields: fields)
    for words, result in (
        (["--survive=5"], {"bound_every": 0}), ([], recipe), (["--bound_every=1"], recipe),
        (["--survive=5", "--bound_every=1"], recipe),
    ):  # fmt: skip
        values = parsed(train, "--task=digits", *words)
        assert one_run._without_bounds(values, recipe) == result


@pytest.mark.slow
@pytest.mark.parametrize("more,close", [
    ([], 1e-5), (["--compress=int8", "--outer=nesterov0.7_0.5", "--optimizer=adamw"], 2e-3),
])  # fmt: skip
def test_three_processes_end_as_workers_of_which_one_has_no_weight(
    tmp_path, monkeypatch, more, close
):
    """The digits, in one process, where the third counts nothing from the sync on that missed it.

    Then the run, cut off at its last checkpoint but one, goes on with three again, and with two.
    """
    length = ["--total_steps=120", "--evaluate_every=10", *more]
    launched(tmp_path, 3, 45, *length)
    recorded = records(tmp_path / "run")
    missed = next(r["step"] for r in recorded if r["members"] == [0, 1])
    assert missed == 50 and recorded[-1]["members"] == [0, 1]
    assert recorded[3]["members"] == [0, 1, 2]
    real = step.sync_of

    def without(worker):
        def sync(params, state, *, at, **options):
            lost = (jax.lax.axis_index(AXIS) == 2) & (at * 120 > missed - 2)
            weight = jnp.where(lost, 0.0, 1.0)
            return worker.rounds.sync(params, state, weight=weight, at=at, **options)

        return real(worker._replace(rounds=worker.rounds._replace(sync=sync)))

    monkeypatch.setattr(step, "sync_of", without)
    train_run([*SETTING, *length, "--workers=3"], tmp_path / "weighed")
    for one, other in zip(recorded, records(tmp_path / "weighed"), strict=True):
        assert abs(one["train/loss"] - other["train/loss"]) < close
    plans = [(tmp_path / run / "sync_plan.json").read_bytes() for run in ("run", "weighed")]
    assert plans[0] == plans[1]
    monkeypatch.undo()
    for count, split in {3: [], 2: ["--units_per_step=6", "--elastic=mean"]}.items():
        subprocess.run(["rm", "-r", str(tmp_path / "run" / "checkpoints" / "120")], check=True)
        text = launched(tmp_path, count, 1000, *length, *split)
        assert "Continues from the checkpoint of step 60" in text
        last = records(tmp_path / "run")[-1]
        assert last["ended"] and last["members"] == [*range(count)] and last["step"] == 120
