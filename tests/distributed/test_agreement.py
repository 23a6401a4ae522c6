"""Errors name the processes that differ or that others wait for, and the difference."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from absl import flags

import experiments.compare.flags
from experiments import fingerprints
from experiments.distributed import agreement, deadlines
from tests.commands import ROOT


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


def differences(*facts, seconds=60.0, count=None):
    """The differences that each of several threads finds."""
    store, count = Store(), count or len(facts)

    def one(number):
        return agreement.differences(store, number, count, facts[number], seconds)

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(one, range(len(facts))))


def test_processes_that_differ_or_do_not_answer_are_named_on_all():
    same, other = {"seed": "--seed=0", "order": "--order=rr"}, {"seed": "--seed=1"}
    assert differences(same, same, same) == [[]] * 3
    results = ["process 1 has --seed=1 where process 0 has --seed=0"]
    assert differences(same, same | other, same) == [results] * 3
    assert differences(same, other)[0] == [
        "process 1 has no order where process 0 has --order=rr",
        *results,
    ]
    results = differences({}, {}, seconds=0.2, count=3)
    assert results == [["process 2 did not answer within 0.2 s: look at its output"]] * 2


def facts_of(*arguments):
    values = flags.FlagValues()
    experiments.compare.flags.define(values, "task", "setting", "run")
    values(["test", *arguments])
    return fingerprints.facts(values, "")


def test_shared_flags_are_compared_and_per_process_flags_are_not():
    one = facts_of("--process_id=0", "--coordinator_address=a:1", "--data_dir=/a", "--num_train=8")
    two = facts_of("--process_id=1", "--coordinator_address=b:1", "--data_dir=/b", "--num_train=9")
    assert differences(one, two)[1] == [
        "process 1 has --num_train=9 where process 0 has --num_train=8"
    ]
    names = {"workers", "learning_rates", "output_dir", "overwrite", "code", "jax", "python"}
    assert names < set(one)
    assert facts_of()["workers"] == "--workers unset"


def test_large_data_are_compared_by_a_sample(monkeypatch):
    monkeypatch.setattr(fingerprints, "WHOLE", 0)
    x = np.zeros((2000, 3), np.float32)
    last = x.copy()
    last[-1] = 1
    assert fingerprints.set_hash({"x": x}) != fingerprints.set_hash({"x": last})
    assert fingerprints.set_hash({"x": x}) == fingerprints.set_hash({"x": x.copy(order="F")})


def test_the_hash_of_the_code_covers_all_packages():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == {*fingerprints.PACKAGES, "tests", "benchmarks"}  # no run imports these two


@pytest.mark.parametrize(
    "places,expected",
    [
        ({0: 8, 1: 8, 2: 4}, "Last seen: process 2 after step 4: look at its output."),
        ({0: 8, 1: 8}, "Last seen: process 1 after step 8: look"),  # nobody is behind
        ({}, "Last seen: none, as process 0 does not answer"),
    ],
)
def test_processes_that_are_behind_are_named(places, expected):
    text = deadlines.waited(0, "the mean loss", 60, places)
    assert expected in text and text.startswith("process 0 has waited 60 s for the mean loss.")
    assert "a longer --timeout" in text
    with deadlines.for_others("nobody"):  # nothing watches a process alone
        deadlines.came_to(3)
