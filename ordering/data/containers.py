"""What is an array and what is a tree of them; other containers are refused, with what to write.

NumPy would convert most of them silently: missing values to NaN or None, uint64 beside int64 to
float64, mappings to their keys. So the user writes the conversion, by a method of the container.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

NUMBERS = np.generic | bool | int | float | complex
TEXTS = str | bytes
TENSORS = {("tensorflow", "Tensor"), ("torch", "Tensor")}
# Methods by which containers of numbers become arrays: frames and columns, sparse matrices.
METHODS = ("to_numpy", "toarray", "todense")


def is_array(x: Any) -> bool:
    """Whether it is an array, or a tensor of TensorFlow or PyTorch, which NumPy reads in place."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(x).__mro__}
    return isinstance(x, np.ndarray | jax.Array) or bool(kinds & TENSORS)


def is_tree(x: Any) -> bool:
    """Whether it is a tree for JAX, such as a dict, a tuple or a dataclass; a list has examples."""
    return not isinstance(x, list) and not jax.tree_util.all_leaves([x])


def method_of(x: Any) -> str | None:
    """The method that makes an array of it, if it is a container that has to be converted."""
    return next((method for method in METHODS if hasattr(type(x), method)), None)


def refuse(name: str, x: Any, line: str, before: str = "") -> NoReturn:
    """Raises the ValueError for what the user has to convert."""
    raise ValueError(f"{name} is a {type(x).__name__}: {before}write {line} in its place.")


def check_container(name: str, x: Any) -> None:
    """Raises ValueError, with what to write, for a container that has to be converted.

    `name` is the expression in the user's program, such as "source['x']".
    """
    kind = type(x)
    if kind is np.ndarray or isinstance(x, TEXTS | list | type):
        return
    if isinstance(x, np.ma.MaskedArray):
        refuse(name, x, f"{name}.filled(value)")
    if isinstance(x, Mapping) and not is_tree(x):
        refuse(name, x, f"dict({name})")
    method, is_arrow = method_of(x), kind.__module__.startswith("pyarrow")
    call = "to_numpy(zero_copy_only=False)" if is_arrow else f"{method}()"
    if hasattr(kind, "columns") and (method or is_arrow):
        names = "column_names" if is_arrow else "columns"
        line = f"{{column: {name}[column].{call} for column in {name}.{names}}}"
        refuse(name, x, line, "drop missing values and ")
    if method:
        refuse(name, x, f"{name}.{call}", "drop missing values and ")


def as_numpy(name: str, x: Any) -> np.ndarray:
    """A number, a text, an array or a tensor as a NumPy array.

    Raises ValueError if there is none, as for random keys, records and objects that are no texts.
    """
    check_container(name, x)
    if not isinstance(x, NUMBERS | TEXTS) and not is_array(x):
        if hasattr(x, "__array__"):
            refuse(name, x, f"np.asarray({name})")
        raise ValueError(f"{name} is a {type(x).__name__}: pass arrays, numbers, or trees of them.")
    try:
        array = np.asarray(x)
    except (TypeError, RuntimeError) as error:  # its library says what to write
        raise ValueError(f"{name} is a {type(x).__name__}: {error}") from error
    if array.dtype.names:
        line = f"{{field: {name}[field] for field in {name}.dtype.names}}"
        refuse(name, x, line)
    if array.dtype.kind == "T" or array.dtype.type is np.void:
        raise ValueError(f"{name} is of {array.dtype}: pass texts as objects, and bytes as uint8.")
    if array.dtype.kind == "O":
        _check_objects(name, array)
    return array


def _check_objects(name: str, array: np.ndarray) -> None:
    """Raises ValueError unless all objects of an array are texts."""
    kinds = {type(x) for x in array.flat}
    if all(issubclass(kind, TEXTS) for kind in kinds):
        return
    named = ", ".join(sorted(kind.__name__ for kind in kinds))[:99]
    raise ValueError(f"{name} has objects of {named}: pass one array of numbers, or texts.")


def refuse_source(name: str, x: Any) -> NoReturn:
    """Raises the ValueError for an object without len(x) or x[i]."""
    if hasattr(x, "__array__"):
        refuse(name, x, f"np.asarray({name})")
    if isinstance(x, Iterable) and not isinstance(x, TEXTS | type):
        refuse(name, x, f"list({name})", "read files by ordering.blocks, or ")
    raise ValueError(
        f"{name} is a {type(x).__name__}: pass arrays, a tree of them, or a data set with len(x) "
        "and x[i], as tfds.data_source."
    )
