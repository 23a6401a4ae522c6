"""Tables: columns as data, and the format of numbers with intervals."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.data.metrics import METRICS
from experiments.report import statistics
from experiments.report.frame import COSTS, difference, ends, measured, named, paired
from experiments.report.statistics import Chosen, Comparison, fastest, interval, volume

# Of scalars and costs of the records; those without a row go by their name.
LABELS = {
    "train/above_optimum": "train loss above the optimum",
    "train/batch_loss": "loss of the batch",
    "bound/linf": "parallel herding bound, L∞",
    "bound/l2": "parallel herding bound, L2",
    "drift": "worker drift at syncs, |x_w - mean| / |mean|",
    "step": "steps",
    "epoch": "epochs",
    "loads": "loads",
    "rounds": "communication rounds",
    "allreduces": "sent, in all-reduces of the parameters",
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
    for chosen in comparison.at(speed):
        row = {}
        for head, cell, always in columns:
            head = head if isinstance(head, str) else head(comparison)
            row[head] = cell(comparison, chosen) if chosen.runs or always else "-"
        rows.append(row)
    if comparison.averaged is None:
        return markdown(rows)
    more = table(comparison.averaged, columns, speed)
    return f"{markdown(rows)}\n\nAveraged weights, each arm at its best rate for them:\n\n{more}"


# Columns.
def arm(head: str) -> Column:
    return Column(head, lambda comparison, chosen: chosen.label, always=True)


def rate(head: str) -> Column:
    """The arm's own learning rate."""

    def cell(comparison, chosen):
        return "all diverge" if chosen.rate is None else marked(chosen.rate, chosen.tried)

    return Column(head, cell, always=True)


def marked(rate: float, tried: Iterable[float]) -> str:
    """A learning rate, and whether it is at an edge of those tried: a better one may lie beyond."""
    tried = sorted(tried)
    return f"{rate:g}{' (edge)' * (len(tried) > 1 and rate in (tried[0], tried[-1]))}"


def mean(head, form: str, values: Callable, word: str = "") -> Column:
    """The mean over seeds of `(comparison, arm) -> values`, as of `show`."""
    return Column(head, lambda comparison, chosen: show(values(comparison, chosen), form, word))


def end(head, scalar: str, form: str, word: str = "", rate: str = "best") -> Column:
    """The mean over seeds of a column of the `frame`; "-" where a value is not finite.

    For "to NAME" some may be infinite; then it says how many seeds reach the target.
    """

    def cell(comparison, chosen):
        values = ends(comparison, chosen, scalar, rate)
        return values if scalar.startswith("to ") or np.isfinite(values).all() else ()

    return mean(head, form, cell, word)


def metric(form: str) -> Column:
    """The last value of the metric that is reported, on the test set."""
    return end(lambda c: name_of(named(c, "metric")), "metric", form)


def less(scalar: str, form: str) -> Column:
    """The last value of a scalar less the baseline's, paired by seed."""

    def cell(comparison, chosen):
        change = difference(comparison, chosen, scalar)
        one = chosen.arm == next(iter(comparison.arms)) or not np.isfinite(change).all()
        return "-" if one else show(change, form)

    return Column(lambda c: f"less {c.baseline().label}", cell)


def train_loss(comparison: Comparison) -> str:
    """The name of the training loss, with the number of examples where it is not that of all."""
    parts = {r["train_examples"] for r in comparison.records if "train_examples" in r}
    return f"train loss (first {max(parts):,})" if parts else "train loss"


def fastest_rate(head: str) -> Column:
    """The learning rate with which the arm reaches the target first."""

    def cell(comparison, chosen):
        has_target = math.isfinite(statistics.target_of(comparison))
        return marked(fastest(comparison, chosen.arm)[0], chosen.tried) if has_target else "-"

    return Column(head, cell)


def _times_fewer(comparison, chosen):
    logs = difference(comparison, chosen, "to epoch", "fastest", ratio=True)
    return times(logs) if len(logs) and np.isfinite(logs).all() else "-"


def _lowest(comparison, chosen):
    return statistics.lowest([*chosen.runs.values()], comparison.criterion)


