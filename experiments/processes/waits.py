"""Waits that end: a process that has waited too long says for what and for whom, and leaves.

Collectives know no deadline, and no exception reaches a thread that waits in one. So a timer writes
what is known and ends the process; whoever has started the processes then ends the others.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import jax

PATIENCE = 1800.0  # seconds; a slow compilation elsewhere is waited for too
ASKING = 5.0  # seconds for the coordinator to say where the others stand
PLACES = "syncopate/after"  # of the coordinator's store: how far each process has come

_patience = PATIENCE


def several() -> bool:
    """Whether there are other processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def patience() -> float:
    """Seconds that this process waits for others, or for a batch."""
    return _patience


def set_patience(seconds: float) -> None:
    global _patience
    _patience = seconds


@contextlib.contextmanager
def limited(seconds: float, told: Callable[[], str]) -> Iterator[None]:
    """Ends this process with exit code 1, after what `told()` says, if the body takes longer."""

    def leave():
        sys.stderr.write(f"{told()}\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def for_others(what: str) -> Iterator[None]:
    """The body waits for other processes, to have `what`; nothing for a process alone."""
    if not several():
        yield
        return
    with limited(_patience, lambda: _told(jax.process_index(), what, _patience, _places())):
        yield


def came_to(step: int) -> None:
    """Tells the others, by the coordinator, after which step this process is."""
    if several():
        place = f"{PLACES}/{jax.process_index()}"
        with for_others("process 0 to note how far this one is"):
            _store().key_value_set(place, str(step), allow_overwrite=True)


def finished(tree, what: str):
    """`jax.block_until_ready`, of arrays that other processes have a part in."""
    with for_others(what):
        return jax.block_until_ready(tree)


def _told(own: int, what: str, seconds: float, places: Mapping[int, int] | None) -> str:
    """
    Example:
      >>> _told(0, "the mean loss", 60, {0: 40, 1: 24, 2: 40})  # doctest: +NORMALIZE_WHITESPACE
      'process 0 has waited 60 s, after step 40, for the mean loss. Process 1 was last seen after
      step 24: look at its output. Then give the command again, or a longer --patience.'
    """
    again = "Then give the command again, or a longer --patience."
    if places is None:
        return (
            f"process {own} has waited {seconds:g} s for {what}. Process 0, where the others are "
            f"known, does not answer: look at its output. {again}"
        )
    where = f", after step {places[own]}," if own in places else ""
    behind = {n: step for n, step in places.items() if step < places.get(own, step)}
    others = behind or {n: step for n, step in places.items() if n != own}
    seen = ", ".join(f"{n} was last seen after step {step}" for n, step in sorted(others.items()))
    look = f"Process {seen}: look at its output." if seen else "Look at the others' output."
    return f"process {own} has waited {seconds:g} s{where} for {what}. {look} {again}"


def _places() -> dict[int, int] | None:
    """{process: the step after which it was}; None where the coordinator does not answer."""
    found = []

    def ask():
        found.append(_store().key_value_dir_get(PLACES))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ASKING)
    if not found:
        return None
    return {int(key.rpartition("/")[2]): int(value) for key, value in found[0]}


def _store():
    from jax._src.distributed import global_state  # no public function reaches it

    return global_state.client
