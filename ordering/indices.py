"""Indices that are computed where they are read."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

BLOCK = 2**14  # indices that an iterator computes at a time
FEW = 64  # indices that are computed for one, if the one before was near


class Indices(Sequence):
    """The units of an epoch in their order, which are computed where they are read.

    `indices[i]` is a unit, `indices[array]` is an int64 array of units, and `indices[a:b]` is again
    `Indices`, which computes nothing yet. `np.asarray(indices)` and `indices.tolist()` compute all.

    Attributes:
      shape, ndim, size, dtype: as of an int64 array with one axis.

    Args:
      function: `places -> units`, int64 arrays of one shape, of NumPy. It gets at least one place.
      size: the number of places, 0 .. size - 1.
    """

    ndim, dtype = 1, np.dtype(np.int64)

    def __init__(self, function: Callable[[Int[np.ndarray, "..."]], Any], size: int):
        self._function, self._places = function, range(size)
        self._last: tuple[int, list[int]] = (-FEW, [])  # a first place and the units from there on

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
            if places.dtype.kind not in "iu" and places.size:
                raise IndexError(f"index is {places.dtype}{list(places.shape)}: pass integers.")
            wrong = places[(places < -self.size) | (places >= self.size)]
            if wrong.size:
                raise IndexError(f"place {wrong[0]} is out of range: there are {self.size}.")
            return self._units(places.astype(np.int64))
        place = operator.index(index)
        if not -self.size <= place < self.size:
            raise IndexError(f"place {place} is out of range: there are {self.size}.")
        return self._one(place % self.size)

    def _units(self, places: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        if not places.size:
            return places
        places = np.where(places < 0, places + self.size, places)
        return self._function(self._places.start + self._places.step * places)

    def _one(self, place: int) -> int:
        """One unit; after a place nearby, those around it too, as most of them are read next."""
        first, units = self._last
        if not 0 <= place - first < len(units):
            near = -FEW < place - first < len(units) + FEW
            start, count = (place // FEW * FEW, FEW) if near else (place, 1)
            first, units = self._last = start, self[start : start + count].tolist()
        return units[place - first]

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        """Several units at once, as data sets of Grain and PyTorch read them."""
        return self[np.asarray(indices, np.int64)].tolist()

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.size, BLOCK):
            yield from self[start : start + BLOCK].tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Int[np.ndarray, "n"]:
        del copy  # there is nothing to share
        units = self._units(np.arange(self.size))
        return units if dtype is None else units.astype(dtype)

    def tolist(self) -> list[int]:
        """All units, as of an array."""
        return np.asarray(self).tolist()

    def __repr__(self) -> str:
        return f"<{self.size} indices, computed where they are read>"
