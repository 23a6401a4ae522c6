"""When a run of a study is evaluated, what is measured then, and whether that ends it."""

from collections.abc import Callable, Sequence

import numpy as np

from experiments.measures import evaluate
from experiments.results import statistics
from experiments.results.statistics import Criterion
from experiments.studies.bounds import bounds_of
from experiments.tasks.base import Recipe, Task
from experiments.training import config


def evaluation_steps(recipe: Recipe, sizes: config.Sizes, total: int) -> list[int]:
    """The steps after which a run is evaluated; the last one always is."""
    if recipe.evaluate_every is not None:
        steps = range(recipe.evaluate_every, total, recipe.evaluate_every)
    elif recipe.evaluations is not None:
        count = min(recipe.evaluations, total)
        steps = np.linspace(0, total, count + 1).astype(int)[1:].tolist()
    else:
        steps = range(0, total, sizes.loads_per_epoch)
    return sorted({*steps, total})


def ends_at(criterion: Criterion, kept: Sequence[dict] = ()) -> Callable[[dict], bool]:
    """`record -> whether the run has reached the target` on both halves of the test set.

    Args:
      kept: records of the run so far.
    """
    if criterion.when != "target":
        return lambda record: False
    seen = list(kept)

    def ends(record):
        seen.append(record)
        return all(statistics.reached(seen, c) for c in (criterion, statistics.tested(criterion)))

    return ends


def scalars_of(task: Task, recipe: Recipe, *, halves: bool = False) -> Callable:
    """`(program, row of ORDERS) -> (step, T, state) -> scalars`.

    Args:
      halves: the first half of the test set is "valid", which tunes, the other one "test"; and the
        training loss is that of as many examples.
    """
    examples = config.size_of(task.test) if halves else None
    measure = evaluate.evaluator(task, recipe, halves=halves, train_examples=examples)
    optimum = task.optimum() if task.optimum else None

    def of(built, order):
        bounds = bounds_of(task, recipe, built, order)
        every = recipe.bound_every * built.sizes.loads_per_epoch

        def scalars(step, total, state):
            params = built.mean_params(state)
            found = measure(params)
            if optimum is not None:
                found["train/above_optimum"] = found["train/loss"] - optimum
            if bounds and (step == total or not step % every):
                found |= bounds(params, state.orders.current)
            return found

        return scalars

    return of
