"""One lift for the worker axis: any axis name, vmap, in turn, any mesh; what is owned, shared."""

import collections
import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
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
by_kind = pytest.mark.parametrize("way", ["vmap", "Auto", "Explicit 2"])


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
@pytest.mark.parametrize("axis", ["worker", "dp", None])
def test_a_loop_of_one_worker_is_a_loop_of_all(way, axis):
    """As people write it: a state with a counter, a batch of all, a loss that is printed."""
    workers = WAYS[way](axis or "worker")
    plan = local_opt.constant(2, total_steps=6)
    optimizer = local_opt.local_steps(optax.sgd(0.1), plan, axis_name=axis)
    axis = "worker" if axis is None and "2" in way else axis  # one of several

    def step(state, batch, scale):
        def loss_of(x):
            return jnp.mean((x[None] - batch) ** 2) * scale

        loss, grads = jax.value_and_grad(loss_of)(state["x"])
        updates, opt = optimizer.update(grads, state["opt"], state["x"])
        x = optax.apply_updates(state["x"], updates)
        return {"x": x, "opt": opt, "step": state["step"] + 1}, {"loss": loss}

    lifted = local_opt.lift(step, workers, "owned split shared -> owned mean", axis_name=axis)
    run = jax.jit(lifted, donate_argnums=0)
    x = jnp.zeros(3)
    state = local_opt.replicate(
        {"x": x, "opt": optimizer.init(x), "step": 0}, workers, axis_name=axis
    )
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


def test_leaves_that_are_not_arrays_pass_through():
    """An equinox module is a tree with functions in it."""
    model = {"w": jnp.ones(2), "act": jnp.tanh, "name": "net", "flag": True}
    own = local_opt.replicate(model, W)
    assert own["act"] is jnp.tanh and own["w"].shape == (W, 2)

    def one(model, x):
        return {**model, "w": model["w"] + x}, model["act"](x)

    run = local_opt.lift(one, W, "owned shared -> owned mean")
    left, y = run(own, 0.5)
    assert left["act"] is jnp.tanh and left["name"] == "net" and left["flag"] is True
    np.testing.assert_allclose(y, np.tanh(0.5), rtol=1e-6)
    # Integers become arrays; a rate, as of dropout, is a number and no weight to be trained.
    found = local_opt.replicate({"step": 0, "rate": 0.1}, W)
    assert found["step"].tolist() == [0] * W
    assert found["rate"] == 0.1 and isinstance(found["rate"], float)


@by_kind
def test_owned_arrays_lie_on_their_workers_and_share_no_memory(way):
    workers = WAYS[way]("worker")
    x = jnp.arange(4.0)
    own = local_opt.replicate({"a": x, "b": x, "n": 3}, workers)
    local_opt.check_synced(own, ulps=0)
    assert own["a"].shape == (W, 4) and own["n"].tolist() == [3] * W
    if way != "vmap":
        assert own["a"].sharding.spec[0] == "worker"
    keep = jax.jit(lambda t: jax.tree.map(jnp.positive, t), donate_argnums=0)
    jax.block_until_ready(keep(own))


def lifted(*args, workers=W, roles="owned -> owned"):
    return local_opt.lift(lambda x: x, workers, roles)(*args)


def of_trees(in_roles, out_roles=("owned",), function=lambda state: (state,)):
    lift = local_opt.lift(function, W, in_roles=in_roles, out_roles=out_roles)
    return lift({"x": jnp.zeros((W, 3)), "n": jnp.zeros(W)})


