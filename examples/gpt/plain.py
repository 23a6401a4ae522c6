"""A small GPT, trained on bytes of Python's standard library, in parallel on all devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from model import Decoder, sequences


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
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))


def loss_fn(params, apply_fn, batch):
    logits = apply_fn(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}


@jax.jit
def eval_step(state, batch):
    return loss_fn(state.params, state.apply_fn, batch)


def train_and_evaluate(c: Config) -> dict:
    model, rng = Decoder(), np.random.default_rng(c.seed)
    data = sequences(c.length, 2304)
    train, valid = data[:2048], data[2048:]
    params = model.init(jax.random.key(c.seed), train[:1, :-1])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer_of(c))
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    state = jax.device_put(state, jax.NamedSharding(mesh, jax.P()))
    losses = []
    for step in range(c.steps):
        batch = train[rng.integers(len(train), size=c.batch_size)]
        batch = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
        state, metrics = train_step(state, batch)
        if step % 50 == 49:
            losses.append(float(metrics["loss"]))
    valid = jnp.asarray(valid)
    return {"valid": float(eval_step(state, valid)), "losses": losses}


def main(**choices) -> dict:
    return train_and_evaluate(Config(**choices))


if __name__ == "__main__":
    print(main())
