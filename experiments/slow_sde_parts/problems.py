"""Small losses whose minimisers form a manifold, with noise that points away from it.

P parameters, N noises of a worker and a step, each N(0, 1). A noise enters the loss linearly and
vanishes on average, so that SGD sees gradients with noise of a known covariance.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Problem(NamedTuple):
    """A loss, where it is started, and the number by which its drift is told.

    What is measured falls along the manifold, so that it says how far a run has drifted.
    """

    title: str  # for people
    measured: str  # likewise
    loss: Callable[[jax.Array, jax.Array], jax.Array]  # of [P] parameters and [N] noises
    measure: Callable[[jax.Array], jax.Array]  # of [P] parameters
    start: tuple[float, ...]  # P numbers, a minimiser
    num_noises: int  # N


def _valley_loss(params, noises):
    x, y = params
    return (1 + x**2) * y**2 / 2 + noises[0] * y


# The minimisers are the line y = 0, across which the curvature is 1 + x^2: flattest at x = 0.
VALLEY = Problem("valley (1 + x²) y² / 2", "x", _valley_loss, lambda p: p[0], (1.0, 0.0), 1)

EXAMPLES = ((0.5, 0.4, -0.3, 0.2), (-0.2, 0.3, 0.4, 0.5))  # two, of four features
NOISE = 0.5**0.5  # standard deviation of a label
START = (1.2, 0.8, 1.0, 0.9, 0.5, 1.0, 0.7, 1.1)  # u, then v


def predictions(params):
    """[2]: of a diagonal linear network, whose weights are w = u * u - v * v."""
    u, v = params[:4], params[4:]
    w = u * u - v * v
    return jnp.stack([sum(a * w[j] for j, a in enumerate(row)) for row in EXAMPLES])


def _label_noise_loss(params, noises):
    # What the start predicts are the labels; every step draws the noise on them anew.
    labels = predictions(jnp.array(START, params.dtype))
    return jnp.sum((predictions(params) - labels - NOISE * noises) ** 2) / 2


def sharpness(params):
    """Trace of the Hessian at a minimiser, 4 sum_j |A_j|^2 (u_j^2 + v_j^2).

    It is what label noise makes small; where it is least, u v = 0, it is a weighted 1-norm of w.
    """
    norms = [sum(row[j] ** 2 for row in EXAMPLES) for j in range(4)]
    return 4 * sum(norms[j % 4] * params[j] ** 2 for j in range(8))


LABEL_NOISE = Problem(
    "label noise, diagonal linear network", "trace of the Hessian",
    _label_noise_loss, sharpness, START, 2,
)  # fmt: skip

PROBLEMS = {"valley": VALLEY, "label_noise": LABEL_NOISE}
