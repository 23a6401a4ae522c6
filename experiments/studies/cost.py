"""What a run costs, known before it: what is sent, the time on a machine, and operations."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend import core

import local_opt
from experiments.training.config import UNITS, Order, Sizes, SyncRule
from ordering.exchange import slice_size
from ordering.pair_balance import SHARED_BLOCK


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
      >>> from experiments.studies.tables import ORDERS
      >>> from experiments.training.config import Sizes
      >>> sizes = Sizes(workers=8, num_units=10, units_per_step=1, unit_size=16)
      >>> round(order_traffic(ORDERS["cd_grab"], sizes, 10**6)(10), 5)
      5.00296
      >>> round(order_traffic(ORDERS["sketch1024"], sizes, 10**6)(10), 5)
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
        epoch = (sizes.unit_loads - 1) * whole + last
        return epochs * epoch + (epoch if rest == sizes.unit_loads else rest * whole)

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
    blocks, rest = divmod(pairs * sizes.workers, SHARED_BLOCK)
    products = blocks * SHARED_BLOCK * (SHARED_BLOCK + 1) + rest * (rest + 1)
    return rows / 2 * padded / num_params + products / num_params


class Price(NamedTuple):
    """A machine, in steps of computation: what a load and an all-reduce take on it."""

    label: str
    load: float
    sync: float


def machines(load: float, sync: float) -> list[Price]:
    """The four machines whose input or network may be slow."""
    return [
        Price("fast input, fast network", 0, 0),
        Price(f"load {load:g} steps", load, 0),
        Price(f"sync {sync:g} steps", 0, sync),
        Price(f"load {load:g}, sync {sync:g} steps", load, sync),
    ]


def price(run: Sequence[dict], machine: Price) -> float:
    """Time in steps of computation, up to the last of a run's records.

    From record to record input is read beside steps and syncs, and the slower of both counts; what
    is sent comes between the steps.
    """
    names = ("step", "loads", "allreduces")
    steps, loads, sent = (np.diff([r[name] for r in run], prepend=0) for name in names)
    return float(np.maximum(steps + machine.sync * sent, machine.load * loads).sum())


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
