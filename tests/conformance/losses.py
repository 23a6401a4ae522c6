"""Every loss of optax, of logits that are a product of a parameter and data."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.conformance.gradients import B, Row

LEFT_OUT = {
    "smooth_labels": "labels, no loss",
    "ntxent": "compares the examples of a batch",
}
L = optax.losses
CLASSES = 7


def _mean(y, n):
    return jnp.mean(jnp.reshape(y.astype(jnp.float32), (n, -1)), axis=1)


def soft(y):
    return jax.nn.softmax(y, axis=-1)


# {loss: {variant: (logits [n, 7], labels [n]) -> losses}}
CASES = {
    "binary_dice_loss": {"": lambda y, t: L.binary_dice_loss(y, hot(t))},
    "convex_kl_divergence": {
        "": lambda y, t: L.convex_kl_divergence(jax.nn.log_softmax(y), soft(hot(t)))},
    "cosine_distance": {"": lambda y, t: L.cosine_distance(y, hot(t), epsilon=1e-6)},
    "cosine_similarity": {"": lambda y, t: L.cosine_similarity(y, hot(t), epsilon=1e-6)},
    "ctc_loss": {"": lambda y, t: L.ctc_loss(
        jnp.stack([y, 0.5 * y, -y], 1), jnp.zeros((len(y), 3)), 1 + t[:, None] % 6,
        jnp.zeros((len(y), 1)))},
    "ctc_loss_with_forward_probs": {"": lambda y, t: L.ctc_loss_with_forward_probs(
        jnp.stack([y, 0.5 * y, -y], 1), jnp.zeros((len(y), 3)), 1 + t[:, None] % 6,
        jnp.zeros((len(y), 1)))[0]},
    "dice_loss": {"": lambda y, t: L.dice_loss(y[:, None], hot(t)[:, None])},
    "generalized_kl_divergence": {
        "": lambda y, t: L.generalized_kl_divergence(jax.nn.log_softmax(y), soft(hot(t)))},
    "hinge_loss": {"": lambda y, t: L.hinge_loss(y, 2 * hot(t) - 1)},
    "huber_loss": {
        "": lambda y, t: L.huber_loss(y, hot(t)),
        "small": lambda y, t: L.huber_loss(y, hot(t), delta=0.1),
    },
    "kl_divergence": {"": lambda y, t: L.kl_divergence(jax.nn.log_softmax(y), soft(hot(t)))},
    "kl_divergence_with_log_targets": {"": lambda y, t: L.kl_divergence_with_log_targets(
        jax.nn.log_softmax(y), jax.nn.log_softmax(hot(t)))},
    "l2_loss": {"": lambda y, t: L.l2_loss(y, hot(t)), "of none": lambda y, t: L.l2_loss(y)},
    "log_cosh": {"": lambda y, t: L.log_cosh(y, hot(t))},
    "make_fenchel_young_loss": {"": lambda y, t: L.make_fenchel_young_loss(
        functools.partial(jax.nn.logsumexp, axis=-1))(y, hot(t))},
    "multiclass_generalized_dice_loss": {"": lambda y, t: jax.vmap(
        lambda y, t: L.multiclass_generalized_dice_loss(y[None], hot(t)[None]))(y, t)},
    "multiclass_hinge_loss": {"": lambda y, t: L.multiclass_hinge_loss(y, t)},
    "multiclass_perceptron_loss": {"": lambda y, t: L.multiclass_perceptron_loss(y, t)},
    "multiclass_sparsemax_loss": {"": lambda y, t: L.multiclass_sparsemax_loss(y, t)},
    "perceptron_loss": {"": lambda y, t: L.perceptron_loss(y, 2 * hot(t) - 1)},
    "poly_loss_cross_entropy": {"": lambda y, t: L.poly_loss_cross_entropy(y, hot(t))},
    "ranking_softmax_loss": {
        "": lambda y, t: L.ranking_softmax_loss(y, hot(t), reduce_fn=None),
        "where": lambda y, t: L.ranking_softmax_loss(
            y, hot(t) + 0.1, where=jnp.arange(CLASSES)[None] < 5, reduce_fn=None),
    },
    "safe_softmax_cross_entropy": {
        "": lambda y, t: L.safe_softmax_cross_entropy(y, hot(t)),
        "of a certain class": lambda y, t: L.safe_softmax_cross_entropy(
            jnp.where(hot(t) > 0, y, -jnp.inf), hot(t)),
    },
    "sigmoid_binary_cross_entropy": {"": lambda y, t: L.sigmoid_binary_cross_entropy(y, hot(t))},
    "sigmoid_focal_loss": {"": lambda y, t: L.sigmoid_focal_loss(y, hot(t), alpha=0.25)},
    "softmax_cross_entropy": {
        "": lambda y, t: L.softmax_cross_entropy(y, hot(t)),
        "smoothed": lambda y, t: L.softmax_cross_entropy(y, L.smooth_labels(hot(t), 0.1)),
        "where": lambda y, t: L.softmax_cross_entropy(
            y, hot(t), where=jnp.ones_like(y, bool).at[:, 3].set(False)),
    },
    "softmax_cross_entropy_with_integer_labels": {
        "": lambda y, t: L.softmax_cross_entropy_with_integer_labels(y, t),
        "axis": lambda y, t: L.softmax_cross_entropy_with_integer_labels(
            jnp.stack([y, 2 * y], 2), jnp.stack([t, t], 1), axis=1),
    },
    "sparsemax_loss": {"": lambda y, t: L.sparsemax_loss(y[:, 0], t % 2)},
    "squared_error": {"": lambda y, t: L.squared_error(y, hot(t))},
    "triplet_margin_loss": {"": lambda y, t: L.triplet_margin_loss(y, 0.3 * y, hot(t))},
}  # fmt: skip


def hot(t):
    return jax.nn.one_hot(t, CLASSES)


def names():
    return sorted(n for n in dir(L) if inspect.isfunction(getattr(L, n)) and n[0] != "_")


def row_of(loss_of_logits, rng):
    x = rng.normal(size=(B, 5)).astype(np.float32)
    params = {"w": rng.normal(size=(5, CLASSES)), "b": rng.normal(size=CLASSES)}
    labels = np.array([3, 0, 5, 3], np.int32)

    def loss(params, batch, key):
        y = batch["x"] @ params["w"] + params["b"]
        return _mean(loss_of_logits(y, batch["y"]), len(y))

    return Row(loss, jax.tree.map(np.float32, params), {"x": x, "y": labels})
