"""Orders that go on with another number of workers, state by state, against plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ordering
from ordering.dealing import DealtState
from ordering.elastic import Change, dealt_to, resize
from ordering.exchange import slice_size
from ordering.gathered import GatheredState
from ordering.grab import GrabState
from ordering.herding import GreedyHerdingState
from ordering.pair_balance import PairBalanceState
from ordering.shuffles import ShuffleState
from tests import reference
from tests.tables import ORDERS, steps, whole_numbers

CHANGES = [(8, 4), (4, 8), (8, 2), (4, 1), (1, 4), (6, 4), (4, 6), (9, 3), (3, 9), (2, 3), (5, 5)]
ENTRIES = 5


class Case:
    """W workers with M units, B per step, after some steps of an epoch; for W' workers."""

    def __init__(self, workers, after, step, loads, tail, visited, seed):
        lcm = np.lcm(workers, after)
        self.workers, self.after = workers, after
        self.size, self.new_size = step * lcm // workers, step * lcm // after
        together = loads * step * lcm + min(tail, step - 1) * lcm
        self.units, self.new_units = together // workers, together // after
        self.visited = min(visited * self.size, self.units)
        self.rng = np.random.default_rng(seed)
        self.new_visited = self.visited * workers // after

    def orders(self, *, dealt=False):
        """Of numbers of their own, or of all units."""
        if dealt:
            every = self.rng.permutation(self.workers * self.units)
            return every.reshape(self.workers, self.units).astype(np.int32)
        own = np.arange(self.units, dtype=np.int32)[None].repeat(self.workers, axis=0)
        return self.rng.permuted(own, axis=1)

    def owned(self):
        """What is owned after earlier changes: no worker's units are neighbours."""
        every = self.rng.permutation(self.workers * self.units)
        return np.sort(every.reshape(self.workers, self.units), axis=1).astype(np.int32)

    def pairs(self, current, sums, *, coordinated):
        """The state of a pair order, whose signs are coins."""
        odd = self.size % 2
        position = self.visited if odd else self.visited // 2 * 2
        following, count = current.copy(), position // 2
        plus = self.rng.random((self.workers, count)) < 0.5
        first, second = current[:, : 2 * count : 2], current[:, 1 : 2 * count : 2]
        following[:, :count] = np.where(plus, first, second)
        following[:, self.units - count :] = np.where(plus, second, first)[:, ::-1]
        shape = (self.workers, self.workers, sums.shape[1]) if coordinated else (self.workers, 1, 5)
        pending = whole_numbers(shape, seed=3) if odd else ()
        positions = np.full(self.workers, position, np.int32)
        return PairBalanceState(current, following, positions, sums, pending, ())

    def change(self, order, *, coordinated=False, init=None):
        return Change(
            self.after, (self.size, self.new_size), self.visited, order, init, coordinated, ENTRIES
        )

    def fresh_pairs(self, *, coordinated):
        """As `init` gives it, without a compiler."""
        size = slice_size(ENTRIES, self.after)
        shape = (self.after, self.after, size) if coordinated else (self.after, 1, ENTRIES)
        sums = np.zeros((self.after, size if coordinated else ENTRIES), np.float32)
        pending = np.zeros(shape, np.float32) if self.new_size % 2 else ()
        zeros = np.zeros((self.after, self.new_units), np.int32)
        return PairBalanceState(zeros, zeros, zeros[:, 0], sums, pending, ())


cases = st.builds(
    lambda pair, *rest: Case(*pair, *rest),
    st.sampled_from(CHANGES), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3),
    st.integers(0, 6), st.integers(0, 2**32 - 1),
)  # fmt: skip


def global_of(owned, numbers):
    return np.take_along_axis(owned, np.asarray(numbers), axis=1)


def placed_pairs(state, count):
    """[(front, back)] of every worker."""
    nexts = np.asarray(state.next).tolist()
    return [[(row[k], row[len(row) - 1 - k]) for k in range(count)] for row in nexts]


def check_each_once(case, before, after):
    """Visited units stay visited, the others are to be visited, each by one worker."""
    for rows, new in (
        (before[:, : case.visited], after[:, : case.new_visited]),
        (before[:, case.visited :], after[:, case.new_visited :]),
    ):
        assert new.shape[0] == case.after
        np.testing.assert_array_equal(np.sort(rows, axis=None), np.sort(new, axis=None))


