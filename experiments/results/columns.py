"""The tables of studies as data: a study names one tuple of columns, and what stands below them.

A section is a function of the comparison that gives the text below the main table, (file name,
text), or for a picture (file name, function of a path and a title that draws it).
"""

import math
from collections.abc import Callable

import numpy as np

from experiments.results import statistics
from experiments.results.statistics import Comparison, interval, last, paired, spent, target_of
from experiments.results.tables import Column, faster, name_of, show, show_reached, sweep


def arm(head: str) -> Column:
    return Column(head, lambda comparison, own: own.label, always=True)


def rate(head: str, *, edge: bool = True) -> Column:
    """The arm's own learning rate; edge: say where it is at the border of those tried."""

    def cell(comparison, own):
        if own.rate is None:
            return "all diverge"
        at_edge = edge and len(own.tried) > 1 and own.rate in (own.tried[0], own.tried[-1])
        return f"{own.rate:g}{' (edge)' * at_edge}"

    return Column(head, cell, always=True)


def mean(head, form: str, values: Callable) -> Column:
    """The mean over seeds of `(comparison, arm) -> float[seeds]`, with its interval."""
    return Column(head, lambda comparison, own: show(values(comparison, own), form))


def arrival(head, form: str, values: Callable, word: str = "") -> Column:
    """The same of {seed: what it takes, or inf}; or how many seeds arrive, and this word."""
    return Column(head, lambda comparison, own: show_reached(values(comparison, own), form, word))


def end(head: str, scalar: str, form: str) -> Column:
    """The last value of a scalar."""
    return mean(head, form, lambda comparison, own: _lasts(own, scalar))


def metric(form: str) -> Column:
    """The last value of the metric that is reported, on the test set."""

    def name(comparison):
        return f"test/{statistics.metric_of(comparison)}"

    return mean(lambda c: name_of(name(c)), form, lambda c, own: _lasts(own, name(c)))


def to_target(head: str, name: str, form: str, word: str = "") -> Column:
    """What it takes to the target, or how many seeds get there."""
    return arrival(head, form, lambda comparison, own: spent(comparison, own.runs, name), word)


def _lasts(own, scalar):
    return [last(run, scalar) for run in _measured(own, scalar)]


def _measured(own, name):
    """Its runs; of seconds, those that were timed alone."""
    return (statistics.timed(own.runs) if name == "seconds" else own.runs).values()


# Of orders: also at other rates than the best, at which the baseline's best is reached.
def fastest(comparison, arm_name: str) -> tuple[float, dict]:
    """(rate, runs by seed) with which most seeds and then the fewest steps reach the target."""
    criterion = comparison.criterion._replace(when="target", target=target_of(comparison))
    best = statistics.best_rate(comparison.records, arm_name, None, criterion)
    return best, statistics.tuned(comparison.records, arm_name).get(best, {})


def _fastest_spent(comparison, own, name="epoch"):
    return spent(comparison, fastest(comparison, own.arm)[1], name)


def _same_rate(comparison, own):
    """At the baseline's rate, or at the arm's own if it did not train with that."""
    runs = statistics.tuned(comparison.records, own.arm).get(comparison.baseline().rate, own.runs)
    return spent(comparison, runs, "epoch")


def _times_fewer(comparison, own):
    pairs = paired(*(_fastest_spent(comparison, of) for of in (own, comparison.baseline())))
    arrived = np.isfinite(pairs).all()
    return pairs[:, 1] / np.maximum(pairs[:, 0], 1) if arrived else ()


ORDER_COLUMNS = (
    arm("order"),
    rate("best lr", edge=False),
    mean(lambda c: f"best {name_of(c.criterion.scalar)}", "{:.2e}",
         lambda c, own: statistics.lowest([*own.runs.values()], c.criterion)),
    arrival(lambda c: f"epochs to {c.baseline().label}'s best, its lr", "{:.0f}", _same_rate),
    Column("own lr", lambda c, own: f"{fastest(c, own.arm)[0]:g}"),
    arrival("epochs, own lr", "{:.0f}", _fastest_spent),
    mean("times fewer", "{:.1f}", _times_fewer),
    arrival("seconds, own lr", "{:.2f}", lambda c, own: _fastest_spent(c, own, "seconds")),
    metric("{:.4f}"),
    end("last bound L∞", "bound/linf", "{:.2f}"),
)  # fmt: skip


def _per_step(own, name) -> list[float]:
    return [run[-1][name] / run[-1]["step"] for run in _measured(own, name)]


def _each(found, form: str) -> str:
    """What seeds have, each number once: they seldom differ."""
    return ", ".join(form.format(v) for v in sorted(set(found))) or "-"


def _periods(comparison, own):
    plan = comparison.plans.get(own.arm)
    return f"{plan.periods.min()} to {plan.periods.max()}" if plan else "-"


SYNC_COLUMNS = (
    arm("rule"),
    rate("peak lr"),
    Column("seeds", lambda c, own: f"{len(own.runs)}"),
    metric("{:.4f}"),
    end("train loss", "train/loss", "{:.4f}"),
    Column("volume", lambda c, own: _each(_per_step(own, "rounds"), "{:.2%}")),
    Column("rounds", lambda c, own: _each(_lasts(own, "rounds"), "{}")),
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
         lambda c, own: _lasts(own, c.criterion.scalar)),
    metric("{:.4g}"),
    to_target("steps to the target", "step", "{:.0f}"),
    to_target("loads", "loads", "{:.0f}"),
    to_target("sent, in all-reduces", "allreduces", "{:.0f}"),
    to_target("seconds", "seconds", "{:.2f}"),
)  # fmt: skip


# Sections.
def late(comparison: Comparison) -> list[str]:
    """The arms that are not at the target with every seed."""
    arms = comparison.at(comparison.speeds[0])
    return [own.label for own in arms if math.inf in spent(comparison, own.runs, "step").values()]


def target_line(comparison: Comparison) -> str:
    """Section: the target of the main table."""
    lost = late(comparison)
    who = f"{', '.join(lost)} do not reach" if lost else "every arm reaches"
    return f"Target: {target_of(comparison):.4g}, which {who} with every seed."


def diverged_rates(comparison):
    """A line per learning rate at which an arm diverged."""
    arms = comparison.at()
    lines = [f"{own.label} diverged at learning rate {r:g}." for own in arms for r in own.diverged]
    return "\n\n".join(lines)


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
