"""Training whose input is slow: workers use batches again, and meet when the arm says so."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
import ordering
from experiments import processes
from experiments.clock import Clock
from experiments.echo_arms import Arm, Setting
from experiments.local_training import evaluator, sample
from experiments.optimizers import OPTIMIZERS, scale_by_rate
from experiments.round_work import worker_step
from experiments.tasks import Task
from local_opt import runners
from ordering.input.loader import on_device

DEPTH = 2  # of the queue of loaded batches
PATIENCE = 60.0  # seconds beyond its delay after which a load counts as hanging


class Setup(NamedTuple):
    """How a task is trained, whatever the arm."""

    workers: int
    batch_size: int  # per worker and step
    optimizer: str  # a name of OPTIMIZERS
    weight_decay: float
    total_steps: int  # at most
    evaluate_every: int  # steps
    metric: str  # "accuracy", or "loss"
    target: float  # of the metric on the test half: the run ends where both halves are there
    proximal: float  # lambda of the proximal arms


class Program(NamedTuple):
    """Everything that depends on neither policy, seed nor learning rate: compiled once."""

    init: Callable  # seed -> (params, state), leaves [W, ...]
    step: Callable  # one step of all workers, without a sync
    meet: Callable  # the sync
    evaluate: Callable  # params -> {"valid": metric, "test": metric}
    mesh: jax.sharding.Mesh | None = None  # of one device per worker


def build(task: Task, arm: Arm, setup: Setup, mesh: jax.sharding.Mesh | None = None) -> Program:
    """The compiled parts of an arm's training.

    Args:
      task, arm, setup: what to train, and how.
      mesh: one device per worker; None lets the workers of one device take turns.
    """
    anchor = ordering.echo.proximal_anchor(arm.proximal * setup.proximal)
    own = OPTIMIZERS[setup.optimizer](setup.weight_decay)
    inner = optax.chain(*[anchor] * bool(arm.proximal), *own, scale_by_rate())
    rounds = arm.rounds(inner, axis_name=runners.AXIS)

    one = worker_step(task.model, rounds)

    def step(params, state, batch, rate, fresh):
        return one(params, state, batch, jax.random.key(0), rate=rate, fresh=fresh)

    def meet(params, state, rate):
        return rounds.sync(params, state, rate=rate)

    steps_run = runners.in_turn if mesh is None else runners.over_mesh(mesh)
    meet_run = runners.simulate if mesh is None else runners.over_mesh(mesh)
    stepped = steps_run(
        step, owned_in=(True, True, True, False, False), owned_out=(True, True, True)
    )
    met = meet_run(meet, owned_in=(True, True, False), owned_out=(True, True))
    model_init, state_init = jax.jit(task.model.init), jax.jit(jax.vmap(rounds.init))
    measures = evaluator(task, setup.batch_size, parts=("valid", "test"))
    which = ("loss", "accuracy").index(setup.metric)

    def init(seed):
        params = model_init(jax.random.fold_in(jax.random.key(seed), 0))
        params = jax.tree.map(lambda p: jnp.stack([p] * setup.workers), params)
        local_opt.check_same_start(params)
        started = params, state_init(params)
        return started if mesh is None else processes.place(started, runners.owned_sharding(mesh))

    return Program(
        init,
        jax.jit(stepped, donate_argnums=(0, 1)),
        jax.jit(met, donate_argnums=(0, 1)),
        lambda params: {part: found[which] for part, found in measures(params).items()},
        mesh,
    )


def reads(task: Task, setup: Setup, seed: int, mesh=None) -> Iterator[dict]:
    """Batches [W, B, ...] of every load: each epoch a fresh shuffle, dealt to all workers.

    On a mesh they are placed on its devices; a process reads the examples of its own workers alone.
    """
    own, sharding = processes.own_workers(mesh, setup.workers), runners.owned_sharding(mesh)
    for indices in sample(len(task.train["y"]), setup, seed).transpose(1, 0, 2):
        batch = {field: values[indices[own]] for field, values in task.train.items()}
        yield batch if mesh is None else processes.place_rows(batch, sharding, setup.workers)


def throttled(batches: Iterator, delay: float, clock: Clock) -> Iterator:
    """The same batches, each `delay` seconds of the clock after it was begun, if not later."""
    while True:
        begun = clock.now()
        try:
            batch = next(batches)
        except StopIteration:
            return
        clock.sleep_until(begun + delay)
        yield batch


def train(
    task: Task,
    setup: Setup,
    program: Program,
    arm: Arm,
    setting: Setting,
    *,
    rate: float,
    seed: int,
    delay: float,
) -> Iterator[dict]:
    """Trains until the target is reached; yields a record at every evaluation.

    Seconds begin with the first load and count training and waiting alone: the clock, and with it
    the input, stands still during evaluations.

    Args:
      rate: learning rate, constant; delay: seconds per load.

    Raises:
      FloatingPointError: for a loss that is not finite; names the step and the worker.
    """
    policy = arm.policy(setting)
    ends = sync_ends(arm, policy, setting)
    shared = jnp.float32(rate), {fresh: jnp.array(fresh) for fresh in (False, True)}
    if program.mesh is not None:  # to where the steps need them, so that none moves them
        shared = processes.place(shared, runners.shared_sharding(program.mesh))
    rate, flags = shared
    first = on_device(next(reads(task, setup, seed, program.mesh)))
    warm = program.step(*program.init(seed), first, rate, flags[True])  # compiles
    program.meet(*warm[:2], rate)
    params, state = program.init(seed)
    record, syncs, seen = [], 0, []
    reached = {"valid": None, "test": None}
    clock = Clock()
    source = throttled(reads(task, setup, seed, program.mesh), delay, clock)
    with ordering.input.load_ahead(source, depth=DEPTH, timeout=PATIENCE + delay) as loader:
        for use in ordering.echo.echo_batches(loader, policy):
            t = use.step
            if ends is None and use.fresh and t:  # only now known: the round has ended
                params, state = program.meet(params, state, rate)
                syncs += 1
            # Proves that an echoed step moves nothing to the device.
            with jax.transfer_guard_host_to_device("allow" if use.fresh else "disallow_explicit"):
                params, state, loss = program.step(params, state, use.batch, rate, flags[use.fresh])
            # Waits for the step, as `measured` needs.
            seen.append(_finite(processes.on_host(loss), t))
            record.append(use.fresh)
            if ends is not None and ends[t]:
                params, state = program.meet(params, state, rate)
                syncs += 1
            last = t + 1 == setup.total_steps
            if not last and (t + 1) % setup.evaluate_every:
                continue
            jax.block_until_ready(params)
            with clock.stopped():
                cost = {"step": t + 1, "loads": sum(record), "rounds": syncs}
                cost |= {"seconds": clock.now()}
                found = processes.of_first(program.evaluate(params))  # all stop, or none
                for part, value in found.items():
                    if reached[part] is None and _at_target(setup, value):
                        reached[part] = cost
                ended = last or None not in reached.values()
                closing = _closing(policy, record, reached) if ended else {}
                yield cost | found | {"batch_loss": float(np.mean(seen)), "ended": ended} | closing
            seen.clear()
            if ended:
                return


def step_seconds(task: Task, setup: Setup, program: Program, arm: Arm) -> float:
    """t_step: the median time of a step of this arm on this machine, where loads have no delay."""
    every = 20
    setup = setup._replace(total_steps=8 * every, evaluate_every=every)
    program = program._replace(evaluate=lambda params: {"valid": np.nan, "test": np.nan})
    setting = Setting(1, setup.total_steps, setup.total_steps, jax.random.key(0))
    run = train(task, setup, program, arm, setting, rate=0.0, seed=0, delay=0.0)
    return float(np.median(np.diff([record["seconds"] for record in run])) / every)


def _closing(policy, record, reached):
    """What the last record of a run adds: the target, and the plan that was carried out."""
    closing = {"reached": reached, "plan": ordering.echo.EchoPlan(record).digest()}
    if policy.online:  # replays the run
        closing["load_steps"] = np.flatnonzero(record).tolist()
    return closing


def sync_ends(arm: Arm, policy, setting: Setting) -> np.ndarray | None:
    """bool[T], the steps after which workers meet; None if only the next load will tell."""
    if arm.sync is not None:
        plan = arm.sync(setting)
    elif not policy.online:
        plan = local_opt.sync_every_load(policy.fresh)
    else:
        return None
    return plan.syncs_after(np.arange(setting.total_steps))


def _at_target(setup, value):
    return value >= setup.target if setup.metric == "accuracy" else value <= setup.target


def _finite(losses, step):
    """The mean loss over workers; stops the run at one that is not finite."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise FloatingPointError(
            f"the loss of worker {bad[0]} is not finite in step {step}: lower the learning rate."
        )
    return float(losses.mean())