FIRST_ORDER_COLUMNS = (
    arm("order"),
    end(lambda c: f"epochs to {c.baseline().label}'s best", "to epoch", "{:.0f}", rate="fastest"),
    fastest_rate("at lr"),
    Column("times fewer", _times_fewer),
    mean(lambda c: f"lowest {name_of(c.criterion.scalar)}", "{:.1e}", _lowest),
    rate("reached at lr"),
)
ORDER_COLUMNS = (
    arm("order"),
    rate("best lr"),
    mean(lambda c: f"best {name_of(c.criterion.scalar)}", "{:.2e}", _lowest),
    end(lambda c: f"epochs to {c.baseline().label}'s best, its lr", "to epoch", "{:.0f}",
        rate="baseline"),
    fastest_rate("own lr"),
    end("epochs, own lr", "to epoch", "{:.0f}", rate="fastest"),
    Column("times fewer", _times_fewer),
    end("seconds, own lr", "to seconds", "{:.2f}", rate="fastest"),
    metric("{:.4f}"),
    end("last bound L∞", "bound/linf", "{:.2f}"),
)  # fmt: skip


def faster(comparison: Comparison, chosen: Chosen, *, who: bool = False) -> str:
    """Seconds of the baseline to the target over the arm's, paired by seed; "-" where none.

    Where not all seeds arrive `who` says how many do.
    """
    if np.isinf(taken := ends(comparison, chosen, "to seconds")).any():
        return show(taken, "", "arrive") if who else "-"
    logs = difference(comparison, chosen, "to seconds", ratio=True)
    return times(logs) if len(logs) and np.isfinite(logs).all() else "-"


def _per_step(chosen, name) -> list[float]:
    runs = statistics.timed(chosen.runs) if name == "seconds" else chosen.runs
    return [run[-1][name] / run[-1]["step"] for run in runs.values()]


def _each(name: str, form: str, of: Callable) -> Column:
    """The distinct values of a run's last record over seeds, which seldom differ."""

    def cell(comparison, chosen):
        values = sorted({of(run[-1]) for run in chosen.runs.values()})
        return ", ".join(form.format(v) for v in values)

    return Column(name, cell)


def _periods(comparison, chosen):
    plan = comparison.plans.get(chosen.arm)
    return f"{plan.periods.min()} to {plan.periods.max()}" if plan else "-"


SYNC_COLUMNS = (
    arm("rule"),
    rate("peak lr"),
    Column("seeds", lambda c, chosen: f"{len(chosen.runs)}"),
    metric("{:.4f}"),
    end(train_loss, statistics.LOSS, "{:.4f}"),
    _each("volume", "{:.2%}", volume),
    _each("rounds", "{}", lambda record: record["rounds"]),
    Column("H", _periods),
    end("seconds", "seconds", "{:.1f}"),
    end("last drift", "drift", "{:.4f}"),
    Column("diverged", lambda c, chosen: ", ".join(f"{r:g}" for r in chosen.diverged) or "-", True),
)
ECHO_COLUMNS = (
    arm("arm"),
    rate("lr"),
    end("seconds", "to seconds", "{:.2f}", word="arrive"),
    Column(lambda c: f"times faster than {next(iter(c.arms.values()))}", faster),
    end("loads", "to loads", "{:.0f}", word="arrive"),
    end("steps", "to step", "{:.0f}", word="arrive"),
    end("rounds", "to rounds", "{:.0f}", word="arrive"),
    mean(
        "ms per step", "{:.2f}", lambda c, chosen: [1e3 * s for s in _per_step(chosen, "seconds")]
    ),
    Column("loads per step", lambda c, chosen: f"{interval(_per_step(chosen, 'loads'))[0]:.2f}"),
)
COMBINED_COLUMNS = (
    arm("arm"),
    rate("best lr"),
    mean(lambda c: f"last {name_of(c.criterion.scalar)}", "{:.3g}",
         lambda c, chosen: ends(c, chosen, c.criterion.scalar)),
    metric("{:.4g}"),
    end("steps to the target", "to step", "{:.0f}"),
    end("loads", "to loads", "{:.0f}"),
    end("sent, in all-reduces", "to allreduces", "{:.0f}"),
    end("seconds", "to seconds", "{:.2f}"),
)  # fmt: skip


# Numbers and names.
def times(logs, *, exact: bool = False) -> str:
    """A geometric mean of ratios and its interval, from logarithms; exact: even where it is 0."""
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


