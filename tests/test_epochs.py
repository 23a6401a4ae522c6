"""The boundary of an epoch: the next one is read before this one has ended."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.input import pipeline
from tests import tables
from tests.sources import Examples, assert_same, plain_loop
from tests.waiting import wait_for

pytest.importorskip("tensorflow")


def some_orders(name, num_units, units_per_step, workers=3):
    """`(state, observe, next_epoch)` of all workers; `observe(state, steps)` runs those steps."""
    order = tables.ORDERS[name].make(num_units, units_per_step)
    gradients = jnp.asarray(tables.whole_numbers((workers, num_units, 4)))
    keys = jax.random.split(jax.random.key(0), workers)
    state = tables.vmap_workers(lambda key, g: order.init(key, g[0]))(keys, gradients)

    @functools.cache
    def step(size):
        def one_worker(state, gradients, start):
            unit = jax.lax.dynamic_slice_in_dim(state.current, start, size)
            return order.observe(state, ordering.Rows.of(gradients[unit]))

        return tables.vmap_workers(one_worker)

    def observe(state, steps):
        for start, stop in steps:
            state = step(stop - start)(state, gradients, jnp.full(workers, start))
        return state

    return state, observe, tables.vmap_workers(order.next_epoch)


def reader(source, units_per_step, num_units):
    """What a user writes: the orders of the steps from `first_step` on, to batches."""

    def read(orders, first_step):
        indices, batch_size = pipeline.step_indices(
            orders, units_per_step=units_per_step, num_units=num_units
        )
        return pipeline.batches(source, indices, batch_size=batch_size, first_batch=first_step)

    return read


@pytest.mark.parametrize("name", ["cd_grab", "pair_balance", "grab", "random_reshuffling", "unzip"])
@pytest.mark.parametrize("num_units,units_per_step", [(12, 2), (13, 3), (1, 1), (2, 1)])
def test_the_front_of_the_next_epoch_is_read_before_this_one_ends(name, num_units, units_per_step):
    state, observe, next_epoch = some_orders(name, num_units, units_per_step)
    source = Examples(np.arange(3 * num_units) * 10)
    read = reader(source, units_per_step, num_units)
    steps = tables.steps(num_units, units_per_step)

    def expected(state):
        indices, size = pipeline.step_indices(state.current, units_per_step=units_per_step)
        return plain_loop(source.arrays, indices, size)

    assert_same(ordering.input.read_epoch(read, state), expected(state))
    for _ in range(2):
        earlier = observe(state, steps[:-1])
        source.asked.clear()
        front = ordering.input.prefetch_next_epoch(read, earlier, units_per_step=units_per_step)
        if num_units > 2:
            assert front.num_steps >= 1
            first = np.asarray(front.orders[:, :units_per_step])
            first = (first + num_units * np.arange(3)[:, None]).reshape(-1).tolist()
            wait_for(lambda first=first: set(first) <= set(source.asked))
        state = next_epoch(observe(earlier, steps[-1:]))
        assert_same(ordering.input.read_epoch(read, state, front), expected(state))


def test_one_worker_and_a_donated_state():
    order = ordering.shuffle_once(10)
    state = order.init(jax.random.key(0), None)._replace(left=jnp.array(5))
    read = reader(np.arange(10), 2, 10)
    expected = plain_loop(np.arange(10), np.asarray(state.current), 2)
    front = ordering.input.prefetch_next_epoch(read, state, units_per_step=2)
    assert front.orders.tolist() == state.current[:4].tolist()
    state = order.next_epoch(state)
    stream = ordering.input.read_epoch(read, state, front)
    state.current.delete()  # as a step with donated arguments does
    assert_same(stream, expected)


def test_reads_are_asked_in_whole_steps_from_where_the_front_ends():
    calls = []

    def read(orders, first_step):
        calls.append((orders.shape, first_step))
        return iter(np.array_split(orders, -(-orders.shape[-1] // 3), axis=-1))

    state, observe, next_epoch = some_orders("cd_grab", 20, 3)
    state = observe(state, tables.steps(20, 3)[:5])
    front = ordering.input.prefetch_next_epoch(read, state, units_per_step=3)
    assert calls == [((3, 6), 0)]  # 15 observed, 7 pairs placed
    stream = ordering.input.read_epoch(read, next_epoch(state), front)
    next(stream)
    assert len(calls) == 1  # the host goes on without the new order
    next(stream)
    assert calls[1:] == [((3, 14), 2)]
    late = state._replace(position=jnp.array([14, 3, 14]))
    assert ordering.input.prefetch_next_epoch(read, late, units_per_step=3).num_steps == 0


def test_a_front_of_another_epoch():
    state, _, _ = some_orders("random_reshuffling", 12, 2)
    read = reader(np.arange(36), 2, 12)
    front = ordering.input.prefetch_next_epoch(read, state, units_per_step=2)
    with pytest.raises(ValueError, match="front of 12 units is not the front"):
        list(ordering.input.read_epoch(read, state, front))
    with pytest.raises(ValueError, match="units_per_step is 13"):
        ordering.input.prefetch_next_epoch(read, state, units_per_step=13)
