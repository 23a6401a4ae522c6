"""What workers do between two syncs, and where their examples come from."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
import ordering
from experiments import processes
from experiments.tasks import Task
from models import Model


def worker_step(model: Model, rounds: local_opt.Rounds) -> Callable:
    """`(params, state, batch, key, **extra) -> (params, state, loss)`, one step of one worker."""

    def step(params, state, batch, key, **extra):
        def mean_loss(params):
            return jnp.mean(model.loss(params, batch, key))

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, state = rounds.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, loss

    return step


def resident_work(
    task: Task, step: Callable, steps_run: Callable, *, sharding=None
) -> tuple[Callable, Callable]:
    """`feed` and `work` of a `Program` whose examples stay on the devices."""
    data = jax.device_put(task.train)

    def work(params, state, indices, key, data, rates, start, steps):
        """`steps` steps of one worker from step `start`; the loop's length is not compiled in."""

        def body(i, carry):
            params, state, total, bad = carry
            t = start + i
            batch = jax.tree.map(lambda x: x[indices[t]], data)
            step_key = jax.random.fold_in(key, t)
            params, state, loss = step(params, state, batch, step_key, rate=rates[t])
            bad = jnp.where((bad < 0) & ~jnp.isfinite(loss), t, bad)
            return params, state, total + loss, bad

        nothing = jnp.zeros(()), jnp.full((), -1, jnp.int32)
        return jax.lax.fori_loop(0, steps, body, (params, state, *nothing))

    owned = (True, True, True, True, False, False, False, False)
    mapped = steps_run(work, owned_in=owned, owned_out=(True,) * 4)
    jitted = jax.jit(mapped, donate_argnums=(0, 1))

    def run_work(params, state, fed, keys, rates, start, steps):
        indices = fed
        return jitted(params, state, indices, keys, data, rates, np.int32(start), np.int32(steps))

    return lambda indices: contextlib.nullcontext(processes.place(indices, sharding)), run_work


def streamed_work(
    task: Task, step: Callable, steps_run: Callable, *, own: Sequence[int], sharding=None
) -> tuple[Callable, Callable]:
    """`feed` and `work` of a `Program` whose examples are read ahead of the steps, on a thread.

    A process reads the examples of its `own` workers alone.
    """

    def one(params, state, total, bad, batch, key, rates, t):
        params, state, loss = step(params, state, batch, jax.random.fold_in(key, t), rate=rates[t])
        bad = jnp.where((bad < 0) & ~jnp.isfinite(loss), t, bad)
        return params, state, total + loss, bad

    owned = (True,) * 6 + (False, False)
    jitted = jax.jit(
        steps_run(one, owned_in=owned, owned_out=(True,) * 4), donate_argnums=(0, 1, 2, 3)
    )

    def run_work(params, state, fed, keys, rates, start, steps):
        total = processes.place(np.zeros(len(keys), np.float32), sharding)
        bad = processes.place(np.full(len(keys), -1, np.int32), sharding)
        for t in range(start, start + steps):
            params, state, total, bad = jitted(
                params, state, total, bad, next(fed), keys, rates, np.int32(t)
            )
        return params, state, total, bad

    def feed(indices):
        batches = read_steps(task.train, indices, own)
        if not processes.several():
            return ordering.input.load_ahead(batches, sharding=sharding)
        placed = (processes.place_rows(batch, sharding, len(indices)) for batch in batches)
        return ordering.input.load_ahead(placed)

    return feed, run_work


def read_steps(source, indices: np.ndarray, own: Sequence[int]) -> Iterator[dict]:
    """Batches [w, B, ...] of every step for `own` workers, out of a random-access source.

    A source with `at_epoch` is asked for every epoch's own view of its examples.
    """
    num_workers, total_steps, batch_size = indices.shape
    steps_per_epoch = len(source) // (num_workers * batch_size)
    at_epoch = getattr(source, "at_epoch", lambda epoch: source)
    for t in range(total_steps):
        if t % steps_per_epoch == 0:
            _, read = ordering.input.reader(at_epoch(t // steps_per_epoch))
        batch = read(indices[own, t].reshape(-1))
        yield jax.tree.map(lambda x: x.reshape((len(own), -1, *x.shape[1:])), batch)
