"""Measures what grows with the units M of an order, the workers W, and the steps T of a plan.

    python -m benchmarks.growth --part=units                        # M = 10^4 .. 10^7
    python -m benchmarks.growth --part=units --sizes=100000000      # 24 GB of memory
    python -m benchmarks.growth --part=workers                      # W = 1 .. 1,024
    python -m benchmarks.growth --part=plans                        # T = 10^4 .. 10^9

Every row of units is a process of its own, as its peaks of resident memory are those of the process
during one phase each, less what it held before the first order. Units are those of all workers.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import local_opt
import ordering
from experiments import timing
from experiments.study.cost import tree_bytes
from experiments.training import checkpoint
from experiments.training.config import Plans
from experiments.training.loop import Progress
from ordering import echo

GRADIENT, PER_STEP, SKETCH = 64, 64, 8  # entries, units per worker and step, numbers of a sketch
STEPS = 50  # between two looks at the clock
SIZES = {
    "units": [10**4, 10**5, 10**6, 10**7],
    "workers": [1, 4, 16, 64, 256, 1024],
    "plans": [10**4, 10**6, 10**7, 10**9],
}
DEALT = ordering.dealing.DealtState | ordering.dealing.DealtShuffleState


def dealt_pairs(m):
    return ordering.dealt(ordering.cd_grab(m, units_per_step=PER_STEP, gathers="step"), m)


ORDERS = {  # (workers, their units -> order)
    "random_reshuffling": (1, ordering.random_reshuffling),
    "block_reshuffling": (1, lambda m: ordering.block_reshuffling(m, block_size=PER_STEP)),
    "pair_balance": (1, lambda m: ordering.pair_balance(m, units_per_step=PER_STEP)),
    "grab": (1, lambda m: ordering.grab(m, units_per_step=PER_STEP)),
    "cd_grab": (2, lambda m: ordering.cd_grab(m, units_per_step=PER_STEP)),
    "cd_grab, at syncs": (
        2, lambda m: ordering.cd_grab(m, units_per_step=PER_STEP, gathers="sync")
    ),
    "dealt_reshuffling": (2, ordering.dealt_reshuffling),
    "dealt cd_grab": (2, dealt_pairs),
}  # fmt: skip


def lifted(order: ordering.Ordering, workers: int, numbers: int) -> tuple[Callable, ...]:
    """(init, observe, next_epoch) of all workers, simulated; the last two donate their states."""

    def init(key):
        return order.init(key, jnp.zeros(numbers))

    def observe(state, rows):
        return order.observe(state, ordering.Rows.of(rows))

    def next_epoch(state):
        return order.next_epoch(state)

    words = {init: "key", observe: "owned split", next_epoch: "owned"}
    calls = [local_opt.lift(f, workers, inputs=words[f], outputs="owned") for f in words]
    return jax.jit(calls[0]), *(jax.jit(call, donate_argnums=0) for call in calls[1:])


def phase(call: Callable, repeats: int) -> tuple[float, float]:
    """(median seconds of a call, peak MB of resident memory until now since the last phase)."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    return timing.medians({"": call}, repeats)[""], resident("VmHWM")


