"""The Grain classes behind `map_dataset`. Grain is imported only when it is used."""

import functools
from typing import Any

from ordering.input.steps import check_epoch

# Methods of a MapDataset whose results are still steps of the same epoch.
TRANSFORMS = ("batch", "filter", "map", "map_with_index", "random_map", "seed", "slice")


def imported() -> Any:
    """Grain."""
    try:
        import grain
    except ImportError as error:
        raise ImportError("Grain cannot be imported: pip install grain.") from error
    return grain


@functools.cache
def epoch_dataset() -> type:
    """The `grain.MapDataset` of one epoch's steps."""
    grain = imported()
    iter_dataset = _iter_dataset(grain)

    class EpochDataset(grain.MapDataset):
        """Steps of one epoch, also after transforms; `epoch` is part of its iterators' states."""

        def __init__(self, elements, epoch: dict, parents=()):
            super().__init__(parents)
            self._elements, self._epoch = elements, epoch

        def __len__(self) -> int:
            return len(self._elements)

        def __getitem__(self, index):
            return self.slice(index) if isinstance(index, slice) else self._elements[index]

        def to_iter_dataset(self, *args, **kwargs):
            read = super().to_iter_dataset(*args, **kwargs)
            return iter_dataset(read, {**self._epoch, "processes": 0})

        def repeat(self, *args, **kwargs):
            raise ValueError("an order is of one epoch: make a map_dataset for every epoch.")

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
    class EpochIterator(grain.DatasetIterator):
        """Adds the epoch to the states of an iterator, and refuses states of other epochs."""

        def __init__(self, parent, epoch: dict):
            super().__init__(parent)
            self._epoch = epoch

        def __next__(self):
            return next(self._parent)

        def get_state(self) -> dict:
            return {**self._epoch, "parent": self._parent.get_state()}

        def set_state(self, state: dict) -> None:
            check_epoch(state, self._epoch)
            if not isinstance(state.get("parent"), dict):
                raise ValueError("the state has no parent: pass the dict of a saved iterator.")
            self._parent.set_state(state["parent"])

    class EpochIterDataset(grain.IterDataset):
        def __init__(self, parent, epoch: dict):
            super().__init__(parent)
            self._epoch = epoch

        def __iter__(self):
            return EpochIterator(iter(self._parent), self._epoch)

        def mp_prefetch(self, options=None, *args, **kwargs):
            # The iterators in the processes raise at `next`; one around them raises at `set_state`.
            # From a state of another number of processes Grain fails elsewhere, or hangs.
            options = options or grain.MultiprocessingOptions(num_workers=10)  # Grain's default
            read = super().mp_prefetch(options, *args, **kwargs)
            return EpochIterDataset(read, {**self._epoch, "processes": options.num_workers})

    return EpochIterDataset
