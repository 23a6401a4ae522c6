"""Containers of other libraries, and the line of code that converts each to arrays.

NumPy would convert most of them silently: missing values to NaN or None, uint64 beside int64 to
float64, mappings to their keys. So they are refused, and the user writes the conversion.
"""

import collections
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

ARRAY = "{x}.to_numpy()"
PANDAS = "{{name: column.to_numpy() for name, column in {x}.items()}}"
POLARS = "{{column.name: column.to_numpy() for column in {x}}}"
ARROW = "{{name: {x}[name].to_numpy(zero_copy_only=False) for name in {x}.schema.names}}"
# By package and class or base class. If several match, the most derived class counts.
LINES = {
    ("dask", "Array"): "{x}.compute()",
    ("dask", "DataFrame"): "{x}.compute()",
    ("datasets", "DatasetDict"): "{x}[{first!r}]",
    ("h5py", "Dataset"): "{x}[:]",
    ("h5py", "Group"): "{{name: {x}[name][:] for name in {x}}}",
    ("jax", "JAXSparse"): "{x}.todense()",
    ("numpy", "MaskedArray"): "{x}.compressed()",
    ("numpy", "NpzFile"): "dict({x})",
    ("pandas", "DataFrame"): PANDAS,
    ("pandas", "ExtensionArray"): ARRAY,
    ("pandas", "GroupBy"): PANDAS.replace("{x}", "{x}.obj"),
    ("pandas", "Index"): ARRAY,
    ("pandas", "Series"): ARRAY,
    ("polars", "DataFrame"): POLARS,
    ("polars", "GroupBy"): POLARS.replace("{x}", "{x}.df"),
    ("polars", "LazyFrame"): "{x}.collect()",
    ("polars", "Series"): ARRAY,
    ("pyarrow", "Array"): "{x}.to_numpy(zero_copy_only=False)",
    ("pyarrow", "ChunkedArray"): ARRAY,
    ("pyarrow", "Dataset"): "{x}.to_table()",
    ("pyarrow", "RecordBatch"): ARROW,
    ("pyarrow", "RecordBatchReader"): "{x}.read_all()",
    ("pyarrow", "Table"): ARROW,
    ("pyarrow", "Tensor"): ARRAY,
    ("scipy", "sparray"): "{x}.toarray()",
    ("scipy", "spmatrix"): "{x}.toarray()",
    ("tensorflow", "DatasetV2"): "list({x}.as_numpy_iterator())",
    ("tensorflow", "RaggedTensor"): "{x}.to_tensor().numpy()",
    ("tensorflow", "SparseTensor"): "tf.sparse.to_dense({x}).numpy()",
    ("torch", "DataLoader"): "{x}.dataset",
    ("xarray", "DataArray"): ARRAY,
    ("xarray", "Dataset"): "{{name: {x}[name].to_numpy() for name in {x}}}",
    ("xarray", "Variable"): ARRAY,
    ("zarr", "Array"): "{x}[:]",
    ("zarr", "Group"): "{{name: array[:] for name, array in {x}.arrays()}}",
}
TENSORS = {("tensorflow", "Tensor"), ("torch", "Tensor")}
DROPPED = {"pandas": ".dropna()", "polars": ".drop_nulls()", "pyarrow": ".drop_null()"}
COLUMNS = {  # a table as the dict of its columns, not converted
    "pandas": "dict({x}.items())",
    "polars": "{{column.name: column for column in {x}}}",
    "pyarrow": "{{name: {x}[name] for name in {x}.schema.names}}",
}
ROWS = {"pandas": "{x}.tolist()", "polars": "{x}.to_list()", "pyarrow": "{x}.to_pylist()"}
TREES = (dict, collections.OrderedDict, collections.defaultdict)  # trees for JAX


def refuse(name: str, what: str, line: str, more: str = "") -> NoReturn:
    """Raises the ValueError for everything that the user has to convert."""
    raise ValueError(f"{name} is {what}: write {line} in its place{more}.")


