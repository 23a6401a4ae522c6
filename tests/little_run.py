"""A little run of all three decisions, 60 steps of 4 workers with 11 units, 3 per step.

Pairs are split over steps, and the last step of an epoch has two units.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import models
from experiments.compare.arms import row_of
from experiments.data.base import Recipe, Task
from experiments.distributed.devices import worker_mesh
from experiments.trainer import checkpoint, config, measure, program
from experiments.trainer.train import Hooks, compile_and_train
from tests.sources import Rolled

WORKERS, STEPS, UNITS, PER_STEP = 4, 60, 11, 3
SETTING = Recipe(
    workers=WORKERS,
    units_per_step=PER_STEP,
    unit_size=1,
    learning_rates=(0.3,),
    total_steps=STEPS,
    weight_decay=1e-3,
    schedule="cosine",
    floor=0.01,
    warmup_steps=3,
    h_base=2,
    growth=1.5,
    echo_factor=3,
)
SIZES = config.Sizes(WORKERS, UNITS, PER_STEP, 1)
STREAMED = {"reads": "thread"}


def task():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(46, 5)).astype(np.float32)
    data = {"x": x, "y": x[:, :3].argmax(axis=1).astype(np.int32)}
    model = models.softmax_regression(num_features=5, num_classes=3)
    return Task("random", model, data, data, SETTING, recut=Rolled(data))


def plans_of(sync="qsr", echo="diffusion+cosine", seed=0, **fields):
    setting = config.config_of(SETTING._replace(**fields), SIZES, seed=seed)
    return setting.plans(row_of("sync", sync), row_of("echo", echo), rate=0.3)


@functools.cache
def built(order="cd_grab", sync="qsr", reads=None, mesh=False, **fields):
    mesh = worker_mesh(WORKERS) if mesh else None
    rounds = row_of("sync", sync).rounds
    optimizer = "adamw" if row_of("order", order).scaled else SETTING.optimizer
    setting = SETTING._replace(optimizer=optimizer, **fields)
    return program.build(task(), setting, row_of("order", order), rounds, reads=reads, mesh=mesh)


def sums(step, state):
    """In place of an evaluation: a number that every bit of the parameters changes."""
    leaves = map(np.asarray, jax.tree.leaves(jax.device_get(state.params)))
    return {"train/loss": float(sum(np.abs(leaf, dtype=np.float64).sum() for leaf in leaves))}


def trained(
    prepared,
    plans,
    *,
    evaluate=sums,
    evaluate_at=range(12, STEPS, 12),
    recorded=None,
    seed=0,
    **options,
):
    """(outcome, new records) of a run that goes on where it is saved, if it is."""
    results, begun = [], None
    if folder := options.get("folder"):
        begun = checkpoint.restore(folder, plans, prepared.shapes, records=recorded)
    hooks = Hooks(results.append, scalars_of(evaluate, evaluate_at))._replace(**options)
    return compile_and_train(prepared, plans, hooks, seed=seed, begun=begun), results


def scalars_of(evaluate, evaluate_at):
    """Of `(step, state) -> scalars`."""
    return measure.Scalars(
        lambda total: evaluate_at, lambda step, total, state: lambda: evaluate(step, state)
    )


def assert_same(one, other):
    def same(a, b):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)

    jax.tree.map(same, one, other)


def timeless(records):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def compiled(prepared):
    """How often what a run needs was compiled: steps, syncs and epochs' ends, by their kind."""
    programs = [prepared.steps(*kind) for kind in STEPS_OF] + [prepared.sync, prepared.epoch_end]
    return [program._cache_size() for program in programs]


STEPS_OF = [(True, 3), (True, 2), (False, 3), (False, 2)]  # fresh, units