test_arguments_and_words_that_do_not_fit_are_refused = refuses({
    "axis": (
        lambda: lifted(workers=mesh_of(AxisType.Auto, "dp", "model")),
        "axes .*dp.*model.* and the workers' is 'worker'",
    ),
    "owned": (
        lambda: lifted(np.ones(3)),
        r"argument 0 is owned and has the shape \(3,\), and there are 4 workers: make it by local",
    ),
    "turns": (
        lambda: local_opt.lift(len, mesh_of(AxisType.Auto), "owned -> owned", in_turn=True),
        "in_turn is for simulated workers",
    ),
    "turns, shared": (
        lambda: local_opt.lift(len, W, "owned -> shared", in_turn=True),
        "with in_turn no result is shared",
    ),
    "too few": (
        lambda: local_opt.lift(step, W, ROLES)(*start(), 2.0),
        r"3 arguments came for \(state, batch, scale.* and in_roles are .*: give one word",
    ),
    "a number": (
        lambda: jax.jit(lifted)(local_opt.replicate({"rate": 0.5}, W)),
        r"argument 0\['rate'\] is owned and has the shape \(\), .*must be arrays, by jnp.asarray",
    ),
    "legacy keys": (
        lambda: lifted(jax.random.split(jax.random.PRNGKey(0)), roles="key -> owned"),
        r"the key, argument 0, is uint32\[2, 2\]: pass one typed key",
    ),
    "to fold": (
        lambda: local_opt.replicate({"rng": jax.random.PRNGKey(0)}, W, keys="fold"),
        r"leaf \['rng'\] is uint32\[2\], a legacy key or any two numbers: .*wrap_key_data",
    ),
    "no roles": (lambda: local_opt.lift(len, W), "pass roles, as .* or in_roles and out_roles"),
    "a word of a tree": (
        lambda: of_trees(({"x": {"y": "own"}},)),
        r"in_roles\[0\]\['x'\]\['y'\] is 'own': pass one of owned, shared, split, key",
    ),
    "no word": (
        lambda: of_trees(({"x": "owned"},)),
        r"in_roles\[0\] is \{'x': 'owned'\}, without a word for the leaf \['n'\]: add it, or pass",
    ),
    "no leaf": (
        lambda: of_trees(({"x": "owned", "n": "owned", "m": {"v": "owned"}},)),
        r"in_roles\[0\]\['m'\]\['v'\] is a word for a leaf that is not there: leave it out",
    ),
    "another node": (
        lambda: of_trees(("owned",), (collections.OrderedDict(x="owned", n="sum"),)),
        r"out_roles\[0\] is of type OrderedDict and the tree of dict, .*: pass nodes of the same",
    ),
    "a single result": (
        lambda: of_trees(("owned",), {"x": "mean"}, lambda state: state),
        r"out_roles is \{'x': 'mean'\}, without a word for the leaf \['n'\]: add it",
    ),
    "a mean of keys": (
        lambda: lifted({"key": jax.random.split(jax.random.key(0), W)}, roles="owned -> mean"),
        "a key has no mean, as result 0.*'key'.* take 'owned'",
    ),
})  # fmt: skip


