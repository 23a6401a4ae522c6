r"""Tests the theory behind QSR: how far SGD drifts along a manifold of minimisers under each rule.

    python -m experiments.slow_sde  # two problems, K = 2 .. 16: two minutes
    python -m experiments.slow_sde --workers=8 --rates=0.1,0.05

After SGD reaches a manifold of minimisers it drifts slowly along it, towards flatter regions. The
Slow SDEs of Gu et al. 2023 (https://arxiv.org/abs/2303.01215) and 2024
(https://arxiv.org/abs/2310.14423) predict how far K workers get in S / eta^2 steps. Every run is
plain SGD at a constant rate under a plan of `local_opt`. Its end is compared with the theory at
that rate and in the limit, and with the strength of drift that would have led there. The formulas
and a part of the tables are in docs/results/slow_sde.md.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

import syncopate
from experiments import entry
from experiments.compare import flags as dialect
from experiments.data.base import COUNT, Real
from experiments.report import tables

SLOW_TIME = 4.0  # S: runs have S / eta^2 steps


def jit(*static: str) -> Callable:
    """`jax.jit`, which is imported where the function is first called: after the flags."""

    def decorated(function):
        @functools.cache
        def compiled():
            import jax

            return jax.jit(function, static_argnames=static)

        return functools.wraps(function)(lambda *args, **options: compiled()(*args, **options))

    return decorated


class Problem(NamedTuple):
    """The measure falls along the manifold; noises are N(0, 1) and enter the loss linearly."""

    loss: Callable  # [P] parameters, [N] noises -> []
    measure: Callable  # [P] parameters -> []
    start: tuple[float, ...]  # P numbers, a minimiser
    num_noises: int  # N


def _valley_loss(params, noises):
    # The minimisers are the line y = 0. The curvature across it is 1 + x^2, flattest at x = 0.
    x, y = params
    return (1 + x**2) * y**2 / 2 + noises[0] * y


EXAMPLES = ((0.5, 0.4, -0.3, 0.2), (-0.2, 0.3, 0.4, 0.5))  # two examples of four features
NOISE = 0.5**0.5  # standard deviation of a label
START = (1.2, 0.8, 1.0, 0.9, 0.5, 1.0, 0.7, 1.1)  # u, then v


def predictions(params):
    """[2]: predictions of a diagonal linear network with weights w = u * u - v * v."""
    import jax.numpy as jnp

    w = params[:4] ** 2 - params[4:] ** 2
    return jnp.stack([sum(a * w[j] for j, a in enumerate(row)) for row in EXAMPLES])


def _label_noise_loss(params, noises):
    import jax.numpy as jnp

    # The labels are the predictions at the start, with fresh noise in every step.
    labels = predictions(jnp.array(START, params.dtype))
    return jnp.sum((predictions(params) - labels - NOISE * noises) ** 2) / 2


def sharpness(params):
    """Trace of the Hessian at a minimiser, 4 sum_j |A_j|^2 (u_j^2 + v_j^2)."""
    norms = [sum(row[j] ** 2 for row in EXAMPLES) for j in range(4)]
    return 4 * sum(norms[j % 4] * params[j] ** 2 for j in range(8))


PROBLEMS = {
    "valley": Problem(_valley_loss, lambda params: params[0], (1.0, 0.0), 1),
    "label_noise": Problem(_label_noise_loss, sharpness, START, 2),
}


class Rule(NamedTuple):
    label: str
    beta: float  # lim eta H
    plan: Callable  # (rate, steps) -> local_opt.SyncPlan


MARGIN = 1 + 1e-12  # against rounding below a whole number
RULES = {
    "parallel": Rule(
        "parallel", 0.0, lambda rate, steps: syncopate.local_opt.constant(1, total_steps=steps)
    ),
    "constant": Rule(
        "H = 4", 0.0, lambda rate, steps: syncopate.local_opt.constant(4, total_steps=steps)
    ),
    "inverse": Rule(
        "H = 1 / η",
        1.0,
        lambda rate, steps: syncopate.local_opt.qsr(
            rate, total_steps=steps, alpha=MARGIN, h_base=1, power=1
        ),
    ),
    "qsr": Rule(
        "QSR, H = 0.5 / η²",
        math.inf,
        lambda rate, steps: syncopate.local_opt.qsr(
            rate, total_steps=steps, alpha=0.5**0.5 * MARGIN, h_base=1
        ),
    ),
}


# The theory, in the notation of docs/results/slow_sde.md: l, S, V and psi.
def in_the_limit(eigenvalues, workers, beta):
    """[P, P]: V / S for eta -> 0 at eta H = beta >= 0, possibly inf."""
    import jax.numpy as jnp

    sums = eigenvalues[:, None] + eigenvalues[None, :]
    x = beta * sums
    share = jnp.where(x > 1e-3, 1 + jnp.expm1(-x) / x, x / 2)
    return (1 / workers + (1 - 1 / workers) * share) / sums


def at_a_rate(eigenvalues, workers, rate, period):
    """[P, P]: V / S for a learning rate eta > 0 and rounds of H >= 1 steps."""
    kept = 1 - rate * eigenvalues
    kept = kept[:, None] * kept[None, :]
    share = 1 - (1 - kept**period) / (period * (1 - kept))
    return (1 / workers + (1 - 1 / workers) * share) * rate / (1 - kept)


def drift(problem: Problem, moments: Callable, params, numbers):
    """float32[P]: d theta / ds at a minimiser; `numbers` are the arguments of `moments` after l."""
    import jax
    import jax.numpy as jnp

    silent = jnp.zeros(problem.num_noises)
    hessian = jax.hessian(problem.loss)
    values, basis = jnp.linalg.eigh(hessian(params, silent))
    normal = values > 1e-3  # along normals both problems exceed 0.1
    # [P, N]: derivative of a worker's gradient by its noises, in the basis; S = M M^T.
    noise = basis.T @ jax.jacfwd(jax.grad(problem.loss), 1)(params, silent)
    both = normal[:, None] & normal[None, :]
    factors = jnp.where(both, moments(jnp.where(normal, values, 1.0), *numbers), 0.0)
    v = basis @ (factors * (noise @ noise.T)) @ basis.T
    pull = jax.grad(lambda p: jnp.sum(hessian(p, silent) * v))(params)
    tangents = basis * ~normal[None, :]
    return -0.5 * tangents @ (tangents.T @ pull)


@jit("problem", "moments", "points")
def flow(problem: Problem, moments: Callable, *numbers, slow_time=SLOW_TIME, points=100):
    """float32[points + 1]: the measure at equally spaced slow times, starting at 0."""
    import jax
    import jax.numpy as jnp

    h = slow_time / points

    def of(params):
        return drift(problem, moments, params, numbers)

    def step(params, _):  # fourth-order Runge-Kutta
        a = of(params)
        b = of(params + h / 2 * a)
        c = of(params + h / 2 * b)
        d = of(params + h * c)
        params = params + h / 6 * (a + 2 * b + 2 * c + d)
        return params, problem.measure(params)

    start = jnp.array(problem.start)
    _, values = jax.lax.scan(step, start, length=points)
    return jnp.concatenate([problem.measure(start)[None], values])


def strength(problem: Problem, values):
    """The strength of drift that explains an end, relative to one worker alone.

    In slow time S, a drift of strength c gets as far as one of strength 1 in c S. Runs scatter
    around strength 1, so the curve extends to 2.
    """
    import jax.numpy as jnp

    curve = flow(problem, in_the_limit, 1, 0.0, slow_time=2 * SLOW_TIME, points=2000)
    return jnp.interp(-values, -curve, jnp.linspace(0, 2, len(curve)))


# Runs: parameters are [P, G, R, K] for G rules, R repetitions and K workers; all rules share the
# noises [N, R, K].
def worker_steps(problem: Problem, params, noises, rate, syncs):
    """One step of every worker, averaged under the rules that synchronise; syncs is bool[G]."""
    import jax
    import jax.numpy as jnp

    gradient = jax.grad(problem.loss)
    for axis, over in ((-1, -1), (-1, -1), (1, None)):
        gradient = jax.vmap(gradient, in_axes=(axis, over), out_axes=axis)
    params = params - rate * gradient(params, noises)
    mean = jnp.mean(params, axis=3, keepdims=True)
    return jnp.where(syncs[None, :, None, None], mean, params)


@jit("problem", "workers", "repetitions")
def ends_of(problem: Problem, workers: int, repetitions: int, periods, steps, rate):
    """[G, R]: the measure of the workers' mean, after noiseless steps onto the manifold."""
    import jax
    import jax.numpy as jnp

    # A fast generator: noises would be most of the work on a CPU.
    key = jax.random.fold_in(jax.random.key(0, impl="unsafe_rbg"), steps)
    start = jnp.array(problem.start)[:, None, None, None]
    params = jnp.broadcast_to(start, (len(start), len(periods), repetitions, workers))

    def step(t, params):
        shape = problem.num_noises, repetitions, workers
        noises = jax.random.normal(jax.random.fold_in(key, t), shape)
        return worker_steps(problem, params, noises, rate, (t + 1) % periods == 0)

    def silent_step(t, params):
        silent = jnp.zeros((problem.num_noises, repetitions, 1))
        return worker_steps(problem, params, silent, rate, periods < 0)

    mean = jnp.mean(jax.lax.fori_loop(0, steps, step, params), axis=3, keepdims=True)
    # 20 / rate steps shrink a distance at curvature 0.5 to exp(-10).
    return problem.measure(jax.lax.fori_loop(0, jnp.int32(20 / rate), silent_step, mean)[..., 0])


