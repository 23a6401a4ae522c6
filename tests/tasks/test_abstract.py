"""Abstract tasks: shapes of the published sizes, without data."""

import jax
import numpy as np
import pytest

from experiments.tasks import TASKS
from tests.shared_data import need

MODELS = {
    "digits": ("softmax",),
    "hmda": ("logistic",),
    "m4_weekly": ("mlp",),
    "mnist": ("softmax", "lenet"),
    "sst2": ("head",),
    "tinyshakespeare": ("gpt2",),
    "wikitext103": ("gpt2",),
    "wikitext2": ("lstm",),
    "wikitext2_small": ("lstm", "gpt2"),
}


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), tree)


@pytest.mark.parametrize("name,model", [(name, model) for name in MODELS for model in MODELS[name]])
def test_an_abstract_task_has_the_shapes_that_its_model_takes(name, model):
    task = TASKS[name](model=model, abstract=True)
    assert task.name == name and task.optimum is None
    for part in (task.train, task.test):
        few = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype), part
        )
        params, key = jax.eval_shape(task.model.init, jax.random.key(0)), jax.random.key(0)
        if name != "m4_weekly" or part is task.train:  # its test set is rolled out
            assert jax.eval_shape(task.model.loss, params, few, key).shape == (2,)


@pytest.mark.parametrize(
    "name,folder,model",
    [
        ("digits", None, "softmax"),
        ("m4_weekly", "m4", "mlp"),
        ("tinyshakespeare", "tinyshakespeare", "gpt2"),
        ("wikitext2_small", "wikitext2", "lstm"),
        ("wikitext2_small", "wikitext2", "gpt2"),
    ],
)
def test_abstract_tasks_are_as_large_as_the_real_ones(name, folder, model):
    real = TASKS[name](folder and need(folder), model)
    abstract = TASKS[name](model=model, abstract=True)
    assert shapes(abstract.train) == shapes(real.train)
    assert shapes(abstract.test) == shapes(real.test)
    inits = [jax.eval_shape(task.model.init, jax.random.key(0)) for task in (real, abstract)]
    assert shapes(inits[0]) == shapes(inits[1])
