"""How much to echo at a given loading speed: a table and a picture."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.results import tables
from experiments.results.plots import COLOURS, panes, save
from experiments.studies.tables import ECHO_POLICIES
from experiments.training.config import RunConfig
from ordering import echo

TOTAL_STEPS = 100_000  # coins differ by some 0.002 of a slowdown from run to run of this length
PICTURE_DEPTH = 2  # of load_ahead, where none is given
PICTURE_STEPS = 10_000


class Speed(NamedTuple):
    """Seconds per load and per step, and where they come from."""

    load_seconds: float
    step_seconds: float
    source: str

    @property
    def ratio(self) -> float:
        return self.load_seconds / self.step_seconds

    def text(self, between: str) -> str:
        load, step = 1e3 * self.load_seconds, 1e3 * self.step_seconds
        return f"{load:.4g} ms per load{between}{step:.4g} ms per step"

    @property
    def free(self) -> str:
        if self.ratio <= 1:
            return f"R = {self.ratio:.3g}, loads keep up and echoing saves no time"
        return f"R = {self.ratio:.3g}, the uses of a batch that are free"


def _whole(ratio):
    return math.ceil(ratio - 1e-9)  # R is a quotient: 0.9 / 0.3 is a little more than 3


# A row of ECHO_POLICIES, and its echo factor at R >= 1; a new one is one row.
POLICIES = {
    "no echo": ("none", _whole),
    "fixed, e = ceil(R)": ("fixed", _whole),
    "Bernoulli, p = 1/R": ("bernoulli", float),
    "Bernoulli, p = 0.9/R": ("bernoulli", lambda ratio: ratio / 0.9),
    "error diffusion, p = 1/R": ("diffusion", float),
    "cosine from 1 to 1/R, diffused": ("diffusion_cosine", float),
    "measured, at most 4R uses": ("measured", _whole),
}


def policy_of(label: str, ratio: float, total_steps: int):
    """A row of POLICIES at R >= 1."""
    (name, factor), key = POLICIES[label], jax.random.key(0)
    if name == "bernoulli":  # the coins of what is published
        return echo.bernoulli(1 / factor(ratio), total_steps=total_steps, key=key)
    return ECHO_POLICIES[name].make(
        RunConfig(np.ones(total_steps), key, echo_factor=factor(ratio), horizon=total_steps)
    )


def records_of(
    speed: Speed, depths: Sequence[int], *, total_steps: int = TOTAL_STEPS
) -> list[dict]:
    """One record per policy and queue depth: what `echo_forecast` says of it."""
    found = []
    for label in POLICIES:
        policy = policy_of(label, max(1.0, speed.ratio), total_steps)
        for depth in depths:
            cost = _forecast(policy, speed, depth)
            found.append(speed._asdict() | {
                "policy": label, "depth": depth, "free_factor": cost.free_factor,
                "total_steps": total_steps, "loads": cost.loads, "share": cost.plan.share,
                "most_uses": int(cost.plan.uses.max()), "slowdown": cost.slowdown,
                "stall_seconds": cost.stall_seconds, "seconds_per_step": cost.seconds_per_step,
                "seconds_per_load": cost.total_seconds / cost.loads,
            })  # fmt: skip
    return found


def _forecast(policy, speed, depth):
    return echo.echo_forecast(
        policy, load_seconds=speed.load_seconds, step_seconds=speed.step_seconds, depth=depth
    )


def table(speed: Speed, found: Sequence[dict]) -> str:
    """Markdown: the free factor, and one row per policy and depth."""
    rows = [
        {
            "policy": r["policy"],
            "queue depth": r["depth"],
            "loads per step": f"{r['share']:.4f}",
            "most uses": r["most_uses"],
            "slowdown": f"{r['slowdown']:.3f}",
            "ms per step": f"{1e3 * r['seconds_per_step']:.4g}",
            "ms per load": f"{1e3 * r['seconds_per_load']:.4g}",
        }
        for r in found
    ]
    return (
        f"{speed.text(' and ')} ({speed.source}): {speed.free}.\n"
        f"Simulated over {found[0]['total_steps']} steps of constant speed. Slowdown is the time "
        f"per step over that of a step that never waits.\n\n{tables.markdown(rows)}\n"
    )


def picture(speed: Speed, found: Sequence[dict], path: str) -> None:
    """Writes a PNG: slowdown against queue depth, and time per step against loads per step."""
    figure, ((left, right),) = panes(1, 2, (12, 5))
    _draw_depths(left, found)
    _draw_shares(right, speed)
    save(figure, path, f"{speed.text(', ')}: {speed.free}")


def _draw_depths(axis, found):
    depths = sorted({r["depth"] for r in found})
    slowdowns = np.array([r["slowdown"] for r in found]).reshape(-1, len(depths))
    # Those that load more often than 1/R stall at any depth, and would flatten the others.
    above = {r["policy"] for r in found if r["share"] * r["free_factor"] > 1.05}
    top, beyond = 0.05, []
    for place, (label, line) in enumerate(zip(POLICIES, slowdowns, strict=True)):
        if label in above:
            beyond.append(f"{label}: {line.max():.2f}")
            continue
        # Several lie on 1: later ones are smaller, so that all show.
        size, top = 13 - 1.6 * place, max(top, line.max() - 1)
        axis.plot(
            depths, line, color=COLOURS[place], marker="o", ms=size, lw=size / 4, label=label,
            clip_on=False,
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(depths, [str(d) for d in depths])
    axis.minorticks_off()
    title = f"above the scale: {'; '.join(beyond)}" if beyond else ""
    axis.set_title(title, fontsize="small")
    axis.set(xlabel="queue depth, batches", ylabel="slowdown, 1 is no stall")
    axis.set_ylim(1 - 0.02 * top, 1 + 1.15 * top)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right", fontsize="small")


def _draw_shares(axis, speed):
    # Around 1/R, where the two differ.
    most = min(1.0, 2.4 / speed.ratio)
    shares = np.unique(np.append(np.linspace(most / 12, most, 12), min(1.0, 1 / speed.ratio)))
    for kind, size in {"Bernoulli": 7, "error diffusion": 4}.items():
        label = f"{kind}, p = 1/R"
        costs = [
            _forecast(policy_of(label, 1 / p, PICTURE_STEPS), speed, PICTURE_DEPTH) for p in shares
        ]
        times, colour = [1e3 * c.seconds_per_step for c in costs], [*POLICIES].index(label)
        axis.plot(shares, times, color=COLOURS[colour], marker="o", ms=size, label=kind)
    axis.axhline(1e3 * speed.step_seconds, color="#444444", lw=1, ls=":", label="a step alone")
    if speed.ratio > 1:
        label = f"p = 1/R = {1 / speed.ratio:.3g}"
        axis.axvline(1 / speed.ratio, color="#444444", lw=1, ls="--", label=label)
    axis.set(xlabel="p, loads per step", ylabel="time per step, ms")
    axis.set(xlim=(0, 1.02 * most), ylim=(0, None))
    axis.set_title(f"queue depth {PICTURE_DEPTH}", fontsize="small")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize="small")
