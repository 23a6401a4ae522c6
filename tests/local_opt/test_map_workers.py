"""One map over workers: any axis name, vmap, in turn, any mesh; what specs say and refuse."""

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import local_opt
from tests.cases import mostly_slow
from tests.compiled_runs import compilations

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
by_way = pytest.mark.parametrize("way", mostly_slow(WAYS, quick=("vmap", "Auto", "Explicit 2")))
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

    run = local_opt.map_workers(
        step,
        workers,
        in_specs=("worker", "batch", "replicated"),
        out_specs=("worker", "mean"),
        axis_name=axis,
    )
    run = jax.jit(run, donate_argnums=0)
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
    copies = local_opt.replicate(model, W)
    assert copies["act"] is jnp.tanh and copies["w"].shape == (W, 2)

    def one(model, x):
        return {**model, "w": model["w"] + x}, model["act"](x)

    run = local_opt.map_workers(
        one, W, in_specs=("worker", "replicated"), out_specs=("worker", "mean")
    )
    left, y = run(copies, 0.5)
    assert left["act"] is jnp.tanh and left["name"] == "net" and left["flag"] is True
    np.testing.assert_allclose(y, np.tanh(0.5), rtol=1e-6)
    # Integers become arrays; a rate, as of dropout, is a number and no weight to be trained.
    result = local_opt.replicate({"step": 0, "rate": 0.1}, W)
    assert result["step"].tolist() == [0] * W
    assert result["rate"] == 0.1 and isinstance(result["rate"], float)


@by_kind
def test_replicated_arrays_lie_on_their_workers_and_share_no_memory(way):
    workers = WAYS[way]("worker")
    x = jnp.arange(4.0)
    copies = local_opt.replicate({"a": x, "b": x, "n": 3}, workers)
    local_opt.check_synced(copies, ulps=0)
    assert copies["a"].shape == (W, 4) and copies["n"].tolist() == [3] * W
    if way != "vmap":
        assert copies["a"].sharding.spec[0] == "worker"
    keep = jax.jit(lambda t: jax.tree.map(jnp.positive, t), donate_argnums=0)
    jax.block_until_ready(keep(copies))


SPECS = {"in_specs": ("worker", "batch"), "out_specs": ("worker", "mean")}


def step(state, batch, scale=1.0, *, power: int = 1, train: bool = True):
    """One step of one worker."""
    if not train:
        return state, batch.mean()
    return state + scale * batch.mean() ** power, batch.mean()


def start():
    return jnp.zeros(W), jnp.arange(2.0 * W)


ROWS = jnp.arange(8.0)
DIFFERENT = {  # (function, its in_specs, arguments, the name of what differs)
    "own": (lambda x: x, "worker", (ROWS[:4],), "result"),
    "a leaf": (
        lambda x: {"mean": jax.lax.pmean(x, "worker"), "x": {"of": 2 * x}},
        "worker",
        (ROWS[:4],),
        r"result\['x'\]\['of'\]",
    ),
    "a gradient": (
        lambda w, x: (jax.lax.pmean(w * x.sum(), "worker"), jax.grad(lambda w: w * x.sum())(w)),
        ("replicated", "batch"),
        (jnp.ones(()), ROWS),
        r"result\[1\]",
    ),
    "a key": (lambda key: key, "key", (jax.random.key(0),), "result"),
    "the worker": (
        lambda x: (jax.lax.psum(x, "worker"), jax.lax.axis_index("worker")),
        "worker",
        (ROWS[:4],),
        r"result\[1\]",
    ),
}


@pytest.mark.parametrize("way", ["vmap", "Auto", "Explicit 2"])
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("function,in_specs,args,name", DIFFERENT.values(), ids=DIFFERENT)
def test_a_replicated_result_that_differs_is_refused_on_one_device_and_on_meshes(
    function, in_specs, args, name, jit, way
):
    run = local_opt.map_workers(
        function, WAYS[way]("worker"), in_specs=in_specs, out_specs="replicated"
    )
    with pytest.raises(ValueError, match=f"{name} is 'replicated' in out_specs"):
        (jax.jit(run) if jit else run)(*args)


