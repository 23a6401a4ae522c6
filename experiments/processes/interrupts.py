"""SIGTERM and SIGINT ask a run to save and leave; a second one ends it at once."""

import contextlib
import signal
from collections.abc import Callable, Iterator

import numpy as np

from experiments.processes import distributed, waits


@contextlib.contextmanager
def caught() -> Iterator[Callable[[bool], tuple[int, bool]]]:
    """`wants to save -> (signal or 0, whether to save)`: the same answer in all processes.

    Several processes must ask after the same step; what one of them is asked or wants, all do.
    """
    signals = []

    def note(number, frame):
        if signals:
            raise KeyboardInterrupt(f"signal {number} came twice")
        signals.append(number)

    def ask(wants_to_save: bool) -> tuple[int, bool]:
        own = signals[0] if signals else 0, wants_to_save
        if not distributed.several():
            return own
        from jax.experimental.multihost_utils import process_allgather

        with waits.for_others("whether one of them was asked to stop or save"):
            number, save = np.max(process_allgather(np.array(own, np.uint8)), axis=0)
        return int(number), bool(save)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ask
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
