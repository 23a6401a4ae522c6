"""An order in, batches on the device out: read ahead, so that no step waits for its batch."""

from ordering.input.epochs import prefetch_next_epoch, read_epoch
from ordering.input.loader import LoadError, load_ahead
from ordering.input.pipeline import batches, prefetch_to_device, step_indices
from ordering.input.sources import reader

__all__ = [
    "LoadError",
    "batches",
    "load_ahead",
    "prefetch_next_epoch",
    "prefetch_to_device",
    "read_epoch",
    "reader",
    "step_indices",
]
