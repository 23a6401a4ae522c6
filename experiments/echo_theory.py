r"""Tests the theory of echoing: how many loads a level takes, over p, steps and workers.

    python -m experiments.echo_theory  # quadratics exactly, two convex problems with seeds: minutes

A step loads a fresh batch with probability p and else uses the last one again; each worker's
parameters are averaged with probability p^c. Every number is at the best of many constant rates.
On quadratics with additive noise the second moments follow a linear recursion, so that nothing is
drawn. Least squares without noise at the optimum and regularised softmax regression on digits are
trained, under the plans of `ordering.echo` and `local_opt`. docs/results/echo_theory.md explains
the tables.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from absl import flags

from experiments import entry
from experiments.compare import flags as dialect
from experiments.data.base import COUNT, FACTOR

RATES = 1.7 ** np.arange(-7.0, 7)  # of a problem's own rate
LEVELS = 10.0 ** -np.arange(0.5, 4.01, 0.5)  # of the loss above the optimum at the start
COINS = ("per load", "every step", "algorithm 2", "own coins, every step", "own coins")
FINE_RATES = 0.25 * 1.4 ** np.arange(-20.0, 7)  # of the quadratic
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
EXACT_WORKERS = (1, 64, 4096)
LAG = 1.5  # times the loss of fresh batches: a run that echoes lags
CURVATURES = np.geomspace(1.0, 0.05, 16)  # of the quadratic


def moments(p: np.ndarray, workers: np.ndarray, steps: int) -> Iterator[np.ndarray]:
    """Losses float64[P, W] of a quadratic after 1, 2, ... steps at the best rate, exactly.

    x' = x - eta (lambda x + xi), where xi ~ N(0, 1 / W) is drawn anew with probability p.
    """
    p = np.reshape(p, (-1, 1, 1, 1))
    noise = 1 / np.reshape(workers, (1, -1, 1, 1))
    rate = FINE_RATES[:, None]
    kept = 1 - rate * CURVATURES
    square, product = np.ones(np.broadcast_shapes(p.shape, noise.shape, kept.shape)), 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(steps):
            square = kept**2 * square - 2 * rate * kept * product + rate**2 * noise
            product = (1 - p) * (kept * product - rate * noise)
            losses = np.sum(CURVATURES * square, axis=-1) / np.sum(CURVATURES)
            yield np.min(np.where(np.isfinite(losses), losses, np.inf), axis=-1)


@functools.cache
def quadratic(shares: tuple, workers: tuple, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(first step at each level float64[P, W, levels], inf if there is none, losses[T, P, W])."""
    losses = np.array([*moments(np.array(shares), np.array(workers), steps)])
    below = losses[..., None] <= LEVELS
    first = np.where(below.any(0), 1.0 + below.argmax(0), np.inf)
    return first, losses


class Problem(NamedTuple):
    """A convex problem of N examples."""

    examples: dict
    init: np.ndarray
    loss: Callable  # (x, examples) -> mean loss
    optimum: float
    batch: int  # examples per worker and step
    rate: float  # that RATES multiply


def interpolated() -> Problem:
    """Least squares that has no noise at its optimum."""
    import jax.numpy as jnp

    draws, size = np.random.default_rng(0), 32
    scales = np.geomspace(1.0, 0.2, size)
    a = (draws.standard_normal((2048, size)) * scales).astype(np.float32)
    solution = draws.standard_normal(size) / scales
    target = (a @ solution).astype(np.float32)

    def loss(x, batch):
        return jnp.mean((batch["a"] @ x - batch["b"]) ** 2) / 2

    return Problem({"a": a, "b": target}, np.zeros(size, np.float32), loss, 0.0, 4, 0.1)


def softmax() -> Problem:
    """Regularised softmax regression on digits, whose gradients keep their noise."""
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree

    from experiments.compare import recipes

    task, _ = recipes.load("digits")
    init, tree_of = ravel_pytree(task.model.init(jax.random.key(0)))

    def loss(x, batch):
        return jnp.mean(task.model.loss(tree_of(x), batch, None))

    return Problem(task.train, np.asarray(init), loss, task.optimum(), 4, 0.5)


PROBLEMS = {"interpolated": functools.cache(interpolated), "softmax": functools.cache(softmax)}


def decisions(coins: str, p: float, workers: int, steps: int, seed: int):
    """(number of the batch int32[T, W], whether a sync follows bool[T]) of one run."""
    import jax

    import local_opt
    import ordering

    key, separate = jax.random.key(seed), coins.startswith("own")
    of_key = functools.partial(jax.random.fold_in, key)
    plans = [
        ordering.echo.bernoulli(p, total_steps=steps, key=of_key(w))
        for w in range(workers if separate else 1)
    ]
    fresh = np.stack([plan.fresh for plan in plans], 1)
    batch = np.broadcast_to(np.cumsum(fresh, 0) - 1, (steps, workers)).astype(np.int32)
    if coins.endswith("every step"):
        ends = np.ones(steps, bool)
    elif coins == "per load":
        ends = np.append(fresh[1:, 0], True)
    else:
        plan = local_opt.bernoulli(p, total_steps=steps, key=of_key(10**6))
        ends = np.zeros(steps, bool)
        ends[plan.starts + plan.periods - 1] = True
    return batch, ends


