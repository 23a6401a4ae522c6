"""Rows of Parquet files, whose row groups are decoded whole."""

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ordering.blocks.sources import File, Source, Unfit, needed

MOST = 2**29  # bytes of decoded row groups that stay in memory


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
        from pyarrow import types

        file = self.open(self.name)
        data, schema, names = file.metadata, file.schema_arrow, file.schema_arrow.names
        chosen = names if self.columns is None else self.columns
        for name in chosen:
            if names.count(name) != 1:  # a reader would ignore it, or take the first one
                raise Unfit(
                    f"it has {names.count(name)} columns named {name!r}, of {names}: pass columns= "
                    "that it has once; write it anew if several columns share a name"
                )
        if not chosen:
            raise Unfit("it has no columns: leave it out")
        groups = [data.row_group(i) for i in range(data.num_row_groups)]
        self.group_sizes = np.array([group.num_rows for group in groups], np.int64)
        self.starts = np.append(0, np.cumsum(self.group_sizes))
        kinds = [schema.field(name).type for name in chosen]
        row = sum(kind.bit_width for kind in kinds if types.is_primitive(kind)) // 8
        self.group_bytes = [max(g.total_byte_size, g.num_rows * row) for g in groups]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if (most := max(self.group_bytes, default=0)) > memory:
            raise Unfit(
                f"one of its row groups takes {most / 2**30:.0f} GiB of {memory / 2**30:.0f} GiB "
                "of memory: write it anew with smaller groups (row_group_size=)"
            )
        flat = [i for i in range(data.num_columns) if file.schema.column(i).path in chosen]
        for i, group in enumerate(groups):
            statistics = [group.column(j).statistics for j in flat]
            if any(stats is not None and stats.null_count for stats in statistics):
                self.incomplete = int(self.starts[i]), int(self.starts[i + 1])
                break
        return data.num_rows

    def groups_of(self, start: Any, stop: Any) -> tuple[Any, Any]:
        """The first row group of a range of rows, and one past its last."""
        first = np.searchsorted(self.starts, start, side="right") - 1
        return first, np.searchsorted(self.starts, stop)

    def records(self, handle: Any, start: int, stop: int) -> Any:
        """An Arrow table; a group that several ranges share is decoded once."""
        import pyarrow as pa

        first, last = map(int, self.groups_of(start, stop))
        tables = []
        for i in range(first, last):
            read = lambda: handle.read_row_group(i, self.columns, use_threads=False)  # noqa: B023,E731
            is_whole = start <= self.starts[i] and self.starts[i + 1] <= stop
            key = self.name, self.state, tuple(self.columns or ()), i
            tables.append(read() if is_whole else DECODED.get(key, read))
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
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
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


def _taken(column, places):
    kind = f"{column.type}"
    if kind.endswith("_view"):  # Arrow has no take for views
        column = column.cast(kind.removesuffix("_view"))
    return column.take(places)


class Decoded:
    """A cache of row groups that several blocks share, limited in bytes; the last used stay."""

    def __init__(self):
        self._lock, self._bytes = threading.Lock(), 0
        self._groups: dict[tuple, Any] = {}  # [a lock, the group or None], the last used at the end

    def get(self, key: tuple, decode: Callable[[], Any]) -> Any:
        """The result of `decode`, which one thread calls while others wait."""
        with self._lock:
            group = self._groups.pop(key, None) or [threading.Lock(), None]
            self._groups[key] = group
        with group[0]:
            if group[1] is None:
                group[1] = decode()
                self._make_room(key, group)
            return group[1]

    def _make_room(self, key, group):
        with self._lock:
            if self._groups.get(key) is group:
                self._bytes += group[1].nbytes
            while self._bytes > MOST and len(self._groups) > 1:
                _, oldest = self._groups.pop(next(iter(self._groups)))
                self._bytes -= 0 if oldest is None else oldest.nbytes


DECODED = Decoded()
os.register_at_fork(after_in_child=lambda: DECODED.__init__())  # locks may be held at the fork


def warn_of_groups(sources: Sequence[Source], unit_size: int) -> None:
    """Warns if blocks would decode the same row groups many times."""
    files = [source for source in sources if isinstance(source, Parquet)]
    if sum(sum(file.group_bytes) for file in files) <= MOST:
        return
    for file in files:
        starts = np.arange(0, len(file), unit_size)
        first, last = file.groups_of(starts, np.minimum(starts + unit_size, len(file)))
        times = (file.starts[last] - file.starts[first]).sum() / len(file)
        if times > 2 and len(file.group_sizes) > 1:
            most = file.group_sizes.max()
            warnings.warn(
                f"{file.name} has row groups of up to {most} rows, which would be decoded "
                f"{times:.0f} times in an epoch of blocks of {unit_size}: pass a unit_size of "
                f"about {most}, or write the file anew with smaller groups, by "
                f"pyarrow.parquet.write_table(table, path, row_group_size={unit_size}).",
                stacklevel=3,
            )
            return
