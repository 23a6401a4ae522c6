"""Tables and pictures of `experiments.blocks`, from its records."""

import math
from collections.abc import Sequence

import numpy as np

from experiments import block_tasks
from experiments.block_runs import ORDERS
from experiments.block_tasks import BUFFER, SETTINGS, Arm, label_of
from experiments.results import plots, statistics, tables
from experiments.results.statistics import ABOVE, AVERAGED, LOSS, Comparison, Criterion

MEASURES = {  # of the tables: (schedule, whether weights are averaged)
    "constant rate": ("constant", ""),
    "constant rate, averaged": ("constant", AVERAGED),
    "cosine": ("cosine", ""),
}
FAMILIES = {  # order and whether several blocks are read at once: place of the look, marker
    ("shuffled", False): ("blocks shuffled", 1, "o"),
    ("shuffled", True): ("blocks shuffled, {} at once", 2, "s"),
    ("balanced", False): ("blocks balanced", 4, "o"),
    ("balanced", True): ("blocks balanced, {} at once", 6, "s"),
}


def tables_of(found: Sequence[dict]) -> dict[str, str]:
    """Markdown by name: a table per task, the ratios of every measure, and the borders."""
    names = list(dict.fromkeys(r["task"] for r in found))
    own = {name: [r for r in found if r["task"] == name] for name in names}
    made = {name: table(own[name]) for name in names}
    for measured in shown(found):
        of = [name for name in names if measured in shown(own[name])]
        rows = [row for name in of for row in ratios(own[name], name, measured)]
        made[f"ratios, {measured}"] = tables.markdown(rows)
    rows = [row for name in names for row in borders(own[name], name, shown(found))]
    return made | {"borders": tables.markdown(rows)}


def compared(found: Sequence[dict], measured: str) -> Comparison:
    """The arms of a task by one of MEASURES."""
    schedule, averaged = MEASURES[measured]
    own = [r for r in found if r["schedule"] == schedule]
    arms = {r["arm"]: label_of(r["arm"], arm_in(r)) for r in found}
    scalar = (ABOVE if any(ABOVE in r for r in own) else LOSS) + averaged
    return statistics.compare(own, arms, Criterion(scalar))


def arm_in(record: dict) -> Arm:
    return Arm(*(record[field] for field in Arm._fields))


def ends(comparison: Comparison, arm: str) -> dict[int, float]:
    """{seed: what the arm ends with at its own best rate}; {} where all rates diverge."""
    own = comparison.chosen.get((arm, None))
    scalar = comparison.criterion.scalar
    return {seed: run[-1][scalar] for seed, run in own.runs.items()} if own else {}


def shown(found: Sequence[dict]) -> list[str]:
    """The measures of which there are records."""
    schedules = {r["schedule"] for r in found}
    return [name for name, (schedule, _) in MEASURES.items() if schedule in schedules]


def table(found: Sequence[dict]) -> str:
    """Markdown of a task: a row per arm."""
    rows, first = {}, ("full", "file", "buffer")

    def place(r):
        where = first.index(r["arm"]) if r["arm"] in first else len(first)
        return where, [*ORDERS].index(r["order"]), block_tasks.are_several(arm_in(r)), r["size"]

    for r in sorted(found, key=place):
        rows[r["arm"]] = {
            "records in the order of": label_of(r["arm"], arm_in(r)),
            "held at once": f"{r['held']:,}",
            "requests": f"{r['requests']:,}",
            "read": tables.show_bytes(r["bytes"]),
        }
    rate = tables.rate("").cell
    for name in shown(found):
        comparison = compared(found, name)
        form = "{:.1e}" if ABOVE in comparison.criterion.scalar else "{:.4f}"
        for arm, row in rows.items():
            own = comparison.chosen.get((arm, None))
            value = tables.show(ends(comparison, arm).values(), form)
            row[name] = f"{value}, lr {rate(comparison, own)}" if own else "-"
    return tables.markdown([*rows.values()])


def families(found: Sequence[dict]) -> dict[tuple, list[dict]]:
    """{key of FAMILIES: one record per arm, the smallest blocks first}."""
    arms = {r["arm"]: r for r in found if r["arm"] not in ("full", "file", "buffer")}
    grouped = {key: [] for key in FAMILIES}
    for r in sorted(arms.values(), key=lambda r: r["size"]):
        grouped[r["order"], block_tasks.are_several(arm_in(r))].append(r)
    return {key: own for key, own in grouped.items() if own}


