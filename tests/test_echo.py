"""The stream of an echoed run: the right batch in every step, loaded once, and nothing lost."""

import functools
import gc
import threading
import time
import weakref
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ordering
from ordering import echo
from ordering.echo import echo_batches
from ordering.input import load_ahead
from tests import reference, tables

PATIENCE = 60  # seconds, for events that take milliseconds
W, B = 2, 4


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def batch(load):
    """Example i of load l is 1000 l + 10 i, the same for both workers but for a sign."""
    ids = np.int32(1000 * load + 10 * np.arange(B))
    return {"x": np.stack([ids, -ids]), "y": np.float32([ids, -ids])[..., None] / 2}


class Source:
    """An iterator of batches that counts what is asked for, and may fail or wait."""

    def __init__(self, loads, first=0, fail_at=None, wait_at=None):
        self.loads, self.next, self.asked = loads, first, 0
        self.fail_at, self.wait_at, self.go_on = fail_at, wait_at, threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        self.asked += 1
        load, self.next = self.next, self.next + 1
        if load == self.wait_at:
            self.go_on.wait(PATIENCE)
        if load == self.fail_at:
            raise OSError("disk on fire")
        if load >= self.loads:
            raise StopIteration
        return batch(load)


def add_noise(batch, key):
    """Whole numbers below 5, so that an example can still be told."""
    noise = (jax.random.bits(key, batch["x"].shape) % 5).astype(jnp.int32)
    return {"x": batch["x"] + noise, "y": batch["y"] - noise[..., None]}


MODES = {
    "plain": {},
    "buffer": dict(buffer_size=3),
    "rebatch": dict(buffer_size=3, rebatch=True, axis=1),
    "rebatch one": dict(rebatch=True, axis=1),
    "augment": dict(augment=add_noise),
    "rebatch and augment": dict(buffer_size=2, rebatch=True, axis=1, augment=add_noise),
}
PLAN = echo.EchoPlan(np.repeat([1, 0, 1, 0, 1, 0, 1], [1, 2, 1, 1, 2, 3, 1]).astype(bool))


def stream(mode, source, plan=PLAN, seed=0, **options):
    key = {} if mode == "plain" else dict(key=jax.random.key(seed))
    return echo_batches(source, plan, **MODES[mode], **key, **options)


@functools.cache
def counted_run(mode):
    source = Source(99)
    return list(stream(mode, source)), source.asked


def whole_run(mode):
    return counted_run(mode)[0]


