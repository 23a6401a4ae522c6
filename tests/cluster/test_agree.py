"""Processes that differ, or that others wait for, are named, with what they differ in."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from absl import flags

import experiments.study.flags
from experiments.cluster import agree, digest
from tests.commands import ROOT
from tests.two_processes import start_two


class Store:
    """The coordinator's store, among threads."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1e3):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.values[key]


def exchanged(facts, seconds=60.0, count=None):
    """What each of several threads has found."""
    store, count = Store(), count or len(facts)

    def one(number):
        return agree.exchanged(store, number, count, "settings", facts[number], seconds)

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(one, range(len(facts))))


def test_who_differs_or_says_nothing_is_named_on_all_processes(monkeypatch):
    same, other = {"seed": "--seed=0", "order": "--order=rr"}, {"seed": "--seed=1"}
    assert exchanged([same] * 3) == [[]] * 3
    found = exchanged([same, same | other, same | other])
    assert found == [["each of processes 1, 2 has --seed=1 where process 0 has --seed=0"]] * 3
    assert agree.differences([same, other])[1:] == [
        "process 1 has no order where process 0 has --order=rr"
    ]
    found = exchanged([{}, {}], seconds=0.2, count=3)
    assert found == [["process 2 said nothing for 0.2 s: look at that output"]] * 2
    monkeypatch.setattr(agree, "SLACK", 0.1)
    found = agree.exchanged(Store(), 1, 2, "settings", {}, 0.1)
    assert found == ["process 0 has said nothing for 0.2 s: look at its output"]


def facts_of(*arguments):
    values = flags.FlagValues()
    experiments.study.flags.define(values, "task", "setting", "run")
    values(["test", *arguments])
    return agree._flags(values)


def test_flags_that_matter_are_compared_and_those_of_a_process_alone_are_not():
    one = facts_of("--process_id=0", "--coordinator_address=a:1", "--data_dir=/a", "--num_train=8")
    two = facts_of("--process_id=1", "--coordinator_address=b:1", "--data_dir=/b", "--num_train=9")
    assert agree.differences([one, two]) == [
        "process 1 has --num_train=9 where process 0 has --num_train=8"
    ]
    assert {"workers", "learning_rates", "output_dir", "overwrite", "input"} < set(one)
    assert facts_of()["workers"] == "--workers unset"


def test_data_are_told_apart_by_size_and_by_value(monkeypatch):
    x = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    texts = {
        agree.said_of(examples)
        for examples in ({"x": x}, {"x": x[:5]}, {"x": x + np.eye(6, 2, dtype=np.float32)})
    }
    assert len(texts) == 3
    assert agree.said_of({"x": x}) == agree.said_of({"x": x.copy(order="F")})
    x = np.zeros((1000, 3), np.float32)
    monkeypatch.setattr(digest, "WHOLE", 0)  # of large data a sample is compared
    last = x.copy()
    last[-1] = 1
    assert agree.said_of({"x": x}) != agree.said_of({"x": last})
    source, other = ([{"x": np.full(2, i * k)} for i in range(50)] for k in (1, 2))
    assert agree.said_of(source).startswith("of 50 examples, hash")
    assert agree.said_of(source) != agree.said_of(other)
    shapes = {"x": jax.ShapeDtypeStruct((7, 2), np.float32)}
    assert "shape=(7, 2)" in agree.said_of(shapes)


def test_code_is_that_of_all_packages():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*digest.PACKAGES, "tests"}


@pytest.mark.parametrize(
    "places,said",
    [
        ({0: 8, 1: 8, 2: 4}, "Process 2 was last seen after step 4: look at its output."),
        ({0: 8, 1: 8}, "Process 1 was last seen after step 8: look"),  # nobody is behind
        ({0: 8}, "Look at the others' output."),
        (None, "Process 0, where the others are known, does not answer"),
    ],
)
def test_who_has_come_less_far_is_named(places, said):
    told = agree._told(0, "the mean loss", 60, places)
    assert said in told and told.startswith("process 0 has waited 60 s")
    assert "for the mean loss." in told and "a longer --patience" in told
    assert (", after step 8," in told) == (places is not None)
    with agree.for_others("nobody"):  # nothing watches a process alone
        agree.came_to(3)


PROCESS = """
import sys
from absl import app, flags
from experiments import train
if sys.argv[-1] == "--process_id=1":
    sys.argv.append("DIFFERENCE")
train.define_flags(flags.FLAGS)
app.run(lambda argv: train.run(flags.FLAGS))
"""


@pytest.mark.slow
@pytest.mark.parametrize("difference", ["--order=rr", "--num_train=100"])
def test_processes_that_differ_both_leave_and_say_so(tmp_path, capfd, difference):
    """Where shapes or programs differ they would wait for each other without end."""
    (tmp_path / "child.py").write_text(PROCESS.replace("DIFFERENCE", difference))
    run = ["--run=mesh", "--workers=2", "--total_steps=4", f"--output_dir={tmp_path}/out"]
    with (tmp_path / "out0").open("w") as out:
        assert start_two("child", *run, folder=tmp_path, stdout=out) == 1
    lines = capfd.readouterr().err.splitlines()
    for other in (True, False):
        said = "\n".join(x for x in lines if x.startswith("[1]") == other)
        assert f"process 1 has {difference} where process 0 has" in said
    assert not (tmp_path / "out").exists()
