"""The loop: workers agree however they run, steps hold what they should, errors name things."""

import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import models
import ordering
from experiments import evaluate, metrics, steps, training
from experiments.methods import METHODS
from experiments.partition import partition
from experiments.tasks import TASKS, Recipe, Task
from local_opt import runners
from tests import tables

RECIPE = Recipe(
    workers=4, units_per_step=2, unit_size=1, epochs=3, learning_rates=(0.05,), momentum=0.9,
    bound_every=2,
)  # fmt: skip


def small_task(num_train=44, model=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_train + 12, 6)).astype(np.float32)
    y = (x[:, 0] + 0.5 * rng.normal(size=len(x)) > 0).astype(np.int32)
    model = model or models.softmax_regression(num_features=6, num_classes=2, l2=1e-2)
    train = {"x": x[:num_train], "y": y[:num_train]}
    test = {"x": x[num_train:], "y": y[num_train:]}
    return Task("small", model, train, test, RECIPE, lambda: models.optimum(model, train))


def run(task, recipe, name="cd_grab", **options):
    program = training.build(task, METHODS[name], recipe, **options)
    return list(training.train(recipe, program, seed=0, rate=recipe.learning_rates[0]))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains(name):
    records = run(small_task(), RECIPE, name)
    assert [r["epoch"] for r in records] == [0, 1, 2, 3]
    assert [r["step"] for r in records] == [0, 6, 12, 18]  # 11 units, 2 per step
    assert records[-1]["train_loss"] < 0.6 < records[0]["train_loss"]
    assert ["bound_linf" in r for r in records] == [True, False, True, True]  # and at the end


@pytest.mark.parametrize(
    "units_per_step,unit_size,name",
    [
        (2, 1, "cd_grab"), (1, 2, "cd_grab"), (3, 1, "cd_grab"), (2, 2, "cd_grab"),
        (3, 1, "rr"), (2, 2, "rr"), (3, 1, "id_pair"),
    ],
)  # fmt: skip
def test_mesh_equals_simulation_equals_stream(name, units_per_step, unit_size):
    task = small_task()
    recipe = RECIPE._replace(units_per_step=units_per_step, unit_size=unit_size)
    finals = []
    streamed = [{"streamed": True}] if importlib.util.find_spec("tensorflow") else []
    for options in ({}, {"mesh": runners.worker_mesh(4)}, *streamed):
        program = training.build(task, METHODS[name], recipe, **options)
        state, orders, front = *program.init(0, 0.5), None
        for _ in range(2):
            state, orders, metrics, front = program.epoch(state, orders, jax.random.key(0), front)
        finals.append((state.params, orders.current, metrics.loss))
    for params, current, losses in finals[1:]:
        np.testing.assert_array_equal(current, finals[0][1])
        np.testing.assert_allclose(losses, finals[0][2], rtol=1e-4)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            params,
            finals[0][0],
        )


def test_equals_a_plain_loop_over_workers():
    """Two epochs of D-RR against optax by hand, with the last step of an epoch shorter."""
    task, recipe = small_task(), RECIPE
    program = training.build(task, METHODS["rr"], recipe)
    state, orders = program.init(0, 0.5)
    expected = state.params
    optimizer = optax.sgd(0.5, momentum=0.9)
    opt_state = optimizer.init(expected)
    current = [np.asarray(orders.current), np.asarray(orders.next)]
    data = partition(task.train, 4, 1)
    for epoch in range(2):
        for start, stop in tables.steps(11, 2):
            units = current[epoch][:, start:stop]
            batch = {
                k: np.concatenate([v[w, units[w], 0] for w in range(4)]) for k, v in data.items()
            }
            grad = jax.grad(lambda p, b: jnp.mean(task.model.loss(p, b, None)))(expected, batch)
            updates, opt_state = optimizer.update(grad, opt_state, expected)
            expected = optax.apply_updates(expected, updates)
        state, orders, _, _ = program.epoch(state, orders, jax.random.key(0))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.params, expected
    )


