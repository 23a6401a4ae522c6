"""Permutations that are computed: a unit of an epoch from its place, with nothing stored.

The units 0 .. M - 1 are pairs (low, high) with unit = high P + low, where P is the even one of
ceil(sqrt(M)) and the next number, and high < Q = ceil(M / P). A round adds a hash of one half to
the other, modulo P or Q, which can be undone: an unbalanced Feistel network. P Q exceeds M by less
than P. A pair beyond M goes through the rounds again until it is below (cycle walking). P is even,
because otherwise a round could only be an even permutation.

All arithmetic is that of uint32, so NumPy and JAX compute the same units.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key, UInt32

from ordering import base
from ordering.base import Ordering, State
from ordering.indices import Indices
from syncopate import plans

MOST = 2**48  # units; a half then has 24 bits, small beside a hash's 32
FEW = 2**16  # units, whose small halves need more rounds to mix
BLOCK = 2**14  # places that NumPy computes at a time, so that the arrays stay in the cache
FACTORS = np.uint32(0x21F0AAAD), np.uint32(0xD35A2D97)
SEEDS = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B)

Halves = tuple[Any, Any]  # low, high: uint32[n], of NumPy or of JAX


class CountedState(NamedTuple):
    """The state of all workers together."""

    key: Key[Array, ""]
    epoch: Int[Array, ""]  # epochs finished


class Domain(NamedTuple):
    """M, the sides of its rectangle and the rounds, as Python integers."""

    num_units: int
    low: int  # P
    high: int  # Q
    rounds: int  # an even number


def domain_of(num_units: int) -> Domain:
    half = math.isqrt(num_units - 1) // 2 + 1
    sides = 2 * half, -(-num_units // (2 * half))
    return Domain(num_units, *sides, rounds=24 if num_units < FEW else 8)


def mixed(x: UInt32[Any, "n"], add: Any = None) -> UInt32[Any, "n"]:
    """A hash of 32 bits, one to one; `add` is added in its middle."""
    x = (x ^ (x >> np.uint32(16))) * FACTORS[0]
    x = x ^ (x >> np.uint32(15))
    x = (x if add is None else x + add) * FACTORS[1]
    return x ^ (x >> np.uint32(15))


def absorbed(state: Halves, word: Any) -> Halves:
    """A state of 64 bits after one more word."""
    first = mixed(state[0] ^ word)
    return first, mixed(state[1] + first)


def round_keys(key_data: UInt32[Any, "k"], epoch: UInt32[Any, "1"], rounds: int) -> Halves:
    """Two words, uint32[rounds], for every round of this epoch."""
    state = SEEDS
    for word in (*key_data, epoch):
        state = absorbed(state, word)
    return absorbed(state, np.arange(rounds, dtype=np.uint32))


def once(halves: Halves, keys: Halves, domain: Domain, least: Callable) -> Halves:
    """The pairs after all rounds; `least` is `np.minimum` or `jnp.minimum`."""
    here, there = halves
    sides = np.uint32(domain.low), np.uint32(domain.high)
    for number in range(domain.rounds):
        here_side = sides[number % 2]
        moved = here + mixed(there ^ keys[0][number], keys[1][number]) % here_side
        here, there = there, least(moved, moved - here_side)  # the difference wraps if it is < 0
    return here, there


def undone(halves: Halves, keys: Halves, domain: Domain, least: Callable) -> Halves:
    """The inverse of `once`."""
    here, there = halves
    sides = np.uint32(domain.low), np.uint32(domain.high)
    for number in reversed(range(domain.rounds)):
        side = sides[number % 2]
        moved = there + side - mixed(here ^ keys[0][number], keys[1][number]) % side
        here, there = least(moved, moved - side), here
    return here, there


def beyond(halves: Halves, domain: Domain) -> Any:
    """Which pairs stand for no unit."""
    high, low = divmod(domain.num_units, domain.low)
    last = np.uint32(high)
    return (halves[1] > last) | ((halves[1] == last) & (halves[0] >= np.uint32(low)))


def computed(
    places: Int[np.ndarray, "..."], domain: Domain, keys: Halves, step: Callable = once
) -> Int[np.ndarray, "..."]:
    """int64, the units at these places; with `step=undone`, the places of these units."""
    flat, units = places.reshape(-1), np.empty(places.size, np.int64)
    for start in range(0, flat.size, BLOCK):
        units[start : start + BLOCK] = walked(flat[start : start + BLOCK], domain, keys, step)
    return units.reshape(places.shape)


def walked(
    places: Int[np.ndarray, "n"], domain: Domain, keys: Halves, step: Callable = once
) -> Int[np.ndarray, "n"]:
    """As `computed`, all at once; keys uint32[rounds], or [rounds, n] of every place."""
    high = places // domain.low
    low = (places - high * domain.low).astype(np.uint32)
    low, high = step((low, high.astype(np.uint32)), keys, domain, np.minimum)
    while (again := np.flatnonzero(beyond((low, high), domain))).size:
        of_them = tuple(words if words.ndim == 1 else words[:, again] for words in keys)
        low[again], high[again] = step((low[again], high[again]), of_them, domain, np.minimum)
    return high.astype(np.int64) * domain.low + low


def computed_by_jax(places: Array, domain: Domain, keys: Halves) -> Int[Array, "..."]:
    """int32, the units at these places; M at places outside."""
    places = places.astype(jnp.promote_types(places.dtype, jnp.int32))
    inside = (places >= 0) & (places < domain.num_units)
    places = jnp.where(inside, places.astype(jnp.uint32), np.uint32(0))
    side = np.uint32(domain.low)
    step = functools.partial(once, keys=keys, domain=domain, least=jnp.minimum)

    def again(halves):
        where, later = beyond(halves, domain), step(halves)
        return jnp.where(where, later[0], halves[0]), jnp.where(where, later[1], halves[1])

    halves = step((places % side, places // side))
    low, high = jax.lax.while_loop(lambda halves: beyond(halves, domain).any(), again, halves)
    return jnp.where(inside, (high * side + low).astype(jnp.int32), np.int32(domain.num_units))


def index_shuffle(
    index: Int[ArrayLike, "..."],
    num_units: int,
    key: Key[Array, ""],
    *,
    epoch: Int[ArrayLike, ""] = 0,
) -> Int[ArrayLike, "..."]:
    """The units at some places of a random permutation that is not stored.

    This is a one-to-one function of 0 .. M - 1, computed by 8 rounds of a hash, or 24 below 2^16
    units. A unit depends on the data of the key, the epoch, M and the place alone: not on the
    device, nor on whether NumPy or JAX computes it.

    Args:
      index: whole numbers in [0, M), the places. An array of JAX gives M for places outside.
      num_units: M, from 1 to 2^48, or to 2^31 - 1 for an array of JAX.
      key: one random key.
      epoch: the number of the permutation under this key, >= 0.

    Returns:
      The units, of the shape of `index`: int32 of JAX if an argument is traced or `index` is an
      array of JAX, else int64 of NumPy.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      >>> import jax, numpy as np
      >>> from syncopate import ordering
      >>> key = jax.random.key(0)
      >>> sorted(ordering.index_shuffle(np.arange(5), 5, key).tolist())
      [0, 1, 2, 3, 4]
      >>> int(ordering.index_shuffle(9_999_999_999, 10**10, key, epoch=3)) < 10**10
      True

    References:
      Black, Rogaway, Ciphers with Arbitrary Finite Domains, 2002,
      https://doi.org/10.1007/3-540-45760-7_9
    """
    domain = domain_of(plans.check_whole("num_units", num_units, 1, MOST))
    words = jax.random.key_data(plans.check_key(key))
    if isinstance(index, jax.Array) or any(isinstance(x, Tracer) for x in (words, epoch)):
        plans.check_whole("num_units, of an array of JAX,", num_units, 1, base.MOST_UNITS)
        if not jnp.issubdtype(jnp.result_type(index), jnp.integer):
            raise ValueError(f"index is {jnp.result_type(index)}: pass whole numbers, the places.")
        keys = round_keys(words, jnp.asarray(epoch).astype(jnp.uint32), domain.rounds)
        return computed_by_jax(jnp.asarray(index), domain, keys)
    places, kind = plans.as_array(index)
    whole = places.dtype.kind in "iu"
    if not whole or places.size and not 0 <= places.min() <= places.max() < num_units:
        raise ValueError(
            f"index is {kind}: pass whole numbers in [0, {num_units - 1}], the places."
        )
    epoch = plans.check_whole("epoch", epoch, 0, base.MOST_UNITS)
    return computed(places.astype(np.int64), domain, keys_of(words, epoch, domain))


class Groups(NamedTuple):
    """How groups of consecutive units, 0 .. K - 1 and so on, are kept together or spread."""

    size: int  # K
    outer: Domain  # of the groups; the last one may have fewer units
    inner: Domain  # of the units of a group
    last: Domain  # of those of the last one


def groups_of(num_units: int, size: int) -> Groups:
    outer = domain_of(-(-num_units // size))
    return Groups(size, outer, domain_of(size), domain_of((num_units - 1) % size + 1))


def inside(
    numbers: Int[np.ndarray, "n"], places: Int[np.ndarray, "n"], domain: Domain, words: Any
) -> Int[np.ndarray, "n"]:
    """The units at places in groups; each group has its permutation, by its number."""
    units = np.empty(places.size, np.int64)
    for start in range(0, places.size, BLOCK):
        part = slice(start, start + BLOCK)
        keys = group_keys(words, numbers[part], domain.rounds)
        units[part] = walked(places[part], domain, keys)
    return units


def group_keys(words: Any, numbers: Int[np.ndarray, "n"], rounds: int) -> Halves:
    """Two words, uint32[rounds, n], for every round in every group."""
    state = SEEDS
    for word in (*words, numbers & 0xFFFFFFFF, numbers >> 32):
        state = absorbed(state, np.atleast_1d(word).astype(np.uint32))
    return absorbed(state, np.arange(rounds, dtype=np.uint32)[:, None])


def together(places: Int[np.ndarray, "..."], groups: Groups, words: Any) -> np.ndarray:
    """The units at these places, where whole groups follow each other."""
    flat, keys = places.reshape(-1), keys_of(words[:-1], int(words[-1]), groups.outer)
    last = np.array([groups.outer.num_units - 1])  # the group that may have fewer units
    begins = computed(last, groups.outer, keys, undone)[0] * groups.size
    ends = begins + groups.last.num_units
    later = np.where(flat >= ends, groups.size - groups.last.num_units, 0)
    positions, within = np.divmod(flat + later, groups.size)
    numbers, units = computed(positions, groups.outer, keys), np.empty(flat.size, np.int64)
    short = (flat >= begins) & (flat < ends)
    for which, domain in ((~short, groups.inner), (short, groups.last)):
        units[which] = inside(numbers[which], within[which], domain, words)
    return (numbers * groups.size + units).reshape(places.shape)


def spread(places: Int[np.ndarray, "..."], groups: Groups, words: Any) -> np.ndarray:
    """The units at these places; those of a group are as many places apart as there are groups."""
    turn, position = np.divmod(places.reshape(-1), groups.outer.num_units)
    keys = keys_of(words[:-1], int(words[-1]), groups.outer)
    numbers = computed(position, groups.outer, keys)
    units = numbers * groups.size + inside(numbers, turn, groups.inner, words)
    return units.reshape(places.shape)


def keys_of(words: Any, epoch: int, domain: Domain) -> Halves:
    """The round keys of an epoch, of NumPy."""
    return round_keys(np.asarray(words)[:, None], np.array([epoch], np.uint32), domain.rounds)


@base.made_once
def counted(
    num_units: int, *, units_per_step: int = 1, group_size: int = 1, groups: str = "mixed"
) -> Ordering:
    """Random reshuffling of the units of all workers, with nothing stored: units are computed.

    The units at the places of an epoch are `index_shuffle(place, N, key, epoch=epoch)`. After u
    units of an epoch, worker w reads the places u + w B to u + w B + B - 1 next. A state is the
    same for any number of workers and any B, so a run can continue with other numbers there.

    Args:
      num_units: N, from 1 to 2^48, the units of the data. If W does not divide N, an epoch leaves
        out fewer than W of them, random ones.
      units_per_step: B >= 1, the units of a worker's step.
      group_size: K, from 1 to N: units 0 .. K - 1 are a group, K .. 2 K - 1 the next, and so on.
      groups: "mixed" ignores groups. "together" visits one whole group after another, in a random
        order, and the units of each group in a random order, too: for files of records. "spread"
        puts the units of a group as many places apart as there are groups: for windows of a
        document; K must divide N.

    Returns:
      An `Ordering` whose state is a key and an epoch, one for all workers. `order.indices(state)`
      computes units of the epoch where they are read; `observe` ignores the gradients.

    Raises:
      ValueError: if a size is out of range.

    Examples:
      >>> import jax
      >>> from syncopate import ordering
      >>> order = ordering.counted(10**10)
      >>> indices = order.indices(order.init(jax.random.key(0), None))
      >>> len(indices), len(indices[-3:]), 0 <= indices[9_999_999_999] < 10**10
      (10000000000, 3, True)

    References:
      Mishchenko, Khaled, Richtárik, Random Reshuffling: Simple Analysis with Vast Improvements,
      2020, https://arxiv.org/abs/2006.05988
    """
    num_units = plans.check_whole("num_units", num_units, 1, MOST)
    units_per_step = plans.check_whole("units_per_step", units_per_step, 1, num_units)
    group_size = plans.check_whole("group_size", group_size, 1, num_units)
    check_groups(groups, group_size, num_units)
    domain, grouped = domain_of(num_units), groups_of(num_units, group_size)

    def indices(state):
        words, epoch = np.asarray(jax.random.key_data(state.key)), int(state.epoch)
        if groups == "mixed":
            keys = keys_of(words, epoch, domain)
            return Indices(functools.partial(computed, domain=domain, keys=keys), num_units)
        function = together if groups == "together" else spread
        words = np.append(words, np.uint32(epoch))
        return Indices(functools.partial(function, groups=grouped, words=words), num_units)

    return computed_order(CountedState, indices, num_units, units_per_step)


def computed_order(
    kind: type, indices: Callable[[State], Indices], total: int, units_per_step: int
) -> Ordering:
    """The order of all workers whose epochs are `indices(state)`, of states `kind(key, epoch)`."""

    def init(key, params=None):
        # A copy of the key, which the caller keeps when the state is donated.
        return kind(jax.random.clone(plans.check_key(key)), jnp.zeros((), jnp.int32))

    def of_state(name, function):
        """The function, which refuses what is no state of this order."""

        def checked(state, *args):
            if type(state) is not kind or np.shape(state.epoch):
                raise ValueError(
                    f"{name} got a {type(state).__name__}: pass the state that init or the last "
                    "call of this order returned; all workers share one."
                )
            return function(state, *args)

        return jax.transfer_guard("allow")(checked)

    def next_epoch(state):
        return state._replace(epoch=state.epoch + 1)

    return Ordering(
        jax.transfer_guard("allow")(init),
        of_state("observe", base.observe_nothing),
        of_state("next_epoch", next_epoch),
        units_per_step=units_per_step,
        is_global=True,
        total=total,
        indices=of_state("indices", indices),
    )


def check_groups(groups: str, group_size: int, num_units: int) -> None:
    """Raises ValueError for an unknown word, or sizes that do not fit it."""
    ways = "mixed", "together", "spread"
    if groups not in ways:
        raise ValueError(f"groups is {groups!r}: pass one of {ways}.")
    if groups == "mixed" and group_size > 1:
        raise ValueError(
            f"group_size is {group_size}, but groups 'mixed' has none: pass groups='together' or "
            "groups='spread'."
        )
    if groups == "spread" and num_units % group_size:
        raise ValueError(
            f"group_size is {group_size}, which does not divide num_units {num_units}: groups that "
            "are spread have equal numbers of units. Leave out the last units, or pass another."
        )
