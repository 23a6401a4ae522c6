"""Units that are blocks: records that lie one after the other in a file."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Int, PyTree

from ordering.blocks.files import File, Part, of_arrays, plain
from ordering.data.sources import stacked
from syncopate import plans


class Blocks(Sequence):
    """What `split` returns: `blocks[u]` holds the records of unit u, as one tree of arrays.

    Attributes:
      parts: the sources.
      sizes: int64[M], records in each unit that a filter keeps.
      unit_size: records in the largest unit.
    """

    def __init__(self, parts: tuple[Part | File, ...], places: np.ndarray, kept: Any, decode: Any):
        self.parts, self._places, self._kept, self._decode = parts, places, kept, decode
        part, start, stop = places.T
        self._first_records = np.cumsum([0, *map(len, parts)])
        self.sizes = stop - start
        if kept is not None:
            before = np.concatenate([[0], np.cumsum(kept)])
            first = self._first_records[part]
            self.sizes = before[first + stop] - before[first + start]
        self.unit_size = int(self.sizes.max())

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, unit: int) -> PyTree[np.ndarray]:
        if not 0 <= unit < len(self):
            raise IndexError(f"there is no unit {unit}: there are {len(self)}.")
        if not self.sizes[unit]:
            raise ValueError(f"unit {unit} has no records: read it by read_blocks or windows.")
        return jax.tree.map(np.array, self.read([unit]))

    @property
    def num_records(self) -> int:
        """Records in all units that a filter keeps."""
        return int(self.sizes.sum())

    @property
    def digests(self) -> Int[np.ndarray, "F 3"]:
        """uint32[F, 3], the number of records and the digest of every file."""
        rows = [(len(part) % 2**32, *part.digest) for part in self.parts]
        return np.array(rows, np.uint32)

    @property
    def filter_digest(self) -> int:
        """Of the records that a filter keeps; 0 without a filter. It fits the int32 of JAX."""
        return 0 if self._kept is None else 1 + zlib.crc32(np.packbits(self._kept).tobytes()) // 4

    def read(self, units: Sequence[int]) -> PyTree[np.ndarray]:
        """The records of units that have some, in one request each. May be views of the source."""
        found = [self._records(unit) for unit in units]
        if isinstance(found[0], list):
            records = [record for unit in found for record in unit]
            return stacked(records if self._decode is None else [self._decode(x) for x in records])
        kinds = {_kind(records) for records in found}
        if len(kinds) > 1:  # which NumPy would make one, as int64 and uint64 float64
            first, second = list(kinds)[:2]
            raise ValueError(
                f"units {units} have records of the types {first} and {second}: pass files whose "
                "records have the same types and shapes."
            )
        return found[0] if len(found) == 1 else jax.tree.map(lambda *x: np.concatenate(x), *found)

    def records(self) -> Iterator[PyTree]:
        """All records, one after the other, also those that a filter leaves out."""
        for part, start, stop in self._places.tolist():
            records = self.parts[part].read(start, stop) if start < stop else []
            for i in range(stop - start):
                if not isinstance(records, list):
                    yield jax.tree.map(lambda x: x[i], records)  # noqa: B023
                else:
                    yield records[i] if self._decode is None else self._decode(records[i])

    def _records(self, unit):
        """The records of a unit that are kept, as the file gives them."""
        part, start, stop = map(int, self._places[unit])
        records, numbers = self.parts[part].read(start, stop), np.arange(start, stop)
        if self._kept is not None:
            kept = self._kept[self._first_records[part] :][start:stop]
            records, numbers = _take(records, np.flatnonzero(kept)), numbers[kept]
        return (
            records if isinstance(records, list) else plain(self.parts[part].name, numbers, records)
        )


def _kind(records):
    """The structure, types and shapes of records."""
    leaves, structure = jax.tree.flatten(records)
    return f"{structure}"[10:-1], tuple((f"{x.dtype}", x.shape[1:]) for x in leaves)


def _take(records, places):
    if isinstance(records, list):
        return [records[i] for i in places.tolist()]
    return jax.tree.map(lambda x: x[places], records)


def split(
    parts: Sequence | PyTree[ArrayLike],
    *,
    unit_size: int,
    multiple_of: int = 1,
    decode: Callable[[bytes], PyTree] | None = None,
    keep: Bool[ArrayLike, "N"] | Callable[[PyTree], bool] | None = None,
) -> Blocks:
    """Splits files into blocks of consecutive records, the units of an order.

    A block never crosses the end of a file, so that one request reads it; the last one of each file
    has the records that are left. An order over `len(blocks)` units says which block comes next,
    and `read_blocks` reads the blocks.

    Args:
      parts: what `files` or `tokens` returned, joined by `+` if need be; a list of sources of your
        own, with `len(source)` and `source.read(start, stop)`, which gives these records as a list
        of bytes or as arrays and is called by several threads; or arrays [N, ...], alone or in
        tuples and dicts.
      unit_size: S >= 1, records in a block. Where a file has groups, such as the row groups of
        Parquet, choose a multiple of their size.
      multiple_of: the number of blocks becomes a multiple of it, by blocks without records at the
        end: the number of workers, or a common multiple of the numbers that a run may have.
      decode: `bytes -> example`, for files whose records are bytes. Several threads call it.
      keep: which records to read, bool[N] in the sequence of the files; or a function of a decoded
        record, which is called for each of them now, in one pass over all data. A missing value is
        None to it. Blocks lose what is not kept, and stay where they are.

    Returns:
      `Blocks`: a sequence whose elements are whole blocks, which other readers of `ordering.data`
      take as a source too.

    Raises:
      ValueError: for parts that are none, a size out of range, or a filter that keeps nothing; for
        a record with a missing value, here if the file tells of it, else from the read.

    Examples:
      >>> import numpy as np
      >>> from syncopate import ordering
      >>> blocks = ordering.blocks.split(np.arange(10), unit_size=4, multiple_of=2)
      >>> len(blocks), blocks[2].tolist(), blocks.sizes.tolist()
      (4, [8, 9], [4, 4, 2, 0])
    """
    unit_size = plans.check_whole("unit_size", unit_size, 1)
    multiple_of = plans.check_whole("multiple_of", multiple_of, 1)
    many = parts if isinstance(parts, tuple | list) else ()
    are_sources = any(hasattr(part, "read") for part in many)
    given = tuple(map(_source, many)) if are_sources else of_arrays(parts)
    if decode is not None:
        plans.check_function("decode", decode, "record")
    places = []
    for number, part in enumerate(given):
        starts = np.arange(0, len(part), unit_size)
        stops = np.minimum(starts + unit_size, len(part))
        places.append(np.stack([np.full_like(starts, number), starts, stops], axis=1))
    empty = -sum(map(len, places)) % multiple_of
    placed = np.concatenate([*places, np.tile((len(given) - 1, 0, 0), (empty, 1))])
    whole = Blocks(given, placed, None, decode)
    if keep is None:
        for part in given:
            if part.incomplete is not None:
                start, stop = part.incomplete
                plain(part.name, np.arange(start, stop), part.read(start, stop))
        return whole
    kept = _kept(whole, keep)
    if not kept.any():
        raise ValueError(f"keep leaves none of {len(kept)} records: pass another filter.")
    return Blocks(given, placed, kept, decode)


def _source(part: Any) -> Part | File:
    """A source of blocks with a name and a digest; ValueError for what is none."""
    name = type(part).__name__
    if isinstance(part, Part | File):
        return part
    if not (hasattr(part, "read") and hasattr(part, "__len__") and len(part)):
        raise ValueError(
            f"parts holds a {name}: pass what files or tokens returned, or sources "
            "with len(source) > 0 and source.read(start, stop)."
        )

    def read(start, stop):
        records = part.read(start, stop)
        columns = [records] if isinstance(records, list) else jax.tree.leaves(records)
        found = {len(x) if isinstance(x, list) or np.ndim(x) else 0 for x in columns}
        if found != {stop - start}:
            what = f"a {type(records).__name__} of {sorted(found)} records"
            raise ValueError(f"{name}.read({start}, {stop}) gave {what}: return {stop - start}.")
        return records

    return Part(name, len(part), (0, 0), read)


def _kept(blocks: Blocks, keep) -> np.ndarray:
    """bool[N]: which records a filter keeps."""
    if callable(keep):
        plans.check_function("keep", keep, "record")
        return np.array([_keeps(keep, i, record) for i, record in enumerate(blocks.records())])
    kept, kind = plans.as_array(keep)
    if kept.shape != (blocks.num_records,) or kept.dtype != bool:
        raise ValueError(
            f"keep is {kind}: pass a bool for each of the {blocks.num_records} records, or a "
            "function of one record."
        )
    return kept


def _keeps(keep, number, record):
    try:
        return bool(keep(record))
    except Exception as error:
        error.add_note(
            f"keep was asked for record {number}, of all from 0. Missing values are None."
        )
        raise
