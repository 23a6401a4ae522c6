"""Every layer of equinox.nn."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from tests.conformance.gradients import B, Row, score

LEFT_OUT = {
    "StateIndex": "no layer: what BatchNorm keeps",
    "StatefulLayer": "the base of layers with a state",
}
K = jax.random.key(0)
LINE, IMAGE, CUBE, VECTOR = (3, 9), (3, 6, 6), (2, 4, 4, 4), (5,)
nn = eqx.nn


def _then(layer, *others):
    """A layer without parameters behind a product with some."""
    return lambda: (nn.Sequential([nn.Linear(5, 6, key=K), layer, *others]), VECTOR)


def _pooled(kind, number, *args):
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][number - 1]
    channels = 2 if number == 3 else 3
    shape = {1: LINE, 2: IMAGE, 3: CUBE}[number]
    layers = lambda: [conv(channels, 2, 1, key=K), getattr(nn, kind)(*args)]  # noqa: E731
    return lambda: (nn.Sequential(layers()), shape)


class Loop(eqx.Module):
    """A cell over a sequence."""

    cell: eqx.Module

    def __call__(self, xs):
        zeros = jnp.zeros(4, xs.dtype)
        start = (zeros, zeros) if isinstance(self.cell, nn.LSTMCell) else zeros

        def body(state, x):
            state = self.cell(x, state)
            return jax.tree.map(lambda new, old: new.astype(old.dtype), state, start), state

        return jax.lax.scan(body, start, xs)[1]


class Attends(eqx.Module):
    layer: eqx.Module
    mask: bool = False

    def __call__(self, x, key=None):
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool)) if self.mask else None
        return self.layer(x, x, x, mask=mask, key=key)


class Rotated(eqx.Module):
    layer: eqx.Module
    rotary: eqx.Module

    def __call__(self, x):
        return self.rotary(jax.vmap(self.layer)(x))


class Stacked(eqx.Module):
    """Layers that eqx.filter_vmap has made, in a loop."""

    layers: eqx.Module

    def __init__(self):
        self.layers = eqx.filter_vmap(lambda k: nn.Linear(5, 5, key=k))(jax.random.split(K, 3))

    def __call__(self, x):
        dynamic, static = eqx.partition(self.layers, eqx.is_array)

        def body(x, layer):
            return x + jnp.tanh(eqx.combine(layer, static)(x)), None

        return jax.lax.scan(body, x, dynamic)[0]


class Tied(eqx.Module):
    """An embedding and an output of one matrix, by nn.Shared."""

    shared: nn.Shared

    def __init__(self):
        pair = nn.Embedding(11, 6, key=K), nn.Linear(6, 11, use_bias=False, key=K)
        self.shared = nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

    def __call__(self, ids):
        table, out = self.shared()
        return jax.vmap(out)(jnp.tanh(jax.vmap(table)(ids)))


CASES = {
    **{
        f"Adaptive{how}Pool{n}d": {"": _pooled(f"Adaptive{how}Pool{n}d", n, 2)}
        for how in ("Avg", "Max")
        for n in (1, 2, 3)
    },
    "AdaptivePool": {"": _pooled("AdaptivePool", 1, 4, 1, jnp.mean)},
    **{
        f"{how}Pool{n}d": {"": _pooled(f"{how}Pool{n}d", n, 2, 2)}
        for how in ("Avg", "Max")
        for n in (1, 2, 3)
    },
    "Pool": {"": _pooled("Pool", 2, 0.0, jax.lax.add, 2, 2, 1)},
    "BatchNorm": {
        "": lambda: (nn.BatchNorm(5, "batch", mode="batch", inference=True), VECTOR),
        "ema": lambda: (nn.BatchNorm(5, "batch", mode="ema", inference=True), VECTOR),
    },
    "Conv": {"": lambda: (nn.Conv(2, 3, 4, 3, key=K), IMAGE)},
    "Conv1d": {
        "": lambda: (nn.Conv1d(3, 4, 3, key=K), LINE),
        "causal": lambda: (nn.Conv1d(3, 4, 3, padding=((2, 0),), key=K), LINE),
        "depthwise": lambda: (nn.Conv1d(3, 3, 3, groups=3, key=K), LINE),
        "circular": lambda: (nn.Conv1d(3, 4, 3, padding=1, padding_mode="CIRCULAR", key=K), LINE),
    },
    "Conv2d": {
        "": lambda: (nn.Conv2d(3, 4, 3, key=K), IMAGE),
        "strided": lambda: (nn.Conv2d(3, 4, 3, stride=2, padding=1, key=K), IMAGE),
        "dilated": lambda: (nn.Conv2d(3, 4, 2, dilation=2, key=K), IMAGE),
        "groups": lambda: (nn.Conv2d(3, 6, 3, groups=3, use_bias=False, key=K), IMAGE),
        "reflect": lambda: (
            nn.Conv2d(3, 4, 3, padding="SAME", padding_mode="REFLECT", key=K),
            IMAGE,
        ),
    },
    "Conv3d": {"": lambda: (nn.Conv3d(2, 3, 2, key=K), CUBE)},
    "ConvTranspose": {"": lambda: (nn.ConvTranspose(2, 3, 4, 3, stride=2, key=K), IMAGE)},
    "ConvTranspose1d": {"": lambda: (nn.ConvTranspose1d(3, 4, 3, key=K), LINE)},
    "ConvTranspose2d": {
        "": lambda: (nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1, key=K), IMAGE),
        "groups": lambda: (nn.ConvTranspose2d(3, 6, 3, groups=3, key=K), IMAGE),
    },
    "ConvTranspose3d": {"": lambda: (nn.ConvTranspose3d(2, 3, 2, key=K), CUBE)},
    "Dropout": {"": _then(nn.Dropout(0.4), nn.Linear(6, 3, key=K))},
    "Embedding": {"": lambda: (nn.Embedding(11, 6, key=K), "ids")},
    "GRUCell": {"": lambda: (Loop(nn.GRUCell(5, 4, key=K)), (6, 5))},
    "GroupNorm": {
        "": lambda: (nn.GroupNorm(2, 6), (6, 4)),
        "of channels": lambda: (nn.GroupNorm(3, 3), IMAGE),
    },
    "Identity": {"": _then(nn.Identity())},
    "LSTMCell": {"": lambda: (Loop(nn.LSTMCell(5, 4, key=K)), (6, 5))},
    "Lambda": {"": _then(nn.Lambda(jnp.tanh))},
    "LayerNorm": {
        "": lambda: (nn.LayerNorm((6, 5)), (6, 5)),
        "no bias": lambda: (nn.LayerNorm(5, use_bias=False), VECTOR),
        "behind": _then(nn.LayerNorm(6), nn.Linear(6, 3, key=K)),
    },
    "Linear": {
        "": lambda: (nn.Linear(5, 7, key=K), VECTOR),
        "scalar": lambda: (nn.Linear(5, "scalar", key=K), VECTOR),
        "stacked in a loop": lambda: (Stacked(), VECTOR),
    },
    "MLP": {
        "": lambda: (nn.MLP(5, 3, 8, 2, key=K), VECTOR),
        "scan": lambda: (nn.MLP(5, "scalar", 8, 3, activation=jax.nn.gelu, key=K), VECTOR),
    },
    "MultiheadAttention": {
        "": lambda: (Attends(nn.MultiheadAttention(2, 6, key=K)), (5, 6)),
        "causal": lambda: (Attends(nn.MultiheadAttention(2, 6, key=K), True), (5, 6)),
        "dropout": lambda: (Attends(nn.MultiheadAttention(2, 6, dropout_p=0.3, key=K)), (5, 6)),
    },
    "PReLU": {"": _then(nn.Lambda(nn.PReLU()))},
    "RMSNorm": {"": lambda: (nn.RMSNorm(5), VECTOR)},
    "RotaryPositionalEmbedding": {
        "": lambda: (Rotated(nn.Linear(5, 6, key=K), nn.RotaryPositionalEmbedding(6)), (7, 5))
    },
    "Sequential": {"": _then(nn.Lambda(jnp.tanh), nn.Linear(6, 3, key=K))},
    "Shared": {"": lambda: (Tied(), "ids")},
    "SpectralNorm": {
        "": lambda: (
            nn.SpectralNorm(nn.Linear(5, 6, key=K), "weight", inference=True, key=K),
            VECTOR,
        )
    },
    "WeightNorm": {
        "": lambda: (nn.WeightNorm(nn.Linear(5, 6, key=K), "weight"), VECTOR),
        "conv": lambda: (nn.WeightNorm(nn.Conv2d(3, 4, 3, key=K), "weight"), IMAGE),
    },
}


def names():
    classes = (n for n in dir(nn) if inspect.isclass(getattr(nn, n)))
    return sorted(n for n in classes if issubclass(getattr(nn, n), eqx.Module))


def row_of(make, rng):
    module, shape = make()
    if shape == "ids":
        batch = rng.integers(0, 11, (B, 6) if isinstance(module, Tied) else (B,)).astype(np.int32)
    else:
        batch = rng.normal(size=(B, *shape)).astype(np.float32)
    state = nn.State(module)
    params, static = eqx.partition(module, eqx.is_inexact_array)
    stateful = isinstance(module, nn.StatefulLayer) and module.is_stateful()
    keyed = "key" in inspect.signature(type(module).__call__).parameters

    def loss(params, x, key):
        model = eqx.combine(params, static)

        def one(x, key):
            given = {"key": key} if keyed else {}
            return model(x, state, **given)[0] if stateful else model(x, **given)

        keys = jax.random.split(key, len(x))
        return score(jax.vmap(one, axis_name="batch")(x, keys), len(x))

    params = jax.tree.map(
        lambda p: np.asarray(p) + (0.1 * rng.normal(size=p.shape)).astype(p.dtype), params
    )
    return Row(loss, params, batch)
