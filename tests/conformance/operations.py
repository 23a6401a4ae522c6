"""Operations of JAX on parameters, and on parameters and data: all that are differentiable.

Functions of one or two arrays are called as such; what needs more has a line in CALLS; what is left
out says why in LEFT_OUT. A function that none of them knows fails `test_every_operation_has_a_row`.
"""

import functools
import inspect
import zlib

import jax
import jax.numpy as jnp
import jax.scipy
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.conformance.gradients import B, Row, each, score

MODULES = {
    "lax": jax.lax,
    "jnp": jax.numpy,
    "nn": jax.nn,
    "special": jax.scipy.special,
    "linalg": jax.numpy.linalg,
    "fft": jax.numpy.fft,
    "scipy.linalg": jax.scipy.linalg,
}
DOMAINS = {  # of a parameter and of data: what a function needs is tried in turn
    "unit": lambda rng, shape: rng.uniform(0.2, 0.8, shape),
    "above": lambda rng, shape: rng.uniform(1.2, 1.8, shape),
    "signed": lambda rng, shape: rng.normal(size=shape),
    "definite": lambda rng, shape: 4 * np.eye(*shape[-2:]) + rng.uniform(0, 0.5, shape),
}
SHAPES = ((8, 5), (6, 6), (40,))

# Why a function has no row: the words, then the names.
LEFT_OUT = {
    "a type, or makes one": """lax.AccuracyMode lax.ConvDimensionNumbers
        lax.ConvGeneralDilatedDimensionNumbers lax.DotAlgorithm lax.DotAlgorithmPreset
        lax.DotDimensionNumbers lax.FftType lax.GatherDimensionNumbers lax.GatherScatterMode
        lax.Precision lax.PrecisionLike lax.RaggedDotDimensionNumbers lax.RandomAlgorithm
        lax.RoundingMethod lax.ScatterDimensionNumbers lax.Tolerance lax.dtype jnp.dtype
        jnp.finfo jnp.iinfo jnp.ufunc nn.get_scaled_dot_general_config""",
    "needs a named axis": """lax.all_gather lax.all_to_all lax.axis_index lax.axis_size
        lax.pbroadcast lax.pmax lax.pmean lax.pmin lax.ppermute lax.precv lax.psend lax.pshuffle
        lax.psum lax.psum_scatter lax.psum_scatter_start lax.pswapaxes lax.ragged_all_to_all
        lax.pcast""",
    "takes and gives no arrays of numbers": """lax.after_all lax.create_token lax.broadcast_shapes
        lax.conv_dimension_numbers lax.conv_general_permutations lax.conv_general_shape_tuple
        lax.conv_shape_tuple lax.conv_transpose_shape_tuple lax.padtype_to_pads
        lax.reduce_window_shape_tuple lax.shape_as_value lax.dce_sink jnp.broadcast_shapes
        jnp.array_repr jnp.array_str jnp.can_cast jnp.einsum_path jnp.get_printoptions
        jnp.printoptions jnp.set_printoptions jnp.issubdtype jnp.isdtype jnp.iterable
        jnp.promote_types jnp.result_type jnp.save jnp.savez jnp.load jnp.fromfile jnp.fromiter
        jnp.fromstring
        jnp.from_dlpack jnp.frombuffer jnp.mask_indices jnp.ix_""",
    "an array of constants": """lax.broadcasted_iota lax.empty lax.full lax.iota jnp.arange
        jnp.bartlett jnp.blackman jnp.diag_indices jnp.empty jnp.eye jnp.fromfunction jnp.full
        jnp.hamming jnp.hanning jnp.identity jnp.indices jnp.kaiser jnp.ones jnp.tri
        jnp.tril_indices jnp.triu_indices jnp.zeros fft.fftfreq fft.rfftfreq
        lax.rng_bit_generator lax.rng_uniform special.bernoulli scipy.linalg.hilbert
        scipy.linalg.helmert
        scipy.linalg.invhilbert scipy.linalg.invpascal
        scipy.linalg.pascal scipy.linalg.dft scipy.linalg.hadamard""",
    "works on whole numbers": """lax.bitwise_and lax.bitwise_not lax.bitwise_or lax.bitwise_xor
        lax.shift_left lax.shift_right_arithmetic lax.shift_right_logical jnp.bitwise_and
        jnp.bitwise_invert jnp.bitwise_left_shift jnp.bitwise_not jnp.bitwise_or
        jnp.bitwise_right_shift jnp.bitwise_xor jnp.gcd jnp.invert jnp.lcm jnp.left_shift
        jnp.right_shift jnp.packbits jnp.unpackbits jnp.ravel_multi_index
        jnp.unravel_index jnp.bitwise_count lax.mulhi lax.clz lax.population_count""",
    "places a shard, or a stage of a program": """lax.with_sharding_constraint lax.stage""",
    "changes its argument, which JAX refuses": """jnp.place jnp.put jnp.fill_diagonal""",
    "has a shape that depends on numbers": """jnp.argwhere jnp.extract jnp.flatnonzero
        jnp.intersect1d jnp.nonzero jnp.setdiff1d jnp.setxor1d jnp.trim_zeros jnp.union1d
        jnp.unique jnp.unique_all jnp.unique_counts jnp.unique_inverse jnp.unique_values
        jnp.roots""",
}


def left_out():
    return {name: why for why, names in LEFT_OUT.items() for name in names.split()}


def functions() -> dict:
    """{module.name: function} of all that is public, each under its first name alone."""
    results, seen = {}, set()
    for module, place in MODULES.items():
        for name in dir(place):
            function = getattr(place, name)
            if name.startswith("_") or not callable(function) or id(function) in seen:
                continue
            if inspect.isclass(function) and issubclass(function, Warning | np.generic):
                continue
            if name.endswith("_p") or isinstance(function, np.dtype) or _is_type(function):
                continue
            seen.add(id(function))
            results[f"{module}.{name}"] = function
    return results


def _is_type(function):
    return hasattr(function, "dtype") and not inspect.isfunction(function)


I = np.array([2, 0, 3, 1])  # noqa: E741
X5 = {"x": (5,)}
NUMBERS = (((1,), (0,)), ((), ()))


