"""Mixtures: shares of steps, passes over sources, and runs that go on."""

import concurrent.futures
import pickle
import zlib
from fractions import Fraction

import jax
import numpy as np
import optax
import pytest

import ordering
from ordering import mixture
from ordering.data import read_epochs
from tests import reference

KEY = jax.random.key(0)
SIZES = {"web": 50, "code": 12, "math": 7}
WEIGHTS = {"web": 5.0, "code": 2.0, "math": 1.0}


def fractions(table):
    """Its rows, divided by their sums."""
    return [[Fraction(w) / sum(map(Fraction, row)) for w in row] for row in table.tolist()]


def test_counts_equal_the_slow_reference():
    """In 300 random settings: sources, weights, batch sizes, what is read, and all three ends."""
    draw = np.random.default_rng(0)
    for trial in range(300):
        names = [f"s{i}" for i in range(draw.integers(1, 8))]
        sizes = {name: int(draw.integers(1, 60)) for name in names}
        steps, batch = int(draw.integers(1, 20)), int(draw.integers(1, 12))
        table = draw.integers(0, 5, (steps, len(names))) * draw.choice([1.0, 0.37])
        table[table.sum(axis=1) == 0, 0] += 0.5
        if trial % 5 == 0:
            table[:] = table[0]
        read = {name: int(draw.integers(0, 9)) for name in names}
        exhausted = ("repeat", "stop", "end")[trial % 3]
        given = dict(zip(names, table.T, strict=True))
        options = {"batch_size": batch, "total_steps": steps, "exhausted": exhausted}
        left = [max(0, sizes[n] - read[n]) if trial % 3 else np.inf for n in names]
        arguments = fractions(table), batch, left, exhausted, [Fraction(0)] * len(names)
        try:
            expected = reference.mixture_counts(*arguments)
        except LookupError as error:
            with pytest.raises(ValueError, match=f"step {error.args[0]} has no source"):
                mixture(sizes, weights=given, examples_read=read, **options)
            continue
        if not expected:
            with pytest.raises(ValueError, match="no examples for step 0"):
                mixture(sizes, weights=given, examples_read=read, **options)
            continue
        plan = mixture(sizes, weights=given, examples_read=read, **options)
        assert plan.counts.tolist() == expected, trial
        before = np.cumsum([[*read.values()], *expected], axis=0)
        assert plan.counts_before(len(expected)) == dict(zip(names, before[-1], strict=True))


def test_plans_made_anew_have_the_counts_of_one_plan():
    """They begin with what sources are owed, or a source would lose up to an example per plan."""
    draw = np.random.default_rng(1)
    weights = {f"s{i}": draw.integers(1, 30, 2100) / 7 for i in range(4)}
    sizes = {name: 10**6 for name in weights}
    whole = mixture(sizes, weights=weights, batch_size=5, total_steps=2100)
    rows, read = [], None
    for start in range(0, 2100, 350):
        part = {name: w[start : start + 350] for name, w in weights.items()}
        plan = mixture(sizes, weights=part, batch_size=5, total_steps=350, examples_read=read)
        rows, read = rows + plan.counts.tolist(), plan.counts_before(350)
    assert rows == whole.counts.tolist()


def test_zero_weights_now_leave_the_run_its_steps():
    weights = {"a": [1.0] * 10 + [0.0] * 10, "b": [1.0] * 10 + [2.0] * 10}
    plan = mixture(
        {"a": 9, "b": 200}, weights=weights, batch_size=4, total_steps=20, exhausted="stop"
    )
    assert plan.total_steps == 20 and plan.counts[:, 0].sum() == 9
    weights["b"] = weights["a"][::-1]
    with pytest.raises(ValueError, match="step 4 has no source"):
        mixture({"a": 19, "b": 99}, weights=weights, batch_size=4, total_steps=20, exhausted="stop")


def test_shares_are_exact_over_any_thousand_steps_of_a_schedule():
    falling = optax.linear_schedule(1.0, 0.1, 3000)
    weights = {"a": falling, "b": 0.3, "c": 0.05}
    plan = mixture(
        {"a": 10**9, "b": 10**7, "c": 5}, weights=weights, batch_size=7, total_steps=4000
    )
    table = np.array([[float(falling(t)), 0.3, 0.05] for t in range(4000)])
    targets = np.cumsum(7 * table / table.sum(axis=1, keepdims=True), axis=0)
    ahead = np.cumsum(plan.counts, axis=0) - targets
    assert ahead.max() < 1 and ahead.min() > -2
    windows = ahead[1000:] - ahead[:-1000]  # of 7,000 examples
    assert np.abs(windows).max() < 2


