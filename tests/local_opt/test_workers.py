"""Workers that must agree, one model out of many, and three ways to run them."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import local_opt
from ordering import echo
from syncopate import plans
from tests.cases import mostly_slow
from tests.problems import COMPRESSORS, RUNS, copies, vmap


def started(workers=4):
    return {
        "w": jnp.stack([jnp.arange(6.0).reshape(2, 3)] * workers),
        "inner": {
            "count": jnp.zeros(workers, jnp.int32),
            "b": jnp.ones((workers, 2), jnp.bfloat16),
        },
        "key": jnp.stack([jax.random.key(3)] * workers),
        "nothing": jnp.ones((workers, 0)),
        "flag": jnp.array([True] * workers),
    }


def test_workers_that_are_equal_pass():
    tree = started()
    tree["w"] = tree["w"].at[:, 0, 1].set(jnp.nan).at[:, 1, 1].set(-jnp.inf)  # equal on all
    tuples = jax.vmap(optax.chain(optax.sgd(0.1, momentum=0.9), optax.adam(0.1)).init)(tree["w"])
    for equal in (tree, started(1), {}, np.ones((2, 3)), (tree["nothing"], tuples)):
        local_opt.check_synced(equal, ulps=0)


UNEQUAL = {  # (leaf, change of it, how far apart, who)
    "ulps": ("w", lambda x: x.at[2, 1, 0].add(1e-6), "9.54e-07", 2),
    "nan": ("w", lambda x: x.at[1, 0, 0].set(jnp.nan), "nan", 1),
    "nan of worker 0": ("w", lambda x: x.at[0, 0, 0].set(jnp.nan), "nan", 1),
    "int": ("inner/count", lambda x: x.at[3].set(2**30), "1", 3),
    "bfloat16": ("inner/b", lambda x: x.at[1, 1].set(1.0078125), "0.00781", 1),
    "key": ("key", lambda x: x.at[1].set(jax.random.key(4)), "1", 1),
}


@pytest.mark.parametrize("leaf,change,largest,worker", UNEQUAL.values(), ids=UNEQUAL)
def test_workers_that_are_not_equal_are_named(leaf, change, largest, worker):
    tree = inner = started()
    *above, last = leaf.split("/")
    for name in above:
        inner = inner[name]
    inner[last] = change(inner[last])
    leaf = "".join(f"['{name}']" for name in leaf.split("/"))
    with pytest.raises(ValueError) as error:
        local_opt.check_synced(tree, what="weights", ulps=0)
    message = f"workers' weights are {largest} apart in {leaf} (worker {worker} from worker 0)"
    assert message in str(error.value)


# A plan, another one, and the first made in another way.
ROUNDS = (
    local_opt.constant(4, total_steps=40),
    local_opt.constant(5, total_steps=40),
    local_opt.from_function(lambda t: 4, total_steps=40),
)
LOADS = (
    echo.fixed(3, total_steps=40),
    echo.fixed(4, total_steps=40),
    echo.error_diffusion(1 / 3, total_steps=40),
)


@pytest.mark.parametrize("plan,other,same", [ROUNDS, LOADS], ids=["rounds", "loads"])
def test_processes_with_another_plan_are_named(plan, other, same, monkeypatch):
    plan.check_same()  # the one process of this test
    rows = [np.frombuffer(bytes.fromhex(p.digest()), np.uint8) for p in (plan, other, same)]

    def gathered(*which):
        stacked = lambda local_state: np.stack([rows[i] for i in which])  # noqa: E731
        monkeypatch.setattr(plans.multihost_utils, "process_allgather", stacked)
        plan.check_same()

    gathered(0, 2, 0)
    with pytest.raises(ValueError, match=r"\[1, 3\] .*plan.* 0"):
        gathered(0, 1, 2, 1)
    here = f"here: {plan.rule}, hash {plan.digest()[:12]}"
    with pytest.raises(ValueError, match=rf"processes \[1\] .*{here}"):
        gathered(1, 0)


# Leaves of every type, wherever the workers are.

KINDS = [
    jnp.int32,
    jnp.uint8,
    jnp.uint32,
    jnp.bool_,
    jnp.int4,
    jnp.uint4,
    jnp.int2,
    jnp.uint2,
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.float4_e2m1fn,
    jnp.complex64,
]
FLOATING = KINDS[8:]
SHAPES = {"number": (4,), "matrix": (4, 2, 4), "nothing": (4, 0)}


def rows(kind, shape):
    return (np.arange(np.prod(shape)).reshape(shape) % 3 % 2).astype(kind)


def tree_of(kinds):
    """Leaves [4, ...] of all kinds, some in all shapes, and keys, which differ between workers."""
    tree = {
        f"{jnp.dtype(kind).name} {name}": rows(kind, shape)
        for kind in kinds
        for name, shape in SHAPES.items()
        if name == "matrix" or kind in (jnp.int32, jnp.bool_, jnp.int4, jnp.float32)
    }
    return tree | {"key": jax.random.split(jax.random.key(0), 4)}


def mean_by_hand(x):
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    wide = np.complex128 if x.dtype == np.complex64 else np.float64
    return x.astype(wide).mean(axis=0).astype(x.dtype)


def data(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


WHERE = {  # (kinds of axes, their names and sizes), or none
    "one device": None,
    "auto": (AxisType.Auto, {"worker": 4}),
    "explicit": (AxisType.Explicit, {"worker": 4}),
    "explicit, two axes": (AxisType.Explicit, {"model": 2, "worker": 4}),
}


def placed(tree, where):
    if where is None:
        return jax.tree.map(jnp.asarray, tree), None
    kind, axes = where
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes))

    def place(x):
        inside = ("model",) if "model" in axes and x.ndim == 3 else ()
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P("worker", *inside)))

    return jax.tree.map(place, tree), mesh


@pytest.mark.parametrize("name", mostly_slow(WHERE, quick=("explicit, two axes",)))
def test_one_model_and_agreement_of_every_type_on_every_mesh(name):
    """Whether the mesh is entered or not."""
    given, where = tree_of(KINDS), WHERE[name]
    tree, mesh = placed(given, where)
    equal, _ = placed(jax.tree.map(lambda x: x[jnp.zeros(4, int)], given), where)
    for entered in {False, mesh is not None}:
        with jax.set_mesh(mesh) if entered else contextlib.nullcontext():
            actual = local_opt.mean_over_workers(tree)
            local_opt.check_synced(equal, ulps=0)
            for name in ("int32 number", "int4 matrix", "bool number", "float8_e5m2 matrix", "key"):
                with pytest.raises(ValueError, match="parameters are .* apart"):
                    local_opt.check_synced({name: tree[name]})
        for name, x in given.items():
            expected = x[0] if name == "key" else mean_by_hand(x)
            assert actual[name].dtype == x.dtype and actual[name].shape == x.shape[1:]
            np.testing.assert_array_equal(data(actual[name]), data(expected))


def test_means_of_every_floating_type():
    given = {}
    for kind in FLOATING:
        x, dtype = rows(kind, (4, 2, 4)), jnp.dtype(kind)
        if dtype.itemsize > 1 or dtype.name.startswith("float8"):
            x = (x + rows(kind, (4, 2, 4)) + 1).astype(kind)
        given[dtype.name] = x
    expected, x = jax.tree.map(mean_by_hand, given), jax.tree.map(jnp.asarray, given)
    with jax.numpy_dtype_promotion("strict"):
        every = [jax.jit(RUNS[run](local_opt.pmean))(x) for run in ("vmap", "shard_map")]
        once = local_opt.map_workers(lambda x: x, 4, in_specs="worker", out_specs="mean")(x)
    for actual in every:
        jax.tree.map(np.testing.assert_array_equal, actual, copies(expected))
    jax.tree.map(np.testing.assert_array_equal, once, expected)


def test_numpy_leaves_of_64_bits_keep_their_type_and_their_numbers(recwarn):
    tree = {"w": np.array([[1.0], [1.0 + 1e-12]]), "n": np.array([2**40 + 9, 2**40 + 9])}
    result = local_opt.mean_over_workers(tree)
    assert result["w"].dtype == np.float64 and result["w"].tolist() == [1.0 + 5e-13]
    assert isinstance(result["n"], np.ndarray) and result["n"].tolist() == 2**40 + 9
    assert isinstance(local_opt.mean_over_workers(np.array([7, 7], np.int32)), jax.Array)
    local_opt.check_synced(jax.tree.map(lambda x: x[[0, 0]], tree), ulps=0)
    for other in ({"w": tree["w"]}, {"n": tree["n"] + np.array([0, 2**33])}):
        with pytest.raises(ValueError, match="apart"):
            local_opt.check_synced(other)
    assert not list(recwarn)


@functools.cache
def a_step(period):
    """Of `local_steps` without a move, compiled."""
    opt = local_opt.local_steps(optax.sgd(0.0), local_opt.constant(period, total_steps=2))
    return jax.jit(vmap(lambda x: opt.update(jnp.zeros_like(x), opt.init(x), x)[0]))


def after_step(before, period=1):
    """Parameters of workers before and after a step, which ends a round of one."""
    before = jnp.asarray(before, jnp.float32)
    return before, before + a_step(period)(before)


def test_workers_that_meet_close_to_zero_agree_to_the_rounding_of_their_way():
    local = np.float32(np.linspace(0.70, 0.71, 20))
    before, after = after_step([local, 0.004 - local])
    numbers = [*zip(before.T, after.T, strict=True)]
    refused = [pair for pair in numbers if pair[1][0] != pair[1][1]]
    assert refused
    for b, x in refused[:3]:
        with pytest.raises(ValueError, match="before="):
            local_opt.check_synced(x)
        with pytest.raises(ValueError, match="apart"):
            local_opt.check_synced(x, before=b, ulps=0)
    local_opt.check_synced([x for _, x in numbers], before=[b for b, _ in numbers])
    rng = np.random.default_rng(0)
    for scale in (1e-3, 1.0, 1e3):
        for workers in (2, 3, 8):
            start = scale * rng.normal(size=(workers, 12))
            start -= (1 - 1e-4) * start.mean(axis=0)
            before, after = after_step(start)
            local_opt.check_synced([*after.T], before=[*before.T])


def test_workers_that_were_not_moved_together_are_refused_whatever_was_before():
    before, after = after_step([0.7036, -0.6956], period=2)  # no sync yet
    with pytest.raises(ValueError, match="1.4 apart"):
        local_opt.check_synced(after, before=before)
    close = jnp.array([0.004, 0.004 + 6e-8])
    for before in (close, close + 1e-3, close * 1.01):
        with pytest.raises(ValueError, match="apart"):
            local_opt.check_synced(close, before=before)
    before, after = after_step([[0.7, 0.1], [-0.7, 0.1]])
    with pytest.raises(ValueError, match="1e-06 apart|9.54e-07 apart|1.01e-06 apart"):
        local_opt.check_synced(after.at[1, 0].add(1e-6), before=before)
    with pytest.raises(ValueError, match="before.* is real"):
        local_opt.check_synced(after, before=before[:, 0])


PLAN = local_opt.constant(2, total_steps=4)
PLAIN = optax.scale(-0.5)  # optax' own optimizers promote types
OPTIONS = {
    "plain": {},
    "mean": {"sync_opt_state": "mean"},
    "drift": {"drift": True},
    "period": {"outer": local_opt.presets.normalize_by_period(PLAIN, h_base=2)},
    "control": {"correction": local_opt.corrections.scaffold()},
    "proximal": {"correction": local_opt.corrections.fedprox(0.5)},
    **{name: {"compress": compressor} for name, compressor in COMPRESSORS.items()},
}


ALL = [*itertools.product(OPTIONS, ("strict", "x64"))]


@pytest.mark.parametrize("name,setting", mostly_slow(ALL, quick=ALL[::3]))
def test_steps_and_syncs_keep_their_types(name, setting):
    """As a loop demands, of parameters of several types."""
    options = OPTIONS[name]
    opt = local_opt.local_steps(PLAIN, PLAN, **options)
    kinds = [jnp.float32, jnp.bfloat16, jnp.float8_e5m2]
    x = {jnp.dtype(kind).name: jnp.ones((4, 3), kind) for kind in kinds}

    def run(x, weight):
        def step(carry, _):
            x, state = carry
            updates, state = opt.update(x, state, x, weight=weight)
            x = jax.tree.map(lambda x, u: (x.astype(u.dtype) + u).astype(x.dtype), x, updates)
            return (x, state), None

        return jax.lax.scan(step, (x, opt.init(x)), length=2)[0]

    other = jax.enable_x64(True) if setting == "x64" else jax.numpy_dtype_promotion("strict")
    with other:
        result, _ = jax.eval_shape(vmap(run), x, jnp.ones(4, jnp.float32))
    assert jax.tree.map(lambda x: x.dtype, result) == jax.tree.map(lambda x: x.dtype, x)
