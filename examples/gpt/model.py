"""A decoder in flax linen, and bytes to train it on, for every way of training in this folder."""

import os
import pathlib

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

VOCABULARY = 128


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, mask):
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        y = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class Decoder(nn.Module):
    width: int = 32
    depth: int = 2
    heads: int = 4

    @nn.compact
    def __call__(self, tokens):
        place = self.param("place", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        embed = nn.Embed(VOCABULARY, self.width)
        x, mask = embed(tokens) + place[None], nn.make_causal_mask(tokens)
        for _ in range(self.depth):
            x = Block(self.heads)(x, mask)
        return embed.attend(nn.LayerNorm()(x)).astype(jnp.float32)


def sequences(length: int, count: int) -> np.ndarray:
    """int32[count, length + 1]: the first bytes of the sources of Python's standard library."""
    text = b"".join(
        p.read_bytes() for p in sorted(pathlib.Path(os.__file__).parent.glob("[a-d]*.py"))
    )
    tokens = np.minimum(np.frombuffer(text, np.uint8), VOCABULARY - 1).astype(np.int32)
    return tokens[: count * (length + 1)].reshape(count, length + 1)
