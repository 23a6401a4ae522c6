"""How much to echo at a given loading speed: a table and a picture, and the speed of a task here.

The command is `experiments.forecast` with --load_seconds and --step_seconds, or with --measure.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax

import ordering.input
from experiments.bench_parts.timing import momentum_step
from experiments.results import tables
from experiments.results.plots import COLOURS, pyplot, save
from experiments.tasks import Task
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


def _bernoulli(p: float, total_steps: int):
    return echo.bernoulli(p, total_steps=total_steps, key=jax.random.key(0))  # the same coins


def _fixed(factor: float, total_steps: int):
    # R is a quotient: 0.9 / 0.3 is a little more than 3.
    return echo.fixed(math.ceil(factor - 1e-9), total_steps=total_steps)


def _cosine(factor: float, total_steps: int):
    p = optax.cosine_decay_schedule(1.0, total_steps, alpha=1 / factor)
    return echo.error_diffusion(p, total_steps=total_steps)


def _measured(factor: float, total_steps: int):
    return echo.measured(total_steps=total_steps, max_factor=math.ceil(4 * factor))


# (R >= 1, total steps) -> policy; a new one is one row.
POLICIES: dict[str, Callable] = {
    "no echo": lambda factor, steps: _fixed(1, steps),
    "fixed, e = ceil(R)": _fixed,
    "Bernoulli, p = 1/R": lambda factor, steps: _bernoulli(1.0 / factor, steps),
    "Bernoulli, p = 0.9/R": lambda factor, steps: _bernoulli(0.9 / factor, steps),
    "error diffusion, p = 1/R": lambda factor, steps: echo.error_diffusion(
        1 / factor, total_steps=steps
    ),
    "cosine from 1 to 1/R, diffused": _cosine,
    "measured, at most 4R uses": _measured,
}


def records_of(
    speed: Speed, depths: Sequence[int], *, total_steps: int = TOTAL_STEPS
) -> list[dict]:
    """One record per policy and queue depth: what `echo_forecast` says of it."""
    found = []
    for name, make in POLICIES.items():
        policy = make(max(1.0, speed.ratio), total_steps)
        for depth in depths:
            cost = _forecast(policy, speed, depth)
            found.append({
                "policy": name, "depth": depth, "free_factor": cost.free_factor,
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
        f"{1e3 * speed.load_seconds:.4g} ms per load and {1e3 * speed.step_seconds:.4g} ms per "
        f"step ({speed.source}): {_free(speed)}.\n"
        f"Simulated over {found[0]['total_steps']} steps of constant speed. Slowdown is the time "
        f"per step over that of a step that never waits.\n\n{tables.markdown(rows)}\n"
    )


def _free(speed):
    if speed.ratio <= 1:
        return f"R = {speed.ratio:.3g}, loads keep up and echoing saves no time"
    return f"R = {speed.ratio:.3g}, the uses of a batch that are free"


def picture(speed: Speed, found: Sequence[dict], path: str) -> None:
    """Writes a PNG: slowdown against queue depth, and time per step against loads per step."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(12, 5), layout="constrained")
    _draw_depths(left, found)
    _draw_shares(right, speed)
    figure.suptitle(
        f"{1e3 * speed.load_seconds:.4g} ms per load, {1e3 * speed.step_seconds:.4g} ms per step: "
        f"{_free(speed)}"
    )
    save(figure, path)


