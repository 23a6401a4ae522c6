"""Linear models and perceptrons, and the optimum of the convex ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from models import base
from models.base import Model
from syncopate.plans import check_number


@base.checked
def softmax_regression(*, num_features: int, num_classes: int, l2: float = 0.0) -> Model:
    """Linear logits and cross-entropy: f(W, b) = -log softmax(W^T x + b)_y + l2/2 |W, b|^2.

    Args:
      num_features: D_in >= 1.
      num_classes: C >= 2.
      l2: weight of l2/2 |W, b|^2, >= 0.

    Returns:
      A `Model` for batches {"x": float[n, D_in] (or images, which are flattened), "y": int[n]};
      its parameters are initialised to 0.

    Raises:
      ValueError: if a size is out of range.

    Examples:
      >>> import models
      >>> model = models.softmax_regression(num_features=64, num_classes=10, l2=1e-3)
    """

    def init(key):
        return {"w": jnp.zeros((num_features, num_classes)), "b": jnp.zeros(num_classes)}

    def predict(params, x):
        base.check_array("x", x, (None, num_features), flat=True)
        return x.reshape(x.shape[0], -1) @ params["w"] + params["b"][None]

    return Model(init, base.softmax_loss(predict, l2), predict)


@base.checked
def logistic_regression(*, num_features: int, l2: float = 0.0) -> Model:
    """Linear logit and log loss: f(w) = log(1 + exp(-(2y - 1) w^T x)) + l2/2 |w|^2.

    Args:
      num_features: D >= 1, including a constant feature for the bias.
      l2: weight of l2/2 |w|^2, >= 0.

    Returns:
      A `Model` for batches {"x": float[n, D], "y": int[n] in {0, 1}}; its parameters are
      initialised to 0.

    Raises:
      ValueError: if a size is out of range.

    Examples:
      >>> import models
      >>> model = models.logistic_regression(num_features=20)
    """

    def init(key):
        return {"w": jnp.zeros(num_features)}

    def logit(params, x):
        base.check_array("x", x, (None, num_features))
        return x @ params["w"]

    def loss(params, batch, key):
        x, y = base.x_and_y(batch)
        positive = logit(params, x)
        base.check_array("y of this x", y, positive.shape)
        losses = optax.sigmoid_binary_cross_entropy(positive, y)
        return losses + base.penalty(params, l2)

    def predict(params, x):
        positive = logit(params, x)
        return jnp.stack([jnp.zeros_like(positive), positive], axis=1)

    return Model(init, loss, predict)


def optimum(model: Model, batch: PyTree[Array], *, tolerance: float = 1e-10) -> float:
    """The minimum of a convex model's mean loss, by L-BFGS in float64.

    Args:
      model: softmax or logistic regression.
      batch: the whole training set.
      tolerance: largest absolute entry of the gradient at the minimum, > 0.

    Returns:
      The mean loss at the minimum, with the penalty of the model.

    Raises:
      ValueError: for a model, batch or tolerance that does not fit.
      RuntimeError: if the tolerance is not reached.

    Examples:
      >>> import jax.numpy as jnp, models
      >>> model = models.logistic_regression(num_features=1, l2=1.0)
      >>> batch = {"x": jnp.array([[1.0], [1.0]]), "y": jnp.array([0, 1])}
      >>> round(models.optimum(model, batch), 4)
      0.6931
    """
    from jax.flatten_util import ravel_pytree
    from scipy.optimize import minimize

    check_number("tolerance", tolerance, "(0, inf)")
    if not isinstance(model, Model):
        raise ValueError(f"model is a {type(model).__name__}: pass a Model, with its sizes given.")
    params = jax.device_get(jax.jit(lambda: model.init(jax.random.key(0)))())
    jax.eval_shape(lambda: model.loss(params, batch, None))  # checks the batch
    with jax.enable_x64(True):  # NumPy widens without compilation
        batch, params = jax.tree.map(_widen, (batch, params))
        batch = jax.device_put(batch)
        start = np.concatenate([np.ravel(p) for p in jax.tree.leaves(params)])

        @jax.jit
        @jax.value_and_grad
        def of_vector(vector, batch):
            _, unravel = ravel_pytree(params)
            return jnp.mean(model.loss(unravel(vector), batch, None))

        def fun(vector):
            value, grad = of_vector(vector, batch)
            return float(value), np.asarray(grad)

        limits = {"maxiter": 20_000, "maxfun": 40_000, "maxcor": 50}
        options = {"ftol": 0.0, "gtol": tolerance, **limits}
        result = minimize(fun, start, jac=True, method="L-BFGS-B", options=options)
        slope = float(np.max(np.abs(fun(result.x)[1])))
    # The error is quadratic in the slope: with 1e-6 it is far below the precision of float32.
    if not slope <= max(tolerance, 1e-6):
        raise RuntimeError(
            f"L-BFGS stopped with a gradient of {slope:.2e} ({result.message}): the loss may have "
            "no finite minimum. Add an l2 penalty, or leave examples with NaN out."
        )
    return float(result.fun)


def _widen(x):
    return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)


@base.checked
def mlp(
    *, num_features: int, hidden: tuple[int, ...] = (128,), num_classes: int, l2: float = 0.0
) -> Model:
    """Multilayer perceptron with ReLU: x_k+1 = max(0, W_k^T x_k + b_k), linear logits.

    Weights are initialised from a normal distribution with variance 2 / fan-in (1 / fan-in in the
    last layer), biases to 0.

    Args:
      num_features: D_in >= 1.
      num_classes: C >= 2.
      hidden: widths of the hidden layers, each >= 1; () is a linear model with random weights.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` for batches {"x": float[n, D_in] (or images, which are flattened), "y": int[n]}.

    Raises:
      ValueError: if a size is out of range.

    Examples:
      >>> import jax, models
      >>> model = models.mlp(num_features=784, hidden=(128,), num_classes=10)
      >>> sum(p.size for p in jax.tree.leaves(model.init(jax.random.key(0))))
      101770

    References:
      He, Zhang, Ren, Sun, Delving Deep into Rectifiers, 2015, https://arxiv.org/abs/1502.01852
    """
    init, predict = _layers(num_features, hidden, num_classes)
    return Model(init, base.softmax_loss(predict, l2), predict)


@base.checked
def forecaster(*, lags: int, horizon: int, hidden: tuple[int, ...], l2: float = 0.0) -> Model:
    """Multilayer perceptron that predicts the next `horizon` values of a series from `lags` ones.

    The layers are those of `models.mlp`. The loss of an example is the mean over the horizon of
    (prediction - y)^2.

    Args:
      lags: D_in >= 1, values before the forecast, the latest last.
      horizon: values to forecast, >= 1.
      hidden: widths of the hidden layers, each >= 1.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` for batches {"x": float[n, lags], "y": float[n, horizon]}; `predict` returns
      float[n, horizon]. Scale the series before.

    Raises:
      ValueError: if a size is out of range; from `loss` if y has another shape than the forecast.

    Examples:
      >>> import jax, models
      >>> model = models.forecaster(lags=20, horizon=6, hidden=(64, 64, 64))
      >>> sum(p.size for p in jax.tree.leaves(model.init(jax.random.key(0))))
      10054

    References:
      Makridakis, Spiliotis, Assimakopoulos, The M4 Competition: 100,000 time series and 61
      forecasting methods, 2020, https://doi.org/10.1016/j.ijforecast.2019.04.014
    """
    init, predict = _layers(lags, hidden, horizon)

    def loss(params, batch, key):
        x, y = base.x_and_y(batch)
        forecast = predict(params, x)
        base.check_array("y of this x", y, forecast.shape)
        return jnp.mean(jnp.square(forecast - y), axis=-1) + base.penalty(params, l2)

    return Model(init, loss, predict)


def _layers(inputs: int, hidden: tuple[int, ...], outputs: int) -> tuple:
    """(init, predict) of dense layers with ReLU between them."""
    if not base.are_sizes(hidden):
        raise ValueError(f"hidden is {hidden!r}: pass a tuple of whole numbers of at least 1.")
    sizes, last = (inputs, *hidden, outputs), len(hidden)

    def init(key):
        base.check_key(key)
        params = []
        for k, (fan_in, fan_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            scale = jnp.sqrt((1 if k == last else 2) / fan_in)
            weights = scale * jax.random.normal(jax.random.fold_in(key, k), (fan_in, fan_out))
            params.append({"w": weights, "b": jnp.zeros(fan_out)})
        return params

    def predict(params, x):
        base.check_array("x", x, (None, inputs), flat=True)
        x = x.reshape(x.shape[0], -1)
        for k, layer in enumerate(params):
            x = x @ layer["w"] + layer["b"][None]
            x = x if k == last else jax.nn.relu(x)
        return x

    return init, predict
