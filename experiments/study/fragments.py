"""Fragments of the parameters that take turns at the syncs of one plan."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import local_opt
from experiments.training.config import RunConfig
from local_opt.streaming import Event
from syncopate.refusals import UserError


class TurnState(NamedTuple):
    """The state of one worker whose fragments take turns."""

    syncs: Int[Array, ""]  # so far
    stream: Any


def in_turn(inner, *, axis_name, fragments: int, **options) -> local_opt.Rounds:
    """`streaming_rounds` without a delay, as rounds: fragment n mod F is merged at the n-th sync.

    One program serves all plans: a sync computes every fragment's merge, and keeps that of one.
    What the last sync does not merge is averaged where the model is evaluated.

    Args:
      fragments: F; options: of `streaming_rounds`.
    """
    stream = local_opt.streaming_rounds(
        inner, axis_name=axis_name, fragments=fragments, mixing=0.0, **options
    )
    due = [[Event(action, f, False) for action in ("start", "finish")] for f in range(fragments)]

    def init(params):
        return TurnState(jnp.zeros((), jnp.int32), stream.init(params))

    def update(grads, state, params=None, **extra):
        updates, own = stream.update(grads, state.stream, params, **extra)
        return updates, state._replace(stream=own)

    def sync(params, state, **extra):
        del extra
        syncs = state.syncs + 1
        found = [stream.communicate(params, state.stream, events) for events in due]
        choose = lambda *leaves: jax.lax.select_n(syncs % fragments, *leaves)  # noqa: E731
        params, own = jax.tree.map(choose, *found)
        return params, TurnState(syncs, own)

    return local_opt.Rounds(init, update, sync)


def plans_in_turn(plan: Callable, config: RunConfig, fragments: int) -> list[local_opt.SyncPlan]:
    """The plan of every fragment: those of `plan(config, offset=)` whose ends take turns."""
    first = int(plan(config).ends[0])
    plans = [plan(config, offset=f * first // fragments) for f in range(fragments)]
    ends = [one.ends[:-1] for one in plans]  # all end with the run
    whose = np.repeat(np.arange(fragments), [len(own) for own in ends])
    steps = np.concatenate(ends)
    order = np.argsort(steps)
    turns = np.arange(1, len(order) + 1) % fragments
    if len(np.unique(steps)) < len(steps) or (whose[order] != turns).any():
        raise UserError(
            f"{fragments} fragments cannot take turns in rounds of {first} steps and more: raise "
            "--h_base, or leave the fragments out."
        )
    return plans


def union(plans: list[local_opt.SyncPlan]) -> local_opt.SyncPlan:
    """All syncs of these plans."""
    ends = np.unique(np.concatenate([plan.ends for plan in plans]))
    rule = f"{len(plans)} fragments in turn, each: {plans[0].rule}"
    return local_opt.SyncPlan(np.append(0, ends[:-1]), plans[0].total_steps, rule)
