"""Compares computed with measured seconds of syncs, on runs that others made.

    python -m benchmarks.measured_syncs --file=diloco_measured.csv

The file has one run per line: algorithm, H, workers, requested bits per second, tokens, and seconds
of computation and of waiting (docs/results/measured_syncs.md says where it is from). A cell is an
algorithm, an H and a link: the median of its runs. `utilisation` is the share of a run's time that
computes. `local_opt.costs.sync_seconds` computes the syncs: for a perfect network, and with an
efficiency and a latency that are fitted to some of the cells and compared with all others.
"""

import os
from collections.abc import Iterator

import numpy as np
import pandas as pd
from absl import app, flags
from scipy.optimize import nnls

from benchmarks import timing
from local_opt.costs import sync_seconds

PARAMETERS, CELL = 30_800_000, ["algorithm", "H", "requested_bps"]
# Which cells are fitted, fixed before the comparison: runs that synchronise in every step over all
# links, and two runs of one algorithm.
FITS = {
    "the eight cells of H = 1": lambda c: c.H == 1,
    "two: DiLoCo, H = 1, 0.2 and 5 Gb/s": lambda c: (
        (c.algorithm == "diloco") & (c.H == 1) & c.requested_bps.isin([2e8, 5e9])
    ),
    "two: DiLoCo, H = 8, 0.2 and 5 Gb/s": lambda c: (
        (c.algorithm == "diloco") & (c.H == 8) & c.requested_bps.isin([2e8, 5e9])
    ),
}


def cells_of(path: str) -> pd.DataFrame:
    """The cells of local steps over a shaped network, with measured seconds of a sync."""
    runs = pd.read_csv(path)
    runs = runs[runs.requested_bps.notna() & (runs.algorithm != "ddp")]
    tokens = runs.workers * runs.micro_batch * runs["sequence"]
    runs = runs.assign(syncs=(runs.tokens_per_s * runs.total_s / tokens).round() // runs.H)
    cells = runs.groupby(CELL, as_index=False).median(numeric_only=True)
    return cells.assign(measured=cells.sync_blocked_s / cells.syncs, perfect=seconds(cells))


def seconds(cells: pd.DataFrame, **network: float) -> np.ndarray:
    """Computed seconds of a sync in every cell."""
    given = zip(cells.workers, cells.requested_bps / 1e9, strict=True)
    return np.array(
        [sync_seconds(PARAMETERS, num_workers=int(w), gigabits=g, **network) for w, g in given]
    )


def fitted(cells: pd.DataFrame) -> dict[str, float]:
    """The efficiency and latency with the least squares of relative errors, latency >= 0."""
    columns = np.stack([cells.perfect, np.ones(len(cells))], 1) / cells.measured.to_numpy()[:, None]
    (slope, latency), _ = nnls(columns, np.ones(len(cells)))
    return {"efficiency": min(1.0, 1 / slope), "latency": latency}


def utilisation(cells: pd.DataFrame, sync) -> pd.Series:
    return cells.compute_s / (cells.compute_s + cells.syncs * sync)


def spread(ratios) -> str:
    return f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def rows(cells: pd.DataFrame) -> Iterator[dict]:
    """Each forecast divided by what was measured: median, least and largest of the cells."""

    def row(name, of, sync, used, text=""):
        ratio = (utilisation(cells, sync) if used is None else used) / cells.utilisation_measured
        times = "" if sync is None else spread((sync / cells.measured)[of])
        return {
            "computed by": name,
            "efficiency, latency": text,
            "cells": int(of.sum()),
            "seconds of a sync, times measured": times,
            "utilisation, times measured": spread(ratio[of]),
        }

    every = cells.H > 0
    yield row("their formula", every, None, cells.utilisation_their_formula)
    yield row("`sync_seconds`", every, cells.perfect, None, "1, 0")
    for name, which in FITS.items():
        network = fitted(cells[which(cells)])
        text = f"{network['efficiency']:.3f}, {1e3 * network['latency']:.1f} ms"
        yield row(f"fitted to {name}", ~which(cells), seconds(cells, **network), None, text)


def table(cells: pd.DataFrame) -> pd.DataFrame:
    """Utilisation of DiLoCo: measured, and by `sync_seconds` as it is and with H = 1 fitted.

    `beyond` is how many seconds longer a run waits than if all its syncs took as long as for H = 1.
    """
    network = fitted(cells[cells.H == 1])
    cells = cells[cells.algorithm == "diloco"].sort_values(["requested_bps", "H"])
    each = cells.requested_bps.map(cells[cells.H == 1].set_index("requested_bps").measured)
    return pd.DataFrame(
        {
            "Gb/s": cells.requested_bps / 1e9,
            "H": cells.H,
            "measured": cells.utilisation_measured,
            "computed": utilisation(cells, cells.perfect),
            "fitted": utilisation(cells, seconds(cells, **network)),
            "syncs": cells.syncs,
            "beyond": cells.sync_blocked_s - cells.syncs * each,
        }
    )


def draw(results: pd.DataFrame, path: str) -> None:
    """Utilisation over H: measured points, computed lines, a colour per link."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
    for number, (gigabits, cell) in enumerate(results.groupby("Gb/s")):
        color = f"C{number}"
        axes.plot(cell.H, cell.measured, "o", color=color, label=f"{gigabits:g} Gb/s, measured")
        axes.plot(cell.H, cell.computed, "-", color=color, label="computed")
        axes.plot(cell.H, cell.fitted, ":", color=color, label="fitted to H = 1")
    axes.set(xscale="log", yscale="log", xlabel="H (steps between syncs)", xticks=[1, 8, 32, 128])
    axes.set(ylabel="utilisation (share of the time that computes)", xticklabels=[1, 8, 32, 128])
    axes.legend(fontsize="x-small", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv):
    del argv
    cells, folder = cells_of(flags.FLAGS.file), flags.FLAGS.folder
    timing.print_rows(timing.saved(rows(cells), folder))
    results = table(cells)
    print(f"\n{results.to_string(index=False, float_format='{:.4f}'.format)}")
    if folder:
        draw(results, os.path.join(folder, "measured_syncs.png"))


if __name__ == "__main__":
    flags.DEFINE_string("file", None, "CSV of measured runs", required=True)
    flags.DEFINE_string("folder", None, "where rows.jsonl and measured_syncs.png are written")
    app.run(main)