def _draw_depths(axis, found):
    depths = sorted({r["depth"] for r in found})
    lines = {
        name: [
            r["slowdown"] for d in depths for r in found if (r["policy"], r["depth"]) == (name, d)
        ]
        for name in POLICIES
    }
    # Those that load more often than 1/R stall at any depth, and would flatten the others.
    above = {r["policy"] for r in found if r["share"] * r["free_factor"] > 1.05}
    for place, (name, slowdowns) in enumerate(lines.items()):
        if name not in above:
            # Several lie on 1: later ones are smaller, so that all show.
            size = 13 - 1.6 * place
            axis.plot(
                depths, slowdowns, color=COLOURS[place], marker="o", ms=size, lw=size / 4,
                label=name, clip_on=False,
            )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(depths, [str(d) for d in depths])
    axis.minorticks_off()
    top = max([1.05, *(max(v) for name, v in lines.items() if name not in above)]) - 1
    beyond = "; ".join(f"{name}: {max(lines[name]):.2f}" for name in lines if name in above)
    axis.set_title(f"above the scale: {beyond}" if beyond else "", fontsize="small")
    axis.set(xlabel="queue depth, batches", ylabel="slowdown, 1 is no stall")
    axis.set_ylim(1 - 0.02 * top, 1 + 1.15 * top)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right", fontsize="small")


def _draw_shares(axis, speed):
    # Around 1/R, where the two differ.
    most = min(1.0, 2.4 / speed.ratio)
    shares = np.unique(np.append(np.linspace(most / 12, most, 12), min(1.0, 1 / speed.ratio)))
    names, sizes = list(POLICIES), {"Bernoulli": 7, "error diffusion": 4}
    for label, size in sizes.items():
        make = POLICIES[f"{label}, p = 1/R"]
        costs = [_forecast(make(1 / p, PICTURE_STEPS), speed, PICTURE_DEPTH) for p in shares]
        times = [1e3 * c.seconds_per_step for c in costs]
        colour = COLOURS[names.index(f"{label}, p = 1/R")]
        axis.plot(shares, times, color=colour, marker="o", ms=size, label=label)
    axis.axhline(1e3 * speed.step_seconds, color="#444444", lw=1, ls=":", label="a step alone")
    if speed.ratio > 1:
        label = f"p = 1/R = {1 / speed.ratio:.3g}"
        axis.axvline(1 / speed.ratio, color="#444444", lw=1, ls="--", label=label)
    axis.set(xlabel="p, loads per step", ylabel="time per step, ms")
    axis.set(xlim=(0, 1.02 * most), ylim=(0, None))
    axis.set_title(f"queue depth {PICTURE_DEPTH}", fontsize="small")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize="small")


def measure(task: Task, *, batch_size: int, rounds: int = 7, per_round: int = 20) -> Speed:
    """Times loads and steps of a task on this machine, one after the other.

    t_step: a step of SGD with momentum, waited for, its batch on the device. t_load: reading a
    batch in a random order through `ordering.input.batches`, or by a NumPy gather without
    TensorFlow, and moving it to the device. Each is the median of `rounds` means over `per_round`,
    for batches that are read in parallel arrive in bursts; a first round warms up. In a run loads
    and steps share the cores, and data may not be in memory, which this leaves out.
    """
    count = len(task.train["y"])
    if not 1 <= batch_size <= count:
        raise ValueError(
            f"--batch_size is {batch_size}: {task.name} has {count} training examples; pass a "
            "number from 1 to that."
        )
    generator, wanted = np.random.default_rng(0), batch_size * per_round * (rounds + 1)
    order = np.concatenate([generator.permutation(count) for _ in range(-(-wanted // count))])
    indices = order[:wanted]
    try:
        read = ordering.input.batches(task.train, indices, batch_size=batch_size)
        source = "tf.data"
    except ImportError:
        parts = indices.reshape(-1, batch_size)
        read = (jax.tree.map(lambda x, i=i: x[i], task.train) for i in parts)
        source = "NumPy gather"
    load = _median(lambda: jax.block_until_ready(jax.device_put(next(read))), rounds, per_round)
    batch = jax.device_put(jax.tree.map(lambda x: x[:batch_size], task.train))
    take = momentum_step(task.model)
    step = _median(lambda: take(batch), rounds, per_round)
    return Speed(load, step, f"{task.name}, batch {batch_size}, measured here, {source}")


def _median(call, rounds, per_round):
    means = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(per_round):
            call()
        means.append((time.perf_counter() - start) / per_round)
    return statistics.median(means[1:])
