"""GPT-2's decoder, for next-token prediction."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from models import base
from models.base import Model

DEVIATION = 0.02  # of all weights and embeddings at the start
MLP_RATIO = 4
EPSILON = 1e-5  # of the layer normalisations

SIZES = {
    "tiny": {"width": 128, "depth": 2, "heads": 2},  # in CD-GraB's experiments
    "small": {"width": 768, "depth": 12, "heads": 12},  # as published: 124 million parameters
}


def _dense(fan_in, fan_out, dtype, rngs, scale=1.0):
    init = nnx.initializers.normal(scale * DEVIATION)
    return nnx.Linear(
        fan_in, fan_out, kernel_init=init, dtype=dtype, dot_general=base.flat_dot_general, rngs=rngs
    )


def _norm(width, rngs):
    return nnx.LayerNorm(width, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)


class _Attention(nnx.Module):
    def __init__(self, width, heads, scale, dtype, rngs):
        self.qkv = _dense(width, 3 * width, dtype, rngs)
        self.project = _dense(width, width, dtype, rngs, scale)
        self.heads = heads

    def __call__(self, x):
        n, length, width = x.shape
        qkv = self.qkv(x).reshape(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k, preferred_element_type=jnp.float32)
        scores = scores / math.sqrt(width // self.heads)
        past = jnp.tril(jnp.ones((1, 1, length, length), bool))
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf)).astype(v.dtype)
        return self.project(jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(x.shape))


class _Block(nnx.Module):
    def __init__(self, width, heads, scale, dtype, rngs):
        self.norm1 = _norm(width, rngs)
        self.attention = _Attention(width, heads, scale, dtype, rngs)
        self.norm2 = _norm(width, rngs)
        self.dense1 = _dense(width, MLP_RATIO * width, dtype, rngs)
        self.dense2 = _dense(MLP_RATIO * width, width, dtype, rngs, scale)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.dense2(nnx.gelu(self.dense1(self.norm2(x)), approximate=True))


class _GPT2(nnx.Module):
    def __init__(self, vocab_size, context, width, depth, heads, dtype, rngs):
        self.dtype = dtype
        draw = nnx.initializers.normal(DEVIATION)
        self.tokens = nnx.Param(draw(rngs.params(), (vocab_size, width), jnp.float32))
        self.positions = nnx.Param(draw(rngs.params(), (context, width), jnp.float32))
        self.names = [f"block{i}" for i in range(depth)]
        for name in self.names:
            # The scale keeps the variance of the sum of all branches independent of the depth.
            setattr(self, name, _Block(width, heads, 1 / math.sqrt(2 * depth), dtype, rngs))
        self.norm = _norm(width, rngs)

    def __call__(self, x, given):
        tokens, (length, context) = self.tokens[...], (x.shape[1], len(self.positions[...]))
        if length > context:
            raise ValueError(
                f"the sequences have {length} tokens and context is {context}: split them, or "
                "build the model with a longer context."
            )
        y = tokens[x] + self.positions[...][None, :length]
        for name in self.names:
            y = getattr(self, name)(y)
        return base.product(self.norm(y), tokens.T, self.dtype)


@base.checked
def gpt2(
    *,
    vocab_size: int,
    context: int,
    width: int,
    depth: int,
    heads: int,
    dtype: str = "float32",
    l2: float = 0.0,
) -> Model:
    """GPT-2: a causal transformer decoder that predicts every next token; without dropout.

    h = tokens[x] + positions; then in every block h += attention(norm(h)) and
    h += W_2 gelu(W_1 norm(h)) with 4 * width hidden units; logits = norm(h) tokens^T.

    It uses the tanh approximation of gelu, layer normalisations with epsilon 1e-5, and biases in
    all layers. Weights and embeddings are initialised from a normal distribution with standard
    deviation 0.02, the last matrix of each residual branch with 0.02 / sqrt(2 depth); biases are 0.

    Args:
      vocab_size: V >= 2; tokens are 0 .. V - 1.
      context: longest sequence, >= 1.
      width: features of a token, a multiple of `heads`.
      depth: transformer blocks, >= 1.
      heads: attention heads, >= 1.
      dtype: "float32" or "bfloat16", for the factors of matrix products and the hidden units;
        residuals, layer normalisations, softmax, logits and parameters are float32.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` without `statistics`, for batches {"x": int[n, L], "y": int[n, L]} with
      L <= context, where y holds the token after each of x. A sequence is one example: its loss
      is the mean cross-entropy of its tokens, in nats; `predict` returns logits float32[n, L, V].

    Raises:
      ValueError: if a size is out of range, `heads` does not divide `width`, or the dtype is
        unknown; from `loss` and `predict` if a sequence is longer than `context`.

    Examples:
      >>> import jax, models
      >>> from models.gpt2 import SIZES
      >>> model = models.gpt2(vocab_size=50257, context=1024, **SIZES["small"])
      >>> params = jax.eval_shape(model.init, jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      124439808

    References:
      Radford et al., Language Models are Unsupervised Multitask Learners, 2019,
      https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
      Press, Wolf, Using the Output Embedding to Improve Language Models, 2017,
      https://arxiv.org/abs/1608.05859
    """
    compute = base.check_dtype(dtype)
    base.check_heads(width, heads)

    def make(rngs):
        return _GPT2(vocab_size, context, width, depth, heads, compute, rngs)

    return base.model_of(make, l2, inputs=(None, None), whole=True)
