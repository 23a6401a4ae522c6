"""Runs side by side: one compiled program trains several, of other seeds and learning rates.

They are compiled once, and fill a device that one of them leaves idle; a CPU seldom is one
(`python -m experiments.bench --part=beside`). All that a run has gets a leading axis of runs; the
data and the plans are shared.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.processes import interrupts
from experiments.training import loop
from experiments.training.checkpoint import Evaluation
from experiments.training.clock import Clock
from experiments.training.config import Plans
from experiments.training.program import Program
from experiments.training.run import Recorder


def key_of(plans: Plans) -> tuple | None:
    """Equal for plans that can run side by side: all but the rates; None where none can."""
    if plans.echo.online:
        return None
    known = plans.digests()
    return plans.total_steps, known["sync"], known["echo"]


def lifted(program: Program) -> Program:
    """The same program of several runs: seeds for a seed, and rates[runs, T].

    Raises:
      ValueError: for a program whose batches are read, or whose workers have devices of their own.
    """
    if program.source is not None or program.sharding is not None:
        raise ValueError(
            "runs side by side share the data on one device: pass --side_by_side=1 with --run=mesh "
            "or where batches are read."
        )

    def init(seeds: Sequence[int]):
        states = [program.init(seed) for seed in seeds]
        return jax.device_put(jax.tree.map(lambda *x: jnp.stack(x), *states), jax.devices()[0])

    def orders_of(seeds: Sequence[int]) -> Callable:
        each = [program.orders_of(seed) for seed in seeds]
        return lambda epoch: np.stack([order_of(epoch) for order_of in each])

    def steps(*kind):
        return _over_runs(program.steps(*kind), (0, None, None, None, None, 0))

    return program._replace(
        init=init,
        steps=functools.cache(steps),
        ends=functools.cache(lambda *kind: _over_runs(program.ends(*kind), (0, 0))),
        orders_of=program.orders_of and orders_of,
        reset=_over_runs(program.reset, (0,)),
    )


@jax.jit
def _one(state, i):
    """The state of one run, to be looked at: without its keys, which are used once."""
    keyless = lambda x: not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: x[i] if keyless(x) else None, state)


def _over_runs(function, in_axes):
    return jax.jit(jax.vmap(function, in_axes=in_axes), donate_argnums=0)


def train(
    program: Program,
    several: Program,
    plans: Sequence[Plans],
    *,
    seeds: Sequence[int],
    evaluate: Callable[[int, object], dict],
    evaluate_at: Iterable[int],
    on_record: Callable[[int, dict], None],
    traffic: Callable[[int, int], float],
    ends: Sequence[Callable[[dict], bool]],
) -> int:
    """Trains runs side by side, each as `run.train` trains it alone.

    A run that diverges, or ends at its target, gets its last record; the others go on. There are no
    checkpoints: runs that a signal stopped begin again.

    Args:
      program, several: of one run, and `lifted`.
      plans, seeds, ends: of every run; the plans differ in their rates alone.
      evaluate: `(step, state of one run) -> scalars`.
      on_record: `(which run, record)`. Seconds are the run's share of all, and "side_by_side" says
        of how many.

    Returns:
      The signal that stopped them, or 0.
    """
    count, total = len(seeds), plans[0].total_steps
    if len({key_of(plan) for plan in plans}) > 1 or key_of(plans[0]) is None:
        raise ValueError("runs side by side have one plan of syncs and loads, known before them.")
    shared = plans[0]._replace(rates=np.stack([plan.rates for plan in plans]))
    shared.check()
    loop.warm_up(several, shared, several.init(seeds))
    looks = {int(step) for step in evaluate_at} | {total}
    here = 0  # the step that is evaluated

    def recorder(i):
        def write(record):
            on_record(i, record | {"side_by_side": count})

        own = lambda state: evaluate(here, state)  # noqa: E731
        return Recorder(program, own, write, traffic, ends[i], total, Evaluation())

    recorders = [recorder(i) for i in range(count)]
    clock, stopped = Clock(), 0

    def look(at, state):
        """Records of all runs that go on, and the state with new stats."""
        nonlocal here
        here, seconds = at.step, clock.now() / count
        with clock.stopped():
            for i, of in enumerate(recorders):
                if of.ended:
                    continue
                try:
                    of.record(at, _one(state, i), seconds)
                except FloatingPointError as error:
                    of.diverged(str(error))
        return several.reset(state)

    def hook(at, state):
        nonlocal stopped
        stopped, _ = ask(False)
        if at.step in looks:
            state = look(at, state)
        ended = all(of.ended for of in recorders)
        return loop.Stop(state) if stopped or ended else state

    with interrupts.caught() as ask:
        state, at = several.init(seeds), loop.Progress()
        if 0 in looks:
            state = look(at, state)
        loop.run(several, shared, state, at, hook, seed=tuple(seeds), stops=looks, clock=clock)
    return 0 if all(of.ended for of in recorders) else stopped
