"""Data sources, and their examples in the sequence of an order."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from ordering.data import containers
from ordering.indices import Indices
from syncopate import plans

MOST = 2**48  # examples; in Grain an endlessly repeated data set has the length 2^63 - 1


class Source:
    """Examples that are read by their numbers: what `as_source` returns.

    `len(source)` is the number of examples. `source[indices]`, with int[n] or a slice, is a batch
    of them: one tree of NumPy arrays [n, ...]. `source.example(i)` is one example, unchanged.
    """

    def __init__(self, data: Any, size: int, like: "Like | None" = None):
        self._data, self._size, self._like = data, size, like  # None: a tree of arrays

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, indices: Int[ArrayLike, "n"] | Indices | slice) -> PyTree[np.ndarray]:
        if isinstance(indices, Indices):
            indices = np.asarray(indices)
        if self._like is None:
            if not isinstance(indices, slice):
                indices = check_indices(indices, self._size)
            return jax.tree.map(lambda x: x[indices], self._data)
        if isinstance(indices, slice):
            indices = np.arange(*indices.indices(self._size))
        numbers = check_indices(indices, self._size).tolist()
        if not numbers:
            return jax.tree.map(lambda x: x[:0], self[:1])
        return stack_examples(_read(self._data, numbers), self._like, numbers)

    def example(self, i: int) -> PyTree:
        """Example i, unchanged: lists of several lengths stay lists."""
        if not 0 <= i < self._size:
            check_indices([i], self._size)
        if self._like is None:
            return jax.tree.map(lambda x: x[i], self._data)
        (example,) = _read(self._data, [int(i)])
        self._like.leaves(int(i), example, ragged=True)
        return example

    def __reduce__(self):
        return as_source, (self._data,)


def as_source(source: PyTree[ArrayLike] | Sequence | Source, *, name: str = "source") -> Source:
    """Data as a `Source`; every reader of `ordering.data` and `ordering.blocks` calls this.

    Nothing is converted silently. Other containers are refused, and the message has the line of
    code to write; missing values are refused, too.

    Args:
      source: a tree (dict, tuple, NamedTuple, dataclass) of arrays [N, ...] of NumPy or JAX; or an
        object with `len(source)` and `source[i]`, such as a list of examples, `tfds.data_source`,
        or a data set of Grain, PyTorch or Hugging Face (one split, without a format or in "numpy",
        "torch" or "jax"). If it has `__getitems__(list)`, this is used. Examples are trees of
        arrays, numbers and texts; a list of numbers or texts is one array. All have the types of
        example 0; a field is None in all examples or in none.
      name: its name in messages.

    Returns:
      A `Source`: `len(source)`, and `source[indices]` for a batch.

    Raises:
      ValueError: for another container, with the line that converts it; for an empty source, or
        arrays of unequal lengths. From `source[indices]`, for an example whose types or keys differ
        from those of example 0, for missing values, and for a batch of several shapes.

    Examples:
      >>> import numpy as np
      >>> from syncopate import ordering
      >>> source = ordering.data.as_source([{"x": np.full(2, i)} for i in range(5)])
      >>> len(source), source[np.array([3, 1])]["x"].tolist()
      (5, [[3, 3], [1, 1]])
    """
    if isinstance(source, Source):
        return source
    containers.check_container(name, source)
    if containers.is_array(source) or containers.is_tree(source):
        return _of_arrays(name, source)
    if not _is_sized(source):
        containers.refuse_source(name, source)
    size = len(source)
    _check_size(name, size)
    _warn_of_random_maps(name, source)
    try:
        (first,) = _read(source, [0])
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{name}[0] fails, {error!r}: pass an object whose {name}[i] is example i."
        ) from error
    return Source(source, size, like_of(first, name))


def _is_sized(x: Any) -> bool:
    is_text = isinstance(x, str | bytes | type)
    return hasattr(x, "__len__") and hasattr(x, "__getitem__") and not is_text


def _of_arrays(name: str, tree: Any) -> Source:
    """A tree of arrays as a source."""

    def as_array(path, x):
        called = name + jax.tree_util.keystr(path)
        if isinstance(x, list):  # NumPy would drop the zeros at the ends of texts
            dtype = ", object" if x and isinstance(x[0], str | bytes) else ""
            containers.refuse(called, x, f"np.array({called}{dtype})")
        if hasattr(x, "read"):
            containers.refuse(called, x, f"ordering.blocks.split({name}, unit_size=1)")
        if _is_sized(x) and not hasattr(x, "__array__"):
            containers.check_container(called, x)
            raise ValueError(f"{called} is a {type(x).__name__}: pass {called} alone, or arrays.")
        return containers.as_numpy(called, x)

    is_leaf = lambda x: isinstance(x, list) or containers.method_of(x) is not None  # noqa: E731
    tree = jax.tree_util.tree_map_with_path(as_array, tree, is_leaf=is_leaf)
    shapes = [x.shape for x in jax.tree.leaves(tree)]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise ValueError(f"{name} has the shapes {shapes}: pass arrays of as many examples.")
    _check_size(name, shapes[0][0])
    return Source(tree, shapes[0][0])


def _warn_of_random_maps(name: str, source: Any) -> None:
    """Warns of Grain's random maps, whose numbers follow from a seed and the example's number."""
    nodes = [source]
    while nodes and type(nodes[0]).__module__.startswith("grain."):
        if type(nodes[0]).__name__.startswith("RandomMap"):
            return warnings.warn(
                f"{name} has a random_map, which is the same in every epoch: apply it to "
                "grain_dataset(source, indices).seed(epoch), in a function for read_epochs.",
                stacklevel=3,
            )
        nodes = [*nodes[1:], *nodes[0].parents]


def _check_size(name: str, size: int) -> None:
    if size == 0:
        raise ValueError(f"{name} is empty: pass at least one example.")
    if size > MOST:
        raise ValueError(
            f"{name} has {size} examples, as if it repeats for ever: leave out repeat()."
        )


def check_indices(indices: ArrayLike | Sequence, num_examples: int) -> Int[np.ndarray, "n"]:
    """int64[n], indices of a source's examples; raises ValueError for other values."""
    indices = whole_numbers("indices", indices, (1,), "step_indices(...)[0]")
    wrong = indices[(indices < 0) | (indices >= num_examples)]
    if wrong.size:
        raise ValueError(
            f"index {wrong[0]} is out of range: the source has {num_examples} examples, so pass "
            f"indices in [0, {num_examples - 1}]."
        )
    return indices


