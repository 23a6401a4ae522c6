"""A little run that goes on with other workers: 40 units, 8 in a step of all, 60 steps."""

import contextlib
import functools
import os

import jax
import numpy as np
import pytest

from experiments.elastic import change, request
from experiments.processes import distributed, interrupts
from experiments.results import records
from experiments.studies.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.training import checkpoint, config, input, loop, program, run
from tests.little_run import SETTING
from tests.test_one_loop import STEPS, task

STEP = 8  # units
RULE = {"order": "cd_grab", "sync": "qsr", "echo": "none"}


def recipe_of(workers):
    return SETTING._replace(workers=workers, units_per_step=STEP // workers)


@functools.cache
def _built(workers, order, sync, reads):
    """What is compiled depends on no unit."""
    recipe, row = recipe_of(workers), ORDERS[order]
    first = config.sizes_of(task(), recipe_of(8), deals=row.deals)
    sizes = request._split(first, (8, 1), (workers, STEP // workers))
    return program.build(
        task(), recipe, row, SYNC_RULES[sync].rounds, reads=reads, epochs=15, sizes=sizes
    )


def built(workers, order="cd_grab", sync="qsr", reads=None, units=None):
    prepared = _built(workers, order, sync, reads)
    if units is None:
        return prepared
    if prepared.source is not None:
        return prepared._replace(source=prepared.source._replace(units=units))
    data = distributed.place(input.partition(task().train, prepared.sizes, units), None)
    return prepared._replace(data=data)


def prepare(folder, workers, *, policy=None, overwrite=False, units_per_step=None, **fields):
    """(plans, sizes, settings, units), as `train` has them before anything is compiled."""
    decisions = RULE | fields
    row, rule, echo = (
        table[decisions[name]]
        for name, table in (("order", ORDERS), ("sync", SYNC_RULES), ("echo", ECHO_POLICIES))
    )
    recipe = recipe_of(workers)
    recipe = recipe._replace(units_per_step=units_per_step or recipe.units_per_step)
    settings = {name: getattr(recipe, name) for name in ("workers", "units_per_step", "run")}
    settings |= decisions
    folder = str(folder)
    asked = request.asked(folder, settings, policy=policy, overwrite=overwrite)
    sizes = request.sizes_of(task(), recipe, asked, deals=row.deals)
    own = config.config_of(recipe, sizes[-1], seed=0)
    plans = config.plans_of(own, rule, echo, rate=0.3)
    this = change.Run(task(), recipe, row, rule.rounds, plans, 0)
    settings, units = change.carried_out(this, asked, sizes, folder, policy, None)
    records.open_folder(folder, settings)
    return plans, sizes[-1], settings, units


def go(folder, workers, *, policy=None, stop=None, reads=None, seen=None, **fields):
    """From where the run stands, to `stop` or to its end: (outcome, records).

    Args:
      seen: gets {step: the units of all workers' orders after it, by their numbers in the data}.
    """
    decisions = RULE | fields
    plans, _, settings, units = prepare(folder, workers, policy=policy, **fields)
    prepared = built(workers, decisions["order"], decisions["sync"], reads, units)
    checkpoints = os.path.join(folder, "checkpoints")
    saving = run.Saving(checkpoints, every=0, at_end=True, about=settings)
    found, last = [], []

    def look(state):
        last[:] = [numbers(state.orders.current, prepared, units)]
        return {}

    def on_record(record):
        found.append(record)
        if seen is not None:
            seen[record["step"]] = last[0]

    begun = checkpoint.latest(checkpoints)
    if begun and seen is not None:  # of the workers that go on
        orders = state_of(folder, begun)["orders"]
        seen[begun] = numbers(orders.get("pairs", orders)["current"], prepared, units)
    with asked_to_stop(begun, stop):
        outcome = run.train(
            prepared, plans, seed=0, evaluate=look, evaluate_at=range(0, STEPS),
            on_record=on_record, saving=saving,
        )  # fmt: skip
    assert outcome.step == (stop or STEPS) > begun
    return outcome, found


def numbers(current, prepared, units):
    """int[W, M], orders by the numbers of the whole set's units."""
    current = np.asarray(current)
    if prepared.dealt is not None:
        return current
    if units is None:
        units = np.arange(current.size).reshape(current.shape)
    return np.take_along_axis(units, current, axis=1)


@contextlib.contextmanager
def asked_to_stop(begun, stop):
    """The host looks at every step, and a signal has come in one of them."""

    @contextlib.contextmanager
    def caught():
        steps = iter(range(begun + 1, 10_000))
        yield lambda wants: (15 if next(steps) == stop else 0, wants)

    with pytest.MonkeyPatch.context() as patch:
        if stop is not None:
            patch.setattr(loop, "LEAST", 1)
            patch.setattr(loop, "MOST", 1)
            patch.setattr(interrupts, "caught", caught)
        yield


def state_of(folder, step):
    """The state of a checkpoint, in dicts."""
    tree = checkpoint.read_on_host(os.path.join(folder, "checkpoints", str(step)))[1]

    def data(x):
        typed = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if typed else x)

    return jax.tree.map(data, tree)
