"""Indices that are computed where they are read."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

BLOCK = 2**14  # indices that an iterator computes at a time
FEW = 64  # indices that are computed for one, because its neighbours are mostly read next


class Indices(Sequence):
    """The units of an epoch in their order, which are computed where they are read.

    `indices[i]` is a unit, `indices[array]` is an int64 array of units, and `indices[a:b]` is again
    `Indices`, which computes nothing yet. `np.asarray(indices)` computes all of them.

    Attributes:
      shape, ndim, size, dtype: as of an int64 array with one axis.

    Args:
      function: `places -> units`, int64 arrays of one shape, of NumPy.
      size: the number of places, 0 .. size - 1.
    """

    ndim, dtype = 1, np.dtype(np.int64)

    def __init__(self, function: Callable[[Int[np.ndarray, "..."]], Any], size: int):
        self._function, self._places = function, range(size)
        self._last: tuple[int, list[int]] = (-1, [])  # a block of units that were read one by one

    def __len__(self) -> int:
        return len(self._places)

    @property
    def size(self) -> int:
        return len(self._places)

    @property
    def shape(self) -> tuple[int]:
        return (len(self._places),)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            part = Indices(self._function, 0)
            part._places = self._places[index]
            return part
        if np.ndim(index):
            places = np.asarray(index)
            if places.dtype.kind not in "iu":
                raise IndexError(f"index is {places.dtype}{list(places.shape)}: pass integers.")
            wrong = places[(places < -self.size) | (places >= self.size)]
            if wrong.size:
                raise IndexError(f"place {wrong[0]} is out of range: there are {self.size}.")
            places = np.where(places < 0, places + self.size, places).astype(np.int64)
            return self._function(self._places.start + self._places.step * places)
        index = operator.index(index)
        if not -self.size <= index < self.size:
            raise IndexError(f"place {index} is out of range: there are {self.size}.")
        block, place = divmod(index % self.size, FEW)
        number, units = self._last
        if number != block:
            units = np.asarray(self[block * FEW : (block + 1) * FEW]).tolist()
            self._last = block, units
        return units[place]

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        """Several units at once, as data sets of Grain and PyTorch read them."""
        return self[np.asarray(indices, np.int64)].tolist()

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.size, BLOCK):
            yield from np.asarray(self[start : start + BLOCK]).tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Int[np.ndarray, "n"]:
        del copy  # there is nothing to share
        places = self._places
        units = self._function(np.arange(places.start, places.stop, places.step, dtype=np.int64))
        return units if dtype is None else units.astype(dtype)

    def __repr__(self) -> str:
        return f"<{self.size} indices, computed where they are read>"
