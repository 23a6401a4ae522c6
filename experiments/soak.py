r"""Does anything grow while it trains? `train` over and over in one process, stopped and gone on.

    python -m experiments.soak --minutes=60                    # an hour; --minutes=0 draws it again

Runs of one setting follow each other in this process, each with evaluations and saves; SIGTERM
stops them at random moments, and they go on from their checkpoints. Every few seconds the resident
memory, the threads and the open files of the process are written down. Every run must end with the
records of the first, which nothing has stopped. Writes soak.jsonl and soak.png into --output_dir.

Expected: docs/endurance.md.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from absl import app, flags, logging

from experiments import train
from experiments.flags import definer
from experiments.results import plots, records

FLAGS = flags.FLAGS
RUN = [
    "--order=cd_grab", "--sync=qsr", "--echo=diffusion_cosine", "--workers=4", "--num_train=512",
    "--units_per_step=3", "--evaluations=20",
]  # fmt: skip
STOPPED = 128 + signal.SIGTERM
SAMPLES, PICTURE = "soak.jsonl", "soak.png"
SERIES = {"rss": "resident memory (MiB)", "threads": "threads", "files": "open files"}


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define, number = definer(values), flags.DEFINE_float
    define(number, "minutes", 60.0, "until no further run begins; 0: draw", lower_bound=0.0)
    define(number, "every", 5.0, "seconds between two samples", lower_bound=0.01)
    define(number, "stop_after", 40.0, "seconds, at most, until a run is stopped", lower_bound=0.1)
    define(flags.DEFINE_integer, "total_steps", 40_000, "of a run", lower_bound=1)
    define(flags.DEFINE_integer, "checkpoint_every", 400, "steps", lower_bound=1)
    define(flags.DEFINE_string, "output_dir", "results/soak", "gets what is written")


def sample() -> dict:
    """What this process holds; of Linux."""
    with open("/proc/self/status", encoding="utf-8") as file:
        status = dict(line.split(":", 1) for line in file)
    files = len(os.listdir("/proc/self/fd")) - 1  # but for the listing itself
    return {
        "rss": int(status["VmRSS"].split()[0]) / 1024, "threads": int(status["Threads"]),
        "files": files,
    }  # fmt: skip


@contextlib.contextmanager
def sampled(path: str, every: float, seen: dict) -> Iterator[None]:
    """Writes a sample, and what has been seen, every few seconds while the body runs."""
    start, ended = time.monotonic(), threading.Event()

    def write():
        with open(path, "w", encoding="utf-8") as file:
            while not ended.wait(every):
                minutes = (time.monotonic() - start) / 60
                print(json.dumps({"minutes": minutes, **sample(), **seen}), file=file, flush=True)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def attempt(arguments: Sequence[str], stop_after: float | None) -> bool:
    """Trains, or goes on; whether the run has come to its end, and was not stopped before."""
    values = flags.FlagValues()
    train.define_flags(values)
    values(["train", *arguments])
    timer = None
    if stop_after is not None:
        timer = threading.Timer(stop_after, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
    try:
        train.run(values)
    except SystemExit as ended:
        if ended.code != STOPPED:
            raise
        return False
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()  # no signal comes after this attempt
    return True


def found(folder: str) -> list[dict]:
    lines = records.read(os.path.join(folder, records.METRICS))
    return [{k: v for k, v in r.items() if k != "seconds"} for r in lines]


def soak(values: flags.FlagValues) -> dict:
    """Runs until the minutes are over: {"runs": that have ended, "stops": on the way}."""
    folder, draw = os.path.join(values.output_dir, "run"), random.Random(0)
    arguments = [
        *RUN, f"--total_steps={values.total_steps}", f"--output_dir={folder}",
        f"--checkpoint_every={values.checkpoint_every}",
    ]  # fmt: skip
    os.makedirs(values.output_dir, exist_ok=True)
    seen, first, end = {"runs": 0, "stops": 0}, None, time.monotonic() + 60 * values.minutes
    # A signal that comes outside of training, where `train` does not listen, asks nothing.
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with sampled(os.path.join(values.output_dir, SAMPLES), values.every, seen):
            while time.monotonic() < end:
                shutil.rmtree(folder, ignore_errors=True)
                undisturbed = first is None
                while not attempt(
                    arguments, None if undisturbed else draw.uniform(0, values.stop_after)
                ):
                    seen["stops"] += 1
                first = first or found(folder)
                if found(folder) != first:
                    sys.exit(f"{folder!r} holds other records than the first run: compare them.")
                seen["runs"] += 1
    finally:
        signal.signal(signal.SIGTERM, before)
    return seen


def picture(samples: Sequence[dict], path: str) -> None:
    figure, axes = plots.panes(1, len(SERIES), (4.2 * len(SERIES), 3.4))
    for axis, (name, label) in zip(axes[0], SERIES.items(), strict=True):
        axis.plot([s["minutes"] for s in samples], [s[name] for s in samples], lw=1)
        axis.set_xlabel("minutes")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    last = samples[-1]
    plots.save(figure, path, f"{last['runs']} runs of train, stopped {last['stops']} times")


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)  # orbax tells a checkpoint in forty lines
    if FLAGS.minutes:
        soak(FLAGS)
    samples = records.read(os.path.join(FLAGS.output_dir, SAMPLES))
    if not samples:
        raise app.UsageError(f"no samples in {FLAGS.output_dir!r}: pass more --minutes.")
    path = os.path.join(FLAGS.output_dir, PICTURE)
    picture(samples, path)
    quarter = samples[len(samples) // 4]
    for name, label in SERIES.items():
        print(f"{label}: {quarter[name]:.0f} after a quarter, {samples[-1][name]:.0f} at the end")
    print(f"{samples[-1]['runs']} runs, {samples[-1]['stops']} stops; written to {path}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
