"""PairBalance, for one worker or coordinated over all: signs of pair differences.

Between workers, one all-to-all moves n gradients of D entries from each of W workers. Every device
then holds D / W entries of all n W gradients, and a psum completes the inner products of these
parts. It sends as much as the first half of an all-reduce.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from ordering import base, signs, trees
from ordering.base import Ordering, State
from ordering.shuffles import first_fields
from ordering.trees import LANES
from syncopate import mesh
from syncopate.workers import AXIS, equal_once, shared_key, simulated


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
        return _placed_pairs(self.position, self.current.shape[-1])


@partial(jax.jit, static_argnums=1, inline=True)
def _placed_pairs(position: Int[Array, ""], num_units: int) -> Int[Array, ""]:
    # Surplus units are counted in the position and never placed.
    return jnp.minimum(position, num_units) // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs(Ordering):
    """The common part of the orders that place pairs by their signs."""

    rule: Any  # a sign rule; None for `signs.Greedy`

    observes = True
    axis_name = None

    def __post_init__(self):
        super().__post_init__()
        self._set(rule=signs.rule_of(self.rule))

    @property
    def splits_pairs(self) -> bool:
        """Whether a pair may have its units in two steps."""
        return self.units_per_step % 2 == 1

    def resize(self, state, fresh, current, visited):
        following, half = current.copy(), current.shape[1] // 2
        # The unit without a partner goes to the middle.
        following[:, half:] = np.roll(current[:, half:], current.shape[1] % 2, axis=1)
        return base.resize_balanced(self.rule, state, fresh, current, following, visited)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairBalance(Pairs):
    """What `pair_balance` returns."""

    def init(self, key, params=None):
        base.check_params(params)
        fields = first_fields(key, self.num_units, PairBalanceState)
        like, workers = params, 1
        if self.axis_name is not None:
            workers = mesh.axis_size(self.axis_name)
            like = jnp.zeros(slice_size(trees.tree_size(params), workers))
            key = shared_key(key, self.axis_name)
        state = PairBalanceState(
            **fields,
            running_sum=trees.zeros_like(like),
            pending=trees.zeros_like(like, (workers,)) if self.splits_pairs else (),
            rule=self.rule.init(jax.random.fold_in(key, 1)),
        )
        return mesh.varying_as(state, state.current)

    def check(self, state):
        """The state, if it is one of this order."""
        has = {"pending": self.splits_pairs}
        return base.check_state(self, state, PairBalanceState, rule=self.rule, **has)

    def observe(self, state, gradients):
        state, axis_name = self.check(state), self.axis_name
        if axis_name is None:
            return self._observe(state, gradients, ())
        check_equal(axis_name)
        if not simulated(axis_name):
            return self._observe(state, gradients, mesh.names_of(axis_name))
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
        new = self._observe(whole, gradients, ())
        of_sums = new.running_sum, new.pending
        running_sum, pending = jax.tree.map(lambda x: slice_of_worker(x, size, axis_name), of_sums)
        return new._replace(running_sum=running_sum, pending=pending)

    def _observe(self, state, gradients, summed):
        """`observe`, with products summed over these axes."""
        workers = 1 if self.axis_name is None else mesh.axis_size(self.axis_name)
        size = base.check_gradients(gradients, self.num_units, self.units_per_step)
        num_pairs = (size + self.splits_pairs) // 2
        # With an even B the odd unit of a short step has no partner. It is not counted: two such
        # steps would count as a pair that was never placed.
        end = state.position + (size if self.splits_pairs else 2 * num_pairs)
        if num_pairs == 0:
            return state._replace(position=end)
        pair = state.left + jnp.arange(num_pairs, dtype=jnp.int32)
        valid = (pair < self.num_units // 2) & (2 * pair + 1 < end)
        pending, vectors = self._complete_pairs(state, gradients, num_pairs, workers)
        derived = self.axis_name is not None or self.splits_pairs
        subtract = partial(jax.tree.map, trees.subtract)  # one pair, leaves [2, ...]
        rule_state, running_sum, sign, _ = signs.balance_blocks(
            self.rule,
            state.rule,
            state.running_sum,
            vectors,
            derive=(lambda vector: vector) if derived else subtract,
            valid=jnp.repeat(valid, workers),
            axes=summed,
        )
        if self.axis_name is not None:
            sign = sign.reshape(num_pairs, workers)[:, jax.lax.axis_index(self.axis_name)]
        state = state._replace(
            position=end, running_sum=running_sum, pending=pending, rule=rule_state
        )
        return state._replace(next=place_pairs(state, pair, valid, sign > 0))

    def _complete_pairs(self, state, tree, num_pairs, workers):
        """(pending, the inputs of `derive` for all complete pairs, worker after worker)."""
        what = "gradients"
        if self.axis_name is not None:  # differences are half as many; pairs of two steps need all
            what, tree = (
                "slices of gradients",
                tree if self.splits_pairs else trees.differences(tree),
            )
            tree = exchange(tree, self.axis_name)
        base.check_shapes(tree, state.running_sum, what)
        if not self.splits_pairs:
            if self.axis_name is None:
                tree = jax.tree.map(lambda g: trees.split_pairs(g, num_pairs), tree)
            return (), tree
        units = jax.tree.map(lambda g: g.reshape((-1, workers, *g.shape[1:])), tree)
        if self.units_per_step == 1:  # in every second step no pair is complete; the sign is unused
            pending = jax.tree.map(lambda g: trees.as_float32(g[0]), units)
            return pending, jax.tree.map(jnp.subtract, state.pending, pending)
        pending = jax.tree.map(lambda g: trees.as_float32(g[-1]), units)
        align = partial(align_pairs, waiting=state.position % 2, num_pairs=num_pairs)
        units = jax.tree.map(align, state.pending, units)

        def differences(g):
            rows = trees.subtract_pairs(trees.split_pairs(g, num_pairs))
            return rows.reshape((num_pairs * workers, *g.shape[2:]))

        return pending, jax.tree.map(differences, units)

    def next_epoch(self, state):
        state = self.check(state)
        placed = 2 * state.left  # the unit that waits for a partner is not placed
        filled = fill_middle(state.next, state.current, state.left, placed)
        state = base.begin_epoch(state, filled, "position", "running_sum")
        return state._replace(rule=self.rule.next_epoch(state.rule))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinatedPairs(PairBalance):
    """What `cd_grab` returns if workers exchange slices of gradients."""

    axis_name: str = AXIS


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
    return PairBalance(num_units=num_units, units_per_step=units_per_step, rule=rule)


def fill_middle(next_order: Array, current: Array, left: Array, placed: Array) -> Array:
    """`next_order` with `current[placed:]` in its free slots, `[left, left + M - placed)`."""
    num_units = current.shape[0]
    slot = jnp.arange(num_units, dtype=jnp.int32)
    free = (slot >= left) & (slot < left + num_units - placed)
    return jnp.where(free, current[jnp.clip(slot - left + placed, 0, num_units - 1)], next_order)


def align_pairs(pending: Array, units: Array, *, waiting: Array, num_pairs: int) -> Array:
    """The 2 P vectors to pair up: `pending`, if one is `waiting`, followed by `units`."""
    units = units.astype(pending.dtype)
    around = jnp.concatenate([pending[None], units, jnp.zeros_like(pending)[None]])
    return jax.lax.dynamic_slice_in_dim(around, 1 - waiting, 2 * num_pairs)


def place_pairs(state: State, pair: Array, valid: Array, plus: Array) -> Int[Array, "M"]:
    """The next order with the `valid` pairs, int32[P], placed at both ends by their signs."""
    num_units = state.current.shape[0]
    first, second = state.current[2 * pair], state.current[2 * pair + 1]
    front = jnp.where(valid, pair, num_units)  # out of range: dropped
    back = jnp.where(valid, num_units - 1 - pair, num_units)
    filled = state.next.at[front].set(jnp.where(plus, first, second), mode="drop")
    return filled.at[back].set(jnp.where(plus, second, first), mode="drop")


def signs_of(state: State, following: Int[Array, "M"]) -> Bool[Array, "P"]:
    """Whether `place_pairs` gave each pair a plus; arbitrary for pairs that it did not place."""
    count = state.current.shape[0] // 2
    return following[:count] == state.current[: 2 * count : 2]


def check_equal(axis_name: str, rows: Array | None = None) -> None:
    """Raises ValueError if the devices of one worker might see different gradients and signs.

    They might under any mesh axis beside the workers'. Rows are exempt if every device has them
    whole: over axes that are left to the compiler, or if their types show that they are equal.
    """
    others = mesh.beside(axis_name, manual_only=rows is not None)
    if rows is not None:
        equal = mesh.typed_axes(tuple(others)) - mesh.varying_axes(rows)
        others = [axis for axis in others if axis not in equal]
    if others:
        raise ValueError(
            f"cd_grab observes under the mesh axes {others} beside the workers' {axis_name!r}, and "
            "all devices of a worker need the same numbers. Observe sketches, which "
            'ordering.make_sketch(specs=) makes equal, with gathers="sync". If these axes are '
            "manual, use jax.shard_map with check_vma=True. If they hold workers, too, name all of "
            "them in axis_name."
        )


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
