"""Computed orders: permutations, equal by NumPy and JAX, read lazily by any number of workers."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering import permutations
from ordering.data import read_epochs
from tests.compiled_runs import compilations

SIZES = [*range(1, 40), 255, 256, 257, 1000, 4095, 65535, 65536, 65537, 262145]


def units_of(size, epoch=0, seed=0):
    return ordering.index_shuffle(np.arange(size), size, jax.random.key(seed), epoch=epoch)


@pytest.mark.parametrize("size", [*SIZES, 10**6 + 3])
def test_every_unit_has_one_place_and_its_inverse_finds_it(size):
    units = units_of(size, epoch=5)
    assert units.dtype == np.int64 and (np.bincount(units, minlength=size) == 1).all()
    domain = permutations.domain_of(size)
    keys = permutations.keys_of_epoch(jax.random.key_data(jax.random.key(0)), 5, domain)
    places = permutations.shuffle_by_numpy(units, domain, keys, permutations.feistel_inverse)
    np.testing.assert_array_equal(places, np.arange(size))


def test_a_place_of_large_data_has_its_inverse():
    draw = np.random.default_rng(0)
    for size in [2**31, 2**32 + 1, 10**10, 10**12, 2**48, *draw.integers(2**16, 10**12, 20)]:
        domain = permutations.domain_of(int(size))
        keys = permutations.keys_of_epoch(jax.random.key_data(jax.random.key(1)), 0, domain)
        places = np.unique(draw.integers(0, size, 10**4))
        units = permutations.shuffle_by_numpy(places, domain, keys)
        assert 0 <= units.min() <= units.max() < size and len(np.unique(units)) == len(places)
        back = permutations.shuffle_by_numpy(units, domain, keys, permutations.feistel_inverse)
        np.testing.assert_array_equal(back, places)


def slowly(place, size, key_data, epoch):
    """The unit at a place, in whole numbers of Python."""
    word = 2**32 - 1

    def hash_word(x, add=0):
        x = (x ^ (x >> 16)) * 0x21F0AAAD & word
        x = ((x ^ (x >> 15)) + add & word) * 0xD35A2D97 & word
        return x ^ (x >> 15)

    def absorb(state, word_in):
        first = hash_word(state[0] ^ word_in)
        return first, hash_word(state[1] + first & word)

    state = (0x9E3779B9, 0x85EBCA6B)
    for w in (*key_data, epoch):
        state = absorb(state, w)
    low = next(p for p in range(2, size + 3, 2) if p * p >= size)
    sides, halves = (low, -(-size // low)), [place % low, place // low]
    while True:
        for number in range(24 if size < 2**16 else 8):
            here, key = number % 2, absorb(state, number)
            moved = halves[here] + hash_word(halves[1 - here] ^ key[0], key[1]) % sides[here]
            halves[here] = moved % sides[here]
        if halves[1] * low + halves[0] < size:
            return halves[1] * low + halves[0]


@pytest.mark.parametrize("size", [1, 2, 7, 1000, 65537])
def test_numpy_jax_and_whole_numbers_of_python_agree(size):
    key, places = jax.random.key(11), np.arange(min(size, 300))
    shuffle = jax.jit(lambda i, key, e: ordering.index_shuffle(i, size, key, epoch=e))
    units = shuffle(places, key, 3)
    words = jax.random.key_data(key).tolist()
    assert units.dtype == jnp.int32
    assert units.tolist() == [slowly(i, size, words, 3) for i in places.tolist()]
    by_numpy = ordering.index_shuffle(places, size, key, epoch=3)
    np.testing.assert_array_equal(units, by_numpy)
    outside = shuffle(np.array([-1, size, 2**31 - 1]), key, 3)
    assert outside.tolist() == [size] * 3


BAD_EPOCHS = [1.5, -1, 2**33, jnp.arange(8), jnp.float32(1), jnp.ones(1, int), True, None]


def test_an_epoch_is_one_whole_number_also_beside_arrays_of_jax():
    key, places = jax.random.key(0), jnp.arange(3)
    for epoch in BAD_EPOCHS:
        with pytest.raises(ValueError, match="epoch is"):
            ordering.index_shuffle(places, 10, key, epoch=epoch)
    traced = jax.jit(lambda epoch: ordering.index_shuffle(places, 10, key, epoch=epoch))
    for epoch in (1.5, jnp.arange(8), True):
        with pytest.raises(ValueError, match="epoch is"):
            traced(epoch)
    last = ordering.index_shuffle(places, 10, key, epoch=2**31 - 1)
    np.testing.assert_array_equal(last, units_of(10, 2**31 - 1)[:3])
    np.testing.assert_array_equal(last, traced(2**31 - 1))


def test_places_of_numpy_are_checked_also_beside_a_traced_key():
    of_key = lambda places, size: jax.jit(  # noqa: E731
        lambda key: ordering.index_shuffle(places, size, key)
    )(jax.random.key(0))
    for places in (np.array([2**32 + 5]), np.array([-1]), [100]):
        with pytest.raises(ValueError, match="index is"):
            of_key(places, 100)
    assert of_key(np.arange(100), 100).tolist() == units_of(100).tolist()
    for empty in ([], np.zeros((2, 0), np.int64)):
        units = ordering.index_shuffle(empty, 7, jax.random.key(0))
        assert units.shape == np.shape(empty) and units.dtype == np.int64


def test_calls_outside_of_jit_share_one_program():
    places = jnp.arange(7)  # of a shape that no other test has
    with compilations() as programs:
        for epoch in range(5):
            ordering.index_shuffle(places, 77, jax.random.key(epoch), epoch=epoch)
    assert programs.count("jit(shuffle_by_jax)") == 1


def test_keys_and_epochs_give_other_permutations():
    rows = [tuple(units_of(50, epoch, seed)) for epoch in range(20) for seed in range(20)]
    assert len(set(rows)) == 400


def test_indices_are_computed_where_they_are_read():
    order = ordering.counted(10**10)
    state = order.init(jax.random.key(0), None)
    indices = order.units(state)
    assert len(indices) == 10**10 and indices.shape == (10**10,)
    part = indices[10**9 : 10**9 + 40_000 : 2]
    assert isinstance(part, ordering.Indices) and len(part) == 20_000
    every = np.asarray(part)
    np.testing.assert_array_equal(every, indices[np.arange(10**9, 10**9 + 40_000, 2)])
    assert list(part) == every.tolist() and part[-1] == every[-1] == part[np.array([-1])][0]
    assert part[3:5][1] == every[4]
    np.testing.assert_array_equal(np.asarray(pickle.loads(pickle.dumps(part))), every)
    np.testing.assert_array_equal(
        every[:9], ordering.index_shuffle(np.arange(9) * 2 + 10**9, 10**10, jax.random.key(0))
    )
    with pytest.raises(IndexError, match="out of range"):
        part[20_000]
    with pytest.raises(IndexError, match="out of range"):
        part[np.array([0, -20_001])]
    following = order.units(order.next_epoch(state))
    assert (np.asarray(following[:100]) != np.asarray(indices[:100])).mean() > 0.9


class Numbers:
    """A source of any size, whose examples are their numbers."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return np.array([i // 2**16, i % 2**16], np.int32)


