"""Trees in which not every leaf is an array: these go through a lift, the others pass by."""

from typing import Any, NamedTuple

import jax
import numpy as np


class Part(NamedTuple):
    """A tree in two: its arrays, and how they stand among leaves that are none."""

    arrays: list
    paths: list  # of the arrays
    structure: Any
    rest: list  # (whether an array stands here, else what)


def parted(tree, kind) -> Part:
    kinds = jax.Array | np.ndarray | np.generic
    if kind == "shared":  # a number has no axis of workers: it is the same for all of them
        kinds |= int | float | complex
    named = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [(path, x) for path, x in named if isinstance(x, kinds)]
    rest = [(True, None) if isinstance(x, kinds) else (False, x) for _, x in named]
    paths, arrays = [path for path, _ in arrays], [x for _, x in arrays]
    return Part(arrays, paths, jax.tree.structure(tree), rest)


def joined(arrays, part: Part):
    own = iter(arrays)
    return part.structure.unflatten([next(own) if array else x for array, x in part.rest])
