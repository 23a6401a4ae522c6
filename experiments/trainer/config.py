"""What a run is made of before it begins: sizes, what its decisions depend on, and its plans.

Shape letters: W workers, M units per worker, B units per worker and step, S examples per unit.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from experiments.data import shards
from experiments.data.base import SEED, Recipe, Task, check, check_recipe, size_of
from syncopate.refusals import UserError

EXAMPLES, UNITS = "examples", "units"  # of the whole training set


class Sizes(NamedTuple):
    workers: int  # W
    num_units: int  # M, per worker
    units_per_step: int  # B, per worker and load
    unit_size: int  # S, examples
    shards: str = "equal"  # which examples a worker has; of data that are dealt: equal
    weights: tuple[float, ...] | None = None  # of the workers in means; None: equal

    @property
    def loads_per_epoch(self) -> int:
        return -(-self.num_units // self.units_per_step)

    @property
    def examples_per_step(self) -> int:
        return self.workers * self.units_per_step * self.unit_size


class OrderSetting(NamedTuple):
    """What an order may need to know about a run."""

    num_units: int  # M
    units_per_step: int  # B
    total: int | None = None  # units of the whole training set; None: W M
    gathers: str = "step"  # when workers tell each other the sketches of their pairs
    workers: int = 1  # W
    scores: Callable | None = None  # () -> float[total], of the units of the whole training set


class RunConfig(NamedTuple):
    """What a synchronisation rule or an echo policy may need to know about a run."""

    recipe: Recipe  # whose echo factor and horizon are those of this run
    rates: np.ndarray  # float64[T], learning rates as a factor of their peak
    seed: int  # of all coins of the run, shared by its workers
    fresh: np.ndarray | None = None  # bool[T], for rules that follow the loads
    loads_per_epoch: int | None = None  # for rules that follow the epochs; None: not known

    @property
    def key(self):
        """The key of the rules that draw random numbers."""
        import jax

        return jax.random.fold_in(jax.random.key(self.seed), 3)

    @property
    def total_steps(self) -> int:
        return len(self.rates)

    def plans(self, sync, echo, *, rate: float) -> "Plans":
        """The plans of a run, from rows of the two tables and a peak learning rate."""
        policy = echo.plan(self)
        fresh = None if policy.online else policy.fresh
        return Plans(sync.plan(self._replace(fresh=fresh)), policy, rate * self.rates)


class Plans(NamedTuple):
    """The decisions of a run, all of one length T."""

    sync: Any  # a SyncPlan; None: before every load but the first, and at the end
    echo: Any  # an EchoPlan, or what decides online
    rates: np.ndarray  # float64[T], learning rates

    @property
    def total_steps(self) -> int:
        return len(self.rates)

    def check(self) -> None:
        """Raises ValueError where the lengths differ, or another process has other plans."""
        for plan in [self.echo] if self.sync is None else [self.sync, self.echo]:
            if plan.total_steps != self.total_steps:
                raise UserError(
                    f"a plan has {plan.total_steps} steps and the run {self.total_steps}: make it "
                    "with the run's total_steps."
                )
            if not plan.online:
                plan.check_same()


def sizes_of(task: Task, recipe: Recipe, *, deals: str | None = None) -> Sizes:
    """The sizes of a run; ValueError where the data are too few for the workers.

    Of EXAMPLES that are dealt anew in every epoch the last ones, which fill no step, are left out.
    """
    check_recipe(recipe)
    shards.check(recipe.shards, recipe.workers)
    size = size_of(task.train)
    per_unit = recipe.workers * recipe.unit_size
    per_step = per_unit * recipe.units_per_step
    if per_step > size:
        raise UserError(
            f"{recipe.workers} workers with {recipe.units_per_step} units of {recipe.unit_size} "
            f"examples need at least {per_step} examples; the training set has {size}. Lower "
            "--workers, --units_per_step or --unit_size."
        )
    if deals == EXAMPLES:
        batch = recipe.units_per_step * recipe.unit_size
        return Sizes(recipe.workers, size // per_step * batch, batch, 1)
    if deals is not None:
        return Sizes(recipe.workers, size // per_unit, recipe.units_per_step, recipe.unit_size)
    workers, kind = recipe.workers, recipe.shards
    if kind == "by_class":
        shards.labels_of(task.train)
    units = shards.units_per_worker(kind, size // recipe.unit_size, workers)
    weights = shards.weights_of(kind, workers) if recipe.weights == "examples" else None
    return Sizes(workers, units, recipe.units_per_step, recipe.unit_size, kind, weights)


def left_out(task: Task, recipe: Recipe, arms: Iterable) -> list[str]:
    """Sentences on the examples that arms do not visit in an epoch, without repetition."""
    size, texts = size_of(task.train), []
    for deals in dict.fromkeys(arm.rows[0].deals for arm in arms):
        sizes = sizes_of(task, recipe, deals=deals)
        used = shards.units_used(sizes.shards, sizes.num_units, sizes.workers)
        if not (count := size - used * sizes.unit_size):
            continue
        which = f"{count} of {size:,} examples"
        if deals == EXAMPLES:
            texts.append(f"{which}, others in every epoch, fill no step")
        else:
            texts.append(f"{which} fill no unit of every worker, and are left out")
    return texts


@functools.lru_cache(maxsize=8)  # a large model takes seconds to trace, and every arm asks
def num_params(model) -> int:
    """D, without making any."""
    import jax

    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def seed_of(seed: int) -> np.uint32:
    """A seed of 32 bits; ValueError for another, which JAX would take modulo 2^32."""
    return np.uint32(check("seed", seed, SEED))


def total_steps_of(recipe: Recipe, sizes: Sizes) -> int:
    if recipe.total_steps is not None:
        return recipe.total_steps
    return recipe.epochs * sizes.loads_per_epoch


def config_of(recipe: Recipe, sizes: Sizes, *, seed: int, speed: float | None = None) -> RunConfig:
    """What plans of a run are made from, with the seed of their coins.

    In studies of slow input a load takes R steps, `speed`: the echo factor is then R, and 2 where
    no echo is free; at a larger factor the run has more steps, for echoed ones are shorter.
    """
    from experiments.data import schedules
    from syncopate.plans import MOST_STEPS
    from syncopate.schedules import evaluate_schedule

    check_recipe(recipe)
    total, factor = total_steps_of(recipe, sizes), recipe.echo_factor
    if speed is not None:
        factor = max(2, round(speed))
        total = total * factor // 2
    if total > MOST_STEPS:
        most = MOST_STEPS * total_steps_of(recipe, sizes) // total
        raise UserError(
            f"a run has {total:,} steps, and may have {MOST_STEPS:,}: pass at most "
            f"--total_steps={most} or --epochs={most // sizes.loads_per_epoch}."
        )
    if recipe.warmup_steps >= total:
        raise UserError(
            f"--warmup_steps is {recipe.warmup_steps} of {total} steps: a run has at least one "
            "step after its warmup. Raise --total_steps (or --epochs), or lower the warmup."
        )
    schedule = schedules.schedule(recipe, total, sizes.loads_per_epoch)
    return RunConfig(
        recipe=recipe._replace(echo_factor=factor, horizon=recipe.horizon or total),
        rates=evaluate_schedule(schedule, total, "lr"),
        seed=seed_of(seed),
        loads_per_epoch=sizes.loads_per_epoch,
    )


def plans_of(
    task: Task, recipe: Recipe, arm, *, rate=1.0, seed=0, speed: float | None = None
) -> Plans:
    """The plans of a run of an arm, made before it; seed and speed as of `config_of`."""
    order, sync, echo = arm.rows
    sizes = sizes_of(task, recipe, deals=order.deals)
    return config_of(recipe, sizes, seed=seed, speed=speed).plans(sync, echo, rate=rate)
