"""`train --elastic`: a run goes on with other workers, in mid-epoch and mid-round.

pytest -m slow -n 0 tests/trainer/test_resize.py     # all orders, rounds, processes: minutes
"""

import os
import re
import shutil
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments.trainer import checkpoint, config, resize
from ordering.echo import EchoPlan
from tests import reference
from tests.commands import RUN, finish, records, stop_in_the_middle, train_run
from tests.little_run import assert_same

STEPS, LOADS, UNITS, TOGETHER = 20, 5, 40, 8  # of a run; of an epoch; of a step of all workers
SMALL = [
    "--num_train=46",
    "--num_test=20",
    f"--total_steps={STEPS}",
    "--evaluations=4",
    "--learning_rate=0.2",
    "--unit_size=1",
    "--checkpoint_every=1",
    "--average=epoch,ema",
]
MEAN = "--elastic=mean"
CHANGES = [(8, 7), (4, 14), (8, STEPS)]  # workers, until which step


def go(folder, workers, *arguments):
    """Trains on to the end, saved after every step."""
    split = [f"--workers={workers}", f"--units_per_step={TOGETHER // workers}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "KEPT", STEPS)
        period = [] if {"--sync=parallel", "--sync=accumulate"} & {*arguments} else ["--h_base=5"]
        train_run([*SMALL, *split, *period, *arguments], folder)


def stopped(folder, new, step):
    """A copy of a run as it was after a step."""
    shutil.copytree(folder, new)
    for name in os.listdir(new / "checkpoints"):
        if int(name) > step:
            shutil.rmtree(new / "checkpoints" / name)
    return new


def changed(folder, *arguments, changes=CHANGES):
    """The folders of a run with these workers one after another, each to the end of the run."""
    results = []
    for number, (workers, _) in enumerate(changes):
        new = folder / str(number)
        if number:
            stopped(results[-1], new, changes[number - 1][1])
        go(new, workers, *arguments, *([MEAN] if number else []))
        results.append(new)
    return results


def state_of(folder, step):
    """The state of a checkpoint, in dicts."""
    with ocp.StandardCheckpointer() as reader:
        tree = reader.restore(os.path.abspath(folder / "checkpoints" / str(step) / "state"))

    def data(x):
        typed = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if typed else x)

    return jax.tree.map(data, tree)


def orders_of(folder, step):
    """int[W, M], the orders of all workers after a step, by the numbers of all units."""
    orders = state_of(folder, step)["orders"]
    if "pairs" in orders:
        return np.asarray(orders["pairs"]["current"])
    current = np.asarray(orders["current"])
    if current.max() >= current.shape[1]:  # dealt: numbers of all units already
        return current
    metadata = checkpoint.read_metadata(folder / "checkpoints" / str(step))
    units = np.array(metadata["units"] or range(UNITS)).reshape(current.shape)
    return np.take_along_axis(units, current, axis=1)


