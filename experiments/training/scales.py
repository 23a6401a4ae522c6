"""The scale of what a scaled order observes, from the optimizer of a run.

It is taken at the end of every epoch. Where workers synchronise in every step it is also taken
after 1, 2, 4, ... steps; under local steps at every sync, if the order observes sketches. The first
epoch of an exact order under local steps is not scaled.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np

import local_opt
import ordering
from experiments.tasks.base import Recipe, Task
from experiments.training import optimizers
from experiments.training.config import Sizes, num_params
from local_opt.workers import AXIS


def scale_of(
    task: Task, recipe: Recipe, rounds: local_opt.Rounds, sizes: Sizes, sketch: int | None, *,
    power: float,
) -> Callable:  # fmt: skip
    """`(state of rounds, params) -> scale` of one worker, the same for all of them.

    Raises ValueError for an optimizer without a second moment.

    Args:
      task: its data may be shapes; sketch: numbers of a sketch, of which the scale is for factors;
        power: of the second moment.
    """
    params = jax.eval_shape(task.model.init, jax.random.key(0))
    leaves = None
    if sketch is not None and sketch < num_params(task.model):
        loss, unit = ordering.grouped(task.model.loss), unit_of(task.train, sizes.unit_size)
        leaves = ordering.sketched_parameters(loss, params, unit, jax.random.key(0), size=sketch)
    of_state = functools.partial(ordering.scale_of, leaves=leaves, power=power)
    try:
        jax.eval_shape(of_state, jax.eval_shape(optimizers.inner(recipe).init, params), params)
    except ValueError as error:
        raise ValueError(
            f"--scale needs a second moment, and --optimizer={recipe.optimizer} has none: "
            f"pass --optimizer=adamw, or leave it out ({error})"
        ) from error

    def scale(state, params):
        if rounds.in_step:
            return of_state(state, params)
        return of_state(state.inner, params, axis_name=AXIS)

    return scale


def unit_of(train, unit_size: int):
    """The shapes of a batch of one unit."""
    few = train if isinstance(train, dict) else ordering.input.reader(train)[1](np.arange(1))
    shape = lambda x: jax.ShapeDtypeStruct((1, unit_size, *x.shape[1:]), x.dtype)  # noqa: E731
    return jax.tree.map(shape, few)
