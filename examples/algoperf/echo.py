"""plain.py, which loads a batch in every second step and uses it again in the others."""

import plain
from plain import get_batch_size, prepare_for_eval  # noqa: F401

from syncopate import ordering

LOADS_PER_STEP = 1 / 2


def init_optimizer_state(workload, model_params, model_state, hyperparameters, rng):
    state, _ = plain.init_optimizer_state(workload, model_params, model_state, hyperparameters, rng)
    plan = ordering.echo.error_diffusion(LOADS_PER_STEP, total_steps=workload.step_hint)
    return state, {"plan": plan, "batch": None}


def update_params(**given):
    """As plain.py's, and keeps the batch: `data_selection` may not change any state."""
    (state, kept), params, model_state = plain.update_params(**given)
    return (state, kept | {"batch": given["batch"]}), params, model_state


def data_selection(workload, input_queue, optimizer_state, *rest):
    kept, step = optimizer_state[1], rest[3]
    fresh = step >= kept["plan"].total_steps or kept["plan"].fresh[step]
    return next(input_queue) if fresh else kept["batch"]
