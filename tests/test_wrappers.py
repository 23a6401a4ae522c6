"""Optax inside local steps, before them and around them: equal to a plain loop, or refused.

The default suite runs rows of every kind, simulated. All of them, on meshes too:
`pytest -m "" tests/test_wrappers.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import local_opt
from tests.problems import RUNS, W
from tests.wrapped import (
    ONLY_W,
    PARAMS,
    PLAN,
    SGD,
    STEPS,
    assert_equal,
    expected,
    found,
    last,
    local,
)

LABELS = {"b": "b", "w": "w"}

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
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
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
    "dadapt_adamw": lambda: contrib.dadapt_adamw(1.0, estim_lr0=0.1),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1), s_init=0.1),
    "momo": lambda: contrib.momo(0.1),
    "sam, opaque": lambda: contrib.sam(
        SGD, optax.chain(contrib.normalize(), optax.sgd(0.05)), opaque_mode=True
    ),
    "galore": lambda: contrib.galore(0.1, rank=2),
    "muon": lambda: contrib.muon(0.1),
    "prodigy": lambda: contrib.prodigy(1.0, estim_lr0=0.1),
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

# What a row's update is passed beside a gradient.
EXTRA = {
    "polyak_sgd": ("value",),
    "momo": ("value",),
    "reduce_on_plateau": ("value",),
    "sam, opaque": ("grad_fn",),
    "lbfgs": ("value", "grad", "value_fn"),
}
# Rows like others, for a machine that has time.
ALIKE = (
    "adabelief", "adadelta", "adamax", "amsgrad", "nadamw", "optimistic_gradient_descent", "yogi",
    "acprop", "adopt", "signum", "lbfgs", "lbfgs without a line search", "simplified_ademamix",
    "clip_by_block_rms", "galore", "normalize_by_update_norm", "rmsprop", "snapshot", "centralize",
    "scale_by_trust_ratio", "ademamix", "momo", "noisy_sgd", "adan", "radam", "dadapt_adamw",
    "fromage", "lamb", "novograd", "rprop", "adagrad", "adam", "sgd", "mechanize", "lion",
    "adaptive_grad_clip", "add_decayed_weights", "chain", "clip", "conditionally_transform", "ema",
    "scale_by_schedule", "set_to_zero", "trace", "zero_nans", "split_real_and_imaginary",
)  # fmt: skip

# Conditionals of optax whose branches are typed otherwise: JAX refuses them where it checks types.
WITHOUT_VMA = ("lbfgs", "reduce_on_plateau")

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

# These look at where they are, and do not go back to where they were before a sync.
LESS = ("keep_params_nonnegative", "lbfgs", "lbfgs without a line search", "sam, opaque")

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


def made(name):
    """A row's optimizer."""
    if name in LINKS:
        return optax.chain(LINKS[name](), SGD)
    return MET[name][0]() if name in MET else OPTIMIZERS[name]()


def met(name):
    return MET[name][1] if name in MET else ()


@functools.cache
def of_row(name):
    """(the expected history, what a step leaves of a move)."""
    history, kept = expected(lambda: made(name), met(name), EXTRA.get(name, ()))
    apart = max(np.ptp(x[:, -2], axis=0).max() for x in jax.tree.leaves(history))
    assert apart > 1e-4, "inside a round workers differ, or nothing is tested"
    return history, kept


def rows(names):
    """The rows, those slow that are like another one."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in names]


MESHES = ["vmap", *(pytest.param(r, marks=pytest.mark.slow) for r in RUNS if r != "vmap")]


@pytest.mark.parametrize("run", MESHES)
@pytest.mark.parametrize("name", rows([*OPTIMIZERS, *LINKS, *MET]))
def test_inside(name, run):
    policy = dict.fromkeys(met(name), "mean") or "local"
    if name in WITHOUT_VMA and run == "shard_map":
        with pytest.raises(TypeError, match="cond branches must have equal output types"):
            found(made(name), run, EXTRA[name])  # without anything of ours, too
        return
    seen, state = found(local(made(name), opt_state=policy), run, EXTRA.get(name, ()))
    history, kept = of_row(name)
    assert (kept < 0.95) == (name in MET or name in LESS), "would its next step undo a sync?"
    assert_equal(seen, history)
    local_opt.check_synced(last(seen))
    assert state.round.tolist() == [PLAN.rounds] * W and state.step.tolist() == [STEPS] * W


@pytest.mark.parametrize("run", MESHES)
@pytest.mark.parametrize("name", rows(LINKS))
def test_before(name, run):
    if name in WITHOUT_VMA and run == "shard_map":
        pytest.skip("refused by JAX without anything of ours, see test_inside")
    seen, _ = found(optax.chain(LINKS[name](), local(SGD)), run, EXTRA.get(name, ()))
    assert_equal(seen, of_row(name)[0])
    local_opt.check_synced(last(seen))


@pytest.mark.parametrize("name", MET)
def test_state_that_would_undo_a_sync_is_refused(name):
    """Unless all of it meets, or is reset; fragments have no sync of it."""
    fields, params = met(name), PARAMS
    message = f"optax.contrib.{name} computes the next parameters from .* would be undone"
    chained = optax.chain(optax.clip(1.0), made(name))
    for inner in (made(name), chained):
        for policy in ("local", {fields[-1]: "local"}):
            with pytest.raises(ValueError, match=f"{message}. Pass opt_state=.*{fields[0]}.*mean"):
                local(inner, opt_state=policy).init(params)
        stream = local_opt.streaming_rounds(inner, axis_name="worker", fragments=1)
        with pytest.raises(ValueError, match=f"{message}. Fragments have no sync of the state"):
            stream.init(params)
        for policy in ("mean", "reset", dict.fromkeys(fields, "reset")):
            local(inner, opt_state=policy).init(params)
        local_opt.accumulate(inner, PLAN, axis_name="worker").init(params)  # one state for all


def test_the_state_of_every_row_may_be_donated_with_the_parameters():
    """Some begin with the parameters themselves: no buffer may be given away twice."""
    names = [*OPTIMIZERS, *LINKS, *MET]
    makers = {
        "local_steps": lambda n: local(
            made(n), opt_state=dict.fromkeys(met(n), "mean") or "local", outer=optax.sgd(1.0, 0.9)
        ),
        "accumulate": lambda n: local_opt.accumulate(made(n), PLAN, axis_name="worker"),
        "parallel": lambda n: local_opt.parallel_rounds(made(n), axis_name="worker"),
    }
    params = jax.tree.map(jnp.copy, PARAMS)
    states = {how: {n: make(n).init(params) for n in names} for how, make in makers.items()}
    keep = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), donate_argnums=0)
    jax.block_until_ready(keep((params, states)))
