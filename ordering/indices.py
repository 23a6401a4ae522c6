"""Indices that are computed where they are read."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

BLOCK = 2**14  # indices that an iterator computes at a time


class Indices(Sequence):
    """The units of an epoch in their order, which are computed where they are read.

    `indices[i]` is a unit, `indices[array]` an int64 array of units, and `indices[a:b]` is again
    `Indices`, of which none is computed. `np.asarray(indices)` computes all of them.

    Attributes:
      shape, ndim, size, dtype: as of an int64 array with one axis.

    Args:
      function: `places -> units`, int64 arrays of one shape, of NumPy.
      size: the number of places, 0 .. size - 1.
    """

    ndim, dtype = 1, np.dtype(np.int64)

    def __init__(self, function: Callable[[Int[np.ndarray, "..."]], Any], size: int):
        self._function, self._places = function, range(size)

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
                raise IndexError(f"index is {places.dtype}{list(places.shape)}: whole numbers.")
            wrong = places[(places < -self.size) | (places >= self.size)]
            if wrong.size:
                raise IndexError(f"place {wrong[0]} is out of range: there are {self.size}.")
            places = np.where(places < 0, places + self.size, places).astype(np.int64)
            return self._function(self._places.start + self._places.step * places)
        return int(self._function(np.array([self._places[index]], np.int64))[0])

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.size, BLOCK):
            yield from np.asarray(self[start : start + BLOCK]).tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Int[np.ndarray, "n"]:
        del copy  # there is nothing to share
        places = self._places
        units = self._function(np.arange(places.start, places.stop, places.step, np.int64))
        return units if dtype is None else units.astype(dtype)

    def __repr__(self) -> str:
        return f"<{self.size} indices, computed where they are read>"