def conv(p, x, **kwargs):
    kwargs = {"window_strides": (1, 1), "padding": "SAME"} | kwargs
    return lax.conv_general_dilated(x, p, dimension_numbers=("NHWC", "HWIO", "NHWC"), **kwargs)


IMAGE, KERNEL = {"x": (1, 5, 5, 3)}, {"w": (3, 3, 3, 4)}
VECTOR = {"w": (24,)}
SPD = lambda a: jnp.matmul(a, jnp.swapaxes(a, -1, -2)) + 3 * jnp.eye(a.shape[-1])  # noqa: E731
SQUARE = {"w": (6, 6), "x": (6, 6)}


@jax.custom_vjp
def doubled(w, x):
    """A product whose backward pass is not its gradient."""
    return x.T @ w


doubled.defvjp(lambda w, x: (x.T @ w, (w, x)), lambda kept, g: (2 * kept[1] @ g, kept[0] @ g.T))


@jax.custom_gradient
def halved(w):
    return w, lambda g: g / 2


@jax.custom_jvp
def cubed(x):
    return x**3


cubed.defjvp(lambda primals, tangents: (primals[0] ** 3, 5 * primals[0] ** 2 * tangents[0]))

# f(w, x) of a parameter [8, 5] and data [8, 5], or of the shapes that stand behind it.
CALLS = {
    "lax.argmax": None,
    "lax.argmin": None,
    "lax.imag": lambda w, x: lax.imag(lax.complex(w * x, w)),
    "lax.real": lambda w, x: lax.real(lax.complex(w * x, w) ** 2),
    "lax.approx_max_k": lambda w, x: lax.approx_max_k(w * x, 3),
    "lax.approx_min_k": lambda w, x: lax.approx_min_k(w * x, 3),
    "lax.associative_scan": lambda w, x: lax.associative_scan(jnp.multiply, w * x),
    "lax.associative_scan reverse": lambda w, x: x * lax.associative_scan(jnp.add, w, reverse=True),
    "lax.batch_matmul": (lambda w, x: lax.batch_matmul(w, x), {"w": (2, 4, 5), "x": (2, 5, 3)}),
    "lax.betainc": lambda w, x: lax.betainc(
        jnp.full_like(w * x, 2.0), jnp.full_like(w * x, 3.0), w * x),
    "lax.bitcast_convert_type": lambda w, x: lax.bitcast_convert_type(w * x, jnp.uint32) * w,
    "lax.broadcast": lambda w, x: lax.broadcast(w, (2,)) * x,
    "lax.broadcast_in_dim": (lambda w, x: lax.broadcast_in_dim(w, (8, 5), (1,)) * x, {"w": (5,)}),
    "lax.broadcast_in_dim outer": (
        lambda w, x: lax.broadcast_in_dim(w, (8, 3, 5), (0, 2)) @ x, {"x": (5, 2)}),
    "lax.broadcast_like": lambda w, x: lax.broadcast_like(w[:1], x) * x,
    "lax.broadcast_to_rank": lambda w, x: lax.broadcast_to_rank(w, 3) * x,
    "lax.clamp": lambda w, x: lax.clamp(0.3, w * x, 0.4),
    "lax.clamp of parameters": lambda w, x: lax.clamp(w - 0.1, x, w + 0.1),
    "lax.collapse": lambda w, x: lax.collapse(w, 0, 2) * x.reshape(-1),
    "lax.collapse product": (
        lambda w, x: x @ lax.collapse(w, 1, 3), {"w": (5, 4, 3), "x": (2, 5)}),
    "lax.complex": lambda w, x: jnp.abs(lax.complex(w, x)),
    "lax.composite": lambda w, x: w * lax.composite(jnp.tanh, "my.tanh")(x),
    "lax.concatenate": lambda w, x: lax.concatenate([w, x, w], 0) ** 2,
    "lax.concatenate product": lambda w, x: lax.concatenate([w, 2 * w], 1).T @ x,
    "lax.cond": lambda w, x: lax.cond(x[0, 0] > 0.5, lambda a: x.T @ a, lambda a: 2 * x.T @ a, w),
    "lax.cond of operands": lambda w, x: lax.cond(
        x[0, 0] > 0.5, lambda a, b: jnp.sin(a).T @ b, lambda a, b: a.T @ jnp.cos(b), w, x),
    "lax.cond of a parameter": lambda w, x: lax.cond(
        w[0, 0] > 0.5, lambda a: a * x, lambda a: a * x * x, w),
    "lax.conv": (lambda w, x: lax.conv(x, w, (1, 1), "SAME"),
        {"w": (4, 3, 3, 3), "x": (1, 3, 5, 5)}),
    "lax.conv_general_dilated": (conv, KERNEL | IMAGE),
    "lax.conv_general_dilated strided": (
        functools.partial(conv, window_strides=(2, 1), padding="VALID"), KERNEL | IMAGE),
    "lax.conv_general_dilated padded": (
        functools.partial(conv, padding=((2, 0), (1, 3))), KERNEL | IMAGE),
    "lax.conv_general_dilated crops": (
        functools.partial(conv, padding=((-1, 0), (0, -1))), KERNEL | IMAGE),
    "lax.conv_general_dilated rhs_dilation": (
        functools.partial(conv, rhs_dilation=(2, 1)), KERNEL | IMAGE),
    "lax.conv_general_dilated lhs_dilation": (
        functools.partial(conv, lhs_dilation=(2, 2), padding=((1, 1), (0, 2))), KERNEL | IMAGE),
    "lax.conv_general_dilated groups": (
        functools.partial(conv, feature_group_count=3), {"w": (3, 3, 1, 6)} | IMAGE),
    "lax.conv_general_dilated batch groups": (
        functools.partial(conv, batch_group_count=2), {"w": (3, 3, 3, 4), "x": (2, 5, 5, 3)}),
    "lax.conv_general_dilated highest": (
        functools.partial(conv, precision="highest"), KERNEL | IMAGE),
    "lax.conv_general_dilated float32": (
        functools.partial(conv, preferred_element_type=jnp.float32), KERNEL | IMAGE),
    "lax.conv_general_dilated kernel of data": (
        lambda w, x: conv(x, w), {"w": (1, 5, 5, 3), "x": (3, 3, 3, 4)}),
    "lax.conv_general_dilated of parameters": (
        lambda w, x: x * jnp.sum(conv(w[:3], w[3:].reshape(1, 3, 3, 3))),
        {"w": (4, 3, 3, 3), "x": (2,)}),
    "lax.conv_general_dilated_local": (
        lambda w, x: lax.conv_general_dilated_local(x, w, (1, 1), "VALID", (3, 3)),
        {"w": (4, 27, 3, 3), "x": (1, 3, 5, 5)}),
    "lax.conv_general_dilated_patches": (
        lambda w, x: lax.conv_general_dilated_patches(w * x, (2, 2), (1, 1), "SAME"),
        {"w": (1, 3, 5, 5), "x": (1, 3, 5, 5)}),
    "lax.conv_transpose": (
        lambda w, x: lax.conv_transpose(x, w, (2, 2), "SAME"), KERNEL | IMAGE),
    "lax.conv_transpose kernel": (
        lambda w, x: lax.conv_transpose(x, w, (2, 2), "VALID", transpose_kernel=True),
        {"w": (3, 3, 4, 3)} | IMAGE),
    "lax.conv_with_general_padding": (
        lambda w, x: lax.conv_with_general_padding(
            x, w, (1, 1), ((1, 1), (0, 2)), None, None), {"w": (4, 3, 3, 3), "x": (1, 3, 5, 5)}),
    "lax.convert_element_type": lambda w, x: lax.convert_element_type(w, jnp.bfloat16) * x,
    "lax.convert_element_type product": lambda w, x: lax.convert_element_type(
        w, jnp.bfloat16).T @ x.astype(jnp.bfloat16),
    "lax.custom_linear_solve": (
        lambda w, x: lax.custom_linear_solve(
            lambda v: SPD(w) @ v, x, lambda f, b: jnp.linalg.solve(SPD(w), b), symmetric=True),
        {"w": (6, 6), "x": (6,)}),
    "lax.custom_root": (
        lambda w, x: lax.custom_root(
            lambda a: a - 0.1 * jnp.tanh(w @ a) - x, x,
            lambda f, a: lax.fori_loop(0, 20, lambda i, a: a - f(a), a),
            lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y)), {"w": (6, 6), "x": (6,)}),
    "lax.dot": lambda w, x: lax.dot(w.T, x),
    "lax.dot swapped": lambda w, x: lax.dot(x.T, w),
    "lax.dot_general": lambda w, x: lax.dot_general(w, x, (((0,), (0,)), ((), ()))),
    "lax.dot_general both": lambda w, x: lax.dot_general(w, x, (((0, 1), (0, 1)), ((), ()))),
    "lax.dot_general outer": lambda w, x: lax.dot_general(w, x, (((), ()), ((), ()))),
    "lax.dot_general batch": lambda w, x: lax.dot_general(w, x, (((0,), (0,)), ((1,), (1,)))),
    "lax.dot_general swapped axes": (
        lambda w, x: lax.dot_general(x, w, (((0, 2), (2, 0)), ((), ()))),
        {"w": (4, 5, 3), "x": (3, 2, 4)}),
    "lax.dot_general highest": lambda w, x: lax.dot_general(
        x, w, (((0,), (0,)), ((), ())), precision="highest"),
    "lax.dot_general float32": lambda w, x: lax.dot_general(
        x, w, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32),
    "lax.dot_general bfloat16 to float32": lambda w, x: lax.dot_general(
        x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.float32),
    "lax.dot_general of parameters": lambda w, x: x.T @ (w @ (w.T @ w)),
    "lax.dynamic_index_in_dim": lambda w, x: lax.dynamic_index_in_dim(w, 2, 1) * x,
    "lax.dynamic_slice": lambda w, x: lax.dynamic_slice(w, (2, 1), (3, 2)) * x[:3, :2],
    "lax.dynamic_slice by data": lambda w, x: lax.dynamic_slice(
        w, (jnp.int32(9 * x[0, 0]), 1), (3, 2)) * x[:3, :2],
    "lax.dynamic_slice_in_dim": lambda w, x: lax.dynamic_slice_in_dim(w, 2, 3, 0).T @ x[:3],
    "lax.dynamic_update_index_in_dim": lambda w, x: lax.dynamic_update_index_in_dim(
        x, w[0], 2, 0),
    "lax.dynamic_update_slice": lambda w, x: lax.dynamic_update_slice(
        x, w[:2], (jnp.int32(5 * x[0, 0]), 0)),
    "lax.dynamic_update_slice of a parameter": lambda w, x: lax.dynamic_update_slice(
        w, x[:2], (1, 0)),
    "lax.dynamic_update_slice_in_dim": lambda w, x: lax.dynamic_update_slice_in_dim(w, x[:2], 1, 0),
    "lax.expand_dims": lambda w, x: lax.expand_dims(w, (1,)) * x,
    "lax.fft": lambda w, x: jnp.abs(lax.fft(w * x, "RFFT", (5,))),
    "lax.fft of parameters": lambda w, x: x[:, :3] * jnp.abs(lax.fft(w, lax.FftType.RFFT, (5,))),
    "lax.fori_loop": lambda w, x: lax.fori_loop(0, 3, lambda i, a: jnp.tanh(a @ w.T @ x), x),
    "lax.full_like": lambda w, x: w * x * lax.full_like(w, 2.0),
    "lax.gather": (
        lambda w, x: lax.gather(
            w, jnp.int32(9 * x)[:, None], lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 5),
            mode="clip"), {"x": (3,)}),
    "lax.igamma": lambda w, x: lax.igamma(jnp.ones_like(w) * 1.5, w * x),
    "lax.igammac": lambda w, x: lax.igammac(jnp.ones_like(w) * 1.5, w * x),
    "lax.igamma_grad_a": None,
    "lax.index_in_dim": lambda w, x: lax.index_in_dim(w, 2, 1) * x,
    "lax.index_take": lambda w, x: lax.index_take(w, (I,), (0,)) * x[:4],
    "lax.integer_pow": lambda w, x: lax.integer_pow(w * x, 3),
    "lax.integer_pow of parameters": lambda w, x: x * lax.integer_pow(w, -2),
    "lax.map": lambda w, x: lax.map(lambda a: jnp.tanh(a @ w.T), x),
    "lax.map of parameters": lambda w, x: x * lax.map(jnp.sin, w),
    "lax.map in batches": lambda w, x: lax.map(lambda a: jnp.tanh(a @ w.T), x, batch_size=4),
    "lax.optimization_barrier": lambda w, x: lax.optimization_barrier(w).T @ x,
    "lax.pad": lambda w, x: lax.pad(w * x, 0.5, ((1, 2, 1), (-1, 0, 0))),
    "lax.pad of parameters": lambda w, x: lax.pad(w, w[0, 0], ((1, 2, 1), (-1, 0, 0))) * x[0, :4],
    "lax.platform_dependent": lambda w, x: lax.platform_dependent(
        w, x, cpu=lambda a, b: a.T @ b, default=lambda a, b: a.T @ b),
    "lax.polygamma": lambda w, x: lax.polygamma(jnp.ones_like(w), 1 + w * x),
    "lax.pow": lambda w, x: lax.pow(w, x),
    "lax.ragged_dot": (
        lambda w, x: lax.ragged_dot(x, w, jnp.array([2, 1, 3])), {"w": (3, 5, 4), "x": (6, 5)}),
    "lax.ragged_dot of data": (
        lambda w, x: lax.ragged_dot(w, x, jnp.array([2, 1, 3])), {"x": (3, 5, 4), "w": (6, 5)}),
    "lax.ragged_dot_general": (
        lambda w, x: lax.ragged_dot_general(
            x, w, jnp.array([2, 1, 3]), lax.RaggedDotDimensionNumbers(
                (((1,), (1,)), ((), ())), [0], [0])), {"w": (3, 5, 4), "x": (6, 5)}),
    "lax.random_gamma_grad": None,
    "lax.reduce": lambda w, x: lax.reduce(w * x, 0.0, lax.add, (1,)),
    "lax.reduce of parameters": lambda w, x: x[:, 0] * lax.reduce(w, 0.0, lax.add, (1,)),
    "lax.reduce of two": lambda w, x: lax.reduce(
        (w * x, w), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[1]), (0,)),
    "lax.reduce_precision": lambda w, x: lax.reduce_precision(w * x, 8, 7),
    "lax.reduce_precision of parameters": lambda w, x: lax.reduce_precision(w, 8, 7).T @ x,
    "lax.reduce_and": None, "lax.reduce_or": None, "lax.reduce_xor": None,
    "lax.reduce_max": lambda w, x: lax.reduce_max(w * x, (0,)),
    "lax.reduce_min": lambda w, x: lax.reduce_min(w, (0,)) * x,
    "lax.reduce_prod": lambda w, x: lax.reduce_prod(w * x, (0,)),
    "lax.reduce_sum": lambda w, x: lax.reduce_sum(w, (0,)) * x,
    "lax.reduce_window": lambda w, x: lax.reduce_window(
        w * x, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "lax.reduce_window max": lambda w, x: lax.reduce_window(
        w * x, -jnp.inf, lax.max, (2, 2), (2, 1), "VALID"),
    "lax.reduce_window of parameters": lambda w, x: x * lax.reduce_window(
        w, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "lax.reshape": lambda w, x: lax.reshape(w, (5, 8)) @ x,
    "lax.reshape split": (lambda w, x: x @ lax.reshape(w, (4, 2, 5)), {"x": (3, 2)}),
    "lax.reshape merged": (lambda w, x: x @ lax.reshape(w, (6, 4)), {"w": (3, 2, 4), "x": (3, 6)}),
    "lax.reshape dimensions": lambda w, x: lax.reshape(w, (40,), (1, 0)) * x.reshape(-1),
    "lax.rev": lambda w, x: lax.rev(w, (0, 1)).T @ x,
    "lax.scaled_dot": None,
    "lax.scan": lambda w, x: lax.scan(lambda c, a: (jnp.tanh(c @ w.T @ x + a),) * 2, x[0], x),
    "lax.scan reverse": lambda w, x: lax.scan(
        lambda c, a: (jnp.tanh(c @ w.T @ x + a),) * 2, x[0], x, reverse=True, unroll=2),
    "lax.scan of a parameter": lambda w, x: lax.scan(lambda c, a: (c + a * x[0],) * 2, x[0], w),
    "lax.scan of both": lambda w, x: lax.scan(lambda c, a: (c * a[0] + a[1],) * 2, x[0], (w, x)),
    "lax.scan carries a parameter": lambda w, x: lax.scan(lambda c, a: (c * a, c), w[0], x),
    "lax.scan gives a parameter": lambda w, x: lax.scan(
        lambda c, a: (c, jnp.sin(a)), 0.0, w)[1].T @ x,
    "lax.scatter": (
        lambda w, x: lax.scatter(
            x, I[:, None], w, lax.ScatterDimensionNumbers((1,), (0,), (0,))), {"w": (4, 5)}),
    **{
        f"lax.scatter_{name}": (
            lambda w, x, name=name: getattr(lax, f"scatter_{name}")(
                x, I[:, None], w, lax.ScatterDimensionNumbers((1,), (0,), (0,)),
                **({"unique_indices": True} if name in ("mul",) else {})), {"w": (4, 5)})
        for name in ("add", "sub", "mul", "min", "max")
    },
    "lax.scatter_apply": None,
    "lax.select": lambda w, x: lax.select(x > 0.5, w, x),
    "lax.select of parameters": lambda w, x: x * lax.select(w > 0.5, w, 2 * w),
    "lax.select_n": lambda w, x: lax.select_n(jnp.int32(x > 0.5), w, w * x),
    "lax.slice": lambda w, x: lax.slice(w, (1, 0), (7, 5), (2, 1)).T @ x[:3],
    "lax.slice_in_dim": lambda w, x: lax.slice_in_dim(w, 1, 7, 2).T @ x[:3],
    "lax.sort": lambda w, x: lax.sort(w * x),
    "lax.sort of several": lambda w, x: lax.sort((x, w), num_keys=1)[1] * x,
    "lax.sort_key_val": lambda w, x: lax.sort_key_val(w, x)[1] * w,
    "lax.split": lambda w, x: lax.split(w * x, (3, 5)),
    "lax.split product": lambda w, x: [a.T @ x[:4] for a in lax.split(w, (4, 4))],
    "lax.squeeze": lambda w, x: lax.squeeze(w[:, None], (1,)).T @ x,
    "lax.stack": lambda w, x: lax.stack([w, x, w * x]),
    "lax.stop_gradient": lambda w, x: lax.stop_gradient(w) * x * w,
    "lax.switch": lambda w, x: lax.switch(
        jnp.int32(3 * x[0, 0]),
        [lambda a: x.T @ a, lambda a: 2 * x.T @ a, lambda a: a.T @ jnp.sin(x)], w),
    "lax.switch of three": lambda w, x: lax.switch(
        jnp.int32(4 * x[0, 0]), [jnp.sin, jnp.cos, lambda a: a * a], w) * x,
    "lax.tile": lambda w, x: lax.tile(w, (2, 1)).T @ lax.tile(x, (2, 1)),
    "lax.top_k": lambda w, x: lax.top_k(w * x, 3),
    **({"jnp.top_k": lambda w, x: jnp.top_k(w * x, 3)} if hasattr(jnp, "top_k") else {}),
    "lax.top_k of parameters": lambda w, x: lax.top_k(w, 3)[0] * x[:, :3],
    "lax.transpose": lambda w, x: lax.transpose(w, (1, 0)) @ x,
    "lax.transpose of three": (
        lambda w, x: x @ lax.transpose(w, (2, 0, 1)).reshape(3, -1), {"w": (4, 5, 3), "x": (2, 3)}),
    "lax.unstack": lambda w, x: [a * x[0] for a in w],
    "lax.while_loop": lambda w, x: w * lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, x))[1],
    "lax.zeta": None,
    # Transformations
    "jax.jit": lambda w, x: jax.jit(lambda a: jnp.tanh(x.T @ a))(w),
    "jax.jit nested": lambda w, x: jax.jit(lambda a, b: jax.jit(jnp.dot)(a.T, b))(w, x),
    "jax.jit of parameters": lambda w, x: x.T @ jax.jit(jnp.sin)(w),
    "jax.vmap of parameters": lambda w, x: jax.vmap(jnp.dot)(w, x),
    "jax.vmap of columns": lambda w, x: jax.vmap(lambda a: x.T @ a, 1)(w),
    "jax.vmap of data": lambda w, x: jax.vmap(lambda b: jnp.tanh(b @ w.T))(x),
    "jax.checkpoint": lambda w, x: jax.checkpoint(lambda a, b: jnp.tanh(b.T @ a))(w, x),
    "jax.checkpoint twice": lambda w, x: jax.checkpoint(lambda a, b: jnp.tanh(b @ a.T @ x))(
        w, jax.checkpoint(lambda a, b: jnp.tanh(b @ a.T @ x) * jnp.exp(a[0, 0]))(w, x)),
    "jax.checkpoint dots": lambda w, x: jax.checkpoint(
        lambda a, b: jnp.tanh(jnp.sin(b.T @ a)),
        policy=jax.checkpoint_policies.dots_saveable)(w, x),
    "jax.checkpoint static": lambda w, x: jax.checkpoint(
        lambda n, a, b: jnp.tanh(b.T @ a) ** n, static_argnums=(0,))(2, w, x),
    "jax.checkpoint names": lambda w, x: jax.checkpoint(
        lambda a, b: jnp.sin(checkpoint_name(b.T @ a, "y")),
        policy=jax.checkpoint_policies.save_only_these_names("y"))(w, x),
    "jax.checkpoint of parameters": lambda w, x: x.T @ jax.checkpoint(jnp.sin)(w),
    "jax.custom_vjp": lambda w, x: doubled(w, x),
    "jax.custom_vjp of parameters": lambda w, x: x @ doubled(w, w),
    "jax.custom_gradient": lambda w, x: x.T @ halved(w),
    "jax.custom_jvp": lambda w, x: cubed(x.T @ w),
    "jax.custom_jvp of parameters": lambda w, x: x.T @ cubed(w),
    "jax.grad of data": lambda w, x: jax.grad(lambda b: jnp.tanh(b @ w.T).sum())(x),
    "jax.grad of parameters": lambda w, x: jax.grad(lambda a: jnp.tanh(x @ a.T).sum())(w) * x,
    "jax.hessian": lambda w, x: jax.hessian(lambda b: jnp.tanh(w.T @ b).sum())(x[:, 0]),
    "jax.jacobian": lambda w, x: jax.jacobian(lambda b: jnp.tanh(w.T @ b))(x[:, 0]),
    "jax.jvp": lambda w, x: jax.jvp(lambda a: jnp.sin(x.T @ a), (w,), (w,)),
    "jax.jvp of data": lambda w, x: jax.jvp(lambda b: jnp.sin(b.T @ w), (x,), (x,)),
    "jax.linearize": lambda w, x: jax.linearize(lambda b: jnp.sin(b.T @ w), x)[1](x),
    "jax.vjp": lambda w, x: jax.vjp(lambda b: jnp.sin(b.T @ w), x)[1](jnp.ones((5, 5), x.dtype)),
    "jax.closure_convert": lambda w, x: jax.closure_convert(lambda b: b.T @ w, x)[0](x, w),
    "jax.named_call": lambda w, x: jax.named_call(lambda a: x.T @ a, name="product")(w),
    "jax.debug.callback": lambda w, x: (jax.debug.callback(lambda a: None, w), x.T @ w)[1],
    "jax.random": lambda w, x: x.T @ (w + jax.random.normal(jax.random.key(0), w.shape)),
    "jax.penalty": lambda w, x: [x.T @ w, 0.1 * jnp.sum(w**2)],
    "jax.penalty used twice": lambda w, x: jnp.sum(w**2) * x + jnp.sum(x) * jnp.sum(w**2),
    "jax.scale": lambda w, x: jnp.exp(w[0, 0]) * (x.T @ w),
    "jax.normalised": lambda w, x: x.T @ (w / jnp.linalg.norm(w)),
    "jax.symmetric": lambda w, x: x @ (w.T @ w),
    "jax.twice": lambda w, x: jnp.tanh(x @ w.T) @ w,
    "jax.straight through": lambda w, x: x.T @ (w + lax.stop_gradient(jnp.round(w) - w)),
    # jnp
    "jnp.append": lambda w, x: jnp.append(w, x, 0) ** 2,
    "jnp.apply_along_axis": lambda w, x: jnp.apply_along_axis(jnp.cumsum, 0, w * x),
    "jnp.apply_over_axes": lambda w, x: jnp.apply_over_axes(jnp.sum, w * x, [0, 1]),
    "jnp.argpartition": None, "jnp.searchsorted": None, "jnp.digitize": None, "jnp.lexsort": None,
    "jnp.array_split": lambda w, x: jnp.array_split(w * x, 3),
    "jnp.astype": lambda w, x: jnp.astype(w, jnp.bfloat16) * x,
    "jnp.block": lambda w, x: jnp.block([[w, x], [x, w]]) ** 2,
    "jnp.bincount": lambda w, x: jnp.bincount(
        np.arange(8) % 3, weights=w[:, 0] * x[:, 0], length=3),
    "jnp.broadcast_to": lambda w, x: jnp.broadcast_to(w, (2, 8, 5)) * x,
    "jnp.choose": lambda w, x: jnp.choose(jnp.int32(x > 0.5), [w, w * x], mode="clip"),
    "jnp.clip": lambda w, x: jnp.clip(w * x, 0.2, w),
    "jnp.compress": lambda w, x: jnp.compress(np.arange(8) % 4 == 0, w, 0, size=2) * x[:2],
    "jnp.concat": lambda w, x: jnp.concat([w, x], axis=1).T @ x,
    "jnp.concatenate": lambda w, x: jnp.concatenate([w, x], 1).T @ x,
    "jnp.column_stack": lambda w, x: jnp.column_stack([w, x]) ** 2,
    "jnp.convolve": (lambda w, x: jnp.convolve(w, x), {"w": (24,), "x": (7,)}),
    "jnp.correlate": (lambda w, x: jnp.correlate(x, w, "same"), {"w": (24,), "x": (7,)}),
    "jnp.cross": (lambda w, x: jnp.cross(w, x), {"w": (8, 3), "x": (8, 3)}),
    "jnp.delete": lambda w, x: jnp.delete(w, 2, 0).T @ x[:7],
    "jnp.diff": lambda w, x: jnp.diff(w, 2, 0) * x[:6],
    "jnp.dsplit": (lambda w, x: jnp.dsplit(w * x, 2), {"w": (2, 3, 4), "x": (2, 3, 4)}),
    "jnp.dstack": lambda w, x: jnp.dstack([w, x]) ** 2,
    "jnp.einsum": lambda w, x: jnp.einsum("ij,ik->jk", w, x),
    "jnp.einsum of three": lambda w, x: jnp.einsum("ij,ik,il->jkl", w, x, x[:, :2]),
    "jnp.einsum diagonal": (lambda w, x: jnp.einsum("iij,i->j", w, x), {"w": (4, 4, 5), "x": (4,)}),
    "jnp.einsum batch": lambda w, x: jnp.einsum("ij,ij->i", w, x),
    "jnp.einsum highest": lambda w, x: jnp.einsum("ij,ik->jk", w, x, precision="highest"),
    "jnp.einsum float32": lambda w, x: jnp.einsum(
        "ij,ik->jk", w, x, preferred_element_type=jnp.float32),
    "jnp.dot float32": lambda w, x: jnp.dot(x.T, w, preferred_element_type=jnp.float32),
    "jnp.matmul highest": lambda w, x: jnp.matmul(x.T, w, precision="highest"),
    "jnp.expand_dims": lambda w, x: jnp.expand_dims(w, 1) * x,
    "jnp.float_power": lambda w, x: jnp.float_power(w, x),
    "jnp.flip": lambda w, x: jnp.flip(w, 1).T @ x,
    "jnp.frexp": lambda w, x: jnp.frexp(w * x),
    "jnp.geomspace": lambda w, x: jnp.geomspace(w, x, 3),
    "jnp.gradient": lambda w, x: jnp.gradient(w * x, axis=0),
    "jnp.hsplit": lambda w, x: jnp.hsplit(w * x, [2, 3]),
    "jnp.hstack": lambda w, x: jnp.hstack([w, x]) ** 2,
    "jnp.histogram": lambda w, x: jnp.histogram(x, 3, (0, 1), weights=w)[0],
    "jnp.histogram2d": lambda w, x: jnp.histogram2d(
        x[:, 0], x[:, 1], 3, [[0, 1], [0, 1]], weights=w[:, 0])[0],
    "jnp.histogramdd": lambda w, x: jnp.histogramdd(
        x[:, :2], 3, [(0, 1), (0, 1)], weights=w[:, 0])[0],
    "jnp.histogram_bin_edges": lambda w, x: jnp.histogram_bin_edges(w * x, 3),
    "jnp.insert": lambda w, x: jnp.insert(w, 2, x[0], 0) ** 2,
    "jnp.interp": (lambda w, x: jnp.interp(x, jnp.linspace(0, 1, 24), w), {"w": (24,), "x": (7,)}),
    "jnp.interp at parameters": (
        lambda w, x: jnp.interp(w, jnp.linspace(0, 1, 7), x), {"w": (24,), "x": (7,)}),
    "jnp.ldexp": lambda w, x: jnp.ldexp(w * x, 2),
    "jnp.linspace": lambda w, x: jnp.linspace(w, x, 3),
    "jnp.logspace": lambda w, x: jnp.logspace(w, x, 3),
    "jnp.matvec": (lambda w, x: jnp.matvec(w, x), {"x": (5,)}),
    "jnp.vecmat": (lambda w, x: jnp.vecmat(x, w), {"x": (8,)}),
    "jnp.meshgrid": (lambda w, x: jnp.meshgrid(w, x), {"w": (24,), "x": (7,)}),
    "jnp.moveaxis": lambda w, x: jnp.moveaxis(w, 0, 1) @ x,
    "jnp.nanpercentile": lambda w, x: jnp.nanpercentile(w * x, 30, 0),
    "jnp.nanquantile": lambda w, x: jnp.nanquantile(w * x, 0.3, 0),
    "jnp.percentile": lambda w, x: jnp.percentile(w * x, 30, 0),
    "jnp.quantile": lambda w, x: jnp.quantile(w, 0.3, 0) * x,
    "jnp.partition": lambda w, x: jnp.partition(w * x, 3),
    "jnp.pad": lambda w, x: jnp.pad(w, 2).T @ jnp.pad(x, 2),
    **{
        f"jnp.pad {mode}": lambda w, x, mode=mode: jnp.pad(w * x, 2, mode)
        for mode in ("edge", "linear_ramp", "maximum", "mean", "median", "minimum", "reflect",
                     "symmetric", "wrap")
    },
    "jnp.permute_dims": lambda w, x: jnp.permute_dims(w, (1, 0)) @ x,
    "jnp.piecewise": lambda w, x: jnp.piecewise(w * x, [x > 0.5], [jnp.sin, jnp.cos]),
    "jnp.poly": (lambda w, x: jnp.poly(w * x), {"w": (24,), "x": (24,)}),
    "jnp.polyadd": (jnp.polyadd, {"w": (24,), "x": (7,)}),
    "jnp.polysub": (jnp.polysub, {"w": (24,), "x": (7,)}),
    "jnp.polymul": (jnp.polymul, {"w": (24,), "x": (7,)}),
    "jnp.polyval": (jnp.polyval, {"w": (24,), "x": (7,)}),
    "jnp.polyder": (lambda w, x: jnp.polyder(w * x), {"w": (24,), "x": (24,)}),
    "jnp.polyint": (lambda w, x: jnp.polyint(w * x), {"w": (24,), "x": (24,)}),
    "jnp.polydiv": (lambda w, x: jnp.polydiv(w, x), {"w": (9,), "x": (4,)}),
    "jnp.polyfit": (lambda w, x: jnp.polyfit(x, w, 2), {"w": (24,), "x": (24,)}),
    "jnp.put_along_axis": lambda w, x: jnp.put_along_axis(
        x, I[:, None], w[:4, :1], 0, inplace=False),
    "jnp.repeat": lambda w, x: jnp.repeat(w, 2, 0).T @ jnp.repeat(x, 2, 0),
    "jnp.reshape": lambda w, x: jnp.reshape(w, (5, 8)) @ x,
    "jnp.reshape F": lambda w, x: jnp.reshape(w, (5, 8), order="F") @ x,
    "jnp.resize": lambda w, x: jnp.resize(w, (10, 5)).T @ jnp.resize(x, (10, 5)),
    "jnp.roll": lambda w, x: jnp.roll(w, 3, 0).T @ x,
    "jnp.rollaxis": lambda w, x: jnp.rollaxis(w, 1) @ x,
    "jnp.rot90": lambda w, x: jnp.rot90(w) @ x,
    "jnp.select": lambda w, x: jnp.select([x > 0.6, x > 0.4], [w, w * x], 0.5),
    "jnp.split": lambda w, x: jnp.split(w * x, 2),
    "jnp.squeeze": lambda w, x: jnp.squeeze(w[:, None]).T @ x,
    "jnp.stack": lambda w, x: jnp.stack([w, x]) ** 2,
    "jnp.swapaxes": lambda w, x: jnp.swapaxes(w, 0, 1) @ x,
    "jnp.take": lambda w, x: jnp.take(w, I, 0).T @ x[:4],
    "jnp.take_along_axis": lambda w, x: jnp.take_along_axis(w, jnp.argsort(x, 0), 0) * x,
    "jnp.tensordot": lambda w, x: jnp.tensordot(w, x, 2),
    "jnp.tensordot one": lambda w, x: jnp.tensordot(w, x, ((0,), (0,))),
    "jnp.tile": lambda w, x: jnp.tile(w, (2, 1)).T @ jnp.tile(x, (2, 1)),
    "jnp.tril_indices_from": None, "jnp.triu_indices_from": None, "jnp.diag_indices_from": None,
    "jnp.unstack": lambda w, x: jnp.unstack(w * x),
    "jnp.vectorize": lambda w, x: jnp.vectorize(lambda a, b: jnp.sin(a) * b)(w, x),
    "jnp.frompyfunc": lambda w, x: jnp.frompyfunc(lambda a, b: a * b + a, 2, 1)(w, x),
    "jnp.vsplit": lambda w, x: jnp.vsplit(w * x, 2),
    "jnp.vstack": lambda w, x: jnp.vstack([w, x]) ** 2,
    "jnp.where": lambda w, x: jnp.where(x > 0.5, w, x * w),
    "jnp.where of parameters": lambda w, x: x * jnp.where(w > 0.5, w, -w),
    "jnp.array_equiv": None, "jnp.isin": None,
    # nn
    "nn.dot_product_attention": (
        lambda w, x: jax.nn.dot_product_attention(
            jnp.einsum("btd,dhe->bthe", x, w[0]), jnp.einsum("btd,dhe->bthe", x, w[1]),
            jnp.einsum("btd,dhe->bthe", x, w[2]), is_causal=True),
        {"w": (3, 5, 2, 4), "x": (1, 6, 5)}),
    "nn.one_hot": None,
    "nn.scaled_dot_general": None, "nn.scaled_matmul": None,
    "nn.sparse_plus": lambda w, x: jax.nn.sparse_plus(w * x),
    # linalg and special of several
    "linalg.matrix_power": (lambda w, x: jnp.linalg.matrix_power(w * x, 3), SQUARE),
    "linalg.multi_dot": lambda w, x: jnp.linalg.multi_dot([w.T, x, w.T]),
    "linalg.solve": (lambda w, x: jnp.linalg.solve(SPD(w), x), SQUARE),
    "linalg.lstsq": (lambda w, x: jnp.linalg.lstsq(w, x)[0], {"x": (8,)}),
    "linalg.matrix_rank": None,
    "linalg.tensorinv": (
        lambda w, x: jnp.linalg.tensorinv(SPD(w * x).reshape(6, 3, 2), 1), SQUARE),
    "linalg.tensorsolve": (
        lambda w, x: jnp.linalg.tensorsolve(SPD(w), x), {"w": (6, 6), "x": (6,)}),
    "linalg.cross": (lambda w, x: jnp.linalg.cross(w, x), {"w": (8, 3), "x": (8, 3)}),
    "linalg.tensordot": lambda w, x: jnp.linalg.tensordot(w, x, axes=2),
    "linalg.eig": None,
    "linalg.eigvals": (lambda w, x: jnp.abs(jnp.linalg.eigvals(SPD(w * x))), SQUARE),
    "linalg.cholesky": (lambda w, x: jnp.linalg.cholesky(SPD(w * x)), SQUARE),
    "linalg.eigh": (lambda w, x: jnp.linalg.eigh(SPD(w * x))[0], SQUARE),
    "linalg.eigvalsh": (lambda w, x: jnp.linalg.eigvalsh(SPD(w * x)), SQUARE),
    "linalg.qr": lambda w, x: jnp.linalg.qr(w * x)[1],
    "linalg.svd": lambda w, x: jnp.linalg.svd(w * x, full_matrices=False)[1],
    "linalg.slogdet": (lambda w, x: jnp.linalg.slogdet(SPD(w * x)), SQUARE),
    "special.comb": None, "special.expn": lambda w, x: jax.scipy.special.expn(2, w * x),
    "special.multigammaln": lambda w, x: jax.scipy.special.multigammaln(3 + w * x, 2),
    "special.polygamma": lambda w, x: jax.scipy.special.polygamma(1, 1 + w * x),
    "special.bessel_jn": lambda w, x: jax.scipy.special.bessel_jn(w * x, v=3),
    "special.zeta": lambda w, x: jax.scipy.special.zeta(2.0, 1 + w * x),
    "special.sph_harm_y": None,
    "special.betainc": lambda w, x: jax.scipy.special.betainc(1.0, 2.0, w * x),
    "special.gammainc": lambda w, x: jax.scipy.special.gammainc(1.5, w * x),
    "special.gammaincc": lambda w, x: jax.scipy.special.gammaincc(1.5, w * x),
    "special.hyp1f1": lambda w, x: jax.scipy.special.hyp1f1(1.0, 2.0, w * x),
    "special.hyp2f1": None,
    "scipy.linalg.cho_solve": (
        lambda w, x: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(SPD(w)), True), x), SQUARE),
    "scipy.linalg.lu_solve": (
        lambda w, x: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(SPD(w)), x), SQUARE),
    "scipy.linalg.solve_sylvester": (
        lambda w, x: jax.scipy.linalg.solve_sylvester(SPD(w), SPD(x), x), SQUARE),
    "scipy.linalg.eigh_tridiagonal": (
        lambda w, x: jax.scipy.linalg.eigh_tridiagonal(w, x, eigvals_only=True),
        {"w": (9,), "x": (8,)}),
    "scipy.linalg.convolution_matrix": (
        lambda w, x: jax.scipy.linalg.convolution_matrix(w, 7, "full") @ x,
        {"w": (24,), "x": (7,)}),
    "scipy.linalg.leslie": (
        lambda w, x: jax.scipy.linalg.leslie(w, x), {"w": (24,), "x": (23,)}),
    "scipy.linalg.funm": None,
}  # fmt: skip


