"""Training in rounds: workers step on their own, and meet when the plan says so."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
from experiments import evaluate, processes
from experiments.optimizers import OPTIMIZERS, scale_by_rate
from experiments.round_work import resident_work, streamed_work, worker_step
from experiments.sync_rules import Rule
from experiments.tasks import Task
from local_opt import runners


class Setup(NamedTuple):
    """How a task is trained, whatever the rule."""

    workers: int
    batch_size: int  # per worker and step
    optimizer: str  # a name of OPTIMIZERS
    weight_decay: float
    total_steps: int
    evaluations: int  # evenly spread over the run


class Program(NamedTuple):
    """Everything that does not depend on plan, seed and learning rate: compiled once."""

    init: Callable  # seed -> (params, state), leaves [W, ...]
    feed: Callable  # int32[W, T, B] -> context manager of what `work` takes its examples from
    work: Callable  # steps without a sync
    meet: Callable  # the sync
    evaluate: Callable  # params -> {part: (loss, accuracy)}
    sharding: Any  # of what every worker has its own of


def inner_optimizer(setup: Setup) -> optax.GradientTransformationExtraArgs:
    """The optimizer of one worker; its learning rate comes with every step, as `rate`."""
    return optax.chain(*OPTIMIZERS[setup.optimizer](setup.weight_decay), scale_by_rate())


def build(task: Task, rule: Rule, setup: Setup, mesh: jax.sharding.Mesh | None = None) -> Program:
    """Prepares the two functions of a round: `work` without any collective and without a
    conditional, and `meet`. Arrays are placed on the devices; a source that does not fit there is
    read while the workers work.

    Args:
      task: what to train; half of its test set chooses learning rates, the other half reports.
      rule: whose `rounds` are taken; its plan comes with the run.
      setup: how.
      mesh: one device per worker; None lets the workers of one device take turns.
    """
    steps_run = runners.in_turn if mesh is None else runners.over_mesh(mesh)
    meet_run = runners.simulate if mesh is None else runners.over_mesh(mesh)
    rounds = rule.rounds(inner_optimizer(setup), axis_name=runners.AXIS)
    step = worker_step(task.model, rounds)
    sharding = runners.owned_sharding(mesh)
    if isinstance(task.train, dict):
        feed, work = resident_work(task, step, steps_run, sharding=sharding)
    else:
        own = processes.own_workers(mesh, setup.workers)
        feed, work = streamed_work(task, step, steps_run, sharding=sharding, own=own)

    def meet(params, state, rate):
        return rounds.sync(params, state, rate=rate)

    met = jax.jit(
        meet_run(meet, owned_in=(True, True, False), owned_out=(True, True)), donate_argnums=(0, 1)
    )
    model_init = jax.jit(task.model.init)
    state_init = jax.jit(jax.vmap(rounds.init))

    def init(seed):
        params = model_init(jax.random.fold_in(jax.random.key(seed), 0))
        params = jax.tree.map(lambda p: jnp.stack([p] * setup.workers), params)
        local_opt.check_same_start(params)
        return processes.place((params, state_init(params)), sharding)

    return Program(init, feed, work, met, evaluator(task, setup.batch_size), sharding)


def evaluator(task: Task, batch_size: int, parts=("train", "valid", "test")) -> Callable:
    """`params [W, ...] -> {part: (loss, accuracy)}` of the mean model.

    Valid and test are the halves of the task's test set; the training set is measured on as many
    examples as those have. The moments of normalisation layers are measured on the averaged
    parameters first.
    """
    half = evaluate.size_of(task.test) // 2
    of = {
        "train": (task.train, 0, 2 * half),
        "valid": (task.test, 0, half),
        "test": (task.test, half, 2 * half),
    }
    cut = {part: evaluate.part_of(*of[part]) for part in parts}
    moments = evaluate.moments(task.model, task.train, batch_size)
    measures = evaluate.over_parts(evaluate.loss_and_accuracy(task.model))
    average = jax.jit(local_opt.consolidate)

    def run(params):
        mean = processes.local(average(params))
        statistics = moments(mean)
        return {part: measures(mean, statistics, examples) for part, examples in cut.items()}

    return run


def sample(size: int, setup: Setup, seed: int) -> np.ndarray:
    """int32[W, T, B], the examples of every step: each epoch a fresh shuffle, dealt to all workers.

    Raises:
      ValueError: if the set does not hold one step.
    """
    per_step = setup.workers * setup.batch_size
    if size < per_step:
        raise ValueError(
            f"{size} examples do not fill one step of {setup.workers} workers with "
            f"{setup.batch_size} each: lower --workers or --batch_size."
        )
    generator = np.random.default_rng(seed)
    steps = size // per_step
    epochs = [
        generator.permutation(size)[: steps * per_step].reshape(steps, setup.workers, -1)
        for _ in range(-(-setup.total_steps // steps))
    ]
    dealt = np.concatenate(epochs)[: setup.total_steps]
    return np.ascontiguousarray(dealt.transpose(1, 0, 2), np.int32)


def train(
    task: Task,
    setup: Setup,
    program: Program,
    plan: local_opt.SyncPlan,
    *,
    rates: np.ndarray,
    seed: int,
) -> Iterator[dict]:
    """Trains once by a plan; yields a record at every evaluation.

    Models are only ever looked at as the mean over workers; in the middle of a round the mean is
    a copy and training goes on from the workers' own. Seconds count training alone, not
    compilation (a step and a sync are run and thrown away first) nor evaluation.

    Args:
      rates: float[T], learning rates.

    Raises:
      ValueError: for a plan of another length than the run, or other than another process has.
      FloatingPointError: for a loss that is not finite; names the step and the worker.
    """
    plan.check_run(setup.total_steps)
    local_opt.check_same_plan(plan)
    indices = sample(evaluate.size_of(task.train), setup, seed)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), setup.workers)
    keys = processes.place(keys, program.sharding)
    rates = np.asarray(rates, np.float32)
    on_device = jax.device_put(rates)
    looks = np.unique(np.linspace(0, setup.total_steps, setup.evaluations + 1).astype(int)[1:])
    with program.feed(indices) as fed:
        warm = program.work(*program.init(seed), fed, keys, on_device, 0, 1)
        program.meet(*warm[:2], rates[0])
    params, state = program.init(seed)
    seconds, syncs, last_loss = 0.0, 0, float("nan")
    drifts, losses, steps_seen = [], [], 0
    with program.feed(indices) as fed:
        begin = time.perf_counter()
        for start, end, ends_round in segments(plan, looks):
            params, state, total, bad = program.work(
                params, state, fed, keys, on_device, start, end - start
            )
            losses.append((total, bad))
            steps_seen += end - start
            if ends_round:
                first = plan.starts[plan.round_at(start)]
                params, state = program.meet(params, state, rates[first])
                syncs += 1
                if isinstance(state, local_opt.LocalState):
                    drifts.append(jnp.copy(state.drift))  # the state is donated
            if end in looks:
                jax.block_until_ready((params, state))
                seconds += time.perf_counter() - begin
                last_loss = _mean_loss(losses, steps_seen, last_loss)
                drift = np.mean(processes.stacked_on_host(drifts)) if drifts else None
                found = program.evaluate(params)
                yield {
                    "seed": seed,
                    "step": end,
                    "rounds": syncs,
                    "volume": syncs / setup.total_steps,
                    "seconds": seconds,
                    "batch_loss": last_loss,
                    "train_loss": found["train"][0],
                    "valid_accuracy": found["valid"][1],
                    "test_accuracy": found["test"][1],
                    "drift": None if drift is None else float(drift),  # mean of workers, syncs
                }
                drifts, losses, steps_seen = [], [], 0
                begin = time.perf_counter()


def segments(plan: local_opt.SyncPlan, looks) -> Iterator[tuple[int, int, bool]]:
    """(first step, one past the last, ends in a sync): rounds, cut at evaluations."""
    for start, steps in plan.rounds_from(0):
        cuts = [int(c) for c in looks if start < c < start + steps]
        for begin, end in zip([start, *cuts], [*cuts, start + steps], strict=True):
            yield begin, end, end == start + steps


def _mean_loss(losses: list[tuple[Any, Any]], steps: int, last: float) -> float:
    """Mean loss over all workers' steps; stops the run at one that is not finite."""
    totals, bad = map(processes.stacked_on_host, zip(*losses, strict=True))  # [segments, W]
    if (bad >= 0).any():
        segment = int(np.argmax((bad >= 0).any(axis=1)))
        found = np.where(bad[segment] >= 0, bad[segment], np.iinfo(np.int32).max)
        worker = int(np.argmin(found))
        raise FloatingPointError(
            f"the loss of worker {worker} is not finite in step {found[worker]} (last mean loss: "
            f"{last:.6g}). Lower the learning rate."
        )
    return float(np.sum(totals) / (steps * bad.shape[1]))