def assert_same(found, expected):
    found = list(found)
    assert [use[:3] for use in found] == [use[:3] for use in expected]
    for use, other in zip(found, expected, strict=True):
        assert jax.tree.structure(use.batch) == jax.tree.structure(other.batch)
        for a, b in zip(jax.tree.leaves(use.batch), jax.tree.leaves(other.batch), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", tables.ECHO_PLANS)
def test_every_step_uses_the_batch_of_the_plain_loop(name):
    plan = tables.ECHO_PLANS[name](41)
    source, steps = Source(99), 0
    expected = reference.loads_used(plan.fresh)
    for use in echo_batches(source, plan):
        assert (use.step, use.load) == (steps, expected[steps])
        assert type(use.fresh) is bool and use.fresh == plan.fresh[steps]
        assert source.asked == plan.loads_before(steps + 1)  # none on an echoed step, none ahead
        for found, loaded in zip(
            jax.tree.leaves(use.batch), jax.tree.leaves(batch(use.load)), strict=True
        ):
            assert isinstance(found, jax.Array) and found.dtype == loaded.dtype
            np.testing.assert_array_equal(found, loaded)
        steps += 1
    assert steps == 41 and source.asked == plan.loads


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_loads_as_often_as_the_plan(mode):
    uses, asked = counted_run(mode)
    assert [(use.step, use.fresh) for use in uses] == list(enumerate(PLAN.fresh))
    assert asked == PLAN.loads == 5


def test_an_echoed_step_gives_the_very_same_arrays():
    uses = whole_run("plain")
    assert uses[1].batch["x"] is uses[0].batch["x"] is not uses[3].batch["x"]


@jax.jit
def train(params, batch):
    loss = lambda w: jnp.mean((batch["x"] * w - batch["y"][..., 0]) ** 2)  # noqa: E731
    return params - 1e-9 * jax.grad(loss)(params)


@pytest.mark.parametrize("mode", MODES)
def test_an_echoed_step_moves_nothing_from_the_host(mode):
    plan = echo.fixed(3, total_steps=10)
    steps = stream(mode, Source(99), plan)
    params = train(jnp.float32(1.0), next(steps).batch)
    for t in range(1, 9):
        if plan.fresh[t]:
            params = train(params, next(steps).batch)
            continue
        with jax.transfer_guard("disallow_explicit"):
            use = next(steps)
            params = train(params, use.batch)
        assert not use.fresh
    assert np.isfinite(params) and params != 1
    # The guard does see the copy of a load.
    with jax.transfer_guard("disallow_explicit"):
        with pytest.raises(ordering.input.LoadError, match="load 3 .*host-to-device transfer"):
            next(steps)


def ids(use):
    """Which examples a batch holds, noise or none."""
    return np.asarray(use.batch["x"][0]) // 10


LONG = echo.error_diffusion(0.3, total_steps=60)


def test_a_buffer_holds_the_last_loads():
    plan, ages = LONG, []
    for use in stream("buffer", Source(99), plan):
        newest = plan.loads_before(use.step + 1) - 1
        ages.append(newest - use.load)
        if use.fresh:
            assert ages[-1] == 0
        else:
            assert 0 <= ages[-1] <= min(2, newest)
        np.testing.assert_array_equal(use.batch["x"], batch(use.load)["x"])
    echoed_late = [a for a, f in zip(ages, plan.fresh, strict=True) if not f][5:]
    assert set(echoed_late) == {0, 1, 2}
    other = [u.load for u in stream("buffer", Source(99), plan, seed=1)]
    assert other != [u.load for u in stream("buffer", Source(99), plan)]


@pytest.mark.parametrize("mode,size", [("rebatch", 3), ("rebatch one", 1)])
def test_rebatching_draws_from_the_last_loads_without_replacement(mode, size):
    drawn_ages, permuted = set(), 0
    for use in stream(mode, Source(99), LONG):
        assert use.batch["x"].shape == (W, B) and use.batch["y"].shape == (W, B, 1)
        newest = LONG.loads_before(use.step + 1) - 1
        assert use.load == newest
        if use.fresh:
            np.testing.assert_array_equal(use.batch["x"], batch(newest)["x"])
            continue
        x, y = np.asarray(use.batch["x"]), np.asarray(use.batch["y"])
        # Both leaves and both workers share the draw, and no worker sees the other's examples.
        np.testing.assert_array_equal(y[..., 0] * 2, x)
        np.testing.assert_array_equal(x[1], -x[0])
        assert (x[0] >= 0).all() and len(set(x[0].tolist())) == B
        loads, examples = x[0] // 1000, x[0] % 1000
        assert set(examples.tolist()) <= set(range(0, 10 * B, 10))
        assert (newest - size < loads).all() and (0 <= loads).all() and (loads <= newest).all()
        drawn_ages |= set((newest - loads).tolist())
        permuted += len(set(loads.tolist())) > 1 or examples.tolist() != [0, 10, 20, 30]
    assert drawn_ages == set(range(size))
    assert permuted > 30  # of 42 echoed steps; one in 24 repeats a batch's own order


def test_the_key_of_a_plan_may_be_the_key_of_its_stream():
    """Choices among the loads are not the coins of the plan once more."""
    plan = echo.bernoulli(0.5, total_steps=2000, key=jax.random.key(0))
    loads = ({"x": np.zeros(0)} for _ in range(2000))
    uses = echo_batches(loads, plan, buffer_size=2, key=jax.random.key(0))
    newest = np.cumsum(plan.fresh) - 1
    ages = np.array([newest[u.step] - u.load for u in uses])[~plan.fresh]
    # A half of about 1000, and 4 deviations.
    assert abs(np.mean(ages) - 0.5) < 4 * 0.5 / np.sqrt(len(ages))


def test_augmenting_depends_on_key_and_step_and_is_never_kept():
    augmented = jax.jit(add_noise)
    for use in whole_run("augment"):
        step_key = jax.random.fold_in(jax.random.key(0), use.step)
        expected = augmented(batch(use.load), step_key)
        np.testing.assert_array_equal(use.batch["x"], expected["x"])
        np.testing.assert_array_equal(use.batch["y"], expected["y"])
    uses = whole_run("augment")
    assert uses[0].load == uses[1].load
    assert (uses[0].batch["x"] != uses[1].batch["x"]).any()
    other = next(stream("augment", Source(99), seed=1))
    assert (uses[0].batch["x"] != other.batch["x"]).any()


def test_rebatched_examples_are_augmented_once():
    found = [ids(use).tolist() for use in whole_run("rebatch and augment")]
    known = {i for load in range(PLAN.loads) for i in (batch(load)["x"][0] // 10).tolist()}
    assert all(set(row) <= known and len(set(row)) == B for row in found)
    # Noise that was kept would add up, and end in one direction.
    noise = np.array([np.asarray(u.batch["x"][0]) % 10 for u in whole_run("rebatch and augment")])
    assert noise.any(axis=1).all() and noise.max() == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_at_any_step_bitwise(mode):
    expected = whole_run(mode)
    size = MODES[mode].get("buffer_size", 1)
    # Each stream that draws on the device compiles: then a few steps, fresh and echoed, with the
    # buffer full and not.
    compiles = "augment" in mode or "rebatch" in mode
    for step in (1, 5, 6, 8) if compiles else range(PLAN.total_steps):
        source = Source(99, first=PLAN.first_load(step, size))
        found = list(stream(mode, source, first_step=step))
        assert_same(found, expected[step:])
        assert source.next == PLAN.loads  # and not one load more


def test_a_run_that_is_over_resumes_to_nothing():
    source = Source(99, first=PLAN.first_load(PLAN.total_steps))
    assert list(echo_batches(source, PLAN, first_step=PLAN.total_steps)) == []


@pytest.mark.parametrize("ahead", [False, True])
def test_loads_that_end_too_early(ahead):
    def loads():
        return load_ahead(Source(2)) if ahead else Source(2)

    steps = echo_batches(loads(), PLAN)
    assert [next(steps).load for _ in range(5)] == [0, 0, 0, 1, 1]
    for _ in range(2):  # the end stays the end
        with pytest.raises(
            ordering.input.LoadError, match="load 2 is missing.* step 5 of 11 "
        ) as error:
            next(steps)
        assert error.value.load == 2
    uses = list(echo_batches(loads(), PLAN, stop_with_loads=True))
    assert [use.load for use in uses] == [0, 0, 0, 1, 1]


def test_loads_that_are_not_needed_stay():
    source = Source(99)
    list(echo_batches(source, PLAN))
    np.testing.assert_array_equal(next(source)["x"], batch(PLAN.loads)["x"])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stop_with_loads", [False, True])
def test_an_empty_source_is_an_error_of_the_call(ahead, stop_with_loads):
    empty = load_ahead([]) if ahead else []
    with pytest.raises(ValueError, match="the source is empty: pass at least one batch"):
        echo_batches(empty, PLAN, stop_with_loads=stop_with_loads)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failed_load_is_named_and_the_run_resumes_from_it(ahead):
    def generator():  # generators end with their first error
        yield from Source(99, fail_at=2)

    source = load_ahead(generator()) if ahead else generator()
    steps = echo_batches(source, PLAN, stop_with_loads=True)
    uses = [next(steps) for _ in range(5)]
    for _ in range(2):  # a failure does not become an end
        with pytest.raises(
            ordering.input.LoadError, match="load 2 failed.*OSError: disk on fire"
        ) as e:
            next(steps)
        assert e.value.load == 2 and isinstance(e.value.__cause__, OSError)
    first = PLAN.first_load(5)
    assert first == 2
    rest = Source(99, first=first)
    rest = load_ahead(rest, first_load=first) if ahead else rest
    assert_same([*uses, *echo_batches(rest, PLAN, first_step=5)], whole_run("plain"))


def test_a_load_that_hangs_is_named_and_nothing_is_lost():
    source = Source(99, wait_at=2)
    with load_ahead(source, timeout=0.02) as loader:
        wait_for(loader.ready)  # any load may take longer than this timeout
        steps, uses, late = echo_batches(loader, PLAN), [], 0
        while len(uses) < PLAN.total_steps and late < 1000:
            try:
                uses.append(next(steps))
            except StopIteration:
                break
            except ordering.input.LoadError as error:
                message = "did not come within 0.02 s: the input hangs. Call next again"
                assert message in str(error)
                if len(uses) == 5:  # where the step needs the load that waits
                    assert error.load == 2 and str(error).startswith("load 2 ")
                    late += 1
                if late == 2:  # so waiting again is an error again
                    source.go_on.set()
        assert late >= 2
        assert_same(uses, whole_run("plain"))


@pytest.mark.parametrize("depth", [1, 3])
def test_a_loader_reads_so_many_batches_ahead(depth):
    source = Source(10**6)
    loader = load_ahead(source, depth=depth)
    for consumed in range(1, 5):
        np.testing.assert_array_equal(next(loader)["x"], batch(consumed - 1)["x"])
        wait_for(lambda c=consumed: source.asked == c + depth + 1)
    loader.close()  # the thread is over, so this is all that it has read
    assert source.asked == 4 + depth + 1
    # What was loaded before the end is still there; then the end stays the end.
    left = [b["x"][0, 0] // 1000 for b in loader]
    assert left == list(range(4, 4 + len(left))) and len(left) <= depth + 1
    assert loader.ready() and next(loader, None) is None and next(loader, None) is None


def loading_threads():
    return {thread for thread in threading.enumerate() if "_work" in thread.name}


def test_a_batch_that_comes_after_closing_does_not_follow_the_end():
    source = Source(99, wait_at=0)
    before = loading_threads()
    loader = load_ahead(source)
    (thread,) = loading_threads() - before
    wait_for(lambda: source.asked == 1)
    loader.close()
    assert list(loader) == []
    source.go_on.set()
    thread.join(PATIENCE)
    assert not thread.is_alive() and source.asked == 1
    assert list(loader) == []


def test_ends_and_errors_of_a_loader_stay():
    loader = load_ahead(Source(2), first_load=5)
    assert len(list(loader)) == 2 and list(loader) == [] and loader.ready()
    loader = load_ahead(Source(99, fail_at=1), first_load=5)
    next(loader)
    for _ in range(2):
        with pytest.raises(ordering.input.LoadError, match="load 6 failed: OSError: disk") as error:
            next(loader)
        assert error.value.load == 6 and loader.ready()


def test_a_loader_knows_what_is_ready():
    source = Source(99, wait_at=1)
    with load_ahead(source) as loader:
        wait_for(loader.ready)
        next(loader)
        assert not loader.ready()
        source.go_on.set()
        wait_for(loader.ready)
        np.testing.assert_array_equal(next(loader)["x"], batch(1)["x"])


def test_batches_are_placed_once_where_they_belong():
    mesh = jax.make_mesh((8,), ("worker",), (AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("worker"))
    loads = [np.arange(16.0).reshape(8, 2) + i for i in range(3)]
    with load_ahead(loads, sharding=sharding) as loader:
        for use in echo_batches(loader, echo.fixed(2, total_steps=6)):
            assert use.batch.sharding == sharding
            assert len(use.batch.addressable_shards) == 8
            np.testing.assert_array_equal(use.batch, np.float32(loads[use.load]))
    (placed,) = load_ahead(loads[:1], sharding=jax.devices()[3])
    assert placed.devices() == {jax.devices()[3]}


def test_an_abandoned_loader_is_let_go_and_its_thread_ends():
    before = loading_threads()
    loader = load_ahead(Source(10**6))
    (thread,) = loading_threads() - before
    steps = echo_batches(loader, PLAN)
    next(steps)
    abandoned = weakref.ref(loader)
    del loader, steps
    gc.collect()
    assert abandoned() is None
    thread.join(PATIENCE)
    assert not thread.is_alive()


# Decisions that depend on time.


class Scripted(Source):
    """A loader whose `ready` gives the answer that is written for the step."""

    def __init__(self, answers, first=0):
        super().__init__(10**6, first)
        self.answers, self.step, self.asked_in = answers, 0, []

    def ready(self):
        self.asked_in.append(self.step)
        return self.answers[self.step]

    def run(self, policy, first_step=0, **options):
        """The uses of all steps, `step` being the one that is decided."""
        self.step = first_step
        steps, uses = echo_batches(self, policy, first_step=first_step, **options), []
        for use in steps:
            uses.append(use)
            self.step = use.step + 1
        return uses


@given(st.data())
def test_measured_decides_as_the_reference(data):
    total_steps, max_factor = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    answers = data.draw(st.lists(st.booleans(), min_size=total_steps, max_size=total_steps))
    kind = data.draw(st.sampled_from(["none", "number", "array"]))
    twelfths = st.integers(1, 12)
    if kind == "none":
        floor, exact = None, [Fraction(1, max_factor)] * total_steps
    elif kind == "number":
        n = data.draw(twelfths)
        floor, exact = n / 12, [Fraction(n, 12)] * total_steps
    else:
        numbers = data.draw(st.lists(twelfths, min_size=total_steps, max_size=total_steps))
        floor, exact = np.array(numbers) / 12, [Fraction(n, 12) for n in numbers]
    fresh, asked = reference.load_if_ready(answers, max_factor, exact)
    policy = echo.measured(total_steps=total_steps, max_factor=max_factor, floor=floor)
    loader = Scripted(answers)
    uses = loader.run(policy)
    assert [use.fresh for use in uses] == fresh
    assert loader.asked_in == asked  # only where time decides
    plan = echo.EchoPlan(fresh)
    assert plan.uses.max() <= max_factor and loader.asked == plan.loads
    assert_same(echo_batches(Source(99), plan), uses)  # replayed


def test_a_floor_may_be_a_schedule():
    floor = optax.piecewise_constant_schedule(0.5, {12: 0.5})
    policy = echo.measured(total_steps=24, max_factor=9, floor=floor)
    uses = Scripted([False] * 24).run(policy)
    exact = [Fraction(1, 2) if t < 12 else Fraction(1, 4) for t in range(24)]
    assert [use.fresh for use in uses] == reference.load_if_ready([False] * 24, 9, exact)[0]
    assert [use.step for use in uses if use.fresh] == [0, 2, 4, 6, 8, 10, 13, 17, 21]


ANSWERS = [t % 5 in (1, 2) or t % 7 == 3 for t in range(24)]
POLICY = functools.partial(echo.measured, total_steps=24, max_factor=4)


@pytest.mark.parametrize("mode", ["plain", "buffer"])
def test_measured_resumes_at_any_step(mode):
    options = lambda: dict(MODES[mode], key=jax.random.key(0))  # noqa: E731
    expected = Scripted(ANSWERS).run(POLICY(), **options())
    record = [use.fresh for use in expected]
    assert 1 < sum(record) < 24
    for step in range(25):
        start = 0
        if step:
            plan = echo.EchoPlan(record[:step])
            start = plan.first_load(step, MODES[mode].get("buffer_size", 1))
        loader = Scripted(ANSWERS, first=start)
        found = loader.run(POLICY(decided=record[:step]), first_step=step, **options())
        assert_same(found, expected[step:])
    again = Scripted([True] * 24)  # other times, the same record
    assert_same(again.run(POLICY(decided=record), **options()), expected)
    assert again.asked_in == []


def test_all_processes_are_asked_and_obeyed():
    mine, other = ANSWERS, [t % 3 != 0 for t in range(24)]
    both = [a and b for a, b in zip(mine, other, strict=True)]
    fresh, asked = reference.load_if_ready(both, 4, [Fraction(1, 4)] * 24)
    alone, _ = reference.load_if_ready(mine, 4, [Fraction(1, 4)] * 24)
    assert fresh != alone
    loader, heard = Scripted(mine), []

    def agree(ready):
        heard.append((loader.step, ready))
        return ready and other[loader.step]

    assert [use.fresh for use in loader.run(POLICY(), agree=agree)] == fresh
    assert heard == [(t, mine[t]) for t in asked]


def test_ready_everywhere_is_the_least_ready_of_all(monkeypatch):
    assert (
        echo.online.ready_everywhere(True) is True and echo.online.ready_everywhere(False) is False
    )
    from jax.experimental import multihost_utils

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for others in ([1, 1], [1, 0], [0, 0]):
        gather = lambda own, others=others: np.array([own, *others])  # noqa: E731
        monkeypatch.setattr(multihost_utils, "process_allgather", gather)
        assert echo.online.ready_everywhere(True) is (others == [1, 1])
        assert echo.online.ready_everywhere(False) is False


def test_measured_echoes_while_a_real_loader_waits():
    source = Source(99, wait_at=1)
    policy = echo.measured(total_steps=8, max_factor=3)
    with load_ahead(source, depth=3) as loader:
        steps = echo_batches(loader, policy)
        assert [next(steps)[:3] for _ in range(3)] == [(0, 0, True), (1, 0, False), (2, 0, False)]
        source.go_on.set()
        assert next(steps)[:3] == (3, 1, True)  # the cap: it waits, whenever the batch comes
        wait_for(loader.ready)
        assert next(steps)[:3] == (4, 2, True)


BAD = {
    "measured without a loader": (
        lambda: echo_batches([batch(0)], POLICY()),
        r"asks whether a batch is ready: pass loads=load_ahead",
    ),
    "no policy": (lambda: echo_batches([batch(0)], 4), r"policy is a int: make an EchoPlan"),
    "first_step -1": (lambda: echo_batches([], PLAN, first_step=-1), r"first_step is -1"),
    "first_step T + 1": (lambda: echo_batches([], PLAN, first_step=12), r"is 12: .*11 steps"),
    "first_step 1.5": (lambda: echo_batches([], PLAN, first_step=1.5), r"first_step is 1.5"),
    "first_step undecided": (
        lambda: echo_batches(Scripted(ANSWERS), POLICY(decided=[True, False]), first_step=3),
        r"first_step is 3: the decisions known before are those of 2 steps",
    ),
    "buffer_size 0": (lambda: echo_batches([], PLAN, buffer_size=0), r"buffer_size is 0"),
    "buffer_size 1.5": (lambda: echo_batches([], PLAN, buffer_size=1.5), r"buffer_size is 1.5"),
    "buffer without a key": (lambda: echo_batches([], PLAN, buffer_size=2), r"pass key=jax.ran"),
    "rebatch without a key": (lambda: echo_batches([], PLAN, rebatch=True), r"pass key=jax.ran"),
    "augment without a key": (
        lambda: echo_batches([], PLAN, augment=add_noise), r"are random: pass key=jax.random"
    ),
    "unequal batches": (
        lambda: list(
            echo_batches([np.ones(3), np.ones(2)], PLAN, rebatch=True, key=jax.random.key(0))
        ),
        r"batch of load 1 has leaves \[\(2,\)\] and those before \[\(3,\)\]: .*drop the short last",
    ),
    "max_factor 0": (lambda: POLICY(max_factor=0), r"max_factor is 0: a batch is used a whole"),
    "max_factor 2.5": (lambda: POLICY(max_factor=2.5), r"max_factor is 2.5"),
    "T 0": (lambda: POLICY(total_steps=0), r"total_steps is 0: a run has at least one"),
    "floor 0": (lambda: POLICY(floor=0.0), r"floor\(0\) is 0: a probability lies in"),
    "floor > 1": (lambda: POLICY(floor=lambda t: 1 + t), r"floor\(1\) is 2: a probability"),
    "decided too long": (lambda: POLICY(decided=[True] * 25), r"25 decisions for 24 steps: pass"),
    "decided not fresh": (
        lambda: POLICY(decided=[False, True]), r"2 decisions for 24 steps, and the first is not"
    ),
    "depth 0": (lambda: load_ahead([], depth=0), r"depth is 0: the queue holds a whole"),
    "depth 1.5": (lambda: load_ahead([], depth=1.5), r"depth is 1.5"),
    "timeout 0": (lambda: load_ahead([], timeout=0), r"timeout is 0: pass seconds > 0"),
    "timeout nan": (lambda: load_ahead([], timeout=float("nan")), r"timeout is nan"),
    "first_load -1": (lambda: load_ahead([], first_load=-1), r"first_load is -1: loads"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("rebatch", [False, True])
def test_an_epoch_compiles_nothing_that_the_one_before_has(rebatch):
    traced = []

    def augment(batch, key):
        traced.append(key)
        return jax.tree.map(lambda x: x + 1, batch)

    def epoch():
        plan = echo.fixed(2, total_steps=6)
        loads = (np.full(4, i, np.float32) for i in range(3))
        options = {"augment": augment, "key": jax.random.key(0), "rebatch": rebatch}
        return [np.asarray(u.batch) for u in echo_batches(loads, plan, **options)]

    first = epoch()
    count = len(traced)
    assert count
    np.testing.assert_array_equal(epoch(), first)
    assert len(traced) == count
