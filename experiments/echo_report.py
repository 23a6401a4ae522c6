"""Arms x loading speeds x seeds: which learning rate is each arm's own, and what it takes there."""

import os
from collections.abc import Sequence

import numpy as np

from experiments import echo_plots, records
from experiments.compare import interval, markdown, show
from experiments.echo_arms import ARMS

FINALISTS = 2


def ends(all_records: Sequence[dict], **fields) -> list[dict]:
    """The last records of the runs with these fields."""
    return [
        r for r in all_records if r["ended"] and all(r[name] == v for name, v in fields.items())
    ]


def steps_to_target(record: dict, part: str) -> float:
    """Steps until the metric of a half of the test set is at the target; inf if it never is."""
    reached = record["reached"][part]
    return float("inf") if reached is None else reached["step"]


def finalists(all_records: Sequence[dict], arm: str, speed: float) -> list[float]:
    """The rates with which seed 0 arrives first, by the validation half."""
    runs = ends(all_records, arm=arm, speed=speed, seed=0, tuning=True, diverged=None)
    return [r["rate"] for r in sorted(runs, key=lambda r: steps_to_target(r, "valid"))[:FINALISTS]]


def best_rate(all_records: Sequence[dict], arm: str, speed: float) -> float | None:
    """The rate with which most seeds arrive, and these first, of the rates with most seeds.

    Steps are counted: for one arm and one speed, fewer steps are less time.
    """
    runs = ends(all_records, arm=arm, speed=speed, tuning=True)
    steps = {}
    for r in runs:
        steps.setdefault(r["rate"], []).append(steps_to_target(r, "valid"))
    most = max(map(len, steps.values()), default=0)
    kept = {rate: np.array(found) for rate, found in steps.items() if len(found) == most}
    return min(kept, key=lambda rate: _rank(kept[rate]), default=None)


def _rank(steps):
    arrived = np.isfinite(steps)
    return (~arrived).sum(), steps[arrived].mean() if arrived.any() else 0.0


def timed(all_records: Sequence[dict], arm: str, speed: float) -> list[dict]:
    """All records of the throttled runs at the arm's own best rate."""
    rate = best_rate(all_records, arm, speed)
    return [
        r
        for r in all_records
        if (r["arm"], r["speed"], r["rate"], r["timed"]) == (arm, speed, rate, True)
    ]


def to_target(runs: Sequence[dict], name: str) -> dict[int, float]:
    """{seed: step, loads, rounds or seconds at the target on the test half}; inf: never there."""
    found = {r["seed"]: r["reached"]["test"] for r in ends(runs)}
    return {seed: float("inf") if at is None else at[name] for seed, at in found.items()}


def table(all_records: Sequence[dict], speed: float) -> str:
    """Markdown: one row per arm; mean and half width of the 95 % interval over seeds.

    Times faster are paired by seed: geometric means with their interval.
    """
    arms = list(dict.fromkeys(r["arm"] for r in all_records if r["speed"] == speed))
    base = to_target(timed(all_records, "none", speed), "seconds")
    rows = []
    for arm in arms:
        runs = timed(all_records, arm, speed)
        if not runs:
            continue
        tried = sorted({r["rate"] for r in ends(all_records, arm=arm, speed=speed, tuning=True)})
        rate = runs[0]["rate"]
        edge = len(tried) > 1 and rate in (tried[0], tried[-1])
        seconds = to_target(runs, "seconds")
        last = ends(runs)
        per_step = [r["seconds"] / r["step"] * 1e3 for r in last]
        rows.append(
            {
                "arm": ARMS[arm].label,
                "lr": f"{rate:g}{' (edge)' * edge}",
                "seconds": _reached(seconds, "{:.2f}"),
                "times faster than no echo": _times(base, seconds),
                "loads": _reached(to_target(runs, "loads"), "{:.0f}"),
                "steps": _reached(to_target(runs, "step"), "{:.0f}"),
                "rounds": _reached(to_target(runs, "rounds"), "{:.0f}"),
                "ms per step": show(interval(per_step), "{:.2f}"),
                "loads per step": f"{np.mean([r['loads'] / r['step'] for r in last]):.2f}",
            }
        )
    return markdown(rows)


