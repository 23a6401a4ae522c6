"""Deadlines of waits for other processes, and for a disk.

Collectives have no timeout, and a thread that waits in one receives no exception. So a timer prints
who is behind and ends the process; whatever started the processes, or JAX's heartbeat, then ends
the others.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import jax

from experiments.distributed import TIMEOUT
from syncopate.unstable import coordination_client

ASKING = 5.0  # seconds to ask the coordinator for the steps of the others
STEPS = "steps"  # folder of each process's last step in the coordinator's store

timeout = TIMEOUT  # of this process: see `processes.start`


def several() -> bool:
    """Whether there are other processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


@contextlib.contextmanager
def limited(seconds: float, explain: Callable[[], str]) -> Iterator[None]:
    """If the body takes longer, prints `explain()` and ends this process with exit code 1."""

    def leave():
        sys.stderr.write(f"{explain()}\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def for_others(what: str) -> contextlib.AbstractContextManager:
    """Puts a timeout on the body, which waits for `what` of other processes, if there are any."""
    if not several():
        return contextlib.nullcontext()
    return limited(timeout, lambda: waited(jax.process_index(), what, timeout, _steps()))


def for_disk(what: str, path: str) -> contextlib.AbstractContextManager:
    """`for_others`, also for a single process: a disk may never answer."""
    alone = f"{what} has taken {timeout:g} s in {path!r}: look at that disk. Then give the command"
    advice = f"{alone} again, or pass a longer --timeout."
    return for_others(what) if several() else limited(timeout, lambda: advice)


def finished(tree, what: str):
    """`jax.block_until_ready` with a timeout, for arrays that depend on other processes."""
    with for_others(what):
        return jax.block_until_ready(tree)


def came_to(step: int) -> None:
    """Records in the coordinator's store that this process has finished a step."""
    if several():
        place = f"{STEPS}/{jax.process_index()}"
        with for_others("process 0 to record the step of this one"):
            coordination_client().key_value_set(place, str(step), allow_overwrite=True)


def waited(process: int, what: str, seconds: float, steps: Mapping[int, int]) -> str:
    """The message after a timeout, naming the processes that are behind in {process: step}."""
    behind = {n: step for n, step in steps.items() if step < steps.get(process, 0)} or steps
    seen = [f"process {n} after step {behind[n]}" for n in sorted(behind) if n != process]
    return (
        f"process {process} has waited {seconds:g} s for {what}. Last seen: "
        f"{', '.join(seen) or 'none, as process 0 does not answer'}: look at its output. Then "
        "give the command again, or pass a longer --timeout."
    )


def _steps() -> dict[int, int]:
    """{process: last step}; empty if the coordinator does not answer."""
    store = coordination_client()
    if value_of(store, f"{STEPS}/0", ASKING) is None:
        return {}
    return {int(key.rpartition("/")[2]): int(x) for key, x in store.key_value_dir_get(STEPS)}


def value_of(store, key: str, seconds: float) -> str | None:
    """The value of a key in the coordinator's store; None after the timeout."""
    try:
        return store.blocking_key_value_get(key, max(1, round(1e3 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None