def test_weights_of_tokens_are_divided_by_mean_lengths():
    tokens = {"web": 300, "code": np.full(12, 100.0), "math": 50}
    plan = mixture(SIZES, weights=WEIGHTS, tokens=tokens, batch_size=10, total_steps=400)
    read = plan.counts.sum(axis=0) * [300, 100, 50]
    np.testing.assert_allclose(read / read.sum(), np.array([5, 2, 1]) / 8, atol=1e-3)


def streams(plan, key=KEY, runs=1):
    """{name: its examples in the sequence of its passes}, by `index_shuffle`."""
    result = {}
    for name, size in plan.sizes.items():
        of_source = jax.random.fold_in(key, zlib.crc32(name.encode()))
        count = runs * plan.counts.sum() // size + 2
        passes = [
            ordering.index_shuffle(np.arange(size), size, of_source, epoch=p) for p in range(count)
        ]
        result[name] = np.concatenate(passes).tolist()
    return result


def test_a_run_reads_each_example_once_in_every_pass():
    """Two runs of a plan, which go on with the passes; the units of parts are those of all."""
    plan = mixture(SIZES, weights=WEIGHTS, batch_size=8, total_steps=9)
    order, places = plan.order(), {name: 0 for name in SIZES}
    state, expected = order.init(KEY, None), streams(plan, runs=2)
    there = pickle.loads(pickle.dumps(order.units(state)))  # of a worker process of a loader
    np.testing.assert_array_equal(np.asarray(there), np.asarray(order.units(state)))
    for _ in range(2):
        indices = order.units(state)
        units = np.asarray(indices)
        assert (
            len(indices) == 72 and [indices[i] for i in (71, 3, 40)] == units[[71, 3, 40]].tolist()
        )
        assert not np.asarray(indices[72:]).size
        np.testing.assert_array_equal(
            indices[np.array([[9, 2], [70, 9]])], units[[[9, 2], [70, 9]]]
        )
        for step, part in enumerate(units.reshape(9, 8)):
            source, index = plan.locate(part)
            for number, name in enumerate(SIZES):
                count = plan.counts[step, number]
                wanted = expected[name][places[name] : places[name] + count]
                assert index[source == number].tolist() == wanted
                places[name] += int(count)
        state = order.next_epoch(state)


SCORES = np.random.default_rng(1).normal(size=12)
ORDERS = {
    "code": ordering.scored(SCORES, jitter=5),
    "math": ordering.random_reshuffling(7, units_per_step=3),
}


def test_a_source_takes_any_order_whose_epochs_are_known_from_their_numbers():
    plan = mixture(SIZES, weights={"web": 1, "code": 2, "math": 1}, batch_size=4, total_steps=14)
    order = plan.order(orders=ORDERS)
    indices = order.units(order.init(KEY))
    source, index = plan.locate(np.asarray(indices))
    for number, name in ((1, "code"), (2, "math")):
        of_source = ORDERS[name]
        state, stream = of_source.init(jax.random.fold_in(KEY, zlib.crc32(name.encode()))), []
        for _ in range(3):
            stream += state.current.tolist()
            state = of_source.next_epoch(state)
        mine = index[source == number].tolist()
        assert len(mine) > SIZES[name] and mine == stream[: len(mine)]
    backwards = plan.order(orders=ORDERS | {"code": ordering.scored(-SCORES, jitter=5)})
    assert backwards.digest() != order.digest(), "scores are in no state"
    back = np.asarray(indices[::-1])  # passes that go backwards
    np.testing.assert_array_equal(plan.locate(back)[1][::-1], index)
    there = pickle.loads(pickle.dumps(indices))  # of a worker process of a loader
    np.testing.assert_array_equal(np.asarray(there), np.asarray(indices))


