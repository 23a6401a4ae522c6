"""Does echoing hide slow input as predicted? Runs with a slow loader against runs without a delay.

A real loader (`ordering.input.load_ahead`) reads batches that take a declared delay of R t_step
each: gather, copy to the device, and sleep until the delay since the start is over. A real step
(MLP with momentum, repeated until it takes --step_ms) is waited for, on batches from
`ordering.echo.echo_batches`. The CPU that the sleeping loader leaves free is what a network would
leave.

Right before every run goes the same run without a delay (for "measured", which would then never
echo, that of error diffusion): its seconds per step are t_step, so that what slows the machine for
longer than two runs slows both. Columns, medians over the turns: measured, the seconds per step
over those of the run without delay, both from the first batch on; simulated, `echo_forecast` of the
very same policy, steps and delay; table, the reference value, simulated over far more steps.

Nothing is subtracted from the times: `time.sleep` oversleeps by some 0.1 ms and a thread takes time
to wake, so error diffusion at p = 1/R stalls a little. Where measured and in_run (the seconds of
the run over those within its own steps) differ by more than a few hundredths, the speed of the
machine changed from run to run: measure again.
Aim: at R = 4 error diffusion takes at most 1.03 times as long as no delay.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import ordering.input
from experiments.bench_parts.timing import medians, momentum_step, publish
from experiments.forecast_parts.echoes import Speed, policy_of
from experiments.tasks import Recipe, Task
from ordering import echo
from syncopate import models

REPEATS = 3
FEATURES, BATCH, EXAMPLES = 784, 64, 4096
DIFFUSION = "error diffusion, p = 1/R"
# A policy, its queue depth, and the reference by R.
ROWS = (
    (DIFFUSION, 1, {2: 1.000, 4: 1.000, 8: 1.000}),
    (DIFFUSION, 2, {}),
    ("Bernoulli, p = 1/R", 1, {2: 1.127, 4: 1.173, 8: 1.196}),
    ("Bernoulli, p = 1/R", 4, {2: 1.052, 4: 1.072, 8: 1.085}),
    ("Bernoulli, p = 1/R", 16, {2: 1.017, 4: 1.023, 8: 1.029}),
    ("Bernoulli, p = 0.9/R", 8, {2: 1.003, 4: 1.009, 8: 1.014}),
    ("measured, at most 4R uses", 1, {}),
)


def stepper(step_seconds: float) -> Callable:
    """`batch -> None`: a step on one batch that takes about so long, and is waited for.

    The update is repeated within the step, as often as makes it that long: no model has a size for
    every machine.
    """
    # One thread: a core stays with the loader, as if the step ran on an accelerator.
    options = {"xla_cpu_multi_thread_eigen": False} if jax.default_backend() == "cpu" else None
    model = models.mlp(num_features=FEATURES, hidden=(128,), num_classes=10)
    call = momentum_step(model, compiler_options=options)
    batch = next(slow_batches(0.0))

    counts = jnp.int32(1), jnp.int32(101)
    one, many = medians({int(n): lambda n=n: call(batch, n) for n in counts}, 7).values()
    times = jnp.int32(max(1, round(step_seconds / ((many - one) / 100))))
    return lambda batch: call(batch, times)  # times are on the device already


def slow_batches(delay: float) -> Iterator[dict]:
    """Random batches on the device, without end, each `delay` seconds after it was asked for."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    y, generator = generator.integers(0, 10, EXAMPLES, np.int32), np.random.default_rng(0)
    while True:
        start = time.perf_counter()
        chosen = generator.integers(0, EXAMPLES, BATCH)
        batch = jax.block_until_ready(jax.device_put({"x": x[chosen], "y": y[chosen]}))
        time.sleep(max(0.0, start + delay - time.perf_counter()))
        yield batch


def run_policy(step: Callable, policy, *, depth: int, delay: float) -> tuple[float, float, float]:
    """Runs a policy to its end, timed from its first batch on.

    Returns:
      Seconds per step, all seconds over those within steps, and loads per step.
    """
    with ordering.input.load_ahead(slow_batches(delay), depth=depth) as loader:
        uses = echo.echo_batches(loader, policy)  # takes the first batch
        start, within, loads, steps = time.perf_counter(), 0.0, 0, 0
        for use in uses:
            begin = time.perf_counter()
            step(use.batch)
            within += time.perf_counter() - begin
            loads, steps = loads + use.fresh, steps + 1
        total = time.perf_counter() - start
        return total / steps, total / within, loads / steps