def summary(all_records: Sequence[dict], speeds: Sequence[float]) -> str:
    """Markdown: how many times faster than no echo every arm is at the target, at every speed."""

    def cell(arm, speed):
        runs = [to_target(timed(all_records, name, speed), "seconds") for name in ("none", arm)]
        arrived = [np.isfinite(s) for s in runs[1].values()]
        if not arrived or all(arrived):
            return _times(*runs)
        return f"{sum(arrived)} of {len(arrived)} arrive"

    return markdown(
        [
            {"times faster than no echo": ARMS[arm].label}
            | {f"R = {speed:g}": cell(arm, speed) for speed in speeds}
            for arm in dict.fromkeys(r["arm"] for r in all_records)
        ]
    )


def _times(base: dict[int, float], seconds: dict[int, float]) -> str:
    """Geometric mean over seeds of base / seconds, and its 95 % interval, from logarithms."""
    shared = [seed for seed in seconds if seed in base]
    pairs = np.array([(base[seed], seconds[seed]) for seed in shared])
    if not shared or not np.isfinite(pairs).all():
        return "-"
    mean, half = interval(np.log(pairs[:, 0] / pairs[:, 1]))
    bounds = f" ({np.exp(mean - half):.2f} to {np.exp(mean + half):.2f})"
    return f"{np.exp(mean):.2f}" + (bounds if half > 0 else "")


def _reached(values: dict[int, float], form: str) -> str:
    found = np.array(list(values.values()))
    if not np.isfinite(found).all():
        return f"{np.isfinite(found).sum()} of {len(found)} arrive"
    return show(interval(found), form)


def sweep(all_records: Sequence[dict], speed: float) -> str:
    """Mean steps to the target (validation half) at every rate, which chose them, as Markdown.

    An arm that multiplies its rates has them in the columns of the rates before.
    """
    runs = ends(all_records, speed=speed, tuning=True)
    base_rates = sorted({r["base_rate"] for r in runs})
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in runs):

        def cell(base_rate, arm=arm):
            own = [r for r in runs if (r["arm"], r["base_rate"]) == (arm, base_rate)]
            steps = [steps_to_target(r, "valid") for r in own]
            if not own or not np.isfinite(steps).all():
                return f"{np.isfinite(steps).sum()} of {len(own)} arrive" if own else "-"
            return f"{np.mean(steps):.0f}" + (f" ({len(own)})" if len(own) > 1 else "")

        rows.append({"arm": ARMS[arm].label} | {f"lr {r:g}": cell(r) for r in base_rates})
    return markdown(rows)


def report(all_records: Sequence[dict], folder: str, title: str, *, metric: str, target: float):
    """Writes table.md, time_to_target.png and a picture of curves per speed; returns the tables."""
    speeds = sorted({r["speed"] for r in all_records})
    parts = [summary(all_records, speeds)]
    for speed in speeds:
        parts.append(f"R = {speed:g}\n\n{table(all_records, speed)}")
        echo_plots.curves(
            {arm: timed(all_records, arm, speed) for arm in ARMS},
            os.path.join(folder, f"curves_R{speed:g}.png"),
            f"{title}, R = {speed:g}",
            metric=metric,
            target=target,
        )
    for speed in speeds:
        head = f"R = {speed:g}, tuning: mean steps to the target on the validation half (seeds)"
        parts.append(f"{head}\n\n{sweep(all_records, speed)}")
    seconds = {
        speed: {arm: to_target(timed(all_records, arm, speed), "seconds") for arm in ARMS}
        for speed in speeds
    }
    echo_plots.time_to_target(seconds, os.path.join(folder, "time_to_target.png"), title)
    text = "\n\n".join(parts)
    records.write_whole(os.path.join(folder, "table.md"), text + "\n")
    return text