def test_threads_that_are_passes_apart_draw_each_pass_about_once():
    """A loader with 16 threads; a pass is drawn from its number, not from all before it."""
    plan = mixture({"a": 10, "b": 990}, weights={"a": 1, "b": 1}, batch_size=4, total_steps=400)
    order, calls = plan.order(orders={"a": ordering.random_reshuffling(10)}), []
    draw, other = order.epoch_programs
    spy = lambda key, epoch: calls.append(int(epoch)) or draw(key, epoch)  # noqa: E731
    object.__setattr__(order, "epoch_programs", [spy, other])
    indices, blocks = order.units(order.init(KEY)), range(0, 1600, 64)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        parts = [*pool.map(lambda start: np.asarray(indices[start : start + 64]), blocks)]
    expected = np.asarray(plan.order(orders=dict(a=order.orders[0])).units(order.init(KEY)))
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    assert {*calls} == {*range(80)} and len(calls) < 3 * 80
    calls.clear()
    assert indices[-4:].tolist() == expected[-4:].tolist() and len(calls) <= 1


PLAN = {"weights": {"a": 1, "b": 1}, "batch_size": 4, "total_steps": 20}
LATER = {"total_steps": 10, "examples_read": {"a": 20, "b": 20}}
RANDOM_B = {"orders": {"b": ordering.random_reshuffling(60)}}


def mixed(*, orders=None, workers=1, **changes):
    plan = mixture(**{"sizes": {"a": 40, "b": 60}} | PLAN | changes)
    return plan.order(orders=orders, workers=workers)


@pytest.mark.parametrize(
    "changes,fits",
    [
        ({"sizes": {"a": 41, "b": 60}}, "nowhere"),
        ({"sizes": {"b": 60, "a": 40}}, "nowhere"),
        (LATER, "nowhere"),
        (RANDOM_B, "nowhere"),
        ({"batch_size": 8}, "nowhere"),
        ({"weights": {"a": 3, "b": 1}}, "first"),  # nothing was read by then
        ({"total_steps": 19}, "middle"),
        ({"total_steps": 30}, "middle"),
        ({"weights": {"a": 7, "b": 7}, "workers": 2}, "later"),
    ],
)
def test_the_state_of_another_plan_is_refused_where_it_read_other_examples(changes, fits):
    """Before any unit, after 40 units, and in the next run."""
    order, other = mixed(), mixed(**changes)
    fresh, runs = order.init(KEY), {"nowhere": 0, "later": 2}.get(fits, 1)
    for run, state in enumerate([fresh, order.next_epoch(fresh)]):
        if run < runs:
            assert len(other.units(state)) == other.num_units
        else:
            with pytest.raises(ValueError, match="Mixture with other sizes"):
                other.units(state)
    assert (other.digest(40) == order.digest(40)) == (fits in ("middle", "later"))
    assert other == pickle.loads(pickle.dumps(other)) != order


DATA = {name: {"i": np.arange(n), "of": np.full(n, len(name))} for name, n in SIZES.items()}


def numbers_of(plan):
    """Its examples as numbers, those of the second source from 100 on."""
    return plan.source({"a": np.arange(plan.sizes["a"]), "b": 100 + np.arange(plan.sizes["b"])})


def test_a_reader_goes_on_with_the_plan_that_a_state_is_of():
    """A longer one, too; other weights, and a plan of the rest, would read other passes."""
    read = lambda order, **options: read_epochs(  # noqa: E731
        numbers_of(order.plan), order, KEY, num_epochs=1, **options
    )
    whole = [np.asarray(batch).tolist() for batch in read(mixed(total_steps=30))]
    reads = read(mixed())
    assert [np.asarray(next(reads)).tolist() for _ in range(10)] == whole[:10]
    state = reads.state()
    assert [np.asarray(x).tolist() for x in read(mixed(total_steps=30), state=state)] == whole[10:]
    for changes in (LATER, RANDOM_B, {"weights": {"a": 3, "b": 1}}, {"sizes": {"a": 41, "b": 60}}):
        with pytest.raises(ValueError, match="another order"):
            read(mixed(**changes), state=state)


@pytest.mark.parametrize("order_of,read_by", [(1, 4), (4, None), (2, 4)])
def test_a_plan_is_read_by_as_many_workers_as_its_order_is_for(order_of, read_by):
    order = mixed(workers=order_of)
    with pytest.raises(ValueError, match=f"pass workers={read_by or 1} to plan.order"):
        read_epochs(numbers_of(order.plan), order, KEY, workers=read_by)


