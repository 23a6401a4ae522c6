"""Reading batches in the sequence of an order, ahead of the steps."""

from ordering.input.datasets import grain_dataset, tf_dataset
from ordering.input.epochs import read_epochs
from ordering.input.loader import LoadError, load_ahead
from ordering.input.sources import reader, step_indices

__all__ = [
    "LoadError",
    "grain_dataset",
    "load_ahead",
    "read_epochs",
    "reader",
    "step_indices",
    "tf_dataset",
]
