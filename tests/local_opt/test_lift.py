"""One lift for the worker axis: any axis name, vmap, in turn, any mesh; what is owned, shared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import local_opt
from tests.refused import refuses

W = 4


def mesh_of(kind, axis="worker", inside=None):
    shape, names = ((W,), (axis,)) if inside is None else ((W, 2), (axis, inside))
    return jax.make_mesh(
        shape, names, (kind,) * len(names), devices=jax.devices()[: W * len(shape)]
    )


WAYS = {
    "vmap": lambda axis: W,
    "Auto": lambda axis: mesh_of(AxisType.Auto, axis),
    "Explicit": lambda axis: mesh_of(AxisType.Explicit, axis),
    "make_mesh": lambda axis: jax.make_mesh((W,), (axis,), devices=jax.devices()[:W]),
    "Auto 2": lambda axis: mesh_of(AxisType.Auto, axis, "model"),
    "Explicit 2": lambda axis: mesh_of(AxisType.Explicit, axis, "model"),
}
by_way = pytest.mark.parametrize("way", WAYS)


@functools.cache
def expected(steps=5):
    """NumPy: x_w - 0.1 g_w, and the mean after every second step."""
    x, losses = np.zeros((W, 3)), []
    for t in range(steps):
        batch = np.arange(W * 2 * 3).reshape(W, 2, 3) + t
        losses.append(np.mean((x[:, None] - batch) ** 2, axis=(1, 2)).mean())
        x = x - 0.1 * 2 / 6 * (x[:, None] - batch).sum(1)
        if t % 2:
            x = np.broadcast_to(x.mean(0), x.shape)
    return x, losses


@by_way
@pytest.mark.parametrize("axis", ["worker", "dp"])
def test_a_loop_of_one_worker_is_a_loop_of_all(way, axis):
    """As people write it: a state with a counter, a batch of all, a loss that is printed."""
    workers = WAYS[way](axis)
    plan = local_opt.constant(2, total_steps=6)
    optimizer = local_opt.local_steps(optax.sgd(0.1), plan, axis_name=axis)

    def step(state, batch, scale):
        def loss_of(x):
            return jnp.mean((x[None] - batch) ** 2) * scale

        loss, grads = jax.value_and_grad(loss_of)(state["x"])
        updates, opt = optimizer.update(grads, state["opt"], state["x"])
        x = optax.apply_updates(state["x"], updates)
        return {"x": x, "opt": opt, "step": state["step"] + 1}, {"loss": loss}

    lifted = local_opt.lift(
        step, workers, inputs="owned split shared", outputs="owned mean",
        axis_name=axis,
    )  # fmt: skip
    run = jax.jit(lifted, donate_argnums=0)
    x = jnp.zeros(3)
    state = local_opt.owned({"x": x, "opt": optimizer.init(x), "step": 0}, workers, axis_name=axis)
    losses = []
    for t in range(5):
        batch = jnp.arange(W * 2 * 3.0).reshape(W * 2, 3) + t
        state, metrics = run(state, batch, 1.0)
        losses.append(float(metrics["loss"]))
    x, of_loss = expected()
    np.testing.assert_allclose(state["x"], x, rtol=1e-6)
    np.testing.assert_allclose(losses, of_loss, rtol=1e-6)
    assert state["step"].tolist() == [5] * W
    assert run._cache_size() == 1


@by_way
def test_words_of_arguments_and_results(way):
    workers = WAYS[way]("worker")

    def one(own, shared, rows, key):
        return own + shared, shared * 2, rows + own, jax.random.normal(key), own

    run = local_opt.lift(
        one, workers, inputs="owned shared split key",
        outputs="owned shared split owned mean",
    )  # fmt: skip
    key = jax.random.key(3)
    found = jax.jit(run)(jnp.arange(W), 10, jnp.zeros((2 * W, 1)), key)
    assert found[0].tolist() == [10, 11, 12, 13] and found[1].tolist() == 20
    assert found[2].ravel().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    drawn = [float(jax.random.normal(jax.random.fold_in(key, w))) for w in range(W)]
    np.testing.assert_allclose(found[3], drawn, rtol=1e-6)
    assert found[4].tolist() == 1.5


def test_workers_in_turn_equal_workers_side_by_side():
    def one(x, rows):
        return x * rows.sum(), rows.mean()

    words = {"inputs": "owned split", "outputs": "owned mean"}
    args = jnp.arange(4.0), jnp.arange(8.0)
    side_by_side = local_opt.lift(one, W, **words)(*args)
    in_turn = local_opt.lift(one, W, in_turn=True, **words)(*args)
    jax.tree.map(np.testing.assert_allclose, side_by_side, in_turn)


def test_leaves_that_are_not_arrays_pass_through():
    """An equinox module is a tree with functions in it."""
    model = {"w": jnp.ones(2), "act": jnp.tanh, "name": "net", "flag": True}
    own = local_opt.owned(model, W)
    assert own["act"] is jnp.tanh and own["w"].shape == (W, 2)

    def one(model, x):
        return {**model, "w": model["w"] + x}, model["act"](x)

    run = local_opt.lift(one, W, inputs="owned shared", outputs="owned mean")
    left, y = run(own, 0.5)
    assert left["act"] is jnp.tanh and left["name"] == "net" and left["flag"] is True
    np.testing.assert_allclose(y, np.tanh(0.5), rtol=1e-6)


def test_integers_become_arrays_and_fractions_stay_numbers():
    """An equinox dropout holds its rate as a number, which no optimizer may take for a weight."""
    found = local_opt.owned({"step": 0, "rate": 0.1, "train": True}, W)
    assert found["step"].tolist() == [0] * W
    assert found["rate"] == 0.1 and isinstance(found["rate"], float) and found["train"] is True


@by_way
def test_owned_arrays_lie_on_their_workers_and_share_no_memory(way):
    workers = WAYS[way]("worker")
    x = jnp.arange(4.0)
    own = local_opt.owned({"a": x, "b": x, "n": 3}, workers)
    local_opt.check_synced(own, ulps=0)
    assert own["a"].shape == (W, 4) and own["n"].tolist() == [3] * W
    if way != "vmap":
        assert own["a"].sharding.spec[0] == "worker"
    keep = jax.jit(lambda t: jax.tree.map(jnp.positive, t), donate_argnums=0)
    jax.block_until_ready(keep(own))


@pytest.mark.parametrize("way", ["Auto 2", "Explicit 2"])
def test_arrays_that_are_split_inside_a_worker_stay_split(way):
    mesh = WAYS[way]("worker")
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("model")))
    assert local_opt.owned(x, mesh).sharding.spec == jax.P("worker", "model")


def test_no_collective_is_added():
    mesh = mesh_of(AxisType.Auto)
    run = local_opt.lift(
        lambda x, rows: (x + rows.sum(), rows.mean()), mesh, inputs="owned split",
        outputs="owned owned",
    )  # fmt: skip
    place = jax.NamedSharding(mesh, jax.P("worker"))
    shapes = [jax.ShapeDtypeStruct((n,), jnp.float32, sharding=place) for n in (W, 2 * W)]
    text = jax.jit(run).lower(*shapes).compile().as_text()
    assert not any(name in text for name in ("all-reduce", "all-gather", "all-to-all", "permute"))


def lifted(*args, workers=W, inputs="owned", outputs="owned"):
    return local_opt.lift(lambda x: x, workers, inputs=inputs, outputs=outputs)(*args)


ROWS, SIX = np.ones((W, 3)), np.ones(6)
test_arguments_and_words_that_do_not_fit_are_refused = refuses({
    "none": (lambda: lifted(workers=0), "workers is 0: pass a whole number >= 1, or a mesh"),
    "axis": (
        lambda: lifted(workers=mesh_of(AxisType.Auto, "dp")),
        "axes .*dp.* and the workers' is 'worker'",
    ),
    "owned": (
        lambda: lifted(np.ones(3)), r"shape \(3,\) and there are 4 workers: make it by local_opt"
    ),
    "split": (lambda: lifted(SIX, inputs=("split",)), "a multiple of the 4 workers"),
    "key": (lambda: lifted(SIX, inputs=("key",)), "pass one typed key"),
    "turns": (
        lambda: local_opt.lift(
            len, mesh_of(AxisType.Auto), inputs="owned", outputs="owned", in_turn=True
        ),
        "in_turn is for simulated workers",
    ),
    "turns, shared": (
        lambda: local_opt.lift(len, W, inputs="owned", outputs="shared", in_turn=True),
        "with in_turn no result is shared",
    ),
})  # fmt: skip


ROWS = jnp.arange(8.0)
DIFFERENT = {  # (function, its inputs and outputs, arguments, the name of what differs)
    "own": (lambda x: x, "owned", "shared", (ROWS[:4],), "result 0"),
    "a leaf": (
        lambda x: {"mean": jax.lax.pmean(x, "worker"), "x": {"of": 2 * x}},
        "owned", "shared", (ROWS[:4],), r"result 0\['x'\]\['of'\]",
    ),
    "a gradient": (
        lambda w, x: (jax.lax.pmean(w * x.sum(), "worker"), jax.grad(lambda w: w * x.sum())(w)),
        "shared split", "shared shared", (jnp.ones(()), ROWS), "result 1",
    ),
    "a key": (lambda key: key, "key", "shared", (jax.random.key(0),), "result 0"),
    "the worker": (
        lambda x: (x, jax.lax.axis_index("worker")), "owned", "owned shared", (ROWS[:4],),
        "result 1",
    ),
}  # fmt: skip


@by_way
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("function,inputs,outputs,args,name", DIFFERENT.values(), ids=DIFFERENT)
def test_a_shared_result_that_differs_is_refused_on_one_device_and_on_meshes(
    function, inputs, outputs, args, name, jit, way
):
    lifted = local_opt.lift(function, WAYS[way]("worker"), inputs=inputs, outputs=outputs)
    with pytest.raises(ValueError, match=f"{name} is said to be shared and differs between"):
        (jax.jit(lifted) if jit else lifted)(*args)


@by_way
@pytest.mark.parametrize("jit", [True, False])
def test_shared_results_that_are_equal_pass(way, jit):
    rounds = local_opt.parallel_rounds(optax.adam(0.1))

    def step(w, state, x, count):
        grads = jax.grad(lambda w: jnp.mean((w - x) ** 2))(w)
        updates, state = rounds.update(grads, state, w)
        rows = jax.lax.all_gather(x, "worker", tiled=True)
        return w + updates, state, count + 1, rows, jax.random.key(3)

    lifted = local_opt.lift(
        step, WAYS[way]("worker"), inputs="shared shared split shared",
        outputs="shared shared shared shared shared",
    )  # fmt: skip
    w = jnp.zeros(())
    args = w, rounds.init(w), ROWS, jnp.zeros((), jnp.int32)
    found, state, count, rows, key = (jax.jit(lifted) if jit else lifted)(*args)
    np.testing.assert_allclose(found, 0.1, rtol=1e-5)  # Adam's first step
    np.testing.assert_allclose(state[0].mu, -0.1 * 7, rtol=1e-6)
    assert count == 1 and rows.tolist() == ROWS.tolist() and key == jax.random.key(3)


def test_a_collective_that_only_a_mesh_has_may_make_a_shared_result():
    def halves(x):
        return jax.lax.psum(x, "worker", axis_index_groups=[[0, 1], [2, 3]])

    lifted = local_opt.lift(
        lambda x: jax.lax.psum(halves(x), "worker"), mesh_of(AxisType.Auto), inputs="owned",
        outputs="shared",
    )  # fmt: skip
    assert jax.jit(lifted)(ROWS[:4]) == 12


def test_messages_name_a_single_argument_and_say_what_to_do_with_numbers():
    same = local_opt.lift(lambda x: x, 4, inputs="owned", outputs="owned")
    with pytest.raises(ValueError, match=r"owned leaf \(the argument\) has the shape \(3,\)"):
        same(jnp.ones(3))
    tree = local_opt.owned({"w": jnp.ones(2), "rate": 0.5}, 4)
    assert same(tree)["rate"] == 0.5
    with pytest.raises(ValueError, match=r"\['rate'\] is one number .*by jnp.asarray, before"):
        jax.jit(same)(tree)
    made = local_opt.owned({"w": jnp.ones(2), "rate": jnp.asarray(0.5)}, 4)
    assert jax.jit(same)(made)["rate"].tolist() == [0.5] * 4