ROWS = jnp.arange(8.0)
DIFFERENT = {  # (function, its roles, arguments, the name of what differs)
    "own": (lambda x: x, "owned -> shared", (ROWS[:4],), "result 0"),
    "a leaf": (
        lambda x: {"mean": jax.lax.pmean(x, "worker"), "x": {"of": 2 * x}},
        "owned -> shared", (ROWS[:4],), r"result 0\['x'\]\['of'\]",
    ),
    "a gradient": (
        lambda w, x: (jax.lax.pmean(w * x.sum(), "worker"), jax.grad(lambda w: w * x.sum())(w)),
        "shared split -> shared shared", (jnp.ones(()), ROWS), "result 1",
    ),
    "a key": (lambda key: key, "key -> shared", (jax.random.key(0),), "result 0"),
    "the worker": (
        lambda x: (x, jax.lax.axis_index("worker")), "owned -> owned shared", (ROWS[:4],),
        "result 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", ["vmap", "Auto", "Explicit 2"])
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("function,roles,args,name", DIFFERENT.values(), ids=DIFFERENT)
def test_a_shared_result_that_differs_is_refused_on_one_device_and_on_meshes(
    function, roles, args, name, jit, way
):
    lifted = local_opt.lift(function, WAYS[way]("worker"), roles)
    with pytest.raises(ValueError, match=f"{name} is said to be shared and differs between"):
        (jax.jit(lifted) if jit else lifted)(*args)


# Compiled in every way, and at once where no other axes are: that takes a second a way.
by_way_and_jit = pytest.mark.parametrize(
    "way,jit", [*((way, True) for way in WAYS), ("vmap", False), ("Explicit", False)]
)


@by_way_and_jit
def test_shared_results_that_are_equal_pass(way, jit):
    rounds = local_opt.parallel_rounds(optax.adam(0.1))

    def step(w, state, x, count):
        grads = jax.grad(lambda w: jnp.mean((w - x) ** 2))(w)
        updates, state = rounds.update(grads, state, w)
        rows = jax.lax.all_gather(x, "worker", tiled=True)
        return w + updates, state, count + 1, rows, jax.random.key(3)

    roles = "shared shared split shared -> shared shared shared shared shared"
    lifted = local_opt.lift(step, WAYS[way]("worker"), roles)
    w = jnp.zeros(())
    args = w, rounds.init(w), ROWS, jnp.zeros((), jnp.int32)
    found, state, count, rows, key = (jax.jit(lifted) if jit else lifted)(*args)
    np.testing.assert_allclose(found, 0.1, rtol=1e-5)  # Adam's first step
    np.testing.assert_allclose(state[0].mu, -0.1 * 7, rtol=1e-6)
    assert count == 1 and rows.tolist() == ROWS.tolist() and key == jax.random.key(3)


def test_a_collective_that_only_a_mesh_has_may_make_a_shared_result():
    def total(x):
        halves = jax.lax.psum(x, "worker", axis_index_groups=[[0, 1], [2, 3]])
        return jax.lax.psum(halves, "worker")

    lifted = local_opt.lift(total, mesh_of(AxisType.Auto), "owned -> shared")
    assert jax.jit(lifted)(ROWS[:4]) == 12


# Words in trees: leaves of one argument, or of one result, with words of their own.


class State(NamedTuple):
    params: Any
    step: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    x: Any
    rate: Any
    name: str = dataclasses.field(default="train", metadata={"static": True})


X, RATE = np.arange(2.0 * W * 3).reshape(2 * W, 3), 0.5
START = {"w": np.arange(W * 3.0).reshape(W, 3), "b": np.arange(W) - 1.0}
BY_HAND = {  # with the mean of each worker's rows
    "w": START["w"] + 7 * RATE * X.reshape(W, 2, 3).mean(1),
    "b": START["b"] + 7,
}


def moved(state, batch, key):
    change = state.step * batch.rate
    params = {
        "w": state.params["w"] + change * batch.x.mean(0),
        "b": state.params["b"] + state.step,
    }
    metrics = {"loss": batch.x.sum(), "seen": (len(batch.x), True), "drawn": jax.random.normal(key)}
    return State(params, state.step + 1), Batch(2 * batch.x, batch.rate), metrics


@pytest.mark.parametrize(
    "way,jit", [*((way, True) for way in (*WAYS, "turns")), ("vmap", False), ("turns", False)]
)
def test_words_may_be_trees_of_named_tuples_and_dataclasses(way, jit):
    turns = way == "turns"
    workers = W if turns else WAYS[way]("worker")
    shared = "owned" if turns else "shared"  # no result is shared then
    lifted = local_opt.lift(
        moved, workers, in_turn=turns,
        in_roles=(State({"w": "owned", "b": "owned"}, "shared"), Batch("split", "shared"), "key"),
        out_roles=(
            State("owned", shared), Batch("split", shared),
            {"loss": "mean", "seen": ("sum", "owned"), "drawn": "owned"},
        ),
    )  # fmt: skip
    state = State(jax.tree.map(jnp.asarray, START), jnp.asarray(7))
    key = jax.random.key(3)
    found = (jax.jit(lifted) if jit else lifted)(state, Batch(jnp.asarray(X), RATE), key)
    state, batch, metrics = found
    assert type(state) is State and type(batch) is Batch and batch.name == "train"
    assert state.params.keys() == START.keys()
    for name, of_all in BY_HAND.items():
        np.testing.assert_allclose(state.params[name], of_all, rtol=1e-6)
    assert state.step.tolist() == (W * [8] if turns else 8)
    np.testing.assert_array_equal(batch.x, 2 * X)
    np.testing.assert_array_equal(batch.rate, RATE)
    np.testing.assert_allclose(metrics["loss"], X.sum() / W, rtol=1e-6)
    assert metrics["seen"][0] == 2 * W, "a number of Python is every worker's"
    assert np.shape(metrics["seen"][1]) == () and metrics["seen"][1], "and passes beside a sum"
    drawn = [jax.random.normal(jax.random.fold_in(key, w)) for w in range(W)]
    np.testing.assert_allclose(metrics["drawn"], drawn, rtol=1e-6)


def test_a_tree_of_words_leaves_out_what_is_none():
    """As a tree made by `jax.tree.map` from a model without a bias does."""
    state = {"w": jnp.arange(W), "bias": None}
    roles = jax.tree.map(lambda _: "owned", state)
    found = local_opt.lift(lambda x: x, W, in_roles=(roles,), out_roles=roles)(state)
    assert found["w"].tolist() == [0, 1, 2, 3] and found["bias"] is None


def test_leaves_that_are_named_alike_are_told_apart():
    class Name(int):
        def __repr__(self):
            return "name"

    state = {Name(n): n * jnp.arange(W) for n in (1, 2)}
    found = local_opt.lift(lambda x: x, W, "owned -> owned")(state)
    assert [x.tolist() for x in found.values()] == [[0, 1, 2, 3], [0, 2, 4, 6]]


# How a lifted function is called: as the function that it wraps, by position and by keyword.

MESH = mesh_of(AxisType.Auto)
CALLED = {
    "vmap": {"workers": W}, "mesh": {"workers": MESH}, "turns": {"workers": W, "in_turn": True}
}  # fmt: skip
by_call = pytest.mark.parametrize("way", CALLED)
ROLES = "owned split -> owned mean"


def step(state, batch, scale=1.0, *, power: int = 1, train: bool = True):
    """One step of one worker."""
    if not train:
        return state, batch.mean()
    return state + scale * batch.mean() ** power, batch.mean()


def start():
    return jnp.zeros(W), jnp.arange(2.0 * W)


MEANS = 2 * np.arange(W) + 0.5  # of each worker's rows


def test_a_lifted_function_has_the_name_signature_and_docstring_of_its_own():
    lifted = local_opt.lift(step, W, ROLES)
    assert inspect.signature(lifted) == inspect.signature(step)
    assert lifted.__name__ == "step" and lifted.__doc__ == step.__doc__


@by_call
def test_arguments_are_given_by_keyword_and_words_belong_to_parameters(way):
    lifted = local_opt.lift(step, **CALLED[way], roles=ROLES)
    state, batch = start()
    for found in (lifted(state, batch=batch), lifted(batch=batch, state=state)):
        np.testing.assert_allclose(found[0], MEANS)
        np.testing.assert_allclose(found[1], MEANS.mean())
    np.testing.assert_allclose(lifted(state, batch, power=2)[0], MEANS**2)
    lifted = local_opt.lift(step, **CALLED[way], roles="owned split owned -> owned mean")
    scale = jnp.arange(float(W))
    np.testing.assert_allclose(lifted(state, batch)[0], MEANS)
    np.testing.assert_allclose(lifted(state, scale=scale, batch=batch)[0], scale * MEANS)


@by_call
def test_jit_may_name_what_is_donated_and_what_is_static(way):
    lifted = local_opt.lift(step, **CALLED[way], roles=ROLES)
    run = jax.jit(lifted, donate_argnames="state", static_argnames=("power", "train"))
    state, batch = start()
    if way == "mesh":
        state = local_opt.replicate(jnp.zeros(()), MESH)
    after, _ = run(state, batch=batch, power=3)
    np.testing.assert_allclose(after, MEANS**3)
    assert state.is_deleted()
    assert run(after, batch, train=False)[0].tolist() == (MEANS**3).tolist()


def test_functions_of_any_number_of_arguments_take_words_by_position():
    def total(*rows, offset=0):
        return sum(rows) + offset

    lifted = local_opt.lift(total, W, "owned shared owned -> owned")
    ones = jnp.ones(W)
    assert lifted(ones, 2.0, ones, offset=jnp.arange(2)).tolist() == [[4, 5]] * W
    partial = functools.partial(step, power=2)
    found, _ = local_opt.lift(partial, W, ROLES)(*start())
    np.testing.assert_allclose(found, MEANS**2)
    assert local_opt.lift(jax.jit(step), W, ROLES)(*start())[0].shape == (W,)


@by_call
def test_sums_and_means_are_over_all_workers_and_of_whole_numbers_too(way):
    def right(shift, rows):
        narrow = jnp.full((), 100, jnp.int8) + shift.astype(jnp.int8)
        return {"right": rows > 3, "count": rows.size, "narrow": narrow}, rows

    lifted = local_opt.lift(right, **CALLED[way], roles="owned split -> sum sum")
    counts, rows = jax.jit(lifted)(jnp.zeros(W), jnp.arange(2.0 * W))
    assert counts["right"].tolist() == [2, 2] and counts["right"].dtype == jnp.int32
    assert counts["narrow"].tolist() == 400, "not in eight bits"
    assert counts["count"].tolist() == 2 * W, "numbers of Python are every worker's"
    np.testing.assert_allclose(rows, [12, 16])
    lifted = local_opt.lift(lambda x: (x, x > 1), **CALLED[way], roles="owned -> mean mean")
    mean, share = jax.jit(lifted)(jnp.arange(W))
    assert float(mean) == 1.5 and float(share) == 0.5


# Random keys inside a tree: copied to every worker with a warning, or one of each worker's own.

everywhere = pytest.mark.parametrize(
    "workers", [W, MESH, mesh_of(AxisType.Explicit)], ids=["vmap", "Auto", "Explicit"]
)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def dropped(workers, **options):
    """Which numbers each worker drops, in two steps of a model of flax.nnx."""
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def step(state, x):
        model = nnx.merge(graph, state)
        return nnx.state(model), model(x) == 0

    run = jax.jit(local_opt.lift(step, workers, "owned shared -> owned owned"))
    state, found = local_opt.replicate(state, workers, **options), []
    for _ in range(2):
        state, zeros = run(state, jnp.ones((5, 3)))
        found.append(np.asarray(zeros))
    return np.stack(found, 1)  # [W, steps, rows, features]


@everywhere
def test_workers_of_nnx_have_their_own_dropout_with_folded_keys(workers):
    own = dropped(workers, keys="fold")
    masks = {mask.tobytes() for worker in own for mask in worker}
    assert len(masks) == 2 * W, "every worker's, and every step's"
    message = r"same key \['dropout'\]\['rngs'\].*key.* keys='fold'.* keys='copy'"
    with pytest.warns(UserWarning, match=message):
        same = dropped(workers)
    assert (same == same[:1]).all() and (same[0, 0] != same[0, 1]).any()
    np.testing.assert_array_equal(dropped(workers, keys="copy"), same)


def test_the_key_of_a_worker_is_folded_with_its_number():
    keys = jax.random.split(jax.random.key(4))
    own = local_opt.replicate({"of": keys}, W, keys="fold")["of"]
    for w in range(W):
        alone = jax.vmap(jax.random.fold_in, (0, None))(keys, w)
        assert (own[w] == alone).all()


@by_kind
def test_a_legacy_key_is_the_typed_one_of_its_numbers(way):
    workers = WAYS[way]("worker")
    draw = local_opt.lift(jax.random.normal, workers, "key -> owned")
    found = [jax.jit(draw)(key) for key in (jax.random.PRNGKey(5), jax.random.key(5))]
    alone = [jax.random.normal(jax.random.fold_in(jax.random.key(5), w)) for w in range(W)]
    np.testing.assert_array_equal(found[0], alone)
    np.testing.assert_array_equal(found[1], alone)


def test_legacy_keys_in_a_state_are_copied_with_a_warning():
    key = jax.random.PRNGKey(5)
    with pytest.warns(UserWarning, match=r"the same key \['rng'\]"):
        own = local_opt.replicate({"rng": key, "x": jnp.ones(3)}, W)
    np.testing.assert_array_equal(own["rng"], np.tile(key, (W, 1)))
    one = local_opt.mean_over_workers(own)["rng"]
    np.testing.assert_array_equal(jax.random.normal(one), jax.random.normal(key))


@by_kind
def test_the_mesh_may_be_the_one_in_scope_where_a_step_is_called(way):
    """One lifted function, also compiled, follows the mesh; without one it asks for it."""

    def step(x, rows, key):
        return x + rows.sum(), jax.random.normal(key), jax.lax.pmean(x, "worker")

    lifted = local_opt.lift(step, roles="owned split key -> owned owned shared")
    rows, key, run = jnp.arange(2.0 * W), jax.random.key(3), jax.jit(lifted)
    for call in (run, lifted, lambda *_: local_opt.replicate(key, keys="copy")):
        with pytest.raises(ValueError, match=r"no mesh is in scope: enter one, .*jax.set_mesh"):
            call(jnp.zeros(W), rows, key)
    if way == "vmap":
        return
    with jax.set_mesh(WAYS[way]("worker")):
        x = local_opt.replicate(jnp.ones(()))
        assert x.sharding.spec[0] == "worker"
        for call in (run, lifted):
            found, drawn, mean = call(x, rows, key)
            np.testing.assert_array_equal(found, 1 + np.arange(2 * W).reshape(W, 2).sum(1))
            alone = [jax.random.normal(jax.random.fold_in(key, w)) for w in range(W)]
            np.testing.assert_allclose(drawn, alone, rtol=1e-6)
            assert float(mean) == 1
    with jax.set_mesh(mesh_of(AxisType.Auto, "dp", "model")):
        with pytest.raises(ValueError, match="axes .*dp.* and the workers' is 'worker'"):
            run(x, rows, key)
