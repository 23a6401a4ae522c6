"""PairBalance: signs of pair differences, alone (one worker) or coordinated (CD-GraB)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ordering import base, signs
from ordering import rows as rows_lib
from ordering.base import Ordering
from ordering.exchange import (
    check_alone,
    check_slices,
    exchange,
    sharded,
    shared_key,
    slice_size,
)
from ordering.gathered import gathered_pairs
from ordering.kernel import balance, balance_blocks
from syncopate import mesh


class PairBalanceState(NamedTuple):
    """State of one worker. Under coordination every device holds one slice of r and of pending."""

    current: jax.Array  # int32[M]
    next: jax.Array  # int32[M]
    position: jax.Array  # int32[], units of the current order observed so far (even B: in pairs)
    running_sum: Any  # float32 tree like a gradient; coordinated: float32[slice_size(D, W)]
    pending: Any  # first half of a pair split over two steps; () where B is even
    rule: Any  # state of the sign rule

    @property
    def left(self):
        """int32[], pairs placed so far: `next[:left]` never changes again."""
        # Surplus units are counted in the position and never placed.
        return jnp.minimum(self.position, self.current.shape[-1]) // 2


def pair_balance(
    num_units: int,
    *,
    units_per_step: int = 1,
    rule: signs.SignRule | None = None,
    specs=None,
) -> Ordering:
    """GraB with pair differences, for one worker: needs no mean, works from the first epoch.

    For the k-th pair (a, b) of the current order, with r = 0 at the start of every epoch:
    s = sign(<r, g_a - g_b>);  r += s (g_a - g_b);  next[k], next[M - 1 - k] = a, b if s is +,
    else b, a. Run on every worker by itself it is the control "independent pair balance".

    The leftover unit of an odd M is never compared and lands in the middle of the next order.
    A pair may be split over two steps. An epoch that is cut short keeps the units that were not
    observed, in their order, in the middle. Surplus units are ignored.

    Args:
      num_units: M >= 1, units of this worker.
      units_per_step: B in [1, M], units in the rows of one step; the last step of an epoch has
        the M mod B that remain.
      rule: the sign rule; greedy by default.
      specs: for a worker that is several devices, as in `cd_grab`.

    Returns:
      An `Ordering` with `PairBalanceState`.

    Raises:
      ValueError: if sizes do not fit, at construction; if rows have another size, at tracing.

    Example:
      >>> import jax, jax.numpy as jnp, ordering
      >>> order = ordering.pair_balance(4, units_per_step=2)
      >>> state = order.init(jax.random.key(0), params=jnp.zeros(3))
      >>> for start in (0, 2):
      ...     units = state.current[start:start + 2]
      ...     state = order.observe(state, ordering.Rows.of(jnp.eye(4, 3)[units]))
      >>> sorted(order.next_epoch(state).current.tolist())
      [0, 1, 2, 3]

    References:
      Lu, Guo, De Sa, GraB: Finding Provably Better Data Permutations than Random Reshuffling,
      2022, https://arxiv.org/abs/2205.10733
    """
    return _pair_balance(num_units, units_per_step, rule, axis_name=None, specs=specs)


def cd_grab(
    num_units: int,
    *,
    units_per_step: int = 1,
    axis_name: str = "worker",
    rule: signs.SignRule | None = None,
    gathers: str | None = None,
    specs=None,
) -> Ordering:
    """CD-GraB: PairBalance with one running sum over all workers.

    For the k-th pair of every worker, worker after worker: s = sign(<r, g_a - g_b>) from the
    shared r;  r += s (g_a - g_b);  the pair is placed in the worker's own next order. This equals
    `pair_balance` on the worker-interleaved stream. Units never move between workers.

    Runs under a named axis (`jax.vmap` or `jax.shard_map`). Gradients are exchanged in slices of
    D / W, so that r and the pending gradients are sharded over the workers. An even B sends the
    pair differences; an odd B sends the gradients, and a loop that exchanges them itself
    (`exchange_rows`) gets the mean gradient for the same volume.

    Short rows, above all sketches (`ordering.sketched`), need none of this: with `gathers` workers
    send each other whole pairs, k numbers each, and all compute all signs. Gathered when they sync,
    the pairs of a round wait in the state, float32[M // 2, k]; the order is the same.

    The leftover unit of an odd M lands in the middle of its worker's next order, as in
    `pair_balance`. Randomised rules draw the same coins on all workers, from worker 0's key.

    Args:
      num_units: M >= 1, units of each worker.
      units_per_step: B in [1, M], as in `pair_balance`.
      axis_name: the workers' axis.
      rule: the sign rule; greedy by default.
      gathers: None exchanges slices of gradients; "step" gathers whole rows in every step; "sync"
        where `Ordering.sync` is called, and at the epoch's end.
      specs: for a worker that is several devices (docs/use/devices.md): how one gradient is split
        over them, a `jax.P` per leaf or one for all, without the workers' axis. Every device then
        observes its part, and all agree. With `gathers` the rows are whole on every device:
        jax.P(). None where a worker is one device.

    Returns:
      An `Ordering` with `PairBalanceState`; of `gathers`, with `gathered.GatheredState`.

    Raises:
      ValueError: if sizes do not fit, or specs name the workers' axis, at construction; at tracing
        if rows have another size, or the mesh has other axes than the workers' and specs are None.

    Example:
      >>> import jax, jax.numpy as jnp, ordering
      >>> order = ordering.cd_grab(4, units_per_step=2)
      >>> keys = jax.random.split(jax.random.key(0), 8)  # 8 workers on one device
      >>> init = jax.vmap(lambda key: order.init(key, jnp.zeros(3)), axis_name="worker")
      >>> init(keys).current.shape
      (8, 4)

    References:
      Cooper et al., Coordinating Distributed Example Orders for Provably Accelerated Training,
      2023, https://arxiv.org/abs/2302.00845
    """
    if gathers is not None:
        return gathered_pairs(num_units, units_per_step, rule, axis_name, specs, gathers)
    return _pair_balance(num_units, units_per_step, rule, axis_name, specs)


def _pair_balance(num_units, units_per_step, rule, axis_name, specs) -> Ordering:
    base.check_units_per_step(num_units, units_per_step)
    rule = signs.greedy() if rule is None else rule
    splits_pairs = units_per_step % 2 == 1
    coordinated = axis_name is not None
    axes = () if specs is None else mesh.check_specs(specs, axis_name)  # inside a worker
    summed = (*mesh.names_of(axis_name), *axes)

    def init(key, params):
        current = base.first_order(key, num_units)
        like, workers = params, 1
        if coordinated:
            workers = mesh.axis_size(axis_name)
            like = jnp.zeros(slice_size(rows_lib.tree_size(params), workers))
            key = shared_key(key, axis_name)
        state = PairBalanceState(
            current=current,
            next=jnp.copy(current),  # a state may be donated: no buffer is in it twice
            position=jnp.zeros((), jnp.int32),
            running_sum=rows_lib.zeros_like(like),
            pending=rows_lib.zeros_like(like, (workers,)) if splits_pairs else (),
            rule=rule.init(jax.random.fold_in(key, 1)),
        )
        return mesh.varying_as(state, current)

    def observe(state, rows):
        if coordinated and specs is None:
            check_alone(axis_name, what="cd_grab observes")
        workers = mesh.axis_size(axis_name) if coordinated else 1
        size = base.check_rows(
            rows, num_units, units_per_step, workers=workers if coordinated else None
        )
        if coordinated:
            check_slices(rows, workers, state.running_sum)
        else:
            base.check_shapes(rows, state.running_sum)
        num_pairs = (size + splits_pairs) // 2
        # Where pairs are never split, the odd unit of a short step gets no partner any more. It is
        # not counted, or two such steps would count as a pair that nobody has placed.
        end = state.position + (size if splits_pairs else 2 * num_pairs)
        if num_pairs == 0:
            return state._replace(position=end)
        pair = state.left + jnp.arange(num_pairs)
        valid = (pair < num_units // 2) & (2 * pair + 1 < end)
        carry = (rule, state.rule, state.running_sum)
        if rows.tree is None and not coordinated and not splits_pairs:
            pending = ()
            rule_state, running_sum, sign, _ = balance(
                *carry, rows_lib.differences(rows), valid=valid
            )
        else:
            base.check_stacked(rows)
            pending, vectors, derive = complete_pairs(state, rows, num_pairs, workers)
            rule_state, running_sum, sign, _ = balance_blocks(
                *carry, vectors, derive=derive, valid=jnp.repeat(valid, workers), axes=summed
            )
        if coordinated:
            sign = sign.reshape(num_pairs, workers)[:, jax.lax.axis_index(axis_name)]
        state = state._replace(
            position=end, running_sum=running_sum, pending=pending, rule=rule_state
        )
        return state._replace(next=base.place_pairs(state, pair, valid, sign > 0))

    def complete_pairs(state, rows, num_pairs, workers):
        """(pending, vectors, derive): the pairs that these rows complete, worker after worker."""
        if not coordinated and not splits_pairs:
            pairs = jax.tree.map(lambda g: rows_lib.split_pairs(g, num_pairs), rows.tree)
            return (), pairs, subtract
        if coordinated and rows.workers is None:
            # Differences are half as many as gradients; only split pairs need the gradients.
            if not splits_pairs:
                sent = exchange(rows_lib.differences(rows), axis_name)
                return (), sent.tree, None
            rows = exchange(rows, axis_name)
        units = jax.tree.map(lambda g: g.reshape((-1, workers, *g.shape[1:])), rows.tree)
        pending = ()
        if units_per_step == 1:  # a pair is complete only if one waits; else its sign is not used
            pending = jax.tree.map(lambda g: rows_lib.as_float32(g[0]), units)
            return pending, jax.tree.map(jnp.subtract, state.pending, pending), None
        if splits_pairs:
            waiting = state.position % 2
            pending = jax.tree.map(lambda g: rows_lib.as_float32(g[-1]), units)
            units = jax.tree.map(
                lambda p, g: base.align_pairs(p, rows_lib.as_float32(g), waiting, num_pairs),
                state.pending,
                units,
            )
        vectors = jax.tree.map(
            lambda g: rows_lib.subtract_pairs(rows_lib.split_pairs(g, num_pairs)).reshape(
                (num_pairs * workers, *g.shape[2:])
            ),
            units,
        )
        return pending, vectors, None

    def next_epoch(state):
        placed = 2 * state.left  # the unit that waits for a partner is not placed
        filled = base.fill_middle(state.next, state.current, state.left, placed)
        return state._replace(
            current=filled,
            next=jnp.copy(filled),
            position=jnp.zeros_like(state.position),
            running_sum=jax.tree.map(jnp.zeros_like, state.running_sum),
            rule=rule.next_epoch(state.rule),
        )

    def state_specs(of):
        pending = jax.tree.map(lambda spec: P(None, *spec), of) if splits_pairs else ()
        return PairBalanceState(P(), P(), P(), running_sum=of, pending=pending, rule=P())

    order = Ordering(init, observe, next_epoch)
    if not axes:
        return order
    return sharded(order, specs, axes, state_specs=state_specs, coordinated=coordinated)


def subtract(pair):
    """The difference of a pair, leaves [2, ...]."""
    return jax.tree.map(rows_lib.subtract, pair)
