"""read_epochs: batches of every epoch's order, reading ahead, resuming, and errors."""

import functools
import json
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering import base
from ordering.data import LoadError, read_epochs
from tests import reads_of_two, tables
from tests.cases import mostly_slow
from tests.commands import start_two
from tests.waiting import wait_for

NAMES = ["cd_grab", "grab", "block_reshuffling", "shuffle_once"]
CASES = [*((name, 13, 3) for name in NAMES), ("cd_grab", 1, 1), ("cd_grab", 4, 4), ("grab", 4, 4)]
KEY = jax.random.key(0)


def order_of(name, num_units=13, size=3):
    return tables.ORDERS[name].make(num_units, size)


@functools.cache
def vectors(num_units=13):
    return jnp.asarray(tables.whole_numbers((2, num_units, 4)))


def source_of(num_units=13):
    """The numbers of all units of two workers, and the gradient of each."""
    return np.arange(2 * num_units) * 10, np.asarray(vectors(num_units)).reshape(-1, 4)


def reads_of(name, num_units=13, size=3, source=None, **options):
    source = source_of(num_units) if source is None else source
    order = order_of(name, num_units, size)
    options = {"like": jnp.zeros(4), "workers": 2} | options
    return read_epochs(source, order, KEY, **options)


def train(name, num_units, size, *, epochs=3, state=None, ways="observe"):
    """`(batches, the reader's states before each)` of a user's loop."""
    reads = reads_of(name, num_units, size, num_epochs=epochs, state=state)
    step = tables.vmap_workers(order_of(name, num_units, size).observe)
    batches, states = [], [reads.state()]
    for numbers, rows in reads:
        batches.append(np.asarray(numbers))
        if ways == "observe":
            reads.observe(rows)
        else:
            reads.advance(step(reads.order_state, rows))
        states.append(reads.state())
        assert reads.loads == reads.state().loads == states[0].loads + len(batches)
    return batches, states


@functools.cache  # for what it compiles
def by_hand(name, num_units=13, size=3, epochs=3):
    order, batches = order_of(name, num_units, size), []
    observe = tables.vmap_workers(order.observe)
    state = ordering.init_workers(order, KEY, jnp.zeros(4), 2)
    for _ in range(epochs):
        for start, stop in tables.steps(num_units, size):
            units = np.asarray(state.current)[:, start:stop]
            batches.append(source_of(num_units)[0][units + num_units * np.arange(2)[:, None]])
            rows = np.take_along_axis(vectors(num_units), units[..., None], 1)
            state = observe(state, rows)
        state = tables.vmap_workers(order.next_epoch)(state)
    return batches


@pytest.mark.parametrize("name,num_units,size", mostly_slow(CASES, quick=CASES[::2]))
def test_batches_follow_every_epochs_order_and_resume_at_every_step(name, num_units, size):
    expected = by_hand(name, num_units, size)
    whole, states = train(name, num_units, size)
    for done, state in enumerate(states):
        actual, _ = train(name, num_units, size, state=state)
        jax.tree.map(np.testing.assert_array_equal, actual, expected[done:])
    jax.tree.map(np.testing.assert_array_equal, whole, expected)


@pytest.mark.parametrize("name", ["cd_grab", "random_reshuffling"])
def test_a_step_that_observes_by_itself_gives_the_same_orders(name):
    (result, states), (other, others) = (train(name, 13, 3, ways=w) for w in ("observe", "advance"))
    jax.tree.map(np.testing.assert_array_equal, (result, states), (other, others))


def saved_by(how, state, folder):
    """The state as a checkpoint gives it back."""
    if how == "orbax":
        ocp = pytest.importorskip("orbax.checkpoint")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "state", state)
            checkpointer.wait_until_finished()
            return checkpointer.restore(folder / "state")
    state = jax.tree.map(np.asarray, state)
    return state if how == "NumPy" else state._asdict() | {"order": state.order._asdict()}


