"""Mixtures of sources, each with an order, windows and epochs of its own."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from jaxtyping import PyTree

from ordering.blocks.reads import BlockEpochs
from syncopate import plans


def shares(weights: Mapping[str, float], *, batch_size: int) -> dict[str, int]:
    """How many records of a batch come from each source, in proportion to the weights.

        b_i = floor(b w_i / sum w), and one more where the remainders are largest, first ones first

    Args:
      weights: a weight > 0 for each name.
      batch_size: b, records in a batch.

    Returns:
      `{name: b_i}`, which add up to b. They are the same in each batch, so that its shape is.

    Raises:
      ValueError: for weights that are not above 0, or so small that a source gets no record.

    Examples:
      >>> import ordering
      >>> ordering.blocks.shares({"web": 0.7, "code": 0.2, "books": 0.1}, batch_size=32)
      {'web': 23, 'code': 6, 'books': 3}
    """
    batch_size = plans.check_whole("batch_size", batch_size, 1)
    if not isinstance(weights, Mapping) or not weights:
        raise ValueError(f"weights is {weights!r}: pass a dict of names and weights.")
    values = [plans.check_number(f"weight of {k}", w, "(0, inf)") for k, w in weights.items()]
    # As they are written: sums of floats are rounded in other ways from Python 3.12 on.
    parts = [Fraction(repr(value)) for value in values]
    exact = [batch_size * part / sum(parts) for part in parts]
    found = [math.floor(wanted) for wanted in exact]
    remainders = sorted(range(len(exact)), key=lambda i: found[i] - exact[i])
    for i in remainders[: batch_size - sum(found)]:
        found[i] += 1
    for name, share, wanted in zip(weights, found, exact, strict=True):
        if not share:
            raise ValueError(
                f"{name} gets {float(wanted):.3g} of the {batch_size} records of a batch, none: "
                "raise its weight or the batch size."
            )
    return dict(zip(weights, found, strict=True))


class Mixture(Iterator, contextlib.AbstractContextManager):
    """What `mixture` returns: an iterator of `{name: (records, places)}`.

    As a context manager it closes the threads of all readers.
    """

    def __init__(self, readers: dict[str, BlockEpochs]):
        self.readers = readers

    def __next__(self) -> dict[str, tuple[PyTree, Any]]:
        for reads in self.readers.values():  # if one is late or at its end, none has gone on
            reads.wait()
        return {name: next(reads) for name, reads in self.readers.items()}

    def position(self) -> dict[str, dict[str, Any]]:
        """The positions of all sources, one tree to be saved."""
        return {name: reads.position() for name, reads in self.readers.items()}

    def close(self) -> None:
        """Ends the threads of all readers."""
        for reads in self.readers.values():
            reads.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def mixture(readers: Mapping[str, BlockEpochs]) -> Mixture:
    """Batches of several sources side by side, each in its own order and epoch.

    The step joins what it gets. Small sources begin their next epoch while large ones are still in
    their first: ask each of `readers` for `window_ended` and `epoch_ended`.

    Args:
      readers: `{name: read_blocks(..., batch_size=shares(weights, batch_size=b)[name])}`.

    Returns:
      An iterator that ends where the first of the readers does. `position()` is the tree of all
      positions, whose entries go back into `read_blocks(position=)`.

    Raises:
      ValueError: for an empty dict, or readers that are none.

    Examples:
      >>> import jax, numpy as np, ordering
      >>> def reader(size, batch_size):
      ...     blocks = ordering.blocks.split(np.arange(size), unit_size=2)
      ...     state = ordering.shuffle_once(len(blocks)).init(jax.random.key(0), None)
      ...     return ordering.blocks.read_blocks(
      ...         blocks, lambda: state, window=1, batch_size=batch_size, num_epochs=1
      ...     )
      >>> mixed = ordering.blocks.mixture({"web": reader(8, 2), "code": reader(4, 1)})
      >>> [{name: len(records) for name, (records, _) in batch.items()} for batch in mixed][:1]
      [{'web': 2, 'code': 1}]
    """
    if not isinstance(readers, Mapping) or not readers:
        raise ValueError(f"readers is {readers!r}: pass a dict of names and readers.")
    for name, reads in readers.items():
        if not isinstance(reads, BlockEpochs):
            raise ValueError(
                f"readers has a {type(reads).__name__} as {name}: pass what read_blocks returns."
            )
    return Mixture(dict(readers))
