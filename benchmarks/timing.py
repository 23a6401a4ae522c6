"""Timings of calls that take turns, their ratios with intervals, and rows that are printed."""

import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from scipy.special import bdtr

import models
from experiments.data import Task
from experiments.timing import in_turns


def median_interval(values) -> tuple[float, float, float]:
    """Median, and the order statistics that enclose it in 95 % of all cases.

    The bounds are infinite with fewer than six values.
    """
    ordered = np.sort(np.asarray(list(values), float))
    count = len(ordered)
    rank = int((bdtr(np.arange(count), count, 0.5) <= 0.025).sum())
    low, high = (ordered[rank - 1], ordered[count - rank]) if rank else (-math.inf, math.inf)
    return float(np.median(ordered)), float(low), float(high)


def compared(calls: dict[str, Callable], repeats: int) -> Iterator[tuple]:
    """(name, median seconds, {other: (median ratio to it in the same turn, low, high)})."""
    times = {name: np.array(s) for name, s in in_turns(calls, repeats).items()}
    for name, seconds in times.items():
        ratios = {other: median_interval(seconds / times[other]) for other in times}
        yield name, statistics.median(seconds), ratios


def compared_with_first(calls: dict[str, Callable], repeats: int) -> Iterator[tuple]:
    """(name, median seconds, (median ratio to the first of the same turn, its interval))."""
    for name, seconds, ratios in compared(calls, max(6, repeats)):  # for the intervals
        middle, low, high = ratios[next(iter(calls))]
        yield name, seconds, (round(middle, 3), f"{low:.3f} to {high:.3f}")


def print_rows(rows: Iterable[dict], head: Sequence[str] = ()) -> tuple[str, ...]:
    """Prints each row as it comes, and its columns unless they are `head`; returns the columns."""
    for row in rows:
        if tuple(row) != tuple(head):
            head = tuple(row)
            print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
        print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
    return tuple(head)


def saved(rows: Iterable[dict], folder: str | None) -> Iterator[dict]:
    """The rows, each of which also becomes a line of rows.jsonl in a folder, if there is one."""
    for row in rows:
        if folder:
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
            with open(pathlib.Path(folder, "rows.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        yield row


def step_task(name: str) -> Task:
    """A task of the published shapes, with random data."""
    rng = np.random.default_rng(0)

    def task(model, shape, classes):
        x, y = rng.normal(size=shape).astype(np.float32), rng.integers(0, classes, shape[:1])
        return Task(name, model, {"x": x, "y": y.astype(np.int32)}, {}, None)

    def text(make, **sizes):
        words = rng.integers(0, 1024, (2, 64, 64), np.int32)
        model = make(vocab_size=1024, width=192, **sizes)
        return Task(name, model, {"x": words[0], "y": words[1]}, {}, None)

    image = (32, 32, 3)
    make = {
        "digits": lambda: task(
            models.softmax_regression(num_features=64, num_classes=10), (1536, 64), 10
        ),
        "hmda": lambda: task(models.logistic_regression(num_features=20), (65536, 20), 2),
        "lenet": lambda: task(models.lenet(), (512, 28, 28, 1), 10),
        "gpt": lambda: text(models.gpt2, context=64, depth=3, heads=3),
        "vit": lambda: task(
            models.vit(image_shape=image, width=192, depth=3, heads=3), (64, *image), 10
        ),
        "lstm": lambda: text(models.lstm),
    }
    return make[name]()
