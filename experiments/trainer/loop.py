"""The training loop: between two events on the host, one compiled segment runs."""

import concurrent.futures
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.distributed import deadlines, processes
from experiments.distributed.devices import replicated_sharding
from experiments.trainer import pipeline, timeline
from experiments.trainer.config import Plans
from experiments.trainer.program import Program
from experiments.trainer.step import TrainState
from experiments.trainer.timeline import Kind, Segment
from ordering.echo.stream import ready_everywhere

LEAST, MOST = 16, 512  # steps after which the host waits for the device
PACE = 0.5  # seconds between two such waits, if steps are fast


class Progress(NamedTuple):
    """The position of a run between two steps."""

    step: int = 0
    loads: int = 0
    rounds: int = 0
    decided: Sequence[bool] = ()  # which steps loaded, for policies that decide online


def resumed(plans: Plans, step: int, decided: Sequence[bool] = ()) -> Progress:
    """The progress of a run after `step` steps."""
    fresh = np.asarray(decided if plans.echo.online else plans.echo.fresh[:step], bool)
    loads = int(fresh.sum())
    if plans.sync is not None:
        rounds = int(np.count_nonzero(plans.sync.starts + plans.sync.periods <= step))
    else:  # the sync after a load happens before the next load, or at the end
        rounds = loads if step == plans.total_steps else max(0, loads - 1)
    return Progress(step, loads, rounds, tuple(decided))


def run(
    program: Program,
    plans: Plans,
    state: TrainState,
    at: Progress,
    hook: Callable[[Progress, TrainState], tuple[TrainState, bool]],
    *,
    stops: Iterable[int] = (),
    begin: Callable[[Progress, TrainState], None] = lambda at, state: None,
    slow: pipeline.Slow = pipeline.FAST,
    clock: pipeline.Clock | None = None,
) -> tuple[Progress, TrainState]:
    """Trains from `at` to the end, or until the hook stops the run.

    Args:
      state: donated.
      hook: `(progress, state) -> (state, whether to stop)`, called after every step of `stops` and
        about every half second. The next segment reuses the state's memory, so a hook must copy
        what it keeps.
      begin: called before the host waits for a step of `stops`, to dispatch what the hook needs.
    """
    stops, clock = frozenset(stops), clock or pipeline.Clock()
    pace = Pace(at.step, fixed=program.source is not None or processes.several())
    rates = _rates(program, plans)
    ahead = Ahead(program, state.orders)
    batch, loaded, reads = program.data, None, None
    deadlines.came_to(at.step)

    def orders():
        return state.orders

    def ready():
        return reads is None or reads.ready()

    with contextlib.ExitStack() as stack:
        segments = _online if plans.echo.online else _planned
        for segment in segments(program, plans, at, stops, pace, ready):
            if program.source is not None and segment.load != loaded:
                if reads is None:  # the first load is known from its segment
                    options = {"first_load": segment.load, "delay": slow.load, "clock": clock}
                    reads = pipeline.read_epochs(program.source, orders, **options)
                    stack.enter_context(reads)
                batch, loaded = next(reads), segment.load
            following = ahead.take() if segment.kind.epoch_end else None
            place = segment.load % program.sizes.loads_per_epoch
            first = np.int32(place * program.sizes.units_per_step)
            doing = f"the steps from {segment.start} to {segment.stop}"
            with deadlines.for_others(doing):
                state = carry_out(program, state, segment, batch, following, first, rates)
            if slow.sync and segment.rounds:
                jax.block_until_ready(state)
                clock.sleep_until(clock.now() + slow.sync * segment.rounds)
            ahead.make()  # beside the steps
            at = _after(at, segment, plans.echo.online)
            if plans.echo.online:  # decides by the time that a step takes
                deadlines.finished(state, doing)
            if segment.stop == segment.start:  # the hook has been called after this step
                continue
            if at.step not in stops and not pace.due(at.step):
                continue
            if at.step in stops:
                begin(at, state)
            deadlines.came_to(at.step)  # before the wait: if one process hangs, all others wait
            deadlines.finished(state, doing)
            state, stop = hook(at, state)
            if stop:
                return at, state
            pace.polled(at.step)
    return at, state


def carry_out(program: Program, state, segment: Segment, batch, following, first, rates):
    """Runs a segment: its steps, then its sync and the end of the epoch, if any."""
    fresh, size, sync, epoch_end = segment.kind
    if segment.stop > segment.start:
        steps = program.steps(fresh, size)
        state = steps(state, batch, np.int32(segment.start), np.int32(segment.stop), first, rates)
    if sync:
        state = program.sync(state, segment.rate, np.float32((segment.stop - 1) / len(rates)))
    if following is not None:
        state = state._replace(orders=following)
    elif epoch_end:
        state = program.epoch_end(state)
    return state


def _rates(program, plans) -> jax.Array:
    """float32[T] on the devices."""
    sharding = program.sharding and replicated_sharding(program.sharding.mesh)
    return pipeline.place(np.asarray(plans.rates, np.float32), sharding)


def _after(at: Progress, segment: Segment, online: bool) -> Progress:
    steps = segment.stop - segment.start
    decided = (*at.decided, segment.kind.fresh) if online and steps else at.decided
    taken = max(1, steps) if segment.kind.fresh else 1
    loads = segment.load + taken if steps else at.loads
    return Progress(segment.stop, loads, at.rounds + segment.rounds, decided)


