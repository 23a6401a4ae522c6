"""A perceptron with hidden layers, for images small enough to be flattened."""

import jax
import jax.numpy as jnp

from models.base import Model, check_l2, softmax_loss


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
      >>> import jax, models
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

    def init(key):
        layers = []
        for k, (fan_in, fan_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            scale = jnp.sqrt((1 if k == len(hidden) else 2) / fan_in)
            weights = scale * jax.random.normal(jax.random.fold_in(key, k), (fan_in, fan_out))
            layers.append({"w": weights, "b": jnp.zeros(fan_out)})
        return layers

    def predict(params, x):
        x = x.reshape(x.shape[0], -1)
        for k, layer in enumerate(params):
            x = x @ layer["w"] + layer["b"][None]
            x = x if k == len(hidden) else jax.nn.relu(x)
        return x

    return Model(init, softmax_loss(predict, l2), predict)