@pytest.mark.parametrize("before,after", [(1, 4), (4, 2), (2, 2)])
def test_a_run_that_is_killed_and_goes_on_with_other_workers_is_the_same_run(before, after):
    plan = mixture(SIZES, weights=WEIGHTS, batch_size=8, total_steps=12)
    source = plan.source(DATA)

    def steps(reads, count):
        batches = [next(reads) for _ in range(count)]
        return [{name: np.ravel(x).tolist() for name, x in batch.items()} for batch in batches]

    def reads(workers, state=None):
        order = plan.order(workers=workers)
        return read_epochs(source, order, KEY, workers=workers, state=state, num_epochs=1)

    whole = reads(before)
    expected = steps(whole, 12)
    assert next(whole, None) is None and whole.epoch_ended
    cut = reads(before)
    assert steps(cut, 5) == expected[:5]
    saved = jax.tree.map(np.asarray, cut.state())
    assert steps(reads(after, saved), 7) == expected[5:]
    assert len({*zip(expected[0]["of"], expected[0]["i"], strict=True)}) == 8


def test_windows_of_token_files_are_sources(tmp_path):
    """Of several files, as `ordering.blocks.tokens` gives them."""
    sources, first = {}, {"web": (0, 640), "code": (10_000,)}
    for name, starts in first.items():
        for start in starts:
            np.arange(start, start + 321, dtype=np.uint16).tofile(tmp_path / f"{name}{start}.bin")
        paths = [tmp_path / f"{name}{start}.bin" for start in starts]
        sources[name] = ordering.blocks.tokens(paths, length=64)
    sizes = {name: sum(map(len, files)) for name, files in sources.items()}
    plan = mixture(sizes, weights={"web": 2, "code": 1}, batch_size=3, total_steps=5)
    reads = read_epochs(plan.source(sources), plan.order(), KEY, num_epochs=1)
    batches = [np.asarray(batch["tokens"]) for batch in reads]
    assert {batch.shape for batch in batches} == {(3, 65)}
    starts = sorted(np.concatenate(batches)[:, 0].tolist())
    expected = [first + 64 * i for of in first.values() for first in of for i in range(5)]
    assert starts == expected, "each window of each file once"


def test_every_worker_reads_the_same_mix():
    plan = mixture({"a": 90, "b": 90}, weights={"a": 3, "b": 1}, batch_size=16, total_steps=5)
    order = plan.order(workers=4)
    units = np.asarray(order.units(order.init(KEY))).reshape(5, 4, 4)
    assert (plan.locate(units)[0].sum(axis=2) == 1).all()


def test_other_weights_go_on_in_the_passes():
    first = mixture(SIZES, weights=WEIGHTS, batch_size=6, total_steps=5)
    then = mixture(
        SIZES,
        weights={"web": 0, "code": 1, "math": 1},
        batch_size=6,
        total_steps=4,
        examples_read=first.counts_before(5),
    )
    units = [plan.locate(np.asarray(o.units(o.init(KEY))))
             for plan in (first, then) for o in [plan.order()]]  # fmt: skip
    source, index = np.concatenate(units, axis=1)
    for number, stream in enumerate(streams(first).values()):
        mine = index[source == number].tolist()
        assert mine == stream[: len(mine)]
    assert then.counts[:, 0].sum() == 0


def test_a_plan_is_described_hashed_and_saved(tmp_path):
    plan = mixture(SIZES, weights=WEIGHTS, batch_size=8, total_steps=20)
    same = mixture(
        SIZES, weights={k: 2 * w for k, w in WEIGHTS.items()}, batch_size=8, total_steps=20
    )
    other = mixture(SIZES | {"web": 51}, weights=WEIGHTS, batch_size=8, total_steps=20)
    assert plan == same and hash(plan) == hash(same) and plan != other
    plan.save(tmp_path / "plan.json")
    back = type(plan).read(tmp_path / "plan.json")
    assert (
        back == plan and back.rule == plan.rule and back.counts_before(7) == plan.counts_before(7)
    )
    assert back.counts_before(7).owed == plan.counts_before(7).owed
    lines = plan.describe().splitlines()
    assert plan.locate([])[0].shape == plan.locate([])[1].shape == (0,)
    assert lines[0] == "mixture by examples: web 5, code 2, math 1; repeat"
    assert lines[3].split() == ["web", "100", "2.000"] and lines[-1].split()[0] == "16"
    plan.check_same()
