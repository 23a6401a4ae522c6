"""Permutations that are computed: a unit of an epoch from its place, with nothing stored.

The units 0 .. M - 1 are pairs (low, high) with unit = high P + low, where P is the even one of
ceil(sqrt(M)) and the next number, and high < Q = ceil(M / P). A round adds a hash of one half to
the other, modulo P or Q, which can be undone: an unbalanced Feistel network. P Q exceeds M by less
than P. A pair beyond M goes through the rounds again until it is below (cycle walking). P is even,
because otherwise a round could only be an even permutation.

All arithmetic is that of uint32, so NumPy and JAX compute the same units.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key, UInt32

from ordering import base
from ordering.base import Ordering
from ordering.indices import Indices
from syncopate import plans

MOST = 2**48  # units; a half then has 24 bits, small beside a hash's 32
FEW = 2**16  # units, whose small halves need more rounds to mix
BLOCK = 2**14  # places that NumPy computes at a time, so that the arrays stay in the cache
FACTORS = np.uint32(0x21F0AAAD), np.uint32(0xD35A2D97)
SEEDS = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B)

Halves = tuple[Any, Any]  # low, high: uint32[n], of NumPy or of JAX


class ComputedState(NamedTuple):
    """The state of all workers together."""

    key: Key[Array, ""]
    epoch: Int[Array, ""]  # epochs finished
    digest: UInt32[Array, ""]  # of what the units are computed from, beside the key and the epoch


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


def hash_word(x: UInt32[Any, "n"], add: Any = None) -> UInt32[Any, "n"]:
    """A hash of 32 bits, one to one; `add` is added in its middle."""
    x = (x ^ (x >> np.uint32(16))) * FACTORS[0]
    x = x ^ (x >> np.uint32(15))
    x = (x if add is None else x + add) * FACTORS[1]
    return x ^ (x >> np.uint32(15))


def hash_words(words: Iterable[Any], state: Halves = SEEDS) -> Halves:
    """A state of 64 bits, two words of the shape of the words, after one word after the other."""
    for word in words:
        first = hash_word(state[0] ^ word)
        state = first, hash_word(state[1] + first)
    return state


def round_keys(words: Iterable[UInt32[Any, "n"]], rounds: int, state: Halves = SEEDS) -> Halves:
    """Two words, uint32[rounds, n], for every round under a key of several words."""
    return hash_words([np.arange(rounds, dtype=np.uint32)[:, None]], hash_words(words, state))


def feistel(halves: Halves, keys: Halves, domain: Domain, least: Callable) -> Halves:
    """The pairs after all rounds; `least` is `np.minimum` or `jnp.minimum`."""
    here, there = halves
    sides = np.uint32(domain.low), np.uint32(domain.high)
    for number in range(domain.rounds):
        here_side = sides[number % 2]
        moved = here + hash_word(there ^ keys[0][number], keys[1][number]) % here_side
        here, there = there, least(moved, moved - here_side)  # the difference wraps if it is < 0
    return here, there


def feistel_inverse(halves: Halves, keys: Halves, domain: Domain, least: Callable) -> Halves:
    """The pairs before all rounds of `feistel`."""
    here, there = halves
    sides = np.uint32(domain.low), np.uint32(domain.high)
    for number in reversed(range(domain.rounds)):
        side = sides[number % 2]
        moved = there + side - hash_word(here ^ keys[0][number], keys[1][number]) % side
        here, there = least(moved, moved - side), here
    return here, there


def out_of_range(halves: Halves, domain: Domain) -> Any:
    """Which pairs stand for no unit."""
    high, low = divmod(domain.num_units, domain.low)
    last = np.uint32(high)
    return (halves[1] > last) | ((halves[1] == last) & (halves[0] >= np.uint32(low)))


def shuffle_by_numpy(
    places: Int[np.ndarray, "..."], domain: Domain, keys: Halves, step: Callable = feistel
) -> Int[np.ndarray, "..."]:
    """int64, the units at these places; with `step=feistel_inverse`, the places of these units."""
    flat, units = places.reshape(-1), np.empty(places.size, np.int64)
    for start in range(0, flat.size, BLOCK):
        units[start : start + BLOCK] = cycle_walk(flat[start : start + BLOCK], domain, keys, step)
    return units.reshape(places.shape)


def cycle_walk(
    places: Int[np.ndarray, "n"], domain: Domain, keys: Halves, step: Callable = feistel
) -> Int[np.ndarray, "n"]:
    """As `shuffle_by_numpy`, all at once; keys uint32[rounds, 1], or [rounds, n] of every place."""
    high = places // domain.low
    low = (places - high * domain.low).astype(np.uint32)
    low, high = step((low, high.astype(np.uint32)), keys, domain, np.minimum)
    while (again := np.flatnonzero(out_of_range((low, high), domain))).size:
        of_them = tuple(x if x.shape[1] == 1 else x[:, again] for x in keys)
        low[again], high[again] = step((low[again], high[again]), of_them, domain, np.minimum)
    return high.astype(np.int64) * domain.low + low


@functools.partial(jax.jit, static_argnames="num_units")
def shuffle_by_jax(
    places: Int[Array, "..."], words: UInt32[Array, "k"], epoch: UInt32[Array, ""], num_units: int
) -> Int[Array, "..."]:
    """int32, the units at these places; M at places outside."""
    domain = domain_of(num_units)
    places = places.astype(jnp.promote_types(places.dtype, jnp.int32))
    inside = (places >= 0) & (places < num_units)
    places = jnp.where(inside, places.astype(jnp.uint32), np.uint32(0))
    rounds = np.arange(domain.rounds, dtype=np.uint32)
    side, keys = np.uint32(domain.low), hash_words((*words, epoch, rounds))
    step = functools.partial(feistel, keys=keys, domain=domain, least=jnp.minimum)

    def again(halves):
        where, later = out_of_range(halves, domain), step(halves)
        return jnp.where(where, later[0], halves[0]), jnp.where(where, later[1], halves[1])

    halves = step((places % side, places // side))
    low, high = jax.lax.while_loop(lambda halves: out_of_range(halves, domain).any(), again, halves)
    return jnp.where(inside, (high * side + low).astype(jnp.int32), np.int32(num_units))


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
      num_units: M, from 1 to 2^48, or to 2^31 - 1 where JAX computes.
      key: one random key.
      epoch: the number of the permutation under this key, from 0 to 2^31 - 1.

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
    words = jax.random.key_data(plans.check_key(key))
    by_jax = isinstance(index, jax.Array) or any(isinstance(x, Tracer) for x in (words, epoch))
    most = base.MOST_UNITS if by_jax else MOST
    num_units = plans.check_whole("num_units", num_units, 1, most)
    places: Any = check_places(index, num_units)
    epoch = check_epoch(epoch)
    if by_jax:
        return shuffle_by_jax(places, words, epoch, num_units)
    domain = domain_of(num_units)
    return shuffle_by_numpy(places, domain, keys_of_epoch(words, epoch, domain))


def check_places(index: Any, num_units: int) -> Int[ArrayLike, "..."]:
    """The places, of JAX or int64 of NumPy; raises ValueError for NumPy's that are outside."""
    if isinstance(index, jax.Array) and jnp.issubdtype(index.dtype, jnp.integer):
        return index
    places, kind = plans.as_array(index)
    whole = not isinstance(index, jax.Array) and (places.dtype.kind in "iu" or not places.size)
    if not whole or places.size and not 0 <= places.min() <= places.max() < num_units:
        raise ValueError(f"index is {kind}: pass the places, in [0, {num_units - 1}].")
    return places.astype(np.int64)


