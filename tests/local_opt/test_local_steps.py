"""Local steps equal the papers line by line, data parallelism at H = 1, and one worker alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from experiments.distributed.devices import worker_mesh
from local_opt import plans
from tests import plain_loop
from tests.compiled_runs import compilations
from tests.plain_loop import Mean, ends
from tests.problems import (
    MATRICES,
    PLAN,
    RATE,
    RNG,
    RUNS,
    SGD,
    START,
    TARGETS,
    W,
    assert_bitwise_equal,
    assert_workers_bitwise_equal,
    copies,
    distance,
    flat,
    plain_sgd,
    square_loss,
    square_step,
    vmap,
)

PMAP = functools.partial(jax.pmap, axis_name="batch", devices=jax.devices()[:W])


@pytest.mark.parametrize("run", ["vmap", "shard_map", "pmap"])
@pytest.mark.parametrize("weights", [None, np.array([1, 0, 2, 5])], ids=["equal", "weighed"])
def test_a_loop_without_optax_asks_the_plan_after_each_step(run, weights, monkeypatch):
    """Between syncs it gets its own arrays back, and all syncs are one program."""
    traced, synchronize = [], plans.pmean
    count = lambda *args, **more: traced.append(1) or synchronize(*args, **more)  # noqa: E731
    monkeypatch.setattr(plans, "pmean", count)
    plans._mean_of_all.cache_clear()
    gradient, axis = jax.grad(square_loss), "batch" if run == "pmap" else "worker"
    step = RUNS.get(run, PMAP)(
        lambda x, *data: jax.tree.map(lambda x, g: x - RATE * g, x, gradient(x, *data))
    )
    step = step if run == "pmap" else jax.jit(step)
    params, history, traces = copies(START), [], set()
    for t in range(13):
        moved = step(params, MATRICES, TARGETS[t])
        workers = moved["b"].sharding.mesh if run == "shard_map" else W
        params = PLAN.after(t, moved, workers, axis_name=axis, weight=weights)
        if PLAN.syncs_after(t):
            assert_workers_bitwise_equal(params)
            traces.add(len(traced))
        else:
            assert params is moved
        history.append(flat(params))
    assert len(traces) == 1
    syncs = ends(PLAN, Mean(weights=weights))
    right = plain_loop.history(plain_sgd(), flat(START).astype(np.float64), [()] * W, 13, syncs)
    assert distance(history, right) < 1e-6


def of_tree(x):
    """Frozen numbers, others and a count, of 7 workers."""
    narrow, frozen = copies(jnp.asarray(x[0], jnp.bfloat16), 7), np.stack([x[0]] * 7)
    return {"frozen": frozen, "narrow": narrow, "x": jnp.asarray(x), "n": jnp.arange(7)}


@pytest.mark.parametrize("weight", [None, np.float32([0, 1, 2, 0, 3, 1, 5])], ids=["equal", "own"])
def test_the_mean_on_one_device_leaves_equal_numbers_and_is_compiled_once(weight):
    """Also of arrays that no device has been chosen for, and where the first worker's is NaN."""
    plan, x = local_opt.constant(1, total_steps=9), np.float32(RNG.normal(size=(7, 40)))
    plans._mean_of_all.cache_clear()
    expected = np.average(np.float64(x), axis=0, weights=weight)
    given = tree = of_tree(x)
    if weight is not None:
        tree = given = {**given, "x": given["x"].at[0].set(jnp.nan)}
    with compilations() as compiled:
        for t in range(3):
            tree = plan.after(t, tree, 7, weight=weight)
    assert len(compiled) == 1
    still = lambda tree: {**tree, "x": tree["n"]}  # noqa: E731
    assert_bitwise_equal(still(tree), still(given))
    np.testing.assert_allclose(tree["x"], np.stack([expected] * 7), atol=1e-6)


def test_arrays_of_one_device_or_a_trace_are_averaged_over_a_mesh_sync_after_sync():
    plan, x = local_opt.constant(1, total_steps=2), jnp.arange(8.0).reshape(4, 2)
    for t in range(2):
        x = plan.after(t, x, worker_mesh(4))
        assert x.tolist() == [[3.0, 4.0]] * 4 and x.devices() == {jax.devices()[0]}
    assert plans._mean_of_all.cache_info().maxsize
    for workers in (4, worker_mesh(4)):
        run = jax.jit(lambda x, workers=workers: plan.after(0, x, workers))
        assert run(np.float32([1, 2, 3, 6])).tolist() == [3.0] * 4
    with jax.set_mesh(worker_mesh(4)):
        assert jax.jit(lambda x: plan.after(0, x))(np.float32([1, 2, 3, 6])).tolist() == [3.0] * 4


