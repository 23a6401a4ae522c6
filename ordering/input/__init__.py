"""Batches in the sequence of an order, read ahead of the steps."""

from ordering.input.epochs import prefetch_next_epoch, read_epoch
from ordering.input.loader import Loader, LoadError, load_ahead
from ordering.input.pipeline import batches, prefetch_to_device, step_indices
from ordering.input.sources import reader

__all__ = [
    "LoadError",
    "Loader",
    "batches",
    "load_ahead",
    "prefetch_next_epoch",
    "prefetch_to_device",
    "read_epoch",
    "reader",
    "step_indices",
]
