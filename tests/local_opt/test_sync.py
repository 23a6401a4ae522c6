"""A sync is careful with every leaf: policies, dtypes, and fields by plans of their own."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from experiments.distributed.devices import worker_mesh
from local_opt import mean as mean_lib
from tests.problems import (
    NESTEROV,
    RUNS,
    SGD,
    W,
    assert_bitwise_equal,
    copies,
    distance,
    vmap,
)


def adam_round(opt_state):
    """(state before the sync, state after it) of adam after two steps with unequal gradients."""
    rounds = local_opt.local_rounds(optax.adam(0.1), axis_name="worker", sync_opt_state=opt_state)

    @jax.jit
    @vmap
    def run(params, grads):
        state = rounds.init(params)
        for _ in range(2):
            _, state = rounds.update(grads, state, params)
        return state.inner[0], rounds.sync(params, state)[1].inner[0]

    return run(copies({"w": jnp.ones(3)}), {"w": jnp.arange(3.0 * W).reshape(W, 3)})


@pytest.mark.parametrize(
    "opt_state,mu,nu,count",
    [
        ("local", "local", "local", 2),
        ("mean", "mean", "mean", 2),
        ("reset", "reset", "reset", 2),
        ({"mu": "mean", "nu": "mean"}, "mean", "mean", 2),
        ({"nu": "reset", "0.nu": "mean"}, "local", "mean", 2),  # the longest name counts
        ({"mu": "reset"}, "reset", "local", 2),
        ({"count": "reset"}, "local", "local", 0),
    ],
    ids=str,
)
def test_optimizer_state_follows_the_policy(opt_state, mu, nu, count):
    before, after = adam_round(opt_state)
    made = {
        "local": lambda x: x,
        "mean": lambda x: np.stack([np.asarray(x).mean(axis=0)] * W),
        "reset": np.zeros_like,
    }
    np.testing.assert_allclose(after.mu["w"], made[mu](before.mu["w"]), rtol=1e-6)
    np.testing.assert_allclose(after.nu["w"], made[nu](before.nu["w"]), rtol=1e-6)
    assert np.ptp(before.mu["w"], axis=0).min() > 0  # or the policies would be the same
    assert after.count.tolist() == [count] * W and after.count.dtype == before.count.dtype


def test_integers_and_keys_stay_the_workers_own():
    tree = {
        "float": jnp.arange(4.0),
        "int": jnp.arange(4),
        "bool": jnp.array([True, False, False, True]),
        "key": jax.random.split(jax.random.key(0), 4),
        "raw": jnp.arange(8, dtype=jnp.uint32).reshape(4, 2),
    }
    result = vmap(functools.partial(local_opt.pmean, axis_name="worker"))(tree)
    assert result["float"].tolist() == [1.5] * 4
    for name in ("int", "bool", "raw"):
        assert result[name].dtype == tree[name].dtype
        np.testing.assert_array_equal(result[name], tree[name])
    same = jax.random.key_data(result["key"]) == jax.random.key_data(tree["key"])
    assert result["key"].dtype == tree["key"].dtype and same.all()


@pytest.mark.parametrize("run", ["vmap", "shard_map"])
def test_narrow_leaves_are_added_in_float32(run):
    """256 + 1 is 256 in bfloat16, and 2048 + 1 is 2048 in float16: ones would be lost."""
    tree = {
        "b16": jnp.array([256.0, 1.0, 1.0, 1.0], jnp.bfloat16)[:, None],
        "f16": jnp.array([2048.0, 1.0, 1.0, 2.0], jnp.float16)[:, None],
        "f32": jnp.array([1.0, 2.0, 3.0, 5.0])[:, None],
    }
    sync = RUNS[run](functools.partial(local_opt.pmean, axis_name="worker"))
    result = jax.jit(sync)(tree)
    for name, x in tree.items():
        mean = jnp.mean(x.astype(jnp.float32), axis=0).astype(x.dtype)
        assert_bitwise_equal(result[name], jnp.stack([mean] * 4))
        assert_bitwise_equal(local_opt.mean_over_workers(x), mean)
    # 64.75 and 513.25 to the nearest; the ones lost, they would be 64 and 512.
    assert float(result["b16"][0, 0]) == 65 and float(result["f16"][0, 0]) == 513


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = {"a": jnp.array([1.0, 1.0 + 2**-48]), "b": jnp.array([1.0, 3.0], jnp.float32)}
        result = jax.jit(vmap(functools.partial(local_opt.pmean, axis_name="worker")))(x)
        assert result["a"].dtype == jnp.float64 and result["b"].dtype == jnp.float32
        assert result["a"].tolist() == [1 + 2**-49] * 2 and result["b"].tolist() == [2.0] * 2
        rounds = local_opt.local_rounds(SGD, axis_name="worker", outer=NESTEROV)
        params = jnp.ones((2, 3), jnp.float64)
        params, state = jax.jit(vmap(lambda x: rounds.sync(x, rounds.init(x))))(params)
        assert params.dtype == state.anchor.dtype == jnp.float64


@pytest.mark.parametrize("workers", [2, worker_mesh(2)], ids=["vmap", "mesh"])
@pytest.mark.parametrize("outer", [None, NESTEROV], ids=["averaging", "DiLoCo"])
def test_a_sync_holds_the_mean_and_no_copy_of_what_is_donated(optimised, workers, outer):
    """Beside its arguments: as many bytes as one worker has parameters.

    With an anchor, as many again for each worker's change, of which the mean is taken.
    """
    rounds = local_opt.local_rounds(SGD, outer=outer)
    params = local_opt.replicate({"a": jnp.ones((128, 96)), "b": jnp.ones((96, 40))}, workers)
    init = local_opt.map_workers(rounds.init, workers, in_specs="worker", out_specs="worker")
    sync = local_opt.map_workers(rounds.sync, workers, in_specs="worker", out_specs="worker")
    held = params, jax.jit(init)(params)
    result = jax.jit(sync, donate_argnums=(0, 1)).lower(*held).compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(params)) // 2
    changes = 0 if outer is None else 2 if workers == 2 else 1
    assert result.temp_size_in_bytes <= (1.01 + changes) * size
    assert result.alias_size_in_bytes == result.argument_size_in_bytes


@pytest.mark.parametrize("weighs,sent", [(False, ["17xf32", "9xf32"]), (True, ["18xf32", "9xf32"])])
def test_processes_on_cpus_send_small_leaves_as_one_vector(weighs, sent, monkeypatch):
    """One vector per dtype, with the weight; equal to leaf by leaf. A large leaf goes alone."""
    mesh = worker_mesh(W)
    monkeypatch.setattr(mean_lib, "JOINED", 8)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    rng, shapes = np.random.default_rng(0), {"a": (2, 4), "b": (), "c": (3,), "d": (9,), "e": (5,)}
    tree = {name: rng.normal(size=(W, *shape)).astype(np.float32) for name, shape in shapes.items()}
    tree["e"], tree["steps"] = tree["e"].astype(jnp.bfloat16), np.arange(W, dtype=np.int32)
    mean = lambda x, v: local_opt.pmean(x, weight=v if weighs else None)  # noqa: E731
    run = jax.jit(local_opt.map_workers(mean, mesh, in_specs="worker", out_specs="worker"))
    args = tree, np.float32([1, 2, 0, 4])
    text = run.lower(*args).as_text()
    assert sorted(re.findall(r"all_reduce.*?-> tensor<(.*?)>", text, re.S)) == sent
    actual, expected = run(*args), vmap(mean)(*args)
    assert distance(actual, expected) < 1e-6
    if not weighs:  # else a compiler may fuse products and sums
        assert_bitwise_equal(actual, expected)


# Fields of the state by plans of their own.

PLANS_OF = {
    "params": local_opt.constant(2, total_steps=13),
    "mu": local_opt.constant(3, total_steps=13, offset=1),
    "nu": local_opt.SyncPlan([0, 5], 13),
}


def test_fields_of_one_plan_share_a_conditional():
    """And so a collective; "mean" is the parameters' plan, in a conditional of its own."""
    same = local_opt.SyncPlan([0, 5], 13)
    mapped = functools.partial(local_opt.map_workers, workers=worker_mesh(2))
    params = local_opt.replicate({"w": jnp.ones(3)}, worker_mesh(2))

    def conditionals(policies):
        opt = local_opt.local_steps(optax.adam(0.1), PLANS_OF["params"], sync_opt_state=policies)
        init = mapped(opt.init, in_specs="worker", out_specs="worker")
        state = jax.eval_shape(init, params)
        step = mapped(
            lambda x, s: opt.update(x, s, x), in_specs=("worker", "worker"), out_specs="worker"
        )
        return jax.jit(step).lower(params, state).as_text().count("stablehlo.case")

    assert conditionals("local") == 1
    assert conditionals({"mu": PLANS_OF["nu"], "nu": same}) == 2
    assert conditionals({"mu": PLANS_OF["mu"], "nu": same}) == 3
    assert conditionals({"mu": "mean", "nu": same}) == 3


