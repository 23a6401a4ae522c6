"""Flags: from a command line to a task, its recipe, and a folder's settings."""

import importlib
import sys

import pytest
from absl import flags as absl_flags

from experiments import cd_grab, combined, echoing, qsr, train
from experiments.study import flags, recipes
from experiments.tasks import TASKS, Recipe, base
from experiments.tasks.base import check_recipe
from experiments.training import optimizers
from experiments.training.averages import AVERAGES
from experiments.training.config import num_params, sizes_of, total_steps_of
from local_opt import resize
from syncopate import command
from tests.commands import flags_of, parsed
from tests.refused import refuses


def setting(*arguments):
    return flags.setting_from_flags(parsed(cd_grab, "--dry_run", *arguments))


def test_every_field_of_a_recipe_is_a_flag_with_help():
    values = parsed(train)
    for name in set(Recipe._fields) - {"evaluations"}:
        assert values[name].value is None and values[name].help
    kinds = {"workers": int, "h_base": int, "growth": float, "horizon": int, "target": float}
    for name, kind in kinds.items():
        assert values[name].flag_type() == kind.__name__
    shown = {flag.name for flag in values.get_key_flags_for_module(sys.argv[0])}
    assert shown == set(values)
    assert {"order", "workers", "track", "coordinator_address"} < shown


@pytest.mark.parametrize("words,table", [
    (base.FIELDS["optimizer"][2], optimizers.OPTIMIZERS),
    (base.FIELDS["schedule"][2], optimizers.SCHEDULES), (base.FIELDS["average"][2], AVERAGES),
    (train.POLICIES, resize.POLICIES),
])  # fmt: skip
def test_the_words_that_flags_take_are_those_of_the_tables(words, table):
    assert [*words] == [*table]


@pytest.mark.parametrize("given,told", [
    ([], {"workers": 32, "schedule": "cosine", "learning_rate": 0.25, "model": "softmax"}),
    (["--task=digits_wide"], {"target": 0.96, "width": 512, "total_steps": 500, "epochs": None}),
    (["--task=hmda"], {"model": "logistic", "state": "NJ"}),
])  # fmt: skip
def test_help_knows_what_the_setting_gives_where_a_flag_is_unset(given, told):
    known = flags.defaults(parsed(train, *given))
    assert {name: known[name] for name in told} == told


def test_flags_replace_fields_of_the_setting():
    task, recipe = setting("--epochs=7", "--learning_rates=0.5,1", "--workers=3", "--h_base=9")
    own = TASKS["digits"](abstract=True).recipe
    assert recipe == own._replace(epochs=7, learning_rates=(0.5, 1.0), workers=3, h_base=9)
    assert task.train["x"].shape == (1536, 64)
    # Of two lengths and two intervals the given one counts.
    assert setting("--task=digits_mlp")[1].total_steps == 2000
    recipe = setting("--task=digits_mlp", "--epochs=3", "--evaluate_every=5")[1]
    assert (recipe.epochs, recipe.total_steps) == (3, None)
    assert (recipe.evaluate_every, recipe.evaluations) == (5, None)
    recipe = setting("--total_steps=5", "--evaluations=2")[1]
    assert (recipe.epochs, recipe.total_steps) == (None, 5)


def test_choices_of_a_task_are_flags(monkeypatch):
    task, _ = setting("--task=digits_mlp", "--num_train=300", "--width=5")
    assert task.train["x"].shape == (300, 64)
    assert setting("--task=tinyshakespeare", "--length=16")[0].train["x"].shape[1] == 16
    found = flags.choices()
    assert {name: (found[name][0].kind, found[name][1]) for name in ("state", "augment")} == {
        "state": (str, ["hmda"]), "augment": (bool, ["imagenet2012"]),
    }  # fmt: skip
    assert "abstract" not in found and "data_dir" not in found

    def load(data_dir=None, model="m", *, sharpness=0.5, kinds: int | None = None, abstract=False):
        task = TASKS["digits"](abstract=True)
        return task._replace(name=f"{sharpness} {kinds}")

    monkeypatch.setitem(TASKS, "strange", load)
    assert setting("--task=strange", "--sharpness=2", "--kinds=3")[0].name == "2.0 3"