@pytest.mark.parametrize("how", ["orbax", "dicts", "NumPy"])
@pytest.mark.parametrize("name", ["random_reshuffling", "grab"])
def test_a_state_goes_on_as_a_checkpoint_gives_it_back(name, how, tmp_path):
    whole, states = train(name, 13, 3, epochs=2)
    result, _ = train(name, 13, 3, epochs=2, state=saved_by(how, states[4], tmp_path))
    jax.tree.map(np.testing.assert_array_equal, result, whole[4:])


def test_a_state_is_not_what_the_next_steps_use_again():
    reads = reads_of("grab")
    states = []
    for _ in range(7):
        reads.observe(next(reads)[1])
        states.append(reads.state())
    for state in states:
        result, _ = train("grab", 13, 3, state=state)
        jax.tree.map(np.testing.assert_array_equal, result, by_hand("grab")[int(state.loads) :])


def test_a_batch_that_was_not_observed_is_read_again():
    reads, expected = reads_of("grab"), by_hand("grab")
    for done in range(7):
        numbers, rows = next(reads)
        actual, _ = train("grab", 13, 3, state=reads.state())
        jax.tree.map(np.testing.assert_array_equal, actual, expected[done:])
        reads.observe(rows)


@pytest.mark.parametrize("name", ["grab", "cd_grab", "greedy_herding"])
@pytest.mark.parametrize("step", [0, 3, 4])
def test_a_step_that_was_not_observed_is_refused_by_the_next(name, step):
    reads = reads_of(name)
    for _ in range(step):
        reads.observe(next(reads)[1])
    next(reads)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"batch {step} .*reads.observe"):
            next(reads)
        with pytest.raises(ValueError, match="observe"):
            reads.wait()


def test_the_next_epoch_is_read_ahead_as_far_as_it_is_known():
    asked = []

    def read(indices, first_step, epoch):
        steps = indices.reshape(-1, 2, 2)  # [step, worker, unit]
        inside = steps - 20 * np.arange(2)[:, None]
        asked.append((epoch, first_step, np.concatenate(inside, axis=-1)))
        return ((units, source_of(20)[1][units]) for units in steps)

    reads = reads_of("pair_balance", 20, 2, source=read, ahead=4)
    for _ in range(10):
        reads.observe(next(reads)[1])
    assert [(*place, orders.shape) for *place, orders in asked] == [(0, 0, (2, 20)), (1, 0, (2, 4))]
    assert reads.epoch_ended
    batches = [next(reads)]
    np.testing.assert_array_equal(asked[1][-1], reads.order_state.current[:, :4])
    assert len(asked) == 2, "the host goes on without the new order"
    for _ in range(9):
        reads.observe(batches[-1][1])
        batches.append(next(reads))
    assert [tuple(place) for *place, _ in asked][:3] == [(0, 0), (1, 0), (1, 2)]
    units = np.concatenate([x for x, _ in batches], axis=-1) - 20 * np.arange(2)[:, None]
    np.testing.assert_array_equal(units, reads.order_state.current)


class Mine(NamedTuple):
    current: jax.Array
    next: jax.Array
    left: jax.Array


def test_an_order_of_ones_own_that_counts_nothing_and_knows_nothing():
    def init(key, like):
        del key, like
        return Mine(jnp.arange(5), jnp.arange(5), jnp.zeros((), jnp.int32))

    def turned(state):
        return state._replace(current=state.current[::-1], next=jnp.copy(state.current))

    order = ordering.Ordering(init, lambda state, rows: state, turned, units_per_step=2)
    batches, states = [], []
    with read_epochs(np.arange(5), order, KEY, num_epochs=3) as reads:
        for batch in reads:
            batches.append(batch.tolist())
            states.append(reads.state())
    assert batches == [[0, 1], [2, 3], [4], [4, 3], [2, 1], [0], [0, 1], [2, 3], [4]]
    for done, state in enumerate(states, 1):
        rest = [
            x.tolist() for x in read_epochs(np.arange(5), order, KEY, num_epochs=3, state=state)
        ]
        assert rest == batches[done:]


