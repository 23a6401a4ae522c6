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

import itertools
import os
from collections.abc import Mapping, Sequence

from absl import flags

from experiments import entry
from experiments.compare import flags as dialect
from experiments.data.base import COUNT, Real
from experiments.report import tables


def table(measured: Sequence[Mapping], name: str) -> str:
    """Markdown for one problem, a row per rule and number of workers.

    "off" is how far the measured mean lies above the limit. "drift" is the strength that explains
    the ends, relative to parallel SGD. Both are at the smallest rate.
    """
    from experiments.slow_drift import RULES

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
    from experiments.slow_drift import PROBLEMS, measure

    rates = sorted(values.rates, reverse=True)
    cells = list(itertools.product(PROBLEMS, values.workers, rates))
    with page.opened("slow_sde", values) as folder:
        measured = [r for cell in progress.bar(cells) for r in measure(*cell, values.repetitions)]
        records.write_lines(os.path.join(folder, records.METRICS), measured)
        texts = {f"table_{name}.md": f"### {name}\n\n{table(measured, name)}" for name in PROBLEMS}
        print(page.write_all(folder, "Drift of SGD in 4 / η² steps", texts, {}))
        print(f"\nWritten to {folder}")


if __name__ == "__main__":
    entry.main(define_flags, main)
