"""read_epochs: batches of every epoch's order, reading ahead, resuming, and errors."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering import echo
from ordering.data import LoadError, read_epochs
from tests import tables
from tests.refused import refuses
from tests.waiting import wait_for

NAMES = ["cd_grab", "grab", "block_reshuffling", "shuffle_once"]


@functools.cache
def order_of(name, num_units=13, size=3):
    """`(start, observe, next_epoch)` of two workers; a step's rows are those of fixed vectors."""
    order = tables.ORDERS[name].make(num_units, size)
    vectors = jnp.asarray(tables.whole_numbers((2, num_units, 4)))
    start = tables.vmap_workers(lambda key, g: order.init(key, g[0]))(
        jax.random.split(jax.random.key(0), 2), vectors
    )

    @functools.cache
    def step(n):
        def one(state, vectors, first):
            units = jax.lax.dynamic_slice_in_dim(state.current, first, n)
            return order.observe(state, vectors[units])

        return tables.vmap_workers(one)

    def observe(state, t):
        first = t * size
        n = min(size, num_units - first)
        return step(n)(state, vectors, jnp.full(2, first))

    return start, observe, tables.vmap_workers(order.next_epoch)


def source_of(num_units=13):
    return np.arange(2 * num_units) * 10


def train(name, num_units, size, *, epochs=3, state=None, first_load=0):
    """`(batches, the orders' states before each)` of a user's loop."""
    start, observe, next_epoch = order_of(name, num_units, size)
    state = start if state is None else state
    reads = read_epochs(
        source_of(num_units), lambda: state, units_per_step=size, num_epochs=epochs,
        first_load=first_load,
    )  # fmt: skip
    found, states = [], [state]
    for batch in reads:
        found.append(np.asarray(batch))
        state = observe(state, reads.step - 1)
        if reads.epoch_ended:
            state = next_epoch(state)
        states.append(state)
        assert reads.load == first_load + len(found)
    return found, states


def by_hand(name, num_units=13, size=3, epochs=3):
    state, observe, next_epoch = order_of(name, num_units, size)
    found = []
    for _ in range(epochs):
        for t, (start, stop) in enumerate(tables.steps(num_units, size)):
            units = np.asarray(state.current)[:, start:stop] + num_units * np.arange(2)[:, None]
            found.append(source_of(num_units)[units])
            state = observe(state, t)
        state = next_epoch(state)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_units,size", [(13, 3), (1, 1), (4, 4)])
def test_batches_follow_every_epochs_order_and_resume_at_every_step(name, num_units, size):
    expected = by_hand(name, num_units, size)
    whole, states = train(name, num_units, size)
    for done, state in enumerate(states):
        found, _ = train(name, num_units, size, state=state, first_load=done)
        jax.tree.map(np.testing.assert_array_equal, found, expected[done:])
    jax.tree.map(np.testing.assert_array_equal, whole, expected)


def test_a_run_that_uses_batches_again_resumes_at_every_step():
    """Also between two uses, whose batch is read again; epochs end where the next step loads."""
    plan, (start, observe, next_epoch) = echo.fixed(2, total_steps=20), order_of("grab", 13, 3)

    def run(state, step, stop):
        found, first = [], plan.first_load(step)
        with read_epochs(source_of(), lambda: state, units_per_step=3, first_load=first) as reads:
            for use in echo.echo_batches(reads, plan, first_step=step):
                found.append(np.asarray(use.batch))
                if use.fresh:
                    state = observe(state, reads.step - 1)
                if reads.epoch_ended and not use.fresh:
                    state = next_epoch(state)
                if use.step + 1 == stop:
                    return found, state

    whole, _ = run(start, 0, 20)
    jax.tree.map(np.testing.assert_array_equal, whole[::2], by_hand("grab", epochs=2))
    for stop in range(1, 20):
        found, state = run(start, 0, stop)
        found += run(state, stop, 20)[0]
        jax.tree.map(np.testing.assert_array_equal, found, whole)


