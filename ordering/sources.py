"""What a data source is, and how batches of it are read."""

import jax
import numpy as np


def reader(source):
    """How to read a source: its length, and a function that reads a batch of it.

    Args:
      source: arrays that share a leading axis, or anything with `len(source)` and `source[i]`, or
        `source.__getitems__(list)` where it exists (`tfds.data_source`, Grain).

    Returns:
      `(N, read)`, where `read(indices)` gives those examples as one tree of arrays [n, ...].

    Raises:
      ValueError: for what is no source, for an empty one, and for arrays of unequal lengths.

    Example:
      >>> import numpy as np, ordering
      >>> size, read = ordering.reader([{"x": np.full(2, i)} for i in range(5)])
      >>> size, read(np.array([3, 1]))["x"].tolist()
      (5, [[3, 3], [1, 1]])
    """
    if isinstance(source, np.ndarray | jax.Array | dict | tuple):
        shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(source)]
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise ValueError(
                f"the source's leaves have shapes {shapes}: pass arrays that share one leading "
                "axis, the examples (of a dict of splits, pass one split)."
            )
        source = jax.tree.map(np.asarray, source)
        num_examples, read = shapes[0][0], lambda i: jax.tree.map(lambda x: x[i], source)
    elif hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        num_examples, read = len(source), lambda i: _read_examples(source, i.tolist())
    else:
        raise ValueError(
            f"the source is a {type(source).__name__}: pass arrays, a tuple or dict of arrays, "
            "or an object with __len__ and __getitem__."
        )
    if num_examples == 0:
        raise ValueError("the source is empty: pass at least one example.")
    return num_examples, read


def _read_examples(source, indices):
    many = getattr(source, "__getitems__", None)
    rows = list(many(indices)) if many else [source[i] for i in indices]
    if len(rows) != len(indices):
        raise ValueError(f"source.__getitems__ gave {len(rows)} examples for {len(indices)}.")
    return jax.tree.map(_stack, *rows)


def _stack(*leaves):
    # NumPy's text types drop trailing zero bytes, which belong to an encoded image.
    is_text = np.asarray(leaves[0]).dtype.kind in "SU"
    return np.array(leaves, dtype=object) if is_text else np.stack(leaves)
