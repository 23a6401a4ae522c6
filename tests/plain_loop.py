"""W workers in a loop, one after the other: steps of optax, and NumPy's means where rounds end.

What the compiled ways of `local_opt` are compared with, whatever the optimizer.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from tests import reference

Tree = Any


class Mean(NamedTuple):
    """A sync: what is averaged after a step.

    Attributes:
      groups: of workers that average among themselves; None for all together.
      weights: [W], None for equal ones; a worker with weight 0 gets the mean of the others.
      params: names of leaves, None for all of them.
      state: names of fields of the optimizer's state.
    """

    groups: list[list[int]] | None = None
    weights: np.ndarray | None = None
    params: set[str] | None = None
    state: set[str] = frozenset()

    def __call__(self, t: int, params: list[Tree], states: list[Tree]) -> tuple:
        del t
        return mean(params, self.params, self), mean(states, self.state, self)


EVERYTHING = Mean()


def _names(path):
    return set(jax.tree_util.keystr(path, simple=True, separator=".").split("."))


def mean(trees: list[Tree], chosen: set[str] | None, at: Mean = EVERYTHING) -> list[Tree]:
    """The trees of the workers after a mean of the chosen leaves; the others stay each one's."""
    paths, structure = jax.tree_util.tree_flatten_with_path(trees[0])
    rows = list(map(list, zip(*map(jax.tree.leaves, trees), strict=True)))
    weights = np.ones(len(trees)) if at.weights is None else np.asarray(at.weights, np.float64)
    for (path, _), row in zip(paths, rows, strict=True):
        if chosen is not None and not _names(path) & chosen:
            continue
        for group in at.groups or [range(len(trees))]:
            counted = [w for w in group if weights[w] > 0]
            total = sum(weights[w] * np.asarray(row[w], np.float64) for w in counted)
            of_all = (total / weights[counted].sum()).astype(row[0].dtype)
            for w in group:
                row[w] = of_all
    return [structure.unflatten([row[w] for row in rows]) for w in range(len(trees))]


def plain_loop(
    step: Callable, params: Tree, states: list[Tree], num_steps: int, syncs: dict[int, Callable]
) -> Iterator[tuple[list[Tree], list[Tree]]]:
    """The parameters and the states of all workers after every step.

    Args:
      step: (worker, t, params, state) -> the worker's params and state after its step t.
      params: of all workers at the start.
      states: of each worker's optimizer.
      num_steps: how many.
      syncs: by the step after which they are; (t, params, states) of all -> params, states.
    """
    params = [params] * len(states)
    for t in range(num_steps):
        after = [step(w, t, *each) for w, each in enumerate(zip(params, states, strict=True))]
        params, states = map(list, zip(*after, strict=True))
        if t in syncs:
            params, states = syncs[t](t, params, states)
        yield params, states


def history(*args) -> Tree:
    """The parameters [T, W, ...] of `plain_loop`."""
    steps = [jax.tree.map(lambda *x: np.stack(x), *params) for params, _ in plain_loop(*args)]
    return jax.tree.map(lambda *x: np.stack(x), *steps)


def ends(plan, at: Callable = EVERYTHING) -> dict[int, Callable]:
    """A sync after the last step of every round of a plan."""
    return {t: at for t in range(plan.total_steps) if plan.syncs_after(t)}


# Syncs of papers. All workers' parameters are trees of NumPy.


def each(function: Callable, *trees: Tree) -> Tree:
    """`jax.tree.map`, in float64."""
    return jax.tree.map(lambda *x: function(*(np.asarray(a, np.float64) for a in x)), *trees)


