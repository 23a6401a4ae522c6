"""What did signing pairs cost before? The published way against the library's kernel.

    python benchmarks/host_loops.py

A Python loop with one sync per pair, on NumPy arrays, on JAX arrays, and with PyTorch where it is
installed, beside `bench --part=balance --rows=kernel`; microseconds per example, all in turns.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.step_costs import KERNEL_SIZES, kernel
from experiments.timing import medians


def host_loop(gradients, total, dot: Callable, order: list) -> list:
    """The published way: a Python loop over pairs that waits for one number per pair."""
    following, left, right = [None] * len(order), 0, len(order) - 1
    for k in range(0, len(order), 2):
        difference = gradients[k] - gradients[k + 1]
        first, second = order[k], order[k + 1]
        if dot(difference, total) <= 0:
            total += difference
            following[left], following[right] = first, second
        else:
            total -= difference
            following[left], following[right] = second, first
        left, right = left + 1, right - 1
    return following


def host_loops(gradients: jax.Array) -> dict[str, Callable]:
    """The host loop on NumPy arrays, JAX arrays and, if installed, PyTorch tensors."""
    array, rows, jax_dot = np.array(gradients), list(gradients), jax.jit(jnp.vdot)
    ways = {
        "NumPy": (array, np.zeros_like, np.dot),
        "JAX": (rows, jnp.zeros_like, lambda a, b: float(jax_dot(a, b))),
    }
    try:
        import torch
    except ImportError:
        pass
    else:
        tensor = torch.from_numpy(array)
        ways["PyTorch"] = (tensor, torch.zeros_like, lambda a, b: torch.dot(a, b).item())
    order = list(range(len(rows)))
    return {
        f"host loop, {name}": lambda way=way: host_loop(way[0], way[1](way[0][0]), way[2], order)
        for name, way in ways.items()
    }


def main(repeats: int = 7) -> None:
    for size, units in KERNEL_SIZES.items():
        gradients = jax.random.normal(jax.random.key(0), (units, size))
        calls = {"syncopate": functools.partial(kernel, gradients, jnp.zeros(size))}
        found = medians(calls | host_loops(gradients), repeats)
        for name, seconds in found.items():
            row = {"parameters": size, "way": name}
            row["us_per_example"] = round(seconds / units * 1e6, 3)
            row["times_syncopate"] = round(seconds / found["syncopate"], 2)
            print(row, flush=True)


if __name__ == "__main__":
    main()
