"""Reading batches in the sequence of an order, ahead of the steps."""

from ordering.data.datasets import grain_dataset, reordered, tf_dataset
from ordering.data.epochs import Epochs, read_epochs
from ordering.data.loader import LoadError, Prefetch, prefetch_to_device
from ordering.data.place import ReadState
from ordering.data.reading import step_indices
from ordering.data.sources import Source, as_source

__all__ = [
    "Epochs",
    "LoadError",
    "Prefetch",
    "ReadState",
    "Source",
    "as_source",
    "grain_dataset",
    "prefetch_to_device",
    "read_epochs",
    "reordered",
    "step_indices",
    "tf_dataset",
]
