"""Optax around and after local steps: what leaves a sync as it is, and what is refused."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import local_opt
from local_opt import runners, wrappers
from tests.problems import RUNS, W
from tests.wrapped import (
    ONLY_W,
    PARAMS,
    PLAN,
    SGD,
    STEPS,
    TARGETS,
    assert_equal,
    expected,
    found,
    last,
    local,
    mean,
)

OTHER = local_opt.SyncPlan([0, 3], STEPS)
EACH = {"b": "b", "w": "w"}
ADAM = optax.adam(0.1)

# {name: (around local steps, the optimizer that this is, the plans of parameters)}
AROUND = {
    "flatten": (lambda: optax.flatten(local(SGD)), lambda: optax.flatten(SGD), None),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(lambda rate: local(optax.sgd(rate, 0.9)))(rate=0.1),
        lambda: SGD,
        None,
    ),
    "split_real_and_imaginary": (
        lambda: contrib.split_real_and_imaginary(local(SGD)),
        lambda: SGD,
        None,
    ),
    "with_extra_args_support": (
        lambda: optax.with_extra_args_support(local(SGD)),
        lambda: SGD,
        None,
    ),
    "chain": (
        lambda: optax.chain(optax.clip(0.5), optax.chain(optax.trace(0.5), local(SGD))),
        lambda: optax.chain(optax.clip(0.5), optax.trace(0.5), SGD),
        None,
    ),
    "named_chain": (
        lambda: optax.named_chain(("clip", optax.clip(0.5)), ("local", local(SGD))),
        lambda: optax.chain(optax.clip(0.5), SGD),
        None,
    ),
    "partition, two plans": (
        lambda: optax.partition({"b": local(ADAM), "w": local(SGD, OTHER)}, EACH),
        lambda: optax.partition({"b": ADAM, "w": SGD}, EACH),
        {"b": PLAN, "w": OTHER},
    ),
    "partition, frozen": (
        lambda: optax.partition({"b": optax.set_to_zero(), "w": local(SGD)}, EACH),
        lambda: optax.partition({"b": optax.set_to_zero(), "w": SGD}, EACH),
        None,
    ),
    "partition, b never meets": (
        lambda: optax.partition({"b": ADAM, "w": local(SGD)}, EACH),
        lambda: optax.partition({"b": ADAM, "w": SGD}, EACH),
        {"w": PLAN},
    ),
    "masked, b never meets": (
        lambda: optax.masked(local(SGD), ONLY_W),
        lambda: optax.masked(SGD, ONLY_W),
        {"w": PLAN},
    ),
    "selective_transform": (
        lambda: optax.selective_transform(local(SGD), freeze_mask={"b": True, "w": False}),
        lambda: optax.selective_transform(SGD, freeze_mask={"b": True, "w": False}),
        None,
    ),
}
MESHES = ["vmap", *(pytest.param(r, marks=pytest.mark.slow) for r in RUNS if r != "vmap")]


@pytest.mark.parametrize("run", MESHES)
@pytest.mark.parametrize("name", AROUND)
def test_around(name, run):
    around, inner, plans = AROUND[name]
    history, _ = found(around(), run)
    assert_equal(history, expected(inner, plans=plans)[0])
    if "never" in name:  # nothing can refuse it: this is who finds it
        with pytest.raises(ValueError, match=r"workers' parameters are .* apart in \['b'\]"):
            local_opt.check_synced(last(history))
    else:
        local_opt.check_synced(last(history))


# What keeps or changes the update of a sync: {factory: around}.
REFUSED = {
    "apply_if_finite": lambda opt: optax.apply_if_finite(opt, 5),
    "apply_if_finite, in a chain": lambda opt: optax.chain(
        optax.clip(1.0), optax.apply_if_finite(opt, 5)
    ),
    "conditionally_mask": lambda opt: optax.conditionally_mask(opt, lambda step: step > 1),
    "conditionally_transform": lambda o: optax.conditionally_transform(o, lambda step: step > 1),
    "MultiSteps": lambda opt: optax.MultiSteps(opt, 2),
    "sam": lambda opt: contrib.sam(opt, optax.sgd(0.1)),
    "schedule_free": lambda opt: contrib.schedule_free(opt, 0.1),
    "mechanize": contrib.mechanize,
    "scale_by_galore": lambda opt: contrib.galore(1.0, rank=2, base_optimizer=opt),
}
FOLLOWED = {
    "chain": lambda opt: optax.chain(optax.clip(1.0), opt, optax.scale(0.5)),
    "a chain in a chain": lambda o: optax.chain(optax.chain(optax.clip(1.0), o), optax.ema(0.9)),
    "named_chain": lambda opt: optax.named_chain(("a", opt), ("b", optax.clip(1.0))),
    "keep_params_nonnegative": lambda o: optax.chain(o, optax.keep_params_nonnegative()),
    "two of them": lambda opt: optax.chain(opt, opt),
}


def refused(opt, run, message, params=PARAMS):
    """A step of it is refused while it is traced."""
    lift = functools.partial(jax.vmap, axis_name="worker")
    if run == "shard_map":
        mesh, split = runners.worker_mesh(W), jax.P("worker")
        lift = functools.partial(jax.shard_map, mesh=mesh, in_specs=split, out_specs=split)
    rows = jax.tree.map(lambda x: jnp.stack([x] * W), params)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lift(lambda x: opt.update(x, opt.init(x), x)[0]), rows)


MAKE = pytest.mark.parametrize("make", [local_opt.local_steps, local_opt.accumulate])
RUN = pytest.mark.parametrize("run", ["vmap", "shard_map"])


@MAKE
@RUN
@pytest.mark.parametrize("name", REFUSED)
def test_a_wrapper_that_would_change_or_skip_a_sync_is_refused(name, run, make):
    opt = REFUSED[name](make(SGD, PLAN, axis_name="worker"))
    if run == "shard_map" and name == "scale_by_galore":
        pytest.skip("GaLore itself asks for unsplit shapes")
    refused(opt, run, f"{make.__name__} stands inside .*Put it inside.* {make.__name__}\\(")


@MAKE
@RUN
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_follows_in_a_chain_is_refused(name, run, make):
    opt = FOLLOWED[name](make(SGD, PLAN, axis_name="worker"))
    refused(opt, run, f"1 of . transformations follow {make.__name__} in an .*Put them before it")


def test_lookahead_outside_is_refused_and_inside_both_sequences_meet():
    pair = optax.LookaheadParams.init_synced
    over = optax.lookahead(local(SGD), 2, 0.5)
    refused(over, "vmap", "local_steps stands inside optax.lookahead", pair(PARAMS))
    opt = optax.lookahead(SGD, 2, 0.5)

    def step(opt, params, state, target):
        grads = jax.grad(lambda x: 0.5 * jnp.sum((x - target) ** 2))(params.fast)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    one = jax.jit(functools.partial(step, opt))
    all_of = jax.jit(jax.vmap(functools.partial(step, local(opt)), axis_name="worker"))
    params, states = [pair(PARAMS["b"])] * W, [opt.init(pair(PARAMS["b"]))] * W
    own = jax.tree.map(lambda x: jnp.stack([x] * W), params[0])
    state = jax.vmap(local(opt).init)(own)
    for t in range(STEPS):
        target = TARGETS["b"][:, t]
        for w in range(W):
            params[w], states[w] = one(params[w], states[w], target[w])
        if PLAN.syncs_after(t):
            params = mean(params, lambda path: True)
        own, state = all_of(own, state, target)
        assert_equal(own, jax.tree.map(lambda *x: np.stack(x), *params))


def test_a_link_after_it_that_is_no_chain_of_optax_is_found_by_check_synced():
    """Whoever writes a chain of their own is not seen, but what it does is."""
    opt = local(SGD)

    def update(grads, state, params, **extra):
        updates, state = opt.update(grads, state, params, **extra)
        return jax.tree.map(lambda u: 0.5 * u, updates), state

    history, _ = found(optax.GradientTransformationExtraArgs(opt.init, update))
    with pytest.raises(ValueError, match="where a sync leaves 1 roundings"):
        local_opt.check_synced(last(history))


def test_gradients_of_examples_may_be_aggregated_inside_or_before():
    def aggregate():
        return contrib.differentially_private_aggregate(1.0, 0.0, key=jax.random.key(0))

    grads = jnp.asarray(np.random.default_rng(0).normal(size=(W, 5, 3)), jnp.float32)
    norms = np.linalg.norm(grads, axis=-1, keepdims=True)
    per_worker = (grads / np.maximum(1, norms)).sum(axis=1) / 5
    plan = local_opt.every_step(2)
    for opt in (
        local(optax.chain(aggregate(), optax.sgd(0.1)), plan),
        optax.chain(aggregate(), local(optax.sgd(0.1), plan)),
    ):
        step = jax.vmap(lambda g, x, opt=opt: opt.update(g, opt.init(x), x)[0], axis_name="worker")
        updates = step(grads, jnp.zeros((W, 3)))
        np.testing.assert_allclose(
            updates, np.stack([-0.1 * per_worker.mean(0)] * W), rtol=1e-5, atol=1e-7
        )


def test_a_plateau_is_each_workers_own_unless_they_share_its_value():
    inner = optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(0.5, patience=1, rtol=0.01))
    opt = local(inner, local_opt.every_step(4))

    def scales(value):
        def run(x, values):
            def body(carry, v):
                x, state = carry
                updates, state = opt.update(jnp.ones(()), state, x, value=value(v))
                return (x + updates, state), None

            (_, state), _ = jax.lax.scan(body, (x, opt.init(x)), values)
            return state.rounds.inner[1].scale

        values = jnp.array([[4.0, 3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
        return jax.vmap(run, axis_name="worker")(jnp.zeros(2), values).tolist()

    assert scales(lambda v: v) == [1.0, 0.125]
    assert scales(lambda v: jax.lax.pmean(v, "worker")) == [1.0, 1.0]


def test_the_evaluation_point_of_schedule_free_is_that_of_the_mean():
    opt = local(contrib.schedule_free_sgd(0.1), opt_state={"z": "mean"})
    _, state = found(opt)
    history, _ = found(opt)
    inner, params = state.rounds.inner, last(history)
    at = jax.vmap(contrib.schedule_free_eval_params)(inner, params)
    local_opt.check_synced(at, ulps=4)  # (y - 0.1 z) / 0.9, of equal y and z
    one = contrib.schedule_free_eval_params(
        local_opt.consolidate(inner), local_opt.consolidate(params)
    )
    assert_equal(one, local_opt.consolidate(at))


def takes_transformations(function):
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any("GradientTransformation" in str(p.annotation) for p in parameters)


# What takes transformations and is another name, or no wrapper of steps that communicate.
OTHERS = (
    "galore", "inject_stateful_hyperparams", "lbfgs", "masked", "monitor", "multi_transform",
    "partition", "sophia",
)  # fmt: skip


def test_every_wrapper_of_optax_is_in_a_table():
    """A new one fails here, and is to be tried before anybody stands it around a sync."""
    known = {name.split(",")[0] for name in AROUND} | set(wrappers.REFUSED) | set(OTHERS)
    seen = {
        name
        for module in (optax, contrib)
        for name, function in inspect.getmembers(module, callable)
        if not name.startswith("_") and takes_transformations(function)
    }
    assert {"MultiSteps", "chain", "schedule_free"} <= seen, "or nothing is looked at"
    assert seen <= known, f"try {sorted(seen - known)} around local_steps"
    assert set(wrappers.REFUSED) == {name.split(",")[0] for name in REFUSED} | {"lookahead"}
