"""An order as a dataset of tf.data or Grain, which are imported only when they are used.

If TensorFlow sees a GPU it takes the memory that JAX needs: install tensorflow-cpu, or call
`tf.config.set_visible_devices([], "GPU")` first.
"""

import atexit
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from ordering.data.loader import describe_error, in_this_context
from ordering.data.sources import as_source, check_indices
from ordering.indices import Indices
from syncopate import install

if TYPE_CHECKING:
    import grain
    import tensorflow as tf

READ_AT_ONCE = 64  # examples: a call from TensorFlow into Python costs as much as reading some


def tf_dataset(
    source: PyTree[ArrayLike] | Sequence, indices: Int[ArrayLike, "n"] | Sequence[int] | Indices
) -> "tf.data.Dataset":
    """The examples that an order names, one by one, as a `tf.data.Dataset`.

    Element i is `source[indices[i]]`. Use it in place of a shuffled dataset, and keep the `map`,
    `batch` and `prefetch` after it. Several threads read 64 examples at a time, in a fixed order.

    Args:
      source: as in `as_source`; all examples have the same shapes.
      indices: int[n] in [0, N): the order of one worker, `state.current`, or the orders of several
        from `step_indices`, whose second result is the size for `batch`; or `order.units(state)`,
        which are computed as they are read. To resume a run at step t, pass `indices[t * size :]`.

    Returns:
      A `tf.data.Dataset` of one epoch. Do not `shuffle` or `repeat` it, which changes or repeats
      the order.

    Raises:
      ValueError: for a source or indices that do not fit.
      ImportError: if TensorFlow is not installed.
      tf.errors.OpError: from its iterators, with the numbers of examples that cannot be read.

    Examples:
      >>> import numpy as np
      >>> from syncopate import ordering
      >>> dataset = ordering.data.tf_dataset((np.arange(5), np.arange(5) ** 2), [4, 0, 3])
      >>> [(int(x), int(y)) for x, y in dataset.as_numpy_iterator()]
      [(4, 16), (0, 0), (3, 9)]
    """
    examples = as_source(source)
    if not isinstance(indices, Indices):  # parts of `Indices` are checked when they are read
        indices = check_indices(indices, len(examples))
    tf = _tensorflow("tf_dataset")

    def kind(leaf):
        try:
            return leaf.shape[1:], tf.as_dtype(leaf.dtype)
        except TypeError:
            raise ValueError(
                f"the examples have {leaf.dtype}, which TensorFlow lacks: pass x.astype(np.int64)."
            ) from None

    like, structure = jax.tree.flatten(examples[:1])
    kinds, read = list(map(kind, like)), in_this_context(examples.__getitem__)

    def load(first):
        part = np.asarray(indices[first:][:READ_AT_ONCE])
        try:
            leaves, other = jax.tree.flatten(_reads()(lambda: read(part)))
            if other != structure or list(map(kind, leaves)) != kinds:
                raise ValueError(
                    "their shapes differ from example 0: pad or cut them, or decode in map."
                )
        except Exception as error:  # TensorFlow keeps only its text
            raise RuntimeError(f"examples {part}: {describe_error(error)}") from error
        return [x.astype(x.dtype.newbyteorder("="), copy=False) for x in leaves]

    def make(first):
        leaves = tf.numpy_function(load, [first], [dtype for _, dtype in kinds])
        for leaf, (shape, _) in zip(leaves, kinds, strict=True):
            leaf.set_shape((None, *shape))
        return jax.tree.unflatten(structure, leaves)

    make = tf.autograph.experimental.do_not_convert(make)
    parts = tf.data.Dataset.range(0, indices.size, READ_AT_ONCE)
    result = parts.map(make, tf.data.AUTOTUNE, deterministic=True).unbatch()
    return result.apply(tf.data.experimental.assert_cardinality(indices.size))


def _tensorflow(name: str) -> Any:
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            f"{name} needs TensorFlow, which cannot be imported: {install('data')}."
        ) from error
    return tf


def reordered(
    dataset: "tf.data.Dataset", indices: Int[ArrayLike, "n"] | Sequence[int] | Indices
) -> "tf.data.Dataset":
    """The examples of a finite `tf.data.Dataset` in another order, one by one.

    Element i is element `indices[i]` of the dataset. Use it in place of
    `dataset.shuffle(...).repeat()`, and keep the `map`, `batch` and `prefetch` after it.

    The call reads the dataset and keeps its examples as tensors in memory, as `dataset.cache()`
    does; while it reads, it takes twice as much memory. So put random maps and the decoding of
    large images after it.

    Args:
      dataset: a dataset of N examples with a known cardinality. An example is a tree (dict, tuple,
        NamedTuple) of dense tensors, also of texts. All examples have the same shapes, and every
        read gives the same sequence.
      indices: as in `tf_dataset`: int[n] in [0, N).

    Returns:
      A `tf.data.Dataset` of one epoch, with the structure and the types of the examples.

    Raises:
      ValueError: for a dataset that is infinite, empty, shuffled, or of unknown cardinality, with
        ragged or sparse tensors or several shapes; for indices that do not fit.
      ImportError: if TensorFlow is not installed.

    Examples:
      >>> import tensorflow as tf
      >>> from syncopate import ordering
      >>> dataset = tf.data.Dataset.range(5).map(lambda i: {"i": i, "square": i**2})
      >>> for example in ordering.data.reordered(dataset, [4, 0]).as_numpy_iterator():
      ...     print(int(example["i"]), int(example["square"]))
      4 16
      0 0
    """
    tf = _tensorflow("reordered")
    size = _check_finite(tf, dataset)
    indices = check_indices(np.asarray(indices) if isinstance(indices, Indices) else indices, size)
    with tf.device("/CPU:0"):
        examples = dataset.batch(size).get_single_element()
        _check_again(tf, dataset, examples)
        row = lambda i: tf.nest.map_structure(lambda x: x[i], examples)  # noqa: E731
        row = tf.autograph.experimental.do_not_convert(row)
        return tf.data.Dataset.from_tensor_slices(indices).map(row, tf.data.AUTOTUNE)


