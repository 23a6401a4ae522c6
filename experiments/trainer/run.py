"""Trains one run, from its start or its last checkpoint to its end, and writes its records."""

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from experiments import files
from experiments.distributed import processes
from experiments.trainer import checkpoint, loop, measure, pipeline
from experiments.trainer.checkpoint import Evaluation
from experiments.trainer.config import Plans
from experiments.trainer.loop import Progress
from experiments.trainer.program import Program
from experiments.trainer.step import StepStats, TrainState

RECORDING, SAVING = "evaluations and records", "checkpoints"  # reasons why the clock stops
SAVE_SECONDS = 60.0  # of training between two checkpoints, if no number of steps is given


class Outcome(NamedTuple):
    """How a call ended."""

    step: int  # the last
    state: TrainState | None  # after it; None if it is lost
    decided: tuple = ()  # which steps loaded a batch, if an online policy decided that
    stopped: int = 0  # the signal that stopped the run
    ended: bool = False  # its last record is written
    diverged: str | None = None  # what was not finite, in which step and worker
    seconds: Mapping[str, float] = {}  # of compilation, steps, and what stopped the clock


class Saving(NamedTuple):
    """When and where a run is saved."""

    folder: str  # of this run's checkpoints
    every: int | None = None  # steps; 0: only when a signal asks; None: about one a minute
    at_end: bool = False
    about: Mapping = {}  # settings besides plans, JSON values; those of a checkpoint must be equal


class Watch(NamedTuple):
    """Callbacks of a run: when it is evaluated, and what gets its records.

    A record has step, epoch, loads, rounds, allreduces, seconds, scalars, ended and diverged. Its
    seconds include training and waiting, without evaluation or compilation.
    """

    on_record: Callable[[dict], None]
    scalars: measure.Scalars = measure.Scalars()  # of the model; the end always has a record
    on_step: Callable[[int], None] = lambda step: None  # whenever the host looks at the run
    traffic: Callable[[int, int], float] = lambda rounds, loads: rounds  # in all-reduces
    ends: Callable[[dict], bool] = lambda record: False  # whether a record ends the run


def train(
    program: Program,
    plans: Plans,
    watch: Watch,
    *,
    seed: int,
    begun: checkpoint.Begun | None = None,
    saving: Saving | None = None,
    slow: pipeline.Slow = pipeline.FAST,
) -> Outcome:
    """Trains to the end of the plans, or until it is stopped.

    A loss or gradient that is not finite ends the run with a record that says so.

    Args:
      seed: of parameters, orders, and views of the data.
      begun: where the run goes on; None: it begins.
      saving: None for a run that is not saved; slow: seconds that are added.
    """
    plans.check()
    if program.source is not None:
        program = program._replace(source=program.source.of_seed(seed))
    called, prepare = time.perf_counter(), [*watch.scalars.prepare]
    if saving is not None and (saving.at_end or saving.every):
        prepare.append(functools.partial(importlib.import_module, "orbax.checkpoint"))
    start = functools.partial(program.init, seed)
    if begun is not None:
        start = functools.partial(pipeline.place_as, begun.state, program.shapes)
    state = loop.warm_up(program, plans, start, prepare)
    compiled, total = time.perf_counter() - called, plans.total_steps
    at, seen = (Progress(), Evaluation()) if begun is None else (begun.at, begun.seen)
    evaluated = {int(step) for step in watch.scalars.at(total)} | {total}
    stops = evaluated | set(range(0, total, saving.every) if saving and saving.every else ())
    with contextlib.ExitStack() as stack:
        ask = stack.enter_context(processes.interrupts())
        saver = _Saver(stack, saving, program, plans, seen.seconds)
        recorder = Recorder(program, watch, total, seen)
        clock, passed, stopped = pipeline.Clock(), seen.seconds, 0

        def begin(at, state):
            if at.step in evaluated:
                recorder.begin(at, state)

        def hook(at, state):
            nonlocal stopped
            watch.on_step(at.step)
            seconds = passed + clock.now()
            stopped, save = ask(saver.due(at.step, seconds))
            if at.step in evaluated:
                with clock.stopped(RECORDING):
                    state = recorder.record(at, state, seconds)
            if save or (stopped and not recorder.ended):
                with clock.stopped(SAVING):
                    _check_finite(pipeline.on_host(state.stats), recorder.seen.batch_loss)
                    saver.save(at, state, recorder.seen._replace(seconds=seconds))
            return state, bool(stopped or recorder.ended)

        try:
            if at.step in evaluated and not at.step:
                with clock.stopped(RECORDING):
                    recorder.begin(at, state)
                    state = recorder.record(at, state, 0.0)
            at, state = loop.run(
                program, plans, state, at, hook, stops=stops, begin=begin, slow=slow, clock=clock
            )
        except FloatingPointError as error:
            recorder.diverged(str(error))
            return Outcome(recorder.seen.step, None, (), stopped, True, str(error))
        if saver.has_saved:  # the last checkpoint is written meanwhile
            with clock.stopped(SAVING):
                stack.close()
        seconds = {"compilation": compiled, "steps": clock.now(), **clock.stood}
    ended = recorder.ended or at.step == total
    return Outcome(at.step, state, tuple(at.decided), stopped, ended, None, seconds)


