"""plain.py with data echoing: a batch is used again while the next one is loaded."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

from syncopate import ordering

STEPS, BATCH, SECONDS = 600, 64, 0.01  # of a load: storage, decoding, augmentation


class Network(eqx.Module):
    layers: list

    def __init__(self, key):
        first, second, third = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 8, 3, key=first),
            jax.nn.relu,
            eqx.nn.Conv2d(8, 16, 3, stride=2, key=second),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(64, 10, key=third),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model, x, y):
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def slow_loader(x, y, seed):
    rng = np.random.default_rng(seed)
    while True:
        chosen = rng.integers(len(x), size=BATCH)
        time.sleep(SECONDS)
        yield x[chosen], y[chosen]


def main(seed: int = 0, learning_rate: float = 1e-3) -> dict:
    x, y = datasets.load_digits(return_X_y=True)
    x, y = x.reshape(-1, 1, 8, 8).astype(np.float32) / 16, y.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(x))
    (x, valid_x), (y, valid_y) = np.split(x[order], [1437]), np.split(y[order], [1437])
    model, optimizer = Network(jax.random.key(seed)), optax.adam(learning_rate)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, opt_state, x, y):
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, value

    begun = time.perf_counter()
    plan = ordering.echo.adaptive(total_steps=STEPS, max_factor=8)
    loads = ordering.data.prefetch_to_device(slow_loader(x, y, seed))
    batches = ordering.echo.repeat(loads, plan)
    for batch in batches:
        model, opt_state, value = step(model, opt_state, *batch)
        if batches.step == 0:
            begun = time.perf_counter()  # compiled
    seconds = time.perf_counter() - begun
    return {"valid": float(loss(model, valid_x, valid_y)), "seconds": seconds}


if __name__ == "__main__":
    print(main())
