"""Abstract tasks: shapes of the published sizes, without data."""

import jax
import numpy as np
import pytest

from experiments.data import TASKS
from tests.shared_data import need


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), tree)


@pytest.mark.parametrize(
    "name,folder,model",
    [
        ("digits", None, "softmax"),
        ("mnist", "tfds", "lenet"),
        ("m4_weekly", "m4", "mlp"),
        ("tinyshakespeare", "tinyshakespeare", "gpt2"),
        ("wikitext2_small", "wikitext2", "lstm"),
        ("wikitext2_small", "wikitext2", "gpt2"),
    ],
)
def test_abstract_tasks_are_as_large_as_the_real_ones(name, folder, model):
    real = TASKS[name](folder and need(folder), model)
    abstract = TASKS[name](model=model, abstract=True)
    assert abstract.name == name and abstract.optimum is None
    assert shapes(abstract.train) == shapes(real.train)
    assert shapes(abstract.test) == shapes(real.test)
    inits = [jax.eval_shape(task.model.init, jax.random.key(0)) for task in (real, abstract)]
    assert shapes(inits[0]) == shapes(inits[1])
