"""A run as arrays over its T steps, and its segments.

Most decisions are known before the run. The steps between two events on the host are therefore one
call of one compiled program: a segment.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments.trainer.config import Plans, Sizes
from ordering.echo.stream import ready_everywhere


class Progress(NamedTuple):
    """Where a run is between two steps. A checkpoint holds it beside the state."""

    step: int = 0
    loads: int = 0
    rounds: int = 0
    decided: Sequence[bool] = ()  # which steps loaded, for policies that decide online
    # At the last record or checkpoint:
    seconds: float = 0.0  # of training, without evaluations, checkpoints and compilation
    # At the last record:
    recorded_step: int = 0
    recorded_rounds: int = 0
    batch_loss: float | None = None
    records: int = 0  # written so far


class Kind(NamedTuple):
    """The properties of a segment that its program depends on."""

    fresh: bool
    size: int  # units per worker and step
    sync: bool  # after the last step
    epoch_end: bool  # after that


class Segment(NamedTuple):
    """Equal steps, `start` to `stop` - 1, without an event on the host between them."""

    start: int
    stop: int  # equal to `start` if there is only a sync or the end of an epoch
    load: int  # of its first step, counted from 0
    first: int  # unit of that load, in the order of the epoch
    kind: Kind
    rounds: int  # that it ends
    rate: np.float32  # learning rate at the start of the last of them


class Timeline(NamedTuple):
    """Events in and after every step, as arrays of length T, and where segments must end."""

    fresh: np.ndarray  # bool: the step loads a new batch
    sync: np.ndarray  # bool: workers synchronise after it
    epoch_end: np.ndarray  # bool: the next order becomes current after it
    load: np.ndarray  # int: of the batch that the step uses, counted from 0
    first: np.ndarray  # int: place of the batch's first unit in the order of its epoch
    round_rate: np.ndarray  # float32: learning rate at the start of its round
    units: np.ndarray  # int: per worker, of the batch
    host_sync: np.ndarray  # bool: the sync is an event on the host, not within the step
    ends: np.ndarray  # int[n], increasing to T: one past the last steps of segments


def timeline(
    plans: Plans,
    sizes: Sizes,
    *,
    streams: bool = False,
    sync_in_step: bool = False,
    stops: Iterable[int] = (),
) -> Timeline:
    """The timeline of plans that are known before the run.

    With batches that are passed in every load begins a segment. Syncs within steps need no event on
    the host. After `stops` a segment must end too.
    """
    fresh, per_epoch = np.asarray(plans.echo.fresh), sizes.loads_per_epoch
    load = np.cumsum(fresh) - 1
    following = np.append(load[1:], load[-1] + 1)
    new = np.append(fresh[1:], True)  # the step after this one loads
    epoch_end = new & (following % per_epoch == 0) & (following > 0)
    rates = np.asarray(plans.rates, np.float32)
    sync = plans.sync.syncs_after(np.arange(len(rates)))
    first, units = units_of(load, sizes, per_epoch)
    host_sync = sync & (not sync_in_step)
    cut = epoch_end | host_sync
    for changes in (fresh, units):
        cut[:-1] |= changes[1:] != changes[:-1]
    if streams:
        cut[:-1] |= fresh[1:]
    stops = np.asarray(sorted(stops), int)
    cut[stops[(stops > 0) & (stops <= len(cut))] - 1] = True
    cut[-1] = True
    round_rate = np.repeat(rates[plans.sync.starts], plans.sync.periods)
    ends = np.flatnonzero(cut) + 1
    return Timeline(fresh, sync, epoch_end, load, first, round_rate, units, host_sync, ends)


def units_of(load, sizes: Sizes, per_epoch: int):
    """(place of the first, number) of the units of a load, or of an array of loads, per worker.

    The last load of an epoch may have fewer.
    """
    first = load % per_epoch * sizes.units_per_step
    return first, np.minimum(sizes.units_per_step, sizes.num_units - first)


def kinds(plans: Plans, sizes: Sizes, *, streams: bool, sync_in_step: bool) -> set[Kind]:
    """The kinds of all segments that a run may have."""
    if not plans.echo.online:
        line = timeline(plans, sizes, streams=streams, sync_in_step=sync_in_step)
        return {*_kinds(line, line.ends - 1)}
    per_epoch = sizes.loads_per_epoch
    units = {int(units_of(n, sizes, per_epoch)[1]) for n in (0, per_epoch - 1)}
    syncs = {False, not sync_in_step}
    return set(
        itertools.starmap(Kind, itertools.product((True, False), units, syncs, (True, False)))
    )


def _kinds(line: Timeline, last) -> Iterator[Kind]:
    """The kinds of segments that end with these steps."""
    rows = (x[last].tolist() for x in (line.fresh, line.units, line.host_sync, line.epoch_end))
    return itertools.starmap(Kind, zip(*rows, strict=True))


def planned(line: Timeline, step: int, limit: Callable[[], int]) -> Iterator[Segment]:
    """The segments from a step on, each to the next of the ends, and at most to `limit()`."""
    while step < len(line.fresh):
        stop = min(int(line.ends[np.searchsorted(line.ends, step, side="right")]), limit())
        [kind] = _kinds(line, [stop - 1])
        load, first = int(line.load[step]), int(line.first[step])
        rounds = int(np.count_nonzero(line.sync[step:stop]))
        yield Segment(step, stop, load, first, kind, rounds, line.round_rate[stop - 1])
        step = stop


def online(
    plans: Plans,
    sizes: Sizes,
    at: Progress,
    ready: Callable[[], bool],
    *,
    sync_in_step: bool,
) -> Iterator[Segment]:
    """Segments of one step each. When it begins, the policy decides whether it loads.

    Args:
      ready: whether the next batch is there.
    """
    rates, per_epoch = np.asarray(plans.rates, np.float32), sizes.loads_per_epoch
    loads = at.loads
    last_load = int(np.flatnonzero(at.decided)[-1]) if loads else 0

    def segment(step, steps, fresh, syncs, epoch_end, rate):
        first, size = map(int, units_of(loads - 1, sizes, per_epoch))
        kind = Kind(fresh, size, syncs and not sync_in_step, epoch_end)
        return Segment(step, step + steps, loads - 1, first, kind, int(syncs), rate)

    for step in range(at.step, len(rates)):
        uses = step - last_load
        fresh = plans.echo.decide(step, uses=uses, ready=lambda: ready_everywhere(ready()))
        if fresh and loads:  # the sync and epoch end after the previous batch, which ends now
            by_loads, ended = plans.sync is None, loads % per_epoch == 0
            if by_loads or ended:
                yield segment(step, 0, False, by_loads, ended, rates[last_load])
        if fresh:
            loads, last_load = loads + 1, step
        last = step + 1 == len(rates)
        syncs, first = last, last_load
        if plans.sync is not None:
            syncs = bool(plans.sync.syncs_after(step))
            first = plans.sync.starts[plans.sync.starts <= step][-1]
        yield segment(step, 1, fresh, syncs, last and loads % per_epoch == 0, rates[first])


def after(at: Progress, segment: Segment, *, online: bool) -> Progress:
    """The progress after a segment."""
    steps, fresh = segment.stop - segment.start, segment.kind.fresh
    if steps:
        at = at._replace(loads=segment.load + (steps if fresh else 1))
        if online:
            at = at._replace(decided=(*at.decided, fresh))
    return at._replace(step=segment.stop, rounds=at.rounds + segment.rounds)
