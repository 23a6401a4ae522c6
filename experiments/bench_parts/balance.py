"""What does balancing cost? The kernel against host loops and the memory, the step against itself.

Kernel: microseconds per example to sign pairs of gradients that are in memory, for D parameters.
"read once" is the time to sum the same gradients, the fastest of three ways: what the memory
allows. "host loop" is the published way, a Python loop with one sync per pair, on NumPy arrays, on
JAX arrays, and with PyTorch where it is installed; "sketches" reads every gradient once and signs
1,024 numbers. Sweep: the kernel over block sizes, for ordering.balance.

Step: a training step with an order against the same step in one fixed order (shuffle once, which
draws nothing), on random data of the tasks' shapes. D-RR's permutations are drawn on the host.
Published systems: 1.5 to 2.1.

All rows of a table are measured in turns, in one process, after a warm-up: the median of --repeats.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import local_opt
import ordering
from experiments.bench_parts.timing import medians, publish, training_calls
from experiments.compiled.lowering import lower_step
from experiments.studies.cost import order_traffic
from experiments.studies.tables import ORDERS
from experiments.tasks import Recipe, Task
from experiments.training.config import sizes_of
from experiments.training.parts import num_params
from ordering.balance import balance_blocks, default_block_size
from ordering.pair_balance import subtract
from ordering.rows import split_pairs
from ordering.sketches import SIZE
from syncopate import models

REPEATS = 9
# Units per call: enough to leave the caches at every D, at most 1.3 GB.
KERNEL_SIZES = {10**3: 4096, 10**5: 512, 10**6: 128, 10**7: 32}
SWEEP = (1, 2, 4, 6, 8, 16, 32, 64)
SWEEP_SIZES = {20: 4096, 64: 4096, 200: 4096, 10**3: 2048, 10**4: 1024, 10**5: 256, 10**6: 64}
ARMS = ("so", "rr", "id_pair", "cd_grab", "sketch1024")
EPOCHS = 4  # of a timed call: what surrounds a run is then little of it


def kernel(block_size: int | None) -> Callable:
    """Jitted `(gradients [n, D], r) -> (r, signs)` with the library's kernel."""

    @jax.jit
    def sign(gradients, total):
        size = block_size or default_block_size(total.size)
        pairs = split_pairs(gradients, gradients.shape[0] // 2)
        _, total, signs, _ = balance_blocks(
            ordering.greedy(), (), total, pairs, block_size=size, derive=subtract
        )
        return total, signs

    return sign


@jax.jit
def sign_sketches(gradients, total):
    """The same on sketches: every gradient is read once."""
    rows = ordering.sketch_rows(
        ordering.Rows.of(gradients), ordering.sketch(jax.random.key(0), size=total.size)
    )
    pairs = split_pairs(rows.tree, rows.size // 2)
    _, total, signs, _ = balance_blocks(
        ordering.greedy(), (), total, pairs, block_size=64, derive=subtract
    )
    return total, signs


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
    array, rows, jax_dot = np.array(gradients), list(gradients), jax.jit(jnp.vdot)
    ways = {
        "NumPy": (array, np.zeros_like, np.dot),
        "JAX": (rows, jnp.zeros_like, lambda a, b: float(jax_dot(a, b))),
    }
    try:
        import torch
    except ImportError:
        pass
    else:
        tensor = torch.from_numpy(array)
        ways["PyTorch"] = (tensor, torch.zeros_like, lambda a, b: torch.dot(a, b).item())
    order = list(range(len(rows)))
    return {
        f"host loop, {name}": lambda way=way: host_loop(way[0], way[1](way[0][0]), way[2], order)
        for name, way in ways.items()
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
        calls = {
            f"block {block}" if block else "syncopate": functools.partial(
                kernel(block), gradients, jnp.zeros(size)
            )
            for block in blocks
        }
        if loops:
            sketches = functools.partial(sign_sketches, gradients, jnp.zeros(min(size, SIZE)))
            calls |= host_loops(gradients) | {"sketches": sketches}
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
    """Tasks of the published shapes with random data, and units from one example to a batch."""
    rng = np.random.default_rng(0)

    def task(name, model, shape, classes, *, words=0):
        draw = (lambda s: rng.integers(0, words, s, np.int32)) if words else rng.normal
        x = draw(shape) if words else draw(size=shape).astype(np.float32)
        y = rng.integers(0, classes, shape if words else shape[0], np.int32)
        return Task(name, model, {"x": x, "y": y}, {}, None)

    text = {"vocab_size": 1024, "width": 192}
    gpt = models.gpt2(context=64, depth=3, heads=3, **text)
    vit = models.vit(image_shape=(32, 32, 3), width=192, depth=3, heads=3)
    softmax = models.softmax_regression(num_features=64, num_classes=10)
    digits = task("digits", softmax, (1536, 64), 10)
    hmda = task("hmda", models.logistic_regression(num_features=20), (65536, 20), 2)
    lenet = task("lenet", models.lenet(), (512, 28, 28, 1), 10)
    larger = (
        task("gpt", gpt, (64, 64), 1024, words=1024),
        task("vit", vit, (64, 32, 32, 3), 10),
        task("lstm", models.lstm(**text), (64, 64), 1024, words=1024),
    )
    microbatch, groups, examples = "microbatch", "groups, 4 per step", "examples, 16 per step"
    rows = [
        (microbatch, digits, (4, 1, 16)), ("examples, 2 per step", digits, (32, 2, 1)),
        (microbatch, hmda, (4, 1, 64)), ("examples, 4 per step", hmda, (4, 4, 1)),
    ]  # fmt: skip
    for of in (lenet, *larger):
        rows += [(microbatch, of, (1, 1, 16)), (groups, of, (1, 4, 4)), (examples, of, (1, 16, 1))]
    return [
        (unit, of, Recipe(*sizes, (1e-3,), epochs=1 if sizes[0] == 1 else EPOCHS))
        for unit, of, sizes in rows
    ]


def step_rows(repeats: int) -> list[dict]:
    """One row per task, unit and order: microseconds per step, times the plain step, memory."""
    rows = []
    for unit, task, recipe in step_tasks():
        calls, steps = training_calls(task, recipe, {name: (name, "parallel") for name in ARMS})
        found = medians(calls, repeats)
        sizes, parameters = sizes_of(task, recipe), num_params(task.model)
        for name, seconds in found.items():
            order = ORDERS[name]
            row = {"part": "step", "task": task.name, "parameters": parameters, "unit": unit}
            row |= {"order": order.label, "us_per_step": round(seconds / steps * 1e6, 1)}
            row["times_plain"] = round(seconds / found["so"], 3)
            row["megabytes"] = round(_peak_megabytes(task, recipe, order), 4)
            # What eight workers would send besides the mean gradient.
            sent = order_traffic(order, sizes._replace(workers=8), parameters)(steps) / steps
            row["allreduces_per_step"] = round(sent, 4)
            rows.append(row)
    return rows


def _peak_megabytes(task, recipe, order) -> float:
    """Of one worker's step on a device of its own, as XLA lays it out."""
    found = lower_step(task, recipe, order, local_opt.parallel_rounds).compile().memory_analysis()
    return (found.argument_size_in_bytes + found.temp_size_in_bytes) / 1e6


ROWS = {
    "kernel": lambda repeats: kernel_rows(repeats, (None,), sizes=KERNEL_SIZES, loops=True),
    "step": step_rows,
    "sweep": lambda repeats: kernel_rows(repeats, SWEEP, sizes=SWEEP_SIZES, loops=False),
}
DEFAULT = ("kernel", "step")


def main(values: flags.FlagValues) -> None:
    rows = [r for name in values.rows or DEFAULT for r in ROWS[name](values.repeats or REPEATS)]
    publish(rows, values.jsonl)
