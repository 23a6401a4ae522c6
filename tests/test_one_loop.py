"""The one loop against the four it replaced: what they trained at commit 88b3bea is recorded.

A little task, 4 workers with 11 units, 3 per step, 60 steps: pairs are split over steps, and the
last step of an epoch is shorter. recorded/old_loops.npz holds orders at the start of every epoch,
parameters of all workers after 41 and 60 steps, and records.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import local_opt
from experiments.studies.tables import ORDERS, SYNC_RULES
from experiments.tasks.base import Recipe, Task
from experiments.training import loop, program
from experiments.training.config import Plans
from experiments.training.loop import Progress
from local_opt import runners
from ordering.echo import EchoPlan, measured
from syncopate import models

pytestmark = pytest.mark.usefixtures("optimised")

RECORDED = np.load(pathlib.Path(__file__).parent / "recorded" / "old_loops.npz")
WORKERS, STEPS = 4, 60
ORDER_NAMES = ("rr", "id_pair", "cd_grab")
SYNCS = ("parallel", "constant", "qsr", "accumulate")
ECHOES = ("none", "fixed", "diffusion_cosine", "replayed")
# The mean gradient and the optimizer are computed once for all workers, where each had its own
# copy and averaged sums of gradients: another sequence of float32 additions.
SHARED = 1e-6
RECIPE = Recipe(
    workers=WORKERS,
    units_per_step=3,
    unit_size=1,
    learning_rates=(0.3,),
    total_steps=STEPS,
    weight_decay=1e-3,
)


def task():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(46, 5)).astype(np.float32)
    data = {"x": x, "y": x[:, :3].argmax(axis=1).astype(np.int32)}
    model = models.softmax_regression(num_features=5, num_classes=3)

    def loss(params, batch, key):
        # What was recorded added a penalty of weight 0: XLA rounds other products together then.
        squares = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        return model.loss(params, batch, key) + 0.5 * 0.0 * squares

    return Task("random", model._replace(loss=loss), data, data, RECIPE)


def order_row(name):
    """D-RR draws other permutations now: the recorded ones are handed to it."""
    if name != "rr":
        return ORDERS[name]
    drawn = RECORDED["loop/orders"][0, 0, 0].astype(np.int32)  # no echo: the most epochs
    return ORDERS["rr"]._replace(on_host=lambda *_: lambda epoch: drawn[min(epoch, 14)])


@functools.cache
def built(order, sync, way):
    options = {"vmap": {}, "thread": {"reads": "thread"}, "tfdata": {"reads": "tfdata"}}
    options["mesh"] = {"mesh": runners.worker_mesh(WORKERS)}
    rounds = SYNC_RULES[sync].rounds
    return program.build(task(), RECIPE, order_row(order), rounds, epochs=15, **options[way])


def plans_of(sync, echo, online=False):
    fresh = RECORDED["loop/fresh"][ECHOES.index(echo)]
    ends = RECORDED["loop/sync_after"][SYNCS.index(sync)]
    starts = np.flatnonzero(np.append(True, ends[:-1]))
    policy = EchoPlan(fresh)
    if online:
        policy = measured(total_steps=STEPS, max_factor=STEPS, decided=fresh)
    return Plans(local_opt.SyncPlan(starts, STEPS), policy, RECORDED["loop/rates"])


def vectors(params):
    """float32[W, D] or, of shared parameters, [1, D]."""
    leaves = jax.tree.leaves(jax.device_get(params))
    rows = 1 if leaves[0].ndim == 1 else WORKERS
    return np.concatenate([leaf.reshape(rows, -1) for leaf in leaves], axis=1)


def trained(prepared, plans):
    """(orders at the start of every epoch, {step: parameters of all workers})."""
    orders, params = [], {}
    fresh = np.asarray(plans.echo.decided if plans.echo.online else plans.echo.fresh)
    begun = {int(step) + 1 for step in np.flatnonzero(fresh)[::4]}

    def hook(at, state):
        if at.step in begun:  # after the first step of an epoch
            orders.append(np.asarray(state.orders.current))
        if at.step in (41, STEPS):
            params[at.step] = vectors(state.params)
        return state

    stops = begun | {41, STEPS}
    loop.run(prepared, plans, prepared.init(0), Progress(), hook, seed=0, stops=stops)
    return np.stack(orders), params


CASES = [
    (order, sync, echo, "vmap") for order in ORDER_NAMES for sync in SYNCS for echo in ECHOES
] + [
    (order, sync, echo, way)
    for way in ("thread", "mesh")
    for order, sync in (("cd_grab", "parallel"), ("cd_grab", "qsr"), ("rr", "accumulate"))
    for echo in ("none", "diffusion_cosine")
]


@pytest.mark.parametrize("order,sync,echo,way", CASES)
def test_it_trains_what_the_general_loop_trained(order, sync, echo, way):
    place = ORDER_NAMES.index(order), SYNCS.index(sync), ECHOES.index(echo)
    orders, params = trained(built(order, sync, way), plans_of(sync, echo))
    begun = RECORDED["loop/epochs_begun"][place]
    np.testing.assert_array_equal(orders, RECORDED["loop/orders"][place][:begun])
    exact = way != "mesh" and sync != "parallel"
    for name, step in (("params_middle", 41), ("params", STEPS)):
        expected = RECORDED[f"loop/{name}"][place]
        np.testing.assert_allclose(
            np.broadcast_to(params[step], expected.shape), expected, rtol=0,
            atol=0 if exact else SHARED,
        )  # fmt: skip


@pytest.mark.parametrize("order,sync", [("cd_grab", "qsr"), ("id_pair", "parallel")])
def test_decisions_taken_online_are_replayed(order, sync):
    place = ORDER_NAMES.index(order), SYNCS.index(sync), ECHOES.index("replayed")
    orders, params = trained(built(order, sync, "thread"), plans_of(sync, "replayed", online=True))
    begun = RECORDED["loop/epochs_begun"][place]
    np.testing.assert_array_equal(orders, RECORDED["loop/orders"][place][:begun])
    np.testing.assert_allclose(
        params[STEPS][:1], RECORDED["loop/params"][place][:1], rtol=0, atol=SHARED
    )
