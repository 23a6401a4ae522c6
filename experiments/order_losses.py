r"""Losses for which the error of the order and that of local steps are known exactly.

f_i(x) = sum_c l_c/2 x_c^2 - z_ic x_c + l_c (g_ic/2 x_c^2 + k/6 x_c^3),  sum_i z_i = sum_i g_i = 0:
curvature l, noise z_i, and two terms beyond a shared quadratic, both in units of l: a curvature g_i
of each unit, and a third derivative k. The minimum of the mean is at 0.

To first order in (g, k) everything is a linear recursion. x_w = y_w + u_w with
  y_w <- (1 - eta l) y_w + eta z(batch of w),           linear: its mean over the workers, y, is
                                                        that of parallel SGD for every plan;
  u <- (1 - eta l) u - eta l mean_w (g(batch of w) y_w + k/2 y_w^2),    the mean of u_w.
So the order's error is that of y, which does not depend on the plan. The error of local steps is
what u gains because y_w differs from y: mean_w cov(g, y_w) + k/2 var_w(y_w).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Setting(NamedTuple):
    """Sizes, rates, and the kind of losses."""

    workers: int  # W
    units_per_step: int  # B, per worker
    num_units: int  # M, per worker
    rate: float = 0.25  # eta, the peak of a cosine
    cosine: bool = False  # decay to 1e-3 of the peak, measured only at its end
    epochs: int = 40  # K; the second half is measured, or the end of a cosine
    dimension: int = 16  # D
    least: float = 0.02  # l goes from here to 1, evenly spaced in logarithm
    spread: float = 1.0  # standard deviation of g
    cubic: float = 1.0  # k
    between: float = 0.0  # shift between workers' units, in standard deviations
    correlation: float = 0.0  # between g and z

    @property
    def steps(self) -> int:
        """n, steps per epoch."""
        return self.num_units // self.units_per_step

    @property
    def label(self) -> str:
        return f"{self.workers} x {self.units_per_step}"


class Family(NamedTuple):
    curvature: np.ndarray  # l, float64[D]
    noise: np.ndarray  # z, float64[W M, D]; worker w's own units are w M .. w M + M - 1
    spread: np.ndarray  # g, float64[W M, D]
    cubic: float  # k


class Drift(NamedTuple):
    """A correction of local drift: `local_opt.control_variates` or `local_opt.proximal`."""

    gain: float = 0.0  # of control variates; 0 for none
    pull: float = 0.0  # mu


NEVER = Drift()


class Errors(NamedTuple):
    """Expected losses above the minimum at the ends of epochs, 1/2 sum_c l_c (.)^2."""

    order: float  # of y: the error of parallel SGD under this order
    local: float  # of the mean of u minus that of parallel SGD: what local steps add
    bias: float  # of its mean over epochs: the part that averaging does not remove
    total: float  # of y + u


def draw(setting: Setting, seed: int = 0) -> Family:
    """Gaussian units; the variance of z_c is l_c, as for a likelihood at its optimum."""
    rng, workers, dimension = np.random.default_rng([seed, 1]), setting.workers, setting.dimension
    curvature = np.geomspace(setting.least, 1, dimension)
    noise, own = rng.normal(size=(2, workers * setting.num_units, dimension))
    own = setting.correlation * noise + np.sqrt(1 - setting.correlation**2) * own
    shift = rng.normal(size=(workers, dimension))
    noise = noise + setting.between * np.repeat(shift, setting.num_units, axis=0)
    noise = np.sqrt(curvature) * (noise - noise.mean(axis=0))
    return Family(curvature, noise, setting.spread * (own - own.mean(axis=0)), setting.cubic)


def adam(family: Family, power: float, least: float = 0.03) -> tuple[Family, np.ndarray]:
    """Units of `draw` with least = 1 in Adam's coordinates, and the preconditioner p.

    Gradients of scales s_c from `least` to 1 and curvatures s_c^power are trained by steps of
    p g with p = v^(-1/2) frozen, v = s^2. With x / sqrt(p) in the place of x these are SGD's steps
    for curvatures p l and noise sqrt(p) z. p is normalised such that the largest p l is 1.
    """
    scale = np.geomspace(least, 1, len(family.curvature))
    p = 1 / scale / np.max(scale ** (power - 1))
    noise = np.sqrt(p) * scale * family.noise
    return Family(p * scale**power, noise, np.zeros_like(noise), 0.0), p


ORDERS = {
    "rr": "D-RR",
    "cd_grab": "CD-GraB",
    "id_pair": "independent pair",
    "dealt": "D-RR, dealt",
    "round_robin": "CD-GraB, dealt round robin",
    "chunks": "CD-GraB, dealt in chunks",
}
SHARDED = ("rr", "cd_grab", "id_pair")  # each worker keeps its units


def epochs_of(name: str, vectors: np.ndarray, workers: int, epochs: int, seed: int) -> np.ndarray:
    """int[K, W, M], after eight epochs in which the order settles."""
    rng, units = np.random.default_rng([seed, 2]), np.arange(len(vectors)).reshape(workers, -1)

    def shuffled():
        if name in SHARDED:
            return rng.permuted(units, axis=1)
        return rng.permutation(units.size).reshape(units.shape)

    found = [shuffled()]
    while len(found) < 8 + epochs:
        unbalanced = name in ("rr", "dealt")
        found.append(shuffled() if unbalanced else balanced(name, vectors, found[-1]))
    return np.stack(found[8:])


def balanced(name: str, vectors: np.ndarray, order: np.ndarray) -> np.ndarray:
    """int[W, M] by PairBalance's signs along one running sum; "id_pair" has one per worker."""
    if name == "id_pair":
        return np.concatenate([balanced("cd_grab", vectors, own[None]) for own in order])
    workers = len(order)
    pairs = signed(vectors, order.reshape(workers, -1, 2).swapaxes(0, 1).reshape(-1, 2))
    if name == "cd_grab":
        return np.stack([placed(own) for own in pairs.reshape(-1, workers, 2).swapaxes(0, 1)])
    dealt = placed(pairs)
    return dealt.reshape(-1, workers).T if name == "round_robin" else dealt.reshape(workers, -1)


