"""A plugin of pytest that keeps the memory of a process of tests small."""

import contextlib
import ctypes
import gc
import os

import jax

GROWTH = 200_000_000  # bytes by which a process of tests may grow before it forgets its programs
memory_before = [0]  # when it last did
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0  # a test may replace sysconf


def pytest_collection_finish():
    """A twentieth of the time would go into looking for garbage among what stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    memory_before[0] = resident_memory()


def pytest_runtest_teardown(nextitem):
    """JAX keeps every program that it has compiled: those of all tests would take 5 GB."""
    if resident_memory() > memory_before[0] + GROWTH:
        jax.clear_caches()
        gc.collect()
        gc.freeze()  # what stays is not looked through again
        with contextlib.suppress(OSError, AttributeError):  # of other C libraries
            ctypes.CDLL(None).malloc_trim(0)
        memory_before[0] = resident_memory()


def resident_memory() -> int:
    """Bytes that this process has in memory; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:
        return 0
