"""What a run costs, known before it: what is sent, the time on a machine, and operations."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

import local_opt
from experiments.study.tables import ECHO_POLICIES
from experiments.study.words import Order, SyncRule
from experiments.tasks.base import Recipe, Task
from experiments.training.config import (
    UNITS,
    Plans,
    RunConfig,
    Sizes,
    config_of,
    plans_of,
    sizes_of,
)
from ordering import echo
from ordering.exchange import slice_size
from ordering.kernel import BLOCK


def traffic(
    order: Order, rule: SyncRule, sizes: Sizes, num_params: int, *, sync_in_step: bool
) -> Callable[[int, int], float]:
    """`(rounds, loads) -> what a worker has sent`, in all-reduces of float32 parameters.

    A sync sends one, or the share of it that its wire leaves.

    Args:
      order, sizes, num_params, sync_in_step: as of `order_traffic`; rule: a row of SYNC_RULES.
    """
    of_order = order_traffic(order, sizes, num_params, sync_in_step=sync_in_step)
    sent = functools.partial(local_opt.sync_bytes, num_params, num_workers=sizes.workers)
    share = sent(wire=rule.wire) / sent() if rule.wire and sizes.workers > 1 else 1
    return lambda rounds, loads: share * rounds + of_order(loads)


def order_traffic(
    order: Order, sizes: Sizes, num_params: int, *, sync_in_step: bool = False
) -> Callable[[int], float]:
    """`loads -> what a worker has sent for its order after so many`, in all-reduces.

    Independent orders send nothing. Orders that are dealt send their signs at an epoch's end, a bit
    for a pair. Sketches of k numbers are gathered, one for a pair: k W / 2 D of an all-reduce. Of
    an exact coordinated order every fresh step exchanges its rows, n / 2 all-reduces for n of them,
    and adds up the inner products of its pairs over the workers. With one unit per step, where
    workers meet in every step, the mean gradient comes out of the exchange of the rows, which then
    costs nothing.

    Args:
      order: a row of ORDERS; sizes: of the run; num_params: D, of the model.
      sync_in_step: whether the mean gradient is taken in every step.

    Example:
      >>> from experiments.study.tables import ORDERS
      >>> from experiments.training.config import Sizes
      >>> sizes = Sizes(workers=8, num_units=10, units_per_step=1, unit_size=16)
      >>> round(order_traffic(ORDERS["cd_grab"], sizes, 10**6)(10), 5)
      5.00296
      >>> round(order_traffic(ORDERS["cd_grab+sketch1024"], sizes, 10**6)(10), 5)
      0.02048
      >>> order_traffic(ORDERS["rr"], sizes, 10**6)(10)
      0.0
    """
    if sizes.workers == 1:
        return lambda loads: 0.0
    of_pairs = _pair_traffic(order, sizes, num_params, sync_in_step=sync_in_step)
    told = math.ceil(sizes.num_units // 2 / 8) if order.deals == UNITS else 0  # bytes
    of_signs = told * sizes.workers / (8 * num_params)
    return lambda loads: of_pairs(loads) + loads // sizes.loads_per_epoch * of_signs


def _pair_traffic(order, sizes, num_params, *, sync_in_step) -> Callable[[int], float]:
    """The same of what the order looks at."""
    if not order.coordinated:
        return lambda loads: 0.0
    if order.sketch:
        per_pair = min(order.sketch, num_params) * sizes.workers / 2 / num_params
        epoch, step = sizes.num_units // 2, sizes.units_per_step / 2

        def gathered(loads: int) -> float:
            epochs, rest = divmod(loads, sizes.loads_per_epoch)
            return per_pair * (epochs * epoch + min(epoch, math.floor(rest * step)))

        return gathered
    whole = step_traffic(sizes.units_per_step, sizes, num_params)
    if sync_in_step and sizes.units_per_step == 1:
        whole -= slice_size(num_params, sizes.workers) * sizes.workers / num_params / 2
    tail = sizes.num_units % sizes.units_per_step
    last = step_traffic(tail, sizes, num_params) if tail else whole

    def allreduces(loads: int) -> float:
        epochs, rest = divmod(loads, sizes.loads_per_epoch)
        return epochs * ((sizes.loads_per_epoch - 1) * whole + last) + rest * whole

    return allreduces


def step_traffic(size: int, sizes: Sizes, num_params: int) -> float:
    """The same of one fresh step with `size` units per worker.

    An even number of units per step sends the differences of its pairs, an odd one all gradients.
    Pairs are signed in blocks of b, whose b (b + 1) products take one reduction.
    """
    splits = sizes.units_per_step % 2
    pairs = (size + splits) // 2
    if not pairs:
        return 0.0
    rows = size if splits else pairs
    padded = slice_size(num_params, sizes.workers) * sizes.workers
    blocks, rest = divmod(pairs * sizes.workers, BLOCK)
    products = blocks * BLOCK * (BLOCK + 1) + rest * (rest + 1)
    return rows / 2 * padded / num_params + products / num_params


class Machine(NamedTuple):
    """What the parts of a run take on a machine, in seconds or any other unit.

    Numbers, or arrays that broadcast.

    Fields:
      step: of computation; load: of reading a batch, beside the steps.
      sync: of an all-reduce of the parameters, which nothing hides; latency: its share that does
        not depend on the bytes.
      ordered: how many times longer a fresh step is with an order; parameters: D, of the model.
      label: for people.
    """

    step: Any = 1.0
    load: Any = 0.0
    sync: Any = 0.0
    latency: Any = 0.0
    ordered: float = 1.0
    parameters: float = 1.0
    label: str = ""

    @property
    def ratio(self) -> float:
        """R, steps that a load takes."""
        return self.load / self.step


def machines(load: float, sync: float) -> list[Machine]:
    """The four machines whose input or network may be slow, in steps of computation."""
    return [
        Machine(label="fast input, fast network"),
        Machine(load=load, label=f"load {load:g} steps"),
        Machine(sync=sync, label=f"sync {sync:g} steps"),
        Machine(load=load, sync=sync, label=f"load {load:g}, sync {sync:g} steps"),
    ]


def time(machine: Machine, *, steps, loads, rounds=0, sent=0, ordered: bool = False):
    """What so much of a run takes: max(steps + what is sent, loads).

    s (T + (o - 1) loads) + y rounds + (y - l) sent, or load loads if that is more: input is read
    beside everything else, and what is sent comes between the steps.

    Args:
      steps, loads, rounds: numbers, or arrays that broadcast.
      sent: besides the syncs, in all-reduces, without their latency; ordered: whether fresh steps
        observe an order.
    """
    longer = (machine.ordered - 1) * loads if ordered else 0
    sending = machine.sync * rounds + (machine.sync - machine.latency) * sent
    return np.maximum(machine.step * (steps + longer) + sending, machine.load * loads)


def price(run: Sequence[dict], machine: Machine) -> float:
    """Time up to the last of a run's records; from each to the next the slower part counts."""
    names = ("step", "loads", "allreduces")
    steps, loads, sent = (np.diff([r[name] for r in run], prepend=0) for name in names)
    return float(time(machine, steps=steps, loads=loads, sent=sent).sum())


