"""repeat with minibatches: the loop of PPO, resumed at any step, for trees, orders and meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ordering
from ordering import echo
from tests import tables
from tests.cases import mostly_slow
from tests.echo_source import Source, Uses, assert_same, batch

KEY, PARTS = jax.random.key(7), 2
PLANS = {
    "fixed": echo.fixed(3, total_steps=8),
    "no end": echo.fixed(2),
    "bernoulli": echo.bernoulli(0.5, total_steps=9, key=jax.random.key(1)),
}


def run(plan, *, first_step=0, loads=5, **options):
    source = Source(loads, first=plan.first_load(first_step // PARTS))
    options = {"minibatches": PARTS, "key": KEY, "axis": 1, "first_step": first_step, **options}
    return Uses(source, plan, stop_with_loads=True, **options)


def published(plan, loads, steps):
    """Load, age and rows of every step: for each use a permutation, and all of its minibatches."""
    load, use, result = -1, 0, []
    for t in range(steps):
        load, use = (load, use + 1) if t and not plan.decide(t, uses=use + 1) else (load + 1, 0)
        if load == loads:
            break
        key = jax.random.fold_in(jax.random.fold_in(KEY, load), use)
        for number, rows in enumerate(np.split(jax.random.permutation(key, 4), PARTS)):
            result.append((load, use * PARTS + number, rows))
    return result


@pytest.mark.parametrize("name", PLANS)
def test_all_minibatches_are_used_before_the_next_use(name):
    plan = PLANS[name]
    uses = run(plan)
    expected = published(plan, 5, plan.total_steps or 10)
    for step, (load, age, rows) in enumerate(expected):
        use = next(uses)
        assert use[:3] == (step, load, age < PARTS) and uses.batches.age == age
        loaded = jax.tree.map(lambda x, rows=rows: x[:, rows], batch(load))
        jax.tree.map(np.testing.assert_array_equal, use.batch, loaded)
    with pytest.raises(StopIteration):
        next(uses)
    orders = {tuple(np.concatenate(pair).tolist()) for pair in _pairs([x[2] for x in expected])}
    assert len(orders) > 1 and all(sorted(order) == [0, 1, 2, 3] for order in orders)


def _pairs(rows):
    return zip(rows[::PARTS], rows[1::PARTS], strict=True)


@pytest.mark.parametrize("name", PLANS)
def test_a_run_resumes_at_any_step_with_its_permutations(name):
    """It loads what the steps before have not used up, and permutes as the whole run does."""
    whole = list(run(PLANS[name]))
    for step in range(len(whole) + 1):
        rest = run(PLANS[name], first_step=step)
        assert rest.batches.step == step - 1
        assert_same(rest, whole[step:])


def test_three_faults_that_learners_had():
    """Updates counted as loads, a shuffle that begins anew, a minibatch repeated in place.

    google/tunix issues 2290 and 2288 and pull request 1623.
    """
    plan = echo.fixed(2)  # num_iterations
    whole = [tuple(use.batch["x"][0].tolist()) for use in run(plan, loads=3)]
    for step in range(12):
        assert plan.first_load(step // PARTS) == step // 4  # and not step
        rest = run(plan, loads=3, first_step=step)
        assert tuple(next(rest).batch["x"][0].tolist()) == whole[step]
    uses = [whole[t] + whole[t + 1] for t in range(0, 12, PARTS)]
    assert len({tuple(x % 1000 for x in use) for use in uses}) > 1, "new permutations"
    for use, load in zip(uses, [0, 0, 1, 1, 2, 2], strict=True):
        assert sorted(use) == batch(load)["x"][0].tolist()


def test_a_policy_that_measures_goes_on_in_the_middle_of_a_use():
    with ordering.data.prefetch_to_device(Source(9)) as loader:
        options = {"minibatches": PARTS, "key": KEY, "axis": 1}
        whole = list(Uses(loader, echo.adaptive(max_factor=2, total_steps=6), **options))
    decided = [use.fresh for use in whole][::PARTS]
    replay = echo.EchoPlan(decided)
    for step in range(2 * 6):
        policy = echo.adaptive(max_factor=2, total_steps=6, decided=decided[: step // PARTS + 1])
        with ordering.data.prefetch_to_device(Source(9, replay.first_load(step // 2))) as loader:
            rest = Uses(loader, policy, first_step=step, **options)
            assert_same([next(rest)], whole[step : step + 1])


def read(name, minibatches, *, plan=None, state=None, workers=None, units=12, step=4, size=1):
    order = tables.ORDERS[name].make(units, step)
    data = np.arange(units * size * (workers or 1))
    reads = ordering.data.read_epochs(
        data, order, KEY, like=jnp.zeros(3), state=state, workers=workers, unit_size=size
    )
    plan = plan or echo.fixed(2)
    return echo.repeat(reads, plan, minibatches=minibatches, key=KEY), order


TABLE = tables.whole_numbers((64, 3)).astype(np.float32)


def gradients(x, size=1):
    return jnp.asarray(TABLE)[x[..., ::size] // size]


def steps_of(name, minibatches, stop, state=None, *, advance=False, **options):
    """(what every step until `stop` uses, the state then)."""
    batches, order = read(name, minibatches, state=state, **options)
    steps = []
    for x in batches:
        steps.append((batches.step, batches.load, batches.fresh, batches.age, x.tolist()))
        if not advance:
            batches.observe(gradients(x, options.get("size", 1)))
        elif batches.fresh:
            batches.advance(jax.jit(order.observe)(batches.order_state, gradients(x)))
        if batches.step + 1 == stop:
            return steps, batches.state()


@pytest.mark.parametrize(
    "name,options",
    [
        ("random_reshuffling", {}),
        ("grab", {"workers": 2}),
        ("grab", {"size": 2}),
        ("grab", {"units": 10}),
    ],
)
def test_an_order_observes_minibatches_as_it_observes_batches(name, options):
    whole, state = steps_of(name, 2, 2 * 2 * 7, **options)
    once, expected = steps_of(name, 1, 2 * 7, **options)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    axis = 1 if options.get("workers") else 0
    size = options.get("size", 1)
    for first, second, use in zip(whole[::2], whole[1::2], once, strict=True):
        joined = np.concatenate([first[4], second[4]], axis)
        assert first[2] == second[2] == use[2]
        if use[2]:  # in the order that was read
            np.testing.assert_array_equal(joined, use[4])
        np.testing.assert_array_equal(np.sort(joined, axis), np.sort(use[4], axis))
        units = joined.reshape(*joined.shape[:-1], -1, size)
        assert (units - units[..., :1] == np.arange(size)).all(), "units stay whole"


RESUMED = [
    ("grab", 1, {"plan": echo.fixed(3), "step": 5}),
    ("random_reshuffling", 1, {"plan": echo.bernoulli(0.4, total_steps=16, key=KEY)}),
    ("grab", 2, {"workers": 2}),
    ("random_reshuffling", 2, {}),
    ("grab", 1, {"plan": echo.bernoulli(0.4, total_steps=16, key=KEY)}),
    ("grab", 2, {"plan": echo.fixed(3, total_steps=8)}),
]


@pytest.mark.parametrize("name,parts,options", mostly_slow(RESUMED, quick=RESUMED[:3]))
def test_a_run_with_an_order_resumes_between_any_two_steps(name, parts, options):
    """Also between two uses of the last load of an epoch, whose order is still needed then."""
    whole, _ = steps_of(name, parts, 16, **options)
    if parts == 1:
        assert whole == steps_of(name, parts, 16, advance=True, **options)[0]
        first = sum([x for *_, fresh, _, x in whole if fresh][: -(-12 // len(whole[0][4]))], [])
        assert sorted(first) == [*range(12)], "an epoch"
    for stop in range(1, 16):
        before, state = steps_of(name, parts, stop, **options)
        saved = jax.tree.map(np.asarray, state)._asdict()  # as from a checkpoint
        batches, _ = read(name, parts, state=saved, **options)
        again = jax.tree.map(np.asarray, batches.state())._asdict()
        jax.tree.map(np.testing.assert_array_equal, again, saved)
        assert before + steps_of(name, parts, 16, saved, **options)[0] == whole, stop


def test_adaptive_goes_on_with_the_batch_that_it_had():
    state, seen = None, []
    for stop in (2, 3, 7, 20):
        state = state and state._asdict()
        result, state = steps_of("grab", 1, stop, state, plan=echo.adaptive(max_factor=4))
        seen += result
    assert [use[0] for use in seen] == list(range(20))
    for before, after in zip(seen, seen[1:], strict=False):
        assert after[1] == before[1] + after[2]
        assert after[2] or after[4] == before[4]


def test_a_step_that_was_not_observed_is_made_again():
    batches, _ = read("grab", 2)
    batches.observe(gradients(next(batches)))
    x = next(batches)
    state = batches.state()
    with pytest.raises(ValueError, match="step 1 was not observed: call observe"):
        next(batches)
    again, _ = read("grab", 2, state=state)
    np.testing.assert_array_equal(next(again), x)
    assert again.step == 1


def test_minibatches_are_gathered_where_the_batch_is():
    x = {"x": np.arange(48.0).reshape(16, 3), "y": np.arange(16)}
    options = {"minibatches": 2, "key": KEY}
    expected = list(echo.repeat([x], echo.fixed(2), **options))
    for kind in AxisType.Explicit, AxisType.Auto:
        mesh = jax.make_mesh((8,), ("data",), (kind,))
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        batches = echo.repeat([jax.device_put(x, sharding)], echo.fixed(2), **options)
        with jax.transfer_guard_device_to_host("disallow"):
            cut = list(batches)
        for part, whole in zip(cut, expected, strict=True):
            jax.tree.map(np.testing.assert_array_equal, part, whole)
            assert all(
                leaf.sharding.is_equivalent_to(sharding, leaf.ndim) for leaf in part.values()
            )
    with pytest.raises(ValueError, match="partitioned 8 times, but the dimension size is 4"):
        next(echo.repeat([jax.device_put(x, sharding)], echo.fixed(2), minibatches=4, key=KEY))


def test_workers_on_a_mesh_exchange_nothing_and_a_later_step_moves_nothing():
    mesh = jax.make_mesh((8,), ("worker",))
    order = ordering.random_reshuffling(8, units_per_step=4)
    reads = ordering.data.read_epochs(np.arange(64), order, KEY, workers=mesh)
    batches = echo.repeat(reads, echo.fixed(2), minibatches=2, key=KEY)
    next(batches)
    with jax.transfer_guard("disallow"):
        x = next(batches)
    assert len(x.addressable_shards) == 8 and x.shape == (8, 2)
    given = [jnp.zeros((8, 4), device=x.sharding)], jnp.arange(2), 1, (x.sharding,)
    compiled = echo.minibatches._take.lower(*given).compile()
    assert not [name for name in ("all-", "permute", "scatter") if name in compiled.as_text()]
