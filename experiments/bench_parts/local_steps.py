"""What do local steps cost? A step, and a sync, against the plain optax step of the same model.

Step: the plain row is loss, gradient, `inner.update` and `apply_updates`, jitted and donated. The
others do the same through local_opt, on one worker, where a sync moves no bytes: a hot step of
`local_rounds` (the fast path: no conditional, no collective), `local_steps` with sync=False, and
`local_steps` that decides in the graph. Aim: the hot step takes at most 1.02 plain steps.

Sync: one sync of W workers on W devices, in one flat collective or one per leaf, in float32 or
bfloat16. On a CPU the devices share the cores and collectives are copies in memory: these rows
order the ways and forecast nothing.

All rows of a part are measured in turns, in one process, after a warm-up. times_plain is the median
over the turns of the ratio to the plain row of the same turn, with its 95 % interval (order
statistics of the median).
"""

import functools
import os
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

import local_opt
from experiments.bench_parts import timing
from local_opt import runners
from syncopate import models

REPEATS = 41
WORKERS = 4
DEVICES = f"--xla_force_host_platform_device_count={WORKERS}"
PLAN = local_opt.constant(1000, total_steps=10**9)
# What is trained, the shape of an input, examples, and steps of a timed call.
MODELS = {
    "mlp, 784-128-10, batch 32": (lambda: models.mlp(num_features=784, hidden=(128,),
                                                     num_classes=10), (784,), 32, 200),
    "mlp, 784-1024-1024-10, batch 64": (lambda: models.mlp(num_features=784, hidden=(1024, 1024),
                                                           num_classes=10), (784,), 64, 20),
    "resnet 16-32-64, 32x32, batch 16": (models.small_resnet, (32, 32, 3), 16, 8),
    "vit 64x4, 32x32, batch 16": (models.vit, (32, 32, 3), 16, 8),
}  # fmt: skip
INNER = {"sgd, momentum": optax.sgd(1e-3, momentum=0.9), "adamw": optax.adamw(1e-4)}


def stepper(model, init: Callable, update: Callable, batch) -> Callable:
    """`steps -> state`: a call that takes so many steps, on from the last."""
    mesh, owned = runners.worker_mesh(1), (True, True)
    step = timing.gradient_step(model, update)
    run = runners.over_mesh(mesh)(step, owned_in=(*owned, False), owned_out=owned)
    jitted = jax.jit(lambda state, batch: run(*state, batch), donate_argnums=0)
    params = jax.tree.map(lambda p: p[None], jax.jit(model.init)(jax.random.key(0)))
    start = jax.device_put((params, jax.vmap(init)(params)), runners.owned_sharding(mesh))
    call = timing.carry_on(jitted, start)
    return lambda steps: [call(batch) for _ in range(steps)][-1]


def ways_of(inner) -> dict[str, tuple[Callable, Callable]]:
    """(init, update) of the plain optimizer and of what wraps it."""
    rounds = local_opt.local_rounds(inner, axis_name=runners.AXIS)
    planned = local_opt.local_steps(inner, PLAN, axis_name=runners.AXIS)

    def hot(grads, state, params):
        return planned.update(grads, state, params, sync=False)

    return {
        "plain optax": (inner.init, inner.update),
        "plain optax, again": (inner.init, inner.update),
        "local_rounds": (rounds.init, rounds.update),
        "local_steps, sync=False": (planned.init, hot),
        "local_steps, in the graph": (planned.init, planned.update),
    }


def step_rows(repeats: int) -> list[dict]:
    """Rows of every model and optimizer: microseconds per step, and against the plain step."""
    rows = []
    for model_name, (make, shape, size, steps) in MODELS.items():
        for inner_name, inner in INNER.items():
            model, generator = make(), np.random.default_rng(0)
            batch = {
                "x": jnp.asarray(generator.normal(size=(size, *shape)), jnp.float32),
                "y": jnp.asarray(generator.integers(0, 10, size), jnp.int32),
            }
            calls = {
                way: functools.partial(stepper(model, *functions, batch), steps)
                for way, functions in ways_of(inner).items()
            }
            times = timing.in_turns(calls, repeats)
            for way, seconds in times.items():
                ratios = np.array(seconds) / np.array(times["plain optax"])
                middle, low, high = timing.median_interval(ratios)
                rows.append({
                    "part": "step", "model": model_name, "optimizer": inner_name, "way": way,
                    "us_per_step": round(statistics.median(seconds) / steps * 1e6, 1),
                    "times_plain": round(middle, 3), "interval": f"{low:.3f} to {high:.3f}",
                })  # fmt: skip
    return rows


def sync_rows(repeats: int) -> list[dict]:
    """Rows for one sync of four workers with ten million parameters in 2 or 200 leaves."""
    mesh = runners.worker_mesh(WORKERS)
    ways = {
        "float32": None,
        "bfloat16 changes": local_opt.WIRES["bfloat16"],
        "8-bit changes": local_opt.WIRES["int8"],
        "4-bit changes": local_opt.WIRES["int4"],
    }

    def sync(wire):
        def one(params, anchor):
            if wire is None:
                return (local_opt.synchronize(params, axis_name=runners.AXIS),)
            return local_opt.synchronize_changes(
                params,
                axis_name=runners.AXIS,
                anchor=anchor,
                wire=wire,
                lost=local_opt.nothing_lost(params, wire),
            )

        sides = (True,) if wire is None else (True, True)
        return jax.jit(runners.over_mesh(mesh)(one, owned_in=(True, True), owned_out=sides))

    rows = []
    for leaves in (2, 200):
        leaf = jnp.ones((WORKERS, 10**7 // leaves))
        params = {str(i): jax.device_put(leaf, runners.owned_sharding(mesh)) for i in range(leaves)}
        calls = {way: functools.partial(sync(wire), params, params) for way, wire in ways.items()}
        rows += [
            {"part": "sync", "leaves": leaves, "way": way, "ms": round(seconds * 1e3, 1)}
            for way, seconds in timing.medians(calls, repeats).items()
        ]
    return rows


ROWS = {"step": step_rows, "sync": sync_rows}


def main(values: flags.FlagValues) -> None:
    # Read when the first device is asked for, which is below.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"
    repeats = max(6, values.repeats or REPEATS)  # for the intervals
    rows = [row for name in values.rows or ROWS for row in ROWS[name](repeats)]
    timing.publish(rows, values.jsonl)