def test_an_error_names_its_load():
    *_, state = train("random_reshuffling", 13, 3, epochs=2)[1][:8]

    def fails(indices, first_step, epoch):
        yield indices[:6]
        raise OSError(f"no disk in epoch {epoch}")

    reads = reads_of("random_reshuffling", source=fails, state=state)
    assert (reads.epoch, reads.loads) == (1, 7)
    assert reads.ready(), "nothing loads before the first batch is asked for"
    next(reads)
    wait_for(reads.ready)
    with pytest.raises(LoadError, match="load 8 .*OSError: no disk in epoch 1"):
        next(reads)


def test_ready_is_right_at_the_end_of_an_epoch():
    gates = [threading.Semaphore(0) for _ in range(2)]

    def read(indices, first_step, epoch):
        for part in np.split(indices, [6, 12, 18, 24]):
            gates[epoch].acquire()
            yield part.reshape(2, -1) - 13 * np.arange(2)[:, None]

    options = {"num_epochs": 2, "timeout": 0.05, "source": read}
    with reads_of("random_reshuffling", **options) as reads:
        with pytest.raises(LoadError, match="load 0 .* 0.05 s"):
            next(reads)
        gates[0].release(5)
        for _ in range(5):
            wait_for(reads.ready)
            next(reads)
        assert reads.epoch_ended and not reads.ready()
        gates[1].release()
        wait_for(reads.ready)
        first = next(reads)
        state = reads.order_state
        np.testing.assert_array_equal(first, state.current[:, :3])
        assert not reads.ready()
        gates[1].release(4)
        rest = []
        for _ in range(4):
            wait_for(reads.ready)  # longer than `timeout` on a busy machine
            rest.append(next(reads))
        np.testing.assert_array_equal(np.concatenate(rest, -1), state.current[:, 3:])
        assert next(reads, None) is None
    begun = threading.active_count()
    with reads_of("random_reshuffling") as reads:
        next(reads)
        assert threading.active_count() > begun
    assert threading.active_count() == begun, "no thread is left"


def test_a_source_that_ends_within_an_epoch_is_an_error():
    reads = reads_of("random_reshuffling", source=lambda *_: [np.zeros((2, 3))])
    next(reads)
    for _ in range(2):
        with pytest.raises(LoadError, match="load 1 is missing"):
            next(reads)


