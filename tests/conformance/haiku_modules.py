"""Every module of Haiku."""

import inspect

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from tests.conformance.gradients import B, Row, score

LEFT_OUT = {
    "ConvND": "the base of Conv1D to Conv3D, which have rows",
    "ConvNDTranspose": "the base of Conv1DTranspose to Conv3DTranspose, which have rows",
    "EMAParamsTree": "averages parameters: no function of data",
    "ExponentialMovingAverage": "averages what it is given: no parameters",
    "Module": "the base of modules",
    "RNNCore": "the base of cores",
    "SNParamsTree": "normalises parameters, as SpectralNorm does",
    "nets.ResNet": "the base of ResNet18 to ResNet200",
    "nets.ResNet34": "as ResNet18, with more blocks",
    "nets.ResNet50": "as ResNet18",
    "nets.ResNet101": "as ResNet18",
    "nets.ResNet152": "as ResNet18",
    "nets.ResNet200": "as ResNet18",
    "nets.VectorQuantizerEMA": "has no parameters: its codes are averages",
}
LINE, IMAGE, CUBE, VECTOR, SEQUENCE = (9, 3), (6, 6, 3), (4, 4, 4, 2), (5,), (6, 5)


def _then(make, shape=VECTOR):
    return lambda x: hk.Linear(3)(make()(hk.Linear(6)(x))), shape


def _core(make, shape=SEQUENCE, reset=False):
    def run(x):
        core, sequence = make(), jnp.moveaxis(x, 1, 0)
        start = core.initial_state(x.shape[0])
        start = jax.tree.map(lambda s: s.astype(x.dtype), start)
        given = (sequence, jnp.arange(len(sequence))[:, None] % 2 == jnp.ones((1, x.shape[0])))
        return hk.dynamic_unroll(core, given if reset else sequence, start)[0].swapaxes(0, 1)

    return run, shape


def _stacked(x):
    """Blocks stacked by hk.experimental.layer_stack, rematerialised."""

    @hk.experimental.layer_stack(3)
    def blocks(x):
        return hk.remat(lambda x: x + jnp.tanh(hk.Linear(5)(x)))(x)

    return blocks(x)


def _switched(x):
    one, two = hk.Linear(4, name="one"), hk.Linear(4, name="two")
    return hk.cond(x.reshape(-1)[0] > 0, one, two, x) if not hk.running_init() else one(x) + two(x)


def _tied(x):
    table = hk.Embed(11, 6)
    return jnp.tanh(table(x)) @ table.embeddings.T


