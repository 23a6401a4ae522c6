"""Optax inside local steps, before them and around them: equal to a plain loop, or refused.

The default suite runs every row once, simulated. All of them on meshes too:
`pytest -m slow tests/test_wrappers.py`.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import local_opt
from local_opt import wrappers
from syncopate.plans import specs
from tests.problems import RUNS, W, copies

STEPS = 6
PLAN = local_opt.SyncPlan([0, 2, 3], STEPS)  # rounds of 2, 1, 3 steps
RNG = np.random.default_rng(5)
PARAMS = {
    "b": jnp.asarray(RNG.normal(size=4), jnp.float32),
    "w": jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32),
}
TARGETS = {
    "b": jnp.asarray(RNG.normal(size=(W, STEPS, 4)), jnp.float32),
    "w": jnp.asarray(RNG.normal(size=(W, STEPS, 3, 4)), jnp.float32),
}
SGD = optax.sgd(0.1, momentum=0.9)
LABELS = {"b": "b", "w": "w"}
ONLY_W = {"b": False, "w": True}


def square(params, target):
    return 0.5 * optax.tree.norm(optax.tree.sub(params, target), squared=True)


# Optimizers, and what a row says beside: the policy of the optimizer state.
OPTIMIZERS = {
    "adabelief": lambda: optax.adabelief(0.1),
    "adadelta": lambda: optax.adadelta(1.0),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.1),
    "adamax": lambda: optax.adamax(0.1),
    "adamw": lambda: optax.adamw(0.1, mask=ONLY_W),
    "adan": lambda: optax.adan(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "fromage": lambda: optax.fromage(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "lbfgs without a line search": lambda: optax.lbfgs(0.1, linesearch=None, memory_size=2),
    "lion": lambda: optax.lion(0.1),
    "nadamw": lambda: optax.nadamw(0.1),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=jax.random.key(1)),
    "novograd": lambda: optax.novograd(0.1),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.1),
    "polyak_sgd": lambda: optax.polyak_sgd(0.1),  # takes the worker's own value
    "radam": lambda: optax.radam(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, centered=True, momentum=0.9),
    "rprop": lambda: optax.rprop(0.1),
    "sgd": lambda: SGD,
    "sgd, nesterov": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 6), 0.9, nesterov=True),
    "signum": lambda: optax.signum(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "yogi": lambda: optax.yogi(0.1),
    "acprop": lambda: contrib.acprop(0.1),
    "ademamix": lambda: contrib.ademamix(0.1),
    "adopt": lambda: contrib.adopt(0.1),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(1.0),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1), s_init=0.1),
    "momo": lambda: contrib.momo(0.1),
    "muon": lambda: contrib.muon(0.1),
    "prodigy": lambda: contrib.prodigy(1.0),
    "simplified_ademamix": lambda: contrib.simplified_ademamix(0.1),
    "keep_params_nonnegative": lambda: optax.chain(SGD, optax.keep_params_nonnegative()),
    "flatten": lambda: optax.flatten(SGD),
    "partition": lambda: optax.partition({"b": optax.adam(0.1), "w": SGD}, LABELS),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(
        optax.linear_schedule(0.1, 0.0, 6), momentum=0.9
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(SGD, 3),
    "conditionally_mask": lambda: optax.conditionally_mask(SGD, lambda step: step % 2 == 0),
    "MultiSteps": lambda: optax.MultiSteps(SGD, 2),
    "selective_transform": lambda: optax.selective_transform(SGD, freeze_mask=ONLY_W),
}

# What computes parameters from fields of its state is refused unless these meet, too.
MET = {
    "schedule_free": (lambda: contrib.schedule_free_sgd(0.1), ("z",)),
    "sam": (
        lambda: contrib.sam(SGD, optax.chain(contrib.normalize(), optax.sgd(0.05))),
        ("cache",),
    ),
    "madgrad": (lambda: contrib.madgrad(0.1), ("s", "grad_sum_sq")),
    "cocob": (
        lambda: contrib.cocob(),
        ("cumulative_gradients", "scale", "subgradients", "reward"),
    ),
}

# What transforms a worker's own gradient: inside or before, these are the same steps.
LINKS = {
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(2)),
    "apply_every": lambda: optax.apply_every(2),
    "centralize": lambda: optax.centralize(),
    "chain": lambda: optax.chain(optax.clip(1.0), optax.scale_by_sign()),
    "clip": lambda: optax.clip(0.5),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.5),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.scale(0.5), lambda step: step % 2 == 0
    ),
    "ema": lambda: optax.ema(0.9),
    "freeze": lambda: optax.freeze(ONLY_W),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.scale)(
        step_size=optax.linear_schedule(1.0, 0.1, 6)
    ),
    "masked": lambda: optax.masked(optax.clip(0.5), ONLY_W),
    "named_chain": lambda: optax.named_chain(("one", optax.clip(1.0)), ("two", optax.trace(0.5))),
    "normalize_by_update_norm": lambda: optax.normalize_by_update_norm(),
    "reduce_on_plateau": lambda: contrib.reduce_on_plateau(0.5, patience=1),  # by its own value
    "scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 6)),
    "scale_by_trust_ratio": lambda: optax.scale_by_trust_ratio(),
    "set_to_zero": lambda: optax.masked(optax.set_to_zero(), ONLY_W),
    "snapshot": lambda: optax.snapshot("norm", lambda tree: optax.tree.norm(tree)),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.trace(0.5)),
    "trace": lambda: optax.trace(0.9, nesterov=True),
    "zero_nans": lambda: optax.zero_nans(),
}


def one_step(opt, params, state, target):
    value, grads = jax.value_and_grad(square)(params, target)
    extra = {"value": value}
    updates, state = optax.with_extra_args_support(opt).update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def expected(opt, met=(), plan=PLAN, averaged=lambda path: True):
    """[W, STEPS, ...] and the last states: W states of optax, a mean by NumPy where a round ends.

    Args:
      met: fields of the optimizer's state that meet, too; averaged: which parameters meet.
    """
    step = jax.jit(functools.partial(one_step, opt))
    params, states = [PARAMS] * W, [opt.init(PARAMS)] * W
    history = []

    def mean(trees, of):
        def leaf(path, *leaves):
            if not of(jax.tree_util.keystr(path, simple=True, separator=".").split(".")):
                return leaves
            return [np.mean(np.stack(leaves), axis=0, dtype=np.float64).astype(np.float32)] * W

        rows = jax.tree_util.tree_map_with_path(leaf, *trees)
        rows = jax.tree.leaves(rows, is_leaf=lambda x: isinstance(x, list | tuple) and len(x) == W)
        structure = jax.tree.structure(trees[0])
        return [jax.tree.unflatten(structure, [row[w] for row in rows]) for w in range(W)]

    for t in range(STEPS):
        for w in range(W):
            target = jax.tree.map(lambda x, w=w, t=t: x[w, t], TARGETS)
            params[w], states[w] = step(params[w], states[w], target)
        if plan.syncs_after(t):
            params = mean(params, averaged)
            states = mean(states, lambda path: set(path) & set(met)) if met else states
        history.append(jax.tree.map(lambda *x: np.stack(x), *params))
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *history), states


def found(opt, run="vmap"):
    """The same of what is to be tested, in one compiled loop: history, and the last state."""

    @jax.jit
    @RUNS[run]
    def all_steps(params, targets):
        def body(carry, target):
            carry = specs.varying(one_step(opt, *carry, target), params)
            return carry, carry[0]

        start = specs.varying((params, opt.init(params)), params)
        (_, state), history = jax.lax.scan(body, start, targets)
        return history, state

    return all_steps(copies(PARAMS), TARGETS)


def assert_equal(history, reference):
    # float32 sums in another order, over six steps of numbers of about 1.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), history, reference
    )


def last(history):
    return jax.tree.map(lambda x: x[:, -1], history)


def local(inner, plan=PLAN, **options):
    return local_opt.local_steps(inner, plan, axis_name="worker", **options)


@functools.cache
def of_row(name):
    """(what stands inside, the fields that meet, the expected history)."""
    if name in MET:
        make, fields = MET[name]
        opt = make()
    else:
        fields = ()
        opt = OPTIMIZERS[name]() if name in OPTIMIZERS else optax.chain(LINKS[name](), SGD)
    history, _ = expected(opt, fields)
    apart = max(np.ptp(x[:, -2], axis=0).max() for x in jax.tree.leaves(history))
    assert apart > 1e-4, "inside a round workers differ, or nothing is tested"
    return opt, fields, history


MESHES = ["vmap", *(pytest.param(r, marks=pytest.mark.slow) for r in RUNS if r != "vmap")]


@pytest.mark.parametrize("run", MESHES)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *LINKS, *MET])
def test_inside(name, run):
    opt, fields, history = of_row(name)
    policy = dict.fromkeys(fields, "mean") or "local"
    seen, state = found(local(opt, opt_state=policy), run)
    assert_equal(seen, history)
    local_opt.check_synced(last(seen))
    assert state.round.tolist() == [PLAN.rounds] * W and state.step.tolist() == [STEPS] * W


@pytest.mark.parametrize("run", MESHES)
@pytest.mark.parametrize("name", LINKS)
def test_before(name, run):
    seen, _ = found(optax.chain(LINKS[name](), local(SGD)), run)
    assert_equal(seen, of_row(name)[2])
    local_opt.check_synced(last(seen))
