"""Workers that must agree, one model out of many, and three ways to run them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from ordering import echo


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
    for equal in (tree, started(1), {}, np.ones((2, 3))):
        local_opt.check_synced(equal, ulps=0)


APART = {  # (leaf, change of it, how far apart, who)
    "ulps": ("w", lambda x: x.at[2, 1, 0].add(1e-6), "9.54e-07", 2),
    "nan": ("w", lambda x: x.at[1, 0, 0].set(jnp.nan), "nan", 1),
    "nan of worker 0": ("w", lambda x: x.at[0, 0, 0].set(jnp.nan), "nan", 1),
    "int": ("inner/count", lambda x: x.at[3].set(2**30), "1", 3),
    "bfloat16": ("inner/b", lambda x: x.at[1, 1].set(1.0078125), "0.00781", 1),
    "key": ("key", lambda x: x.at[1].set(jax.random.key(4)), "1", 1),
}


@pytest.mark.parametrize("leaf,change,apart,worker", APART.values(), ids=APART)
def test_workers_that_are_not_equal_are_named(leaf, change, apart, worker):
    tree = inner = started()
    *above, last = leaf.split("/")
    for name in above:
        inner = inner[name]
    inner[last] = change(inner[last])
    leaf = "".join(f"['{name}']" for name in leaf.split("/"))
    with pytest.raises(ValueError) as error:
        local_opt.check_synced(tree, what="weights", ulps=0)
    said = f"workers' weights are {apart} apart in {leaf} (worker {worker} from worker 0)"
    assert said in str(error.value)


def test_trees_may_hold_tuples():
    """As the states of optax are; of any length."""
    x = jnp.ones((2, 3))
    tree = (x, jax.vmap(optax.chain(optax.sgd(0.1, momentum=0.9), optax.adam(0.1)).init)(x), x, x)
    local_opt.check_synced(tree, ulps=0)
    with pytest.raises(ValueError, match=r"parameters are 1 apart in \[3\] \(worker 1 from"):
        local_opt.check_synced((*tree[:3], x.at[1].add(1)), ulps=0)


# A plan, another one, and the first made in another way.
ROUNDS = (
    local_opt.constant(4, total_steps=40), local_opt.constant(5, total_steps=40),
    local_opt.from_function(lambda t: 4, total_steps=40),
)  # fmt: skip
LOADS = (
    echo.fixed(3, total_steps=40), echo.fixed(4, total_steps=40),
    echo.error_diffusion(1 / 3, total_steps=40),
)  # fmt: skip


@pytest.mark.parametrize("plan,other,same", [ROUNDS, LOADS], ids=["rounds", "loads"])
def test_processes_with_another_plan_are_named(plan, other, same):
    digests = [np.frombuffer(bytes.fromhex(p.digest()), np.uint8) for p in (plan, other)]

    def gathered(*which):
        def gather(own):
            np.testing.assert_array_equal(own, digests[0])
            return np.stack([digests[i] for i in which])

        return gather

    local_opt.check_same_plan(plan)  # the one process of this test
    local_opt.check_same_plan(plan, gather=gathered(0, 0, 0))
    local_opt.check_same_plan(same, gather=gathered(0, 0))
    with pytest.raises(ValueError, match=r"processes \[1, 3\] have another plan than process 0"):
        local_opt.check_same_plan(plan, gather=gathered(0, 1, 0, 1))
    here = f"here: {plan.rule}, hash {plan.digest()[:12]}"
    with pytest.raises(ValueError, match=rf"processes \[1\] .*{here}"):
        local_opt.check_same_plan(plan, gather=gathered(1, 0))


def test_consolidating_averages_in_float32_and_keeps_what_has_no_mean():
    tree = {
        "w": jnp.array([[1.0, 2.0], [3.0, 5.0]]),
        "count": jnp.array([7, 10]),
        "mask": jnp.array([[False], [True]]),
        "key": jax.random.split(jax.random.key(0), 2),
    }
    found = local_opt.consolidate(tree)
    assert found["w"].tolist() == [2.0, 3.5] and found["w"].dtype == jnp.float32
    narrow = local_opt.consolidate(jnp.array([256.0, 1.0, 1.0, 1.0], jnp.bfloat16))
    assert float(narrow) == 65 and narrow.dtype == jnp.bfloat16  # their sum there: 256
    assert found["count"] == 7 and found["count"].dtype == jnp.int32
    assert found["mask"].tolist() == [False] and found["mask"].dtype == bool
    assert found["key"].dtype == tree["key"].dtype and found["key"].shape == ()
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(tree["key"])[0]).all()
    assert local_opt.consolidate(np.ones((2, 3), np.float32)).shape == (3,)


def test_a_key_of_workers_on_an_explicit_mesh_is_the_first_workers():
    workers = jax.make_mesh((4,), ("worker",), devices=jax.devices()[:4])
    keys = jax.device_put(
        jax.random.split(jax.random.key(3), 4), jax.NamedSharding(workers, jax.P("worker"))
    )
    assert (
        local_opt.consolidate({"dropout": keys})["dropout"]
        == jax.random.split(jax.random.key(3), 4)[0]
    )


def test_moments_are_the_mean_of_those_of_the_batches_at_the_given_parameters():
    def statistics(params, x):
        return {"mean": jnp.mean(params * x), "of squares": jnp.mean(jnp.square(params * x))}

    batches = np.float32(np.random.default_rng(0).normal(size=(3, 4, 8)))
    for scale in (1.0, 2.0):  # averaged parameters have moments of their own
        found = jax.jit(lambda p: local_opt.reestimate(statistics, p, batches))(scale)
        np.testing.assert_allclose(found["mean"], (scale * batches).mean(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            found["of squares"], np.square(scale * batches).mean(), rtol=1e-5
        )


@pytest.mark.parametrize("workers", [4, "make_mesh"])
def test_workers_agree_after_a_sync_and_not_before(workers):
    if workers == "make_mesh":
        workers = jax.make_mesh((4,), ("worker",), devices=jax.devices()[:4])
    plan = local_opt.constant(2, total_steps=4)
    optimizer = local_opt.local_steps(optax.adam(0.1), plan, axis_name="worker")

    def step(x, state, grads):
        updates, state = optimizer.update(grads, state, x)
        return optax.apply_updates(x, updates), state

    owned = ("owned",) * 3
    run = jax.jit(local_opt.lift(step, workers, inputs=owned, outputs=owned[:2]))
    x = jax.random.normal(jax.random.key(0), (50,))
    x, state = local_opt.owned((x, optimizer.init(x)), workers)
    local_opt.check_synced(x, ulps=0)
    grads = jax.random.normal(jax.random.key(1), (4, 4, 50))
    for t in range(4):
        x, state = run(x, state, grads[t])
        if plan.syncs_after(t):
            local_opt.check_synced({"x": x, "round": state.num_syncs})
        else:
            with pytest.raises(ValueError, match=r"workers' x are .* in \['w'\].*syncs_after"):
                local_opt.check_synced({"w": x}, what="x")
