"""The linear primitives in which a parameter meets an array of an example: y = w * x.

Every rule binds the equation's own primitive with its parameters. So modes, precisions and types
are the user's, and JAX's own rules differentiate it. Besides y, a `Use` describes how the gradient
of w is a product of factors, rows of x and columns of dy, which are sketched in its place.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend import core
from jaxtyping import Array

from ordering.gradients import linear
from ordering.gradients.convolution import CONVOLUTION, bind
from ordering.gradients.interpret import (
    Handler,
    bind_of_example,
    is_constant,
    is_plain,
    of_example,
    raw,
)
from ordering.gradients.moves import Param, filled
from ordering.trees import as_float32

PRODUCT, LOOK_UP, LINEAR = "product", "look-up", "linear"
Dims = tuple[tuple[int, int], ...]  # dimensions of a leaf, (number, size)


class Use(NamedTuple):
    """Where a parameter meets an example: y = apply(w, *data), linear in w.

    For products, convolutions and look-ups, the gradient of w is sum_t x_t^T dy_t over `rank` pairs
    of factors, as a matrix [K, N] of the leaf's rows and columns. For other linear primitives, all
    dimensions are rows, and there are no factors.
    """

    kind: str  # PRODUCT, "convolution", LOOK_UP or LINEAR
    rows: Dims  # the leaf's dimensions that are summed over or looked up, in the equation's order
    cols: Dims  # those that are in the result
    rank: int
    apply: Callable[..., Array]
    plain: Callable[..., Array]  # the same, as JAX differentiates it outside of vmap
    # (the rows' `linear.Side`, g groups, *data) -> float32[g, T, r], `residue_sums` of x
    sums: Any = None
    columns: Any = None  # (dy, *data) -> [T, N]
    precision: Any = None  # precision of the products that make sketches


def _dot_general(equation, values, handler):
    side = 0 if isinstance(values[0], Param) else 1
    param, x = values[side], values[1 - side]
    if not isinstance(param, Param) or not of_example(x):
        return None
    contracted, batched = equation.params["dimension_numbers"]
    if any(batched) or equation.params.get("out_sharding") is not None:
        return _linear(equation, values, handler)
    shapes = [v.aval.shape for v in equation.invars]
    of_w, of_x = contracted[side], contracted[1 - side]
    free = [i for i in range(len(shapes[side])) if i not in of_w]
    kept = [i for i in range(len(shapes[1 - side])) if i not in of_x]
    rows, cols = _dims(param, of_w), _dims(param, free)
    counts, sizes = ([shapes[s][i] for i in at] for s, at in ((1 - side, kept), (side, free)))
    terms, parts = math.prod(shapes[side][i] for i in of_w), param.parts

    def matrix(x):
        return x.transpose((*kept, *of_x)).reshape(math.prod(counts), terms)

    def through(multiply):
        def run(w, x):
            w = w.transpose((*of_w, *free)).reshape(terms, math.prod(sizes))
            y = multiply(matrix(x), w).reshape(*counts, *sizes)
            # A product has the axes of its first factor first.
            return y if side else jnp.moveaxis(y, range(len(kept)), range(-len(kept), 0))

        return run

    def sums(of, read, x):
        return linear.residue_sums(_natural(matrix(x), rows, parts), of, read)

    def columns(dy, x):
        dy = dy if side else jnp.moveaxis(dy, range(-len(kept), 0), range(len(kept)))
        return _natural(dy.reshape(math.prod(counts), math.prod(sizes)), cols, parts)

    precision, multiply = precision_of(equation), _matmul(equation, side)
    use = Use(
        PRODUCT,
        rows,
        cols,
        math.prod(counts),
        through(_rows_as_one(multiply)),
        through(multiply),
        sums,
        columns,
        precision,
    )
    return [handler.use(use, param, (x,))]


def _matmul(equation, side):
    """The equation's product of matrices, x [T, K] and w [K, N], in its own order."""

    def multiply(x, w):
        pair, over = ((x, w), ((1,), (0,))) if side else ((w, x), ((0,), (1,)))
        (y,) = bind(equation, pair, dimension_numbers=(over, ((), ())))
        return y if side else y.T

    return multiply


def _rows_as_one(multiply):
    """`(x [T, K], w [K, N]) -> [T, N]`: on a CPU, under vmap of x, batch and rows are one axis.

    On a CPU the step of a GPT takes a fifth longer with products of three axes. On a TPU products
    of two axes are worse: the compiler does not fuse the gradient of a loss with them.
    """

    def as_one(x, w):
        flat = x.reshape(x.shape[0] * x.shape[1], x.shape[2])
        return multiply(flat, w).reshape(*x.shape[:2], w.shape[1])

    wrapped = custom_vmap(multiply)

    @wrapped.def_vmap
    def _(size, batched, x, w):
        each = jax.vmap(multiply, [0 if one else None for one in batched])
        if batched == [True, False]:
            return jax.lax.platform_dependent(x, w, cpu=as_one, default=each), True
        return each(x, w), True

    return wrapped


