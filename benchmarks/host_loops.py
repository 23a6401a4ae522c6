"""Measures the cost of signing pairs of gradients in memory, against loops on the host.

    python -m benchmarks.host_loops

Prints microseconds per example for D parameters; all ways take turns. "read once" is the time to
sum the gradients, the fastest of three ways, which is the limit of the memory. "syncopate" is the
library's kernel, and "sketches" reads every gradient once and signs 1,024 numbers. The published
way is a Python loop with one sync per pair, on NumPy arrays, JAX arrays and, if installed, PyTorch.

Then it prints microseconds per pair for sketches of 1,024 numbers that exist already: with the
block size that the library chooses, in blocks of 16 and 64, and by a loop on NumPy arrays.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import ordering
from benchmarks.timing import compared, print_rows
from experiments.timing import medians
from ordering.gradients.linear import SIZE
from ordering.signs import Greedy, balance_blocks
from ordering.trees import split_pairs, subtract

# Units per call: enough to exceed the caches at every D, at most 1.3 GB.
KERNEL_SIZES = {10**3: 4096, 10**5: 512, 10**6: 128, 10**7: 32}
PAIRS = (64, 256, 1024)
READS = (
    jax.jit(lambda g: jnp.sum(g.reshape(2, -1), axis=1)),
    jax.jit(lambda g: jnp.sum(g, axis=1)),
    jax.jit(lambda g: g @ jnp.ones(g.shape[1])),
)


@jax.jit
def kernel(gradients, total):
    """`(gradients [n, D], r) -> (r, signs)` with the library's kernel."""
    pairs = split_pairs(gradients, gradients.shape[0] // 2)
    return balance_blocks(Greedy(), (), total, pairs, derive=subtract)[1:3]


@jax.jit
def sign_sketches(gradients, total):
    """The same on sketches, which read every gradient once."""
    made = ordering.make_sketch(jax.random.key(0), size=total.size)
    return kernel(jax.vmap(made)(gradients), total)


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


def rows(size: int, units: int, repeats: int) -> list[dict]:
    gradients = jax.random.normal(jax.random.key(0), (units, size))
    calls = {
        "syncopate": functools.partial(kernel, gradients, jnp.zeros(size)),
        "sketches": functools.partial(sign_sketches, gradients, jnp.zeros(min(size, SIZE))),
    }
    reads = {read: functools.partial(read, gradients) for read in READS}
    measured = medians(reads | calls | host_loops(gradients), repeats)
    limit = min(measured.pop(read) for read in READS)
    return [
        {
            "parameters": size,
            "way": name,
            "us_per_example": round(seconds / units * 1e6, 3),
            "times_read_once": round(seconds / limit, 2),
            "times_syncopate": round(seconds / measured["syncopate"], 2),
        }
        for name, seconds in {"read once": limit, **measured}.items()
    ]


def signed_by_numpy(pairs: np.ndarray, total: np.ndarray) -> list[bool]:
    """Whether each pair gets a plus."""
    signs = []
    for pair in pairs:
        signs.append(pair @ total <= 0)
        total = total + pair if signs[-1] else total - pair
    return signs


def pair_rows(repeats: int) -> Iterator[dict]:
    """Signs of pairs of sketches, without the sketches."""
    for count in PAIRS:
        pairs, total = jax.random.normal(jax.random.key(0), (count, SIZE)), jnp.zeros(SIZE)

        def sign(pairs, total, block):
            signs = balance_blocks(Greedy(), (), total, pairs, block_size=block)[2]
            return signs > 0

        ways = {f"blocks of {n}" if n else "syncopate": n for n in (None, 16, 64)}
        calls = {
            way: functools.partial(jax.jit(functools.partial(sign, block=n)), pairs, total)
            for way, n in ways.items()
        }
        calls["NumPy"] = functools.partial(signed_by_numpy, np.array(pairs), np.zeros(SIZE, "f4"))
        for way, call in calls.items():
            np.testing.assert_array_equal(call(), calls["NumPy"](), err_msg=way)
        for way, seconds, ratios in compared(calls, repeats):
            yield {
                "pairs": count,
                "way": way,
                "us_per_pair": round(seconds / count * 1e6, 3),
                "times_syncopate": "{:.2f} ({:.2f} to {:.2f})".format(*ratios["syncopate"]),
            }


def main(repeats: int = 7) -> None:
    head = ()
    for size, units in KERNEL_SIZES.items():
        head = print_rows(rows(size, units, repeats), head)
    print_rows(pair_rows(3 * repeats))


if __name__ == "__main__":
    main()
