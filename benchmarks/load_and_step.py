"""Times loads of decoded JPEGs against training steps, and whole loops with and without echoing.

    pip install -e ".[experiments]" "jax[cuda12]" opencv-python-headless pillow
    python -m benchmarks.load_and_step --folder=DIR

R is the time of a load in steps: above 1 the accelerator waits. A load is a batch of files of 500 x
375 pixels and about 100 kB, which are read from the page cache, decoded by threads, and copied to
the device. benchmarks/jpegs.py makes the files: synthetic content, real decoding and crops. A
step is SGD with momentum on uint8 images of 224 x 224 in bfloat16. First come the images per second
of every number of threads, and of as many processes, which share nothing. Then come the step's time
and R for every model and batch size. For the first --loops_of of them, whole loops then take turns:
steps on one batch that stays on the device, a load per step, error diffusion with p = 1/R, and
`adaptive`. A loop's clock starts at its first batch. `waiting` is the share of the loop's time that
exceeds its steps', `in next` the share in which the loop asks for a batch: where it is less, the
host itself is slow. Ranges are the least and the largest of the turns. Each row is printed as it is
measured, and with --folder becomes a line of rows.jsonl there.
"""

import itertools
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import models
from benchmarks import jpegs, timing
from models.mobilenet import IMAGENET_STAGES
from models.vit import SIZES
from ordering import echo
from ordering.data import prefetch_to_device

SIDE = 224
IMAGE = (SIDE, SIDE, 3)
VIT = {"image_shape": IMAGE, "num_classes": 1000, "pool": "class", "dtype": "bfloat16"}
MODELS = {
    "vit_small": lambda: models.vit(**VIT, **SIZES["small"]),
    "vit_base": lambda: models.vit(**VIT, **SIZES["base"]),
    "resnet50": lambda: models.resnet(depth=50, dtype="bfloat16"),
    "mobilenet_v2": lambda: models.mobilenet_v2(
        image_shape=IMAGE,
        num_classes=1000,
        stages=IMAGENET_STAGES,
        stem_channels=32,
        stem_stride=2,
        head_channels=1280,
        dtype="bfloat16",
    ),
    "patches": lambda: models.vit(**{**VIT, "pool": "mean"}, patch=56, width=8, depth=1),  # a toy
}
NO_LOAD, NO_ECHO, DIFFUSED, ADAPTIVE = WAYS = (
    "no load",
    "a load per step",
    "error_diffusion(1/R)",
    "adaptive",
)


class Sizes(NamedTuple):
    """How much is measured."""

    files: int
    threads: Sequence[int]  # that decode
    loops: Sequence[int]  # threads of the whole loops
    loops_of: int  # how many models are timed in whole loops
    steps: int  # of a loop
    seconds: float  # of loads, for every number of threads and turn
    repeats: int


class Step:
    """A compiled training step, its state and a batch."""

    def __init__(self, name: str, size: int):
        self.name, self.size = name, size
        model, optimizer = MODELS[name](), optax.sgd(0.01, momentum=0.9)

        def step(state, batch):
            x = (batch["x"].astype(jnp.float32) - 118) / 60

            def mean_loss(params):
                losses = model.loss(params, {"x": x, "y": batch["y"]}, jax.random.key(0))
                return jnp.mean(losses)

            loss, grads = jax.value_and_grad(mean_loss)(state[0])
            updates, inner = optimizer.update(grads, state[1], state[0])
            return (optax.apply_updates(state[0], updates), inner), loss

        params = jax.jit(model.init)(jax.random.key(0))
        self.state = params, jax.jit(optimizer.init)(params)
        x = np.random.default_rng(0).integers(0, 256, (size, *IMAGE), np.uint8)
        self.batch = jax.device_put({"x": x, "y": np.arange(size, dtype=np.int32) % 10})
        start = time.perf_counter()
        self.run = jax.jit(step, donate_argnums=0).lower(self.state, self.batch).compile()
        self.compilation = time.perf_counter() - start

    def __call__(self, batch) -> jax.Array:
        """The loss, not waited for."""
        self.state, loss = self.run(self.state, batch)
        return loss

    def seconds(self, steps: int, repeats: int) -> list[float]:
        """Seconds of a step in each turn, after one that warms up."""
        return [self.turn(steps) for _ in range(repeats + 1)][1:]

    def turn(self, steps: int) -> float:
        """Seconds per step on a batch that stays on the device."""
        return _timed(self, itertools.repeat(self.batch, steps + 1))[0]


