"""The classes behind `map_dataset`; Grain is imported here alone, and only where it is used."""

import functools

from ordering.input.sources import check_epoch

# What a MapDataset's users may do to its elements before they iterate.
TRANSFORMS = ("batch", "filter", "map", "map_with_index", "random_map", "seed", "slice")


@functools.cache
def epoch_dataset():
    """The class of an epoch's steps."""
    try:
        import grain
    except ImportError as error:
        raise ImportError("Grain cannot be imported: pip install grain.") from error
    iter_dataset = _iter_dataset(grain)

    class EpochDataset(grain.MapDataset):
        """The steps of one epoch, or what transforms make of them.

        Iterators of it, in threads and processes, save `epoch` with their states, and refuse those
        of others.
        """

        _MUTATES_ELEMENT_SPEC = True

        def __init__(self, elements, epoch: dict, parents=()):
            super().__init__(parents)
            self._elements, self._epoch = elements, epoch

        def __len__(self) -> int:
            return len(self._elements)

        def __getitem__(self, index):
            return self.slice(index) if isinstance(index, slice) else self._elements[index]

        def to_iter_dataset(self, *args, **kwargs):
            return iter_dataset(super().to_iter_dataset(*args, **kwargs), self._epoch)

        def repeat(self, *args, **kwargs):
            raise ValueError("an order is of one epoch: make a map_dataset of every epoch's.")

        def shuffle(self, *args, **kwargs):
            raise ValueError("the order is the shuffle: leave shuffle out.")

        def __repr__(self) -> str:
            return f"EpochDataset({self._elements!r})"

    def transformed(name):
        def transform(self, *args, **kwargs):
            elements = getattr(super(EpochDataset, self), name)(*args, **kwargs)
            return EpochDataset(elements, self._epoch, elements)

        return transform

    for name in TRANSFORMS:
        setattr(EpochDataset, name, transformed(name))
    return EpochDataset


def _iter_dataset(grain):
    class EpochIterDataset(grain.IterDataset):
        """An IterDataset whose iterators save the epoch with their states."""

        def __init__(self, parent, epoch: dict):
            super().__init__(parent)
            self._epoch = epoch

        def __iter__(self):
            return EpochIterator(iter(self._parent), self._epoch)

        def mp_prefetch(self, *args, **kwargs):
            # A second check, at the call of `set_state`: the processes' own comes with `next`.
            return EpochIterDataset(super().mp_prefetch(*args, **kwargs), self._epoch)

    class EpochIterator(grain.DatasetIterator):
        _MUTATES_ELEMENT_SPEC = False

        def __init__(self, parent, epoch: dict):
            super().__init__(parent)
            self._epoch = epoch

        def __next__(self):
            return next(self._parent)

        def get_state(self) -> dict:
            return {**self._epoch, "parent": self._parent.get_state()}

        def set_state(self, state: dict) -> None:
            check_epoch(state, self._epoch)
            self._parent.set_state(state["parent"])

    return EpochIterDataset
