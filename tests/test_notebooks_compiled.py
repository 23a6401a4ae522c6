"""What the notebooks jit compiles for the machines that notebooks are given: no device is there."""

import json
import pathlib
import sys
import time
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from experiments.compiled import slices
from experiments.compiled.chips import LIBTPU
from experiments.compiled.programs import Compiled, compile_or_refuse
from tests.abstract_runs import compiled_by, kinds

NOTEBOOKS = pathlib.Path(__file__).parents[1] / "notebooks"
# What each one jits, by the names of the functions.
JITTED = {
    "1_orders": {"run"},
    "2_local_steps": {"local_step", "sync", "evaluated"},
    "3_echoing": {"step", "<lambda>"},
    "4_all_together": {"fresh", "echoed", "sync", "next_epoch", "evaluated"},
}
ONE_CHIP, EIGHT_CORES = ("v5e:1", 1), ("v2:2x2", 8)  # of Colab, now and before


class Program(NamedTuple):
    name: str
    lowered: jax.stages.Lowered


def programs_of(name, devices, monkeypatch) -> list[Program]:
    """Runs a notebook on devices that are not there: what it jits is lowered and returns ones."""
    namespace, found, results, meshes = {"__name__": name}, [], {}, []
    jit = jax.jit

    def make_mesh(shape, axes, types):
        meshes.append(Mesh(np.array(devices).reshape(shape), axes, axis_types=types))
        return meshes[-1]

    def recorded(function, **options):
        made = jit(function, **options)
        if sys._getframe(1).f_globals is not namespace:
            return made  # the library's own

        def call(*args):
            leaves, tree = jax.tree.flatten(args)
            key = made, tree, *((np.shape(x), jax.dtypes.result_type(x)) for x in leaves)
            if key not in results:
                # Arguments of a notebook with a mesh all have a worker axis.
                on = meshes and NamedSharding(meshes[0], PartitionSpec("worker"))
                on = on or SingleDeviceSharding(devices[0])
                shapes = [jax.ShapeDtypeStruct(*each, sharding=on) for each in key[2:]]
                args = jax.tree.unflatten(tree, shapes)
                found.append(Program(function.__name__, made.lower(*args)))
                results[key] = jax.tree.map(ones, jax.eval_shape(made, *args))
            return results[key]

        return call

    monkeypatch.setattr(jax, "jit", recorded)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "make_mesh", make_mesh)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    _, *sources = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    with warnings.catch_warnings(action="ignore"), jax.debug_key_reuse(False):  # pictures of ones
        for source in sources:
            exec(compile(source, name, "exec"), namespace)
    return found


def ones(shape):
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape.shape)
    return jnp.ones(shape.shape, shape.dtype)


def compiled(programs) -> list:
    """[(name, what it holds)] of programs that differ."""
    different = {program.lowered.as_text(): program for program in programs}.values()
    found = [(program.name, compile_or_refuse(program.lowered)) for program in different]
    assert not [name for name, one in found if not isinstance(one, Compiled)], "does not fit"
    return found


@compiled_by(LIBTPU)
@pytest.mark.parametrize("name,on", [
    *((name, ONE_CHIP) for name in JITTED),
    *((name, EIGHT_CORES) for name in JITTED if name != "2_local_steps"),  # which uses them all
], ids=lambda value: value if isinstance(value, str) else value[0])  # fmt: skip
def test_what_a_notebook_jits_compiles_for_one_device(name, on, monkeypatch):
    programs = programs_of(name, list(slices.slice_of(*on).mesh.devices), monkeypatch)
    assert {program.name for program in programs} == JITTED[name]
    assert not [one for _, program in compiled(programs) for one in kinds(program)]


@compiled_by(LIBTPU)
def test_eight_workers_on_eight_cores_talk_in_their_sync_alone(monkeypatch):
    devices = slices.slice_of(*EIGHT_CORES).mesh.devices
    found = compiled(programs_of("2_local_steps", list(devices), monkeypatch))
    sent = [kinds(program) for name, program in found if name == "on_device"]
    size = 64 * 128 + 128 + 128 * 10 + 10
    assert sorted(map(len, sent)) == [0, 1]
    assert {kind: size_ for one in sent for kind, size_ in one.items()} == {"all-reduce": 4 * size}
