"""Containers of the ecosystem, what is in each, and what the readers of data make of them."""

import collections
import importlib
import io
import itertools
import re
import tempfile

import jax
import numpy as np

import ordering
from tests.sources import reads_in

N = 6
COLUMNS = {
    "int64": 2**53 + 1 + np.arange(N),
    "uint64": 2**63 + 1 + np.arange(N, dtype=np.uint64),
    "int8": np.arange(N, dtype=np.int8),
    "float64": np.array([0.1, np.inf, np.nan, -0.0, 1e300, 3.0]),
    "float32": np.arange(N, dtype=np.float32) / 3,
    "bool": np.arange(N) % 2 == 0,
    "text": np.array(["a", "bcd", "", "é", "e\0", "f"], object),
    "time": np.arange(N).astype("datetime64[ns]"),
    "pairs": np.arange(2 * N).reshape(N, 2),
}
MISSING = 1  # the number of the example that lacks its value, where one does


def library(name):
    return importlib.import_module(name)


def temporary(name):
    return f"{tempfile.mkdtemp()}/{name}"


def memmap(c):
    np.save(path := temporary("a.npy"), c)
    return np.load(path, mmap_mode="r")


def nullable(c, missing=False):
    pd = library("pandas")
    kind = c.dtype.name.replace("int", "Int").replace("uInt", "UInt").replace("float", "Float")
    kind = {"bool": "boolean", "object": "string"}.get(kind, kind)
    values = c.tolist()
    if missing and c.dtype.kind in "M":
        no()  # NaT is a time of NumPy, too
    if missing:
        values[MISSING] = None
    return pd.Series(values, dtype=kind)


def arrow(c, missing=False):
    pa = library("pyarrow")
    if c.ndim > 1:
        values = [list(row) for row in c.tolist()]
        if missing:
            values[MISSING][1] = None
        return pa.array(values, pa.list_(pa.from_numpy_dtype(c.dtype)))
    mask = (np.arange(N) == MISSING) if missing else None
    return pa.array(c, mask=mask)


def of_arrow(c, missing=False):
    pd = library("pandas")
    column = arrow(c, missing)
    return pd.Series(column.to_pandas(types_mapper=pd.ArrowDtype))


def in_polars(c, missing=False):
    return library("polars").from_arrow(arrow(c, missing))


def masked(c, missing=False):
    mask = np.zeros(c.shape, bool)
    mask[MISSING] = missing
    return np.ma.array(c, mask=mask)


def in_h5py(c):
    file = library("h5py").File(temporary("a.h5"), "w")
    file["x"] = c
    return file["x"]


def in_zarr(c):
    if c.dtype.kind in "OM":
        raise TypeError
    return library("zarr").array(c)


def hugging(c, missing=False):
    datasets, pa = library("datasets"), library("pyarrow")
    return datasets.Dataset(pa.table({"x": arrow(c, missing)}))


