"""--nonfinite=skip: updates that are not finite are left out and counted, and the run goes on.

pytest -m slow -n 0 tests/test_nonfinite.py    # further rules and ways to run: a minute
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.studies.tables import ORDERS, SYNC_RULES
from experiments.training import program, run, step
from local_opt import runners
from tests.little_run import SETTING, assert_same, plans_of, timeless, trained
from tests.little_run import built as stopping
from tests.test_one_loop import STEPS, WORKERS, task

EPOCHS = STEPS // 4  # without echo
BROKEN = 13  # an example: unit 2 of worker 1


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@functools.cache
def skipping(order="rr", sync="qsr", *, broken=True, mesh=False, way="vmap"):
    given, recipe = task(), SETTING._replace(nonfinite="skip", run=way)
    if broken:
        x = np.array(given.train["x"])
        x[BROKEN] = np.nan
        given = given._replace(train={**given.train, "x": x})
    mesh = runners.worker_mesh(WORKERS) if mesh else None
    rounds = SYNC_RULES[sync].rounds
    return program.build(given, recipe, ORDERS[order], rounds, mesh=mesh, epochs=15)


def every_step(prepared, sync, **options):
    plans = plans_of(sync, "none")
    return trained(prepared, plans, evaluate_at=range(1, STEPS), **options)


@pytest.mark.parametrize(
    "order,sync",
    [("rr", "parallel"), ("rr", "qsr"), slow("cd_grab", "qsr"), slow("rr", "accumulate")],
)
def test_where_all_is_finite_nothing_changes(order, sync):
    outcome, records = trained(stopping(order, sync), plans_of(sync))
    other, same = trained(skipping(order, sync, broken=False), plans_of(sync))
    assert_same(outcome.state.params, other.state.params)
    assert {r.pop("skipped") for r in same} == {0}
    assert timeless(records) == timeless(same)


@pytest.mark.parametrize(
    "order,sync,way,counts",
    [
        ("rr", "qsr", "vmap", {0: STEPS - EPOCHS, 1: EPOCHS}),
        ("cd_grab", "qsr", "vmap", {0: STEPS - EPOCHS, 1: EPOCHS}),
        slow("rr", "qsr", "turns", {0: STEPS - EPOCHS, 1: EPOCHS}),
        ("rr", "parallel", "vmap", {0: STEPS - EPOCHS, WORKERS: EPOCHS}),
        slow("cd_grab", "parallel", "vmap", {0: STEPS - EPOCHS, WORKERS: EPOCHS}),
        ("rr", "parallel", "turns", {0: STEPS - EPOCHS, WORKERS: EPOCHS}),
    ],
)
def test_the_update_of_a_broken_example_is_left_out_and_counted(order, sync, way, counts):
    """Alone under local steps; by all workers together where they meet in every step."""
    outcome, records = every_step(skipping(order, sync, way=way), sync)
    assert outcome.step == STEPS and outcome.diverged is None
    found = np.unique([r["skipped"] for r in records], return_counts=True)
    assert dict(zip(*map(np.ndarray.tolist, found), strict=True)) == counts
    assert all(np.isfinite(r["train/batch_loss"]) for r in records)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outcome.state.params))
    assert records[-1]["rounds"] == plans_of(sync, "none").sync.rounds
    orders = np.sort(outcome.state.orders.current, axis=1)
    assert (orders == np.arange(11)).all()


def test_rounds_of_accumulated_gradients_are_left_out_by_all():
    outcome, records = every_step(skipping(sync="accumulate"), "accumulate")
    counts = [r["skipped"] for r in records]
    assert set(counts) == {0, WORKERS} and sum(counts) <= WORKERS * EPOCHS
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outcome.state.params))
    one, *others = (jax.tree.map(lambda x, w=w: x[w], outcome.state.params) for w in range(WORKERS))
    for other in others:
        assert_same(one, other)


@pytest.mark.parametrize("order,sync", [slow("cd_grab", "parallel"), ("cd_grab", "qsr")])
def test_workers_on_a_mesh_leave_out_what_simulated_ones_do(order, sync):
    outcome, records = every_step(skipping(order, sync), sync)
    other, same = every_step(skipping(order, sync, mesh=True), sync)
    assert [r["skipped"] for r in records] == [r["skipped"] for r in same]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        outcome.state.params, other.state.params,
    )  # fmt: skip


def test_it_goes_on_from_a_checkpoint(tmp_path):
    whole, records = trained(skipping(), plans_of())
    saving = run.Saving(str(tmp_path), every=20)
    trained(skipping(), plans_of(), saving=saving, ends=lambda record: record["step"] >= 24)
    again, rest = trained(skipping(), plans_of(), saving=saving)
    assert_same(whole.state, again.state)
    assert timeless(rest) == timeless(records)[-len(rest) :] and len(rest) == 4
    assert sum(r["skipped"] for r in records)


def test_a_run_in_which_nothing_is_finite_ends_and_says_so():
    given = task()
    broken = given._replace(train={**given.train, "x": np.full_like(given.train["x"], np.nan)})
    rounds, recipe = SYNC_RULES["qsr"].rounds, SETTING._replace(nonfinite="skip")
    prepared = program.build(broken, recipe, ORDERS["rr"], rounds, epochs=15)
    start = jax.device_get(prepared.init(0).params)
    outcome, records = every_step(prepared, "qsr")
    assert {r["skipped"] for r in records} == {WORKERS}
    assert not any("train/batch_loss" in r for r in records)
    assert_same(outcome.state.params, start)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, 1.0])
def test_what_is_left_out_is_what_optax_leaves_out(bad):
    inner = optax.sgd(0.1, momentum=0.9)
    params = {"a": jnp.ones(3), "b": jnp.ones(())}
    good = {"a": jnp.arange(3.0), "b": jnp.ones(())}
    _, before = inner.update(good, inner.init(params), params)
    updates, after = inner.update(good | {"b": jnp.asarray(bad)}, before, params)
    found, state, taken = step.finite_update(updates, after, before)
    other = optax.apply_if_finite(inner, 10)
    expected, known = other.update(
        good | {"b": jnp.asarray(bad)}, other.init(params)._replace(inner_state=before), params
    )
    assert_same((found, state), (expected, known.inner_state))
    assert bool(taken) == (bad == 1.0)
