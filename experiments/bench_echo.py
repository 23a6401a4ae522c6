r"""Does echoing hide slow input as predicted? Runs with a slow loader against runs without a delay.

    python -m experiments.bench_echo                   # minutes; nothing else may run beside it
    python -m experiments.bench_echo --ratios=4 --steps=100 --repeats=1

A real loader (`load_ahead`) reads batches that take a declared delay of R t_step each:
gather, copy to the device, and sleep until the delay since the start is over. A real step (MLP with
momentum, jitted, repeated until it takes --step_ms) is waited for, on batches from
`echo_batches`. The CPU that the sleeping loader leaves free is what a network would leave.

Right before every run goes the same run without a delay (for "measured", which would then never
echo, that of error diffusion): its seconds per step are t_step, so that what slows the machine for
longer than two runs slows both. Columns, medians over the turns: measured, the seconds per step
over those of the run without delay, both from the first batch on; simulated,
`ordering.echo.echo_forecast` of the very same policy, steps and delay; table, the reference value,
simulated over far more steps. The coins have one key in all turns.

Nothing is subtracted from the times: `time.sleep` oversleeps by some 0.1 ms and a thread takes time
to wake, so loads take longer than declared, and error diffusion at p = 1/R stalls a little. Where
measured and in_run (the seconds of the run over those within its own steps) differ by more than a
few hundredths, the speed of the machine changed from run to run: measure again.
Aim: at R = 4 error diffusion takes at most 1.03 times as long as no delay.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import models
import ordering
from experiments.flag_values import definer
from experiments.timing import publish

FLAGS = flags.FLAGS
FEATURES, BATCH, EXAMPLES = 784, 64, 4096


class Row(NamedTuple):
    """A policy `(R, total_steps) -> EchoPlan | Measured`, its queue, and the reference by R."""

    label: str
    policy: Callable
    depth: int
    table: dict


def _diffused(factor, steps):
    return ordering.echo.error_diffusion(1 / factor, total_steps=steps)


def _coins(share):
    def make(factor, steps):
        return ordering.echo.bernoulli(share / factor, total_steps=steps, key=jax.random.key(0))

    return make


def _measured(factor, steps):
    return ordering.echo.measured(total_steps=steps, max_factor=round(4 * factor))


ROWS = (
    Row("error diffusion, p = 1/R", _diffused, 1, {2: 1.000, 4: 1.000, 8: 1.000}),
    Row("error diffusion, p = 1/R", _diffused, 2, {}),
    Row("Bernoulli, p = 1/R", _coins(1.0), 1, {2: 1.127, 4: 1.173, 8: 1.196}),
    Row("Bernoulli, p = 1/R", _coins(1.0), 4, {2: 1.052, 4: 1.072, 8: 1.085}),
    Row("Bernoulli, p = 1/R", _coins(1.0), 16, {2: 1.017, 4: 1.023, 8: 1.029}),
    Row("Bernoulli, p = 0.9/R", _coins(0.9), 8, {2: 1.003, 4: 1.009, 8: 1.014}),
    Row("measured, at most 4R uses", _measured, 1, {}),
)


class Run(NamedTuple):
    """One run, timed from its first batch on."""

    seconds_per_step: float
    in_run: float  # of all seconds, over those within steps
    loads: int


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define = definer(values)
    define(flags.DEFINE_integer, "steps", 400, "T of every run", lower_bound=2)
    define(flags.DEFINE_integer, "repeats", 3, "turns of every run", lower_bound=1)
    define(flags.DEFINE_list, "ratios", ["2", "4", "8"], "R, loads of so many steps' time")
    define(flags.DEFINE_float, "step_ms", 4.0, "what a step is made to take", lower_bound=0.1)
    define(flags.DEFINE_string, "output", None, "file for the rows as JSON lines; standard output "
           "if unset")  # fmt: skip


def stepper(step_seconds: float) -> Callable:
    """`batch -> None`: a step on one batch that takes about so long, and is waited for.

    The update is repeated within the step, as often as makes it that long: no model has a size for
    every machine. The state is donated, and kept here.
    """
    model = models.mlp(num_features=FEATURES, hidden=(128,), num_classes=10)
    optimizer = optax.sgd(1e-3, momentum=0.9)

    def step(params, state, batch, times):
        def update(_, carry):
            params, state = carry
            grads = jax.grad(lambda p: jnp.mean(model.loss(p, batch, None)))(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, times, update, (params, state))

    # One thread: a core stays with the loader, as if the step ran on an accelerator.
    options = {"xla_cpu_multi_thread_eigen": False} if jax.default_backend() == "cpu" else None
    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)
    params = jax.jit(model.init)(jax.random.key(0))
    held = [params, optimizer.init(params)]

    def call(batch, times):
        held[:] = jax.block_until_ready(jitted(*held, batch, times))

    batch = jax.device_put(next(slow_batches(0.0)))
    once, many = jnp.int32(1), jnp.int32(101)
    single = (_median_seconds(call, batch, many) - _median_seconds(call, batch, once)) / 100
    times = jnp.int32(max(1, round(step_seconds / single)))  # moved to the device once
    return lambda batch: call(batch, times)


def _median_seconds(call, *args):
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        call(*args)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def slow_batches(delay: float) -> Iterator[dict]:
    """Random batches on the device, without end, each `delay` seconds after it was asked for."""
    generator, examples = np.random.default_rng(0), _examples()
    while True:
        start = time.perf_counter()
        chosen = generator.integers(0, EXAMPLES, BATCH)
        batch = {name: values[chosen] for name, values in examples.items()}
        batch = jax.block_until_ready(jax.device_put(batch))
        time.sleep(max(0.0, start + delay - time.perf_counter()))
        yield batch


@functools.cache
def _examples():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": generator.integers(0, 10, EXAMPLES, np.int32)}


def timed(step: Callable, policy, *, depth: int, delay: float) -> Run:
    """Runs a policy to its end."""
    with ordering.input.load_ahead(slow_batches(delay), depth=depth) as loader:
        uses = ordering.echo.echo_batches(loader, policy)  # takes the first batch
        start, within, loads, steps = time.perf_counter(), 0.0, 0, 0
        for use in uses:
            begin = time.perf_counter()
            step(use.batch)
            within += time.perf_counter() - begin
            loads, steps = loads + use.fresh, steps + 1
        total = time.perf_counter() - start
        return Run(total / steps, total / within, int(loads))


def measure(step: Callable, ratios: Sequence[float], *, steps: int, repeats: int) -> list[dict]:
    """One row per R and policy, all measured in turns."""
    policies = {r: [row.policy(r, steps) for row in ROWS] for r in ratios}
    found = {(r, i): [] for r in ratios for i in range(len(ROWS))}
    timed(step, _diffused(2, 20), depth=1, delay=0.0)  # warms up what is not the step
    for _ in range(repeats):
        for ratio in ratios:
            for i, (row, policy) in enumerate(zip(ROWS, policies[ratio], strict=True)):
                plan = _diffused(ratio, steps) if policy.online else policy
                base = timed(step, plan, depth=row.depth, delay=0.0).seconds_per_step
                pace = {"load_seconds": ratio * base, "step_seconds": base}
                run = timed(step, policy, depth=row.depth, delay=ratio * base)
                cost = ordering.echo.echo_forecast(policy, depth=row.depth, **pace)
                measured = run.seconds_per_step / base
                share = run.loads / steps
                found[ratio, i].append((base, share, measured, run.in_run, cost.slowdown))
    rows = []
    for (ratio, i), turns in found.items():
        base, share, measured, in_run, simulated = map(statistics.median, zip(*turns, strict=True))
        rows.append({
            "part": "echo", "R": ratio, "policy": ROWS[i].label, "depth": ROWS[i].depth,
            "step_ms": round(1e3 * base, 3), "loads_per_step": round(share, 4),
            "measured": round(measured, 3), "in_run": round(in_run, 3),
            "simulated": round(simulated, 3), "table": ROWS[i].table.get(ratio, "-"),
        })  # fmt: skip
    return rows


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    try:
        ratios = [float(r) for r in values.ratios]
    except ValueError:
        ratios = []
    if not ratios or not all(1 <= r < 1000 for r in ratios):
        raise app.UsageError(f"--ratios has {values.ratios}: pass numbers >= 1.")
    step = stepper(values.step_ms / 1e3)
    publish(measure(step, ratios, steps=values.steps, repeats=values.repeats), values.output)


def run() -> None:
    define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
