"""Compares the loop over signs on a TPU as a scan and as a Pallas kernel, by libtpu without a TPU.

    pip install -e ".[topology]"
    python -m benchmarks.sign_loop --chip=v5e

Of the scan, libtpu's estimate of cycles for a sign, of which a turn makes eight. Of the kernel, for
which libtpu gives none, the instruction bundles of its loop, from libtpu's own dump: cycles of a
sign, but for those in which the loop waits for a sum over lanes.
"""

import functools
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import NamedSharding, PartitionSpec

import ordering
from experiments import timing
from experiments.study.compile import cycles_of, slice_of
from ordering import sign_loop

RULES = {
    "greedy": ordering.greedy(),
    "self_balancing_walk": ordering.self_balancing_walk(),
    "kernel_halving": ordering.kernel_halving(num_epochs=10, num_pairs=1000),
}
SIZES = (64, 128, 1024)


def bundles_of(folder: pathlib.Path) -> int:
    """Instruction bundles of the innermost loop of the kernel in the newest dump."""
    found = folder.glob("*signs_in_kernel*-[0-9]*-final_bundles.txt")
    text = max(found, key=lambda path: path.stat().st_mtime_ns).read_text()
    return len(re.findall(r"^ +0x[0-9a-f]+ +(?:LB)?: >", text, re.M))


def turn_of(text: str) -> str:
    """The computation that is the body of a program's loop."""
    name = re.search(r"\bbody=%?([\w.\-]+)", text)[1]
    return next(part for part in re.split(r"\n(?=\S)", text) if part.startswith(f"%{name} "))


def rows_of(chip: str, folder: str) -> Iterator[dict]:
    mesh, _ = slice_of(f"{chip}:1", 1)
    place = NamedSharding(mesh, PartitionSpec())
    abstract = functools.partial(jax.ShapeDtypeStruct, sharding=place)

    def compiled(loop, rule, n):
        state = jax.eval_shape(rule.init, jax.random.key(0))
        shapes = state, jnp.zeros(n), jnp.zeros((n, n)), jnp.zeros(n, bool)
        args = jax.tree.map(lambda x: abstract(x.shape, x.dtype), shapes)
        with jax.set_mesh(mesh):
            return jax.jit(functools.partial(loop, rule)).lower(*args).compile().as_text()

    for name, rule in RULES.items():
        for n in SIZES:
            turn = turn_of(compiled(sign_loop.signs_by_scan, rule, n))
            compiled(sign_loop.signs_in_kernel, rule, n)
            yield {
                "rule": name, "signs": f"{n:,}",
                "scan, cycles of a sign": f"{cycles_of(turn) / sign_loop.UNROLL:,.0f}",
                "kernel, bundles of a sign": bundles_of(pathlib.Path(folder)),
            }  # fmt: skip


def main(argv):
    del argv
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = dump  # read once, when libtpu is loaded
        timing.print_rows(rows_of(flags.FLAGS.chip, folder))


if __name__ == "__main__":
    flags.DEFINE_string("chip", "v5e", "a TPU of docs/use/accelerators.md")
    app.run(main)
