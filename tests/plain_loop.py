"""W workers in a loop, one after the other: steps of optax, and NumPy's means where rounds end.

What the compiled ways of `local_opt` are compared with, whatever the optimizer.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any


class Mean(NamedTuple):
    """What is averaged after a step.

    Attributes:
      groups: of workers that average among themselves; None for all together.
      weights: [W], None for equal ones; a worker with weight 0 gets the mean of the others.
      params: names of leaves, None for all of them.
      state: names of fields of the optimizer's state.
      outer: an optimizer that steps by the change of the mean since its last step.
    """

    groups: list[list[int]] | None = None
    weights: np.ndarray | None = None
    params: set[str] | None = None
    state: set[str] = frozenset()
    outer: optax.GradientTransformation | None = None


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
    step: Callable, params: Tree, states: list[Tree], num_steps: int, means: dict[int, Mean]
) -> Iterator[tuple[list[Tree], list[Tree]]]:
    """The parameters and the states of all workers after every step.

    Args:
      step: (worker, t, params, state) -> the worker's params and state after its step t.
      params: of all workers at the start.
      states: of each worker's optimizer.
      num_steps: how many.
      means: by the step after which they are taken.
    """
    params, anchor, moved = [params] * len(states), params, None
    for t in range(num_steps):
        after = [step(w, t, *each) for w, each in enumerate(zip(params, states, strict=True))]
        params, states = map(list, zip(*after, strict=True))
        if at := means.get(t):
            params, states = mean(params, at.params, at), mean(states, at.state, at)
        if at and at.outer:
            moved = at.outer.init(anchor) if moved is None else moved
            change = jax.tree.map(lambda a, x: jnp.asarray(a - x), anchor, params[0])
            updates, moved = at.outer.update(change, moved, anchor)
            anchor = optax.apply_updates(anchor, updates)
            params = [anchor] * len(states)
        yield params, states


def history(*args) -> Tree:
    """The parameters [T, W, ...] of `plain_loop`."""
    steps = [jax.tree.map(lambda *x: np.stack(x), *params) for params, _ in plain_loop(*args)]
    return jax.tree.map(lambda *x: np.stack(x), *steps)


def ends(plan, at: Mean = EVERYTHING) -> dict[int, Mean]:
    """A mean after the last step of every round of a plan."""
    return {t: at for t in range(plan.total_steps) if plan.syncs_after(t)}