def resident(field: str) -> float:
    """MB of memory of this process: VmRSS now, VmHWM at its peak."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def saved(state, folder: str, repeats: int) -> tuple[float, float, float]:
    """(seconds to save, to restore, peak MB) of a checkpoint of the state, with its hashes."""
    plans = Plans(local_opt.every_step(1), echo.fixed(1, total_steps=1), np.ones(1))
    program, steps = types.SimpleNamespace(sizes=(), units=None), iter(range(1, 99))

    with checkpoint.opened(folder) as manager:

        def save():
            at, seen = Progress(next(steps)), checkpoint.Evaluation()
            checkpoint.save(manager, program, plans, at, state, seen, {})
            manager.wait_until_finished()

        save_seconds, peak = phase(save, repeats)

    def restore():
        return checkpoint.read_state(f"{folder}/{checkpoint.settled(folder)}", state)

    restore_seconds, later = phase(restore, repeats)
    return save_seconds, restore_seconds, max(peak, later)


def first_batches(state, units: int) -> dict[str, Callable]:
    """Calls that read the first batch of an epoch, to the device or by tf.data."""
    source = np.zeros((units, 1), np.float32)
    sizes = {"units_per_step": PER_STEP}
    if isinstance(state, DEALT):
        sizes["total"] = units

    def read():
        with ordering.input.read_epochs(source, lambda: state, **sizes) as reads:
            return next(reads)

    def tf_data():
        indices, batch = ordering.input.step_indices(np.asarray(state.current), **sizes)
        return next(ordering.input.batches(source, indices, batch_size=batch))

    return {"read_epochs": read, "tf.data": tf_data}


def unit_row(name: str, units: int, repeats: int) -> dict:
    workers, make = ORDERS[name]
    numbers = SKETCH if "syncs" in name else GRADIENT
    init, observe, next_epoch = lifted(make(units // workers), workers, numbers)
    next(ordering.input.batches(np.zeros(1), [0], batch_size=1))  # imports TensorFlow
    before = resident("VmRSS")
    init_seconds, peak = phase(lambda: init(jax.random.key(0)), repeats)
    state, rows = init(jax.random.key(0)), jnp.ones((workers * PER_STEP, numbers))
    memory = observe.lower(state, rows).compile().memory_analysis()
    step = timing.carry_on(observe, state)
    observe_seconds, _ = phase(lambda: [step(rows) for _ in range(STEPS)][-1], repeats)
    epoch_seconds, later = phase(timing.carry_on(next_epoch, step(rows)), repeats)
    state = init(jax.random.key(1))
    with tempfile.TemporaryDirectory() as folder:
        save_seconds, restore_seconds, peak_save = saved(state, folder, repeats)
    batch = {name: phase(call, repeats) for name, call in first_batches(state, units).items()}
    peaks = {"order": max(peak, later), "checkpoint": peak_save}
    peaks["batch"] = max(found for _, found in batch.values())
    return {
        "order": name, "units": f"{units:,}", "workers": workers,
        "state_mb": round(tree_bytes(state) / 1e6, 1),
        "in_place_mb": round(memory.alias_size_in_bytes / 1e6, 1),
        "step_temporary_kb": round(memory.temp_size_in_bytes / 1e3, 1),
        "observe_us": round(1e6 * observe_seconds / STEPS, 1),
        "init_s": round(init_seconds, 3), "next_epoch_s": round(epoch_seconds, 3),
        "save_s": round(save_seconds, 2), "restore_s": round(restore_seconds, 2),
        "first_batch_s": round(batch["read_epochs"][0], 3),
        "first_by_tf_data_s": round(batch["tf.data"][0], 3),
    } | {f"peak_mb_{name}": round(found - before) for name, found in peaks.items()}  # fmt: skip


def unit_rows(sizes: list[int], repeats: int) -> Iterator[dict]:
    """A process for every row, so that none inherits memory."""
    for name in ORDERS:
        for size in sizes:
            given = [f"--order={name}", f"--sizes={size}", f"--repeats={repeats}"]
            command = [sys.executable, "-m", "benchmarks.growth", "--part=units", *given]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            yield json.loads(done.stdout.splitlines()[-1])


def worker_step(order: ordering.Ordering) -> tuple[Callable, Callable]:
    """(init, step) of one worker: SGD on linear regression, local steps, and the order's signs."""
    plan = local_opt.constant(4, total_steps=10**9)
    optimizer = local_opt.local_steps(optax.sgd(1e-3), plan)

    def init(key):
        params = jnp.zeros(GRADIENT)
        return params, optimizer.init(params), order.init(key, params)

    def step(run, batch):
        params, state, orders = run
        gradients = (batch @ params - 1.0)[:, None] * batch  # of every unit
        updates, state = optimizer.update(jnp.mean(gradients, axis=0), state, params)
        orders = order.observe(orders, ordering.Rows.of(gradients))
        return optax.apply_updates(params, updates), state, orders

    return init, step


def worker_rows(counts: list[int], repeats: int) -> Iterator[dict]:
    """One step and the end of an epoch of W workers, of 64 units each, simulated on one device."""
    for name in ("pair_balance", "cd_grab"):
        for workers in counts:
            order = getattr(ordering, name)(64, units_per_step=8)
            init, step = worker_step(order)
            of_all = {"outputs": "owned"}
            run = jax.jit(local_opt.lift(init, workers, inputs="key", **of_all))(jax.random.key(0))
            batch = jax.random.normal(jax.random.key(1), (8 * workers, GRADIENT))
            lowered = jax.jit(
                local_opt.lift(step, workers, inputs="owned split", **of_all), donate_argnums=0
            ).lower(run, batch)
            begin = time.perf_counter()
            program = lowered.compile()
            compile_seconds = time.perf_counter() - begin
            # The order's own state, which the steps do not donate.
            orders = jax.tree.map(jnp.copy, run[2])
            one, end = timing.carry_on(program, run), lifted(order, workers, GRADIENT)[2]
            end = timing.carry_on(end, orders)
            times = timing.medians(
                {
                    "step": lambda one=one, batch=batch: [one(batch) for _ in range(STEPS)][-1],
                    "epoch": lambda end=end: [end() for _ in range(STEPS)][-1],
                },
                repeats,
            )
            step_us, epoch_us = (1e6 * times[part] / STEPS for part in ("step", "epoch"))
            yield {
                "order": name, "workers": workers, "compile_s": round(compile_seconds, 2),
                "program_kb": round(len(program.as_text()) / 1e3),
                "step_us": round(step_us, 1), "of_a_worker_us": round(step_us / workers, 2),
                "next_epoch_us": round(epoch_us, 1),
                "next_epoch_of_a_worker_us": round(epoch_us / workers, 2),
            }  # fmt: skip