class Outer:
    """A step of momentum on the mean change since the last sync: DiLoCo, SlowMo.

    v <- m v + d / s, a <- a - lr s v, or with Nesterov's a <- a - lr s (d / s + m v).
    """

    def __init__(self, start, rate, momentum, *, nesterov=True, scale=lambda t, period: 1.0):
        self.anchor, self.velocity, self.last = each(np.copy, start), each(np.zeros_like, start), -1
        self.rate, self.momentum, self.nesterov, self.scale = rate, momentum, nesterov, scale

    def __call__(self, t, params, states):
        scale, self.last = self.scale(t, t - self.last), t
        change = each(lambda a, *x: (a - sum(x) / len(x)) / scale, self.anchor, *params)
        self.velocity = each(lambda v, d: self.momentum * v + d, self.velocity, change)
        moves = self.velocity
        if self.nesterov:
            moves = each(lambda v, d: d + self.momentum * v, moves, change)
        self.anchor = each(lambda a, v: a - self.rate * scale * v, self.anchor, moves)
        return [self.anchor] * len(params), states


class Controlled(NamedTuple):
    """What a worker of SCAFFOLD keeps: c_w, c, and the sum of its rates in this round."""

    control: np.ndarray
    common: np.ndarray
    spent: float = 0.0


class Scaffold:
    """Algorithm 1 with option II (Karimireddy et al. 2020), eta_g = 1; states are `Controlled`.

    The change of c is that of the workers that took a step and count; the others' c_w follow it.
    weights: [W] at every sync.
    """

    def __init__(self, start, weights=None):
        self.x, self.weights = np.array(start, np.float64), weights

    def __call__(self, t, params, states):
        shares = np.ones(len(params)) if self.weights is None else np.asarray(self.weights[t])
        took = np.array([state.spent > 0 for state in states])
        change = [
            (self.x - y) / state.spent - state.common if state.spent else 0 * y
            for y, state in zip(params, states, strict=True)
        ]
        of_all = reference.weighted_mean(change, shares * took)
        self.x = reference.weighted_mean(params, shares)
        new = [
            Controlled(s.control + (d if moved else of_all), s.common + of_all)
            for s, d, moved in zip(states, change, took & (shares > 0), strict=True)
        ]
        return [self.x] * len(params), new


def scaffold_step(gradient: Callable, rate_of: Callable) -> Callable:
    """A step of SGD for `Scaffold`; a worker waits where its rate_of(w, t) is 0."""

    def step(w, t, y, state):
        rate = rate_of(w, t)
        y = y - rate * (gradient(w, t, y) - state.control + state.common)
        return y, state._replace(spent=state.spent + rate)

    return step


class Streaming:
    """Algorithm 2 of Streaming DiLoCo (Douillard et al. 2025), called after every step of a run.

    fragments: the places of each; ends: the steps after which each is sent; outer: (rate, momentum)
    of Nesterov; weights [T, W] of the workers in the mean of what is sent after a step, where a
    worker with weight zero keeps nothing. At the end of the run everything is sent and received at
    once, and nobody keeps anything.
    """

    def __init__(self, start, fragments, ends, total, *, delay, mixing, outer, weights=None):
        self.common, self.velocity = np.array(start, np.float64), np.zeros(len(start))
        self.sent, self.weights = [None] * len(fragments), weights
        self.fragments, self.ends, self.total = fragments, ends, total
        self.delay, self.mixing, (self.rate, self.momentum) = delay, mixing, outer

    def __call__(self, t, params, states):
        params, t, last = [np.copy(x) for x in params], t + 1, t + 1 == self.total
        shares = np.ones(len(params)) if self.weights is None else self.weights[t - 1]
        for p, part in enumerate(self.fragments):
            if self.sent[p] is not None and (t == self.sent[p][0] + self.delay or last):
                self.receive(p, params, shares, self.mixing)
            if t in self.ends[p]:
                deltas = [self.common[part] - x[part] for x in params]
                self.sent[p] = t, reference.weighted_mean(deltas, shares)
                if self.delay == 0 or last:
                    self.receive(p, params, shares, 0.0 if last else self.mixing)
        return params, states

    def receive(self, p, params, shares, keep):
        part, delta = self.fragments[p], self.sent[p][1]
        self.velocity[part] = self.momentum * self.velocity[part] + delta
        self.common[part] -= self.rate * (delta + self.momentum * self.velocity[part])
        for x, share in zip(params, shares, strict=True):
            kept = keep if share > 0 else 0.0
            x[part] = kept * x[part] + (1 - kept) * self.common[part]
        self.sent[p] = None
