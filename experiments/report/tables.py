"""Tables: columns as data, and the format of numbers with intervals."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.data.metrics import METRICS
from experiments.report import statistics
from experiments.report.statistics import (
    COSTS,
    Chosen,
    Comparison,
    column,
    frame,
    interval,
    named,
    paired,
)

# Of scalars and costs of the records; those without a row go by their name.
LABELS = {
    "train/above_optimum": "train loss above the optimum",
    "train/batch_loss": "loss of the batch",
    "bound/linf": "parallel herding bound, L∞",
    "bound/l2": "parallel herding bound, L2",
    "drift": "worker drift at syncs, |x_w - mean| / |mean|",
    "step": "steps",
    "epoch": "epochs",
    "rounds": "communication rounds",
    "allreduces": "sent, in all-reduces of the parameters",
    "seconds": "seconds of training",
    "H": "H, steps from sync to sync",
}


class Column(NamedTuple):
    """A number for each arm, from its rows of the `frame`, one per seed; "-" if one is not finite.

    If `value` is "to NAME" and some seeds never reach the target, the cell says how many do.
    """

    head: str  # {base}, {objective}, {metric} and {train_loss} stand for their names
    form: str | Callable  # of the mean and its interval, as of `show`; or values -> text
    value: str | Callable  # a column of the frame, or a function of the arm's rows
    at: str = "best"  # at which learning rate, as of `statistics.at`
    than: str = ""  # "difference" or "ratio": the first arm's to it, paired by seed
    word: str = ""  # after the number of seeds that arrive
    distinct: bool = False  # the values of the seeds, which seldom differ, in place of their mean
    always = False

    def cell(self, comparison: Comparison, chosen: Chosen) -> str:
        table, base = frame(comparison, self.at, chosen.speed), next(iter(comparison.arms))
        if callable(self.value):
            values = self.value(table.loc[chosen.arm]).dropna()
        elif self.than:
            name = named(comparison, self.value)
            values = paired(table, chosen.arm, base, name, ratio=self.than == "ratio")
        else:
            values = column(table, chosen.arm, named(comparison, self.value))
        late = not self.than and str(self.value).startswith("to ")
        same = self.than == "difference" and chosen.arm == base
        if same or not len(values) or not (late or np.isfinite(values).all()):
            return "-"
        if self.distinct:
            return ", ".join(self.form.format(value) for value in sorted({*values}))
        return self.form(values) if callable(self.form) else show(values, self.form, self.word)


class Fact(NamedTuple):
    """A text of each arm."""

    head: str
    text: Callable[[Comparison, Chosen], str]
    at: str = "best"
    always: bool = True  # of arms too that diverged at every rate; else "-"

    def cell(self, comparison: Comparison, chosen: Chosen) -> str:
        return self.text(comparison, statistics.at(comparison, chosen, self.at))


def table(comparison: Comparison, columns: Sequence, speed: float | None = None) -> str:
    """The main table: one row per arm at its best rate, of `Column`s and `Fact`s.

    Where averaged weights were recorded, the same table of them follows.
    """
    words = {
        "base": next(iter(comparison.arms.values())),
        "train_loss": _train_loss(comparison),
        "objective": name_of(named(comparison, "objective")),
        "metric": name_of(named(comparison, "metric")),
    }
    rows = [
        {
            column.head.format(**words): column.cell(comparison, chosen)
            if column.always or len(chosen.runs)
            else "-"
            for column in columns
        }
        for chosen in comparison.at(speed)
    ]
    if comparison.averaged is None:
        return markdown(rows)
    more = table(comparison.averaged, columns, speed)
    return f"{markdown(rows)}\n\nAveraged weights, each arm at its best rate for them:\n\n{more}"


def _train_loss(comparison: Comparison) -> str:
    """The name of the training loss, with the number of examples where it is not that of all."""
    part = comparison.data.get("train_examples")
    return "train loss" if part is None else f"train loss (first {int(part.max()):,})"


# Numbers and names.
def times(logs, *, exact: bool = False) -> str:
    """A geometric mean of ratios and its interval, from logarithms; exact: even one of width 0."""
    mean, half = interval(logs)
    shown = half >= 0 if exact else half > 0
    bounds = f" ({np.exp(mean - half):.2f} to {np.exp(mean + half):.2f})"
    return f"{np.exp(mean):.2f}" + bounds * shown


def show(sample: Iterable[float], form: str, word: str = "") -> str:
    """Mean and half width of the 95 % interval over seeds; "-" without values.

    If a value is inf, a target that was never reached: how many seeds reach it, and the word.
    """
    sample = [*sample]
    if late := sum(map(math.isinf, sample)):
        return f"{len(sample) - late} of {len(sample)} {word}".rstrip()
    mean, half = interval(sample)
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
    if scalar in LABELS:
        return LABELS[scalar]
    part, _, name = scalar.partition("/")
    part = "validation" if part == "valid" else part
    return (
        METRICS[name].label.replace("test", part) if name in METRICS else f"{part} {name}".strip()
    )


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


# Columns.
def arm(head: str) -> Fact:
    return Fact(head, _label)


def rate(head: str) -> Fact:
    """The arm's own learning rate."""
    return Fact(head, _rate)