def test_the_next_epoch_is_read_ahead_as_far_as_it_is_known():
    state, observe, next_epoch = order_of("pair_balance", 20, 2)
    asked = []

    def read(indices, first_step, epoch):
        steps = indices.reshape(-1, 2, 2) - 20 * np.arange(2)[:, None]  # [step, worker, unit]
        asked.append((epoch, first_step, np.concatenate(steps, axis=-1)))
        return iter(steps)

    reads = read_epochs(read, lambda: state, units_per_step=2, ahead=4)
    for _ in range(10):
        next(reads)
        state = observe(state, reads.step - 1)
    assert [(*place, orders.shape) for *place, orders in asked] == [(0, 0, (2, 20)), (1, 0, (2, 4))]
    assert reads.epoch_ended
    state = next_epoch(state)
    np.testing.assert_array_equal(asked[1][-1], state.current[:, :4])
    found = [next(reads)]
    assert len(asked) == 2, "the host goes on without the new order"
    found += [next(reads) for _ in range(9)]
    assert [tuple(place) for *place, _ in asked][:3] == [(0, 0), (1, 0), (1, 2)]
    np.testing.assert_array_equal(np.concatenate(found, axis=-1), state.current)


def test_one_worker_with_a_donated_state_and_no_known_units():
    order = ordering.random_reshuffling(20)
    state = order.init(jax.random.key(0), None)
    state = state._replace(left=jnp.zeros((), jnp.int32))  # nothing is known
    orders = [np.array(s.current) for s in (state, order.next_epoch(state))]
    reads = read_epochs(np.arange(20), lambda: state, units_per_step=8, num_epochs=2)
    with pytest.raises(ValueError, match=r"call orders = reads.after\(order, orders\) after every"):
        list(reads)
    reads = read_epochs(np.arange(20), lambda: state, units_per_step=8, num_epochs=2)
    found = []
    for batch in reads:
        found.append(np.asarray(batch))
        copied = jax.tree.map(jnp.copy, state)
        jax.tree.map(lambda x: x.delete(), state)
        state = reads.after(order, copied)
    assert [x.size for x in found] == [8, 8, 4, 8, 8, 4]
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(orders))


def test_an_error_names_its_load():
    state = order_of("cd_grab")[0]

    def fails(indices, first_step, epoch):
        yield indices[:6]
        raise OSError(f"no disk in epoch {epoch}")

    state = state._replace(epoch=state.epoch + 1)
    reads = read_epochs(fails, lambda: state, units_per_step=3, first_load=7)
    assert (reads.epoch, reads.step) == (1, 2)
    assert reads.ready(), "nothing loads before the first batch is asked for"
    next(reads)
    wait_for(reads.ready)
    with pytest.raises(LoadError, match="load 8 failed: OSError: no disk in epoch 1"):
        next(reads)


def test_ready_is_right_at_the_end_of_an_epoch():
    state, _, next_epoch = order_of("random_reshuffling")
    gates = [threading.Semaphore(0) for _ in range(2)]

    def read(indices, first_step, epoch):
        for part in np.split(indices, [6, 12, 18, 24]):
            gates[epoch].acquire()
            yield part.reshape(2, -1) - 13 * np.arange(2)[:, None]

    options = {"units_per_step": 3, "num_epochs": 2, "timeout": 0.05}
    with read_epochs(read, lambda: state, **options) as reads:
        with pytest.raises(LoadError, match="load 0 did not come within 0.05 s"):
            next(reads)
        gates[0].release(5)
        for _ in range(5):
            wait_for(reads.ready)
            next(reads)
        assert reads.epoch_ended and not reads.ready()
        gates[1].release()
        wait_for(reads.ready)
        state = next_epoch(state)
        np.testing.assert_array_equal(next(reads), state.current[:, :3])
        assert not reads.ready()
        gates[1].release(4)
        rest = []
        for _ in range(4):
            wait_for(reads.ready)  # longer than `timeout` on a busy machine
            rest.append(next(reads))
        np.testing.assert_array_equal(np.concatenate(rest, -1), state.current[:, 3:])
        assert next(reads, None) is None
    begun = threading.active_count()
    with read_epochs(source_of(), lambda: state, units_per_step=3) as reads:
        next(reads)
        assert threading.active_count() > begun
    assert threading.active_count() == begun, "no thread is left"


