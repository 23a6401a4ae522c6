"""Programs: workers agree however they run, units are what was asked for, errors name things."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
import models
import ordering
from experiments.compare.arms import row_of
from experiments.data import Recipe, Task
from experiments.data.base import check_task, size_of
from experiments.distributed.devices import worker_mesh
from experiments.trainer import config, measure, program
from experiments.trainer.config import Plans
from experiments.trainer.step import SCALARS
from ordering.echo import EchoPlan
from syncopate.refusals import UserError
from tests import little_run, tables
from tests.cases import mostly_slow
from tests.sources import Examples
from tests.words import each

RECIPE = Recipe(
    workers=4,
    units_per_step=2,
    unit_size=1,
    epochs=3,
    learning_rates=(0.05,),
    momentum=0.9,
    bound_every=2,
)
PARALLEL = row_of("sync", "parallel").rounds


def small_task(num_train=44, model=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_train + 12, 6)).astype(np.float32)
    y = (x[:, 0] + 0.5 * rng.normal(size=len(x)) > 0).astype(np.int32)
    model = model or models.softmax_regression(num_features=6, num_classes=2, l2=1e-2)
    train = {"x": x[:num_train], "y": y[:num_train]}
    test = {"x": x[num_train:], "y": y[num_train:]}
    return Task("small", model, train, test, RECIPE, lambda: models.optimum(model, train))


def every_step(built, recipe, rate=None):
    steps = recipe.epochs * built.sizes.loads_per_epoch
    rates = np.full(steps, rate or recipe.learning_rates[0])
    return Plans(local_opt.constant(1, total_steps=steps), EchoPlan(np.ones(steps, bool)), rates)


@functools.cache
def plain(name):
    """The program of an order. Learning rates and epochs are not of it."""
    return built(small_task(), RECIPE, name)


def built(task, recipe, name, **options):
    if row_of("order", name).scaled:
        recipe = recipe._replace(optimizer="adamw")
    return program.build(task, recipe, row_of("order", name), PARALLEL, **options)


def trained(prepared, recipe, scalars=lambda step, total, state: dict):
    """(outcome, records, orders at the end of every epoch)."""
    orders, plans = [], every_step(prepared, recipe)
    steps = measure.evaluation_steps(recipe, prepared.sizes, plans.total_steps)

    def observe(step, state):
        orders.append(np.asarray(state.orders.current))
        return scalars(step, plans.total_steps, state)()

    return *little_run.trained(prepared, plans, evaluate=observe, evaluate_at=steps), orders


@functools.cache
def measured(name):
    """`trained` with the scalars of an evaluation."""
    scalars = measure.scalars_of(small_task(), RECIPE)
    return trained(plain(name), RECIPE, scalars(plain(name)).begin)


# One of every way in which a program asks: nothing of the gradients, units, means; sketches below.
KINDS = ("rr", "cd_grab", "id_mean")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in KINDS))
        for name in each("order")
        if not row_of("order", name).deals and not row_of("order", name).recut
    ],
)
def test_every_order_trains(name):
    _, records, orders = measured(name)
    assert [r["epoch"] for r in records] == [0, 1, 2, 3]
    assert [r["step"] for r in records] == [0, 6, 12, 18]  # 11 units, 2 per step
    assert records[-1]["train/loss"] < 0.6 < records[0]["train/loss"]
    assert 0 < records[-1]["train/above_optimum"] < records[0]["train/above_optimum"]
    assert ["bound/linf" in r for r in records] == [True, False, True, True]  # and at the end
    units = np.tile(np.arange(11), (4, 4, 1))
    np.testing.assert_array_equal(np.sort(orders, axis=2), units)


def test_workers_with_their_own_moments_have_the_scale_of_the_mean():
    """After the last sync, and not one any more."""
    program, plans = little_run.built("cd_grab+sketch16+scaled"), little_run.plans_of(echo="none")
    state = little_run.trained(program, plans)[0].state
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
    nu = jax.tree.map(lambda v: v.mean(0), optax.tree_utils.tree_get(state.opt_state, "nu"))
    expected = ordering.second_moment_scale(
        optax.scale_by_rms(), optax.ScaleByRmsState(nu), first(state.params)
    )
    for mine, other in zip(*map(jax.tree.leaves, (state.scale, expected)), strict=True):
        for of_worker in mine:
            np.testing.assert_allclose(of_worker, other, rtol=1e-4)
    assert max(float(jnp.abs(x - 1).max()) for x in jax.tree.leaves(expected)) > 0.1


@pytest.mark.parametrize("name", ["rr", "rr+dealt"])
def test_reshuffling_is_that_of_the_library(name):
    orders = measured(name)[2]
    order = ordering.random_reshuffling(11)
    if name != "rr":  # of 44 examples, 40 in 5 steps; a batch is 2 of every worker
        order = ordering.global_reshuffling(10, total=44)
    state = tables.vmap_workers(lambda key: order.init(key, None))(program.keys_of(0, 4)[1])
    next_epoch = tables.vmap_workers(order.next_epoch)
    for result in orders[1:]:  # at the ends of epochs, when the next order is current
        state = next_epoch(state)
        np.testing.assert_array_equal(result, state.current)


SIGNED = ("id_pair+dealt", "cd_grab+sketch16+dealt")


@pytest.mark.parametrize("name", mostly_slow(SIGNED, quick=SIGNED[1:]))
def test_units_that_are_dealt_are_all_visited_in_every_epoch(name):
    assert row_of("order", name).deals == config.UNITS
    _, records, orders = measured(name)
    assert records[-1]["train/loss"] < 0.6 < records[0]["train/loss"]
    seen = np.sort(np.asarray(orders).reshape(len(orders), -1), axis=1)
    np.testing.assert_array_equal(seen, np.tile(np.arange(44), (len(orders), 1)))


def test_mesh_equals_simulation_equals_stream():
    recipe = RECIPE._replace(units_per_step=3, unit_size=2, epochs=2)
    mesh = worker_mesh(4)
    ways = [{}, {"mesh": mesh}, {"mesh": mesh, "reads": "thread"}]
    name = "cd_grab+scaled+dealt"
    finals = [trained(built(small_task(), recipe, name, **way), recipe) for way in ways]
    for outcome, records, orders in finals[1:]:
        np.testing.assert_array_equal(orders, finals[0][2])
        for actual, expected in zip(records[1:], finals[0][1][1:], strict=True):
            assert actual["train/batch_loss"] == pytest.approx(expected["train/batch_loss"], 1e-4)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            outcome.state.params,
            finals[0][0].state.params,
        )


def test_local_steps_that_meet_in_every_step_are_data_parallel_training():
    """With SGD and momentum; so are sums of gradients, and workers in turn."""
    recipe, results = RECIPE._replace(epochs=1), []
    ways = ((PARALLEL, "vmap"), (PARALLEL, "turns"), (local_opt.local_rounds, "vmap"))
    moved = row_of("order", "rr+dealt")
    for rounds, way in (*ways, (local_opt.accumulated_rounds, "vmap")):
        prepared = plain("rr+dealt")
        if (rounds, way) != ways[0]:
            prepared = program.build(small_task(), recipe._replace(run=way), moved, rounds)
        assert prepared.sync_in_step == ((rounds, way) == ways[0])
        state = trained(prepared, recipe)[0].state
        results.append(measure.model_of(prepared, state.params))
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), other, results[0])


def test_a_unit_that_is_not_finite_is_named():
    for name in ("id_mean", "cd_grab"):
        data = plain(name).data
        bad = data | {"x": data["x"].at[2, 5, 0, 3].set(np.nan)}  # worker 2, unit 5
        outcome, records, _ = trained(plain(name)._replace(data=bad), RECIPE)
        assert outcome.diverged.startswith("the loss or gradient of unit 5 of worker 2 is not")
        step = int(outcome.diverged.split("in step ")[1].split(" ")[0])
        assert 0 <= step <= 5 and len(records) == 2  # of the start, and that it ended
        assert (records[-1]["ended"], records[-1]["diverged"]) == (True, outcome.diverged)


def test_a_model_that_mixes_examples_is_refused():
    model = models.softmax_regression(num_features=6, num_classes=2)

    def loss(params, batch, key):
        x = batch["x"] - jnp.mean(batch["x"], axis=0, keepdims=True)
        return model.loss(params, batch | {"x": x}, key) + jnp.sum(jnp.square(x), axis=1)

    task = small_task(model=model._replace(loss=loss))
    with pytest.raises(ValueError, match="mixes the examples"):
        built(task, RECIPE, "cd_grab")
    built(task, RECIPE._replace(units_per_step=1, unit_size=4), "cd_grab")


def normalising():
    """Softmax regression on features that are normalised over their batch."""
    plain = models.softmax_regression(num_features=6, num_classes=2)

    def statistics(params, x):
        return jnp.mean(x, axis=0), jnp.var(x, axis=0)

    def predict(params, x, statistics):
        mean, variance = statistics
        return plain.predict(params, (x - mean[None]) / jnp.sqrt(variance + 1e-3)[None])

    def loss(params, batch, key):
        logits = predict(params, batch["x"], statistics(params, batch["x"]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    return models.Model(plain.init, loss, predict, statistics)


def test_batch_normalised_models_are_ordered_by_microbatches():
    task = small_task(model=normalising())._replace(optimum=None)
    recipe = RECIPE._replace(units_per_step=2, unit_size=3, workers=2, learning_rates=(0.1,))
    scalars, results = measure.scalars_of(task, recipe), {}
    for name in ("rr", "cd_grab"):
        prepared = built(task, recipe, name)
        results[name] = trained(prepared, recipe, scalars(prepared).begin)[1]
    first, *_, last = results["cd_grab"]
    assert last["train/loss"] < first["train/loss"] and 0 <= last["test/accuracy"] <= 1
    # The first epoch has the same order, and a unit is its own batch under every order.
    np.testing.assert_allclose(
        results["rr"][1]["train/loss"], results["cd_grab"][1]["train/loss"], rtol=1e-4
    )
    with pytest.raises(ValueError, match="one example is no unit"):
        built(task, recipe._replace(unit_size=1), "cd_grab")
    built(task, recipe._replace(unit_size=1), "rr+dealt")  # its batch is the unit


def test_scalars_have_names_that_no_other_field_of_a_record_has():
    wrong = [name for name in SCALARS if "/" not in name and name != "drift"]
    assert not wrong, "a name needs a slash, as losses/spread, or null would not mean infinite"


@pytest.mark.parametrize("halves", [False, True])
def test_metrics_of_a_source_are_those_of_its_arrays(halves, monkeypatch):
    """However it is read: a perplexity is of the mean of all tokens, not a mean of perplexities."""
    rng = np.random.default_rng(0)
    words = rng.integers(7, size=(23, 5, 2)).astype(np.int32)
    data = {"x": words[..., 0], "y": words[..., 1]}
    table = 9 * rng.normal(size=(7, 7)).astype(np.float32)  # some tokens cost much more than others
    scores = table - np.log(np.exp(table - table.max(1, keepdims=True)).sum(1, keepdims=True))
    scores -= table.max(1, keepdims=True)
    nats = -scores[data["x"], data["y"]].mean(axis=1)
    hits = (scores[data["x"]].argmax(axis=2) == data["y"]).mean(axis=1)

    def loss(table, batch, key):
        return -jax.nn.log_softmax(table[batch["x"]])[
            jnp.arange(len(batch["y"]))[:, None], jnp.arange(5), batch["y"]
        ].mean(axis=1)

    model = models.Model(lambda key: jnp.asarray(table), loss, lambda table, x: table[x])
    recipe = Recipe(1, 4, 1, (0.1,), metric="accuracy", target=0.1)
    monkeypatch.setattr(measure, "CHUNK", 5)
    for train in (data, Examples(data)):
        task = Task("bigrams", model, train, train, recipe, metric="perplexity")
        begin, _ = measure.evaluator(task, recipe, halves=halves)
        result = begin(jnp.asarray(table))()
        middle = 11 if halves else 0
        tested = slice(middle, 2 * middle or 23)
        assert result["test/perplexity"] == pytest.approx(np.exp(nats[tested].mean()), rel=1e-4)
        assert result["test/accuracy"] == pytest.approx(hits[tested].mean(), rel=1e-4)
        assert result["train/loss"] == pytest.approx(nats.mean(), rel=1e-4)


def test_inputs_may_be_a_tree_of_arrays():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)).astype(np.float32), np.arange(12, dtype=np.int32) % 2
    inputs = {"values": x, "mask": (x > -1).astype(np.float32)}
    net = models.softmax_regression(num_features=4, num_classes=2)
    moments = lambda params, x: jnp.mean(x["values"])  # noqa: E731
    model = models.Model(
        net.init,
        lambda w, batch, key: net.loss(w, batch | {"x": masked(batch["x"])}, key),
        lambda w, x, mean: net.predict(w, masked(x)) + 0 * mean,
        moments,
    )
    masked = lambda x: x["values"] * x["mask"]  # noqa: E731
    results = []
    for made, of in ((model, inputs), (net, x * inputs["mask"])):
        task = Task("tree", made, {"x": of, "y": y}, {"x": of, "y": y}, RECIPE)
        begin, _ = measure.evaluator(check_task(task), RECIPE, halves=True)
        results.append(begin(net.init(jax.random.key(0)))())
    assert results[0] == results[1] and size_of({"x": inputs, "y": y}) == 12


@pytest.mark.parametrize(
    "data,message",
    [
        ((np.ones((4, 2)), np.ones(4)), "train set of a tuple, of lengths .*: give a dict of"),
        ({"image": np.ones(4), "label": np.ones(4)}, "train set of .'image', 'label'."),
        ({"x": np.ones((4, 2)), "y": np.ones(3)}, "of .'x', 'y'., of lengths .3, 4."),
        (Examples((np.ones((4, 2)), np.ones(4))), "train set of a tuple, of lengths .4."),
        ({"x": np.array([[1], [1, 2]], object), "y": np.ones(2)}, "array of object: .* pad series"),
        ({"x": np.ones((2, 3)), "y": np.array(["a", "b"])}, "array of <U1: give numbers"),
        ({"x": np.ones((0, 3)), "y": np.ones(0)}, "train set without an example"),
    ],
)
def test_sets_that_a_run_cannot_read_are_refused(data, message):
    with pytest.raises(UserError, match=message):
        check_task(Task("yours", None, data, data, RECIPE))
