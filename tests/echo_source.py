"""Batches that differ, and a source that counts, fails or waits."""

import functools
import threading
from typing import Any, NamedTuple

import jax
import numpy as np

from ordering import echo
from tests.waiting import TIMEOUT

W, B = 2, 4


def batch(load):
    """Example i of load l is 1000 l + 10 i; worker 1 has the negative values."""
    ids = np.int32(1000 * load + 10 * np.arange(B))
    return {"x": np.stack([ids, -ids]), "y": np.float32([ids, -ids])[..., None] / 2}


class Source:
    """An iterator of batches that counts what is asked for, and may fail or wait."""

    def __init__(self, loads, first=0, fail_at=None, wait_at=None):
        self.loads, self.next, self.asked = loads, first, 0
        self.fail_at, self.wait_at, self.go_on = fail_at, wait_at, threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        self.asked += 1
        load, self.next = self.next, self.next + 1
        if load == self.wait_at:
            self.go_on.wait(TIMEOUT)
        if load == self.fail_at:
            raise OSError("disk on fire")
        if load >= self.loads:
            raise StopIteration
        return batch(load)


PLAN = echo.EchoPlan(np.repeat([1, 0, 1, 0, 1, 0, 1], [1, 2, 1, 1, 2, 3, 1]).astype(bool))


class Use(NamedTuple):
    """A step, and what `repeat` tells of it."""

    step: int
    load: int
    fresh: bool
    batch: Any


class Uses:
    """The steps of `repeat`, which takes these arguments."""

    def __init__(self, *args, **options):
        self.batches = echo.repeat(*args, **options)

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self.batches)
        return Use(self.batches.step, self.batches.load, self.batches.fresh, batch)


@functools.cache
def whole_run():
    return list(Uses(Source(99), PLAN))


def assert_same(actual, expected):
    actual = list(actual)
    assert [use[:3] for use in actual] == [use[:3] for use in expected]
    batches = ([use.batch for use in uses] for uses in (actual, expected))
    jax.tree.map(np.testing.assert_array_equal, *batches)
