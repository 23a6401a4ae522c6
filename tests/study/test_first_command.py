"""The first command of the README: a short table by default, and what it does not do twice."""

import pytest

from experiments import cd_grab
from experiments.results import tables
from experiments.study import flags, recipes, search
from experiments.training import measure
from tests import commands
from tests.compiled_runs import compilations

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


@pytest.mark.parametrize("given,arms", [
    ("cd_grab", ["rr", "cd_grab"]), ("cd_grab+sketch4", ["rr", "cd_grab+sketch4"]),
    ("rr", ["rr"]), ("id_pair,cd_grab", ["id_pair", "cd_grab"]),
])  # fmt: skip
def test_one_arm_is_compared_with_the_baseline(given, arms, tmp_path, monkeypatch):
    run = []
    monkeypatch.setattr(search, "_carry_out", lambda *known: run.append([*known[1].arms]))
    commands.study_run(cd_grab, [f"--arms={given}", "--seeds=1"], tmp_path)
    assert run == [arms]


def test_the_first_table_has_five_columns_and_the_long_one_all():
    assert len(asked()[0].columns) <= 5
    assert asked("--long")[0].columns == tables.ORDER_COLUMNS


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
    trains = search.Trainer(cd_grab.STUDY, task, recipe)
    arms = ("rr", "id_pair", "cd_grab")
    trains.prepare((arm, None) for arm in arms)
    with compilations() as compiled:
        for arm in arms:
            for seed in range(2):
                trains.train(search.Run(arm, None, 0.1, seed, "run"), [], records.append)
    assert not compiled and len(made) == 1 and made[0]._cache_size() == 1
    assert all("bound/linf" in record for record in records)
