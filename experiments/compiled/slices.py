"""Slices of chips that need not be there, by their name."""

import importlib.util
import math
import os
import re
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from experiments.compiled.chips import CHIPS, Chip
from local_opt import runners

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked: there is none outside Google Cloud
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a second process would be refused: nobody holds a chip
    # libtpu complains where these are not set; the name of the topology decides all the same.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_MIN_LOG_LEVEL": "3",
}


class Slice(NamedTuple):
    """Fields:
    name: such as v5e:4x4; kind: what its devices call themselves.
    mesh: of all its devices, one worker each.
    chip: of CHIPS.
    """

    name: str
    kind: str
    mesh: Mesh
    chip: Chip


def stay_on_cpu() -> None:
    """Keeps JAX from looking for accelerators, before it looks for any; and libtpu quiet."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")


def slice_of(name: str, workers: int) -> Slice:
    """The slice of a topology, a device for each worker.

    Args:
      name: CHIP:SHAPE, a chip of CHIPS and its chips per axis, such as v5e:4x4 or h100:8.
      workers: W, of the run.

    Raises:
      ValueError: for a topology that does not exist, without its compiler, and for another number
        of workers than devices.
    """
    parts = re.fullmatch(r"(\w+):(\d+(?:x\d+){0,2})", name)
    if parts is None or parts[1] not in CHIPS:
        raise ValueError(
            f"--topology is {name}: a slice is CHIP:SHAPE, and chips are {', '.join(CHIPS)}, for "
            "which alone programs are compiled. Pass one such as v5e:4x4 or h100:8."
        )
    chip = CHIPS[parts[1]]
    compiler = chip.compiler
    if not any(map(importlib.util.find_spec, compiler.modules)):
        raise ValueError(
            f"--topology is {name}, and {' or '.join(compiler.modules)}, which compiles for it, is "
            f"not installed: {compiler.install}."
        )
    stay_on_cpu()
    try:
        described = compiler.topology(*parts.groups(), chip)
        devices = topologies.get_topology_desc(platform=compiler.platform, **described).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise ValueError(
            f"--topology is {name}, and there is no such slice ({error}): a {parts[1]} has shapes "
            f"such as {', '.join(chip.shapes)}. Pass one of them."
        ) from error
    if len(devices) != workers:
        raise ValueError(_other_number(name, len(devices), workers))
    mesh = Mesh(np.array(devices), (runners.AXIS,))
    return Slice(name, devices[0].device_kind, mesh, chip)


def _other_number(name, devices, workers) -> str:
    kind = name.split(":")[0]
    sizes = {
        f"{kind}:{shape}": math.prod(int(n) for n in shape.split("x")) * CHIPS[kind].devices
        for shape in CHIPS[kind].shapes
    }
    fitting = [f", or --topology={other}" for other, size in sizes.items() if size == workers]
    return (
        f"--workers is {workers} and {name} has {devices} devices: every device runs one worker. "
        f"Pass --workers={devices}{fitting[0] if fitting else ''}."
    )
