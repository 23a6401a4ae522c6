"""The models: valid arguments and batches, and bad ones for each."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

import models
from tests.bad_values import (
    KEY,
    NAN,
    THING,
    Arg,
    also,
    arguments,
    call,
    real,
)
from tests.public import returning


def made(make, x, y):
    """All functions of the model, traced."""

    def run(key=KEY, x=x, y=y, **args):
        model = make(**args)

        def calls():
            params = model.init(key)
            statistics = () if model.statistics is None else (model.statistics(params, x),)
            return model.loss(params, {"x": x, "y": y}, key), model.predict(params, x, *statistics)

        return jax.eval_shape(calls)

    return run


# JAX and Flax also take legacy keys and numbers.
NO_KEYS = ["0", 0.5, None, THING, jax.random.split(KEY, 2)]
NO_ARRAYS = [None, 3, "text", THING, {}, np.array(["a"] * 2), jnp.ones(())]
SHAPES = [None, 3, "text", (8, 8), (8, 8, 3, 1), (0, 8, 3), (-8, 8, 3), (8.5, 8, 3), (8, 8, 0), [],
          (8, 8, NAN), ("8", 8, 3), (8, 8, None), THING, {}, (8, 8, True), 1j]  # fmt: skip
HIDDEN = [None, 3, "text", (0,), (-1,), (2.5,), ("2",), (NAN,), (None,), (True,), THING, [[2]]]
STAGES = [
    None,
    3,
    "text",
    (),
    (3,),
    THING,
    ((2, 4, 1),),
    ((2, 4, 1, 3),),
    ((2.5, 4, 1, 1),),
    (("2", 4, 1, 1),),
    ((NAN, 4, 1, 1),),
    ((None, 4, 1, 1),),
]


def images(side, channels):
    bad = [
        jnp.ones((2, side, side)),
        jnp.ones((2, side, side, channels + 1)),
        [[1.0]],
        jnp.ones((side, side, channels)),
        jnp.ones((0, side, side, channels)),
    ]
    return Arg(jnp.ones((2, side, side, channels)), [*NO_ARRAYS, *bad])


CLASSES = jnp.zeros(2, int)
FEATURES = Arg(
    jnp.ones((2, 4)), [*NO_ARRAYS, jnp.ones((2, 5)), jnp.ones(7), jnp.ones((3, 4)), [[1.0]]]
)
STEPS = Arg(jnp.ones((2, 5, 4)), [*NO_ARRAYS, jnp.ones((2, 4)), jnp.ones((2, 5, 6)), [[1.0]]])
LABELS = Arg(CLASSES, [*NO_ARRAYS, jnp.zeros(3, int), jnp.zeros((2, 1), int)])
WHOLE_LABELS = Arg(CLASSES, [*LABELS.bad, jnp.zeros(2)])
TOKENS = jnp.zeros((2, 4), int)
TEXTS = [
    *NO_ARRAYS,
    jnp.zeros((2, 4)),
    jnp.zeros(4, int),
    jnp.zeros((3, 4), int),
    jnp.zeros((2, 4, 1), int),
    jnp.zeros((2, 0), int),
]
NEXT = Arg(TOKENS, [*NO_ARRAYS, jnp.zeros((2, 4)), jnp.zeros((2, 3), int), jnp.zeros(2, int)])
SERIES = Arg(jnp.zeros((2, 2)), [*NO_ARRAYS, jnp.zeros(2), jnp.zeros((2, 3)), jnp.zeros((3, 2))])
BY_WORDS = {"x": Arg(TOKENS, TEXTS), "y": NEXT}
BY_IMAGES = {"x": images(8, 3), "y": WHOLE_LABELS}
DRAWS = {"key": Arg(KEY, NO_KEYS)}
USUAL = {
    "num_features": 4,
    "num_classes": 3,
    "hidden": Arg((5,), HIDDEN),
    "lags": 4,
    "horizon": 2,
    "vocab_size": 7,
    "context": 6,
    "width": 4,
    "depth": also("patch", 1),
    "heads": 2,
    "patch": 4,
    "image_shape": Arg((8, 8, 3), SHAPES),
    "l2": 0.5,
}
CHANGES = {
    "mlp": DRAWS,
    "forecaster": {"y": SERIES} | DRAWS,
    "logistic_regression": {"y": LABELS},
    "lstm": DRAWS,
    "vit": DRAWS,
    "gpt2": {"x": Arg(TOKENS, [*TEXTS, jnp.zeros((2, 9), int)])} | DRAWS,
    "lenet": {"image_shape": Arg((28, 28, 1), SHAPES), "x": images(28, 1)},
    "resnet": {"depth": also("patch", 8, 7), "stem": "cifar"},
    "mobilenet_v2": {
        "stem_channels": 4,
        "stem_stride": also("stem_stride", 1, 3),
        "head_channels": 8,
        "stages": Arg(((2, 4, 1, 2),), STAGES),
    },
}


def features_of(make, args):
    """The batch of a model of features, or of series of them; {} of one that takes neither."""
    if make.__name__ in CHANGES:
        return {"x": FEATURES, "y": WHOLE_LABELS}
    for x in (FEATURES, STEPS):
        with contextlib.suppress(ValueError, TypeError):
            made(make, x.valid, CLASSES)(**{name: arg.valid for name, arg in args.items()})
            return {"x": x, "y": WHOLE_LABELS}
    return {}


def model_call(make, changes):
    args = arguments(make, **USUAL | changes)
    if "vocab_size" in args:
        batch = BY_WORDS
    else:
        batch = BY_IMAGES if "image_shape" in args else features_of(make, args)
    args = batch | args | changes
    if "x" not in args:
        return call(lambda **args: jax.eval_shape(make(**args).init, KEY), **args)
    return call(made(make, args["x"].valid, args["y"].valid), **args)


CALLS = {
    name: model_call(make, CHANGES.get(name, {}))
    for name, make in returning(models.Model, models).items()
}
BATCH = {"x": jnp.ones((2, 1)), "y": jnp.array([0, 1])}
NO_BATCHES = [
    None,
    3,
    "text",
    {},
    {"x": BATCH["x"]},
    BATCH | {"x": "text"},
    THING,
    BATCH | {"x": jnp.ones((2, 2))},
    BATCH | {"x": jnp.full((2, 1), NAN)},
    {"x": jnp.ones((0, 1)), "y": jnp.zeros(0, int)},
]
CALLS["optimum"] = call(
    models.optimum,
    batch=Arg(BATCH, NO_BATCHES),
    tolerance=Arg(1e-6, real()),
    model=Arg(
        models.logistic_regression(num_features=1, l2=1.0),
        [None, 3, "model", models.logistic_regression, THING, {}],
    ),
)
