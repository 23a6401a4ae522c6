"""What is damaged, exchanged or cut off between two calls is noticed, or the run is the same."""

import collections
import functools
import gc
import json
import pathlib
import re
import shutil
import tempfile
import threading
import time

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import syncopate
from experiments import fingerprints
from experiments.data import TASKS
from experiments.data.base import first_of
from experiments.data.text import Recut
from experiments.fingerprints import data_hash
from experiments.report import records
from experiments.trainer import checkpoint, run
from syncopate.refusals import UserError
from tests.cases import times
from tests.commands import SAVED, train_run
from tests.little_run import STEPS, assert_same, built, plans_of, timeless, trained
from tests.sources import EpochSource


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(program, folder of the checkpoints of steps 56 and 60, the state at the end, records)."""
    folder, program = tmp_path_factory.mktemp("saved"), built(mesh=True)
    outcome, recorded = trained(
        program, plans_of(), saving=run.Saving(folder, every=7, at_end=True)
    )
    assert checkpoint.steps_of(folder) == [60, 56]
    return program, folder, outcome.state, recorded


@pytest.fixture
def copied(saved, tmp_path):
    """The same, in a folder that may be damaged."""
    program, folder, state, result = saved
    return program, pathlib.Path(shutil.copytree(folder, tmp_path / "copy")), state, result


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def changed(content, path, draw):
    """What a file then holds; None for nothing."""
    how, place = draw(st.sampled_from(HOW)), draw(st.integers(0, len(content)))
    if how == "bit" and place < len(content):
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
    return None if how == "gone" else bytes(content)


HOW = ("bit", "cut", "piece", "zeros", "older", "gone")


@settings(max_examples=times(60))
@given(data=st.data())
def test_a_changed_file_is_named_or_does_nothing(saved, data):
    """What a restore reads is named; what orbax writes beside it is not read."""
    program, folder, state, _ = saved
    with tempfile.TemporaryDirectory() as name:
        newest = pathlib.Path(shutil.copytree(folder, pathlib.Path(name, "copy"))) / "60"
        path = data.draw(st.sampled_from(files_of(newest)))
        before = path.read_bytes()
        after = changed(bytearray(before), path, data.draw)
        path.unlink() if after is None else path.write_bytes(after)
        wrong, place = checkpoint.damage(newest), str(path.relative_to(newest))
        if place.startswith((checkpoint.DIGEST, checkpoint.STATE, checkpoint.METADATA)):
            assert (after == before) == (wrong is None)
            assert wrong is None or place in wrong
            return
        assert wrong is None
        at, other, _ = checkpoint.restore(newest.parent, 60, plans_of(), program.shapes, {})
        assert at.step == STEPS
        assert_same(other, state)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def largest(folder):
    return max((folder / "60" / "state").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)


def older(folder):
    """Files that fit each other, under another name."""
    shutil.rmtree(folder / "60")
    shutil.copytree(folder / "56", folder / "60")


@pytest.mark.parametrize(
    "act,expected",
    [
        (lambda folder: cut(largest(folder)), r"state/\S+ not as digest.txt says"),
        (older, "it is that of step 56"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(copied, capsys, act, expected):
    program, folder, state, result = copied
    act(folder)
    outcome, again = trained(program, plans_of(), saving=run.Saving(folder, at_end=True))
    output = capsys.readouterr().out
    assert re.search(rf"The checkpoint of step 60 is passed over: .*{expected}", output)
    assert "Continues from the checkpoint of step 56" in output
    assert_same(outcome.state, state)
    assert timeless(again) == timeless(r for r in result if r["step"] > 56)
    assert sorted(p.name for p in folder.iterdir()) == ["56", "60", "60.aside"]


def test_older_damage_does_not_matter_and_where_none_is_whole_nothing_begins(copied, capsys):
    program, folder, state, _ = copied
    for path in files_of(folder / "56"):
        cut(path)
    outcome, recorded = trained(program, plans_of(), saving=run.Saving(folder))
    assert "Continues from the checkpoint of step 60" in capsys.readouterr().out
    assert_same(outcome.state, state)
    assert not recorded
    cut(largest(folder))
    with pytest.raises(ValueError, match=r"no checkpoint in .* fits its run \(step 60: .*--over"):
        trained(program, plans_of(), saving=run.Saving(folder))
    assert sorted(p.name for p in folder.iterdir()) == ["56", "60"], "nothing was touched"


def test_a_kill_while_a_digest_is_written_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """A folder gets its name when its digest is there."""
    real, calls = checkpoint._write_digest, []

    def fails_late(folder):
        calls.append(folder)
        if len(calls) == 2:
            raise OSError("no space left")
        real(folder)

    monkeypatch.setattr(checkpoint, "_write_digest", fails_late)
    with pytest.raises(OSError, match="no space left"):
        trained(built(mesh=True), plans_of(), saving=run.Saving(tmp_path, every=30, at_end=True))
    assert checkpoint.steps_of(tmp_path) == [30] and checkpoint.reconcile(tmp_path) == 30


A = {"seed": 0, "data": "a"}


OTHERS = [
    (plans_of(echo="fixed"), {}, "step 60 belongs to another echo plan: give"),
    (plans_of(sync="constant"), {}, "step 60 belongs to another sync plan: give"),
    (plans_of(floor=0.02, growth=1.51), {}, "belongs to another learning rate plan: give"),
    (plans_of(), {"about": A | {"seed": 1}}, r"settings \(seed: 0 there, 1 here.* --o"),
    (plans_of(), {"about": A | {"data": "b"}}, r"settings \(data: 'a' there, .* pass --"),
    (plans_of(), {"recorded": [12, 24]}, "60: it needs 5 records, and metrics.jsonl holds 2 up"),
]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    saving = run.Saving(tmp_path, at_end=True, about=A)
    _, recorded = trained(built(mesh=True), plans_of(), saving=saving)
    trained(built(mesh=True), plans_of(), saving=saving, recorded=[r["step"] for r in recorded])
    for plans, other, message in OTHERS:
        with pytest.raises(ValueError, match=message):
            given = saving._replace(about=other.get("about", A))
            trained(built(mesh=True), plans, saving=given, recorded=other.get("recorded"))


def test_data_are_known_by_their_hash():
    task = TASKS["digits"](None)
    data = jax.tree.map(np.array, task.train)
    data["x"][7, 3] += 1e-3
    turned = EpochSource({**task.train, "y": task.train["y"][::-1]})
    others = [data, first_of(task.train, 100), EpochSource(task.train), turned]
    tasks = [task, *(task._replace(train=x) for x in others), task._replace(test=data)]
    # A text's windows are the same; what a later epoch cuts is not.
    tokens, start = np.arange(41), np.array([0])
    texts = [(tokens, start), (tokens, np.array([0, 9])), (np.append(tokens[:-1], 7), start)]
    tasks += [task._replace(recut=Recut(*text, 4)) for text in texts]
    assert len({data_hash(one) for one in tasks}) == len(tasks)
    assert data_hash(TASKS["digits"](None)) == data_hash(task)


LINE = '{"step": 1}\n'


def test_a_cut_last_line_is_left_out_and_another_that_is_broken_is_named(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text(LINE + LINE[:-4])
    assert records.read(str(path)) == [{"step": 1}]
    assert f"Line 2 of {str(path)!r} was cut off" in capsys.readouterr().out
    for line in ('{"step": 1', "[1, 2]", "7", "\xff\xfe", '{"step": 1}}', "", "[" * 10**5):
        path.write_text(f"{LINE}{line}\n{LINE}", encoding="latin-1")
        with pytest.raises(ValueError, match=r"line 2 of .*l' is broken .* --overwrite"):
            records.read(str(path))


LINES = {  # of a run with checkpoints of steps 21 and 24, after three and four records
    "as it was": (lambda x: x, 24),
    "ends of lines": (lambda x: [line.replace(b"\n", b"\r\n") for line in x], 24),
    "a last line twice": (lambda x: [*x, x[-1]], "line 5 of .* has step 24 after step 24"),
    "garbage": (lambda x: [*x, b"\x00\xff{"], 24),
    "a last line gone": (lambda x: x[:-1], 21),
    "a last line cut": (lambda x: [*x[:-1], x[-1][:40]], 21),
    "two lines gone": (lambda x: x[:2], "24: it needs 4 records, and .* holds 2 .*21: it needs 3"),
    "swapped": (lambda x: [x[1], x[0], *x[2:]], "line 2 of .* has step 6 after step 12 "),
}


@pytest.mark.parametrize("change,expected", LINES.values(), ids=LINES)
def test_a_run_goes_back_to_the_records_that_are_left(finished, tmp_path, change, expected):
    folder = pathlib.Path(shutil.copytree(finished, tmp_path / "run"))
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    def newest():
        steps = [r["step"] for r in records.read_folder(str(folder))]
        return checkpoint.reconcile(str(folder / "checkpoints"), steps)

    if isinstance(expected, int):
        assert newest() == expected
    else:
        with pytest.raises(ValueError, match=expected):
            newest()


def test_lost_lines_are_written_again(finished, tmp_path, capsys):
    folder = pathlib.Path(shutil.copytree(finished, tmp_path / "run"))
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    train_run(SAVED, folder)
    output = capsys.readouterr().out
    assert "step 24 is passed over: it needs 4 records, and metrics.jsonl holds 3 up to" in output
    assert "Continues from the checkpoint of step 21" in output
    assert timeless(records.read_folder(str(folder))) == timeless(
        records.read_folder(str(finished))
    )


def test_data_and_settings_of_jax_belong_to_a_run(finished, tmp_path, monkeypatch):
    folder = shutil.copytree(finished, tmp_path / "run")
    for name, value in (
        ("jax_default_prng_impl", "rbg"),
        ("jax_threefry_partitionable", False),
        ("jax_random_seed_offset", 3),
        ("jax_default_matmul_precision", "float32"),
    ):
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        try:
            text = f"other settings .{name}: {before!r} there, {value!r}"
            with pytest.raises(ValueError, match=text):
                train_run(SAVED, folder)
        finally:
            jax.config.update(name, before)
    digits = TASKS["digits"]

    def others(*args, **choices):
        task = digits(*args, **choices)
        return task._replace(test={**task.test, "y": task.test["y"][::-1]})

    monkeypatch.setitem(TASKS, "digits", functools.wraps(digits)(others))
    with pytest.raises(ValueError, match=r"settings \(data: .*-"):
        train_run(SAVED, folder)


def test_conditions_hold_the_flags_of_xla_but_the_number_of_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_force_host_platform_device_count=3 --xla_a=2")
    assert fingerprints.conditions()["XLA_FLAGS"] == "--xla_a=2 --xla_b=1"


def test_a_run_goes_on_as_it_was_and_is_told_of_other_conditions(
    finished, tmp_path, capsys, monkeypatch
):
    folder, now = shutil.copytree(finished, tmp_path / "run"), fingerprints.conditions()
    checked, real = [], checkpoint.damage
    monkeypatch.setattr(checkpoint, "damage", lambda path: (checked.append(path), real(path))[1])
    train_run(SAVED, folder)
    assert "other conditions" not in capsys.readouterr().out
    assert [pathlib.Path(path).name for path in checked] == ["24"], "all files were read once"
    monkeypatch.setattr(fingerprints, "conditions", lambda: now | {"cores": "1000", "jax": "9.9"})
    train_run(SAVED, folder)
    text = f"(cores: '{now['cores']}' there, '1000' here, jax: '{jax.__version__}' there, '9.9'"
    assert f"24 was written under other conditions {text} here)" in capsys.readouterr().out


def test_a_clock_that_is_set_forward_ends_no_save(tmp_path, monkeypatch):
    """A day further in every thread that writes a checkpoint, once it has looked at the clock."""
    real, seen, main = time.time, collections.Counter(), threading.get_ident()

    def now():
        seen[thread := threading.get_ident()] += 1
        return real() + 86_400.0 * (thread != main and seen[thread] > 1)

    monkeypatch.setattr(time, "time", now)
    outcome, _ = trained(
        built(mesh=True), plans_of(), saving=run.Saving(tmp_path, every=20, at_end=True)
    )
    assert max(n for thread, n in seen.items() if thread != main) > 1
    assert outcome.ended and checkpoint.reconcile(tmp_path) == 60


def test_broken_or_missing_settings_are_named(tmp_path):
    settings = {"seed": 0, "data": "a"}
    records.open_folder(str(tmp_path), settings)
    (tmp_path / "metrics.jsonl").write_text(LINE)
    with pytest.raises(ValueError, match=r"other settings \(data: 'a' there, 'b' here\): .* --o"):
        records.open_folder(str(tmp_path), {"seed": 0, "data": "b"})
    path = tmp_path / "settings.json"
    for text in (path.read_text()[:-5], "[]", "null", "7", '"text"', "[" * 10**5):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"settings.json' is broken .* or pass --overwrite"):
            records.open_folder(str(tmp_path), settings)
    path.unlink()
    with pytest.raises(ValueError, match="holds metrics.jsonl and no settings.json .* --overwrite"):
        records.open_folder(str(tmp_path), settings)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds checkpoints and no settings.json .* --overwrite"):
        records.open_folder(str(tmp_path), settings)
    records.open_folder(str(tmp_path), settings, overwrite=True)
    assert records.read_folder(str(tmp_path)) == []
    assert json.loads(path.read_text()) == settings


def test_records_of_other_settings_go_before_the_new_ones_come(tmp_path, monkeypatch):
    """--overwrite, killed in between, leaves no records under settings that are not theirs."""
    records.open_folder(str(tmp_path), {"seed": 0})
    (tmp_path / "metrics.jsonl").write_text(LINE)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(records, "versions", interrupted)
        records.open_folder(str(tmp_path), {"seed": 1}, overwrite=True)
    records.open_folder(str(tmp_path), {"seed": 1})
    assert records.read_folder(str(tmp_path)) == []


def interrupted():
    raise KeyboardInterrupt


def test_a_run_that_had_ended_says_so_and_shows_its_result(finished, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "run")
    last = records.read_folder(str(folder))[-1]
    train_run(SAVED, folder)
    text = capsys.readouterr()
    assert f"The run in {folder} had come to its end, step 24." in text.out
    result = f"After 24 steps: test accuracy {last['test/accuracy']:.4g}, train loss "
    assert result in text.out and "Compiling" not in text.err
    assert f"as {last['allreduces']:,.0f} all-reduces of the parameters: in " in text.out
    report = (pathlib.Path(folder) / "report.html").read_text()
    assert f"<strong>{result}" in report and "of averaged" not in report and "±" not in report
    assert f"<td>loads</td>\n<td>6</td>\n<td>{last['loads']}</td>" in report
    assert report.count('src="data:image/png;base64,') == 1
    versions = json.loads((pathlib.Path(folder) / "versions.json").read_text())
    assert versions["syncopate"] == syncopate.__version__


@pytest.mark.parametrize(
    "make,expected",
    [
        (lambda path: path.symlink_to(path.parent), "is a link"),
        (lambda path: path.write_text("mine"), "is no folder"),
    ],
)
def test_a_model_that_could_not_be_written_in_the_end_is_refused_before_training(
    tmp_path, make, expected, capsys
):
    make(tmp_path / "model")
    with pytest.raises(UserError, match=f"model' {expected}, and .* another --output_dir"):
        train_run(SAVED, tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists() and (tmp_path / "model").exists()


FORGED = {
    "an array": lambda state: {**state, "a": np.arange(7.0)},
    "no array": lambda state: {"b": state["b"]},
    "a tree": lambda state: {**state, "a": {"c": state["a"]}},
}


@pytest.mark.parametrize("what", [*FORGED, "d", "manifest.ocdbt", "_METADATA"])
def test_a_state_that_orbax_cannot_read_is_named_where_its_digest_was_forged(tmp_path, what):
    import orbax.checkpoint as ocp

    state, path = {"a": jax.numpy.arange(6.0), "b": jax.numpy.ones((2, 3))}, tmp_path / "7"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", FORGED.get(what, lambda state: state)(state))
    for file in files_of(path / "state" / what) or [path / "state" / what]:
        if file.exists():
            file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"7/state' cannot be read, .* \(.+\): restore it from a"):
        checkpoint.read_state(str(path), state)
    gc.collect()  # what still waits for an array: pytest would show its errors