@pytest.mark.parametrize(
    "policies,match",
    [
        ({"mu": PLANS_OF["mu"]}, "name both, as {'mu': 'mean', 'nu': 'mean'}"),
        ({"mu": PLANS_OF["mu"], "nv": PLANS_OF["nu"]}, "names ['nv']"),
        ({"count": PLANS_OF["mu"]}, "averages '0.count', which is int32"),
        ({"mu": local_opt.constant(2, total_steps=5), "nu": "mean"}, "a plan of 5 steps for 'mu'"),
        ({"": PLANS_OF["mu"]}, "for the empty name: name a field"),
    ],
)
def test_plans_of_fields_that_have_none_are_refused(policies, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        opt = local_opt.local_steps(optax.adam(0.1), PLANS_OF["params"], sync_opt_state=policies)
        opt.init({"w": jnp.ones(3)})


@pytest.mark.parametrize("of_first", ["local", local_opt.SyncPlan([0, 7], 13)])
def test_the_longest_name_counts_among_plans_too(of_first):
    """`0.mu` of two states of Adam does as it says, and `mu` of the other by its plan."""
    twice = optax.chain(optax.scale_by_adam(), optax.scale_by_adam())
    plan, short = local_opt.constant(13, total_steps=13), local_opt.constant(2, total_steps=13)
    policies = {"mu": short, "nu": short, "0.mu": of_first, "0.nu": of_first}
    opt = local_opt.local_steps(twice, plan, sync_opt_state=policies)

    @vmap
    def run(params, grads):
        state = opt.init(params)
        for _ in range(2):
            _, state = opt.update(grads, state, params)
        return state.rounds.inner

    first, second = jax.jit(run)(
        copies({"w": jnp.ones(3)}), {"w": jnp.arange(3.0 * W).reshape(W, 3)}
    )
    assert np.ptp(second.mu["w"], axis=0).max() == 0, "averaged after two steps"
    assert np.ptp(first.mu["w"], axis=0).min() > 0, "not before its own plan says so"


def test_plans_of_fields_need_a_count_of_steps():
    plans = {"mu": PLANS_OF["mu"], "nu": PLANS_OF["nu"]}
    with pytest.raises(ValueError, match="only local_steps counts steps"):
        local_opt.local_rounds(optax.adam(0.1), sync_opt_state=plans)
    opt = local_opt.local_steps(optax.adam(0.1), PLANS_OF["params"], sync_opt_state=plans)
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="fields of the state have their own plans: pass step"):
        opt.update(params, opt.init(params), params, sync=True)
