"""Hashes of a task's data and of the code, by which a resumed run notices changes."""

import functools
import hashlib
import importlib.util
import pathlib

import jax
import numpy as np

import ordering.input

WHOLE = 2**28  # bytes up to which a set is hashed as a whole: about a second
PACKAGES = ("experiments", "local_opt", "models", "ordering", "syncopate")
SAMPLED = 1000  # examples of larger arrays and of sources, evenly spaced


def data_hash(task) -> str:
    """Hash of both sets: lengths, shapes, types and examples; a sample if large or a source."""
    total = hashlib.sha256()
    for data in (task.train, task.test):
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
