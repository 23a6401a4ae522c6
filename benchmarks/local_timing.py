"""Timings of local steps against plain ones, and of syncs: rows of `bench --part=local_steps`."""

import functools
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
import models
from benchmarks import timing
from experiments.distributed.devices import worker_mesh, worker_sharding
from experiments.timing import carry_on, gradient_step, medians
from syncopate.workers import AXIS

WORKERS = 4  # of a sync

# What is trained, the shape of an input, examples, and steps of a timed call.
MODELS = {
    "mlp, 784-128-10, batch 32": (
        lambda: models.mlp(num_features=784, hidden=(128,), num_classes=10),
        (784,),
        32,
        200,
    ),
    "mlp, 784-1024-1024-10, batch 64": (
        lambda: models.mlp(num_features=784, hidden=(1024, 1024), num_classes=10),
        (784,),
        64,
        20,
    ),
    "resnet 16-32-64, 32x32, batch 16": (
        lambda: models.resnet(
            depth=8, stem="cifar", width=16, products=True, image_shape=(32, 32, 3), num_classes=10
        ),
        (32, 32, 3),
        16,
        8,
    ),
    "vit 64x4, 32x32, batch 16": (models.vit, (32, 32, 3), 16, 8),
}
INNER = {"sgd, momentum": optax.sgd(1e-3, momentum=0.9), "adamw": optax.adamw(1e-4)}


def ways_of(inner) -> dict[str, tuple[Callable, Callable]]:
    """(init, update) of the plain optimizer and of what wraps it."""
    plan = local_opt.constant(1000, total_steps=10**7)
    rounds = local_opt.local_rounds(inner, axis_name=AXIS)
    planned = local_opt.local_steps(inner, plan, axis_name=AXIS)
    return {
        "plain optax": (inner.init, inner.update),
        "plain optax, again": (inner.init, inner.update),
        "local_rounds": (rounds.init, rounds.update),
        "local_steps, sync=False": (planned.init, functools.partial(planned.update, sync=False)),
        "local_steps, in the graph": (planned.init, planned.update),
    }


def _stepper(model, init: Callable, update: Callable, batch, steps: int) -> Callable:
    """A call that takes so many steps on one worker, on from the last."""
    mesh = worker_mesh(1)
    step = gradient_step(model, update)
    run = local_opt.map_workers(
        step, mesh, in_specs=("worker", "worker", "replicated"), out_specs="worker"
    )
    jitted = jax.jit(lambda state, batch: run(*state, batch), donate_argnums=0)
    params = jax.tree.map(lambda p: p[None], jax.jit(model.init)(jax.random.key(0)))
    start = jax.device_put((params, jax.vmap(init)(params)), worker_sharding(mesh))
    call = carry_on(jitted, start)
    return lambda: [call(batch) for _ in range(steps)][-1]


def local_rows(repeats: int, names: Iterable[str] | None = None) -> Iterator[dict]:
    """Steps of `local_rounds` and `local_steps`, relative to a plain step.

    A plain step is loss, gradient, `inner.update` and `apply_updates`, jitted and donated. There
    is one worker, so that a sync moves no bytes. Aim: a step without a sync takes at most 1.02
    plain ones.
    """
    for model_name in names or MODELS:
        make, shape, size, steps = MODELS[model_name]
        for inner_name, inner in INNER.items():
            model, generator = make(), np.random.default_rng(0)
            batch = {
                "x": jnp.asarray(generator.normal(size=(size, *shape)), jnp.float32),
                "y": jnp.asarray(generator.integers(0, 10, size), jnp.int32),
            }
            calls = {
                way: _stepper(model, *functions, batch, steps)
                for way, functions in ways_of(inner).items()
            }
            for way, seconds, times in timing.compared_with_first(calls, repeats):
                yield {
                    "part": "local_steps",
                    "model": model_name,
                    "optimizer": inner_name,
                    "way": way,
                    "us_per_step": round(seconds / steps * 1e6, 1),
                    "times_plain": times[0],
                    "interval": times[1],
                }


