"""Compares the losses if one of four workers is lost after a third of a run, or none, or earlier.

    python -m benchmarks.lost_worker  # digits and a small GPT, five seeds: two minutes

Each worker has a quarter of the data. Once it is lost, the fourth worker has weight 0 in every
sync, which is then the sync of `local_opt.elastic.ElasticSync` over three. Rates are not tuned.
"""

from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
import models
from experiments.data import TASKS
from experiments.report.statistics import interval

WORKERS, SEEDS, BATCH = 4, 5, 8
THIRD = 1 / 3
ARMS = {"all four": (4, 1.0), "one lost at a third": (4, THIRD), "three throughout": (3, 1.0)}


def digits():
    task = TASKS["digits"](model="mlp")
    return task.model, task.train, task.test, optax.sgd, 0.2, 600


def gpt():
    text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    tokens = np.frombuffer(text, np.uint8)[: 2304 * 33].reshape(-1, 33).astype(np.int32)
    model = models.gpt2(vocab_size=256, context=32, width=32, depth=2, heads=2)
    data = {"x": tokens[:, :-1], "y": tokens[:, 1:]}
    halves = ({k: v[part] for k, v in data.items()} for part in (slice(2048), slice(2048, None)))
    return model, *halves, optax.adam, 3e-3, 300


def run(task, workers, share, seed):
    """(loss on all training data, on test data) of the mean over the workers that live."""
    model, train, test, optimizer, peak, steps = task
    rate = optax.cosine_decay_schedule(peak, steps)
    plan = local_opt.qsr(rate, total_steps=steps, alpha=0.5 * peak, h_base=10)
    rounds = local_opt.local_rounds(optimizer(rate))
    draw, size = np.random.default_rng(seed), len(train["x"]) // WORKERS

    def step(params, state, batch):
        loss = lambda p: jnp.mean(model.loss(p, batch, jax.random.key(0)))  # noqa: E731
        updates, state = rounds.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    def sync(params, state, weight):
        return rounds.sync(params, state, weight=weight)

    specs = {"in_specs": "worker", "out_specs": "worker"}
    step, sync = (jax.jit(local_opt.map_workers(f, workers, **specs)) for f in (step, sync))
    first = model.init(jax.random.key(seed))
    copies = local_opt.replicate((first, rounds.init(first)), workers)
    weight = jnp.ones(workers)
    for t in range(steps):
        if not t * BATCH % size:
            orders = np.stack([draw.permutation(size) + w * size for w in range(WORKERS)])
        at = t * BATCH % size
        rows = orders[:workers, at : at + BATCH]
        copies = step(*copies, {k: v[rows] for k, v in train.items()})
        if t + 1 == int(share * steps):
            weight = weight.at[-1].set(1.0 if share == 1 else 0.0)
        if plan.syncs_after(t):
            copies = sync(*copies, weight)
    last = jax.tree.map(lambda x: x[0], copies[0])
    of = jax.jit(lambda data: jnp.mean(model.loss(last, data, jax.random.key(0))))
    return float(of(train)), float(of(test))


def main():
    print("| task | workers | training loss | test loss |\n|---|---|---|---|")
    for name, load in {"digits": digits, "small GPT": gpt}.items():
        task = load()
        for arm, (workers, share) in ARMS.items():
            losses = np.array([run(task, workers, share, seed) for seed in range(SEEDS)])
            cells = (f"{m:.4f} ± {h:.4f}" for m, h in map(interval, losses.T))
            print(f"| {name} | {arm} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
