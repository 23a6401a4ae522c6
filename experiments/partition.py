"""How a training set is cut into the fixed units of fixed workers."""

import math

import jax


def partition(train: dict, num_workers: int, unit_size: int):
    """Cuts the training set into fixed units of fixed workers.

    Args:
      train: arrays [N, ...]; num_workers: W; unit_size: examples per unit.

    Returns:
      Arrays [W, M, unit_size, ...] with M = N // (W unit_size). Worker w owns the w-th run of
      M * unit_size examples, for the whole training; fewer than W * unit_size are left out.

    Raises:
      ValueError: if there is not one unit for every worker.
    """
    if not isinstance(train, dict):
        raise ValueError(
            f"the training set is a {type(train).__name__}, which does not fit in memory: this "
            "loop cuts arrays. Choose a task whose data fit, or experiments.qsr, which streams."
        )
    shapes = partition_shapes(train, num_workers, unit_size)
    return jax.tree.map(lambda x, s: x[: math.prod(s.shape[:3])].reshape(s.shape), train, shapes)


def partition_shapes(train: dict, num_workers: int, unit_size: int):
    """The shapes of `partition`, from arrays or from shapes."""
    size = jax.tree.leaves(train)[0].shape[0]
    if min(num_workers, unit_size) < 1 or num_workers * unit_size > size:
        raise ValueError(
            f"{num_workers} workers with units of {unit_size} examples need at least "
            f"{num_workers * unit_size} examples (both at least 1); the training set has {size}. "
            "Lower --workers or --unit_size."
        )
    units = (num_workers, size // (num_workers * unit_size), unit_size)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*units, *x.shape[1:]), x.dtype), train)