def fastest_rate(head: str) -> Fact:
    """The learning rate with which the arm reaches the target first."""
    return Fact(head, _rate, at="fastest", always=False)


def _label(comparison, chosen):
    return chosen.label


def _rate(comparison, chosen):
    if chosen.rate is None:
        return "all diverge" if {*chosen.tried} <= {*chosen.diverged} else "-"
    return marked(chosen.rate, chosen.tried)


def _seeds(comparison, chosen):
    return f"{chosen.runs.seed.nunique()}"


def marked(rate: float, tried: Iterable[float]) -> str:
    """A learning rate, and whether it is at an edge of those tried: a better one may lie beyond."""
    tried = sorted(tried)
    return f"{rate:g}{' (edge)' * (len(tried) > 1 and rate in (tried[0], tried[-1]))}"


def _periods(comparison, chosen):
    plan = comparison.plans.get(chosen.arm)
    return f"{plan.periods.min()} to {plan.periods.max()}" if plan else "-"


def _volume(runs):
    """All-reduces per step; older records, of runs that sent nothing else, have rounds alone."""
    return runs.get("allreduces", runs.rounds).fillna(runs.rounds) / runs.step


def _diverged(comparison, chosen):
    return ", ".join(f"{rate:g}" for rate in chosen.diverged) or "-"


SEEDS = Fact("seeds", _seeds, always=False)
SYNC_COLUMNS = (  # of studies of syncs; others have theirs beside their arms
    arm("rule"),
    rate("peak lr"),
    SEEDS,
    Column("{metric}", "{:.4f}", "metric"),
    Column("{train_loss}", "{:.4f}", statistics.LOSS),
    Column("volume", "{:.2%}", _volume, distinct=True),
    Column("rounds", "{:.0f}", "rounds", distinct=True),
    Fact("H", _periods, always=False),
    Column("seconds", "{:.1f}", "seconds"),
    Column("last drift", "{:.4f}", "drift"),
    Fact("diverged", _diverged),
)


# One run.
def text_of(name: str, value: float | None) -> str:
    """A number of a record, as it is read."""
    if value is None:
        return "not finite"
    return f"{value:,.0f}" if isinstance(value, int) or name == "allreduces" else f"{value:.4g}"


def result(record: Mapping) -> str:
    """A sentence with the scalars of a record: of the test set, then of training."""
    names = [name for part in ("test/", "train/") for name in record if name.startswith(part)]
    names = [name for name in names if name != "train/batch_loss"] or names
    words = [f"{_label_of(name)} {text_of(name, record[name])}" for name in names]
    return f"After {record['step']:,} steps: {', '.join(words)}."


def course(rows: Sequence[Mapping]) -> str:
    """The scalars and costs of a run at its first and last evaluation."""
    first, last = rows[0], rows[-1]
    names = sorted((name for name in last if "/" in name), key=lambda name: name.split("/")[0])
    names += [name for name in ("drift", *COSTS) if name in last and name != "step"]
    return markdown(
        [
            {"of the run": _label_of(name)}
            | {f"step {r['step']:,}": text_of(name, r.get(name)) for r in (first, last)}
            for name in names
        ]
    )


