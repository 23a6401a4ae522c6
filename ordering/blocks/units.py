"""Units that are blocks: records that lie one after the other in a file."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Int, PyTree

from ordering.blocks.parquet import warn_of_groups
from ordering.blocks.sources import SAMPLE, SAMPLES, Part, Source, digest_of, name_of
from ordering.data.sources import as_source, never_ends, stacked
from syncopate import plans

ARRAYS = np.ndarray | jax.Array | dict | tuple


class Blocks(Sequence):
    """What `split` returns: `blocks[u]` holds the records of unit u, as one tree of arrays.

    Attributes:
      parts: the sources.
      sizes: int64[M], records in each unit that a filter keeps.
      unit_size: records in the largest unit.
    """

    def __init__(self, parts: tuple[Source, ...], places: np.ndarray, kept: Any, decode: Any):
        self.parts, self._places, self._kept, self._decode = parts, places, kept, decode
        part, start, stop = places.T
        self._first_records = np.cumsum([0, *map(len, parts)])
        self.sizes = stop - start
        if kept is not None:
            before = np.concatenate([[0], np.cumsum(kept)])
            first = self._first_records[part]
            self.sizes = before[first + stop] - before[first + start]
        self.unit_size = int(self.sizes.max())
        self._first: dict[str, Any] = {}  # the unit that was read first, and its types

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, unit: int) -> PyTree[np.ndarray]:
        if not 0 <= unit < len(self):
            raise IndexError(f"there is no unit {unit}: there are {len(self)}.")
        if not self.sizes[unit]:
            raise ValueError(f"unit {unit} has no records: read it by read_blocks or windows.")
        records = jax.tree.map(np.array, self.read([unit]))
        self.check([unit])
        return records

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
        """A digest of the records that a filter keeps, which fits int32; 0 without a filter."""
        return 0 if self._kept is None else 1 + zlib.crc32(np.packbits(self._kept).tobytes()) // 4

    def read(self, units: Sequence[int]) -> PyTree[np.ndarray]:
        """The records of units that have some, in one request each; may be views of the source.

        They are valid if `check` passes afterwards.
        """
        blocks = [self._records(unit) for unit in units]
        if all(isinstance(records, list) for records in blocks):  # in one copy
            records = [record for unit in blocks for record in unit]
            blocks = [stacked(records)]
        blocks = [stacked(x) if isinstance(x, list) else x for x in blocks]
        for unit, records in zip(units, blocks, strict=False):
            self._check_types(unit, records)
        if len(blocks) == 1:
            return blocks[0]
        return jax.tree.map(lambda *x: np.concatenate(x), *blocks)

    def check(self, units: Sequence[int]) -> None:
        """Raises ValueError if a source of these units has changed."""
        for part in np.unique(self._places[units, 0]).tolist():
            self.parts[part].check()

    def records(self) -> Iterator[PyTree]:
        """All records, one after the other, also those that a filter leaves out."""
        for part, start, stop in self._places.tolist():
            if start < stop:
                yield from self._decoded(self.parts[part], self.parts[part].rows(start, stop))

    def _records(self, unit):
        """The records of a unit that are kept: a list of examples, or a tree of arrays."""
        part, start, stop = map(int, self._places[unit])
        kept = None
        if self._kept is not None:
            kept = self._kept[self._first_records[part] :][start:stop]
        return self._decoded(self.parts[part], self.parts[part].fetch(start, stop, kept))

    def _decoded(self, part, records):
        if self._decode is None:
            return records
        _check_decoder(part, isinstance(records, list) and not isinstance(records[0], ARRAYS))
        return never_ends(lambda: [self._decode(record) for record in records])

    def _check_types(self, unit, records):
        """Raises ValueError unless records have the types and shapes of the first unit read.

        Otherwise NumPy would silently convert, as int64 and uint64 to float64.
        """
        leaves = jax.tree_util.tree_leaves_with_path(records)
        types = {path: (x.dtype, x.shape[1:]) for path, x in leaves}
        first, wanted = self._first.setdefault("unit", (unit, types))
        for path in types | wanted if types != wanted else ():
            if types.get(path) != wanted.get(path):
                here, there = (_text(of.get(path)) for of in (types, wanted))
                raise ValueError(
                    f"{name_of(path)} of unit {unit} is {here}, and of unit {first} {there}: pass "
                    "files whose records have the same types and shapes."
                )


def _text(kind):
    return "missing" if kind is None else f"{kind[0]}{list(kind[1])}"


def split(
    parts: Sequence | PyTree[ArrayLike],
    *,
    unit_size: int,
    multiple_of: int = 1,
    decode: Callable[[bytes], PyTree] | None = None,
    keep: Bool[ArrayLike, "N"] | Callable[[PyTree], bool] | None = None,
) -> Blocks:
    """Splits files into blocks of consecutive records, the units of an order.

    A block never crosses the end of a file, so that one request reads it. The last block of a file
    has the remaining records. An order over `len(blocks)` units determines which block comes next,
    and `read_blocks` reads the blocks.

    Args:
      parts: one of these. The result of `files` or `tokens`, several joined by `+`. A list of your
        own sources with `len(source)` and `source.read(start, stop)`, which returns these records
        as a list of bytes or as arrays; several threads call it. Or data as for `as_source`: arrays
        [N, ...], alone or in tuples and dicts, or a list of examples.
      unit_size: S >= 1, records in a block. Row groups of Parquet are decoded whole: choose a
        multiple of their size (`source.group_sizes`). If many blocks share a group, it is decoded
        once, as long as the groups in use take at most 512 MiB; beyond that there is a warning.
      multiple_of: >= 1: blocks without records at the end make the number of blocks a multiple of
        this. Pass the number of workers, or a common multiple of the numbers that a run may have.
      decode: `bytes -> example`, for sources whose records are bytes. Several threads call it.
      keep: which records to read, as bool[N] in the order of the files; or a function of a decoded
        record, which is called now for every record, in one pass over all data. It gets a row of
        Parquet as a dict of Python values, with None for missing ones. The blocks keep their
        boundaries and lose the other records.

    Returns:
      `Blocks`: a sequence whose elements are whole blocks. Other readers of `ordering.data` accept
      it as a source, too.

    Raises:
      ValueError: for invalid parts, a size out of range, `decode` for arrays, or a filter that
        keeps nothing. Also for a record with a missing value: here if the file shows it, else from
        the read. A read also raises for blocks whose types differ from the first block read.

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
    if decode is not None:
        plans.check_function("decode", decode, "record")
    given = tuple(map(_source, many)) if are_sources else (_of_data(parts),)
    for part in given if decode is not None else ():
        _check_decoder(part, part.is_bytes is not False)
    places = []
    for number, part in enumerate(given):
        starts = np.arange(0, len(part), unit_size)
        stops = np.minimum(starts + unit_size, len(part))
        places.append(np.stack([np.full_like(starts, number), starts, stops], axis=1))
    empty = -sum(map(len, places)) % multiple_of
    warn_of_groups(given, unit_size)
    placed = np.concatenate([*places, np.tile((len(given) - 1, 0, 0), (empty, 1))])
    whole = Blocks(given, placed, None, decode)
    if keep is None:
        for part in given:
            if part.incomplete is not None:
                part.read(*part.incomplete)
        return whole
    kept = _kept(whole, keep)
    if not kept.any():
        raise ValueError(f"keep leaves none of {len(kept)} records: pass another filter.")
    return Blocks(given, placed, kept, decode)


