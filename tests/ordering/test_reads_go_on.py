"""Readers that are interrupted, late, damaged or hang, and orders that rest."""

import _thread
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.data import LoadError, read_epochs
from tests.block_cases import parts_of
from tests.cases import mostly_slow


class Source:
    """The numbers below `size`; `act(i)` runs before number i is read."""

    def __init__(self, act=lambda i: None, size=12):
        self.act, self.size = act, size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.act(i)
        return np.array(i)

    def read(self, start, stop):
        self.act(start)
        return np.arange(start, stop)


def state_of(num_units, epoch=0):
    order = ordering.random_reshuffling(num_units)
    state = order.init(jax.random.key(0), None)
    for _ in range(epoch):
        state = order.next_epoch(state)
    return state


def blocks_of(act=lambda i: None, size=12):
    """Units of two numbers; `act(i)` runs before the one that begins with i is read."""
    return ordering.blocks.split([Source(act, size)], unit_size=2)


MORE = np.arange(3), np.array(1), "text", [b"1"], {"x": np.arange(2), "y": np.arange(1)}


@pytest.mark.parametrize("records", MORE)
def test_a_source_of_ones_own_that_gives_other_records_than_two_is_named(records):
    source = Source()
    source.read = lambda start, stop: records
    with pytest.raises(ValueError, match=r"Source.read\(0, 2\) .* 2"):
        ordering.blocks.split([source], unit_size=2)[0]


def epochs(act=lambda i: None, **options):
    order = ordering.random_reshuffling(12, units_per_step=2)
    return read_epochs(Source(act), order, jax.random.key(0), **{"num_epochs": 1} | options)


def in_grain(windows):
    import grain

    return grain.MapDataset.source(windows).to_iter_dataset()


def of_blocks(act=lambda i: None, size=12, **options):
    blocks = blocks_of(act, size)
    order, options = ordering.random_reshuffling(len(blocks)), {"num_epochs": 1} | options
    return ordering.blocks.read_blocks(
        blocks, order, jax.random.key(0), window=2, batch_size=2, **options
    )


READERS = {
    "epochs": epochs,
    "blocks": of_blocks,
    "blocks, by Grain": lambda act, **options: of_blocks(act, readers=in_grain, **options),
}


def numbers(batch):
    return np.asarray(jax.tree.leaves(batch)[0]).ravel().tolist()


INTERRUPTS = {
    "a signal": lambda: os.kill(os.getpid(), signal.SIGINT),  # ends the wait
    "a flag": _thread.interrupt_main,  # is seen when the batch is there
}


@pytest.fixture
def interruptible():
    """As in a terminal: a shell starts what it runs in the background without SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("interrupt,depth", [("a signal", 1), ("a flag", 2)])
@pytest.mark.parametrize("reader", READERS)
def test_an_interrupt_while_next_waits_loses_no_batch(reader, depth, interrupt):
    assert threading.current_thread() is threading.main_thread()
    expected = [numbers(batch) for batch in READERS[reader](lambda i: None)]
    once = []

    def act(i):
        with contextlib.suppress(IndexError):
            once.pop()()

    batches = []
    with READERS[reader](act, depth=depth, timeout=60) as reads:
        once.append(INTERRUPTS[interrupt])  # of all but example 0 nothing is read before next
        with pytest.raises(KeyboardInterrupt):
            next(reads)
        assert reads.loads == 0
        for batch in reads:
            batches.append(numbers(batch))
    assert batches == expected


class Odd(Exception):
    """An error that cannot be made from its arguments, and cannot be shown."""

    def __init__(self, one, two, *, three):
        self.all = one, two, three

    def __str__(self):
        raise KeyError(self.all)


ERRORS = {
    "its own": (lambda: Odd(1, 2, three=3), "failed: Odd: its text cannot be shown. Resume"),
    "the end": (lambda: StopIteration(), "failed: RuntimeError: the source raised StopItera"),
    "exit": (lambda: SystemExit(3), "failed: SystemExit: 3. Resume"),
    "no text": (lambda: KeyboardInterrupt(), "failed: KeyboardInterrupt. Resume the run from"),
}


@pytest.mark.parametrize(
    "error,reader",
    [
        *((error, "epochs") for error in ERRORS),
        ("the end", "blocks"),
        ("no text", "blocks"),
        ("the end", "blocks, by Grain"),
        ("its own", "blocks, by Grain"),
    ],
)
def test_whatever_a_source_raises_is_an_error_of_its_load(error, reader):
    make, message = ERRORS[error]

    def act(i):
        if i == 8:
            raise make()

    messages = []
    with READERS[reader](act, timeout=60) as reads:
        for _ in range(2):  # the error is repeated
            with pytest.raises(LoadError, match=message) as info:
                for batch in reads:
                    messages += numbers(batch)
        assert info.value.load == reads.loads == len(messages) // 2
    assert 8 not in messages


HANGS = """
import threading, jax, numpy as np, ordering
from ordering.blocks.sources import Part

def read(start, stop):
    if start >= 4:
        threading.Event().wait()
    return np.arange(start, stop)

blocks = ordering.blocks.split([Part("a dead mount", 12, (1, 2), read)], unit_size=2)
order, key = ordering.baselines.shuffle_once(6, units_per_step=2), jax.random.key(0)
options = {"batch_size": 2, "num_epochs": 1, "timeout": 0.2}
closed, left = (ordering.blocks.read_blocks(blocks, order, key, **options) for _ in range(2))
for reads in (closed, left):
    try:
        list(reads)
    except ordering.data.LoadError as error:
        print(error)
