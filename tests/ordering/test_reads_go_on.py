"""Readers that are interrupted, fail, wait or hang, with all their threads."""

import _thread
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

import ordering
from ordering.data import LoadError, read_epochs

KEY = jax.random.key(0)


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


def epochs(act=lambda i: None, **options):
    order = ordering.random_reshuffling(12, units_per_step=2)
    return read_epochs(Source(act), order, KEY, **{"num_epochs": 1} | options)


def in_grain(windows):
    import grain

    return grain.MapDataset.source(windows).to_iter_dataset()


def of_blocks(act=lambda i: None, size=12, window=2, **options):
    """Units of two numbers; `act(i)` runs before the one that begins with i is read."""
    blocks = ordering.blocks.split([Source(act, size)], unit_size=2)
    order = ordering.random_reshuffling(len(blocks), units_per_step=window)
    options = {"num_epochs": 1, "batch_size": 2} | options
    return ordering.blocks.read_blocks(blocks, order, KEY, **options)


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
@pytest.mark.parametrize("reader", ["epochs", "blocks"])
def test_an_interrupt_while_next_waits_loses_no_batch(reader, depth, interrupt):
    assert threading.current_thread() is threading.main_thread()
    expected = [numbers(batch) for batch in READERS[reader](lambda i: None)]
    once = []

    def act(i):
        with contextlib.suppress(IndexError):
            once.pop()()

    with READERS[reader](act, depth=depth, timeout=60) as reads:
        once.append(INTERRUPTS[interrupt])  # of all but example 0 nothing is read before next
        with pytest.raises(KeyboardInterrupt):
            next(reads)
        assert reads.loads == 0
        assert [numbers(batch) for batch in reads] == expected


class Odd(Exception):
    """An error that cannot be made from its arguments, and cannot be shown."""

    def __init__(self, one, two, *, three):
        self.all = one, two, three

    def __str__(self):
        raise KeyError(self.all)


ERRORS = [
    (lambda: Odd(1, 2, three=3), "failed: Odd: its text cannot be shown. Resume", "epochs"),
    (lambda: Odd(1, 2, three=3), "failed: Odd", "blocks, by Grain"),
    (lambda: StopIteration(), "failed: RuntimeError: the source raised StopItera", "epochs"),
    (lambda: StopIteration(), "RuntimeError: the source raised StopItera", "blocks"),
    (lambda: SystemExit(3), "failed: SystemExit: 3. Resume", "epochs"),
    (lambda: KeyboardInterrupt(), "failed: KeyboardInterrupt. Resume the run from", "blocks"),
]


@pytest.mark.parametrize("make,message,reader", ERRORS)
def test_whatever_a_source_raises_is_an_error_of_its_load(make, message, reader):
    def act(i):
        if i == 8:
            raise make()

    read = []
    with READERS[reader](act, timeout=60) as reads:
        for _ in range(2):  # the error is repeated
            with pytest.raises(LoadError, match=message) as info:
                for batch in reads:
                    read += numbers(batch)
        assert info.value.load == reads.loads == len(read) // 2
    assert 8 not in read


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


@pytest.mark.slow  # that the threads are daemons is tested below
def test_a_read_that_hangs_does_not_keep_the_process():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the input hangs") == 2 and not done.stderr


def test_a_wait_raises_what_next_would_and_takes_no_batch():
    """No thread of a read that hangs keeps the process."""
    expected, batches, late = [numbers(batch) for batch in of_blocks()], [], 0
    gate, before = threading.Event(), {*threading.enumerate()}
    with of_blocks(lambda i: i == 8 and gate.wait(60), timeout=0.2) as reads:
        while len(batches) < 6:
            try:
                reads.wait()
            except LoadError:
                late += 1
                assert all(thread.daemon for thread in {*threading.enumerate()} - before)
                if late == 2:
                    gate.set()
            else:
                batches.append(numbers(next(reads)))
            assert reads.loads == len(batches)
        with pytest.raises(StopIteration):
            reads.wait()
    assert late >= 2 and batches == expected


@pytest.mark.parametrize("readers", [1, 3])
def test_no_more_threads_read_than_readers(readers):
    """Also while one epoch ends and the next one begins."""
    inside, most = [], []

    def act(i):
        inside.append(i)
        most.append(len(inside))
        time.sleep(0.001)
        inside.remove(i)

    with of_blocks(act, 24, window=4, num_epochs=3, readers=readers) as reads:
        list(reads)
    assert len(most) == 36 and max(most) <= readers


def test_a_program_that_forbids_transfers_reads_blocks_and_goes_on():
    state, seen = None, []
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            with of_blocks(state=state) as reads:
                seen += next(reads)[0].tolist()
                state = reads.state()
    assert len({*seen}) == 4
