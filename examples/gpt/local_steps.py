"""plain.py with local steps: workers sync where the Quadratic Synchronization Rule says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from model import Decoder, sequences

from syncopate import local_opt

WORKERS = 4  # simulated; or jax.sharding.Mesh(jax.devices(), ("worker",)), one per device
SPECS = {"in_specs": ("worker", "batch"), "out_specs": ("worker", "mean")}


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
    plan = local_opt.qsr(rate, total_steps=c.steps, alpha=0.01, h_base=4, warmup_steps=c.warmup)
    return local_opt.local_steps(inner, plan)


def loss_fn(params, apply_fn, batch):
    logits = apply_fn(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=0)
@functools.partial(local_opt.map_workers, workers=WORKERS, **SPECS)
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
    state = local_opt.replicate(state, WORKERS)
    losses = []
    for step in range(c.steps):
        batch = train[rng.integers(len(train), size=c.batch_size)]
        state, metrics = train_step(state, batch)
        if step % 50 == 49:
            losses.append(float(metrics["loss"]))
    valid = jnp.asarray(valid)
    return {"valid": float(eval_step(local_opt.mean_over_workers(state), valid)), "losses": losses}


def main(**choices) -> dict:
    return train_and_evaluate(Config(**choices))


if __name__ == "__main__":
    print(main())
