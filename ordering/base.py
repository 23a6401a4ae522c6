"""The contract of an order: three pure functions over one typed state.

Shape letters of this package: W workers, M units per worker, B units per worker and step,
P pairs, D parameters. A unit is what is ordered: an example or a fixed microbatch.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ordering.rows import Rows
from syncopate import mesh, plans

PyTree = Any
State = Any
CALL_INIT = "Call init with params shaped like one gradient, or for sketches with jnp.zeros(size)."


class Ordering(NamedTuple):
    """Which unit comes next, for one worker: a record of pure functions.

    Fields:
      init: `(key, params) -> state`. `key` is this worker's own typed key; `params` gives the
        structure and shapes of one gradient and is not read.
      observe: `(state, rows) -> state`. Runs inside the jitted step, after the gradients of the
        next `rows.size` units of the current order are known. See `ordering.rows`.
      next_epoch: `state -> state`. Makes the next order current.
      sync: `state -> state`. Where workers meet: what coordinated orders have to tell each other
        may wait for it. Nothing for the others, and never needed: `next_epoch` does what is left.

    Every state has `current`, int32[M], the order of this epoch; `next`, int32[M], the order
    being filled; and `left`, int32[]: the entries `next[:left]` are known and never change again,
    so that input may run ahead of the epoch's end.

    Example:
      >>> import jax, ordering
      >>> order = ordering.random_reshuffling(4)
      >>> state = order.init(jax.random.key(0), params=None)
      >>> sorted(order.next_epoch(state).current.tolist())
      [0, 1, 2, 3]
    """

    init: Callable[[jax.Array, PyTree], State]
    observe: Callable[[State, Any], State]
    next_epoch: Callable[[State], State]
    sync: Callable[[State], State] = lambda state: state


def first_order(key: jax.Array, num_units: int) -> jax.Array:
    """Returns the random order, int32[M], that every ordering starts from under `key`."""
    check_key(key)
    return permutation(jax.random.fold_in(key, 0), num_units)


def permutation(key: jax.Array, size: int) -> jax.Array:
    """int32[size], a random order that is typed as what draws it: one worker's, or equal on all.

    That of `jax.random.permutation(key, size)`: random numbers are sorted, again and again until
    equal ones do not matter. The sort is another one.
    """
    order = jnp.arange(size, dtype=jnp.int32)
    for _ in range(math.ceil(3 * math.log(size) / math.log(2**32 - 1))):
        key, draw = jax.random.split(key)
        order = order[_argsort(jax.random.bits(draw, (size,), jnp.uint32))]
    return mesh.varying(order, key)


def _argsort(numbers):
    """The stable argsort of uint32[M].

    A CPU sorts numbers that carry nothing four times faster than numbers with their places. So
    up to 2^16 of them carry their place in their low bits: they are sorted by their lower halves,
    then, in that order, by their upper halves.
    """
    size = numbers.shape[0]
    places = max(1, (size - 1).bit_length())
    if places > 16:
        return jnp.argsort(numbers)

    def by(half):
        places_of = jax.lax.sort((half << places) | jnp.arange(size, dtype=jnp.uint32))
        return places_of & (2**places - 1)

    lower = by(numbers & 0xFFFF)
    return lower[by(numbers[lower] >> 16)]


def fill_middle(next_order, current, left, placed):
    """`next_order` with `current[placed:]` in its free slots, `[left, left + M - placed)`."""
    num_units = current.shape[0]
    slot = jnp.arange(num_units)
    free = (slot >= left) & (slot < left + num_units - placed)
    return jnp.where(free, current[jnp.clip(slot - left + placed, 0, num_units - 1)], next_order)


def align_pairs(pending, units, waiting, num_pairs):
    """The 2 P units that pair up: from the pending one on if it waits, else without it."""
    around = jnp.concatenate([pending[None], units, jnp.zeros_like(pending)[None]])
    return jax.lax.dynamic_slice_in_dim(around, 1 - waiting, 2 * num_pairs)


def place_pairs(state, pair, valid, plus):
    """The next order, filled from both ends with the pairs int32[P] of these signs, bool[P]."""
    num_units = state.current.shape[0]
    first, second = state.current[2 * pair], state.current[2 * pair + 1]
    front = jnp.where(valid, pair, num_units)  # out of range: dropped
    back = jnp.where(valid, num_units - 1 - pair, num_units)
    filled = state.next.at[front].set(jnp.where(plus, first, second), mode="drop")
    return filled.at[back].set(jnp.where(plus, second, first), mode="drop")


def signs_of(state, following):
    """bool[M // 2]: by which sign `place_pairs` placed each pair; of pairs not placed, either."""
    count = state.current.shape[0] // 2
    return following[:count] == state.current[: 2 * count : 2]


def check_num_units(num_units: int) -> None:
    if not plans.is_whole(num_units) or num_units < 1:
        raise ValueError(
            f"num_units is {num_units!r}: an order needs at least one unit per worker. "
            "Pass the number of examples (or microbatches) that one worker owns, a whole number."
        )


def check_units_per_step(num_units: int, units_per_step: int) -> None:
    """Raises ValueError unless a step of B units fits in an epoch of M."""
    check_num_units(num_units)
    if not plans.is_whole(units_per_step) or not 1 <= units_per_step <= num_units:
        raise ValueError(
            f"units_per_step is {units_per_step!r} with {num_units} units per worker: it must lie "
            f"in [1, {num_units}], a whole number. Lower units_per_step or give each worker more "
            "units."
        )


def check_key(key) -> None:
    """Raises ValueError unless it is the typed key of one worker."""
    plans.check_key(key)
    if key.shape:
        raise ValueError(
            f"key has shape {key.shape}: init takes one worker's key. Call it under jax.vmap or "
            "local_opt.lift, which give each worker its own."
        )


def check_is_rows(rows) -> None:
    if not isinstance(rows, Rows):
        raise ValueError(
            f"got a {type(rows).__name__} where Rows are needed: wrap the gradients by "
            "ordering.Rows.of(tree) for leaves [n, ...], one gradient per unit, or by "
            "ordering.Rows.of_one(gradient) for a single one."
        )


def check_rows(
    rows: Rows, num_units: int, units_per_step: int, *, workers: int | None = None
) -> int:
    """Returns how many of one worker's units the rows hold.

    Raises ValueError where no step of the epoch has so many, and for rows of all `workers` where an
    order does not take them (None).
    """
    check_is_rows(rows)
    if rows.workers not in (None, workers):
        raise ValueError(
            f"observe got rows of all {rows.workers} workers, as exchange_rows returns them: this "
            "order observes one worker's. Pass the rows that were exchanged, or use cd_grab "
            "without gathers."
        )
    size, tail = rows.size // (rows.workers or 1), num_units % units_per_step
    if size not in (units_per_step, tail) or size == 0:
        raise ValueError(
            f"observe got rows of {size} units; this ordering was built for {units_per_step} "
            f"units per step and {tail} in the last step of an epoch ({num_units} units). "
            "Slice the order accordingly, or build the ordering with another units_per_step."
        )
    return size


def check_shapes(rows: Rows, like: PyTree) -> None:
    """Raises ValueError unless the rows are gradients of the shapes of `like`, or have no tree."""
    if rows.tree is None:
        return
    given, needed = _shapes(rows.tree), _shapes(like, (rows.size,))
    for path in given | needed:
        if given.get(path) != needed.get(path):
            raise ValueError(
                f"observe got rows whose rows.tree{path} has shape {given.get(path, 'none')}; the "
                f"state was made for {needed.get(path, 'no such leaf')}. {CALL_INIT}"
            )


def _shapes(tree, leading=()):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leading + jnp.shape(leaf) for path, leaf in leaves}


def check_width(entries: int, needed: int, held: int) -> None:
    """Raises ValueError unless a state holds as many numbers as rows of D entries need."""
    if held != needed:
        raise ValueError(
            f"observe got rows of {entries} numbers each, for which a state holds {needed} on each "
            f"worker; this one holds {held}. {CALL_INIT}"
        )


def check_stacked(rows: Rows) -> None:
    check_is_rows(rows)
    if rows.tree is None:
        raise ValueError(
            "these rows hold no stacked gradients, which this ordering must keep or send: use "
            "gradients.per_example or gradients.microbatch, or pair_balance with an even "
            "units_per_step."
        )
