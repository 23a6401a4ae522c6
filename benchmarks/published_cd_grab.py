"""Times epochs of CD-GraB beside the code that was published with the paper.

    git clone https://github.com/GarlGuo/CD-GraB
    pip install torch
    python -m benchmarks.published_cd_grab --cd_grab=CD-GraB

Softmax regression on random examples, all workers in one process: gradients of single examples
(`torch.func` there, `ordering.per_example` here), their order by `CD_GraB`, and SGD on their mean,
two examples of every worker in a step. First, on whole numbers, three epochs of both must have the
same orders. Then epochs take turns.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import local_opt
import ordering
from experiments import timing

STEP, RATE, CLASSES = 2, 0.01, 10
SIZES = ((4, 16, 40), (32, 2, 640), (64, 4, 640), (4, 16, 10_000))  # W, units of each, parameters


def examples(workers: int, units: int, parameters: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [W, M, D / C] and classes [W, M]."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(workers, units, parameters // CLASSES)).astype(np.float32)
    return x, rng.integers(0, CLASSES, (workers, units))


def given(workers: int, units: int, parameters: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers [W, M, D / C, C], the gradients of `linear`, and classes that it ignores."""
    rng = np.random.default_rng(1)
    x = rng.integers(-9, 10, (workers, units, parameters // CLASSES, CLASSES))
    return x.astype(np.float32), np.zeros((workers, units), np.int64)


def linear(weights, x, y):
    """The loss of one example, in either framework."""
    return (weights * x).sum()


def published(folder: str, sizes: tuple[int, int, int], loss: Callable, data) -> Callable:
    """An epoch of the published class, in a loop as its script's: () -> the next orders."""
    import torch

    sys.path.insert(0, folder)
    workers, units, parameters = sizes
    sorter = importlib.import_module("d_algo").CD_GraB(
        0, None, n=workers, m=units, d=parameters, microbatch=STEP, device="cpu"
    )
    weights = torch.zeros(parameters // CLASSES, CLASSES)
    x, y = map(torch.from_numpy, data)
    single = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    gradients = torch.func.vmap(single, in_dims=(None, 0, 0))
    worker = torch.arange(workers)[:, None]

    def epoch():
        for place in range(0, units, STEP):
            batch = torch.arange(place, place + STEP)
            visited = sorter.orders[:, batch]
            found = gradients(weights, x[worker, visited], y[worker, visited])
            weights.sub_(RATE * found.mean((0, 1)))
            sorter.step(found.reshape(workers, STEP, parameters), batch)
        sorter.sort()
        return sorter.orders.numpy()

    return epoch


def softmax_in_torch(weights, x, y):
    import torch

    return torch.nn.functional.cross_entropy((x @ weights)[None], y[None])


def softmax(weights, x, y):
    return -jax.nn.log_softmax(x @ weights)[y]


def ours(sizes: tuple[int, int, int], loss: Callable, data) -> Callable:
    """An epoch by the public functions: () -> (weights, orders)."""
    workers, units, parameters = sizes
    order = ordering.cd_grab(units, units_per_step=STEP)
    losses = jax.vmap(loss, in_axes=(None, 0, 0))
    gradients = ordering.per_example(lambda w, batch, key: losses(w, batch["x"], batch["y"]))

    def begin(key):
        state = order.init(key, jnp.zeros(parameters))
        return state._replace(current=jnp.arange(units, dtype=state.current.dtype))

    def train(weights, orders, x, y):
        def step(carry, place):
            weights, orders = carry
            visited = jax.lax.dynamic_slice(orders.current, (place,), (STEP,))
            batch = {"x": x[visited], "y": y[visited]}
            _, mean, rows = gradients(weights, batch, jax.random.key(0))
            flat = ordering.Rows.of(rows.tree.reshape(STEP, parameters))
            weights = weights - RATE * jax.lax.pmean(mean, "worker")
            return (weights, order.observe(orders, flat)), None

        places = jnp.arange(0, units, STEP)
        (weights, orders), _ = jax.lax.scan(step, (weights, orders), places)
        return weights, order.next_epoch(orders)

    lift = functools.partial(local_opt.lift, workers=workers)
    orders = lift(begin, inputs="key", outputs="owned")(jax.random.key(0))
    weights = jnp.zeros((workers, parameters // CLASSES, CLASSES))
    words = {"inputs": "owned owned owned owned", "outputs": "owned owned"}
    run = jax.jit(lift(train, **words), donate_argnums=(0, 1))
    call = timing.carry_on(lambda state, x, y: run(*state, x, y), (weights, orders))
    return functools.partial(call, *map(jnp.asarray, data))


def check(folder: str, sizes: tuple[int, int, int]) -> None:
    """Raises AssertionError if the orders of three epochs differ."""
    data = given(*sizes)
    theirs, own = published(folder, sizes, linear, data), ours(sizes, linear, data)
    for _ in range(3):
        np.testing.assert_array_equal(own()[1].current, theirs())


def rows_of(folder: str, sizes: tuple[int, int, int], repeats: int) -> Iterator[dict]:
    """Rows of one size."""
    check(folder, sizes)
    data = examples(*sizes)
    calls = {
        "published, PyTorch": published(folder, sizes, softmax_in_torch, data),
        "syncopate": ours(sizes, softmax, data),
    }
    workers, units, parameters = sizes
    for way, seconds, times in timing.compared(calls, repeats):
        middle, low, high = times["syncopate"]
        yield {
            "workers x units": f"{workers} x {units}", "parameters": f"{parameters:,}", "way": way,
            "ms of an epoch": f"{seconds * 1e3:.2f}", "times ours": f"{middle:.1f}",
            "interval": f"{low:.1f} to {high:.1f}",
        }  # fmt: skip


def main(argv):
    del argv
    head = ()
    for sizes in SIZES:
        rows = rows_of(flags.FLAGS.cd_grab, sizes, flags.FLAGS.repeats)
        head = timing.print_rows(rows, head)


if __name__ == "__main__":
    flags.DEFINE_string("cd_grab", None, "folder of the published code", required=True)
    flags.DEFINE_integer("repeats", 41, "timed epochs of both")
    app.run(main)
