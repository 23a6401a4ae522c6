"""The training of one run.

    plans -> segments -> compiled steps -> sync, end of the epoch -> record, save, stop

A run has a record at every evaluation, and the last one says that the run has ended.
"""

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from experiments import files
from experiments.distributed import deadlines, processes
from experiments.trainer import checkpoint, measure, pipeline, timeline
from experiments.trainer.config import Plans
from experiments.trainer.program import Program, placed_rates, warm_up
from experiments.trainer.step import StepStats, TrainState
from experiments.trainer.timeline import Progress, Segment

RECORDING, SAVING = "evaluations and records", "checkpoints"  # reasons why the clock stops
SAVE_SECONDS = 60.0  # of training between two checkpoints, if no number of steps is given
LEAST, MOST = 16, 512  # steps after which the host waits for the device
PACE = 0.5  # seconds between two such waits, if steps are fast


class Hooks(NamedTuple):
    """What is done between the steps of a run, and where it is saved.

    A record has step, epoch, loads, rounds, allreduces, seconds, scalars, ended and diverged. Its
    seconds include training and waiting, without evaluation or compilation.
    """

    on_record: Callable[[dict], None] = lambda record: None
    scalars: measure.Scalars | None = None  # of the model; None: there are no records
    on_step: Callable[[int], None] = lambda step: None  # whenever the host waits for the device
    traffic: Callable[[int, int], float] = lambda rounds, loads: rounds  # in all-reduces
    ends: Callable[[dict], bool] = lambda record: False  # whether a record ends the run
    folder: str | None = None  # of this run's checkpoints; None: it is not saved
    save_every: int | None = None  # steps; 0: only when a signal asks; None: about one a minute
    save_at_end: bool = False
    slow: pipeline.Slow = pipeline.FAST  # seconds that are added

    def record_steps(self, total: int) -> set[int]:
        return set() if self.scalars is None else {*map(int, self.scalars.at(total)), total}

    def saves(self, step: int, total: int, seconds: float) -> bool:
        """Whether a run is saved after a step, so many seconds after the last checkpoint."""
        if self.folder is None or step == total:
            return self.folder is not None and self.save_at_end
        if self.save_every is None:
            return seconds >= SAVE_SECONDS
        return bool(self.save_every) and not step % self.save_every


class Outcome(NamedTuple):
    """How a call has ended."""

    at: Progress
    state: TrainState | None  # None if it is lost
    ended: bool = True  # the last record of the run is written
    stopped: int = 0  # the signal that stopped it
    diverged: str | None = None  # what was not finite, in which step and worker
    seconds: Mapping[str, float] = {}  # of compilation, steps, and what stopped the clock


def compile_and_train(
    program: Program,
    plans: Plans,
    hooks: Hooks,
    *,
    seed: int,
    begun: tuple[Progress, TrainState] | None = None,
) -> Outcome:
    """Trains from the start of a run, or from where it has begun, once all is compiled.

    Args:
      seed: of parameters, orders, and views of the data.
      begun: as of a checkpoint; arrays may still be on the host.
    """
    plans.check()
    if program.source is not None:
        program = program._replace(source=program.source.of_seed(seed))
    before, prepare = time.perf_counter(), [*hooks.scalars.prepare] if hooks.scalars else []
    if hooks.folder is not None and (hooks.save_at_end or hooks.save_every):
        prepare.append(functools.partial(importlib.import_module, "orbax.checkpoint"))
    at, start = Progress(), functools.partial(program.init, seed)
    if begun is not None:
        at, start = begun[0], functools.partial(pipeline.place_as, begun[1], program.shapes)
    state = warm_up(program, plans, start, prepare)
    compiled = {"compilation": time.perf_counter() - before}
    outcome = train(program, plans, state, at, hooks)
    return outcome._replace(seconds=compiled | outcome.seconds)