def borders(found: Sequence[dict], name: str, measures: Sequence[str]) -> list[dict]:
    """The largest blocks up to which no loss is shown to be above that of a full shuffle."""
    rows = []
    for key, own in families(found).items():
        row = {"task": SETTINGS[name].label, "blocks": family_label(key, own)}
        for measured in measures:
            if measured not in shown(found):
                row[measured] = "-"
                continue
            comparison, best = compared(found, measured), None
            full = ends(comparison, "full")
            for r in own:
                logs = statistics.log_ratios(full, ends(comparison, r["arm"]))  # of full over own
                mean, half = statistics.interval(logs)
                if not mean + np.nan_to_num(half) >= 0:  # worse, or diverged
                    break
                best = r
            row[measured] = "none" if best is None else f"{best['size']:,}"
        rows.append(row)
    return rows


def ratios(found: Sequence[dict], name: str, measured: str) -> list[dict]:
    """A row per block size: how many times the loss of a full shuffle, geometric means of seeds."""
    comparison, rows = compared(found, measured), {}
    full, grouped = ends(comparison, "full"), families(found)
    for key, own in grouped.items():
        for r in own:
            row = {"task": SETTINGS[name].label, "records of a block": f"{r['size']:,}"}
            row |= {label.format("several"): "-" for label, *_ in FAMILIES.values()}
            row = rows.setdefault(r["size"], row)
            logs = statistics.log_ratios(ends(comparison, r["arm"]), full)
            row[FAMILIES[key][0].format("several")] = tables.times(logs) if len(logs) else "-"
    return [rows[size] for size in sorted(rows)]


def family_label(key: tuple, own: Sequence[dict]) -> str:
    return FAMILIES[key][0].format(max(r["window"] for r in own))


def picture(found: Sequence[dict], measured: str, path: str) -> None:
    """Writes a PNG: the loss over the requests of an epoch, a panel per task."""
    tasks = {}
    for r in found:
        if r["schedule"] == MEASURES[measured][0]:
            tasks.setdefault(r["task"], []).append(r)
    columns = min(3, len(tasks))
    lines = math.ceil(len(tasks) / columns)
    figure, axes = plots.panes(lines, columns, (max(7, 4.6 * columns), 3.9 * lines + 1))
    for axis, (name, own) in zip(axes.flat, tasks.items(), strict=False):
        comparison = compared(own, measured)
        panel(axis, own, comparison)
        of_x = "requests of an epoch × records of a block"
        axis.set(title=SETTINGS[name].label, xscale="log", xlabel=of_x)
        axis.set_ylabel(tables.name_of(comparison.criterion.scalar))
        sizes = {r["requests"]: r["size"] for of in families(own).values() for r in of}
        axis.set_xticks([*sizes], [f"{n:,}\n× {size:,}" for n, size in sizes.items()])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    plots.legend(figure)
    each = "each at its own best rate, mean and 95 % interval"
    plots.save(figure, path, f"Blocks of sorted files, {measured}\n{each}")


def panel(axis, found: Sequence[dict], comparison: Comparison) -> None:
    for arm, label, colour in (
        ("full", "full shuffle", "#000000"), ("file", "file order", "#999999"),
        ("buffer", f"file order, buffer of 1/{BUFFER}", "#CC79A7"),
    ):  # fmt: skip
        if values := [*ends(comparison, arm).values()]:
            mean, below, above = spread(values)
            axis.axhline(mean, color=colour, linestyle="--", linewidth=1.3, label=label)
            axis.axhspan(mean - below, mean + above, color=colour, alpha=0.12, linewidth=0)
    for key, own in families(found).items():
        _, place, marker = FAMILIES[key]
        beside = 1.06 if key[1] else 1.0
        points = [(beside * r["requests"], [*ends(comparison, r["arm"]).values()]) for r in own]
        x, values = zip(*(point for point in points if point[1]), strict=True)
        mean, *spreads = np.array([spread(v) for v in values]).T
        axis.errorbar(
            x, mean, yerr=spreads, marker=marker, ms=5, capsize=3,
            color=plots.COLOURS[place], label=family_label(key, own),
        )  # fmt: skip
    if ABOVE in comparison.criterion.scalar:
        axis.set_yscale("log")


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and how far its interval reaches down and up; down to half the least value."""
    mean, half = statistics.interval(values)
    half = float(np.nan_to_num(half))
    return mean, min(half, mean - min(values) / 2), half
