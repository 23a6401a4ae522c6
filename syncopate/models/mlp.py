"""Perceptrons with hidden layers: a classifier of flattened images, a forecaster of series."""

import jax
import jax.numpy as jnp

from syncopate.models.base import Model, check_l2, penalty, softmax_loss


def mlp(
    *, num_features: int, hidden: tuple[int, ...] = (128,), num_classes: int, l2: float = 0.0
) -> Model:
    """Multilayer perceptron with ReLU: x_k+1 = max(0, W_k^T x_k + b_k), linear logits.

    Weights start normal with variance 2 / fan-in (the last layer 1 / fan-in), biases at zero.

    Args:
      num_features: D_in >= 1.
      hidden: widths of the hidden layers, each >= 1.
      num_classes: C >= 2.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` for batches {"x": float[n, D_in] (or images, which are flattened), "y": int[n]}.

    Raises:
      ValueError: for sizes out of range.

    Example:
      >>> import jax
      >>> from syncopate import models
      >>> model = models.mlp(num_features=784, hidden=(128,), num_classes=10)
      >>> sum(p.size for p in jax.tree.leaves(model.init(jax.random.key(0))))
      101770

    References:
      He, Zhang, Ren, Sun, Delving Deep into Rectifiers, 2015, https://arxiv.org/abs/1502.01852
    """
    check_l2(l2)
    sizes = (num_features, *hidden, num_classes)
    if min(sizes) < 1 or num_classes < 2:
        raise ValueError(
            f"num_features, hidden and num_classes are {sizes}: layers need at least one unit and "
            "there are at least two classes."
        )

    init, predict = layers(sizes)
    return Model(init, softmax_loss(predict, l2), predict)


def forecaster(*, lags: int, horizon: int, hidden: tuple[int, ...], l2: float = 0.0) -> Model:
    """Multilayer perceptron with ReLU from the last `lags` values of a series to the next ones.

    The layers are those of `models.mlp`, the last one linear, all `horizon` values at once; the
    loss of an example is the mean over them of (prediction - y)^2.

    Args:
      lags: D_in >= 1, values before the forecast, the latest last.
      horizon: values to forecast, >= 1.
      hidden: widths of the hidden layers, each >= 1.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` for batches {"x": float[n, lags], "y": float[n, horizon]}; `predict` gives
      float[n, horizon], in the units of the series: scale these before.

    Raises:
      ValueError: for sizes out of range; from `loss` for a y of another shape than the forecast.

    Example:
      The next six values of a series out of the last twenty.

      >>> import jax
      >>> from syncopate import models
      >>> model = models.forecaster(lags=20, horizon=6, hidden=(64, 64, 64))
      >>> sum(p.size for p in jax.tree.leaves(model.init(jax.random.key(0))))
      10054

    References:
      Makridakis, Spiliotis, Assimakopoulos, The M4 Competition: 100,000 time series and 61
      forecasting methods, 2020, https://doi.org/10.1016/j.ijforecast.2019.04.014
    """
    check_l2(l2)
    sizes = (lags, *hidden, horizon)
    if min(sizes) < 1:
        raise ValueError(
            f"lags, hidden and horizon are {sizes}: give at least one value to forecast from, one "
            "to forecast, and one unit in every hidden layer."
        )
    init, predict = layers(sizes)

    def loss(params, batch, key):
        forecast = predict(params, batch["x"])
        if batch["y"].shape != forecast.shape:
            raise ValueError(
                f"y has shape {batch['y'].shape} and the forecast {forecast.shape}: y holds the "
                f"next {horizon} values of every example."
            )
        return jnp.mean(jnp.square(forecast - batch["y"]), axis=-1) + penalty(params, l2)

    return Model(init, loss, predict)


def layers(sizes: tuple[int, ...]) -> tuple:
    """(init, predict) of dense layers from sizes[0] to sizes[-1] units, with ReLU in between."""
    last = len(sizes) - 2

    def init(key):
        params = []
        for k, (fan_in, fan_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            scale = jnp.sqrt((1 if k == last else 2) / fan_in)
            weights = scale * jax.random.normal(jax.random.fold_in(key, k), (fan_in, fan_out))
            params.append({"w": weights, "b": jnp.zeros(fan_out)})
        return params

    def predict(params, x):
        x = x.reshape(x.shape[0], -1)
        for k, layer in enumerate(params):
            x = x @ layer["w"] + layer["b"][None]
            x = x if k == last else jax.nn.relu(x)
        return x

    return init, predict
