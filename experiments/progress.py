"""Progress of a loop: a bar on a terminal, elsewhere a line every ten seconds."""

import sys
from collections.abc import Iterable, Mapping

from tqdm import tqdm

from experiments.distributed import processes

SECONDS = 10.0  # between two lines


def bar(items: Iterable | None = None, **options):
    """`tqdm(items, **options)` on process 0, or `Lines` if standard error is not a terminal."""
    if not processes.is_first() or sys.stderr.isatty():
        return tqdm(items, disable=not processes.is_first(), **options)
    return Lines(items, **options)


def note(bar, record: Mapping, *, examples: int) -> None:
    """Shows a record's batch loss and examples per second, of so many in a step of all workers."""
    loss, seconds = record.get("train/batch_loss"), record["seconds"]
    if loss is not None and seconds:
        speed = f"{record['step'] * examples / seconds:,.0f}"
        bar.set_postfix({"loss": f"{loss:.4f}", "examples/s": speed}, refresh=False)


def duration(seconds: Mapping[str, float]) -> str:
    """The seconds of runs in words, as "12.3 s of steps, 0.1 s of checkpoints"."""
    return ", ".join(f"{value:.3g} s of {name}" for name, value in seconds.items())


class Lines(tqdm):
    """`tqdm` for logs: plain lines on standard error, ten seconds apart."""

    monitor_interval, write = 0, staticmethod(print)

    def __init__(self, items=None, **options):
        super().__init__(items, **{"mininterval": SECONDS, "miniters": 1} | options)

    def display(self, msg=None, pos=None) -> None:
        print(msg or self, file=sys.stderr, flush=True)

    def set_description(self, desc=None, refresh=False) -> None:
        super().set_description(desc, refresh=False)  # else every run of a study is a line

    def close(self) -> None:
        self.disable = True

    @staticmethod
    def format_meter(n, total, elapsed, prefix="", unit="", rate=None, initial=0, postfix="", **_):
        about = f"{prefix.removesuffix(': ')}: " if prefix else ""
        words = [f"{about}{unit} {n:,}" + (f" of {total:,}" if total else "")]
        rate = rate or ((n - initial) / elapsed if elapsed else 0)
        if total and rate:
            words.append(f"{tqdm.format_interval((total - n) / rate)} left")
        return ", ".join([*words, *filter(None, [postfix])])
