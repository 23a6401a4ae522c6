"""Generalized primal averaging equals its equations, alone and inside local steps."""

import jax
import numpy as np
import optax
import pytest

import local_opt
from tests import reference_presets
from tests.problems import (
    MATRICES,
    PLAN,
    START,
    TARGETS,
    distance,
    flat,
    run_squares,
    square_gradient,
    square_step,
)
from tests.refused import refuses

ADAMW = optax.adamw(0.1, b1=0.9, b2=0.99, weight_decay=0.2)


@pytest.mark.parametrize("mu_x,mu_y", [(0.9, 0.7), (0.0, 0.5), (0.95, 1.0)])
def test_gpa_equals_its_equations(mu_x, mu_y):
    opt = optax.chain(optax.clip(1e6), local_opt.gpa(ADAMW, mu_x=mu_x, mu_y=mu_y))
    y, state, step = START, opt.init(START), jax.jit(square_step(opt))
    found = []
    for t in range(12):
        y, state = step(y, state, MATRICES[0], TARGETS[t, 0])
        found.append([flat(y), flat(local_opt.gpa_eval_params(state, y))])
    expected = reference_presets.primal_averaging(
        flat(START), lambda t, x: square_gradient(0, t, x), 12, 0.1, 0.2, mu_x, mu_y
    )
    assert distance(np.swapaxes(found, 0, 1), expected) < 1e-5


def test_workers_meet_in_all_of_gpa():
    """The mean of x is x of the means; if z stayed local, it would undo a sync."""
    opt = local_opt.local_steps(local_opt.gpa(ADAMW), PLAN, opt_state={"z": "mean"})
    history, state = run_squares(opt)
    w = {"b": history[-1][:, :2], "w": history[-1][:, 2:].reshape(-1, 2, 2)}
    for tree in (w, state.rounds.inner.z):
        local_opt.check_synced(tree)
    each = jax.vmap(local_opt.gpa_eval_params)(state, w)
    one = local_opt.gpa_eval_params(local_opt.consolidate(state), local_opt.consolidate(w))
    assert distance(one, local_opt.consolidate(each)) < 1e-6
    with pytest.raises(ValueError, match=r"local_opt.gpa computes .*'z'.*\{'z': 'mean'\}"):
        local_opt.local_steps(local_opt.gpa(ADAMW), PLAN).init(START)


test_bad_gpa_is_refused = refuses({
    "mu_x": (lambda: local_opt.gpa(ADAMW, mu_x=1.0), "mu_x is 1.0"),
    "mu_y": (lambda: local_opt.gpa(ADAMW, mu_y=0.0), "mu_y is 0.0"),
    "params": (
        lambda: local_opt.gpa(ADAMW).update(START, local_opt.gpa(ADAMW).init(START)), "z differs"
    ),
    "state": (
        lambda: local_opt.gpa_eval_params(ADAMW.init(START), START), "without gpa's: pass that"
    ),
})  # fmt: skip
