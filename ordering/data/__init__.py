"""Reading batches in the sequence of an order, ahead of the steps."""

from ordering.data.datasets import grain_dataset, tf_dataset
from ordering.data.epochs import read_epochs
from ordering.data.loader import LoadError, load_ahead
from ordering.data.sources import reader, step_indices

__all__ = [
    "LoadError",
    "grain_dataset",
    "load_ahead",
    "read_epochs",
    "reader",
    "step_indices",
    "tf_dataset",
]