def never_ends(read: Callable[[], Any]) -> Any:
    """The result of `read`; a StopIteration, which would silently end the epoch, is replaced."""
    try:
        return read()
    except StopIteration as error:
        raise RuntimeError(
            f"the source raised {error!r}: raise another error, or return the record."
        ) from error


def _read(source: Any, numbers: list[int]) -> list:
    many = getattr(source, "__getitems__", None)
    rows = never_ends(lambda: list(many(numbers)) if many else [source[i] for i in numbers])
    if len(rows) != len(numbers):
        raise ValueError(f"source.__getitems__ gave {len(rows)} examples for {len(numbers)}.")
    return rows


PYTHONS = {kind: np.asarray(kind()).dtype for kind in (bool, int, float, complex)}
TEXTS = np.dtype(object)  # NumPy's text types drop trailing zero bytes, e.g. of encoded images
PYTHONS |= {str: TEXTS, bytes: TEXTS}


class Like(NamedTuple):
    """The structure and the types of the first example, which all others must have."""

    structure: Any
    paths: list[str]
    dtypes: list[np.dtype]

    def leaves(self, number: int, example: PyTree, ragged: bool = False) -> list:
        """The leaves of an example as arrays, or scalars; ValueError unless like example 0's."""
        try:
            values = self.structure.flatten_up_to(example)
        except ValueError as error:
            raise ValueError(
                f"example {number} has another structure than example 0: give all the same keys, "
                f"and None to all or none. {f'{error}'[:99]}"
            ) from None
        leaves = []
        for path, value, dtype in zip(self.paths, values, self.dtypes, strict=True):
            kind = type(value)  # first the cases that need only the type
            if kind is np.ndarray or issubclass(kind, np.generic):
                is_like = value.dtype == dtype and dtype != TEXTS
            else:
                is_like = PYTHONS.get(kind) is dtype
            if is_like or ragged and isinstance(value, list) and None not in value:
                leaves.append(value)
                continue
            array = _array(f"example {number}{path}", value)
            if array.dtype != dtype:
                raise ValueError(
                    f"example {number}{path} is of {_named(array.dtype)}, and that of example 0 of "
                    f"{_named(dtype)}: give all examples the types of the first."
                )
            leaves.append(array if array.ndim else array[()])
        return leaves


