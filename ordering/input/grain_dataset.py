"""An epoch as a Grain `MapDataset`; imported by `map_dataset` alone, for it imports Grain."""

import grain

from ordering.input.steps import Steps


class EpochDataset(grain.MapDataset):
    """The steps of one epoch, which has an end: what is repeated would be of another order."""

    _MUTATES_ELEMENT_SPEC = True

    def __init__(self, steps: Steps):
        super().__init__()
        self._steps = steps

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        if not 0 <= index < len(self):
            raise ValueError(
                f"element {index} of an epoch of {len(self)}: the next epoch has another order, "
                "which this dataset does not know. Leave repeat out, and make a map_dataset per "
                "epoch; ordering.input.read_epochs reads over the boundary."
            )
        return self._steps[index]

    def repeat(self, *args, **kwargs):
        raise ValueError("an order is of one epoch: make a map_dataset of every epoch's.")

    def shuffle(self, *args, **kwargs):
        raise ValueError("the order is the shuffle: leave shuffle out.")

    def __repr__(self) -> str:
        return f"EpochDataset({self._steps!r})"
