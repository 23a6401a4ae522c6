"""echo_batches: the right batch in every step, each loaded once, resumed runs, and donation."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ordering import echo, input
from ordering.echo import echo_batches
from tests import reference, tables
from tests.echo_source import MODES, PLAN, Source, add_noise, assert_same, batch, options, whole_run
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


@jax.jit
def train(params, batch):
    loss = lambda w: jnp.mean((batch["x"] * w - batch["y"][..., 0]) ** 2)  # noqa: E731
    return params - 1e-9 * jax.grad(loss)(params)


@pytest.mark.parametrize("mode", MODES)
def test_an_echoed_step_moves_nothing_from_the_host(mode):
    plan = echo.fixed(3, total_steps=10)
    steps = echo_batches(Source(99), plan, **options(mode))
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
        with pytest.raises(input.LoadError, match="load 3 .*host-to-device transfer"):
            next(steps)


def test_augmentation_depends_on_key_and_step_and_starts_from_the_loaded_batch():
    augmented, uses = jax.jit(add_noise), whole_run("augment")
    for use in uses:
        step_key = jax.random.fold_in(jax.random.key(0), use.step)
        expected = augmented(batch(use.load), step_key)
        jax.tree.map(np.testing.assert_array_equal, use.batch, expected)
    assert uses[0].load == uses[1].load
    assert (uses[0].batch["x"] != uses[1].batch["x"]).any()
    other = next(echo_batches(Source(99), PLAN, **options("augment", seed=1)))
    assert (uses[0].batch["x"] != other.batch["x"]).any()


@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_at_any_step_bitwise(mode):
    expected = whole_run(mode)
    assert [(use.step, use.fresh) for use in expected] == list(enumerate(PLAN.fresh))
    for step in range(PLAN.total_steps + 1):
        source = Source(99, first=PLAN.first_load(step))
        found = list(echo_batches(source, PLAN, first_step=step, **options(mode)))
        assert_same(found, expected[step:])
        left = PLAN.total_steps - step  # without a step none is read, else not one more
        assert source.next == (PLAN.loads if left else PLAN.first_load(step))


def test_the_second_epoch_compiles_nothing():
    traced = []

    def augment(batch, key):
        traced.append(key)
        return jax.tree.map(lambda x: x + 1, batch)

    def epoch():
        plan = echo.fixed(2, total_steps=6)
        loads = (np.full(4, i, np.float32) for i in range(3))
        uses = echo_batches(loads, plan, augment=augment, key=jax.random.key(0))
        return [np.asarray(use.batch) for use in uses]

    first = epoch()
    count = len(traced)
    assert count
    np.testing.assert_array_equal(epoch(), first)
    assert len(traced) == count


@dataclasses.dataclass
class Shift:
    """A function that has no hash, as a module with arrays."""

    by: np.ndarray

    def __call__(self, batch, key):
        return jax.tree.map(lambda x: x + self.by, batch)


def test_an_augment_needs_no_hash_and_is_not_kept():
    def epoch(augment):
        plan, loads = echo.fixed(2, total_steps=4), (np.full(2, i) for i in range(2))
        uses = echo_batches(loads, plan, augment=augment, key=jax.random.key(0))
        return [use.batch.tolist() for use in uses]

    by = np.array([10, 20])
    expected = [[i + 10, i + 20] for i in (0, 0, 1, 1)]
    for augment in (Shift(by), lambda batch, key: batch + by, Shift(by).__call__):
        assert epoch(augment) == expected
    for make in (lambda: Shift(by), lambda: functools.partial(Shift(by))):
        augment = make()
        gone = weakref.ref(augment)
        epoch(augment)
        del augment
        gc.collect(1)
        assert gone() is None


@pytest.mark.parametrize("total_steps", [1, 4])
def test_a_run_that_is_over_needs_no_batch(total_steps):
    def nothing():
        pytest.fail("read a batch")
        yield

    plan = echo.fixed(2, total_steps=total_steps)
    known = [use.fresh for use in echo_batches(Source(99), plan)]
    policy = echo.measured(total_steps=total_steps, max_factor=3, decided=known)
    assert list(echo_batches(nothing(), plan, first_step=total_steps)) == []
    loader = input.load_ahead(iter([]))
    assert list(echo_batches(loader, policy, first_step=total_steps)) == []


@functools.partial(jax.jit, donate_argnums=1)
def donating(params, batch):
    """A step whose result takes the batch's memory."""
    return params + batch["y"][0].sum(), jax.tree.map(lambda leaf: leaf + 1, batch)


def test_a_donated_batch_that_is_used_again_is_an_error():
    uses = echo_batches(Source(99), PLAN)
    donating(0, next(uses).batch)
    for _ in range(2):  # the error is repeated
        with pytest.raises(ValueError, match="1 uses load 0 again, but step 0 .*donate a copy"):
            next(uses)
    uses = echo_batches(Source(99), echo.fixed(1, total_steps=3))
    assert len([donating(0, use.batch) for use in uses]) == 3  # no batch is used again


def shift_y(batch, key):
    return {"x": batch["x"], "y": batch["y"] + jax.random.uniform(key)}


COPIES = {"copied": {}, "augmented": {"augment": shift_y, "key": jax.random.key(0)}}


@pytest.mark.parametrize("mode", COPIES)
@pytest.mark.parametrize("policy", [PLAN, echo.measured(total_steps=9, max_factor=3)])
def test_steps_may_donate_copied_and_augmented_batches(mode, policy):
    copied = (lambda x: jax.tree.map(jnp.copy, x)) if mode == "copied" else lambda x: x

    def run(step):
        source = Source(99)
        source.ready = lambda: False  # so that `measured` echoes whenever it may
        uses = echo_batches(source, policy, **COPIES[mode])
        return [(use[:3], jax.device_get(step(0, copied(use.batch)))) for use in uses]

    found, expected = run(donating), run(jax.jit(donating.__wrapped__))
    assert len(found) == policy.total_steps
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def uses(policy=PLAN, **options):
    return lambda: echo_batches([batch(0)], policy, **options)


test_bad_input = refuses({
    "no policy": (uses(4), r"policy is a int: make an EchoPlan"),
    "augment without a key": (uses(augment=add_noise), r"key is None .*: pass a typed key"),
    "augment of a batch": (uses(augment=lambda b: b, key=jax.random.key(0)), "augment is <"),
})  # fmt: skip
