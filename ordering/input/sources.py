"""What a data source is, and how batches of it are read."""

import jax
import numpy as np


def reader(source):
    """How to read a source: its length, and a function that reads a batch of it.

    Args:
      source: arrays that share a leading axis, or anything with `len(source)` and `source[i]`, or
        `source.__getitems__(list)` where it exists (`tfds.data_source`, Grain). Of Hugging Face
        data sets one split, plain or in the formats "numpy", "torch" and "jax". These formats give
        floats 32 bits and cut zeros off the ends of bytes: read encoded images without a format.

    Returns:
      `(N, read)`, where `read(indices)` gives those examples as one tree of arrays [n, ...]. A list
      of numbers or texts in an example, as in a table in plain Python, is one array; other lists,
      tuples and dicts are structure.

    Raises:
      ValueError: for what is no source, for an empty one, for tables of columns, and for arrays of
        unequal lengths; from `read`, for lists that are no array, and for missing values.

    Example:
      >>> import numpy as np, ordering
      >>> size, read = ordering.input.reader([{"x": np.full(2, i)} for i in range(5)])
      >>> size, read(np.array([3, 1]))["x"].tolist()
      (5, [[3, 3], [1, 1]])
    """
    if isinstance(source, np.ndarray | jax.Array | dict | tuple):
        # A data set of Hugging Face has a shape as well, and is no array.
        leaves = jax.tree.leaves(source)
        shapes = [leaf.shape if hasattr(leaf, "dtype") else () for leaf in leaves]
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise ValueError(
                f"the source's leaves have shapes {shapes}: pass arrays that share one leading "
                "axis, the examples (of a dict of splits, pass one split)."
            )
        source = jax.tree.map(np.asarray, source)
        num_examples, read = shapes[0][0], lambda i: jax.tree.map(lambda x: x[i], source)
    elif hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        _check_rows(source)
        num_examples, read = len(source), lambda i: _read_examples(source, i.tolist())
    else:
        raise ValueError(
            f"the source is a {type(source).__name__}: pass arrays, a tuple or dict of arrays, "
            "or an object with __len__ and __getitem__ (of Hugging Face, load_dataset without "
            "streaming)."
        )
    if num_examples == 0:
        raise ValueError("the source is empty: pass at least one example.")
    return num_examples, read


def _check_rows(source):
    """Raises for tables whose `source[i]` is a column, or no example."""
    form = getattr(source, "format", None)
    if isinstance(form, dict) and form.get("type") in ("arrow", "pandas", "polars"):
        raise ValueError(
            f"the source is in the format {form['type']!r}, whose rows are tables: pass "
            "source.with_format(None), or with_format('numpy')."
        )
    kind = type(source)
    columns = hasattr(kind, "column_names") and not hasattr(kind, "with_format")
    if columns or hasattr(kind, "columns") or hasattr(kind, "iloc"):
        raise ValueError(
            f"the source is a {kind.__module__.split('.')[0]} {kind.__name__}, whose source[i] is "
            "a column or goes by labels: pass a dict of its columns as NumPy arrays."
        )


# What a list of a table holds; None, for a value that is missing, becomes an error of its own.
PLAIN = bool | int | float | complex | str | bytes | np.generic | None


def _read_examples(source, indices):
    many = getattr(source, "__getitems__", None)
    rows = list(many(indices)) if many else [source[i] for i in indices]
    if len(rows) != len(indices):
        raise ValueError(f"source.__getitems__ gave {len(rows)} examples for {len(indices)}.")
    return jax.tree.map(_stack, *rows, is_leaf=lambda value: value is None or _is_column(value))


def _is_column(value):
    """Whether a list is data, numbers or texts, and no structure that holds arrays.

    Tables in plain Python (Hugging Face datasets are) give an array as a list, which JAX would take
    for a tree and cut into one array per place.
    """
    if not isinstance(value, list):
        return False
    return all(_is_column(v) or isinstance(v, PLAIN) for v in value)


def _stack(*leaves):
    missing = sum(leaf is None for leaf in leaves)
    if missing == len(leaves):
        return None  # structure, as JAX has it
    if missing:
        raise ValueError(
            f"{missing} of {len(leaves)} examples of a batch have None for a value: a batch needs "
            "all values. Filter these examples out of the source, or fill the value in."
        )
    if isinstance(leaves[0], list):
        leaves = [_array(leaf) for leaf in leaves]
        shapes = sorted({leaf.shape for leaf in leaves})
        if len(shapes) > 1:
            raise ValueError(
                f"a column of the source holds lists of the shapes {shapes}: examples of a batch "
                "need lists of one length. Pad or cut them in the source."
            )
    # NumPy's text types drop trailing zero bytes, which belong to an encoded image.
    is_text = np.asarray(leaves[0]).dtype.kind in "SU"
    if isinstance(leaves[0], np.ndarray) and leaves[0].dtype == object and leaves[0].ndim:
        leaves = [_array(_lists(leaf)) for leaf in leaves]
        is_text = False
    return np.array(leaves, dtype=object) if is_text else np.stack(leaves)


def _array(column):
    """One array from a list of numbers or of texts."""
    try:
        array = np.asarray(column)
    except ValueError:  # lists of unequal lengths
        array = np.empty(0, object)
    texts = {isinstance(value, str | bytes) for value in _flat(column)}
    if array.dtype == object or len(texts) > 1:
        raise ValueError(
            f"a column of the source holds the list {str(column)[:60]}: a list is read as one "
            "array, so it needs numbers or texts, of one length on every level and none missing. "
            "Pad it in the source, or drop the column."
        )
    # NumPy's text types drop trailing zero bytes.
    return np.asarray(column, object) if texts == {True} else array


def _lists(array):
    """A column of objects, as of text or of rows of unequal lengths, in plain lists."""
    return [_lists(v) if isinstance(v, np.ndarray) else v for v in array.tolist()]


def _flat(column):
    for value in column:
        yield from _flat(value) if isinstance(value, list) else (value,)
