r"""Herding of static vectors: how far partial sums stray under each order, round after round.

    python -m experiments.herding                             # 10^6 vectors, W = 5 .. 100
    python -m experiments.herding --num_vectors=16384 --workers=1 --dimension=256 --norm=2

Balances random vectors of norm 1 (Gaussian directions), centred per worker, and prints the
parallel herding bound of every order after --rounds rounds. Cooper et al. 2023 published, for 10^6
vectors of dimension 16 after 15 rounds, L-infinity, W = 5, 10, 20, 50, 100: CD-GraB about 2.3 to
2.6 throughout, independent mean 4.3, 5.8, 8.5, 12.5, 17.7, independent pair 6, 8.5, 11.8, 17.5,
24, D-RR 350 to 400.
"""

import os
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

import ordering
from experiments import compare, html_report, plots, records
from experiments.methods import METHODS, Setting
from local_opt import runners

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_integer("num_vectors", 1_000_000, "over all workers", lower_bound=1)
    flags.DEFINE_integer("dimension", 16, "of a vector", lower_bound=1)
    flags.DEFINE_integer("rounds", 15, "passes over the vectors", lower_bound=1)
    flags.DEFINE_list("workers", ["5", "10", "20", "50", "100"], "numbers of workers")
    flags.DEFINE_list("orders", ["rr", "id_mean", "id_pair", "cd_grab"], "of experiments.methods")
    flags.DEFINE_integer("seeds", 1, "draws of the vectors and first orders", lower_bound=1)
    flags.DEFINE_enum("norm", "inf", ["inf", "2"], "of the bound")
    flags.DEFINE_string(
        "output_dir", "results/herding", "gets metrics.jsonl, table.md, herding.png"
    )


def unit_vectors(num_workers: int, num_units: int, dimension: int, seed: int) -> jax.Array:
    """float32[W, M, D]: Gaussian directions of norm 1, then centred per worker."""
    key = jax.random.fold_in(jax.random.key(seed), 0)
    vectors = jax.random.normal(key, (num_workers, num_units, dimension))
    vectors = vectors / jnp.linalg.norm(vectors, axis=2, keepdims=True)
    return vectors - jnp.mean(vectors, axis=1, keepdims=True)


def bounds_over_rounds(
    vectors: jax.Array, order_name: str, *, rounds: int, norm: float, seed: int
) -> list[float]:
    """Parallel herding bounds of the first order and of the order after every round.

    Args:
      vectors: float32[W, M, D]; order_name: of `METHODS`; rounds: passes; norm: jnp.inf or 2.
    """
    num_workers, num_units, dimension = vectors.shape
    # Steps of about 16 units in all keep the loop short without large Gram matrices.
    units_per_step = min(max(2, 16 // num_workers * 2), num_units)
    block_size = ordering.balance.default_block_size(-(-dimension // num_workers))
    setting = Setting(num_units, units_per_step, num_workers, rounds, block_size)
    order = METHODS[order_name].make(setting)

    def init(key):
        return (order.init(key, jnp.zeros(dimension)),)

    def one_round(state, vectors):
        def step(state, start, size):
            unit = jax.lax.dynamic_slice_in_dim(state.current, start, size)
            return order.observe(state, ordering.Rows.of(vectors[unit]))

        whole = num_units // units_per_step * units_per_step
        starts = jnp.arange(0, whole, units_per_step)
        state, _ = jax.lax.scan(lambda s, t: (step(s, t, units_per_step), None), state, starts)
        if whole < num_units:
            state = step(state, whole, num_units - whole)
        return (order.next_epoch(state),)

    simulate = runners.simulate
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), num_workers)
    (state,) = jax.jit(simulate(init, owned_in=(True,), owned_out=(True,)))(keys)
    run = jax.jit(simulate(one_round, owned_in=(True, True), owned_out=(True,)), donate_argnums=0)
    bound = jax.jit(lambda v, o: ordering.parallel_herding_bound(v, o, norm=norm))
    found = [float(bound(vectors, state.current))]
    for _ in range(rounds):
        (state,) = run(state, vectors)
        found.append(float(bound(vectors, state.current)))
    return found


def table(all_records: Sequence[dict], rounds: int) -> str:
    """Markdown: the bound after the last round, an order a row, a number of workers a column."""
    widths = sorted({r["workers"] for r in all_records})
    lines = ["| order | " + " | ".join(f"W = {w}" for w in widths) + " |"]
    lines.append("|" + "---|" * (len(widths) + 1))
    for name in dict.fromkeys(r["order"] for r in all_records):
        cells = [
            compare.show(compare.interval(_final(all_records, name, w, rounds)), "{:.2f}")
            for w in widths
        ]
        lines.append(f"| {METHODS[name].label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _final(all_records, name, num_workers, rounds):
    return [
        r["bound"]
        for r in all_records
        if (r["order"], r["workers"], r["round"]) == (name, num_workers, rounds)
    ]


def main(argv: Sequence[str]) -> None:
    del argv
    unknown = sorted(set(FLAGS.orders) - set(METHODS))
    if unknown:
        raise app.UsageError(f"--orders holds {unknown}: choose of {', '.join(METHODS)}.")
    norm = jnp.inf if FLAGS.norm == "inf" else 2
    settings = {k: FLAGS[k].value for k in ("num_vectors", "dimension", "rounds", "norm")}
    records.open_folder(FLAGS.output_dir, settings, overwrite=True)
    metrics = os.path.join(FLAGS.output_dir, "metrics.jsonl")
    worker_counts = [int(w) for w in FLAGS.workers]
    all_records = []
    with tqdm(total=len(worker_counts) * FLAGS.seeds * len(FLAGS.orders), unit="run") as bar:
        for num_workers in worker_counts:
            num_units = FLAGS.num_vectors // num_workers
            for seed in range(FLAGS.seeds):
                vectors = unit_vectors(num_workers, num_units, FLAGS.dimension, seed)
                for name in FLAGS.orders:
                    bar.set_description(f"{METHODS[name].label}, W = {num_workers}")
                    start = time.perf_counter()
                    found = bounds_over_rounds(
                        vectors, name, rounds=FLAGS.rounds, norm=norm, seed=seed
                    )
                    seconds = time.perf_counter() - start
                    run = {"order": name, "workers": num_workers, "seed": seed, "seconds": seconds}
                    all_records += [run | {"round": k, "bound": b} for k, b in enumerate(found)]
                    records.write_lines(metrics, all_records)
                    bar.set_postfix(bound=f"{found[-1]:.2f}", seconds=f"{seconds:.1f}")
                    bar.update()
    text = table(all_records, FLAGS.rounds)
    records.write_whole(os.path.join(FLAGS.output_dir, "table.md"), text + "\n")
    title = f"{FLAGS.num_vectors:,} unit vectors, d = {FLAGS.dimension}"
    plots.herding(all_records, os.path.join(FLAGS.output_dir, "herding.png"), title, FLAGS.norm)
    html_report.of_folder(FLAGS.output_dir, title=title, command=html_report.command_line())
    print(text)
    total = sum(r["seconds"] for r in all_records if r["round"] == 0)
    print(f"\n{np.round(total):.0f} s of work. Written to {FLAGS.output_dir}")


def run() -> None:
    define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
