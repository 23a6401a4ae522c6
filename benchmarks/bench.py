r"""Measures costs: microseconds and ratios. Every row is printed as it is measured.

    python -m benchmarks.bench --part=balance                  # 3 minutes: a step with an order
    python -m benchmarks.bench --part=balance --rows=all       # with a GPT, a ViT and an LSTM
    python -m benchmarks.bench --part=scaled                   # scaled sketches against sketches
    python -m benchmarks.bench --part=local_steps              # one worker, then a mesh of four
    python -m benchmarks.bench --part=loops                    # a minute: the training loop
    python -m benchmarks.bench --part=epochs --data_dir=DIR   # minutes, half of them compilation
    python -m benchmarks.bench --part=peers --repositories=DIR --data_dir=DIR    # docs/peers.md

The calls of a table take turns in one process, after a warm-up; times are the median of --repeats.
Ratios with a 95 % interval are computed within each turn; the median over turns is shown.
Expected: orders.md and local_steps.md in docs/results hold the tables.
"""

import functools
import os
import sys
from collections.abc import Iterator

import jax
from absl import flags

import local_opt
from benchmarks import local_timing, peers, timing
from experiments import entry
from experiments.compare import recipes
from experiments.compare.arms import row_of
from experiments.compare.cost import lower_step, order_traffic
from experiments.compare.flags import define_value, shown
from experiments.data import TASKS, Recipe
from experiments.data.base import COUNT
from experiments.timing import medians, training_calls
from experiments.trainer.config import num_params, sizes_of

LOOPS = [(o, r) for o in ("rr", "id_pair", "cd_grab") for r in ("parallel", "accumulate", "qsr")]
# {task: {unit: (workers, units per step, unit size, epochs of a timed call)}}
DEEP = {
    "microbatch": (1, 1, 16, 1),
    "groups, 4 per step": (1, 4, 4, 1),
    "examples, 16 per step": (1, 16, 1, 1),
}
DEEP_TASKS = ("lenet", "gpt", "vit", "lstm")
UNITS = {
    "digits": {"microbatch": (4, 1, 16, 4), "examples, 2 per step": (32, 2, 1, 4)},
    "hmda": {"microbatch": (4, 1, 64, 4), "examples, 4 per step": (4, 4, 1, 4)},
    **dict.fromkeys(DEEP_TASKS, DEEP),
}


ARMS = ("so", "rr", "id_pair", "cd_grab", "cd_grab+sketch1024")


def step_rows(task_name: str, repeats: int) -> Iterator[dict]:
    """A training step with an order, relative to one in a fixed order, which draws nothing."""
    task = timing.step_task(task_name)
    for unit, (*sizes, epochs) in UNITS[task_name].items():
        recipe = Recipe(*sizes, (1e-3,), epochs=epochs)
        calls, steps = training_calls(task, recipe, {name: (name, "parallel") for name in ARMS})
        times = medians(calls, repeats)
        sizes, parameters = sizes_of(task, recipe), num_params(task.model)
        for name, seconds in times.items():
            order = row_of("order", name)
            # One worker's step on one device, as XLA lays it out.
            lowered = lower_step(task, recipe, order, local_opt.parallel_rounds)
            memory = lowered.compile().memory_analysis()
            peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            # What eight workers would send besides the mean gradient.
            sent = order_traffic(order, sizes._replace(workers=8), parameters)(steps) / steps
            yield {
                "part": "step",
                "task": task.name,
                "parameters": parameters,
                "unit": unit,
                "order": order.label,
                "us_per_step": round(seconds / steps * 1e6, 1),
                "times_plain": round(seconds / times["so"], 3),
                "megabytes": round(peak / 1e6, 4),
                "allreduces_per_step": round(sent, 4),
            }


SCALED = ("cd_grab+sketch1024", "cd_grab+sketch1024+scaled")


def scaled_rows(task_name: str, repeats: int) -> Iterator[dict]:
    """A step of AdamW with a scaled sketched order. Aim: 1.02 times one without scale, or less."""
    task = timing.step_task(task_name)
    for unit, (*sizes, epochs) in UNITS[task_name].items():
        recipe = Recipe(*sizes, (1e-3,), epochs=epochs, optimizer="adamw")
        calls, steps = training_calls(task, recipe, {name: (name, "parallel") for name in SCALED})
        flops = {}
        for name, seconds, times in timing.compared_with_first(calls, repeats):
            lowered = lower_step(task, recipe, row_of("order", name), local_opt.parallel_rounds)
            flops[name] = lowered.compile().cost_analysis()["flops"]
            yield {
                "part": "scaled",
                "task": task.name,
                "unit": unit,
                "order": row_of("order", name).label,
                "us_per_step": round(seconds / steps * 1e6, 1),
                "times_first": times[0],
                "interval": times[1],
                "times_flops": round(flops[name] / flops[SCALED[0]], 4),
            }


def loop_rows(repeats: int) -> Iterator[dict]:
    """A step of the training loop on digits with the published units, mostly time of the host."""
    task = TASKS["digits"](None)
    recipe = task.recipe._replace(epochs=20, schedule="cosine", floor=1e-3)
    calls, steps = training_calls(task, recipe, {arm: arm for arm in LOOPS})
    measured = medians(calls, repeats)
    for (order, sync), seconds in measured.items():
        yield {
            "part": "loops",
            "order": row_of("order", order).label,
            "rule": row_of("sync", sync).label,
            "us_per_step": round(seconds / steps * 1e6, 1),
            "times_first": round(seconds / measured[LOOPS[0]], 3),
        }