HALVES, SCALAR = [[0, 1], [2, 3]], jax.ShapeDtypeStruct((), "f")
UNPROVED = {  # what devices do and jax.vmap does not; None: it does on one device
    "psum of groups": (
        lambda x: jax.lax.psum(x, "worker", axis_index_groups=HALVES),
        NotImplementedError,
    ),
    "ppermute of some": (lambda x: jax.lax.ppermute(x, "worker", [(0, 1), (1, 0)]), AssertionError),
    "pure_callback": (lambda x: jax.pure_callback(lambda x: x, x, x), NotImplementedError),
    "io_callback": (lambda x: jax.experimental.io_callback(lambda: np.float32(1), SCALAR), None),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_what_is_not_proved_to_be_replicated_is_refused_on_a_mesh(name):
    function, alone = UNPROVED[name]
    for way in ("Auto", "Explicit"):
        over = WAYS[way]("worker")
        run = local_opt.map_workers(function, over, in_specs="worker", out_specs="replicated")
        with pytest.raises(ValueError, match="result is 'replicated' .* 'worker'"):
            jax.jit(run)(ROWS[:4])
    run = local_opt.map_workers(function, W, in_specs="worker", out_specs="replicated")
    with contextlib.nullcontext() if alone is None else pytest.raises(alone):  # not a wrong number
        jax.jit(run)(ROWS[:4])
    if "callback" not in name:
        run = local_opt.map_workers(function, over, in_specs="worker", out_specs="worker")
        assert len(jax.jit(run)(ROWS[:4])) == W


def test_an_error_of_the_step_is_not_one_of_the_proof():
    run = local_opt.map_workers(
        lambda x: x.reshape(3), mesh_of(AxisType.Auto), in_specs="worker", out_specs="replicated"
    )
    with pytest.raises(TypeError, match="cannot reshape array"):
        jax.jit(run)(ROWS[:4])


NOTHING_MAPPED = {  # of which function of a replicated x over W = 4 workers
    "the worker": (lambda x: x + jax.lax.axis_index("worker"), "worker", [1, 2, 3, 4]),
    "a sum": (lambda x: jax.lax.psum(x, "worker"), "replicated", 4),
    "a mean": (lambda x: x * jax.lax.axis_index("worker"), "mean", 1.5),
    "rows": (lambda x: x[None] + jax.lax.axis_index("worker"), "batch", [1, 2, 3, 4]),
}


@by_way
@pytest.mark.parametrize("name", NOTHING_MAPPED)
def test_a_function_of_replicated_arguments_alone_runs_on_every_worker(way, name):
    function, out_specs, expected = NOTHING_MAPPED[name]
    over = WAYS[way]("worker")
    run = local_opt.map_workers(function, over, in_specs="replicated", out_specs=out_specs)
    assert run(jnp.ones(())).tolist() == expected


def test_workers_in_turn_need_no_mapped_argument():
    run = local_opt.map_workers(
        jnp.negative, W, in_specs="replicated", out_specs="worker", in_turn=True
    )
    assert run(jnp.ones(())).tolist() == [-1] * W


@pytest.mark.parametrize("way", ["vmap", "Auto", "Explicit 2"])
def test_a_step_is_traced_once_and_compiled_once(way):
    traced = []

    def step(x, rows):
        traced.append(way)
        return x + jax.lax.pmean(rows.sum(), "worker"), rows

    over = WAYS[way]("worker")
    specs = {"in_specs": ("replicated", "batch"), "out_specs": ("replicated", "batch")}
    run = jax.jit(local_opt.map_workers(step, over, **specs))
    for _ in range(2):
        assert run(jnp.ones(()), ROWS)[0] == 8
    assert len(traced) == 1, "the proof takes the same trace"
    traced.clear()
    run = local_opt.map_workers(step, over, **specs)  # not jitted
    with compilations() as compiled:
        for _ in range(3):
            run(jnp.ones(()), ROWS)
    if "2" in way:  # JAX compiles it
        assert len(traced) == 1 and len(compiled) <= 1
        run(1, ROWS), run(1.0, ROWS), run(True, ROWS)
        assert len(traced) == 4, "1 == 1.0 == True, and they are other programs"


@by_way
def test_a_leaf_without_a_hash_passes_through(way):
    class Setting:
        __hash__ = None  # as a dataclass has, which is not frozen

    run = local_opt.map_workers(
        lambda setting, x: (setting, 2 * x),
        WAYS[way]("worker"),
        out_specs="worker",
        in_specs=("replicated", "worker"),
    )
    setting, x = run(Setting(), ROWS[:4])
    assert type(setting) is Setting and x.tolist() == [0, 2, 4, 6]


def test_sizes_of_an_equinox_module_stay_whole_numbers():
    eqx = pytest.importorskip("equinox")

    class Cell(eqx.Module):
        size: int
        w: Any
        activation: Any = jnp.tanh

        def __call__(self, x):
            return jnp.zeros(self.size) + self.w * x

    tree = local_opt.replicate({"net": {"cell": Cell(3, jnp.ones(()))}, "step": 0}, W)
    cell = tree["net"]["cell"]
    assert cell.size == 3 and type(cell.size) is int and cell.w.shape == (W,)
    assert tree["step"].tolist() == [0] * W, "a counter of a state is an array"
    run = local_opt.map_workers(lambda cell, x: cell(x), W, in_specs="worker", out_specs="worker")
    assert eqx.filter_jit(run)(cell, jnp.arange(4.0)).tolist() == [[w] * 3 for w in range(W)]
    again = local_opt.map_workers(lambda cell: cell, W, in_specs="worker", out_specs="worker")
    assert type(eqx.filter_jit(again)(cell).size) is int
    one = local_opt.mean_over_workers(tree)["net"]["cell"]
    assert type(one.size) is int and one.activation is jnp.tanh and one.w.shape == ()


def test_a_plan_takes_the_mean_of_an_equinox_model_whole():
    eqx = pytest.importorskip("equinox")
    model = local_opt.replicate(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), 2)
    rows = jnp.arange(2.0)[:, None]
    model = eqx.tree_at(lambda m: m.layers[0].bias, model, jnp.tile(rows, (1, 4)))
    after = local_opt.constant(1, total_steps=1).after(0, model, 2)
    assert after.activation is model.activation and after.layers[0].in_features == 3
    np.testing.assert_array_equal(after.layers[0].bias, np.full((2, 4), 0.5))


