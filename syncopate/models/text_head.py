"""A classification head on sentence embeddings that stay as they are."""

from syncopate.models.base import Model, check_l2, softmax_loss
from syncopate.models.mlp import layers


def text_head(
    *, num_features: int, num_classes: int = 2, hidden: tuple[int, ...] = (), l2: float = 0.0
) -> Model:
    """Logits W^T x + b of frozen embeddings x, or a perceptron's as in `models.mlp`.

    The embeddings are taken as they come: centre, scale or normalise them before.

    Args:
      num_features: D_in >= 1, of one embedding.
      num_classes: C >= 2.
      hidden: widths of hidden layers with ReLU, each >= 1; () is softmax regression, started at
        random.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` for batches {"x": float[n, D_in], "y": int[n]}.

    Raises:
      ValueError: for sizes out of range.

    Example:
      >>> import jax
      >>> from syncopate import models
      >>> model = models.text_head(num_features=384)
      >>> sum(p.size for p in jax.tree.leaves(model.init(jax.random.key(0))))
      770
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