def test_the_first_examples_alone():
    task, _ = setting("--task=hmda", "--num_train=100", "--num_test=10")
    assert task.train["x"].shape == (100, 20) and task.test["y"].shape == (10,)
    digits = TASKS["digits"]()
    assert base.with_first(digits).train is digits.train
    few = base.with_first(digits, num_train=100)
    assert (few.train["y"] == digits.train["y"][:100]).all() and few.test is digits.test
    assert few.optimum is None, "that of all examples is another"


def test_settings_hold_what_the_runs_of_a_folder_share():
    values = parsed(echoing, "--task=digits_mlp", "--width=5", "--learning_rates=1", "--dry_run")
    shared = flags.settings(values, flags.setting_from_flags(values)[1])
    assert (shared["task"], shared["width"], shared["workers"]) == ("digits_mlp", 5, 4)
    assert shared["step_seconds"] is None and shared["input"] == "device"
    assert not {"learning_rates", "seeds", "arms", "data_dir", "output_dir"} & set(shared)


test_settings_that_cannot_run = refuses({
    " ".join(given): (lambda given=given: setting(*given), message)
    for message, *given in [
        ("--task is cats: choose one of digits_cosine", "--task=cats"),
        ("wikitext2_small. Did you mean digits_mlp or", "--task=digit_mlp"),
        ("--state is MD: digits has no such choice. It has model", "--state=MD"),
        ("--width is 7: of digits only --model=mlp has it, and the model is soft", "--width=7"),
        ("--width is 7: of mnist", "--width=7", "--task=mnist", "--model=lenet"),
        ("--data_dir is /x: digits come with scikit-learn. Leave it out", "--data_dir=/x"),
    ]
})  # fmt: skip


def test_commands_without_flags_need_no_data():
    for module in (cd_grab, qsr, echoing, combined, train):
        assert recipes.setting_of(parsed(module).task).task == "digits"


def test_settings_name_tasks_choices_and_fields_that_exist():
    assert not set(recipes.RECIPES) & set(TASKS)
    for name, row in recipes.RECIPES.items():
        known = {*recipes.choices_of(TASKS[row.task]), *recipes.EVERYWHERE}
        assert set(row.choices) <= known, name
        if not isinstance(row.recipe, Recipe):
            assert set(row.recipe) <= set(Recipe._fields), name
    for name in ("digits_mlp", "digits_wide", "digits_cosine", "shakespeare_race"):
        task, recipe = recipes.load(name, abstract=True)
        check_recipe(recipe)
        assert total_steps_of(recipe, sizes_of(task, recipe, deals="examples")) >= 500
        assert task.name == recipes.RECIPES[name].task


def test_digits_is_embedded():
    task = TASKS["digits"]()
    assert task.train["x"].shape == (1536, 64) and task.test["y"].shape == (261,)
    assert task.optimum and not TASKS["digits"](model="mlp").optimum
    assert num_params(TASKS["digits"](model="mlp", width=8, depth=2).model) == 65 * 8 + 9 * 8 + 90


test_digits_without_such_a_model_or_so_many_examples = refuses({
    "model": (lambda: TASKS["digits"](model="lenet"), "model is 'lenet'"),
    "examples": (lambda: TASKS["digits"](num_train=1797), "num_train is 1797"),
})  # fmt: skip


# Every number that a command takes has a range, which its help tells and its parser keeps.


def accepted(flag, text):
    """The value of a text; None if it is refused, by a message that names the flag."""
    try:
        flag.parse(text)
    except absl_flags.IllegalFlagValueError as error:
        assert str(error).startswith(f"flag --{flag.name}={text}: ")
        return None
    return flag.value


def is_number(flag):
    value = accepted(flag, "0.5") or accepted(flag, "2")
    value = value[0] if isinstance(value, list) else value
    return isinstance(value, int | float) and not isinstance(value, bool)


NO_NUMBERS = ("nan", "inf", "-inf", "1e999", "1" + "0" * 400, "a", "")


@pytest.mark.parametrize("name", command.experiments())
def test_no_flag_takes_a_number_outside_its_range(name):
    values = flags_of(importlib.import_module(f"experiments.{name}"))
    numbers = [values[name] for name in values if is_number(values[name])]
    assert numbers or name == "claims"
    for flag in numbers:
        assert not any(accepted(flag, text) is not None for text in NO_NUMBERS), flag.name
        signed = accepted(flag, "-1") is not None
        assert signed == ("(-inf" in flag.parser.syntactic_help), flag.name
        if isinstance(flag.value, list):
            assert accepted(flag, "1,nan") is None