def check_container(name: str, x: Any) -> None:
    """Raises ValueError, with the line to write, for a container that is not an array or a tree.

    `name` is the expression in the user's program, such as "source['x']".
    """
    if type(x) in (np.ndarray, str, bytes, bool, int, float, dict, tuple, list):
        return
    for package, kind in _kinds(x):
        if (package, kind) in LINES:
            _refuse_container(name, x, package, kind)
    if isinstance(x, Mapping) and type(x) not in TREES:
        refuse(name, f"a mapping, {type(x).__name__}", f"dict({name})")
    if isinstance(x, tuple) and type(x) is not tuple and not hasattr(x, "_fields"):
        refuse(name, f"a {type(x).__name__}", f"tuple({name})")


def _refuse_container(name: str, x: Any, package: str, kind: str) -> NoReturn:
    """Raises the ValueError for a container of `LINES`."""
    line, what, more = LINES[package, kind], _described(package, x), ""
    words: dict[str, Any] = {"x": name}
    if kind == "DatasetDict":
        words["first"] = next(iter(x), None)
    elif kind == "MaskedArray" and not np.ma.is_masked(x):
        line = "{x}.data"
    elif kind == "MaskedArray":
        what, more = f"{what} with missing values", ", or fill them in by filled(0)"
        whole = "[~np.ma.getmaskarray({x}).reshape(len({x}), -1).any(1)].data"
        line = "{x}.compressed()" if x.ndim == 1 else "{x}" + whole
    elif package in DROPPED and _missing(package, x):
        words["x"] = name + DROPPED[package]
        what, more = f"{what} with missing values", ", or fill them in"
    elif package in COLUMNS and _inner_missing(package, x):
        what, more = f"{what} with missing values in its lists", ", or fill them in"
        line = COLUMNS[package] if _is_table(package, x) else ROWS[package]
    elif package == "polars" and kind == "Series" and f"{x.dtype}".startswith("Struct"):
        line = "{x}.struct.unnest()"
    refuse(name, what, line.format(**words), more)


def is_tensor(x: Any) -> bool:
    """Whether it is an array of TensorFlow or PyTorch, which NumPy reads without a copy."""
    return any(kind in TENSORS for kind in _kinds(x))


def as_numpy(name: str, x: Any) -> np.ndarray:
    """A NumPy array, a JAX array or a tensor as a NumPy array.

    Raises ValueError if there is none, as for random keys, objects, records and texts of variable
    width.
    """
    check_container(name, x)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        refuse(name, "an array of random keys", f"jax.random.key_data({name})")
    try:
        array = np.asarray(x)
    except Exception as error:
        if not is_tensor(x):
            raise
        floats = ".float()" if "BFloat16" in f"{error}" else ""
        line = f"{name}.detach().to_dense().cpu(){floats}.numpy()"
        refuse(name, "a tensor that NumPy cannot read where it is", line)
    dtype = array.dtype
    if dtype.kind == "T":
        refuse(name, f"an array of {dtype}", f"{name}.astype(object)")
    if dtype.names:
        line = f"{{field: {name}[field] for field in {name}.dtype.names}}"
        refuse(name, "a structured array", line)
    if dtype.type is np.void:
        refuse(name, f"an array of {dtype}", f"{name}.view(np.uint8).reshape(*{name}.shape, -1)")
    if dtype.kind == "O":
        _check_objects(name, array)
    return array


def _check_objects(name: str, array: np.ndarray) -> None:
    """Raises ValueError unless all objects of an array are texts."""
    kinds = set(map(type, array.flat))
    if all(issubclass(kind, str | bytes) for kind in kinds):
        return
    named = {kind.__name__ for kind in kinds}
    what, filled = f"an array of the objects {', '.join(sorted(named))[:200]}", ", or fill them in"
    rows = f"{name}.reshape(len({name}), -1).tolist()" if array.ndim > 1 else name
    if "NoneType" in named:
        keep = "None not in row" if array.ndim > 1 else "row is not None"
        line = f"{name}[[{keep} for row in {rows}]]"
        refuse(name, f"{what}, with missing values", line, filled)
    if named & {"NAType", "NaTType"} or named >= {"str", "float"}:
        refuse(name, f"{what}, with missing values", f"{name}[pandas.notna({name})]", filled)
    if kinds == {np.ndarray} and len({(x.shape, x.dtype) for x in array.flat}) == 1:
        refuse(name, what, f"np.stack(list({name}))")
    if kinds <= {np.ndarray, list, tuple, dict}:
        refuse(name, what, f"list({name})", " (examples), and pad what has several lengths")
    of_one = len(kinds) == 1 and issubclass(
        next(iter(kinds)), bool | int | float | complex | np.generic
    )
    if of_one and np.array(array.tolist()).dtype != object:
        refuse(name, what, f"np.array({name}.tolist())")
    if named == {"Timestamp"} or named == {"datetime"}:
        refuse(name, what, f'{name}.astype("datetime64[us]")')
    if named == {"Decimal"}:
        refuse(name, what, f"{name}.astype(float)", ", which rounds")
    raise ValueError(f"{name} is {what}: pass numbers of one type, texts, or leave it out.")


