"""A hash of a task's data, by which a run that goes on notices that they are others."""

import hashlib

import jax
import numpy as np

import ordering.input
from experiments.tasks.base import Task

WHOLE = 2**28  # bytes of an array up to which every one is hashed: about a second
SAMPLED = 1000  # examples of larger arrays and of sources, evenly spaced


def data_hash(task: Task) -> str:
    """Of both sets: lengths, shapes, types and examples; of large ones and of sources some."""
    total = hashlib.sha256()
    for data in (task.train, task.test):
        total.update(_set_hash(data).encode())
    return total.hexdigest()[:32]


def _set_hash(data) -> str:
    size, read = ordering.input.reader(data)
    some = np.unique(np.linspace(0, size - 1, min(size, SAMPLED)).astype(int))
    small = isinstance(data, dict) and sum(x.nbytes for x in jax.tree.leaves(data)) <= WHOLE
    total = hashlib.sha256(f"{size} {small}".encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(data if small else read(some)):
        leaf = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        total.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
    return total.hexdigest()
