"""The scripts of docs/launching are valid, and what they start has the flags that they give."""

import pathlib
import re
import shlex
import subprocess

import pytest
from absl import flags

from experiments import launch, train
from experiments.processes import heartbeat

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "launching.md").read_text()
SCRIPTS = ("train.sbatch", "tpu_pod.sh")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_valid_and_starts_a_run_with_flags_that_exist(name):
    path = DOCS / "launching" / name
    subprocess.run(["bash", "-n", path], check=True)
    found = re.search(r"experiments\.train ([^\n]*--output_dir=[^\s&]+)", path.read_text())[1]
    values = flags.FlagValues()
    train.define_flags(values)
    assert values(["train", *shlex.split(found.rstrip('"') if '="' not in found else found)])
    assert (values.run, values.checkpoint_every) == ("mesh", 500)
    assert f"launching/{name}" in PAGE


def test_the_command_of_the_page_has_flags_that_exist():
    before, _, after = re.search(r"experiments\.launch (.*?)\n```", PAGE, re.S)[1].partition(" -- ")
    values = flags.FlagValues()
    launch.define_flags(values)
    values(["launch", *before.split()])
    assert (values.processes, values.restarts, values.min_processes) == (2, 3, 1)
    values = flags.FlagValues()
    train.define_flags(values)
    assert values(["train", *after.replace("\\", "").split()[1:]])


def test_signs_of_life_are_where_the_scripts_look():
    assert heartbeat.FOLDER in (DOCS / "launching" / "train.sbatch").read_text()
    assert heartbeat.FOLDER in PAGE
