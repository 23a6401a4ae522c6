"""Vision Transformers: the published ones, and a small one for images of CIFAR's size."""

import jax.numpy as jnp
from flax import nnx

from models import base
from models.base import Model

EPSILON = 1e-6  # of the layer normalisations
POOLS, GELUS = ("mean", "class"), ("tanh", "exact")
SIZES = {
    "tiny": {"width": 192, "depth": 12, "heads": 3, "mlp_ratio": 4, "patch": 16},
    "small": {"width": 384, "depth": 12, "heads": 6, "mlp_ratio": 4, "patch": 16},
    "base": {"width": 768, "depth": 12, "heads": 12, "mlp_ratio": 4, "patch": 16},
}


class _Block(nnx.Module):
    def __init__(self, width, heads, hidden, *, tanh, dtype, rngs):
        self.tanh = tanh
        self.norm1 = nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs)
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
        self.norm = nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs)
        self.dense = nnx.Linear(width, num_classes, rngs=rngs)

    def __call__(self, x, given):
        x = self.embed(_patches(x.astype(jnp.float32), self.patch))
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


@base.checked
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
    dtype: str = "float32",
    l2: float = 0.0,
) -> Model:
    """Vision Transformer: layer normalisation before each branch, learned position embeddings.

    The logits are computed from the mean of the tokens after the last layer normalisation, as in
    Beyer et al., or from a class token, as in Dosovitskiy et al. There is no dropout.

    The defaults give a small network for images of CIFAR's size. The published ones have pool
    "class", gelu "exact" and the sizes in `models.vit.SIZES`: ViT-Ti/16, -S/16 and -B/16.

    Args:
      image_shape: (height, width, channels); height and width multiples of `patch`.
      num_classes: C >= 2.
      patch: side of the square patches in pixels, >= 1.
      width: features of a token, a multiple of `heads`.
      depth: transformer blocks, >= 1.
      heads: attention heads, >= 1.
      mlp_ratio: hidden units of a block's perceptron / `width`, >= 1.
      pool: "mean", of all tokens, or "class", for a class token.
      gelu: "tanh", the approximation, or "exact", with the error function.
      dtype: "float32" or "bfloat16", for the factors of matrix products and the hidden units;
        residuals, layer normalisations, softmax, logits and parameters are float32.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` without `statistics`, for batches {"x": float[n, H, W, channels], "y": int[n]}.

    Raises:
      ValueError: if a size is out of range or does not divide, or an option is unknown.

    Examples:
      >>> import jax, models
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
    compute = base.check_dtype(dtype)
    base.check_images(image_shape)
    height, wide, _ = image_shape
    base.check_heads(width, heads)
    if min(height, wide) < patch or height % patch or wide % patch:
        raise ValueError(
            f"patch is {patch} for images of {height} x {wide}: it must divide both sides. Resize "
            "the images or use another patch size."
        )
    base.check_choice(POOLS, pool=pool)
    base.check_choice(GELUS, gelu=gelu)
    block = {"heads": heads, "hidden": mlp_ratio * width, "tanh": gelu == "tanh", "dtype": compute}

    def make(rngs):
        return _ViT(image_shape, num_classes, patch, width, depth, pool=pool, rngs=rngs, **block)

    return base.model_of(make, l2, inputs=(None, *image_shape))