# One run.
def result(record: Mapping) -> str:
    """What a record has of the test set, then of training: a sentence."""
    names = [name for part in ("test/", "train/") for name in record if name.startswith(part)]
    names = [name for name in names if name != "train/batch_loss"] or names
    words = [f"{_label_of(name)} {_one(name, record[name])}" for name in names]
    return f"After {record['step']:,} steps: {', '.join(words)}."


def course(rows: Sequence[Mapping]) -> str:
    """The scalars and costs of a run at its first and last evaluation."""
    first, last = rows[0], rows[-1]
    names = sorted((name for name in last if "/" in name), key=lambda name: name.split("/")[0])
    names += [name for name in ("drift", *COSTS) if name in last and name != "step"]
    return markdown([
        {"of the run": _label_of(name)}
        | {f"step {r['step']:,}": _one(name, r.get(name)) for r in (first, last)}
        for name in names
    ])  # fmt: skip


def _label_of(scalar: str) -> str:
    return name_of(scalar) + " of averaged weights" * scalar.endswith(statistics.AVERAGED)


def _one(name: str, value: float | None) -> str:
    if value is None:
        return "not finite"
    whole = name in ("loads", "rounds", "allreduces")
    return f"{value:,.0f}" if whole else f"{value:.4g}"


# Sections of a report.
def answer(comparison: Comparison) -> str:
    """A sentence: what the best arm gains over the baseline, by costs and ends of the tables."""
    speed, criterion = comparison.speeds[-1], comparison.criterion
    spent = "to seconds" if speed is not None else "to step"
    costs = {"lowest": ("to epoch", "fastest"), "target": (spent, "best")}
    scalar, rate = costs.get(criterion.when, (criterion.scalar, "best"))
    is_cost, words = scalar.startswith("to "), {"to epoch": "epochs", "to step": "steps"}
    scalar = "metric" if scalar.startswith("valid/") else scalar
    base, others = comparison.baseline(speed), []
    for chosen in comparison.at(speed):
        effect = difference(comparison, chosen, scalar, rate, ratio=is_cost)
        if chosen.arm != next(iter(comparison.arms)) and len(effect) and np.isfinite(effect).all():
            mean, half = interval(effect if is_cost or not criterion.lower else -effect)
            others.append((mean, half, chosen.label, len(effect)))
    if base is None or len(comparison.at(speed)) < 2:
        return ""
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
    arms = comparison.at(comparison.speeds[0])
    taken = ((chosen.label, statistics.spent(comparison, chosen.runs, "step")) for chosen in arms)
    return [label for label, steps in taken if math.inf in steps.values()]


def target_line(comparison: Comparison) -> str:
    """Section: the target of the main table."""
    if not math.isfinite(statistics.target_of(comparison)):
        return "No target: every run diverged. Pass lower --learning_rates."
    lost = late(comparison)
    who = f"{', '.join(lost)} do not reach" if lost else "every arm reaches"
    return f"Target: {statistics.target_of(comparison):.4g}, which {who} with every seed."


def diverged_rates(comparison):
    """A line per learning rate at which an arm diverged."""
    arms = comparison.at()
    lines = [
        f"{chosen.label} diverged at learning rate {r:g}."
        for chosen in arms
        for r in chosen.diverged
    ]
    return "\n\n".join(lines)


def baseline_differences(comparison: Comparison) -> str:
    """Section: the test metric of every arm less the baseline's, paired by seed."""
    metric, rows = statistics.metric_of(comparison), []
    base, label = next(iter(comparison.arms.items()))
    scale, unit = (100, "points") if metric == "accuracy" else (1, "difference")
    for chosen in comparison.at():
        less = difference(comparison, chosen, "metric")
        if chosen.arm != base and len(less) and np.isfinite(less).all():
            shown = {METRICS[metric].label: show(scale * less, "{:+.2f}")}
            rows.append({f"{unit} against {label}": chosen.label} | shown)
    return markdown(rows) if rows else ""


def gains(comparison: Comparison) -> str:
    """Section: the end of the baseline's runs, and what every other arm gains there.

    Times fewer epochs are those to the value with which the baseline's run of the same seed ends.
    """
    both = [c for c in (comparison, comparison.averaged) if c and c.baseline().runs]
    rows = [_gains(c, chosen) for c in both for chosen in c.at() if chosen.runs]
    return markdown(rows) if len(rows) > len(both) else ""