@functools.cache
def programs(name: str, workers: int) -> tuple[Callable, Callable]:
    """(`(x, t0, t1, rates, keys, batches, ends) -> x`, `x -> losses`) of all rates and seeds."""
    import jax
    import jax.numpy as jnp
    import optax

    import local_opt

    problem = PROBLEMS[name]()
    examples = jax.tree.map(jnp.asarray, problem.examples)
    number = len(jax.tree.leaves(examples)[0])
    grad = jax.grad(problem.loss)

    def worker(x, rate, key, batch, end):
        rounds = local_opt.local_rounds(optax.sgd(rate))
        key = jax.random.fold_in(jax.random.fold_in(key, batch), jax.lax.axis_index("worker"))
        units = jax.random.randint(key, (problem.batch,), 0, number)
        gradient = grad(x, jax.tree.map(lambda leaf: leaf[units], examples))
        state = rounds.init(x)
        updates, state = rounds.update(gradient, state, x)
        moved = x + updates
        return jnp.where(end, rounds.sync(moved, state)[0], moved)

    of_workers = jax.vmap(worker, (0, None, None, 0, None), axis_name="worker", axis_size=workers)
    of_seeds = jax.vmap(of_workers, (0, None, 0, 0, 0))
    of_rates = jax.vmap(of_seeds, (0, 0, None, None, None))

    @jax.jit
    def advance(x, t0, t1, rates, keys, batches, ends):
        return jax.lax.fori_loop(
            t0, t1, lambda t, x: of_rates(x, rates, keys, batches[t], ends[t]), x
        )

    @jax.jit
    def losses(x):
        mean = jnp.mean(x, axis=2)  # over workers
        flat = mean.reshape(-1, mean.shape[-1])
        values = jax.lax.map(lambda x: problem.loss(x, examples), flat, batch_size=32)
        return values.reshape(mean.shape[:2]) - problem.optimum

    return advance, losses


def trained_rows(
    name: str, coins: str, p: float, workers: int, steps: int, seeds: int
) -> list[dict]:
    """Rows as of `quadratic_rows`, by seed; the best rate is that of the mean over seeds."""
    import jax
    import jax.numpy as jnp

    problem = PROBLEMS[name]()
    made = [decisions(coins, p, workers, steps, seed) for seed in range(seeds)]
    batches, ends = (jnp.asarray(np.stack(of, 1)) for of in zip(*made, strict=True))
    keys = jax.random.split(jax.random.key(1), seeds)
    rates = jnp.asarray(problem.rate * RATES, jnp.float32)
    advance, losses = programs(name, workers)
    x = jnp.broadcast_to(problem.init, (len(rates), seeds, workers, len(problem.init)))
    times = np.unique(np.rint(1.1 ** np.arange(np.log(steps) / np.log(1.1) + 1)).astype(int))
    times = np.append(0, times[times <= steps])
    curve = [np.asarray(losses(x))]
    for t0, t1 in itertools.pairwise(times):
        x = advance(x, t0, t1, rates, keys, batches, ends)
        curve.append(np.asarray(losses(x)))
    curve = np.array(curve, np.float64) / curve[0].mean()  # [times, rates, seeds]
    loads = np.cumsum(np.diff(np.array(batches), axis=0, prepend=-1) > 0, 0)[..., 0]
    rounds = np.cumsum(np.array(ends), 0)
    return _rows(
        {"problem": name, "coins": coins, "p": p, "workers": workers}, times, curve, loads, rounds
    )


def _rows(common, times, curve, loads, rounds) -> list[dict]:
    """Rows of levels and of times from curves float64[times, rates, seeds]."""
    curve, rows = np.where(np.isfinite(curve), curve, np.inf), []
    for level in LEVELS:
        first = np.full(curve.shape[1:], np.inf)
        for at in np.ndindex(first.shape):
            below = np.flatnonzero(curve[(slice(None), *at)] <= level)
            if below.size:
                first[at] = _crossing(times, curve[(slice(None), *at)], below[0], level)
        best = int(np.argmin(first.mean(1)))
        if np.isfinite(first[best]).all():
            for seed, t in enumerate(first[best]):
                of = int(np.ceil(t)) - 1
                rows.append(
                    common
                    | {"level": level, "seed": seed, "steps": float(t), "rate": float(RATES[best])}
                    | {"loads": int(loads[of, seed]), "rounds": int(rounds[of, seed])}
                )
    return rows


