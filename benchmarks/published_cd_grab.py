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
    rng = np.random.default_rng(0)
    x = rng.normal(size=(workers, units, parameters // CLASSES)).astype(np.float32)
    return x, rng.integers(0, CLASSES, (workers, units))


class Published:
    """The published class and a loop as in the script that came with it, on one process."""

    def __init__(self, folder: str, workers: int, units: int, parameters: int):
        import torch

        sys.path.insert(0, folder)
        of_orders = importlib.import_module("d_algo").CD_GraB
        self.torch, self.sizes = torch, (workers, units, parameters)
        sizes = {"n": workers, "m": units, "d": parameters, "microbatch": STEP}
        self.sorter = of_orders(0, None, device="cpu", **sizes)
        self.weights = torch.zeros(parameters // CLASSES, CLASSES)
        self.x, self.y = map(torch.from_numpy, examples(workers, units, parameters))

        def loss(weights, x, y):
            return torch.nn.functional.cross_entropy((x @ weights)[None], y[None])

        single = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        self.gradients = torch.func.vmap(single, in_dims=(None, 0, 0))

    def epoch(self, gradients: np.ndarray | None = None) -> np.ndarray:
        """Trains an epoch, or only orders these [W, M, D]; returns the next orders."""
        torch, (workers, units, parameters) = self.torch, self.sizes
        rows, orders = torch.arange(workers)[:, None], self.sorter.orders
        for place in range(0, units, STEP):
            batch = torch.arange(place, place + STEP)
            visited = orders[:, batch]
            if gradients is None:
                found = self.gradients(self.weights, self.x[rows, visited], self.y[rows, visited])
            else:
                found = torch.from_numpy(gradients)[rows, visited]
            found = found.reshape(workers, STEP, parameters)
            if gradients is None:
                self.weights -= RATE * found.mean((0, 1)).view(self.weights.shape)
            self.sorter.step(found, batch)
        self.sorter.sort()
        return self.sorter.orders.numpy()


def ours(workers: int, units: int, parameters: int) -> tuple[Callable, Callable]:
    """(an epoch of training, of ordering given gradients [W, M, D]): state -> state."""
    order = ordering.cd_grab(units, units_per_step=STEP)

    def loss(weights, batch, key):
        logits = jax.nn.log_softmax(batch["x"] @ weights)
        return -jnp.take_along_axis(logits, batch["y"][:, None], axis=1)[:, 0]

    gradients = ordering.per_example(loss)

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

    def sort(orders, gradients):
        def step(orders, place):
            visited = jax.lax.dynamic_slice(orders.current, (place,), (STEP,))
            return order.observe(orders, ordering.Rows.of(gradients[visited])), None

        orders, _ = jax.lax.scan(step, orders, jnp.arange(0, units, STEP))
        return order.next_epoch(orders)

    lift = functools.partial(local_opt.lift, workers=workers)
    start = lift(begin, inputs="key", outputs="owned")(jax.random.key(0))
    weights = jnp.zeros((workers, parameters // CLASSES, CLASSES))
    x, y = map(jnp.asarray, examples(workers, units, parameters))
    run = jax.jit(
        lift(train, inputs="owned owned owned owned", outputs="owned owned"), donate_argnums=(0, 1)
    )
    train_epoch = timing.carry_on(
        lambda state: run(*state, x, y), jax.tree.map(jnp.copy, (weights, start))
    )
    sort_epoch = timing.carry_on(jax.jit(lift(sort, inputs="owned owned", outputs="owned")), start)
    return train_epoch, sort_epoch


def check(folder: str, *sizes: int) -> None:
    """Raises AssertionError if the orders of three epochs differ."""
    workers, units, parameters = sizes
    rng = np.random.default_rng(1)
    gradients = rng.integers(-9, 10, (workers, units, parameters)).astype(np.float32)
    published, (_, sort_epoch) = Published(folder, *sizes), ours(*sizes)
    for _ in range(3):
        expected, found = published.epoch(gradients), sort_epoch(jnp.asarray(gradients)).current
        np.testing.assert_array_equal(found, expected)


def rows_of(folder: str, sizes: tuple[int, int, int], repeats: int) -> Iterator[dict]:
    """Rows of one size."""
    check(folder, *sizes)
    calls = {"published, PyTorch": Published(folder, *sizes).epoch, "syncopate": ours(*sizes)[0]}
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
