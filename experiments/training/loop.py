"""The one loop: from event to event of the host, one compiled segment runs between them."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.processes import distributed, heartbeat, waits
from experiments.training import input, timeline
from experiments.training.clock import Clock
from experiments.training.config import Plans
from experiments.training.program import Program
from experiments.training.step import HostOrder, TrainState
from experiments.training.timeline import Kind, Segment
from local_opt import runners
from ordering.echo.online import decide, ready_everywhere

LEAST, MOST = 16, 512  # steps between two looks of the host at the run
PACE = 0.5  # seconds between two looks, where steps are fast


class Progress(NamedTuple):
    """Where a run stands, between two steps."""

    step: int = 0
    loads: int = 0
    rounds: int = 0
    decided: Sequence[bool] = ()  # by a policy that decides online


class Stop(NamedTuple):
    """What a hook returns to end the run, with the state there."""

    state: TrainState


Hook = Callable[[Progress, TrainState], TrainState | Stop]


def resumed(plans: Plans, step: int, decided: Sequence[bool] = ()) -> Progress:
    """Where a run stands after `step` steps."""
    fresh = np.asarray(decided if plans.echo.online else plans.echo.fresh[:step], bool)
    loads = int(fresh.sum())
    if plans.sync is not None:
        rounds = int((plans.sync.ends <= step).sum())
    else:  # the sync after the last load waits for the next one
        rounds = max(0, loads - 1)
    return Progress(step, loads, rounds, tuple(decided))


def run(
    program: Program,
    plans: Plans,
    state: TrainState,
    at: Progress,
    hook: Hook,
    *,
    seed: int,
    stops: Iterable[int] = (),
    delay: float = 0.0,
    sync_delay: float = 0.0,
    clock: Clock | None = None,
) -> tuple[Progress, TrainState]:
    """Trains on from `at` to the end, or until the hook stops the run.

    Args:
      state: donated; seed: that it was made from, for orders drawn on the host.
      hook: `(progress, state) -> state` after every step of `stops`, and whenever the host looks
        at the run; a `Stop` ends it. The next segment is given the state's memory, so that a hook
        copies what it keeps.
      delay: seconds of the clock that a load takes at least; for programs that read.
      sync_delay: that a sync takes more.

    Returns:
      Where the run stands, and its state.
    """
    stops, clock = frozenset(stops), clock or Clock()
    pace = Pace(at.step, fixed=program.source is not None or distributed.several())
    rates = _rates(program, plans)
    orders = _Drawn(program, seed)
    batch, loaded = program.data, None
    with _feed(program, seed, delay, clock) as feed, heartbeat.beating(at.step) as beat:
        segments = _online if plans.echo.online else _planned
        for segment in segments(program, plans, at, stops, pace, feed):
            if feed is not None and segment.load != loaded and not segment.kind.rest:
                batch, loaded = feed.next(state, segment.load), segment.load
            given = program.rest if segment.kind.rest else batch
            epoch, place = divmod(segment.load, program.sizes.loads_per_epoch)
            following = orders.of(epoch + 1) if segment.kind.epoch_end else None
            first = np.int32(place * program.sizes.units_per_step)
            doing = f"the steps from {segment.start} to {segment.stop}"
            with waits.for_others(doing):
                state = carry_out(program, state, segment, given, following, first, rates)
            if sync_delay and segment.rounds:
                jax.block_until_ready(state)
                clock.sleep_until(clock.now() + sync_delay * segment.rounds)
            orders.draw(epoch + 1)  # beside the steps
            at = _after(at, segment, plans.echo.online)
            if plans.echo.online:  # decides by the time that a step takes
                waits.finished(state, doing)
            if segment.stop == segment.start:  # the host has looked at this step
                continue
            if at.step not in stops and not pace.due(at.step):
                continue
            beat(at.step)  # before the wait, in which all are whose fellow hangs
            waits.finished(state, doing)
            state = hook(at, state)
            if isinstance(state, Stop):
                return at, state.state
            pace.looked(at.step)
    return at, state


def carry_out(program: Program, state, segment: Segment, batch, following, first, rates):
    """A segment: its steps, then the sync and the epoch's end if it has them."""
    fresh, size, sync, epoch_end, rest = segment.kind
    if segment.stop > segment.start:
        steps = program.steps(fresh, size, rest)
        state = steps(state, batch, np.int32(segment.start), np.int32(segment.stop), first, rates)
    if following is not None:  # drawn on the host: nothing to compute
        state, epoch_end = state._replace(orders=HostOrder(following)), False
    if sync or epoch_end:
        state = program.ends(sync, epoch_end)(state, segment.rate)
    return state


def _rates(program, plans) -> jax.Array:
    """float32[T] on the devices; [runs, T] of runs side by side."""
    sharding = program.sharding and runners.shared_sharding(program.sharding.mesh)
    return distributed.place(np.asarray(plans.rates, np.float32), sharding)


def _feed(program, seed, delay, clock):
    if program.source is None:
        return contextlib.nullcontext()
    order_of = program.orders_of(seed) if program.orders_of else None
    feed = input.Feed(program.source, order_of=order_of, delay=delay, clock=clock)
    return contextlib.closing(feed)


