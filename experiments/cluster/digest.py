"""What a resumed run notices: changes of a task's data, of the code, and of what computes it."""

import functools
import hashlib
import importlib.util
import os
import pathlib

import jax
import jaxlib
import numpy as np

import ordering.input

WHOLE = 2**28  # bytes up to which a set is hashed as a whole: about a second
PACKAGES = ("experiments", "local_opt", "models", "ordering", "syncopate")
SAMPLED = 1000  # examples of larger arrays and of sources, evenly spaced


DEVICES = "--xla_force_host_platform_device_count"  # splits a CPU, and computes the same


def data_hash(task) -> str:
    """Hash of both sets: lengths, shapes, types and examples; a sample if large or a source."""
    total = hashlib.sha256()
    recut = [] if task.recut is None else [{"text": task.recut.tokens}, {"at": task.recut.starts}]
    for data in (task.train, task.test, *recut):
        total.update(set_hash(data).encode())
    return total.hexdigest()[:32]


def set_hash(data) -> str:
    """Hash of one set: arrays by name, or a random-access source."""
    size, read = ordering.input.reader(data)
    some = np.unique(np.linspace(0, size - 1, min(size, SAMPLED)).astype(int))
    small = isinstance(data, dict) and sum(x.nbytes for x in jax.tree.leaves(data)) <= WHOLE
    total = hashlib.sha256(f"{size} {small}".encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(data if small else read(some)):
        leaf = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        total.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
    return total.hexdigest()


def conditions() -> dict[str, str]:
    """What may change between two calls of a run, and decides the last digits of its numbers."""
    xla = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICES)]
    return {
        "code": code_hash()[:12],
        "cores": str(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "XLA_FLAGS": " ".join(sorted(xla)),
    }


@functools.cache
def code_hash() -> str:
    """Hash of the repository's source files, the same in a clone and in a wheel."""
    total = hashlib.sha256()
    for package in PACKAGES:
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        root = pathlib.Path(folder).parent
        paths = sorted(path.relative_to(root) for path in root.glob(f"{package}/**/*.py"))
        for path in paths:
            if "_bundled" not in path.parts:  # in a wheel: experiments and models
                total.update(str(path).encode() + b"\0" + (root / path).read_bytes())
    return total.hexdigest()
