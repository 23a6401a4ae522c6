"""plain.py by four workers that meet where QSR says; the judge is shown their mean."""

import functools

import jax
import numpy as np
import plain
from plain import data_selection, get_batch_size  # noqa: F401

from syncopate import local_opt

WORKERS = 4  # simulated, or on devices: local_opt.lift takes a mesh


@functools.partial(jax.jit, static_argnums=0)
def train_step(workload, params, model_state, adam, batch, rate, rng):
    def of_one(params, model_state, adam, batch, rate, rng):
        return plain.train_step(workload, params, model_state, adam, batch, rate, rng)

    lifted = local_opt.lift(
        of_one, WORKERS, "owned owned owned split shared shared -> owned owned owned"
    )
    return lifted(params, model_state, adam, batch, rate, rng)


@jax.jit
@functools.partial(local_opt.lift, workers=WORKERS, roles="owned -> owned")
def sync(params):
    return local_opt.synchronize(params)


def init_optimizer_state(workload, model_params, model_state, hyperparameters, rng):
    state, _ = plain.init_optimizer_state(workload, model_params, model_state, hyperparameters, rng)
    steps = workload.step_hint
    rates = np.array([plain.rate_at(workload, hyperparameters, step) for step in range(steps)])
    alpha = 2 * hyperparameters.learning_rate
    plan = local_opt.qsr(rates, total_steps=steps, alpha=alpha, h_base=4)
    own = {"params": model_params, "model_state": model_state, "adam": state["adam"]}
    return local_opt.owned(own, WORKERS), {"plan": plan}


def update_params(**given):
    """Workers' parameters are in the state: what the judge holds waits for `prepare_for_eval`."""
    (state, kept), step = given["optimizer_state"], given["global_step"]
    rate = plain.rate_at(given["workload"], given["hyperparameters"], step)
    params, adam, model_state = train_step(
        given["workload"], state["params"], state["model_state"], state["adam"], given["batch"],
        rate, given["rng"],
    )  # fmt: skip
    plan = kept["plan"]
    if step >= plan.total_steps or plan.syncs_after(step):
        params = sync(params)
    found = {"params": params, "model_state": model_state, "adam": adam}
    return (found, kept), given["current_param_container"], given["model_state"]


def prepare_for_eval(**given):
    state, _ = given["optimizer_state"]
    shown = local_opt.consolidate({k: state[k] for k in ("params", "model_state")})
    return given["optimizer_state"], shown["params"], shown["model_state"]