def test_a_source_that_ends_within_an_epoch_is_an_error():
    state = order_of("random_reshuffling")[0]
    reads = read_epochs(lambda *_: [np.zeros(2)], lambda: state, units_per_step=3)
    next(reads)
    for _ in range(2):
        with pytest.raises(LoadError, match="load 1 is missing: .* one batch for each"):
            next(reads)


MESHES = [None, (("dp", 4),), (("worker", 4), ("data", 2))]


@pytest.mark.parametrize("name,axes", [
    *(("cd_grab", axes) for axes in MESHES), ("dealt", None), ("random_reshuffling", MESHES[2])
])  # fmt: skip
def test_after_ends_each_epoch_once_for_all_workers(name, axes):
    """Where transfers are forbidden, and in steps that repeat the last batch of an epoch."""
    axis_name = axes[0][0] if axes else "worker"
    order = {
        "cd_grab": ordering.cd_grab(12, units_per_step=2, gathers="sync", axis_name=axis_name),
        "dealt": ordering.global_reshuffling(12, axis_name=axis_name),
        "random_reshuffling": ordering.random_reshuffling(12),
    }[name]
    workers = 4 if axes is None else jax.make_mesh([n for _, n in axes], [n for n, _ in axes])
    key, args = np.asarray(jax.random.PRNGKey(0)), (jnp.zeros(3), jnp.zeros((2, 3)))
    gradients = ordering.per_example_grads(lambda w, x: jnp.square(x @ w))
    named = dict(workers=4, axis_name=axis_name)
    expected = ordering.start(order, jax.random.key(0), gradients, args, **named)
    with jax.transfer_guard("disallow"):
        state = ordering.start(order, key, gradients, args, workers=workers)
    read = functools.partial(read_epochs, np.arange(48), units_per_step=5, num_epochs=3)
    total = 48 if name == "dealt" else None
    with jax.transfer_guard("disallow"), read(lambda: state, total=total) as reads:
        for _ in reads:
            before, state = state, reads.after(order, state)
            assert (state is before) == (not reads.epoch_ended)
            assert reads.after(order, state) is state
            if reads.epoch_ended:
                with jax.transfer_guard("allow"):
                    expected = jax.vmap(order.next_epoch, axis_name=axis_name)(expected)
                    np.testing.assert_array_equal(state.current, expected.current)
                assert axes is None or state.current.sharding.mesh == workers
    assert reads.load == 9


def reads_with(**options):
    start = order_of("random_reshuffling")[0]
    return read_epochs(source_of(), lambda: start, **{"units_per_step": 3} | options)


test_wrong_inputs_are_refused = refuses({
    "a step longer than the epoch": (lambda: reads_with(units_per_step=14), "per_step is 14"),
    "a source of one argument": (
        lambda: read_epochs(lambda order: [], lambda: order_of("grab")[0], units_per_step=3),
        r"source is <.*: pass a function of \(indices, first_step, epoch\)",
    ),
    "after, exchanged": (
        lambda: reads_with().after(order_of("grab")[0], ordering.grab(13)),
        r"after got a GrabState and a Ordering: pass the order and its state",
    ),
    "an order of another size": (
        lambda: list(read_epochs(np.arange(6), iter(
            [ordering.shuffle_once(m).init(jax.random.key(0), None) for m in (6, 5)]
        ).__next__, units_per_step=3)),
        "live gives an order of 5 units, after 6: make another read_epochs",
    ),
})  # fmt: skip
