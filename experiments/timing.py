"""Fair times: calls take turns in one process, so that what disturbs one disturbs all."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax

from experiments import compare, records


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


def publish(rows: Sequence[dict], path: str | None) -> None:
    """Prints a table per part, and the rows as JSON lines: into a file, or below the tables."""
    for part in dict.fromkeys(row["part"] for row in rows):
        print(compare.markdown([row for row in rows if row["part"] == part]) + "\n")
    if path:
        records.write_lines(path, rows)
    else:
        sys.stdout.write("".join(json.dumps(row) + "\n" for row in rows))
