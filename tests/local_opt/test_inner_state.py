"""The inner optimizer's state is read and set under local steps as it is in optax without them."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import tree_utils

import local_opt

W, STEPS = 2, 3
PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(())}
RATE = optax.linear_schedule(0.1, 0.0, 10)
PLAN = local_opt.constant(2, total_steps=10)
INNERS = {
    "momentum": (optax.sgd(RATE, momentum=0.9), ("trace", "count")),
    "adamw": (optax.adamw(0.1), ("mu", "nu", "count")),
    "MultiSteps": (
        optax.MultiSteps(optax.sgd(RATE, momentum=0.9), 2).gradient_transformation(),
        ("trace", "count", "gradient_step", "mini_step", "acc_grads"),
    ),
    "inject_hyperparams": (
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
        ("trace", "count", "hyperparams", "learning_rate", "momentum"),
    ),
    "conditionally_mask": (optax.conditionally_mask(optax.sgd(0.1), lambda step: True), ("step",)),
}
by_inner = pytest.mark.parametrize("name", INNERS)


def states(inner, **options):
    """The states of all workers after some steps: of local steps, of local rounds, and alone."""
    opt = local_opt.local_steps(inner, PLAN, axis_name="worker", **options)
    rounds = local_opt.local_rounds(inner, axis_name="worker", **options)
    for some in (opt, rounds, inner):
        state = jax.vmap(lambda _, s=some: s.init(PARAMS))(jnp.arange(W))
        grads = jax.tree.map(lambda p: jnp.ones((W, *p.shape)), PARAMS)
        step = jax.vmap(lambda g, s, f=some.update: f(g, s, PARAMS)[1], axis_name="worker")
        for _ in range(STEPS):
            state = step(grads, state)
        yield state


def values(state, key):
    return [value for _, value in tree_utils.tree_get_all_with_path(state, key)]


@by_inner
def test_optax_finds_inner_fields_and_no_others_of_their_names(name):
    inner, keys = INNERS[name]
    steps, rounds, alone = states(inner)
    for key in keys:
        expected = values(alone, key)
        assert expected
        for state in (steps, rounds):
            jax.tree.map(np.testing.assert_array_equal, values(state, key), expected)
            if len(expected) == 1:
                found = tree_utils.tree_get(state, key)
                jax.tree.map(np.testing.assert_array_equal, found, expected[0])


def test_optax_sets_inner_fields():
    for state in states(INNERS["inject_hyperparams"][0]):
        new = tree_utils.tree_set(state, learning_rate=jnp.full(W, 0.5))
        assert tree_utils.tree_get(new, "learning_rate").tolist() == [0.5] * W
        assert jax.tree.structure(new) == jax.tree.structure(state)


def test_states_are_copied_and_pickled():
    steps, *_ = states(optax.adam(0.1))
    for copied in (copy.deepcopy(steps), pickle.loads(pickle.dumps(steps))):
        jax.tree.map(np.testing.assert_array_equal, copied, steps)


def test_an_outer_optimizer_of_the_same_kind_is_told_apart_by_the_field_inner():
    steps, rounds, alone = states(optax.sgd(0.1, momentum=0.9), outer=optax.sgd(1.0, momentum=0.5))
    for state in (steps, rounds):
        with pytest.raises(KeyError, match="Found multiple values for 'trace'"):
            tree_utils.tree_get(state, "trace")
        found = tree_utils.tree_get(tree_utils.tree_get(state, "inner"), "trace")
        jax.tree.map(np.testing.assert_array_equal, found, tree_utils.tree_get(alone, "trace"))