def _whole(ratio):
    return math.ceil(ratio - 1e-9)  # R is a quotient: 0.9 / 0.3 is a little more than 3


# A row of ECHO_POLICIES, and its echo factor at R >= 1; a new one is one row.
POLICIES = {
    "no echo": ("none", _whole),
    "fixed, e = ceil(R)": ("fixed", _whole),
    "Bernoulli, p = 1/R": ("bernoulli", float),
    "Bernoulli, p = 0.9/R": ("bernoulli", lambda ratio: ratio / 0.9),
    "error diffusion, p = 1/R": ("diffusion", float),
    "cosine from 1 to 1/R, diffused": ("diffusion+cosine", float),
    "measured, at most 4R uses": ("measured", _whole),
}


def policy_of(label: str, ratio: float, total_steps: int):
    """The echo policy of a row of POLICIES at R >= 1."""
    (name, factor), key = POLICIES[label], jax.random.key(0)
    if label.startswith("Bernoulli"):  # the coins of what is published
        return echo.bernoulli(1 / factor(ratio), total_steps=total_steps, key=key)
    own = {"echo_factor": factor(ratio), "horizon": total_steps}
    return ECHO_POLICIES[name].make(RunConfig(np.ones(total_steps), key, **own))


class Run(NamedTuple):
    """What is decided before a run, or by a simulated clock.

    Fields:
      sizes, plans: of the run; echo: its plan, of a policy that decides online that of the clock.
      seconds: of computation and of waiting for input.
    """

    sizes: Sizes
    plans: Plans
    echo: echo.EchoPlan
    seconds: float

    @property
    def steps(self) -> int:
        return self.plans.total_steps

    @property
    def rounds(self) -> int:
        return self.echo.loads if self.plans.sync is None else self.plans.sync.rounds


def run_of(
    task: Task, recipe: Recipe, rows: tuple, speed: float | None, step_seconds: float
) -> Run:
    """What is decided before the run of an arm.

    Args:
      rows: its order, rule and echo policy; speed: R of the input, or None if it is not slow.
    """
    order, rule, policy = rows
    sizes = sizes_of(task, recipe, deals=order.deals)
    plans = plans_of(config_of(recipe, sizes, seed=0, speed=speed), rule, policy, rate=1.0)
    if speed is None and not policy.online:
        return Run(sizes, plans, plans.echo, plans.total_steps * step_seconds)
    load_seconds = (speed or 1) * step_seconds
    found = echo.echo_forecast(plans.echo, load_seconds=load_seconds, step_seconds=step_seconds)
    return Run(sizes, plans, found.plan, found.total_seconds)


def operations(function: Callable, *shapes) -> float:
    """Floating-point operations of one call, as XLA counts them before it optimises.

    XLA counts the body of a loop once: the other turns of every scan are added here. A loop whose
    length the program does not know, a `lax.while_loop`, still counts as one turn.

    Args:
      function: anything that `jax.jit` takes; shapes: its arguments, of which only shapes and
        dtypes matter.

    Example:
      A product with a 3 x 3 matrix takes 18 operations.

      >>> import jax, jax.numpy as jnp
      >>> step = lambda x: jnp.ones((3, 3)) @ x
      >>> scanned = lambda x: jax.lax.scan(lambda x, _: (step(x), None), x, length=10)[0]
      >>> operations(step, jnp.ones(3)), operations(scanned, jnp.ones(3)) >= 180
      (18.0, True)
    """
    return _counted(jax.make_jaxpr(function)(*shapes))


def _counted(program: core.ClosedJaxpr) -> float:
    total = _by_xla(program)
    for length, body in _scans(program.jaxpr):
        total += length * _counted(body) - _by_xla(body)
    return total


def _by_xla(program: core.ClosedJaxpr) -> float:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.in_avals]
    lowered = jax.jit(core.jaxpr_as_fun(program)).lower(*shapes)
    return float(lowered.cost_analysis()["flops"])


def _scans(program: core.Jaxpr) -> Iterator[tuple[int, core.ClosedJaxpr]]:
    """(length, body) of the scans that are in no other scan."""
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            yield equation.params["length"], equation.params["jaxpr"]
            continue
        for value in equation.params.values():
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, core.ClosedJaxpr | core.Jaxpr):
                    yield from _scans(getattr(part, "jaxpr", part))
