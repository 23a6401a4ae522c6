"""Orders that look at nothing, drawn on the host beside the steps: int32[W, M] of every epoch."""

from collections.abc import Callable

import numpy as np

from experiments.training.config import Sizes


def reshuffled(seed: int, first, sizes: Sizes, num_examples: int) -> Callable:
    """D-RR: `epoch -> int32[W, M]`, a fresh permutation of every worker's own units.

    Drawn by NumPy beside the steps: devices would sort M random numbers for it, which takes longer
    than an epoch of a small model.

    Args:
      first: int32[W, M] of epoch 0, which all orders share under one seed.
    """
    del num_examples
    shape = sizes.workers, sizes.num_units
    units = np.broadcast_to(np.arange(sizes.num_units, dtype=np.int32), shape)

    def order(epoch: int) -> np.ndarray:
        if not epoch:
            return np.asarray(first)
        return np.random.default_rng([seed, epoch]).permuted(units, axis=1)

    return order


def dealt(seed: int, first, sizes: Sizes, num_examples: int) -> Callable:
    """D-RR over all data: `epoch -> int32[W, M]`, a shuffle of all examples, dealt step by step.

    One generator draws all epochs, one after the other. What fills no step is left out of its
    epoch.
    """
    del first
    drawn = {}  # the generator after an epoch, and that epoch

    def order(epoch: int) -> np.ndarray:
        if drawn.get("epoch", epoch) >= epoch:
            drawn.update(epoch=-1, generator=np.random.default_rng(seed))
        while drawn["epoch"] < epoch:
            examples = drawn["generator"].permutation(num_examples)
            drawn["epoch"] += 1
        return deal(examples, sizes)

    return order


def deal(examples: np.ndarray, sizes: Sizes) -> np.ndarray:
    """int32[W, M]: every step takes the next W B examples, worker after worker."""
    steps = examples[: sizes.workers * sizes.num_units].reshape(
        -1, sizes.workers, sizes.units_per_step
    )
    return np.ascontiguousarray(steps.swapaxes(0, 1).reshape(sizes.workers, -1), np.int32)
