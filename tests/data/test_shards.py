"""Shards: the examples of each worker, and weights that make means over workers those of all."""

import collections
import functools

import jax
import numpy as np
import pytest

import models
from experiments.compare.arms import Arm, row_of
from experiments.data import base, shards
from experiments.data.shards import units_per_worker
from experiments.trainer import config, measure, pipeline, program
from tests import little_run
from tests.cases import mostly_slow
from tests.refused import refuses

RATE = 2.0**-10
UNEQUAL = ("by_class", "sizes")


def sizes_of(task=None, **fields):
    return config.sizes_of(task or little_run.task(), little_run.SETTING._replace(**fields))


@pytest.mark.parametrize("unit_size", [1, 2])
@pytest.mark.parametrize("workers", [4, 8])
def test_unequal_sizes_hold_a_half_a_quarter_and_two_eighths(workers, unit_size):
    task = little_run.task()
    fields = {"shards": "sizes", "workers": workers, "unit_size": unit_size, "units_per_step": 1}
    sizes = sizes_of(task, **fields)
    numbers = pipeline.examples_of_workers(task.train, sizes)
    assert numbers.shape == (workers, sizes.num_units, unit_size)
    counts = [collections.Counter(row.ravel().tolist()) for row in numbers]
    assert [{*count.values()} for count in counts] == [{1}, {2}, {4}, {4}] * (workers // 4)
    whole = [len(count) for count in counts]
    assert whole[:4] == [8 * part * sum(whole) // workers // 16 for part in (4, 2, 1, 1)]
    used = sum(counts, collections.Counter())
    assert len(used) == sum(whole) and max(used) < len(task.train["y"]), "no example of two workers"
    left = len(task.train["y"]) - len(used)
    arms = [Arm(order="cd_grab"), Arm(order="rr")]
    (text,) = config.left_out(task, little_run.SETTING._replace(**fields), arms)
    assert text.startswith(f"{left} of 46 examples")
    weights = shards.weights_of("sizes", workers)
    np.testing.assert_allclose(weights, np.array(whole) / np.mean(whole))


def test_classes_are_sorted_and_cut_and_the_same_examples_are_left_out():
    task, sizes = little_run.task(), sizes_of(shards="by_class")
    numbers = pipeline.examples_of_workers(task.train, sizes)
    assert sorted(numbers.ravel()) == list(range(44))
    assert (np.diff(task.train["y"][numbers.ravel()]) >= 0).all()
    assert pipeline.examples_of_workers(task.train, sizes_of()) is None
    every = config.sizes_of(task, little_run.SETTING._replace(shards="by_class"), deals="units")
    assert every == config.sizes_of(task, little_run.SETTING, deals="units")


@pytest.mark.parametrize("kind", mostly_slow(UNEQUAL, quick=("sizes",)))
def test_batches_that_are_read_are_those_that_stay_on_devices(kind):
    plans = little_run.plans_of()
    states = [
        little_run.trained(little_run.built(reads=reads, shards=kind), plans)[0].state
        for reads in (None, "thread")
    ]
    little_run.assert_same(*states)


@functools.cache
def least_squares():
    """32 examples of a line: the means of the workers' shards differ."""
    x = np.linspace(-1, 2, 32, dtype=np.float32)[:, None]
    data = {"x": x, "y": (x[:, 0] > 0.3).astype(np.int32)}
    model = models.softmax_regression(num_features=1, num_classes=2, l2=0.0)
    return base.Task("line", model, data, data, little_run.SETTING)


WAYS = [("parallel", "cd_grab"), ("constant", "rr"), ("parallel", "rr"), ("accumulate", "rr")]


@pytest.mark.parametrize(("sync", "order"), mostly_slow(WAYS, quick=WAYS[:2]))
def test_weights_make_a_step_that_of_all_examples(sync, order):
    """At a small rate, two steps of half a shard move parameters by the shard's mean gradient."""
    task, moved = least_squares(), {}
    for weights in shards.WEIGHTS:
        recipe = little_run.SETTING._replace(
            units_per_step=8,
            shards="sizes",
            weights=weights,
            momentum=0.0,
            weight_decay=0.0,
            total_steps=2,
            warmup_steps=0,
            h_base=2,
            schedule="constant",
            bound_every=1,
        )
        rows = row_of("order", order), row_of("sync", sync), row_of("echo", "none")
        built = program.build(task, recipe, rows[0], rows[1].rounds)
        setting = config.config_of(recipe, built.sizes, seed=0)
        plans = setting.plans(*rows[1:], rate=RATE)
        start = measure.model_of(built, built.init(0).params)
        state = little_run.trained(built, plans, evaluate_at=())[0].state
        after = measure.model_of(built, state.params)
        moved[weights] = jax.tree.map(np.subtract, start, after)

    def loss(params):
        return (
            (1 if sync == "accumulate" else 2)
            * RATE
            * task.model.loss(params, task.train, jax.random.key(0)).mean()
        )

    exact = jax.grad(loss)(start)
    close = functools.partial(np.testing.assert_allclose, rtol=3e-3, atol=1e-7)
    jax.tree.map(close, moved["examples"], exact)
    far = jax.tree.map(lambda a, b: np.abs(a - b).max(), moved["equal"], exact)
    assert max(jax.tree.leaves(far)) > 0.05 * RATE


def test_weighted_workers_are_evaluated_and_bounded_by_their_weights():
    tree = {"w": np.array([[1.0], [2.0], [4.0], [8.0]], np.float32)}
    weights = shards.weights_of("sizes", 4)
    np.testing.assert_allclose(measure.mean_of(weights)(tree)["w"], [1 / 2 + 2 / 4 + 4 / 8 + 8 / 8])
    equal = {"w": np.full((4, 3), 0.1, np.float32)}
    assert (measure.mean_of(weights)(equal)["w"] == equal["w"][0]).all()
    task, sizes = least_squares(), sizes_of(least_squares(), shards="sizes", weights="examples")
    data = pipeline.partition(task.train, sizes)
    orders = np.tile(np.arange(sizes.num_units, dtype=np.int32), (4, 1))
    bounds = {
        given: measure.order_bounds(task.model, 4, num_units=16, weights=given)(
            task.model.init(jax.random.key(0)), orders, data
        )
        for given in (None, (1.0,) * 4, sizes.weights)
    }
    np.testing.assert_allclose(bounds[None], bounds[1.0, 1.0, 1.0, 1.0])
    assert (np.abs(bounds[sizes.weights] - bounds[None]) > 0.05 * bounds[None]).all()


def test_workers_on_a_mesh_have_the_shards_and_weights_of_simulated_ones():
    fields, plans = {"shards": "sizes", "weights": "examples"}, little_run.plans_of()
    both = [
        little_run.trained(little_run.built(mesh=mesh, **fields), plans)[0].state
        for mesh in (False, True)
    ]
    params = [jax.tree.map(np.asarray, jax.device_get(state.params)) for state in both]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *params)


def without_classes():
    task = little_run.task()
    return task._replace(train=task.train | {"y": np.zeros((46, 3), np.float32)})


CANNOT_BE = {
    "workers": (lambda: sizes_of(shards="sizes", workers=6), "is sizes with 6 workers: of every"),
    "classes": (lambda: sizes_of(without_classes(), shards="by_class"), "needs one class of every"),
    "few": (lambda: units_per_worker("sizes", 7, 4), "7 units of 4 workers"),
    "kind": (lambda: sizes_of(shards="cats"), "--shards is cats"),
}
test_shards_that_cannot_be_are_named = refuses(CANNOT_BE)
