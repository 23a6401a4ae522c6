"""Fair times: calls take turns in one process, so that what disturbs one disturbs all."""

import statistics
import time
from collections.abc import Callable

import jax


def in_turns(calls: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call, `repeats` of each, measured in turns after one warm-up each."""
    times = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def medians(calls: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Median seconds of every call."""
    return {name: statistics.median(s) for name, s in in_turns(calls, repeats).items()}
