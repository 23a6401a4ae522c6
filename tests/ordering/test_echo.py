"""repeat: the right batch in every step, each loaded once, resumed runs, and donation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering import echo
from tests import reference, tables
from tests.echo_source import PLAN, Source, Uses, assert_same, batch, whole_run


@pytest.mark.parametrize("name", tables.ECHO_PLANS)
def test_every_step_uses_the_batch_of_the_plain_loop(name):
    plan = tables.ECHO_PLANS[name](41)
    source, steps = Source(99), 0
    expected = reference.loads_used(plan.fresh)
    for use in Uses(source, plan):
        assert (use.step, use.load) == (steps, expected[steps])
        assert type(use.fresh) is bool and use.fresh == plan.fresh[steps]
        assert source.asked == plan.loads_before(steps + 1)  # none on an echoed step, none ahead
        for used, loaded in zip(
            jax.tree.leaves(use.batch), jax.tree.leaves(batch(use.load)), strict=True
        ):
            assert isinstance(used, jax.Array) and used.dtype == loaded.dtype
            np.testing.assert_array_equal(used, loaded)
        steps += 1
    assert steps == 41 and source.asked == plan.loads


@jax.jit
def train(params, batch):
    loss = lambda w: jnp.mean((batch["x"] * w - batch["y"][..., 0]) ** 2)  # noqa: E731
    return params - 1e-9 * jax.grad(loss)(params)


def test_an_echoed_step_moves_nothing_from_the_host():
    plan = echo.fixed(3, total_steps=10)
    steps = Uses(Source(99), plan)
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
    # The guard does notice the transfer of a load.
    with jax.transfer_guard("disallow_explicit"):
        with pytest.raises(ordering.data.LoadError, match="load 3 .*host-to-device transfer"):
            next(steps)


def test_a_run_resumes_at_any_step_bitwise():
    expected = whole_run()
    assert [(use.step, use.fresh) for use in expected] == list(enumerate(PLAN.fresh))
    for step in range(PLAN.total_steps + 1):
        source = Source(99, first=PLAN.first_load(step))
        actual = list(Uses(source, PLAN, first_step=step))
        assert_same(actual, expected[step:])
        left = PLAN.total_steps - step  # without a step none is read, else not one more
        assert source.next == (PLAN.loads if left else PLAN.first_load(step))


@pytest.mark.parametrize("total_steps", [1, 4])
def test_a_run_that_is_over_needs_no_batch(total_steps):
    def nothing():
        pytest.fail("read a batch")
        yield

    plan = echo.fixed(2, total_steps=total_steps)
    decided = [use.fresh for use in Uses(Source(99), plan)]
    policy = echo.adaptive(total_steps=total_steps, max_factor=3, decided=decided)
    assert list(Uses(nothing(), plan, first_step=total_steps)) == []
    loader = ordering.data.prefetch_to_device(iter([]))
    assert list(Uses(loader, policy, first_step=total_steps)) == []


@functools.partial(jax.jit, donate_argnums=1)
def donating(params, batch):
    """A step whose result takes the batch's memory."""
    return params + batch["y"][0].sum(), jax.tree.map(lambda leaf: leaf + 1, batch)


def test_a_donated_batch_that_is_used_again_is_an_error():
    uses = Uses(Source(99), PLAN)
    donating(0, next(uses).batch)
    for _ in range(2):  # the error is repeated
        with pytest.raises(ValueError, match="load 0 .*step 0 .*donate"):
            next(uses)
    uses = Uses(Source(99), echo.fixed(1, total_steps=3))
    assert len([donating(0, use.batch) for use in uses]) == 3  # no batch is used again


def test_a_plan_without_an_end_stops_with_the_loads():
    batches = echo.repeat([np.ones(1)] * 3, echo.fixed(2))
    assert [(batches.step, batches.load) for _ in batches] == [(t, t // 2) for t in range(6)]
    for step in range(6):
        rest = Uses(Source(3, first=step // 2), echo.fixed(2), first_step=step)
        assert [use.step for use in rest] == list(range(step, 6))
    late = Uses(Source(10**8, first=10**7), echo.fixed(2), first_step=2 * 10**7)
    assert next(late)[:2] == (2 * 10**7, 10**7), "a run without an end has no last step"
