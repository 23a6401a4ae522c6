"""An order in, batches out: tf.data reads the examples that an order names, ahead of the training.

TensorFlow is imported only where it is used. If it sees a GPU it takes the memory that JAX needs:
install tensorflow-cpu, or call `tf.config.set_visible_devices([], "GPU")` first.
"""

import collections
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from ordering import base
from ordering.base import PyTree
from ordering.input.sources import reader


def step_indices(
    orders,
    *,
    units_per_step: int,
    unit_size: int = 1,
    num_units: int | None = None,
    total: int | None = None,
) -> tuple[np.ndarray, int]:
    """The examples that orders name: by step, then worker, then unit, then example of the unit.

    Worker w owns the units w M .. w M + M - 1 of the source; unit u is the examples
    u S .. u S + S - 1. The last step of an epoch has the M mod B units left over.

    Args:
      orders: int[M] or int[W, M], one permutation of 0 .. M - 1 per worker; or, with
        `num_units`, a slice [.., m] of such orders that starts at a step.
      units_per_step: B in [1, M], units per worker and step.
      unit_size: S >= 1, neighbouring examples in one unit.
      num_units: M, where `orders` is a slice.
      total: where units of the whole source are dealt to the workers (`ordering.dealt`), how many
        these are; orders then name units in [0, total), and none twice among these workers.

    Returns:
      `(indices, batch_size)`: int64[W m S], and W B S, the examples of a whole step: `batches`
      of that size are the steps.

    Raises:
      ValueError: if a worker's units are out of range or named twice, or a size does not fit.

    Example:
      >>> from ordering.input import pipeline
      >>> indices, batch_size = pipeline.step_indices([[2, 0, 1], [1, 0, 2]], units_per_step=2)
      >>> indices.tolist(), batch_size
      ([2, 0, 4, 3, 1, 5], 4)
    """
    orders = np.atleast_2d(_integers("orders", orders, ndims=(1, 2)))
    workers, length = orders.shape
    num_units = length if num_units is None else num_units
    base.check_units_per_step(num_units, units_per_step)
    _check_at_least(1, unit_size=unit_size)
    ranked = np.sort(orders if total is None else orders.reshape(1, -1), axis=1)
    most = num_units if total is None else total
    if not ((ranked >= 0) & (ranked < most)).all() or (np.diff(ranked, axis=1) == 0).any():
        whose = "each worker's order of its own units; for a slice of an order also num_units"
        raise ValueError(
            f"orders of shape {orders.shape} do not name each unit of 0 .. {most - 1} at most "
            f"once. Pass {whose if total is None else 'the orders of one epoch, and their total'}."
        )
    units = orders if total is not None else orders + num_units * np.arange(workers)[:, None]
    whole = length - length % units_per_step
    steps = units[:, :whole].reshape(workers, -1, units_per_step).swapaxes(0, 1)
    units = np.concatenate([steps.reshape(-1), units[:, whole:].reshape(-1)])
    indices = units[:, None] * unit_size + np.arange(unit_size)
    return indices.reshape(-1), workers * units_per_step * unit_size


def batches(
    source,
    indices,
    *,
    batch_size: int,
    transform: Callable[[PyTree, Any], PyTree] | None = None,
    seed: int = 0,
    first_batch: int = 0,
    num_parallel_calls: int | None = None,
    prefetch: int = 2,
) -> Iterator[PyTree]:
    """Batch i is `source[indices[i B : (i + 1) B]]`, read ahead on tf.data's threads.

    Reading starts at the call, not at the first `next`. Several threads read the source: two
    open iterators do so in any case.

    Args:
      source: NumPy arrays [N, ...], alone or in tuples and dicts; or examples to be read by
        `source[i]`, or `source.__getitems__(list)` where it exists, with `len(source)` (Grain,
        tfds.data_source): arrays, numbers, text, or trees of them, all of the same shapes.
      indices: int[n] in [0, N), as from `step_indices`.
      batch_size: B >= 1; the last batch has what is left over.
      transform: `(batch, seed) -> batch` in TensorFlow, to decode and augment a whole batch.
        `seed` is int64[2], (seed, number of the batch), for tf.random.stateless_*. One example
        is read at the call, to learn the structure.
      seed: for the transform; give every epoch another one.
      first_batch: number of the first batch, so that chained iterators augment as one.
      num_parallel_calls: batches read at once. tf.data decides if None, at most one per core:
        pass more where reading waits for a disk or a network.
      prefetch: >= 1, finished batches that wait for the consumer.

    Returns:
      An iterator of trees of NumPy arrays; those from a transform are read-only.

    Raises:
      ValueError: at the call, for a source, index or size that cannot be.
      ImportError: if TensorFlow is not installed.
      RuntimeError: from `next`, naming the examples, if a batch cannot be read or transformed.

    Example:
      >>> import numpy as np
      >>> from ordering.input import pipeline
      >>> source = {"x": np.arange(5), "y": np.arange(5) ** 2}
      >>> for batch in pipeline.batches(source, [4, 0, 3], batch_size=2):
      ...     print(batch["x"], batch["y"])
      [4 0] [16  0]
      [3] [9]
    """
    _check_at_least(0, first_batch=first_batch)
    _check_at_least(
        1, batch_size=batch_size, num_parallel_calls=num_parallel_calls, prefetch=prefetch
    )
    num_examples, read = reader(source)
    indices = _integers("indices", indices, ndims=(1,))
    _check_in_range(indices, num_examples)
    tf = _tensorflow()
    if not indices.size:
        return iter(())
    parts = [indices[i : i + batch_size] for i in range(0, indices.size, batch_size)]
    failures = {}

    def load(i):
        try:
            return read(parts[i])
        except Exception as error:  # TensorFlow keeps its text only, and ends on StopIteration
            failures[i] = error
            raise RuntimeError(repr(error)) from error

    if transform is None:
        make, finish = _kept(tf, load)
    else:
        make, finish = _transformed(tf, load, read(indices[:1]), transform, seed, first_batch)
    make = tf.autograph.experimental.do_not_convert(make)
    calls = tf.data.AUTOTUNE if num_parallel_calls is None else num_parallel_calls
    dataset = tf.data.Dataset.range(len(parts)).map(make, calls, deterministic=True)
    options = tf.data.Options()
    options.experimental_warm_start = True  # read now, not at the first next
    running = [dataset.prefetch(prefetch).with_options(options).as_numpy_iterator()]

    def run():
        for i, part in enumerate(parts):
            try:
                leaves = next(running[0])
            except tf.errors.OpError as error:
                cause = failures.get(i, error)
                raise RuntimeError(
                    f"batch {first_batch + i}, examples {part}: {type(cause).__name__}: {cause}"
                ) from cause
            yield finish(i, leaves)

    stream = run()
    # Threads that still read while the interpreter exits would hang it: finalize stops them.
    weakref.finalize(stream, running.clear)
    return stream


