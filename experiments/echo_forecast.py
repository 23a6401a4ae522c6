"""How much to echo at a given loading speed: a table and a picture, and the speed of a task here.

The command is `experiments.forecast` with --load_seconds and --step_seconds, or with --measure.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ordering
from experiments import compare
from experiments.plots import COLOURS, pyplot, save
from experiments.tasks import Task

TOTAL_STEPS = 100_000  # coins differ by some 0.002 of a slowdown from run to run of this length
PICTURE_DEPTH = 2  # of load_ahead, where none is given
PICTURE_STEPS = 10_000


class Setting(NamedTuple):
    """What a policy is made for."""

    factor: float  # R, at least 1
    total_steps: int
    seed: int


class Speed(NamedTuple):
    """Seconds per load and per step, and where they come from."""

    load_seconds: float
    step_seconds: float
    source: str


def _diffused(s: Setting):
    return ordering.echo.error_diffusion(1 / s.factor, total_steps=s.total_steps)


def _fixed(s: Setting):
    # R is a quotient: 0.9 / 0.3 is a little more than 3.
    return ordering.echo.fixed(math.ceil(s.factor - 1e-9), total_steps=s.total_steps)


def _bernoulli(s: Setting, share: float):
    # The same coins for both shares.
    key = jax.random.key(s.seed)
    return ordering.echo.bernoulli(share / s.factor, total_steps=s.total_steps, key=key)


def _cosine(s: Setting):
    p = optax.cosine_decay_schedule(1.0, s.total_steps, alpha=1 / s.factor)
    return ordering.echo.error_diffusion(p, total_steps=s.total_steps)


def _measured(s: Setting):
    cap = math.ceil(4 * s.factor)
    return ordering.echo.measured(total_steps=s.total_steps, max_factor=cap)


# A new policy is one row.
POLICIES: dict[str, Callable] = {
    "no echo": lambda s: ordering.echo.fixed(1, total_steps=s.total_steps),
    "fixed, e = ceil(R)": _fixed,
    "Bernoulli, p = 1/R": lambda s: _bernoulli(s, 1.0),
    "Bernoulli, p = 0.9/R": lambda s: _bernoulli(s, 0.9),
    "error diffusion, p = 1/R": _diffused,
    "cosine from 1 to 1/R, diffused": _cosine,
    "measured, at most 4R uses": _measured,
}


def records_of(
    speed: Speed, depths: Sequence[int], *, total_steps: int = TOTAL_STEPS, seed: int = 0
) -> list[dict]:
    """One record per policy and queue depth: what `ordering.echo.echo_forecast` says of it."""
    setting = Setting(max(1.0, speed.load_seconds / speed.step_seconds), total_steps, seed)
    found = []
    for name, make in POLICIES.items():
        policy = make(setting)
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
        "per step over that of a step that never waits.\n\n"
        f"{compare.markdown(rows)}\n"
    )


def picture(speed: Speed, found: Sequence[dict], path: str, *, seed: int = 0) -> None:
    """Writes a PNG: slowdown against queue depth, and time per step against loads per step."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(12, 5), layout="constrained")
    _draw_depths(left, found)
    _draw_shares(right, speed, seed)
    figure.suptitle(
        f"{1e3 * speed.load_seconds:.4g} ms per load, {1e3 * speed.step_seconds:.4g} ms per step: "
        f"{_free(speed)}"
    )
    save(figure, path)


def _free(speed):
    factor = speed.load_seconds / speed.step_seconds
    if factor <= 1:
        return f"R = {factor:.3g}, loads keep up and echoing saves no time"
    return f"R = {factor:.3g}, the uses of a batch that are free"


def _forecast(policy, speed, depth):
    return ordering.echo.echo_forecast(
        policy, load_seconds=speed.load_seconds, step_seconds=speed.step_seconds, depth=depth
    )


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
    top = max([1.05, *(max(v) for name, v in lines.items() if name not in above)])
    axis.set_ylim(1 - 0.02 * (top - 1), 1 + 1.15 * (top - 1))
    axis.set_xlabel("queue depth, batches")
    axis.set_ylabel("slowdown, 1 is no stall")
    axis.grid(alpha=0.3)
    beyond = "; ".join(f"{name}: {max(lines[name]):.2f}" for name in lines if name in above)
    axis.set_title(f"above the scale: {beyond}" if beyond else "", fontsize="small")
    axis.legend(loc="upper right", fontsize="small")


