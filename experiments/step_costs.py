"""What a step costs: to balance in it, to step locally, and a sync, each against the plain one.

kernel: microseconds per example to sign pairs of gradients that are in memory, for D parameters.
"read once" is the time to sum the same gradients, the fastest of three ways: what the memory
allows; "sketches" reads every gradient once and signs 1,024 numbers. The published way, a loop on
the host, is in benchmarks/host_loops.py.

step: a training step with an order against the same step in one fixed order (shuffle once, which
draws nothing), on random data of the tasks' shapes. D-RR's permutations are drawn on the host.
Published systems: 1.5 to 2.1.

local_steps: the plain row is loss, gradient, `inner.update` and `apply_updates`, jitted and
donated. The others do the same through local_opt, on one worker, where a sync moves no bytes: a hot
step of `local_rounds`, `local_steps` with sync=False, and `local_steps` that decides in the graph.
times_plain is the median over the turns of the ratio to the plain row of the same turn, with its
95 % interval. Aim: the hot step takes at most 1.02 plain steps.

sync: one sync of W workers on W devices, by wire. On a CPU the devices share the cores and
collectives are copies in memory: these rows order the ways and forecast nothing.
"""

import functools
import statistics
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
import models
import ordering
from experiments import timing
from experiments.study.cost import lower_step, order_traffic
from experiments.study.tables import ORDERS
from experiments.tasks import Recipe, Task
from experiments.timing import medians, training_calls
from experiments.training.config import num_params, sizes_of
from local_opt.workers import AXIS, owned_sharding, worker_mesh
from ordering.kernel import balance_blocks
from ordering.pair_balance import subtract
from ordering.rows import split_pairs
from ordering.sketch import SIZE

# Units per call: enough to leave the caches at every D, at most 1.3 GB.
KERNEL_SIZES = {10**3: 4096, 10**5: 512, 10**6: 128, 10**7: 32}
ARMS = ("so", "rr", "id_pair", "cd_grab", "cd_grab+sketch1024")
EPOCHS = 4  # of a timed call: what surrounds a run is then little of it


WORKERS = 4
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