def _check_finite(tf: Any, dataset: Any) -> int:
    """N of a finite dataset of dense tensors; raises ValueError for another."""
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            f"dataset is a {type(dataset).__name__}: pass a tf.data.Dataset, or write tf_dataset."
        )
    for path, spec in jax.tree_util.tree_leaves_with_path(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec):
            raise ValueError(
                f"dataset{jax.tree_util.keystr(path)} is a {type(spec).__name__}: make it dense in "
                "a map before, as by x.to_tensor(shape=...)."
            )
    size = int(dataset.cardinality())
    if size < 1:
        kinds = {0: "empty", tf.data.INFINITE_CARDINALITY: "endless: leave out repeat()"}
        unknown = "of unknown length: apply tf.data.experimental.assert_cardinality(n) to it"
        raise ValueError(f"dataset is {kinds.get(size, unknown)}.")
    return size


def _check_again(tf: Any, dataset: Any, examples: Any) -> None:
    """Raises ValueError if a second read of the dataset gives other examples."""
    again = dataset.take(READ_AT_ONCE).batch(READ_AT_ONCE).get_single_element()
    as_bytes = lambda x: tf.io.serialize_tensor(x[:READ_AT_ONCE]).numpy()  # noqa: E731
    if jax.tree.map(as_bytes, examples) != jax.tree.map(as_bytes, again):
        raise ValueError(
            "dataset gives other examples when it is read again: leave out shuffle and "
            "shuffle_files, and draw random numbers after reordered."
        )


class _Reads:
    """Reads for TensorFlow's threads, none of which may be inside Python when the program ends.

    At exit Python frees iterators, which wait for these threads, which would wait for Python. So a
    daemon thread reads, and the wait for it ends with the program even while the read hangs.
    """

    def __init__(self):
        self._waiting: set[queue.SimpleQueue] = set()
        self._calls, self._closed = 0, False
        atexit.register(self.close)

    def __call__(self, read: Callable[[], Any]) -> Any:
        """The result of `read`."""
        answers = queue.SimpleQueue()

        def answer():
            try:
                answers.put((read(), None))
            except BaseException as error:  # raised again where the result is awaited
                answers.put((None, error))

        self._calls += 1
        self._waiting.add(answers)
        if self._closed:
            answers.put(ENDED)
        else:
            threading.Thread(target=answer, daemon=True).start()
        result, error = answers.get()
        self._waiting.discard(answers)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Ends all waits, and returns when TensorFlow has made no call for a moment."""
        self._closed, calls = True, None
        while self._waiting or calls != self._calls:
            calls = self._calls
            for answers in self._waiting.copy():
                answers.put(ENDED)
            time.sleep(0.05)


ENDED = None, RuntimeError("the program has ended.")
_reads = functools.cache(_Reads)  # made by the first read: other programs exit at once


def grain_dataset(
    source: PyTree[ArrayLike] | Sequence, indices: Int[ArrayLike, "n"] | Sequence[int] | Indices
) -> "grain.MapDataset":
    """The examples that an order names, one by one, as a Grain `MapDataset`.

    Element i is `source[indices[i]]`, unchanged. Use it in place of a shuffled dataset, and keep
    the `map`, `batch`, `to_iter_dataset` and `mp_prefetch` after it. Batch before
    `to_iter_dataset`, so that batches do not depend on the number of processes.

    Args:
      source: as in `as_source`, such as a `MapDataset` or `tfds.data_source`.
      indices: as in `tf_dataset`.

    Returns:
      A `grain.MapDataset` of one epoch. Do not `shuffle` or `repeat` it.

    Raises:
      ValueError: for a source or indices that do not fit.
      ImportError: if Grain is not installed.

    Examples:
      >>> import numpy as np
      >>> from syncopate import ordering
      >>> dataset = ordering.data.grain_dataset(np.arange(4) * 10, [2, 0, 3, 1])
      >>> [batch.tolist() for batch in dataset.batch(2)]
      [[20, 0], [30, 10]]

    References:
      Grain's datasets, https://google-grain.readthedocs.io/en/latest/
    """
    examples = as_source(source)
    if not isinstance(indices, Indices):  # Grain reads `Indices` like any source
        indices = check_indices(indices, len(examples))
    try:
        import grain
    except ImportError as error:
        raise ImportError("Grain cannot be imported: pip install grain.") from error
    return grain.MapDataset.source(cast(Any, indices)).map(examples.example)