def signed(vectors, pairs) -> np.ndarray:
    """The pairs, each starting with the unit that goes to the front; signs are sequential."""
    differences = vectors[pairs[:, 0]] - vectors[pairs[:, 1]]
    total, minus = np.zeros(vectors.shape[1]), np.zeros(len(pairs), bool)
    for p, difference in enumerate(differences):
        minus[p] = total @ difference > 0
        total += -difference if minus[p] else difference
    return np.where(minus[:, None], pairs[:, ::-1], pairs)


def placed(pairs) -> np.ndarray:
    """First units from the front, second units from the back."""
    return np.concatenate([pairs[:, 0], pairs[::-1, 1]])


def paths(
    family: Family, setting: Setting, orders: np.ndarray, syncs: np.ndarray, rates: np.ndarray,
    drift: Drift = NEVER,
) -> np.ndarray:  # fmt: skip
    """Means (y, u) over the workers after every step of K epochs, from the minimum: [2, K n, D].

    Args:
      orders: int[K, W, M]; rates: float[K n].
      syncs: bool[K n], whether workers synchronise after a step.
    """

    def of_steps(units):
        """[K n, W, D], means over each worker's batches."""
        shape = setting.workers, setting.steps, setting.units_per_step
        taken = np.stack([units[order.reshape(shape)].mean(axis=2) for order in orders])
        return taken.swapaxes(1, 2).reshape(-1, setting.workers, setting.dimension)

    noise, spread = of_steps(family.noise), of_steps(family.spread)
    y, u = np.zeros(noise.shape[1:]), np.zeros(setting.dimension)  # y per worker
    anchor, anchor_u, against, spent = y, u, y, 0.0
    found = np.empty((2, len(noise), setting.dimension))
    for t, (z, g, rate) in enumerate(zip(noise, spread, rates, strict=True)):
        keep = 1 - rate * family.curvature
        more = family.curvature * np.mean((g + family.cubic / 2 * y) * y, axis=0)
        u = keep * u - rate * (more + drift.pull * (u - anchor_u))
        y = keep * y + rate * (z - against - drift.pull * (y - anchor))
        mean, spent = y.mean(axis=0), spent + rate
        if syncs[t]:
            if drift.gain:
                against = against + drift.gain * (y - mean) / spent
            y = np.broadcast_to(mean, y.shape)
            anchor, anchor_u, spent = y, u, 0.0
        found[:, t] = mean, u
    return found