def _label_of(scalar: str) -> str:
    return name_of(scalar) + " of averaged weights" * scalar.endswith(statistics.AVERAGED)


# Sections of a report.
def _better(comparison: Comparison, chosen: Chosen, scalar: str, at="best", ratio=False):
    """The first arm's column to this arm's, by seed; empty for the first arm or if not finite."""
    base, table = next(iter(comparison.arms)), frame(comparison, at, chosen.speed)
    values = paired(table, chosen.arm, base, named(comparison, scalar), ratio=ratio)
    return values[:0] if chosen.arm == base or not np.isfinite(values).all() else values


def answer(comparison: Comparison) -> str:
    """A sentence: what the best arm gains over the baseline, by costs and ends of the tables."""
    speed, criterion = comparison.speeds[-1], comparison.criterion
    spent = "to seconds" if speed is not None else "to step"
    costs = {"lowest": ("to epoch", "fastest"), "target": (spent, "best")}
    scalar, rate = costs.get(criterion.when, ("objective", "best"))
    is_cost, words = scalar.startswith("to "), {"to epoch": "epochs", "to step": "steps"}
    base, others = comparison.baseline(speed), []
    if base is None or len(comparison.at(speed)) < 2:
        return ""
    for chosen in comparison.at(speed):
        effect = _better(comparison, chosen, scalar, rate, ratio=is_cost)
        if len(effect):
            mean, half = interval(effect if is_cost or not criterion.lower else -effect)
            others.append((mean, half, chosen.label, len(effect)))
    none = f"Nothing is shown to beat {base.label}"
    if not others:
        return f"{none}: no other arm comes to its end, or to the target, with every seed."
    mean, half, label, seeds = max(others)
    shown = [mean, mean - half, mean + half]
    gain, low, high = (f"{x:.3g}" for x in (np.exp(shown) if is_cost else shown))
    if is_cost:
        what = f"reaches the target in {gain} times fewer {words.get(scalar, 'seconds')}"
    else:
        more = "lower" if criterion.lower else "higher"
        what = f"ends with a {name_of(named(comparison, scalar))} that is {gain} {more}"
    over = f"{low} to {high}, 95 % over {seeds} seeds" if seeds > 1 else "one seed, no interval"
    over += f"; the best of {len(others)}" * (len(others) > 1)
    at = "" if speed is None else f"At R = {speed:g}: "
    doubt = "" if mean - half > 0 else f"{none}. The best: "
    return f"{at}{doubt}{label} {what} than {base.label} ({over})."


def late(comparison: Comparison) -> list[str]:
    """The arms that miss the target with some seed."""
    speed = comparison.speeds[0]
    steps = {
        one.label: column(frame(comparison, speed=speed), one.arm, "to step")
        for one in comparison.at(speed)
    }
    return [label for label, taken in steps.items() if np.isinf(taken).any()]


def target_line(comparison: Comparison) -> str:
    """Section: the target of the main table."""
    target = statistics.target_of(comparison)
    if not math.isfinite(target):
        return "No target: every run diverged. Pass lower --learning_rates."
    lost = late(comparison)
    who = f"{', '.join(lost)} do not reach" if lost else "every arm reaches"
    return f"Target: {target:.4g}, which {who} with every seed."


def diverged_rates(comparison):
    """A line per learning rate at which an arm diverged."""
    return "\n\n".join(
        f"{chosen.label} diverged at learning rate {rate:g}."
        for chosen in comparison.at()
        for rate in chosen.diverged
    )


def baseline_differences(comparison: Comparison) -> str:
    """Section: the test metric of every arm less the baseline's, paired by seed."""
    metric, rows = statistics.metric_of(comparison), []
    scale, unit = (100, "points") if metric == "accuracy" else (1, "difference")
    head = f"{unit} against {next(iter(comparison.arms.values()))}"
    for chosen in comparison.at():
        if len(less := _better(comparison, chosen, "metric")):
            rows.append({head: chosen.label, METRICS[metric].label: show(scale * less, "{:+.2f}")})
    return markdown(rows) if rows else ""