def _crossing(times, curve, k: int, level: float) -> float:
    """The step of a level, between the evaluations before and after it, on logarithms."""
    if k == 0:
        return 1.0
    low, high = np.log(curve[k]), np.log(curve[k - 1])
    part = (high - np.log(level)) / (high - low)
    return max(1.0, float(times[k - 1] + part * (times[k] - times[k - 1])))


def jobs(shares, workers, base: int) -> list[tuple]:
    """(problem, coins, p, W) of all runs that are trained."""
    over_p = itertools.product(PROBLEMS, COINS, shares, [base])
    over_w = itertools.product(PROBLEMS, COINS[:1], shares[::2], workers)
    return [*dict.fromkeys([*over_p, *over_w])]


def slopes(table, over: str, of: str) -> np.ndarray:
    """The exponents of `of` over `over`, fitted on logarithms, by seed; none of under 3 points."""
    fits = []
    for _, group in table.groupby("seed"):
        points = group.sort_values(over)
        if len(points) >= 3:
            fits.append(np.polyfit(np.log(points[over]), np.log(points[of]), 1)[0])
    return np.array(fits)


def exact_tables(shares=SHARES, workers=EXACT_WORKERS, steps: int = 2**14) -> dict[str, str]:
    """Exponents of the quadratic, of which nothing is drawn."""
    from experiments.report import tables

    first, losses = quadratic(tuple(shares), tuple(workers), steps)
    p, rows, lasting = np.array(shares), [], []
    loads = 1 + p[:, None, None] * (first - 1)
    for b, w in enumerate(workers):
        row = {"workers": w}
        for k, level in enumerate(LEVELS):
            reached = np.isfinite(first[:, b, k])
            slope = (
                np.polyfit(np.log(p[reached]), np.log(loads[reached, b, k]), 1)[0]
                if reached.all()
                else None
            )
            row[f"{level:.2g}"] = "-" if slope is None else f"{slope:.2f}"
        rows.append(row)
        behind = losses[:, 1:, b] > LAG * losses[:, :1, b]
        last = np.where(behind.any(0), behind.argmax(0), np.inf)
        row = {"workers": w} | {
            f"p = {share:g}": "-" if np.isinf(t) else f"{t:.0f}"
            for share, t in zip(shares[1:], last, strict=True)
        }
        lasting.append(row)
    return {"loads": tables.markdown(rows), "lasting": tables.markdown(lasting)}


def trained_tables(rows: Iterable[dict]) -> dict[str, str]:
    """Exponents of the trained problems, with 95 % intervals over seeds."""
    import pandas as pd

    from experiments.report import tables

    levels, made, base = pd.DataFrame(rows), {"coins": [], "workers": []}, 4

    def exponent(part, over, of):
        return tables.show(slopes(part, over, of), "{:+.2f}")

    def of_levels(part, over, of):
        return {f"{x:.2g}": exponent(part[np.isclose(part.level, x)], over, of) for x in LEVELS}

    for (problem, coins), part in levels[levels.workers == base].groupby(["problem", "coins"]):
        made["coins"].append({"problem": problem, "coins": coins} | of_levels(part, "p", "loads"))
    of = levels[levels.coins == "per load"]
    for (problem, p), part in of.groupby(["problem", "p"]):
        if part.workers.nunique() > 2:
            row = {"problem": problem, "p": f"{p:g}"} | of_levels(part, "workers", "steps")
            made["workers"].append(row)
    return {name: tables.markdown(rows) for name, rows in made.items() if rows}


def define_flags(values: flags.FlagValues) -> None:
    with dialect.shown(values):
        dialect.define_list(values, FACTOR, "shares", [*SHARES], "shares of fresh batches, p")
        dialect.define_list(values, COUNT, "workers", [1, 2, 4, 8, 16], "numbers of workers, W")
        dialect.define_value(values, COUNT, "steps", 4096, "steps of every run")
        dialect.define_value(values, COUNT, "seeds", 8, "repetitions of every run")
        dialect.define_value(values, COUNT, "of", 1, "parts of the runs")
        dialect.define_value(values, COUNT, "part", 1, "which of them is run")
    dialect.define(values, "output")


def main(values: flags.FlagValues) -> None:
    from experiments.report import page, records

    with page.opened("echo_theory", values) as folder:
        path, rows = os.path.join(folder, records.METRICS), []
        base = 4 if 4 in values.workers else values.workers[-1]
        for job in jobs(values.shares, values.workers, base)[values.part - 1 :: values.of]:
            rows += trained_rows(*job, values.steps, values.seeds)
            records.write_lines(path, rows)
            print(job, flush=True)
        texts = {f"table_{name}.md": text for name, text in trained_tables(rows).items()}
        exact = exact_tables(values.shares)
        texts |= {f"table_exact_{name}.md": text for name, text in exact.items()}
        print(page.write_all(folder, "The theory of echoing", texts, {}))
        print(f"\nWritten to {folder}")


if __name__ == "__main__":
    entry.main(define_flags, main)
