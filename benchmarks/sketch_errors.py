"""Measures how well sketches keep inner products of gradients: of models, and of structured ones.

    python -m benchmarks.sketch_errors --size=1024 --keys=24

Every row has the gradients of 16 random examples under one model, at its initial parameters. In the
last row words are as frequent as in a text, and the model has begun to learn how frequent. The
error of a squared norm is relative to the squared norm, that of an inner product to the product of
the norms. Both are root mean squares over all examples or pairs, and over keys. A Gaussian
projection has sqrt(2 / size) for squared norms, and sqrt(1 / size) for orthogonal vectors. Sketches
from the backward pass are those of the same gradients after it; tests compare them.
"""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import models
import ordering
from ordering.gradients import linear

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
    """The relative errors of squared norms and of inner products of different gradients."""
    lengths = np.sqrt(np.diag(exact))
    relative = (rows @ rows.T - exact) / np.outer(lengths, lengths)
    return np.diag(relative), relative[~np.eye(len(exact), dtype=bool)]


def part(*where):
    """Normal numbers in a part of a gradient, zeros elsewhere."""

    def make(rng, shape):
        is_in = np.zeros(shape)
        is_in[where] = 1
        return is_in * rng.normal(size=shape)

    return make


def low_rank(rank):
    return lambda rng, shape: rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1]))


KINDS = {  # (random numbers, [K, N]) -> a gradient of this shape
    "one column": part(slice(None), 3),
    "one row": part(3),
    "rank one": low_rank(1),
    "rank two": low_rank(2),
    "sorted": lambda rng, shape: np.sort(rng.normal(size=shape).ravel()).reshape(shape),
    "diagonal": lambda rng, shape: np.eye(*shape) * rng.normal(size=shape),
    "one block": part(slice(8, 40), slice(16, 48)),
    "alternating signs": lambda rng, shape: (-1.0) ** np.add.outer(*map(np.arange, shape)),
    "one number": part(5, 7),
    "rows of a power law": lambda rng, shape: (
        rng.normal(size=shape) / np.arange(1, shape[0] + 1)[:, None]
    ),
    "every 32nd column": part(slice(None), slice(3, None, 32)),
    "every 32nd row": part(slice(5, None, 32)),
}


def errors_of(kind, shape, size, keys):
    """Relative errors of squared norms and of the inner product of two gradients; their cosine."""
    rng, matrix = np.random.default_rng(0), linear.matrix_of(shape)
    pair = [np.float32(KINDS[kind](rng, matrix)).ravel()[: np.prod(shape)] for _ in range(2)]
    pair = jnp.stack(pair).reshape(2, *shape)
    flat = np.asarray(pair, np.float64).reshape(2, -1)
    exact = flat @ flat.T
    of_key = lambda key: jax.vmap(ordering.make_sketch(key, size=size))(pair)  # noqa: E731
    rows = jax.jit(lambda keys: jax.lax.map(of_key, keys))(
        jax.random.split(jax.random.key(5), keys)
    )
    norms, products = zip(
        *(errors(row, exact) for row in np.asarray(rows, np.float64)), strict=True
    )
    cosine = exact[0, 1] / np.sqrt(exact[0, 0] * exact[1, 1])
    return np.ravel(norms), np.ravel(products), cosine


SHAPES = ((768, 1000), (512, 256), (512, 1024), (64, 4096), (1024, 512), (192, 192), (20_000,))


def line(name, norms, products):
    norm, product = (float(np.sqrt(np.mean(np.square(x)))) for x in (norms, products))
    print(f"{name:40} squared norms {norm:.3f}  inner products {product:.3f}", flush=True)


def main(argv):
    del argv
    values = flags.FLAGS
    for name, (model, batch, steps) in CASES.items():
        params = after(model, model.init(jax.random.key(0)), batch, steps)

        def both(key, model=model, batch=batch, params=params):
            gradients = ordering.sketched_grads(model.loss, key, size=values.size)
            sketched = gradients(params, batch, key=key)[2]
            rows = ordering.per_example_grads(model.loss)(params, batch, key=key)[2]
            flat = jax.vmap(lambda tree: jax.flatten_util.ravel_pytree(tree)[0])(rows)
            with jax.default_matmul_precision("highest"):
                return sketched, flat @ flat.T

        run = jax.jit(both)
        keys = (jax.random.key(100 + seed) for seed in range(values.keys))
        pairs = [errors(*map(np.asarray, run(key))) for key in keys]
        line(name, *zip(*pairs, strict=True))
    for shape in SHAPES:
        for kind in KINDS:
            norms, products, _ = errors_of(kind, shape, values.size, values.keys)
            line(f"{kind}, {' x '.join(map(str, shape))}", norms, products)


if __name__ == "__main__":
    flags.DEFINE_integer("size", 1024, "numbers of a sketch")
    flags.DEFINE_integer("keys", 24, "projections")
    app.run(main)
