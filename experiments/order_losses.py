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

from typing import NamedTuple

import numpy as np

LONGEST = 4096  # longest period that `border` tries


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
        shape = len(orders), setting.workers, setting.steps, setting.units_per_step
        taken = units[orders.reshape(shape)].mean(axis=3)
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


def errors(family: Family, setting: Setting, plain: np.ndarray, own: np.ndarray) -> Errors:
    """Both errors, from `paths` with a sync after every step and with the plan's syncs."""
    epochs = 1 if setting.cosine else setting.epochs // 2
    late = slice(plain.shape[1] - (epochs - 1) * setting.steps - 1, None, setting.steps)
    (y0, u0), (y, u) = plain[:, late], own[:, late]

    def loss(x):
        return 0.5 * float(np.mean(np.sum(family.curvature * np.square(x), axis=-1)))

    more = y - y0 + u - u0
    return Errors(loss(y0), loss(more), loss(more.mean(axis=0)), loss(y + u))


def order_formula(family: Family, setting: Setting) -> float:
    """The error of D-RR in closed form, a sum over steps whose batches add up to zero.

    E y^2 = eta^2 s^2 / (B W) (sum_t q_t^2 - (sum_t q_t)^2 / n) / (1 - (1 - eta l)^2n), with
    q_t = (1 - eta l)^(n - 1 - t) and s^2 the variance of z.
    """
    keep, n = 1 - setting.rate * family.curvature, setting.steps
    q = keep ** np.arange(n)[:, None]
    bridge = ((q**2).sum(axis=0) - q.sum(axis=0) ** 2 / n) / (1 - keep ** (2 * n))
    variance = family.noise.var(axis=0) / (setting.workers * setting.units_per_step)
    return 0.5 * float(np.sum(family.curvature * setting.rate**2 * variance * bridge))


def local_formula(family: Family, setting: Setting, period: int) -> float:
    """The bias of local steps at the end of a round in closed form, for independent batches.

    bias = k/2 V, V = sum_{h < H} q_h V_h / sum_h q_h with q_h = (1 - eta l)^(H - 1 - h) and V_h,
    the variance between workers after h steps,
    V_h = (1 - 1/W) eta^2 s^2 / B (1 - (1 - eta l)^2h) / (1 - (1 - eta l)^2).
    """
    keep, h = 1 - setting.rate * family.curvature, np.arange(period)[:, None]
    walked, q = (1 - keep ** (2 * h)) / (1 - keep**2), keep ** (period - 1 - h)
    variance = (1 - 1 / setting.workers) * family.noise.var(axis=0) / setting.units_per_step
    mean = (q * walked).sum(axis=0) / q.sum(axis=0)
    bias = family.cubic / 2 * setting.rate**2 * variance * mean
    return 0.5 * float(np.sum(family.curvature * bias**2))


def border(family: Family, setting: Setting) -> int:
    """The longest period, at most LONGEST, at which local steps add less than D-RR's error."""
    most, low, high = order_formula(family, setting), 1, LONGEST + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = local_formula(family, setting, middle) < most
        low, high = (middle, high) if fits else (low, middle)
    return low
