"""read_epochs: batches of every epoch's order as by hand, from any state on, and errors."""

import functools
import json
import threading
import tracemalloc
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.data import LoadError, grain_dataset, read_epochs, tf_dataset
from tests import reads_of_two, tables
from tests.cases import mostly_slow
from tests.commands import start_two
from tests.sources import Examples
from tests.waiting import wait_for

KEY, LIKE = jax.random.key(0), jnp.zeros(4)
VECTORS = tables.whole_numbers((60, 4))
ORDERS = {
    "cd_grab": ordering.cd_grab,
    "cd_grab, at syncs": functools.partial(ordering.cd_grab, gathers="sync"),
    "global": lambda m, **how: ordering.global_order(ordering.cd_grab(m, **how), m),
    "global_reshuffling": ordering.global_reshuffling,
    "grab": ordering.grab,
    "pair_balance": ordering.pair_balance,
    "random_reshuffling": ordering.random_reshuffling,
    "blocks": functools.partial(ordering.baselines.block_reshuffling, block_size=3),
    "once": ordering.baselines.shuffle_once,
}


class Run(NamedTuple):
    """An order, the kind of its source, and sizes; None for one worker without an axis."""

    order: str
    source: str = "arrays"
    workers: int | None = 2
    units: int = 13
    step: int = 3
    unit_size: int = 1
    mesh: tuple = ()

    @property
    def axis(self):
        return {"axis_name": self.mesh[0][0]} if self.mesh else {}

    @functools.cache  # compiles once  # noqa: B019
    def make(self):
        return ORDERS[self.order](self.units, units_per_step=self.step, **self.axis)

    def data(self):
        """The number of every example, and the gradient of its unit."""
        numbers = np.arange((self.workers or 1) * self.units * self.unit_size)
        tree = {"n": numbers, "g": VECTORS[numbers // self.unit_size]}
        if self.source in ("tf.data", "Grain"):
            return functools.partial(self.pipeline, Examples(tree))
        kinds = {"examples": Examples, "JAX": functools.partial(jax.tree.map, jnp.asarray)}
        return kinds.get(self.source, lambda tree: tree)(tree)

    def pipeline(self, source, indices, first_step, epoch):
        """As anyone writes it, with the examples of all workers in one batch."""
        make = tf_dataset if self.source == "tf.data" else grain_dataset
        return make(source, indices).batch(len(self.lead()) * self.step * self.unit_size)

    def lead(self):
        return [0] * (self.workers or 1)

    def reads(self, state=None, *, num_epochs=2, **options):
        workers = self.workers
        if self.mesh:
            workers = jax.make_mesh([n for _, n in self.mesh], [name for name, _ in self.mesh])
        given = {"like": LIKE, "workers": workers, "unit_size": self.unit_size} | self.axis
        given |= {"order": self.make(), "num_epochs": num_epochs} | options
        return read_epochs(self.data(), key=KEY, state=state, **given)


@functools.cache
def by_hand(run, epochs=2):
    """The examples of every step, from the definition of a unit, by the order's own functions."""
    order, axis = run.make(), run.mesh[0][0] if run.mesh else "worker"
    each = functools.partial(jax.vmap, axis_name=axis) if run.workers else lambda f: f
    observe, following = jax.jit(each(order.observe)), jax.jit(each(order.next_epoch))
    state = ordering.init_workers(order, KEY, LIKE, run.workers, **run.axis)
    firsts = run.units * np.arange(run.workers or 1)[:, None] * (not order.is_global)
    batches = []
    for _ in range(epochs):
        for start, stop in tables.steps(run.units, run.step):
            units = np.atleast_2d(state.current)[:, start:stop] + firsts
            examples = units[..., None] * run.unit_size + np.arange(run.unit_size)
            batches.append(examples.reshape(len(units), -1).tolist())
            state = observe(state, VECTORS[units if run.workers else units[0]])
        state = following(state)
    return batches


def train(run, state=None, *, advance=False, **options):
    """(the examples of every step, the reader's states before each)."""
    reads, order = run.reads(state, **options), run.make()
    step = jax.jit(jax.vmap(order.observe, axis_name="worker") if run.workers else order.observe)
    batches, states = [], [reads.state()]
    with jax.transfer_guard("disallow" if run.unit_size == 1 else "allow"):
        for batch in reads:
            rows = batch["g"][..., :: run.unit_size, :] if run.unit_size > 1 else batch["g"]
            if run.workers and rows.ndim == 2:  # a pipeline's batch of all workers
                rows = rows.reshape(run.workers, -1, 4)
            if advance:
                reads.advance(step(reads.order_state, rows))
            else:
                reads.observe(rows)
            states.append(reads.state())
            with jax.transfer_guard("allow"):  # to the host, for the test alone
                batches.append(np.reshape(batch["n"], (len(run.lead()), -1)).tolist())
            assert reads.loads == reads.state().loads == states[0].loads + len(batches)
    if run.mesh and batches:
        place = jax.NamedSharding(reads.order_state.current.sharding.mesh, jax.P(run.mesh[0][0]))
        assert batch["n"].sharding.is_equivalent_to(place, 2)
    return batches, states


def as_dicts(state):
    return state._asdict() | {"order": state.order._asdict()}


SLOW = pytest.mark.slow
RUNS = [
    Run("cd_grab"),
    Run("grab", "examples", None),
    Run("blocks", "JAX", 4, unit_size=2),
    Run("pair_balance", "tf.data", None, unit_size=2),
    Run("random_reshuffling", "Grain", None),
    Run("cd_grab, at syncs", mesh=(("dp", 4),), workers=4),
    Run("global", workers=4, units=12, step=5),
    Run("global_reshuffling", mesh=(("worker", 4), ("data", 2)), workers=4, units=12, step=5),
    Run("cd_grab", units=1, step=1),
    Run("cd_grab", "examples", 1, 4, 4),
    Run("grab", "tf.data", 4, 5, 5),
    Run("once", "examples", None, unit_size=2),
]


@pytest.mark.parametrize(
    "run", mostly_slow([(run,) for run in RUNS], quick=[(r,) for r in RUNS[:8]])
)
def test_batches_follow_every_epochs_order_and_resume_at_every_step(run):
    """From a state as it was, and from dicts of NumPy arrays, as of a checkpoint."""
    expected = by_hand(run)
    whole, states = train(run)
    assert whole == expected
    for done, state in enumerate(states):
        saved = as_dicts(jax.tree.map(np.asarray, state)) if done % 2 else state
        assert train(run, saved)[0] == expected[done:]


def test_a_step_that_observes_by_itself_gives_the_same_states():
    observed, advanced = (train(RUNS[0], advance=how) for how in (False, True))
    jax.tree.map(np.testing.assert_array_equal, observed, advanced)


def test_a_state_goes_through_orbax(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    whole, states = train(RUNS[1])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", states[4])
        checkpointer.wait_until_finished()
        assert train(RUNS[1], checkpointer.restore(tmp_path / "state"))[0] == whole[4:]


GRAB = Run("grab")


def test_a_batch_that_was_not_observed_is_read_again_and_the_next_is_refused():
    reads, expected = GRAB.reads(), by_hand(GRAB)
    for done in range(6):
        batch = next(reads)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"batch {done} .*reads.observe"):
                next(reads)
            with pytest.raises(ValueError, match="observe"):
                reads.wait()
        again = next(GRAB.reads(reads.state()))["n"]
        assert np.reshape(again, (2, -1)).tolist() == expected[done]
        reads.observe(batch["g"])


def test_the_next_epoch_is_read_ahead_as_far_as_it_is_known():
    asked = []

    def read(indices, first_step, epoch):
        steps = indices.reshape(-1, 2, 2)  # [step, worker, unit]
        inside = steps - 20 * np.arange(2)[:, None]
        asked.append((epoch, first_step, np.concatenate(inside, axis=-1)))
        return ((units, VECTORS[units]) for units in steps)

    order = ordering.pair_balance(20, units_per_step=2)
    reads = read_epochs(read, order, KEY, like=LIKE, workers=2, ahead=4)
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


class Turned(NamedTuple):
    current: jax.Array
    next: jax.Array
    left: jax.Array
    epoch: jax.Array


class Turns(ordering.Ordering):
    """The next order is known at the end of an epoch alone."""

    def init(self, key, params=None):
        del key, params
        zeros = jnp.zeros((2,), jnp.int32)
        return Turned(jnp.arange(5), jnp.arange(5), *zeros)

    def next_epoch(self, state):
        turned = state.current[::-1]
        return Turned(turned, jnp.copy(turned), jnp.zeros_like(state.left), state.epoch + 1)


def test_an_order_of_ones_own_that_knows_nothing_of_the_next_epoch():
    order = Turns(num_units=5, units_per_step=2)

    def read(state=None):
        return read_epochs(np.arange(5), order, KEY, num_epochs=3, state=state)

    batches, states = [], []
    with read() as reads:
        for batch in reads:
            batches.append(batch.tolist())
            states.append(reads.state())
    assert batches == [[0, 1], [2, 3], [4], [4, 3], [2, 1], [0], [0, 1], [2, 3], [4]]
    for done, state in enumerate(states, 1):
        assert [x.tolist() for x in read(state)] == batches[done:]


# Other sizes of a step, other numbers of workers, and units that are left out


def numbers(batch):
    return np.ravel(jax.tree.leaves(batch)[0]).tolist()


def goes_on(make, sizes):
    """The units of every batch of one run, with so many steps of each size in turn."""
    batches, state = [], None
    for size, most in sizes:
        with read_epochs(
            np.arange(60), make(60, units_per_step=size), KEY, like=jnp.zeros(2), state=state
        ) as reads:
            for _ in range(most):
                batch = next(reads)
                batches.append(numbers(batch))
                reads.observe(jnp.ones((len(batch), 2)) * batch[:, None])
            state = reads.state()
    return batches


STEP_SIZES = [
    (ordering.random_reshuffling, ((6, 2), (12, 4), (4, 15), (60, 1))),
    (ordering.grab, ((4, 3), (12, 4), (10, 6))),
    (ordering.pair_balance, ((10, 6), (6, 10), (20, 1))),
]


@pytest.mark.parametrize("make,sizes", mostly_slow(STEP_SIZES, quick=STEP_SIZES[:2]))
def test_another_step_size_goes_on_without_loss(make, sizes):
    """In an epoch, at its end, and into the next one: no unit is read twice or never."""
    visited = sum(goes_on(make, sizes), [])
    for epoch in range(-(-len(visited) // 60)):
        units = visited[60 * epoch :][:60]
        assert len({*units}) == len(units), epoch


def test_an_order_without_gradients_goes_on_between_steps():
    """15 of 60 units in steps of 5, then steps of 10, of which the last has the rest."""
    units = goes_on(ordering.random_reshuffling, ((5, 3), (10, 6)))
    assert list(map(len, units)) == [5] * 3 + [10] * 4 + [5, 10]
    assert sorted(sum(units[:-1], [])) == list(range(60))


def test_less_than_a_step_may_be_left_over():
    order = ordering.random_reshuffling(60, units_per_step=5)
    batches = list(read_epochs(np.arange(64), order, KEY, num_epochs=1))
    assert sorted(sum(map(numbers, batches), [])) == list(range(60))


@pytest.mark.parametrize("workers,num_units", [(2, 4), (1, 8)])
def test_a_global_order_that_leaves_out_units_reads_all_in_turn(workers, num_units):
    order = ordering.global_reshuffling(num_units, units_per_step=2, total=9)
    reads = read_epochs(np.arange(9), order, KEY, workers=workers, num_epochs=6)
    batches = np.array([numbers(batch) for batch in reads]).reshape(6, 8)
    assert all(len({*units}) == 8 for units in batches.tolist())
    assert len({sum(range(9)) - sum(units) for units in batches.tolist()}) > 1, "who is left out"


# Pipelines that fail or end


def test_an_error_names_its_load():
    run = Run("random_reshuffling")
    state = train(run)[1][7]

    def fails(indices, first_step, epoch):
        yield indices[:6]
        raise OSError(f"no disk in epoch {epoch}")

    reads = read_epochs(fails, run.make(), KEY, workers=2, state=state)
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

    def following(epoch, count):
        batches = []
        for _ in range(count):
            gates[epoch].release()
            wait_for(reads.ready)  # longer than `timeout` on a busy machine
            batches.append(next(reads))
        return np.concatenate(batches, -1)

    begun, order = threading.active_count(), Run("random_reshuffling").make()
    with read_epochs(read, order, KEY, workers=2, num_epochs=2, timeout=0.05) as reads:
        with pytest.raises(LoadError, match="load 0 .* 0.05 s"):
            next(reads)
        following(0, 5)
        assert reads.epoch_ended and not reads.ready()
        first = following(1, 1)
        assert not reads.ready()
        units = np.concatenate([first, following(1, 4)], -1)
        np.testing.assert_array_equal(units, reads.order_state.current)
        assert next(reads, None) is None
    with Run("random_reshuffling").reads() as reads:
        next(reads)
        assert threading.active_count() > begun
    assert threading.active_count() == begun, "no thread is left"


def test_a_source_that_ends_within_an_epoch_is_an_error():
    reads = read_epochs(
        lambda *_: [np.zeros((2, 3))], Run("random_reshuffling").make(), KEY, workers=2
    )
    next(reads)
    for _ in range(2):
        with pytest.raises(LoadError, match="load 1 is missing"):
            next(reads)


def test_a_pipeline_of_smaller_batches_is_refused():
    """Half of each epoch, or more, would never be read; also where a shape looks right."""
    order = ordering.random_reshuffling(12, units_per_step=6)

    def of(size):
        return lambda indices, *_: np.split(indices, len(indices) // size)

    def shaped(indices, *_):
        return [np.tile(x[:, None, None], (1, 6, 1)) for x in np.split(indices, 2)]

    for size in (2, 3):
        with pytest.raises(LoadError, match="load 0 .* 6 examples: .* unit_size="):
            next(read_epochs(of(size), order, KEY))
    with pytest.raises(LoadError, match="load 1 .* 2 batches"):
        list(read_epochs(lambda *_: [np.zeros((6, 1))] * 3, order, KEY, num_epochs=1))
    for pipeline in (of(6), shaped):
        assert len(list(read_epochs(pipeline, order, KEY, num_epochs=1))) == 2


def test_no_thread_starts_after_the_end():
    begun, reads = threading.active_count(), Run("once").reads()
    reads.close()
    with pytest.raises(LoadError, match="load 0 .*closed"):
        next(reads)
    assert threading.active_count() == begun


def test_a_pipeline_of_very_many_steps_needs_no_list_of_them():
    order = ordering.counted(2 * 10**9, units_per_step=32)

    def read(indices, first_step, epoch):
        return (np.asarray(indices[i : i + 32]) % 7 for i in range(0, len(indices), 32))

    tracemalloc.start()
    with read_epochs(read, order, KEY) as reads:
        next(reads)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


def test_the_batches_of_a_pipeline_are_on_the_devices_of_the_workers():
    mesh = jax.make_mesh((4,), ("worker",))
    order = ordering.counted(12, units_per_step=2)
    read = lambda indices, *_: grain_dataset(np.arange(12), indices).batch(8)  # noqa: E731
    with read_epochs(read, order, KEY, workers=mesh, num_epochs=1) as reads:
        for batch in reads:
            assert batch.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("worker")), 1)


@pytest.mark.parametrize("axes", [("model",), ("data", "model")])
def test_a_mesh_in_scope_without_an_axis_of_workers_makes_no_workers(axes):
    """Its only axis was taken for that of workers: a batch was four times as large."""
    order = ordering.counted(100, units_per_step=5)
    with jax.set_mesh(jax.make_mesh((4, 2)[: len(axes)], axes)):
        with read_epochs(np.arange(100), order, KEY) as reads:
            assert next(reads).shape == (5,)
    with jax.set_mesh(jax.make_mesh((4,), ("worker",))):
        with read_epochs(np.arange(100), order, KEY) as reads:
            assert next(reads).shape == (4, 5)


GUARDED = [
    Run("cd_grab"),
    Run("global", units=12),
    Run("pair_balance", workers=None),
    Run("global_reshuffling", mesh=(("worker", 2),), units=12),
]


@pytest.mark.parametrize(
    "run", mostly_slow([(r,) for r in GUARDED], quick=[(r,) for r in GUARDED[:2]])
)
def test_a_transfer_guard_lets_a_reader_be_made_and_refuses_rows_of_numpy(run):
    """Only what the program moves itself is refused: the reader moves its few numbers by name."""
    with jax.transfer_guard("allow"):
        expected = by_hand(run)
    with jax.transfer_guard("disallow"):
        state = None
        for _ in range(2):
            reads = run.reads(state)
            rows = next(reads)["g"]
            if reads.observes:
                with pytest.raises(Exception, match="Disallowed host-to-device"):
                    reads.observe(np.asarray(rows))
            reads.observe(rows)
            state = jax.device_get(reads.state())
    assert train(run, state)[0] == expected[2:]


def as_json(state):
    """A tree of dicts, or as `json` writes a NamedTuple, and lists in the place of arrays."""
    return json.loads(json.dumps(jax.tree.map(lambda x: np.asarray(x).tolist(), state)))


@pytest.mark.parametrize("form", [as_json, lambda state: as_json(as_dicts(state))])
@pytest.mark.parametrize("name", ["cd_grab, at syncs", "grab", "random_reshuffling"])
def test_a_state_goes_through_json(name, form):
    run = Run(name)
    _, states = train(run)
    assert train(run, form(states[3]))[0] == by_hand(run)[3:]


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


def test_readers_of_an_order_compile_once_and_the_next_state_takes_over_the_memory_of_the_last():
    order = GRAB.make()
    for _ in range(3):
        train(GRAB, order=order)
    (of_all,) = order._programs.values()
    assert of_all.init._cache_size() == of_all.next_epoch._cache_size() == 1
    assert of_all.observe._cache_size() == 2, "whole steps and a short one"
    reads, states = Run("grab", step=13).reads(num_epochs=None), []
    for _ in range(2):
        rows = next(reads)["g"]
        states.append(reads.order_state)
        reads.observe(rows)
        states.append(reads.order_state)
    next(reads)
    for state in states:
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.mean, state.total)))
