"""The file of a run and its trackers hold the same records, also after interruptions."""

import importlib.util
import json
import struct
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import syncopate
from experiments.distributed import processes
from experiments.report import records, trackers

needs_tensorboardx = pytest.mark.skipif(
    importlib.util.find_spec("tensorboardX") is None, reason="tensorboardX is not installed"
)
RECORDS = [
    {"arm": "rr", "seed": 0, "step": 0, "train/loss": 2.5, "diverged": None},
    {"arm": "rr", "seed": 0, "step": 10, "train/loss": 1.25, "diverged": None},
    {"arm": "rr", "seed": 0, "step": 20, "train/loss": 0.1, "bound": 3, "diverged": None},
    {"arm": "cd_grab", "seed": 1, "step": 0, "train/loss": 2.5},
    {"arm": "cd_grab", "seed": 1, "step": 10, "load_steps": [0, 7], "ended": True},
]


@pytest.mark.parametrize(
    "field,value",
    [
        ("arm", "../../elsewhere"),
        ("arm", "/etc"),
        ("phase", "run/.."),
        ("seed", "0/../.."),
        ("arm", "a\0b"),
        ("speed", "..\\x"),
        ("arm", ""),
    ],
)
def test_records_that_name_paths_are_refused(tmp_path, field, value):
    """A run's name becomes that of a folder, which is made and removed."""
    records.rewrite(str(tmp_path), [RECORDS[0], RECORDS[1] | {field: value}])
    with pytest.raises(
        ValueError, match=rf"line 2 of .* as its {field}, which is no name of one: "
    ):
        records.read_folder(str(tmp_path))
    records.rewrite(str(tmp_path), [r | {"arm": "cd_grab+sketch256+qsr"} for r in RECORDS])
    assert len(records.read_folder(str(tmp_path))) == len(RECORDS)


def write_all(folder, new, **options):
    with records.writing(str(folder), **options) as write:
        for record in new:
            write(record)


def numbers(records_):
    """{(run, name, step): value} that trackers draw, in float32 as in TensorBoard."""
    return {
        (records.run_of(r).name, name, r["step"]): float(np.float32(value))
        for r in records_
        for name, value in records.numbers_of(r).items()
    }


def in_tensorboard(folder):
    """The same from event files, chains of framed messages; a start purges later steps."""
    from tensorboardX.proto import event_pb2

    results = {}
    for path in sorted((folder / "tensorboard").rglob("events.out.*")):
        data, at, run = path.read_bytes(), 0, path.parent.name
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            at += length + 16
            if event.session_log.status == event_pb2.SessionLog.START:
                results = {k: v for k, v in results.items() if k[0] != run or k[2] < event.step}
            for value in event.summary.value:
                assert (run, value.tag, event.step) not in results
                results[run, value.tag, event.step] = value.simple_value
    return results


@pytest.mark.parametrize("kept", [0, 2, len(RECORDS)])
def test_resumed_lines_equal_those_of_one_call_to_the_byte(tmp_path, kept):
    write_all(tmp_path / "once", RECORDS)
    write_all(tmp_path / "twice", RECORDS[: kept + 1] + [{"step": 99, "cut": 1}])
    once, twice = (tmp_path / run / "metrics.jsonl" for run in ("once", "twice"))
    twice.write_text(twice.read_text() + '{"step": 3')  # killed in the middle of a record
    # What is kept may be read from the file that is rewritten.
    keep = (json.loads(line) for line in twice.read_text().splitlines()[:kept])
    write_all(tmp_path / "twice", RECORDS[kept:], keep=keep)
    assert once.read_bytes() == twice.read_bytes()
    assert records.read(str(once)) == RECORDS


@needs_tensorboardx
def test_every_record_is_on_disk_before_the_next(tmp_path):
    turns = [r | {"arm": arm} for r in RECORDS[:3] for arm in ("rr", "cd_grab")]
    with records.writing(str(tmp_path), trackers=["tensorboard"]) as write:
        for count, record in enumerate(turns, 1):
            write(record)
            assert records.read(str(tmp_path / "metrics.jsonl")) == turns[:count]
            assert in_tensorboard(tmp_path) == numbers(turns[:count])


