"""Measures what grows with the units M of an order, the workers W, and the steps T of a plan.

    python -m benchmarks.growth --part=units                                  # M = 10^4 .. 10^7
    python -m benchmarks.growth --part=units --sizes=100000000 --repeats=1    # 24 GB of memory
    python -m benchmarks.growth --part=workers                                # W = 1 .. 1,024
    python -m benchmarks.growth --part=plans                                  # T = 10^4 .. 10^7

`benchmarks.growth_units` measures a row of units.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

import local_opt
import ordering
from benchmarks import timing
from benchmarks.growth_units import GRADIENT, ORDERS, STEPS, mapped
from experiments.timing import carry_on, medians
from ordering import echo

SIZES = {
    "units": [10**4, 10**5, 10**6, 10**7],
    "workers": [1, 4, 16, 64, 256, 1024],
    "plans": [10**4, 10**6, 10**7],
}


def unit_rows(sizes: list[int], repeats: int) -> Iterator[dict]:
    """A process for every row, so that none inherits memory."""
    for name in ORDERS:
        for size in sizes:
            given = [f"--order={name}", f"--units={size}", f"--repeats={repeats}"]
            command = [sys.executable, "-m", "benchmarks.growth_units", *given]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            yield json.loads(done.stdout.splitlines()[-1])


def worker_step(order: ordering.Ordering) -> tuple[Callable, Callable]:
    """(init, step) of one worker: SGD on linear regression, local steps, and the order's signs."""
    plan = local_opt.constant(4, total_steps=10**7)
    optimizer = local_opt.local_steps(optax.sgd(1e-3), plan)

    def init(key):
        params = jnp.zeros(GRADIENT)
        return params, optimizer.init(params), order.init(key, params)

    def step(run, batch):
        params, state, orders = run
        gradients = (batch @ params - 1.0)[:, None] * batch  # of every unit
        updates, state = optimizer.update(jnp.mean(gradients, axis=0), state, params)
        orders = order.observe(orders, gradients)
        return optax.apply_updates(params, updates), state, orders

    return init, step


def worker_rows(counts: list[int], repeats: int) -> Iterator[dict]:
    """One step and the end of an epoch of W workers, of 64 units each, simulated on one device."""
    for name in ("pair_balance", "cd_grab"):
        for workers in counts:
            order = getattr(ordering, name)(64, units_per_step=8)
            init, step = worker_step(order)
            run = jax.jit(local_opt.map_workers(init, workers, in_specs="key", out_specs="worker"))(
                jax.random.key(0)
            )
            batch = jax.random.normal(jax.random.key(1), (8 * workers, GRADIENT))
            lowered = jax.jit(
                local_opt.map_workers(
                    step, workers, in_specs=("worker", "batch"), out_specs="worker"
                ),
                donate_argnums=0,
            ).lower(run, batch)
            begin = time.perf_counter()
            program = lowered.compile()
            compile_seconds = time.perf_counter() - begin
            # A copy of the orders' states, which the steps do not donate.
            orders = jax.tree.map(jnp.copy, run[2])
            one, end = carry_on(program, run), mapped(order, workers, GRADIENT)[2]
            end = carry_on(end, orders)
            times = medians(
                {
                    "step": lambda one=one, batch=batch: [one(batch) for _ in range(STEPS)][-1],
                    "epoch": lambda end=end: [end() for _ in range(STEPS)][-1],
                },
                repeats,
            )
            step_us, epoch_us = (1e6 * times[part] / STEPS for part in ("step", "epoch"))
            yield {
                "order": name,
                "workers": workers,
                "compile_s": round(compile_seconds, 2),
                "program_kb": round(len(program.as_text()) / 1e3),
                "step_us": round(step_us, 1),
                "of_a_worker_us": round(step_us / workers, 2),
                "next_epoch_us": round(epoch_us, 1),
                "next_epoch_of_a_worker_us": round(epoch_us / workers, 2),
            }


def qsr(steps: int):
    warmup = steps // 10
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.008, warmup, steps, 1e-6)
    rule = {"total_steps": steps, "alpha": 0.0175, "h_base": 4, "warmup_steps": warmup}
    return local_opt.qsr(rate, **rule)


KEY = jax.random.key
FRESH = [True, False, False, False]  # again and again
PLANS = {  # T -> plan
    "constant, H = 1": lambda t: local_opt.constant(1, total_steps=t),
    "constant, H = 4": lambda t: local_opt.constant(4, total_steps=t),
    "from_function, H = 1000": lambda t: local_opt.from_function(lambda s: 1000, total_steps=t),
    "aligned, epochs of 5000": lambda t: local_opt.constant(4, total_steps=t).aligned(every=5000),
    "qsr, warmup and cosine": qsr,
    "fixed, e = 4": lambda t: echo.fixed(4, total_steps=t),
    "bernoulli, p = 1/4": lambda t: local_opt.bernoulli(0.25, total_steps=t, key=KEY(0)),
    "echo.bernoulli, p = 1/4": lambda t: echo.bernoulli(0.25, total_steps=t, key=KEY(0)),
    "error_diffusion, p = 0.3": lambda t: echo.error_diffusion(0.3, total_steps=t),
}


def plan_row(name: str, steps: int, repeats: int) -> dict:
    plan = PLANS[name](steps)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "plan.json")
        calls = {
            "make": lambda: PLANS[name](steps),
            "hash": plan.digest,
            "save": lambda: plan.save(path),
            "read": lambda: type(plan).read(path),
        }
        measured = {part: medians({part: call}, repeats)[part] for part, call in calls.items()}
        size = path.stat().st_size
    return {
        "plan": name,
        "steps": f"{steps:,}",
        "stretches": f"{len(plan._marked):,}",
        "held_kb": round(plan._bounds.nbytes / 1e3, 2),
        "file_kb": round(size / 1e3, 2),
        **{f"{part}_ms": round(1e3 * measured[part], 2) for part in calls},
    }


def plan_rows(lengths: list[int], repeats: int) -> Iterator[dict]:
    for name in PLANS:
        for steps in lengths:
            yield plan_row(name, steps, repeats)


def main(argv) -> None:
    del argv
    values = flags.FLAGS
    parts = {"units": unit_rows, "workers": worker_rows, "plans": plan_rows}
    sizes = [int(size) for size in values.sizes] or SIZES[values.part]
    timing.print_rows(parts[values.part](sizes, values.repeats))


if __name__ == "__main__":
    flags.DEFINE_enum("part", "units", list(SIZES), "what grows")
    flags.DEFINE_list("sizes", [], "M, W or T of the rows")
    flags.DEFINE_integer("repeats", 3, "timings of a call, after a first one", lower_bound=1)
    app.run(main)
