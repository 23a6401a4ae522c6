"""Orders over the units of all workers, dealt anew in every epoch: units move between workers."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ordering import base
from ordering.exchange import shared_key
from ordering.gathered import GatheredState
from ordering.pair_balance import PairBalanceState
from ordering.shuffles import shuffled
from syncopate import mesh

HOW = ("round_robin", "chunks")


class DealtState(NamedTuple):
    """State of one worker; `everyone` is equal on all."""

    pairs: Any  # of the pair order; its units are numbers in [0, total)
    everyone: jax.Array  # int32[W, M], the current orders of all workers
    waiting: Any  # int32[total - W M], neighbours, which this epoch leaves out; () where none are

    @property
    def current(self):
        return self.pairs.current

    @property
    def next(self):
        return _relieved(self.pairs.next, self)

    @property
    def left(self):
        return self.pairs.left


class ChunksState(DealtState):
    """`DealtState` of chunks: whose next units are known, and when, differs between workers."""

    left = property(lambda self: jnp.zeros_like(self.pairs.left))


def dealt(
    order: base.Ordering,
    num_units: int,
    *,
    how: str = "round_robin",
    total: int | None = None,
    axis_name="worker",
) -> base.Ordering:
    """An order over all units, from the pairs that workers balance, dealt anew each epoch.

    All pairs are placed in one order, from both ends, in the sequence in which they are signed:
    the k-th pair (a, b) of worker w takes the places p = k W + w and W M - 1 - p, a in front if
    its sign is +. Place q then goes to

        round_robin:  worker q mod W, as its unit q // W;      chunks:  worker q // M, as q mod M.

    Where all workers meet in every step, round robin visits what fixed shards visit, for every step
    takes the next W B places of the one order. Under local steps the workers' data are the same in
    distribution, which takes away the error of fixed shards.

    Units that are left over take the places of as many others from epoch to epoch: first the last
    ones wait, then the first ones, and so on.

    Every worker knows the orders of all, 4 bytes for a unit, and at the epoch's end they tell each
    other their signs: a bit for every pair, and nothing else. Data must be readable by all workers.

    Args:
      order: `cd_grab` or `pair_balance` of `num_units`; with the latter every worker balances its
        own pairs.
      num_units: M >= 1, units per worker and epoch.
      how: "round_robin" or "chunks". With chunks no unit of the next epoch is known before its
        beginning, so input cannot read ahead.
      total: units of the data, from W M to 2 W M. None: W M.
      axis_name: the workers' axis.

    Returns:
      An `Ordering` whose `current` names units in [0, total), with `DealtState`. The first order is
      a random one of the first W M units, from worker 0's key.

    Raises:
      ValueError: for sizes or a `how` that do not fit, at construction; from `init`, for an order
        that places no pairs, or a total that is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, ordering
      >>> order = ordering.dealt(ordering.cd_grab(4, units_per_step=2), 4)
      >>> keys = jax.random.split(jax.random.key(0), 8)  # 8 workers on one device
      >>> state = jax.vmap(lambda key: order.init(key, jnp.zeros(3)), axis_name="worker")(keys)
      >>> sorted(state.current.ravel().tolist()) == list(range(32))
      True

    References:
      Cooper et al., Coordinating Distributed Example Orders for Provably Accelerated Training,
      2023, https://arxiv.org/abs/2302.00845, whose units stay where they are.
    """
    base.check_num_units(num_units)
    if how not in HOW:
        raise ValueError(f"how is {how!r}: units are dealt by one of {', '.join(HOW)}.")
    state_of = DealtState if how == "round_robin" else ChunksState

    def init(key, params):
        first = jax.random.fold_in(shared_key(key, axis_name), 0)
        everyone = _shuffled(first, num_units, axis_name)
        all_units = _all_units(num_units, total, axis_name)
        if all_units > 2 * everyone.size:
            raise ValueError(
                f"total is {total}: at most as many units wait as are visited, {everyone.size}. "
                "Raise num_units."
            )
        waiting = jnp.arange(everyone.size, all_units, dtype=jnp.int32)
        pairs = order.init(key, params)
        if not isinstance(pairs, PairBalanceState | GatheredState):
            raise ValueError(
                f"the order's state is {type(pairs).__name__}: what is dealt are the signs of "
                "pairs; pass cd_grab or pair_balance, or use dealt_reshuffling."
            )
        if pairs.current.shape != (num_units,):
            raise ValueError(
                f"num_units is {num_units} and the order has {pairs.current.shape[0]} units: "
                "make both for the same number."
            )
        everyone = mesh.varying(everyone, key)  # as what is gathered at an epoch's end
        waiting = mesh.varying(waiting, key) if waiting.size else ()
        return state_of(_begun(pairs, everyone, axis_name), everyone, waiting)

    def observe(state, rows):
        return state._replace(pairs=order.observe(state.pairs, rows))

    def sync(state):
        return state._replace(pairs=order.sync(state.pairs))

    def next_epoch(state):
        mesh.axis_size(axis_name)  # raises outside of it
        before, after = state.pairs, order.next_epoch(state.pairs)
        count = num_units // 2
        told = jax.lax.all_gather(jnp.packbits(base.signs_of(before, after.current)), axis_name)
        signs = jax.vmap(lambda bits: jnp.unpackbits(bits, count=count) > 0)(told)
        placed = jnp.minimum(before.position, num_units) // 2
        everyone = deal(jax.vmap(_placed, (0, 0, None))(state.everyone, signs, placed), how)
        everyone = jax.vmap(_relieved, (0, None))(everyone, state)
        return state_of(_begun(after, everyone, axis_name), everyone, _following(state))

    return base.Ordering(init, observe, next_epoch, sync)


def dealt_reshuffling(
    num_units: int, *, total: int | None = None, axis_name="worker"
) -> base.Ordering:
    """Random reshuffling over the units of all workers: a fresh shuffle, dealt to them, each epoch.

    Args:
      num_units: M >= 1, units per worker and epoch.
      total: units of the data, at least W M; those left over are others in every epoch. None: W M.
      axis_name: the workers' axis.

    Returns:
      An `Ordering` whose `current` names units in [0, total); `observe` ignores the rows. All
      workers draw the same shuffle, from worker 0's key, which is sent once an epoch: so simulated
      workers draw it once.

    Raises:
      ValueError: if num_units is below 1; from `init`, if total is below W M.

    Example:
      >>> import jax, ordering
      >>> order = ordering.dealt_reshuffling(4)
      >>> keys = jax.random.split(jax.random.key(0), 2)
      >>> state = jax.vmap(lambda key: order.init(key, None), axis_name="worker")(keys)
      >>> sorted(jax.vmap(order.next_epoch, axis_name="worker")(state).current.ravel().tolist())
      [0, 1, 2, 3, 4, 5, 6, 7]

    References:
      Mishchenko, Khaled, Richtárik, Random Reshuffling: Simple Analysis with Vast Improvements,
      2020, https://arxiv.org/abs/2006.05988
    """

    def own(key, epoch):
        shared = shared_key(jax.random.fold_in(key, epoch), axis_name)
        return _shuffled(shared, num_units, axis_name, total)[jax.lax.axis_index(axis_name)]

    return shuffled(num_units, lambda key, epoch, _: own(key, epoch), lambda key: own(key, 0))


def deal(placed: jax.Array, how: str) -> jax.Array:
    """int32[W, M], the units of every worker, after the pairs of every worker have been placed.

    Row w of `placed` are the pairs of worker w from both ends; so worker w's place m is place
    m W + w of the order of all units in its first half, and m W + (W - 1 - w) in the second.
    """
    half = (placed.shape[1] + 1) // 2
    in_turn = jnp.concatenate([placed[:, :half], placed[::-1, half:]], axis=1)
    return in_turn if how == "round_robin" else in_turn.T.reshape(placed.shape)


def _following(state):
    """The units that the next epoch leaves out: the neighbours of those that wait now."""
    if isinstance(state.waiting, tuple):
        return state.waiting
    total = math.prod(state.everyone.shape[-2:]) + state.waiting.shape[-1]
    return (state.waiting + state.waiting.shape[-1]) % total


def _relieved(units, state):
    """Units of the next epoch: those that wait now are in the places of those that wait then."""
    if isinstance(state.waiting, tuple):
        return units
    count = state.waiting.shape[-1]
    total = math.prod(state.everyone.shape[-2:]) + count
    leaves = (units - _following(state)[..., :1]) % total < count
    return jnp.where(leaves, (units - count) % total, units)


def _placed(current, plus, count):
    """int32[M], a worker's next order, from the signs of its first `count` pairs."""
    paired = 2 * plus.shape[0]
    first, second = current[:paired:2], current[1:paired:2]
    front, back = jnp.where(plus, first, second), jnp.where(plus, second, first)
    following = jnp.concatenate([front, current[paired:], back[::-1]])
    return base.fill_middle(following, current, count, 2 * count)


def _begun(pairs, everyone, axis_name):
    """The state of a pair order at the beginning of its epoch, with the units dealt to it."""
    own = everyone[jax.lax.axis_index(axis_name)]
    return pairs._replace(current=own, next=jnp.copy(own))


def _all_units(num_units, total, axis_name) -> int:
    workers = mesh.axis_size(axis_name)
    dealt = workers * num_units
    if total is not None and total < dealt:
        raise ValueError(
            f"total is {total}, and {workers} workers with {num_units} units each take {dealt}: "
            "lower num_units, or pass the number of units that there are."
        )
    return dealt if total is None else total


def _shuffled(key, num_units, axis_name, total=None):
    """int32[W, M]: a random order of all units, which `key`, of all workers, draws."""
    workers, total = mesh.axis_size(axis_name), _all_units(num_units, total, axis_name)
    drawn = base.permutation(key, total)[: workers * num_units]
    return drawn.reshape(workers, num_units)
