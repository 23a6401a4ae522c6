"""Measures an order of M units: bytes, seconds and peak memory, one order and M per process.

    python -m benchmarks.growth_units --order=pair_balance --units=1000000

prints a row as JSON; `benchmarks.growth` starts a process for each. Peaks of resident memory are
those of one phase each, less what the process held before the first order. Units are those of all
workers, which are simulated. Aim: no phase grows faster than a sort, and a step not at all.
"""

import json
import pathlib
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import local_opt
import ordering
from experiments.compare.cost import tree_bytes
from experiments.timing import carry_on, medians
from experiments.trainer import checkpoint
from experiments.trainer.config import Plans
from experiments.trainer.timeline import Progress
from ordering import echo

GRADIENT, PER_STEP, SKETCH = 64, 64, 8  # entries, units per worker and step, numbers of a sketch
STEPS = 50  # of a timed call
GLOBAL = ordering.global_orders.GlobalState | ordering.global_orders.GlobalShuffleState


def global_pairs(m):
    return ordering.global_order(ordering.cd_grab(m, units_per_step=PER_STEP, gathers="step"), m)


ORDERS = {  # (workers, their units -> order)
    "random_reshuffling": (1, ordering.random_reshuffling),
    "block_reshuffling": (
        1,
        lambda m: ordering.baselines.block_reshuffling(m, block_size=PER_STEP),
    ),
    "pair_balance": (1, lambda m: ordering.pair_balance(m, units_per_step=PER_STEP)),
    "grab": (1, lambda m: ordering.grab(m, units_per_step=PER_STEP)),
    "cd_grab": (2, lambda m: ordering.cd_grab(m, units_per_step=PER_STEP)),
    "cd_grab, at syncs": (
        2,
        lambda m: ordering.cd_grab(m, units_per_step=PER_STEP, gathers="sync"),
    ),
    "global_reshuffling": (2, ordering.global_reshuffling),
    "global cd_grab": (2, global_pairs),
}


def mapped(order: ordering.Ordering, workers: int, numbers: int) -> tuple[Callable, ...]:
    """(init, observe, next_epoch) of all workers, simulated; the last two donate their states."""

    def init(key):
        return order.init(key, jnp.zeros(numbers))

    def observe(state, rows):
        return order.observe(state, rows)

    def next_epoch(state):
        return order.next_epoch(state)

    words = {init: "key", observe: ("worker", "batch"), next_epoch: "worker"}
    calls = [
        local_opt.map_workers(f, workers, in_specs=words[f], out_specs="worker") for f in words
    ]
    return jax.jit(calls[0]), *(jax.jit(call, donate_argnums=0) for call in calls[1:])


def phase(call: Callable, repeats: int) -> tuple[float, float]:
    """(median seconds of a call, peak MB of resident memory until now since the last phase)."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    return medians({"": call}, repeats)[""], resident("VmHWM")


def resident(field: str) -> float:
    """MB of memory of this process: VmRSS now, VmHWM at its peak."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def saved(state, folder: str, repeats: int) -> tuple[float, float, float]:
    """(seconds to save, to restore, peak MB) of a checkpoint of the state."""
    plans = Plans(local_opt.constant(1, total_steps=1), echo.fixed(1, total_steps=1), np.ones(1))
    steps = iter(range(1, 99))

    def save():
        with checkpoint.writing(folder, plans) as write:
            write(Progress(next(steps)), state)

    def restore():
        return checkpoint.restore(folder, plans, state)[1]

    save_seconds, peak = phase(save, repeats)

    restore_seconds, later = phase(restore, repeats)
    return save_seconds, restore_seconds, max(peak, later)


def first_batches(state, units: int) -> dict[str, Callable]:
    """Calls that read the first batch of an epoch, to the device or by tf.data."""
    source = np.zeros((units, 1), np.float32)
    sizes = {"units_per_step": PER_STEP}
    workers, size = (1, *state.current.shape)[-2:]
    order = ordering.baselines.shuffle_once(size, units_per_step=PER_STEP)
    options = {"workers": workers if state.current.ndim == 2 else None}
    if isinstance(state, GLOBAL):
        order = ordering.global_reshuffling(size, units_per_step=PER_STEP, total=units)
        sizes["total"] = units
    first = ordering.init_workers(order, jax.random.key(0), **options)
    first = first._replace(current=state.current, next=state.next)
    place = ordering.data.ReadState(first)

    def read():
        key = jax.random.key(0)
        with ordering.data.read_epochs(source, order, key, state=place, **options) as reads:
            return next(reads)

    def tf_data():
        indices, batch = ordering.data.step_indices(np.asarray(state.current), **sizes)
        return next(ordering.data.tf_dataset(source, indices).batch(batch).as_numpy_iterator())

    return {"read_epochs": read, "tf.data": tf_data}


def unit_row(name: str, units: int, repeats: int) -> dict:
    workers, make = ORDERS[name]
    numbers = SKETCH if "syncs" in name else GRADIENT
    init, observe, next_epoch = mapped(make(units // workers), workers, numbers)
    next(iter(ordering.data.tf_dataset(np.zeros(1), [0])))  # imports TensorFlow
    before = resident("VmRSS")
    held = []

    def first():
        held[:] = [init(jax.random.key(0))]
        return held[0]

    init_seconds, peak = phase(first, repeats)
    state, rows = held.pop(), jnp.ones((workers * PER_STEP, numbers))
    memory = observe.lower(state, rows).compile().memory_analysis()
    step = carry_on(observe, state)
    observe_seconds, _ = phase(lambda: [step(rows) for _ in range(STEPS)][-1], repeats)
    end = carry_on(next_epoch, step(rows))
    epoch_seconds, later = phase(end, repeats)
    state = end()
    with tempfile.TemporaryDirectory() as folder:
        save_seconds, restore_seconds, peak_save = saved(state, folder, repeats)
    batch = {name: phase(call, repeats) for name, call in first_batches(state, units).items()}
    peaks = {"order": max(peak, later), "checkpoint": peak_save}
    peaks["batch"] = max(megabytes for _, megabytes in batch.values())
    return {
        "order": name,
        "units": f"{units:,}",
        "workers": workers,
        "state_mb": round(tree_bytes(state) / 1e6, 1),
        "in_place_mb": round(memory.alias_size_in_bytes / 1e6, 1),
        "step_temporary_kb": round(memory.temp_size_in_bytes / 1e3, 1),
        "observe_us": round(1e6 * observe_seconds / STEPS, 1),
        "init_s": round(init_seconds, 3),
        "next_epoch_s": round(epoch_seconds, 3),
        "save_s": round(save_seconds, 2),
        "restore_s": round(restore_seconds, 2),
        "first_batch_s": round(batch["read_epochs"][0], 3),
        "first_by_tf_data_s": round(batch["tf.data"][0], 3),
    } | {f"peak_mb_{name}": round(peak_mb - before) for name, peak_mb in peaks.items()}


def main(argv) -> None:
    del argv
    values = flags.FLAGS
    print(json.dumps(unit_row(values.order, values.units, values.repeats)))


if __name__ == "__main__":
    flags.DEFINE_enum("order", "pair_balance", list(ORDERS), "of the row")
    flags.DEFINE_integer("units", 10**6, "M, of all workers", lower_bound=PER_STEP)
    flags.DEFINE_integer("repeats", 3, "timings of a call, after a first one", lower_bound=1)
    app.run(main)
