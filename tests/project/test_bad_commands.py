"""Command lines that are wrong, or unusual and right: none ends in a traceback of Python's."""

import functools
import multiprocessing
import os
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from syncopate import command

LIMIT = 300  # seconds of a command; none of these takes more than a few
SIZES = "--num_train=64 --workers=2 --units_per_step=4 --total_steps=6 --evaluations=2"
TINY = f"{SIZES} --warmup_steps=0 --output_dir=new"
PLANNED = "--dry_run --nocompile --task=digits"
STUDY = f"--arms=rr --seeds=1 --learning_rates=0.5 {TINY}"
NUMBERS = "nan text -1"
# {what comes before: {flag: values, each refused by a line that names the flag or the value}}
WRONG = {
    f"train {TINY}": {
        "seed": f"{NUMBERS} 4294967296 18446744073709551616 1e3 ''",
        "learning_rate": f"{NUMBERS} 0 inf 1e400",
        "learning_rates": "a,b 0.1,,0.2 '' 0.1,nan , %s {} 0x10",
        "momentum": f"{NUMBERS} 1 0.99999999999",
        "weight_decay": f"{NUMBERS} inf 1e400",
        "target": "nan inf text", "growth": f"{NUMBERS} 0", "floor": "nan 2",
        "decay_factor": "nan 0", "decay_every": "inf 0",
        "h_base": "0 -3 1.5 ½ 99999999999999999999", "echo_factor": "0 99999999999999999999",
        "workers": "0 -1 99999999999999999999", "unit_size": "0 1000000",
        "units_per_step": "0 1000000", "total_steps": "0 -5 10000000000", "warmup_steps": "-1 6",
        "evaluations": "0", "evaluate_every": "0", "bound_every": "-1", "horizon": "0",
        "num_train": "0 -1 99999999999", "num_test": "0",
        "order": "'' cats qsr cd_grab+ cd_grab+sketch0 cd_grab:k=-3 rr+shifted+documents",
        "sketch": "0 text", "deal": "'' cats", "signs": "cats",
        "sync": "cats qsr:alpha= streaming:fragments=0 parallel+int8 qsr+qsr", "compress": "cats",
        "echo": "diffusion:cosine none+cosine ++", "p": "''",
        "task": "'' cats cifar10 wikitext2 /proc/x %s", "model": "cats", "state": "MD",
        "metric": "cats",
        "average": "cats epoch,,ema ''", "ema_epochs": f"{NUMBERS} 0 inf",
        "optimizer": "cats", "schedule": "cats", "input": "cats", "run": "cats",
        "track": "cats , wandb", "checkpoint_every": "-1 text", "timeout": "0 nan",
        "num_processes": "0 2", "process_id": "-1 0",
        "coordinator_address": "localhost auto ''", "overwrite": "maybe",
        "output_dir": f"file file/new /proc/new /dev/null {'x' * 300}",
    },
    "train --dry_run": {"device_teraflops": "0 nan inf", "gigabits": "nan 0", "width": "8"},
    f"cd_grab {TINY}": {
        "arms": ", cats rr+cats rr+dealt+dealt", "seeds": "0 1e9 text",
        "learning_rates": "0 '' 0.5,x", "output_dir": "file",
    },
    f"qsr {TINY}": {"arms": "streaming:fragments=0 accumulate+int8 '+'", "growth": "0"},
    f"echoing --arms=none {TINY}": {
        "speeds": "0 '' -1 nan x 1e400", "step_seconds": f"{NUMBERS} inf 1e30",
    },
    f"combined {TINY} --dry_run": {
        "order": "rr cats", "echo": "none measured", "baseline": "cats cd_grab ''",
        "load_steps": "nan -1", "sync_steps": "inf", "step_seconds": "-1 nan",
    },
    "forecast --task=digits --step_seconds=1 --output_dir=new": {
        "step_seconds": f"{NUMBERS} 0 1e400", "gigabits": "0 -1 '' a",
        "arms": "cats '' qsr+", "task": "'' cats", "workers": "0", "learning_rates": "'' a",
    },
    "advise --task=digits": {
        "gigabits": "0 '' nan 1e-400", "workers": "0", "task": "cats cifar10",
        "units_per_step": "-1", "num_train": "0",
    },
    "herding --num_vectors=64 --output_dir=new": {
        "workers": "'' 0 2.5 x 100 99999999999999999999", "rounds": "0", "num_vectors": "1e6 0",
        "arms": "cats '' cd_grab+team4", "dimension": "0 x", "units_per_step": "0 2.5",
    },
    "slow_sde --output_dir=new": {
        "workers": "0 ''", "rates": "0 nan '' 1e-9 100 1e-300 x", "repetitions": "1",
    },
    "claims --record=new": {"record": "file /nonexistent m4", "claims": "cats"},
    "launch -- experiments.train": {"processes": "0 -1 x 99999999999999999999"},
}  # fmt: skip
# Lines as a whole, each refused by a line that has this text.
TOGETHER = {
    f"train {TINY} --output_dir=run": "other settings",
    f"train {TINY} leftover": "leftover",
    f"train {TINY} -- --seed=1": "--seed=1",
    f"train {TINY} --cats=3": "cats",
    f"train {TINY} --seed": "seed",
    f"train {TINY} --epochs=3": "epochs",
    f"train {TINY} --order=rr --sketch=4": "sketch",
    f"train {TINY} --sync=qsr --correction=proximal --compress=int8": "correction",
    f"train {TINY} --echo=none --p=cosine": "p",
    f"train {TINY} --run=mesh --workers=9": "9 workers",
    f"train {TINY} --run=turns": "--run",
    f"train {TINY} --flagfile=absent": "absent",
    f"train {TINY} --flagfile=binary": "flags",
    f"train {TINY} --preset=cats": "'cats' is not a preset",
    f"train {TINY} --preset={'x' * 300}": "preset",
    f"train {TINY} --data_dir=file": "--data_dir",
    f"train {TINY} --coordinator_address=a:99999 --num_processes=2 --process_id=1": "99999",
    f"echoing {STUDY} --arms=none --task=digits": "--target",
    "launch": "--processes=2",
    "launch --processes=1 -- experiments.cats": "experiments.cats",
    "cats": "'cats' is not an experiment",
}
# Unusual, and right.
RIGHT = [
    "--help",
    f"train {TINY} --output_dir='a b\"c'",
    f"train {TINY} --num_test=1",
    f"train {TINY} --evaluate_every=2",
    f"train {TINY} --output_dir=übung",
    f"train {TINY} --seed=1 --seed=4294967295",
    f"train {TINY} --total_steps 1",
    f"train {TINY} -seed=3",
    f"train {TINY} --sketch=1",
    f"train {PLANNED} --epochs=1 --workers=1",
    f"train {TINY} --num_processes=1",
    f"cd_grab {STUDY}",
    f"qsr {PLANNED} --arms=qsr+half",
    f"combined {PLANNED}",
    "forecast --task=digits --step_seconds=1 --output_dir=new",
]


