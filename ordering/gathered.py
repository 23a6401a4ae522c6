"""Coordinated pair balance for short rows: each worker gathers all rows and computes all signs.

Rows of k numbers, such as sketches, are sent whole: k numbers per pair, and nothing else. No sign
is needed before the epoch ends, so pairs can wait until the workers communicate anyway.

Teams of W' workers gather and sign their own pairs in parallel, each with its own running sum.
After every gather, each team's sum is replaced by the mean of the teams' sums.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, PyTree

from ordering import base, signs, trees
from ordering.base import equal_once, shared_key, simulated
from syncopate import mesh, plans

WHEN = ("step", "sync")
WINDOW = 16  # pairs per worker in one gather of waiting pairs
GATHERED = 2**20  # numbers in one gather, 4 MB, if many pairs have waited


class GatheredState(NamedTuple):
    """State of one worker.

    position, left, epoch and, between two calls, running_sum are equal on all workers. rule is
    equal within a team.
    """

    current: Int[Array, "M"]
    next: Int[Array, "M"]
    position: Int[Array, ""]  # units of the current order observed so far
    left: Int[Array, ""]  # pairs signed and placed
    epoch: Int[Array, ""]  # epochs finished
    running_sum: Float32[Array, "k"]
    pending: PyTree  # float32[k], the first half of a pair that two steps share; () where B is even
    waiting: PyTree  # [M // 2, k], the pairs of this epoch; () without gathers="sync"
    rule: PyTree  # state of the sign rule


def gathered_pairs(
    num_units: int,
    units_per_step: int,
    rule: signs.SignRule | None,
    axis_name: str,
    when: str,
    team_size: int | None,
) -> base.Ordering:
    """The order of `cd_grab(gathers=when, team_size=team_size)`."""
    num_units, units_per_step = base.check_units(num_units, units_per_step)
    if when not in WHEN:
        raise ValueError(f"gathers is {when!r}: pass one of {', '.join(WHEN)}, or None.")
    if team_size is not None:
        team_size = plans.check_whole("team_size", team_size, 1, base.MOST_UNITS)
    rule = signs.rule_of(rule)
    pairs = num_units // 2
    waits = when == "sync" and pairs > 0
    splits_pairs = units_per_step % 2 == 1

    def init(key, params):
        size = trees.tree_size(params)
        key_of_rule = jax.random.fold_in(shared_key(key, axis_name), 1)
        if size_of_teams() < mesh.axis_size(axis_name):  # each team draws its own numbers
            team = jax.lax.axis_index(axis_name) // size_of_teams()
            key_of_rule = jax.random.fold_in(key_of_rule, team)
        coins = rule.init(key_of_rule)
        state = GatheredState(
            **base.first_fields(key, num_units, GatheredState),
            running_sum=jnp.zeros(size),
            pending=jnp.zeros(size) if splits_pairs else (),
            waiting=jnp.zeros((pairs, size)) if waits else (),
            rule=coins,
        )
        return mesh.varying_as(state, key)

    def observe(state, gradients):
        base.check_gradients(gradients, num_units, units_per_step)
        units = trees.as_float32(trees.flat(gradients))
        base.check_equal(axis_name, units)
        base.check_shapes(units, state.running_sum, "flattened gradients")
        first = state.position // 2
        pairs_now, end, pending = complete_pairs(state, units)
        state = state._replace(position=end, pending=pending)
        if not pairs_now.shape[0]:
            return state
        number = first + jnp.arange(pairs_now.shape[0])
        valid = (number < pairs) & (2 * number + 1 < end)
        if waits:
            at = jnp.where(valid, number, pairs)  # out of range: dropped
            return state._replace(waiting=state.waiting.at[at].set(pairs_now, mode="drop"))
        return place(state, pairs_now, first, valid)

    def complete_pairs(state, units):
        """(differences [n, k] of the pairs that are complete now, new position, pending)."""
        size = units.shape[0]
        if not splits_pairs:  # the odd unit of a short step has no partner and is not counted
            whole = size // 2 * 2
            return units[0:whole:2] - units[1:whole:2], state.position + whole, state.pending
        waiting, num_pairs = state.position % 2, (size + 1) // 2
        both = base.align_pairs(state.pending, units, waiting=waiting, num_pairs=num_pairs)
        return both[::2] - both[1::2], state.position + size, units[-1]

    def size_of_teams():
        workers = mesh.axis_size(axis_name)
        if workers % (size := team_size or workers):
            raise ValueError(
                f"team_size is {size} and there are {workers} workers: pass a number that divides "
                "them, or None for one team."
            )
        return size

    def place(state, differences, first, valid):
        """Signs the pairs of all workers, from number `first` on, and places this worker's."""
        count, size = differences.shape[0], size_of_teams()

        def of_team(everyone, rule_state, running_sum, is_valid):
            stream = everyone.swapaxes(0, 1).reshape(count * size, -1)
            *new, sign, _ = signs.balance_blocks(
                rule, rule_state, running_sum, stream, valid=jnp.repeat(is_valid, size)
            )
            return *new, sign.reshape(count, size)

        shared = (state.rule, state.running_sum, valid)
        rule_state, running_sum, sign = in_teams(of_team, differences, shared, size, axis_name)
        if size < mesh.axis_size(axis_name):
            running_sum = mesh.varying(jax.lax.pmean(running_sum, axis_name), running_sum)
        sign = sign[:, jax.lax.axis_index(axis_name) % size]
        number = first + jnp.arange(count)
        return state._replace(
            next=base.place_pairs(state, number, valid, sign > 0),
            left=state.left + jnp.sum(valid, dtype=jnp.int32),
            running_sum=running_sum,
            rule=rule_state,
        )

    def sync(state):
        """Signs all waiting pairs, in windows of a fixed size."""
        if not waits:
            return state
        observed = jnp.minimum(state.position // 2, pairs)

        def window(state, size):
            # The last window may begin with pairs that are signed already.
            first = jnp.minimum(state.left, pairs - size)
            number = first + jnp.arange(size)
            valid = (number >= state.left) & (number < observed)
            differences = jax.lax.dynamic_slice_in_dim(state.waiting, first, size)
            return place(state, differences, first, valid)

        state = mesh.varying(state)
        workers = mesh.axis_size(axis_name)
        small = min(WINDOW, pairs)
        large = min(GATHERED // (workers * state.waiting.shape[-1]), pairs)
        # Large windows first: without syncs, many pairs wait at the end of an epoch. Not for teams,
        # which share their sums after every window, so that its size affects the signs.
        if large >= 4 * small and size_of_teams() == workers:
            state = jax.lax.while_loop(
                lambda state: state.left + large <= observed,
                functools.partial(window, size=large),
                state,
            )
        return jax.lax.while_loop(
            lambda state: state.left < observed, functools.partial(window, size=small), state
        )

    def next_epoch(state):
        state = sync(state)
        filled = base.fill_middle(state.next, state.current, state.left, 2 * state.left)
        state = base.begin_epoch(state, filled, "position", "left", "running_sum")
        return state._replace(rule=rule.next_epoch(state.rule))

    order = base.Ordering(init, observe, next_epoch, sync, units_per_step)
    fields = {"pending": splits_pairs, "waiting": waits}
    return base.checked(order, num_units, GatheredState, rule=rule, **fields)


def in_teams(function: Callable, local: Array, shared: tuple, size: int, axis_name: str) -> PyTree:
    """`function([W', *local.shape] of the worker's team, *shared)`; `shared` is equal in a team.

    With simulated workers it runs once per team, not once for each worker.
    """
    workers = mesh.axis_size(axis_name)
    if size == workers:
        return function(jax.lax.all_gather(local, axis_name), *equal_once(shared, axis_name))
    if not simulated(axis_name):
        teams = np.arange(workers).reshape(-1, size).tolist()
        return function(jax.lax.all_gather(local, axis_name, axis_index_groups=teams), *shared)

    def once(x):
        if mesh.is_key(x):
            data = once(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jax.lax.all_gather(x, axis_name)[::size]

    everyone = jax.lax.all_gather(local, axis_name).reshape(-1, size, *local.shape)
    of_teams = jax.vmap(function)(everyone, *jax.tree.map(once, shared))
    team = jax.lax.axis_index(axis_name) // size
    return jax.tree.map(lambda x: x[team], of_teams)
