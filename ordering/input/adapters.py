"""Orders for other libraries' loaders: a Grain dataset, and a batch sampler for PyTorch."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from ordering.input.grain_epoch import epoch_dataset
from ordering.input.sources import whole_numbers
from ordering.input.steps import Steps, check_epoch, epoch_mark, step_indices
from syncopate import plans

if TYPE_CHECKING:
    import grain


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
    return epoch_dataset()(steps, steps.epoch)


class TorchSampler:
    """What `torch_sampler` returns: an iterable of lists of indices, one per step."""

    def __init__(self, orders: Callable, sizes: dict):
        self._orders, self._sizes = orders, sizes
        self._length = len(iter(self)._steps)  # of all epochs; refuses wrong sizes at once

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> "TorchSteps":
        indices, size = step_indices(self._orders(), **self._sizes)
        return TorchSteps(indices, size)


class TorchSteps(Iterator):
    """One epoch of a `TorchSampler`; torchdata's loaders save and restore its position."""

    def __init__(self, indices: np.ndarray, size: int):
        self._epoch, self._step = epoch_mark(indices, size), 0
        self._steps = [indices[i : i + size].tolist() for i in range(0, indices.size, size)]

    def __next__(self) -> list[int]:
        if self._step >= len(self._steps):
            raise StopIteration
        self._step += 1
        return self._steps[self._step - 1]

    def state_dict(self) -> dict:
        return {**self._epoch, "step": self._step}

    def load_state_dict(self, state: dict) -> None:
        check_epoch(state, self._epoch)
        self._step = plans.check_whole("the state's step", state.get("step"), 0, len(self._steps))


def torch_sampler(
    orders: Int[ArrayLike, "*W M"] | Sequence | Callable[[], ArrayLike],
    *,
    units_per_step: int,
    unit_size: int = 1,
    total: int | None = None,
) -> TorchSampler:
    """A batch sampler for PyTorch's `DataLoader`, in the sequence of its orders.

    Each of its lists holds the indices of one step, which one process of the loader reads. The
    batches therefore do not depend on the number of processes, and `list(sampler)[t:]` goes on from
    step t with any number of them. It does not import PyTorch.

    Args:
      orders: as in `ordering.input.step_indices`; or a function without arguments that returns
        them, so that one loader serves all epochs. It is called when an iterator is made, so make
        an epoch's iterator after `next_epoch`.
      units_per_step, unit_size, total: as in `ordering.input.step_indices`.

    Returns:
      A `TorchSampler` for `DataLoader(batch_sampler=...)`. Its length is the number of steps; its
      iterators have `state_dict` and `load_state_dict`, for torchdata's `StatefulDataLoader`.

    Raises:
      ValueError: for orders or sizes that do not fit; from `load_state_dict`, for a state of
        another order.

    Examples:
      >>> import ordering
      >>> sampler = ordering.input.torch_sampler([2, 0, 1], units_per_step=2)
      >>> len(sampler), list(sampler)
      (2, [[2, 0], [1]])

    References:
      https://docs.pytorch.org/docs/stable/data.html
      https://docs.pytorch.org/data/main/stateful_dataloader_tutorial.html
    """
    sizes = {"units_per_step": units_per_step, "unit_size": unit_size, "total": total}
    if callable(orders):
        return TorchSampler(orders, sizes)
    given = whole_numbers("orders", orders)
    return TorchSampler(lambda: given, sizes)
