"""README at full size: `pytest -m slow -n 0 tests/results/test_claims.py`, five minutes."""

import numpy as np
import pytest

from experiments import cd_grab, echoing, herding, qsr
from experiments.results import statistics
from experiments.results.statistics import Criterion
from experiments.study import recipes, search, trainer
from experiments.study.study import sync_plans

pytestmark = pytest.mark.slow


def compared(study, name, arms, *, seeds, speeds=(), criterion=None, **fields):
    """(comparison of a study's arms, task, recipe), as its command makes it."""
    task, recipe = recipes.load(name)
    recipe = recipe._replace(**fields)
    study = study._replace(
        arms={arm: study.arms[arm] for arm in arms}, speeds=speeds,
        criterion=criterion or study.criterion,
    )  # fmt: skip
    trains = trainer.Trainer(study, task, recipe, step_seconds=1e-4)
    found, _ = search.search(study, trains, seeds=seeds)
    labels = {arm: study.arms[arm].label for arm in arms}
    return statistics.compare(found, labels, study.criterion), task, recipe


def test_coordination_needs_a_third_of_the_epochs_on_digits():
    arms = ("rr", "unzip", "id_mean", "id_pair", "cd_grab")
    found, _, _ = compared(cd_grab.STUDY, "digits", arms, seeds=5, bound_every=0)
    runs, best = {c.arm: c.runs for c in found.at()}, {}
    epochs = {  # to the best of D-RR, each at the rate that gets there first
        arm: np.mean(
            list(statistics.spent(found, statistics.fastest(found, arm)[1], "epoch").values())
        )
        for arm in runs
    }
    assert epochs["rr"] >= 3 * epochs["cd_grab"]
    assert epochs["cd_grab"] < epochs["id_pair"] < epochs["rr"]
    for arm, own in runs.items():
        best[arm] = statistics.interval(statistics.lowest(list(own.values()), found.criterion))
    (unzip, unzip_half), (random, random_half) = best["unzip"], best["rr"]
    assert unzip > random - unzip_half - random_half  # the control is no better than D-RR
    assert best["cd_grab"][0] < 0.2 * min(best["id_mean"][0], best["id_pair"][0])


@pytest.mark.parametrize("num_workers", [5, 10, 20, 50, 100])
def test_coordinated_bound_is_flat_for_a_million_vectors(num_workers):
    vectors = herding.unit_vectors(num_workers, 10**6 // num_workers)

    def bound(name):
        return herding.bounds_over_rounds(vectors, name, rounds=15)[-1]

    assert bound("cd_grab") <= 3
    published = {5: 6.0, 10: 8.5, 20: 11.8, 50: 17.5, 100: 24.0}[num_workers]
    assert 0.75 * published < bound("id_pair") < 1.33 * published
    assert 100 < bound("rr") < 1000


def test_a_ninth_of_the_syncs_costs_digits_no_accuracy_beyond_noise():
    arms = ("parallel", "qsr", "cubic")
    found, task, recipe = compared(qsr.STUDY, "digits_mlp", arms, seeds=5)
    plan = sync_plans({"qsr": qsr.STUDY.arms["qsr"]}, task, recipe)["qsr"]
    assert (plan.rounds, plan.total_steps) == (219, 2000)
    accuracy = {
        c.arm: np.array([statistics.last(run, "test/accuracy") for run in c.runs.values()])
        for c in found.at()
    }
    assert all(len(values) == 5 and values.min() > 0.96 for values in accuracy.values())
    mean, half = statistics.interval(accuracy["qsr"] - accuracy["parallel"])
    assert abs(mean) < half + 0.005


def test_an_echoed_run_needs_a_third_of_the_loads_on_digits_and_more_steps():
    _, recipe = recipes.load("digits_wide", abstract=True)
    criterion = Criterion(f"valid/{recipe.metric}", False, "target", recipe.target)
    arms = ("none", "larger_lr", "diffusion")
    found, _, _ = compared(
        echoing.STUDY, "digits_wide", arms, seeds=5, speeds=(8,), criterion=criterion
    )
    runs = {c.arm: c.runs for c in found.at(8)}
    assert all(len(own) == 5 for own in runs.values())
    tested = statistics.tested(criterion)

    def mean(arm, cost):
        return np.mean([statistics.reached(run, tested)[cost] for run in runs[arm].values()])

    assert mean("none", "loads") >= 3 * mean("diffusion", "loads")
    # Not a larger learning rate in disguise.
    assert mean("larger_lr", "loads") >= 3 * mean("diffusion", "loads")
    assert mean("diffusion", "step") > mean("none", "step")
    assert mean("diffusion", "rounds") <= mean("diffusion", "loads")
