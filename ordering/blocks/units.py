"""Units that are blocks: records that lie one after the other in a file."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Int, PyTree

from ordering.blocks.parquet import warn_of_groups
from ordering.blocks.sources import SAMPLE, SAMPLES, Part, Source, digest_of, types_of
from ordering.data.sources import as_source, never_ends, stack_examples
from syncopate import plans

ARRAYS = np.ndarray | jax.Array | dict | tuple


class Blocks(Sequence):
    """What `split` returns: `blocks[u]` holds the records of unit u, as one tree of arrays.

    Attributes:
      parts: the sources.
      sizes: int64[M], records in each unit that a filter keeps.
      unit_size: records in the largest unit.
    """

    def __init__(self, parts, ranges: Int[np.ndarray, "G 3"], ends: np.ndarray, kept, decode):
        """Unit u has the ranges (part, start, stop) from `ends[u]` to `ends[u + 1] - 1`."""
        self.parts, self._ranges, self._ends = parts, ranges, ends
        self._kept, self._decode = kept, decode
        self._first_records = np.cumsum([0, *map(len, parts)])
        before = _sums_before(_sizes(ranges, self._first_records, kept))
        self.sizes = np.diff(before[ends])
        self.unit_size = int(self.sizes.max())
        self._first: dict[str, Any] = {}  # the unit that was read first, and its types

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, unit: int | slice) -> PyTree[np.ndarray]:
        if isinstance(unit, slice):
            return [self[u] for u in range(len(self))[unit]]
        unit = range(len(self))[unit]  # as Python counts, also from the end
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
        """The records of units that have some, one request per range; may be views of the source.

        They are valid if `check` passes afterwards.
        """
        read = [(unit, self._records(*of)) for unit in units for of in self._ranges_of(unit)]
        if all(isinstance(records, list) for _, records in read):  # in one copy
            read = [(units[0], [record for _, records in read for record in records])]
        blocks = [(unit, stack_examples(x) if isinstance(x, list) else x) for unit, x in read]
        for unit, records in blocks:
            self._check_types(unit, types_of(records))
        if len(blocks) == 1:
            return blocks[0][1]
        return jax.tree.map(lambda *x: np.concatenate(x), *[records for _, records in blocks])

    def check(self, units: Sequence[int]) -> None:
        """Raises ValueError if a source of these units has changed."""
        for part in {part for unit in units for part, _, _ in self._ranges_of(unit)}:
            self.parts[part].check()

    def _ranges_of(self, unit):
        return self._ranges[self._ends[unit] : self._ends[unit + 1]].tolist()

    def _records(self, part, start, stop):
        """The records of a range that are kept: a list of examples, or a tree of arrays."""
        kept = None
        if self._kept is not None:
            kept = self._kept[self._first_records[part] :][start:stop]
        return _decoded(self._decode, self.parts[part], self.parts[part].fetch(start, stop, kept))

    def _check_types(self, unit, types):
        """Raises ValueError unless records have the types and shapes of the first unit read.

        Otherwise NumPy would silently convert, as int64 and uint64 to float64.
        """
        first, wanted = self._first.setdefault("unit", (unit, types))
        _check_same(f"unit {unit}", types, f"unit {first}", wanted)


def _sizes(ranges, first_records, kept):
    """int64[G], how many records of each range are kept."""
    part, start, stop = ranges.T
    if kept is None:
        return stop - start
    before = _sums_before(kept)
    return before[first_records[part] + stop] - before[first_records[part] + start]


def _sums_before(counts):
    return np.concatenate([[0], np.cumsum(counts)])


def _decoded(decode, part, records):
    if decode is None:
        return records
    _check_decoder(part, isinstance(records, list) and not isinstance(records[0], ARRAYS))
    return never_ends(lambda: [decode(record) for record in records])


def _check_same(name, types, first, wanted):
    """Raises ValueError for types of records that differ; a shape of None is not known yet."""
    for leaf in types | wanted:
        here, there = types.get(leaf), wanted.get(leaf)
        if here and there and None in (here[1], there[1]):
            here, there = (here[0], None), (there[0], None)
        if here != there:
            raise ValueError(
                f"{leaf} of {name} is {_text(here)}, and of {first} {_text(there)}: pass files "
                "whose records have the same types and shapes."
            )


def _text(kind):
    if kind is None:
        return "missing"
    return f"{kind[0]}" if kind[1] is None else f"{kind[0]}{list(kind[1])}"


def split(
    parts: Sequence | PyTree[ArrayLike],
    *,
    unit_size: int,
    multiple_of: int = 1,
    decode: Callable[[bytes], PyTree] | None = None,
    keep: Bool[ArrayLike, "N"] | Callable[[PyTree], bool] | None = None,
) -> Blocks:
    """Splits files into blocks of consecutive records, the units of an order.

    One request reads a block. The last block of a file has the remaining records. If neighbouring
    blocks together have at most S records, in small files or behind a filter, they become one. An
    order over `len(blocks)` units determines which block comes next, and `read_blocks` reads them.

    Args:
      parts: one of these. The result of `files` or `tokens`, several joined by `+`. A list of your
        own sources with `len(source)` and `source.read(start, stop)`, which returns these records
        as a list of bytes or as arrays; several threads call it, and a saved state knows them by
        their length alone. Or data as for `as_source`: arrays [N, ...], alone or in tuples and
        dicts, or a list of examples.
      unit_size: S >= 1, records in a block. Row groups of Parquet are decoded whole: choose a
        multiple of their size (`source.group_sizes`). If many blocks share a group, it is decoded
        once, as long as the groups in use take at most 512 MiB; beyond that there is a warning.
      multiple_of: >= 1: blocks without records at the end make the number of blocks a multiple of
        this. Pass the number of workers, or a common multiple of the numbers that a run may have.
      decode: `bytes -> example`, for sources whose records are bytes. Several threads call it.
      keep: which records to read, as bool[N] in the order of the files; or a function of a decoded
        record, which is called now for every record, in one pass over all data. It gets a row of
        Parquet as a dict of Python values, with None for missing ones.

    Returns:
      `Blocks`: a sequence whose elements are whole blocks. Other readers of `ordering.data` accept
      it as a source, too.

    Raises:
      ValueError: for invalid parts, a size out of range, `decode` for arrays, or a filter that
        keeps nothing. Also for a record with a missing value, or files of other types than the
        first: here if the files show it, else from the read.

    Examples:
      >>> import numpy as np
      >>> from syncopate import ordering
      >>> blocks = ordering.blocks.split(np.arange(10), unit_size=4, multiple_of=2)
      >>> len(blocks), blocks[2].tolist(), blocks.sizes.tolist()
      (4, [8, 9], [4, 4, 2, 0])
    """
    unit_size = plans.check_whole("unit_size", unit_size, 1)
    multiple_of = plans.check_whole("multiple_of", multiple_of, 1)
    if decode is not None:
        plans.check_function("decode", decode, "record")
    given = _sources(parts)
    typed = [part for part in given if part.types is not None]
    for part in typed:
        _check_same(part.name, part.types, typed[0].name, typed[0].types)
    for part in given if decode is not None else ():
        _check_decoder(part, part.is_bytes is not False)
    ranges = []
    for number, part in enumerate(given):
        starts = np.arange(0, len(part), unit_size)
        stops = np.minimum(starts + unit_size, len(part))
        ranges.append(np.stack([np.full_like(starts, number), starts, stops], axis=1))
    warn_of_groups(given, unit_size)
    ranges = np.concatenate(ranges)
    kept = None if keep is None else _kept(given, ranges, decode, keep)
    for part in given if kept is None else ():
        if part.incomplete is not None:
            part.read(*part.incomplete)
    sizes = _sizes(ranges, np.cumsum([0, *map(len, given)]), kept)
    ranges = ranges[sizes > 0]
    ends = _ends(sizes[sizes > 0], unit_size)
    empty = -(len(ends) - 1) % multiple_of
    return Blocks(given, ranges, np.pad(ends, (0, empty), "edge"), kept, decode)


def _ends(sizes: np.ndarray, most: int) -> np.ndarray:
    """Where units begin, and their end: neighbours that together have few records are one."""
    if (sizes[1:] + sizes[:-1] > most).all():
        return np.arange(len(sizes) + 1)
    ends, size = [0], 0
    for i, more in enumerate(sizes.tolist()):
        if size + more > most:
            ends.append(i)
            size = 0
        size += more
    return np.array([*ends, len(sizes)])


def _check_decoder(part, is_bytes):
    if not is_bytes:
        raise ValueError(
            f"decode is for records that are bytes, and {part.name} holds arrays: leave decode out."
        )


def _sources(parts: Any) -> tuple[Source, ...]:
    many = parts if isinstance(parts, tuple | list) else ()
    if any(hasattr(part, "read") for part in many):
        return tuple(map(_source, many))
    return (_of_data(parts),)


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
    source, of_arrays = as_source(data, name="parts"), isinstance(data, ARRAYS)
    size = sum(x.nbytes for x in jax.tree.leaves(source[:1]))
    count = max(1, SAMPLE // max(1, size)) if of_arrays else 1
    starts = np.unique(np.linspace(0, max(0, len(source) - count), SAMPLES).astype(np.int64))
    samples = (source[at : at + count] for at in starts.tolist()) if of_arrays else [source[starts]]
    digest = digest_of(len(source), (x for sample in samples for x in _bytes_of(sample)))
    name = "the arrays" if of_arrays else "the examples"
    return Part(name, len(source), digest, lambda start, stop: source[start:stop], False)


def _bytes_of(records: PyTree[np.ndarray]) -> Iterator[bytes]:
    """The paths, types, shapes and values of records."""
    for path, x in jax.tree_util.tree_leaves_with_path(records):
        yield f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}".encode()
        yield repr(x.tolist()).encode() if x.dtype.hasobject else x.tobytes()


def _kept(parts, ranges, decode, keep) -> np.ndarray:
    """bool[N]: which records a filter keeps."""
    total = sum(map(len, parts))
    if callable(keep):
        plans.check_function("keep", keep, "record")
        rows = (
            row
            for part, start, stop in ranges.tolist()
            for row in _decoded(decode, parts[part], parts[part].rows(start, stop))
        )
        kept, kind = np.array([_keeps(keep, i, row) for i, row in enumerate(rows)]), ""
    else:
        kept, kind = plans.as_array(keep)
    if kept.shape != (total,) or kept.dtype != bool:
        raise ValueError(
            f"keep is {kind}: pass a bool for each of the {total} records, or a function of one."
        )
    if not kept.any():
        raise ValueError(f"keep leaves none of {total} records: pass another filter.")
    return kept


def _keeps(keep, number, record):
    try:
        return bool(keep(record))
    except Exception as error:
        error.add_note(f"keep was called for record {number}, counted from 0.")
        raise
