r"""Measures the rates of CD-GraB's theorems: slopes over epochs T, workers m and examples n.

    python -m experiments.order_rates  # five problems and static vectors, with seeds: minutes

One example per worker and step, m workers with n examples each, orders of `ordering`, and the best
of many constant rates for every T. Cooper et al. 2023 bound two measures, as summaries say. For
smooth losses the mean over epochs of |grad F|^2 is O((m n T)^(-2/3)). With the PL condition the
last loss above the optimum is O((m n T)^(-2)), up to logarithms. Random reshuffling has
T^(-2/3) n^(-1/3) and T^(-2) n^(-1). docs/results/order_rates.md has the tables.
"""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from absl import flags

from experiments import entry
from experiments.compare import flags as dialect
from experiments.data.base import COUNT

RATES = 1.5 ** np.arange(-13.0, 5)  # of a problem's own rate
ORDERS = ("rr", "id_pair", "cd_grab")
MEASURES = {"square": "mean square of the gradient", "above": "last loss above the optimum"}
THEORY = {"square": -2 / 3, "above": -2.0}  # the exponent of T
SIZE = 16  # entries of the parameters of the problems that are drawn
NOISE = 1.0  # of the targets of the regressions
NEAR, FAR = 0.5, 2.0  # distances of the robust regression's start from a minimum
WITHIN = {"square": 0.15, "above": 0.2}  # of THEORY, a doubling of T counts as the theorem's


class Problem(NamedTuple):
    """Examples with leaves [m, n, ...], and a loss of one of them."""

    examples: dict
    init: np.ndarray
    loss: Callable  # (x, example) -> float
    optimum: float | None  # of the mean loss, None if it is not known
    rate: float  # that RATES multiply


def regression(seed: int, m: int, n: int) -> Problem:
    """Least squares with noise in the targets, which fulfils the PL condition."""
    draws = np.random.default_rng(seed)
    a = draws.standard_normal((m, n, SIZE))
    b = a @ np.ones(SIZE) + NOISE * draws.standard_normal((m, n))
    rows, targets = a.reshape(-1, SIZE), b.reshape(-1)
    best = np.linalg.lstsq(rows, targets, rcond=None)[0]
    optimum = float(np.mean((rows @ best - targets) ** 2) / 2)
    examples = {"a": a.astype(np.float32), "b": b.astype(np.float32)}
    return Problem(
        examples,
        np.zeros(SIZE, np.float32),
        lambda x, e: (e["a"] @ x - e["b"]) ** 2 / 2,
        optimum,
        0.1,
    )


@functools.cache
def first_digits(number: int):
    """(task, minimum of its loss) of the first digits alone."""
    import models
    from experiments.compare import recipes
    from experiments.data import base

    task = base.with_first(recipes.load("digits")[0], num_train=number)
    return task, models.optimum(task.model, task.train)


def digits(seed: int, m: int, n: int) -> Problem:
    """Regularised softmax regression on the first m n digits, dealt by the seed."""
    import jax
    from jax.flatten_util import ravel_pytree

    task, optimum = first_digits(m * n)
    permuted = np.random.default_rng(seed).permutation(m * n)
    chosen = jax.tree.map(lambda leaf: leaf[permuted], task.train)
    init, tree_of = ravel_pytree(task.model.init(jax.random.key(0)))

    def loss(x, e):
        return task.model.loss(tree_of(x), jax.tree.map(lambda leaf: leaf[None], e), None)[0]

    examples = jax.tree.map(lambda leaf: leaf.reshape(m, n, *leaf.shape[1:]), chosen)
    return Problem(examples, np.asarray(init), loss, optimum, 0.5)


