"""What is damaged, exchanged or cut off between two calls is noticed, or the run is the same.

pytest -m slow -n 0 tests/test_damage.py      # a thousand flipped bits: two minutes
"""

import functools
import json
import pathlib
import shutil
import tempfile

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import qsr
from experiments.results import manifest, records
from experiments.studies import study
from experiments.tasks import TASKS
from experiments.tasks.base import first_of
from experiments.tasks.digest import data_hash
from experiments.training import checkpoint, run
from experiments.training.loop import Progress
from tests.cases import times
from tests.little_run import assert_same, built, plans_of, timeless, trained
from tests.test_lock import SHORT
from tests.test_one_loop import STEPS, WORKERS
from tests.test_studies import RUN, SMALL, start, train_run
from tests.test_train import Source

# What orbax's other reads say after one has failed, which is no warning of ours.
quiet = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
ORDERS_OF = {"own": "cd_grab", "examples": "dealt", "units": "cd_grab_dealt"}


@pytest.fixture(scope="module", params=["cd_grab", "dealt"])
def saved(request, tmp_path_factory):
    """(order, folder of the checkpoints of steps 56 and 60, the state at the end, records)."""
    folder = tmp_path_factory.mktemp("saved")
    saving = run.Saving(str(folder), every=7, at_end=True)
    outcome, found = trained(built(request.param), plans_of(), saving=saving)
    assert checkpoint.steps_of(saving.folder) == [60, 56]
    return request.param, folder, outcome.state, found


