"""Settings that models refuse; each bad argument: tests/project/test_bad_inputs.py."""

import jax.numpy as jnp
import pytest

import models

DECODER = {"vocab_size": 13, "context": 5, "width": 16, "depth": 1, "heads": 2}
SMALL = {"depth": 8, "stem": "cifar", "norm": "group"}
# For each model: settings, and part of the message.
REFUSED = {
    "vit": [
        ({"patch": 5}, "patch is 5"),
        ({"image_shape": (0, 0, 3)}, r"image_shape is .*: pass \(height, width, channels"),
        ({"image_shape": (3, 3, 3)}, "patch is 4"),
        ({"width": 30}, "width is 30 with 4 heads"),
    ],
    "gpt2": [(DECODER | {"heads": 3}, "width is 16 with 3 heads")],
    "mobilenet_v2": [({"stages": ((6, 24, 2, 3),)}, "stages is")],
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
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused(name):
    for settings, word in REFUSED[name]:
        with pytest.raises(ValueError, match=word):
            getattr(models, name)(**settings)


MODEL = models.logistic_regression(num_features=1, l2=1.0)


def test_the_optimum_of_nan_is_no_number():
    batch = {"x": jnp.full((2, 1), jnp.nan), "y": jnp.array([0, 1])}
    with pytest.raises(RuntimeError, match="a gradient of nan .*leave examples with NaN out"):
        models.optimum(MODEL, batch)
