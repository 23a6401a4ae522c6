"""GraB: signs of gradients, centred by the mean gradient of the epoch before (mean balance)."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from ordering import base, signs, trees
from ordering.base import Ordering
from ordering.pairs import fill_middle
from ordering.shuffles import first_fields
from syncopate import mesh


class GrabState(NamedTuple):
    """State of one worker. Three of its fields are float32 trees like a gradient."""

    current: Int[Array, "M"]
    next: Int[Array, "M"]
    position: Int[Array, ""]  # units observed in this epoch
    left: Int[Array, ""]  # units placed at the front of `next`
    epoch: Int[Array, ""]  # epochs finished
    taken: Int[Array, ""]  # gradients in `total`: those of this epoch that are finite
    running_sum: PyTree
    mean: PyTree  # mean gradient of the last epoch with finite ones; 0 in the first epoch
    total: PyTree  # sum of this epoch's gradients, not centred
    rule: PyTree  # state of the sign rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grab(Ordering):
    """What `grab` returns."""

    rule: Any  # a sign rule; None for `signs.Greedy`

    observes = True

    def __post_init__(self):
        super().__post_init__()
        self._set(rule=signs.rule_of(self.rule))

    def init(self, key, params=None):
        base.check_params(params)
        state = GrabState(
            **first_fields(key, self.num_units, GrabState),
            taken=jnp.zeros((), jnp.int32),
            running_sum=trees.zeros_like(params),
            mean=trees.zeros_like(params),
            total=trees.zeros_like(params),
            rule=self.rule.init(jax.random.fold_in(key, 1)),
        )
        return mesh.varying_as(state, key)

    def observe(self, state, gradients):
        state = base.check_state(self, state, GrabState, rule=self.rule)
        size = base.check_gradients(gradients, self.num_units, self.units_per_step)
        base.check_shapes(gradients, state.mean)
        valid = state.position + jnp.arange(size, dtype=jnp.int32) < self.num_units
        rule_state, running_sum, sign, taken = signs.balance_blocks(
            self.rule,
            state.rule,
            state.running_sum,
            gradients,
            derive=lambda g: _centred(g, state.mean),
            valid=valid,
        )
        following, left = _place(state, size, sign > 0)
        ones = jnp.ones(size, jnp.float32)
        return state._replace(
            next=following,
            position=state.position + size,
            left=left,
            taken=state.taken + jnp.sum(taken, dtype=jnp.int32),
            running_sum=running_sum,
            total=signs.add_weighted(state.total, gradients, ones, taken),
            rule=rule_state,
        )

    def next_epoch(self, state):
        state = base.check_state(self, state, GrabState, rule=self.rule)
        filled = fill_middle(state.next, state.current, state.left, state.position)
        count = jnp.maximum(state.taken, 1).astype(jnp.float32)
        mean = jax.tree.map(
            lambda g, m: jnp.where(state.taken > 0, g / count, m), state.total, state.mean
        )
        cleared = ("position", "left", "taken", "running_sum", "total")
        state = base.begin_epoch(state, filled, *cleared)
        return state._replace(mean=mean, rule=self.rule.next_epoch(state.rule))

    def resize(self, state, fresh, current, visited):
        new = base.resize_balanced(self.rule, state, fresh, current, current.copy(), visited)
        return new._replace(mean=jax.tree.map(lambda x: _shared(x, len(current)), state.mean))


def grab(
    num_units: int, *, units_per_step: int = 1, rule: signs.SignRule | None = None
) -> Ordering:
    """GraB: balances g - m, where m is the mean gradient of the epoch before.

    For each unit u of the current order: c = g_u - m;  s = sign(<r, c>);  r += s c;  u goes to the
    front of the next order if s is +, else to its back. If an epoch is cut short, the units that
    were not observed stay in the middle. Gradients that are not finite get a plus and enter neither
    r nor the mean; an epoch without any finite gradient does not change m.

    Args:
      num_units: M >= 1.
      units_per_step: B in [1, M].
      rule: the sign rule; None for the sign that makes the sum smaller: + iff <r, c> <= 0.

    Returns:
      An `Ordering` with `GrabState`.

    Raises:
      ValueError: at construction if sizes are out of range; while tracing if the number of
        gradients is not that of a step.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> order = ordering.grab(3)
      >>> state = order.init(jax.random.key(0), params=jnp.zeros(2))
      >>> for gradient in ([[1., 0.]], [[0., 1.]], [[1., 1.]]):
      ...     state = order.observe(state, jnp.array(gradient))
      >>> sorted(order.next_epoch(state).current.tolist())
      [0, 1, 2]

    References:
      Lu, Guo, De Sa, GraB: Finding Provably Better Data Permutations than Random Reshuffling,
      2022, https://arxiv.org/abs/2205.10733
    """
    return Grab(num_units=num_units, units_per_step=units_per_step, rule=rule)


def _centred(gradient, mean):
    return jax.tree.map(lambda g, m: trees.as_float32(g) - m, gradient, mean)


@functools.partial(jax.jit, static_argnums=1, inline=True)  # as signs may be typed for a mesh
def _place(state, size, plus):
    """(next, left) with the units just observed placed at both ends of the next order."""
    num_units = state.current.shape[0]
    place = state.position + jnp.arange(size, dtype=jnp.int32)
    unit = state.current[place]
    ahead = jnp.cumsum(plus, dtype=jnp.int32) - plus.astype(
        jnp.int32
    )  # earlier units of this step that went to the front
    front = state.left + ahead
    back = num_units - 1 - (place - front)
    slot = jnp.where(plus, front, back)
    slot = jnp.where(place < num_units, slot, num_units)  # surplus units are dropped
    left = state.left + jnp.sum(plus & (place < num_units), dtype=jnp.int32)
    return state.next.at[slot].set(unit, mode="drop"), left


def _shared(leaf: np.ndarray, workers: int) -> np.ndarray:
    """Means [W, ...] over equally many units, for W' workers by the units that each takes over."""
    old = np.asarray(leaf)
    ends = lambda count: np.arange(count + 1) * (len(old) * workers // count)  # noqa: E731
    (low, high), (first, last) = ((ends(n)[:-1], ends(n)[1:]) for n in (workers, len(old)))
    both = np.minimum(high[:, None], last) - np.maximum(low[:, None], first)
    weights = np.maximum(both, 0).astype(old.dtype) / len(old)
    return np.tensordot(weights, old, axes=1)