def robust(seed: int, m: int, n: int, distance: float = NEAR) -> Problem:
    """Regression with the loss r^2 / (2 + 2 r^2), which is smooth and bounded: no PL condition.

    It starts at a distance from the minimum that descent from the true parameters leads to.
    """
    draws = np.random.default_rng(seed)
    a = draws.standard_normal((m, n, SIZE))
    b = a @ np.ones(SIZE) + NOISE * draws.standard_normal((m, n))
    x, rows, targets = np.ones(SIZE), a.reshape(-1, SIZE), b.reshape(-1)
    for _ in range(4000):
        residuals = rows @ x - targets
        x = x - 0.5 * (residuals / (1 + residuals**2) ** 2) @ rows / len(rows)
    away = draws.standard_normal(SIZE)
    start = x + distance * away / np.linalg.norm(away)

    def loss(x, e):
        square = (e["a"] @ x - e["b"]) ** 2
        return square / (2 + 2 * square)

    examples = {"a": a.astype(np.float32), "b": b.astype(np.float32)}
    return Problem(examples, start.astype(np.float32), loss, None, 0.5)


def perceptron(seed: int, m: int, n: int, warm: int = 300) -> Problem:
    """Eight tanh units on the first m n digits with a penalty, after steps of full gradients."""
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree

    task, _ = first_digits(m * n)
    permuted = np.random.default_rng(seed).permutation(m * n)
    flat = {k: np.asarray(v)[permuted].reshape(m * n, -1) for k, v in task.train.items()}
    keys, size = jax.random.split(jax.random.key(0)), flat["x"].shape[1]
    init, tree_of = ravel_pytree(
        {
            "into": jax.random.normal(keys[0], (size, 8)) / np.sqrt(size),
            "out": jax.random.normal(keys[1], (8, 10)) / np.sqrt(8),
        }
    )

    def loss(x, e):
        tree = tree_of(x)
        logits = jnp.tanh(e["x"].reshape(-1) @ tree["into"]) @ tree["out"]
        return -jax.nn.log_softmax(logits)[e["y"].reshape(())] + 5e-3 * jnp.sum(x**2)

    mean = jax.grad(lambda x: jnp.mean(jax.vmap(loss, (None, 0))(x, flat)))
    start = jax.jit(lambda x: jax.lax.fori_loop(0, warm, lambda _, x: x - 0.5 * mean(x), x))(init)
    examples = {k: v.reshape(m, n, *v.shape[1:]) for k, v in flat.items()}
    return Problem(examples, np.asarray(start), loss, None, 0.5)


def static(seed: int, m: int, n: int) -> Problem:
    """Vectors of norm 1, centred per worker, which no step changes: of the herding bound alone."""
    vectors = np.random.default_rng(seed).standard_normal((m, n, SIZE))
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    vectors -= vectors.mean(1, keepdims=True)
    return Problem(
        {"a": vectors.astype(np.float32)},
        np.zeros(SIZE, np.float32),
        lambda x, e: e["a"] @ x,
        None,
        0.0,
    )


PROBLEMS = {
    "regression": regression,
    "digits": digits,
    "robust": robust,
    "robust_far": functools.partial(robust, distance=FAR),
    "perceptron": perceptron,
    "static": static,
}


def order_of(name: str, n: int):
    import ordering

    if name == "rr":
        return ordering.random_reshuffling(n)
    return {"id_pair": ordering.pair_balance, "cd_grab": ordering.cd_grab}[name](n)