def check_epoch(epoch: Any) -> UInt32[ArrayLike, ""]:
    """The number of an epoch; raises ValueError unless it is one whole number in range."""
    if not isinstance(epoch, Tracer):
        return np.uint32(plans.check_whole("epoch", epoch, 0, base.MOST_UNITS))
    if epoch.shape or not jnp.issubdtype(epoch.dtype, jnp.integer):
        raise ValueError(f"epoch is {epoch.dtype}{list(epoch.shape)}: pass one whole number.")
    return epoch.astype(jnp.uint32)


def keys_of_epoch(key_data: Any, epoch: Any, domain: Domain) -> Halves:
    """The round keys of NumPy, from the data of a key."""
    words = np.array([*jax.device_get(key_data), epoch], np.uint32)
    return round_keys(words[:, None], domain.rounds)


def shuffle_within(
    numbers: Int[np.ndarray, "n"], places: Int[np.ndarray, "n"], domain: Domain, words: Any
) -> Int[np.ndarray, "n"]:
    """The units at places in groups; each group has its permutation, by its number."""
    units, state = np.empty(places.size, np.int64), hash_words(words[:, None])
    for start in range(0, places.size, BLOCK):
        part = slice(start, start + BLOCK)
        of_part = numbers[part] & 0xFFFFFFFF, numbers[part] >> 32
        keys = round_keys([x.astype(np.uint32) for x in of_part], domain.rounds, state)
        units[part] = cycle_walk(places[part], domain, keys)
    return units