@jax.jit
def kernel(gradients, total):
    """`(gradients [n, D], r) -> (r, signs)` with the library's kernel."""
    pairs = split_pairs(gradients, gradients.shape[0] // 2)
    return balance_blocks(ordering.greedy(), (), total, pairs, derive=subtract)[1:3]


@jax.jit
def sign_sketches(gradients, total):
    """The same on sketches: every gradient is read once."""
    rows = ordering.sketch_rows(
        ordering.Rows.of(gradients), ordering.sketch(jax.random.key(0), size=total.size)
    )
    pairs = split_pairs(rows.tree, rows.size // 2)
    return balance_blocks(ordering.greedy(), (), total, pairs, derive=subtract)[1:3]


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


def kernel_rows(repeats: int) -> Iterator[dict]:
    """One row per D and way: microseconds per example, and times the limit."""
    for size, units in KERNEL_SIZES.items():
        gradients = jax.random.normal(jax.random.key(0), (units, size))
        calls = {
            "syncopate": functools.partial(kernel, gradients, jnp.zeros(size)),
            "sketches": functools.partial(sign_sketches, gradients, jnp.zeros(min(size, SIZE))),
        }
        found = medians(calls | reads(gradients), repeats)
        limit = min(found.pop(name) for name in ("read 1", "read 2", "read 3"))
        for name, seconds in {"read once": limit, **found}.items():
            yield {
                "part": "kernel", "parameters": size, "way": name,
                "us_per_example": round(seconds / units * 1e6, 3),
                "times_read_once": round(seconds / limit, 2),
            }  # fmt: skip


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


def step_rows(repeats: int) -> Iterator[dict]:
    """One row per task, unit and order: microseconds per step, times the plain step, memory."""
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
            yield row


def _peak_megabytes(task, recipe, order) -> float:
    """Of one worker's step on a device of its own, as XLA lays it out."""
    found = lower_step(task, recipe, order, local_opt.parallel_rounds).compile().memory_analysis()
    return (found.argument_size_in_bytes + found.temp_size_in_bytes) / 1e6


def _stepper(model, init: Callable, update: Callable, batch) -> Callable:
    """`steps -> state`: a call that takes so many steps, on from the last."""
    mesh = worker_mesh(1)
    step = timing.gradient_step(model, update)
    run = local_opt.lift(step, mesh, inputs="owned owned shared", outputs="owned owned")
    jitted = jax.jit(lambda state, batch: run(*state, batch), donate_argnums=0)
    params = jax.tree.map(lambda p: p[None], jax.jit(model.init)(jax.random.key(0)))
    start = jax.device_put((params, jax.vmap(init)(params)), owned_sharding(mesh))
    call = timing.carry_on(jitted, start)
    return lambda steps: [call(batch) for _ in range(steps)][-1]


def ways_of(inner) -> dict[str, tuple[Callable, Callable]]:
    """(init, update) of the plain optimizer and of what wraps it."""
    rounds = local_opt.local_rounds(inner, axis_name=AXIS)
    planned = local_opt.local_steps(inner, PLAN, axis_name=AXIS)

    def hot(grads, state, params):
        return planned.update(grads, state, params, sync=False)

    return {
        "plain optax": (inner.init, inner.update),
        "plain optax, again": (inner.init, inner.update),
        "local_rounds": (rounds.init, rounds.update),
        "local_steps, sync=False": (planned.init, hot),
        "local_steps, in the graph": (planned.init, planned.update),
    }


def local_rows(repeats: int) -> Iterator[dict]:
    """Rows of every model and optimizer: microseconds per step, and against the plain step."""
    repeats = max(6, repeats)  # for the intervals
    for model_name, (make, shape, size, steps) in MODELS.items():
        for inner_name, inner in INNER.items():
            model, generator = make(), np.random.default_rng(0)
            batch = {
                "x": jnp.asarray(generator.normal(size=(size, *shape)), jnp.float32),
                "y": jnp.asarray(generator.integers(0, 10, size), jnp.int32),
            }
            calls = {
                way: functools.partial(_stepper(model, *functions, batch), steps)
                for way, functions in ways_of(inner).items()
            }
            times = timing.in_turns(calls, repeats)
            for way, seconds in times.items():
                ratios = np.array(seconds) / np.array(times["plain optax"])
                middle, low, high = timing.median_interval(ratios)
                yield {
                    "part": "local_steps", "model": model_name, "optimizer": inner_name, "way": way,
                    "us_per_step": round(statistics.median(seconds) / steps * 1e6, 1),
                    "times_plain": round(middle, 3), "interval": f"{low:.3f} to {high:.3f}",
                }  # fmt: skip


def sync_rows(repeats: int) -> Iterator[dict]:
    """Rows for one sync of four workers with ten million parameters in 2 or 200 leaves."""
    mesh = worker_mesh(WORKERS)
    ways = {"float32": None} | {n: local_opt.WIRES[n] for n in ("bfloat16", "int8", "int4")}

    def program(wire):
        rounds = local_opt.local_rounds(optax.identity(), axis_name=AXIS, wire=wire)
        init = local_opt.lift(rounds.init, mesh, inputs="owned", outputs="owned")
        sync = local_opt.lift(rounds.sync, mesh, inputs="owned owned", outputs="owned owned")
        return jax.jit(init), jax.jit(sync)

    for leaves in (2, 200):
        leaf = jnp.ones((WORKERS, 10**7 // leaves))
        params = {str(i): jax.device_put(leaf, owned_sharding(mesh)) for i in range(leaves)}
        calls = {}
        for way, wire in ways.items():
            init, sync = program(wire)
            calls[way] = functools.partial(sync, params, init(params))
        for way, seconds in medians(calls, repeats).items():
            yield {"part": "sync", "leaves": leaves, "way": way, "ms": round(seconds * 1e3, 1)}
