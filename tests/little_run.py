"""A little run of all three decisions, 60 steps, that test_train and test_resume share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.training import config, program, run
from local_opt import runners
from tests.test_one_loop import RECIPE, STEPS, WORKERS, task

# Pairs are split over steps, and the last step of an epoch has two units.
UNITS, PER_STEP = 11, 3
SETTING = RECIPE._replace(
    schedule="cosine", floor=0.01, warmup_steps=3, h_base=2, growth=1.5, echo_factor=3
)
SIZES = config.Sizes(WORKERS, UNITS, PER_STEP, 1)
STREAMED = {"reads": "thread"}


def plans_of(sync="qsr", echo="diffusion_cosine", seed=0, **fields):
    own = config.config_of(SETTING._replace(**fields), SIZES, seed=seed)
    return config.plans_of(own, SYNC_RULES[sync], ECHO_POLICIES[echo], rate=0.3)


@functools.cache
def built(order="cd_grab", sync="qsr", reads=None, mesh=False):
    mesh = runners.worker_mesh(WORKERS) if mesh else None
    rounds = SYNC_RULES[sync].rounds
    return program.build(task(), SETTING, ORDERS[order], rounds, reads=reads, mesh=mesh, epochs=15)


def sums(state):
    """In place of an evaluation: a number that every bit of the parameters changes."""
    leaves = map(np.asarray, jax.tree.leaves(jax.device_get(state.params)))
    return {"train/loss": float(sum(np.abs(leaf, dtype=np.float64).sum() for leaf in leaves))}


def trained(prepared, plans, **options):
    found = []
    given = {"seed": 0, "evaluate": sums, "evaluate_at": range(12, STEPS, 12)} | options
    outcome = run.train(prepared, plans, on_record=found.append, **given)
    return outcome, found


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
    return [prepared.steps(*kind, False)._cache_size() for kind in STEPS_OF] + [
        prepared.ends(*kind)._cache_size() for kind in ENDS_OF
    ]


STEPS_OF = [(True, 3), (True, 2), (False, 3), (False, 2)]  # fresh, units
ENDS_OF = [(True, False), (False, True), (True, True)]  # sync, epoch_end
