"""Sources of examples, and the plain loops over their batches."""

import jax
import numpy as np

import ordering
from tests import tables
from tests.problems import assert_bitwise_equal


class Examples:
    """A random-access source of the examples of a tree of arrays; counts what is asked for."""

    def __init__(self, arrays, fail_at=None, error=None):
        self.arrays, self.fail_at, self.error = arrays, fail_at, error
        self.asked = []

    def __len__(self):
        return len(jax.tree.leaves(self.arrays)[0])

    def __getitem__(self, index):
        self.asked.append(index)
        if index == self.fail_at:
            raise self.error
        return jax.tree.map(lambda x: x[index], self.arrays)


def assert_same(actual, expected):
    actual = list(actual)
    assert_bitwise_equal(actual, expected)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(actual))


# (workers or None for one order without an axis, units, units per step, unit size)
SIZES = [(None, 13, 3, 1), (1, 12, 4, 2), (4, 13, 3, 2), (4, 5, 5, 1)]


def epoch_of(size):
    """(source, orders, sizes, the steps by hand, from the definition of a unit)."""
    workers, num_units, units_per_step, unit_size = size
    count = (workers or 1) * num_units * unit_size
    source = {"x": np.arange(2 * count).reshape(count, 2), "y": np.arange(count) * 10}
    rng, steps = np.random.default_rng(0), []
    orders = np.stack([rng.permutation(num_units) for _ in range(workers or 1)])
    for start, stop in tables.steps(num_units, units_per_step):
        units = orders[:, start:stop] + num_units * np.arange(workers or 1)[:, None]
        examples = units[..., None] * unit_size + np.arange(unit_size)
        examples = examples.reshape((workers, -1) if workers else -1)
        steps.append(jax.tree.map(lambda x, chosen=examples: x[chosen], source))
    sizes = {"units_per_step": units_per_step, "unit_size": unit_size}
    return source, orders if workers else orders[0], sizes, steps


def reads_in(source, orders, *, units_per_step, **options):
    """`read_epochs` in these orders, int[W, M], or int[M] of one worker."""
    order = ordering.baselines.shuffle_once(orders.shape[-1], units_per_step=units_per_step)
    workers, key = None if orders.ndim == 1 else len(orders), jax.random.key(0)
    state = ordering.init_workers(order, key, None, workers)
    state = ordering.data.ReadState(state._replace(current=orders, next=orders))
    return ordering.data.read_epochs(source, order, key, workers=workers, state=state, **options)


class EpochSource:
    """Random access to examples, with a view for every epoch."""

    def __init__(self, data):
        self.data, self.epochs = data, []

    def __len__(self):
        return len(self.data["y"])

    def __getitem__(self, i):
        return {name: values[i] for name, values in self.data.items()}

    def at_epoch(self, epoch):
        self.epochs.append(epoch)
        return self


class Rolled(EpochSource):
    """Examples that are numbered anew in every epoch, in the place of `text.Recut`."""

    def by(self, how):
        return self

    def at_epoch(self, epoch):
        return EpochSource({name: np.roll(x, epoch, axis=0) for name, x in self.data.items()})
