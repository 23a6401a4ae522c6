"""Runs of shapes alone for compilers of devices that need not be there, and what programs hold."""

import contextlib
import importlib.util
import io
import math
import pathlib
import re

import numpy as np
import pytest
from absl import flags as absl_flags

import models
from experiments import train
from experiments.study.compile import KINDS, collectives_of, shapes_of
from experiments.study.tables import ORDERS, SYNC_RULES
from experiments.tasks import Recipe, Task
from experiments.tasks.base import abstract_set

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "topology.md"
WORKERS = 4
RECIPE = Recipe(WORKERS, 2, 4, (0.1,), total_steps=40, schedule="cosine", floor=1e-3, h_base=4)


def marks_of(compiler):
    """Of a test that needs a compiler of `experiments.study.chips`."""
    absent = not any(map(importlib.util.find_spec, compiler.modules))
    reason = f"{' or '.join(compiler.modules)} is not installed: {compiler.install}"
    return [pytest.mark.topology, pytest.mark.skipif(absent, reason=reason)]


def compiled_by(compiler):
    """The same as a decorator, of a test that compiles as users do."""

    def mark(function):
        for each in [*marks_of(compiler), pytest.mark.usefixtures("optimised")]:
            function = each(function)
        return function

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
    found = {}
    for one in compiled.collectives:
        found[one.kind] = found.get(one.kind, 0) + one.bytes
    return found


def all_reduces(found, size):
    """What these collectives send, in all-reduces of the gradient: gathers are half of one."""
    halves = found.get("all-to-all", 0) + found.get("all-gather", 0)
    return (found.get("all-reduce", 0) + halves / 2) / (4 * size)


# Of a compiled program's text.


def operations(text):
    """Kinds of its collectives, in their order."""
    return [one.kind for one in collectives_of(text)]


def types_of(one):
    """Types of the numbers that a collective gives, such as {"f32"}."""
    result = re.split(rf"\b(?:{'|'.join(KINDS)})", one.line.split(" = ", 1)[1])[0]
    return set(re.findall(r"\b([a-z]+\d+)\[", result))


def conditionals(text):
    """Lines of its conditionals."""
    return re.findall(r"^.* conditional\(.*$", text, re.M)


def donated(text):
    """How many arguments are handed on as outputs."""
    return re.search(r"input_output_alias=\{(.*?) \}", text)[1].count("alias)")


def groups_of(line):
    """Replica groups of a collective, in the three ways in which XLA prints them.

    Written out, as [shape]<=[iota]T(permutation), or as mesh['a'=2,'b'=4] {'b'}.
    """
    if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        axes = re.findall(r"'(\w+)'=(\d+)", match[1])
        reduced = re.findall(r"'(\w+)'", match[2])
        ids = np.arange(8).reshape([int(size) for _, size in axes])
        places = [i for i, (name, _) in enumerate(axes) if name in reduced]
        ids = np.moveaxis(ids, places, range(-len(places), 0))
        members = math.prod(ids.shape[-len(places) :])
        return sorted(sorted(row) for row in ids.reshape(-1, members).tolist())
    if match := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        rows = re.findall(r"\{([\d,]+)\}", match[1])
        return sorted(sorted(int(n) for n in row.split(",")) for row in rows)
    shape, iota, order = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line
    ).groups()
    ints = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    ids = np.arange(8).reshape(ints(iota))
    ids = ids.transpose(ints(order)) if order else ids
    return sorted(sorted(row) for row in ids.reshape(ints(shape)).tolist())


# Of what a dry run prints.


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
    exact = (None, 8, 2, None, None)  # columns of the tables; all of the last line
    for one, other, columns in zip(
        cells(shown), cells(printed.getvalue().rstrip("\n")), exact, strict=True
    ):
        same = [row[:columns] for row in one if "---" not in row[0]]
        assert same == [row[:columns] for row in other if "---" not in row[0]]


def lines_of(compiled, mesh):
    """(operation, bytes of its results, axes between whose devices it runs) of all collectives."""
    ids = np.arange(mesh.size).reshape(mesh.devices.shape)
    found = []
    for one in collectives_of(compiled.as_text()):
        groups = groups_of(one.line)
        (axes,) = {
            axes
            for axes, places in {
                "worker": ids.T.tolist(),
                "model": ids.tolist(),
                "both": [ids.ravel().tolist()],
            }.items()
            if sorted(places) == groups
        }
        found.append((one.kind, one.bytes, axes))
    return sorted(found)