def train(program: Program, plans: Plans, state: TrainState, at: Progress, hooks: Hooks) -> Outcome:
    """Trains to the end of the plans, or until a signal or a record stops the run.

    A loss or gradient that is not finite ends it with a record. The state is donated.
    """
    total, clock, passed = len(plans.rates), pipeline.Clock(), at.seconds
    records, rates = hooks.record_steps(total), placed_rates(program, plans)
    stops = records | set(range(0, total, hooks.save_every) if hooks.save_every else ())
    ended, stopped, saved, pace = False, 0, passed, Pace(at.step, passed)
    steady = program.source is not None or processes.several()
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(processes.interrupts())
        save = stack.enter_context(checkpoint.writing(hooks.folder, plans))
        source, order = program.source, program.worker.order
        reads_from = functools.partial(
            pipeline.read_epochs, source, order, lambda: state.orders, hooks.slow.load, clock
        )
        segments = _segments(program, plans, at, stops, lambda: pace.limit, reads_from)
        try:
            if at.step == 0 and 0 in records:
                with clock.stopped(RECORDING):
                    finish = hooks.scalars.begin(0, total, state)
                    at, state, ended = record(program, hooks, total, at, state, finish, 0.0)
            for segment, batch in stack.enter_context(contextlib.closing(segments)):
                doing = f"the steps from {segment.start} to {segment.stop}"
                with deadlines.for_others(doing):
                    state = carry_out(program, state, segment, batch, rates)
                if hooks.slow.sync and segment.rounds:
                    clock.sleep(hooks.slow.sync * segment.rounds, after=state)
                at = timeline.after(at, segment, online=plans.echo.online)
                if plans.echo.online:  # it decides by the time that a step takes
                    deadlines.finished(state, doing)
                if segment.stop == segment.start or at.step not in stops and at.step < pace.limit:
                    continue

                finish = at.step in records and hooks.scalars.begin(at.step, total, state)
                deadlines.came_to(at.step)  # before the wait: if one process hangs, all others wait
                deadlines.finished(state, doing)
                hooks.on_step(at.step)
                seconds = passed + clock.now()
                stopped, wanted = asked(hooks.saves(at.step, total, seconds - saved))
                if finish:
                    with clock.stopped(RECORDING):
                        at, state, ended = record(program, hooks, total, at, state, finish, seconds)
                if wanted or (stopped and not ended):
                    with clock.stopped(SAVING):
                        check_finite(pipeline.on_host(state.stats), at.batch_loss)
                        save(at._replace(seconds=seconds), state)
                        saved = seconds
                if stopped or ended:
                    break
                pace = pace.after(at.step, seconds, steady)
        except FloatingPointError as error:
            hooks.on_record(last_record(total, at.seconds, str(error)))
            return Outcome(at, None, stopped=stopped, diverged=str(error))
        if SAVING in clock.stood:
            with clock.stopped(SAVING):
                stack.close()  # waits until the last checkpoint is written
    seconds = {"steps": clock.now(), **clock.stood}
    return Outcome(at, state, ended or at.step == total, stopped, None, seconds)


class Pace(NamedTuple):
    """After how many steps the host waits for the device: about PACE seconds' worth."""

    step: int  # of the last wait
    seconds: float  # then
    most: int = LEAST

    @property
    def limit(self) -> int:
        return self.step + self.most

    def after(self, step: int, seconds: float, steady: bool) -> "Pace":
        """The pace after a wait at a step.

        Args:
          steady: where batches that are read occupy device memory until they are used, and several
            processes must wait after the same steps, the number of steps stays as it is.
        """
        most = self.most
        if step >= self.limit and not steady:
            each = max(seconds - self.seconds, 1e-9) / (step - self.step)
            most = int(min(max(PACE / each, 1), MOST))
        return Pace(step, seconds, most)


