r"""Measures herding bounds of static vectors under each order, round after round.

    python -m experiments.herding  # 10^6 vectors, W = 5 .. 100: four minutes
    python -m experiments.herding --arms=id_pair,cd_grab,cd_grab+sketch256+team16 --workers=64 \
        --num_vectors=8192 --dimension=256 --units_per_step=8 # teams that meet after 4 pairs each

Balances random vectors of norm 1 (Gaussian directions) in 16 dimensions, centred per worker, and
prints the L-infinity parallel herding bound of every order after --rounds rounds. Cooper et al.
2023 report, for 10^6 vectors after 15 rounds and W = 5, 10, 20, 50, 100: CD-GraB about 2.3 to 2.6
for all W; independent mean 4.3, 5.8, 8.5, 12.5, 17.7; independent pair 6, 8.5, 11.8, 17.5, 24;
D-RR 350 to 400.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

from absl import flags

from experiments import entry
from experiments.compare import flags as dialect
from experiments.compare.arms import row_of
from experiments.data.base import COUNT
from experiments.report import plots, tables
from experiments.trainer.config import OrderSetting
from syncopate.refusals import UserError

ARMS = ("rr", "id_mean", "id_pair", "cd_grab")
DIMENSION = 16


def define_flags(values: flags.FlagValues) -> None:
    with dialect.shown(values):
        text = "vectors over all workers"
        flags.DEFINE_integer("num_vectors", 1_000_000, text, 2, 10**8, values)
        flags.DEFINE_integer("rounds", 15, "passes over the vectors", 1, 10_000, values)
        workers = [5, 10, 20, 50, 100]
        dialect.define_list(values, COUNT, "workers", workers, "numbers of workers")
        dialect.define_list(values, dialect.RowParser("order"), "arms", [*ARMS], "orders")
        dialect.define_value(values, COUNT, "dimension", DIMENSION, "entries of a vector")
        text = "vectors of a worker in a step; about 16 over all workers"
        dialect.define_value(values, COUNT, "units_per_step", None, text)
    dialect.define(values, "output")


def unit_vectors(num_workers: int, num_units: int, dimension: int = DIMENSION):
    """float32[W, M, D]: Gaussian directions of norm 1, then centred per worker."""
    import jax
    import jax.numpy as jnp

    key = jax.random.fold_in(jax.random.key(0), 0)
    vectors = jax.random.normal(key, (num_workers, num_units, dimension))
    vectors = vectors / jnp.linalg.norm(vectors, axis=2, keepdims=True)
    return vectors - jnp.mean(vectors, axis=1, keepdims=True)


def bounds_over_rounds(
    vectors, order_name: str, rounds: int, units_per_step: int | None = None
) -> list[float]:
    """Parallel herding bounds of [W, M, D] under the first order and after every round."""
    import jax
    import jax.numpy as jnp

    import local_opt
    import ordering

    num_workers, num_units, dimension = vectors.shape
    # About 16 units per step keep the loop short without large Gram matrices.
    units_per_step = min(units_per_step or max(2, 16 // num_workers * 2), num_units)
    order = row_of("order", order_name).make(OrderSetting(num_units, units_per_step))

    def one_round(state, vectors):
        def step(state, start, size):
            units = jax.lax.dynamic_slice_in_dim(state.current, start, size)
            return order.observe(state, vectors[units])

        whole = num_units // units_per_step * units_per_step
        starts = jnp.arange(0, whole, units_per_step)
        state, _ = jax.lax.scan(lambda s, t: (step(s, t, units_per_step), None), state, starts)
        if whole < num_units:
            state = step(state, whole, num_units - whole)
        return order.next_epoch(state)

    over = functools.partial(local_opt.map_workers, workers=num_workers)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 1), num_workers)
    init = over(
        lambda key: order.init(key, jnp.zeros(dimension)), in_specs="worker", out_specs="worker"
    )
    run = jax.jit(over(one_round, in_specs="worker", out_specs="worker"), donate_argnums=0)
    bound = jax.jit(lambda v, o: ordering.baselines.herding_bound(v, o, norm=jnp.inf))
    state = jax.jit(init)(keys)
    bounds = [float(bound(vectors, state.current))]
    for _ in range(rounds):
        state = run(state, vectors)
        bounds.append(float(bound(vectors, state.current)))
    return bounds


def table(measured: Sequence[dict], labels: Mapping[str, str], rounds: int) -> str:
    """Markdown: the bound after the last round, one row per order, one column per W."""
    rows = {name: {"order": label} for name, label in labels.items()}
    for r in measured:
        if r["round"] == rounds:
            rows[r["order"]][f"W = {r['workers']}"] = f"{r['bound']:.2f}"
    return tables.markdown([*rows.values()])


def main(values: flags.FlagValues) -> None:
    if max(values.workers) > values.num_vectors // 2:
        raise UserError(
            f"--workers has {max(values.workers)}, and --num_vectors is {values.num_vectors}: each "
            "worker needs two vectors. Raise --num_vectors or lower --workers."
        )
    from experiments.report import page, records

    with page.opened("herding", values) as folder:
        labels = {name: row_of("order", name).label for name in values.arms}
        measured, title = measure(values, labels), f"{values.num_vectors:,} unit vectors"
        records.rewrite(folder, measured)
        parts = {
            "table_herding.md": table(measured, labels, values.rounds),
            "herding.png": functools.partial(plots.herding, measured, labels),
        }
        print(page.write_all(folder, title, parts))
        print(f"\nWritten to {folder}")


def measure(values: flags.FlagValues, arms: Iterable[str]) -> list[dict]:
    """{order, workers, round, bound} of these orders, for every number of workers."""
    from experiments import progress

    rows = []
    for workers, name in progress.bar(list(itertools.product(values.workers, arms)), unit="run"):
        vectors = unit_vectors(workers, values.num_vectors // workers, values.dimension)
        bounds = bounds_over_rounds(vectors, name, values.rounds, values.units_per_step)
        for k, bound in enumerate(bounds):
            rows.append({"order": name, "workers": workers, "round": k, "bound": bound})
    return rows


if __name__ == "__main__":
    entry.main(define_flags, main)
