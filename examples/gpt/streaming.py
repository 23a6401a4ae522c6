"""plain.py with Streaming DiLoCo: fragments are averaged in turns, while the next steps run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from model import Decoder, sequences

from syncopate import local_opt

WORKERS, FRAGMENTS, PERIOD, DELAY = 4, 2, 20, 5


@dataclasses.dataclass(frozen=True)
class Config:
    length: int = 64
    batch_size: int = 32
    steps: int = 300
    learning_rate: float = 3e-3
    warmup: int = 30
    seed: int = 0


def optimizer_of(c: Config):
    rate = optax.warmup_cosine_decay_schedule(0.0, c.learning_rate, c.warmup, c.steps)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    outer = optax.sgd(0.7, momentum=0.5, nesterov=True)
    return local_opt.streaming.streaming_rounds(inner, fragments=FRAGMENTS, outer=outer)


def loss_fn(params, apply_fn, batch):
    logits = apply_fn(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}


@functools.partial(jax.jit, donate_argnums=0, static_argnames="due")
@functools.partial(local_opt.map_workers, workers=WORKERS, in_specs="worker", out_specs="worker")
def train_segment(state, batches, *, due):
    """The events that are due and the steps up to the next event: one program overlaps them."""
    params, opt_state = state.tx.communicate(state.params, state.opt_state, due)
    return jax.lax.scan(train_step, state.replace(params=params, opt_state=opt_state), batches)


@jax.jit
def eval_step(state, batch):
    return loss_fn(state.params, state.apply_fn, batch)


def train_and_evaluate(c: Config) -> dict:
    model, rng = Decoder(), np.random.default_rng(c.seed)
    data = sequences(c.length, 2304)
    train, valid = data[:2048], data[2048:]
    params = model.init(jax.random.key(c.seed), train[:1, :-1])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer_of(c))
    state = local_opt.replicate(state, WORKERS)
    turns = {
        f: local_opt.constant(PERIOD, total_steps=c.steps, offset=f * PERIOD // FRAGMENTS)
        for f in range(FRAGMENTS)
    }
    losses = []
    for begin, end, due in local_opt.streaming.stream_segments(turns, delay=DELAY):
        chosen = rng.integers(len(train), size=(end - begin, c.batch_size))
        shape = (len(chosen), WORKERS, c.batch_size // WORKERS, c.length + 1)
        batches = train[chosen].reshape(shape).swapaxes(0, 1)
        state, metrics = train_segment(state, batches, due=due)
        losses.append(metrics["loss"].mean(0))
    losses = np.concatenate(losses)[49::50].tolist()
    valid = jnp.asarray(valid)
    return {"valid": float(eval_step(local_opt.mean_over_workers(state), valid)), "losses": losses}


def main(**choices) -> dict:
    return train_and_evaluate(Config(**choices))


if __name__ == "__main__":
    print(main())
