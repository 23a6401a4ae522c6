"""What is recorded between epochs: losses, accuracy and the parallel herding bound."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from experiments.steps import unit_gradients
from local_opt.runners import AXIS
from ordering.rows import flat, tree_size

CHUNK = 500  # examples evaluated at once


def mean_loss(model) -> Callable:
    """`(params, batch) -> float32[]`, jitted: the mean loss over a whole set."""

    def loss(params, batch):
        return _sum_chunks(lambda part: jnp.sum(model.loss(params, part, None)), batch)

    return jax.jit(loss)


def accuracy(model) -> Callable:
    """`(params, batch) -> float32[]` in [0, 1], jitted: the share of right answers."""

    def share(params, batch):
        def correct(part):
            return _hits(model.predict(params, part["x"]), part["y"])

        return _sum_chunks(correct, batch)

    return jax.jit(share)


def loss_and_accuracy(model) -> Callable:
    """`(params, statistics, batch) -> (loss, accuracy)`, jitted: of a classifier as it is used.

    Cross-entropy and share of right answers of `predict`, with the given moments where the model
    has any (else None). Where an example is a sequence, both are means over its tokens.
    """

    def measures(params, statistics, batch):
        given = () if model.statistics is None else (statistics,)

        def sums(part):
            logits = model.predict(params, part["x"], *given)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, part["y"])
            return jnp.stack([_sum_examples(losses), _hits(logits, part["y"])])

        return tuple(_sum_chunks(sums, batch))

    return jax.jit(measures)


def order_bounds(model, run: Callable, *, num_units: int, units_per_step: int) -> Callable:
    """`(params, orders, data) -> float32[2]`: parallel herding bounds at fixed parameters.

    max over k of |sum_{j <= k} sum_w (g_{w, order_w(j)} - mean g)| in the norms L-infinity and
    L2, over all units of all workers. Two passes over the data, memory for one step's gradients.

    Args:
      model: the model; run: `simulate` or `over_mesh(mesh)` of `local_opt.runners`.
      num_units, units_per_step: M and B. The data has leaves [W, M, unit_size, ...].
    """
    whole = num_units // units_per_step * units_per_step

    def rows_of(params, order, data, start, size):
        units = jax.lax.dynamic_slice_in_dim(order, start, size)
        batch = jax.tree.map(lambda x: x[units], data)
        gradients = unit_gradients(model.loss, units_per_step=size)
        return flat(gradients(params, batch, jax.random.key(0))[2])

    def visit(function, carry, params, order, data):
        """Folds `function(carry, rows summed over the workers)` over the steps of an epoch."""

        def step(carry, start, size):
            rows = jax.lax.psum(rows_of(params, order, data, start, size), AXIS)
            return function(carry, rows)

        starts = jnp.arange(0, whole, units_per_step)
        carry, _ = jax.lax.scan(
            lambda c, start: (step(c, start, units_per_step), None), carry, starts
        )
        return step(carry, whole, num_units - whole) if whole < num_units else carry

    def bounds(params, order, data):
        zeros = jnp.zeros(tree_size(params))
        total = visit(lambda t, rows: t + jnp.sum(rows, axis=0), zeros, params, order, data)
        mean = total / num_units

        def follow(carry, rows):
            prefix, bound = carry
            prefixes = prefix[None] + jnp.cumsum(rows - mean[None], axis=0)
            norms = [jnp.max(jnp.abs(prefixes)), jnp.sqrt(jnp.max(jnp.sum(prefixes**2, axis=1)))]
            return prefixes[-1], jnp.maximum(bound, jnp.stack(norms))

        return visit(follow, (zeros, jnp.zeros(2)), params, order, data)[1]

    def wrapped(params, order, data):
        return (bounds(params, order, data),)

    mapped = run(wrapped, owned_in=(False, True, True), owned_out=(False,))
    return jax.jit(lambda params, orders, data: mapped(params, orders, data)[0])


def _hits(logits, y):
    """Right answers among logits [n, C], or of logits [n, L, V] the examples' shares, summed."""
    return _sum_examples((jnp.argmax(logits, axis=-1) == y).astype(jnp.float32))


def _sum_examples(values):
    """The sum over examples of values [n], or of the means over tokens of values [n, L]."""
    return jnp.sum(jnp.mean(values, axis=tuple(range(1, values.ndim))))


def _sum_chunks(function, batch):
    """function summed over chunks of the batch, divided by its size."""
    size = jax.tree.leaves(batch)[0].shape[0]
    whole = size // CHUNK * CHUNK
    total = 0.0
    if whole:
        chunks = jax.tree.map(lambda x: x[:whole].reshape((-1, CHUNK, *x.shape[1:])), batch)
        total += jnp.sum(jax.lax.map(function, chunks), axis=0)
    if whole < size:
        total += function(jax.tree.map(lambda x: x[whole:], batch))
    return total / size
