"""A run that was stopped goes on with other workers, in mid-epoch and mid-round.

pytest -m slow -n 0 tests/test_elastic.py     # all orders and rounds, `train` itself: minutes
"""

import json
import os
import shutil

import jax
import numpy as np
import pytest

from experiments.elastic import request
from experiments.results import records
from experiments.training import checkpoint, config, loop
from tests.elastic_run import go, prepare, state_of
from tests.little_run import assert_same, timeless
from tests.test_one_loop import STEPS

LOADS = 5  # of an epoch


def visited(seen, load_steps=range(STEPS), *, online=False):
    """{epoch: the units of its loads}.

    Args:
      online: where loads are not known before, the next order is current once the next one comes.
    """
    found = {}
    for load, step in enumerate(load_steps):
        epoch, place = divmod(load, LOADS)
        orders = seen[step + (online and not place)]
        each = 8 // len(orders)
        units = orders[:, place * each : (place + 1) * each]
        assert units.size == 8
        found.setdefault(epoch, []).extend(units.reshape(-1).tolist())
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """8 to 4 to 8 workers on the device: (copies before each change, outcome, records, seen)."""
    folder, copies = tmp_path_factory.mktemp("elastic"), tmp_path_factory.mktemp("copies")
    seen, found = {}, []
    for workers, policy, stop in ((8, None, 23), (4, "mean", 43), (8, "mean", None)):
        if policy:
            shutil.copytree(folder, copies / str(workers))
        outcome, new = go(folder, workers, policy=policy, stop=stop, seen=seen)
        found += new
    return copies, outcome, found, seen


@pytest.fixture
def eight(whole, tmp_path):
    """The folder of a run of 8 workers, stopped at step 23."""
    return shutil.copytree(whole[0] / "4", tmp_path / "eight")


def test_each_unit_is_visited_once_in_every_epoch(whole):
    _, outcome, found, seen = whole
    epochs = visited(seen)
    assert len(epochs) == STEPS / LOADS
    assert all(sorted(units) == list(range(40)) for units in epochs.values())
    assert outcome.ended and [r["step"] for r in found] == list(range(STEPS + 1))


def test_other_input_and_further_stops_change_nothing(whole, tmp_path):
    _, outcome, found, _ = whole
    again = []
    for workers, policy, stop in (
        (8, None, 23), (4, "mean", 30), (4, None, 43), (8, "mean", 50), (8, "reset", None),
    ):  # fmt: skip
        # A policy without other workers changes nothing.
        other, new = go(tmp_path, workers, policy=policy, stop=stop, reads="thread")
        again += new
    assert_same(other.state, outcome.state)
    assert timeless(again) == timeless(found)


@pytest.mark.parametrize("policy", ["mean", "reset", "first"])
def test_workers_become_their_mean_and_their_momentum_what_is_asked(eight, policy, capsys):
    before = state_of(eight, 23)
    _, sizes, settings, units = prepare(eight, 4, policy=policy)
    assert units is None, "neighbours merge"
    assert (sizes.workers, sizes.num_units, sizes.units_per_step) == (4, 10, 2)
    after = state_of(eight, 23)

    def to_all(x):
        return np.stack([x] * 4)

    for name, rows in before["params"].items():
        mean = np.mean(rows.astype(np.float64), axis=0).astype(np.float32)
        np.testing.assert_array_equal(after["params"][name], to_all(mean))
        assert (rows != rows[:1]).any(), "in a round"
    inner = [jax.tree.leaves(state["opt_state"]["inner"]) for state in (before, after)]
    assert any(old.any() for old in inner[0])
    for old, new in zip(*inner, strict=True):
        chosen = {
            "mean": np.mean(old.astype(np.float64), axis=0).astype(np.float32),
            "reset": np.zeros_like(old[0]), "first": old[0],
        }  # fmt: skip
        np.testing.assert_array_equal(new, to_all(chosen[policy]))
    assert set(after["opt_state"]["since"]) == set(before["opt_state"]["since"]) != {0}
    old, new = (np.ravel(state["orders"]["running_sum"])[:18] for state in (before, after))
    np.testing.assert_array_equal(old, new)
    assert old.any()
    np.testing.assert_allclose(*(state["stats"]["loss"].mean() for state in (before, after)))
    change = {
        "step": 23, "rounds": 7, "loads": 23, "workers": [8, 4], "units_per_step": [1, 2],
        "policy": policy, "units": None,
    }  # fmt: skip
    assert settings["elastic"] == [change | {"rounds": settings["elastic"][0]["rounds"]}]
    assert records.read_json(os.path.join(eight, "settings.json")) == settings
    known = checkpoint.read_on_host(os.path.join(eight, "checkpoints", "23"))[0]
    assert known["about"] == settings
    assert capsys.readouterr().out == (
        "Goes on from step 23 with 4 workers instead of 8: 16 of 40 units of epoch 5 are left, "
        f"dealt anew; parameters are the workers' mean; optimizer state: {policy}.\n"
    )


