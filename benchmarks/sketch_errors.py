"""Measures how well sketches keep inner products of gradients: made in the backward pass or after.

    python -m benchmarks.sketch_errors --size=1024 --keys=24

Every row has the gradients of 16 random examples under one model, at its initial parameters. In the
last row words are as frequent as in a text, and the model has begun to learn how frequent. The
error of a squared norm is relative to the squared norm, that of an inner product to the product of
the norms. Both are root mean squares over all examples or pairs, and over keys. A Gaussian
projection has sqrt(2 / size) for squared norms, and sqrt(1 / size) for orthogonal vectors.
"""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import models
import ordering

EXAMPLES = 16


def images(*shape):
    key, labels = jax.random.split(jax.random.key(1))
    return {
        "x": jax.random.normal(key, (EXAMPLES, *shape)),
        "y": jax.random.randint(labels, (EXAMPLES,), 0, 10),
    }


def tokens(length, frequencies=(1.0,) * 256):
    logits = jnp.log(jnp.asarray(frequencies))
    text = jax.random.categorical(jax.random.key(1), logits, shape=(EXAMPLES, length + 1))
    return {"x": text[:, :-1], "y": text[:, 1:]}


CASES = {  # (model, batch, steps of training before)
    "MLP 64-512-512-10": (
        models.mlp(num_features=64, hidden=(512, 512), num_classes=10),
        images(64),
        0,
    ),
    "MLP 784-1024-10": (
        models.mlp(num_features=784, hidden=(1024,), num_classes=10),
        images(784),
        0,
    ),
    "LeNet": (models.lenet(image_shape=(32, 32, 3)), images(32, 32, 3), 0),
    "GPT-2, 2 layers of 128": (
        models.gpt2(vocab_size=256, context=64, width=128, depth=2, heads=4),
        tokens(64),
        0,
    ),
    "GPT-2, after 10 steps": (
        models.gpt2(vocab_size=2048, context=64, width=64, depth=2, heads=2),
        tokens(64, frequencies=1 / np.arange(1, 2049)),
        10,
    ),
}


def after(model, params, batch, steps):
    """The parameters after some steps of Adam."""
    optimizer = optax.adam(2e-3)
    gradient = jax.jit(jax.grad(lambda p: jnp.mean(model.loss(p, batch, jax.random.key(0)))))
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(gradient(params), state)
        params = optax.apply_updates(params, updates)
    return params


def errors(rows, exact):
    """The relative errors of squared norms and of inner products of different examples."""
    lengths = np.sqrt(np.diag(exact))
    relative = (rows @ rows.T - exact) / np.outer(lengths, lengths)
    return np.diag(relative), relative[~np.eye(EXAMPLES, dtype=bool)]


def main(argv):
    del argv
    values = flags.FLAGS
    for name, (model, batch, steps) in CASES.items():
        params = after(model, model.init(jax.random.key(0)), batch, steps)

        def both(key, model=model, batch=batch, params=params):
            gradients = ordering.sketched_grads(model.loss, key, size=values.size)
            sketched = gradients(params, batch, key=key)[2]
            rows = ordering.per_example_grads(model.loss)(params, batch, key=key)[2]
            formed = jax.vmap(ordering.make_sketch(key, size=values.size))(rows)
            flat = jax.vmap(lambda tree: jax.flatten_util.ravel_pytree(tree)[0])(rows)
            with jax.default_matmul_precision("highest"):
                return {"sketched": sketched, "of gradients": formed}, flat @ flat.T

        run, measured = jax.jit(both), {}
        for seed in range(values.keys):
            sketches, exact = run(jax.random.key(100 + seed))
            for how, rows in sketches.items():
                measured.setdefault(how, []).append(errors(np.asarray(rows), np.asarray(exact)))
        for how, pairs in measured.items():
            norm, inner = (float(jnp.sqrt(np.mean(np.square(x)))) for x in zip(*pairs, strict=True))
            print(
                f"{name:24} {how:12} squared norms {norm:.3f}  inner products {inner:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    flags.DEFINE_integer("size", 1024, "numbers of a sketch")
    flags.DEFINE_integer("keys", 24, "projections")
    app.run(main)
