"""What is recorded between epochs: losses, accuracy and the parallel herding bound."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
import ordering
from experiments.steps import unit_gradients
from local_opt.runners import AXIS
from ordering.rows import flat, tree_size

CHUNK = 500  # examples, or tokens of examples, evaluated at once
BATCHES = 16  # of training data, behind the moments of a normalisation layer


def predicting(model, params, statistics) -> Callable:
    """`x -> predictions`, with the given moments where the model has any (else None)."""
    given = () if model.statistics is None else (statistics,)
    return lambda x: model.predict(params, x, *given)


def size_of(data) -> int:
    """Examples of arrays, of their shapes, or of a random-access source."""
    return jax.tree.leaves(data)[0].shape[0] if isinstance(data, dict) else len(data)


def part_of(data, start: int, stop: int) -> Callable:
    """`() -> iterator of batches`, the examples from `start` to `stop`.

    Arrays are placed on the device once, as one batch; a source is read anew, in pieces.
    """
    if isinstance(data, dict):
        part = jax.device_put(jax.tree.map(lambda x: x[start:stop], data))
        return lambda: iter([part])
    _, read = ordering.input.reader(data)
    starts = range(start, stop, CHUNK)
    return lambda: (read(np.arange(first, min(first + CHUNK, stop))) for first in starts)


def over_parts(measures: Callable) -> Callable:
    """`(params, statistics, part) -> floats`: measures of batches averaged over a `part_of`."""

    def run(params, statistics, part):
        found = [
            (size_of(batch), jax.device_get(measures(params, statistics, batch)))
            for batch in part()
        ]
        sizes, values = zip(*found, strict=True)
        return tuple(float(v) for v in np.average(np.array(values, float), axis=0, weights=sizes))

    return run


def moments(model, train, batch_size: int) -> Callable:
    """`params -> statistics`, jitted: moments of training inputs at these parameters, or None.

    Args:
      train: the training set, or a source; `BATCHES` batches of its first examples are used.
      batch_size: of each.
    """
    if model.statistics is None:
        return lambda params: None
    size, read = ordering.input.reader(train)
    count = max(1, min(BATCHES, size // batch_size))
    used = read(np.arange(min(count * batch_size, size)))["x"]
    batches = jax.device_put(used.reshape(count, -1, *used.shape[1:]))
    return jax.jit(lambda params: local_opt.reestimate(model.statistics, params, batches))


def mean_loss(model) -> Callable:
    """`(params, statistics, batch) -> float32[]`, jitted: the mean loss over a whole set.

    With the penalty on the parameters, which is trained on too; a model with statistics is
    measured as it is used, by the cross-entropy of its predictions.
    """

    def loss(params, statistics, batch):
        def total(part):
            if model.statistics is None:
                return jnp.sum(model.loss(params, part, None))
            logits = predicting(model, params, statistics)(part["x"])
            return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, part["y"]))

        return sum_chunks(total, batch)

    return jax.jit(loss)


def loss_and_accuracy(model) -> Callable:
    """`(params, statistics, batch) -> (loss, accuracy)`, jitted: of a classifier as it is used.

    Cross-entropy and share of right answers of `predict`, with the given moments where the model
    has any (else None). Where an example is a sequence, both are means over its tokens.
    """

    def measures(params, statistics, batch):
        predict = predicting(model, params, statistics)

        def sums(part):
            logits = predict(part["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, part["y"])
            return jnp.stack([sum_examples(losses), hits(logits, part["y"])])

        return tuple(sum_chunks(sums, batch))

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


def hits(logits, y):
    """Right answers among logits [n, C], or of logits [n, L, V] the examples' shares, summed."""
    return sum_examples((jnp.argmax(logits, axis=-1) == y).astype(jnp.float32))


def sum_examples(values):
    """The sum over examples of values [n], or of the means over tokens of values [n, L]."""
    return jnp.sum(jnp.mean(values, axis=tuple(range(1, values.ndim))))


def sum_chunks(function, batch):
    """function summed over chunks of the batch, divided by its size."""
    size = jax.tree.leaves(batch)[0].shape[0]
    chunk = _chunk(batch["y"])
    whole = size // chunk * chunk
    total = 0.0
    if whole:
        chunks = jax.tree.map(lambda x: x[:whole].reshape((-1, chunk, *x.shape[1:])), batch)
        total += jnp.sum(jax.lax.map(function, chunks), axis=0)
    if whole < size:
        total += function(jax.tree.map(lambda x: x[whole:], batch))
    return total / size


def _chunk(y):
    """Examples at once: the logits of a token take as much memory as those of an example."""
    tokens = y.shape[1] if y.ndim > 1 and jnp.issubdtype(y.dtype, jnp.integer) else 1
    return max(1, CHUNK // tokens)
