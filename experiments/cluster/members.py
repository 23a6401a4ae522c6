"""Runs with --survive: what all processes do together is done by those that live.

The programs of such a run are over the mesh of all, and have no collective. So steps go on when a
process dies; syncs, and what is gathered for records, are those of `local_opt.elastic.ElasticSync`.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.cluster import coordination, strict
from local_opt.elastic import ElasticSync
from syncopate.refusals import UserError
from syncopate.unstable import multihost_utils
from syncopate.workers import AXIS

step = 0  # of this process, after which its barriers are
_gather: ElasticSync | None = None  # see `begin`
_members: Sequence[int] = ()  # processes, of the last barrier
_calls = itertools.count()  # of `exchanged`


def begin(sync: Callable, mesh: Mesh) -> Callable:
    """From now on processes may be lost. Returns `(state, *numbers) -> state` from that of one.

    Each device of the mesh is a worker.
    """
    global _gather, _members
    one = lambda state, *numbers: (sync(state, *numbers), *numbers)  # noqa: E731
    elastic = ElasticSync(one, timeout=coordination.timeout)
    gather = lambda *rows: jax.lax.all_gather(rows, AXIS)  # noqa: E731
    _gather = ElasticSync(gather, timeout=coordination.timeout, donate=False)
    _members, axis = range(jax.process_count()), jax.P(AXIS)

    def synced(state, *numbers):
        state = multihost_utils.global_array_to_host_local_array(state, mesh, axis)
        given = [np.full(jax.local_device_count(), number) for number in numbers]
        state, *_ = _together(elastic, lambda: elastic(step, state, *given))
        return multihost_utils.host_local_array_to_global_array(state, mesh, axis)

    return synced


def on() -> bool:
    """Whether processes may be lost."""
    return _gather is not None


def workers() -> list[int]:
    return [w for w, device in enumerate(jax.devices()) if device.process_index in _members]


def barrier() -> None:
    _together(_gather, lambda: _gather.barrier(step))


def exchanged(numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of each that lives. No collective, so that a death in the middle ends nothing."""
    place = f"exchanged/{next(_calls) % 2}"  # all have read what was there, a barrier ago
    text = strict.dumps(list(numbers))
    coordination.store().key_value_set(f"{place}/{jax.process_index()}", text, allow_overwrite=True)
    barrier()
    entries = coordination.store().key_value_dir_get(place)
    texts = [text for key, text in entries if int(key.rpartition("/")[2]) in _members]
    return [strict.loads(text, "a process's numbers", list) for text in texts]


def gathered(rows: Sequence) -> list[np.ndarray]:
    """Arrays of `workers()` [L, ...] on the host, from those of this process's workers."""
    return [np.asarray(x)[0] for x in _together(_gather, lambda: _gather(step, *rows))]


@contextlib.contextmanager
def left_together() -> Iterator[None]:
    """Ends a run without JAX's shutdown, which would wait for lost processes."""

    def leave():
        if on():
            _together(_gather, lambda: _gather.shutdown(step))

    try:
        yield
    except SystemExit:
        leave()
        raise
    leave()


def _together(elastic: ElasticSync, call: Callable):
    """The result of a barrier or a sync; prints which processes were lost before or during it."""
    global _members
    before = workers()
    try:
        result = call()
    except RuntimeError as error:
        if isinstance(error, jax.errors.JaxRuntimeError):  # no process is gone
            raise
        raise UserError(str(error)) from error
    _members = elastic.members.processes
    gone = sorted({*before} - {*workers()})
    if gone and not jax.process_index():
        names = ", ".join(map(str, gone))
        text = f"without worker {names}, whose units are not visited any more"
        print(f"Goes on from step {step} {text}.", flush=True)
    return result
