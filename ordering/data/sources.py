"""Data sources, and their examples in the sequence of an order."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from ordering import base
from syncopate import plans

ARRAYS = np.ndarray | jax.Array | dict | tuple  # a tree of arrays, and no list of examples


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
      >>> import numpy as np
      >>> from syncopate import ordering
      >>> size, read = ordering.data.reader([{"x": np.full(2, i)} for i in range(5)])
      >>> size, read(np.array([3, 1]))["x"].tolist()
      (5, [[3, 3], [1, 1]])
    """
    is_list = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if isinstance(source, ARRAYS):
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
            f"the source is a {type(source).__name__}, and an order needs source[i]: pass arrays, "
            "a tuple or dict of them, or an object with __len__ and __getitem__, as "
            "tfds.data_source in place of tfds.load, or load_dataset without streaming. Of files "
            "that can only be read in sequence, order blocks (ordering.blocks)."
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


def step_indices(
    orders: Int[ArrayLike, "*W M"] | Sequence,
    *,
    units_per_step: int,
    unit_size: int = 1,
    num_units: int | None = None,
    total: int | None = None,
) -> tuple[Int[np.ndarray, "n"], int]:
    """Indices of the examples that orders name, by step, worker, unit and example of the unit.

    Worker w owns the units w M to w M + M - 1 of the source, and unit u has the examples u S to
    u S + S - 1. If B does not divide M, the last step has the M mod B units that are left.

    Args:
      orders: int[M] or int[W, M], a permutation of 0 .. M - 1 for every worker; with `num_units`,
        a slice [.., m] of such orders that starts at a step.
      units_per_step: B in [1, M], units per worker and step.
      unit_size: S >= 1, consecutive examples per unit.
      num_units: M, if `orders` is a slice.
      total: number of units in the source, if they are dealt to the workers
        (`ordering.global_order`); orders then name units in [0, total), each at most once.

    Returns:
      `(indices, batch_size)`: int64[W m S], and W B S, the number of examples in a whole step.
      `tf_dataset(source, indices).batch(batch_size)` reads the steps.

    Raises:
      ValueError: if units are out of range or named twice, or a size does not fit.

    Examples:
      >>> from syncopate import ordering
      >>> indices, batch_size = ordering.data.step_indices(
      ...     [[2, 0, 1], [1, 0, 2]], units_per_step=2
      ... )
      >>> indices.tolist(), batch_size
      ([2, 0, 4, 3, 1, 5], 4)
    """
    orders = np.atleast_2d(whole_numbers("orders", orders))
    workers, length = orders.shape
    owned = length if num_units is None else num_units
    owned, units_per_step = base.check_units(owned, units_per_step)
    unit_size = plans.check_whole("unit_size", unit_size, 1)
    total = None if total is None else plans.check_whole("total", total, 1)
    most = owned if total is None else total
    outside = length > owned or not ((orders >= 0) & (orders < most)).all()
    lists = orders if total is None else orders.reshape(1, -1)
    if outside or any(_repeats(units, most) for units in lists):
        whose = "each worker's order of its own units; for a slice of an order also num_units"
        whose = whose if total is None else "the orders of one epoch, and their total"
        raise ValueError(
            f"orders of shape {orders.shape} name a unit twice, or outside 0 .. {most - 1}, or "
            f"more than {owned} units: pass {whose}."
        )
    if total is None:
        np.add(orders, owned * np.arange(workers)[:, None], out=orders)  # our own copy
    whole, units = length - length % units_per_step, np.empty(orders.size, np.int64)
    steps = orders[:, :whole].reshape(workers, -1, units_per_step).swapaxes(0, 1)
    units[: workers * whole].reshape(steps.shape)[:] = steps
    units[workers * whole :] = orders[:, whole:].reshape(-1)
    if unit_size > 1:
        units = (units[:, None] * unit_size + np.arange(unit_size)).reshape(-1)
    return units, workers * units_per_step * unit_size


def check_examples(
    num_examples: int, shape: tuple[int, ...], *, units_per_step: int, unit_size: int = 1,
    total: int | None = None,
) -> None:  # fmt: skip
    """Raises ValueError if orders of this shape name more examples than there are, or would never
    read a whole step of them; less is left over where all steps are to have one size."""
    workers, owned = (1, *shape)[-2:]
    unit_size = plans.check_whole("unit_size", unit_size, 1)
    units = workers * owned if total is None else plans.check_whole("total", total, 1)
    all_workers = units // owned  # of dealt orders, which may be on other hosts
    left_over = num_examples - units * unit_size
    if not 0 <= left_over < all_workers * units_per_step * unit_size:
        raise ValueError(
            f"the source has {num_examples} examples, and the orders name {units} units of "
            f"{unit_size}: make orders for all of them, pass a source of the examples of all "
            "workers, or another unit_size; leave out of the source what is not to be read."
        )


def _repeats(units: np.ndarray, most: int) -> bool:
    """Whether a unit of 0 .. most - 1 occurs twice."""
    if 64 * len(units) < most:  # to sort a few is cheaper than a mark for everyone
        return bool((np.diff(np.sort(units)) == 0).any())
    seen = np.zeros(most, bool)
    seen[units] = True
    return int(np.count_nonzero(seen)) < len(units)