@by_kind
def test_equal_starts_are_compiled_once(way):
    over = WAYS[way]("worker")
    state = {"x": jnp.arange(7.0), "key": jax.random.key(0)}
    local_opt.replicate(state, over, keys="fold")
    with compilations() as compiled:
        for _ in range(3):
            local_opt.replicate(state, over, keys="fold")
    assert not compiled


@by_kind
def test_trees_of_empty_arrays_alone(way):
    """XLA fails on such programs, where they are passed to devices."""
    rounds = local_opt.local_rounds(optax.sgd(0.1), outer=optax.sgd(0.7, 0.9))
    empty = {"a": jnp.zeros((W, 0, 3)), "b": jnp.zeros((W, 0))}
    run = local_opt.map_workers(
        rounds.init, WAYS[way]("worker"), in_specs="worker", out_specs="worker"
    )
    state = jax.jit(run)(empty)
    assert jax.tree.map(jnp.shape, state.anchor) == jax.tree.map(jnp.shape, empty)


# Compiled in every way, and at once where no other axes are: that takes a second a way.
ALL = [*((way, True) for way in WAYS), ("vmap", False), ("Explicit", False)]


@pytest.mark.parametrize("way,jit", mostly_slow(ALL, quick=[*ALL[:2], ALL[-2]]))
def test_replicated_results_that_are_equal_pass(way, jit):
    rounds = local_opt.parallel_rounds(optax.adam(0.1))

    def step(w, state, x, count):
        grads = jax.grad(lambda w: jnp.mean((w - x) ** 2))(w)
        updates, state = rounds.update(grads, state, w)
        rows = jax.lax.all_gather(x, "worker", tiled=True)
        return w + updates, state, count + 1, rows, jax.random.key(3)

    specs = {
        "in_specs": ("replicated", "replicated", "batch", "replicated"),
        "out_specs": "replicated",
    }
    mapped = local_opt.map_workers(step, WAYS[way]("worker"), **specs)
    w = jnp.zeros(())
    args = w, rounds.init(w), ROWS, jnp.zeros((), jnp.int32)
    result, state, count, rows, key = (jax.jit(mapped) if jit else mapped)(*args)
    np.testing.assert_allclose(result, 0.1, rtol=1e-5)  # Adam's first step
    np.testing.assert_allclose(state[0].mu, -0.1 * 7, rtol=1e-6)
    assert count == 1 and rows.tolist() == ROWS.tolist() and key == jax.random.key(3)


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


TREES = [*((way, True) for way in (*WAYS, "turns")), ("vmap", False), ("turns", False)]


