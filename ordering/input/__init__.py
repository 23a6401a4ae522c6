"""Reading batches in the sequence of an order, ahead of the steps."""

from ordering.input.epochs import read_epochs
from ordering.input.grain import map_dataset
from ordering.input.loader import LoadError, load_ahead
from ordering.input.sources import reader, step_indices
from ordering.input.tfdata import batches

__all__ = [
    "LoadError",
    "batches",
    "load_ahead",
    "map_dataset",
    "read_epochs",
    "reader",
    "step_indices",
]
