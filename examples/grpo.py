"""GRPO whose rollouts are used again in minibatches: 1, 2, 4 and 8 uses, each at its best rate.

    python examples/grpo.py                        # about half a minute on one core

A policy learns to add two digits: it writes the two digits of the sum, and its reward is the share
of digits that are right. A rollout has 16 answers to each of 32 questions. An advantage is a reward
less its group's mean, divided by the group's deviation. A use of a rollout is four updates, one per
minibatch. Five seeds train side by side, so rows are on axis 1. The program prints how many
rollouts it takes until the chance of a right answer, over all hundred questions, is 0.7.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncopate import ordering

SEEDS, QUESTIONS, GROUP, MINIBATCHES, WIDTH, CLIP, ENTROPY = 5, 32, 16, 4, 64, 0.2, 0.1
USES, RATES, TARGET, ROLLOUTS = (1, 2, 4, 8), (0.005, 0.01, 0.02, 0.04), 0.7, 150
PAIRS = np.stack(np.divmod(np.arange(100), 10), -1)
ADAM = optax.inject_hyperparams(optax.adam)(learning_rate=0.0)  # one program for all rates


def log_softmax(params, pairs, digits):
    """Log-probabilities of both digits, [n, 2, 10]; the second depends on the first."""
    hidden = params["a"][pairs[:, 0]] + params["b"][pairs[:, 1]]
    both = jnp.stack([hidden, hidden + params["first"][digits[:, 0]]], 1)
    return jax.nn.log_softmax(jnp.einsum("nkh,khd->nkd", jnp.tanh(both), params["out"]))


def log_probability(log_p, digits):
    return jnp.take_along_axis(log_p, digits[..., None], -1).sum((1, 2))


def sums(pairs):
    return jnp.stack(jnp.divmod(pairs.sum(-1), 10), -1)


@jax.jit
@jax.vmap
def init(key):
    shapes = {"a": (10, WIDTH), "b": (10, WIDTH), "first": (10, WIDTH), "out": (2, WIDTH, 10)}
    keys = dict(zip(shapes, jax.random.split(key, 4), strict=True))
    params = {k: jax.random.normal(keys[k], s) * 0.1 ** (k == "out") for k, s in shapes.items()}
    return params, ADAM.init(params)


@jax.jit
@jax.vmap
def rollout(params, key):
    """Questions, answers, their log-probabilities and advantages."""
    keys = jax.random.split(key, 3)
    pairs = jnp.repeat(jax.random.choice(keys[0], PAIRS, (QUESTIONS,), replace=False), GROUP, 0)
    digits = jnp.zeros_like(pairs)
    for k in range(2):
        drawn = jax.random.categorical(keys[k + 1], log_softmax(params, pairs, digits)[:, k])
        digits = digits.at[:, k].set(drawn)
    rewards = (digits == sums(pairs)).mean(-1).reshape(QUESTIONS, GROUP)
    deviation = rewards.std(1, keepdims=True) + 1e-6
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / deviation).reshape(-1)
    return pairs, digits, log_probability(log_softmax(params, pairs, digits), digits), advantages


@jax.jit
@jax.vmap
def update(params, state, minibatch):
    pairs, digits, old, advantages = minibatch

    def loss(params):
        log_p = log_softmax(params, pairs, digits)
        ratio = jnp.exp(log_probability(log_p, digits) - old)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        entropy = -(jnp.exp(log_p) * log_p).sum((1, 2))
        return -(jnp.minimum(ratio * advantages, clipped * advantages) + ENTROPY * entropy).mean()

    updates, state = ADAM.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, updates), state


@jax.jit
@jax.vmap
def chance(params):
    return jnp.exp(log_probability(log_softmax(params, PAIRS, sums(PAIRS)), sums(PAIRS))).mean()


def train(uses, rate, rollouts=ROLLOUTS):
    """How many rollouts each seed needs until its chance is TARGET; one more than all if never."""
    params, state = init(jax.random.split(jax.random.key(0), SEEDS))
    state.hyperparams["learning_rate"] = jnp.full(SEEDS, rate)
    keys, needed = jax.random.split(jax.random.key(1), (rollouts, SEEDS)), rollouts + 1
    made = (rollout(params, key) for key in keys)  # each by the latest parameters
    options = {"minibatches": MINIBATCHES, "key": jax.random.key(2), "axis": 1}
    batches = ordering.echo.repeat(made, ordering.echo.fixed(uses), **options)
    for minibatch in batches:
        params, state = update(params, state, minibatch)
        if batches.age == uses * MINIBATCHES - 1:  # the last update with this rollout
            reached = jnp.where(chance(params) >= TARGET, batches.load + 1, rollouts + 1)
            needed = np.minimum(needed, reached)
            if needed.max() <= rollouts:
                break
    return needed


def main(all_uses=USES, rates=RATES, rollouts=ROLLOUTS):
    print("| uses |" + "".join(f" rate {r} |" for r in rates) + "\n|" + "---|" * (len(rates) + 1))
    results = {(uses, r): train(uses, r, rollouts) for uses in all_uses for r in rates}
    for uses in all_uses:
        needed = [results[uses, r] for r in rates]
        half = [2.776 * x.std(ddof=1) / SEEDS**0.5 for x in needed]  # Student's t, 4 degrees
        never = [f"{(x > rollouts).sum()} of {SEEDS} not in {rollouts}" for x in needed]
        cells = [
            n if x.max() > rollouts else f"{x.mean():.0f} ± {h:.0f}"
            for x, h, n in zip(needed, half, never, strict=True)
        ]
        print(f"| {uses} | " + " | ".join(cells) + " |")
    return results


if __name__ == "__main__":
    main()
