"""Methods x learning rates x seeds: from records to a table and a picture."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.methods import METHODS
from experiments.metrics import METRICS


class Curves(NamedTuple):
    """All seeds of one method at one learning rate, arrays [seeds, epochs + 1]; gaps are nan."""

    order: str
    learning_rate: float
    seeds: tuple
    epoch: np.ndarray
    seconds: np.ndarray
    values: dict  # name of a metric -> array


TEST_METRICS = tuple(f"test_{name}" for name in METRICS)
VALUES = ("train_loss", "suboptimality", *TEST_METRICS, "bound_linf", "bound_l2")


def gather(records: Sequence[dict]) -> list[Curves]:
    """Groups records by method and learning rate; every run must have the same epochs.

    A learning rate at which a run of the method diverged is out for it.
    """
    runs, out = {}, diverged(records)
    for record in records:
        if (record["order"], record["learning_rate"]) in out:
            continue
        key = (record["order"], record["learning_rate"])
        runs.setdefault(key, {}).setdefault(record["seed"], []).append(record)
    curves = []
    for (order, rate), by_seed in runs.items():
        seeds = tuple(sorted(by_seed))
        rows = [sorted(by_seed[s], key=lambda r: r["epoch"]) for s in seeds]

        def column(name, rows=rows):
            return np.array([[r.get(name, math.nan) for r in row] for row in rows], float)

        values = {name: column(name) for name in VALUES}
        values = {name: v for name, v in values.items() if not np.isnan(v).all()}
        curves.append(Curves(order, rate, seeds, column("epoch")[0], column("seconds"), values))
    return curves


def diverged(records: Sequence[dict]) -> list[tuple[str, float]]:
    """(order, learning rate) of all methods that had a run with a loss that was not finite."""
    return sorted({(r["order"], r["learning_rate"]) for r in records if r.get("diverged")})


def interval(values) -> tuple[float, float]:
    """Mean and half width of the 95 % interval (Student's t) over seeds; nan for one seed."""
    from scipy.stats import t

    values = np.asarray(values, float)
    count = len(values)
    if count < 2:
        return float(np.mean(values)), math.nan
    half = t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)
    return float(np.mean(values)), float(half)


def objective(curves: Curves) -> np.ndarray:
    """What is compared: suboptimality where the optimum is known, else the train loss."""
    return curves.values.get("suboptimality", curves.values.get("train_loss"))


def best_of(curves: Sequence[Curves], order: str) -> Curves:
    """The method at its own best learning rate: the mean over seeds goes lowest."""
    return min((c for c in curves if c.order == order), key=lowest_mean)


def lowest_mean(curves: Curves) -> float:
    """The lowest point of the mean over seeds."""
    return float(objective(curves).mean(axis=0).min())


def epochs_to(curves: Curves, target: float) -> np.ndarray:
    """First epoch at which each seed is at or below the target; inf where it never is."""
    reached = objective(curves) <= target
    return np.where(reached.any(axis=1), curves.epoch[reached.argmax(axis=1)], math.inf)


def seconds_to(curves: Curves, epochs: np.ndarray) -> np.ndarray:
    return np.array(
        [
            s[int(e)] if math.isfinite(e) else math.inf
            for s, e in zip(curves.seconds, epochs, strict=True)
        ]
    )


class Row(NamedTuple):
    """One method of the table; numbers are (mean, half width of the 95 % interval)."""

    order: str
    best_rate: float
    best: tuple
    same_rate_epochs: np.ndarray  # at the baseline's best learning rate, one entry per seed
    fastest_rate: float
    fastest_epochs: np.ndarray  # at the learning rate that needs fewest
    fastest_seconds: np.ndarray
    metric: tuple  # of the test set, at the last epoch
    metric_label: str
    bound: tuple
    has_optimum: bool


def summarise(records: Sequence[dict], baseline: str = "rr") -> list[Row]:
    """The table of a comparison against `baseline`.

    The target is the lowest point of the baseline's mean over seeds, at the baseline's own best
    learning rate. Under one seed all methods start from the same orders.

    Raises:
      ValueError: if the baseline was not run.
    """
    curves = gather(records)
    orders = list(dict.fromkeys(c.order for c in curves))
    if baseline not in orders:
        raise ValueError(f"the baseline {baseline!r} is not among the orders run: {orders}.")
    base = best_of(curves, baseline)
    target = lowest_mean(base)
    metric = next(name for name in METRICS if f"test_{name}" in base.values)
    rows = []
    for order in orders:
        own = [c for c in curves if c.order == order]
        best = best_of(curves, order)
        same = next((c for c in own if c.learning_rate == base.learning_rate), best)
        # Most seeds that arrive first, then the fewest epochs.
        fastest = min(
            own,
            key=lambda c: (
                np.isinf(epochs_to(c, target)).sum(),
                np.where(np.isinf(e := epochs_to(c, target)), c.epoch[-1], e).mean(),
            ),
        )
        epochs = epochs_to(fastest, target)
        bounds = best.values.get("bound_linf", np.full((1, 1), math.nan))
        last = bounds[:, ~np.isnan(bounds).all(axis=0)][:, -1:]
        rows.append(
            Row(
                order,
                best.learning_rate,
                interval(objective(best)[:, objective(best).mean(axis=0).argmin()]),
                epochs_to(same, target),
                fastest.learning_rate,
                epochs,
                seconds_to(fastest, epochs),
                interval(best.values[f"test_{metric}"][:, -1]),
                METRICS[metric].label,
                interval(last[:, 0]) if last.size else (math.nan, math.nan),
                "suboptimality" in best.values,
            )
        )
    return rows


def table(rows: Sequence[Row], baseline: str = "rr") -> str:
    """The table as Markdown. "3 of 5" counts the seeds that reach the target at all."""
    base = next(r for r in rows if r.order == baseline)
    head = [
        "order",
        "best lr",
        "best train loss" + (" above the optimum" if base.has_optimum else ""),
        f"epochs to {METHODS[baseline].label}'s best, its lr",
        "own lr",
        "epochs, own lr",
        "times fewer",
        "seconds, own lr",
        base.metric_label,
        "last bound L∞",
    ]
    body = []
    for row in rows:
        arrived = np.isfinite(base.fastest_epochs) & np.isfinite(row.fastest_epochs)
        ratio = base.fastest_epochs[arrived] / np.maximum(row.fastest_epochs[arrived], 1)
        body.append(
            [
                METHODS[row.order].label,
                f"{row.best_rate:g}",
                show(row.best, "{:.2e}"),
                show_reached(row.same_rate_epochs, "{:.0f}"),
                f"{row.fastest_rate:g}",
                show_reached(row.fastest_epochs, "{:.0f}"),
                show(interval(ratio), "{:.1f}") if arrived.all() else "-",
                show_reached(row.fastest_seconds, "{:.2f}"),
                show(row.metric, "{:.4f}"),
                show(row.bound, "{:.2f}"),
            ]
        )
    return markdown([dict(zip(head, line, strict=True)) for line in body])


def markdown(rows: Sequence[dict]) -> str:
    """Rows with equal keys as an aligned Markdown table."""
    lines = [list(rows[0]), *([str(v) for v in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * w for w in widths])
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def show(pair, form: str) -> str:
    mean, half = pair
    if math.isnan(mean):
        return "-"
    return form.format(mean) + ("" if math.isnan(half) else " ± " + form.format(half))


def show_reached(values: np.ndarray, form: str) -> str:
    """Mean and interval if all seeds arrived, else how many did."""
    arrived = np.isfinite(values)
    if arrived.all():
        return show(interval(values), form)
    return f"{arrived.sum()} of {len(values)}"
