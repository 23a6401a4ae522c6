"""Abstract tasks: shapes of the published sizes, without data."""

import jax
import numpy as np
import pytest

from experiments.data import TASKS
from syncopate.refusals import UserError
from tests.shared_data import need


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), tree)


# Where the data of the sets lie that are compared, and further models; others need none.
FOLDERS = {
    "mnist": "tfds",
    "m4_weekly": "m4",
    "tinyshakespeare": "tinyshakespeare",
    "wikitext2_small": "wikitext2",
}
MODELS = {"mnist": "lenet"}
CASES = [(name, MODELS.get(name)) for name in TASKS] + [("wikitext2_small", "gpt2")]


@pytest.mark.parametrize("name,model", CASES)
def test_abstract_tasks_are_as_large_as_the_real_ones(name, model):
    chosen = {} if model is None else {"model": model}
    abstract = TASKS[name](abstract=True, **chosen)
    assert abstract.name == name and abstract.optimum is None
    try:
        real = TASKS[name](need(FOLDERS[name]) if name in FOLDERS else None, **chosen)
    except UserError as error:
        assert name not in FOLDERS and "data_dir" in str(error)
        return
    assert shapes(abstract.train) == shapes(real.train)
    assert shapes(abstract.test) == shapes(real.test)
    inits = [jax.eval_shape(task.model.init, jax.random.key(0)) for task in (real, abstract)]
    assert shapes(inits[0]) == shapes(inits[1])