def refuse_source(name: str, x: Any) -> NoReturn:
    """Raises the ValueError for an object that is not a tree of arrays and lacks len(x) or x[i]."""
    kind = type(x).__name__
    if isinstance(x, Iterable) and not isinstance(x, str | bytes | type):
        refuse(
            name,
            f"a {kind}, and an order needs {name}[i]",
            f"list({name})",
            ", or read files in blocks (ordering.blocks)",
        )
    raise ValueError(
        f"{name} is a {kind}, and an order needs {name}[i]: pass arrays, a tuple or dict of them, "
        "or an object with __len__ and __getitem__, as tfds.data_source in place of tfds.load. "
        "If files can only be read in sequence, order blocks of them (ordering.blocks)."
    )


def _kinds(x: Any) -> list[tuple[str, str]]:
    """The packages and names of an object's classes, the most derived one first."""
    return [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(x).__mro__]


def _described(package: str, x: Any) -> str:
    kind = type(x).__name__
    if isinstance(x, np.ma.MaskedArray):
        return "a masked array"
    return f"a {kind}" if kind.lower().startswith(package) else f"a {package} {kind}"


def _is_table(package: str, x: Any) -> bool:
    return x.ndim == 2 if package == "pandas" else hasattr(x, "columns")


def _columns(package: str, x: Any) -> list:
    """The columns of a frame or table, or the one column that it is."""
    x = getattr(x, "obj", getattr(x, "df", x))  # the frame of a group-by
    if hasattr(x, "collect"):
        return []
    if not _is_table(package, x):
        return [x]
    if package == "pandas":
        return [x.iloc[:, i] for i in range(x.shape[1])]
    return list(x) if package == "polars" else list(x.columns)


def _missing(package: str, x: Any) -> bool:
    """Whether a column lacks a value, which would become NaN, None or NaT in an array.

    A NaN that is already in a NumPy array counts as a number.
    """
    if package != "pandas":
        return any(map(_null_count, _columns(package, x)))
    for column in _columns(package, x):
        dtype = getattr(column, "dtype", None)
        if (not isinstance(dtype, np.dtype) or dtype.kind == "O") and bool(np.any(column.isna())):
            return True
    return False


def _inner_missing(package: str, x: Any) -> bool:
    """Whether a list or struct in a column lacks a value, which would make its array floating."""
    for column in _columns(package, x):
        if package == "pandas":  # only Arrow's types have lists
            column = getattr(getattr(column, "array", column), "__arrow_array__", lambda: None)()
        if column is not None and any(map(_lacks, _inner(column))):
            return True
    return False


def _lacks(column: Any) -> bool:
    return bool(_null_count(column)) or any(map(_lacks, _inner(column)))


def _null_count(column: Any) -> Any:
    count = getattr(column, "null_count", lambda: 0)
    return count() if callable(count) else count


def _inner(column: Any) -> list:
    """The columns inside a column of lists or structs, of polars or Arrow."""
    kind = f"{getattr(column, 'type', None) or getattr(column, 'dtype', '')}".lower()
    polars = hasattr(column, "explode")
    if kind.startswith("struct"):
        return list(column.struct.unnest()) if polars else column.flatten()
    if not kind.startswith(("list", "large_list", "fixed_size_list", "array", "map")):
        return []
    return (
        [column.explode()] if polars else [x.flatten() for x in getattr(column, "chunks", [column])]
    )
