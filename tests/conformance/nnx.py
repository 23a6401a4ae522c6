"""Every layer of flax.nnx."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.conformance.gradients import B, Row, score

LEFT_OUT = {
    "Dict": "a container",
    "List": "a container",
    "Module": "the base of layers",
    "RoPE": "turns what it is given: no parameters",
    "RNNCellBase": "the base of cells",
}
SEQUENCE, IMAGE, VECTOR = (6, 5), (6, 6, 3), (5,)


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.table, self.layer = nnx.Embed(11, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        return self.table.attend(jnp.tanh(self.layer(self.table(x))))


class Scanned(nnx.Module):
    """Blocks whose parameters are stacked."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return nnx.Linear(5, 5, rngs=rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x, block):
            return x + jnp.tanh(block(x))

        return forward(x, self.blocks)


class Contained(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(5, 5, rngs=rngs) for _ in range(2)])
        self.named = nnx.Dict(out=nnx.Linear(5, 3, rngs=rngs))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.named["out"](x)


def _rnn(cell):
    return lambda r: (nnx.RNN(cell(5, 4, rngs=r), rngs=r), SEQUENCE)


CASES = {
    "BatchNorm": {"": lambda r: (nnx.BatchNorm(5, use_running_average=True, rngs=r), VECTOR)},
    "Bidirectional": {"": lambda r: (nnx.Bidirectional(
        nnx.RNN(nnx.LSTMCell(5, 4, rngs=r), rngs=r), nnx.RNN(nnx.GRUCell(5, 4, rngs=r), rngs=r),
        rngs=r), SEQUENCE)},
    "Conv": {
        "": lambda r: (nnx.Conv(3, 4, (3, 3), rngs=r), IMAGE),
        "strided": lambda r: (nnx.Conv(3, 4, (3, 3), 2, padding="VALID", rngs=r), IMAGE),
        "dilated": lambda r: (nnx.Conv(3, 4, (3, 3), kernel_dilation=2, rngs=r), IMAGE),
        "circular": lambda r: (nnx.Conv(3, 4, (3, 3), padding="CIRCULAR", rngs=r), IMAGE),
        "causal": lambda r: (nnx.Conv(5, 4, (3,), padding="CAUSAL", rngs=r), SEQUENCE),
        "groups": lambda r: (nnx.Conv(3, 6, (3, 3), feature_group_count=3, rngs=r), IMAGE),
        "highest": lambda r: (nnx.Conv(3, 4, (3, 3), precision="highest", rngs=r), IMAGE),
    },
    "ConvTranspose": {
        "": lambda r: (nnx.ConvTranspose(3, 4, (3, 3), strides=(2, 2), rngs=r), IMAGE),
        "transposed": lambda r: (
            nnx.ConvTranspose(3, 4, (3, 3), transpose_kernel=True, rngs=r), IMAGE),
    },
    "Dict": {"": lambda r: (Contained(r), VECTOR)},
    "Dropout": {"": lambda r: (nnx.Sequential(
        nnx.Linear(5, 7, rngs=r), nnx.Dropout(0.4, rngs=r), nnx.Linear(7, 3, rngs=r)), SEQUENCE)},
    "Einsum": {"": lambda r: (
        nnx.Einsum("bti,ijk->btjk", (5, 2, 3), (2, 3), rngs=r), SEQUENCE)},
    "Embed": {
        "": lambda r: (nnx.Embed(11, 6, rngs=r), "ids"),
        "tied": lambda r: (Tied(r), "ids"),
    },
    "GRUCell": {"": _rnn(nnx.GRUCell)},
    "GroupNorm": {"": lambda r: (nnx.GroupNorm(4, num_groups=2, rngs=r), (6, 4))},
    "InstanceNorm": {"": lambda r: (nnx.InstanceNorm(3, rngs=r), IMAGE)},
    "LSTMCell": {"": _rnn(nnx.LSTMCell)},
    "LayerNorm": {
        "": lambda r: (nnx.LayerNorm(5, rngs=r), SEQUENCE),
        "bfloat16": lambda r: (nnx.LayerNorm(5, dtype=jnp.bfloat16, rngs=r), SEQUENCE),
    },
    "Linear": {
        "": lambda r: (nnx.Linear(5, 7, rngs=r), VECTOR),
        "bfloat16": lambda r: (nnx.Linear(5, 7, dtype=jnp.bfloat16, rngs=r), SEQUENCE),
        "bfloat16 parameters": lambda r: (
            nnx.Linear(5, 7, param_dtype=jnp.bfloat16, rngs=r), SEQUENCE),
        "highest": lambda r: (nnx.Linear(5, 7, precision="highest", rngs=r), SEQUENCE),
        "float32 products": lambda r: (
            nnx.Linear(5, 7, dtype=jnp.bfloat16, preferred_element_type=jnp.float32, rngs=r),
            SEQUENCE),
        "in nnx.scan": lambda r: (Scanned(r), SEQUENCE),
    },
    "LinearGeneral": {
        "": lambda r: (nnx.LinearGeneral(5, (2, 3), rngs=r), SEQUENCE),
        "two axes": lambda r: (
            nnx.LinearGeneral((6, 3), (2, 3), axis=(-2, -1), rngs=r), IMAGE),
    },
    "List": {"": lambda r: (Contained(r), SEQUENCE)},
    "LoRA": {"": lambda r: (nnx.LoRA(5, 2, 4, rngs=r), SEQUENCE)},
    "LoRALinear": {"": lambda r: (nnx.LoRALinear(5, 4, lora_rank=2, rngs=r), SEQUENCE)},
    "MultiHeadAttention": {
        "": lambda r: (nnx.MultiHeadAttention(
            2, 5, 6, decode=False, rngs=r), SEQUENCE),
        "dropout": lambda r: (nnx.MultiHeadAttention(
            2, 5, 6, decode=False, dropout_rate=0.3, deterministic=False, rngs=r), SEQUENCE),
        "normalised": lambda r: (nnx.MultiHeadAttention(
            2, 5, 6, decode=False, normalize_qk=True, rngs=r), SEQUENCE),
    },
    "OptimizedLSTMCell": {"": _rnn(nnx.OptimizedLSTMCell)},
    "PReLU": {"": lambda r: (nnx.Sequential(nnx.Linear(5, 4, rngs=r), nnx.PReLU()), VECTOR)},
    "RMSNorm": {"": lambda r: (nnx.RMSNorm(5, rngs=r), SEQUENCE)},
    "RNN": {
        "": _rnn(nnx.SimpleCell),
        "reverse": lambda r: (
            nnx.RNN(nnx.GRUCell(5, 4, rngs=r), reverse=True, keep_order=True, rngs=r), SEQUENCE),
    },
    "Sequential": {"": lambda r: (nnx.Sequential(
        nnx.Linear(5, 6, rngs=r), jnp.tanh, nnx.Linear(6, 3, rngs=r)), VECTOR)},
    "SimpleCell": {"": _rnn(nnx.SimpleCell)},
    "SpectralNorm": {"": lambda r: (nnx.SpectralNorm(
        nnx.Linear(5, 6, rngs=r), rngs=r), VECTOR)},
    "WeightNorm": {"": lambda r: (nnx.WeightNorm(nnx.Linear(5, 6, rngs=r), rngs=r), VECTOR)},
}  # fmt: skip


def names():
    classes = (n for n in dir(nnx) if inspect.isclass(getattr(nnx, n)))
    return sorted(n for n in classes if issubclass(getattr(nnx, n), nnx.Module))


def row_of(make, rng):
    module, shape = make(nnx.Rngs(0))
    if shape == "ids":
        batch = rng.integers(0, 11, (B, 6)).astype(np.int32)
    else:
        batch = rng.normal(size=(B, *shape)).astype(np.float32)
    options = {"update_stats": False} if isinstance(module, nnx.SpectralNorm) else {}
    graph, params, rest = nnx.split(module, (nnx.Param, nnx.LoRAParam), ...)

    def loss(params, x, key):
        model = nnx.merge(graph, params, rest, copy=True)
        nnx.reseed(model, default=key, dropout=key)
        return score(model(x, **options), len(x))

    params = jax.tree.map(
        lambda p: np.asarray(p) + (0.1 * rng.normal(size=p.shape)).astype(p.dtype), params
    )
    return Row(loss, params, batch)
