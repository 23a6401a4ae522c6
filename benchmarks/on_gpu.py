"""Times on one GPU what was otherwise measured on CPUs and by compilers alone.

    pip install -e ".[experiments]" "jax[cuda12]"
    python -m benchmarks.on_gpu

The parts are those of other benchmarks, in turns within a part: `reads`, the exact kernel and
sketches (benchmarks/host_loops.py); `signs`, the loop over signs as a scan and as a kernel, which
give the same signs; `gradients`, sketched gradients of single examples beside plain steps, optax'
`micro_grad` and others (benchmarks/single_examples.py); `gpt2_small`, the same of GPT-2 with 124
million parameters, 8 windows of 1,024 tokens; `sync` and `local_steps`, those of `bench`; `syncs`,
one of every kind beside a pass over the parameters. Every row is printed with the name of the
device, and with --folder becomes a line of rows.jsonl there. On an H200 `gpt2_small` took under
three minutes, `gradients` more than two, most of it compilation, the others a minute each;
docs/results/orders.md has what was measured. With --toy everything is small enough for the tests on
a CPU.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import models
import ordering
from benchmarks import host_loops, local_timing, single_examples, timing
from models.gpt2 import SIZES as GPT2
from ordering import signs as sign_kernel
from ordering.signs import Greedy

RULES = {
    "greedy": Greedy(),
    "self_balancing_walk": ordering.baselines.self_balancing_walk(),
    "kernel_halving": ordering.baselines.kernel_halving(num_epochs=10, num_pairs=1000),
}
WAYS = (
    "plain step",
    "ordering.sketched_grads",
    "optax micro_grad, microbatches 1",
)  # of GPT-2 small


class Sizes(NamedTuple):
    reads: dict[int, int]  # {parameters: units}, more than the caches hold
    signs: tuple[int, ...]
    models: tuple[str, ...]  # of `timing.step_task`
    gpt2: dict
    windows: int
    numbers: int  # parameters of a sync
    syncs: tuple[int, ...]  # the same, of every kind
    local: tuple[str, ...]  # of `local_timing.MODELS`
    repeats: int


GPU = Sizes(
    reads={10**4: 4096, 10**5: 1024, 10**6: 256, 10**7: 64},
    signs=(64, 1024),
    models=("lenet", "gpt", "vit"),
    gpt2={"vocab_size": 50257, "context": 1024, "dtype": "bfloat16", **GPT2["small"]},
    windows=8,
    numbers=10**7,
    syncs=(10**6, 10**8),
    local=("mlp, 784-1024-1024-10, batch 64", "vit 64x4, 32x32, batch 16"),
    repeats=21,
)
TOY = Sizes(
    reads={64: 8},
    signs=(6,),
    models=("digits",),
    gpt2={"vocab_size": 16, "context": 8, "dtype": "bfloat16", "width": 8, "depth": 1, "heads": 2},
    windows=2,
    numbers=1000,
    syncs=(64,),
    local=("mlp, 784-128-10, batch 32",),
    repeats=6,  # for the intervals
)


def sign_rows(sizes: Iterable[int], repeats: int) -> Iterator[dict]:
    """Microseconds of a sign, of products that are whole numbers and therefore exact."""
    platform = jax.default_backend()
    kernel = functools.partial(
        sign_kernel.signs_in_kernel, triton=platform == "gpu", interpret=platform == "cpu"
    )
    for name, rule in RULES.items():
        for size in sizes:
            vectors = np.random.default_rng(0).integers(-3, 4, (size, 8)).astype(np.float32)
            products = jnp.asarray(vectors[:, 0]), jnp.asarray(vectors @ vectors.T)
            given = rule.init(jax.random.key(0)), *products, jnp.ones(size, bool)
            calls = {
                way: functools.partial(jax.jit(functools.partial(loop, rule)), *given)
                for way, loop in {"scan": sign_kernel.signs_by_scan, "kernel": kernel}.items()
            }
            np.testing.assert_array_equal(*(call()[1] for call in calls.values()))
            for way, seconds, times in timing.compared(calls, repeats):
                yield {
                    "rule": name,
                    "signs": size,
                    "way": way,
                    "us_per_sign": f"{seconds / size * 1e6:.3f}",
                    "times_scan": f"{times['scan'][0]:.3f}",
                }


def gpt2_rows(shape: dict, windows: int, repeats: int) -> Iterator[dict]:
    """The mean gradient of some windows, and sketches of each. bfloat16 rounds it to a percent."""
    model = models.gpt2(**shape)
    params = jax.jit(model.init)(jax.random.key(0))
    words = np.random.default_rng(0).integers(
        0, shape["vocab_size"], (2, windows, shape["context"]), np.int32
    )
    batch = {"x": jnp.asarray(words[0]), "y": jnp.asarray(words[1])}
    every = single_examples.ways_of(model.loss)
    calls = {way: functools.partial(jax.jit(every[way]), params, batch) for way in WAYS}
    plain = calls[WAYS[0]]()[0]
    for way, call in calls.items():
        off = optax.tree.norm(jax.tree.map(jnp.subtract, call()[0], plain))
        if not off < 0.03 * optax.tree.norm(plain):
            raise AssertionError(f"{way}: the mean gradient is off by {float(off):.3g}")
    for way, seconds, times in timing.compared(calls, repeats):
        yield {
            "model": f"GPT-2, {shape['width']}x{shape['depth']}",
            "windows": windows,
            "way": way,
            "ms": f"{seconds * 1e3:.2f}",
            "times_plain": f"{times[WAYS[0]][0]:.3f}",
            "interval": "{1:.3f} to {2:.3f}".format(*times[WAYS[0]]),
        }


def gradient_rows(names: Iterable[str], repeats: int) -> Iterator[dict]:
    """Rows in full float32: by default a GPU rounds products more than the comparison allows."""
    with jax.default_matmul_precision("highest"):
        for name in names:
            yield from single_examples.rows_of(name, repeats)


def read_rows(sizes: dict[int, int], repeats: int) -> Iterator[dict]:
    for size, units in sizes.items():
        yield from host_loops.rows(size, units, repeats)


def parts(sizes: Sizes, repeats: int) -> dict[str, Iterable[dict]]:
    """Rows by part, measured when they are asked for."""
    return {
        "signs": sign_rows(sizes.signs, repeats),
        "reads": read_rows(sizes.reads, repeats),
        "gradients": gradient_rows(sizes.models, repeats),
        "gpt2_small": gpt2_rows(sizes.gpt2, sizes.windows, repeats),
        "sync": local_timing.sync_rows(repeats, sizes.numbers),
        "local_steps": local_timing.local_rows(repeats, sizes.local),
        "syncs": local_timing.sync_kind_rows(repeats, sizes.syncs),
    }


def rows(toy: bool, names: Iterable[str], repeats: int | None = None) -> Iterator[dict]:
    """Rows of some parts, each with its part and the device."""
    sizes = TOY if toy else GPU
    tables, device = parts(sizes, repeats or sizes.repeats), jax.devices()[0].device_kind
    for name in names:
        for row in tables[name]:
            yield {"device": device, **row, "part": name}


def main(argv):
    del argv
    results = rows(flags.FLAGS.toy, flags.FLAGS.parts, flags.FLAGS.repeats)
    timing.print_rows(timing.saved(results, flags.FLAGS.folder))


if __name__ == "__main__":
    flags.DEFINE_bool("toy", False, "small sizes, for the tests")
    flags.DEFINE_multi_enum("parts", list(parts(TOY, 1)), list(parts(TOY, 1)), "what to time")
    flags.DEFINE_string("folder", None, "where rows.jsonl is written")
    flags.DEFINE_integer("repeats", None, "timed calls of every way; 21 if unset")
    app.run(main)