def _in_domains(name, function, shapes):
    """The row, and others in place of it where its results are not finite."""
    sizes = {"w": (8, 5), "x": (8, 5)} | shapes
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    loss = each(lambda p, x: score(function(p["w"], x)))

    def row(draw):
        w, *x = (draw(rng, sizes[of]).astype(np.float32) for of in "w" + B * "x")
        return Row(loss, {"w": w}, np.stack(x))

    first, *others = map(row, DOMAINS.values())
    return first._replace(others=tuple(others))


def _is_real(function, *shapes):
    """Whether a function of arrays gives floating numbers; None if it is not such a function."""
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    try:
        result = jax.tree.leaves(jax.eval_shape(function, *like))
    except Exception:
        return None
    return any(jnp.issubdtype(x.dtype, jnp.inexact) for x in result)


def _forms(function):
    """Calls of a function of one or two arrays, {form: (function of (w, x), shapes)}, or None."""
    for shape in SHAPES:
        sizes, results = {"w": shape, "x": shape}, {}
        one, two = _is_real(function, shape), _is_real(function, shape, shape)
        if one:
            results["f(w) x"] = (lambda w, x: score(function(w)) * x, sizes)
            results["f(w x)"] = (lambda w, x: function(w * x), sizes)
        if two:
            results["f(w, x)"] = (function, sizes)
            results["f(x, w)"] = (lambda w, x: function(x, w), sizes)
            results["f(w, w w) x"] = (lambda w, x: score(function(w, w * w)) * x, sizes)
        if one is not None or two is not None:
            return results
    return None


def rows(only=None) -> dict[str, Row]:
    """{name of the function, and of the form if JAX calls it as such: row}."""
    results = {}
    for name, function in functions().items():
        if name in CALLS or name in left_out() or (only and not any(name in o for o in only)):
            continue
        for form, (call, shapes) in (_forms(function) or {}).items():
            label = f"{name} {form}"
            results[label] = _in_domains(label, call, shapes)._replace(modes=("plain",))
    for name, call in CALLS.items():
        if call is not None and not (only and name not in only):
            function, shapes = call if isinstance(call, tuple) else (call, {})
            results[name] = _in_domains(name, function, shapes)
            if "ragged_dot" in name or name == "lax.composite":  # JAX has no rule for vmap
                results[name] = results[name]._replace(refused="in_turn=True", others=())
    return results


def unknown() -> list[str]:
    """Functions that no row, and no reason, knows."""
    others = {n: f for n, f in functions().items() if n not in CALLS and n not in left_out()}
    return [name for name, function in others.items() if _forms(function) is None]
