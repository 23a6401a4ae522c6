"""Rollouts that are used several times, by a plan that is known before the run.

    python examples/policy_gradient.py             # every rollout four times, then once

A policy learns to hold a pole upright. Each rollout is used in several updates, which pays where a
rollout costs more than an update, as one that a language model writes; importance ratios, clipped,
correct for the policy having moved on since (PPO without a critic). Which update uses which rollout
is an echo plan: it is known, hashed and the same on every process before the run, also where the
share of new rollouts changes, as by `ordering.echo.error_diffusion(schedule, ...)`.
"""

import jax
import jax.numpy as jnp
import optax

from syncopate import ordering

POLES, TIME, CLIP = 64, 200, 0.2
OPTIMIZER = optax.adam(1e-2)


def moved(state, right):
    """The next position, speed, angle and spin of a cart of 1 kg and a pole of 1 m and 0.1 kg."""
    x, speed, angle, spin = state
    push = (jnp.where(right, 10.0, -10.0) + 0.05 * spin**2 * jnp.sin(angle)) / 1.1
    turn = 9.8 * jnp.sin(angle) - jnp.cos(angle) * push
    turn = turn / (0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    pull = push - 0.05 * turn * jnp.cos(angle) / 1.1
    return state + 0.02 * jnp.array([speed, pull, spin, turn])


def logits(params, states):
    return jnp.tanh(states @ params["in"]) @ params["out"]


@jax.jit
def rollout(params, key):
    """What POLES poles do until they fall: states, actions, their log-probabilities, advantages."""

    def step(carry, key):
        states, up = carry
        chance = logits(params, states)
        right = jax.random.bernoulli(key, jax.nn.sigmoid(chance))
        after = jax.vmap(moved)(states, right)
        still = up & (abs(after[:, 0]) < 2.4) & (abs(after[:, 2]) < 0.21)
        return (after, still), (states, right, log_probability(chance, right), up)

    first = jax.random.uniform(key, (POLES, 4), minval=-0.05, maxval=0.05)
    start = first, jnp.ones(POLES, bool)
    _, (states, right, log_p, up) = jax.lax.scan(step, start, jax.random.split(key, TIME))
    left = jnp.cumsum(up[::-1], axis=0)[::-1]  # steps that the pole still stays up
    weight = up / up.sum()
    return states, right, log_p, weight * (left - (weight * left).sum()), up.sum(0).mean()


def log_probability(chance, right):
    return -jax.nn.softplus(jnp.where(right, -chance, chance))


@jax.jit
def update(params, state, batch):
    states, right, old, advantage, _ = batch

    def loss(params):
        ratio = jnp.exp(log_probability(logits(params, states), right) - old)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        return -jnp.minimum(ratio * advantage, clipped * advantage).sum()

    updates, state = OPTIMIZER.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, updates), state


def train(plan, seed=0):
    """The mean steps that a pole stayed up, of every rollout."""
    keys = jax.random.split(jax.random.key(seed), plan.loads + 1)
    shapes = {"in": (4, 32), "out": (32,)}
    params = {k: jax.random.normal(keys[-1], s) / s[0] ** 0.5 for k, s in shapes.items()}
    state, lengths = OPTIMIZER.init(params), []
    rollouts = (rollout(params, key) for key in keys)  # each by the parameters of its time
    batches = ordering.echo.repeat(rollouts, plan)
    for batch in batches:
        params, state = update(params, state, batch)
        if batches.fresh:
            lengths.append(float(batch[-1]))
    return lengths


def main(rollouts=40, uses=4):
    for times in (uses, 1):
        plan = ordering.echo.fixed(times, total_steps=rollouts * times)
        print(plan)
        lengths = train(plan)
        print("  steps upright, in every eighth rollout:", [round(n) for n in lengths[::8]])
    return lengths


if __name__ == "__main__":
    main()
