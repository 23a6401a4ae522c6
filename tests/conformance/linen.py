"""Every layer of flax.linen."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.conformance.gradients import B, Row, score

LEFT_OUT = {
    "Module": "the base of layers",
    "RNNCellBase": "the base of cells",
}
SEQUENCE, IMAGE, VECTOR = (6, 5), (6, 6, 3), (5,)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, x):
        table = nn.Embed(11, 6)
        return table.attend(jnp.tanh(nn.Dense(6)(table(x))))


class Scanned(nn.Module):
    """Blocks stacked by nn.scan; `rematerialised` as language models have them."""

    rematerialised: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.rematerialised else Block
        loop = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return loop()(x, None)[0]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(5)(jnp.tanh(nn.LayerNorm()(nn.Dense(7)(x)))), None


class Products(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (16, 16))
        return nn.Fp8Einsum()("bti,ij->btj", x, w)


class Experts(nn.Module):
    """Layers side by side by nn.vmap."""

    @nn.compact
    def __call__(self, x):
        many = nn.vmap(
            nn.Dense,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=3,
        )
        return many(4)(x).mean(0)


class Switched(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = [nn.Dense(4, name="a"), nn.Dense(4, name="b")]
        if self.is_initializing():
            return sum(layer(x) for layer in layers)
        return nn.switch(
            jnp.int32(x.reshape(-1)[0] > 0),
            [lambda m, x: layers[0](x), lambda m, x: layers[1](x)],
            self,
            x,
        )


def _rnn(cell):
    return lambda: (nn.RNN(cell()), SEQUENCE)


# {layer: {variant: () -> (module, shape of one input)}}; a shape of "ids" is of places.
CASES = {
    "BatchNorm": {"": lambda: (nn.BatchNorm(use_running_average=True), VECTOR)},
    "Bidirectional": {
        "": lambda: (nn.Bidirectional(nn.RNN(nn.LSTMCell(4)), nn.RNN(nn.GRUCell(4))), SEQUENCE)
    },
    "Conv": {
        "": lambda: (nn.Conv(4, (3, 3)), IMAGE),
        "strided": lambda: (nn.Conv(4, (3, 3), strides=2, padding="VALID"), IMAGE),
        "dilated": lambda: (nn.Conv(4, (3, 3), kernel_dilation=2), IMAGE),
        "transposed data": lambda: (nn.Conv(4, (3, 3), padding=2, input_dilation=2), IMAGE),
        "circular": lambda: (nn.Conv(4, (3, 3), padding="CIRCULAR"), IMAGE),
        "reflect": lambda: (nn.Conv(4, (3, 3), padding="REFLECT"), IMAGE),
        "causal": lambda: (nn.Conv(4, (3,), padding="CAUSAL"), SEQUENCE),
        "groups": lambda: (nn.Conv(6, (3, 3), feature_group_count=3), IMAGE),
        "depthwise": lambda: (nn.Conv(5, (3,), feature_group_count=5), SEQUENCE),
        "mask": lambda: (nn.Conv(4, (3, 3), mask=jnp.triu(jnp.ones((3, 3)))[..., None, None]
                                 * jnp.ones((3, 3, 3, 4))), IMAGE),
        "one by one": lambda: (nn.Conv(4, (1, 1), use_bias=False), IMAGE),
        "highest": lambda: (nn.Conv(4, (3, 3), precision="highest"), IMAGE),
        "3-D": lambda: (nn.Conv(4, (2, 2, 2)), (3, 4, 4, 2)),
        "patches": lambda: (nn.Conv(8, (3, 3), strides=(3, 3), padding="VALID"), IMAGE),
        "bfloat16": lambda: (nn.Conv(4, (3, 3), dtype=jnp.bfloat16), IMAGE),
    },
    "ConvLSTMCell": {"": lambda: (nn.RNN(nn.ConvLSTMCell(2, (3, 3))), (3, 4, 4, 2))},
    "ConvLocal": {
        "": lambda: (nn.ConvLocal(4, (3,)), SEQUENCE),
        "2-D": lambda: (nn.ConvLocal(4, (3, 3), strides=2), IMAGE),
    },
    "ConvTranspose": {
        "": lambda: (nn.ConvTranspose(4, (3, 3), strides=(2, 2)), IMAGE),
        "valid": lambda: (nn.ConvTranspose(4, (3, 3), padding="VALID"), IMAGE),
        "transposed kernel": lambda: (nn.ConvTranspose(4, (3, 3), transpose_kernel=True), IMAGE),
        "circular": lambda: (nn.ConvTranspose(4, (3, 3), padding="CIRCULAR"), IMAGE),
    },
    "Dense": {
        "": lambda: (nn.Dense(7), VECTOR),
        "of a sequence": lambda: (nn.Dense(7), SEQUENCE),
        "bfloat16": lambda: (nn.Dense(7, dtype=jnp.bfloat16), SEQUENCE),
        "bfloat16 parameters": lambda: (nn.Dense(7, param_dtype=jnp.bfloat16), SEQUENCE),
        "highest": lambda: (nn.Dense(7, precision="highest"), SEQUENCE),
        "tied": lambda: (Tied(), "ids"),
        "in nn.scan": lambda: (Scanned(), SEQUENCE),
        "in nn.scan and nn.remat": lambda: (Scanned(True), SEQUENCE),
        "in nn.vmap": lambda: (Experts(), SEQUENCE),
        "in nn.switch": lambda: (Switched(), SEQUENCE),
        "in nn.remat": lambda: (nn.remat(nn.Dense)(7), SEQUENCE),
        "in nn.jit": lambda: (nn.jit(nn.Dense)(7), SEQUENCE),
    },
    "DenseGeneral": {
        "": lambda: (nn.DenseGeneral((2, 3)), SEQUENCE),
        "two axes": lambda: (nn.DenseGeneral((2, 3), axis=(-2, -1)), IMAGE),
        "two axes swapped": lambda: (nn.DenseGeneral(3, axis=(-1, -3)), IMAGE),
        "batch": lambda: (nn.DenseGeneral(3, axis=-1, batch_dims=(0,)), SEQUENCE),
    },
    "Dropout": {
        "": lambda: (nn.Sequential(
            [nn.Dense(7), nn.Dropout(0.4, deterministic=False), nn.Dense(3)]), VECTOR),
        "of dimensions": lambda: (nn.Sequential(
            [nn.Dense(7), nn.Dropout(0.4, (1,), deterministic=False), nn.Dense(3)]), SEQUENCE),
    },
    "Einsum": {
        "": lambda: (nn.Einsum((5, 2, 3), "bti,ijk->btjk"), SEQUENCE),
        "bias": lambda: (nn.Einsum((6, 5, 3), "bti,tij->btj", use_bias=True), SEQUENCE),
    },
    "Embed": {
        "": lambda: (nn.Embed(11, 6), "ids"),
        "bfloat16": lambda: (nn.Embed(11, 6, dtype=jnp.bfloat16), "ids"),
        "one": lambda: (nn.Embed(1, 6), "ids"),
    },
    "Fp8DirectDotGeneralOp": {
        "": lambda: (nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp), (6, 16))
    },
    "Fp8DotGeneral": {"": lambda: (nn.Dense(16, dot_general_cls=nn.Fp8DotGeneral), (6, 16))},
    "Fp8DotGeneralOp": {"": lambda: (nn.Dense(16, dot_general_cls=nn.Fp8DotGeneralOp), (6, 16))},
    "Fp8Einsum": {"": lambda: (Products(), (6, 16))},
    "NANOOFp8DotGeneralOp": {
        "": lambda: (nn.Dense(16, dot_general_cls=nn.NANOOFp8DotGeneralOp), (6, 16))
    },
    "GRUCell": {"": _rnn(lambda: nn.GRUCell(4))},
    "GroupNorm": {
        "": lambda: (nn.GroupNorm(2), (6, 4)),
        "groups of size": lambda: (nn.GroupNorm(None, 3), IMAGE),
    },
    "InstanceNorm": {"": lambda: (nn.InstanceNorm(), IMAGE)},
    "LSTMCell": {"": _rnn(lambda: nn.LSTMCell(4))},
    "LayerNorm": {
        "": lambda: (nn.LayerNorm(), SEQUENCE),
        "slow variance": lambda: (nn.LayerNorm(use_fast_variance=False), SEQUENCE),
        "two axes": lambda: (nn.LayerNorm(reduction_axes=(1, 2), feature_axes=(1, 2)), SEQUENCE),
        "no bias": lambda: (nn.LayerNorm(use_bias=False, dtype=jnp.bfloat16), SEQUENCE),
    },
    "MGUCell": {"": _rnn(lambda: nn.MGUCell(4))},
    "MultiHeadAttention": {
        "": lambda: (nn.MultiHeadAttention(2, qkv_features=6, out_features=5), SEQUENCE),
        "dropout": lambda: (
            nn.MultiHeadAttention(2, qkv_features=6, dropout_rate=0.3, deterministic=False),
            SEQUENCE),
    },
    "MultiHeadDotProductAttention": {
        "": lambda: (nn.MultiHeadDotProductAttention(2, qkv_features=6), SEQUENCE),
        "normalised": lambda: (
            nn.MultiHeadDotProductAttention(2, qkv_features=6, normalize_qk=True), SEQUENCE),
        "broadcast dropout": lambda: (
            nn.MultiHeadDotProductAttention(
                2, qkv_features=6, dropout_rate=0.3, broadcast_dropout=False, deterministic=False),
            SEQUENCE),
        "highest": lambda: (
            nn.MultiHeadDotProductAttention(2, qkv_features=6, precision="highest"), SEQUENCE),
    },
    "OptimizedLSTMCell": {"": _rnn(lambda: nn.OptimizedLSTMCell(4))},
    "PReLU": {"": lambda: (nn.Sequential([nn.Dense(4), nn.PReLU()]), VECTOR)},
    "RMSNorm": {
        "": lambda: (nn.RMSNorm(), SEQUENCE),
        "after": lambda: (nn.Sequential([nn.Dense(6), nn.RMSNorm(), nn.Dense(3)]), SEQUENCE),
    },
    "RNN": {
        "": _rnn(lambda: nn.SimpleCell(4)),
        "reverse": lambda: (nn.RNN(nn.GRUCell(4), reverse=True, keep_order=True), SEQUENCE),
        "unrolled": lambda: (nn.RNN(nn.GRUCell(4), unroll=3), SEQUENCE),
    },
    "SelfAttention": {"": lambda: (nn.SelfAttention(2, qkv_features=6), SEQUENCE)},
    "Sequential": {"": lambda: (nn.Sequential([nn.Dense(6), nn.tanh, nn.Dense(3)]), VECTOR)},
    "SimpleCell": {"": _rnn(lambda: nn.SimpleCell(4)), "residual": _rnn(
        lambda: nn.SimpleCell(4, residual=True))},
    "SpectralNorm": {"": lambda: (nn.SpectralNorm(nn.Dense(6)), VECTOR)},
    "WeightNorm": {
        "": lambda: (nn.WeightNorm(nn.Dense(6)), VECTOR),
        "conv": lambda: (nn.WeightNorm(nn.Conv(4, (3, 3))), IMAGE),
    },
}  # fmt: skip


def names():
    classes = (n for n in dir(nn) if inspect.isclass(getattr(nn, n)))
    return sorted(n for n in classes if issubclass(getattr(nn, n), nn.Module))


def row_of(make, rng):
    module, shape = make()
    if shape == "ids":
        batch = rng.integers(0, 11, (B, 6)).astype(np.int32)
    else:
        batch = rng.normal(size=(B, *shape)).astype(np.float32)
    options = {"update_stats": False} if isinstance(module, nn.SpectralNorm) else {}
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    state = dict(jax.jit(lambda keys, x: module.init(keys, x, **options))(keys, batch[:1]))
    params = jax.tree.map(np.asarray, state.pop("params"))

    def loss(params, x, key):
        y = module.apply({"params": params, **state}, x, rngs={"dropout": key}, **options)
        return score(y, len(x))

    # Zeros, of which many initial biases consist, would hide what is wrong.
    params = jax.tree.map(lambda p: p + (0.1 * rng.normal(size=p.shape)).astype(p.dtype), params)
    return Row(loss, params, batch)