def _timed(step: Callable, batches: Iterator) -> tuple[float, int]:
    """(seconds per step from the second batch on, their number); the host is one step ahead."""
    last = jax.block_until_ready(step(next(batches)))
    start, count = time.perf_counter(), 0
    for batch in batches:
        loss = step(batch)
        jax.block_until_ready(last)
        last, count = loss, count + 1
    if not np.isfinite(jax.block_until_ready(last)):
        raise AssertionError("the loss is not finite")
    return (time.perf_counter() - start) / count, count


def span(results: Sequence[float], digits: int = 3) -> str:
    """The least and the largest."""
    return f"{min(results):.{digits}f} to {max(results):.{digits}f}"


def load_rates(paths: Sequence, threads: int, size: int, sizes: Sizes) -> list[float]:
    """Images per second that arrive on the device, by turns."""
    results = []
    with (
        jpegs.reading(paths, size=size, side=SIDE, threads=threads) as batches,
        prefetch_to_device(batches, depth=1) as loader,
    ):
        next(loader)
        for _ in range(sizes.repeats):
            start, count, spent = time.perf_counter(), 0, 0.0
            while spent < sizes.seconds:
                next(loader)
                count, spent = count + 1, time.perf_counter() - start
            results.append(count * size / spent)
    return results


def process_rate(folder: pathlib.Path, processes: int, sizes: Sizes) -> float:
    """Images per second of so many processes of one thread."""
    options = f"--files={sizes.files}", f"--seconds={max(1.0, sizes.seconds)}", f"--side={SIDE}"
    line = [sys.executable, "-m", "benchmarks.jpegs", f"--folder={folder}", *options]
    root = pathlib.Path(jpegs.__file__).parents[1]
    started = [
        subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=root)
        for _ in range(processes)
    ]
    return sum(float(process.communicate()[0]) for process in started)


def plan_of(way: str, ratio: float, steps: int):
    if way == ADAPTIVE:
        return echo.adaptive(total_steps=steps, max_factor=max(1, math.ceil(4 * ratio)))
    p = min(1.0, 1 / ratio) if way == DIFFUSED else 1.0
    return echo.error_diffusion(p, total_steps=steps)


def one_loop(step: Step, way: str, ratio: float, paths: Sequence, threads: int, steps: int):
    """(seconds, loads, seconds of asking for a batch) per step, after the first batch."""
    if way == NO_LOAD:
        return step.turn(steps), 0.0, 0.0
    fresh, asking = [], []

    def recorded(batches):
        start = time.perf_counter()
        for batch in batches:
            asking.append(time.perf_counter() - start)
            fresh.append(batches.fresh)
            yield batch
            start = time.perf_counter()

    with (
        jpegs.reading(paths, size=step.size, side=SIDE, threads=threads) as source,
        prefetch_to_device(source, depth=2) as loader,
    ):
        batches = echo.repeat(loader, plan_of(way, ratio, steps + 1))
        seconds, count = _timed(step, recorded(batches))
    return seconds, sum(fresh[1:]) / count, sum(asking[1:]) / count


