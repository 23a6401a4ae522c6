"""The one dialect of flags: from a command line to a task, its recipe and a folder's settings."""

import typing

import jax
import numpy as np
import pytest
from absl import flags as absl_flags

from experiments import cd_grab, combined, echoing, qsr, train
from experiments.study import flags, recipes, study
from experiments.tasks import TASKS, Recipe, base
from experiments.tasks.base import check_recipe
from experiments.training import measure
from experiments.training.config import sizes_of, total_steps_of

STUDIES = (cd_grab, qsr, echoing, combined)


def parsed(*arguments, of=cd_grab):
    values = absl_flags.FlagValues()
    study.define_flags(of.STUDY, values)
    values(["experiment", *arguments])
    return values


def setting(*arguments):
    return flags.setting_from_flags(parsed("--dry_run", *arguments))


def test_every_field_of_a_recipe_is_a_flag():
    hints = typing.get_type_hints(Recipe)
    values = parsed()
    for name in Recipe._fields:
        assert values[name].value is None, "the setting's own"
        assert isinstance(values[name].parser, absl_flags.IntegerParser) == (
            flags._kind(hints[name]) is int
        )


def test_flags_replace_fields_of_the_setting():
    task, recipe = setting("--epochs=7", "--learning_rates=0.5,1", "--workers=3", "--h_base=9")
    own = TASKS["digits"](abstract=True).recipe
    assert recipe == own._replace(epochs=7, learning_rates=(0.5, 1.0), workers=3, h_base=9)
    assert task.train["x"].shape == (1536, 64)


def test_of_two_lengths_and_two_intervals_the_given_one_counts():
    assert setting("--task=digits_mlp")[1].total_steps == 2000
    recipe = setting("--task=digits_mlp", "--epochs=3", "--evaluate_every=5")[1]
    assert (recipe.epochs, recipe.total_steps) == (3, None)
    assert (recipe.evaluate_every, recipe.evaluations) == (5, None)
    recipe = setting("--total_steps=5", "--evaluations=2")[1]
    assert (recipe.epochs, recipe.total_steps) == (None, 5)


def test_choices_of_a_task_are_flags():
    task, _ = setting("--task=digits_mlp", "--num_train=300", "--width=5")
    assert task.train["x"].shape == (300, 64)
    with pytest.raises(ValueError, match="--state is MD: digits has no such choice. It has model"):
        setting("--state=MD")
    assert setting("--task=tinyshakespeare", "--length=16")[0].train["x"].shape[1] == 16
    found = flags.choices()
    assert found["state"] == (str, ["hmda"]) and found["augment"] == (bool, ["imagenet2012"])
    assert "abstract" not in found and "data_dir" not in found


def test_a_strangers_task_has_its_choices_as_flags(monkeypatch):
    def load(data_dir=None, model="m", *, sharpness=0.5, kinds: int | None = None, abstract=False):
        task = TASKS["digits"](abstract=True)
        return task._replace(name=f"{sharpness} {kinds}")

    monkeypatch.setitem(TASKS, "strange", load)
    assert setting("--task=strange", "--sharpness=2", "--kinds=3")[0].name == "2.0 3"

    def other(data_dir=None, *, sharpness: str = "a"):
        pass

    monkeypatch.setitem(TASKS, "stranger", other)
    with pytest.raises(ValueError, match="sharpness of stranger is a str"):
        parsed()


def test_the_first_examples_alone():
    task, _ = setting("--task=hmda", "--num_train=100", "--num_test=10")
    assert task.train["x"].shape == (100, 20) and task.test["y"].shape == (10,)
    digits = TASKS["digits"]()
    assert base.with_first(digits).train is digits.train
    few = base.with_first(digits, num_train=100)
    assert (few.train["y"] == digits.train["y"][:100]).all() and few.test is digits.test
    assert few.optimum is None, "that of all examples is another"
    with pytest.raises(ValueError, match="num_test is 0"):
        base.with_first(digits, num_test=0)


def test_settings_are_what_the_runs_of_a_folder_share():
    values = parsed("--task=digits_mlp", "--width=5", "--learning_rates=1", "--dry_run", of=echoing)
    shared = flags.settings(values, flags.setting_from_flags(values)[1])
    assert (shared["task"], shared["width"], shared["workers"]) == ("digits_mlp", 5, 4)
    assert shared["step_seconds"] is None and shared["input"] == "device"
    assert not {"learning_rates", "seeds", "arms", "data_dir", "output_dir"} & set(shared)


REFUSED = {
    "--task=cats": "--task is cats: choose one of digits_cosine",
    **{
        f"--{name}={value}": f"{name} is {value}"
        for name, value in [
            ("momentum", 1), ("decay_every", 0), ("decay_every", "inf"), ("floor", -1),
            ("floor", "nan"), ("growth", "inf"), ("echo_factor", 0), ("horizon", 0),
            ("evaluations", 0), ("evaluate_every", 0),
        ]
    },
    **{
        f"--learning_rates={rate}": r"a learning rate is .*: it must be positive and finite"
        for rate in ("nan", "inf", "0", "3.5e38")  # which no step can take
    },
}  # fmt: skip


@pytest.mark.parametrize("bad", REFUSED)
def test_settings_that_cannot_run(bad):
    with pytest.raises(ValueError, match=REFUSED[bad]):
        setting(bad)


def test_more_evaluations_than_steps_are_all_steps():
    _, recipe = setting("--total_steps=3", "--evaluations=1000000000000")
    assert measure.evaluation_steps(recipe, None, 3) == [1, 2, 3]


def test_defaults_need_no_data():
    """A command without flags runs on embedded data."""
    for module in STUDIES:
        values = absl_flags.FlagValues()
        study.define_flags(module.STUDY, values)
        values(["experiment"])
        assert recipes.setting_of(values.task).task == "digits"
    values = absl_flags.FlagValues()
    train.define_flags(values)
    values(["experiment"])
    assert recipes.setting_of(values.task).task == "digits"


@pytest.mark.parametrize("name", ["digits_mlp", "digits_wide", "digits_cosine", "shakespeare_race"])
def test_settings_load_and_can_run(name):
    task, recipe = recipes.load(name, abstract=True)
    check_recipe(recipe)
    assert total_steps_of(recipe, sizes_of(task, recipe, deals="examples")) >= 500
    assert task.name == recipes.RECIPES[name].task


def test_settings_name_tasks_and_choices_that_exist():
    for name, row in recipes.RECIPES.items():
        known = {*recipes.choices_of(TASKS[row.task]), *recipes.EVERYWHERE}
        assert set(row.choices) <= known, name
        if not isinstance(row.recipe, Recipe):
            assert set(row.recipe) <= set(Recipe._fields), name
    assert not set(recipes.RECIPES) & set(TASKS)


def test_digits_is_embedded():
    task = TASKS["digits"]()
    assert task.train["x"].shape == (1536, 64) and task.test["y"].shape == (261,)
    assert task.optimum and not TASKS["digits"](model="mlp").optimum
    params = TASKS["digits"](model="mlp", width=8, depth=2).model.init(jax.random.key(0))
    assert sum(np.size(p) for p in jax.tree.leaves(params)) == 65 * 8 + 9 * 8 + 90
    with pytest.raises(ValueError, match="model is 'lenet'"):
        TASKS["digits"](model="lenet")
    with pytest.raises(ValueError, match="num_train is 1797"):
        TASKS["digits"](num_train=1797)
