"""Compares the loop over signs on a TPU as a scan and as a Pallas kernel, by libtpu without a TPU.

    pip install -e ".[topology]"
    python -m benchmarks.sign_loop --chip=v5e

Of the scan, libtpu's estimate of cycles for a sign, of which a turn makes eight. Of the kernel, for
which libtpu gives none, the instruction bundles of its loop, from libtpu's own dump: cycles of a
sign, but for those in which the loop waits for a sum over lanes.

Then all signs of one step, of sketches of 1,024 numbers and four pairs of each worker, beside the
step of GPT-2 small on one chip (bfloat16, 8 windows of 1,024, AdamW), as libtpu estimates its
cycles. "blocks" are the estimated cycles of all that is not the loop over signs: products and
running sum. Not counted are the gather of the sketches, for libtpu estimates no collectives, and
the loop's wait for sums over lanes: "for 1 %" are the cycles that a sign may take.
"""

import functools
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
import ordering
from experiments import timing
from experiments.study.cost import cycles_of, slice_of
from models.gpt2 import SIZES as GPT2
from ordering import kernel
from ordering.kernel import BLOCK, balance_blocks
from ordering.sketches.linear import SIZE

RULES = {
    "greedy": ordering.greedy(),
    "self_balancing_walk": ordering.self_balancing_walk(),
    "kernel_halving": ordering.kernel_halving(num_epochs=10, num_pairs=1000),
}
SIZES = (64, 128, 1024)
WORKERS, WINDOWS = (64, 256, 1024), 8


def bundles_of(folder: pathlib.Path) -> int:
    """Instruction bundles of the innermost loop of the kernel in the newest dump."""
    found = folder.glob("*signs_in_kernel*-[0-9]*-final_bundles.txt")
    text = max(found, key=lambda path: path.stat().st_mtime_ns).read_text()
    return len(re.findall(r"^ +0x[0-9a-f]+ +(?:LB)?: >", text, re.M))


def turn_of(text: str) -> str:
    """The computation that is the body of a program's loop."""
    name = re.search(r"\bbody=%?([\w.\-]+)", text)[1]
    return next(part for part in re.split(r"\n(?=\S)", text) if part.startswith(f"%{name} "))


def compiled(mesh: Mesh, function: Callable, *shapes) -> str:
    """The program of a function of arrays of these shapes on one chip, as text."""
    place = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(*args).compile().as_text()


def rows_of(mesh: Mesh, folder: pathlib.Path) -> Iterator[dict]:
    for name, rule in RULES.items():
        for n in SIZES:
            state = jax.eval_shape(rule.init, jax.random.key(0))
            args = state, jnp.zeros(n), jnp.zeros((n, n)), jnp.zeros(n, bool)
            turn = turn_of(compiled(mesh, functools.partial(kernel.signs_by_scan, rule), *args))
            compiled(mesh, functools.partial(kernel.signs_in_kernel, rule), *args)
            yield {
                "rule": name, "signs": f"{n:,}",
                "scan, cycles of a sign": f"{cycles_of(turn) / kernel.UNROLL:,.0f}",
                "kernel, bundles of a sign": bundles_of(folder),
            }  # fmt: skip


def step_cycles(mesh: Mesh) -> int:
    """Cycles of a training step of GPT-2 small with 8 windows."""
    model = models.gpt2(vocab_size=50257, context=1024, dtype="bfloat16", **GPT2["small"])
    optimizer = optax.adamw(1e-3)
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((WINDOWS, 1024), jnp.int32)
    step = timing.gradient_step(model, optimizer.update)
    args = params, jax.eval_shape(optimizer.init, params), {"x": tokens, "y": tokens}
    return cycles_of(compiled(mesh, step, *args))


def step_rows(mesh: Mesh, folder: pathlib.Path) -> Iterator[dict]:
    def signed(total, pairs):
        return balance_blocks(ordering.greedy(), (), total, pairs)

    whole = step_cycles(mesh)
    print(f"\nThe step of GPT-2 small: {whole:,} cycles.\n")
    for workers in WORKERS:
        signs = workers * WINDOWS // 2
        text = compiled(mesh, signed, jnp.zeros(SIZE), jnp.zeros((signs, SIZE)))
        turn = cycles_of(turn_of(text))
        blocks = cycles_of(text) + (signs // BLOCK - 1) * turn  # the turn counts once in the text
        loop = signs * bundles_of(folder)
        yield {
            "workers": f"{workers:,}", "signs": f"{signs:,}", "blocks, cycles": f"{blocks:,}",
            "loop, bundles": f"{loop:,}", "of the step": f"{(blocks + loop) / whole:.2%}",
            "for 1 %, cycles of a sign": f"{(whole / 100 - blocks) / signs:,.0f}",
        }  # fmt: skip


def main(argv):
    del argv
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = dump  # read once, when libtpu is loaded
        mesh, _ = slice_of(f"{flags.FLAGS.chip}:1", 1)
        timing.print_rows(rows_of(mesh, pathlib.Path(folder)))
        timing.print_rows(step_rows(mesh, pathlib.Path(folder)))


if __name__ == "__main__":
    flags.DEFINE_string("chip", "v5e", "a TPU of docs/use/accelerators.md")
    app.run(main)