def _check_decoder(part, is_bytes):
    if not is_bytes:
        raise ValueError(
            f"decode is for records that are bytes, and {part.name} holds arrays: leave decode out."
        )


def _source(part: Any) -> Source:
    """A source of blocks with a name and a digest; raises ValueError if it is not a source."""
    name = type(part).__name__
    if isinstance(part, Source):
        return part
    if not (hasattr(part, "read") and hasattr(part, "__len__") and len(part)):
        raise ValueError(
            f"parts holds a {name}: pass what files or tokens returned, or sources "
            "with len(source) > 0 and source.read(start, stop)."
        )

    def read(start, stop):
        records = part.read(start, stop)
        columns = [records] if isinstance(records, list) else jax.tree.leaves(records)
        lengths = {len(x) if isinstance(x, list) or np.ndim(x) else 0 for x in columns}
        if lengths != {stop - start}:
            what = f"a {type(records).__name__} of {sorted(lengths)} records"
            raise ValueError(f"{name}.read({start}, {stop}) gave {what}: return {stop - start}.")
        return records

    return Part(name, len(part), (0, 0), read)


def _of_data(data: Any) -> Part:
    """Arrays with a common leading axis, or a list of examples."""
    source = as_source(data, name="parts")
    of_arrays = isinstance(data, ARRAYS)
    samples = np.linspace(0, len(source) - 1, SAMPLE if of_arrays else SAMPLES).astype(np.int64)
    leaves = [np.ascontiguousarray(x) for x in jax.tree.leaves(source[np.unique(samples)])]
    digest = digest_of(len(source), (repr(x.tolist()).encode() for x in leaves))
    name = "the arrays" if of_arrays else "the examples"
    return Part(name, len(source), digest, lambda start, stop: source[start:stop], False)


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
            f"keep was called for record {number}, counted from 0. Missing values are None."
        )
        raise
