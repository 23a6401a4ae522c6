"""What stays on the device for echoed steps: the last batches, whole or as one pool of examples."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from syncopate import plans


class Buffer(NamedTuple):
    """Three functions of a state that holds batches on the device.

    Fields:
      init: `first_step -> state`.
      add: `(state, load, batch) -> state`, with a fresh batch; drops the oldest.
      use: `(state, step, fresh) -> (load, batch, state)`, without a transfer from the host.
    """

    init: Callable
    add: Callable
    use: Callable


class Held(NamedTuple):
    batches: tuple  # of (load, batch), the last N
    step: Any  # int32[] on the device, or None where nothing needs it


class Pooled(NamedTuple):
    load: int  # the last
    batch: Any  # the last
    pool: Any  # leaves [.., N B, ..]
    filled: Any  # int32[], examples in the pool
    step: Any  # int32[]


def make(size, total_steps, *, rebatch, axis, augment, key) -> Buffer:
    """The buffer that the options of `ordering.echo.echo_batches` ask for.

    Raises:
      ValueError: for a size below 1, or randomness without a key.
    """
    if not plans.is_whole(size) or size < 1:
        raise ValueError(f"buffer_size is {size!r}: pass a whole number of batches, >= 1.")
    if key is None and (size > 1 or rebatch or augment is not None):
        raise ValueError(
            "an echo buffer and an augmentation are random: pass key=jax.random.key(0)."
        )
    if key is not None:
        plans.check_key(key)
    # Choices have a key of their own: the caller's may have drawn the plan, or split in augment.
    choices = None if key is None else jax.random.fold_in(key, 2**32 - 1)  # no step
    if rebatch:
        return _pool(size, axis, augment, key, choices)
    return _whole(size, total_steps, augment, key, choices)


def _whole(size, total_steps, augment, key, choices):
    """Keeps whole batches; which one a step uses is drawn on the host, before the run."""
    drawn = np.zeros(total_steps) if size == 1 else _uniform(choices, total_steps)
    augmented = None if augment is None else _finish(augment)

    def init(first_step):
        return Held((), None if augment is None else jnp.int32(first_step))

    def add(state, load, batch):
        return state._replace(batches=(*state.batches, (load, batch))[-size:])

    def use(state, step, fresh):
        held = state.batches
        load, batch = held[-1 if fresh else int(drawn[step] * len(held))]
        if augmented is None:
            return load, batch, state
        batch, counter = augmented(batch, key, state.step)
        return load, batch, state._replace(step=counter)

    return Buffer(init, add, use)


def _pool(size, axis, augment, key, choices):
    """Keeps examples; an echoed step draws as many as a batch has from all of them."""
    draw = _draw(size, axis, augment)

    def init(first_step):
        return Pooled(-1, None, None, None, jnp.int32(first_step))

    def add(state, load, batch):
        pool = state.pool
        if pool is None:
            # Never the batch itself, which is kept: the pool is donated.
            repeat = jnp.copy if size == 1 else lambda x: jnp.concatenate([x] * size, axis)
            pool = jax.tree.map(repeat, batch)
        shapes = [x.shape for x in jax.tree.leaves(batch)]
        wanted = [x.shape for x in jax.tree.leaves(pool)]
        wanted = [(*s[:axis], s[axis] // size, *s[axis + 1 :]) for s in wanted]
        if shapes != wanted:
            raise ValueError(
                f"the batch of load {load} has leaves {shapes} and those before {wanted}: "
                "re-batching needs equal batches; drop the short last batch of an epoch."
            )
        count = shapes[0][axis]
        filled = jnp.int32(min(load + 1, size) * count)
        return Pooled(load, batch, _put(pool, batch, load % size, axis), filled, state.step)

    def use(state, step, fresh):
        if fresh:
            batch, counter = state.batch, state.step + 1
            if augment is not None:
                batch, counter = _finish(augment)(batch, key, state.step)
        else:
            batch, counter = draw(state.pool, state.filled, choices, key, state.step)
        return state.load, batch, state._replace(step=counter)

    return Buffer(init, add, use)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(pool, batch, position, axis):
    def place(all_examples, examples):
        start = position * examples.shape[axis]
        return jax.lax.dynamic_update_slice_in_dim(all_examples, examples, start, axis)

    return jax.tree.map(place, pool, batch)


# The compiled functions outlive a call of `echo_batches`: there may be one per epoch.
@functools.lru_cache(maxsize=32)
def _finish(augment):
    """`(batch, key, step) -> (batch, step + 1)`, jitted; the counter stays on the device."""

    def run(batch, key, step):
        return augment(batch, jax.random.fold_in(key, step)), step + 1

    return jax.jit(run, donate_argnums=2)


@functools.lru_cache(maxsize=32)
def _draw(size, axis, augment):
    """`(pool, filled, choices, key, step) -> (batch, step + 1)`, jitted."""
    finish = _finish(augment or _unchanged)

    def draw(pool, filled, choices, key, step):
        total = jax.tree.leaves(pool)[0].shape[axis]
        scores = jax.random.uniform(jax.random.fold_in(choices, step), (total,))
        scores = jnp.where(jnp.arange(total) < filled, scores, -1.0)
        chosen = jax.lax.top_k(scores, total // size)[1]
        return finish(jax.tree.map(lambda x: jnp.take(x, chosen, axis), pool), key, step)

    return jax.jit(draw, donate_argnums=4)


def _unchanged(batch, key):
    return batch


def _uniform(key, total_steps):
    return np.asarray(jax.random.uniform(key, (total_steps,), np.float32), np.float64)