def precision_of(equation: core.JaxprEqn) -> Any:
    """The precision of a product; the higher one if its factors differ."""
    given = equation.params.get("precision")
    given = given if isinstance(given, tuple) else (given,)
    precisions = [p for p in given if isinstance(p, jax.lax.Precision)]
    return max(precisions, key=lambda p: p.value) if precisions else None


def _gather(equation, values, handler):
    """Rows that are looked up, as by `table[indices]`."""
    table, indices = values
    if not isinstance(table, Param):
        return _look_up(equation, values, handler)
    if table.parts or not is_plain(indices):
        return None
    if (canonical := _of_rows(equation)) is not None:
        return _rows_of_vmap(equation, canonical, values, handler)
    how, (table_shape, shape) = (
        equation.params["dimension_numbers"],
        [v.aval.shape for v in equation.invars],
    )
    batch, width = len(shape) - 1, len(table_shape) - 1
    is_look_up = (
        is_plain(indices)  # places may be constants
        and (how.collapsed_slice_dims, how.start_index_map) == ((0,), (0,))
        and not how.operand_batching_dims
        and how.offset_dims == tuple(range(batch, batch + width))
        and equation.params["slice_sizes"] == (1, *table_shape[1:])
    )
    if not is_look_up:
        return None
    rows, cols = _dims(table, (0,)), _dims(table, range(1, 1 + width))

    def apply(w, indices):
        return bind(equation, [w, indices])[0]

    modes = jax.lax.GatherScatterMode
    clips = equation.params["mode"] == modes.CLIP

    def looked_up(table, indices, fill_value=0):
        """Rows of another table where the gradient has a row to go to; zeros elsewhere.

        A look-up that promises indices in bounds clamps them, but its gradient drops them.
        """
        (rows_of,) = bind(
            equation,
            [table, indices],
            dimension_numbers=how._replace(offset_dims=(batch,)),
            slice_sizes=(1, table.shape[1]),
            fill_value=fill_value,
            mode=modes.CLIP if clips else modes.FILL_OR_DROP,
        )
        return rows_of.reshape(-1, table.shape[1])

    def sums(of, read, indices):
        """Of rows that are ones at their indices."""
        signs, residues = of.in_groups(read), len(of.sums)
        order = _as_used(jnp.arange(table_shape[0])[:, None], rows)
        at = looked_up(order, indices, -1)[:, 0]
        ones = (at % residues)[:, None] == jnp.arange(residues)[None]
        return jnp.where((ones & (at >= 0)[:, None])[None], signs[:, at, None], 0.0)

    rank = math.prod(shape[:-1])

    def columns(dy, indices):
        dy = _natural(dy.reshape(rank, math.prod(table_shape[1:])), cols)
        if clips:
            return dy
        there = looked_up(jnp.ones((table_shape[0], 1)), indices)
        return jnp.where(there > 0, dy, 0)  # the cotangent of a filled-in value may be NaN

    use = Use(LOOK_UP, rows, cols, rank, apply, apply, sums, columns)
    data = indices.value if is_constant(indices) else indices
    return [handler.use(use, table, (data,))]


