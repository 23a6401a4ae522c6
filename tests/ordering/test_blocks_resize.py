"""A run over blocks goes on with another number of workers, and reads every record once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.blocks import read_blocks, resize
from tests import block_cases
from tests.block_cases import as_lists
from tests.refused import refuses

# 24 units, 2 of them empty; together 16 in a window and 48 records in a step: W workers have 24 / W
# units, windows of 16 / W and 8 / W, and 3 + 2 steps in an epoch.
SIZES, UNIT_SIZE, UNITS, WINDOW, BATCH, STEPS = [20, 31, 11], 3, 24, 16, 16, 5
WORKERS = (1, 2, 4, 8)
BLOCKS = ordering.blocks.split(
    block_cases.parts_of(SIZES), unit_size=UNIT_SIZE, multiple_of=max(WORKERS)
)
RECORDS = list(range(sum(SIZES)))
GRADIENTS = block_cases.vectors_of(UNITS)


def parts_of(name, workers):
    return block_cases.dealt_of(name, workers, UNITS // workers, WINDOW // workers)


def read(name, state, position=None, *, most, share=None):
    """(batches, the position after them, the state); `share`: those of a host's workers."""
    workers = share[2] if share else len(state.current)
    _, _, observe, next_epoch = parts_of(name, workers)
    found, window = [], WINDOW // workers
    options = {"window": window, "batch_size": BATCH // workers, "position": position}
    with read_blocks(BLOCKS, lambda: state, share=share, **options) as reads:
        while len(found) < most:
            found.append(as_lists(next(reads)))
            if observe and reads.window_ended:
                first = window if reads.epoch_ended else 0
                units = np.asarray(state.current)[:, first : first + reads.window_units]
                state = observe(state, GRADIENTS[units])
            if reads.epoch_ended:
                state = next_epoch(state)
        return found, reads.position(), state


def resized(name, position, workers):
    """The position for other workers, and the state of their orders."""
    order, fresh, *_ = parts_of(name, workers)
    position = resize(position, fresh, order)
    return position, jax.tree.map(jnp.asarray, position["orders"])


def flat(batches):
    """The records of each step, of all workers."""
    return [sorted(r for lane in batch for r, place in lane if place >= 0) for batch in batches]


def check(name, *stages):
    """Workers and steps of each stage: every epoch that is read has every record once."""
    (workers, most), *others = stages
    found, position, state = read(name, parts_of(name, workers)[1], most=most)
    alone = read(name, parts_of(name, workers)[1], most=STEPS)[0]
    for after, most in others:
        if after != workers:
            workers = after
            position, state = resized(name, position, workers)
        more, position, state = read(name, state, position, most=most)
        assert all(len(batch) == workers for batch in more)
        found += more
    assert len(found) % STEPS == 0
    for first in range(0, len(found), STEPS):
        assert sorted(sum(flat(found[first : first + STEPS]), [])) == RECORDS, (stages, first)
    assert flat(found[:STEPS]) == flat(alone), "the epoch that was broken keeps its batches"
    return found


@pytest.mark.parametrize("done", [2, 3, 5, 7])  # within windows, at their ends, between epochs
def test_a_shuffle_goes_on_with_any_number_of_workers(done):
    for before, after in [(1, 4), (4, 1), (2, 4), (8, 2), (4, 8)]:
        check("dealt_reshuffling", (before, done), (after, 15 - done))


def test_the_axis_of_the_workers_may_have_another_name():
    def of(workers):
        order = ordering.dealt_reshuffling(UNITS // workers, axis_name="dp")
        init = jax.jit(jax.vmap(lambda key: order.init(key, None), axis_name="dp"))
        return order, init(jax.random.split(jax.random.key(0), workers))

    (_, two), (order, four) = of(2), of(4)
    options = {"window": WINDOW // 2, "batch_size": BATCH // 2, "num_epochs": 1}
    with read_blocks(BLOCKS, lambda: two, **options) as reads:
        found = [as_lists(next(reads)) for _ in range(2)]
        position = resize(reads.position(), four, order, axis_name="dp")
    state = jax.tree.map(jnp.asarray, position["orders"])
    options |= {"window": WINDOW // 4, "batch_size": BATCH // 4, "position": position}
    with read_blocks(BLOCKS, lambda: state, **options) as reads:
        found += map(as_lists, reads)
    assert sorted(sum(flat(found), [])) == RECORDS


def test_the_next_epoch_is_no_longer_that_of_the_workers_before():
    """A run goes on in its middle."""
    check("dealt_reshuffling", (2, 2), (4, 5), (4, 8))


def test_workers_change_twice_in_an_epoch():
    changes = [(2, 4, 8), (8, 4, 2), (4, 2, 4), (1, 8, 2), (8, 1, 4)]
    steps = [(1, 1), (2, 2), (3, 1), (1, 4), (6, 2)]
    for (before, between, after), (first, second) in zip(changes, steps, strict=True):
        rest = 15 - first - second
        check("dealt_reshuffling", (before, first), (between, second), (after, rest))


@pytest.mark.parametrize("before,after", [(2, 4), (8, 4)])
def test_hosts_finish_a_broken_epoch_as_one_does(before, after):
    name = "dealt_reshuffling"
    for done in (1, 3, 4):
        position = read(name, parts_of(name, before)[1], most=done)[1]
        position, state = resized(name, position, after)
        whole = read(name, state, position, most=STEPS - done)[0]
        for hosts in (2, after):
            count = after // hosts
            own = [
                read(name, block_cases.rows_of(state, h, count), position,
                     most=STEPS - done, share=(h, count, after))[0]
                for h in range(0, after, count)
            ]  # fmt: skip
            assert [sum(lanes, []) for lanes in zip(*own, strict=True)] == whole


@pytest.mark.parametrize("how", ordering.dealing.HOW)
def test_a_balanced_order_goes_on_with_other_workers(how):
    for before, after in ((2, 4), (4, 2)):
        for done in (2, 3, 5, 9):
            check(how, (before, done), (after, 15 - done))
    check(how, (2, 1), (4, 1), (4, 1), (2, 12))


def broken(share=None):
    """A reader of two of four workers, in an epoch that two workers began."""
    position = read("dealt_reshuffling", parts_of("dealt_reshuffling", 2)[1], most=1)[1]
    position, state = resized("dealt_reshuffling", position, 4)
    own = block_cases.rows_of(state, 0, 2)
    options = {"window": WINDOW // 4, "batch_size": BATCH // 4, "position": position}
    return read_blocks(BLOCKS, lambda: own, share=share, **options)


def restarted(workers=2, **changes):
    order, first, *_ = parts_of("dealt_reshuffling", workers)
    position = read("dealt_reshuffling", parts_of("dealt_reshuffling", 2)[1], most=1)[1]
    return resize(position | changes, first, order)


test_bad_input = refuses({
    "no share": (broken, "share is None: pass .*the 2 workers of this host"),
    "other workers": (lambda: broken((0, 1, 4)), r"share is \(0, 1, 4\): pass .*the 2 workers"),
    "all workers": (lambda: broken((0, 2, 8)), r"share is \(0, 2, 8\).* finish an epoch of 24"),
    "part of a batch": (
        lambda: restarted(8, batch_size=np.array(9)),
        "8 workers, who cannot share the windows of 2, of 8 blocks and batches of 9: .* divides 16",
    ),
    "a fixed shard": (
        lambda: restarted(orders=ordering.shuffle_once(4).init(jax.random.key(0), None)),
        "orders are a ShuffleState: pass those of all workers, of an order that deals",
    ),
    "one worker's": (
        lambda: restarted(orders=jax.tree.map(
            lambda x: x[0], parts_of("dealt_reshuffling", 2)[1])),
        "a DealtShuffleState: pass those of all workers",
    ),
})  # fmt: skip
