"""Orders that continue with another number of workers, in the middle of an epoch."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ordering
from ordering.resizing import redistribute, resize
from tests import reference
from tests.cases import mostly_slow
from tests.problems import assert_bitwise_equal
from tests.tables import ORDERS, Order, steps, vmap_workers, whole_numbers

ENTRIES = 5


class Turned(NamedTuple):
    current: jax.Array
    next: jax.Array
    left: jax.Array
    epoch: jax.Array


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3)
)
def test_every_step_keeps_its_units_and_every_unit_has_one_worker(before, after, step, loads, tail):
    """So at any step the same units have been visited as before."""
    lcm = math.lcm(before, after)
    together = loads * step * lcm + min(tail, step - 1) * lcm  # units
    size, new_size = step * lcm // before, step * lcm // after
    rows = np.random.default_rng(together).permutation(together).reshape(before, -1)
    new = redistribute(rows, after, size)
    assert new.tolist() == reference.redistributed(rows.tolist(), after, size)
    old_steps, new_steps = steps(rows.shape[1], size), steps(new.shape[1], new_size)
    for (a, b), (c, d) in zip(old_steps, new_steps, strict=True):
        np.testing.assert_array_equal(np.sort(rows[:, a:b], None), np.sort(new[:, c:d], None))


GLOBAL = {  # 20 units, of which each epoch leaves out two
    "global": lambda m, b: ordering.global_order(
        ordering.cd_grab(m, units_per_step=b, gathers="step"), m, total=20
    ),
    "global_reshuffling": lambda m, b: ordering.global_reshuffling(m, total=20),
}
FIXED = ("block_reshuffling", "grab", "greedy_herding", "cd_grab_walk", "cd_grab, at syncs")
NAMED = {name: ORDERS[name] for name in (*FIXED, "kh")}
NAMED |= {name: Order(make, name != "global_reshuffling") for name, make in GLOBAL.items()}
# 18 units, 6 in a step: 3 workers with 6 each, or 2 with 9 each, where one has no partner.
SIZES, STEPS = {3: (6, 2), 2: (9, 3)}, 3


@functools.cache
def compiled(name, workers):
    """(the order, its first states, observe, next_epoch), of all workers."""
    order = NAMED[name].make(*SIZES[workers])

    def observe(state, gradients):
        return order.observe(state, gradients)

    keys = jax.random.split(jax.random.key(workers), workers)
    started = vmap_workers(lambda key: order.init(key, jnp.zeros(ENTRIES)))(keys)
    return order, started, vmap_workers(observe), vmap_workers(order.next_epoch)


GRADIENTS = whole_numbers((20, ENTRIES), seed=5)


def visit(name, state, units, places, seen):
    """The state after these steps of an epoch; `seen` gets their units."""
    observe, size = compiled(name, len(state.current))[2], SIZES[len(state.current)][1]
    for at in places:
        numbers = np.asarray(state.current)[:, at * size : (at + 1) * size]
        if units is not None:
            numbers = np.take_along_axis(units, numbers, axis=1)
        seen.extend(numbers.reshape(-1).tolist())
        if NAMED[name].observes:
            state = observe(state, GRADIENTS[numbers])
    return state


def mean_taken_over(before, after):
    """For each worker the mean, over the slots of a step that it takes, of their workers' means."""
    means = GRADIENTS[:18].reshape(before, -1, ENTRIES).mean(axis=1)
    slots = np.repeat(np.arange(before), SIZES[before][1])
    return means[slots].reshape(after, -1, ENTRIES).mean(axis=1)


@pytest.mark.parametrize("name,counter", [("kh", "epoch"), ("cd_grab_walk", "signed")])
def test_between_epochs_the_counters_of_rules_are_kept(name, counter):
    _, first, _, next_epoch = compiled(name, 3)
    order, fresh, _, following = compiled(name, 2)
    units = np.arange(18).reshape(3, -1)
    state = next_epoch(visit(name, first, units, range(STEPS), []))
    new, _ = ordering.resize(state, fresh, order, units, units_per_step=2, visited=0)
    counted = np.asarray(getattr(state.rule, counter))
    assert counted[0] and getattr(new.rule, counter).tolist() == [counted[0]] * 2
    assert new.epoch.tolist() == [1] * 2 and (new.rule.key == fresh.rule.key).all()
    following(jax.tree.map(jnp.asarray, new))


