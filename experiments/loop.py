"""One run, step by step: where it stands, how it goes on, and what is seen at a look."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

import local_opt
import ordering
from experiments.clock import Clock
from experiments.loads import front_load, see
from experiments.processes import on_host
from experiments.whole import Program, State

IN_FLIGHT = 16  # steps that the host may run ahead of the devices


class Plans(NamedTuple):
    """The decisions of a run, all of one length T."""

    sync: local_opt.SyncPlan
    echo: ordering.echo.EchoPlan | ordering.echo.online.Measured
    rates: np.ndarray  # float[T], learning rates

    @property
    def total_steps(self) -> int:
        return len(self.rates)

    @property
    def timed(self) -> bool:
        """Whether it depends on time when the run loads."""
        return self.echo.online

    def check(self) -> None:
        """Raises ValueError where the lengths differ, or another process has other plans."""
        for plan in (self.sync, self.echo)[: 1 if self.timed else 2]:
            plan.check_run(self.total_steps)
            local_opt.check_same_plan(plan)
        if self.echo.total_steps != self.total_steps:
            raise ValueError(
                f"the echo policy has {self.echo.total_steps} steps and the run "
                f"{self.total_steps}: make it with the run's total_steps."
            )


class At(NamedTuple):
    """Where a run stands, between two steps."""

    step: int = 0
    loads: int = 0
    rounds: int = 0
    decided: Sequence[bool] = ()  # by `ordering.echo.measured` so far; a list that grows


Visit = Callable[[At, State], State | None]


def steps(program: Program, plans: Plans, state: State, at: At, visit: Visit) -> tuple[At, State]:
    """Trains on from `at` to the end, or until a visit stops the run.

    Args:
      visit: `(at, state) -> state` after every step; None stops. The next step is given the
        state's memory, so a visit copies what it keeps.

    Returns:
      Where the run stands, and its state.
    """
    per_epoch = program.sizes.loads_per_epoch
    rates = np.asarray(plans.rates, np.float32)
    starts, ends = plans.sync.starts, plans.sync.ends
    round_of = plans.sync.round_at(np.arange(len(rates)))
    timed, policy, decided = plans.timed, plans.echo, list(at.decided)
    if timed:
        policy = policy._replace(decided=np.array(decided, bool))
    # The orders move on when the first load of an epoch is asked for, not before: so the batch
    # that an echoed step needs is always one of the current orders.
    epoch, front, sight = max(0, at.loads - 1) // per_epoch, None, None
    first = _first_load(policy, at.step) - epoch * per_epoch
    while at.step < plans.total_steps:
        opened = program.input.open(see(state.orders), first, epoch, front)
        front = None
        with opened as batches:
            for use in ordering.echo.echo_batches(
                batches, policy, first_step=at.step, stop_with_loads=True
            ):
                t, load, around = use.step, use.load - epoch * per_epoch, round_of[use.step]
                unit = np.int32(load * program.sizes.units_per_step)
                step = program.fresh if use.fresh else program.echoed
                state = step(state, use.batch, rates[t], unit, np.int32(t))
                meets = ends[around] == t + 1
                if meets:
                    state = program.meet(state, rates[starts[around]])
                if timed:
                    decided.append(use.fresh)
                if timed or t % IN_FLIGHT == 0:
                    jax.block_until_ready(state)
                at = At(t + 1, use.load + 1, at.rounds + int(meets), decided)
                if sight is not None:  # of an earlier step, which is done by now
                    front, sight = program.input.front(sight, epoch + 1), None
                elif program.input.front and use.fresh and load == front_load(program.sizes):
                    sight = see(state.orders)
                visited = visit(at, state)
                if visited is None:
                    return at, state
                state = visited
        if at.step < plans.total_steps:  # the loads are used up, and this step wants a fresh one
            state = program.next_epoch(state)
            epoch, first, sight = epoch + 1, 0, None
            if timed:
                policy = policy._replace(decided=np.array([*decided, True]))
    return at, state


def _first_load(policy, step):
    if not step:
        return 0
    if policy.online:
        policy = ordering.echo.EchoPlan(policy.decided, "measured")
    return policy.first_load(step)


def resumed(plans: Plans, step: int, decided: Sequence[bool] = ()) -> At:
    """Where a run stands after `step` steps."""
    if not step:
        return At()
    echo = ordering.echo.EchoPlan(decided, "measured") if plans.timed else plans.echo
    rounds = int((plans.sync.ends <= step).sum())
    return At(step, int(echo.loads_before(step)), rounds, decided)


def stop_if_not_finite(state: State, last_loss: float) -> None:
    """Raises FloatingPointError, on all processes, where a worker saw what is not finite."""
    _, step, unit = on_host(state.seen)
    if (step < 0).all():
        return
    worker = int(np.argmin(np.where(step < 0, np.iinfo(np.int32).max, step)))
    name = f"unit {unit[worker]}" if unit[worker] >= 0 else "one unit"
    raise FloatingPointError(
        f"the loss or gradient of {name} of worker {worker} is not finite in step {step[worker]} "
        f"(last mean loss: {last_loss:.6g}). Lower the learning rate or look at that unit."
    )


class Look(NamedTuple):
    """What is carried from look to look, besides the state."""

    step: int = 0
    seconds: float = 0.0  # of training, without looks, checkpoints and compilation
    batch_loss: float = float("nan")


def look(program: Program, plans: Plans, at: At, state: State, before: Look) -> dict:
    """A record of the run where it stands."""
    stop_if_not_finite(state, before.batch_loss)
    sent = at.rounds + program.order_sent(at.loads)
    losses = on_host(state.seen.loss)
    return {
        "step": at.step,
        "epoch": at.loads / program.sizes.loads_per_epoch,
        "loads": at.loads,
        "rounds": at.rounds,
        "sent": sent,  # in all-reduces: by syncs and by the coordination of the orders
        "volume": sent / plans.total_steps,
        "batch_loss": float(losses.mean()) / (at.step - before.step),
        **program.evaluate(state.params),
        **_drift(state),
    }


def _drift(state):
    """How far workers were from their mean at the last sync, where they step on their own."""
    if not isinstance(state.rounds, local_opt.LocalState):
        return {}
    return {"drift": float(on_host(state.rounds.drift).mean())}


class Saving(NamedTuple):
    """What `train` asks after every step."""

    due: Callable[[int], bool] = lambda step: False
    save: Callable[[At, State, Look], None] = lambda at, state, seen: None
    stop: Callable[[int], bool] = lambda step: False  # save, and leave


def train(
    program: Program,
    plans: Plans,
    state: State,
    *,
    evaluations: int,
    on_record: Callable[[dict], None],
    at: At | None = None,
    before: Look | None = None,
    saving: Saving | None = None,
) -> tuple[At, State]:
    """Trains to the end of the plans, or until it is stopped, with a record at every evaluation.

    Args:
      program, plans: what is compiled, and what is decided.
      state, at, before: of the start, or of a checkpoint.
      evaluations: evenly spread over the run.
      on_record: called with every record.
      saving: when to save, how, and when to stop; not at all if None.

    Returns:
      Where the run stands, and its state.

    Raises:
      ValueError: where plans do not fit the run, or differ between processes.
      FloatingPointError: for a loss or gradient that is not finite; names the step and the worker.
    """
    plans.check()
    saving, at, seen = saving or Saving(), at or At(), before or Look()
    looks = set(np.linspace(0, plans.total_steps, evaluations + 1).astype(int)[1:].tolist())
    clock, passed = Clock(), seen.seconds

    def visit(at, state):
        nonlocal seen
        due, stop = saving.due(at.step), saving.stop(at.step)
        if at.step not in looks and not due and not stop:
            return state
        jax.block_until_ready(state)
        with clock.stopped():
            seconds = passed + clock.now()
            if at.step in looks:
                record = look(program, plans, at, state, seen) | {"seconds": seconds}
                seen = Look(at.step, seconds, record["batch_loss"])
                on_record(record)
                state = program.forget(state)
            if due or stop:
                stop_if_not_finite(state, seen.batch_loss)
                saving.save(at, state, seen._replace(seconds=seconds))
        return None if stop else state

    return steps(program, plans, state, at, visit)


def warm_up(program: Program, plans: Plans) -> None:
    """Compiles what a run needs, by a step of each kind, before a clock runs."""
    state, rate, sizes = program.init(0), np.float32(plans.rates[0]), program.sizes
    echoes = plans.timed or plans.echo.loads < plans.total_steps
    kinds = [program.fresh] + [program.echoed] * echoes
    # The last step of an epoch may be shorter, and is another shape.
    for load in {0, sizes.loads_per_epoch - 1 if sizes.num_units % sizes.units_per_step else 0}:
        with program.input.open(see(state.orders), load, 0, None) as batches:
            batch = next(iter(batches))
        for step in kinds:
            state = step(state, batch, rate, np.int32(0), np.int32(0))
    state = program.next_epoch(program.forget(program.meet(state, rate)))
    program.evaluate(state.params)