@needs_tensorboardx
@pytest.mark.parametrize("kept", (0, 2))
def test_tensorboard_has_what_was_kept_and_what_is_new(tmp_path, kept, monkeypatch):
    write_all(tmp_path, RECORDS[: kept + 1], trackers=["tensorboard"])
    changed = [r | {"train/loss": 7.5} for r in RECORDS[kept:]]
    write_all(tmp_path, changed, keep=RECORDS[:kept], trackers=["tensorboard"])
    assert in_tensorboard(tmp_path) == numbers(RECORDS[:kept] + changed)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    monkeypatch.setattr(processes, "is_first", lambda: False)
    write_all(tmp_path, RECORDS, keep=RECORDS[:1], trackers=["tensorboard"])
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_scalars_and_multiline_text_are_kept_and_what_is_not_finite_is_null(tmp_path):
    results = {"step": np.int64(3), "loss": np.float32(0.5), "at": jnp.float32(0.25)}
    text, lines = {"step": 4, "text": 'a,"b"\nc', "test/loss": jnp.inf, "at": 1e-300}, []
    with records.writing(str(tmp_path), console=lines.append) as write:
        write(results)
        write(text)
    read = records.read(str(tmp_path / "metrics.jsonl"))
    assert read == [{"step": 3, "loss": 0.5, "at": 0.25}, text | {"test/loss": None}]
    assert lines == ["step 3  loss 0.5  at 0.25", "step 4  at 1e-300  test/loss not finite"]


def test_a_tracker_gets_every_number_once_in_one_open_run(tmp_path, monkeypatch):
    given, events = [], []

    def opens(folder, run, run_id, step):
        events.append((run, run_id, step))

        def log(step, result):
            given.extend(((run, name, step), float(np.float32(v))) for name, v in result.items())

        return run_id or len(events), log, lambda: events.append("closed")

    monkeypatch.setitem(trackers.TRACKERS, "fake", opens)
    write_all(tmp_path, RECORDS[:2], trackers=["fake"])
    write_all(tmp_path, RECORDS[2:], keep=RECORDS[:2], trackers=["fake"])
    assert dict(given) == numbers(RECORDS) and len(given) == len(numbers(RECORDS))
    first, other = (records.run_of(RECORDS[i]).name for i in (0, 3))
    assert events[:5:2] == [(first, None, 0), (first, 1, 20), (other, None, 0)]
    assert events[1::2] == ["closed"] * 3
    write_all(tmp_path, RECORDS[:1], trackers=["fake"])
    assert events[6] == (first, None, 0), "a run that begins again is another"


@pytest.mark.filterwarnings("ignore")  # of their own dependencies
@pytest.mark.parametrize("name,left", [("wandb", "wandb/offline-run-*/*"), ("mlflow", "mlflow.db")])
def test_tracker_packages_accept_the_records(tmp_path, monkeypatch, name, left):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[{name}]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_all(tmp_path, RECORDS[:3], trackers=[name])
    write_all(tmp_path, RECORDS[3:], keep=RECORDS[:3], trackers=[name])
    assert list(tmp_path.glob(left))


def test_unknown_and_missing_trackers_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--track has comet: pass some of tensorboard, wandb"):
        write_all(tmp_path, RECORDS, trackers=["comet"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ValueError, match=r"--track=wandb needs .* pip install 'syncopate-jax.wandb.'"
    ):
        write_all(tmp_path, RECORDS, trackers=["wandb"])
    assert not list(tmp_path.iterdir())


def test_versions_name_ours_and_no_commit_of_an_installed_copy(tmp_path, monkeypatch):
    """Whose sources lie in no repository of theirs, even in an environment inside of another."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(
        records, "__file__", str(tmp_path / "venv" / "a" / "results" / "records.py")
    )
    versions = records.versions()
    assert versions["commit"] is None and versions["syncopate"] == syncopate.__version__
