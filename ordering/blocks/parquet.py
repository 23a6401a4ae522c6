"""Rows of Parquet files, whose row groups are decoded whole."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from ordering.blocks.sources import MOST, File, Source, Unfit, needed


class Parquet(File):
    """Rows of a dict of columns.

    Attributes:
      group_sizes: int64[G], rows of each row group.
    """

    @staticmethod
    def open(path: str) -> Any:
        module = needed("pyarrow.parquet", "pyarrow", "Parquet")
        return module.ParquetFile(path, memory_map=False, page_checksum_verification=True)

    def index(self) -> int:
        file = self.open(self.name)
        data, schema, names = file.metadata, file.schema_arrow, file.schema_arrow.names
        chosen = names if self.columns is None else self.columns
        for name in chosen:
            if names.count(name) != 1:  # a reader would ignore it, or take the first one
                raise Unfit(
                    f"it has {names.count(name)} columns named {name!r}, of {names}: pass columns= "
                    "that it has once"
                )
        if not chosen:
            raise Unfit("it has no columns: leave it out")
        groups = [data.row_group(i) for i in range(data.num_row_groups)]
        self.group_sizes = np.array([group.num_rows for group in groups], np.int64)
        self.starts = np.append(0, np.cumsum(self.group_sizes))
        self.group_bytes = [group.total_byte_size for group in groups]
        self.types = {name: (_dtype(schema.field(name).type), None) for name in chosen}
        flat = [i for i in range(data.num_columns) if file.schema.column(i).path in chosen]
        for group, start in zip(groups, self.starts.tolist(), strict=False):
            statistics = [group.column(j).statistics for j in flat]
            if any(stats is not None and stats.null_count for stats in statistics):
                self.incomplete = start, start + group.num_rows
                break
        return data.num_rows

    def records(self, handle: Any, start: int, stop: int) -> Any:
        """An Arrow table; a group that several ranges share is decoded once."""
        import pyarrow as pa

        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop))
        tables = []
        for i in range(first, last):
            read = lambda: handle.read_row_group(i, self.columns, use_threads=False)  # noqa: B023,E731
            is_whole = start <= self.starts[i] and self.starts[i + 1] <= stop
            key = self.name, self.state, tuple(self.columns or ()), i
            tables.append(read() if is_whole else self.shared.group(key, read))
        return pa.concat_tables(tables).slice(start - int(self.starts[first]), stop - start)

    def take(self, records: Any, places: np.ndarray, numbers: np.ndarray) -> dict[str, np.ndarray]:
        columns = {name: records[name].combine_chunks() for name in records.column_names}
        if len(places) < len(records):
            columns = {name: _taken(column, places) for name, column in columns.items()}
        return {name: self._array(column, name, numbers) for name, column in columns.items()}

    def rows(self, start: int, stop: int) -> list[dict]:
        return self.raw(start, stop).to_pylist()

    def _array(self, column, name, numbers):
        """An array whose dtype follows from the column's: objects for texts, maps and rows.

        Raises ValueError if a value is missing, or lists have several lengths.
        """
        import pyarrow as pa
        import pyarrow.compute

        if column.null_count:
            places = column.is_null().to_numpy(zero_copy_only=False)
            raise ValueError(
                f"{self.name}, record {numbers[np.argmax(places)]}: {name} has no value. Fill it "
                "in, or leave out such records by split(keep=), which gets None for them."
            )
        kind, types = column.type, pa.types
        if types.is_dictionary(kind):
            return self._array(column.dictionary_decode(), name, numbers)
        if isinstance(column, pa.FixedShapeTensorArray):
            return column.to_numpy_ndarray()
        if isinstance(column, pa.ExtensionArray):
            return self._array(column.storage, name, numbers)
        if _is_list(kind):
            sizes = pyarrow.compute.call_function("list_value_length", [column]).to_numpy()
            values = self._array(column.flatten(), name, np.repeat(numbers, sizes))
            if len(lengths := np.unique(sizes)) > 1:
                raise ValueError(
                    f"{self.name}, records {numbers[0]} to {numbers[-1]}: the lists of {name} have "
                    f"several lengths, such as {lengths[:3].tolist()}. Make them equal, or leave "
                    "some out by split(keep=)."
                )
            return values.reshape(len(column), *lengths, *values.shape[1:])
        if types.is_map(kind) or types.is_struct(kind):  # to_numpy would make floats of these
            objects = np.empty(len(column), object)
            objects[:] = column.to_pylist()
            return objects
        if types.is_fixed_size_binary(kind) and len(column):
            size = kind.byte_width
            data = np.frombuffer(column.buffers()[1], np.uint8, offset=column.offset * size)
            return data[: len(column) * size].reshape(-1, size)
        return column.to_numpy(zero_copy_only=False)


def _dtype(kind):
    """The dtype of the arrays that a column becomes."""
    from pyarrow import types

    while any(hasattr(kind, name) for name in ("value_type", "storage_type")):
        kind = getattr(kind, "value_type", None) or kind.storage_type
    if types.is_fixed_size_binary(kind):
        return np.dtype(np.uint8)
    numbers = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return np.dtype(kind.to_pandas_dtype() if numbers else object)


def _is_list(kind):
    import pyarrow as pa

    names = ["list", "large_list", "fixed_size_list", "list_view", "large_list_view"]
    checks = (getattr(pa.types, f"is_{name}", None) for name in names)  # views since pyarrow 16
    return any(check is not None and check(kind) for check in checks)


def _taken(column, places):
    kind = f"{column.type}"
    if kind.endswith("_view"):  # Arrow has no take for views
        column = column.cast(kind.removesuffix("_view"))
    return column.take(places)


def warn_of_groups(sources: Sequence[Source], unit_size: int) -> None:
    """Warns if blocks would decode the same row groups many times."""
    files = [source for source in sources if isinstance(source, Parquet)]
    if sum(sum(file.group_bytes) for file in files) <= MOST:
        return
    file = max(files, key=lambda file: file.group_sizes.max())
    if (most := file.group_sizes.max()) > 2 * unit_size:
        warnings.warn(
            f"{file.name} has row groups of up to {most} rows, which blocks of {unit_size} decode "
            f"again and again: pass a larger unit_size, or write it with "
            f"row_group_size={unit_size}.",
            stacklevel=3,
        )