def like_of(example: PyTree, name: str = "source") -> Like:
    """The structure and types for all examples; ValueError if no batch can hold them."""
    with_paths, structure = jax.tree_util.tree_flatten_with_path(example, is_leaf=_is_leaf)
    if not with_paths:
        raise ValueError(f"{name}[0] is {example!r}, without arrays: give examples with values.")
    paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
    arrays = [_array(f"{name}[0]{path}", x) for path, (_, x) in zip(paths, with_paths, strict=True)]
    return Like(structure, paths, [array.dtype for array in arrays])


def stack_examples(
    examples: Sequence[PyTree], like: Like | None = None, numbers: Sequence[int] | None = None
) -> PyTree[np.ndarray]:
    """One tree of arrays [n, ...] from n examples, like the first one of the source.

    `numbers` are the examples' numbers, for messages. Without `like`, the first example sets it.
    """
    numbers = range(len(examples)) if numbers is None else numbers
    like = like_of(examples[0]) if like is None else like
    rows = [like.leaves(i, example) for i, example in zip(numbers, examples, strict=True)]
    columns = zip(*rows, strict=True)
    return like.structure.unflatten(map(_stack, like.paths, columns, like.dtypes))


def _stack(path: str, column: Sequence, dtype: np.dtype) -> np.ndarray:
    """One array from arrays or scalars of one type."""
    shapes = {getattr(x, "shape", ()) for x in column}
    if len(shapes) > 1:
        raise ValueError(
            f"the examples' {path or 'arrays'} have the shapes {sorted(shapes)[:9]} in one batch: "
            "pad or cut them in the source."
        )
    if shapes and shapes != {()}:
        return np.stack(column)
    array = np.empty(len(column), dtype)
    try:
        array[:] = column
    except OverflowError as error:
        raise ValueError(f"the examples' {path or 'numbers'} are of {dtype}: {error}.") from None
    return array


def _named(dtype: np.dtype) -> str:
    return "texts" if dtype == TEXTS else f"{dtype}"


def _is_leaf(value: Any) -> bool:
    """Whether it becomes one array, or is refused; for JAX some of these are trees."""
    return _is_column(value) or containers.method_of(value) is not None


def _is_column(value: Any) -> bool:
    """Whether it is a list of numbers or texts, or of such lists."""
    plain = containers.NUMBERS | containers.TEXTS | None
    return isinstance(value, list) and all(isinstance(x, plain) or _is_column(x) for x in value)


def _array(name: str, value: Any) -> np.ndarray:
    """A value of an example as an array; texts as objects."""
    if value is None:
        raise ValueError(f"{name} is None: leave such examples out, or fill the value in.")
    if isinstance(value, list):
        return _of_list(name, value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        return _of_list(name, list(value)) if value.ndim else _array(name, value[()])
    if isinstance(value, str | bytes):
        array = np.empty((), object)
        array[()] = value
        return array
    if not containers.is_array(value) and not isinstance(value, containers.NUMBERS):
        raise ValueError(
            f"{name} is a {type(value).__name__}: give arrays, numbers, texts, and trees of them."
        )
    array = containers.as_numpy(name, value)
    return array.astype(object) if array.dtype.kind in "SU" else array


def _of_list(name: str, value: list) -> np.ndarray:
    """One array from a list of numbers or texts, or of lists and arrays of equal lengths."""
    try:
        array = np.array(value)
    except ValueError:  # several lengths
        array = np.empty(0, object)
    if array.dtype.kind in "biu" or not array.size and array.dtype != object:
        return array
    objects = np.array(value, object) if array.size else array
    of_texts = [isinstance(x, str | bytes) for x in objects.flat]
    if of_texts and all(of_texts):
        return objects
    numbers = zip(objects.flat, array.ravel().tolist(), strict=False)
    exact = all(v == w for v, w in numbers if isinstance(v, int | np.integer))
    if array.dtype.kind not in "fc" or not exact:
        raise ValueError(
            f"{name} is the list {f'{value}'[:60]}, as {array.dtype}: give numbers of one type or "
            "texts, of equal lengths, without None."
        )
    return array


def whole_numbers(
    name: str, value: object, ndims: Sequence[int] = (1, 2), example: str = "state.current"
) -> Int[np.ndarray, "..."]:
    """int64 with so many axes; raises ValueError otherwise, as for the whole state of an order."""
    array, kind = plans.as_array(value)
    if array.ndim not in ndims or (array.size and array.dtype.kind not in "iu"):
        axes = " or ".join(map(str, ndims))
        raise ValueError(
            f"{name} is {kind}: pass whole numbers with {axes} axes, such as {example}."
        )
    return array.astype(np.int64)
