"""Times data echoing as tf.data and init2winit do it, beside ours, on a loader that is too slow.

    git clone https://github.com/google/init2winit
    pip install -e ".[experiments,data]"
    python -m benchmarks.echo_peers --repositories=.

A load takes a declared delay of R steps (`slow_batches`), and every way uses it R times:
tf.data by `flat_map` and `repeat`, of batches, or of examples that are then shuffled and batched;
init2winit by the generator of its trainer; ours by a plan. The others take whole numbers, so at
R = 2.5 they use a load three times. `adaptive` decides by what is ready. All read one load ahead on
a thread. Before the timing, ways with a whole R must use every example of every load R times. Each
turn begins with steps that wait for no load; `times the step` is relative to these, and `interval`
is its 95 % interval over the turns. The clock starts at the first batch.
"""

import contextlib
import itertools
import math
import pathlib
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np
from absl import app, flags

import models
from benchmarks import timing
from benchmarks.timing import median_interval
from experiments.timing import momentum_step
from ordering import echo
from ordering.data import prefetch_to_device

RATIOS = (2, 2.5, 4)
SHUFFLE = 4  # batches in tf.data's buffer of examples
PLAIN = "a load per step"
FEATURES, BATCH = 784, 64


def slow_step() -> Callable:
    """`batch -> state`: waits for a step of some milliseconds on one batch."""
    # One thread leaves a core to the loader, as if the step ran on an accelerator.
    options = {"xla_cpu_multi_thread_eigen": False} if jax.default_backend() == "cpu" else None
    model = models.mlp(num_features=FEATURES, hidden=(128,), num_classes=10)
    call = momentum_step(model, 20, compiler_options=options)
    return lambda batch: jax.block_until_ready(call(batch))


def slow_batches(delay: float) -> Iterator[dict]:
    """Endless random batches on the device, each `delay` seconds after its request."""
    generator = np.random.default_rng(0)
    while True:
        start = time.perf_counter()
        x = generator.normal(size=(BATCH, FEATURES)).astype(np.float32)
        y = generator.integers(0, 10, BATCH, np.int32)
        batch = jax.block_until_ready(jax.device_put({"x": x, "y": y}))
        time.sleep(max(0.0, start + delay - time.perf_counter()))
        yield batch


def numbered(batches: Iterable[dict]) -> Iterator[dict]:
    """Batches that carry, for each example, the number of its load."""
    for load, batch in enumerate(batches):
        yield {**batch, "load": np.full(len(batch["y"]), load, np.int32)}


def by_plan(policy) -> Callable:
    """`source -> batches` of ours, by an `EchoPlan` or `adaptive`."""

    def run(source):
        with prefetch_to_device(source, depth=1) as loader:
            yield from echo.repeat(loader, policy, stop_with_loads=True)

    return run


def by_tf_data(factor: int, examples: bool) -> Callable:
    """`source -> batches`, each load or each of its examples repeated."""
    import tensorflow as tf

    def run(source):
        source = iter(source)
        first = jax.tree.map(np.asarray, next(source))
        rest = (jax.tree.map(np.asarray, batch) for batch in source)
        like = jax.tree.map(lambda x: tf.TensorSpec(x.shape, x.dtype), first)
        loads = tf.data.Dataset.from_generator(
            lambda: itertools.chain([first], rest), output_signature=like
        ).prefetch(1)
        if examples:
            loads = loads.unbatch()
        uses = loads.flat_map(lambda load: tf.data.Dataset.from_tensors(load).repeat(factor))
        if examples:
            size = len(first["y"])
            uses = uses.shuffle(SHUFFLE * size, seed=0).batch(size)
        yield from uses.prefetch(1).as_numpy_iterator()

    return run


def by_init2winit(folder: pathlib.Path, factor: int) -> Callable:
    """`source -> batches` through the data selector of init2winit's trainer."""
    sys.path.insert(0, str(folder / "init2winit"))
    from init2winit.dataset_lib import data_selectors

    def run(source):
        with prefetch_to_device(source, depth=1) as loader:
            yield from data_selectors.data_echoing(
                loader,
                optimizer_state=None,
                params=None,
                batch_stats=None,
                global_step=0,
                hps=types.SimpleNamespace(num_data_echoes=factor),
                constant_base_rng=None,
            )

    return run


