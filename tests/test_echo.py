"""The stream of an echoed run: the right batch in every step, loaded once, and nothing lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ordering import echo, input
from ordering.echo import echo_batches
from tests import reference, tables
from tests.echo_source import (
    MODES,
    PLAN,
    B,
    Source,
    W,
    add_noise,
    assert_same,
    batch,
    counted_run,
    stream,
    whole_run,
)
from tests.refused import refuses


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
        with pytest.raises(input.LoadError, match="load 3 .*host-to-device transfer"):
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


BAD = {
    "no policy": (lambda: echo_batches([batch(0)], 4), r"policy is a int: make an EchoPlan"),
    "first_step -1": (lambda: echo_batches([], PLAN, first_step=-1), r"first_step is -1"),
    "first_step T + 1": (lambda: echo_batches([], PLAN, first_step=12), r"is 12: .*11 steps"),
    "first_step 1.5": (lambda: echo_batches([], PLAN, first_step=1.5), r"first_step is 1.5"),
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
}  # fmt: skip

test_bad_input = refuses(BAD)


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