@pytest.mark.parametrize("way,jit", mostly_slow(TREES, quick=[*TREES[:2], *TREES[5:7]]))
def test_words_may_be_trees_of_named_tuples_and_dataclasses(way, jit):
    turns = way == "turns"
    workers = W if turns else WAYS[way]("worker")
    same = "worker" if turns else "replicated"  # no result is proved to be
    mapped = local_opt.map_workers(
        moved,
        workers,
        in_turn=turns,
        in_specs=(
            State({"w": "worker", "b": "worker"}, "replicated"),
            Batch("batch", "replicated"),
            "key",
        ),
        out_specs=(
            State("worker", same),
            Batch("batch", same),
            {"loss": "mean", "seen": ("sum", "worker"), "drawn": "worker"},
        ),
    )
    state = State(jax.tree.map(jnp.asarray, START), jnp.asarray(7))
    key = jax.random.key(3)
    result = (jax.jit(mapped) if jit else mapped)(state, Batch(jnp.asarray(X), RATE), key)
    state, batch, metrics = result
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
    words = jax.tree.map(lambda _: "worker", state)
    result = local_opt.map_workers(lambda x: x, W, in_specs=(words,), out_specs=words)(state)
    assert result["w"].tolist() == [0, 1, 2, 3] and result["bias"] is None


def test_leaves_that_are_named_alike_are_told_apart():
    class Name(int):
        def __repr__(self):
            return "name"

    state = {Name(n): n * jnp.arange(W) for n in (1, 2)}
    result = local_opt.map_workers(lambda x: x, W, in_specs="worker", out_specs="worker")(state)
    assert [x.tolist() for x in result.values()] == [[0, 1, 2, 3], [0, 2, 4, 6]]


# How a mapped function is called.

MESH = mesh_of(AxisType.Auto)
CALLED = {
    "vmap": {"workers": W},
    "mesh": {"workers": MESH},
    "turns": {"workers": W, "in_turn": True},
}
by_call = pytest.mark.parametrize("way", CALLED)
MEANS = 2 * np.arange(W) + 0.5  # of each worker's rows


@by_call
def test_words_belong_to_positions_and_keywords_are_replicated(way):
    run = local_opt.map_workers(step, **CALLED[way], **SPECS)
    assert run.__name__ == "step" and run.__doc__ == step.__doc__
    state, batch = start()
    for scale in (1.0, jnp.float32(1)):
        result = run(state, batch, scale=scale)
        np.testing.assert_allclose(result[0], MEANS)
        np.testing.assert_allclose(result[1], MEANS.mean())
    np.testing.assert_allclose(run(state, batch, power=2)[0], MEANS**2)
    by_worker = local_opt.map_workers(
        step, **CALLED[way], in_specs=("worker", "batch", "worker"), out_specs=("worker", "mean")
    )
    scale = jnp.arange(float(W))
    np.testing.assert_allclose(by_worker(state, batch, scale)[0], scale * MEANS)


@by_call
def test_jit_may_name_what_is_donated_and_what_is_static(way):
    run = local_opt.map_workers(step, **CALLED[way], **SPECS)
    run = jax.jit(run, donate_argnames="state", static_argnames=("power", "train"))
    state, batch = start()
    if way == "mesh":
        state = local_opt.replicate(jnp.zeros(()), MESH)
    after, _ = run(state, batch, power=3)
    np.testing.assert_allclose(after, MEANS**3)
    assert state.is_deleted()
    assert run(after, batch, train=False)[0].tolist() == (MEANS**3).tolist()


def test_functions_of_any_number_of_arguments():
    def total(*rows, offset=0):
        return sum(rows) + offset

    run = local_opt.map_workers(
        total, W, in_specs=("worker", "replicated", "worker"), out_specs="worker"
    )
    ones = jnp.ones(W)
    assert run(ones, 2.0, ones, offset=jnp.arange(2)).tolist() == [[4, 5]] * W
    partial = functools.partial(step, power=2)
    result, _ = local_opt.map_workers(partial, W, **SPECS)(*start())
    np.testing.assert_allclose(result, MEANS**2)
    assert local_opt.map_workers(jax.jit(step), W, **SPECS)(*start())[0].shape == (W,)
    both = local_opt.map_workers(lambda x, y: (x, y), W, in_specs="worker", out_specs="worker")
    assert [x.shape for x in both(ones, ones)] == [(W,), (W,)], "one word for all"


