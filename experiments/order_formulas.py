r"""What the errors of order_losses.py are expected to be, in closed form.

Every average of the iterates is sum_j w_j y_{T-j}, with the weights w, newest first: (1,) for the
last iterate, n times 1 / n for the mean of the last epoch. It is linear in the noise, so it equals
eta sum_j c_j z_{T-j} with c_j = (1 - eta l) c_{j-1} + w_j, and within an epoch, whose z add up to
zero, sum_t c_t z_t = sum_t (c_t - c_{t+1}) P_t. An order enters through the covariances of its
prefix sums P_t alone, and an average through c alone.
"""

from collections.abc import Sequence

import numpy as np

from experiments import order_losses as losses
from experiments.order_losses import Family, Setting

LONGEST = 4096  # longest period that `border` tries
EPOCHS_BEFORE = 6  # epochs whose prefix sums are counted as correlated; each has half of the last's


def ema(steps: float) -> np.ndarray:
    """Weights of an exponential moving average with a time constant of so many steps."""
    keep = 1 - 1 / steps
    return keep ** np.arange(int(12 * steps)) / steps


AVERAGES = {  # weights of the iterates, newest first
    "last": lambda n: np.ones(1),
    "mean of the epoch": lambda n: np.full(n, 1 / n),
    "EMA of two epochs": lambda n: ema(2 * n),
}


