"""TPU slices that need not be there: libtpu compiles for a topology by its name.

libtpu comes from PyPI (`pip install -e ".[topology]"`) and asks for no device.
"""

import importlib.util
import math
import os
import re
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from local_opt import runners

GIB = 2**30
SQUARES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")


class Chip(NamedTuple):
    """As published."""

    hbm: int  # bytes of one chip
    devices: int  # of JAX, on one chip
    shapes: tuple[str, ...]  # usual ones of a slice, to propose

    @property
    def memory(self) -> int:
        """Bytes of one device."""
        return self.hbm // self.devices


CHIPS = {
    "v4": Chip(32 * GIB, 2, CUBES),
    "v5e": Chip(16 * GIB, 1, SQUARES),
    "v5p": Chip(95 * GIB, 1, CUBES),
    "v6e": Chip(32 * GIB, 1, SQUARES),
}
INSTALL = 'pip install -e ".[topology]"'
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
      name: CHIP:SHAPE, a chip of CHIPS and its chips per axis, such as v5e:4x4 or v5p:2x2x2.
      workers: W, of the run.

    Raises:
      ValueError: for a topology that does not exist, without libtpu, and for another number of
        workers than devices.
    """
    parts = re.fullmatch(r"(\w+):(\d+(?:x\d+){1,2})", name)
    if parts is None or parts[1] not in CHIPS:
        raise ValueError(
            f"--topology is {name}: a slice is CHIP:SHAPE, and chips are {', '.join(CHIPS)}, for "
            "which alone programs are compiled. Pass one such as v5e:4x4 or v5p:2x2x2."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"--topology is {name}, and libtpu, which compiles for it, is not installed: {INSTALL}."
        )
    stay_on_cpu()
    chip = CHIPS[parts[1]]
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except jax.errors.JaxRuntimeError as error:
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