def duration(seconds: Mapping[str, float]) -> str:
    """The seconds of runs in words, as "12.3 s of steps, 0.1 s of checkpoints"."""
    return ", ".join(f"{value:.3g} s of {name}" for name, value in seconds.items())


class Recorder:
    """Writes a record at every evaluation, and tells whether a record has ended the run."""

    def __init__(self, program: Program, watch: Watch, total: int, seen: Evaluation):
        self._program, self._watch, self._total = program, watch, total
        self.seen, self.ended, self._finish = seen, False, None

    def begin(self, at: Progress, state: TrainState) -> None:
        """Dispatches the evaluation of the next record, while the steps before it still run."""
        self._finish = self._watch.scalars.begin(at.step, self._total, state)

    def record(self, at: Progress, state: TrainState, seconds: float) -> TrainState:
        """Writes a record at this step, and returns the state with its stats set to zero."""
        stats = pipeline.on_host(state.stats)
        _check_finite(stats, self.seen.batch_loss)
        scalars = {
            "step": at.step,
            "epoch": at.loads / self._program.sizes.loads_per_epoch,
            "loads": at.loads,
            "rounds": at.rounds,
            "allreduces": self._watch.traffic(at.rounds, at.loads) + self.seen.more_sent,
            "seconds": seconds,
        }
        scalars |= stats.means(step=at.step - self.seen.step, round=at.rounds - self.seen.rounds)
        state = state._replace(stats=self._program.reset(state.stats))  # beside the evaluation
        scalars |= self._finish()
        scalars = processes.of_first(files.plain(scalars))  # all processes end, or none
        self.ended = at.step == self._total or self._watch.ends(scalars)
        self.seen = self.seen._replace(
            step=at.step,
            rounds=at.rounds,
            seconds=scalars["seconds"],
            batch_loss=scalars.get("train/batch_loss", self.seen.batch_loss),
            records=self.seen.records + 1,
        )
        online = {"load_steps": np.flatnonzero(at.decided).tolist()} if at.decided else {}
        closing = {"ended": self.ended, "diverged": None} | (online if self.ended else {})
        self._watch.on_record(scalars | closing)
        return state

    def diverged(self, message: str) -> None:
        """Writes the last record of a run whose parameters are no longer finite."""
        nothing = {"step": self._total, "epoch": 0.0, "loads": 0, "rounds": 0, "allreduces": 0.0}
        ending = {"seconds": self.seen.seconds, "ended": True, "diverged": message}
        self.ended = True
        self._watch.on_record(nothing | ending)


class _Saver:
    """Writes the checkpoints of a run. Orbax is opened for the first one."""

    def __init__(self, stack, saving: Saving | None, program, plans: Plans, seconds: float):
        self._stack, self._saving, self._program, self._plans = stack, saving, program, plans
        self._manager, self._seconds = None, seconds

    @property
    def has_saved(self) -> bool:
        return self._manager is not None

    def due(self, step: int, seconds: float) -> bool:
        if self._saving is None or step == self._plans.total_steps:
            return self._saving is not None and self._saving.at_end
        if self._saving.every is None:
            return seconds - self._seconds >= SAVE_SECONDS
        return bool(self._saving.every) and not step % self._saving.every

    def save(self, at: Progress, state: TrainState, seen: Evaluation) -> None:
        if self._saving is None:
            return
        if self._manager is None:
            self._manager = self._stack.enter_context(checkpoint.opened(self._saving.folder))
        about = self._saving.about
        checkpoint.save(self._manager, self._program, self._plans, at, state, seen, about)
        self._seconds = seen.seconds


def _check_finite(stats: StepStats, last_loss: float | None) -> None:
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