@pytest.mark.parametrize("pieces", [2, 3, 6])
def test_a_pipeline_of_smaller_batches_is_refused(pieces):
    """Half of each epoch, or more, would never be read; also where a shape looks right."""

    def read(indices, first_step, epoch):
        return [
            np.repeat(x[:, None], 6, 1)[:, :, None]
            for x in np.split(indices, len(indices) // pieces)
        ]

    def smaller(indices, first_step, epoch):
        return np.split(indices, len(indices) // pieces)

    order = ordering.random_reshuffling(12, units_per_step=6)
    if pieces < 6:
        with pytest.raises(LoadError, match="load 0 .* 6 examples: .* unit_size="):
            next(read_epochs(smaller, order, KEY))
        with pytest.raises(LoadError, match="load 1 .* 2 batches"):
            list(read_epochs(lambda *a: [np.zeros((6, 1))] * 3, order, KEY, num_epochs=1))
    else:
        assert len(list(read_epochs(smaller, order, KEY, num_epochs=1))) == 2
        assert len(list(read_epochs(read, order, KEY, num_epochs=1))) == 2


MESHES = [None, (("dp", 4),), (("worker", 4), ("data", 2))]


@pytest.mark.parametrize(
    "name,axes",
    [*(("cd_grab", axes) for axes in MESHES[1:]), ("global", None)],
)
def test_epochs_of_all_workers_simulated_and_on_a_mesh(name, axes):
    """Where transfers are forbidden; batches lie where their workers are."""
    axis_name = axes[0][0] if axes else "worker"
    sizes = {"units_per_step": 5}
    order = {
        "cd_grab": ordering.cd_grab(12, gathers="sync", axis_name=axis_name, **sizes),
        "global": ordering.global_reshuffling(12, axis_name=axis_name, **sizes),
    }[name]
    workers = 4 if axes is None else jax.make_mesh([n for _, n in axes], [n for n, _ in axes])
    key, like, rows = np.asarray(jax.random.PRNGKey(0)), jnp.zeros(3), jnp.eye(48, 3)
    state = ordering.init_workers(order, KEY, like, 4, axis_name=axis_name)
    first_units = 0 if name == "global" else 12 * np.arange(4)[:, None]
    observe, following = (
        jax.jit(jax.vmap(f, axis_name=axis_name)) for f in (order.observe, order.next_epoch)
    )
    source = np.arange(48), np.asarray(rows)
    with jax.transfer_guard("disallow"):
        reads = read_epochs(source, order, key, like=like, workers=workers, num_epochs=3)
        for numbers, rows in reads:
            reads.observe(rows)
            with jax.transfer_guard("allow"):
                first = 5 * ((reads.loads - 1) % 3)
                units = state.current[:, first : first + 5] + first_units
                np.testing.assert_array_equal(numbers, units)
                state = observe(state, np.asarray(rows))
                state = following(state) if reads.epoch_ended else state
            if axes is not None:
                rows_of_workers = jax.NamedSharding(workers, jax.P(axis_name))
                assert numbers.sharding.is_equivalent_to(rows_of_workers, 2)
    assert reads.loads == 9


def test_a_global_order_that_leaves_out_units_reads_all_in_turn():
    """For two workers, and for one without an axis."""
    for workers, num_units in ((2, 4), (None, 8)):
        axis_name = "worker" if workers else None
        order = ordering.global_reshuffling(
            num_units, units_per_step=2, total=9, axis_name=axis_name
        )
        batches, left_out = [], set()
        reads = read_epochs(np.arange(9), order, KEY, workers=workers, num_epochs=6)
        for batch in reads:
            batches += np.asarray(batch).ravel().tolist()
            if reads.epoch_ended:
                assert len(set(batches)) == len(batches) == 8
                left_out |= {*range(9)} - {*batches}
                batches = []
        assert len(left_out) > 1


@pytest.mark.slow
def test_two_processes_read_as_one_does(tmp_path):
    """Each the rows of its own worker, from a source of all; a run goes on from its middle."""
    assert start_two("tests.reads_of_two", str(tmp_path)) == 0
    workers = jax.make_mesh((2,), ("worker",), devices=jax.devices()[:2])
    both = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for name, expected in reads_of_two.all_of(workers).items():
        together = [
            [*map(list, a), *map(list, b)] for a, b in zip(*(x[name] for x in both), strict=True)
        ]
        assert together == [[*map(list, batch)] for batch in expected], name


def test_equal_readers_compile_once():
    base.compiled.cache_clear()
    for _ in range(3):
        train("grab", 13, 3, epochs=2)
    of_all = base.compiled(order_of("grab"), base.Scope(2, "worker"))
    assert base.compiled.cache_info().currsize == 1
    assert of_all.observe._cache_size() == 2, "whole steps and a short one"
    assert of_all.next_epoch._cache_size() == 1


def test_the_next_order_takes_over_the_memory_of_the_last():
    reads = reads_of("grab", size=13)
    states = []
    for _ in range(2):
        rows = next(reads)[1]
        states.append(reads.order_state)
        reads.observe(rows)
        states.append(reads.order_state)
    next(reads)
    for state in states:
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.mean, state.total)))
