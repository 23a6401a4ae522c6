"""Progress of a loop: a bar on a terminal, elsewhere a line every ten seconds."""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping

from tqdm import tqdm

from experiments.cluster import processes

SECONDS = 10.0  # between two lines


def bar(items: Iterable | None = None, **options):
    """`tqdm(items, **options)` on process 0, or `Lines` if standard error is not a terminal."""
    if not processes.is_first() or sys.stderr.isatty():
        return tqdm(items, disable=not processes.is_first(), **options)
    return Lines(items, **options)


def note(bar, record: Mapping, *, examples: int) -> None:
    """Shows the batch loss and the examples per second of a run's record beside its progress.

    Args:
      examples: in a step of all workers.
    """
    loss, seconds = record.get("train/batch_loss"), record["seconds"]
    if loss is not None and seconds:
        speed = f"{record['step'] * examples / seconds:,.0f}"
        bar.set_postfix({"loss": f"{loss:.4f}", "examples/s": speed}, refresh=False)


class Lines:
    """The part of `tqdm` that our loops use, for logs: it writes plain lines to standard error."""

    disable, write = False, staticmethod(print)

    def __init__(self, items=None, *, total=None, initial=0, desc="", unit="item", **_):
        self._items, self._unit, self._about = items, unit, desc
        self._total = len(items) if total is None and hasattr(items, "__len__") else total
        self.n, self._postfix, self._told = initial, {}, time.monotonic()
        self._first = None  # (items, time) of the first update: what was prepared is not counted

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __iter__(self) -> Iterator:
        self._told = -math.inf
        self.update(0)  # a line at once
        self._first = None
        for item in self._items:
            yield item
            self.update()

    def set_description(self, text: str) -> None:
        self._about = text

    def set_postfix(self, found: Mapping[str, str], refresh: bool = True) -> None:
        self._postfix = found

    def update(self, count: int = 1) -> None:
        """Counts on, and writes a line if the last one is ten seconds old."""
        self.n += count
        now = time.monotonic()
        self._first = self._first or (self.n, now)
        if now - self._told < SECONDS:
            return
        self._told, words = now, [f"{self._unit} {self.n:,}"]
        if self._total:
            words[0] += f" of {self._total:,}"
        first, begun = self._first
        if self._total and self.n > first:
            left = (self._total - self.n) * (now - begun) / (self.n - first)
            words.append(f"{tqdm.format_interval(left)} left")
        words += [f"{name}={value}" for name, value in self._postfix.items()]
        start = f"{self._about}: " if self._about else ""
        print(start + ", ".join(words), file=sys.stderr, flush=True)