def compiled_step(method, units_per_step, num_workers=4, name=None):
    """HLO text of one training step under shard_map."""
    model = models.softmax_regression(num_features=6, num_classes=2)
    optimizer = optax.sgd(0.1)
    shown = steps.units_per_observe(units_per_step)
    order = method.make(training.Setting(12, shown, num_workers, 3))
    step = steps.worker_step(
        model.loss, optimizer, observes=method.observes,
        exchanges=method.coordinated and units_per_step == 1,
    )  # fmt: skip
    chunk = steps.worker_chunk(step, order, units_per_step=units_per_step, observes=method.observes)
    mesh = runners.worker_mesh(num_workers)
    run = runners.over_mesh(mesh)
    params = model.init(jax.random.key(0))
    keys = jax.random.split(jax.random.key(0), num_workers)
    init = run(lambda k, p: (order.init(k, p),), owned_in=(True, False), owned_out=(True,))
    (orders,) = jax.jit(init)(keys, params)
    batch = {
        "x": jnp.zeros((num_workers, shown, 1, 6)),
        "y": jnp.zeros((num_workers, shown, 1), jnp.int32),
    }
    owned = (False, True, True, True, False)
    function = jax.jit(run(chunk, owned_in=owned, owned_out=(False, True, True)))
    return function.lower(
        steps.init_train_state(params, optimizer),
        orders,
        batch,
        orders.current[:, :shown],
        jax.random.key(0),
    ).compile().as_text()  # fmt: skip


def count(text, collective):
    return sum(
        f" {collective}(" in line or f" {collective}-start(" in line for line in text.split("\n")
    )


def test_collectives_in_the_compiled_step():
    """Two steps of one unit: per step an all-to-all and an all-gather replace the all-reduce."""
    text = compiled_step(METHODS["cd_grab"], 1)
    assert count(text, "all-to-all") == 2
    assert count(text, "all-gather") == 2
    assert count(text, "all-reduce") == 1
    assert re.search(r"= f32\[4,5\]\S* all-reduce", text)  # all inner products at once, W (W + 1)
    text = compiled_step(METHODS["id_pair"], 1)
    assert count(text, "all-to-all") == count(text, "all-gather") == 0
    plain = compiled_step(METHODS["rr"], 1)
    assert count(text, "all-reduce") == count(plain, "all-reduce")
    text = compiled_step(METHODS["cd_grab"], 2)
    assert count(text, "all-to-all") == 1  # the differences of the pairs


def test_coordination_moves_no_more_bytes_than_an_all_reduce():
    """An all-to-all and an all-gather of D entries are the two halves of a ring all-reduce."""
    text = compiled_step(METHODS["cd_grab"], 1)
    padded = 16  # 6 x 2 weights and 2 biases, padded to a multiple of 4 workers
    sent = []
    for line in text.split("\n"):
        if found := re.search(r"= (.*?) (all-to-all|all-gather)\(", line):
            shapes = re.findall(r"f32\[([\d,]+)\]", found[1])
            sent.append(sum(math.prod(map(int, shape.split(","))) for shape in shapes))
    assert sent == [padded] * 4  # of two steps
    assert "f64" not in text and "bf16" not in text


def test_the_second_epoch_never_recompiles():
    task = small_task()
    program = training.build(task, METHODS["cd_grab"], RECIPE)
    state, orders = program.init(0, 0.5)
    for _ in range(2):  # an epoch compiled ahead refuses arguments of another shape or dtype
        state, orders, *_ = program.epoch(state, orders, jax.random.key(0))
    assert int(state.step) == 12


def test_a_unit_that_is_not_finite_is_named():
    task = small_task()
    task.train["x"][4 * 0 + 11 * 2 + 5, 3] = np.nan  # worker 2, unit 5
    for name, unit_size in (("cd_grab", 1), ("rr", 1), ("id_mean", 1)):
        with pytest.raises(FloatingPointError, match="unit 5 of worker 2 .* in step [0-5] "):
            run(task, RECIPE._replace(unit_size=unit_size), name)
    pytest.importorskip("tensorflow")
    with pytest.raises(FloatingPointError, match="unit 5 of worker 2 "):
        run(task, RECIPE, "cd_grab", streamed=True)


