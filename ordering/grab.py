"""GraB: signs of gradients centred by the mean of the epoch before (mean balance)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ordering import base, signs
from ordering import rows as rows_lib
from ordering.base import Ordering
from ordering.kernel import add_weighted, balance, balance_blocks
from syncopate import mesh


class GrabState(NamedTuple):
    """State of one worker: three vectors of D entries beside the orders."""

    current: jax.Array  # int32[M]
    next: jax.Array  # int32[M]
    position: jax.Array  # int32[], units observed in this epoch
    left: jax.Array  # int32[], units placed at the front of next
    running_sum: Any  # float32 tree
    mean: Any  # float32 tree, mean gradient of the epoch before; 0 in the first
    gathered: Any  # float32 tree, sum of this epoch's gradients (not centred)
    rule: Any


def grab(
    num_units: int,
    *,
    units_per_step: int = 1,
    rule: signs.SignRule | None = None,
) -> Ordering:
    """GraB: balances g - m, with m the mean gradient of the epoch before.

    For each unit u of the current order: c = g_u - m;  s = sign(<r, c>);  r += s c;  u goes to the
    front of the next order if s is +, else to its back. Run on every worker by itself it is the
    control "independent mean balance". There are no pairs, so any M and B leave nothing over; the
    units of an epoch that is cut short stay in the middle. Gradients that are not finite take +
    and enter neither r nor the mean. Surplus units are ignored.

    Args:
      num_units: M >= 1.
      units_per_step: B in [1, M].
      rule: the sign rule; greedy by default.

    Returns:
      An `Ordering` with `GrabState`.

    Raises:
      ValueError: if sizes do not fit, at construction; if rows have another size, at tracing.

    Example:
      >>> import jax, jax.numpy as jnp, ordering
      >>> order = ordering.grab(3)
      >>> state = order.init(jax.random.key(0), params=jnp.zeros(2))
      >>> for gradient in ([[1., 0.]], [[0., 1.]], [[1., 1.]]):
      ...     state = order.observe(state, ordering.Rows.of(jnp.array(gradient)))
      >>> sorted(order.next_epoch(state).current.tolist())
      [0, 1, 2]

    References:
      Lu, Guo, De Sa, GraB: Finding Provably Better Data Permutations than Random Reshuffling,
      2022, https://arxiv.org/abs/2205.10733
    """
    base.check_units_per_step(num_units, units_per_step)
    rule = signs.greedy() if rule is None else rule

    def init(key, params):
        current = base.first_order(key, num_units)
        # A state may be donated: no buffer is in it twice.
        state = GrabState(
            current=current,
            next=jnp.copy(current),
            position=jnp.zeros((), jnp.int32),
            left=jnp.zeros((), jnp.int32),
            running_sum=rows_lib.zeros_like(params),
            mean=rows_lib.zeros_like(params),
            gathered=rows_lib.zeros_like(params),
            rule=rule.init(jax.random.fold_in(key, 1)),
        )
        return mesh.varying_as(state, key)

    def observe(state, rows):
        base.check_rows(rows, num_units, units_per_step)
        base.check_shapes(rows, state.mean)
        valid = state.position + jnp.arange(rows.size) < num_units
        carry = (rule, state.rule, state.running_sum)
        if rows.tree is None:
            centred = rows_lib.centre(rows, state.mean)
            rule_state, total, sign, taken = balance(*carry, centred, valid=valid)
        else:
            rule_state, total, sign, taken = balance_blocks(
                *carry, rows.tree, derive=lambda g: centre(g, state.mean), valid=valid
            )
        gathered = add_weighted(state.gathered, rows, jnp.ones(rows.size), taken)
        following, left = _place(state, rows.size, sign > 0)
        return state._replace(
            next=following,
            position=state.position + rows.size,
            left=left,
            running_sum=total,
            gathered=gathered,
            rule=rule_state,
        )

    def next_epoch(state):
        filled = base.fill_middle(state.next, state.current, state.left, state.position)
        observed = jnp.clip(state.position, 1, num_units)
        return state._replace(
            current=filled,
            next=jnp.copy(filled),
            position=jnp.zeros_like(state.position),
            left=jnp.zeros_like(state.left),
            running_sum=jax.tree.map(jnp.zeros_like, state.running_sum),
            mean=jax.tree.map(lambda g: g / observed, state.gathered),
            gathered=jax.tree.map(jnp.zeros_like, state.gathered),
            rule=rule.next_epoch(state.rule),
        )

    return Ordering(init, observe, next_epoch)


def centre(gradient, mean):
    """g - m in float32."""
    return jax.tree.map(lambda g, m: rows_lib.as_float32(g) - m, gradient, mean)


def _place(state, size, plus):
    """(next, left): fills the next order from both ends with the units just observed."""
    num_units = state.current.shape[0]
    place = state.position + jnp.arange(size)
    unit = state.current[place]
    ahead = jnp.cumsum(plus) - plus  # units of this step that went to the front before
    front = state.left + ahead
    back = num_units - 1 - (place - front)
    slot = jnp.where(plus, front, back)
    slot = jnp.where(place < num_units, slot, num_units)  # surplus units are dropped
    left = state.left + jnp.sum(plus & (place < num_units), dtype=jnp.int32)
    return state.next.at[slot].set(unit, mode="drop"), left
