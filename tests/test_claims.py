"""What the README claims at full size: `pytest -m slow -n 0 tests/test_claims.py`, five minutes."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    cd_grab,
    compare,
    echo_report,
    echo_training,
    echoing,
    herding,
    qsr,
    sync_report,
)
from experiments.local_training import Setup
from experiments.sync_rules import RULES
from experiments.tasks import TASKS

pytestmark = pytest.mark.slow


def test_coordination_needs_a_third_of_the_epochs_on_digits():
    task = TASKS["digits"]()
    orders = ["rr", "unzip", "id_mean", "id_pair", "cd_grab"]
    found = cd_grab.compare_orders(
        task, task.recipe._replace(bound_every=0), orders=orders, seeds=5
    )
    rows = {row.order: row for row in compare.summarise(found)}
    epochs = {name: np.mean(row.fastest_epochs) for name, row in rows.items()}
    assert epochs["rr"] >= 3 * epochs["cd_grab"]
    assert epochs["cd_grab"] < epochs["id_pair"] < epochs["rr"]
    (unzip, unzip_half), (random, random_half) = rows["unzip"].best, rows["rr"].best
    assert unzip > random - unzip_half - random_half  # the control is no better than D-RR
    assert rows["cd_grab"].best[0] < 0.2 * min(rows["id_mean"].best[0], rows["id_pair"].best[0])


@pytest.mark.parametrize("num_workers", [5, 10, 20, 50, 100])
def test_coordinated_bound_is_flat_for_a_million_vectors(num_workers):
    vectors = herding.unit_vectors(num_workers, 10**6 // num_workers, 16, seed=0)

    def bound(name):
        return herding.bounds_over_rounds(vectors, name, rounds=15, norm=jnp.inf, seed=0)[-1]

    assert bound("cd_grab") <= 3
    published = {5: 6.0, 10: 8.5, 20: 11.8, 50: 17.5, 100: 24.0}[num_workers]
    assert 0.75 * published < bound("id_pair") < 1.33 * published
    assert 100 < bound("rr") < 1000


def test_a_ninth_of_the_syncs_costs_digits_no_accuracy_beyond_noise():
    recipe = qsr.RECIPES["digits"]
    setting = qsr.setting_of(recipe)
    plan = RULES["qsr"].plan(setting)
    assert (plan.rounds, plan.total_steps) == (219, 2000)
    setup = Setup(recipe.workers, recipe.batch_size, recipe.optimizer, recipe.weight_decay, 2000, 4)
    found = qsr.compare_rules(
        recipe.load(None),
        setup,
        setting,
        rules=("parallel", "qsr", "cubic"),
        peak_rates=recipe.peak_rates,
        seeds=5,
    )
    chosen = sync_report.at_best(found)
    accuracy = {
        rule: np.array([r["test_accuracy"] for r in sync_report.finals(own)])
        for rule, own in chosen.items()
    }
    assert all(len(values) == 5 and values.min() > 0.96 for values in accuracy.values())
    mean, half = compare.interval(accuracy["qsr"] - accuracy["parallel"])
    assert abs(mean) < half + 0.005


def test_an_echoed_run_needs_a_third_of_the_loads_on_digits_and_more_steps():
    recipe = echoing.RECIPES["digits"]
    setup = echo_training.Setup(**{f: getattr(recipe, f) for f in echo_training.Setup._fields})
    found = echoing.compare_arms(
        recipe.load(None), setup, arms=["none", "larger_lr", "diffusion"], speeds=[8],
        rates=recipe.rates, seeds=5, horizon=recipe.horizon, step_seconds=1e-4,
    )  # fmt: skip

    def mean(arm, cost):
        runs = echo_report.timed(found, arm, 8)
        return np.mean(list(echo_report.to_target(runs, cost).values()))

    assert mean("none", "loads") >= 3 * mean("diffusion", "loads")
    assert mean("larger_lr", "loads") >= 3 * mean(
        "diffusion", "loads"
    )  # not a larger lr in disguise
    assert mean("diffusion", "step") > mean("none", "step")
    assert mean("diffusion", "rounds") <= mean("diffusion", "loads")