def _after(at: Progress, segment: Segment, online: bool) -> Progress:
    steps = segment.stop - segment.start
    decided = (*at.decided, segment.kind.fresh) if online and steps else at.decided
    taken = max(1, steps) if segment.kind.fresh else 1
    loads = segment.load + taken if steps else at.loads
    return Progress(segment.stop, loads, at.rounds + segment.rounds, decided)


def _planned(program, plans, at, stops, pace, feed) -> Iterator[Segment]:
    """The segments of a run whose decisions are known."""
    del feed
    sizes, sync_in_step = program.sizes, program.sync_in_step
    line = timeline.timeline(plans, sizes)
    streams = program.source is not None
    ends = timeline.cuts(line, sizes, streams=streams, sync_in_step=sync_in_step, stops=stops)
    step = at.step
    while step < plans.total_steps:
        segment = timeline.segment_from(
            line, ends, sizes, step, pace.limit, sync_in_step=sync_in_step
        )
        yield segment
        step = segment.stop


def _online(program, plans, at, stops, pace, feed) -> Iterator[Segment]:
    """Segments of one step each: whether it loads is decided when it begins."""
    del stops, pace
    sizes, in_step = program.sizes, program.sync_in_step
    rates = np.asarray(plans.rates, np.float32)
    loads = at.loads
    last_load = int(np.flatnonzero(at.decided)[-1]) if loads else 0

    def ready():
        return ready_everywhere(feed is None or feed.ready())

    def segment(step, steps, fresh, syncs, epoch_end, rate):
        size = int(timeline.units_of(loads - 1, sizes))
        rest = bool(timeline.is_rest(loads - 1, sizes))
        kind = Kind(fresh, size, syncs and not in_step, epoch_end, rest)
        return Segment(step, step + steps, loads - 1, kind, int(syncs), rate)

    for step in range(at.step, plans.total_steps):
        uses = step - last_load
        fresh = decide(plans.echo, step, loads=loads, uses=uses, ready=ready)
        if fresh and loads:  # what follows the batch before, whose end is known only now
            by_loads, ended = plans.sync is None, loads % sizes.loads_per_epoch == 0
            if by_loads or ended:
                yield segment(step, 0, False, by_loads, ended, rates[last_load])
        if fresh:
            loads, last_load = loads + 1, step
        syncs, first = False, step
        if plans.sync is not None:
            syncs = bool(plans.sync.syncs_after(step))
            first = plans.sync.starts[plans.sync.round_at(step)]
        yield segment(step, 1, fresh, syncs, False, rates[first])


class Pace:
    """How many steps the devices run ahead before the host looks up: about half a second's."""

    def __init__(self, step: int, *, fixed: bool):
        # Batches that are read lie on the devices until they are used; and processes must look up
        # after the same steps.
        self._fixed, self._most = fixed, LEAST
        self._step, self._time = step, time.perf_counter()

    @property
    def limit(self) -> int:
        return self._step + self._most

    def due(self, step: int) -> bool:
        return step >= self.limit

    def looked(self, step: int) -> None:
        now = time.perf_counter()
        if not self._fixed and self.due(step):
            each = (now - self._time) / (step - self._step)
            self._most = int(min(max(PACE / each, 1), MOST))
        self._step, self._time = step, now


class _Drawn:
    """The next order of a host that draws them, placed on the devices beside the steps."""

    def __init__(self, program: Program, seed: int):
        self._order_of = program.orders_of(seed) if program.orders_of else None
        # Committed, as all of the state is: what the steps are compiled for depends on it.
        self._sharding = program.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self._epoch, self._order = None, None

    def draw(self, epoch: int) -> None:
        if self._order_of is not None and epoch != self._epoch:
            order = self._order_of(epoch)
            self._epoch, self._order = epoch, distributed.place(order, self._sharding)

    def of(self, epoch: int):
        self.draw(epoch)
        return self._order


def warm_up(program: Program, plans: Plans, state: TrainState) -> None:
    """Compiles what a run needs, by a call of no steps of each kind; uses the state up."""
    rates, zero = _rates(program, plans), np.int32(0)
    no_rate = np.zeros(np.shape(plans.rates)[:-1], np.float32)
    kinds = _kinds(program, plans)
    for fresh, size, rest in {(kind.fresh, kind.size, kind.rest) for kind in kinds}:
        batch = program.rest if rest else program.data
        if batch is None:
            batch = input.example_batch(program.source, size)
        state = program.steps(fresh, size, rest)(state, batch, zero, zero, zero, rates)
    drawn = program.orders_of is not None
    for ends in {(kind.sync, kind.epoch_end and not drawn) for kind in kinds} - {(False, False)}:
        state = program.ends(*ends)(state, no_rate)
    jax.block_until_ready(program.reset(state))


def _kinds(program, plans) -> set[Kind]:
    """All kinds of segments that a run can have."""
    pace = Pace(plans.total_steps, fixed=True)
    if not plans.echo.online:
        segments = _planned(program, plans, Progress(), (), pace, None)
        return {segment.kind for segment in segments}
    sizes, in_step = program.sizes, program.sync_in_step
    places = (0, sizes.unit_loads - 1, sizes.loads_per_epoch - 1)
    units = {(int(timeline.units_of(n, sizes)), bool(timeline.is_rest(n, sizes))) for n in places}
    syncs = {False, not in_step}
    return {
        Kind(fresh, n, sync, end, rest)
        for fresh in (True, False) for n, rest in units for sync in syncs for end in (True, False)
    }  # fmt: skip
