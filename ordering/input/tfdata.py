"""An order in, batches out: tf.data reads the examples that an order names, ahead of the training.

TensorFlow is imported only where it is used. If it sees a GPU it takes the memory that JAX needs:
install tensorflow-cpu, or call `tf.config.set_visible_devices([], "GPU")` first.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ordering.base import PyTree
from ordering.input.sources import check_at_least, reader, whole_numbers


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
      >>> import ordering
      >>> source = {"x": np.arange(5), "y": np.arange(5) ** 2}
      >>> for batch in ordering.input.batches(source, [4, 0, 3], batch_size=2):
      ...     print(batch["x"], batch["y"])
      [4 0] [16  0]
      [3] [9]
    """
    check_at_least(0, first_batch=first_batch, seed=seed)
    check_at_least(
        1, batch_size=batch_size, num_parallel_calls=num_parallel_calls, prefetch=prefetch
    )
    num_examples, read = reader(source)
    indices = whole_numbers("indices", indices, (1,), "step_indices gives them first")
    wrong = indices[(indices < 0) | (indices >= num_examples)]
    if wrong.size:
        raise ValueError(
            f"index {wrong[0]} is out of range: the source has {num_examples} examples. Pass "
            f"indices in [0, {num_examples - 1}]; see step_indices for workers and units."
        )
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


def _tensorflow():
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            "ordering.input.batches needs TensorFlow, which cannot be imported: "
            "pip install 'syncopate[data]'."
        ) from error
    return tf
