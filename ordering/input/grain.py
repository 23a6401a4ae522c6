"""An epoch as a Grain dataset. Grain is imported only when it is used."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from ordering.input.sources import Steps

if TYPE_CHECKING:
    import grain

# Methods of a MapDataset whose results are still steps of the same epoch.
TRANSFORMS = ("batch", "filter", "map", "map_with_index", "random_map", "seed", "slice")


def map_dataset(
    source: PyTree[ArrayLike] | Sequence,
    orders: Int[ArrayLike, "*W M"] | Sequence,
    *,
    units_per_step: int,
    unit_size: int = 1,
    num_units: int | None = None,
    total: int | None = None,
) -> "grain.MapDataset":
    """One epoch in the sequence of its orders, as a Grain `MapDataset`.

    Element t is the batch of step t. Grain's processes (`to_iter_dataset().mp_prefetch`) read whole
    steps, so the batches do not depend on the number of processes, and `get_state` is exact after
    every step. With another number of processes go on from step t by `map_dataset(...)[t:]`. Apply
    maps of single examples to the source, which may be a `MapDataset` too.

    Args:
      source, orders, units_per_step, unit_size, num_units, total: as in `reader` and
        `step_indices`.

    Returns:
      A `grain.MapDataset`. Every epoch has another order, so it refuses `repeat`, `shuffle` and
      indices past its end.

    Raises:
      ValueError: for a source, orders or sizes that do not fit; from an iterator's `set_state`, for
        the state of another order or number of processes.
      ImportError: if Grain is not installed.

    Examples:
      >>> import numpy as np, ordering
      >>> dataset = ordering.input.map_dataset(np.arange(4) * 10, [2, 0, 3, 1], units_per_step=2)
      >>> [batch.tolist() for batch in dataset]
      [[20, 0], [30, 10]]

    References:
      Grain's datasets, https://google-grain.readthedocs.io/en/latest/
    """
    steps = Steps(
        source, orders, units_per_step=units_per_step, unit_size=unit_size, num_units=num_units,
        total=total,
    )  # fmt: skip
    return _epoch_dataset()(steps, steps.epoch)


@functools.cache
def _epoch_dataset() -> type:
    """The `grain.MapDataset` of one epoch's steps."""
    try:
        import grain
    except ImportError as error:
        raise ImportError("Grain cannot be imported: pip install grain.") from error
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
            if not isinstance(state, dict):
                raise ValueError(
                    f"state is a {type(state).__name__}: pass the dict of a saved iterator."
                )
            for name, value in self._epoch.items():
                if state.get(name) != value:
                    raise ValueError(
                        f"the state's {name} is {state.get(name)!r}, and this epoch's is "
                        f"{value!r}: restore the order's state of the same step first, and pass "
                        "the same sizes and processes."
                    )
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