# (task, folder of its data, choices, examples, what differs from its recipe). All but HMDA take a
# part of the set, so that an epoch takes less than a second. LeNet has batches of 64 for every W.
EPOCHS = {
    "hmda": ("hmda", "hmda", {"model": "logistic"}, None, {}),
    "m4": ("m4_weekly", "m4", {"model": "mlp"}, 40_000, {}),
    "lstm": ("wikitext2_small", "wikitext2", {"model": "lstm"}, 512, {}),
    "gpt2": ("wikitext2_small", "wikitext2", {"model": "gpt2"}, 256, {}),
} | {
    f"lenet_{workers}": (
        "cifar10_small",
        "tfds",
        {"model": "lenet"},
        1024,
        {"workers": workers, "unit_size": 64 // workers},
    )
    for workers in (4, 16, 64)
}


def epoch_rows(name: str, repeats: int, data_dir: str) -> Iterator[dict]:
    """Seconds per epoch of every order, including the making of the next order.

    times_rr is relative to D-RR, and times_so to one fixed order, both in the same turn.
    """
    task_name, folder, choices, first, fields = EPOCHS[name]
    try:
        task, recipe = recipes.load(task_name, os.path.join(data_dir, folder), **choices)
    except (ValueError, ImportError) as error:
        return print(f"{name} is left out: {error}")
    task = task._replace(train=jax.tree.map(lambda x: x[:first], task.train))
    recipe = recipe._replace(**fields, epochs=1, total_steps=None)
    arms = {order: (order, "parallel") for order in ("rr", "so", "unzip", "id_pair", "cd_grab")}
    calls, steps = training_calls(task, recipe, arms)
    for order, seconds, times in timing.compared(calls, repeats):
        middle, low, high = times["rr"]
        yield {
            "part": "epochs",
            "row": name,
            "steps": steps,
            "order": row_of("order", order).label,
            "s_per_epoch": float(f"{seconds:.3g}"),
            "times_rr": round(middle, 3),
            "interval": f"{low:.3f} to {high:.3f}",
            "times_so": round(times["so"][0], 3),
        }


def peer_rows(repeats: int | None, *folders: str | None) -> Iterator[dict]:
    """Runs the programs that time other packages; they print their rows."""
    peers.run(dict(zip(FOLDERS["peers"], folders, strict=True)) | {"repeats": repeats})
    yield from ()


FOLDERS = {"epochs": ("data_dir",), "peers": ("repositories", "data_dir")}  # flags of parts
PARTS = {  # the names of their rows, and the repeats
    "balance": ({name: functools.partial(step_rows, name) for name in UNITS}, 9),
    "scaled": ({name: functools.partial(scaled_rows, name) for name in DEEP_TASKS}, 41),
    "local_steps": ({"step": local_timing.local_rows, "sync": local_timing.sync_rows}, 41),
    "loops": ({"loops": loop_rows}, 9),
    "epochs": ({name: functools.partial(epoch_rows, name) for name in EPOCHS}, 9),
    "peers": ({"all": peer_rows}, None),
}
FIRST = {"balance": ["digits", "hmda", "lenet"]}  # rows by default, where these are not all


def define_flags(values: flags.FlagValues) -> None:
    with shown(values):
        flags.DEFINE_enum("part", "balance", list(PARTS), "what to measure", values)
        text = "rows of the part, or all; if unset, all, but digits,hmda,lenet of balance"
        flags.DEFINE_list("rows", None, text, values)
        text = "timed calls of every row; the part's own if unset"
        define_value(values, COUNT, "repeats", None, text)
        text = "folder with the folders hmda, m4, wikitext2, tfds (prepared cifar10), or some"
        flags.DEFINE_string("data_dir", None, text, values)
        text = "folder with clones of CD-GraB and init2winit, which PyPI lacks"
        flags.DEFINE_string("repositories", None, text, values)


def main(values: flags.FlagValues) -> None:
    tables, repeats = PARTS[values.part]
    names = FIRST.get(values.part, tables)
    if values.rows is not None:
        names = tables if values.rows == ["all"] else values.rows
        if absent := {*names} - {*tables}:
            raise ValueError(f"--rows has {sorted(absent)}: names are {', '.join(tables)}")
    taken = FOLDERS.get(values.part, ())
    given = [values[flag].value for flag in taken]
    if values.part == "epochs" and given == [None]:
        raise ValueError("pass --data_dir=DIR, the folder with the folders of the data sets.")
    for flag in {*FOLDERS["peers"]} - {*taken}:
        if values[flag].value:
            of = " or ".join(part for part in FOLDERS if flag in FOLDERS[part])
            raise ValueError(f"--{flag} is of --part={of}: leave it out of --part={values.part}.")
    if values.part == "local_steps":  # read when the first device is asked for, which is below
        flag = f"--xla_force_host_platform_device_count={local_timing.WORKERS}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        os.environ.setdefault("PJRT_NPROC", str(2 * local_timing.WORKERS))
    head = ()
    for name in names:
        print(f"Measuring {values.part}, {name}: compiles first", file=sys.stderr, flush=True)
        head = timing.print_rows(tables[name](values.repeats or repeats, *given), head)


if __name__ == "__main__":
    entry.main(define_flags, main)