def loop_rows(step: Step, ratio: float, paths, threads: int, sizes: Sizes) -> Iterator[dict]:
    """One row per way, after the turns of all ways."""
    turns = {way: [] for way in WAYS}
    for _ in range(sizes.repeats):
        for way in WAYS:
            turns[way].append(one_loop(step, way, ratio, paths, threads, sizes.steps))
    base = np.array(turns[NO_LOAD])[:, 0]
    for way, results in turns.items():
        seconds, loads, asking = np.array(results).T
        yield {
            "part": "loop",
            "model": step.name,
            "batch": step.size,
            "threads": threads,
            "R": round(ratio, 3),
            "way": way,
            "steps/s": round(1 / statistics.median(seconds), 2),
            "range": span(1 / seconds, 2),
            "loads/s": round(statistics.median(loads / seconds), 2),
            "loads per step": round(statistics.median(loads), 3),
            "times no load": round(statistics.median(seconds / base), 3),
            "waiting": round(statistics.median(1 - base / seconds), 3),
            "in next": round(statistics.median(asking / seconds), 3),
        }


def rate_rows(folder: pathlib.Path, paths: Sequence, size: int, sizes: Sizes) -> Iterator[dict]:
    """Rows of loads, by the number of threads."""
    kilobytes = statistics.mean(path.stat().st_size for path in paths) / 1e3
    for threads in sorted({*sizes.threads, *sizes.loops}):
        results = load_rates(paths, threads, size, sizes)
        yield {
            "part": "loads",
            "threads": threads,
            "cores": os.cpu_count(),
            "kB per file": round(kilobytes, 1),
            "images/s": round(statistics.median(results), 1),
            "range": span(results, 1),
            "images/s of as many processes": round(process_rate(folder, threads, sizes), 1),
        }


def rows(folder: pathlib.Path, steps: Sequence[str], sizes: Sizes) -> Iterator[dict]:
    """Rows of all parts; `steps` are "model:batch"."""
    paths, rates = jpegs.make_files(folder, sizes.files), {}
    pairs = [(name, int(size)) for name, size in (step.split(":") for step in steps)]
    for row in rate_rows(folder, paths, pairs[0][1], sizes):
        rates[row["threads"]] = row["images/s"]
        yield row
    for number, (name, size) in enumerate(pairs):
        step = Step(name, size)
        seconds = step.seconds(sizes.steps, sizes.repeats)
        middle = statistics.median(seconds)
        for threads, rate in rates.items():
            yield {
                "part": "ratio",
                "model": name,
                "batch": size,
                "threads": threads,
                "step ms": round(middle * 1e3, 2),
                "range": span([1e3 * s for s in seconds], 2),
                "images/s of steps": round(size / middle, 1),
                "R": round(size / rate / middle, 3),
                "compilation s": round(step.compilation, 1),
            }
        for threads in sizes.loops if number < sizes.loops_of else ():
            yield from loop_rows(step, size / rates[threads] / middle, paths, threads, sizes)


def main(argv):
    del argv
    values, device = flags.FLAGS, jax.devices()[0].device_kind
    threads, loops = ([int(n) for n in results if n] for results in (values.threads, values.loops))
    sizes = Sizes(
        values.files,
        threads,
        loops,
        values.loops_of,
        values.steps_per_loop,
        values.seconds,
        values.repeats,
    )
    with tempfile.TemporaryDirectory() as folder:
        results = rows(pathlib.Path(folder), values.steps, sizes)
        results = ({"device": device, **row} for row in results)
        timing.print_rows(timing.saved(results, values.folder))


if __name__ == "__main__":
    flags.DEFINE_string("folder", None, "where rows.jsonl is written")
    flags.DEFINE_integer("files", 1024, "number of JPEGs")
    flags.DEFINE_list(
        "steps",
        ["vit_small:128", "resnet50:128", "vit_small:256", "resnet50:256"],
        f"model:batch, of {', '.join(MODELS)}",
    )
    flags.DEFINE_list("threads", ["1", "2", "4", "8", "16"], "numbers of threads that decode")
    flags.DEFINE_list("loops", ["4", "16", "8"], "threads of the whole loops")
    flags.DEFINE_integer("loops_of", 2, "how many of the steps are put into whole loops")
    flags.DEFINE_integer("steps_per_loop", 60, "steps of a loop")
    flags.DEFINE_float("seconds", 1.5, "how long to load, for every number of threads and turn")
    flags.DEFINE_integer("repeats", 3, "turns")
    app.run(main)
