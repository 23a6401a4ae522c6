r"""Losses whose two errors, of the order and of local steps, are known exactly.

f_i(x) = sum_c l_c/2 x_c^2 - z_ic x_c + l_c (g_ic/2 x_c^2 + k/6 x_c^3),  sum_i z_i = sum_i g_i = 0:
curvature l, noise z_i, and what makes a loss more than a shared quadratic: a curvature g_i of every
unit's own, and a third derivative k, both in units of l. The minimum of the mean is 0.

To first order in (g, k) everything is a linear recursion. x_w = y_w + u_w with
  y_w <- (1 - eta l) y_w + eta z(batch of w),           linear: its mean over the workers, y, is
                                                        parallel SGD's, whatever the plan;
  u <- (1 - eta l) u - eta l mean_w (g(batch of w) y_w + k/2 y_w^2),    the mean of u_w.
So the order's error is that of y, which no plan changes, and the error of local steps is what u
gains where y_w is not y: mean_w cov(g, y_w) + k/2 var_w(y_w).

W workers, M units per worker, B units per worker and step, n = M / B steps of an epoch, D numbers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Family(NamedTuple):
    curvature: np.ndarray  # l, float64[D]
    noise: np.ndarray  # z, float64[W M, D]
    spread: np.ndarray  # g, float64[W M, D]
    cubic: float  # k


class Errors(NamedTuple):
    """Expected losses above the minimum, at the ends of epochs: 1/2 sum_c l_c (.)^2."""

    order: float  # of y: what parallel SGD has under this order
    local: float  # of the mean of u, less parallel SGD's: what local steps add
    bias: float  # of its mean over the epochs: what neither seeds nor epochs average out
    total: float  # of y + u


class Drift(NamedTuple):
    """A correction of local drift, as `local_opt.control_variates` and `local_opt.proximal`."""

    gain: float = 0.0  # of control variates; 0 for none
    pull: float = 0.0  # mu


NEVER = Drift()


def draw(
    num_units: int, workers: int, *, dimension=16, least=0.02, spread=1.0, cubic=1.0, between=0.0,
    correlation=0.0, seed=0,
) -> Family:  # fmt: skip
    """Gaussian units; the variance of z_c is l_c, as of a likelihood at its optimum.

    Args:
      least: l is from here to 1, evenly in logarithms.
      between: a shift of each worker's own units, in standard deviations; worker w owns the units
        w M .. w M + M - 1 of fixed shards.
      correlation: of g with z.
    """
    rng = np.random.default_rng([seed, 1])
    curvature = np.geomspace(least, 1, dimension)
    noise, own = rng.normal(size=(2, num_units, dimension))
    own = correlation * noise + np.sqrt(1 - correlation**2) * own
    shift = rng.normal(size=(workers, dimension))
    noise = noise + between * np.repeat(shift, num_units // workers, axis=0)
    noise = np.sqrt(curvature) * (noise - noise.mean(axis=0))
    return Family(curvature, noise, spread * (own - own.mean(axis=0)), cubic)


def means_of_steps(units: np.ndarray, orders: np.ndarray, units_per_step: int) -> np.ndarray:
    """[K n, W, D], the means over every worker's batches; orders int[K, W, M]."""
    epochs, workers, num_units = orders.shape
    taken = units[orders.reshape(epochs, workers, num_units // units_per_step, units_per_step)]
    return taken.mean(axis=3).swapaxes(1, 2).reshape(-1, workers, units.shape[1])


def errors(
    family: Family, plain: np.ndarray, own: np.ndarray, *, steps: int, epochs: int
) -> Errors:
    """Both errors, over the ends of the last epochs that `paths` has taken.

    Args:
      plain, own: of `paths`, with a sync after every step and with the plan's; steps: n.
    """
    late = slice(plain.shape[1] - (epochs - 1) * steps - 1, None, steps)
    (y0, u0), (y, u) = plain[:, late], own[:, late]

    def loss(x):
        return 0.5 * float(np.mean(np.sum(family.curvature * np.square(x), axis=-1)))

    more = y - y0 + u - u0
    return Errors(loss(y0), loss(more), loss(more.mean(axis=0)), loss(y + u))


def paths(
    family: Family, orders: np.ndarray, syncs: np.ndarray, rates: np.ndarray, *,
    units_per_step: int, drift: Drift = NEVER,
) -> np.ndarray:  # fmt: skip
    """The means (y, u) over the workers after every step of K epochs from the minimum: [2, K n, D].

    Args:
      orders: int[K, W, M]; syncs: bool[K n], whether workers meet after a step; rates: float[K n].
      units_per_step: B; drift: how their drift is corrected.
    """
    noise, spread = (
        means_of_steps(units, orders, units_per_step) for units in (family.noise, family.spread)
    )
    y, mean = np.zeros(noise.shape[1:]), np.zeros(noise.shape[2])  # y of every worker
    u = anchor_u = mean
    against, anchor, spent = np.zeros_like(y), y, 0.0
    found = np.empty((2, len(noise), noise.shape[2]))
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


def order_formula(family: Family, *, rate: float, workers: int, units_per_step: int, steps: int):
    """The error of D-RR in closed form: a sum over steps whose batches add up to zero.

    E y^2 = eta^2 s^2 / (B W) (sum_t q_t^2 - (sum_t q_t)^2 / n) / (1 - (1 - eta l)^2n), with
    q_t = (1 - eta l)^(n - 1 - t) and s^2 the variance of z: for eta l n << 1,
    eta^3 l s^2 (n^2 - 1) / (24 B W); for eta l n >> 1, eta s^2 / (2 l B W).
    """
    keep = 1 - rate * family.curvature
    q = keep ** np.arange(steps)[:, None]
    bridge = (q**2).sum(axis=0) - q.sum(axis=0) ** 2 / steps
    variance = family.noise.var(axis=0) * rate**2 / (workers * units_per_step)
    return 0.5 * float(np.sum(family.curvature * variance * bridge / (1 - keep ** (2 * steps))))


def local_formula(family: Family, *, rate: float, workers: int, units_per_step: int, period: int):
    """The bias of local steps at the end of a round in closed form, of batches drawn anew.

    bias = k/2 V, V = sum_{h < H} q_h V_h / sum_h q_h with q_h = (1 - eta l)^(H - 1 - h) and V_h,
    what workers have walked apart in h steps,
    V_h = (1 - 1/W) eta^2 s^2 / B (1 - (1 - eta l)^2h) / (1 - (1 - eta l)^2). For eta l H << 1 it is
    (1 - 1/W) eta^2 s^2 (H - 1) / (2 B), for eta l H >> 1 (1 - 1/W) eta s^2 / (2 l B).
    """
    keep = 1 - rate * family.curvature
    h = np.arange(period)[:, None]
    walked, q = (1 - keep ** (2 * h)) / (1 - keep**2), keep ** (period - 1 - h)
    step = (1 - 1 / workers) * rate**2 * family.noise.var(axis=0) / units_per_step
    bias = family.cubic / 2 * step * (q * walked).sum(axis=0) / q.sum(axis=0)
    return 0.5 * float(np.sum(family.curvature * bias**2))


def border(family: Family, *, rate, workers, units_per_step, steps) -> int:
    """The longest period at which local steps err by less than D-RR's order does, in 1 .. 4096.

    While eta l n << 1 it is H - 1 < n sqrt(2 l B / (3 k^2 eta s^2 W)) for a single number.
    """
    given = dict(rate=rate, workers=workers, units_per_step=units_per_step)
    most = order_formula(family, steps=steps, **given)
    low, high = 1, 4097
    while high - low > 1:
        middle = (low + high) // 2
        fits = local_formula(family, period=middle, **given) < most
        low, high = (middle, high) if fits else (low, middle)
    return low


# Of a task.
class Sign(NamedTuple):
    """How the two parts of the bias of local steps lie to each other, at a task's optimum.

    Fields:
      cosine: of E[H_i z_i], which a worker feels of its own units' curvature, with E[f'''(z_i,
        z_i)] / 2, in the metric of H^-1, in which a bias costs loss. Below 0 the two cancel, and a
        correction that takes one away lets the other be.
      noise: trace of the covariance of z over the trace of H; 1 in the family.
    """

    cosine: float
    noise: float


def sign(model, train: dict, *, steps: int = 12, sample: int = 200, seed: int = 0) -> Sign:
    """Measures a model that is convex and small: dense Hessians.

    Args:
      model: a `models.Model`; train: its examples, arrays.
      steps: of Newton's method from the initial parameters; sample: units of the third derivative.
    """
    params, unravel = jax.flatten_util.ravel_pytree(model.init(jax.random.key(seed)))
    count = len(jax.tree.leaves(train)[0])
    train = jax.tree.map(jnp.asarray, train)

    def unit(x, i):
        return model.loss(unravel(x), jax.tree.map(lambda a: a[i][None], train), None)[0]

    def mean(x):
        return jnp.mean(model.loss(unravel(x), train, None))

    gradient, hessian = jax.jit(jax.grad(mean)), jax.jit(jax.hessian(mean))
    for _ in range(steps):
        params = params - jnp.linalg.solve(hessian(params), gradient(params))
    units = jnp.arange(count)
    z = -jax.jit(jax.vmap(jax.grad(unit), (None, 0)))(params, units)
    z = z - jnp.mean(z, axis=0, keepdims=True)

    def own(i, v):
        return jax.jvp(lambda x: jax.grad(unit)(x, i), (params,), (v,))[1]

    def third(v):
        along = lambda x: jax.jvp(jax.grad(mean), (x,), (v,))[1]  # noqa: E731
        return jax.jvp(along, (params,), (v,))[1]

    # z has the mean 0, so the mean curvature adds nothing.
    spread = jax.jit(lambda: jnp.mean(jax.vmap(own)(units, z), axis=0))()
    few = z[np.random.default_rng(seed).choice(count, min(sample, count), replace=False)]
    cubic = jnp.mean(jax.jit(lambda v: jax.lax.map(third, v))(few), axis=0) / 2
    curvature = hessian(params)
    solved = jnp.linalg.solve(curvature, jnp.stack([spread, cubic], axis=1))
    products = jnp.stack([spread, cubic]) @ solved
    cosine = products[0, 1] / jnp.sqrt(products[0, 0] * products[1, 1])
    noise = jnp.sum(jnp.mean(jnp.square(z), axis=0)) / jnp.trace(curvature)
    return Sign(float(cosine), float(noise))
