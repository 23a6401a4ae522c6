"""Settings that models refuse, and the messages."""

import pytest

import models

LSTM = {"vocab_size": 13, "width": 6, "depth": 2}
DECODER = {"vocab_size": 13, "context": 5, "width": 16, "depth": 1, "heads": 2}
VIT = {"image_shape": (4, 4, 3), "num_classes": 3, "patch": 2, "width": 16, "heads": 2}
FORECASTER = {"lags": 1, "horizon": 1, "hidden": ()}
SMALL = {"depth": 8, "stem": "cifar", "norm": "group"}
# For each model: settings, and part of the message.
REFUSED = {
    "vit": [
        ({"num_classes": 1}, "num_classes is 1: pass a whole number of at least 2"),
        ({"patch": 5}, "patch is 5"),
        ({"image_shape": (0, 0, 3)}, "patch is 4"),
        ({"width": 30}, "width is 30 with 4 heads"),
        ({"depth": 0}, "depth is 0: pass a whole number of at least 1"),
        (VIT | {"dtype": "float64"}, "dtype is 'float64'"),
        (VIT | {"pool": "max"}, "pool is 'max': choose one of 'mean', 'class'"),
        (VIT | {"gelu": "erf"}, "gelu is 'erf'"),
    ],
    "gpt2": [
        (DECODER | {"vocab_size": 1}, "vocab_size is 1"),
        (DECODER | {"context": 0}, "context is 0"),
        (DECODER | {"heads": 3}, "width is 16 with 3 heads"),
        (DECODER | {"heads": 0}, "heads is 0"),
    ],
    "mobilenet_v2": [
        ({"image_shape": (3, 8, 3)}, "image_shape"),
        ({"image_shape": (8, 8, 0)}, "channels is 0"),
        ({"stages": ()}, "stages is"),
        ({"stages": ((6, 24, 2, 3),)}, "stages is"),
        ({"stages": ((6, 24, 2),)}, "stages is"),
        ({"stem_stride": 3}, "stem_stride is 3"),
        ({"head_channels": 0}, "head_channels is 0"),
    ],
    "resnet": [
        ({"depth": 19}, "depth is 19: choose one of 18, 34"),
        ({"norm": "layer"}, "norm is 'layer'"),
        ({"stem": "large"}, "stem is 'large'"),
        ({"image_shape": (31, 64, 3)}, "32 x 32"),
        ({"image_shape": (7, 7, 3), "depth": 18, "stem": "cifar"}, "8 x 8"),
        (SMALL | {"image_shape": (2, 8, 3)}, "4 x 4"),
        (SMALL | {"width": 9}, "width is 9: groups must divide"),
        ({"width": 20, "norm": "group"}, "width is 20: groups must divide"),
        ({"width": 4, "norm": "group", "image_shape": (32, 32, 3)}, "single value"),
    ],
    "mobilenet_v3": [
        ({"variant": "medium"}, "variant is 'medium'"),
        ({"image_shape": (31, 32, 3)}, "32 x 32"),
        ({"stem_stride": 3}, "stem_stride is 3"),
    ],
    "lenet": [({"image_shape": (30, 30, 1)}, "LeNet takes 28 x 28 or 32 x 32")],
    "lstm": [(LSTM | {"width": 0}, "width is 0"), (LSTM | {"dtype": "float16"}, "dtype is 'float")],
    "forecaster": [
        (FORECASTER | {"lags": 0}, "inputs is 0"),
        (FORECASTER | {"hidden": (3, 0)}, "hidden is 0"),
    ],
}
WHOLE = {
    "softmax_regression": {"num_features": 4, "num_classes": 3},
    "logistic_regression": {"num_features": 4},
    "mlp": {"num_features": 4, "num_classes": 3},
    "forecaster": FORECASTER,
    "gpt2": DECODER,
    "lstm": LSTM,
}  # the other models have defaults


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused(name):
    for settings, word in REFUSED[name]:
        with pytest.raises(ValueError, match=word):
            getattr(models, name)(**settings)


@pytest.mark.parametrize("name", sorted({*models.__all__} - {"Model", "optimum"}))
def test_a_negative_penalty_is_refused(name):
    with pytest.raises(ValueError, match="l2 is -1.0"):
        getattr(models, name)(**WHOLE.get(name, {}), l2=-1.0)