BOTH_WAYS = ("grab", "cd_grab_walk", "global")
CHANGES = [(name, 3, 2) for name in (*FIXED, *GLOBAL)] + [(name, 2, 3) for name in BOTH_WAYS]


@pytest.mark.parametrize("name,before,after", mostly_slow(CHANGES, quick=CHANGES[::3]))
def test_each_unit_is_visited_once_per_epoch_across_a_resize(name, before, after):
    _, first, _, next_epoch = compiled(name, before)
    order, fresh, _, following = compiled(name, after)
    units, size = SIZES[after]
    for place in range(STEPS + 1):
        numbers = None if name in GLOBAL else np.arange(18).reshape(before, -1)
        # The second epoch is interrupted, whose order was made from gradients.
        state = next_epoch(visit(name, first, numbers, range(STEPS), []))
        seen = []
        state = visit(name, state, numbers, range(place), seen)
        state, numbers = resize(
            state, fresh, order, numbers, units_per_step=SIZES[before][1], visited=place * size
        )
        jax.tree.map(lambda x, y: np.testing.assert_equal(x.shape, y.shape), state, fresh)
        if name == "grab" and place == 0:
            np.testing.assert_allclose(state.mean, mean_taken_over(before, after), rtol=1e-6)
        state = jax.tree.map(jnp.asarray, state)
        current = np.asarray(state.current)
        state = visit(name, state, numbers, range(place, STEPS), seen)
        num_final, ahead = int(state.left.min()), np.array(state.next)
        state = following(state)
        read_ahead = ahead[:, :num_final]
        np.testing.assert_array_equal(state.current[:, :num_final], read_ahead)
        assert len(set(seen)) == len(seen) == 18
        if place and NAMED[name].observes and name not in (*GLOBAL, "greedy_herding"):
            once_more = current.copy()
            if units % 2 and name != "grab":  # the unit without a partner
                half = units // 2
                once_more = np.insert(current[:, :-1], half, current[:, -1], axis=1)
            epoch = np.full(after, 2, np.int32)
            expected = fresh._replace(current=once_more, next=once_more, epoch=epoch)
            forget = dict.fromkeys({"pending", "rule", "mean"} & {*fresh._fields}, ())
            assert_bitwise_equal(state._replace(**forget), expected._replace(**forget))
            if name == "grab":
                np.testing.assert_allclose(state.mean, mean_taken_over(before, after), rtol=1e-6)
        left = set(range(20)) - set(seen)
        for _ in range(2):
            seen = []
            state = following(visit(name, state, numbers, range(STEPS), seen))
            assert len(set(seen)) == len(seen) == 18
        assert name not in GLOBAL or set(range(20)) - set(seen) != left  # others wait now


def test_an_order_of_ones_own_is_resized_only_between_epochs():
    class Mine(ordering.Ordering):
        def init(self, key, params=None):
            rows = jnp.arange(self.num_units)
            return Turned(rows, rows, *jnp.zeros((2,), jnp.int32))

        def next_epoch(self, state):
            return state

    state, fresh = (
        ordering.init_workers(Mine(num_units=8 // w), jax.random.key(0), None, w) for w in (4, 2)
    )
    state = state._replace(current=state.current[:, ::-1])
    given = {"order": Mine(num_units=4), "units": np.arange(8).reshape(4, 2), "units_per_step": 1}
    with pytest.raises(ValueError, match="Mine has no method resize.* at the end of"):
        ordering.resize(state, fresh, visited=1, **given)
    new, units = ordering.resize(state, fresh, visited=0, **given)
    assert units.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert new.current.tolist() == new.next.tolist() == [[1, 3, 0, 2]] * 2