def visited(folders, load_steps=range(STEPS), changes=CHANGES):
    """{epoch: the units of its loads}, each by the workers of its step."""
    results = {}
    for load, step in enumerate(load_steps):
        epoch, place = divmod(load, LOADS)
        folder = folders[sum(step >= until for _, until in changes)]
        # The order stays to the end of the step in which its epoch ends.
        orders = orders_of(folder, step if place == LOADS - 1 else step + 1)
        each = TOGETHER // len(orders)
        units = orders[:, place * each : (place + 1) * each]
        assert units.size == TOGETHER
        results.setdefault(epoch, []).extend(units.reshape(-1).tolist())
    return results


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folders of a run with 8, then 4, then 8 workers."""
    return changed(tmp_path_factory.mktemp("whole"))


def test_averages_go_on_with_other_workers(whole):
    """Equal to those of the means over the workers, whatever their number."""

    def at(step):
        folder = whole[sum(step > until for _, until in CHANGES)]
        state = state_of(folder, step)
        return state["params"]["w"].mean(axis=0), state["averages"]

    weights = [at(step)[0] for step in range(1, STEPS + 1)]
    for t in (5, 8, 9, 13, 15, STEPS):
        means = {name: m["w"].mean(axis=0) for name, m in at(t)[1].items()}
        mean = reference.epoch_mean(weights, t - 1, LOADS)
        np.testing.assert_allclose(means["epoch"], mean, rtol=1e-4, atol=1e-6)
        mean = reference.debiased_ema(weights, t - 1, np.exp(-1 / (0.5 * LOADS)))
        np.testing.assert_allclose(means["ema_0.5"], mean, rtol=1e-4, atol=1e-6)


def test_each_unit_is_visited_once_in_every_epoch(whole):
    epochs = visited(whole)
    assert len(epochs) == STEPS / LOADS
    assert all(sorted(units) == list(range(UNITS)) for units in epochs.values())
    recorded = records(whole[-1])
    assert [r["step"] for r in recorded] == list(range(5, STEPS + 1, 5))
    sent = [r["allreduces"] for r in recorded]
    assert sent == sorted(sent) and recorded[-1]["ended"]


def begun(folder, *arguments):
    """Where `train` goes on, and is killed; and the traffic by which it counts."""
    result, real = [], resize.begun

    class Killed(BaseException):
        pass

    def caught(*args, traffic, **options):
        result.extend([*real(*args, traffic=traffic, **options), traffic])
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(resize, "begun", caught)
        go(folder, *arguments)
    return result


def files_of(folder):
    paths = (p for p in folder.rglob("*") if p.is_file() and p.name != "versions.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_workers_become_their_mean_and_what_they_sent_is_kept(whole, tmp_path, capsys):
    """And until that is saved, a run that is killed goes on by the same command, to its end."""
    folder = stopped(whole[0], tmp_path / "eight", 7)
    files = files_of(folder)
    (at, after, seen), units, traffic = begun(folder, 4, MEAN)
    assert units is None, "neighbours merge"
    assert at.step == 7 and seen.records == 1
    before = state_of(folder, 7)
    for name, rows in before["params"].items():
        mean = np.mean(rows.astype(np.float64), axis=0).astype(np.float32)
        np.testing.assert_array_equal(after.params[name], np.stack([mean] * 4))
        assert (rows != rows[:1]).any(), "in a round"
    assert {*after.opt_state.since.tolist()} == {*before["opt_state"]["since"].tolist()} != {0}
    eight, four = (
        traffic(config.Sizes(w, UNITS // w, TOGETHER // w, 1), False)(at.rounds, at.loads)
        for w in (8, 4)
    )
    assert seen.more_sent == eight - four != 0
    assert (
        "Continues from step 7 with 4 workers instead of 8: 6 of 10 units of each are left of "
        "this epoch; their optimizers' state: mean.\n" in capsys.readouterr().out
    )
    now = files_of(folder)
    assert {n for n in now if files.get(n) != now[n]} <= {"settings.json", "lock.json"}
    with pytest.raises(ValueError, match=r"workers: 8 there, 4 here\): .* pass --elastic=mean or"):
        go(folder, 4)
    go(folder, 4, MEAN)
    assert_same(state_of(folder, STEPS), state_of(whole[1], STEPS))
    assert records(folder) == records(whole[1])


def test_what_does_not_fit_is_refused_and_nothing_is_touched(whole, tmp_path):
    folder = stopped(whole[0], tmp_path / "eight", 7)
    before = files_of(folder)
    for workers, flags, message in (
        (
            4,
            [MEAN, "--units_per_step=1"],
            r"4 workers with 1 units per step cannot go on with the 40 units of this run, 8 of "
            r"them in every step of all workers: pass --workers=4 --units_per_step=2\.",
        ),
        (
            3,
            [MEAN],
            r"3 workers with 2 .*: pass --workers=1 --units_per_step=8, "
            r"--workers=2 --units_per_step=4, --workers=4 ",
        ),
        (4, [MEAN, "--sync=constant"], r"sync: 'qsr' there, 'constant' here, .*run\.$"),
        (8, [MEAN, "--run=mesh"], r"\(run: 'vmap' there, 'mesh' here\): choose"),
        (8, ["--order=rr"], r"order: 'cd_grab' there, 'rr' here\): choose another"),
    ):
        with pytest.raises(ValueError, match=message):
            go(folder, workers, *flags)
    assert files_of(folder) == before
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match=r"workers: 8 there, 4 here\): .* pass --overwrite"):
        go(folder, 4, MEAN)


BETWEEN = [(8, 5), (4, 15), (8, STEPS)]  # where epochs end


@pytest.mark.slow
@pytest.mark.parametrize(
    "order,sync,echo,changes",
    [
        ("rr+dealt", "qsr", "none", CHANGES),
        ("so", "qsr", "fixed", CHANGES),
        ("id_pair", "qsr+int8", "none", CHANGES),
        ("cd_grab+walk", "qsr+control", "none", BETWEEN),
        ("herding", "constant", "none", CHANGES),
        ("cd_grab+dealt", "parallel", "fixed", CHANGES),
        ("cd_grab+sketch16", "qsr", "diffusion+cosine", CHANGES),
        ("id_pair+sketch1024", "accumulate", "none", CHANGES),
        ("cd_grab+scaled", "qsr", "none", CHANGES),
    ],
)
def test_every_order_goes_on_with_other_workers(tmp_path, order, sync, echo, changes):
    """From both inputs, bitwise the same; in mid-epoch and between two; echoed batches too."""
    rule, ends = [f"--order={order}", f"--sync={sync}", f"--echo={echo}"], []
    rule += ["--optimizer=adamw"] * ("scaled" in order)
    for reads in ("device", "thread"):
        folders = changed(tmp_path / reads, *rule, f"--input={reads}", changes=changes)
        ends.append(state_of(folders[-1], STEPS))
    assert_same(*ends)
    plan = EchoPlan.read(str(folders[-1] / "echo_plan.json"))
    epochs = visited(folders, plan.load_steps, changes)
    for epoch in range(plan.loads // LOADS):  # those that are whole
        assert len(epochs[epoch]) == len(set(epochs[epoch])) == UNITS, epoch


FOUR, TWO = ["--workers=4", "--run=mesh"], ["--workers=2", "--run=mesh", "--units_per_step=6"]


@pytest.mark.slow
def test_two_processes_go_on_where_four_workers_were_killed(tmp_path):
    code, output = stop_in_the_middle([*RUN, *FOUR], tmp_path / "a", signal.SIGKILL, devices=4)
    assert code == -9, output
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    text = finish([*RUN, *TWO, MEAN], tmp_path / "a", devices=2)
    assert re.search(r"Continues from step \d+ with 2 workers instead of 4: \d+ of 768", text)
    together = ["experiments.launch", "--processes=2", "--", *RUN, *TWO, MEAN]
    assert text.splitlines()[0] in finish(together, tmp_path / "b")
    one, two = records(tmp_path / "a"), records(tmp_path / "b")
    assert len(one) == 12
    for a, b in zip(one, two, strict=True):
        names = ("step", "loads", "rounds", "allreduces")
        assert [a.get(n) for n in names] == [b.get(n) for n in names]
        np.testing.assert_allclose(a["train/loss"], b["train/loss"], rtol=1e-5)
