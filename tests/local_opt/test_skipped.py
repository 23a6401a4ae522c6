"""Steps that a worker skips, as in loss scaling: it still meets the others, in every sync."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from syncopate import mesh
from tests.plain_loop import ends, history
from tests.problems import RUNS, W, vmap

RATE, MOMENTUM, T, H = 0.1, 0.9, 18, 3
RNG = np.random.default_rng(11)
GRADS = RNG.normal(size=(T, W, 2)).astype(np.float32)
OK = RNG.random((T, W)) > 0.3
OK[[0, H - 1, T - 1], [1, 2, 3]] = False  # the first step, and steps that end rounds
OK[6:9, 0] = False  # a whole round
OK[11] = True  # none skips this sync
PLAN = local_opt.constant(H, total_steps=T)


def expected():
    """[T, W, 2] of momentum, whose skipped steps change neither x nor v; a mean after a round."""

    def step(w, t, x, v):
        moved = MOMENTUM * v + GRADS[t, w]
        return (x - RATE * moved, moved) if OK[t, w] else (x, v)

    return history(step, np.zeros(2), [np.zeros(2)] * W, T, ends(PLAN))


SGD = optax.sgd(RATE, MOMENTUM)
NAN = np.where(OK[..., None], GRADS, np.nan)
SKIPS = {  # the inner optimizer, gradients, and whether update is passed `ok`
    "apply_if_finite": (optax.apply_if_finite(SGD, 1000), NAN, False),
    "a condition of one's own": (
        optax.conditionally_mask(SGD, lambda step, *, ok: ok, forward_extra_args=True),
        GRADS,
        True,
    ),
    "skip_not_finite": (
        optax.MultiSteps(SGD, 1, should_skip_update_fn=optax.skip_not_finite),
        NAN,
        False,
    ),
}


@pytest.mark.parametrize("name,run", list(zip(SKIPS, RUNS, strict=True)))
def test_a_step_that_is_skipped_inside_loses_no_sync(name, run):
    inner, grads, passes = SKIPS[name]
    opt = local_opt.local_steps(inner, PLAN)

    def steps(x, grads, ok):
        def body(carry, now):
            x, state = carry
            updates, state = opt.update(now[0], state, x, **({"ok": now[1]} if passes else {}))
            carry = mesh.varying((x + updates, state), grads)
            return carry, carry[0]

        start = mesh.varying((x, opt.init(x)), grads)
        (_, state), outcome = jax.lax.scan(body, start, (grads, ok))
        return outcome, state

    rows = np.moveaxis(grads, 1, 0), OK.T
    result, state = jax.jit(RUNS[run](steps))(jnp.zeros((W, 2)), *rows)
    np.testing.assert_allclose(np.moveaxis(np.asarray(result), 0, 1), expected(), atol=1e-6)
    assert state.num_steps.tolist() == [T] * W and state.num_syncs.tolist() == [T // H] * W


def test_a_select_that_is_told_loses_one_sync_of_one_worker():
    """The usual select of loss scaling, around the update."""
    opt = local_opt.local_steps(SGD, PLAN)

    @jax.jit
    @vmap
    def step(x, state, grads, ok, t):
        updates, new = opt.update(grads, state, x, step=t, weight=ok)
        new = x + updates, new
        return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, (x, state))

    x = jnp.zeros((W, 2))
    state, results = jax.vmap(opt.init)(x), []
    for t in range(T):
        x, state = step(x, state, NAN[t], OK[t], jnp.full(W, t))
        results.append(x)
    assert np.isfinite(results).all()
    with pytest.raises(ValueError, match="roundings are allowed"):
        local_opt.check_synced(results[H - 1])
    local_opt.check_synced(results[H - 1][OK[H - 1]])
    local_opt.check_synced(results[11])
