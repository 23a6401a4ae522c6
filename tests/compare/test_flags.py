"""Flags: a task, its recipe and settings, plans of any of them, and those that are refused."""

import functools
import importlib
import re
import sys

import numpy as np
import pytest
from absl import flags as absl_flags
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import cd_grab, combined, echoing, qsr, train
from experiments.compare import commands, flags, recipes, runs
from experiments.compare.arms import options_of
from experiments.compare.rows import TABLES
from experiments.data import TASKS, Recipe, base
from experiments.data.base import check_recipe
from experiments.data.schedules import SCHEDULES
from experiments.data.shards import SHARDS, WEIGHTS
from experiments.trainer import config, measure, timeline
from experiments.trainer.config import sizes_of, total_steps_of
from syncopate import command
from tests.cases import times
from tests.commands import flags_of, parsed
from tests.refused import refuses
from tests.words import each


def setting(*arguments):
    return flags.setting_from_flags(parsed(cd_grab, "--dry_run", *arguments))


def test_every_field_of_a_recipe_is_a_flag_with_help():
    values = parsed(train)
    for name in set(Recipe._fields) - {"evaluations"}:
        assert values[name].value is None and values[name].help
    assert "<momentum|adamw|muon|muon_valley>" in values["optimizer"].help
    kinds = {"workers": int, "h_base": int, "growth": float, "horizon": int, "target": float}
    for name, kind in kinds.items():
        assert values[name].flag_type() == kind.__name__
    shown = {flag.name for flag in values.get_key_flags_for_module(sys.argv[0])}
    assert shown == set(values)
    assert {"order", "workers", "track", "coordinator_address"} < shown


@pytest.mark.parametrize(
    "given,expected",
    [
        ([], {"workers": 32, "schedule": "cosine", "learning_rate": 0.25, "model": "softmax"}),
        (
            ["--task=digits_wide"],
            {"target": 0.96, "width": 512, "total_steps": 500, "epochs": None},
        ),
        (["--task=hmda"], {"model": "logistic", "state": "NJ"}),
    ],
)
def test_help_knows_what_the_setting_gives_where_a_flag_is_unset(given, expected):
    values = flags.defaults(parsed(train, *given))
    assert {name: values[name] for name in expected} == expected


def test_flags_replace_fields_of_the_setting():
    task, recipe = setting("--epochs=7", "--learning_rates=0.5,1", "--workers=3", "--h_base=9")
    usual = TASKS["digits"](abstract=True).recipe
    assert recipe == usual._replace(epochs=7, learning_rates=(0.5, 1.0), workers=3, h_base=9)
    assert task.train["x"].shape == (1536, 64)
    # If the defaults have another length or interval, the given one counts.
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
    result = flags.choices()
    kinds = {n: (result[n][0].parser.flag_type(), result[n][1]) for n in ("state", "augment")}
    assert kinds == {"state": ("string", ["hmda"]), "augment": ("bool", ["imagenet2012"])}
    assert "abstract" not in result and "data_dir" not in result

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


@pytest.mark.parametrize("delay", [0, 0.1])
def test_echoing_shows_seconds_of_runs_with_a_delay_alone(delay):
    values = parsed(echoing, f"--step_seconds={delay}")
    shown = echoing.fit(echoing.STUDY, None, recipes.recipe_of(values.task), values)
    heads = [column.head for column in shown.columns]
    assert ("seconds" in heads) == (delay > 0) and {"loads", "steps", "rounds"} <= {*heads}


test_settings_that_cannot_run = refuses(
    {
        " ".join(given): (lambda given=given: setting(*given), message)
        for message, *given in [
            ("--task is cats: choose one of digits_cosine", "--task=cats"),
            ("wikitext2_small. Did you mean digits_mlp or", "--task=digit_mlp"),
            ("--state is MD: digits has no such choice. It has model", "--state=MD"),
            ("--width is 7: of digits only --model=mlp has it, and the model is soft", "--width=7"),
            ("--width is 7: of mnist", "--width=7", "--task=mnist", "--model=lenet"),
            ("--data_dir is /x: digits come with scikit-learn. Leave it out", "--data_dir=/x"),
        ]
    }
)


