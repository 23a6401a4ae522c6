"""Reading batches in the sequence of an order, ahead of the steps."""

from ordering.input.epochs import read_epochs
from ordering.input.grain import grain_dataset
from ordering.input.loader import LoadError, load_ahead
from ordering.input.sources import reader, step_indices
from ordering.input.tfdata import tf_dataset

__all__ = [
    "LoadError",
    "grain_dataset",
    "load_ahead",
    "read_epochs",
    "reader",
    "step_indices",
    "tf_dataset",
]
