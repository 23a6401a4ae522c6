r"""Herding of static vectors: how far partial sums stray under each order, round after round.

    python -m experiments.herding                             # 10^6 vectors, W = 5 .. 100
    python -m experiments.herding --num_vectors=16384 --workers=1 --dimension=256 --norm=2

Balances random vectors of norm 1 (Gaussian directions), centred per worker, and prints the
parallel herding bound of every order after --rounds rounds. Cooper et al. 2023 published, for 10^6
vectors of dimension 16 after 15 rounds, L-infinity, W = 5, 10, 20, 50, 100: CD-GraB about 2.3 to
2.6 throughout, independent mean 4.3, 5.8, 8.5, 12.5, 17.7, independent pair 6, 8.5, 11.8, 17.5,
24, D-RR 350 to 400.
"""

import functools
import itertools
import os
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from absl import app, flags
from tqdm import tqdm

import local_opt
import ordering
from experiments.cluster import files
from experiments.results import plots, records, report, tables
from experiments.study.flags import definer, names_of, whole_numbers
from experiments.study.tables import ORDERS
from experiments.training.config import OrderSetting

FLAGS = flags.FLAGS
NORMS = {"inf": jnp.inf, "2": 2}


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define, integer, names = definer(values), flags.DEFINE_integer, flags.DEFINE_list
    define(integer, "num_vectors", 1_000_000, "over all workers", lower_bound=1)
    define(integer, "dimension", 16, "of a vector", lower_bound=1)
    define(integer, "rounds", 15, "passes over the vectors", lower_bound=1)
    define(integer, "seeds", 1, "draws of the vectors and first orders", lower_bound=1)
    define(names, "workers", ["5", "10", "20", "50", "100"], "numbers of workers")
    define(
        names, "arms", ["rr", "id_mean", "id_pair", "cd_grab"], f"orders, of {', '.join(ORDERS)}"
    )
    define(flags.DEFINE_enum, "norm", "inf", "of the bound", list(NORMS))
    define(flags.DEFINE_string, "output_dir", "results/herding", "gets what is written")


def unit_vectors(num_workers: int, num_units: int, dimension: int, seed: int) -> jax.Array:
    """float32[W, M, D]: Gaussian directions of norm 1, then centred per worker."""
    key = jax.random.fold_in(jax.random.key(seed), 0)
    vectors = jax.random.normal(key, (num_workers, num_units, dimension))
    vectors = vectors / jnp.linalg.norm(vectors, axis=2, keepdims=True)
    return vectors - jnp.mean(vectors, axis=1, keepdims=True)


def bounds_over_rounds(
    vectors: jax.Array, order_name: str, *, rounds: int, norm: float, seed: int
) -> list[float]:
    """Parallel herding bounds of the first order and of that after every round, of [W, M, D]."""
    num_workers, num_units, dimension = vectors.shape
    # Steps of about 16 units in all keep the loop short without large Gram matrices.
    units_per_step = min(max(2, 16 // num_workers * 2), num_units)
    setting = OrderSetting(num_units, units_per_step, num_workers, rounds)
    order = ORDERS[order_name].make(setting)

    def init(key):
        return order.init(key, jnp.zeros(dimension))

    def one_round(state, vectors):
        def step(state, start, size):
            units = jax.lax.dynamic_slice_in_dim(state.current, start, size)
            return order.observe(state, ordering.Rows.of(vectors[units]))

        whole = num_units // units_per_step * units_per_step
        starts = jnp.arange(0, whole, units_per_step)
        state, _ = jax.lax.scan(lambda s, t: (step(s, t, units_per_step), None), state, starts)
        if whole < num_units:
            state = step(state, whole, num_units - whole)
        return order.next_epoch(state)

    def over(function, inputs):
        return local_opt.lift(function, num_workers, inputs=inputs, outputs="owned")

    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), num_workers)
    state = jax.jit(over(init, "owned"))(keys)
    run = jax.jit(over(one_round, "owned owned"), donate_argnums=0)
    bound = jax.jit(lambda v, o: ordering.parallel_herding_bound(v, o, norm=norm))
    found = [float(bound(vectors, state.current))]
    for _ in range(rounds):
        state = run(state, vectors)
        found.append(float(bound(vectors, state.current)))
    return found


def measure(values: flags.FlagValues, worker_counts: Sequence[int]) -> Iterator[list[dict]]:
    """The records of every run: a bound per round."""
    runs = list(itertools.product(worker_counts, range(values.seeds), values.arms))
    drawn = functools.lru_cache(1)(unit_vectors)
    with tqdm(runs, unit="run") as bar:
        for workers, seed, name in bar:
            bar.set_description(f"{ORDERS[name].label}, W = {workers}")
            vectors = drawn(workers, values.num_vectors // workers, values.dimension, seed)
            start = time.perf_counter()
            bounds = bounds_over_rounds(
                vectors, name, rounds=values.rounds, norm=NORMS[values.norm], seed=seed
            )
            seconds = time.perf_counter() - start
            bar.set_postfix(bound=f"{bounds[-1]:.2f}", seconds=f"{seconds:.1f}")
            run = {"order": name, "workers": workers, "seed": seed, "seconds": seconds}
            yield [run | {"round": k, "bound": b} for k, b in enumerate(bounds)]


def table(all_records: Sequence[dict], rounds: int) -> str:
    """Markdown: the bound after the last round, an order a row, a number of workers a column."""
    bounds = {}
    for r in sorted(all_records, key=lambda r: r["workers"]):
        if r["round"] == rounds:
            own = bounds.setdefault(ORDERS[r["order"]].label, {})
            own.setdefault(f"W = {r['workers']}", []).append(r["bound"])
    return tables.markdown([
        {"order": label} | {head: tables.show(found, "{:.2f}") for head, found in own.items()}
        for label, own in bounds.items()
    ])  # fmt: skip


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    names_of(values, "arms", ORDERS)
    folder, all_records = values.output_dir, []
    settings = {k: values[k].value for k in ("num_vectors", "dimension", "rounds", "norm")}
    records.open_folder(folder, settings, overwrite=True)
    for run in measure(values, whole_numbers(values, "workers")):
        all_records += run
        records.write_lines(os.path.join(folder, records.METRICS), all_records)
    text = table(all_records, values.rounds)
    files.write_whole(os.path.join(folder, "table.md"), text + "\n")
    title = f"{values.num_vectors:,} unit vectors, d = {values.dimension}"
    labels, path = {n: ORDERS[n].label for n in values.arms}, os.path.join(folder, "herding.png")
    plots.herding(all_records, labels, path, title, values.norm)
    report.write_page(folder, title)
    print(text)
    total = sum(r["seconds"] for r in all_records if r["round"] == 0)
    print(f"\n{total:.0f} s of work. Written to {folder}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
