"""A run of shapes alone, for compilers of devices that need not be there."""

import contextlib
import importlib.util
import io
import pathlib
import re

import numpy as np
import pytest
from absl import flags as absl_flags

from experiments import train
from experiments.compiled.lowering import shapes_of
from experiments.studies.tables import ORDERS, SYNC_RULES
from experiments.tasks import Recipe, Task
from experiments.tasks.base import abstract_set
from syncopate import models

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "topology.md"
WORKERS = 4
RECIPE = Recipe(WORKERS, 2, 4, (0.1,), total_steps=40, schedule="cosine", floor=1e-3, h_base=4)


def compiled_by(compiler):
    """The mark of a test that needs a compiler of `experiments.compiled.chips`."""
    absent = not any(map(importlib.util.find_spec, compiler.modules))
    reason = f"{' or '.join(compiler.modules)} is not installed: {compiler.install}"

    def mark(function):
        skip = pytest.mark.skipif(absent, reason=reason)
        optimised = pytest.mark.usefixtures("optimised")  # what users compile
        return pytest.mark.topology(optimised(skip(function)))

    return mark


def task(width=127, classes=8):
    """D = 1,024 parameters, which four workers share in slices without any padding."""
    data = abstract_set(320, x=((width,), np.float32), y=((), np.int32))
    model = models.softmax_regression(num_features=width, num_classes=classes)
    return Task("shapes", model, data, data, RECIPE)


def programs_of(mesh, order, sync, units_per_step=2):
    recipe = RECIPE._replace(units_per_step=units_per_step)
    return shapes_of(task(), recipe, ORDERS[order], SYNC_RULES[sync].rounds, mesh=mesh)


def kinds(compiled):
    """{kind: bytes} of a program's collectives."""
    return {c.kind: c.times * c.bytes for c in compiled.contents.collectives}


def all_reduces(found, size):
    """What these collectives send, in all-reduces of the gradient: gathers are half of one."""
    halves = found.get("all-to-all", 0) + found.get("all-gather", 0)
    return (found.get("all-reduce", 0) + halves / 2) / (4 * size)


def cells(text):
    """Tables of rows of cells; lines that are none are rows of one."""
    lines = [part.split("\n") for part in text.split("\n\n")]
    return [[[c.strip() for c in x.strip("|").split("|")] for x in part] for part in lines]


def check_page(topology, start, end):
    """The page shows what its command for a topology prints.

    But for what another compiler may find otherwise: bytes, operations, cycles, seconds.
    """
    page = PAGE.read_text()
    command = re.search(
        rf"^    python -m experiments.train (.* --topology={topology})$", page, re.M
    )
    values = absl_flags.FlagValues()
    train.define_flags(values)
    values(["train", *command[1].split()])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train.run(values)
    shown = page.split(start)[1].split(end)[0]
    exact = (None, 8, 3, None, 5, None)  # columns of the tables; all of the last line
    for one, other, columns in zip(
        cells(shown), cells(printed.getvalue().rstrip("\n")), exact, strict=True
    ):
        same = [row[:columns] for row in one if "---" not in row[0]]
        assert same == [row[:columns] for row in other if "---" not in row[0]]
