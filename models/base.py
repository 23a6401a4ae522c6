"""What a model is: a record of pure functions, independent of the library that built it."""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, PyTree

from syncopate.mesh import platform
from syncopate.plans import check_key, check_number, check_whole, is_whole

CLASSES = ("num_classes", "vocab_size")  # sizes of at least 2


class Model(NamedTuple):
    """A model as pure functions.

    Attributes:
      init: `key -> params`, a pytree of float arrays.
      loss: `(params, batch, key) -> float32[n]`, one loss per example of the batch.
      predict: `(params, inputs) -> logits`, deterministic; `(params, inputs, statistics) -> logits`
        for a model with `statistics`.
      statistics: `(params, inputs) -> tree`, mean and variance of one batch at every batch
        normalisation; None for a model without batch normalisation.

    There are no running statistics. `loss` normalises with the moments of its own batch, so each
    loss depends on the whole batch; `predict` normalises with the moments it is given. Before an
    evaluation, average `statistics` over several batches of training inputs at the parameters to
    be evaluated.

    Examples:
      >>> import jax, jax.numpy as jnp, models
      >>> model = models.softmax_regression(num_features=4, num_classes=3)
      >>> params = model.init(jax.random.key(0))
      >>> batch = {"x": jnp.ones((2, 4)), "y": jnp.array([0, 2])}
      >>> model.loss(params, batch, jax.random.key(1)).shape
      (2,)
      >>> model.statistics is None
      True
    """

    init: Callable[[Array], PyTree]
    loss: Callable[[PyTree, PyTree, Any], Array]
    predict: Callable[..., Array]
    statistics: Callable[[PyTree, Array], PyTree] | None = None


def softmax_loss(predict: Callable, l2: float) -> Callable:
    """Cross-entropy per example, the mean over tokens for sequences, plus l2 / 2 |params|^2."""

    def loss(params, batch, key):
        x, y = x_and_y(batch)
        logits = predict(params, x)
        check_array("y of this x", y, logits.shape[:-1], whole=True)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        losses = losses if losses.ndim == 1 else jnp.mean(losses, axis=-1)
        return losses + penalty(params, l2)

    return loss


def model_of(
    make: Callable,
    l2: float,
    *,
    inputs: tuple[int | None, ...],
    whole: bool = False,
    keys: Callable = nnx.Rngs,
) -> Model:
    """The `Model` of a network, with `statistics` if it contains batch normalisation.

    Args:
      make: `keys(key) -> net`. `net(x, given)` returns logits. It normalises with the moments in
        its state if `given` is true, and otherwise with those of `x`, which it writes there.
      l2: weight of l2/2 |params|^2.
      inputs, whole: the shape of x, and whether it holds whole numbers, as in `check_array`.
      keys: makes the source of keys for `make`.
    """

    def build(key):
        return nnx.split(make(keys(key)), nnx.Param, nnx.BatchStat)

    graph, _, moments = nnx.eval_shape(lambda: build(jax.random.key(0)))
    # Shapes only: recipes make models at import, before `jax.distributed.initialize`, when JAX must
    # not have started its devices.
    moments = jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype), nnx.to_pure_dict(moments)
    )

    def zeros():  # overwritten before they are read
        return jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), moments)

    def init(key):
        if keys is not nnx.Rngs or not is_whole(key):  # nnx.Rngs takes a seed, too
            check_key(key)
        return nnx.to_pure_dict(build(key)[1])

    def forward(params, x, statistics):
        check_array("x", x, inputs, whole=whole)
        given = zeros() if statistics is None else statistics
        net = nnx.merge(graph, nnx.State(params), nnx.State(given))
        logits = net(x, statistics is not None)
        return logits, nnx.to_pure_dict(nnx.state(net, nnx.BatchStat))

    def in_training(params, x):
        return forward(params, x, None)[0]

    def predict(params, x, statistics):
        return forward(params, x, statistics)[0]

    def statistics(params, x):
        return forward(params, x, None)[1]

    if not moments:
        return Model(init, softmax_loss(in_training, l2), in_training)
    return Model(init, softmax_loss(in_training, l2), predict, statistics)


def penalty(params: PyTree[Array], l2: float) -> Float[Array, ""] | float:
    """l2 / 2 |params|^2."""
    if not l2:  # reads no parameter
        return 0.0
    return 0.5 * l2 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))


def checked(model: Callable) -> Callable:
    """Makes a model check its sizes and its l2; sizes may also be integers of NumPy or JAX."""
    parameters = inspect.signature(model).parameters.values()
    sizes = [parameter.name for parameter in parameters if parameter.annotation is int]

    @functools.wraps(model)
    def made(**settings):
        check_number("l2", settings.get("l2", 0.0), "[0, inf)")
        for name in settings.keys() & sizes:
            settings[name] = check_whole(name, settings[name], 2 if name in CLASSES else 1)
        return model(**settings)

    return made