def trained(problems: list[Problem], name: str, epochs: int, rates: np.ndarray):
    """(losses, squares float64[T + 1, rates, seeds], orders int32[seeds, m, n] of the last epoch).

    Losses are means over all examples at the start of epochs, squares those of their gradient.
    """
    import jax
    import jax.numpy as jnp

    loss = problems[0].loss
    examples = jax.tree.map(
        lambda *leaves: jnp.asarray(np.stack(leaves)), *(p.examples for p in problems)
    )
    m, n = jax.tree.leaves(examples)[0].shape[1:3]
    init = jnp.asarray(np.stack([p.init for p in problems]))
    order, observes = order_of(name, n), name != "rr"

    def start(key):
        return order.init(key, jnp.zeros(init.shape[1]))

    def step(state, x, mine, t):
        unit = state.current[t]
        gradient = jax.grad(loss)(x, jax.tree.map(lambda leaf: leaf[unit], mine))
        state = order.observe(state, gradient[None]) if observes else state
        return state, jax.lax.pmean(gradient, "worker")

    def epoch(x, states, examples, rate):
        def body(t, carry):
            x, states = carry
            over = jax.vmap(step, (0, None, 0, None), (0, None), axis_name="worker")
            states, gradient = over(states, x, examples, t)
            return x - rate * gradient, states

        x, states = jax.lax.fori_loop(0, n, body, (x, states))
        return x, jax.vmap(order.next_epoch, axis_name="worker")(states)

    def value(x, examples):
        mean = lambda x: jnp.mean(jax.vmap(jax.vmap(lambda e: loss(x, e)))(examples))  # noqa: E731
        result, gradient = jax.value_and_grad(mean)(x)
        return result, jnp.sum(gradient**2)

    over = lambda f, *axes: jax.vmap(jax.vmap(f, axes[0]), axes[1])  # noqa: E731
    run = jax.jit(over(epoch, (0, 0, 0, None), (0, 0, None, 0)))
    values = jax.jit(over(value, (0, 0), (0, None)))
    keys = jnp.stack([jax.random.split(jax.random.key(seed), m) for seed in range(len(problems))])
    begin = jax.jit(jax.vmap(jax.vmap(start, axis_name="worker")))(keys)
    states = jax.tree.map(lambda s: jnp.broadcast_to(s, (len(rates), *s.shape)), begin)
    x = jnp.broadcast_to(init, (len(rates), *init.shape))
    curve = [values(x, examples)]
    for _ in range(epochs):
        x, states = run(x, states, examples, jnp.asarray(rates, jnp.float32))
        curve.append(values(x, examples))
    losses, squares = (np.array(of, np.float64) for of in zip(*curve, strict=True))
    return losses, squares, np.asarray(states.current[0])


def rows_of(kind: str, name: str, m: int, n: int, epochs: int, seeds: int) -> list[dict]:
    """{problem, order, m, n, T, seed, square, above} at the best rate of every T, or the bound."""
    import ordering

    problems = [PROBLEMS[kind](seed, m, n) for seed in range(seeds)]
    common = {"problem": kind, "order": name, "m": m, "n": n}
    if kind == "static":
        current = trained(problems, name, epochs, np.zeros(1))[2]
        return [
            common
            | {"T": epochs, "seed": seed}
            | {"bound": float(ordering.baselines.herding_bound(p.examples["a"], order))}
            for seed, (p, order) in enumerate(zip(problems, current, strict=True))
        ]
    rates = problems[0].rate * RATES
    losses, squares, _ = trained(problems, name, epochs, rates)
    measures = {"square": np.cumsum(squares[:-1], 0) / np.arange(1, epochs + 1)[:, None, None]}
    if problems[0].optimum is not None:
        measures["above"] = losses[1:] - np.array([p.optimum for p in problems])
    rows = []
    for measure, values in measures.items():
        values = np.where(np.isfinite(values), values, np.inf)
        for k in range(2, int(np.log2(epochs)) + 1):
            at = values[2**k - 1]
            best = int(np.argmin(at.mean(1)))
            rows += [
                common
                | {"T": 2**k, "seed": seed, "measure": measure, "value": float(value)}
                | {"rate": float(RATES[best]), "edge": best in (0, len(RATES) - 1)}
                for seed, value in enumerate(at[best])
            ]
    return rows


def jobs(toy: bool, problems: Iterable[str] = tuple(PROBLEMS)) -> list[tuple]:
    """(problem, order, m, n, T), the base point first."""
    if toy:
        sizes = {kind: [(2, 4, 8)] for kind in PROBLEMS}
    else:
        sizes = {
            "regression": [(8, 32, 128), *((m, 32, 32) for m in (2, 4, 16, 32))]
            + [(8, n, 32) for n in (8, 16, 64)],
            "static": [(m, 256, 10) for m in (2, 4, 8, 16, 32, 64)],
            "digits": [(16, 24, 64), (4, 24, 16), (64, 24, 16)]
            + [(16, n, 16) for n in (12, 48, 80)],
            "robust": [(4, 16, 1024), (2, 16, 256), (8, 16, 256), (4, 8, 256), (4, 32, 256)],
            "robust_far": [(4, 16, 1024)],
            "perceptron": [(8, 32, 64), (4, 32, 16), (16, 32, 16), (8, 16, 16), (8, 64, 16)],
        }
    return [(kind, name, *of) for kind in problems for of in sizes[kind] for name in ORDERS]


