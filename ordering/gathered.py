"""Coordinated pair balance for short rows: each worker gathers all rows and computes all signs.

Rows of k numbers, such as sketches, are sent whole: k numbers per pair, and nothing else. No sign
is needed before the epoch ends, so pairs can wait until the workers communicate anyway.

Teams of W' workers gather and sign their own pairs in parallel, each with its own running sum.
After every gather, each team's sum is replaced by the mean of the teams' sums.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, PyTree

from ordering import base, signs, trees
from ordering.base import Ordering
from ordering.pairs import (
    CoordinatedPairs,
    Pairs,
    align_pairs,
    check_equal,
    fill_middle,
    place_pairs,
)
from ordering.shuffles import first_fields
from syncopate import mesh, plans
from syncopate.workers import AXIS, equal_once, shared_key, simulated

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredPairs(Pairs):
    """What `cd_grab` returns if workers gather rows."""

    gathers: str
    team_size: int | None = None
    axis_name: str = AXIS

    def __post_init__(self):
        super().__post_init__()
        if self.gathers not in WHEN:
            raise ValueError(
                f"gathers is {self.gathers!r}: pass one of {', '.join(WHEN)}, or None."
            )
        if self.team_size is not None:
            size = plans.check_whole("team_size", self.team_size, 1, base.MOST_UNITS)
            self._set(team_size=size)

    @property
    def pairs(self) -> int:
        """The pairs of an epoch."""
        return self.num_units // 2

    @property
    def waits(self) -> bool:
        """Whether pairs wait in the state until `sync`."""
        return self.gathers == "sync" and self.pairs > 0

    def check(self, state):
        """The state, if it is one of this order."""
        has = {"pending": self.splits_pairs, "waiting": self.waits}
        return base.check_state(self, state, GatheredState, rule=self.rule, **has)

    def init(self, key, params=None):
        base.check_params(params)
        size = trees.tree_size(params)
        key_of_rule = jax.random.fold_in(shared_key(key, self.axis_name), 1)
        if self.size_of_teams() < mesh.axis_size(self.axis_name):  # each team draws its own numbers
            team = jax.lax.axis_index(self.axis_name) // self.size_of_teams()
            key_of_rule = jax.random.fold_in(key_of_rule, team)
        coins = self.rule.init(key_of_rule)
        state = GatheredState(
            **first_fields(key, self.num_units, GatheredState),
            running_sum=jnp.zeros(size, jnp.float32),
            pending=jnp.zeros(size, jnp.float32) if self.splits_pairs else (),
            waiting=jnp.zeros((self.pairs, size), jnp.float32) if self.waits else (),
            rule=coins,
        )
        return mesh.varying_as(state, key)

    def observe(self, state, gradients):
        state = self.check(state)
        base.check_gradients(gradients, self.num_units, self.units_per_step)
        units = trees.as_float32(trees.flat(gradients))
        check_equal(self.axis_name, units)
        base.check_shapes(units, state.running_sum, "flattened gradients")
        first = state.position // 2
        pairs_now, end, pending = self._complete_pairs(state, units)
        state = state._replace(position=end, pending=pending)
        if not pairs_now.shape[0]:
            return state
        number = first + jnp.arange(pairs_now.shape[0], dtype=jnp.int32)
        valid = (number < self.pairs) & (2 * number + 1 < end)
        if self.waits:
            at = jnp.where(valid, number, self.pairs)  # out of range: dropped
            return state._replace(waiting=state.waiting.at[at].set(pairs_now, mode="drop"))
        return self._place(state, pairs_now, first, valid)

    def _complete_pairs(self, state, units):
        """(differences [n, k] of the pairs that are complete now, new position, pending)."""
        size = units.shape[0]
        if not self.splits_pairs:  # the odd unit of a short step has no partner and is not counted
            whole = size // 2 * 2
            return units[0:whole:2] - units[1:whole:2], state.position + whole, state.pending
        waiting, num_pairs = state.position % 2, (size + 1) // 2
        both = align_pairs(state.pending, units, waiting=waiting, num_pairs=num_pairs)
        return both[::2] - both[1::2], state.position + size, units[-1]

    def size_of_teams(self):
        workers = mesh.axis_size(self.axis_name)
        if workers % (size := self.team_size or workers):
            raise ValueError(
                f"team_size is {size} and there are {workers} workers: pass a number that divides "
                "them, or None for one team."
            )
        return size

    def _place(self, state, differences, first, valid):
        """Signs the pairs of all workers, from number `first` on, and places this worker's."""
        count, size = differences.shape[0], self.size_of_teams()

        def of_team(everyone, rule_state, running_sum, is_valid):
            stream = everyone.swapaxes(0, 1).reshape(count * size, -1)
            *new, sign, _ = signs.balance_blocks(
                self.rule, rule_state, running_sum, stream, valid=jnp.repeat(is_valid, size)
            )
            return *new, sign.reshape(count, size)

        shared = (state.rule, state.running_sum, valid)
        rule_state, running_sum, sign = in_teams(of_team, differences, shared, size, self.axis_name)
        if size < mesh.axis_size(self.axis_name):
            running_sum = mesh.varying(jax.lax.pmean(running_sum, self.axis_name), running_sum)
        sign = sign[:, jax.lax.axis_index(self.axis_name) % size]
        number = first + jnp.arange(count, dtype=jnp.int32)
        return state._replace(
            next=place_pairs(state, number, valid, sign > 0),
            left=state.left + jnp.sum(valid, dtype=jnp.int32),
            running_sum=running_sum,
            rule=rule_state,
        )

    def sync(self, state):
        """Signs all waiting pairs, in windows of a fixed size."""
        state = self.check(state)
        if not self.waits:
            return state
        observed = jnp.minimum(state.position // 2, self.pairs)

        def window(state, size):
            # The last window may begin with pairs that are signed already.
            first = jnp.minimum(state.left, self.pairs - size)
            number = first + jnp.arange(size, dtype=jnp.int32)
            valid = (number >= state.left) & (number < observed)
            differences = jax.lax.dynamic_slice_in_dim(state.waiting, first, size)
            return self._place(state, differences, first, valid)

        state = mesh.varying(state)
        workers = mesh.axis_size(self.axis_name)
        small = min(WINDOW, self.pairs)
        large = min(GATHERED // (workers * state.waiting.shape[-1]), self.pairs)
        # Large windows first: without syncs, many pairs wait at the end of an epoch. Not for teams,
        # which share their sums after every window, so that its size affects the signs.
        if large >= 4 * small and self.size_of_teams() == workers:
            state = jax.lax.while_loop(
                lambda state: state.left + large <= observed,
                functools.partial(window, size=large),
                state,
            )
        return jax.lax.while_loop(
            lambda state: state.left < observed, functools.partial(window, size=small), state
        )

    def next_epoch(self, state):
        state = self.sync(state)
        filled = fill_middle(state.next, state.current, state.left, 2 * state.left)
        state = base.begin_epoch(state, filled, "position", "left", "running_sum")
        return state._replace(rule=self.rule.next_epoch(state.rule))

    def resize(self, state, fresh, current, visited):
        new = super().resize(state, fresh, current, visited)
        return new._replace(left=new.position // 2)


def cd_grab(
    num_units: int,
    *,
    units_per_step: int = 1,
    axis_name: str = AXIS,
    rule: signs.SignRule | None = None,
    gathers: str | None = None,
    team_size: int | None = None,
) -> Ordering:
    """CD-GraB: PairBalance with one running sum for all workers.

    For the k-th pair (a, b) of every worker, one worker after the other, s = sign(<r, g_a - g_b>)
    with the common r, and r += s (g_a - g_b). The pair is placed in the worker's own next order.
    This equals `pair_balance` on the interleaved units of all workers. Units stay with their
    workers.

    Call it under a named axis (`jax.vmap`, `jax.shard_map` or `local_opt.map_workers`). Workers
    exchange their gradients in slices of D / W entries, so that r and the pending gradients are
    sharded over them. With an even B they send pair differences, with an odd B the gradients.

    It is better to gather short rows, such as those of `ordering.sketched_grads`. With `gathers`,
    workers send each other their sketches of k numbers, and each computes all signs. With "sync",
    the pairs wait in the state, float32[M // 2, k], until workers communicate anyway; the orders
    are the same.

    With hundreds of workers, computing all signs takes time. `team_size` splits the workers into
    teams of W' consecutive workers, which sign only their own pairs, each with its own sum. After
    every gather, all teams continue with the mean of their sums. The herding bound grows
    (docs/results/orders.md). Randomised rules draw the same numbers on all workers of a team.

    Args:
      num_units: M >= 1, units of each worker.
      units_per_step: B in [1, M], as in `pair_balance`.
      axis_name: the workers' axis.
      rule: the sign rule; None for the sign that makes the sum smaller, as in the equation.
      gathers: None to exchange slices of gradients; "step" to gather whole rows in every step;
        "sync" to gather them where `Ordering.sync` is called, and at the end of the epoch.
      team_size: W' >= 1, a divisor of W, with `gathers`; None for one team of all workers. "sync"
        gathers 16 pairs of each worker at a time, after which teams average their sums.

    Returns:
      An `Ordering` with `PairBalanceState`, or with `GatheredState` if `gathers` is given.

    Raises:
      ValueError: at construction if team_size is given without gathers. While tracing, if the axis
        is not in scope or team_size does not divide it. Also if the mesh has other axes, over which
        devices of a worker might differ (docs/use/meshes.md).

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> order = ordering.cd_grab(4, units_per_step=2)
      >>> keys = jax.random.split(jax.random.key(0), 8)  # 8 workers on one device
      >>> init = jax.vmap(lambda key: order.init(key, jnp.zeros(3)), axis_name="worker")
      >>> init(keys).current.shape
      (8, 4)

    References:
      Cooper et al., Coordinating Distributed Example Orders for Provably Accelerated Training,
      2023, https://arxiv.org/abs/2302.00845
    """
    options = {"num_units": num_units, "units_per_step": units_per_step, "axis_name": axis_name}
    if gathers is not None:
        return GatheredPairs(**options, rule=rule, gathers=gathers, team_size=team_size)
    if team_size is not None:
        raise ValueError(
            f"team_size is {team_size!r} without gathers, where all workers exchange slices of "
            'gradients: pass gathers="step" or "sync", for sketches, or leave team_size out.'
        )
    return CoordinatedPairs(**options, rule=rule)


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
