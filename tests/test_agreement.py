"""Processes that were started differently say so, all of them, before anything is trained."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from absl import flags

import experiments.flags
from experiments.processes import agreement
from experiments.tasks import digest
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
        return agreement.exchanged(store, number, count, "settings", facts[number], seconds)

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(one, range(len(facts))))


def test_who_differs_is_named_with_what_on_all_processes():
    same, other = {"seed": "--seed=0", "order": "--order=rr"}, {"seed": "--seed=1"}
    assert exchanged([same] * 3) == [[]] * 3
    found = exchanged([same, same, same | other])
    assert found == [["process 2 has --seed=1 where process 0 has --seed=0"]] * 3
    found = exchanged([same, same | other, same | other])[0]
    assert found == ["each of processes 1, 2 has --seed=1 where process 0 has --seed=0"]
    assert agreement.differences([same, other])[1:] == [
        "process 1 has no order where process 0 has --order=rr"
    ]


def test_a_process_that_says_nothing_is_named():
    found = exchanged([{}, {}], seconds=0.2, count=3)
    assert found == [["process 2 said nothing for 0.2 s: look at that output"]] * 2


def test_a_silent_process_0_is_named(monkeypatch):
    monkeypatch.setattr(agreement, "SLACK", 0.1)
    found = agreement.exchanged(Store(), 1, 2, "settings", {}, 0.1)
    assert found == ["process 0 has said nothing for 0.2 s: look at its output"]


def facts_of(*arguments):
    values = flags.FlagValues()
    experiments.flags.define(values, "task", "setting", "run")
    values(["test", *arguments])
    return agreement._flags(values)


def test_flags_that_matter_are_compared_and_those_of_a_process_alone_are_not():
    one = facts_of("--process_id=0", "--coordinator_address=a:1", "--data_dir=/a", "--num_train=8")
    two = facts_of("--process_id=1", "--coordinator_address=b:1", "--data_dir=/b", "--num_train=9")
    assert agreement.differences([one, two]) == [
        "process 1 has --num_train=9 where process 0 has --num_train=8"
    ]
    assert {"workers", "learning_rates", "output_dir", "overwrite", "input"} < set(one)
    assert facts_of()["workers"] == "--workers unset"


def test_data_are_told_apart_by_size_and_by_value():
    x = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    texts = {
        agreement.said_of(examples)
        for examples in ({"x": x}, {"x": x[:5]}, {"x": x + np.eye(6, 2, dtype=np.float32)})
    }
    assert len(texts) == 3
    assert agreement.said_of({"x": x}) == agreement.said_of({"x": x.copy(order="F")})


def test_of_large_data_a_sample_is_compared_and_of_a_source_what_it_reads(monkeypatch):
    x = np.zeros((1000, 3), np.float32)
    monkeypatch.setattr(digest, "WHOLE", 0)
    last = x.copy()
    last[-1] = 1
    assert agreement.said_of({"x": x}) != agreement.said_of({"x": last})
    source, other = ([{"x": np.full(2, i * k)} for i in range(50)] for k in (1, 2))
    assert agreement.said_of(source).startswith("of 50 examples, hash")
    assert agreement.said_of(source) != agreement.said_of(other)
    shapes = {"x": jax.ShapeDtypeStruct((7, 2), np.float32)}
    assert agreement.said_of(shapes).startswith("of 7 examples (x float32[7, 2])")


PROCESS = """
import sys
from absl import app, flags
from experiments import train
last = sys.argv[-1] == "--process_id=1"
extra = [a.removeprefix("--of_1") for a in sys.argv if a.startswith("--of_1")]
sys.argv = [a for a in sys.argv if not a.startswith("--of_1")]
if last:
    sys.argv += extra
    if "--other_data" in extra:
        sys.argv.remove("--other_data")
        from experiments.tasks import base
        from experiments.studies import recipes
        whole = recipes.load
        def load(*given, **more):
            task, recipe = whole(*given, **more)
            return task._replace(train=base.first_of(task.train, 1000)), recipe
        recipes.load = load
train.define_flags(flags.FLAGS)
app.run(lambda argv: train.run(flags.FLAGS))
"""


def started(tmp_path, capfd, difference):
    """(exit code, what process 0 and process 1 have said)."""
    (tmp_path / "child.py").write_text(PROCESS)
    run = ["--run=mesh", "--workers=2", "--total_steps=4", f"--output_dir={tmp_path}/out"]
    with (tmp_path / "out0").open("w") as out:
        code = start_two("child", *run, f"--of_1{difference}", folder=tmp_path, stdout=out)
    lines = capfd.readouterr().err.splitlines()
    return code, *("\n".join(x for x in lines if x.startswith("[1]") == own) for own in (0, 1))


def test_two_processes_with_other_seeds_both_leave_and_say_so(tmp_path, capfd):
    code, first, second = started(tmp_path, capfd, "--seed=1")
    message = "process 1 has --seed=1 where process 0 has --seed=0. They would train"
    assert code == 1 and message in first and message in second
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("difference", ["--order=rr", "--num_train=100", "--other_data"])
def test_differences_that_would_hang_end_both_processes(tmp_path, capfd, difference):
    code, first, second = started(tmp_path, capfd, difference)
    message = "process 1 has train data of 1000" if "other" in difference else difference
    assert code == 1 and message in first and message in second