def parallel(family: Family, setting: Setting, orders: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """`paths` with a sync after every step: those of one worker with all batches."""
    size, units = setting.workers * setting.units_per_step, family.noise.shape[0]
    one = setting._replace(workers=1, units_per_step=size, num_units=units)
    shape = len(orders), setting.workers, setting.steps, setting.units_per_step
    merged = orders.reshape(shape).swapaxes(1, 2).reshape(len(orders), 1, units)
    return paths(family, one, merged, np.ones(len(rates), bool), rates)


def errors(
    family: Family, setting: Setting, plain: np.ndarray, own: np.ndarray, weights=(1.0,)
) -> Errors:
    """Both errors, from `paths` with a sync after every step and with the plan's syncs.

    Args:
      weights: of the iterates whose mean is measured, newest first (order_formulas.py).
    """
    epochs = 1 if setting.cosine else setting.epochs // 2
    ends = plain.shape[1] - 1 - setting.steps * np.arange(epochs)

    def averaged(path):
        """[2, epochs, D]"""
        back = [path[:, t::-1][:, : len(weights)] for t in ends]
        return np.stack([np.tensordot(weights[: b.shape[1]], b, (0, 1)) for b in back], axis=1)

    (y0, u0), (y, u) = averaged(plain), averaged(own)

    def loss(x):
        return 0.5 * float(np.mean(np.sum(family.curvature * np.square(x), axis=-1)))

    more = y - y0 + u - u0
    return Errors(loss(y0), loss(more), loss(more.mean(axis=0)), loss(y + u))


class Optimum(NamedTuple):
    """A convex model's optimum, and what its units' losses are like there."""

    start: np.ndarray  # float32[D], where training starts
    params: np.ndarray  # float32[D]
    curvature: np.ndarray  # float32[D, D]
    noise: np.ndarray  # float32[N, D], z = -gradients, of mean 0
    spread: Callable  # v float[N, D] -> sum_i H_i v_i / N
    third: Callable  # v float[P, D] -> the mean of f'''(v, v) over the vectors


def optimum(model, train: dict, *, seed: int = 0) -> Optimum:
    """Newton's method from the parameters of a seed, for a convex `models.Model`."""
    start, unravel = jax.flatten_util.ravel_pytree(model.init(jax.random.key(seed)))
    params, train = start, jax.tree.map(jnp.asarray, train)

    def each(x):
        return model.loss(unravel(x), train, None)

    gradients, mean = jax.jacfwd(each), jax.grad(lambda x: jnp.mean(each(x)))
    hessian = jax.jit(jax.jacfwd(mean))
    for _ in range(12):
        params = params - jnp.linalg.solve(hessian(params), mean(params))
    z = -jax.jit(gradients)(params)

    def third(v):
        along = lambda x: jax.jvp(mean, (x,), (v,))[1]  # noqa: E731
        return jax.jvp(along, (params,), (v,))[1]

    return Optimum(
        start, params, hessian(params), z - jnp.mean(z, axis=0, keepdims=True),
        lambda v: jax.jit(jax.grad(lambda x: jnp.sum(v * gradients(x)) / len(v)))(params),
        lambda v: jnp.mean(jax.jit(lambda v: jax.lax.map(third, v))(v), axis=0),
    )  # fmt: skip


def sign(at: Optimum, *, sample: int = 200, seed: int = 0) -> tuple[float, float]:
    """Angle between the two parts of the bias of local steps, at a convex model's optimum.

    Args:
      sample: number of units over which the third derivative is averaged.

    Returns:
      The cosine of E[H_i z_i], from the curvature of a worker's own units, with E[f'''(z_i,
      z_i)] / 2, in the metric of H^-1, which measures what a bias costs in loss. Below 0 the two
      cancel, and a correction that removes one of them leaves the other. Second, the trace of the
      covariance of z over that of H, which is 1 in the family.
    """
    chosen = np.random.default_rng(seed).choice(len(at.noise), min(sample, len(at.noise)), False)
    # z has mean 0, so the mean curvature adds nothing.
    both = jnp.stack([at.spread(at.noise), at.third(at.noise[chosen]) / 2])
    products = both @ jnp.linalg.solve(at.curvature, both.T)
    cosine = products[0, 1] / jnp.sqrt(products[0, 0] * products[1, 1])
    noise = jnp.sum(jnp.mean(jnp.square(at.noise), axis=0)) / jnp.trace(at.curvature)
    return float(cosine), float(noise)


def family_of(at: Optimum) -> tuple[Family, np.ndarray, np.ndarray]:
    """A task as a shared quadratic: the family, the start, and the eigenvectors of its numbers."""
    curvature, turn = np.linalg.eigh(np.asarray(at.curvature, np.float64))
    noise = np.asarray(at.noise, np.float64) @ turn
    start = np.asarray(at.start - at.params, np.float64) @ turn
    return Family(curvature, noise, np.zeros_like(noise), 0.0), start, turn


def floor(at: Optimum, path: np.ndarray) -> float:
    """What the third derivative makes of iterates that stray: 1/2 b^T H^-1 b, b = E f'''(y, y) / 2.

    Averaging does not remove it, as it moves the mean of the iterates.
    """
    bias = at.third(jnp.asarray(path, jnp.float32)) / 2
    return 0.5 * float(bias @ jnp.linalg.solve(at.curvature, bias))
