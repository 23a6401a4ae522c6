"""proximal_anchor: echoed steps are pulled back to the parameters at the load."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ordering.echo import EchoPlan, proximal_anchor
from tests import reference
from tests.refused import refuses

RNG = np.random.default_rng(0)
START = RNG.normal(size=3).astype(np.float32)
ECHOES = EchoPlan(np.concatenate([np.arange(u) == 0 for u in (3, 1, 2, 3, 2, 1, 3, 2)]))
# The loss of batch l has its minimum at C[l] and the curvatures H.
H = np.array([0.5, 2.0, 4.0], np.float32)
CENTRES = RNG.normal(size=(8, 3)).astype(np.float32)
LOADS = np.array(reference.loads_used(ECHOES.fresh))
STRENGTH = 1.5


@functools.partial(jax.jit, static_argnums=3)
@functools.partial(jax.vmap, in_axes=(0, None, None, None))
def run(x, fresh, centres, momentum=None):
    """x after every step, with a traced `fresh`, of every worker."""
    opt = optax.chain(proximal_anchor(STRENGTH), optax.sgd(0.1, momentum=momentum))

    def body(carry, at):
        x, state = carry
        fresh, centre = at
        grads = jax.tree.map(lambda x: H * (x - centre), x)
        updates, state = opt.update(grads, state, x, fresh=fresh)
        x = optax.apply_updates(x, updates)
        return (x, state), x

    return jax.lax.scan(body, (x, opt.init(x)), (fresh, centres))[1]


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_the_anchor_equals_the_reference(momentum):
    """Every worker has an anchor of its own."""
    x = np.stack([START, -START])
    found = run({"w": x}, ECHOES.fresh, CENTRES[LOADS], momentum)["w"]
    gradient = lambda t, x: H * (x - CENTRES[LOADS[t]])  # noqa: E731
    for own, start in zip(found, x, strict=True):
        expected = reference.anchored_sgd(
            start, gradient, ECHOES.fresh, STRENGTH, 0.1, momentum or 0.0
        )
        # 17 steps of float32 roundings of numbers of order one.
        np.testing.assert_allclose(own, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", [bool, np.bool_, jnp.bool_])
def test_a_known_and_a_traced_fresh_agree(kind):
    opt = proximal_anchor(STRENGTH)
    traced = jax.jit(lambda g, s, x, fresh: opt.update(g, s, x, fresh=fresh))
    x, state = jnp.asarray(START), opt.init(jnp.asarray(START))
    assert state.anchor.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()  # to donate both
    for t, fresh in enumerate(ECHOES.fresh[:6].tolist()):
        known = opt.update(H, state, x, fresh=kind(fresh))
        update, state = traced(H, state, x, fresh)
        # The compiler may fuse a product and a sum: one rounding.
        np.testing.assert_allclose(known[0], update, rtol=2e-7, atol=1e-7)
        np.testing.assert_array_equal(known[1].anchor, state.anchor)
        x = x + np.float32(0.1 * (t + 1))


def test_many_uses_converge_to_the_proximal_point():
    uses = 200
    last = run(START[None], np.arange(uses) == 0, np.stack([CENTRES[0]] * uses), None)[0, -1]
    point = (H * CENTRES[0] + STRENGTH * START) / (H + STRENGTH)
    # The slowest direction shrinks by 1 - 0.1 * 2 in a step: what is left is rounding.
    np.testing.assert_allclose(last, point, rtol=0, atol=1e-6)
    # Without the anchor, the minimum of the batch's loss.
    assert np.abs(point - CENTRES[0]).max() > 0.1


def test_gradients_keep_their_type():
    opt = proximal_anchor(STRENGTH)
    x = jnp.asarray(START)
    update, _ = opt.update(jnp.ones(3, jnp.bfloat16), opt.init(x + 1), x, fresh=False)
    assert update.dtype == jnp.bfloat16
    np.testing.assert_array_equal(update, jnp.full(3, 1 - STRENGTH, jnp.bfloat16))


def updated(params=None, updates=None, state=None, fresh=True):
    """An update of {"w": [3]}, with some argument another."""
    given, opt = {"w": jnp.ones(3)}, proximal_anchor(1.0)
    return lambda: opt.update(
        given if updates is None else updates, opt.init(given) if state is None else state,
        given if params is None else params, fresh=fresh,
    )  # fmt: skip


test_bad_input = refuses({
    "strength": (lambda: proximal_anchor(-0.1), "strength is -0.1: pass a finite number"),
    "fresh": (updated(fresh=3), "fresh is 3: pass a bool"),
    "fresh of workers": (updated(fresh=jnp.ones(2, bool)), "fresh is Array.*: pass a bool"),
    "fresh missing": (updated(fresh=None), r"fresh is missing: .*, fresh=use.fresh\)"),
    "state": (updated(state=(optax.EmptyState(),)), "state is a .*: pass that of this init"),
    "state of others": (updated(state=proximal_anchor(1.0).init(())), "anchor.* is missing"),
    "params": (updated(params={"w": jnp.ones(())}), r"\w+\[.*\] is .* in params.*: pass a"),
    "updates": (updated(updates={"v": jnp.ones(3)}), r"\w+\[.*\] is .* in params.*: pass a"),
    "params missing": (
        lambda: proximal_anchor(1.0).update(jnp.ones(2), None, fresh=True),
        "params is missing: call update",
    ),
})  # fmt: skip
