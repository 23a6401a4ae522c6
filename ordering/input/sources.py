"""What a data source is, which examples an order names in it, and the steps of an epoch."""

import zlib

import jax
import numpy as np

from ordering import base
from syncopate import plans


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
    is_list = hasattr(source, "__len__") and hasattr(source, "__getitem__")
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
    elif is_list and not isinstance(source, str | bytes | type):
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
    try:
        return jax.tree.map(_stack, *rows, is_leaf=_is_leaf)
    except ValueError:
        found = sorted({str(jax.tree.structure(row, is_leaf=_is_leaf))[10:-1] for row in rows})
        if len(found) == 1:
            raise
        raise ValueError(
            f"examples of a batch are the trees {' and '.join(found)[:400]}: give all examples "
            "of the source the same keys."
        ) from None


def _is_leaf(value):
    return value is None or _is_column(value)


def _is_column(value):
    """Whether a list is data, numbers or texts, as tables in plain Python give arrays.

    JAX would take it for a tree, and cut it into one array per place.
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
    # NumPy's text types drop trailing zero bytes, which belong to an encoded image.
    is_text = np.asarray(leaves[0]).dtype.kind in "SU"
    if isinstance(leaves[0], np.ndarray) and leaves[0].dtype == object and leaves[0].ndim:
        leaves = [_array(_lists(leaf)) for leaf in leaves]
        is_text = False
    if is_text:
        return np.array(leaves, dtype=object)
    shapes = sorted({np.shape(leaf) for leaf in leaves})
    if len(shapes) > 1:
        raise ValueError(
            f"values of a batch have the shapes {shapes}: they need one shape. Pad or cut them in "
            "the source."
        )
    return np.stack(leaves)


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
      >>> import ordering
      >>> indices, batch_size = ordering.input.step_indices(
      ...     [[2, 0, 1], [1, 0, 2]], units_per_step=2
      ... )
      >>> indices.tolist(), batch_size
      ([2, 0, 4, 3, 1, 5], 4)
    """
    orders = np.atleast_2d(whole_numbers("orders", orders))
    workers, length = orders.shape
    num_units = length if num_units is None else num_units
    base.check_units_per_step(num_units, units_per_step)
    check_at_least(1, unit_size=unit_size, total=total)
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


def check_at_least(least: int, **sizes) -> None:
    for name, value in sizes.items():
        if value is not None and (not plans.is_whole(value) or value < least):
            raise ValueError(f"{name} is {value!r}: pass a whole number of at least {least}.")


def whole_numbers(name: str, value, ndims=(1, 2), example="state.current is") -> np.ndarray:
    """int64 of so many axes; ValueError for anything else, as a state in place of its order."""
    array, kind = plans.as_array(value)
    if array.ndim not in ndims or (array.size and array.dtype.kind not in "iu"):
        axes = " or ".join(map(str, ndims))
        raise ValueError(f"{name} is {kind}: pass whole numbers with {axes} axes, as {example}.")
    return array.astype(np.int64)


class Steps:
    """The steps of an epoch by number: element t is the batch of step t, for loaders of any kind.

    Leaves are [W, B S, ...] for orders int[W, M], and [B S, ...] for an order int[M]; a source and
    sizes as of `reader` and `step_indices`. A process that reads them asks JAX for no device.
    """

    def __init__(self, source, orders, **sizes):
        self.indices, self.batch_size = step_indices(orders, **sizes)
        self.epoch = epoch_mark(self.indices, self.batch_size)
        self.workers = np.shape(orders)[0] if np.ndim(orders) == 2 else None
        num_examples, self._read = reader(source)
        if self.indices.size and self.indices.max() >= num_examples:
            raise ValueError(
                f"the order names example {self.indices.max()}, and the source has {num_examples}: "
                "all workers' examples lie in one source, worker w's from w M unit_size on. Pass a "
                "source of them all, or another unit_size."
            )

    def __len__(self) -> int:
        return -(-self.indices.size // self.batch_size)

    def __getitem__(self, step: int):
        step = int(step)
        if not 0 <= step < len(self):
            raise IndexError(
                f"step {step} of an epoch of {len(self)} steps: the next epoch has another order. "
                "Call next_epoch, and read what it gives."
            )
        batch = self._read(self.indices[step * self.batch_size :][: self.batch_size])
        if self.workers is None:
            return batch
        return jax.tree.map(lambda x: x.reshape(self.workers, -1, *x.shape[1:]), batch)

    def __repr__(self) -> str:
        """Names the order: `grain.DataLoader` compares these where a state is restored."""
        return f"Steps({len(self)} steps, {self.epoch['order']})"


def epoch_mark(indices: np.ndarray, batch_size: int) -> dict:
    """What tells epochs apart in the states of their readers."""
    checksum = zlib.crc32(np.ascontiguousarray(indices, np.int64).tobytes())
    return {"order": f"{checksum:08x}", "examples_per_step": batch_size}


def check_epoch(state: dict, epoch: dict) -> None:
    """Raises ValueError for a reader's state that is of another epoch."""
    for name, value in epoch.items():
        if state.get(name) != value:
            raise ValueError(
                f"the state's {name} is {state.get(name)!r}, and this epoch's is {value!r}: "
                "restore the order's state of the same step first, and pass the same sizes."
            )
