"""What compiled programs hold, and compilers of devices that need not be there."""

import contextlib
import importlib.util
import math
import re

import jax
import numpy as np
import pytest

from benchmarks.hlo import collectives_of
from benchmarks.topologies import CHIPS, Chip, Compiler, uncached
from local_opt.costs import KINDS

CPU = Chip(2**40, Compiler("cpu", (), "", None, {}, False))  # as many as there are


@contextlib.contextmanager
def compilations():
    """The names of all that is compiled in the body."""
    results = []

    def listen(event, *_, **about):
        if event.endswith("backend_compile_duration"):
            results.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield results
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def marks_of(compiler):
    """The marks of a test that needs a compiler of `benchmarks.topologies`."""
    absent = not any(map(importlib.util.find_spec, compiler.modules))
    reason = f"{' or '.join(compiler.modules)} is not installed: extra {compiler.extra}"
    return [pytest.mark.topology, pytest.mark.skipif(absent, reason=reason)]


def compiled_by(compiler):
    """The same as a decorator, of a test that compiles as users do."""

    def mark(function):
        for each in [*marks_of(compiler), pytest.mark.usefixtures("optimised")]:
            function = each(function)
        return function

    return mark


def text_of(lowered, name="cpu"):
    """A program as a chip's compiler prints it."""
    chip = CHIPS.get(name, CPU)
    with uncached():
        return lowered.compile(compiler_options=dict(chip.compiler.options) or None).as_text()


def kinds(collectives):
    """{kind: bytes}."""
    results = {}
    for one in collectives:
        results[one.kind] = results.get(one.kind, 0) + one.bytes
    return results


def operations(text):
    """Kinds of its collectives, sorted."""
    return sorted(one.kind for one in collectives_of(text))


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


def lines_of(compiled, mesh, least=0):
    """(operation, bytes of its results, axes between whose devices it runs) of all collectives.

    Those of fewer than `least` bytes are left out, such as places that a compiler has shared out.
    """
    ids = np.arange(mesh.size).reshape(mesh.devices.shape)
    workers, inside = mesh.axis_names
    results = []
    for one in collectives_of(compiled.as_text()):
        if one.bytes < least:
            continue
        groups = groups_of(one.line)
        every = {workers: ids.T, inside: ids, "both": ids.reshape(1, -1)}
        whole = [axes for axes, places in every.items() if sorted(places.tolist()) == groups]
        if not whole:  # a compiler may add up over some devices of a worker, then over others
            assert all({*group} <= {*row} for group in groups for row in ids if group[0] in row)
        axes = whole[0] if whole else inside
        results.append((one.kind, one.bytes, axes))
    return sorted(results)