def test_commands_without_flags_need_no_data():
    for module in (cd_grab, qsr, echoing, combined, train):
        assert recipes.setting_of(parsed(module).task).task == "digits"


def test_settings_name_tasks_choices_and_fields_that_exist():
    assert not set(recipes.RECIPES) & set(TASKS)
    for name, row in recipes.RECIPES.items():
        options = {*recipes.choices_of(TASKS[row.task]), *recipes.EVERYWHERE}
        assert set(row.choices) <= options, name
        if not isinstance(row.recipe, Recipe):
            assert set(row.recipe) <= set(Recipe._fields), name
    for name in ("digits_mlp", "digits_wide", "digits_cosine", "shakespeare_race"):
        task, recipe = recipes.load(name, abstract=True)
        check_recipe(recipe)
        assert total_steps_of(recipe, sizes_of(task, recipe, deals="examples")) >= 500
        assert task.name == recipes.RECIPES[name].task


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


# Any flags give the requested plans, or an error that names one of them.

WHOLE = st.one_of(st.integers(-1, 12), st.sampled_from([40, 2000, 10**12, -(10**9)]))
REAL = st.one_of(
    st.floats(0, 2), st.floats(), st.sampled_from([0.0, -1.0, 1.0, 1e-300, 1e300, np.inf, np.nan])
)
ANY = {
    "workers": WHOLE, "units_per_step": WHOLE, "unit_size": WHOLE, "num_train": WHOLE,
    "total_steps": WHOLE, "epochs": st.integers(-1, 30), "warmup_steps": WHOLE,
    "h_base": WHOLE, "echo_factor": WHOLE, "horizon": WHOLE,
    "evaluations": WHOLE, "evaluate_every": WHOLE, "bound_every": WHOLE, "seed": WHOLE,
    "growth": REAL, "floor": REAL, "decay_every": REAL, "decay_factor": REAL, "momentum": REAL,
    "weight_decay": REAL, "learning_rate": REAL,
    **{kind: st.sampled_from([*table, *each(kind), "cats"]) for kind, table in TABLES.items()},
    **{flag: st.sampled_from([*option.words, "cats"]) if option.words else WHOLE
       for kind in TABLES for flag, option in options_of(kind).items()},
    "ema_epochs": REAL, "average": st.sampled_from(["epoch", "ema,epoch", "", "cats"]),
    "schedule": st.sampled_from([*SCHEDULES, "cats"]),
    "shards": st.sampled_from([*SHARDS, "cats"]), "weights": st.sampled_from([*WEIGHTS, "cats"]),
    "task": st.sampled_from(["digits", "digits_cosine", "digits_mlp", "hmda", "cats"]),
}  # fmt: skip


def decided(arguments):
    """What `train` decides before anything is compiled: sizes, plans, evaluations, segments."""
    values = parsed(train, "--dry_run", *arguments)
    task, recipe = flags.setting_from_flags(values)
    rates = recipe.learning_rates
    rate = rates[0] if values.learning_rate is None else values.learning_rate
    recipe = recipe._replace(learning_rates=(rate,))
    check_recipe(recipe)
    arm = flags.arm_from_flags(values)
    sizes = config.sizes_of(task, recipe, deals=arm.rows[0].deals)
    plans = config.plans_of(task, recipe, arm, rate=rate, seed=values.seed)
    plans.check()
    return sizes, plans, measure.evaluation_steps(recipe, sizes, plans.total_steps)


# What little data are called.
ALSO = dict.fromkeys(("num_train", "unit_size"), ("training_set",))


def names(message, name):
    """Whether a message names a flag, or the field or argument that it sets."""
    plain = re.sub(r"[\s-]+", "_", message.lower())
    return any(word in plain for word in (name, name.removesuffix("s"), *ALSO.get(name, ())))