def _segments(
    program: Program,
    plans: Plans,
    at: Progress,
    stops: Iterable[int],
    limit: Callable[[], int],
    reads_from: Callable,
) -> Iterator[tuple[Segment, object]]:
    """The segments of a run, each with the batch of its first step, or with all data."""
    sizes, streams, in_step = program.sizes, program.source is not None, program.sync_in_step
    reads, load, batch = None, None, program.data

    def ready():
        return reads is None or reads.ready()

    if plans.echo.online:
        segments = timeline.online(plans, sizes, at, ready, sync_in_step=in_step)
    else:
        line = timeline.timeline(plans, sizes, streams=streams, sync_in_step=in_step, stops=stops)
        segments = timeline.planned(line, at.step, limit)
    with contextlib.ExitStack() as stack:
        for segment in segments:
            if streams and segment.load != load:
                if reads is None:  # the first load is known from its segment
                    reads = stack.enter_context(reads_from(segment.load))
                batch, load = next(reads), segment.load
            yield segment, batch


def carry_out(program: Program, state: TrainState, segment: Segment, batch, rates) -> TrainState:
    """Runs a segment: its steps, then its sync and the end of the epoch, if any."""
    fresh, size, sync, epoch_end = segment.kind
    if segment.stop > segment.start:
        start, stop, first = map(np.int32, (segment.start, segment.stop, segment.first))
        state = program.steps(fresh, size)(state, batch, start, stop, first, rates)
    if sync:
        state = program.sync(state, segment.rate, np.float32((segment.stop - 1) / len(rates)))
    return program.epoch_end(state) if epoch_end else state


def record(program, hooks: Hooks, total: int, at: Progress, state: TrainState, finish, seconds):
    """Writes the record of a step: (progress, state, whether it ends the run).

    The statistics of the state begin anew. `finish() -> scalars` waits for the evaluation.
    """
    stats = pipeline.on_host(state.stats)
    check_finite(stats, at.batch_loss)
    scalars = {
        "step": at.step,
        "epoch": at.loads / program.sizes.loads_per_epoch,
        "loads": at.loads,
        "rounds": at.rounds,
        "allreduces": hooks.traffic(at.rounds, at.loads),
        "seconds": seconds,
    }
    scalars |= stats.means(step=at.step - at.recorded_step, round=at.rounds - at.recorded_rounds)
    state = state._replace(stats=program.reset(state.stats))  # beside the evaluation
    scalars |= finish()
    scalars = processes.of_first(files.plain(scalars))  # all processes end, or none
    ended = at.step == total or hooks.ends(scalars)
    online = {"load_steps": np.flatnonzero(at.decided).tolist()} if ended and at.decided else {}
    hooks.on_record(scalars | {"ended": ended, "diverged": None} | online)
    at = at._replace(
        seconds=scalars["seconds"],
        recorded_step=at.step,
        recorded_rounds=at.rounds,
        batch_loss=scalars.get("train/batch_loss", at.batch_loss),
        records=at.records + 1,
    )
    return at, state, ended


def last_record(total: int, seconds: float, diverged: str) -> dict:
    """The record of a run whose parameters are no longer finite."""
    nothing = {"step": total, "epoch": 0.0, "loads": 0, "rounds": 0, "allreduces": 0.0}
    return nothing | {"seconds": seconds, "ended": True, "diverged": diverged}


def check_finite(stats: StepStats, last_loss: float | None) -> None:
    """Raises FloatingPointError, on all processes, if a worker saw a value that is not finite."""
    step, unit = stats.bad_step, stats.bad_unit
    if (step < 0).all():
        return
    row = int(np.argmin(np.where(step < 0, np.iinfo(np.int32).max, step)))
    name = f"unit {unit[row]}" if unit[row] >= 0 else "one unit"
    raise FloatingPointError(
        f"the loss or gradient of {name} of worker {row} is not finite in step {step[row]} "
        f"(last mean loss: {np.nan if last_loss is None else last_loss:.6g}). Lower the learning "
        "rate or look at that unit."
    )
