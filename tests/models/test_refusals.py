"""What a model refuses, with its message."""

import pytest

import models

LSTM = {"vocab_size": 13, "width": 6, "depth": 2}
DECODER = {"vocab_size": 13, "context": 5, "width": 16, "depth": 1, "heads": 2}
VIT = {"image_shape": (4, 4, 3), "num_classes": 3, "patch": 2, "width": 16, "heads": 2}
FORECASTER = {"lags": 1, "horizon": 1, "hidden": ()}
# Of every model: settings, and what is said of them.
REFUSED = {
    "small_resnet": [
        ({"image_shape": (2, 8, 3)}, "image_shape"),
        ({"widths": (16, 8, 4)}, "widths"),
        ({"widths": (16, 32)}, "widths"),
        ({"blocks": 0}, "blocks"),
    ],
    "vit": [
        ({"num_classes": 1}, "classes"),
        ({"patch": 5}, "patch"),
        ({"width": 30}, "heads"),
        ({"depth": 0}, "depth"),
        (VIT | {"dtype": "float64"}, "dtype is 'float64'"),
        (VIT | {"pool": "max"}, "pool is 'max'"),
        (VIT | {"gelu": "erf"}, "gelu is 'erf'"),
        (VIT | {"epsilon": 0.0}, "epsilon is 0.0"),
    ],
    "gpt2": [
        (DECODER | {"vocab_size": 1}, "vocab_size"),
        (DECODER | {"context": 0}, "context"),
        (DECODER | {"heads": 3}, "heads"),
        (DECODER | {"depth": 0}, "depth"),
        (DECODER | {"dtype": "half"}, "dtype is 'half'"),
    ],
    "mobilenet_v2": [
        ({"image_shape": (3, 8, 3)}, "image_shape"),
        ({"num_classes": 1}, "classes"),
        ({"width": 0.0}, "width"),
        ({"stages": ()}, "stages"),
        ({"stages": ((6, 24, 2, 3),)}, "stages"),
        ({"stages": ((6, 24, 2),)}, "stages"),
        ({"stem_stride": 3}, "stem_stride"),
        ({"head_channels": 0}, "head_channels"),
        ({"dtype": "float16"}, "dtype"),
    ],
    "resnet": [
        ({"depth": 20}, "depth is 20: take one of 18, 34"),
        ({"norm": "layer"}, "norm is 'layer'"),
        ({"stem": "large"}, "stem is 'large'"),
        ({"image_shape": (31, 64, 3)}, "32 x 32"),
        ({"image_shape": (7, 7, 3), "stem": "cifar"}, "8 x 8"),
        ({"num_classes": 1}, "classes"),
        ({"width": 0}, "width"),
        ({"width": 20, "norm": "group"}, "width is 20: 32 groups"),
        ({"width": 4, "norm": "group", "image_shape": (32, 32, 3)}, "single value"),
        ({"dtype": "float16"}, "dtype"),
    ],
    "mobilenet_v3": [
        ({"variant": "medium"}, "variant is 'medium'"),
        ({"image_shape": (31, 32, 3)}, "32 x 32"),
        ({"num_classes": 1}, "classes"),
        ({"stem_stride": 3}, "stem_stride"),
        ({"dtype": "float64"}, "dtype"),
    ],
    "lstm": [
        (LSTM | {"vocab_size": 1}, "vocab_size is 1"),
        (LSTM | {"width": 0}, "width 0"),
        (LSTM | {"depth": 0}, "depth 0"),
        (LSTM | {"dtype": "float16"}, "dtype is 'float16'"),
    ],
    "forecaster": [
        (FORECASTER | {"lags": 0}, r"\(0, 1\)"),
        (FORECASTER | {"horizon": 0}, r"\(1, 0\)"),
        (FORECASTER | {"hidden": (0,)}, r"\(1, 0, 1\)"),
    ],
    "text_head": [
        ({"num_features": 0}, r"\(0, 2\)"),
        ({"num_features": 4, "num_classes": 1}, r"\(4, 1\)"),
        ({"num_features": 4, "hidden": (0,)}, r"\(4, 0, 2\)"),
    ],
}
WHOLE = {
    "softmax_regression": {"num_features": 4, "num_classes": 3},
    "logistic_regression": {"num_features": 4},
    "mlp": {"num_features": 4, "num_classes": 3},
    "text_head": {"num_features": 4},
    "forecaster": FORECASTER,
    "gpt2": DECODER,
    "lstm": LSTM,
}  # the others can be built without any


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings(name):
    for settings, word in REFUSED[name]:
        with pytest.raises(ValueError, match=word):
            getattr(models, name)(**settings)


@pytest.mark.parametrize("name", sorted({*models.__all__} - {"Model", "optimum"}))
def test_a_negative_penalty_is_refused(name):
    with pytest.raises(ValueError, match="l2 is -1.0"):
        getattr(models, name)(**WHOLE.get(name, {}), l2=-1.0)
