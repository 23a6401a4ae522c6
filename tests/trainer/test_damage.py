"""What is damaged, exchanged or cut off between two calls is noticed, or the run is the same."""

import collections
import functools
import json
import pathlib
import re
import shutil
import threading
import time

import jax
import numpy as np
import pytest

import syncopate
from experiments import entry, fingerprints
from experiments.data import TASKS
from experiments.data.base import first_of
from experiments.data.text import Recut
from experiments.fingerprints import data_hash
from experiments.report import records
from experiments.trainer import checkpoint
from syncopate.refusals import UserError
from tests.cases import mostly_slow
from tests.commands import ROOT, SAVED, start, train_run
from tests.little_run import STEPS, assert_same, built, plans_of, timeless, trained
from tests.sources import EpochSource


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(program, folder of the checkpoints of steps 56 and 60, the state at the end, records)."""
    folder, program = tmp_path_factory.mktemp("saved"), built(mesh=True)
    outcome, recorded = trained(program, plans_of(), folder=folder, save_every=7, save_at_end=True)
    assert checkpoint.steps_of(folder) == [60, 56]
    return program, folder, outcome.state, recorded


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def largest(folder):
    return max(files_of(folder), key=lambda path: path.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "no metadata": lambda path: (path / "state" / "_METADATA").unlink(),
    "no facts": lambda path: shutil.rmtree(path / "run"),
    "cut facts": lambda path: cut(path / "run" / "metadata"),
    "no state": lambda path: shutil.rmtree(path / "state"),
}


@pytest.mark.parametrize("damage", mostly_slow(DAMAGES, quick=("no facts", "no state")))
def test_a_checkpoint_that_cannot_be_read_is_named_and_without_it_the_run_goes_on(
    saved, tmp_path, damage
):
    program, folder, state, result = saved
    folder = pathlib.Path(shutil.copytree(folder, tmp_path / "copy"))
    DAMAGES[damage](folder / "60")
    before = files_of(folder)
    with pytest.raises(
        UserError, match=r"copy/60' cannot be read \(.+\): .* or delete it to go on"
    ):
        trained(program, plans_of(), folder=folder)
    assert files_of(folder) == before
    shutil.rmtree(folder / "60")
    outcome, again = trained(program, plans_of(), folder=folder)
    assert_same(outcome.state, state)
    assert timeless(again) == timeless(r for r in result if r["step"] > 56)


def test_arrays_that_cannot_be_read_end_a_run_by_name(finished, tmp_path):
    """In a process: TensorStore reports each of them to whoever is there later."""
    folder = pathlib.Path(shutil.copytree(finished, tmp_path / "run"))
    cut(largest(folder / "checkpoints" / "24" / "state"))
    process = start(["experiments.train", *SAVED], folder)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.search(r"Error: the checkpoint '.*24' cannot be read \(.+\): .* delete it", text), (
        text
    )


OTHERS = [
    (plans_of(echo="fixed"), None, "step 60 belongs to another echo plan: give"),
    (plans_of(sync="constant"), None, "step 60 belongs to another sync plan: give"),
    (plans_of(floor=0.02, growth=1.51), None, "belongs to another learning rate plan: give"),
    (plans_of(), 2, "60 needs 5 records, and metrics.jsonl holds 2 up .* or delete .*60' to go on"),
]


def test_a_checkpoint_of_another_run_is_refused(saved):
    program, folder, _, recorded = saved
    for plans, count, message in OTHERS:
        with pytest.raises(UserError, match=message):
            checkpoint.restore(folder, plans, program.shapes, records=count)
    at, _ = checkpoint.restore(folder, plans_of(), program.shapes, records=len(recorded))
    assert at.step == STEPS


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


LINES = {  # of a run with four records: how many are left, or what is wrong
    "as it was": (lambda x: x, 4),
    "ends of lines": (lambda x: [line.replace(b"\n", b"\r\n") for line in x], 4),
    "a last line twice": (lambda x: [*x, x[-1]], "line 5 of .* has step 24 after step 24"),
    "garbage": (lambda x: [*x, b"\x00\xff{"], 4),
    "a last line cut": (lambda x: [*x[:-1], x[-1][:40]], 3),
    "swapped": (lambda x: [x[1], x[0], *x[2:]], "line 2 of .* has step 6 after step 12 "),
}


@pytest.mark.parametrize("change,expected", LINES.values(), ids=LINES)
def test_records_are_read_in_their_order(finished, tmp_path, change, expected):
    folder = pathlib.Path(shutil.copytree(finished, tmp_path / "run"))
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    if isinstance(expected, int):
        assert len(records.read_folder(str(folder))) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            records.read_folder(str(folder))


def test_lost_lines_are_named_and_without_their_checkpoint_written_again(
    finished, tmp_path, capsys
):
    folder = pathlib.Path(shutil.copytree(finished, tmp_path / "run"))
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match=r"24 needs 4 records, and metrics.jsonl holds 3 up to"):
        train_run(SAVED, folder)
    shutil.rmtree(folder / "checkpoints" / "24")
    train_run(SAVED, folder)
    assert "Continues from the checkpoint of step 21" in capsys.readouterr().out
    assert timeless(records.read_folder(str(folder))) == timeless(
        records.read_folder(str(finished))
    )


def test_other_workers_are_refused_with_the_page_that_has_the_program(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    message = r"\(units_per_step: 4 there, 2 here, workers: 2 there, 4 here\).*docs/use/resize.md"
    with pytest.raises(UserError, match=message):
        train_run([*SAVED, "--workers=4", "--units_per_step=2"], folder)
    assert (ROOT / "docs" / "use" / "resize.md").exists()


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
    assert entry.cpu_devices() == 3
    monkeypatch.setenv("XLA_FLAGS", f"{entry.DEVICES}=2 {entry.DEVICES}=16")  # XLA takes the last
    assert entry.cpu_devices() == 16
    monkeypatch.delenv("XLA_FLAGS")
    assert entry.cpu_devices() == 1


def test_a_run_goes_on_as_it_was_and_is_told_of_other_conditions(
    finished, tmp_path, capsys, monkeypatch
):
    folder, now = shutil.copytree(finished, tmp_path / "run"), fingerprints.conditions()
    train_run(SAVED, folder)
    assert "other conditions" not in capsys.readouterr().out
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
    saving = {"folder": tmp_path, "save_every": 20, "save_at_end": True}
    outcome, _ = trained(built(mesh=True), plans_of(), **saving)
    assert max(n for thread, n in seen.items() if thread != main) > 1
    assert outcome.ended and checkpoint.newest(tmp_path) == 60


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
    train_run(SAVED, folder, draw=True)
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