# How a column becomes a container. With `missing` one value is None, or masked.
ONE = {
    "numpy": lambda c: c,
    "numpy, memory-mapped": memmap,
    "numpy, of big-endian numbers": lambda c: c.astype(c.dtype.newbyteorder(">")),
    "numpy, not contiguous": lambda c: np.repeat(c, 2, axis=0)[::2],
    "numpy, masked": masked,
    "numpy, objects": lambda c: objects(list(c)),
    "numpy, StringDType": lambda c: c.astype(np.dtypes.StringDType()) if c.dtype == "O" else no(),
    "jax": lambda c: jax.numpy.asarray(c),
    "pandas": lambda c: library("pandas").Series(c if c.ndim == 1 else list(c)),
    "pandas, index": lambda c: library("pandas").Index(c if c.ndim == 1 else no()),
    "pandas, categories": lambda c: library("pandas").Series(c).astype("category"),
    "pandas, nullable": nullable,
    "pandas, array": lambda c: nullable(c).array,
    "pandas, of Arrow": of_arrow,
    "polars": in_polars,
    "Arrow, array": arrow,
    "Arrow, chunks": lambda c, missing=False: library("pyarrow").chunked_array(
        [arrow(c, missing)[:2], arrow(c, missing)[2:]]
    ),
    "Arrow, dictionary": lambda c: arrow(c).dictionary_encode(),
    "xarray": lambda c: library("xarray").DataArray(c),
    "h5py": in_h5py,
    "zarr": in_zarr,
    "tensorflow": lambda c: library("tensorflow").constant(c),
    "torch": lambda c: library("torch").from_numpy(c),
    "scipy, array": lambda c: library("scipy.sparse").csr_array(c) if c.ndim == 2 else no(),
    "scipy, matrix": lambda c: library("scipy.sparse").coo_matrix(c) if c.ndim == 2 else no(),
    "jax, sparse": lambda c: (
        library("jax.experimental.sparse").BCOO.fromdense(c)
        if c.dtype.kind != "b" and not np.isnan(c.astype(float)).any()
        else no()
    ),
    "list": list,
    "list of Python's": lambda c: c.tolist(),
    "tuple of Python's": lambda c: tuple(c.tolist()) if c.ndim == 1 else no(),
    "deque": lambda c: collections.deque(c),
    "generator": lambda c: (x for x in c),
    "iterator": lambda c: iter(list(c)),
    "map": lambda c: map(lambda x: x, c),
    "tf.data": lambda c: library("tensorflow").data.Dataset.from_tensor_slices(c),
    "grain": lambda c: library("grain").MapDataset.source(list(c)),
    "grain, stream": lambda c: library("grain").MapDataset.source(list(c)).to_iter_dataset(),
}


def no():
    raise TypeError("there is no such container")


def objects(values):
    result = np.empty(len(values), object)
    result[:] = values
    return result


def npz(c):
    np.savez(file := io.BytesIO(), x=c if c.dtype != object else no())
    return np.load(io.BytesIO(file.getvalue()))


def group(module, c):
    if module == "h5py":
        return in_h5py(c).parent
    result = library("zarr").group(library("zarr.storage").MemoryStore())
    result.create_array("x", data=np.asarray(in_zarr(c)))
    return result


NAN_IS_MISSING = ["pandas, nullable", "pandas, array", "pandas, categories", "pandas table"]
TYPED = ["Hugging Face, as NumPy", "Hugging Face, as pandas"]
# How a column becomes a table with the column "x".
TABLES = {
    "dict": lambda c: {"x": c},
    "mapping": lambda c: collections.UserDict({"x": c}),
    "Counter": lambda c: type("Own", (dict,), {})({"x": c}),
    "examples": lambda c: [{"x": x} for x in c],
    "examples of Python's": lambda c: [{"x": x} for x in c.tolist()],
    "examples, missing": lambda c: [
        {"x": None if i == MISSING else x} for i, x in enumerate(c.tolist())
    ],
    "structured": lambda c: np.rec.fromarrays([c], names="x") if c.dtype != "O" else no(),
    "npz": npz,
    "pandas table": lambda c, missing=False: library("pandas").DataFrame(
        {"x": nullable(c, missing)}
    ),
    "pandas table, plain": lambda c: library("pandas").DataFrame(
        {"x": c if c.ndim == 1 else list(c)}
    ),
    "pandas table, of Arrow": lambda c, missing=False: of_arrow(c, missing).to_frame("x"),
    "pandas, groups": lambda c: library("pandas").DataFrame({"x": c}).groupby("x"),
    "polars table": lambda c, missing=False: in_polars(c, missing).to_frame("x"),
    "polars, lazy": lambda c: in_polars(c).to_frame("x").lazy(),
    "Arrow": lambda c, missing=False: library("pyarrow").table({"x": arrow(c, missing)}),
    "Arrow, batch": lambda c, missing=False: library("pyarrow").record_batch(
        {"x": arrow(c, missing)}
    ),
    "xarray set": lambda c: library("xarray").Dataset({"x": (("i", "j")[: c.ndim], c)}),
    "h5py group": lambda c: group("h5py", c),
    "zarr group": lambda c: group("zarr", c),
    "Hugging Face": hugging,
    "Hugging Face, as NumPy": lambda c: hugging(c).with_format("numpy"),
    "Hugging Face, as pandas": lambda c: hugging(c).with_format("pandas"),
    "Hugging Face, splits": lambda c: library("datasets").DatasetDict({"train": hugging(c)}),
    "Hugging Face, stream": lambda c: hugging(c).to_iterable_dataset(),
    "tf.data of dicts": lambda c: library("tensorflow").data.Dataset.from_tensor_slices({"x": c}),
}


