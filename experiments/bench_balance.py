r"""What does balancing cost? The kernel against host loops and the memory, the step against itself.

    python -m experiments.bench_balance                # both tables, a few minutes
    python -m experiments.bench_balance --sweep        # block sizes, for ordering.balance.balance
    python -m experiments.bench_balance --parts=step

Kernel: microseconds per example to sign pairs of gradients that are in memory, for D parameters.
"read once" is the time to sum the same gradients, the fastest of three ways: what the memory
allows. "host loop" is the published way, a Python loop with one sync per pair, on NumPy arrays, on
JAX arrays, and with PyTorch where it is installed.

Step: a training step with an order against the same step in one fixed order (shuffle once, which
draws nothing), on random data of the tasks' shapes. D-RR's row has the cost of its permutations.
Published systems: 1.5 to 2.1.

All rows of a table are measured in turns, in one process, after a warm-up: the median of --repeats.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import models
import ordering
from experiments import training
from experiments.methods import METHODS
from experiments.tasks import Recipe, Task
from experiments.timing import medians, publish
from ordering.pair_balance import subtract
from ordering.rows import split_pairs

FLAGS = flags.FLAGS
# Units per call: enough to leave the caches at every D, at most 1.3 GB.
KERNEL_SIZES = {10**3: 4096, 10**5: 512, 10**6: 128, 10**7: 32}
SWEEP = (1, 2, 4, 6, 8, 16, 32, 64)
SWEEP_SIZES = {20: 4096, 64: 4096, 200: 4096, 10**3: 2048, 10**4: 1024, 10**5: 256, 10**6: 64}


def define_flags() -> None:
    flags.DEFINE_list("parts", ["kernel", "step"], "of kernel, step")
    flags.DEFINE_bool("sweep", False, "only the kernel, over block sizes")
    flags.DEFINE_integer("repeats", 9, "timed calls of every row", lower_bound=1)
    flags.DEFINE_string("jsonl", None, "file for the rows as JSON lines; standard output if unset")


def kernel(block_size: int | None) -> Callable:
    """Jitted `(gradients [n, D], r) -> (r, signs)` with the library's kernel."""

    @jax.jit
    def sign(gradients, total):
        size = block_size or ordering.balance.default_block_size(total.size)
        pairs = split_pairs(gradients, gradients.shape[0] // 2)
        _, total, signs, _ = ordering.balance.balance_blocks(
            ordering.greedy(), (), total, pairs, block_size=size, derive=subtract
        )
        return total, signs

    return sign


def host_loop(gradients, total, dot: Callable, order: list) -> list:
    """The published way: a Python loop over pairs that waits for one number per pair."""
    following, left, right = [None] * len(order), 0, len(order) - 1
    for k in range(0, len(order), 2):
        difference = gradients[k] - gradients[k + 1]
        first, second = order[k], order[k + 1]
        if dot(difference, total) <= 0:
            total += difference
            following[left], following[right] = first, second
        else:
            total -= difference
            following[left], following[right] = second, first
        left, right = left + 1, right - 1
    return following


def host_loops(gradients: jax.Array) -> dict[str, Callable]:
    """The host loop on NumPy arrays, JAX arrays and, if installed, PyTorch tensors."""
    array, order = np.array(gradients), list(range(gradients.shape[0]))
    rows = list(gradients)
    jax_dot = jax.jit(jnp.vdot)
    loops = {
        "host loop, NumPy": lambda: host_loop(array, np.zeros_like(array[0]), np.dot, order),
        "host loop, JAX": lambda: host_loop(
            rows, jnp.zeros_like(rows[0]), lambda a, b: float(jax_dot(a, b)), order
        ),
    }
    try:
        import torch
    except ImportError:
        return loops
    tensor = torch.from_numpy(array)
    return loops | {
        "host loop, PyTorch": lambda: host_loop(
            tensor, torch.zeros_like(tensor[0]), lambda a, b: torch.dot(a, b).item(), order
        )
    }


def reads(gradients: jax.Array) -> dict[str, Callable]:
    """Three ways to read the gradients once; the fastest is the limit."""
    by_parts = jax.jit(lambda g: jnp.sum(g.reshape(2, -1), axis=1))
    by_rows = jax.jit(lambda g: jnp.sum(g, axis=1))
    product = jax.jit(lambda g, v: g @ v)
    ones = jnp.ones(gradients.shape[1])
    return {
        "read 1": lambda: by_parts(gradients),
        "read 2": lambda: by_rows(gradients),
        "read 3": lambda: product(gradients, ones),
    }


def kernel_rows(
    repeats: int, blocks: Sequence[int | None], *, sizes: dict[int, int], loops: bool
) -> list[dict]:
    """One row per D and way: microseconds per example, times the limit, times the host loop."""
    rows = []
    for size, units in sizes.items():
        gradients = jax.random.normal(jax.random.key(0), (units, size))
        total = jnp.zeros(size)
        calls = {}
        for block in blocks:
            name = f"block {block}" if block else "syncopate"
            calls[name] = functools.partial(kernel(block), gradients, total)
        if loops:
            calls |= host_loops(gradients)
        found = medians(calls | reads(gradients), repeats)
        limit = min(found.pop(name) for name in ("read 1", "read 2", "read 3"))
        ours = found.get("syncopate")
        for name, seconds in {"read once": limit, **found}.items():
            row = {"part": "kernel", "parameters": size, "way": name}
            row["us_per_example"] = round(seconds / units * 1e6, 3)
            row["times_read_once"] = round(seconds / limit, 2)
            if ours:
                row["times_syncopate"] = round(seconds / ours, 2)
            rows.append(row)
    return rows


def step_tasks() -> list[tuple[str, Task, Recipe]]:
    """Tasks of the published shapes with random data, each with both kinds of unit."""
    rng = np.random.default_rng(0)

    def task(name, model, shape, classes):
        x = rng.normal(size=shape).astype(np.float32)
        return Task(
            name, model, {"x": x, "y": rng.integers(0, classes, shape[0], np.int32)}, {}, None
        )

    softmax = models.softmax_regression(num_features=64, num_classes=10)
    digits = task("digits", softmax, (1536, 64), 10)
    hmda = task("hmda", models.logistic_regression(num_features=20), (65536, 20), 2)
    lenet = task("lenet", models.lenet(), (2048, 28, 28, 1), 10)

    def recipe(workers, units_per_step, unit_size):
        return Recipe(workers, units_per_step, unit_size, 1, (1e-3,), 0.9, 0)

    return [
        ("microbatch of 16", digits, recipe(4, 1, 16)),
        ("microbatch of 64", hmda, recipe(4, 1, 64)),
        ("microbatch of 16", lenet, recipe(4, 1, 16)),
        ("example, 2 per step", digits, recipe(32, 2, 1)),
        ("example, 4 per step", hmda, recipe(4, 4, 1)),
        ("example, 16 per step", lenet, recipe(4, 16, 1)),
    ]


def step_rows(repeats: int) -> list[dict]:
    """One row per task, unit and order: microseconds per step, times the plain step."""
    rows = []
    for unit, task, recipe in step_tasks():
        calls, steps = {}, 0
        for name in ("so", "rr", "id_pair", "cd_grab"):
            program = training.build(task, METHODS[name], recipe)
            calls[name] = _epochs(program, program.init(0, 1e-3))
            num_units = len(task.train["y"]) // (recipe.workers * recipe.unit_size)
            steps = -(-num_units // recipe.units_per_step)
        found = medians(calls, repeats)
        for name, seconds in found.items():
            row = {"part": "step", "task": task.name, "unit": unit, "order": METHODS[name].label}
            row["us_per_step"] = round(seconds / steps * 1e6, 1)
            row["times_plain"] = round(seconds / found["so"], 3)
            rows.append(row)
    return rows


def _epochs(program, carry):
    """A call that trains one epoch more; buffers are donated, so the state is kept here."""
    held = list(carry)

    def epoch():
        held[0], held[1], *_ = program.epoch(*held, jax.random.key(0))
        return held

    return epoch


def main(argv: Sequence[str]) -> None:
    del argv
    rows = []
    if FLAGS.sweep:
        rows += kernel_rows(FLAGS.repeats, SWEEP, sizes=SWEEP_SIZES, loops=False)
    elif "kernel" in FLAGS.parts:
        rows += kernel_rows(FLAGS.repeats, (None,), sizes=KERNEL_SIZES, loops=True)
    if "step" in FLAGS.parts and not FLAGS.sweep:
        rows += step_rows(FLAGS.repeats)
    publish(rows, FLAGS.jsonl)


def run() -> None:
    define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