def qsr(steps: int):
    warmup = steps // 10
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.008, warmup, steps, 1e-6)
    rule = {"total_steps": steps, "alpha": 0.0175, "h_base": 4, "warmup_steps": warmup}
    return local_opt.qsr(rate, **rule)


KEY = jax.random.key
PLANS = {  # T -> plan
    "every_step": local_opt.every_step,
    "constant, H = 4": lambda t: local_opt.constant(4, total_steps=t),
    "post_local, to T / 2": lambda t: local_opt.post_local(4, switch_step=t // 2, total_steps=t),
    "swap, at T / 2": lambda t: local_opt.swap(4, switch_step=t // 2, total_steps=t),
    "from_function, H = 1000": lambda t: local_opt.from_function(lambda s: 1000, total_steps=t),
    "aligned, epochs of 5000": lambda t: local_opt.aligned(
        local_opt.constant(4, total_steps=t), every=5000
    ),
    "qsr, warmup and cosine": qsr,
    "fixed, e = 4": lambda t: echo.fixed(4, total_steps=t),
    "bernoulli, p = 1/4": lambda t: local_opt.bernoulli(0.25, total_steps=t, key=KEY(0)),
    "echo.bernoulli, p = 1/4": lambda t: echo.bernoulli(0.25, total_steps=t, key=KEY(0)),
    "error_diffusion, p = 0.3": lambda t: echo.error_diffusion(0.3, total_steps=t),
    "sync_every_load": lambda t: local_opt.sync_every_load(np.arange(t) % 4 == 0),
}  # fmt: skip
FORECAST = dict(num_params=10**8, num_workers=8, step_seconds=0.1, gigabits_per_second=10.0)


def plan_row(name: str, steps: int, repeats: int) -> dict:
    plan = PLANS[name](steps)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "plan.json")
        calls = {
            "make": lambda: PLANS[name](steps), "hash": plan.digest,
            "save": lambda: plan.save(path), "read": lambda: type(plan).read(path),
        }  # fmt: skip
        if isinstance(plan, local_opt.SyncPlan):
            calls["forecast"] = lambda: local_opt.forecast(plan, **FORECAST)
        found = {part: timing.medians({part: call}, repeats)[part] for part, call in calls.items()}
        size = path.stat().st_size
    held = sum(numbers.nbytes for numbers in plan.runs[:3])
    return {
        "plan": name, "steps": f"{steps:,}", "stretches": f"{plan.runs.num_stretches:,}",
        "held_kb": round(held / 1e3, 2), "file_kb": round(size / 1e3, 2),
    } | {
        f"{part}_ms": round(1e3 * found[part], 2) if part in found else "-"
        for part in ("make", "hash", "save", "read", "forecast")
    }  # fmt: skip


def plan_rows(lengths: list[int], repeats: int) -> Iterator[dict]:
    for name in PLANS:
        for steps in lengths:
            try:
                yield plan_row(name, steps, repeats)
            except ValueError as error:
                print(f"{name} is left out: {error}")


def main(argv) -> None:
    del argv
    values = flags.FLAGS
    if values.order:
        print(json.dumps(unit_row(values.order, int(values.sizes[0]), values.repeats)))
        return
    parts = {"units": unit_rows, "workers": worker_rows, "plans": plan_rows}
    sizes = [int(size) for size in values.sizes] or SIZES[values.part]
    timing.print_rows(parts[values.part](sizes, values.repeats))


if __name__ == "__main__":
    flags.DEFINE_enum("part", "units", list(SIZES), "what grows")
    flags.DEFINE_list("sizes", [], "M, W or T of the rows")
    flags.DEFINE_string("order", None, "one row of units, as JSON: for the processes of the rows")
    flags.DEFINE_integer("repeats", 3, "timings of a call, after a first one", lower_bound=1)
    app.run(main)
