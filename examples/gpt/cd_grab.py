"""plain.py with CD-GraB: every worker visits its sequences in an order that balances gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from model import Decoder, sequences

from syncopate import local_opt, ordering

WORKERS, UNIT = 4, 8  # simulated, or a mesh; a unit is the sequences of a worker in a step
SKETCH = ordering.make_sketch(jax.random.key(1907), size=1024)
ORDER = ordering.cd_grab(2048 // WORKERS // UNIT, gathers="step")
INPUTS, RESULTS = ("replicated", "worker", "worker"), ("replicated", "worker", "mean")


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


@functools.partial(jax.jit, donate_argnums=(0, 1))
@functools.partial(local_opt.map_workers, workers=WORKERS, in_specs=INPUTS, out_specs=RESULTS)
def train_step(state, orders, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
    orders = ORDER.observe(orders, SKETCH(grads)[None])
    grads = jax.lax.pmean(grads, "worker")
    return state.apply_gradients(grads=grads), orders, {"loss": loss}


@jax.jit
def eval_step(state, batch):
    return loss_fn(state.params, state.apply_fn, batch)


def train_and_evaluate(c: Config) -> dict:
    model = Decoder()
    data = sequences(c.length, 2304)
    train, valid = data[:2048], data[2048:]
    params = model.init(jax.random.key(c.seed), train[:1, :-1])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer_of(c))
    specs = {"in_specs": ("key", "replicated"), "out_specs": "worker"}
    init = local_opt.map_workers(ORDER.init, WORKERS, **specs)
    orders = init(jax.random.key(c.seed), jnp.zeros(1024))
    units, losses = train.reshape(WORKERS, -1, UNIT, c.length + 1), []
    for step in range(c.steps):
        place = step % units.shape[1]
        orders = orders if place else jax.vmap(ORDER.next_epoch)(orders)
        batch = units[np.arange(WORKERS), orders.current[:, place]]
        state, orders, metrics = train_step(state, orders, batch)
        if step % 50 == 49:
            losses.append(float(metrics["loss"]))
    valid = jnp.asarray(valid)
    return {"valid": float(eval_step(state, valid)), "losses": losses}


def main(**choices) -> dict:
    return train_and_evaluate(Config(**choices))


if __name__ == "__main__":
    print(main())
