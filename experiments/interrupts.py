"""SIGTERM and SIGINT ask a run to save and leave; a second one ends it at once."""

import contextlib
import signal
from collections.abc import Callable, Iterator

import numpy as np

from experiments import processes

EVERY = 16  # steps between two agreements of several processes


@contextlib.contextmanager
def caught() -> Iterator[tuple[Callable[[int], bool], list[int]]]:
    """`(stop, signals)`: whether to stop after a step, and which signals have come.

    Several processes stop after the same step, whichever of them was asked.
    """
    signals = []

    def ask(number, frame):
        if signals:
            raise KeyboardInterrupt(f"signal {number} came twice")
        signals.append(number)

    def stop(step: int) -> bool:
        if not processes.several():
            return bool(signals)
        return step % EVERY == 0 and _anywhere(bool(signals))

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop, signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _anywhere(asked: bool) -> bool:
    from jax.experimental.multihost_utils import process_allgather

    return bool(np.any(process_allgather(np.uint8(asked))))
