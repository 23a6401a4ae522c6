r"""Tests the theory of echoing over p, steps T and workers W.

    python -m experiments.echo_theory  # quadratics exactly, two convex problems with seeds: minutes
    python -m experiments.echo_theory --problems=hmda --data_dir=DIR  # another

A step loads a fresh batch with probability p and else uses the last one again; each worker's
parameters are averaged with probability p^c. Two things are measured: how many loads a level of
the loss takes, and the mean over steps of |grad F|^2, which the theorem bounds. Every number is at
the best of many constant rates. On quadratics with additive noise the second moments follow a
linear recursion, so that nothing is drawn. Least squares without noise at the optimum, regularised
softmax regression on digits and logistic regression on HMDA are trained, under the plans of
`ordering.echo` and `local_opt`. docs/results/echo_theory.md explains the tables.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from absl import flags

from experiments import entry
from experiments.compare import flags as dialect
from experiments.data.base import COUNT, FACTOR

RATES = 1.7 ** np.arange(-9.0, 7)  # of a problem's own rate
LEVELS = 10.0 ** -np.arange(0.5, 4.01, 0.5)  # of the loss above the optimum at the start
COINS = ("per load", "every step", "algorithm 2", "own coins, every step", "own coins")
FINE_RATES = 0.25 * 1.4 ** np.arange(-20.0, 7)  # of the quadratic
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
NOISY_WORKERS = (1, 16, 256)  # of the quadratic's mean |grad F|^2
BOUND = -0.5  # the theorem's exponent of T and W
WITHIN = 0.1  # of BOUND: the exponent of a doubling that counts as the theorem's
EQUAL_LOADS = 128  # where shares are compared
EXACT_LOADS = (4, 16, 64, 256, 1024)  # on the quadratic
CURVATURES = np.geomspace(1.0, 0.05, 16)  # of the quadratic


def moments(
    p: np.ndarray, workers: np.ndarray, steps: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(loss, |grad F|^2), each float64[P, W, rates], of a quadratic after 0, 1, ... steps, exactly.

    x' = x - eta (lambda x + xi), where xi ~ N(0, 1 / W) is drawn anew with probability p. Both are
    shares of what they are at the start.
    """
    p = np.reshape(p, (-1, 1, 1, 1))
    noise = 1 / np.reshape(workers, (1, -1, 1, 1))
    rate = FINE_RATES[:, None]
    kept = 1 - rate * CURVATURES
    square, product = np.ones(np.broadcast_shapes(p.shape, noise.shape, kept.shape)), 0.0
    weights = np.stack([CURVATURES, CURVATURES**2], axis=1)
    weights /= weights.sum(0)
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(steps + 1):
            if t:
                square = kept**2 * square - 2 * rate * kept * product + rate**2 * noise
                product = (1 - p) * (kept * product - rate * noise)
            means = square @ weights
            means = np.where(np.isfinite(means), means, np.inf)
            yield means[..., 0], means[..., 1]


