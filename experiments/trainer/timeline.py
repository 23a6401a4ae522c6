"""The run as arrays over its T steps, and its segments.

Decisions are known before the run. The steps between two events on the host are therefore one call
of one compiled program: a segment.
"""

import itertools
from typing import NamedTuple

import numpy as np

from experiments.trainer.config import Plans, Sizes


class Timeline(NamedTuple):
    """Events in and after every step, as arrays of length T, and where segments must end."""

    fresh: np.ndarray  # bool: the step loads a new batch
    sync: np.ndarray  # bool: workers synchronise after it
    epoch_end: np.ndarray  # bool: the next order becomes current after it
    load: np.ndarray  # int: of the batch that the step uses, counted from 0
    round_rate: np.ndarray  # float32: learning rate at the start of its round
    units: np.ndarray  # int: per worker, of the batch
    host_sync: np.ndarray  # bool: the sync is an event on the host, not within the step
    ends: np.ndarray  # int[n], increasing to T: one past the last steps of segments


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
    kind: Kind
    rounds: int  # that it ends
    rate: np.float32  # learning rate at the start of the last of them


def timeline(
    plans: Plans, sizes: Sizes, *, streams: bool = False, sync_in_step: bool = False, stops=()
) -> Timeline:
    """The timeline of plans that are known before the run.

    With batches that are passed in every load begins a segment. Syncs within steps need no event on
    the host. After `stops` a segment must end too.
    """
    fresh = np.asarray(plans.echo.fresh)
    load = np.cumsum(fresh) - 1
    following = np.append(load[1:], load[-1] + 1)
    new = np.append(fresh[1:], True)  # the step after this one loads
    epoch_end = new & (following % sizes.loads_per_epoch == 0) & (following > 0)
    steps, rates = np.arange(plans.total_steps), np.asarray(plans.rates, np.float32)
    sync, units = plans.sync.syncs_after(steps), units_of(load, sizes)
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
    return Timeline(fresh, sync, epoch_end, load, round_rate, units, host_sync, ends)


def units_of(load, sizes: Sizes):
    """Units per worker of a load (or of an array of them): the last of an epoch may be shorter."""
    first = load % sizes.loads_per_epoch * sizes.units_per_step
    return np.minimum(sizes.units_per_step, sizes.num_units - first)


def kinds(line: Timeline) -> set[Kind]:
    """The kinds of all segments."""
    return {*_kinds(line, line.ends - 1)}


def _kinds(line, last):
    """The kinds of segments that end with these steps."""
    rows = (x[last].tolist() for x in (line.fresh, line.units, line.host_sync, line.epoch_end))
    return itertools.starmap(Kind, zip(*rows, strict=True))


def segment_from(line: Timeline, step: int, limit: int) -> Segment:
    """The segment from a step on: to the next of the ends, at most to `limit`."""
    stop = min(int(line.ends[np.searchsorted(line.ends, step, side="right")]), limit)
    [kind] = _kinds(line, [stop - 1])
    rounds = int(np.count_nonzero(line.sync[step:stop]))
    return Segment(step, stop, int(line.load[step]), kind, rounds, line.round_rate[stop - 1])