def x_and_y(batch: Any) -> tuple[Array, Array]:
    """Inputs and labels of a batch."""
    if not isinstance(batch, Mapping) or not {"x", "y"} <= batch.keys():
        given = list(batch) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ValueError(f'batch is {given}: pass {{"x": inputs, "y": labels}}.')
    return batch["x"], batch["y"]


def check_array(
    name: str, x: Any, shape: tuple[int | None, ...], *, whole: bool = False, flat: bool = False
) -> None:
    """Raises ValueError unless x holds real, or whole, numbers in this shape.

    None stands for any length of at least 1; if `flat`, all axes after the first count as one.
    """
    dtype: Any = getattr(x, "dtype", None)
    is_array = isinstance(dtype, np.dtype)
    given = tuple(x.shape) if is_array else ()
    sides = (given[0], math.prod(given[1:])) if flat and given else given
    kinds = (jnp.integer,) if whole else (jnp.integer, jnp.floating, jnp.bool_)
    fits = len(sides) == len(shape) and any(jnp.issubdtype(dtype, kind) for kind in kinds)
    if not fits or any(
        side < 1 if n is None else side != n for n, side in zip(shape, sides, strict=True)
    ):
        text = f"{dtype}{list(given)}" if is_array else f"a {type(x).__name__}"
        wanted = ", ".join("n" if n is None else str(n) for n in shape)
        kind = "whole" if whole else "real"
        raise ValueError(f"{name} is {text}: pass an array of {kind} numbers in [{wanted}].")


def are_sizes(value: Any, length: int | None = None) -> bool:
    """Whether a value is a list of (so many) whole numbers of at least 1."""
    is_list = isinstance(value, tuple | list | np.ndarray) and length in (None, len(value))
    return is_list and all(is_whole(size) and size >= 1 for size in value)


def check_images(image_shape: Any, reduction: int = 1) -> None:
    """Raises ValueError unless these are the sizes of images that strides can reduce so."""
    if not are_sizes(image_shape, 3):
        raise ValueError(
            f"image_shape is {image_shape!r}: pass (height, width, channels), whole numbers of at "
            "least 1."
        )
    if min(image_shape[:2]) < reduction:
        raise ValueError(
            f"image_shape is {image_shape}: the strides shrink the image {reduction} times, so it "
            f"needs at least {reduction} x {reduction} pixels. Resize the images or use smaller "
            "strides."
        )


def check_choice(choices: Collection, **values: Any) -> None:
    """Raises ValueError with the name of a value that is not among the known ones."""
    for name, value in values.items():
        if type(value) not in (str, int) or value not in choices:
            raise ValueError(f"{name} is {value!r}: choose one of {', '.join(map(repr, choices))}.")


def check_heads(width: int, heads: int) -> None:
    """Raises ValueError unless the width is a multiple of the number of heads."""
    if width % heads:
        raise ValueError(
            f"width is {width} with {heads} heads: the heads share the width equally. Take a "
            "multiple of heads."
        )


def check_dtype(dtype: str) -> jnp.dtype:
    """The type that a model computes with; parameters are float32 with either."""
    check_choice(("float32", "bfloat16"), dtype=dtype)
    return jnp.dtype(dtype)


def product(
    x: Float[Array, "*n K"], weights: Float[Array, "K N"], dtype: jnp.dtype
) -> Float[Array, "*n N"]:
    """The matrix product of factors rounded to `dtype`, accumulated in float32."""
    x, weights = x.astype(dtype), weights.astype(dtype)
    contracted = ((x.ndim - 1,), (0,)), ((), ())
    return flat_dot_general(x, weights, contracted, preferred_element_type=jnp.float32)


def flat_dot_general(x: Array, weights: Array, dimension_numbers: tuple, **options: Any) -> Array:
    """`lax.dot_general` of x [..., K] and weights [K, N]; on CPUs x is reshaped to [rows, K].

    That is faster on CPUs, but gives a TPU's compiler fewer operations to fuse.
    """
    last_and_first = dimension_numbers == (((x.ndim - 1,), (0,)), ((), ()))
    if not last_and_first or weights.ndim != 2 or platform() != "cpu":
        return jax.lax.dot_general(x, weights, dimension_numbers, **options)
    rows = x.reshape(-1, x.shape[-1])
    y = jax.lax.dot_general(rows, weights, (((1,), (0,)), ((), ())), **options)
    return y.reshape(*x.shape[:-1], weights.shape[1])