@settings(max_examples=times(60))
@given(
    st.dictionaries(st.sampled_from([*ANY]), st.none(), min_size=1, max_size=6).flatmap(
        lambda chosen: st.fixed_dictionaries({name: ANY[name] for name in chosen})
    )
)
def test_any_flags_give_plans_or_an_error_that_names_one_of_them(chosen):
    arguments = [f"--{name}={value}" for name, value in chosen.items()]
    try:
        sizes, plans, evaluated = decided(arguments)
    except (ValueError, absl_flags.Error) as error:
        assert any(names(str(error), name) for name in chosen), (arguments, str(error))
        return
    total = plans.total_steps
    assert sizes.workers >= 1 and 1 <= sizes.units_per_step <= sizes.num_units
    assert plans.rates.shape == (total,) and np.isfinite(plans.rates).all()
    assert evaluated[-1] == total and 0 <= evaluated[0] and len(set(evaluated)) == len(evaluated)
    if not plans.echo.online:
        ends = timeline.timeline(plans, sizes).ends
        assert ends[-1] == total and (np.diff(ends, prepend=0) > 0).all()


# Flags that contradict each other, or ask for what a command does not do, are refused.


@pytest.fixture(autouse=True)
def _nothing_is_forecast(monkeypatch):
    monkeypatch.setattr(runs, "dry_run", lambda *args: "")


def run(name, *arguments):
    """What `python -m experiments.NAME` does once its flags are parsed."""
    module = importlib.import_module(f"experiments.{name}")
    try:
        values = parsed(module, *arguments)
    except absl_flags.Error as error:
        raise ValueError(str(error)) from error
    if hasattr(module, "STUDY"):
        return commands.run_study(module.STUDY, values)
    return (getattr(module, "run", None) if name in ("train", "advise") else module.main)(values)


REFUSED = {
    "train --deal=dealt --shards=sizes": "--shards is sizes, .*: take one of each worker's own",
    "qsr --shards=by_class": "--shards is by_class, and here every order",
    "one_plan --shards=by_class": "--shards is by_class, and here every order",
    "forecast --task=imagenet_vit_b --shards=sizes": "--shards is sizes, and here every order",
    "train --learning_rate=1 --learning_rates=1,2": "learning_rate=1.0, .*: At most one of",
    "train --epochs=2 --total_steps=9": "total_steps=9: At most one of",
    "cd_grab --long --task=hmda": "--long is for --task=digits",
    "echoing --echo_factor=3": "--echo_factor is 3: here .* R of --speeds",
    "combined --arms=rr --order=id_pair": "--order is id_pair and is a level of no --arms",
    "cd_grab --arms=rr,qr": "--arms has 'qr'",
    "echoing --task=digits": "has no target",
    "combined --order=rr": "that is the first level",
    "combined --echo=measured": "--echo is measured",
    "forecast --arms=qsr,often": "--arms=qsr,often: .often. has .often., which is no word",
    "herding --num_vectors=3": "--workers has 100, and --num_vectors is 3: each worker needs two",
}
# A dry run stands for the command without it; --data_dir and what a folder is for are accepted.
DRY = ("train", "cd_grab", "qsr", "echoing", "combined")
GIVEN = {f"{c} --dry_run" if c.split()[0] in DRY else c: message for c, message in REFUSED.items()}
test_flags_that_do_not_go_together_are_refused = refuses(
    {command: (functools.partial(run, *command.split()), text) for command, text in GIVEN.items()}
)


@pytest.mark.parametrize(
    "command",
    [
        "cd_grab --arms=rr+constant --h_base=9",
        "qsr --arms=parallel --growth=3",
        "qsr --floor=0.001",
        "qsr --schedule=step --floor=0.1 --decay_every=3",
        "qsr --epochs=2 --total_steps=200",
        "cd_grab --task=hmda --data_dir=DIR",
        "qsr --arms=rr+qsr,qsr --shards=sizes --weights=examples",
        "train --sync=parallel --h_base=4 --bound_every=0",
        "combined --arms=rr+constant",
        "combined --target=0.1 --metric=loss",
        "train --metric=loss",
        "train --h_base=9",
        "train --average=ema --ema_epochs=2",
        "train --output_dir=x --track=wandb --checkpoint_every=3 --overwrite",
    ],
)
def test_what_a_preset_may_give_and_another_flag_override_is_accepted(command):
    run(*command.split(), "--dry_run")