def gains(comparison: Comparison) -> str:
    """Section: the end of the baseline's runs, and what every other arm gains there.

    "times fewer epochs" compares the epochs up to the last value of the baseline's same seed.
    """
    both = [c for c in (comparison, comparison.averaged) if c and len(c.baseline().runs)]
    rows = [_gains(c, chosen) for c in both for chosen in c.at() if len(chosen.runs)]
    return markdown(rows) if len(rows) > len(both) else ""


def _gains(comparison, chosen) -> Mapping[str, str]:
    scalar, base = comparison.criterion.scalar, comparison.baseline()
    plain = scalar.removesuffix(statistics.AVERAGED)
    form = "{:.2e}" if plain == statistics.ABOVE else "{:.4f}"  # distances are of any size
    ends, change = frame(comparison)[scalar], _better(comparison, chosen, scalar)
    after, before = (
        of.runs[of.runs.seed.isin(base.runs.seed)]
        .groupby("seed")
        .apply(lambda run: arrival(run, scalar, ends[base.arm, run.name]))
        for of in (chosen, base)
    )
    late = np.isinf(after).sum()
    return {
        "at the end": chosen.label,
        "weights": "last" if plain == scalar else "averaged",
        "lr": marked(chosen.rate, chosen.tried),
        "seeds": f"{chosen.runs.seed.nunique()}",
        name_of(scalar): show(ends[chosen.arm], form),
        f"less {base.label}": show(change, form.replace(":", ":+")),
        "times fewer epochs at this lr": f"{len(after) - late} of {len(after)} arrive"
        if late
        else times(statistics.ratio_of(after, before)),
    }


def arrival(run, scalar: str, target: float) -> float:
    """The epoch at which a curve first is at most `target`, linearly between its points; or inf."""
    run = run[np.isfinite(run[scalar])]
    at, values = run.epoch.to_numpy(float), run[scalar].to_numpy()
    if not math.isfinite(target) or not (values <= target).any():
        return math.inf
    i = int(np.argmax(values <= target))
    return float(np.interp(-target, -values[max(i - 1, 0) : i + 1], at[max(i - 1, 0) : i + 1]))


def rates_tried(comparison: Comparison) -> str:
    """Section: a table per speed of what chose the learning rates."""
    criterion, parts = comparison.criterion, []
    what = f"mean {name_of(criterion.scalar)}"
    if criterion.when == "target":
        what = "mean steps to the target on the validation half"
    for speed in comparison.speeds:
        start = "Tuning" if speed is None else f"R = {speed:g}, tuning"
        title = f"{start}: {what} at every learning rate (seeds)"
        parts.append(f"{title}\n\n{sweep(comparison, speed)}")
    return "\n\n".join(parts)


def sweep(comparison: Comparison, speed: float | None = None) -> str:
    """What chose the rates: the criterion at every learning rate, in brackets the seeds if many."""
    at, criterion = comparison.at(speed), comparison.criterion
    rates = sorted({rate for chosen in at for rate in chosen.tried})

    def cell(chosen, rate):
        if rate in chosen.diverged:
            return "diverged"
        if rate not in chosen.tried:
            return "-"
        rows = statistics.runs_at(chosen.data, rate, statistics.TUNING)
        runs = statistics.curves(rows, criterion.scalar)
        (late, mean), seeds = statistics.score(runs, criterion), runs.shape[1]
        if late:
            return f"{seeds - late:.0f} of {seeds} arrive"
        if not math.isfinite(mean):
            return "not finite"
        target = criterion.when == "target"
        mean = mean if target or criterion.lower else -mean
        text = rounded(mean, "{:.0f}" if target else form_of(criterion.scalar))
        return text + (f" ({seeds})" if seeds > 1 else "")

    return markdown(
        [{"arm": chosen.label} | {f"lr {r:g}": cell(chosen, r) for r in rates} for chosen in at]
    )