CASES = {
    "AvgPool": {"": _then(lambda: hk.AvgPool(2, 2, "VALID", channel_axis=None), SEQUENCE)},
    "BatchNorm": {
        "": (lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=hk.running_init()), VECTOR),
    },
    "Bias": {"": _then(lambda: hk.Bias()),
             "of axes": (lambda x: hk.Bias(bias_dims=[-2])(x), SEQUENCE)},
    **{
        f"Conv{n}D{kind}": {
            "": (lambda x, f=f"Conv{n}D{kind}": getattr(hk, f)(4, 3)(x), shape),
            "strided": (
                lambda x, f=f"Conv{n}D{kind}": getattr(hk, f)(4, 2, 2, padding="VALID")(x), shape),
        }
        for n, shape in ((1, LINE), (2, IMAGE), (3, CUBE)) for kind in ("", "Transpose")
    },
    **{
        f"Conv{n}DLSTM": {"": _core(
            lambda n=n: getattr(hk, f"Conv{n}DLSTM")((4,) * n, 2, 2), (3, *(4,) * n, 2))}
        for n in (1, 2, 3)
    },
    "DeepRNN": {
        "": _core(lambda: hk.DeepRNN([hk.GRU(4), jnp.tanh, hk.VanillaRNN(3)])),
    },
    "DepthwiseConv1D": {"": (lambda x: hk.DepthwiseConv1D(2, 3)(x), LINE)},
    "DepthwiseConv2D": {"": (lambda x: hk.DepthwiseConv2D(2, 3)(x), IMAGE)},
    "DepthwiseConv3D": {"": (lambda x: hk.DepthwiseConv3D(2, 3)(x), CUBE)},
    "Embed": {
        "": (lambda x: hk.Embed(11, 6)(x), "ids"),
        "one-hot": (lambda x: hk.Embed(11, 6, lookup_style="ONE_HOT")(x), "ids"),
        "tied": (_tied, "ids"),
    },
    "Flatten": {"": _then(lambda: hk.Flatten(), SEQUENCE)},
    "GRU": {"": _core(lambda: hk.GRU(4))},
    "GroupNorm": {"": (lambda x: hk.GroupNorm(3)(x), IMAGE)},
    "IdentityCore": {"": (lambda x: hk.IdentityCore()(hk.Linear(4)(x), ())[0], VECTOR)},
    "InstanceNorm": {"": (lambda x: hk.InstanceNorm(True, True)(x), IMAGE)},
    "LSTM": {"": _core(lambda: hk.LSTM(4))},
    "LayerNorm": {
        "": (lambda x: hk.LayerNorm(-1, True, True)(x), SEQUENCE),
        "fast": (lambda x: hk.LayerNorm(
            (-1, -2), True, True, use_fast_variance=True)(x), SEQUENCE),
    },
    "Linear": {
        "": (lambda x: hk.Linear(7)(x), VECTOR),
        "highest": (lambda x: hk.Linear(7)(x, precision="highest"), SEQUENCE),
        "layer_stack": (_stacked, SEQUENCE),
        "cond": (_switched, SEQUENCE),
    },
    "MaxPool": {"": _then(lambda: hk.MaxPool(2, 2, "VALID", channel_axis=None), SEQUENCE)},
    "MultiHeadAttention": {
        "": (lambda x: hk.MultiHeadAttention(
            2, 3, w_init=hk.initializers.VarianceScaling())(x, x, x), SEQUENCE),
    },
    "RMSNorm": {"": (lambda x: hk.RMSNorm(-1)(x), SEQUENCE)},
    "ResetCore": {"": _core(lambda: hk.ResetCore(hk.GRU(4)), reset=True)},
    "Reshape": {"": _then(lambda: hk.Reshape((3, 2)))},
    "SeparableDepthwiseConv2D": {
        "": (lambda x: hk.SeparableDepthwiseConv2D(2, 3)(x), IMAGE)
    },
    "Sequential": {"": (lambda x: hk.Sequential(
        [hk.Linear(6), jnp.tanh, hk.Linear(3)])(x), VECTOR)},
    "SpectralNorm": {"": (lambda x: x @ hk.SpectralNorm()(
        hk.get_parameter("w", (5, 6), init=hk.initializers.RandomNormal()),
        update_stats=False), VECTOR)},
    "VanillaRNN": {"": _core(lambda: hk.VanillaRNN(4))},
    "nets.MLP": {
        "": (lambda x: hk.nets.MLP([6, 3])(x), VECTOR),
        "dropout": (lambda x: hk.nets.MLP([6, 3])(x, 0.3, hk.next_rng_key()), VECTOR),
    },
    "nets.MobileNetV1": {
        "": (lambda x: hk.nets.MobileNetV1(
            (1, 2), (4, 8), 3, use_bn=True)(x, is_training=hk.running_init()), (8, 8, 3)),
    },
    "nets.ResNet18": {
        "": (lambda x: hk.nets.ResNet(
            (1,) * 4, 3, initial_conv_config={"output_channels": 8}, bottleneck=False,
            channels_per_group=(8, 8, 8, 16), use_projection=(True,) * 4)(
                x, is_training=hk.running_init()), (8, 8, 3)),
    },
    "nets.VectorQuantizer": {
        "": (lambda x: hk.nets.VectorQuantizer(5, 7, 0.25)(x, is_training=False)["loss"][None],
             SEQUENCE),
    },
}  # fmt: skip


def names():
    results = []
    for prefix, place in (("", hk), ("nets.", hk.nets)):
        classes = (n for n in dir(place) if inspect.isclass(getattr(place, n)))
        results += [prefix + n for n in classes if issubclass(getattr(place, n), hk.Module)]
    return sorted(results)


def row_of(case, rng):
    function, shape = case
    if shape == "ids":
        batch = rng.integers(0, 11, (B, 6)).astype(np.int32)
    else:
        batch = rng.normal(size=(B, *shape)).astype(np.float32)
    module = hk.transform_with_state(function)
    params, state = jax.jit(module.init)(jax.random.key(0), batch[:1])

    def loss(params, x, key):
        y = module.apply(params, state, key, x)[0]
        return score(y, len(jax.tree.leaves(y)[0]))

    params = jax.tree.map(
        lambda p: np.asarray(p) + (0.1 * rng.normal(size=p.shape)).astype(p.dtype), params
    )
    return Row(loss, params, batch)
