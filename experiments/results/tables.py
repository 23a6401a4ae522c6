"""Tables: columns as data, and the format of numbers with intervals."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.results import statistics
from experiments.results.statistics import (
    Chosen,
    Comparison,
    fastest,
    interval,
    last,
    spent,
    volume,
)
from experiments.tasks.metrics import METRICS

NAMES = {
    "train/above_optimum": "train loss above the optimum",
    "train/batch_loss": "loss of the batch",
    "bound/linf": "parallel herding bound, L∞",
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
    """The main table: one row per arm at its best rate.

    Where averaged weights were recorded, the same table of them follows.
    """
    rows = []
    for own in comparison.at(speed):
        row = {}
        for head, cell, always in columns:
            head = head if isinstance(head, str) else head(comparison)
            row[head] = cell(comparison, own) if own.runs or always else "-"
        rows.append(row)
    if comparison.averaged is None:
        return markdown(rows)
    more = table(comparison.averaged, columns, speed)
    return f"{markdown(rows)}\n\nAveraged weights, each arm at its best rate for them:\n\n{more}"


# Columns.
def arm(head: str) -> Column:
    return Column(head, lambda comparison, own: own.label, always=True)


def rate(head: str, *, edge: bool = True) -> Column:
    """The arm's own learning rate; edge: mark the smallest and largest of those tried."""

    def cell(comparison, own):
        if own.rate is None:
            return "all diverge"
        at_edge = edge and len(own.tried) > 1 and own.rate in (own.tried[0], own.tried[-1])
        return f"{own.rate:g}{' (edge)' * at_edge}"

    return Column(head, cell, always=True)


def mean(head, form: str, values: Callable, word: str = "") -> Column:
    """The mean over seeds of `(comparison, arm) -> values`, as of `show`."""
    return Column(head, lambda comparison, own: show(values(comparison, own), form, word))


def end(head: str, scalar: str, form: str) -> Column:
    """The last value of a scalar."""
    return mean(head, form, lambda comparison, own: _lasts(comparison, own, scalar))


def metric(form: str) -> Column:
    """The last value of the metric that is reported, on the test set."""

    def name(comparison):
        return f"test/{statistics.metric_of(comparison)}"

    return mean(lambda c: name_of(name(c)), form, lambda c, own: _lasts(c, own, name(c)))


def to_target(head: str, name: str, form: str, word: str = "") -> Column:
    """The cost up to the target, or how many seeds reach it."""
    return mean(head, form, lambda c, own: spent(c, own.runs, name).values(), word)


def _lasts(comparison, own, scalar):
    scalar = _scalar_of(comparison, scalar)
    ends = [last(run, scalar) for run in _measured(own, scalar)]
    return ends if np.isfinite(ends).all() else ()  # inf means never reached


def _scalar_of(comparison: Comparison, name: str) -> str:
    """The scalar of this name, in a comparison of averaged weights theirs if it was recorded."""
    own = name + statistics.AVERAGED
    averaged = comparison.criterion.scalar.endswith(statistics.AVERAGED)
    return own if averaged and any(own in r for r in comparison.records) else name


def _measured(own, name):
    """Its runs; of seconds, those that were timed alone."""
    return (statistics.timed(own.runs) if name == "seconds" else own.runs).values()


def train_loss(comparison: Comparison) -> str:
    """The name of the training loss, with the number of examples where it is not that of all."""
    parts = {r["train_examples"] for r in comparison.records if "train_examples" in r}
    return f"train loss (first {max(parts):,})" if parts else "train loss"


def _fastest_spent(name):
    return lambda c, own: spent(c, fastest(c, own.arm)[1], name).values()


def _same_rate(comparison, own):
    """Epochs at the baseline's rate, or at the arm's own if it did not train with that."""
    runs = statistics.tuned(comparison.records, own.arm).get(comparison.baseline().rate, own.runs)
    return spent(comparison, runs, "epoch").values()


def _times_fewer(comparison, own):
    runs = (fastest(comparison, of.arm)[1] for of in (own, comparison.baseline()))
    pairs = statistics.paired(*(spent(comparison, of, "epoch") for of in runs))
    return pairs[:, 1] / np.maximum(pairs[:, 0], 1) if np.isfinite(pairs).all() else ()


def own_rate(head: str) -> Column:
    """The learning rate with which the arm reaches the target first."""

    def cell(comparison, own):
        known = math.isfinite(statistics.target_of(comparison))
        return f"{fastest(comparison, own.arm)[0]:g}" if known else "-"

    return Column(head, cell)


FIRST_ORDER_COLUMNS = (
    arm("order"),
    mean(lambda c: f"epochs to {c.baseline().label}'s best", "{:.0f}", _fastest_spent("epoch")),
    own_rate("at lr"),
    mean("times fewer", "{:.1f}", _times_fewer),
    mean(lambda c: f"lowest {name_of(c.criterion.scalar)}", "{:.1e}",
         lambda c, own: statistics.lowest([*own.runs.values()], c.criterion)),
)  # fmt: skip
ORDER_COLUMNS = (
    arm("order"),
    rate("best lr", edge=False),
    mean(lambda c: f"best {name_of(c.criterion.scalar)}", "{:.2e}",
         lambda c, own: statistics.lowest([*own.runs.values()], c.criterion)),
    mean(lambda c: f"epochs to {c.baseline().label}'s best, its lr", "{:.0f}", _same_rate),
    own_rate("own lr"),
    mean("epochs, own lr", "{:.0f}", _fastest_spent("epoch")),
    mean("times fewer", "{:.1f}", _times_fewer),
    mean("seconds, own lr", "{:.2f}", _fastest_spent("seconds")),
    metric("{:.4f}"),
    end("last bound L∞", "bound/linf", "{:.2f}"),
)  # fmt: skip


