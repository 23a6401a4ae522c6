"""The factorial of order x sync x echo: from records to tables of costs and of effects."""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments import combined_plots, records
from experiments.combined_effects import effects, effects_of, responses, shown
from experiments.combined_runs import (
    Arm,
    above_optimum,
    at_best,
    metric_of,
    objective,
    reached,
    target_of,
    until,
)
from experiments.compare import interval, markdown, show
from experiments.metrics import METRICS

WINDOWS = 50  # of a forecast


class Price(NamedTuple):
    """A machine, in steps of computation: what a load and an all-reduce take on it."""

    label: str
    load: float
    sync: float


def prices(load: float, sync: float) -> list[Price]:
    """The four machines whose input or network may be slow."""
    return [
        Price("fast input, fast network", 0, 0),
        Price(f"load {load:g} steps", load, 0),
        Price(f"sync {sync:g} steps", 0, sync),
        Price(f"load {load:g}, sync {sync:g} steps", load, sync),
    ]


def priced(run: Sequence[dict], price: Price) -> float:
    """Time in steps of computation, up to the last of a run's records.

    From record to record input is read beside the steps, the slower of both counts; what is sent
    comes between them.
    """
    steps, loads = (np.diff([r[name] for r in run], prepend=0) for name in ("step", "loads"))
    waited = np.maximum(steps, price.load * loads).sum()
    return float(waited + price.sync * run[-1]["sent"])


def table(all_records: Sequence[dict], chosen: dict[Arm, list[list[dict]]]) -> str:
    """Markdown: every arm at its own best rate, and what it takes to the target."""
    target, metric, rows = target_of(chosen), metric_of(all_records), []
    tried = sorted({r["learning_rate"] for r in all_records})
    above = above_optimum(all_records)
    for arm, runs in chosen.items():
        rate = runs[0][-1]["learning_rate"]
        edge = " (edge)" if rate in (tried[0], tried[-1]) and len(tried) > 1 else ""
        at = [reached(run, target) for run in runs]
        last = [run[-1] for run in runs]
        tested = [r[f"test_{metric}"] for r in last]
        rows.append(
            {
                "arm": arm.label,
                "best lr": f"{rate:g}{edge}",
                f"last train loss{above}": show(interval(list(map(objective, last))), "{:.3g}"),
                METRICS[metric].label: show(np.round(interval(tested), 9), "{:.4g}"),
                "steps to the target": show(interval([r["step"] for r in at]), "{:.0f}"),
                "loads": show(interval([r["loads"] for r in at]), "{:.0f}"),
                "sent, in all-reduces": show(interval([r["sent"] for r in at]), "{:.0f}"),
                "seconds": show(interval([r["seconds"] for r in at]), "{:.2f}"),
            }
        )
    return markdown(rows)


def effects_table(all_records: Sequence[dict], chosen: dict[Arm, list[list[dict]]]) -> str:
    """Markdown: a row per effect, a column per response."""
    columns = {
        r.label: [shown(e, r.relative) for e in effects_of(chosen, r)]
        for r in responses(all_records)
    }
    names = [" × ".join(e.factors) for e in effects(np.zeros((2, 2, 2, 1)))]
    return markdown(
        [
            {"effect of": name} | {label: cells[i] for label, cells in columns.items()}
            for i, name in enumerate(names)
        ]
    )


def priced_table(chosen: dict[Arm, list[list[dict]]], machines: Sequence[Price]) -> str:
    """Markdown: priced time to the target on every machine, as times faster than the first arm.

    Geometric means over seeds, paired; the interval is theirs.
    """
    target = target_of(chosen)
    first = next(iter(chosen.values()))

    def times(runs, price):
        return np.log([priced(until(run, target), price) for run in runs])

    rows = []
    for arm, runs in chosen.items():
        row = {"arm": arm.label}
        for price in machines:
            mean, half = interval(times(first, price) - times(runs, price))
            text = f"{math.exp(mean):.2f}"
            if not math.isnan(half):
                text += f" ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})"
            row[price.label] = text
        rows.append(row)
    return markdown(rows)


def tables(
    all_records: Sequence[dict], chosen: dict[Arm, list[list[dict]]], machines: Sequence[Price]
) -> dict[str, str]:
    """{file name: its text}, what `report` writes."""
    return {
        "table.md": f"Target: {target_of(chosen):.4g}, which every arm reaches with every seed.\n\n"
        + table(all_records, chosen),
        "table_effects.md": "Effects from the first level to the second, 95 % intervals over "
        "seeds, × for factors; bold: no effect lies outside.\n\n"
        + effects_table(all_records, chosen),
        "table_priced.md": "Times faster to the target than the first arm, priced.\n\n"
        + priced_table(chosen, machines),
    }


def report(
    all_records: Sequence[dict],
    arms: Sequence[Arm],
    folder: str,
    title: str,
    machines: Sequence[Price],
) -> str:
    """Writes the tables and pictures into the folder and returns the text."""
    chosen = at_best(all_records, arms)
    texts = tables(all_records, chosen, machines)
    for name, text in texts.items():
        records.write_whole(os.path.join(folder, name), text + "\n")
    combined_plots.comparison(all_records, chosen, os.path.join(folder, "comparison.png"), title)
    found = {r: effects_of(chosen, r) for r in responses(all_records)}
    combined_plots.effects(found, os.path.join(folder, "effects.png"), title)
    return "\n\n".join(texts.values())


def forecast(plans: dict, order_sent: dict, machines: Sequence[Price]) -> str:
    """What the arms cost, known before a run: loads, rounds, what is sent, and priced time.

    Args:
      plans: {arm: its plans}; order_sent: {arm: what its order sends after a number of loads}.
    """
    rows = []
    for arm, plan in plans.items():
        steps = np.linspace(0, plan.total_steps, WINDOWS + 1).astype(int)[1:]
        loads = plan.echo.loads_before(steps)
        sent = plan.sync.rounds + order_sent[arm](plan.echo.loads)
        ends = [{"step": t, "loads": n, "sent": sent} for t, n in zip(steps, loads, strict=True)]
        rows.append(
            {"arm": arm.label, "loads": plan.echo.loads, "rounds": plan.sync.rounds}
            | {"sent, in all-reduces": f"{sent:.0f}"}
            | {price.label: f"{priced(ends, price):.0f}" for price in machines}
        )
    return markdown(rows)
