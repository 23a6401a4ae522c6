"""Data sources, and batches of their examples."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from syncopate import plans


def reader(
    source: PyTree[ArrayLike] | Sequence,
) -> tuple[int, Callable[[np.ndarray], PyTree[np.ndarray]]]:
    """The number of examples in a source, and a function that reads a batch of them.

    Args:
      source: arrays [N, ...], alone or in tuples and dicts; or an object with `len(source)` and
        `source[i]`, or `source.__getitems__(list)` if it exists (Grain, `tfds.data_source`). Of a
        Hugging Face data set pass one split, without a format or in "numpy", "torch" or "jax".
        These formats cut floats to 32 bits and trailing zeros off bytes, as of encoded images.

    Returns:
      `(N, read)`: `read(indices)` returns the examples as one tree of arrays [n, ...]. A list of
      numbers or texts in an example becomes one array; other lists, tuples and dicts are trees.

    Raises:
      ValueError: for an object that is no source, an empty source, a table of columns, or arrays
        of unequal lengths; from `read`, for lists of unequal lengths, missing values, and examples
        with other shapes or keys.

    Examples:
      >>> import numpy as np, ordering
      >>> size, read = ordering.input.reader([{"x": np.full(2, i)} for i in range(5)])
      >>> size, read(np.array([3, 1]))["x"].tolist()
      (5, [[3, 3], [1, 1]])
    """
    is_list = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if isinstance(source, np.ndarray | jax.Array | dict | tuple):
        # A Hugging Face data set has a shape, too, but is no array.
        leaves = jax.tree.leaves(source)
        shapes = [leaf.shape if hasattr(leaf, "dtype") else () for leaf in leaves]
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise ValueError(
                f"the source's arrays have the shapes {shapes}: pass arrays with the same leading "
                "axis, the examples (of a dict of splits, pass one split)."
            )
        source = jax.tree.map(np.asarray, source)
        num_examples, take = shapes[0][0], lambda i: jax.tree.map(lambda x: x[i], source)
    elif is_list and not isinstance(source, str | bytes | type):
        _check_rows(source)
        num_examples, take = len(source), lambda i: _read_examples(source, i.tolist())
    else:
        raise ValueError(
            f"the source is a {type(source).__name__}: pass arrays, a tuple or dict of arrays, or "
            "an object with __len__ and __getitem__ (from Hugging Face, without streaming)."
        )
    if num_examples == 0:
        raise ValueError("the source is empty: pass at least one example.")
    return num_examples, lambda indices: take(check_indices(indices, num_examples))


def check_indices(indices: ArrayLike | Sequence, num_examples: int) -> Int[np.ndarray, "n"]:
    """int64[n], indices of a source's examples; raises ValueError for anything else."""
    indices = whole_numbers("indices", indices, (1,), "step_indices(...)[0]")
    wrong = indices[(indices < 0) | (indices >= num_examples)]
    if wrong.size:
        raise ValueError(
            f"index {wrong[0]} is out of range: the source has {num_examples} examples. Pass "
            f"indices in [0, {num_examples - 1}], as step_indices makes them for an order."
        )
    return indices


def _check_rows(source):
    """Raises ValueError for tables whose `source[i]` is a column, or goes by labels."""
    kind = type(source)
    if hasattr(kind, "columns") or hasattr(kind, "iloc"):
        raise ValueError(
            f"the source is a {kind.__module__.split('.')[0]} {kind.__name__}, whose source[i] is "
            "a column or goes by labels: pass a dict of its columns as NumPy arrays."
        )


# The elements of lists that become arrays. None, a missing value, has an error of its own.
PLAIN = bool | int | float | complex | str | bytes | np.generic | None


def never_ends(read: Callable[[], Any]) -> Any:
    """What `read` returns. StopIteration becomes another error: it would end the epoch unseen."""
    try:
        return read()
    except StopIteration as error:
        raise RuntimeError(
            f"the source raised {error!r}: raise another error, or return the record."
        ) from error


def _read_examples(source, indices):
    many = getattr(source, "__getitems__", None)
    rows = never_ends(lambda: list(many(indices)) if many else [source[i] for i in indices])
    if len(rows) != len(indices):
        raise ValueError(f"source.__getitems__ gave {len(rows)} examples for {len(indices)}.")
    return stacked(rows)


def stacked(rows: Sequence[PyTree]) -> PyTree[np.ndarray]:
    """One tree of arrays [n, ...] from n examples, as `reader` describes it."""
    try:
        return jax.tree.map(_stack, *rows, is_leaf=_is_leaf)
    except ValueError:
        found = sorted({str(jax.tree.structure(row, is_leaf=_is_leaf))[10:-1] for row in rows})
        if len(found) == 1:
            raise
        raise ValueError(
            f"examples of a batch have the structures {' and '.join(found)[:400]}: give all "
            "examples of the source the same keys."
        ) from None


def _is_leaf(value):
    return value is None or _is_column(value)


def _is_column(value):
    """Whether a list is to become one array; JAX would treat it as a tree of many."""
    if not isinstance(value, list):
        return False
    return all(_is_column(v) or isinstance(v, PLAIN) for v in value)


def _stack(*leaves):
    missing = sum(leaf is None for leaf in leaves)
    if missing == len(leaves):
        return None  # an empty tree, as in JAX
    if missing:
        raise ValueError(
            f"{missing} of {len(leaves)} examples of a batch have None for a value: a batch needs "
            "all values. Filter these examples out of the source, or fill the value in."
        )
    first = leaves[0]
    if isinstance(first, list) or np.ndim(first) and getattr(first, "dtype", 0) == "O":
        leaves = [_array(_lists(leaf)) for leaf in leaves]
    else:
        texts = {np.asarray(leaf).dtype.kind in "SU" for leaf in leaves}
        if len(texts) > 1:
            raise ValueError(
                f"values of a batch are texts and numbers, as {str(leaves)[:60]}: give all "
                "examples of the source the same types."
            )
        # NumPy's text types drop trailing zero bytes, which belong to an encoded image.
        if True in texts:
            return np.array(leaves, dtype=object)
    try:
        return np.stack(leaves)
    except ValueError:
        raise ValueError(
            f"values of a batch have the shapes {sorted(set(map(np.shape, leaves)))}: they need "
            "one shape. Pad or cut them in the source."
        ) from None


def _array(column):
    """One array from a list of numbers or of texts."""
    objects = np.asarray(column, object)  # of lists, if their lengths differ
    texts = {isinstance(value, str | bytes) for value in objects.flat}
    if len(texts) > 1 or any(value is None or isinstance(value, list) for value in objects.flat):
        raise ValueError(
            f"a column holds the list {str(column)[:60]}: lists become arrays of numbers or texts, "
            "of equal lengths, with no missing values. Pad it in the source, or drop the column."
        )
    return objects if texts == {True} else np.asarray(column)


def _lists(column):
    """A list, or nested lists from an array of objects such as rows of unequal lengths."""
    if isinstance(column, list):
        return column
    return [_lists(v) if isinstance(v, np.ndarray) else v for v in column.tolist()]


def whole_numbers(
    name: str, value: object, ndims: Sequence[int] = (1, 2), example: str = "state.current"
) -> Int[np.ndarray, "..."]:
    """int64 with so many axes; ValueError for anything else, such as an order's whole state."""
    array, kind = plans.as_array(value)
    if array.ndim not in ndims or (array.size and array.dtype.kind not in "iu"):
        axes = " or ".join(map(str, ndims))
        raise ValueError(
            f"{name} is {kind}: pass whole numbers with {axes} axes, such as {example}."
        )
    return array.astype(np.int64)
