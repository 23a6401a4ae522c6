"""A small Vision Transformer."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.base import Model, check_l2, softmax_loss


class _Block(nnx.Module):
    def __init__(self, width, heads, hidden, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.dense1 = nnx.Linear(width, hidden, rngs=rngs)
        self.dense2 = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.dense2(nnx.gelu(self.dense1(self.norm2(x))))


class _ViT(nnx.Module):
    def __init__(self, image_shape, num_classes, patch, width, depth, heads, hidden, rngs):
        height, wide, channels = image_shape
        self.patch = patch
        self.embed = nnx.Linear(patch * patch * channels, width, rngs=rngs)
        tokens = (height // patch) * (wide // patch)
        self.positions = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), (1, tokens, width), jnp.float32)
        )
        self.names = [f"block{i}" for i in range(depth)]
        for name in self.names:
            setattr(self, name, _Block(width, heads, hidden, rngs))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.dense = nnx.Linear(width, num_classes, rngs=rngs)

    def __call__(self, x):
        x = self.embed(_patches(x, self.patch)) + self.positions[...]
        for name in self.names:
            x = getattr(self, name)(x)
        return self.dense(jnp.mean(self.norm(x), axis=1))


def _patches(x, patch):
    """[n, H, W, C] as [n, H W / patch^2, patch^2 C], row by row."""
    n, height, width, channels = x.shape
    x = x.reshape(n, height // patch, patch, width // patch, patch, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, -1, patch * patch * channels)


def vit(
    *,
    image_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
    patch: int = 4,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    mlp_ratio: int = 2,
    l2: float = 0.0,
) -> Model:
    """Vision Transformer: layer normalisation before each branch, learned position embeddings.

    The tokens after the last layer normalisation are averaged (no class token), as in Beyer et
    al.; there is no dropout.

    Args:
      image_shape: (height, width, channels); height and width multiples of `patch`.
      num_classes: C >= 2.
      patch: side of the square patches, one token each.
      width: features of a token, a multiple of `heads`; depth: transformer blocks, >= 1.
      heads: attention heads; mlp_ratio: hidden units of a block's perceptron over `width`, >= 1.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` without `statistics`, for batches {"x": float[n, H, W, channels], "y": int[n]}.

    Raises:
      ValueError: for sizes out of range, or that do not divide.

    Example:
      >>> import jax, jax.numpy as jnp, models
      >>> model = models.vit(image_shape=(8, 8, 3), width=8, depth=1, heads=2)
      >>> params = jax.jit(model.init)(jax.random.key(0))
      >>> jax.jit(model.predict)(params, jnp.ones((2, 8, 8, 3))).shape
      (2, 10)

    References:
      Dosovitskiy et al., An Image is Worth 16x16 Words: Transformers for Image Recognition at
      Scale, 2021, https://arxiv.org/abs/2010.11929
      Beyer, Zhai, Kolesnikov, Better plain ViT baselines for ImageNet-1k, 2022,
      https://arxiv.org/abs/2205.01580
    """
    check_l2(l2)
    _check(image_shape, num_classes, patch, width, depth, heads, mlp_ratio)

    def build(key):
        net = _ViT(
            image_shape, num_classes, patch, width, depth, heads, mlp_ratio * width, nnx.Rngs(key)
        )
        return nnx.split(net, nnx.Param)

    graph, _ = nnx.eval_shape(lambda: build(jax.random.key(0)))

    def init(key):
        return nnx.to_pure_dict(build(key)[1])

    def predict(params, x):
        return nnx.merge(graph, nnx.State(params))(x.astype(jnp.float32))

    return Model(init, softmax_loss(predict, l2), predict)


def _check(image_shape, num_classes, patch, width, depth, heads, mlp_ratio):
    height, wide, channels = image_shape
    if min(height, wide, channels) < 1 or num_classes < 2:
        raise ValueError(
            f"image_shape is {image_shape} with {num_classes} classes: it needs at least one "
            "pixel, one channel and two classes. Resize the images."
        )
    if patch < 1 or height % patch or wide % patch:
        raise ValueError(
            f"patch is {patch} for images of {height} x {wide}: it must divide both sides. Resize "
            "the images or choose another patch."
        )
    if heads < 1 or width < 1 or width % heads:
        raise ValueError(
            f"width is {width} with {heads} heads: the heads share the width equally. Take a "
            "multiple of heads."
        )
    if depth < 1 or mlp_ratio < 1:
        raise ValueError(f"depth is {depth} and mlp_ratio {mlp_ratio}: both must be at least 1.")
