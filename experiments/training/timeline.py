"""The run as arrays over its T steps, and its segments.

Decisions are known before the run. The steps between two events on the host are therefore one call
of one compiled program: a segment.
"""

from typing import NamedTuple

import numpy as np

from experiments.training.config import Plans, Sizes


class Timeline(NamedTuple):
    """Events in and after every step, as arrays of length T."""

    fresh: np.ndarray  # bool: the step loads a new batch
    sync: np.ndarray  # bool: workers synchronise after it
    epoch_end: np.ndarray  # bool: the next order becomes current after it
    load: np.ndarray  # int: of the batch that the step uses, counted from 0
    round_rate: np.ndarray  # float32: learning rate at the start of its round


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


def timeline(plans: Plans, sizes: Sizes) -> Timeline:
    """The timeline of plans that are known before the run."""
    fresh = np.asarray(plans.echo.fresh)
    load = np.cumsum(fresh) - 1
    following = np.append(load[1:], load[-1] + 1)
    new = np.append(fresh[1:], True)  # the step after this one loads
    per_epoch = sizes.loads_per_epoch
    epoch_end = new & (following % per_epoch == 0) & (following > 0)
    steps, rates = np.arange(plans.total_steps), np.asarray(plans.rates, np.float32)
    first = plans.sync.start_at(steps)
    return Timeline(fresh, plans.sync.syncs_after(steps), epoch_end, load, rates[first])


def cuts(line: Timeline, sizes: Sizes, *, streams: bool, sync_in_step: bool, stops=()):
    """int[n], the steps (one past) at which a segment must end, increasing, the last is T.

    Args:
      streams: batches are passed in, so that every load begins a segment.
      sync_in_step: workers synchronise within every step, which needs no event on the host.
      stops: further steps after which a segment must end.
    """
    cut = line.epoch_end.copy()
    if not sync_in_step:
        cut |= line.sync
    for changes in (line.fresh, units_of(line.load, sizes)):
        cut[:-1] |= changes[1:] != changes[:-1]
    if streams:
        cut[:-1] |= line.fresh[1:]
    stops = np.asarray(sorted(stops), int)
    cut[stops[(stops > 0) & (stops <= len(cut))] - 1] = True
    cut[-1] = True
    return np.flatnonzero(cut) + 1


def kinds(line: Timeline, ends: np.ndarray, sizes: Sizes, *, sync_in_step: bool) -> set[Kind]:
    """The kinds of all segments between two neighbours of `ends`, as of `cuts`."""
    last = ends - 1
    units, sync = units_of(line.load[last], sizes), line.sync[last] & (not sync_in_step)
    codes = np.unique(units * 8 + line.fresh[last] * 4 + sync * 2 + line.epoch_end[last])
    return {
        Kind(bool(code & 4), code >> 3, bool(code & 2), bool(code & 1)) for code in codes.tolist()
    }


def units_of(load, sizes: Sizes):
    """Units per worker of a load (or of an array of them): the last of an epoch may be shorter."""
    first = load % sizes.loads_per_epoch * sizes.units_per_step
    return np.minimum(sizes.units_per_step, sizes.num_units - first)


def segment_from(
    line: Timeline, ends: np.ndarray, sizes: Sizes, step: int, limit: int, *, sync_in_step: bool
) -> Segment:
    """The segment from a step on: to the next of `ends`, as of `cuts`, at most to `limit`."""
    stop = min(int(ends[np.searchsorted(ends, step, side="right")]), limit)
    last, load = stop - 1, int(line.load[step])
    kind = Kind(
        fresh=bool(line.fresh[last]),
        size=int(units_of(load, sizes)),
        sync=bool(line.sync[last]) and not sync_in_step,
        epoch_end=bool(line.epoch_end[last]),
    )
    rounds = int(np.count_nonzero(line.sync[step:stop]))
    return Segment(step, stop, load, kind, rounds, line.round_rate[last])