def _kept(tf, load):
    """`(make, finish)`: batches stay in Python, for each way into a tensor costs a copy."""
    made = {}

    def keep(i):
        made[int(i)] = load(int(i))
        return i

    return (
        lambda i: tf.numpy_function(keep, [i], tf.int64),
        lambda i, leaves: made.pop(i),
    )


def _transformed(tf, load, one, transform, seed, first_batch):
    """`(make, finish)`: tensors like those of the example `one` go through the transform."""
    ones, structure = jax.tree.flatten(one)
    shapes = [leaf.shape[1:] for leaf in ones]
    types = [tf.as_dtype(leaf.dtype) for leaf in ones]
    transform = tf.function(transform)
    structures = []

    def load_leaves(i):
        leaves, found = jax.tree.flatten(load(int(i)))
        kinds = [(leaf.shape[1:], tf.as_dtype(leaf.dtype)) for leaf in leaves]
        if found != structure or kinds != list(zip(shapes, types, strict=True)):
            raise ValueError("the examples differ from the first in structure, shapes or types.")
        return leaves

    def make(i):
        leaves = tf.numpy_function(load_leaves, [i], types)
        for leaf, shape in zip(leaves, shapes, strict=True):
            leaf.set_shape((None, *shape))
        number = tf.stack([tf.constant(seed, tf.int64), first_batch + i])
        leaves, found = jax.tree.flatten(transform(jax.tree.unflatten(structure, leaves), number))
        structures.append(found)  # not carried by tf.data, which would stack lists
        return tuple(leaves)

    return make, lambda i, leaves: jax.tree.unflatten(structures[0], leaves)


def prefetch_to_device(iterator: Iterable, *, size: int = 2, sharding=None) -> Iterator[PyTree]:
    """Copies batches to the device while those before them are worked on.

    Args:
      iterator: trees of NumPy arrays.
      size: >= 1, batches on the device, the one handed out included.
      sharding: a device or `jax.sharding.Sharding`, or a tree of them, which must fit the short
        last batch too; the default device if None.

    Returns:
      An iterator of the same trees as JAX arrays.

    Raises:
      ValueError: if size is below 1.

    Example:
      >>> import numpy as np
      >>> from ordering.input import pipeline
      >>> [int(x.sum()) for x in pipeline.prefetch_to_device([np.arange(3), np.arange(4)])]
      [3, 6]
    """
    _check_at_least(1, size=size)

    def run():
        copies = (jax.device_put(batch, sharding) for batch in iterator)
        queue = collections.deque(itertools.islice(copies, size))
        while queue:
            yield queue.popleft()
            queue.extend(itertools.islice(copies, 1))

    return run()


def _tensorflow():
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            "pipeline.batches needs TensorFlow, which cannot be imported: "
            "pip install 'syncopate[data]'."
        ) from error
    return tf


def _check_at_least(least, **sizes):
    for name, value in sizes.items():
        if value is not None and (int(value) != value or value < least):
            raise ValueError(f"{name} is {value}: pass a whole number of at least {least}.")


def _integers(name, value, ndims):
    value = np.asarray(value)
    if value.ndim not in ndims or (value.size and not np.issubdtype(value.dtype, np.integer)):
        raise ValueError(
            f"{name} is {value.dtype}{list(value.shape)}: pass whole numbers with "
            f"{' or '.join(map(str, ndims))} axes."
        )
    return value.astype(np.int64)


def _check_in_range(indices, num_examples):
    wrong = indices[(indices < 0) | (indices >= num_examples)]
    if wrong.size:
        raise ValueError(
            f"index {wrong[0]} is out of range: the source has {num_examples} examples. Pass "
            f"indices in [0, {num_examples - 1}]; see step_indices for workers and units."
        )
