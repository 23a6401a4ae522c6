r"""The slow drift along a manifold of minimisers, as a number: two problems, and their theory.

The Slow SDEs of SGD and Local SGD (Gu et al. 2023, https://arxiv.org/abs/2303.01215) and of QSR
(Gu et al. 2024, https://arxiv.org/abs/2310.14423). Where noise points across the manifold
alone, as here, nothing diffuses along it, and in slow time s = eta^2 t

    d theta / ds = -1/2 P grad^3 L [V],    V_ij = S_ij / (l_i + l_j) (1/K + (1 - 1/K) psi_ij)

with P the projection on the tangents, l and the basis of i, j the eigenvalues and vectors of the
Hessian, S the covariance of one worker's gradients, eta V the second moments of a worker's
distance from the manifold. K workers' mean has 1/K of the moments of one who is alone. The rest is
of their distances from the mean: 0 after a sync, whole where the round outlasts 1 / (eta l). psi is
the share of it that is there on average over a round,

    psi_ij = psi(beta (l_i + l_j)),    psi(x) = (exp(-x) - 1 + x) / x

for H = beta / eta: 0 for a fixed H, as parallel SGD has it, and 1 for QSR, K times the drift.

At a rate that is not small yet, V and psi are those of the steps themselves: with a_i = 1 - eta l_i
moments are multiplied by q = a_i a_j a step, so that eta / (1 - q) is in place of 1 / (l_i + l_j),
and psi is the mean of 1 - q^h over the gradients of a round, which are taken at h = 0 .. H - 1.

Problems have P parameters, and N noises of a worker and a step, each N(0, 1): a noise enters the
loss linearly and vanishes on average, so that SGD sees noise of a known covariance.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Problem(NamedTuple):
    """What is measured falls along the manifold, so that it says how far a run has drifted."""

    title: str  # for people
    measured: str  # likewise
    loss: Callable[[jax.Array, jax.Array], jax.Array]  # of [P] parameters and [N] noises
    measure: Callable[[jax.Array], jax.Array]  # of [P] parameters
    start: tuple[float, ...]  # P numbers, a minimiser
    num_noises: int  # N


def _valley_loss(params, noises):
    # The minimisers are the line y = 0, across which the curvature is 1 + x^2: flattest at x = 0.
    x, y = params
    return (1 + x**2) * y**2 / 2 + noises[0] * y


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


PROBLEMS = {
    "valley": Problem("valley (1 + x²) y² / 2", "x", _valley_loss, lambda p: p[0], (1.0, 0.0), 1),
    "label_noise": Problem(
        "label noise, diagonal linear network", "trace of the Hessian",
        _label_noise_loss, sharpness, START, 2,
    ),
}  # fmt: skip

POINTS = 100  # unless told, steps of Runge and Kutta's method of fourth order
FLAT = 1e-3  # eigenvalues below it are of tangents; those of both problems' normals exceed 0.1


def in_the_limit(eigenvalues, workers, beta):
    """[P, P]: V / S of eta -> 0 at eta H = beta >= 0, which may be inf."""
    sums = eigenvalues[:, None] + eigenvalues[None, :]
    x = beta * sums
    share = jnp.where(x > 1e-3, 1 + jnp.expm1(-x) / x, x / 2)
    return (1 / workers + (1 - 1 / workers) * share) / sums


def at_a_rate(eigenvalues, workers, rate, period):
    """[P, P]: V / S of a learning rate eta > 0 and rounds of H >= 1 steps."""
    kept = 1 - rate * eigenvalues
    kept = kept[:, None] * kept[None, :]
    share = 1 - (1 - kept**period) / (period * (1 - kept))
    return (1 / workers + (1 - 1 / workers) * share) * rate / (1 - kept)


def drift(problem: Problem, moments: Callable, params, numbers):
    """float32[P]: d theta / ds at a minimiser, `params`.

    Args:
      moments: `in_the_limit` or `at_a_rate`; numbers: its arguments after the eigenvalues.
    """
    silent = jnp.zeros(problem.num_noises)
    hessian = jax.hessian(problem.loss)
    values, basis = jnp.linalg.eigh(hessian(params, silent))
    normal = values > FLAT
    # [P, N] of one worker's gradient in its noises, in the basis: S = M M^T.
    noise = basis.T @ jax.jacfwd(jax.grad(problem.loss), 1)(params, silent)
    both = normal[:, None] & normal[None, :]
    factors = jnp.where(both, moments(jnp.where(normal, values, 1.0), *numbers), 0.0)
    v = basis @ (factors * (noise @ noise.T)) @ basis.T
    pull = jax.grad(lambda p: jnp.sum(hessian(p, silent) * v))(params)
    tangents = basis * ~normal[None, :]
    return -0.5 * tangents @ (tangents.T @ pull)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="points")
def flow(problem: Problem, moments: Callable, slow_time, *numbers, points=POINTS):
    """float32[points + 1]: what is measured at equal distances of slow time, 0 the first.

    Example:
      >>> x = flow(PROBLEMS["valley"], in_the_limit, 4.0, 8, 0.0)  # parallel SGD with K = 8
      >>> round(float(x[-1]), 3)
      0.875
    """
    h = slow_time / points

    def of(params):
        return drift(problem, moments, params, numbers)

    def step(params, _):
        a = of(params)
        b = of(params + h / 2 * a)
        c = of(params + h / 2 * b)
        d = of(params + h * c)
        params = params + h / 6 * (a + 2 * b + 2 * c + d)
        return params, problem.measure(params)

    start = jnp.array(problem.start)
    _, found = jax.lax.scan(step, start, length=points)
    return jnp.concatenate([problem.measure(start)[None], found])


def strength(problem: Problem, slow_time: float, found: jax.Array) -> jax.Array:
    """How strong the drift must have been, in those of one worker alone, to end where it did.

    A drift of strength c arrives in slow time S where one of strength 1 arrives in c S.
    """
    # Runs scatter around strength 1: the curve goes on beyond it.
    points = 20 * POINTS  # between which it is as good as straight
    curve = flow(problem, in_the_limit, 2 * slow_time, 1, 0.0, points=points)
    return jnp.interp(-found, -curve, jnp.linspace(0, 2, points + 1))