def _of_rows(equation):
    """The parameters of a look-up of rows for one that vmap makes of `table[i]`, or None.

    It has indices of all axes. They are clipped, so that all but that of the row are zero.
    """
    how, clips = equation.params["dimension_numbers"], jax.lax.GatherScatterMode.CLIP
    shape, indices = (v.aval.shape for v in equation.invars)
    batch = len(indices) - 1
    if not (
        equation.params["mode"] == clips
        and equation.params["slice_sizes"] == (1, *shape[1:])
        and how.collapsed_slice_dims == ()
        and not how.operand_batching_dims
        and 0 in how.start_index_map
        and how.offset_dims == tuple(range(batch, batch + len(shape)))
    ):
        return None
    how = how._replace(
        offset_dims=how.offset_dims[:-1], collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return {"dimension_numbers": how}


def _rows_of_vmap(equation, canonical, values, handler):
    table, indices = values
    at = equation.params["dimension_numbers"].start_index_map.index(0)
    (table_aval, shape), result = (v.aval for v in equation.invars), equation.outvars[0].aval
    batch = len(shape.shape) - 1

    def rows(table, indices):
        indices = jax.lax.slice_in_dim(indices, at, at + 1, axis=-1)
        return bind(equation, [table, indices], **canonical)[0]

    equations = jax.make_jaxpr(rows)(table_aval, shape).jaxpr.eqns
    (of_rows,) = [e for e in equations if e.primitive is equation.primitive]
    if indices is not None:  # an array is evaluated
        value = jax.lax.slice_in_dim(raw(indices), at, at + 1, axis=-1)
        indices = indices._replace(value=value) if is_constant(indices) else value
    results = _gather(of_rows, [table, indices], handler)
    if results is None or results[0] is None:
        return results
    return [jnp.expand_dims(results[0], batch).reshape(result.shape)]


def _convolution(equation, values, handler):
    x, param = values
    if not (is_plain(x) and isinstance(param, Param)) or not of_example(x) or param.parts:
        return None
    params = equation.params
    if max(params["feature_group_count"], params["batch_group_count"]) > 1:
        return _linear(equation, values, handler)
    numbers, kernel = params["dimension_numbers"], equation.invars[1].aval.shape
    result: Any = equation.outvars[0].aval
    out, features = numbers.rhs_spec[0], numbers.out_spec[1]
    axes = [i for i in range(len(kernel)) if i != out]
    rows, cols = _dims(param, axes), _dims(param, (out,))

    def apply(w, x):
        return bind(equation, [x, w])[0]

    def matrix(y):
        return jnp.moveaxis(y, features, -1).reshape(-1, y.shape[features])

    def sums(of, read, x):
        signs, residues = of.in_groups(read), len(of.sums)
        ones = jnp.arange(signs.shape[1])[:, None] % residues == jnp.arange(residues)[None]
        signed = _as_used(signs.T[..., None] * ones[:, None], rows)
        signed = signed.reshape(*(kernel[i] for i in axes), -1)
        y = apply(jnp.moveaxis(signed, -1, out).astype(equation.invars[1].aval.dtype), x)
        return as_float32(matrix(y)).reshape(-1, len(signs), residues).swapaxes(0, 1)

    def columns(dy, x):
        return _natural(matrix(dy), cols)

    rank = math.prod(result.shape) // max(1, result.shape[features])
    use = Use("convolution", rows, cols, rank, apply, apply, sums, columns, precision_of(equation))
    return [handler.use(use, param, (x,))]


def _linear(equation, values, handler):
    side = 0 if isinstance(values[0], Param) else 1
    param = values[side]
    result: Any = equation.outvars[0].aval

    def apply(w, x):
        return bind(equation, [x, w] if side else [w, x])[0]

    rows = _dims(param, range(len(param.dims)))
    use = Use(LINEAR, rows, (), result.shape[0] if result.shape else 1, apply, apply)
    return [handler.use(use, param, (values[1 - side],))]


def _dims(param, axes) -> Dims:
    return tuple(dim for axis in axes for dim in param.dims[axis])


def _natural(x, dims, parts=()):
    """[T, K], with columns in the leaf's order instead of the use's; `dims` are in the use's.

    Of dimensions of which the use has parts, it has all entries, zeros elsewhere.
    """
    order = [1 + dims.index(dim) for dim in sorted(dims)]
    x = x.reshape(len(x), *(n for _, n in dims)).transpose(0, *order)
    axes = {number: axis for axis, (number, _) in enumerate(sorted(dims), 1)}
    x = filled(x, axes, tuple((number, part) for number, part in parts if number in axes))
    return x.reshape(len(x), math.prod(x.shape[1:]))


def _as_used(table, dims):
    """[K, N], with rows in the order of the use instead of the leaf's."""
    order = [sorted(dims).index(dim) for dim in dims]
    natural = table.reshape(*(n for _, n in sorted(dims)), -1)
    return natural.transpose(*order, len(order)).reshape(table.shape)


def _look_up(equation, values, handler):
    """A gather from an array of the example, without the axes of size 1 along which it slices.

    A batch of one example is such an axis. With it, a TPU's compiler uses a large scatter in the
    backward pass of a look-up of labels in logits; without it, a comparison, which is free.
    """
    how, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape = equation.invars[0].aval.shape
    whole = {*how.collapsed_slice_dims, *how.operand_batching_dims}
    sliced = [i for i in range(len(shape)) if i not in whole]
    at = dict(zip(sliced, how.offset_dims, strict=True))  # where an axis is in the result
    gone = [i for i in sliced if shape[i] == sizes[i] == 1 and i not in how.start_index_map]
    if not (gone and all(map(is_plain, values)) and any(map(of_example, values))):
        return None
    if not handler.evaluates:
        return bind_of_example(equation, values, handler)
    x, indices = (v.value if is_constant(v) else v for v in values)
    kept = [i for i in range(x.ndim) if i not in gone]
    dropped = [at[i] for i in gone]

    def number(axes):
        return tuple(kept.index(i) for i in axes)

    numbers = how._replace(
        offset_dims=tuple(
            d - sum(other < d for other in dropped) for d in how.offset_dims if d not in dropped
        ),
        collapsed_slice_dims=number(how.collapsed_slice_dims),
        start_index_map=number(how.start_index_map),
        operand_batching_dims=number(how.operand_batching_dims),
    )
    fewer = {"dimension_numbers": numbers, "slice_sizes": tuple(sizes[i] for i in kept)}
    (rows_of,) = bind(equation, [jnp.squeeze(x, gone), indices], **fewer)
    return [jnp.expand_dims(rows_of, dropped)]


RULES: dict[str, Callable[[core.JaxprEqn, list, Handler], list | None]] = {
    "dot_general": _dot_general,
    "gather": _gather,
    CONVOLUTION: _convolution,
}
