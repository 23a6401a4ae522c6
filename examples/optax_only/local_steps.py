"""plain.py with local steps: four workers that sync after every eighth step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets, preprocessing

from syncopate import local_opt

STEPS, BATCH = 400, 32


def loss(w, x, y):
    return optax.sigmoid_binary_cross_entropy(x @ w[:-1] + w[-1], y).mean()


def main(seed: int = 0, learning_rate: float = 0.1) -> dict:
    x, y = datasets.load_breast_cancer(return_X_y=True)
    x, rng = preprocessing.scale(x).astype(np.float32), np.random.default_rng(seed)
    plan = local_opt.constant(8, total_steps=STEPS)
    optimizer = optax.sgd(optax.cosine_decay_schedule(learning_rate, STEPS), momentum=0.9)
    optimizer = local_opt.local_steps(optimizer, plan)
    specs = {"in_specs": ("worker", "worker", "batch", "batch"), "out_specs": "worker"}

    @jax.jit
    @functools.partial(local_opt.map_workers, workers=4, **specs)
    def step(w, state, x, y):
        value, grads = jax.value_and_grad(loss)(w, x, y)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state, value

    w = jnp.zeros(x.shape[1] + 1)
    w, state = local_opt.replicate((w, optimizer.init(w)), 4)
    for _ in range(STEPS):
        chosen = rng.integers(len(x), size=BATCH)
        w, state, value = step(w, state, x[chosen], y[chosen].astype(np.float32))
    return {"train": float(loss(local_opt.mean_over_workers(w), x, y))}


if __name__ == "__main__":
    print(main())
