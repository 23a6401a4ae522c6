"""Settings and batches that models refuse, and the messages."""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
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
        ({"num_classes": 1}, "num_classes is 1: pass a whole number of at least 2"),
        ({"patch": 5}, "patch is 5"),
        ({"image_shape": (0, 0, 3)}, "image_shape is"),
        ({"image_shape": (3, 3, 3)}, "patch is 4"),
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
        ({"image_shape": (8, 8, 0)}, r"image_shape is \(8, 8, 0\): pass"),
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
        (FORECASTER | {"lags": 0}, "lags is 0"),
        (FORECASTER | {"hidden": (3, 0)}, r"hidden is \(3, 0\)"),
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
SMALLEST = {
    "vit": VIT, "resnet": SMALL | {"width": 4, "image_shape": (8, 8, 3)},
    "mobilenet_v2": {"image_shape": (8, 8, 3)}, "lenet": {"image_shape": (28, 28, 1)},
    "mobilenet_v3": {"variant": "small", "image_shape": (32, 32, 3)},
    "forecaster": {"lags": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused(name):
    for settings, word in REFUSED[name]:
        with pytest.raises(ValueError, match=word):
            getattr(models, name)(**settings)


MODELS = sorted({*models.__all__} - {"Model", "optimum"})


@pytest.mark.parametrize("name", MODELS)
def test_a_penalty_that_is_no_weight_is_refused(name):
    for l2 in (-1.0, math.nan, math.inf, "1", None, True, 1j, [0.1]):
        with pytest.raises(ValueError, match=f"l2 is {re.escape(repr(l2))}: pass a finite"):
            getattr(models, name)(**WHOLE.get(name, {}), l2=l2)


NO_SIZES = (0, -1, 2.5, math.nan, math.inf, "4", None, True, 1j, [4], np.array([4]), {})


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_whole_numbers(name):
    make = getattr(models, name)
    known = inspect.signature(make).parameters
    settings = WHOLE.get(name, {}) | SMALLEST.get(name, {})
    for size in {"num_features", "num_classes", "width", "depth", "heads", "vocab_size", "context",
                 "lags", "horizon", "patch", "mlp_ratio", "stem_channels", "stem_stride",
                 "head_channels"} & {*known}:  # fmt: skip
        for wrong in NO_SIZES:
            with pytest.raises(ValueError, match=f"{size} is {re.escape(repr(wrong))}[ :]"):
                make(**settings | {size: wrong})
        one = settings.get(size, known[size].default)
        assert make(**settings | {size: jnp.asarray(one)}).init
    sides = [None, 3, "888", (8, 8), (8, 8, 3, 1), (8.0, 8, 3), (8, 8, None), (8, 8, True), {}]
    for wrong in sides if "image_shape" in known else ():
        with pytest.raises(ValueError, match=r"image_shape is .*: pass \(height, width, channels"):
            make(image_shape=wrong)
    for wrong in [None, 3, (2.5,), ("2",), (0,), {}, "3"] if "hidden" in known else ():
        with pytest.raises(ValueError, match=r"hidden is .*: pass a tuple of whole numbers"):
            make(**settings | {"hidden": wrong})


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mobilenet_v3"])
def test_batches_of_other_arrays_are_refused(name):
    settings = WHOLE.get(name, {}) | SMALLEST.get(name, {})
    model = getattr(models, name)(**settings)
    tokens = "vocab_size" in settings
    shape = settings.get("image_shape", (4,))
    x = jnp.ones((2, *shape), int if tokens else float)
    y = jnp.ones((2, 4) if tokens else (2, 1) if name == "forecaster" else 2, int)
    params = jax.eval_shape(model.init, jax.random.key(0))

    def loss(batch):
        return jax.eval_shape(lambda p: model.loss(p, batch, None), params)

    assert loss({"x": x, "y": y}).shape == (2,)
    for wrong in (None, (x, y), {"x": x}, x):
        with pytest.raises(ValueError, match="batch is .*: pass .*inputs.*labels"):
            loss(wrong)
    others = [None, 3, "x", {}, [[1.0]], np.array("a"), x[0], x[:0]]
    others += [x[..., None], x * 1.0] if tokens else [x[..., :-1], x * 1j]
    for wrong in others:
        with pytest.raises(ValueError, match=r"x is .*: pass an array of (real|whole) numbers in"):
            loss({"x": wrong, "y": y})
    if name in ("mobilenet_v2", "resnet", "vit"):
        return  # which take seconds to trace, and have the loss of the others
    for wrong in (None, 3, "y", {}, [0, 1], y[0], y[:1], y[..., None], y * 1j):
        with pytest.raises(ValueError, match=r"y of this x is .*: pass an array of"):
            loss({"x": x, "y": wrong})


def solved(**changed):
    batch = {"x": jnp.ones((2, 1)), "y": jnp.array([0, 1])}
    given = {"model": models.logistic_regression(num_features=1, l2=1.0), "batch": batch}
    return lambda: models.optimum(**given | changed)


test_no_optimum = refuses({
    "no model": (solved(model=models.logistic_regression), "model is a function: pass a Model"),
    "no batch": (solved(batch={}), r"batch is \[\]: pass"),
    "empty": (solved(batch={"x": jnp.ones((0, 1)), "y": jnp.ones(0)}), r"x is float32\[0, 1\]"),
    **{f"tolerance {t}": (solved(tolerance=t), f"tolerance is {t!r}: pass a finite")
       for t in (0, -1.0, math.nan, math.inf, "1", None, True)},
})  # fmt: skip


def test_the_optimum_of_nan_is_no_number():
    batch = {"x": jnp.full((2, 1), jnp.nan), "y": jnp.array([0, 1])}
    with pytest.raises(RuntimeError, match="a gradient of nan .*leave examples with NaN out"):
        solved(batch=batch)()


@pytest.mark.parametrize("name", MODELS)
def test_keys_are_keys(name):
    model = getattr(models, name)(**WHOLE.get(name, {}) | SMALLEST.get(name, {}))
    if name in ("softmax_regression", "logistic_regression"):
        return  # draw nothing
    for wrong in (None, "0", 0.5, jax.random.split(jax.random.key(0)), [0]):
        with pytest.raises(ValueError, match="key .*: pass (a typed key|one key)"):
            model.init(wrong)
