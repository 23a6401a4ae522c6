"""Softmax and logistic regression: convex, so that the optimum can be computed."""

import jax
import jax.numpy as jnp
import optax

from syncopate.models.base import Model, check_l2, penalty, softmax_loss


def softmax_regression(*, num_features: int, num_classes: int, l2: float = 0.0) -> Model:
    """Linear logits and cross-entropy: f(W, b) = -log softmax(W^T x + b)_y + l2/2 |W, b|^2.

    Args:
      num_features: D_in >= 1; num_classes: C >= 2; l2: >= 0.

    Returns:
      A `Model` for batches {"x": float[n, D_in] (or images, which are flattened), "y": int[n]};
      it starts at zero.

    Raises:
      ValueError: for sizes out of range.

    Example:
      >>> from syncopate import models
      >>> model = models.softmax_regression(num_features=64, num_classes=10, l2=1e-3)
    """
    check_l2(l2)
    if num_features < 1 or num_classes < 2:
        raise ValueError(
            f"num_features is {num_features} and num_classes {num_classes}: softmax regression "
            "needs at least one feature and two classes."
        )

    def init(key):
        return {"w": jnp.zeros((num_features, num_classes)), "b": jnp.zeros(num_classes)}

    def predict(params, x):
        return x.reshape(x.shape[0], -1) @ params["w"] + params["b"][None]

    return Model(init, softmax_loss(predict, l2), predict)


def logistic_regression(*, num_features: int, l2: float = 0.0) -> Model:
    """Linear logit and log loss: f(w) = log(1 + exp(-(2y - 1) w^T x)) + l2/2 |w|^2.

    Args:
      num_features: D >= 1, a constant feature for the bias included; l2: >= 0.

    Returns:
      A `Model` for batches {"x": float[n, D], "y": int[n] in {0, 1}}; it starts at zero.

    Raises:
      ValueError: for sizes out of range.

    Example:
      >>> from syncopate import models
      >>> model = models.logistic_regression(num_features=20)
    """
    check_l2(l2)
    if num_features < 1:
        raise ValueError(f"num_features is {num_features}: it must be at least 1.")

    def init(key):
        return {"w": jnp.zeros(num_features)}

    def logit(params, x):
        return x @ params["w"]

    def loss(params, batch, key):
        losses = optax.sigmoid_binary_cross_entropy(logit(params, batch["x"]), batch["y"])
        return losses + penalty(params, l2)

    def predict(params, x):
        positive = logit(params, x)
        return jnp.stack([jnp.zeros_like(positive), positive], axis=1)

    return Model(init, loss, predict)


def optimum(model: Model, batch, *, tolerance: float = 1e-10) -> float:
    """The minimum of a convex model's mean loss, by L-BFGS in float64.

    Args:
      model: softmax or logistic regression; batch: the whole training set.
      tolerance: largest entry of the gradient at the end.

    Returns:
      The minimum, a float.

    Raises:
      RuntimeError: if the tolerance was not reached.

    Example:
      >>> import jax.numpy as jnp
      >>> from syncopate import models
      >>> model = models.logistic_regression(num_features=1, l2=1.0)
      >>> batch = {"x": jnp.array([[1.0], [1.0]]), "y": jnp.array([0, 1])}
      >>> round(models.optimum(model, batch), 4)
      0.6931
    """
    import numpy as np
    from jax.flatten_util import ravel_pytree
    from scipy.optimize import minimize

    with jax.enable_x64(True):
        batch = jax.tree.map(lambda x: jnp.asarray(_widen(np.asarray(x))), batch)
        start = jax.tree.map(lambda x: x.astype(jnp.float64), model.init(jax.random.key(0)))
        flat, unravel = ravel_pytree(start)

        @jax.jit
        def value_and_grad(vector):
            return jax.value_and_grad(lambda v: jnp.mean(model.loss(unravel(v), batch, None)))(
                vector
            )

        def fun(vector):
            value, grad = value_and_grad(vector)
            return float(value), np.asarray(grad)

        options = {
            "maxiter": 20_000,
            "maxfun": 40_000,
            "ftol": 0.0,
            "gtol": tolerance,
            "maxcor": 50,
        }
        found = minimize(fun, np.asarray(flat), jac=True, method="L-BFGS-B", options=options)
        slope = float(np.max(np.abs(fun(found.x)[1])))
    # The error of the value is quadratic in the slope: a slope of 1e-6 is still far below float32.
    if slope > max(tolerance, 1e-6):
        raise RuntimeError(
            f"L-BFGS stopped with a gradient of {slope:.2e} ({found.message}): the problem may "
            "have no finite optimum; give it an l2 penalty."
        )
    return float(found.fun)


def _widen(array):
    return array.astype("float64") if array.dtype.kind == "f" else array