def test_a_kill_in_the_middle_of_a_change_loses_nothing(whole, eight, monkeypatch):
    """Wherever it comes, the same command makes the same of it."""
    other = shutil.copytree(eight, f"{eight}_2")
    prepare(other, 4, policy="mean")
    expected = state_of(other, 23)

    class Killed(BaseException):
        pass

    def killed(*args, **options):
        raise Killed

    rename = os.rename

    def second(old, new):
        if old.endswith(os.path.join("checkpoints.new", "23")):
            raise Killed
        rename(old, new)

    for module, name, instead in (
        (checkpoint, "save", killed), (os, "rename", second), (records, "write_json", killed),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(module, name, instead)
            with pytest.raises(Killed):
                prepare(eight, 4, policy="mean")
        assert checkpoint.settled(os.path.join(eight, "checkpoints")) == 23
        assert "elastic" not in records.read_json(os.path.join(eight, "settings.json"))
    # The checkpoint is changed already: no flag is needed.
    _, _, settings, _ = prepare(eight, 4)
    assert len(settings["elastic"]) == 1
    assert_same(state_of(eight, 23), expected)
    assert sorted(os.listdir(os.path.join(eight, "checkpoints"))) == ["23"]


def files_of(folder):
    found = {}
    for root, _, names in os.walk(folder):
        for path in (os.path.join(root, name) for name in names if name != "versions.json"):
            with open(path, "rb") as file:
                found[path] = file.read()
    return found


def test_what_does_not_fit_is_refused_and_nothing_is_touched(eight):
    before = files_of(eight)
    for workers, fields, message in (
        (4, {}, r"other settings \(units_per_step: 1 there, 2 here, workers: 8 there, 4 here\): "
                r"choose .* that run; to go on with other workers pass --elastic=mean or reset or"),
        (4, {"policy": "mean", "units_per_step": 1},
         r"4 workers with 1 units per step cannot go on with the 40 units of this run, 8 of them "
         r"in every step of all workers: pass --workers=4 --units_per_step=2\."),
        (3, {"policy": "mean"}, r"3 workers with 2 .*: pass --workers=1 --units_per_step=8, "
                                r"--workers=2 --units_per_step=4, --workers=4 "),
        (4, {"policy": "mean", "sync": "constant"}, r"sync: 'qsr' there, 'constant' here, .*run.$"),
        (8, {"order": "rr"}, r"\(order: 'cd_grab' there, 'rr' here\): choose another"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            prepare(eight, workers, **fields)
    prepare(eight, 8, policy="reset")  # the workers that it has
    assert files_of(eight) == before


def test_lost_units_are_named(whole, tmp_path):
    folder = shutil.copytree(whole[0] / "8", tmp_path / "four")
    _, sizes, settings, units = prepare(folder, 8, policy="mean")
    assert units.shape == (8, 5) and len(settings["elastic"]) == 2
    assert sorted(units.reshape(-1).tolist()) == list(range(40))
    (path,) = (tmp_path / "four" / "units").iterdir()
    np.testing.assert_array_equal(request.units_of(folder, settings["elastic"], sizes), units)
    np.save(path, units[::-1])
    with pytest.raises(ValueError, match=r"npy' is not what was saved: bring it back"):
        prepare(folder, 8)
    path.unlink()
    with pytest.raises(ValueError, match="No such file.*: bring it back"):
        prepare(folder, 8)


def test_a_run_without_a_checkpoint_begins_with_other_workers(tmp_path):
    prepare(tmp_path, 8)
    with pytest.raises(ValueError, match="to go on with other workers pass --elastic"):
        prepare(tmp_path, 4)
    _, sizes, settings, _ = prepare(tmp_path, 4, policy="mean")
    assert sizes.workers == 4 and "elastic" not in settings
    assert json.loads((tmp_path / "settings.json").read_text())["workers"] == 4


def test_what_was_sent_by_other_workers_is_added():
    changes = [
        {"rounds": 7, "loads": 20, "workers": [8, 4], "units_per_step": [1, 2]},
        {"rounds": 9, "loads": 40, "workers": [4, 2], "units_per_step": [2, 4]},
    ]
    sizes = config.Sizes(2, 20, 4, 1)
    sent = request.traffic_of(
        changes, sizes, lambda s: lambda rounds, loads: rounds + s.workers * loads
    )
    assert sent(12, 50) == 12 + 8 * 20 + 4 * 20 + 2 * 10


ORDERS_AND_ROUNDS = [
    ("rr", "parallel", "none"), ("rr", "qsr", "diffusion_cosine"), ("dealt", "qsr", "none"),
    ("dealt", "parallel", "fixed"), ("so", "qsr", "none"), ("block", "qsr", "none"),
    ("unzip", "constant", "none"), ("id_mean", "qsr", "none"), ("id_pair", "qsr_int8", "none"),
    ("cd_grab", "parallel", "none"), ("cd_grab", "qsr", "diffusion_cosine"),
    ("cd_walk", "qsr_top_k", "none"), ("kh", "qsr_control", "none"),
    ("herding", "qsr_proximal", "none"), ("sketch16", "qsr", "diffusion_cosine"),
    ("sketch16", "parallel", "none"), ("id_sketch", "accumulate", "none"),
    ("cd_grab_dealt", "qsr", "diffusion_cosine"), ("cd_grab_chunks", "constant", "none"),
    ("id_pair_dealt", "qsr", "none"), ("sketch16_dealt", "qsr", "none"),
    ("sketch16_chunks", "parallel", "none"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("order,sync,echo", ORDERS_AND_ROUNDS)
def test_every_order_goes_on_with_other_workers(tmp_path, order, sync, echo):
    """8 to 4 to 8 workers, from both inputs, bitwise the same; echoed batches too."""
    rule, ends = {"order": order, "sync": sync, "echo": echo}, []
    for reads in (None, "thread"):
        folder, seen = tmp_path / str(reads), {}
        for workers, policy, stop in ((8, None, 23), (4, "mean", 43), (8, "first", None)):
            outcome, _ = go(
                folder, workers, policy=policy, stop=stop, reads=reads, seen=seen, **rule
            )
        plans, *_ = prepare(folder, 8, **rule)
        epochs = visited(seen, plans.echo.load_steps)
        last = len(plans.echo.load_steps) // LOADS  # epochs that are whole
        for epoch in range(last):
            units = epochs[epoch]
            assert len(set(units)) == len(units) == 40, epoch
            assert set(units) <= set(range(46))
        assert last > 3
        ends.append(outcome.state)
    assert_same(*ends)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["cd_grab", "rr", "sketch16_dealt"])
@pytest.mark.parametrize("stops,left", [((14, 30), (0, 40)), ((15, 29), (40, 0))])
def test_epochs_that_are_over_or_whose_last_batch_is_echoed(tmp_path, capsys, order, stops, left):
    """Every batch is used three times; the next order is current once the next is loaded."""
    rule, seen = {"order": order, "echo": "fixed"}, {}
    plan = prepare(tmp_path, 8, **rule)[0].echo
    assert plan.load_steps[:7].tolist() == [0, 3, 6, 9, 12, 15, 18]
    for workers, policy, stop in ((8, None, stops[0]), (4, "mean", stops[1]), (8, "mean", None)):
        go(tmp_path, workers, policy=policy, stop=stop, seen=seen, **rule)
    epochs = visited(seen, plan.load_steps)
    assert all(len(set(units)) == len(units) == 40 for units in epochs.values())
    said = capsys.readouterr().out
    for stop, units, epoch in zip(stops, left, (1 + (not left[1]), 3 - (not left[1])), strict=True):
        assert f"step {stop} with" in said and f"{units} of 40 units of epoch {epoch} are" in said


@pytest.mark.slow
def test_what_was_decided_while_it_ran_stays_decided(tmp_path, monkeypatch):
    """By coins, as the same input would not be ready twice."""
    coins, seen = iter(np.random.default_rng(2).random(10_000)), {}
    monkeypatch.setattr(loop, "ready_everywhere", lambda ready: next(coins) < 0.4)
    rule, decided = {"echo": "measured"}, ()
    for workers, policy, stop in ((8, None, 23), (4, "mean", 43), (8, "mean", None)):
        outcome, _ = go(
            tmp_path, workers, policy=policy, stop=stop, reads="thread", seen=seen, **rule
        )
        assert outcome.decided[: len(decided)] == decided
        decided = outcome.decided
    loads = np.flatnonzero(decided)
    epochs = visited(seen, loads, online=True)
    assert len(decided) == STEPS and len(loads) > 20
    for epoch in range(len(loads) // LOADS):
        assert sorted(epochs[epoch]) == list(range(40))
