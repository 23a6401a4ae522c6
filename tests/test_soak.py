"""What grows while a run trains: nothing by saves; and the tool that looks for an hour.

pytest -m slow -n 0 tests/test_soak.py      # a minute
"""

import collections
import gc
import os

import pytest
from absl import flags as absl_flags

from experiments import soak
from experiments.results import records
from experiments.training import run
from tests.little_run import built, plans_of, trained


def held():
    """Objects that Python knows of, by their type."""
    gc.collect()
    return collections.Counter(type(found) for found in gc.get_objects())


def test_saves_leave_nothing_behind(tmp_path):
    """TensorStore keeps a list of every metric that it was asked for."""

    def saves(name, every):
        trained(built(), plans_of(), saving=run.Saving(str(tmp_path / name), every=every))
        return held()[list]

    saves("first", 2)
    few = saves("few", 30)
    assert saves("many", 2) - few < 28, "a list each of 28 more saves would be a leak"


def test_a_sample_is_of_this_process():
    before = soak.sample()
    with open(os.devnull):
        during = soak.sample()
    assert during["files"] == before["files"] + 1
    assert during["threads"] >= 1 and during["rss"] > 50


@pytest.mark.slow
def test_a_soak_stops_goes_on_and_is_drawn(tmp_path):
    values = absl_flags.FlagValues()
    soak.define_flags(values)
    values([
        "soak", "--minutes=0.5", "--every=0.5", "--stop_after=8", "--total_steps=4000",
        "--checkpoint_every=50", f"--output_dir={tmp_path}",
    ])  # fmt: skip
    seen = soak.soak(values)
    samples = records.read(str(tmp_path / soak.SAMPLES))
    assert seen["runs"] >= 1 and len(samples) > 10
    soak.picture(samples, str(tmp_path / soak.PICTURE))
    assert (tmp_path / soak.PICTURE).stat().st_size > 10_000