def groups_together(
    places: Int[np.ndarray, "..."], num_units: int, size: int, words: UInt32[np.ndarray, "k"]
) -> Int[np.ndarray, "..."]:
    """The units at these places, where whole groups follow each other."""
    flat, shape = places.reshape(-1), places.shape
    domain, last = domain_of(-(-num_units // size)), (num_units - 1) % size + 1
    keys = round_keys(words[:, None], domain.rounds)
    # The last group may have fewer units; it begins at this place.
    begin = size * cycle_walk(np.array([domain.num_units - 1]), domain, keys, feistel_inverse)
    short = (flat >= begin) & (flat < begin + last)
    later = np.where(flat >= begin + last, size - last, 0)
    positions, within = np.divmod(flat + later, size)
    numbers, units = shuffle_by_numpy(positions, domain, keys), np.empty(flat.size, np.int64)
    for which, number in ((~short, size), (short, last)):
        units[which] = shuffle_within(numbers[which], within[which], domain_of(number), words)
    return (numbers * size + units).reshape(shape)


def groups_spread(
    places: Int[np.ndarray, "..."], num_units: int, size: int, words: UInt32[np.ndarray, "k"]
) -> Int[np.ndarray, "..."]:
    """The units at these places; those of a group are as many places apart as there are groups."""
    domain = domain_of(num_units // size)
    turn, position = np.divmod(places.reshape(-1), domain.num_units)
    numbers = shuffle_by_numpy(position, domain, round_keys(words[:, None], domain.rounds))
    units = numbers * size + shuffle_within(numbers, turn, domain_of(size), words)
    return units.reshape(places.shape)


GROUPS = {"together": groups_together, "spread": groups_spread}


class Computed(Ordering):
    """An order of all workers' units, by the key and the number of an epoch alone.

    A subclass has `epoch_units`, and says in `others` what makes its units other ones.
    """

    is_global = computed = True
    others: ClassVar[str]

    def init(self, key, params=None):
        # A copy of the key, which the caller keeps when the state is donated.
        key = jax.random.clone(plans.check_key(key))
        return ComputedState(key, *jax.device_put((np.int32(0), self.digest())))

    def observe(self, state, gradients):
        self._check(state)
        return super().observe(state, gradients)

    def next_epoch(self, state):
        self._check(state)
        one, digest = jax.device_put((np.int32(1), self.digest(self.num_units)))
        return state._replace(epoch=state.epoch + one, digest=digest)

    def units(self, state, start=0):
        return self._units(state, 0)[start:]

    def indices(self, state: ComputedState) -> Indices:
        """The units of this epoch, for other readers than those of `ordering.data`."""
        return self.units(state)

    def next_units(self, state):
        return self._units(state, 1), self.num_units

    def _units(self, state: ComputedState, later: int) -> Indices:
        self._check(state)
        epoch, digest = map(int, jax.device_get((state.epoch, state.digest)))
        if digest != self.digest(self.num_units if epoch else 0):
            raise ValueError(
                f"the state is of a {type(self).__name__} with other {self.others}: make the order "
                "with those, or begin anew without the state."
            )
        return self.epoch_units(state.key, epoch + later)

    def _check(self, state: Any) -> None:
        if type(state) is not ComputedState or np.shape(state.epoch):
            raise ValueError(
                f"{type(self).__name__} got a {type(state).__name__}: pass the state that its last "
                "call returned; all workers share one."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted(Computed):
    """What `counted` returns."""

    others = "num_units, group_size or groups"

    group_size: int = 1
    groups: str = "mixed"

    def __post_init__(self):
        num_units = plans.check_whole("num_units", self.num_units, 1, MOST)
        units_per_step = plans.check_whole("units_per_step", self.units_per_step, 1, num_units)
        group_size = plans.check_whole("group_size", self.group_size, 1, num_units)
        if self.groups not in ("mixed", *GROUPS):
            raise ValueError(f"groups is {self.groups!r}: pass one of mixed, {', '.join(GROUPS)}.")
        if self.groups == "mixed" and group_size > 1:
            raise ValueError(
                f"group_size is {group_size}, and groups 'mixed' has none: pass groups='together' "
                "or groups='spread'."
            )
        if self.groups == "spread" and num_units % group_size:
            raise ValueError(
                f"group_size is {group_size}, which does not divide num_units {num_units}: leave "
                "out the last units, or pass another, as groups that are spread are equal."
            )
        self._set(num_units=num_units, units_per_step=units_per_step, group_size=group_size)

    @property
    def total(self) -> int:
        return self.num_units

    def epoch_units(self, key, epoch):
        key_data = jax.device_get(jax.random.key_data(key))
        domain, words = domain_of(self.num_units), np.append(key_data, np.uint32(epoch))
        if self.groups == "mixed":
            keys = round_keys(words[:, None], domain.rounds)
            function = functools.partial(shuffle_by_numpy, domain=domain, keys=keys)
        else:
            sizes = {"num_units": self.num_units, "size": self.group_size}
            function = functools.partial(GROUPS[self.groups], words=words, **sizes)
        return Indices(function, self.num_units)


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
      groups: "mixed" has no groups. "together" visits one whole group after another, in a random
        order, and the units of each group in a random order, too: for files of records. "spread"
        puts the units of a group as many places apart as there are groups: for windows of a
        document; K must divide N.

    Returns:
      An `Ordering` whose state is a key and an epoch, one for all workers. `order.units(state)`
      computes units of the epoch where they are read; `observe` ignores the gradients.

    Raises:
      ValueError: if a size is out of range.

    Examples:
      >>> import jax
      >>> from syncopate import ordering
      >>> order = ordering.counted(10**10)
      >>> indices = order.units(order.init(jax.random.key(0)))
      >>> len(indices), len(indices[-3:]), 0 <= indices[9_999_999_999] < 10**10
      (10000000000, 3, True)

    References:
      Mishchenko, Khaled, Richtárik, Random Reshuffling: Simple Analysis with Vast Improvements,
      2020, https://arxiv.org/abs/2006.05988
    """
    return Counted(
        num_units=num_units, units_per_step=units_per_step, group_size=group_size, groups=groups
    )
