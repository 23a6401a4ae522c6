"""Settings and batches that models refuse, and the messages."""

import math

import jax
import jax.numpy as jnp
import pytest

import models
from tests.refused import refuses

LSTM = {"vocab_size": 13, "width": 6, "depth": 2}
DECODER = {"vocab_size": 13, "context": 5, "width": 16, "depth": 1, "heads": 2}
VIT = {"image_shape": (4, 4, 3), "num_classes": 3, "patch": 2, "width": 16, "heads": 2}
FORECASTER = {"lags": 1, "horizon": 1, "hidden": ()}
SMALL = {"depth": 8, "stem": "cifar", "norm": "group"}
# For each model: settings, and part of the message.
REFUSED = {
    "vit": [
        ({"patch": 5}, "patch is 5"),
        ({"image_shape": (0, 0, 3)}, r"image_shape is .*: pass \(height, width, channels"),
        ({"image_shape": (3, 3, 3)}, "patch is 4"),
        ({"width": 30}, "width is 30 with 4 heads"),
        (VIT | {"pool": "max"}, "pool is 'max': choose one of 'mean', 'class'"),
    ],
    "gpt2": [
        (DECODER | {"heads": 3}, "width is 16 with 3 heads"),
    ],
    "mobilenet_v2": [
        ({"stages": ((6, 24, 2, 3),)}, "stages is"),
    ],
    "resnet": [
        ({"depth": 19}, "depth is 19: choose one of 18, 34"),
        ({"image_shape": (31, 64, 3)}, "32 x 32"),
        ({"image_shape": (7, 7, 3), "depth": 18, "stem": "cifar"}, "8 x 8"),
        (SMALL | {"image_shape": (2, 8, 3)}, "4 x 4"),
        (SMALL | {"width": 9}, "width is 9: groups must divide"),
        ({"width": 20, "norm": "group"}, "width is 20: groups must divide"),
        ({"width": 4, "norm": "group", "image_shape": (32, 32, 3)}, "single value"),
    ],
    "lenet": [({"image_shape": (30, 30, 1)}, "LeNet takes 28 x 28 or 32 x 32")],
    "forecaster": [
        (FORECASTER | {"hidden": (3, 0)}, r"hidden is \(3, 0\): pass a tuple of whole numbers"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused(name):
    for settings, word in REFUSED[name]:
        with pytest.raises(ValueError, match=word):
            getattr(models, name)(**settings)


LOGISTIC = models.logistic_regression(num_features=4)
X, Y = jnp.ones((2, 4)), jnp.array([0, 1])


def loss(model=LOGISTIC, **batch):
    params = jax.eval_shape(model.init, jax.random.key(0))
    return lambda: jax.eval_shape(lambda p: model.loss(p, batch or None, None), params)


# With every other model and value in tests/project/test_bad_inputs.py.
test_batches_and_keys_are_named = refuses({
    "penalty": (lambda: models.mobilenet_v2(l2=math.nan), "l2 is nan: pass a finite"),
    "no batch": (loss(), "batch is .*: pass .*inputs.*labels"),
    "words": (loss(models.lstm(**LSTM), x=X, y=Y), "x is .*: pass an array of whole numbers in"),
    "key": (lambda: models.lstm(**LSTM).init(0.5), "key .*: pass a typed key"),
})  # fmt: skip


def solved(**changed):
    batch = {"x": jnp.ones((2, 1)), "y": jnp.array([0, 1])}
    given = {"model": models.logistic_regression(num_features=1, l2=1.0), "batch": batch}
    return lambda: models.optimum(**given | changed)


test_no_optimum = refuses({
    "no model": (solved(model=models.logistic_regression), "model is a function: pass a Model"),
    "no batch": (solved(batch={}), r"batch is \[\]: pass"),
})  # fmt: skip


def test_the_optimum_of_nan_is_no_number():
    batch = {"x": jnp.full((2, 1), jnp.nan), "y": jnp.array([0, 1])}
    with pytest.raises(RuntimeError, match="a gradient of nan .*leave examples with NaN out"):
        solved(batch=batch)()