def sync_rows(repeats: int, numbers: int = 10**7) -> Iterator[dict]:
    """One sync of four workers with so many parameters in 2 or 200 leaves.

    On a CPU devices share the cores and collectives are copies in memory, so this predicts no
    cluster. If there are fewer devices than workers, one device simulates all of them.
    """
    mesh = worker_mesh(WORKERS) if jax.device_count() >= WORKERS else None
    rounds, over = local_opt.local_rounds(optax.identity(), axis_name=AXIS), mesh or WORKERS
    init = local_opt.map_workers(rounds.init, over, in_specs="worker", out_specs="worker")
    sync = jax.jit(local_opt.map_workers(rounds.sync, over, in_specs="worker", out_specs="worker"))
    for leaves in (2, 200):
        leaf = jnp.ones((WORKERS, numbers // leaves))
        params = {str(i): jax.device_put(leaf, worker_sharding(mesh)) for i in range(leaves)}
        call = functools.partial(sync, params, jax.jit(init)(params))
        seconds = medians({"sync": call}, repeats)["sync"]
        yield {"part": "sync", "leaves": leaves, "ms": round(seconds * 1e3, 1)}


LEAVES = 16  # of the parameters of `sync_kinds`
KINDS = {
    "plain mean": {},
    "outer Nesterov": {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True)},
    "int8": {"compress": local_opt.quantize("int8")},
    "top_k 64 of 4096": {"compress": local_opt.top_k(64 / 4096)},
    "scaffold": {"correction": local_opt.corrections.scaffold()},
}


def _after_a_step(kind: str, numbers: int) -> tuple[Callable, tuple]:
    """(jitted sync, its arguments): simulated workers that have taken one step from one point."""
    rounds = local_opt.local_rounds(optax.sgd(0.1), axis_name=AXIS, **KINDS[kind])
    mapped = functools.partial(
        local_opt.map_workers, workers=WORKERS, in_specs="worker", out_specs="worker"
    )

    def step(params, key):
        state = rounds.init(params)
        grads = optax.tree.random_like(key, params, jax.random.normal)
        updates, state = rounds.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {str(i): jnp.ones((WORKERS, numbers // LEAVES)) for i in range(LEAVES)}
    keys = jax.random.split(jax.random.key(0), WORKERS)
    return jax.jit(mapped(rounds.sync)), jax.block_until_ready(jax.jit(mapped(step))(params, keys))


def _sync_row(kind: str, numbers: int, repeats: int) -> dict:
    sync, args = _after_a_step(kind, numbers)
    one_pass = jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params))
    calls = {"pass": functools.partial(one_pass, args[0]), kind: functools.partial(sync, *args)}
    times = {way: rest for way, *rest in timing.compared_with_first(calls, repeats)}
    memory = sync.lower(*args).compile().memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "ms": f"{times[kind][0] * 1e3:.3f}",
        "ms of a pass": f"{times['pass'][0] * 1e3:.3f}",
        "passes": times[kind][1][0],
        "interval": times[kind][1][1],
        "GB in and out": f"{used / 1e9:.3f}",
        "GB beside": f"{memory.temp_size_in_bytes / 1e9:.3f}",
    }


def sync_kind_rows(repeats: int, sizes: Iterable[int]) -> Iterator[dict]:
    """Syncs of four workers on one device, beside one pass that reads and writes their parameters.

    `passes` is how many such passes would take as long. Kinds take turns only with the pass,
    because the device may not hold the states of two kinds.
    """
    for numbers in sizes:
        for kind in KINDS:
            try:
                times = _sync_row(kind, numbers, repeats)
            except jax.errors.JaxRuntimeError as error:  # out of memory
                times = {"ms": str(error).split("\n")[0][:60]}
            yield {"part": "syncs", "numbers": numbers, "sync": kind, **times}