def mean_squares(shares: tuple, workers: tuple, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(T int[K], mean over T steps of |grad F|^2 at the best rate float64[K, P, W]), exactly."""
    times = np.unique(np.rint(2 ** np.arange(0, np.log2(steps) + 0.1, 0.25)).astype(int))
    total, means = 0.0, []
    for t, (_, square) in enumerate(moments(np.array(shares), np.array(workers), steps), 1):
        total = total + square
        if t in times:
            means.append(np.min(total, axis=-1) / t)
    return times, np.array(means)


def burn_in(times: np.ndarray, values: np.ndarray) -> float:
    """From which T on every doubling has the theorem's exponent, within WITHIN.

    inf if these are fewer than two doublings.
    """
    if len(times) < 3:
        return np.inf
    logs = np.interp(np.log(2 * times), np.log(times), np.log(values), right=np.nan)
    off = np.abs((logs - np.log(values)) / np.log(2) - BOUND) > WITHIN  # false beyond the last
    at = 1 + np.flatnonzero(off).max() if off.any() else 0
    return float(times[at]) if 4 * times[min(at, len(times) - 1)] <= times[-1] else np.inf


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


def regression(rate: float, *setting, **choices) -> Problem:
    """A regression whose gradients keep their noise."""
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree

    import models
    from experiments.compare import recipes

    task, _ = recipes.load(*setting, **choices)
    init, tree_of = ravel_pytree(task.model.init(jax.random.key(0)))

    def loss(x, batch):
        return jnp.mean(task.model.loss(tree_of(x), batch, None))

    least = models.optimum(task.model, task.train)
    return Problem(task.train, np.asarray(init), loss, least, 4, rate)


PROBLEMS = {
    "interpolated": lambda _: interpolated(),
    "softmax": lambda _: regression(0.5, "digits"),
    "hmda": lambda folder: regression(0.2, "hmda", folder, num_train=2**14),
}


@functools.cache
def problem_of(name: str, data_dir: str | None = None) -> Problem:
    return PROBLEMS[name](data_dir)


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
def programs(name: str, workers: int, data_dir: str | None = None) -> tuple[Callable, Callable]:
    """(`(x, t0, t1, rates, keys, batches, ends) -> x`, `x -> (losses, squares)`) of all runs."""
    import jax
    import jax.numpy as jnp
    import optax

    import local_opt

    problem = problem_of(name, data_dir)
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
    def measures(x):
        mean = jnp.mean(x, axis=2)  # over workers
        flat = mean.reshape(-1, mean.shape[-1])
        of = jax.value_and_grad(problem.loss)
        losses, grads = jax.lax.map(lambda x: of(x, examples), flat, batch_size=32)
        squares = jnp.sum(grads**2, axis=-1)
        return tuple(v.reshape(mean.shape[:2]) for v in (losses - problem.optimum, squares))

    return advance, measures


def times_of(steps: int) -> np.ndarray:
    """Where runs are measured: 0, powers of 1.1, and powers of 2."""
    powers = [1.1 ** np.arange(np.log(steps) / np.log(1.1) + 1), 2 ** np.arange(np.log2(steps) + 1)]
    times = np.unique(np.rint(np.concatenate(powers)).astype(int))
    return np.append(0, times[times <= steps])


def trained_rows(
    name: str,
    coins: str,
    p: float,
    workers: int,
    steps: int,
    seeds: int,
    data_dir: str | None = None,
) -> list[dict]:
    """Rows of levels and of squares by seed; the best rate is that of the mean over seeds."""
    import jax
    import jax.numpy as jnp

    problem = problem_of(name, data_dir)
    made = [decisions(coins, p, workers, steps, seed) for seed in range(seeds)]
    batches, ends = (jnp.asarray(np.stack(of, 1)) for of in zip(*made, strict=True))
    keys = jax.random.split(jax.random.key(1), seeds)
    rates = jnp.asarray(problem.rate * RATES, jnp.float32)
    advance, measures = programs(name, workers, data_dir)
    x = jnp.broadcast_to(problem.init, (len(rates), seeds, workers, len(problem.init)))
    times = times_of(steps)
    curves = [measures(x)]
    for t0, t1 in itertools.pairwise(times):
        x = advance(x, t0, t1, rates, keys, batches, ends)
        curves.append(measures(x))
    curve, squares = (np.array(of, np.float64) for of in zip(*curves, strict=True))
    loads = np.cumsum(np.diff(np.array(batches), axis=0, prepend=-1) > 0, 0)[..., 0]
    rounds = np.cumsum(np.array(ends), 0)
    common = {"problem": name, "coins": coins, "p": p, "workers": workers}
    rows = _rows(common, times, curve / curve[0].mean(), loads, rounds)
    return rows + _square_rows(common, times, squares)


def _square_rows(common, times, squares) -> list[dict]:
    """Rows of the mean over T steps of |grad F|^2, by the trapezoidal rule, for powers T of 2."""
    squares, rows = np.where(np.isfinite(squares), squares, np.inf), []
    widths = np.diff(times)[:, None, None]
    with np.errstate(invalid="ignore"):
        total = np.cumsum((squares[1:] + squares[:-1]) / 2 * widths, 0)
    for k in range(3, int(np.log2(times[-1])) + 1):
        at = total[np.flatnonzero(times == 2**k)[0] - 1] / 2**k
        best = int(np.argmin(at.mean(1)))
        rows += [
            common
            | {"T": 2**k, "seed": seed, "square": float(value), "rate": float(RATES[best])}
            | {"edge": best in (0, len(RATES) - 1)}
            for seed, value in enumerate(at[best])
        ]
    return rows


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


def jobs(problems, shares, workers, base: int) -> list[tuple]:
    """(problem, coins, p, W) of all runs that are trained."""
    over_p = itertools.product(problems, COINS, shares, [base])
    over_w = itertools.product(problems, COINS[:3], shares[:: max(1, len(shares) - 1)], workers)
    return [*dict.fromkeys([*over_p, *over_w])]


def base_of(workers) -> int:
    """The number of workers at which shares are compared."""
    return 4 if 4 in workers else max(workers)


def slopes(table, over: str, of: str) -> np.ndarray:
    """The exponents of `of` over `over`, fitted on logarithms, by seed; none of under 3 points."""
    fits = []
    for _, group in table.groupby("seed"):
        points = group.sort_values(over)
        if len(points) >= 3:
            fits.append(np.polyfit(np.log(points[over]), np.log(points[of]), 1)[0])
    return np.array(fits)


def exact_tables(shares=SHARES, steps: int = 2**14) -> dict[str, str]:
    """Exponents of the quadratic, of which nothing is drawn."""
    from experiments.report import tables

    times, means = mean_squares(tuple(shares), NOISY_WORKERS, steps)
    return {
        "squares": tables.markdown(_exponents(shares, times, means)),
        "loads": tables.markdown(_equal_loads(shares, times, means)),
    }


def _slope(x, y) -> str:
    """The exponent of y over x, if all y are finite."""
    return f"{np.polyfit(np.log(x), np.log(y), 1)[0]:.2f}" if np.isfinite(y).all() else "-"


def _exponents(shares, times, means) -> list[dict]:
    """Exponents of the mean |grad F|^2 over T and W, and where T's begins."""
    half, rows = int(np.argmin(np.abs(times - times[-1] / 2))), []
    of_workers = [*enumerate(NOISY_WORKERS)]
    for a, p in enumerate(shares):
        row = {"p": f"{p:g}"}
        row |= {
            f"T, W = {w}": _slope(times[[half, -1]], means[[half, -1], a, b]) for b, w in of_workers
        }
        row |= {f"from T, W = {w}": f"{burn_in(times, means[:, a, b]):.0f}" for b, w in of_workers}
        row["W"] = _slope(NOISY_WORKERS, means[-1, a])
        row["over p = 1, W = 16"] = f"{means[-1, a, 1] / means[-1, 0, 1]:.2f}"
        rows.append(row | {"√(2 / p - 1)": f"{np.sqrt(2 / p - 1):.2f}"})
    return rows


def _equal_loads(shares, times, means) -> list[dict]:
    """The exponent of the mean |grad F|^2 over p, where all shares have had as many loads."""
    rows = []
    for b, w in enumerate(NOISY_WORKERS):
        row = {"workers": w}
        for loads in EXACT_LOADS:
            at = [np.flatnonzero(times == loads / p) for p in shares]
            whole = all(map(len, at))
            values = [means[k[0], a, b] for a, k in enumerate(at)] if whole else [np.inf]
            row[f"{loads} loads"] = _slope(shares, values) if whole else "-"
        rows.append(row)
    return rows


def trained_tables(rows: Iterable[dict]) -> dict[str, str]:
    """Exponents of the trained problems, with 95 % intervals over seeds."""
    import pandas as pd

    from experiments.report import tables

    table = pd.DataFrame(rows)
    return {"trained": tables.markdown(trained_exponents(table, base_of({*table.workers})))}


def trained_exponents(table, base: int) -> list[dict]:
    """Exponents of the mean |grad F|^2 over T, W and p, and of loads to a level over p."""
    from experiments.report import tables

    levels, table = table[table.level.notna()], table[table.square.notna()]
    made, most, ends = [], table["T"].max(), (1.0, table.p.min())

    def exponent(part, over, of="square"):
        return tables.show(slopes(part, over, of), "{:+.2f}")

    for (problem, coins), of in table.groupby(["problem", "coins"]):
        at, row = of[of.workers == base], {"problem": problem, "coins": coins}
        for p in ends:
            part = at[at.p == p]
            row[f"T, p = {p:g}"] = exponent(part[most / 8 <= part["T"]], "T")
            means = part.groupby("T").square.mean()
            begin = burn_in(means.index.to_numpy(), means.to_numpy())
            row[f"from T, p = {p:g}"] = f"{begin:.0f}" if np.isfinite(begin) else "-"
        for p in ends:
            row[f"W, p = {p:g}"] = exponent(of[(of.p == p) & (of["T"] == most)], "workers")
        row["p, equal T"] = exponent(at[at["T"] == most], "p")
        row["p, equal loads"] = exponent(at[np.isclose(at["T"] * at.p, EQUAL_LOADS)], "p")
        part = levels[(levels.problem == problem) & (levels.coins == coins)]
        part = part[(part.workers == base) & np.isclose(part.level, 0.1)]
        made.append(row | {"p, loads to 0.1": exponent(part, "p", "loads")})
    return made


def define_flags(values: flags.FlagValues) -> None:
    with dialect.shown(values):
        usual = ["interpolated", "softmax"]
        each = flags.EnumParser([*PROBLEMS])
        dialect.define_list(values, each, "problems", usual, "what is trained")
        flags.DEFINE_string("data_dir", None, "where the data of hmda lie", values)
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
        rows, base = [], base_of(values.workers)
        for name in values.problems:  # missing data are refused before the first run
            problem_of(name, values.data_dir)
        listed = jobs(values.problems, values.shares, values.workers, base)
        for job in listed[values.part - 1 :: values.of]:
            rows += trained_rows(*job, values.steps, values.seeds, values.data_dir)
            records.rewrite(folder, rows)
            print(job, flush=True)
        texts = {f"table_{name}.md": text for name, text in trained_tables(rows).items()}
        exact = exact_tables(values.shares)
        texts |= {f"table_exact_{name}.md": text for name, text in exact.items()}
        print(page.write_all(folder, "The theory of echoing", texts))
        print(f"\nWritten to {folder}")


if __name__ == "__main__":
    entry.main(define_flags, main)
