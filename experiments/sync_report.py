"""Synchronisation rules x seeds: from records to a table and a picture."""

import math
import os
from collections.abc import Mapping, Sequence

import numpy as np

from experiments import records, sync_plots
from experiments.compare import interval, markdown, show
from experiments.sync_rules import RULES
from local_opt import SyncPlan

FINALISTS = 2


def finalists(all_records: Sequence[dict], rule: str) -> list[float]:
    """The peak rates at which seed 0 ends with the best validation accuracies, best first."""
    ends = [r for r in finals(all_records) if r["rule"] == rule and r["seed"] == 0]
    ends = [r for r in ends if not r["diverged"]]
    ends.sort(key=lambda r: (r["valid_accuracy"], -r["train_loss"]), reverse=True)
    return [r["peak_rate"] for r in ends[:FINALISTS]]


def best_rate(all_records: Sequence[dict], rule: str) -> float | None:
    """The peak rate with the best mean validation accuracy, of those that ran with most seeds.

    None if no run has reached its end.
    """
    accuracies = validation(all_records, rule)
    most = max(map(len, accuracies.values()), default=0)
    means = {rate: np.mean(found) for rate, found in accuracies.items() if len(found) == most}
    return max(means, key=means.get, default=None)


def validation(all_records: Sequence[dict], rule: str) -> dict[float, list[float]]:
    """{peak rate: final validation accuracies of all seeds}, without runs that diverged."""
    found = {}
    for r in finals(all_records):
        if r["rule"] == rule and not r["diverged"]:
            found.setdefault(r["peak_rate"], []).append(r["valid_accuracy"])
    return found


def finals(all_records: Sequence[dict]) -> list[dict]:
    """The last record of every run."""
    last = {}
    for r in all_records:
        key = (r["rule"], r["peak_rate"], r["seed"])
        if key not in last or r["step"] >= last[key]["step"]:
            last[key] = r
    return list(last.values())


def at_best(all_records: Sequence[dict]) -> dict[str, list[dict]]:
    """{rule: records of all seeds at its own best peak rate}, without runs that diverged."""
    chosen = {}
    for rule in dict.fromkeys(r["rule"] for r in all_records):
        rate = best_rate(all_records, rule)
        own = [r for r in all_records if (r["rule"], r["peak_rate"]) == (rule, rate)]
        lost = {r["seed"] for r in own if r["diverged"]}
        chosen[rule] = [r for r in own if r["seed"] not in lost]
    return chosen


def table(all_records: Sequence[dict], plans: Mapping[str, SyncPlan]) -> str:
    """The table as Markdown: mean and half width of the 95 % interval over seeds."""
    rows = []
    diverged = [r for r in finals(all_records) if r["diverged"]]
    for rule, own in at_best(all_records).items():
        ends = finals(own)
        plan = plans[rule]
        tried = sorted({r["peak_rate"] for r in all_records if r["rule"] == rule})
        out = sorted(r["peak_rate"] for r in diverged if r["rule"] == rule)
        rate = best_rate(all_records, rule)
        edge = rate in (tried[0], tried[-1]) and len(tried) > 1

        def column(name, form, ends=ends):
            values = [math.nan if r.get(name) is None else r[name] for r in ends]
            return show(interval(values), form) if values else "-"

        rows.append(
            {
                "rule": RULES[rule].label,
                "peak lr": "all diverge" if rate is None else f"{rate:g}{' (edge)' * edge}",
                "seeds": len(ends),
                "test accuracy": column("test_accuracy", "{:.4f}"),
                "train loss": column("train_loss", "{:.4f}"),
                "volume": f"{plan.volume:.2%}",
                "rounds": plan.rounds,
                "H": f"{plan.periods.min()} to {plan.periods.max()}",
                "seconds": column("seconds", "{:.1f}"),
                "last drift": column("drift", "{:.4f}"),
                "diverged": ", ".join(f"{r:g}" for r in out) or "-",
            }
        )
    return markdown(rows)


def sweep(all_records: Sequence[dict]) -> str:
    """Mean validation accuracy at every peak rate, which chose them, as Markdown.

    In brackets the number of seeds, where it is not one.
    """
    rates = sorted({r["peak_rate"] for r in all_records})
    rows = []
    for rule in dict.fromkeys(r["rule"] for r in all_records):
        tried = {r["peak_rate"] for r in all_records if r["rule"] == rule}
        found = validation(all_records, rule)

        def cell(rate, found=found, tried=tried):
            if rate not in found:
                return "diverged" if rate in tried else "-"
            seeds = len(found[rate])
            return f"{np.mean(found[rate]):.4f}" + (f" ({seeds})" if seeds > 1 else "")

        rows.append({"rule": RULES[rule].label} | {f"lr {rate:g}": cell(rate) for rate in rates})
    return markdown(rows)


def against(all_records: Sequence[dict], rule: str) -> str:
    """Test accuracy of every rule less that of `rule`, paired by seed, as Markdown."""
    ends = {name: {r["seed"]: r for r in finals(own)} for name, own in at_best(all_records).items()}
    rows = []
    for name, own in ends.items():
        shared = sorted(set(own) & set(ends[rule]))
        if name == rule or not shared:
            continue
        differences = [
            100 * (own[s]["test_accuracy"] - ends[rule][s]["test_accuracy"]) for s in shared
        ]
        rows.append(
            {
                f"points against {RULES[rule].label}": RULES[name].label,
                "test accuracy": show(np.array(interval(differences)), "{:+.2f}").replace(
                    "± +", "± "
                ),
            }
        )
    return markdown(rows) if rows else ""


def report(
    all_records: Sequence[dict], plans: Mapping[str, SyncPlan], folder: str, title: str
) -> str:
    """Writes table.md and comparison.png into the folder and returns the tables."""
    rates = "Mean validation accuracy at every peak rate (seeds)"
    parts = [table(all_records, plans), f"{rates}\n\n{sweep(all_records)}"]
    if "parallel" in plans:
        parts.append(against(all_records, "parallel"))
    text = "\n\n".join(part for part in parts if part)
    records.write_whole(os.path.join(folder, "table.md"), text + "\n")
    sync_plots.comparison(
        at_best(all_records), plans, os.path.join(folder, "comparison.png"), title
    )
    return text
