"""Every optimizer of optax and optax.contrib in local steps: what is frozen stays to the bit.

The list is made from the packages. What an optimizer's `init` refuses by name counts as refused.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import local_opt

START = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)
QUICK = ("adam", "lion", "schedule_free_sgd")
HOW = {
    "outer adam": {"outer": optax.adam(1e-2)},
    "scaffold": {"correction": local_opt.scaffold()},
    "int8, outer adam": {"outer": optax.adam(1e-2), "compress": local_opt.quantize("int8")},
    "mean, outer adam": {"outer": optax.adam(1e-2), "sync_opt_state": "mean"},
    "reset, outer adam": {"outer": optax.adam(1e-2), "sync_opt_state": "reset"},
}


def optimizers():
    """{name: optimizer} that needs a learning rate alone."""
    made = {}
    for package in (optax, contrib):
        for name, make in vars(package).items():
            if not inspect.isfunction(make) or name.startswith(("scale_by", "inject")):
                continue
            try:
                given = inspect.signature(make).parameters
                more = {"key": jax.random.key(0)} if name == "noisy_sgd" else {}
                if "learning_rate" in given:
                    made[name] = make(learning_rate=0.05, **more)
            except (TypeError, DeprecationWarning):  # more is needed, or another is
                continue
    return {name: o for name, o in made.items() if isinstance(o, optax.GradientTransformation)}


FOUND = optimizers()
ROWS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(FOUND)
]


@pytest.mark.parametrize("name", ROWS)
def test_a_frozen_leaf_keeps_its_bits_under_every_sync(name):
    params = {"frozen": START, "train": START}
    tried, refused = 0, 0
    for how in HOW.values():
        labels = {"frozen": "f", "train": "t"}
        inner = optax.partition({"t": FOUND[name], "f": optax.set_to_zero()}, labels)
        tried += 1
        try:
            rounds = local_opt.local_rounds(inner, **how)
            jax.eval_shape(rounds.init, params)
        except ValueError:
            refused += 1
            continue

        def run(params, shift, rounds=rounds):
            state = rounds.init(params)
            for _ in range(3):
                grads = jax.tree.map(lambda x: x - shift, params)
                updates, state = rounds.update(grads, state, params)
                params, state = rounds.sync(optax.apply_updates(params, updates), state)
            return params

        try:
            found = jax.jit(jax.vmap(run, in_axes=(None, 0), axis_name="worker"))(
                params, jnp.arange(3.0)
            )
        except (TypeError, ValueError) as error:  # it takes the loss as well
            pytest.skip(str(error)[:80])
        np.testing.assert_array_equal(found["frozen"], np.stack([START] * 3))
        np.testing.assert_array_equal(found["train"][0], found["train"][1])
    print(f"{name}: {tried} tried, {tried - refused} right, {refused} refused")