@by_call
def test_sums_and_means_are_over_all_workers_and_of_whole_numbers_too(way):
    def right(shift, rows):
        narrow = jnp.full((), 100, jnp.int8) + shift.astype(jnp.int8)
        return {"right": rows > 3, "count": rows.size, "narrow": narrow}, rows

    mapped = local_opt.map_workers(
        right, **CALLED[way], in_specs=("worker", "batch"), out_specs="sum"
    )
    counts, rows = jax.jit(mapped)(jnp.zeros(W), jnp.arange(2.0 * W))
    assert counts["right"].tolist() == [2, 2] and counts["right"].dtype == jnp.int32
    assert counts["narrow"].tolist() == 400, "not in eight bits"
    assert counts["count"].tolist() == 2 * W, "numbers of Python are every worker's"
    np.testing.assert_allclose(rows, [12, 16])
    mapped = local_opt.map_workers(
        lambda x: (x, x > 1), **CALLED[way], in_specs="worker", out_specs="mean"
    )
    mean, share = jax.jit(mapped)(jnp.arange(W))
    assert float(mean) == 1.5 and float(share) == 0.5


# Random keys inside a tree: copied to every worker with a warning, or one of each worker's.


def test_the_key_of_a_worker_is_folded_with_its_number():
    keys = jax.random.split(jax.random.key(4))
    copies = local_opt.replicate({"of": keys}, W, keys="fold")["of"]
    for w in range(W):
        alone = jax.vmap(jax.random.fold_in, (0, None))(keys, w)
        assert (copies[w] == alone).all()
    message = r"same key \['of'\]\['rngs'\].* keys='fold'.* keys='copy'"
    with pytest.warns(UserWarning, match=message):
        same = local_opt.replicate({"of": {"rngs": keys}}, W)["of"]["rngs"]
    assert (same == local_opt.replicate(keys, W, keys="copy")).all() and (same == keys[None]).all()


@by_kind
def test_a_legacy_key_is_the_typed_one_of_its_numbers(way):
    workers = WAYS[way]("worker")
    draw = local_opt.map_workers(jax.random.normal, workers, in_specs="key", out_specs="worker")
    result = [jax.jit(draw)(key) for key in (jax.random.PRNGKey(5), jax.random.key(5))]
    alone = [jax.random.normal(jax.random.fold_in(jax.random.key(5), w)) for w in range(W)]
    np.testing.assert_array_equal(result[0], alone)
    np.testing.assert_array_equal(result[1], alone)


def test_legacy_keys_in_a_state_are_copied_with_a_warning():
    key = jax.random.PRNGKey(5)
    with pytest.warns(UserWarning, match=r"the same key \['rng'\]"):
        copies = local_opt.replicate({"rng": key, "x": jnp.ones(3)}, W)
    np.testing.assert_array_equal(copies["rng"], np.tile(key, (W, 1)))
    one = local_opt.mean_over_workers(copies)["rng"]
    np.testing.assert_array_equal(jax.random.normal(one), jax.random.normal(key))


@by_kind
def test_the_mesh_may_be_the_one_in_scope_where_a_step_is_called(way):
    """One mapped function, also compiled, follows the mesh; without one it asks for it."""

    def step(x, rows, key):
        return x + rows.sum(), jax.random.normal(key), jax.lax.pmean(x, "worker")

    mapped = local_opt.map_workers(
        step, in_specs=("worker", "batch", "key"), out_specs=("worker", "worker", "replicated")
    )
    rows, key, run = jnp.arange(2.0 * W), jax.random.key(3), jax.jit(mapped)
    for call in (run, mapped, lambda *_: local_opt.replicate(key, keys="copy")):
        with pytest.raises(ValueError, match=r"mesh .*jax.set_mesh"):
            call(jnp.zeros(W), rows, key)
    if way == "vmap":
        return
    with jax.set_mesh(WAYS[way]("worker")):
        x = local_opt.replicate(jnp.ones(()))
        assert x.sharding.spec[0] == "worker"
        for call in (run, mapped):
            result, drawn, mean = call(x, rows, key)
            np.testing.assert_array_equal(result, 1 + np.arange(2 * W).reshape(W, 2).sum(1))
            alone = [jax.random.normal(jax.random.fold_in(key, w)) for w in range(W)]
            np.testing.assert_allclose(drawn, alone, rtol=1e-6)
            assert float(mean) == 1
    with jax.set_mesh(mesh_of(AxisType.Auto, "dp", "model")):
        with pytest.raises(ValueError, match="dp.*'worker'"):
            run(x, rows, key)
