"""Orders from scores: the published patterns, over workers, in epochs, and after a resume."""

import functools

import jax
import numpy as np
import pytest

import ordering
from ordering import scored
from ordering.data import read_epochs
from ordering.scored_orders import PATTERNS
from tests import reference
from tests.problems import assert_bitwise_equal, on_mesh
from tests.tables import vmap_workers

KEY = jax.random.key(0)


def orders(order, *, workers=None, epochs=3, key=KEY):
    """int[epochs, W, M], compiled once."""
    state = ordering.init_workers(order, key, None, workers)
    following = jax.jit(order.next_epoch) if workers is None else vmap_workers(order.next_epoch)
    seen = []
    for _ in range(epochs):
        seen.append(np.atleast_2d(state.current))
        state = following(state)
    assert following._cache_size() == 1
    return np.stack(seen)


def common(seen):
    """int[epochs, W M], the common orders of workers."""
    return seen.swapaxes(1, 2).reshape(len(seen), -1)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_equals_the_slow_reference(pattern):
    """In 25 random settings of each: scores with ties, and any layers, sections and radius."""
    draw = np.random.default_rng([*PATTERNS].index(pattern))
    for _ in range(25):
        size = int(draw.choice([1, 2, 7, 33, 60]))
        scores = draw.integers(0, 30, size) if draw.integers(2) else draw.normal(size=size)
        options = {
            "layers": int(draw.integers(1, size + 1)),
            "sections": int(draw.integers(1, size + 1)),
            "radius": float(draw.integers(0, 65) / 64),
        }
        takes = PATTERNS[pattern].__kwdefaults__ or {}
        options = {name: value for name, value in options.items() if name in takes}
        expected = reference.scored_order(scores, pattern, **options)
        state = scored(scores, pattern=pattern, **options).init(KEY, None)
        current = state.current.tolist()
        if pattern == "segments":
            assert sorted(current) == sorted(expected)
        else:
            assert current == expected == state.next.tolist()


def test_units_move_within_their_window_or_segment_alone_and_anew_in_every_epoch():
    scores = np.random.default_rng(1).normal(size=50)
    expected = np.argsort(scores)
    for options, bounds in (
        ({"pattern": "segments", "ends": 0.2}, [0, 10, 40, 50]),
        ({"jitter": 8}, [*range(0, 50, 8), 50]),
    ):
        seen = orders(scored(scores, **options))[:, 0]
        assert len({*map(tuple, seen.tolist())}) == 3
        for low, high in zip(bounds, bounds[1:], strict=False):
            for epoch in seen:
                assert {*epoch[low:high]} == {*expected[low:high]}
        fixed = orders(scored(scores, **options, fixed=True))[:, 0]
        np.testing.assert_array_equal(fixed, np.broadcast_to(seen[0], fixed.shape))


def test_a_window_has_a_uniform_order():
    """6 orders of 3 units, 6,000 windows: chi-squared with 5 degrees of freedom, below 20.5."""
    first = orders(scored(np.arange(18_000.0), jitter=3), epochs=1)[0, 0]
    code = (first.reshape(-1, 3) % 3) @ [9, 3, 1]
    counts = np.unique(code, return_counts=True)[1]
    assert len(counts) == 6 and ((counts - 1000) ** 2 / 1000).sum() < 20.5


@pytest.mark.parametrize("options", [{}, {"jitter": 6}, {"pattern": "segments"}])
def test_a_step_has_the_same_units_for_any_number_of_workers(options):
    scores = np.random.default_rng(2).normal(size=48)
    key_of_first = jax.random.fold_in(KEY, 0)  # as of worker 0
    one = orders(scored(scores, units_per_step=12, **options), key=key_of_first)[:, 0]
    for workers in (2, 4):
        order = scored(scores, workers=workers, units_per_step=12 // workers, **options)
        np.testing.assert_array_equal(common(orders(order, workers=workers)), one)


def test_what_fills_no_step_lies_evenly_and_is_other_units_in_every_epoch():
    order = scored(np.arange(43.0), workers=8)
    seen, left_out = common(orders(order, workers=8, epochs=12)), set()
    for epoch in seen.tolist():
        assert len(epoch) == 40 and epoch == sorted({*epoch})  # the order of the scores
        out = sorted({*range(43)} - {*epoch})
        assert len(out) == 3 and min(np.diff([*out, out[0] + 43])) >= 14
        left_out |= {*out}
    assert len(left_out) > 20
    fixed = common(orders(scored(np.arange(43.0), workers=8, fixed=True), workers=8))
    np.testing.assert_array_equal(fixed, fixed[:1].repeat(3, axis=0))


def test_workers_on_a_mesh_have_the_orders_of_simulated_ones():
    scores = np.random.default_rng(3).normal(size=45)
    order = scored(scores, pattern="saw", jitter=4, workers=8)

    def epochs(key):
        state = order.init(key, None)
        return state.current, order.next_epoch(state).current

    keys = jax.random.split(KEY, 8)
    assert_bitwise_equal(jax.jit(on_mesh(epochs, 8))(keys), vmap_workers(epochs)(keys))


@functools.cache
def run_of(workers):
    scores = np.random.default_rng(4).normal(size=48)
    return scored(scores, jitter=6, workers=workers, units_per_step=8 // workers)


def steps(reads, count):
    return [sorted(np.ravel(next(reads)).tolist()) for _ in range(count)]


@pytest.mark.parametrize("after", [2, 4])
def test_a_run_that_is_saved_goes_on_as_the_same_run_also_with_other_workers(after):
    """From the middle of an epoch: the same units in every step, of this epoch and later ones."""
    data, order = np.arange(48), run_of(after)
    expected = steps(read_epochs(data, run_of(2), KEY, workers=2), 17)
    reads = read_epochs(data, run_of(2), KEY, workers=2)
    assert steps(reads, 8) == expected[:8]
    state = jax.tree.map(np.asarray, reads.state())
    if after != 2:
        fresh = ordering.init_workers(order, jax.random.key(9), None, after)
        kept, _ = ordering.resize(state.order, fresh, order, units_per_step=4, visited=4)
        state = state._replace(order=kept, digest=None)
    reads = read_epochs(data, order, jax.random.key(9), workers=after, state=state)
    assert steps(reads, 9) == expected[8:]