def read(size, workers, batch, state=None, steps=None, *, unit_size=1, pipeline=False, epochs=1):
    """(examples of every step, all workers' rows, the state after the last step)."""

    def source(indices, first_step, epoch):
        step = workers * batch * unit_size
        parts = [np.asarray(indices[i : i + step]) for i in range(0, len(indices), step)]
        return [np.stack([x // 2**16, x % 2**16], -1).astype(np.int32) for x in parts]

    order = ordering.counted(size, units_per_step=batch)
    options = {"workers": workers, "num_epochs": epochs, "state": state, "unit_size": unit_size}
    given = source if pipeline else Numbers(size * unit_size)
    with read_epochs(given, order, jax.random.key(3), **options) as reads:
        batches = []
        for pairs in reads:
            pairs = np.asarray(pairs).reshape(-1, 2).astype(np.int64)
            batches.append((pairs[:, 0] * 2**16 + pairs[:, 1]).tolist())
            if len(batches) == steps:
                break
        return batches, reads.state()


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("unit_size", [1, 3])
def test_a_run_goes_on_with_other_workers_and_batches_without_a_unit_lost(pipeline, unit_size):
    options = {"unit_size": unit_size, "pipeline": pipeline}
    expected = [i for batch in read(352, 1, 1, epochs=2, unit_size=unit_size)[0] for i in batch]
    assert sorted(expected[: 352 * unit_size]) == list(range(352 * unit_size))
    seen, state = read(352, 8, 2, steps=5, **options)
    assert {"order", "epoch", "units"} < {*state._fields} and int(state.units) == 80
    for workers, batch in ((3, 8), (16, 1), (8, 2)):
        more, state = read(352, workers, batch, state, steps=4, **options)
        seen += more
    seen += read(352, 16, 2, state, epochs=2, **options)[0]
    # 48 units are left for steps of 32
    assert [len(x) for x in seen[17:20]] == [n * unit_size for n in (32, 16, 32)]
    assert [i for batch in seen for i in batch] == expected


def test_units_that_workers_cannot_share_are_left_out_of_the_epoch():
    batches, _ = read(20, 3, 4, epochs=2)
    assert [len(x) for x in batches] == [12, 6, 12, 6]
    expected = [i for batch in read(20, 1, 1, epochs=2)[0] for i in batch]
    assert sum(batches, []) == expected[:18] + expected[20:38]


def test_step_indices_are_computed_too():
    order = ordering.counted(2**40, units_per_step=4)
    indices = order.units(order.init(jax.random.key(0), None))
    examples, size = ordering.data.step_indices(indices, units_per_step=8, unit_size=2)
    assert size == 16 and len(examples) == 2**41
    first = np.asarray(indices[:3])
    assert np.asarray(examples[:6]).tolist() == [2 * u + k for u in first for k in (0, 1)]
    assert pickle.loads(pickle.dumps(examples))[5] == examples[5]


def test_all_workers_share_one_state():
    order = ordering.counted(12, units_per_step=2)
    state = ordering.init_workers(order, jax.random.key(0), workers=4)
    assert state.epoch.shape == () == state.key.shape
    with pytest.raises(ValueError, match="all workers share one"):
        order.next_epoch(ordering.random_reshuffling(12).init(jax.random.key(0), None))
    with pytest.raises(ValueError, match="exceeds the 12 units"):
        read_epochs(np.arange(12), order, jax.random.key(0), workers=8)


@pytest.mark.parametrize(
    "changes,fits",
    [
        ({"num_units": 96}, False),
        ({"group_size": 6, "groups": "spread"}, False),
        ({"group_size": 6, "groups": "together"}, False),
        ({"units_per_step": 5}, True),
    ],
)
def test_the_state_of_other_units_or_groups_is_refused(changes, fits):
    order = ordering.counted(120, units_per_step=4)
    other = ordering.counted(**{"num_units": 120, "units_per_step": 4} | changes)
    assert (order.digest() == other.digest()) == fits
    for state in (order.init(jax.random.key(0)), order.next_epoch(order.init(jax.random.key(0)))):
        if fits:
            assert other.units(state).tolist() == order.units(state).tolist()
            continue
        with pytest.raises(ValueError, match="Counted with other num_units, group_size or groups"):
            other.units(state)
    plan = ordering.mixture({"a": 120}, weights={"a": 1}, batch_size=4, total_steps=30)
    with pytest.raises(ValueError, match="Mixture with other sizes"):
        plan.order().units(order.init(jax.random.key(0)))


def read_records(blocks, workers, window, state=None, steps=None):
    order = ordering.counted(len(blocks), units_per_step=window)
    options = {"workers": workers, "batch_size": 2 * window, "num_epochs": 2, "state": state}
    with ordering.blocks.read_blocks(blocks, order, jax.random.key(1), **options) as reads:
        batches = []
        for records, _ in reads:
            batches += np.asarray(records).ravel().tolist()
            if reads.loads == steps:
                break
        return batches, reads.state()


def test_blocks_go_on_with_other_workers_without_a_record_lost():
    blocks = ordering.blocks.split(np.arange(40), unit_size=2, multiple_of=4)
    expected = read_records(blocks, 1, 1)[0]
    assert sorted(expected[:40]) == sorted(expected[40:]) == list(range(40))
    assert expected[:40] != expected[40:]
    first, state = read_records(blocks, 2, 2, steps=2)
    assert int(state.units) == 8 and set(first) == set(expected[:16])
    for workers, window in ((4, 1), (1, 4), (2, 2), (None, 4)):
        following, _ = read_records(blocks, workers, window, state)
        assert sorted(first + following[:24]) == list(range(40))
        assert set(following[24:32]) == set(expected[40:48])
    order = ordering.counted(20, units_per_step=1)
    assert ordering.blocks.resize(state, None, order) is state
    assert ordering.resize(state.order, None, order, units_per_step=1, visited=0)[0] is state.order
    with pytest.raises(ValueError, match="use another units_per_step or window"):
        read_records(blocks, 1, 5, state)
    with pytest.raises(ValueError, match="3 workers cannot share them"):
        read_records(blocks, 3, 1)


def test_a_window_that_leaves_no_whole_windows_is_refused():
    """Its last records were never read."""
    blocks, key = ordering.blocks.split(np.arange(10), unit_size=1), jax.random.key(0)
    order, other = (ordering.random_reshuffling(10, units_per_step=k) for k in (4, 5))
    with ordering.blocks.read_blocks(blocks, order, key, batch_size=4) as reads:
        next(reads)
        state = reads.state()
    with pytest.raises(ValueError, match="leaves no whole steps of 5 units"):
        ordering.blocks.read_blocks(blocks, other, key, batch_size=5, state=state)


def test_a_compiled_program_has_no_numbers_of_64_bits_and_no_table():
    def shuffle(places, key):
        return ordering.index_shuffle(places, 10**6, key, epoch=2)

    args = jax.ShapeDtypeStruct((64,), jnp.int32), jax.random.key(0)
    with jax.enable_x64(True):
        text = jax.jit(shuffle).lower(*args).as_text()
    assert "tensor<64xi32>" in text
    assert not [word for word in ("i64>", "f32>", "f64>", "gather", "sort") if word in text]


def grouped(size, group_size, groups, epoch=0, seed=0):
    order = ordering.counted(size, group_size=group_size, groups=groups)
    state = order.init(jax.random.key(seed), None)
    for _ in range(epoch):
        state = order.next_epoch(state)
    return order.units(state)


@pytest.mark.parametrize("size,group_size", [(12, 4), (13, 4), (7, 7), (5, 1), (1000, 32), (3, 2)])
def test_groups_together_follow_whole_on_one_another(size, group_size):
    """Also the last one, which has fewer units, at a place of its own."""
    units = np.asarray(grouped(size, group_size, "together", epoch=2))
    assert (np.bincount(units, minlength=size) == 1).all()
    groups = units // group_size
    assert np.count_nonzero(np.diff(groups)) == -(-size // group_size) - 1


@pytest.mark.parametrize("size,group_size", [(12, 4), (7, 7), (5, 1), (1000, 8)])
def test_spread_groups_have_their_units_as_far_from_each_other_as_can_be(size, group_size):
    units = np.asarray(grouped(size, group_size, "spread", epoch=2))
    assert (np.bincount(units, minlength=size) == 1).all()
    number = size // group_size
    places = np.argsort(units).reshape(number, group_size)  # of the units of each group
    np.testing.assert_array_equal(np.diff(np.sort(places, axis=1), axis=1), number)


@pytest.mark.parametrize("groups", ["together", "spread"])
def test_groups_are_computed_anywhere_and_differ_by_epoch_and_group(groups):
    indices = grouped(10**10, 1000, groups)
    places = np.random.default_rng(0).integers(0, 10**10, 1000)
    units = indices[places]
    assert units[7] == indices[int(places[7])] == indices[places[7:8]][0]
    assert (indices[places.reshape(20, 50)] == units.reshape(20, 50)).all()
    assert (indices[10**9 :][places % 100] == indices[10**9 + places % 100]).all()
    assert (grouped(10**10, 1000, groups, epoch=1)[places] != units).any()
    inside = np.asarray(grouped(1000, 50, "together")).reshape(20, 50) % 50
    assert len({tuple(row) for row in inside}) == 20  # no two groups have one permutation


@pytest.mark.parametrize("groups", ["together", "spread"])
def test_groups_land_everywhere_alike(groups):
    """Where each of 12 units lands in 480 epochs, by chi squared of 11 degrees of freedom."""
    counts = np.zeros((12, 12))
    for epoch in range(480):
        words = np.array([1, 2, epoch], np.uint32)
        units = getattr(permutations, f"groups_{groups}")(np.arange(12), 12, 4, words)
        counts[np.arange(12), units] += 1
    chi = ((counts - 40) ** 2 / 40).sum(0)
    assert chi.max() < 40, chi  # one in 30,000 is above
