"""PairBalance, for one worker or coordinated over all (CD-GraB): signs of pair differences.

Between workers, one all-to-all moves n gradients of D entries from each of W workers. Every device
then holds D / W entries of all n W gradients, and a psum completes the inner products of these
parts. It sends as much as the first half of an all-reduce.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ordering import base, signs, trees
from ordering.base import Ordering, equal_once, shared_key, simulated
from ordering.gathered import gathered_pairs
from ordering.trees import LANES
from syncopate import mesh


class PairBalanceState(NamedTuple):
    """State of one worker. If coordinated, each device has a slice of running_sum and pending."""

    current: Int[Array, "M"]
    next: Int[Array, "M"]
    position: Int[Array, ""]  # units of the current order observed so far (even B: paired ones)
    epoch: Int[Array, ""]  # epochs finished
    running_sum: PyTree  # float32, like a gradient; coordinated: float32[slice_size(D, W)]
    pending: PyTree  # the first half of a pair that two steps share; () where B is even
    rule: PyTree  # state of the sign rule

    @property
    def left(self) -> Int[Array, ""]:
        """Pairs placed so far: `next[:left]` is final."""
        # Surplus units are counted in the position and never placed.
        return jnp.minimum(self.position, self.current.shape[-1]) // 2


@base.made_once
def pair_balance(
    num_units: int, *, units_per_step: int = 1, rule: signs.SignRule | None = None
) -> Ordering:
    """PairBalance for one worker: GraB on differences of gradients, which need no mean.

    For the k-th pair (a, b) of the current order, with r = 0 at the start of every epoch,
    s = sign(<r, g_a - g_b>) and r += s (g_a - g_b). Then next[k], next[M - 1 - k] = a, b if s is +,
    else b, a. It works from the first epoch on.

    If M is odd, the last unit is not compared and lands in the middle of the next order. If an
    epoch is cut short, the units that were not observed keep their order in the middle. Pairs that
    are not finite get a plus, and are not added to r.

    Args:
      num_units: M >= 1, units of this worker.
      units_per_step: B in [1, M], units of one step; the last step of an epoch has the rest.
      rule: the sign rule; None for the sign that makes the sum smaller, as in the equation.

    Returns:
      An `Ordering` with `PairBalanceState`.

    Raises:
      ValueError: at construction if sizes are out of range; while tracing if the number of
        gradients is not that of a step.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> order = ordering.pair_balance(4, units_per_step=2)
      >>> state = order.init(jax.random.key(0), params=jnp.zeros(3))
      >>> for start in (0, 2):
      ...     units = state.current[start:start + 2]
      ...     state = order.observe(state, jnp.eye(4, 3)[units])
      >>> sorted(order.next_epoch(state).current.tolist())
      [0, 1, 2, 3]

    References:
      Lu, Guo, De Sa, GraB: Finding Provably Better Data Permutations than Random Reshuffling,
      2022, https://arxiv.org/abs/2205.10733
    """
    return _pair_balance(num_units, units_per_step, rule, None, coordinated=False)


@base.made_once
def cd_grab(
    num_units: int,
    *,
    units_per_step: int = 1,
    axis_name: str | None = "worker",
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
      axis_name: the workers' axis; None for the only named axis in scope.
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
    if axis_name is None:
        options = {"units_per_step": units_per_step, "gathers": gathers, "team_size": team_size}
        return base.of_only_axis(
            lambda axis: cd_grab(num_units, axis_name=axis, rule=rule, **options)
        )
    if gathers is not None:
        return gathered_pairs(num_units, units_per_step, rule, axis_name, gathers, team_size)
    if team_size is not None:
        raise ValueError(
            f"team_size is {team_size!r} without gathers, where all workers exchange slices of "
            'gradients: pass gathers="step" or "sync", for sketches, or leave team_size out.'
        )
    return _pair_balance(num_units, units_per_step, rule, axis_name, coordinated=True)


def _pair_balance(num_units, units_per_step, rule, axis_name, *, coordinated) -> Ordering:
    num_units, units_per_step = base.check_units(num_units, units_per_step)
    rule = signs.rule_of(rule)
    splits_pairs = units_per_step % 2 == 1
    subtract = partial(jax.tree.map, trees.subtract)  # one pair, leaves [2, ...]
    derive = (lambda vector: vector) if coordinated or splits_pairs else subtract

    def init(key, params):
        fields = base.first_fields(key, num_units, PairBalanceState)
        like, workers = params, 1
        if coordinated:
            workers = mesh.axis_size(axis_name)
            like = jnp.zeros(slice_size(trees.tree_size(params), workers))
            key = shared_key(key, axis_name)
        state = PairBalanceState(
            **fields,
            running_sum=trees.zeros_like(like),
            pending=trees.zeros_like(like, (workers,)) if splits_pairs else (),
            rule=rule.init(jax.random.fold_in(key, 1)),
        )
        return mesh.varying_as(state, state.current)

    def observe(state, gradients):
        if coordinated:
            base.check_equal(axis_name)
        if not coordinated or not simulated(axis_name):
            return observe_held(state, gradients, mesh.names_of(axis_name))
        # One device simulates all workers, so it signs whole gradients once, not slices.
        workers, count = mesh.axis_size(axis_name), trees.check_gradients(gradients)
        entries, size = trees.tree_size(gradients) // count, state.running_sum.shape[0]
        like = jax.ShapeDtypeStruct((1, slice_size(entries, workers)), jnp.float32)
        base.check_shapes(like, state.running_sum, "slices of gradients")
        of_sums = state.running_sum, state.pending
        running_sum, pending = jax.tree.map(lambda x: joined(x, entries, axis_name), of_sums)
        position, rule_state = equal_once((state.position, state.rule), axis_name)
        whole = state._replace(
            position=position, running_sum=running_sum, pending=pending, rule=rule_state
        )
        new = observe_held(whole, gradients, ())
        of_sums = new.running_sum, new.pending
        running_sum, pending = jax.tree.map(lambda x: slice_of_worker(x, size, axis_name), of_sums)
        return new._replace(running_sum=running_sum, pending=pending)

    def observe_held(state, gradients, summed):
        """`observe`, with products summed over these axes."""
        workers = mesh.axis_size(axis_name) if coordinated else 1
        size = base.check_gradients(gradients, num_units, units_per_step)
        num_pairs = (size + splits_pairs) // 2
        # With an even B the odd unit of a short step has no partner. It is not counted: two such
        # steps would count as a pair that was never placed.
        end = state.position + (size if splits_pairs else 2 * num_pairs)
        if num_pairs == 0:
            return state._replace(position=end)
        pair = state.left + jnp.arange(num_pairs)
        valid = (pair < num_units // 2) & (2 * pair + 1 < end)
        pending, vectors = complete_pairs(state, gradients, num_pairs, workers)
        rule_state, running_sum, sign, _ = signs.balance_blocks(
            rule,
            state.rule,
            state.running_sum,
            vectors,
            derive=derive,
            valid=jnp.repeat(valid, workers),
            axes=summed,
        )
        if coordinated:
            sign = sign.reshape(num_pairs, workers)[:, jax.lax.axis_index(axis_name)]
        state = state._replace(
            position=end, running_sum=running_sum, pending=pending, rule=rule_state
        )
        return state._replace(next=base.place_pairs(state, pair, valid, sign > 0))

    def complete_pairs(state, tree, num_pairs, workers):
        """(pending, the inputs of `derive` for all complete pairs, worker after worker)."""
        if coordinated:  # differences are half as many; pairs of two steps need the gradients
            tree = exchange(tree if splits_pairs else trees.differences(tree), axis_name)
        what = "slices of gradients" if coordinated else "gradients"
        base.check_shapes(tree, state.running_sum, what)
        if not splits_pairs:
            pairs = lambda g: g if coordinated else trees.split_pairs(g, num_pairs)  # noqa: E731
            return (), jax.tree.map(pairs, tree)
        units = jax.tree.map(lambda g: g.reshape((-1, workers, *g.shape[1:])), tree)
        if units_per_step == 1:  # in every second step no pair is complete; its sign is not used
            pending = jax.tree.map(lambda g: trees.as_float32(g[0]), units)
            return pending, jax.tree.map(jnp.subtract, state.pending, pending)
        pending = jax.tree.map(lambda g: trees.as_float32(g[-1]), units)
        align = partial(base.align_pairs, waiting=state.position % 2, num_pairs=num_pairs)
        units = jax.tree.map(align, state.pending, units)

        def differences(g):
            rows = trees.subtract_pairs(trees.split_pairs(g, num_pairs))
            return rows.reshape((num_pairs * workers, *g.shape[2:]))

        return pending, jax.tree.map(differences, units)

    def next_epoch(state):
        placed = 2 * state.left  # the unit that waits for a partner is not placed
        filled = base.fill_middle(state.next, state.current, state.left, placed)
        state = base.begin_epoch(state, filled, "position", "running_sum")
        return state._replace(rule=rule.next_epoch(state.rule))

    order = Ordering(init, observe, next_epoch, units_per_step=units_per_step)
    return base.checked(order, num_units, PairBalanceState, rule=rule, pending=splits_pairs)


def slice_size(entries: int, workers: int) -> int:
    """How many of a gradient's D entries one of W devices holds after an exchange: D / W, or more.

    From 128 on it is rounded up to a multiple of 128, since a TPU turns other gathers into an
    all-reduce.
    """
    size = -(-entries // workers)
    return size if size < LANES else -(-size // LANES) * LANES


def joined(slices: Array, entries: int, axis_name: str) -> Array:
    """Simulated workers' slices [..., `slice_size`] as one array [..., D], not batched."""
    return jax.lax.all_gather(slices, axis_name, axis=slices.ndim - 1, tiled=True)[..., :entries]