def _draw_shares(axis, speed, seed):
    factor = speed.load_seconds / speed.step_seconds
    # Around 1/R, where the two differ.
    most = min(1.0, 2.4 / factor)
    shares = np.unique(np.append(np.linspace(most / 12, most, 12), min(1.0, 1 / factor)))
    ways = {
        "Bernoulli": lambda p: ordering.echo.bernoulli(
            p, total_steps=PICTURE_STEPS, key=jax.random.key(seed)
        ),
        "error diffusion": lambda p: ordering.echo.error_diffusion(p, total_steps=PICTURE_STEPS),
    }
    colours = (COLOURS[list(POLICIES).index("Bernoulli, p = 1/R")],
               COLOURS[list(POLICIES).index("error diffusion, p = 1/R")])  # fmt: skip
    for colour, size, (name, make) in zip(colours, (7, 4), ways.items(), strict=True):
        costs = [_forecast(make(float(p)), speed, PICTURE_DEPTH) for p in shares]
        times = [1e3 * c.seconds_per_step for c in costs]
        axis.plot(shares, times, color=colour, marker="o", ms=size, label=name)
    axis.axhline(1e3 * speed.step_seconds, color="#444444", lw=1, ls=":", label="a step alone")
    if factor > 1:
        axis.axvline(
            1 / factor, color="#444444", lw=1, ls="--", label=f"p = 1/R = {1 / factor:.3g}"
        )
    axis.set_xlim(0, 1.02 * most)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("p, loads per step")
    axis.set_ylabel("time per step, ms")
    axis.set_title(f"queue depth {PICTURE_DEPTH}", fontsize="small")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize="small")


def measure(task: Task, *, batch_size: int, rounds: int = 7, per_round: int = 20) -> Speed:
    """Times loads and steps of a task on this machine, one after the other.

    t_step: a jitted step of SGD with momentum, waited for, its batch on the device. t_load: reading
    a batch in a random order through `input.batches`, or by a NumPy gather where TensorFlow is
    not installed, and moving it to the device. Each is the median of `rounds` means over
    `per_round`, for batches that are read in parallel arrive in bursts; a first round warms up.

    In a run loads and steps share the cores, which this leaves out. The data of all tasks are in
    memory: what a disk or a network takes, pass as --load_seconds.

    Raises:
      ValueError: for more examples in a batch than the task has.
    """
    count = len(task.train["y"])
    if not 1 <= batch_size <= count:
        raise ValueError(f"batch_size is {batch_size}: {task.name} has {count} training examples.")
    generator, wanted = np.random.default_rng(0), batch_size * per_round * (rounds + 1)
    order = np.concatenate([generator.permutation(count) for _ in range(-(-wanted // count))])
    indices = order[:wanted]
    try:
        batches, source = (
            ordering.input.batches(task.train, indices, batch_size=batch_size),
            "tf.data",
        )
    except ImportError:
        parts = indices.reshape(-1, batch_size)
        batches = (jax.tree.map(lambda x, i=i: x[i], task.train) for i in parts)
        source = "NumPy gather"
    load = _median(lambda: jax.block_until_ready(jax.device_put(next(batches))), rounds, per_round)
    batch = jax.device_put(jax.tree.map(lambda x: x[:batch_size], task.train))
    step = _median(_stepper(task.model, batch), rounds, per_round)
    return Speed(load, step, f"{task.name}, batch {batch_size}, measured here, {source}")


def _median(call, rounds, per_round):
    means = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(per_round):
            call()
        means.append((time.perf_counter() - start) / per_round)
    return statistics.median(means[1:])


def _stepper(model, batch):
    """A call that takes one step and waits for it; the state is donated, and kept here."""
    optimizer = optax.sgd(1e-3, momentum=0.9)

    def step(params, state, batch, seed):
        key = jax.random.key(seed)
        grads = jax.grad(lambda p: jnp.mean(model.loss(p, batch, key)))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1))
    params = jax.jit(model.init)(jax.random.key(0))
    held, seeds = [params, optimizer.init(params)], itertools.count()

    def call():
        held[:] = jax.block_until_ready(jitted(*held, batch, next(seeds)))

    return call
