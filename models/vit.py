"""Vision Transformers: a small one for images of the size of CIFAR's, and the published ones."""

import jax.numpy as jnp
from flax import nnx

from models.base import Model, check_dtype, check_heads, check_l2, functions_of, softmax_loss

SIZES = {
    "tiny": {"width": 192, "depth": 12, "heads": 3, "mlp_ratio": 4, "patch": 16},
    "small": {"width": 384, "depth": 12, "heads": 6, "mlp_ratio": 4, "patch": 16},
    "base": {"width": 768, "depth": 12, "heads": 12, "mlp_ratio": 4, "patch": 16},
}


class _Block(nnx.Module):
    def __init__(self, width, heads, hidden, *, tanh, epsilon, dtype, rngs):
        self.tanh = tanh
        self.norm1 = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.dense1 = nnx.Linear(width, hidden, dtype=dtype, rngs=rngs)
        self.dense2 = nnx.Linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.dense2(nnx.gelu(self.dense1(self.norm2(x)), approximate=self.tanh))


class _ViT(nnx.Module):
    def __init__(
        self, image_shape, num_classes, patch, width, depth, *, pool, dtype, rngs, **block
    ):
        height, wide, channels = image_shape
        self.patch, self.pool = patch, pool
        self.embed = nnx.Linear(patch * patch * channels, width, dtype=dtype, rngs=rngs)
        tokens = (height // patch) * (wide // patch) + (pool == "class")
        self.positions = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), (1, tokens, width), jnp.float32)
        )
        if pool == "class":
            self.class_token = nnx.Param(jnp.zeros((1, 1, width)))
        self.names = [f"block{i}" for i in range(depth)]
        for name in self.names:
            setattr(self, name, _Block(width, dtype=dtype, rngs=rngs, **block))
        self.norm = nnx.LayerNorm(width, epsilon=block["epsilon"], rngs=rngs)
        self.dense = nnx.Linear(width, num_classes, rngs=rngs)

    def __call__(self, x):
        x = self.embed(_patches(x, self.patch))
        if self.pool == "class":
            first = jnp.broadcast_to(self.class_token[...], (x.shape[0], 1, x.shape[2]))
            x = jnp.concatenate([first, x], axis=1)
        x = x + self.positions[...]
        for name in self.names:
            x = getattr(self, name)(x)
        x = self.norm(x)
        return self.dense(x[:, 0] if self.pool == "class" else jnp.mean(x, axis=1))


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
    pool: str = "mean",
    gelu: str = "tanh",
    epsilon: float = 1e-6,
    dtype: str = "float32",
    l2: float = 0.0,
) -> Model:
    """Vision Transformer: layer normalisation before each branch, learned position embeddings.

    The tokens after the last layer normalisation are averaged, as in Beyer et al., or a class
    token stands before them, with a position embedding of its own, and alone gives the logits, as
    in Dosovitskiy et al.; there is no dropout.

    The defaults make a small network for images of the size of CIFAR's. The published ones have
    pool "class", gelu "exact", and the `SIZES` of this file, which are ViT-Ti/16, -S/16 and -B/16.

    Args:
      image_shape: (height, width, channels); height and width multiples of `patch`.
      num_classes: C >= 2.
      patch: side of the square patches, one token each.
      width: features of a token, a multiple of `heads`; depth: transformer blocks, >= 1.
      heads: attention heads; mlp_ratio: hidden units of a block's perceptron over `width`, >= 1.
      pool: "mean" of all tokens or "class", a token of its own.
      gelu: "tanh", the approximation, or "exact", with the error function.
      epsilon: added to the variance in layer normalisations, > 0.
      dtype: "float32" or "bfloat16", of the factors of matrix products and the hidden units;
        residuals, layer normalisations, softmax, logits and parameters are float32.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` without `statistics`, for batches {"x": float[n, H, W, channels], "y": int[n]}.

    Raises:
      ValueError: for sizes out of range, or that do not divide, or an option that is not listed.

    Example:
      The published ViT-B/16.

      >>> import jax
      >>> import models
      >>> from models.vit import SIZES
      >>> published = {"image_shape": (224, 224, 3), "pool": "class", "gelu": "exact"}
      >>> model = models.vit(num_classes=1000, **published, **SIZES["base"])
      >>> params = jax.eval_shape(model.init, jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      86567656

    References:
      Dosovitskiy et al., An Image is Worth 16x16 Words: Transformers for Image Recognition at
      Scale, 2021, https://arxiv.org/abs/2010.11929
      Touvron, Cord, Douze, Massa, Sablayrolles, Jegou, Training data-efficient image transformers
      and distillation through attention, 2021 (Ti and S), https://arxiv.org/abs/2012.12877
      Beyer, Zhai, Kolesnikov, Better plain ViT baselines for ImageNet-1k, 2022,
      https://arxiv.org/abs/2205.01580
    """
    check_l2(l2)
    dtype = check_dtype(dtype)
    _check(image_shape, num_classes, patch, width, depth, heads, mlp_ratio)
    _check_options(pool, gelu, epsilon)
    block = {"heads": heads, "hidden": mlp_ratio * width, "tanh": gelu == "tanh"}
    block |= {"epsilon": epsilon, "dtype": dtype}

    def make(rngs):
        return _ViT(image_shape, num_classes, patch, width, depth, pool=pool, rngs=rngs, **block)

    init, apply = functions_of(make)

    def predict(params, x):
        return apply(params, x.astype(jnp.float32))

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
    check_heads(width, heads)
    if depth < 1 or mlp_ratio < 1:
        raise ValueError(f"depth is {depth} and mlp_ratio {mlp_ratio}: both must be at least 1.")


def _check_options(pool, gelu, epsilon):
    if pool not in ("mean", "class"):
        raise ValueError(f"pool is {pool!r}: choose 'mean' of the tokens or a 'class' token.")
    if gelu not in ("tanh", "exact"):
        raise ValueError(f"gelu is {gelu!r}: choose 'tanh', its approximation, or 'exact'.")
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon}: the layer normalisations divide by it. Take 1e-6.")