def test_bad_settings():
    task = small_task()
    with pytest.raises(ValueError, match="50 workers with units of 1"):
        training.build(task, METHODS["rr"], RECIPE._replace(workers=50))
    with pytest.raises(ValueError, match="units_per_step is 12"):
        training.build(task, METHODS["rr"], RECIPE._replace(units_per_step=12))
    with pytest.raises(ValueError, match="9 workers need as many devices"):
        runners.worker_mesh(9)
    for field, value in (
        ("epochs", 0),
        ("learning_rates", (-1.0,)),
        ("momentum", 1.0),
        ("bound_every", -1),
        ("weight_decay", -0.5),
        ("decay_every", 0),
        ("decay_factor", 1.5),
    ):
        with pytest.raises(ValueError, match=str(value).strip("(),")):
            training.check_recipe(RECIPE._replace(**{field: value}))


def test_a_model_that_mixes_examples_is_refused():
    model = models.softmax_regression(num_features=6, num_classes=2)

    def loss(params, batch, key):
        x = batch["x"] - jnp.mean(batch["x"], axis=0, keepdims=True)
        return model.loss(params, batch | {"x": x}, key) + jnp.sum(jnp.square(x), axis=1)

    task = small_task(model=model._replace(loss=loss))
    with pytest.raises(ValueError, match="mixes the examples"):
        training.build(task, METHODS["cd_grab"], RECIPE)
    training.build(task, METHODS["cd_grab"], RECIPE._replace(units_per_step=1, unit_size=4))


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
    found = {name: run(task, recipe, name) for name in ("rr", "cd_grab")}
    first, *_, last = found["cd_grab"]
    assert last["train_loss"] < first["train_loss"] and 0 <= last["test_accuracy"] <= 1
    # The first epoch has the same order, and a unit is its own batch under every method.
    np.testing.assert_allclose(
        found["rr"][1]["train_loss"], found["cd_grab"][1]["train_loss"], rtol=1e-4
    )
    with pytest.raises(ValueError, match="one example is no unit"):
        training.build(task, METHODS["cd_grab"], recipe._replace(unit_size=1))


def test_evaluation_in_chunks_equals_the_whole(monkeypatch):
    task = small_task()
    params = jax.tree.map(lambda p: p + 0.3, task.model.init(jax.random.key(0)))
    whole = float(evaluate.mean_loss(task.model)(params, None, task.train))
    share = float(metrics.measured(task.model, "accuracy")(params, None, task.train))
    monkeypatch.setattr(evaluate, "CHUNK", 10)
    np.testing.assert_allclose(
        float(evaluate.mean_loss(task.model)(params, None, task.train)), whole, rtol=1e-6
    )
    assert float(metrics.measured(task.model, "accuracy")(params, None, task.train)) == share


@pytest.mark.parametrize(
    "name,word", [("hmda", "pasta41/hmda-data-2017"), ("mnist", "download_and_prepare")]
)
def test_missing_data_says_where_to_get_them(name, word, tmp_path):
    for folder in (None, str(tmp_path)):
        with pytest.raises(ValueError, match=word):
            TASKS[name](folder)


def test_order_state_survives_a_checkpoint(tmp_path):
    """A restored state gives the same orders: the state is one tree of arrays and keys."""
    import orbax.checkpoint as ocp

    order = ordering.cd_grab(9, rule=ordering.self_balancing_walk(bound=100.0))
    gradients = jnp.asarray(tables.whole_numbers((2, 9, 3)))
    keys = jax.random.split(jax.random.key(0), 2)
    state = tables.vmap_workers(lambda k, g: order.init(k, g[0]))(keys, gradients)

    def some_steps(state, gradients, start):
        for k in range(4):
            unit = state.current[start + k][None]
            state = order.observe(state, ordering.Rows.of(gradients[unit]))
        return state

    run_some = tables.vmap_workers(some_steps)
    middle = run_some(state, gradients, jnp.zeros(2, jnp.int32))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", middle)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: middle))
    follow = tables.vmap_workers(lambda s, g: tables.run_epoch(order, order.next_epoch(s), g, 1))
    np.testing.assert_array_equal(
        follow(run_some(middle, gradients, jnp.full(2, 4)), gradients).current,
        follow(run_some(restored, gradients, jnp.full(2, 4)), gradients).current,
    )