def _gains(comparison, chosen) -> Mapping[str, str]:
    scalar, base = comparison.criterion.scalar, comparison.baseline()
    plain = scalar.removesuffix(statistics.AVERAGED)
    form = "{:.2e}" if plain == statistics.ABOVE else "{:.4f}"  # distances are of any size
    column = less(scalar, form.replace(":", ":+"))
    after, before = (
        {seed: arrival(run, scalar, statistics.last(base.runs[seed], scalar))
         for seed, run in of.runs.items() if seed in base.runs} for of in (chosen, base)
    )  # fmt: skip
    if late := sum(map(math.isinf, after.values())):
        fewer = f"{len(after) - late} of {len(after)} arrive"
    else:
        both = measured({chosen.arm: after, base.arm: before})
        fewer = times(paired(both, chosen.arm, base.arm, "value", ratio=True))
    return {
        "at the end": chosen.label, "weights": "last" if plain == scalar else "averaged",
        "lr": marked(chosen.rate, chosen.tried), "seeds": f"{len(chosen.runs)}",
        name_of(scalar): show([statistics.last(run, scalar) for run in chosen.runs.values()], form),
        column.head(comparison): column.cell(comparison, chosen),
        "times fewer epochs at this lr": fewer,
    }  # fmt: skip


def arrival(run: statistics.Run, scalar: str, target: float) -> float:
    """The epoch at which a curve first is at most `target`, linearly between its points; or inf."""
    points = [(r["epoch"], r[scalar]) for r in run if r.get(scalar) is not None]
    at, values = np.array(points, float).reshape(-1, 2).T
    if not (values <= target).any():
        return math.inf
    i = int(np.argmax(values <= target))
    if i == 0 or not math.isfinite(values[i - 1]):
        return float(at[i])
    return float(np.interp(-target, -values[i - 1 : i + 1], at[i - 1 : i + 1]))


def times_faster(comparison: Comparison) -> str:
    """Section: how many times faster than the baseline an arm is at the target, by speed."""
    head, rows = f"times faster than {next(iter(comparison.arms.values()))}", []
    for arm, label in comparison.arms.items():
        row = {head: label}
        for speed in comparison.speeds:
            chosen = comparison.chosen.get((arm, speed))
            row[f"R = {speed:g}"] = faster(comparison, chosen, who=True) if chosen else "-"
        rows.append(row)
    return markdown(rows)


def rates_tried(head: str = "arm"):
    """A table per speed of what chose the learning rates."""

    def section(comparison):
        criterion, parts = comparison.criterion, []
        what = f"mean {name_of(criterion.scalar)}"
        if criterion.when == "target":
            what = "mean steps to the target on the validation half"
        for speed in comparison.speeds:
            start = "Tuning" if speed is None else f"R = {speed:g}, tuning"
            title = f"{start}: {what} at every learning rate (seeds)"
            parts.append(f"{title}\n\n{sweep(comparison, speed, head)}")
        return "\n\n".join(parts)

    return section


def sweep(comparison: Comparison, speed: float | None = None, head: str = "arm") -> str:
    """What chose the rates: the criterion at every learning rate, in brackets the seeds if many."""
    at, criterion = comparison.at(speed), comparison.criterion
    rates = sorted({rate for chosen in at for rate in chosen.tried})

    def cell(chosen, rate):
        if rate in chosen.diverged:
            return "diverged"
        runs = statistics.runs_of(comparison.records, chosen.arm, speed).get(rate)
        if not runs:
            return "-"
        late, mean = statistics.score([*runs.values()], criterion)
        if late:
            return f"{len(runs) - late:.0f} of {len(runs)} arrive"
        if not math.isfinite(mean):
            return "not finite"
        target = criterion.when == "target"
        mean = mean if target or criterion.lower else -mean
        text = rounded(mean, "{:.0f}" if target else form_of(criterion.scalar))
        return text + (f" ({len(runs)})" if len(runs) > 1 else "")

    return markdown(
        [{head: chosen.label} | {f"lr {r:g}": cell(chosen, r) for r in rates} for chosen in at]
    )
