"""Batches of the examples that an order names, read ahead by tf.data.

TensorFlow is imported only when it is used. If it sees a GPU it takes the memory that JAX needs:
install tensorflow-cpu, or call `tf.config.set_visible_devices([], "GPU")` first.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from ordering.input.sources import check_indices, reader
from syncopate import plans


def batches(
    source: PyTree[ArrayLike] | Sequence,
    indices: Int[ArrayLike, "n"] | Sequence[int],
    *,
    batch_size: int,
    transform: Callable[[PyTree, Any], PyTree] | None = None,
    seed: int = 0,
    first_batch: int = 0,
    num_parallel_calls: int | None = None,
    prefetch: int = 2,
) -> Iterator[PyTree]:
    """Batches of the indexed examples, read ahead on tf.data's threads.

    Batch i is `source[indices[i B : (i + 1) B]]`. Reading starts at the call. The source must
    allow reads from several threads, as two open iterators use several in any case.

    Args:
      source: as in `reader`; all examples have the same shapes.
      indices: int[n] in [0, N), as from `step_indices`.
      batch_size: B >= 1; the last batch has the indices that are left.
      transform: `(batch, seed) -> batch` in TensorFlow, to decode and augment a whole batch.
        `seed` is int64[2], the seed and the number of the batch, for tf.random.stateless_*. One
        example is read at the call, to learn the structure.
      seed: >= 0, for the transform; pass another one in every epoch.
      first_batch: number of the first batch, so that chained iterators augment as one.
      num_parallel_calls: batches read at once. If None, tf.data chooses, at most one per core:
        pass more if reading waits for a disk or a network.
      prefetch: >= 1, finished batches that wait for the consumer.

    Returns:
      An iterator of trees of NumPy arrays; those from a transform are read-only.

    Raises:
      ValueError: at the call, for a source, index or size that does not fit.
      ImportError: if TensorFlow is not installed.
      RuntimeError: from `next`, naming the examples, if a batch cannot be read or transformed.

    Examples:
      >>> import numpy as np
      >>> from syncopate import ordering
      >>> source = {"x": np.arange(5), "y": np.arange(5) ** 2}
      >>> for batch in ordering.input.batches(source, [4, 0, 3], batch_size=2):
      ...     print(batch["x"], batch["y"])
      [4 0] [16  0]
      [3] [9]
    """
    plans.check_whole("first_batch", first_batch, 0)
    plans.check_whole("seed", seed, 0)
    batch_size = plans.check_whole("batch_size", batch_size, 1)
    prefetch = plans.check_whole("prefetch", prefetch, 1)
    if num_parallel_calls is not None:
        plans.check_whole("num_parallel_calls", num_parallel_calls, 1)
    num_examples, read = reader(source)
    indices = check_indices(indices, num_examples)
    if transform is not None:
        plans.check_function("transform", transform, "batch", "seed")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            "ordering.input.batches needs TensorFlow, which cannot be imported: "
            "pip install 'syncopate[data]'."
        ) from error
    if not indices.size:
        return iter(())
    count, failures = -(-indices.size // batch_size), {}

    def part(i):
        return indices[i * batch_size :][:batch_size]

    def load(i):
        try:
            return read(part(i))
        except Exception as error:  # TensorFlow keeps only its text, and ends on StopIteration
            ended = isinstance(error.__cause__, StopIteration)
            failures[i] = error.__cause__ if ended else error
            raise RuntimeError(repr(error)) from error

    if transform is None:
        make, finish = _kept(tf, load)
    else:
        make, finish = _transformed(tf, load, read(indices[:1]), transform, seed, first_batch)
    make = tf.autograph.experimental.do_not_convert(make)
    calls = tf.data.AUTOTUNE if num_parallel_calls is None else num_parallel_calls
    dataset = tf.data.Dataset.range(count).map(make, calls, deterministic=True)
    options = tf.data.Options()
    options.experimental_warm_start = True  # pyright: ignore - made at run time
    running = [dataset.prefetch(prefetch).with_options(options).as_numpy_iterator()]

    def run():
        for i in range(count):
            try:
                leaves = next(running[0])
            except tf.errors.OpError as error:
                cause = failures.get(i, error)
                raise RuntimeError(
                    f"batch {first_batch + i}, examples {part(i)}: {type(cause).__name__}: {cause}"
                ) from cause
            yield finish(i, leaves)

    stream = run()
    # Threads that still read at exit would hang the interpreter.
    weakref.finalize(stream, running.clear)
    return stream


def _kept(tf, load):
    """`(make, finish)`: batches stay in Python, as tensors would cost copies."""
    made = {}

    def keep(i):
        made[int(i)] = load(int(i))
        return i

    return (
        lambda i: tf.numpy_function(keep, [i], tf.int64),
        lambda i, leaves: made.pop(i),
    )


def _transformed(tf, load, one, transform, seed, first_batch):
    """`(make, finish)`: tensors like those of the example `one` pass through the transform."""
    ones, structure = jax.tree.flatten(one)
    shapes = [leaf.shape[1:] for leaf in ones]
    types = [tf.as_dtype(leaf.dtype) for leaf in ones]
    transform = tf.function(transform)
    structures = []

    def load_leaves(i):
        leaves, found = jax.tree.flatten(load(int(i)))
        kinds = [(leaf.shape[1:], tf.as_dtype(leaf.dtype)) for leaf in leaves]
        if found != structure or kinds != list(zip(shapes, types, strict=True)):
            raise ValueError("the examples differ in structure, shapes or types: make them alike.")
        return leaves

    def make(i):
        leaves = tf.numpy_function(load_leaves, [i], types)
        for leaf, shape in zip(leaves, shapes, strict=True):
            leaf.set_shape((None, *shape))
        number = tf.stack([tf.constant(seed, tf.int64), first_batch + i])
        leaves, found = jax.tree.flatten(transform(jax.tree.unflatten(structure, leaves), number))
        if not leaves:
            raise ValueError("transform returns no tensors: return the batch.")
        structures.append(found)  # tf.data would stack lists
        return tuple(leaves)

    return make, lambda i, leaves: jax.tree.unflatten(structures[0], leaves)