def check_steps_kept(case, before, after):
    """Every step to come has the units that it would have had."""
    old, new = steps(case.units, case.size), steps(case.new_units, case.new_size)
    for (a, b), (c, d) in zip(old, new, strict=True):
        if a >= case.visited:
            np.testing.assert_array_equal(
                np.sort(before[:, a:b], axis=None), np.sort(after[:, c:d], axis=None)
            )


@given(cases, st.booleans(), st.booleans())
def test_pairs_stay_where_they_were_placed(case, coordinated, dealt):
    current, owned = case.orders(dealt=dealt), case.owned()
    sums = (case.workers, slice_size(ENTRIES, case.workers)) if coordinated else (case.workers, 5)
    sums = 840 * whole_numbers(sums, seed=1)  # of which a part is a whole number
    if coordinated:  # what the last slices are filled up with is zero
        sums.reshape(-1)[ENTRIES:] = 0
    state = case.pairs(current, sums, coordinated=coordinated)
    fresh = case.fresh_pairs(coordinated=coordinated)
    change = case.change(None, coordinated=coordinated, init=fresh)
    if dealt:
        everyone = np.broadcast_to(current, (case.workers, *current.shape))
        change = change._replace(fresh=DealtState(fresh, None))
        new, none = resize(DealtState(state, everyone), change)
        assert none is None
        np.testing.assert_array_equal(new.everyone, np.stack([new.current] * case.after))
        new, before = new.pairs, state
    else:
        new, units = resize(state, change, owned)
        names = functools.partial(global_of, owned)
        before = state._replace(current=names(state.current), next=names(state.next))
        assert sorted(units.reshape(-1).tolist()) == list(range(case.workers * case.units))
        assert all(sorted(row) == list(range(case.new_units)) for row in new.current.tolist())
        new = new._replace(current=global_of(units, new.current), next=global_of(units, new.next))
    check_each_once(case, before.current, new.current)
    check_steps_kept(case, before.current, new.current)

    count = int(state.left[0])
    orders, placed, waiting = reference.elastic_pairs(
        before.current.tolist(), placed_pairs(before, count), case.after, case.size, case.visited
    )
    assert new.current.tolist() == orders
    odd = case.new_size % 2
    assert set(new.position.tolist()) == {case.new_visited // (2 - odd) * (2 - odd)}
    assert placed_pairs(new, case.new_visited // 2) == placed
    # The running sum.
    if coordinated:
        joined = np.ravel(new.running_sum)
        np.testing.assert_array_equal(joined[:ENTRIES], np.ravel(state.running_sum)[:ENTRIES])
        assert not joined[ENTRIES:].any()
    else:
        np.testing.assert_array_equal(new.running_sum.sum(axis=0), state.running_sum.sum(axis=0))
    check_pending(case, state, new, waiting, coordinated)


def check_pending(case, state, new, waiting, coordinated):
    """The gradient of the unit that waits, or none: then its next pair adds nothing."""
    if not case.new_size % 2:
        assert new.pending == ()
        return
    for w, owners in enumerate(waiting):
        found = np.ravel(new.pending[:, w])[:ENTRIES] if coordinated else new.pending[w, 0]
        if not owners:
            assert not found.any()
        elif owners[0] is None or not case.size % 2:
            assert np.isnan(found).all()
        else:
            old = state.pending[:, owners[0]] if coordinated else state.pending[owners[0], 0]
            np.testing.assert_array_equal(found, np.ravel(old)[:ENTRIES])


@given(cases, st.booleans())
def test_gathered_pairs_keep_their_signs(case, waits):
    current, owned = case.orders(), case.owned()
    own = case.pairs(current, np.zeros((case.workers, 5), np.float32), coordinated=False)
    total = np.repeat(whole_numbers((1, ENTRIES), seed=1), case.workers, axis=0)
    pending = own.pending[:, 0] if case.size % 2 else ()
    waiting = np.ones((case.workers, case.units // 2, 5), np.float32) if waits else ()
    state = GatheredState(
        current, own.next, own.position, own.position // 2, total, pending, waiting, ()
    )
    fresh = case.fresh_pairs(coordinated=False)
    shape = (case.after, case.new_units // 2, 5)
    fresh = state._replace(
        pending=fresh.pending[:, 0] if case.new_size % 2 else (),
        waiting=np.zeros(shape, np.float32) if waits else (),
    )
    new, units = resize(state, case.change(None, coordinated=True, init=fresh), owned)
    like, same = resize(
        own, case.change(None, init=case.fresh_pairs(coordinated=False)), owned
    )  # fmt: skip
    np.testing.assert_array_equal(units, same)
    for name in ("current", "next", "position"):
        np.testing.assert_array_equal(getattr(new, name), getattr(like, name))
    np.testing.assert_array_equal(new.signed, like.left)
    np.testing.assert_array_equal(new.running_sum, np.repeat(total[:1], case.after, axis=0))
    np.testing.assert_array_equal(new.pending, like.pending[:, 0] if case.new_size % 2 else ())
    assert np.shape(new.waiting) == (shape if waits else (0,)) and not np.any(new.waiting)
    if case.visited > 1:
        with pytest.raises(ValueError, match="wait for their signs: call Ordering.sync first"):
            resize(state._replace(signed=0 * state.signed), case.change(None, init=fresh), owned)


@given(cases)
def test_single_units_stay_in_front_or_behind(case):
    current, owned = case.orders(), case.owned()
    front = case.rng.random((case.workers, case.units)) < 0.5
    front[:, case.visited :] = False
    following, vectors = current.copy(), 840 * whole_numbers((case.workers, 5), seed=1)
    for row, new, side in zip(current, following, front[:, : case.visited], strict=True):
        ahead, behind = row[: case.visited][side], row[: case.visited][~side]
        new[: len(ahead)], new[case.units - len(behind) :] = ahead, behind[::-1]
    state = GrabState(
        current, following, np.full(case.workers, case.visited, np.int32),
        front.sum(axis=1, dtype=np.int32), vectors, vectors, vectors, (),
    )  # fmt: skip
    new, units = resize(state, case.change(None, init=state), owned)
    before, after = global_of(owned, current), global_of(units, new.current)
    check_each_once(case, before, after)
    assert after.tolist() == reference.elastic_units(before.tolist(), case.after, case.size)
    sides = reference.elastic_units(front.tolist(), case.after, case.size)
    for w, (row, side) in enumerate(zip(after.tolist(), sides, strict=True)):
        side = side[: case.new_visited]
        found = global_of(units, new.next)[w].tolist()
        ahead = [u for u, s in zip(row, side, strict=False) if s]
        behind = [u for u, s in zip(row, side, strict=False) if not s]
        assert new.left[w] == len(ahead) and found[: len(ahead)] == ahead
        assert found[case.new_units - len(behind) :] == behind[::-1]
    np.testing.assert_array_equal(new.gathered.sum(axis=0), vectors.sum(axis=0))
    np.testing.assert_array_equal(new.running_sum, new.gathered)
    np.testing.assert_allclose(new.mean.mean(axis=0), vectors.mean(axis=0), rtol=1e-6, atol=1e-3)
    assert (new.position == case.new_visited).all()


@given(cases)
def test_herding_keeps_every_units_gradient(case):
    current, owned = case.orders(), case.owned()
    gradients = owned[:, :, None].astype(np.float32)  # the unit's number
    none = np.zeros(case.workers, np.int32)
    state = GreedyHerdingState(current, current.copy(), none + case.visited, none, gradients)
    new, units = resize(state, case.change(None, init=state), owned)
    np.testing.assert_array_equal(new.gradients[:, :, 0], units)
    check_each_once(case, global_of(owned, current), global_of(units, new.current))


def started(order, workers):
    """First states of an order, compiled."""
    keys = jax.random.split(jax.random.key(workers), workers)
    init = jax.vmap(lambda key: order.init(key, jnp.zeros(ENTRIES)), axis_name="worker")
    return jax.jit(init)(keys)


@functools.cache
def compiled(name, units, size, workers):
    """(first states, observe, next_epoch) of all workers under one name of tables.ORDERS."""
    order = ORDERS[name].make(units, size)

    def observe(state, gradients):
        return order.observe(state, ordering.Rows.of(gradients))

    over = functools.partial(jax.vmap, axis_name="worker")
    return order, started(order, workers), jax.jit(over(observe)), jax.jit(over(order.next_epoch))


RUNS = ["flip_flop"]
# 4 workers with 8 units, 2 per step, and 8 with 4; 3 steps are odd for the latter.
SIZES = {4: (8, 2), 8: (4, 1)}


@pytest.mark.parametrize("before,after", [(4, 8), (8, 4)])
@pytest.mark.parametrize("name", [*RUNS, "cd_grab_walk", "grab"])
def test_each_unit_is_visited_once_in_the_broken_epoch_and_in_the_next(name, before, after):
    gradients = whole_numbers((32, ENTRIES), seed=5)
    owned, visited = np.arange(32, dtype=np.int32).reshape(before, -1), [[]]
    order, state, observe, next_epoch = compiled(name, *SIZES[before], before)
    observes = ORDERS[name].observes

    def step(state, workers, observe, at):
        units, size = SIZES[workers]
        mine = np.asarray(state.current)[:, at * size : (at + 1) * size]
        numbers = np.take_along_axis(owned, mine, axis=1)
        visited[-1].extend(numbers.reshape(-1).tolist())
        return observe(state, gradients[numbers]) if observes else state

    for at in range(3):
        state = step(state, before, observe, at)
    new_order, fresh, observe, next_epoch = compiled(name, *SIZES[after], after)
    coordinated = ORDERS[name].coordinated
    sizes = SIZES[before][1], SIZES[after][1]
    change = Change(after, sizes, 3 * sizes[0], new_order, fresh, coordinated, ENTRIES)
    old = state
    state, owned = resize(state, change, owned)
    like = jax.tree.map(lambda x: (x.shape, x.dtype), fresh)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == like
    state = jax.tree.map(jnp.asarray, state)
    if isinstance(state, ShuffleState):
        assert all(sorted(row) == list(range(SIZES[after][0])) for row in state.next.tolist())
    for at in range(3, 4):
        state = step(state, after, observe, at)
    for _ in range(2):
        state = next_epoch(state)
        visited.append([])
        for at in range(4):
            state = step(state, after, observe, at)
    assert [sorted(seen) for seen in visited] == [list(range(32))] * 3
    if observes:
        assert np.isfinite(jax.tree.leaves(state.running_sum)[0]).all()
    if name == "cd_grab_walk":  # coins go on where they were, from the shared key
        assert state.rule.count[0] > old.rule.count[0] > 0
        np.testing.assert_array_equal(*(jax.random.key_data(s.rule.key)[0] for s in (state, old)))


def test_what_waits_for_a_lost_gradient_adds_nothing():
    """4 to 8 workers: the pairs of the third step are split, and their partners come in the 4th."""
    gradients = whole_numbers((32, ENTRIES), seed=5)
    order, state, observe, _ = compiled("cd_grab_walk", *SIZES[4], 4)
    for at in range(3):
        numbers = np.take_along_axis(
            np.arange(32).reshape(4, 8), np.asarray(state.current)[:, 2 * at : 2 * at + 2], axis=1
        )
        state = observe(state, gradients[numbers])
    order, fresh, observe, _ = compiled("cd_grab_walk", *SIZES[8], 8)
    change = Change(8, (2, 1), 6, order, fresh, coordinated=True, entries=ENTRIES)
    new, owned = resize(state, change, np.arange(32).reshape(4, 8))
    total = np.ravel(state.running_sum)[:ENTRIES]
    np.testing.assert_array_equal(np.ravel(new.running_sum)[:ENTRIES], total)
    assert np.isnan(new.pending).any() and total.any()
    numbers = np.take_along_axis(owned, new.current[:, 3:], axis=1)
    new = observe(jax.tree.map(jnp.asarray, new), gradients[numbers])
    np.testing.assert_array_equal(np.ravel(new.running_sum)[:ENTRIES], total)
    assert np.isfinite(new.pending).all() and (new.left == 2).all()


class Mine:
    """A state that nobody knows of."""

    def __init__(self, current, next):
        self.current, self.next = current, next

    _fields = ("current", "next")

    def _replace(self, **fields):
        return Mine(**({"current": self.current, "next": self.next} | fields))


jax.tree_util.register_pytree_node(
    Mine, lambda x: ((x.current, x.next), None), lambda _, children: Mine(*children)
)


def test_an_unknown_order_changes_between_two_epochs_alone():
    case = Case(4, 2, 1, 3, 0, 1, seed=0)
    current, owned = case.orders(), case.owned()
    state, fresh = Mine(current, current), Mine(None, None)
    with pytest.raises(ValueError, match="Mine has no row in ordering.elastic, .* at the end of"):
        resize(state, case.change(None, init=fresh), owned)
    new, units = resize(state, case.change(None, init=fresh)._replace(visited=0), owned)
    expected = reference.elastic_units(global_of(owned, current).tolist(), 2, case.size)
    assert global_of(units, new.current).tolist() == global_of(units, new.next).tolist() == expected


def test_merging_neighbours_keep_their_shards():
    case = Case(8, 4, 1, 3, 0, 2, seed=0)
    rows = case.orders(dealt=True)
    change = case.change(None)
    own = np.arange(case.workers * case.units).reshape(case.workers, -1)
    new = np.sort(dealt_to(global_of(own, case.orders()), change), axis=1)
    np.testing.assert_array_equal(new, own.reshape(4, -1))
    assert dealt_to(rows, change).shape == (4, case.new_units)
