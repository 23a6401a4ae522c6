"""An epoch as a Grain `MapDataset`; imported by `map_dataset` alone, for it imports Grain."""

import grain
import jax

from ordering.input.steps import StepSource


class EpochDataset(grain.MapDataset):
    """Elements of one epoch, which has an end: what is repeated would be of another order."""

    _MUTATES_ELEMENT_SPEC = True

    def __init__(self, steps: StepSource, batched: bool):
        super().__init__()
        self._steps, self._batched = steps, batched

    def __len__(self) -> int:
        return len(self._steps) if self._batched else self._steps.indices.size

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        if not 0 <= index < len(self):
            raise ValueError(
                f"element {index} of an epoch of {len(self)}: the next epoch has another order, "
                "which this dataset does not know. Leave repeat out, and make a map_dataset per "
                "epoch; ordering.input.read_epochs reads over the boundary."
            )
        if self._batched:
            return self._steps[index]
        source, example = self._steps.source, int(self._steps.indices[index])
        if isinstance(source, dict | tuple) or hasattr(source, "dtype"):
            return jax.tree.map(lambda x: x[example], source)
        return source[example]

    def repeat(self, *args, **kwargs):
        raise ValueError("an order is of one epoch: make a map_dataset of every epoch's.")

    def shuffle(self, *args, **kwargs):
        raise ValueError("the order is the shuffle: leave shuffle out.")

    def __repr__(self) -> str:
        return f"EpochDataset({self._steps!r})"