def ways_of(ratio: float, steps: int, folder: pathlib.Path | None) -> dict[str, Callable]:
    """{way: source -> batches} of the packages that are installed."""
    factor = math.ceil(ratio)
    ways = {
        PLAIN: by_plan(echo.fixed(1, total_steps=steps)),
        "error_diffusion": by_plan(echo.error_diffusion(1 / ratio, total_steps=steps)),
        "measured": by_plan(echo.adaptive(total_steps=steps, max_factor=math.ceil(4 * ratio))),
    }
    peers = {
        "tf.data, batches": lambda: by_tf_data(factor, False),
        "tf.data, examples shuffled": lambda: by_tf_data(factor, True),
    }
    if folder is not None:
        peers["init2winit data_echoing"] = lambda: by_init2winit(folder, factor)
    for name, make in peers.items():
        try:
            ways[name] = make()
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return ways


def check(ways: dict[str, Callable], factor: int, loads: int = 8, size: int = 16) -> None:
    """Raises AssertionError for a way that uses an example more or less often than it should."""
    for name, run in ways.items():
        if name != "measured":
            source = numbered({"y": np.arange(size, dtype=np.int32)} for _ in range(loads))
            uses = np.zeros((loads, size), int)
            for batch in run(source):
                np.add.at(uses, (np.asarray(batch["load"]), np.asarray(batch["y"])), 1)
            np.testing.assert_array_equal(uses, 1 if name == PLAIN else factor, name)


def timed(step: Callable, run: Callable, delay: float, steps: int) -> tuple[float, float]:
    """Seconds per step, and loads per step."""
    seen = []
    with contextlib.closing(run(numbered(slow_batches(delay)))) as batches:
        first = next(batches)
        start = time.perf_counter()
        for batch in itertools.chain([first], itertools.islice(batches, steps - 1)):
            seen.append(batch["load"])
            step({name: batch[name] for name in ("x", "y")})
    seconds = (time.perf_counter() - start) / len(seen)
    return seconds, len(np.unique(np.concatenate(seen))) / len(seen)


def rows(
    ratio: float, repeats: int, *, folder: pathlib.Path | None = None, steps: int = 80, step=None
) -> Iterator[dict]:
    """One row per way, medians over the turns."""
    step = step or slow_step()
    ways, factor = ways_of(ratio, steps, folder), math.ceil(ratio)
    check(ways_of(factor, 8 * factor, folder), factor)
    quick = ways["error_diffusion"]
    timed(step, quick, 0.0, steps)  # warms up
    turns = {way: [] for way in ways}
    for _ in range(repeats):
        base, _ = timed(step, quick, 0.0, steps)
        for way, run in ways.items():
            seconds, share = timed(step, run, ratio * base, steps)
            turns[way].append((base, seconds / base, share))
    ours = np.array(turns["error_diffusion"])[:, 1]
    for way, measured in turns.items():
        base, ratios, shares = np.array(measured).T
        middle, low, high = median_interval(ratios)
        yield {
            "R": ratio,
            "way": way,
            "step ms": f"{1e3 * np.median(base):.2f}",
            "loads per step": f"{np.median(shares):.3f}",
            "times the step": f"{middle:.3f}",
            "interval": f"{low:.3f} to {high:.3f}",
            "times ours": f"{median_interval(ratios / ours)[0]:.3f}",
        }


def main(argv):
    del argv
    folder, head = flags.FLAGS.repositories, ()
    for ratio in RATIOS:
        table = rows(ratio, flags.FLAGS.repeats, folder=folder and pathlib.Path(folder))
        head = timing.print_rows(table, head)


if __name__ == "__main__":
    flags.DEFINE_string("repositories", None, "folder of the clone of init2winit")
    flags.DEFINE_integer("repeats", 7, "turns")
    app.run(main)