def kinds():
    """`(name, make, what is in it)`; without what lacks its value, if one does."""
    for (of, c), (name, make) in itertools.product(COLUMNS.items(), (ONE | TABLES).items()):
        is_table, result = name in TABLES, held(name, c)
        result = {"x": result} if is_table else result
        yield f"{name}: {of}", lambda make=make, c=c: make(c), result
        if not is_table:
            yield f"dict of {name}: {of}", lambda make=make, c=c: {"x": make(c)}, {"x": result}
        if "missing" in getattr(make, "__code__", no.__code__).co_varnames:
            rest = jax.tree.map(lambda x: np.delete(x, MISSING, axis=0), result)
            yield f"{name}, missing: {of}", lambda make=make, c=c: make(c, True), rest


def held(name, c):
    """A column as a container of this name has it."""
    if "Python's" in name or name.startswith("Hugging Face") and name not in TYPED:
        c = np.array(c.tolist()) if c.dtype.kind in "iufbM" else c
    if name == "Hugging Face, as NumPy":  # which makes its own types
        types = {"uint64": np.int64, "int8": np.int64, "float64": np.float32}
        with np.errstate(over="ignore"):
            c = c.astype(types.get(c.dtype.name, c.dtype))
        c = np.array([x.rstrip("\0") for x in c], object) if c.dtype == object else c
    if name in NAN_IS_MISSING and c.dtype.kind == "f":
        c = c[~np.isnan(c)]
    return c


def as_source(source):
    result = ordering.data.as_source(source)
    return result[np.arange(len(result))]


def read_epochs(source):
    units = np.arange(len(ordering.data.as_source(source)))
    with reads_in(source, units, units_per_step=2, num_epochs=1) as reads:
        return joined(list(reads))


def tf_dataset(source):
    size = len(ordering.data.as_source(source))
    dataset = ordering.data.tf_dataset(source, np.arange(size))
    return joined(list(dataset.batch(4).as_numpy_iterator()))


def grain_dataset(source):
    size = len(ordering.data.as_source(source))
    dataset = ordering.data.grain_dataset(source, np.arange(size))
    return ordering.data.sources.stack_examples(list(dataset))


def split(source):
    blocks = ordering.blocks.split(source, unit_size=4)
    return joined(list(blocks))


def prefetch_to_device(source):
    """A batch of lists, tuples or sparse arrays stays what it is: a tree."""
    with ordering.data.prefetch_to_device([source]) as loader:
        batch = next(loader)
    is_sparse = lambda x: hasattr(x, "todense")  # noqa: E731
    batch = jax.tree.map(lambda x: x.todense() if is_sparse(x) else x, batch, is_leaf=is_sparse)
    is_list = lambda x: isinstance(x, list | tuple)  # noqa: E731
    return jax.tree.map(of_list, jax.device_get(batch), is_leaf=is_list)


def of_list(batch):
    if isinstance(batch, list) and isinstance(batch[0], dict):
        rows = [{name: np.array(x) for name, x in row.items()} for row in batch]
        return ordering.data.sources.stack_examples(rows)
    result = np.array(batch)
    if result.dtype == object:  # a tree with None, which is none of a column
        raise ValueError("no array")
    return result


READERS = [as_source, read_epochs, tf_dataset, grain_dataset, split, prefetch_to_device]


def joined(batches):
    return jax.tree.map(lambda *x: np.concatenate(x), *batches)


LINE = re.compile(r"((?:source|parts|batch)[^ ]*) is .*?: (.*?)write (.*?) in its place", re.S)
DROP = "drop missing values"