def measure(name: str, workers: int, rate: float, repetitions: int) -> list[dict]:
    """One record per rule: the ends of its runs, the strength of their drift, and the theory."""
    import jax.numpy as jnp

    problem, steps = PROBLEMS[name], round(SLOW_TIME / rate**2)
    periods = [int(rule.plan(rate, steps).periods[0]) for rule in RULES.values()]
    ends = ends_of(problem, workers, repetitions, jnp.array(periods), steps, rate)
    rows = []
    for (key, rule), period, reached in zip(RULES.items(), periods, ends, strict=True):
        limit = flow(problem, in_the_limit, workers, rule.beta)[-1]
        theory = flow(problem, at_a_rate, workers, rate, float(period))[-1]
        *drifts, limit_drift = workers * np.asarray(strength(problem, jnp.append(reached, limit)))
        rows.append(
            {
                "problem": name,
                "workers": workers,
                "learning_rate": rate,
                "rule": key,
                "end": reached.tolist(),
                "theory": float(theory),
                "limit": float(limit),
                "drift": list(map(float, drifts)),
                "limit_drift": float(limit_drift),
            }
        )
    return rows


def table(measured: Sequence[Mapping], name: str) -> str:
    """Markdown for one problem, a row per rule and number of workers.

    "off" is how far the measured mean lies above the limit. "drift" is the strength that explains
    the ends, relative to parallel SGD. Both are at the smallest rate.
    """
    rows, least = {}, min(r["learning_rate"] for r in measured)
    for r in measured:
        if r["problem"] == name:
            row = rows.setdefault((r["workers"], r["rule"]), {})
            row |= {"K": r["workers"], "rule": RULES[r["rule"]].label}
            row[f"η = {r['learning_rate']:g}"] = tables.show(r["end"], "{:.4f}")
            if r["learning_rate"] == least:  # the last one
                off = [100 * (end / r["limit"] - 1) for end in r["end"]]
                row[f"theory at {least:g}"] = f"{r['theory']:.4f}"
                row["theory, η → 0"] = f"{r['limit']:.4f}"
                row["off / %"] = tables.show(off, "{:+.1f}")
                row["drift"] = tables.show(r["drift"], "{:.3f}")
                row["theory's drift"] = f"{r['limit_drift']:.3f}"
    return tables.markdown([*rows.values()])


def define_flags(values: flags.FlagValues) -> None:
    with dialect.shown(values):
        dialect.define_list(values, COUNT, "workers", [2, 4, 8, 16], "numbers of workers, K")
        rates = Real("[0.001, 1]"), "rates", [0.1, 0.05, 0.02, 0.01]  # of S / eta^2 steps
        dialect.define_list(values, *rates, "small learning rates, eta")
        flags.DEFINE_integer("repetitions", 64, "repetitions of every run", 2, 10_000, values)
    dialect.define(values, "output")


def main(values: flags.FlagValues) -> None:
    from experiments import progress
    from experiments.report import page, records

    rates = sorted(values.rates, reverse=True)
    cells = list(itertools.product(PROBLEMS, values.workers, rates))
    with page.opened("slow_sde", values) as folder:
        measured = [r for cell in progress.bar(cells) for r in measure(*cell, values.repetitions)]
        records.rewrite(folder, measured)
        texts = {f"table_{name}.md": f"### {name}\n\n{table(measured, name)}" for name in PROBLEMS}
        print(page.write_all(folder, "Drift of SGD in 4 / η² steps", texts))
        print(f"\nWritten to {folder}")


if __name__ == "__main__":
    entry.main(define_flags, main)
