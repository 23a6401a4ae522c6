"""The loss over simulated seconds of workers that merge by a quorum, for `experiments.quorum`.

Eight workers with a part of digits each take steps of unequal length and fail now and then. The
clock says which merge is when, how many steps each worker has done by then and with which weight it
enters `rounds.sync`. Training is real, the seconds are the clock's.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
from experiments import clocks
from experiments.results import plots, tables
from experiments.results.statistics import intervals
from experiments.study import recipes

WORKERS, PERIOD, BATCH = 8, 16, 8
STEPS = np.linspace(1.0, 1.5, WORKERS)  # seconds of a step of each worker
EVERY, PAUSE = 600.0, 60.0  # seconds of steps between two failures of a worker; of a failure
BUDGET = 3000.0  # seconds of the clock


class Rule(NamedTuple):
    label: str
    least: int
    grace: float = 0.0  # seconds
    partial: bool = False  # whether late workers count with the steps that they have done


RULES = {
    "all": Rule("waiting for all 8", WORKERS),
    "six": Rule("quorum of 6, no grace", 6),
    "one": Rule("quorum of 1, no grace", 1),
    "grace": Rule("quorum of 1, grace 6 s", 1, 6.0),
    "partial": Rule("quorum of 1, late workers by their steps", 1, 0.0, True),
}


def clock_of(rule: Rule, seeds: int) -> clocks.Clock:
    """The merges of rounds of `PERIOD` steps up to the budget and beyond."""
    count = int(BUDGET / (PERIOD * STEPS.min())) + 1
    draw = np.random.default_rng(0)
    failures = clocks.drawn(draw, EVERY, 4 * BUDGET, (seeds, WORKERS))
    work = np.broadcast_to(PERIOD * STEPS, (count, seeds, WORKERS))
    return clocks.run(work, failures, pause=PAUSE, least=rule.least, grace=rule.grace)


@functools.partial(jax.jit, static_argnums=0)
def losses(model, train, shards, steps, weights, rate, key):
    """float32[R]: the training loss after every merge, from int[R, W] steps and [R, W] weights."""
    rounds = local_opt.local_rounds(optax.sgd(rate, momentum=0.9))

    def loss(params, batch):
        return jnp.mean(model.loss(params, batch, key))

    def one_step(params, state, shard, goes, key):  # of one worker
        places = jax.random.randint(key, (BATCH,), 0, len(shard["y"]))
        grads = jax.grad(loss)(params, jax.tree.map(lambda x: x[places], shard))
        updates, after = rounds.update(grads, state, params)
        stepped = optax.apply_updates(params, updates), after
        return jax.tree.map(lambda new, old: jnp.where(goes, new, old), stepped, (params, state))

    def one_round(carry, now):
        steps, weights, key = now

        def body(h, carry):
            keys = jax.random.split(jax.random.fold_in(key, h), WORKERS)
            return jax.vmap(one_step)(*carry, shards, h < steps, keys)

        def sync(params, state, weight):
            return rounds.sync(params, state, weight=weight)

        carry = jax.lax.fori_loop(0, PERIOD, body, carry)
        carry = jax.vmap(sync, axis_name="worker")(*carry, weights)
        return carry, loss(jax.tree.map(lambda x: x[0], carry[0]), train)

    params, state = local_opt.owned((start := model.init(key), rounds.init(start)), WORKERS)
    keys = jax.random.split(key, len(steps))
    return jax.lax.scan(one_round, (params, state), (steps, weights, keys))[1]


def measure(rates: Sequence[float], seeds: int, *, shared: bool = False) -> list[dict]:
    """One record per rule, rate and seed: seconds of the merges, and the loss after each.

    Args:
      shared: whether every worker draws from all examples, and not from its own part.
    """
    task, _ = recipes.load("digits_mlp", None)
    size = len(task.train["y"]) // WORKERS
    owns = 1 if shared else WORKERS  # parts of the examples
    parts = jax.tree.map(lambda x: x[: size * WORKERS].reshape(owns, -1, *x.shape[1:]), task.train)
    shards = jax.tree.map(lambda x: np.broadcast_to(x, (WORKERS, *x.shape[1:])), parts)
    run = jax.vmap(functools.partial(losses, task.model, task.train, shards),
                   in_axes=(1, 1, None, 0))  # fmt: skip
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    found = []
    for name, rule in RULES.items():
        clock = clock_of(rule, seeds)
        steps = np.floor(clock.done * PERIOD + 1e-9).astype(int)
        weights = steps if rule.partial else np.where(clock.done < 1, 0, steps)
        counted = weights.sum((0, 2)) / (clock.seconds[-1] * np.sum(1 / STEPS))
        for rate in rates:
            curves = np.asarray(run(steps, weights, rate, keys))
            found += [
                {"rule": name, "learning_rate": rate, "seed": seed, "counted": counted[seed],
                 "seconds": clock.seconds[:, seed].tolist(), "loss": curve.tolist()}
                for seed, curve in enumerate(curves)
            ]  # fmt: skip
    return found


def at(records: Sequence[Mapping], seconds) -> np.ndarray:
    """float64[n, len(seconds)]: the loss after the last merge by then; nan before the first."""
    known = [np.array([np.nan, *r["loss"]]) for r in records]
    places = [np.searchsorted(r["seconds"], seconds, side="right") for r in records]
    return np.array([loss[place] for loss, place in zip(known, places, strict=True)])


def best(found: Sequence[Mapping]) -> dict[str, list[Mapping]]:
    """The records of each rule at its own best rate: the lowest mean loss when the budget ends."""

    def score(own):
        loss = at(own, [BUDGET]).mean()
        return loss if np.isfinite(loss) else np.inf

    chosen = {}
    for name in RULES:
        own = [r for r in found if r["rule"] == name]
        rates = dict.fromkeys(r["learning_rate"] for r in own)
        tried = [[r for r in own if r["learning_rate"] == rate] for rate in rates]
        chosen[name] = min(tried, key=score)
    return chosen


def table(found: Sequence[Mapping]) -> str:
    """Markdown: a row per rule, at its best rate."""
    rates, rows = sorted({r["learning_rate"] for r in found}), []
    for name, own in best(found).items():
        rate = own[0]["learning_rate"]
        merges = [np.sum(np.array(r["seconds"]) <= BUDGET) for r in own]
        row = {
            "merge": RULES[name].label,
            "at lr": f"{rate:g}" + " (edge)" * (rate in (rates[0], rates[-1])),
            "merges": tables.show(merges, "{:.0f}"),
            "steps that count / %": tables.show([100 * r["counted"] for r in own], "{:.0f}"),
        }
        for share in (1 / 6, 1 / 3, 1):
            seconds = share * BUDGET
            row[f"loss at {seconds:.0f} s"] = tables.show(at(own, [seconds])[:, 0], "{:.4f}")
        rows.append(row)
    return tables.markdown(rows)


def draw(found: Sequence[Mapping], path: str) -> None:
    """Writes a PNG: the training loss over seconds of the clock; intervals are of its logarithm."""
    figure, ((axis,),) = plots.panes(1, 1, (7.5, 5.2))
    grid = np.linspace(0, BUDGET, 301)
    for place, (name, own) in enumerate(best(found).items()):
        mean, half = intervals(np.log(at(own, grid)).T)
        label = f"{RULES[name].label} (lr {own[0]['learning_rate']:g})"
        style = plots.look(place)
        axis.plot(grid, np.exp(mean), **style, label=label)
        band = np.exp(mean - half), np.exp(mean + half)
        axis.fill_between(grid, *band, color=style["color"], alpha=0.2, lw=0)
    axis.set(xlabel="seconds of the simulated clock", ylabel="training loss", yscale="log")
    axis.grid(alpha=0.3)
    plots.legend(figure)
    title = "Digits, MLP, 8 workers of unequal speed that fail"
    plots.save(figure, path, f"{title}\ngeometric mean and its 95 % interval, {len(own)} seeds")