def outcome(reader, make, wanted):
    """How it ends: "right", "converted" (by the messages' lines), "refused" or what is wrong."""
    messages = []
    end = followed(reader, make(), wanted, messages)
    if end.startswith("wrong") and any(DROP in message for message in messages):
        return followed(reader, dropped(make()), wanted, messages)
    return end


def dropped(x):
    """A container without missing values, by its library."""
    if isinstance(x, dict):
        return {name: dropped(column) for name, column in x.items()}
    for method in ("dropna", "drop_nulls", "drop_null"):
        if hasattr(x, method):
            return getattr(x, method)()
    return x


def followed(reader, source, wanted, messages):
    """How it ends if the lines of the messages are run, as often as there is one."""
    name = {"split": "parts", "prefetch_to_device": "batch"}.get(reader.__name__, "source")
    scope, lines = {name: source, "np": np, "jax": jax, "ordering": ordering, "reader": reader}, 0
    while True:
        try:
            result = reader(scope[name])
        except Exception as error:
            ours = isinstance(error, ValueError | ordering.data.LoadError)
            if not ours and "OpError" not in [k.__name__ for k in type(error).__mro__]:
                return f"raw: {type(error).__name__}: {error}"[:300]
            if f"{error}".startswith("load 0 failed") and "ValueError" not in f"{error}":
                return f"raw: {error}"[:300]
            message = LINE.search(f"{error}")
            messages.append(f"{error}")
            if not message or "(value)" in message[3]:
                return "refused"
            exec(f"{message[1]} = {message[3]}", scope)  # a line that makes another container
            lines += 1
            if lines > 7:
                return "no end"
            continue
        if not equal(result, wanted):
            return f"wrong: {result}"[:300]
        return "converted" if lines else "right"


def equal(actual, wanted):
    actual, wanted = (dict(x) if isinstance(x, dict) else {"": x} for x in (actual, wanted))
    return actual.keys() == wanted.keys() and all(map(_same, actual.values(), wanted.values()))


def _same(actual, wanted):
    if wanted.dtype == object:  # TensorFlow has bytes
        plain = [x.decode() if isinstance(x, bytes) else x for x in actual.tolist()]
        return plain == wanted.tolist()
    same = actual.dtype.newbyteorder("=") == wanted.dtype and actual.shape == wanted.shape
    return same and actual.astype(wanted.dtype).tobytes() == wanted.tobytes()


SHOWN = {
    "numpy": "arrays and memory maps",
    "jax": "arrays of JAX",
    "tensorflow": "tensors of TensorFlow and PyTorch",
    "h5py": "data sets of h5py",
    "examples": "lists of examples",
    "grain": "Grain's `MapDataset`",
    "Hugging Face": "a Hugging Face split",
    "numpy, masked": "masked arrays",
    "structured": "structured arrays",
    "npz": "`.npz` files",
    "h5py group": "groups of h5py",
    "xarray set": "xarray `Dataset`",
    "mapping": "mappings other than `dict`",
    "pandas": "pandas columns",
    "polars": "polars columns",
    "xarray": "xarray `DataArray`",
    "pandas table": "pandas frames",
    "polars table": "polars frames",
    "Arrow, chunks": "Arrow columns",
    "Arrow": "Arrow tables",
    "zarr": "zarr arrays",
    "scipy, array": "sparse arrays of SciPy",
    "jax, sparse": "sparse arrays of JAX",
    "generator": "generators",
    "tf.data": "`tf.data.Dataset`",
}


def table():
    """The rows of the page: what to write, and for which containers."""
    rows = collections.defaultdict(list)
    for name, shown in SHOWN.items():
        container = (ONE | TABLES)[name](COLUMNS["pairs" if name == "scipy, array" else "int64"])
        try:
            ordering.data.as_source(container, name="x")
            rows["`x`, as it is"].append(shown)
        except ValueError as error:
            rows["`{}`".format(LINE_OF_X.search(f"{error}")[1])].append(shown)
    head = ["| write | for |", "|---|---|"]
    return "\n".join([*head, *(f"| {line} | {', '.join(of)} |" for line, of in rows.items())])


LINE_OF_X = re.compile("write (.*?) in its place")