def bench_rows(step: Callable, ratios: Sequence[float], *, steps: int, repeats: int) -> list[dict]:
    """One row per R and policy, all measured in turns."""
    places = [(r, *row, policy_of(row[0], r, steps)) for r in ratios for row in ROWS]
    found = [[] for _ in places]
    run_policy(step, policy_of(DIFFUSION, 2, 20), depth=1, delay=0.0)  # warms up the rest
    for _ in range(repeats):
        for turns, (ratio, _, depth, _, policy) in zip(found, places, strict=True):
            plan = policy_of(DIFFUSION, ratio, steps) if policy.online else policy
            base, _, _ = run_policy(step, plan, depth=depth, delay=0.0)
            seconds, in_run, share = run_policy(step, policy, depth=depth, delay=ratio * base)
            cost = echo.echo_forecast(
                policy, depth=depth, load_seconds=ratio * base, step_seconds=base
            )
            turns.append((1e3 * base, share, seconds / base, in_run, cost.slowdown))
    names = {"step_ms": 3, "loads_per_step": 4, "measured": 3, "in_run": 3, "simulated": 3}
    return [
        {"part": "echo", "R": ratio, "policy": label, "depth": depth}
        | {name: round(statistics.median(values), digits)
           for (name, digits), values in zip(names.items(), zip(*turns, strict=True), strict=True)}
        | {"table": table.get(ratio, "-")}
        for turns, (ratio, label, depth, table, _) in zip(found, places, strict=True)
    ]  # fmt: skip


def measure(task: Task, recipe: Recipe, *, rounds: int = 7, per_round: int = 20) -> Speed:
    """Times loads and steps of one worker's batches on this machine, one after the other.

    t_step: a step of SGD with momentum, waited for, its batch on the device. t_load: reading a
    batch in a random order through `ordering.input.batches`, or by a NumPy gather without
    TensorFlow, and moving it to the device. Each is the median of `rounds` means over `per_round`,
    for batches that are read in parallel arrive in bursts; a first round warms up. In a run loads
    and steps share the cores, and data may not be in memory, which this leaves out.
    """
    count, size = len(task.train["y"]), recipe.units_per_step * recipe.unit_size
    if not 1 <= size <= count:
        raise ValueError(
            f"--units_per_step x --unit_size is {size}: {task.name} has {count} training examples; "
            "pass numbers whose product is from 1 to that."
        )
    generator, wanted = np.random.default_rng(0), size * per_round * (rounds + 1)
    order = np.concatenate([generator.permutation(count) for _ in range(-(-wanted // count))])
    indices = order[:wanted]
    try:
        read, source = ordering.input.batches(task.train, indices, batch_size=size), "tf.data"
    except ImportError:
        parts, source = indices.reshape(-1, size), "NumPy gather"
        read = (jax.tree.map(lambda x, i=i: x[i], task.train) for i in parts)
    batch = jax.device_put(jax.tree.map(lambda x: x[:size], task.train))
    take = momentum_step(task.model)

    def seconds(call):
        return medians({"": lambda: [call() for _ in range(per_round)][-1]}, rounds)[""] / per_round

    load = seconds(lambda: jax.block_until_ready(jax.device_put(next(read))))
    step = seconds(lambda: take(batch))
    return Speed(load, step, f"{task.name}, batch {size}, measured here, {source}")


def main(values: flags.FlagValues) -> None:
    try:
        ratios = [float(r) for r in values.ratios]
    except ValueError:
        ratios = []
    if not ratios or not all(1 <= r < 1000 for r in ratios):
        raise app.UsageError(f"--ratios has {values.ratios}: pass numbers >= 1.")
    step, repeats = stepper(values.step_ms / 1e3), values.repeats or REPEATS
    publish(bench_rows(step, ratios, steps=values.steps, repeats=repeats), values.jsonl)
