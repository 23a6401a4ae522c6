"""Training in rounds: workers step on their own, and meet when the plan says so."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
from experiments import evaluate
from experiments.sync_rules import Rule
from experiments.tasks import Task
from local_opt import runners

STATISTICS_BATCHES = 16  # of training data, behind the moments of a normalisation layer


class Setup(NamedTuple):
    """How a task is trained, whatever the rule."""

    workers: int
    batch_size: int  # per worker and step
    optimizer: str  # a name of OPTIMIZERS
    weight_decay: float
    total_steps: int
    evaluations: int  # evenly spread over the run


# Everything of an optimizer but its learning rate, which comes with every step.
OPTIMIZERS = {
    "momentum": lambda decay: (optax.add_decayed_weights(decay), optax.trace(0.9)),
    "adamw": lambda decay: (optax.scale_by_adam(), optax.add_decayed_weights(decay)),
}


def scale_by_rate() -> optax.GradientTransformationExtraArgs:
    """u <- -rate u with the extra argument `rate`: one compiled step serves all schedules."""

    def update(updates, state, params=None, *, rate, **extra):
        del params, extra
        return jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


class Program(NamedTuple):
    """Everything that does not depend on plan, seed and learning rate: compiled once."""

    init: Callable  # seed -> (params, state), leaves [W, ...]
    work: Callable  # steps without a sync
    meet: Callable  # the sync
    evaluate: Callable  # params -> {part: (loss, accuracy)}


def build(task: Task, rule: Rule, setup: Setup, mesh: jax.sharding.Mesh | None = None) -> Program:
    """Places the data and prepares the two functions of a round: `work` without any collective
    and without a conditional, and `meet`.

    Args:
      task: what to train; half of its test set chooses learning rates, the other half reports.
      rule: whose `rounds` are taken; its plan comes with the run.
      setup: how.
      mesh: one device per worker; None lets the workers of one device take turns.
    """
    steps_run = runners.in_turn if mesh is None else runners.over_mesh(mesh)
    meet_run = runners.simulate if mesh is None else runners.over_mesh(mesh)
    inner = optax.chain(*OPTIMIZERS[setup.optimizer](setup.weight_decay), scale_by_rate())
    rounds = rule.rounds(inner, axis_name=runners.AXIS)
    data = jax.device_put(task.train)

    def work(params, state, indices, key, data, rates, start, steps):
        """`steps` steps of one worker from step `start`; the loop's length is not compiled in."""

        def step(i, carry):
            params, state, total, bad = carry
            t = start + i
            batch = jax.tree.map(lambda x: x[indices[t]], data)

            def mean_loss(params):
                return jnp.mean(task.model.loss(params, batch, jax.random.fold_in(key, t)))

            loss, grads = jax.value_and_grad(mean_loss)(params)
            updates, state = rounds.update(grads, state, params, rate=rates[t])
            params = optax.apply_updates(params, updates)
            bad = jnp.where((bad < 0) & ~jnp.isfinite(loss), t, bad)
            return params, state, total + loss, bad

        nothing = jnp.zeros(()), jnp.full((), -1, jnp.int32)
        return jax.lax.fori_loop(0, steps, step, (params, state, *nothing))

    def meet(params, state, rate):
        return rounds.sync(params, state, rate=rate)

    owned = (True, True, True, True, False, False, False, False)
    mapped = steps_run(work, owned_in=owned, owned_out=(True,) * 4)
    jitted = jax.jit(mapped, donate_argnums=(0, 1))
    met = jax.jit(
        meet_run(meet, owned_in=(True, True, False), owned_out=(True, True)), donate_argnums=(0, 1)
    )
    model_init = jax.jit(task.model.init)
    state_init = jax.jit(jax.vmap(rounds.init))
    sharding = runners.owned_sharding(mesh)

    def init(seed):
        params = model_init(jax.random.fold_in(jax.random.key(seed), 0))
        params = jax.tree.map(lambda p: jnp.stack([p] * setup.workers), params)
        local_opt.check_same_start(params)
        return jax.device_put(params, sharding), jax.device_put(state_init(params), sharding)

    def run_work(params, state, indices, keys, rates, start, steps):
        return jitted(params, state, indices, keys, data, rates, np.int32(start), np.int32(steps))

    return Program(init, run_work, met, evaluator(task, setup.batch_size))


def evaluator(task: Task, batch_size: int, parts=("train", "valid", "test")) -> Callable:
    """`params [W, ...] -> {part: (loss, accuracy)}` of the mean model.

    Valid and test are the halves of the task's test set. The moments of normalisation layers are
    measured on the averaged parameters first.
    """
    half = len(task.test["y"]) // 2
    cut = {
        "train": jax.tree.map(lambda x: x[: 2 * half], task.train),
        "valid": jax.tree.map(lambda x: x[:half], task.test),
        "test": jax.tree.map(lambda x: x[half:], task.test),
    }
    cut = jax.device_put({part: cut[part] for part in parts})
    count = min(STATISTICS_BATCHES, len(task.train["y"]) // batch_size)
    used = task.train["x"][: count * batch_size]
    batches = jax.device_put(used.reshape(count, batch_size, *used.shape[1:]))
    measures = evaluate.loss_and_accuracy(task.model)

    @jax.jit
    def moments(params):
        mean = local_opt.consolidate(params)
        if task.model.statistics is None:
            return mean, None
        return mean, local_opt.reestimate(task.model.statistics, mean, batches)

    def run(params):
        mean, statistics = moments(params)
        found = {part: measures(mean, statistics, examples) for part, examples in cut.items()}
        return {part: (float(loss), float(share)) for part, (loss, share) in found.items()}

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
    compilation (a round without steps is run and thrown away first) nor evaluation.

    Args:
      rates: float[T], learning rates.

    Raises:
      ValueError: for a plan of another length than the run, or other than another process has.
      FloatingPointError: for a loss that is not finite; names the step and the worker.
    """
    plan.check_run(setup.total_steps)
    local_opt.check_same_plan(plan)
    indices = jax.device_put(sample(len(task.train["y"]), setup, seed))
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), setup.workers)
    rates = np.asarray(rates, np.float32)
    on_device = jax.device_put(rates)
    warm = program.work(*program.init(seed), indices, keys, on_device, 0, 0)
    program.meet(*warm[:2], rates[0])
    params, state = program.init(seed)
    looks = np.unique(np.linspace(0, setup.total_steps, setup.evaluations + 1).astype(int)[1:])
    seconds, syncs, last_loss = 0.0, 0, float("nan")
    begin = time.perf_counter()
    drifts, losses, steps_seen = [], [], 0
    for start, end, ends_round in segments(plan, looks):
        params, state, total, bad = program.work(
            params, state, indices, keys, on_device, start, end - start
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
            last_loss = _mean_loss(jax.device_get(losses), steps_seen, last_loss)
            drift = np.mean(jax.device_get(drifts)) if drifts else None
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
    bad = np.array([b for _, b in losses])  # [segments, W]
    if (bad >= 0).any():
        segment = int(np.argmax((bad >= 0).any(axis=1)))
        found = np.where(bad[segment] >= 0, bad[segment], np.iinfo(np.int32).max)
        worker = int(np.argmin(found))
        raise FloatingPointError(
            f"the loss of worker {worker} is not finite in step {found[worker]} (last mean loss: "
            f"{last:.6g}). Lower the learning rate."
        )
    return float(np.sum([t for t, _ in losses]) / (steps * bad.shape[1]))