def prefixes(order: str, family: Family, setting: Setting, scale=1.0) -> list[np.ndarray]:
    """Covariances [n - 1, n - 1, D] of the prefix sums P_1 .. P_{n-1} of batch means.

    The first is that of an epoch with itself, the i-th after it with the i-th epoch before.
    D-RR's ("rr") is a Brownian bridge, s^2 / (B W) (min(t, t') - t t' / n). For a balanced order
    ("cd_grab", or "id_pair" with a sum r per worker) of an even number of steps, the next order's
    first and second half are P'(t) = (r(t) + P(2 t)) / 2 and P'(n - t) = (r(t) - P(2 t)) / 2. The
    sum r of signed differences of variance S_c = 2 scale_c^2 s_c^2 is taken as Gaussian with
    independent numbers of variances V_c, of which a greedy sign takes, per pair,
    V_c <- V_c + S_c - 2 sqrt(2 / pi) S_c V_c / (sum_c S_c V_c)^(1/2).

    Args:
      scale: float[D] or a number, by which the rows that are balanced are multiplied.
    """
    n, units = setting.steps, setting.workers * setting.units_per_step
    variance, t = family.noise.var(axis=0), np.arange(1, setting.steps)
    if order == "rr":
        bridge = np.minimum(t[:, None], t) - t[:, None] * t / n
        return [bridge[..., None] * variance / units]
    sums = setting.workers if order == "id_pair" else 1
    half, per_step = np.arange(n // 2 + 1), units // sums
    signed = 2 * variance * np.square(scale)
    at, spent = [(np.zeros_like(signed),) * 2], np.zeros_like(signed)
    now = signed  # the first pair has nothing to be held against
    for pair in range(1, half[-1] * per_step + 1):
        if pair > 1:
            pull = np.minimum(np.sqrt(2 / np.pi) * signed / np.sqrt(np.sum(signed * now)), 0.5)
            now, spent = now + signed - 2 * pull * now, spent + pull
        if pair % per_step == 0:
            at.append((now, spent))
    now, spent = np.moveaxis(at, 1, 0)
    own = now[np.minimum(half[:, None], half)] * np.exp(-np.abs(spent[:, None] - spent))
    of_sum, of_old = np.zeros((n + 1, len(half))), np.zeros((n + 1, n + 1))
    of_sum[n - half, half], of_old[n - half, 2 * half] = 0.5, -0.5
    of_sum[half, half], of_old[half, 2 * half] = 0.5, 0.5
    found = made = np.einsum("ai,ijd,bj->abd", of_sum, own, of_sum)
    for _ in range(8):  # settled, as `epochs_of`
        found = made + np.einsum("ai,ijd,bj->abd", of_old, found, of_old)
    lagged, size = [found], sums / np.square(units * np.asarray(scale))
    for _ in range(EPOCHS_BEFORE):
        lagged.append(np.einsum("ai,ijd->ajd", of_old, lagged[-1]))
    return [c[1:n, 1:n] * size for c in lagged]


def order_formula(
    family: Family, setting: Setting, order: str = "rr", weights: Sequence = (1.0,), scale=1.0
) -> float:
    """The expected error of an order at the end of an epoch, in a weighted mean of the iterates.

    E a^2 = eta^2 sum_{k,i} d_k^T C_|i| d_{k+i} with d_t = c_t - c_{t+1} of epoch k before the last
    and C_i the covariances of `prefixes`; a geometric sum over the epochs without weights. For
    D-RR's last iterate this is eta^2 s^2 / (B W) (sum_t q_t^2 - (sum_t q_t)^2 / n) /
    (1 - (1 - eta l)^2n), q_t = (1 - eta l)^(n - 1 - t).
    """
    keep, n = 1 - setting.rate * family.curvature, setting.steps
    covariances = prefixes(order, family, setting, scale)
    own = -(-(len(weights) - 1) // n) + 1  # from the last of these epochs on, c is geometric
    steps = np.zeros((own + len(covariances)) * n)
    steps[: len(weights)] = weights
    c, found = np.zeros_like(keep), []
    for weight in steps:
        c = keep * c + weight
        found.append(c)
    c = np.reshape(found, (-1, n, len(keep)))[:, ::-1]
    d, total = c[:, :-1] - c[:, 1:], np.zeros((own, len(keep)))
    for i, covariance in enumerate(covariances):
        pairs = np.einsum("kad,abd,kbd->kd", d[:own], covariance, d[i : i + own], optimize=True)
        total += (2 if i else 1) * pairs
    total[-1] /= 1 - keep ** (2 * n)
    return 0.5 * setting.rate**2 * float(np.sum(family.curvature * total.sum(axis=0)))


def start_formula(family: Family, setting: Setting, start, weights: Sequence = (1.0,)) -> float:
    """The loss that K epochs have left of where they started, the same for every order."""
    keep, age = 1 - setting.rate * family.curvature, np.arange(len(weights))[:, None]
    left = np.asarray(weights) @ keep ** np.maximum(setting.epochs * setting.steps - age, 0)
    return 0.5 * float(np.sum(family.curvature * np.square(left * start)))


def local_formula(family: Family, setting: Setting, period: int, averaged: bool = False) -> float:
    """The bias of local steps in closed form, for independent batches.

    bias = k/2 V, V = sum_{h < H} q_h V_h / sum_h q_h with V_h, the variance between workers after
    h steps, V_h = (1 - 1/W) eta^2 s^2 / B (1 - (1 - eta l)^2h) / (1 - (1 - eta l)^2). At the end of
    a round q_h = (1 - eta l)^(H - 1 - h); in a mean over whole rounds (`averaged`), q_h = 1.
    """
    keep, h = 1 - setting.rate * family.curvature, np.arange(period)[:, None]
    walked = (1 - keep ** (2 * h)) / (1 - keep**2)
    q = np.ones_like(walked) if averaged else keep ** (period - 1 - h)
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


def gains(family: Family, setting: Setting, order: str, seed: int, scale=1.0) -> dict[str, float]:
    """How often the error of D-RR is that of `order`, in a run and by `order_formula`."""
    found, rates = {}, np.full(setting.epochs * setting.steps, setting.rate)
    for name, rows, sign in (("rr", 1.0, 1), (order, scale, -1)):
        vectors = family.noise * rows
        made = losses.epochs_of(name, vectors, setting.workers, setting.epochs, seed)
        path = losses.parallel(family, setting, made, rates)
        for average in ("last", "mean of the epoch"):
            weights = AVERAGES[average](setting.steps)
            own = losses.errors(family, setting, path, path, weights).order
            expected = order_formula(family, setting, name, weights, rows)
            for column, value in ((average, own), (f"{average}, formula", expected)):
                found[column] = found.get(column, 1.0) * value**sign
    return found