def carry_out(words, folder):
    """What a child process does, forked of one that has imported everything."""
    os.chdir(folder)
    for number, name in enumerate(("out", "err"), 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    sys.modules.pop(f"experiments.{words[0]}", None)  # runpy takes it anew
    try:
        command.main(words)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def outcome(context, folder, words):
    """(exit code or None after LIMIT, what it has printed to stderr)."""
    folder.mkdir()
    (folder / "file").write_text("a file\n")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "run").mkdir()
    (folder / "run" / "settings.json").write_text('{"task": "cats"}')
    process = context.Process(target=carry_out, args=(words, folder))
    process.start()
    process.join(LIMIT)
    if process.exitcode is None:
        process.terminate()
    return process.exitcode, (folder / "err").read_text(errors="replace")


def wrong_with(texts, code, expected):
    """What is wrong with an outcome; a refusal has one of the texts, () of what is right."""
    if code is None or code < 0:
        return f"ended by {code}"
    if "Traceback" in expected:
        return "traceback"
    if bool(texts) != bool(code):
        return "refused" if code else "accepted"
    return "" if not texts or any(text in expected for text in texts) else "does not say what of"


@pytest.mark.slow
def test_two_hundred_command_lines_end_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    lines = [
        (shlex.split(f"{begin} --{flag}={shlex.quote(value)}"), [flag, *value.split()])
        for begin, table in WRONG.items()
        for flag, values in table.items()
        for value in shlex.split(values)
    ]
    lines += [(shlex.split(line), [text]) for line, text in TOGETHER.items()]
    lines += [(shlex.split(line), []) for line in RIGHT]
    context = multiprocessing.get_context("forkserver")
    modules = [f"experiments.{name}" for name in command.experiments()]
    context.set_forkserver_preload([__name__, *modules])
    with ThreadPoolExecutor(2) as pool:
        folders = [tmp_path / f"{i}" for i in range(len(lines))]
        words = [line for line, _ in lines]
        ended = [*pool.map(functools.partial(outcome, context), folders, words)]
    results = {}
    for (words, texts), (code, message) in zip(lines, ended, strict=True):
        if why := wrong_with(texts, code, message):
            results.setdefault(why, []).append(f"{why}: {shlex.join(words)}\n{message[-300:]}")
    assert len(lines) >= 200
    print({why: len(those) for why, those in results.items()}, "of", len(lines))
    tracebacks = results.pop("traceback", [])
    assert not results and len(tracebacks) <= 1, "\n".join(sum(results.values(), tracebacks))
