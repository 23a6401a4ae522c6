"""A run over blocks goes on with another number of workers, and reads every record once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.blocks import read_blocks, resize
from tests import block_cases
from tests.block_cases import as_lists, records_of
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


def read(name, state, position=None, *, most):
    """(batches, the position after them, the state)."""
    workers = len(state.current)
    _, _, observe, next_epoch = parts_of(name, workers)
    found, window = [], WINDOW // workers
    options = {"window": window, "batch_size": BATCH // workers, "position": position}
    with read_blocks(BLOCKS, lambda: state, **options) as reads:
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


def check(name, *stages):
    """Workers and steps of each stage: every epoch that is read has every record once."""
    (workers, most), *others = stages
    found, position, state = read(name, parts_of(name, workers)[1], most=most)
    for after, most in others:
        if after != workers:
            workers = after
            position, state = resized(name, position, workers)
        more, position, state = read(name, state, position, most=most)
        assert all(len(batch) == workers for batch in more)
        found += more
    alone = read(name, parts_of(name, stages[0][0])[1], most=STEPS)[0]
    assert len(found) % STEPS == 0
    for first in range(0, len(found), STEPS):
        assert records_of(found[first : first + STEPS]) == RECORDS, (stages, first)
    for begin, end in ((0, 3), (3, 5)):
        assert records_of(found[begin:end]) == records_of(alone[begin:end]), "windows are kept"


@pytest.mark.parametrize("name", ["global_reshuffling", "dealt"])
def test_a_run_goes_on_with_any_number_of_workers(name):
    """After the first window of an epoch, between epochs, and once more in the same epoch."""
    more = [(1, 4), (8, 1)] if name == "global_reshuffling" else []
    for before, after in [(2, 4), (4, 2), *more]:
        for done in (3, 5, 8):
            check(name, (before, done), (after, 15 - done))
    check(name, (2, 3), (4, 5), (2, 7))


def test_the_axis_of_the_workers_may_have_another_name():
    def of(workers):
        order = ordering.global_reshuffling(UNITS // workers, axis_name="dp")
        init = jax.jit(jax.vmap(lambda key: order.init(key, None), axis_name="dp"))
        return order, init(jax.random.split(jax.random.key(0), workers))

    (_, two), (order, four) = of(2), of(4)
    options = {"window": WINDOW // 2, "batch_size": BATCH // 2, "num_epochs": 1}
    with read_blocks(BLOCKS, lambda: two, **options) as reads:
        found = [as_lists(next(reads)) for _ in range(3)]
        position = resize(reads.position(), four, order, axis_name="dp")
    state = jax.tree.map(jnp.asarray, position["orders"])
    options |= {"window": WINDOW // 4, "batch_size": BATCH // 4, "position": position}
    with read_blocks(BLOCKS, lambda: state, **options) as reads:
        found += map(as_lists, reads)
    assert records_of(found) == RECORDS


def restarted(workers=2, steps=3, **changes):
    order, first, *_ = parts_of("global_reshuffling", workers)
    position = read("global_reshuffling", parts_of("global_reshuffling", 2)[1], most=steps)[1]
    return resize(position | changes, first, order)


test_bad_input = refuses({
    "inside a window": (
        lambda: restarted(4, steps=4), "of step 4, inside a window: go on with 2 workers until win"
    ),
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
            lambda x: x[0], parts_of("global_reshuffling", 2)[1])),
        "a DealtShuffleState: pass those of all workers",
    ),
})  # fmt: skip