@pytest.fixture
def copied(saved, tmp_path):
    """The same, in a folder that may be damaged."""
    order, folder, state, found = saved
    shutil.copytree(folder, tmp_path / "copy")
    return order, tmp_path / "copy", state, found


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def flipped(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def restored(order, folder):
    with checkpoint.opened(str(folder)) as manager:
        return checkpoint.restore(manager, plans_of(), built(order).init(0))


def noticed(order, folder, state, count, seed):
    """How many of `count` flipped bits of the newest checkpoint are noticed; the others do nothing.

    Places are drawn among all bytes of all files.
    """
    files = files_of(folder / "60")
    sizes = np.array([path.stat().st_size for path in files])
    ends, found = np.cumsum(sizes), 0
    for bit in np.random.default_rng(seed).integers(8 * ends[-1], size=count).tolist():
        number = int(np.searchsorted(ends, bit // 8, side="right"))
        place = bit - 8 * int(ends[number] - sizes[number])
        flipped(files[number], place)
        if checkpoint.damage(str(folder / "60")):
            found += 1
        else:
            at, other, _ = restored(order, folder)
            assert at.step == STEPS
            assert_same(other, state)
        flipped(files[number], place)
    return found


def test_another_name_of_a_node_without_leaves_is_noticed(copied):
    """Its name is in the structure alone, which no hash of a leaf knows."""
    _, folder, _, _ = copied
    changed = 0
    for path in files_of(folder / "60"):
        before = path.read_bytes()
        if b"anchor" in before and path.parent.name != "manifest":
            path.write_bytes(before.replace(b"anchor", b"aNchor"))
            changed += bool(checkpoint.damage(str(folder / "60")))
            path.write_bytes(before)
    assert changed


@quiet
def test_a_flipped_bit_is_noticed_or_does_nothing(copied):
    order, folder, state, _ = copied
    assert noticed(order, folder, state, 20, seed=0) > 5
    assert checkpoint.damage(str(folder / "60")) is None


@quiet
@pytest.mark.slow
def test_a_thousand_flipped_bits_are_noticed_or_do_nothing(copied):
    order, folder, state, _ = copied
    print(f"{order}: {noticed(order, folder, state, 500, seed=1)} of 500 noticed")


@st.composite
def changes(draw, files):
    """[(file, what it then holds, None for nothing)], of the newest checkpoint's files."""
    found = []
    for number in draw(
        st.lists(st.integers(0, len(files) - 1), min_size=1, max_size=3, unique=True)
    ):
        path = files[number]
        content, how = bytearray(path.read_bytes()), draw(st.sampled_from(HOW))
        place = draw(st.integers(0, 2**20)) % max(1, len(content))
        if how == "bit" and content:
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del content[place:]
        elif how == "piece":
            content[place : place + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
        elif how == "zeros":
            content[place:] = bytes(len(content) - place)
        elif how == "older":  # the same file, of the checkpoint before
            older = pathlib.Path(str(path).replace("/60/", "/56/"))
            content = older.read_bytes() if older.exists() else content
        elif how == "another":
            content = files[draw(st.integers(0, len(files) - 1))].read_bytes()
        found.append((path, None if how == "gone" else bytes(content)))
    return found


HOW = ("bit", "cut", "piece", "zeros", "older", "another", "gone")


@quiet
@settings(max_examples=times(10))
@given(data=st.data())
def test_changed_files_are_noticed_or_do_nothing(saved, data):
    order, folder, state, _ = saved
    with tempfile.TemporaryDirectory() as name:
        copy = pathlib.Path(name, "copy")
        shutil.copytree(folder, copy)
        for path, content in data.draw(changes(files_of(copy / "60"))):
            path.unlink() if content is None else path.write_bytes(content)
        if not checkpoint.damage(str(copy / "60")):
            at, other, _ = restored(order, copy)
            assert at.step == STEPS
            assert_same(other, state)
        assert checkpoint.damage(str(copy / "56")) is None


def test_the_state_of_another_step_is_noticed(copied):
    """Also where all files fit each other, as those of a folder with another name do."""
    _, folder, *_ = copied
    said = []
    for item in ("state", "manifest"):
        shutil.rmtree(folder / "60" / item)
        shutil.copytree(folder / "56" / item, folder / "60" / item)
        said.append(checkpoint.damage(str(folder / "60")))
    assert "is not what was saved" in said[0] and "it is that of step 56" in said[1]


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def largest(folder):
    return max((folder / "60" / "state").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)


DAMAGE = {
    "a file cut": lambda folder: cut(largest(folder)),
    "a file gone": lambda folder: largest(folder).unlink(),
    "a bit": lambda folder: flipped(largest(folder), 800),
    "no manifest": lambda folder: (folder / "60" / "manifest" / "0.json").unlink(),
    "manifest cut": lambda folder: cut(folder / "60" / "manifest" / "0.json"),
    "empty": lambda folder: [shutil.rmtree(p) for p in (folder / "60").iterdir() if p.is_dir()],
}


@quiet
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(copied, capsys, how):
    order, folder, state, found = copied
    DAMAGE[how](folder)
    outcome, again = trained(built(order), plans_of(), saving=run.Saving(str(folder), at_end=True))
    text = capsys.readouterr().out
    assert "The checkpoint of step 60 is damaged (" in text and "and passed over" in text
    assert "Goes on from the checkpoint of step 56" in text
    assert_same(outcome.state, state)
    assert timeless(again) == timeless(r for r in found if r["step"] > 56)
    assert sorted(p.name for p in folder.iterdir()) == ["56", "60", "60.damaged"]


@quiet
def test_an_older_checkpoint_that_is_damaged_does_not_matter(copied, capsys):
    order, folder, state, _ = copied
    for path in files_of(folder / "56"):
        cut(path)
    outcome, records = trained(built(order), plans_of(), saving=run.Saving(str(folder)))
    assert "Goes on from the checkpoint of step 60" in capsys.readouterr().out
    assert_same(outcome.state, state)
    assert not records


def test_where_none_is_whole_the_run_says_so_and_begins_nothing(copied):
    order, folder, *_ = copied
    for path in files_of(folder):
        if "manifest" in path.parts:
            cut(path)
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole \(step 60: .*--overwrite"):
        trained(built(order), plans_of(), saving=run.Saving(str(folder)))
    assert sorted(p.name for p in folder.iterdir()) == ["56", "60"], "nothing was touched"


def test_shards_of_a_mesh_are_hashed_one_by_one(tmp_path, capsys):
    """As every process hashes those that it holds."""
    saving = run.Saving(str(tmp_path), every=30, at_end=True)
    outcome, _ = trained(built(mesh=True), plans_of(), saving=saving)
    leaves = manifest.read(str(tmp_path / "60"))["leaves"]
    assert {len(leaf["shards"]) for leaf in leaves.values()} == {WORKERS}
    assert "0:1,0:11" in leaves["orders/current"]["shards"]
    again, _ = trained(built(mesh=True), plans_of(), saving=saving)
    assert_same(again.state, outcome.state)
    cut(largest(tmp_path))
    again, _ = trained(built(mesh=True), plans_of(), saving=saving)
    assert "of step 60 is damaged" in capsys.readouterr().out
    assert_same(again.state, outcome.state)


@pytest.mark.parametrize("deals", ORDERS_OF)
def test_an_order_that_visits_a_unit_twice_trains_nothing(tmp_path, deals):
    """Even where all hashes fit, as after an error of ours."""
    program, plans = built(ORDERS_OF[deals]), plans_of()
    start = program.init(0)
    twice = jax.tree.map(np.array, jax.device_get(start.orders))
    twice.current[0, 1] = twice.current[0, 0]
    for number, orders in enumerate((start.orders, jax.device_put(twice))):
        folder, state = str(tmp_path / str(number)), start._replace(orders=orders)
        at, seen = Progress(7), checkpoint.Evaluation()
        with checkpoint.opened(folder) as manager:
            checkpoint.save(manager, plans, at, state, seen, dealt=program.dealt)
        if not number:
            assert checkpoint.settled(folder) == 7
            continue
        with pytest.raises(ValueError, match="does not visit every unit once"):
            checkpoint.settled(folder)
        with pytest.raises(ValueError, match="does not visit every unit once"):
            with checkpoint.opened(folder) as manager:
                checkpoint.restore(manager, plans, start)


@pytest.mark.parametrize(
    "orders,dealt,fits",
    [
        ([[0, 1, 2], [2, 0, 1]], None, True),
        ([[0, 1, 2], [2, 0, 3]], None, False),
        ([[0, 1, 2], [2, 0, -1]], None, False),
        ([[0, 4, 2], [5, 1, 3]], 6, True),
        ([[0, 4, 2], [5, 4, 3]], 6, False),
        ([[0, 4, 2], [7, 1, 3]], 8, True),
        ([[0, 4, 2], [8, 1, 3]], 8, False),
    ],
)
def test_what_orders_must_be(orders, dealt, fits):
    state = {"orders": {"current": np.array(orders)}}
    if fits:
        return manifest.check_orders(state, dealt)
    with pytest.raises(ValueError, match="orders/current does not visit every unit once"):
        manifest.check_orders(state, dealt)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    saving = run.Saving(str(tmp_path), at_end=True, about={"seed": 0, "data": "a"})
    trained(built("cd_grab"), plans_of(), saving=saving)
    for about, what in (({"seed": 1}, "seed: 0 there, 1 here"), ({"data": "b"}, "data: 'a' there")):
        other = saving._replace(about={**saving.about, **about})
        with pytest.raises(ValueError, match=rf"other settings \({what}.* pass --overwrite"):
            trained(built("cd_grab"), plans_of(), saving=other)
    trained(built("cd_grab"), plans_of(), saving=saving)


def test_records_that_were_lost_are_missed(tmp_path):
    saving = run.Saving(str(tmp_path), at_end=True)
    _, found = trained(built("cd_grab"), plans_of(), saving=saving)
    trained(built("cd_grab"), plans_of(), saving=saving._replace(kept=len(found)))
    with pytest.raises(ValueError, match=f"are 2 records .* saved after {len(found)}: bring"):
        trained(built("cd_grab"), plans_of(), saving=saving._replace(kept=2))


def test_data_are_known_by_their_hash():
    task = TASKS["digits"](None)
    first = data_hash(task)
    assert data_hash(TASKS["digits"](None)) == first
    for part in ("train", "test"):
        data = jax.tree.map(np.array, getattr(task, part))
        data["x"][7, 3] += 1e-3
        assert data_hash(task._replace(**{part: data})) != first
        fewer = first_of(getattr(task, part), 100)
        assert data_hash(task._replace(**{part: fewer})) != first
    source = task._replace(train=Source(task.train))
    assert data_hash(source) == data_hash(source) != first
    other = task._replace(train=Source({**task.train, "y": task.train["y"][::-1]}))
    assert data_hash(other) != data_hash(source)


LINE = '{"step": 1}\n'


def test_a_cut_last_line_is_left_out_and_said(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text(LINE + LINE[:-4])
    assert records.read(str(path)) == [{"step": 1}]
    assert f"Line 2 of {str(path)!r} was cut off" in capsys.readouterr().out


@pytest.mark.parametrize("line", ['{"step": 1', "[1, 2]", "7", "\xff\xfe", '{"step": 1}}', ""])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{LINE}{line}\n{LINE}", encoding="latin-1")
    with pytest.raises(ValueError, match=r"line 2 of .*metrics.jsonl' is no record .* --overwrite"):
        records.read(str(path))


def test_broken_or_missing_settings_are_named(tmp_path):
    settings = {"seed": 0, "data": "a"}
    records.open_folder(str(tmp_path), settings)
    (tmp_path / "metrics.jsonl").write_text(LINE)
    with pytest.raises(ValueError, match=r"other settings \(data: 'a' there, 'b' here\): .* --o"):
        records.open_folder(str(tmp_path), {"seed": 0, "data": "b"})
    path = tmp_path / "settings.json"
    path.write_text(path.read_text()[:-5])
    with pytest.raises(ValueError, match=r"settings.json' is broken .* or pass --overwrite"):
        records.open_folder(str(tmp_path), settings)
    path.unlink()
    with pytest.raises(ValueError, match="holds records and no settings.json .* --overwrite"):
        records.open_folder(str(tmp_path), settings)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds checkpoints and no settings.json .* --overwrite"):
        records.open_folder(str(tmp_path), settings)
    assert records.open_folder(str(tmp_path), settings, overwrite=True) == []
    assert json.loads(path.read_text()) == settings


def test_records_of_other_settings_go_before_the_new_ones_come(tmp_path, monkeypatch):
    """--overwrite, killed in between, leaves no records under settings that are not theirs."""
    records.open_folder(str(tmp_path), {"seed": 0})
    (tmp_path / "metrics.jsonl").write_text(LINE)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(records, "versions", interrupted)
        records.open_folder(str(tmp_path), {"seed": 1}, overwrite=True)
    assert records.open_folder(str(tmp_path), {"seed": 1}) == []


def interrupted():
    raise KeyboardInterrupt


def test_a_run_goes_on_with_its_own_data_settings_and_records_alone(tmp_path, monkeypatch):
    train_run(SHORT, tmp_path)
    whole = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}

    def others(*args, **choices):
        task = digits(*args, **choices)
        return task._replace(test={**task.test, "y": task.test["y"][::-1]})

    digits = TASKS["digits"]
    with (
        monkeypatch.context() as patch,
        pytest.raises(ValueError, match=r"settings \(data: .*-"),
    ):
        patch.setitem(TASKS, "digits", functools.wraps(digits)(others))
        train_run(SHORT, tmp_path)
    settings = tmp_path / "settings.json"
    settings.unlink()
    with pytest.raises(ValueError, match="and no settings.json that says of which run"):
        train_run([*SHORT, "--seed=1"], tmp_path)
    settings.write_text(whole[settings.name].decode().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(ValueError, match=r"of step 24 belongs .* settings \(seed: 0 there, 1 here"):
        train_run([*SHORT, "--seed=1"], tmp_path)
    settings.write_bytes(whole[settings.name])
    metrics = tmp_path / "metrics.jsonl"
    metrics.unlink()
    with pytest.raises(ValueError, match="there are 0 records of the run .* saved after 4"):
        train_run(SHORT, tmp_path)
    metrics.write_bytes(whole[metrics.name])
    train_run(SHORT, tmp_path)
    assert metrics.read_bytes() == whole[metrics.name]


def test_a_study_goes_on_with_its_own_data_alone(tmp_path, monkeypatch):
    arguments = [*SMALL, *RUN, "--width=8", "--arms=qsr", "--learning_rates=0.1", "--seeds=1"]
    start(qsr, arguments, tmp_path)
    monkeypatch.setattr(study, "data_hash", lambda task: "others")
    with pytest.raises(ValueError, match=r"settings \(data: '\w+' there, 'others' here\): .*--"):
        start(qsr, arguments, tmp_path)