def test_narrow_gradients_do_not_narrow_the_sync():
    """bfloat16 gradients make bfloat16 updates; what a sync adds needs the parameter's digits."""
    plan = local_opt.constant(2, total_steps=2)
    opt = local_opt.local_steps(optax.sgd(0.1), plan, axis_name="worker")
    step = jax.jit(vmap(lambda g, s, x: opt.update(g, s, x)))
    x = jnp.ones((W, 3))
    state = jax.jit(vmap(opt.init))(x)
    for grads in jnp.asarray(TARGETS[:2, :, :3], jnp.bfloat16):
        updates, state = step(grads, state, x)
        x = optax.apply_updates(x, updates)
    assert x.dtype == jnp.float32
    assert np.ptp(x, axis=0).max() <= np.spacing(np.abs(x).max())
    mean = 1 - 0.1 * jnp.asarray(TARGETS[:2, :, :3], jnp.bfloat16).astype(float).mean(1).sum(0)
    np.testing.assert_allclose(x[0], mean, rtol=1e-2)  # of what the optimizer did in bfloat16


def test_an_optimizer_may_look_at_the_values_of_the_first_parameters():
    inner = optax.GradientTransformation(
        lambda x: jnp.full((), float(jnp.max(x)) + 0.5),
        lambda g, state, x=None: (-state * g, state),
    )
    opt = local_opt.local_steps(inner, local_opt.constant(2, total_steps=4))
    state = opt.init(jnp.zeros(3))
    x, state = local_opt.replicate((jnp.zeros(3), state), W)
    updates, _ = jax.jit(vmap(opt.update))(jnp.ones((W, 3)), state, x)
    np.testing.assert_array_equal(updates, -0.5)


@pytest.mark.parametrize("inner", [SGD, optax.adamw(0.01)], ids=["sgd", "adamw"])
def test_one_worker_is_the_inner_optimizer_bitwise(inner):
    opt, results = local_opt.local_steps(inner, PLAN), []
    for made in (inner, opt):
        step, params = jax.jit(vmap(square_step(made))), copies(START, 1)
        state = jax.vmap(made.init)(params)
        for target in TARGETS[:13]:
            params, state = step(params, state, MATRICES[:1], target[:1])
        results.append(params)
    assert distance(results[0], copies(START, 1)) > 0.01
    assert_bitwise_equal(*results)


def test_a_sync_of_parallel_rounds_gives_back_what_it_was_given():
    rounds, params = local_opt.parallel_rounds(SGD), copies(START)
    state = jax.vmap(rounds.init)(params)
    assert jax.tree.structure(state) == jax.tree.structure(jax.vmap(SGD.init)(params))
    result = rounds.sync(params, state, period=4)
    assert result[0] is params and result[1] is state


@pytest.mark.parametrize("workers", [4, "mesh"])
def test_a_shared_step_decides_when_workers_synchronise(workers):
    """The same run as by each worker's own count; and a count that differs parts nobody."""
    workers = worker_mesh(W) if workers == "mesh" else workers
    plan = local_opt.constant(3, total_steps=7)
    opt = local_opt.local_steps(SGD, plan, axis_name="worker")

    def step(x, state, grads, t):
        updates, state = opt.update(grads, state, x, step=t)
        return x + updates, state

    specs = {"in_specs": ("worker", "worker", "worker", "replicated"), "out_specs": "worker"}
    run = jax.jit(local_opt.map_workers(step, workers, **specs))
    local = jax.jit(
        local_opt.map_workers(lambda *a: step(*a, None), W, in_specs="worker", out_specs="worker")
    )
    grads = jax.random.normal(jax.random.key(0), (8, W))
    for miscounted in (0, 1):
        x, state = local_opt.replicate((jnp.zeros(()), opt.init(jnp.zeros(()))), workers)
        y, other = local_opt.replicate((jnp.zeros(()), opt.init(jnp.zeros(()))), W)
        state = state._replace(num_steps=state.num_steps.at[1].add(miscounted))
        for t in range(8):  # one beyond the plan
            x, state = run(x, state, grads[t], t)
            y, other = local(y, other, grads[t])
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
        assert state.num_steps.tolist() == other.num_steps.tolist() == [8] * W
        assert state.num_syncs.tolist() == other.num_syncs.tolist() == [4] * W


def test_under_vmap_a_shared_step_leaves_the_conditional():
    plan = local_opt.constant(3, total_steps=7)
    opt = local_opt.local_steps(SGD, plan, axis_name="worker")

    def text(inputs):
        def step(x, state, *t):
            return opt.update(x, state, x, **({"step": t[0]} if t else {}))

        run = local_opt.map_workers(step, W, in_specs=inputs, out_specs="worker")
        x, state = local_opt.replicate((jnp.zeros(()), opt.init(jnp.zeros(()))), W)
        return str(jax.make_jaxpr(run)(x, state, *([0] if "replicated" in inputs else [])))

    assert "cond[" in text(("worker", "worker", "replicated"))
    assert "cond[" not in text(("worker", "worker")), "every step computes a sync, and selects"
