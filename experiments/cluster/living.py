"""Runs with --survive: what all processes do together is done by those that live.

The programs of such a run are over the mesh of all, and have no collective. So steps go on when a
process dies; syncs, and what is gathered for records, are meetings of `local_opt.Survivors`.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.cluster import agree, strict
from local_opt import Survivors
from syncopate.refusals import UserError
from syncopate.unstable import multihost_utils
from syncopate.workers import AXIS

step = 0  # of this process, after which its meetings are
_gather: Survivors | None = None  # see `begin`
_living: Sequence[int] = ()  # processes, as far as they have met
_calls = itertools.count()  # of `said`


def begin(sync: Callable, mesh: Mesh) -> Callable:
    """From now on processes may be lost. Returns `(state, *numbers) -> state` from that of one.

    Each device of the mesh is a worker.
    """
    global _gather, _living
    one = lambda state, *numbers: (sync(state, *numbers),)  # noqa: E731
    survivors = Survivors(one, patience=agree.patience)
    _gather = Survivors(lambda *rows: jax.lax.all_gather(rows, AXIS), patience=agree.patience)
    _living, axis = range(jax.process_count()), jax.P(AXIS)

    def synced(state, *numbers):
        state = multihost_utils.global_array_to_host_local_array(state, mesh, axis)
        given = [np.full(jax.local_device_count(), number) for number in numbers]
        (state,) = _met(survivors, lambda: survivors(step, state, *given))
        return multihost_utils.host_local_array_to_global_array(state, mesh, axis)

    return synced


def on() -> bool:
    """Whether processes may be lost."""
    return _gather is not None


def workers() -> list[int]:
    return [w for w, device in enumerate(jax.devices()) if device.process_index in _living]


def meet() -> None:
    _met(_gather, lambda: _gather.meet(step))


def said(numbers: Sequence[int]) -> list[list[int]]:
    """What each that lives says. No collective, so that a death in the middle ends nothing."""
    place = f"said/{next(_calls) % 2}"  # all have read what was there, as they have met since
    text = strict.dumps(list(numbers))
    agree.store().key_value_set(f"{place}/{jax.process_index()}", text, allow_overwrite=True)
    meet()
    found = agree.store().key_value_dir_get(place)
    texts = [text for key, text in found if int(key.rpartition("/")[2]) in _living]
    return [strict.loads(text, "what a process says", list) for text in texts]


def gathered(rows: Sequence) -> list[np.ndarray]:
    """Arrays of `workers()` [L, ...] on the host, from those of this process's workers."""
    return [np.asarray(x)[0] for x in _met(_gather, lambda: _gather(step, *rows))]


@contextlib.contextmanager
def left_together() -> Iterator[None]:
    """Ends a run, of which JAX's own end would wait for the dead, unless an error ends it."""

    def leave():
        if on():
            _met(_gather, lambda: _gather.leave(step))

    try:
        yield
    except SystemExit:
        leave()
        raise
    leave()


def _met(survivors: Survivors, meeting: Callable):
    """What a meeting returns; says who is gone, and who was lost in its middle."""
    global _living
    before = workers()
    try:
        found = meeting()
    except RuntimeError as error:
        first = "CoordinationService" in str(error.__cause__)  # which process 0 holds
        told = "process 0 is gone, without which none goes on: " if first else ""
        raise UserError(f"{told}{error}") from error
    _living = survivors.met.living
    gone = sorted({*before} - {*workers()})
    if gone and not jax.process_index():
        told = f"without worker {', '.join(map(str, gone))}, whose units are not visited any more"
        print(f"Goes on from step {step} {told}.", flush=True)
    return found