def faster(comparison: Comparison, own: Chosen, *, who: bool = False) -> str:
    """Seconds of the baseline to the target over the arm's, paired by seed; "-" where none.

    Args:
      who: say how many seeds arrive where not all do.
    """
    base = comparison.baseline(own.speed)
    taken, before = (spent(comparison, of.runs, "seconds") if of else {} for of in (own, base))
    if math.inf in taken.values():
        return show(taken.values(), "", "arrive") if who else "-"
    if not set(taken) & set(before) or math.inf in before.values():
        return "-"
    return times(statistics.log_ratios(before, taken))


def _per_step(own, name) -> list[float]:
    return [run[-1][name] / run[-1]["step"] for run in _measured(own, name)]


def _each(found, form: str) -> str:
    """The distinct values over seeds, which seldom differ."""
    return ", ".join(form.format(v) for v in sorted(set(found))) or "-"


def _periods(comparison, own):
    plan = comparison.plans.get(own.arm)
    return f"{plan.periods.min()} to {plan.periods.max()}" if plan else "-"


SYNC_COLUMNS = (
    arm("rule"),
    rate("peak lr"),
    Column("seeds", lambda c, own: f"{len(own.runs)}"),
    metric("{:.4f}"),
    mean(train_loss, "{:.4f}", lambda c, own: _lasts(c, own, statistics.LOSS)),
    Column("volume", lambda c, own: _each([volume(r[-1]) for r in own.runs.values()], "{:.2%}")),
    Column("rounds", lambda c, own: _each(_lasts(c, own, "rounds"), "{}")),
    Column("H", _periods),
    end("seconds", "seconds", "{:.1f}"),
    end("last drift", "drift", "{:.4f}"),
    Column("diverged", lambda c, own: ", ".join(f"{r:g}" for r in own.diverged) or "-", True),
)
ECHO_COLUMNS = (
    arm("arm"),
    rate("lr"),
    to_target("seconds", "seconds", "{:.2f}", "arrive"),
    Column(lambda c: f"times faster than {next(iter(c.arms.values()))}", faster),
    to_target("loads", "loads", "{:.0f}", "arrive"),
    to_target("steps", "step", "{:.0f}", "arrive"),
    to_target("rounds", "rounds", "{:.0f}", "arrive"),
    mean("ms per step", "{:.2f}", lambda c, own: [1e3 * s for s in _per_step(own, "seconds")]),
    Column("loads per step", lambda c, own: f"{interval(_per_step(own, 'loads'))[0]:.2f}"),
)
COMBINED_COLUMNS = (
    arm("arm"),
    rate("best lr"),
    mean(lambda c: f"last {name_of(c.criterion.scalar)}", "{:.3g}",
         lambda c, own: _lasts(c, own, c.criterion.scalar)),
    metric("{:.4g}"),
    to_target("steps to the target", "step", "{:.0f}"),
    to_target("loads", "loads", "{:.0f}"),
    to_target("sent, in all-reduces", "allreduces", "{:.0f}"),
    to_target("seconds", "seconds", "{:.2f}"),
)  # fmt: skip


# Numbers and names.
def times(logs, *, exact: bool = False) -> str:
    """A geometric mean of ratios and its interval, from logarithms; exact: even where it is 0."""
    mean, half = interval(logs)
    shown = half >= 0 if exact else half > 0
    bounds = f" ({np.exp(mean - half):.2f} to {np.exp(mean + half):.2f})"
    return f"{np.exp(mean):.2f}" + bounds * shown


def show(found: Iterable[float], form: str, word: str = "") -> str:
    """Mean and half width of the 95 % interval over seeds; "-" without values.

    If a value is inf, a target that was never reached: how many seeds reach it, and the word.
    """
    found = [*found]
    if late := sum(map(math.isinf, found)):
        return f"{len(found) - late} of {len(found)} {word}".rstrip()
    mean, half = interval(found)
    if math.isnan(mean):
        return "-"
    spread = "" if math.isnan(half) else f" ± {form.replace('+', '').format(half)}"
    return rounded(mean, form) + spread


def rounded(mean: float, form: str) -> str:
    """Rounds ties up, since records have six decimal digits and binary tails would decide ties."""
    return form.format(mean + 1e-12 * abs(mean))


def name_of(scalar: str) -> str:
    """The name of a scalar in tables and pictures, whether of the last or averaged weights."""
    scalar = scalar.removesuffix(statistics.AVERAGED)
    if scalar in NAMES:
        return NAMES[scalar]
    part, _, name = scalar.partition("/")
    part = "validation" if part == "valid" else part
    return METRICS[name].label.replace("test", part) if name in METRICS else f"{part} {name}"


def form_of(scalar: str) -> str:
    metric = METRICS.get(scalar.removesuffix(statistics.AVERAGED).split("/")[-1])
    return metric.form if metric and not scalar.startswith("train") else "{:.3g}"


def markdown(rows: Sequence[Mapping]) -> str:
    """Rows with equal keys as an aligned Markdown table."""
    escaped = lambda cell: " ".join(str(cell).splitlines()).replace("|", "\\|")  # noqa: E731
    lines = [[*map(escaped, line)] for line in (rows[0], *(row.values() for row in rows))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * w for w in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def show_bytes(number: float) -> str:
    """Bytes in three digits, as "2.6 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
