"""One way to tabulate: columns as data, Markdown, and how numbers with intervals are written."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.results import statistics
from experiments.results.statistics import Chosen, Comparison, interval, spent
from experiments.tasks.metrics import METRICS

NAMES = {
    "train/loss": "train loss",
    "train/above_optimum": "train loss above the optimum",
    "train/batch_loss": "loss of the batch",
    "bound/linf": "parallel herding bound, L∞",
    "bound/l2": "parallel herding bound, L2",
    "drift": "worker drift at syncs, |x_w - mean| / |mean|",
    "step": "steps",
    "epoch": "epochs",
    "loads": "loads",
    "rounds": "communication rounds",
    "allreduces": "sent, in all-reduces",
    "seconds": "seconds of training",
}


class Column(NamedTuple):
    head: str | Callable[[Comparison], str]
    cell: Callable[[Comparison, Chosen], str]  # of an arm at its own best rate
    always: bool = False  # of arms too that diverged at every rate; else "-"


def table(comparison: Comparison, columns: Sequence[Column], speed: float | None = None) -> str:
    """The main table: an arm a row, at its own best rate; what every task measures comes last."""
    rows = []
    for own in comparison.at(speed):
        row = {}
        for head, cell, always in columns:
            head = head if isinstance(head, str) else head(comparison)
            row[head] = cell(comparison, own) if own.runs or always else "-"
        for name in statistics.everywhere(comparison):
            ends = [statistics.last(run, f"test/{name}") for run in own.runs.values()]
            row.setdefault(METRICS[name].label, show(ends, METRICS[name].form))
        rows.append(row)
    return markdown(rows)


def sweep(comparison: Comparison, speed: float | None = None, head: str = "arm") -> str:
    """What chose the rates: the criterion at every learning rate, in brackets the seeds if many."""
    at, criterion = comparison.at(speed), comparison.criterion
    rates = sorted({rate for own in at for rate in own.tried})

    def cell(own, rate):
        if rate in own.diverged:
            return "diverged"
        runs = statistics.runs_of(comparison.records, own.arm, speed).get(rate)
        if not runs:
            return "-"
        late, mean = statistics.score([*runs.values()], criterion)
        if late:
            return f"{len(runs) - late:.0f} of {len(runs)} arrive"
        target = criterion.when == "target"
        mean = mean if target or criterion.lower else -mean
        text = rounded(mean, "{:.0f}" if target else form_of(criterion.scalar))
        return text + (f" ({len(runs)})" if len(runs) > 1 else "")

    return markdown([{head: own.label} | {f"lr {r:g}": cell(own, r) for r in rates} for own in at])


def against(comparison: Comparison) -> str:
    """Section: the test metric of every arm less the baseline's, paired by seed."""
    metric, base = statistics.metric_of(comparison), comparison.baseline()
    scale, unit = (100, "points") if metric == "accuracy" else (1, "difference")
    rows = []
    for own in comparison.at():
        ends = ({s: statistics.last(run, f"test/{metric}") for s, run in of.runs.items()}
                for of in (own, base))  # fmt: skip
        less = statistics.paired(*ends)
        if own.arm != base.arm and len(less):
            text = show(scale * (less[:, 0] - less[:, 1]), "{:+.2f}").replace("± +", "± ")
            rows.append({f"{unit} against {base.label}": own.label, METRICS[metric].label: text})
    return markdown(rows) if rows else ""


def times_faster(comparison: Comparison) -> str:
    """Section: how many times faster than the baseline an arm is at the target, by speed."""
    chosen, speeds = comparison.chosen, comparison.speeds
    head = f"times faster than {next(iter(comparison.arms.values()))}"

    def cell(own):
        return faster(comparison, own, missing="arrive") if own else "-"

    return markdown([
        {head: label} | {f"R = {speed:g}": cell(chosen.get((arm, speed))) for speed in speeds}
        for arm, label in comparison.arms.items()
        if any((arm, speed) in chosen for speed in speeds)
    ])  # fmt: skip


def faster(comparison: Comparison, own: Chosen, missing: str = "") -> str:
    """Seconds of the baseline to the target over the arm's, paired by seed; "-" where none."""
    base = comparison.baseline(own.speed)
    taken, before = (spent(comparison, of.runs, "seconds") if of else {} for of in (own, base))
    late = sum(map(math.isinf, taken.values()))
    if late and missing:
        return f"{len(taken) - late} of {len(taken)} {missing}"
    if late or not set(taken) & set(before) or any(map(math.isinf, before.values())):
        return "-"
    return times(statistics.log_ratios(before, taken))


def times(logs, *, exact: bool = False) -> str:
    """A geometric mean of ratios and its interval, from logarithms; exact: even where it is 0."""
    mean, half = interval(logs)
    shown = half >= 0 if exact else half > 0
    bounds = f" ({np.exp(mean - half):.2f} to {np.exp(mean + half):.2f})"
    return f"{np.exp(mean):.2f}" + bounds * shown


def show(found, form: str) -> str:
    """Mean and half width of the 95 % interval over seeds; "-" where there is nothing."""
    mean, half = interval(found)
    if math.isnan(mean):
        return "-"
    return rounded(mean, form) + ("" if math.isnan(half) else f" ± {form.format(half)}")


def rounded(mean: float, form: str) -> str:
    """Ties go up: records have six digits, and their binary tails shall decide nothing."""
    return form.format(mean + 1e-12 * abs(mean))


def show_reached(found: Mapping[int, float], form: str, word: str = "") -> str:
    """Mean and interval if all seeds arrived, else how many did."""
    late = sum(map(math.isinf, found.values()))
    if late:
        return f"{len(found) - late} of {len(found)} {word}".rstrip()
    return show(found.values(), form)


def name_of(scalar: str) -> str:
    """A scalar of the records, for people."""
    if scalar in NAMES:
        return NAMES[scalar]
    part, _, name = scalar.partition("/")
    part = "validation" if part == "valid" else part
    return METRICS[name].label.replace("test", part) if name in METRICS else f"{part} {name}"


def form_of(scalar: str) -> str:
    metric = METRICS.get(scalar.split("/")[-1])
    return metric.form if metric and not scalar.startswith("train") else "{:.3g}"


def markdown(rows: Sequence[Mapping]) -> str:
    """Rows with equal keys as an aligned Markdown table."""
    lines = [list(rows[0]), *([str(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * w for w in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def show_bytes(number: float) -> str:
    """Bytes in three digits.

    Example:
      >>> show_bytes(2600)
      '2.6 kB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
