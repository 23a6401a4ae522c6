"""The flags of commands, and their runs: in this process, and as processes that signals reach."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from unittest import mock

import numpy as np
from absl import flags as absl_flags

from experiments import train
from experiments.compare import commands, study
from experiments.report import plots
from tests.cases import FAST_XLA

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = [  # few examples, for two workers
    "--num_train=96",
    "--num_test=200",
    "--workers=2",
    "--units_per_step=4",
    "--unit_size=1",
    "--checkpoint_every=0",
]
LENGTH = ["--total_steps=24", "--evaluations=4", "--warmup_steps=2", "--h_base=2"]
SMALL = [*DATA, "--seeds=2", "--learning_rates=0.1,0.4"]  # of every study
SHORT = [*DATA, *LENGTH, "--learning_rate=0.2", "--order=rr"]  # of a run
SAVED = [*SHORT, "--checkpoint_every=7"]
RUN = [
    "experiments.train",
    "--order=cd_grab",
    "--sync=qsr",
    "--echo=diffusion+cosine",
    "--total_steps=6000",
    "--evaluations=12",
    "--checkpoint_every=150",
    "--units_per_step=3",
]
TWO_DEVICES = ["--workers=2", "--run=mesh"]
LAUNCH_TWO = ["experiments.launch", "--processes=2", "--"]


def start_two(module, *arguments, folder=ROOT, **options):
    """The exit code of two processes that run a module of the tests, or one of `folder`."""
    environ = environment() | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", *LAUNCH_TWO, module, *arguments]
    return subprocess.call(command, env=environ, cwd=folder, **options)


def flags_of(module):
    """All flags of a command, unparsed."""
    values = absl_flags.FlagValues()
    if hasattr(module, "STUDY"):
        study.define_flags(module.STUDY, values)
    else:
        module.define_flags(values)
    return values


def parsed(module, *arguments):
    """The flags of a command."""
    values = flags_of(module)
    rest = values([module.__name__, *arguments])
    assert len(rest) == 1, "every argument is a flag"
    return values


def study_run(module, arguments, folder, *, draw=False):
    """What `study.main` does, in flags of its own."""
    with contextlib.nullcontext() if draw else undrawn():
        commands.run_study(module.STUDY, parsed(module, *arguments, f"--output_dir={folder}"))


def train_run(arguments, folder, *, draw=False):
    with contextlib.nullcontext() if draw else undrawn():
        train.run(parsed(train, *arguments, f"--output_dir={folder}"))


def undrawn():
    """A report without the picture of its curves, which takes half of the time of a short run."""
    return mock.patch.object(plots, "comparison")


def environment(devices=1):
    xla = f"--xla_force_host_platform_device_count={devices} {FAST_XLA}"
    inherited = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    return inherited | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla, "PYTHONPATH": str(ROOT)}


def start(command, folder, devices=1, *, again=False, stdout=subprocess.PIPE):
    """A process that runs a module of ours; again: in the loop of docs/use/clusters.md."""
    command = [sys.executable, "-m", *command, f"--output_dir={folder}"]
    if again:
        page = (ROOT / "docs" / "use" / "clusters.md").read_text()
        loop = re.search(r"^until COMMAND\n.*?^done\n", page, re.M | re.S)[0]
        command = [
            "bash",
            "-c",
            loop.replace("COMMAND", '"$@"').replace("10", "0.2"),
            *command[:1],
            *command,
        ]
    options = {"stdout": stdout, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment(devices), **options)


def children(pid):
    """The processes that one has started, in their order; of Linux."""
    path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    return [int(n) for n in path.read_text().split()] if path.exists() else []


def finish(command, folder, devices=1):
    process = start(command, folder, devices)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def wait_for_checkpoint(process, folder):
    """Waits for the first that is whole: those that are being written have another name."""
    until, result = time.monotonic() + 200, folder / "checkpoints"
    while not (result.exists() and any(path.name.isdigit() for path in result.iterdir())):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)


def stop_in_the_middle(command, folder, number, devices=1):
    """Sends a signal after the first checkpoint; (exit status, output)."""
    process = start(command, folder, devices)
    wait_for_checkpoint(process, folder)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def rows_of(text):
    """{head: cell} of every row of the Markdown table in a text."""
    lines = [[c.strip() for c in x.strip("|").split("|")] for x in text.split("\n") if "|" in x]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k != "seconds"} for x in lines]


def ended(folder):
    """What a run has found: its records without seconds, and its model if it writes one."""
    import orbax.checkpoint as ocp

    lines = sorted(json.dumps(r, sort_keys=True) for r in records(folder))
    if not (folder / "model").exists():
        assert (folder / "table.md").exists() and not list((folder / "checkpoints").glob("*"))
        return lines, None
    with ocp.StandardCheckpointer() as checkpointer:
        model = checkpointer.restore(os.path.abspath(folder / "model"))
    return lines, {name: np.asarray(leaf).tobytes() for name, leaf in model.items()}