closed.close()
"""


def test_a_read_that_hangs_does_not_keep_the_process():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the input hangs") == 2 and not done.stderr


def test_a_wait_raises_what_next_would_and_takes_no_batch():
    expected, batches, late = [numbers(batch) for batch in of_blocks()], [], 0
    gate = threading.Event()
    with of_blocks(lambda i: i == 8 and gate.wait(60), timeout=0.2) as reads:
        while len(batches) < 6:
            try:
                reads.wait()
            except LoadError:
                late += 1
                if late == 2:
                    gate.set()
            else:
                batches.append(numbers(next(reads)))
            assert reads.loads == len(batches)
        with pytest.raises(StopIteration):
            reads.wait()
    assert late >= 2 and batches == expected


def test_an_epoch_that_is_known_is_read_once():
    """Ten units in windows of four: the last window of each epoch was read twice."""
    parts = parts_of([10])
    blocks = ordering.blocks.split(parts, unit_size=1)
    order = ordering.random_reshuffling(10, units_per_step=4)
    options = {"batch_size": 3, "num_epochs": 4}
    with ordering.blocks.read_blocks(blocks, order, jax.random.key(0), **options) as reads:
        assert len(list(reads)) == 20
    assert len(parts[0].read.asked) == 40


@pytest.mark.parametrize("readers", [1, 3])
def test_no_more_threads_read_than_readers(readers):
    """Also while one epoch ends and the next one begins."""
    inside, most = [], []

    def act(i):
        inside.append(i)
        most.append(len(inside))
        time.sleep(0.001)
        inside.remove(i)

    order, blocks = ordering.random_reshuffling(12, units_per_step=4), blocks_of(act, 24)
    options = {"batch_size": 2, "num_epochs": 3, "readers": readers}
    with ordering.blocks.read_blocks(blocks, order, jax.random.key(0), **options) as reads:
        list(reads)
    assert len(most) == 36 and max(most) <= readers


KEY = jax.random.key(0)


def goes_on(make, sizes, num_units=60):
    """Batches [(size of its step, units)] of one run, with so many steps of each size in turn."""
    batches, state = [], None
    for size, most in sizes:
        order = make(num_units, units_per_step=size)
        with read_epochs(np.arange(num_units), order, KEY, like=jnp.zeros(2), state=state) as reads:
            for _ in range(most):
                batch = next(reads)
                batches.append(numbers(batch))
                reads.observe(jnp.ones((len(batch), 2)) * batch[:, None])
            state = reads.state()
    return batches


STEP_SIZES = [((6, 2), (12, 4), (4, 15), (60, 1)), ((4, 3), (12, 4), (10, 6))]
STEP_SIZES += [((10, 6), (6, 10), (20, 1))]
MAKERS = [ordering.random_reshuffling, ordering.grab, ordering.pair_balance]
ALL = [*itertools.product(MAKERS, STEP_SIZES)]


@pytest.mark.parametrize("make,sizes", mostly_slow(ALL, quick=ALL[::4]))
def test_another_step_size_goes_on_without_loss(make, sizes):
    """In an epoch, at its end, and into the next one: no unit is read twice or never."""
    visited = sum(goes_on(make, sizes), [])
    for epoch in range(-(-len(visited) // 60)):
        units = visited[60 * epoch :][:60]
        assert len({*units}) == len(units), epoch


def test_an_order_without_gradients_goes_on_between_steps():
    """15 of 60 units in steps of 5, then steps of 10, of which the last has the rest."""
    units = goes_on(ordering.random_reshuffling, ((5, 3), (10, 6)))
    assert list(map(len, units)) == [5] * 3 + [10] * 4 + [5, 10]
    assert sorted(sum(units[:-1], [])) == list(range(60))


def test_a_run_goes_on_with_another_number_of_workers():
    """16 of 2 x 24 units by two workers, the rest by four, each unit once."""
    orders = [ordering.global_reshuffling(m, units_per_step=m // 6) for m in (24, 12)]
    data, examples = np.arange(48), []
    reads = read_epochs(data, orders[0], KEY, workers=2)
    for _ in range(2):
        examples += numbers(next(reads))
    state, fresh = reads.state(), ordering.init_workers(orders[1], KEY, None, 4)
    assert state.units == 16
    kept, _ = ordering.resize(state.order, fresh, orders[1], units_per_step=4, visited=4)
    reads = read_epochs(data, orders[1], KEY, workers=4, state=state._replace(order=kept))
    while not reads.epoch_ended:
        examples += numbers(next(reads))
    assert sorted(examples) == list(range(48)) and reads.epoch == 0
    next(reads)
    assert reads.epoch == 1


def test_less_than_a_step_may_be_left_over():
    order = ordering.random_reshuffling(60, units_per_step=5)
    batches = list(read_epochs(np.arange(64), order, KEY, num_epochs=1))
    assert sorted(sum(map(numbers, batches), [])) == list(range(60))


def test_a_program_that_forbids_transfers_reads_and_goes_on():
    order = ordering.random_reshuffling(12, units_per_step=5)
    of_blocks = ordering.random_reshuffling(6, units_per_step=2)
    batches, state, blocks = [], None, blocks_of()
    with jax.transfer_guard("disallow"):
        for most in (4, 5):
            reads = read_epochs(np.arange(12), order, KEY, num_epochs=3, state=state)
            batches += [next(reads) for _ in range(most)]
            state = reads.state()
        state = None
        for _ in range(2):
            options = {"batch_size": 2, "num_epochs": 1, "state": state}
            with ordering.blocks.read_blocks(blocks, of_blocks, KEY, **options) as read:
                next(read)
                state = read.state()
    assert len(batches) == 9