def slope(table, over: str, of: str = "value") -> list[float]:
    """The exponents of `of` over `over`, fitted on logarithms, by seed; none of under 3 points."""
    parts = [part for _, part in table.groupby("seed") if len(part) >= 3]
    return [np.polyfit(np.log(part[over]), np.log(part[of]), 1)[0] for part in parts]


def begins(table, measure: str) -> str:
    """From which T on every doubling of T has the exponent of the theory, within WITHIN.

    The last loss may fall faster; the mean square does so where the order does not count yet.
    """
    means = table.groupby("T")["value"].apply(lambda v: np.log(v).mean())
    off = np.diff(means) / np.log(2) - THEORY[measure]
    slow = (np.abs(off) if measure == "square" else off) > WITHIN[measure]
    at = 1 + np.flatnonzero(slow).max() if slow.any() else 0
    return f"{means.index[at]}" if at < len(slow) else "never"


def slope_tables(rows: list[dict]) -> dict[str, str]:
    """Exponents with 95 % intervals over seeds, and the herding bounds."""
    import pandas as pd

    from experiments.report import tables

    table, made, bounds = pd.DataFrame(rows), [], []
    show = lambda values: tables.show(values, "{:+.2f}")  # noqa: E731
    for (problem, measure), of in table[table.measure.notna()].groupby(["problem", "measure"]):
        longest = of[of["T"] == of["T"].max()]
        m, n = longest.m.iloc[0], longest.n.iloc[0]
        fixed = of[(of.n == n) & (of.m != m)]["T"].max()
        for order in ORDERS:
            part = of[of.order == order]
            base = part[(part.m == m) & (part.n == n)]
            at = part[part["T"] == fixed]
            made.append(
                {
                    "problem": problem,
                    "what": MEASURES[measure],
                    "order": order,
                    "T": show(slope(base[base["T"] >= max(16, base["T"].max() / 8)], "T")),
                    "m": show(slope(at[at.n == n], "m")),
                    "n": show(slope(at[at.m == m], "n")),
                    "T's begins at": begins(base, measure),
                }
            )
    static = table[table.problem == "static"]
    for order, part in static.groupby("order"):
        row = {"order": order}
        for m, of in part.groupby("m"):
            row[f"m = {m}"] = tables.show(of.bound, "{:.2f}")
        bounds.append(row | {"exponent": show(slope(part, "m", "bound"))})
    return {k: tables.markdown(v) for k, v in {"slopes": made, "bounds": bounds}.items() if v}


def define_flags(values: flags.FlagValues) -> None:
    with dialect.shown(values):
        text = "repetitions of every run, each of other examples or another dealing"
        dialect.define_value(values, COUNT, "seeds", 5, text)
        each = flags.EnumParser([*PROBLEMS])
        dialect.define_list(values, each, "problems", [*PROBLEMS], "what is measured")
        flags.DEFINE_bool("toy", False, "tiny sizes, to see that it runs", values)
        dialect.define_value(values, COUNT, "of", 1, "parts of the runs")
        dialect.define_value(values, COUNT, "part", 1, "which of them is run")
    dialect.define(values, "output")


def main(values: flags.FlagValues) -> None:
    from experiments.report import page, records

    with page.opened("order_rates", values) as folder:
        rows, listed = [], jobs(values.toy, values.problems)
        for kind, name, m, n, epochs in listed[values.part - 1 :: values.of]:
            rows += rows_of(kind, name, m, n, epochs, values.seeds)
            records.rewrite(folder, rows)
            print(kind, name, m, n, flush=True)
        texts = {f"table_{name}.md": text for name, text in slope_tables(rows).items()}
        print(page.write_all(folder, "Rates of orders", texts))
        print(f"\nWritten to {folder}")


if __name__ == "__main__":
    entry.main(define_flags, main)
