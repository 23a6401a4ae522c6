"""README at full size: `pytest -m slow -n 0 tests/results/test_claims.py`, five minutes."""

import math

import pytest

from experiments import cd_grab, echoing, herding, qsr
from experiments.results import statistics
from experiments.results.effects import Measure
from experiments.study import recipes, search, study, trainer

pytestmark = pytest.mark.slow


def compared(chosen, name, arms, *, speeds=(), **fields):
    """The comparison of a study's arms over five seeds, from its command."""
    task, recipe = recipes.load(name)
    recipe, arms = recipe._replace(**fields), {arm: chosen.arms[arm] for arm in arms}
    criterion = chosen.criterion._replace(target=recipe.target)
    chosen = chosen._replace(arms=arms, speeds=speeds, criterion=criterion)
    trains = trainer.Trainer(chosen, task, recipe, step_seconds=1e-4)
    found, _ = search.search(chosen, trains, seeds=5)
    labels = {name: arm.label for name, arm in arms.items()}
    plans = {} if speeds else study.sync_plans(arms, task, recipe)
    return statistics.compare(found, labels, criterion, plans)


def gain(found, *words, **options):
    """The 95 % interval of an effect; a factor for costs and losses."""
    effect = Measure(*words, **options)(found)
    assert len(effect.values) == 5
    return effect.interval(0.05)


def test_coordination_needs_a_third_of_the_epochs_on_digits():
    arms = ("rr", "unzip", "id_mean", "id_pair", "cd_grab")
    found = compared(cd_grab.STUDY, "digits", arms, bound_every=0)
    assert gain(found, "epoch").mean > math.log(3)
    for pair in (("id_pair", "rr"), ("cd_grab", "id_pair")):
        assert gain(found, "epoch", *pair).mean > 0
    best = {own.arm: statistics.lowest([*own.runs.values()], found.criterion) for own in found.at()}
    unzip, unzip_half = statistics.interval(best["unzip"])
    random, random_half = statistics.interval(best["rr"])
    assert unzip > random - unzip_half - random_half  # the control is no better than D-RR
    assert best["cd_grab"].mean() < 0.2 * min(best["id_mean"].mean(), best["id_pair"].mean())


@pytest.mark.parametrize("num_workers", [5, 10, 20, 50, 100])
def test_the_coordinated_bound_is_flat_for_a_million_vectors(num_workers):
    vectors = herding.unit_vectors(num_workers, 10**6 // num_workers)

    def bound(name):
        return herding.bounds_over_rounds(vectors, name, rounds=15)[-1]

    assert bound("cd_grab") <= 3
    published = {5: 6.0, 10: 8.5, 20: 11.8, 50: 17.5, 100: 24.0}[num_workers]
    assert 0.75 * published < bound("id_pair") < 1.33 * published
    assert 100 < bound("rr") < 1000


def test_a_ninth_of_the_syncs_costs_digits_no_accuracy_beyond_noise():
    found = compared(qsr.STUDY, "digits_mlp", ("parallel", "qsr", "cubic"))
    assert (found.plans["qsr"].rounds, found.plans["qsr"].total_steps) == (219, 2000)
    for own in found.at():
        ends = [statistics.last(run, "test/accuracy") for run in own.runs.values()]
        assert len(ends) == 5 and min(ends) > 0.96
    points = gain(found, "test/accuracy", "qsr", "parallel")
    assert points.low < 0.5 and points.high > -0.5


def test_an_echoed_run_needs_a_third_of_the_loads_on_digits_and_more_steps():
    arms = ("none", "larger_lr", "diffusion")
    found = compared(echoing.STUDY, "digits_wide", arms, speeds=(8,))
    for against in ("none", "larger_lr"):  # not a larger learning rate in disguise
        assert gain(found, "loads", "diffusion", against, speed=8).mean > math.log(3)
    runs = {own.arm: own.runs for own in found.at(8)}
    steps, rounds, loads = (
        {arm: sum(statistics.spent(found, runs[arm], cost).values()) for arm in runs}
        for cost in ("step", "rounds", "loads")
    )
    assert steps["diffusion"] > steps["none"] and rounds["diffusion"] <= loads["diffusion"]
