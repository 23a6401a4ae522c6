"""Batches in the sequence of an order, read ahead of the steps."""

from ordering.input.epochs import prefetch_next_epoch, read_epoch
from ordering.input.loader import Loader, LoadError, load_ahead
from ordering.input.pipeline import batches, prefetch_to_device, step_indices
from ordering.input.samplers import grain_sampler, map_dataset
from ordering.input.sources import reader
from ordering.input.steps import StepSource, step_source
from ordering.input.stream import Epochs, read_epochs
from ordering.input.torch_samplers import torch_sampler

__all__ = [
    "Epochs",
    "LoadError",
    "Loader",
    "StepSource",
    "batches",
    "grain_sampler",
    "load_ahead",
    "map_dataset",
    "prefetch_next_epoch",
    "prefetch_to_device",
    "read_epoch",
    "read_epochs",
    "reader",
    "step_indices",
    "step_source",
    "torch_sampler",
]
