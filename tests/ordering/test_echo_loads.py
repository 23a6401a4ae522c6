"""Loads that end, fail, hang or come late, and the thread that reads them ahead."""

import gc
import threading
import weakref

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ordering import echo
from ordering.data import LoadError, prefetch_to_device
from tests.echo_source import PLAN, Source, Uses, assert_same, batch, whole_run
from tests.waiting import TIMEOUT, wait_for

AHEAD = pytest.mark.parametrize("given", [lambda loads, **_: loads, prefetch_to_device])


@AHEAD
def test_loads_that_end_before_the_run(given):
    steps = Uses(given(Source(2)), PLAN)
    assert [next(steps).load for _ in range(5)] == [0, 0, 0, 1, 1]
    for _ in range(2):  # the end is repeated
        with pytest.raises(LoadError, match="load 2 is missing.* step 5 of 11 ") as error:
            next(steps)
        assert error.value.load == 2
    uses = list(Uses(given(Source(2)), PLAN, stop_with_loads=True))
    assert [use.load for use in uses] == [0, 0, 0, 1, 1]
    for stop in (False, True):
        with pytest.raises(ValueError, match="source"):
            next(Uses(given([]), PLAN, stop_with_loads=stop))


@AHEAD
def test_a_run_resumes_from_the_load_that_an_error_names(given):
    def generator():  # generators end after their first error
        yield from Source(99, fail_at=2)

    steps = Uses(given(generator()), PLAN, stop_with_loads=True)
    uses = [next(steps) for _ in range(5)]
    for _ in range(2):  # the error is repeated
        with pytest.raises(LoadError, match="load 2 .*OSError: disk on fire") as error:
            next(steps)
        assert error.value.load == 2 and isinstance(error.value.__cause__, OSError)
    first = PLAN.first_load(5)
    assert first == 2
    rest = given(Source(99, first=first), first_load=first)
    assert_same([*uses, *Uses(rest, PLAN, first_step=5)], whole_run())


def test_no_batch_is_lost_after_a_timeout():
    source = Source(99, wait_at=2)
    with prefetch_to_device(source, timeout=0.02) as loader:
        wait_for(loader.ready)  # any load may take longer than this timeout
        steps, uses, late = Uses(loader, PLAN), [], 0
        while len(uses) < PLAN.total_steps and late < 1000:
            try:
                uses.append(next(steps))
            except LoadError as error:
                assert "did not come within 0.02 s: the input hangs. Call next" in str(error)
                if len(uses) == 5:  # the step that needs the late load
                    assert error.load == 2 and str(error).startswith("load 2 ")
                    late += 1
                if late == 2:  # after a second timeout
                    source.go_on.set()
        assert late >= 2
        assert_same(uses, whole_run())


@pytest.mark.parametrize("depth", [1, 3])
def test_a_loader_reads_depth_plus_one_batches_ahead(depth):
    source = Source(10**6)
    loader = prefetch_to_device(source, depth=depth)
    for consumed in range(1, 5):
        np.testing.assert_array_equal(next(loader)["x"], batch(consumed - 1)["x"])
        wait_for(lambda c=consumed: source.asked == c + depth + 1)
    loader.close()  # ends the thread, so the count is final
    assert source.asked == 4 + depth + 1
    # Batches loaded before the close are still returned; then the end is repeated.
    left = [b["x"][0, 0] // 1000 for b in loader]
    assert left == list(range(4, 4 + len(left))) and len(left) <= depth + 1
    assert loader.ready() and next(loader, None) is None and next(loader, None) is None


def test_a_loader_repeats_its_end_or_error():
    loader = prefetch_to_device(Source(2), first_load=5)
    assert len(list(loader)) == 2 and list(loader) == [] and loader.ready()
    loader = prefetch_to_device(Source(99, fail_at=1), first_load=5)
    next(loader)
    for _ in range(2):
        with pytest.raises(LoadError, match="load 6 .*OSError: disk") as error:
            next(loader)
        assert error.value.load == 6 and loader.ready()


def loading_threads():
    return {thread for thread in threading.enumerate() if "_load_all" in thread.name}


def test_a_batch_that_arrives_after_closing_is_dropped():
    source, before = Source(99, wait_at=0), loading_threads()
    loader = prefetch_to_device(source)
    (thread,) = loading_threads() - before
    wait_for(lambda: source.asked == 1)
    assert not loader.ready()
    loader.close()
    assert list(loader) == []
    source.go_on.set()
    thread.join(TIMEOUT)
    assert not thread.is_alive() and source.asked == 1
    assert list(loader) == []


def test_an_abandoned_loader_is_freed_and_its_thread_ends():
    before = loading_threads()
    loader = prefetch_to_device(Source(10**6))
    (thread,) = loading_threads() - before
    steps = Uses(loader, PLAN)
    next(steps)
    abandoned = weakref.ref(loader)
    del loader, steps
    gc.collect(1)
    assert abandoned() is None
    thread.join(TIMEOUT)
    assert not thread.is_alive()


def test_batches_are_placed_once_with_the_given_sharding():
    mesh = jax.make_mesh((8,), ("worker",), (AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("worker"))
    loads = [np.arange(16.0).reshape(8, 2) + i for i in range(3)]
    with prefetch_to_device(loads, sharding=sharding) as loader:
        for use in Uses(loader, echo.fixed(2, total_steps=6)):
            assert use.batch.sharding == sharding
            assert len(use.batch.addressable_shards) == 8
            np.testing.assert_array_equal(use.batch, np.float32(loads[use.load]))
    (placed,) = prefetch_to_device(loads[:1], sharding=jax.devices()[3])
    assert placed.devices() == {jax.devices()[3]}


@AHEAD
@pytest.mark.parametrize(
    "wrong,message",
    [
        ({"text": "a"}, r"batch\['text'\] is of <U1, .*JAX lacks"),
        (None, "without arrays: give arrays"),
        ({}, "without arrays: give arrays"),
    ],
)
def test_a_batch_that_is_none_is_an_error(given, wrong, message):
    with pytest.raises(LoadError, match=f"load 0 failed.*{message}"):
        next(Uses(given([wrong]), PLAN))


def test_a_loader_may_be_collected_by_its_own_thread(monkeypatch):
    """Garbage is collected in any thread, also in the one that the loader's end waits for."""
    problems, held, dropped = [], [], threading.Event()
    monkeypatch.setattr("sys.unraisablehook", problems.append)

    def source():
        yield np.zeros(1)
        dropped.wait(5)
        held.clear()  # the last reference
        gc.collect(1)
        yield np.ones(1)

    before = loading_threads()
    held.append(prefetch_to_device(source(), depth=2))
    next(held[0])
    (thread,) = loading_threads() - before
    dropped.set()
    thread.join(TIMEOUT)
    assert not held and not problems
