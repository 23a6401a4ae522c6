"""What a run compiles and imports, and what the first command does and does not do twice."""

import json
import signal
import subprocess
import sys

import pytest

from experiments import cd_grab
from experiments.compare import flags, recipes, runs, search
from experiments.report.records import Run
from experiments.trainer import measure, train
from tests import commands, little_run
from tests.compiled_runs import compilations
from tests.sources import Examples

# What the run has compiled so far is counted when the host first looks at it, and at its end.
COUNTED = """
import json, sys
from absl import flags
from experiments import train
from experiments.trainer import train as loop
from tests.compiled_runs import compilations

first, modules, whole = [], [], loop.train

def counted(program, plans, state, at, hooks):
    def look(step):
        first.append(list(compiled))
        hooks.on_step(step)
    ended = whole(program, plans, state, at, hooks._replace(on_step=look))
    modules.extend(sys.modules)  # before the report, which draws
    return ended

loop.train = counted
train.define_flags(flags.FLAGS)
flags.FLAGS(["train", *sys.argv[1:]])
with compilations() as compiled:
    train.run(flags.FLAGS)
facts = {"first": first[0], "all": compiled, "modules": modules}
print(json.dumps(facts))
"""
UNUSED = {
    "datasets",
    "grain",
    "IPython.terminal",
    "matplotlib",
    "pandas",
    "sklearn",
    "tensorflow",
    "tensorflow_datasets",
    "torch",
    "transformers",
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A run with the default flags of `experiments.train`, but for its length."""
    folder = tmp_path_factory.mktemp("start")
    flags = [f"--output_dir={folder}", "--total_steps=48", "--evaluations=2"]
    command = [sys.executable, "-c", COUNTED, *flags]
    options = {"capture_output": True, "text": True, "timeout": 300, "check": True}
    done = subprocess.run(command, cwd=commands.ROOT, env=commands.environment(), **options)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_compiles_few_programs_and_each_once(started):
    # The schedule's 7 operations, parameters, two of the check of units, the start, the reset of
    # stats, and 3 of the loop: steps, sync and epoch's end. Of evaluations one, the workers' mean,
    # and two of the optimum.
    assert len(started["first"]) <= 19, " ".join(started["first"])
    assert started["all"] == started["first"]


def test_a_run_imports_nothing_that_it_does_not_use(started):
    assert not UNUSED & set(started["modules"])


@pytest.mark.parametrize("order,sync,mesh", [("cd_grab", "qsr", True), ("rr", "parallel", False)])
def test_nothing_is_compiled_after_the_start(order, sync, mesh, monkeypatch):
    warm_up = train.warm_up

    def warmed_up(*given):
        start = warm_up(*given)
        compiled.clear()
        return start

    monkeypatch.setattr(train, "warm_up", warmed_up)
    program, setting = little_run.built(order, sync, mesh=mesh), little_run.SETTING
    task = little_run.task()
    if mesh:  # read, in chunks of two sizes
        monkeypatch.setattr(measure, "CHUNK", 30)
        task = task._replace(train=Examples(task.train))
    scalars = measure.scalars_of(task, setting._replace(bound_every=3))(program)
    with compilations() as compiled:
        records = little_run.trained(program, little_run.plans_of(sync), scalars=scalars)[1]
    assert not compiled and {"train/loss", "test/accuracy", "bound/l2"} <= records[-1].keys()


# The first command of the README: a short table by default, and what it does not do twice.

FIRST = 3 * 3 * 3  # orders, learning rates and seeds
LONG = 5 * 5 * 5


def asked(*arguments):
    """(the study, its runs) of a command."""
    values = commands.parsed(cd_grab, *arguments)
    cd_grab.STUDY.default(values)
    _, recipe = flags.setting_from_flags(values)
    chosen = cd_grab.STUDY.fit(cd_grab.STUDY, None, recipe, values)
    arms = values.arms or chosen.arms
    return chosen, len(arms) * search.planned(
        len(recipe.learning_rates), values.seeds, chosen.finalists, None
    )


@pytest.mark.parametrize(
    "arguments,runs",
    [
        ([], FIRST),
        (["--long"], LONG),
        (["--seeds=4", "--arms=rr,id_mean"], 2 * 5 * 4),
        (["--learning_rates=0.5"], 5 * 5),
        (["--long", "--seeds=1", "--arms=rr"], 5),
        (["--task=digits_cosine", "--seeds=1"], 5 * 5),
    ],
)
def test_the_comparison_is_short_only_where_no_flag_says_what_is_compared(arguments, runs):
    assert asked(*arguments)[1] == runs


@pytest.mark.parametrize(
    "given,arms",
    [
        ("cd_grab", ["rr", "cd_grab"]),
        ("cd_grab+sketch4", ["rr", "cd_grab+sketch4"]),
        ("rr", ["rr"]),
        ("id_pair,cd_grab", ["id_pair", "cd_grab"]),
    ],
)
def test_one_arm_is_compared_with_the_baseline(given, arms, tmp_path, monkeypatch):
    run = []

    def stopped(study, *args, **options):
        run.append([*study.arms])
        return [], signal.SIGTERM

    monkeypatch.setattr(search, "search", stopped)
    with pytest.raises(SystemExit):
        commands.study_run(cd_grab, [f"--arms={given}", "--seeds=1"], tmp_path)
    assert run == [arms]


def test_the_first_table_has_six_columns_and_the_long_one_all():
    assert len(asked()[0].columns) <= 6
    assert asked("--long")[0].columns == cd_grab.COLUMNS


def test_the_short_table_is_a_part_of_the_long_one():
    assert set(cd_grab.SHORT["arms"]) <= set(cd_grab.STUDY.arms)
    rates = recipes.load("digits")[1].learning_rates
    assert set(map(float, cd_grab.SHORT["learning_rates"])) < set(rates)


def test_programs_are_compiled_before_the_runs_and_bounds_once_for_all_orders(monkeypatch):
    task, recipe = recipes.load("digits", num_train=64, num_test=32)
    recipe = recipe._replace(workers=2, units_per_step=4, epochs=2, bound_every=1)
    bounds, made, records = measure.order_bounds, [], []
    monkeypatch.setattr(
        measure, "order_bounds", lambda *a, **k: made.append(bounds(*a, **k)) or made[-1]
    )
    trains = runs.Trainer(cd_grab.STUDY, task, recipe)
    arms = ("rr", "id_pair", "cd_grab")
    trains.prepare((arm, None) for arm in arms)
    with compilations() as compiled:
        for arm in arms:
            for seed in range(2):
                trains.train(Run(arm, None, 0.1, seed, "run"), [], records.append)
    assert not compiled and len(made) == 1 and made[0]._cache_size() == 1
    assert all("bound/linf" in record for record in records)