def slice_of_worker(array: Array, size: int, axis_name: str) -> Array:
    """This worker's slice of what `joined` put together."""
    missing = size * mesh.axis_size(axis_name) - array.shape[-1]
    padded = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])
    start = jax.lax.axis_index(axis_name) * size
    return jax.lax.dynamic_slice_in_dim(padded, start, size, axis=array.ndim - 1)


def exchange(gradients: PyTree, axis_name: str) -> Array:
    """From n units on each worker, this device's slice of all n W gradients: [n W, `slice_size`].

    Unit 1 of every worker comes first, then unit 2 of every worker, and so on, as `cd_grab` signs
    them. Inner products of slices are partial; a psum over the axis completes them. With simulated
    workers, the one device holds the whole gradients, [n W, D].
    """
    workers, leaves = mesh.axis_size(axis_name), jax.tree.leaves(gradients)
    count = len(leaves[0])
    leaves = [leaf.reshape(count, -1) for leaf in leaves]
    if simulated(axis_name):
        everyone = jax.lax.all_gather(jnp.concatenate(leaves, axis=1), axis_name)
        return everyone.swapaxes(0, 1).reshape(count * workers, -1)
    entries = sum(leaf.shape[1] for leaf in leaves)
    size = slice_size(entries, workers)
    zeros = jnp.zeros((count, size * workers - entries), jnp.result_type(*leaves))
    if count == 1:  # avoids a matrix of one row, which a TPU would pad to eight
        parts = jnp.concatenate([leaf[0] for leaf in (*leaves, zeros)]).reshape(workers, size)
    else:
        parts = jnp.concatenate([*leaves, zeros], axis=1)
        parts = parts.reshape(count, workers, size).swapaxes(0, 1)
    parts = jax.lax.all_to_all(parts, axis_name, split_axis=0, concat_axis=0, tiled=True)
    if count > 1:
        parts = parts.swapaxes(0, 1).reshape(count * workers, size)
    return parts