def _planned(program, plans, at, stops, pace, ready) -> Iterator[Segment]:
    """The segments of a run whose decisions are all known in advance."""
    del ready
    line, step = _line(program, plans, stops), at.step
    while step < plans.total_steps:
        segment = timeline.segment_from(line, step, pace.limit)
        yield segment
        step = segment.stop


def _line(program, plans, stops=()) -> timeline.Timeline:
    given = {"streams": program.source is not None, "sync_in_step": program.sync_in_step}
    return timeline.timeline(plans, program.sizes, **given, stops=stops)


def _online(program, plans, at, stops, pace, ready) -> Iterator[Segment]:
    """Segments of one step each; whether a step loads is decided when it begins."""
    del stops, pace
    sizes, in_step = program.sizes, program.sync_in_step
    rates = np.asarray(plans.rates, np.float32)
    loads = at.loads
    last_load = int(np.flatnonzero(at.decided)[-1]) if loads else 0

    def segment(step, steps, fresh, syncs, epoch_end, rate):
        size = int(timeline.units_of(loads - 1, sizes))
        kind = Kind(fresh, size, syncs and not in_step, epoch_end)
        return Segment(step, step + steps, loads - 1, kind, int(syncs), rate)

    for step in range(at.step, plans.total_steps):
        uses = step - last_load
        fresh = plans.echo.decide(step, uses=uses, ready=lambda: ready_everywhere(ready()))
        if fresh and loads:  # the sync and epoch end after the previous batch, which ends now
            by_loads, ended = plans.sync is None, loads % sizes.loads_per_epoch == 0
            if by_loads or ended:
                yield segment(step, 0, False, by_loads, ended, rates[last_load])
        if fresh:
            loads, last_load = loads + 1, step
        last = step + 1 == plans.total_steps
        syncs, first = last, last_load
        if plans.sync is not None:
            syncs = bool(plans.sync.syncs_after(step))
            first = plans.sync.starts[plans.sync.starts <= step][-1]
        ended = last and loads % sizes.loads_per_epoch == 0
        yield segment(step, 1, fresh, syncs, ended, rates[first])


class Pace:
    """How many steps are dispatched before the host waits: about half a second's worth."""

    def __init__(self, step: int, *, fixed: bool):
        # Batches that are read occupy device memory until they are used, and several processes
        # must wait after the same steps.
        self._fixed, self._most = fixed, LEAST
        self._step, self._time = step, time.perf_counter()

    @property
    def limit(self) -> int:
        return self._step + self._most

    def due(self, step: int) -> bool:
        return step >= self.limit

    def polled(self, step: int) -> None:
        now = time.perf_counter()
        if not self._fixed and self.due(step):
            each = (now - self._time) / (step - self._step)
            self._most = int(min(max(PACE / each, 1), MOST))
        self._step, self._time = step, now


class Ahead:
    """Draws the next orders while the steps run, for orders that do not observe gradients.

    It keeps a copy of each. Those in the state are donated to the steps, so that reading them would
    wait for the steps.
    """

    def __init__(self, program: Program, orders):
        self._following, self._orders, self._next = program.following, orders, None
        self.make()  # before the steps take the orders

    def make(self) -> None:
        if self._following is not None and self._next is None:
            self._orders, self._next = self._following(self._orders)

    def take(self):
        """The orders of the next epoch, or None if the steps make them."""
        self.make()
        given, self._next = self._next, None
        return given


def warm_up(
    program: Program,
    plans: Plans,
    start: Callable[[], TrainState],
    further: Sequence[Callable] = (),
) -> TrainState:
    """`start()`, when all that the run needs is compiled, two programs at once.

    No step is run: the first call of a program finds it compiled for the same shapes.

    Args:
      start: makes or places the state, beside the compilation; further: what else is done beside
        it, as the compilation of evaluations.
    """
    with concurrent.futures.ThreadPoolExecutor(1 if processes.several() else 2) as pool:
        state = pool.submit(start)
        jobs = itertools.chain((low.compile for low in _lowered(program, plans)), further)
        list(pool.map(lambda job: job(), jobs))
        return state.result()


def _lowered(program, plans) -> Iterator[jax.stages.Lowered]:
    """The programs of a run, the longest to compile first."""
    state = program.shapes
    rates, zero, kinds = _rates(program, plans), np.int32(0), _kinds(program, plans)
    for fresh, size in {(kind.fresh, kind.size) for kind in kinds}:
        batch = program.data
        if batch is None:
            batch = pipeline.example_batch(program.source, size)
        yield program.steps(fresh, size).lower(state, batch, zero, zero, zero, rates)
    yield program.reset.lower(state.stats)
    if any(kind.sync for kind in kinds):
        yield program.sync.lower(state, np.float32(0), np.float32(0))
    if any(kind.epoch_end for kind in kinds):
        if program.following is not None:
            yield program.following.lower(state.orders)
        else:
            yield program.epoch_end.lower(state)


def _kinds(program, plans) -> set[Kind]:
    """All kinds of segments in a run."""
    if not plans.echo.online:
        return timeline.kinds(_line(program, plans))
    sizes, syncs = program.sizes, {False, not program.sync_in_step}
    units = {int(timeline.units_of(n, sizes)) for n in (0, sizes.loads_per_epoch - 1)}
    return {
        Kind(fresh, n, sync, end)
        for fresh in (True, False)
        for n in units
        for sync in syncs
        for end in (True, False)
    }
