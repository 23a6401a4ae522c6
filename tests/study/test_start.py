"""What a run of digits compiles and imports before its first steps, and until its end."""

import json
import subprocess
import sys

import pytest

from experiments.study.arms import ORDERS
from experiments.training import loop, measure
from tests import commands, little_run
from tests.compiled_runs import compilations
from tests.sources import Examples

# What the run has compiled so far is counted when the host first looks at it, and at its end.
COUNTED = """
import json, sys
from absl import flags
from experiments import train
from experiments.training import loop
from tests.compiled_runs import compilations

first, run = [], loop.run

def counted(program, plans, state, at, hook, **options):
    def look(*given):
        first.append(list(compiled))
        return hook(*given)
    return run(program, plans, state, at, look, **options)

loop.run = counted
train.define_flags(flags.FLAGS)
flags.FLAGS(["train", *sys.argv[1:]])
with compilations() as compiled:
    train.run(flags.FLAGS)
found = {"first": first[0], "all": compiled, "modules": list(sys.modules)}
print(json.dumps(found))
"""
UNUSED = {"datasets", "grain", "IPython.terminal", "matplotlib", "pandas", "sklearn", "tensorflow",
          "tensorflow_datasets", "torch", "transformers"}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A run with the default flags of `experiments.train`, but for its length."""
    folder = tmp_path_factory.mktemp("start")
    flags = [f"--output_dir={folder}", "--total_steps=48", "--evaluations=2"]
    command = [sys.executable, "-c", COUNTED, *flags]
    options = {"capture_output": True, "text": True, "timeout": 300, "check": True}
    done = subprocess.run(command, cwd=commands.ROOT, env=commands.environment(), **options)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_compiles_few_programs_and_each_once(found):
    # The schedule's 7 operations, parameters, two of the check of units, the start, the reset of
    # stats, and 3 of the loop: steps, sync and epoch's end. Of evaluations one, the workers' mean,
    # and two of the optimum.
    assert len(found["first"]) <= 19, " ".join(found["first"])
    assert found["all"] == found["first"]


def test_a_run_imports_nothing_that_it_does_not_use(found):
    assert not UNUSED & set(found["modules"])


@pytest.mark.parametrize("order,sync,mesh", [("cd_grab", "qsr", True), ("rr", "parallel", False)])
def test_nothing_is_compiled_after_the_start(order, sync, mesh, monkeypatch):
    warm_up = loop.warm_up

    def warmed_up(*given):
        start = warm_up(*given)
        compiled.clear()
        return start

    monkeypatch.setattr(loop, "warm_up", warmed_up)
    program, setting = little_run.built(order, sync, mesh=mesh), little_run.SETTING
    task = little_run.task()
    if mesh:  # read, in chunks of two sizes
        monkeypatch.setattr(measure, "CHUNK", 30)
        task = task._replace(train=Examples(task.train))
    scalars = measure.scalars_of(task, setting._replace(bound_every=3))(program, ORDERS[order])
    with compilations() as compiled:
        records = little_run.trained(program, little_run.plans_of(sync), scalars=scalars)[1]
    assert not compiled and {"train/loss", "test/accuracy", "bound/l2"} <= records[-1].keys()
