"""Counts the kernels that an H100 starts in a step with CD-GraB, by XLA's compiler without a GPU.

    pip install -e ".[topology_gpu]"
    python -m benchmarks.launches

Softmax regression with 1,024 parameters. Kernels, copies and collectives are counted over all turns
of the loops: with the signs of a block in XLA's scan, and in one kernel of Triton. `block` is the
number of pairs whose products are one matrix. Nothing is timed.
"""

import re
from collections.abc import Iterator
from unittest import mock

import numpy as np
from absl import app

import models
from experiments import timing
from experiments.study.cost import shapes_of, slice_of, uncached
from experiments.study.tables import row_of
from experiments.tasks import Recipe, Task
from experiments.tasks.base import abstract_set
from ordering import kernel

# (order, workers, units per step, pairs in a block)
CASES = [
    ("rr", 8, 8, 64),
    ("cd_grab", 8, 2, 64),
    ("cd_grab", 8, 8, 64),
    ("cd_grab", 8, 32, 64),
    *(("cd_grab", 64, 32, block) for block in (64, 128, 256, 1024)),
    *(("cd_grab+sketch1024", 64, 32, block) for block in (64, 1024)),
]
HOST = (  # starts nothing on the device
    "parameter", "get-tuple-element", "constant", "tuple", "bitcast", "after-all", "partition-id",
)  # fmt: skip


def launches_of(text: str) -> int:
    """What a program of scheduled HLO starts, with all turns of loops whose number is known."""
    parts = [part.split("\n") for part in re.split(r"\n(?=\S)", text)]
    bodies = {
        start[2]: lines
        for head, *lines in parts
        if (start := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", head))
    }
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.M)[1]

    def of_line(line: str) -> int:
        found = re.match(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\(", line)
        if not found or found[1] in HOST or found[1].endswith("-done"):
            return 0
        if found[1] == "while":
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            each = [re.search(rf"\b{part}=%?([\w.\-]+)", line)[1] for part in ("condition", "body")]
            return int(turns[1] if turns else 1) * sum(map(of_computation, each))
        if found[1] == "call":
            return of_computation(re.search(r"\bto_apply=%?([\w.\-]+)", line)[1])
        return 1

    def of_computation(name: str) -> int:
        return sum(map(of_line, bodies[name]))

    return of_computation(entry)


def step_of(order: str, workers: int, units: int) -> str:
    """A fresh step's program, as compiled for as many H100s as workers."""
    mesh, chip = slice_of(f"h100:{workers}", workers)
    data = abstract_set(64 * workers * 4, x=((127,), np.float32), y=((), np.int32))
    model = models.softmax_regression(num_features=127, num_classes=8)
    recipe = Recipe(workers, units, 4, (0.1,), total_steps=40)
    task, rounds = Task("shapes", model, data, data, recipe), row_of("sync", "parallel").rounds
    shapes = shapes_of(task, recipe, row_of("order", order), rounds, mesh=mesh)
    lowered = shapes.programs["fresh step"]()
    with uncached():
        return lowered.compile(compiler_options=dict(chip.compiler.options)).as_text()


def rows() -> Iterator[dict]:
    for order, workers, units, block in CASES:
        with mock.patch.object(kernel, "BLOCK", block):
            found = launches_of(step_of(order, workers, units))
            with mock.patch.object(kernel, "signs_of", kernel.signs_by_scan):
                by_scan = launches_of(step_of(order, workers, units))
        yield {
            "order": row_of("order", order).label, "workers": workers,
            "pairs of a step": f"{workers * units // 2:,}", "block": f"{block:,}",
            "started, by a scan": f"{by_scan:,}", "by a kernel": f"{found:,}",
        }  # fmt: skip


def main(argv):
    del argv
    timing.print_rows(rows())


if __name__ == "__main__":
    app.run(main)
