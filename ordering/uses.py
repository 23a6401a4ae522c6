"""Where a parameter meets data: products, look-ups, convolutions and other functions linear in it.

Products and look-ups are rewritten in the form that is fastest on the target platform.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend import core
from jaxtyping import Array, Int

from ordering.convolution import convolution


class Param(NamedTuple):
    """A parameter, or the slice of it that a scan is at.

    Attributes:
      value: its current value; leaf: its index among the leaves.
      dims: for every dimension of `value` the leaf's dimensions in it, as (number, size); those of
        size 1 are in none.
      stack: how many leading dimensions of the leaf scans have gone into.
      index: the number of the current slice, uint32[]; place: how many slices come before it.
      own: the unit's own copy of the value, or None where the parameter is not copied.
    """

    value: Any
    leaf: int
    dims: tuple[tuple[tuple[int, int], ...], ...]
    stack: int
    index: Any
    place: Any
    own: Any = None


class Shared(NamedTuple):
    """What all units share: it is made of parameters and constants alone.

    Attributes:
      value: its value; own: that of this unit, made of copies of parameters, or None.
      leaves: for every parameter in it the primitive that has used it.
    """

    value: Any
    own: Any
    leaves: dict[int, str]


class Use(NamedTuple):
    """Where a parameter meets data: y = function(w, *data), linear in w.

    Attributes:
      kind: "product", "convolution", "look-up", or "linear" for another such function.
      param: the parameter.
      rows: (number, size) of the leaf's dimensions that are summed over or looked up; cols: of
        those that are in the result. Of "linear", rows are all.
      function: `(w [K, N], *data) -> y [T, N]`, K and N in the order of rows and cols; of "linear",
        N is 1 and y of any shape.
      data: arrays.
    """

    kind: str
    param: Param
    rows: tuple[tuple[int, int], ...]
    cols: tuple[tuple[int, int], ...]
    function: Callable
    data: tuple


class Hooks(NamedTuple):
    """What a walk does where units meet parameters.

    Attributes:
      site: `(use, w) -> y = use.function(w, *use.data)`.
      unknown: `(leaf, primitive)`, for another use of a parameter.
      term: `Shared -> array`, for a number that all units share, or None within loops.
      inline: whether to compute what is in a `jax.checkpoint` only once.
      rule: told of every equation of parameters alone that has a backward rule of its own.
    """

    site: Callable[[Use, Array], Array] = lambda use, w: use.function(w, *use.data)
    unknown: Callable[[int, str], None] = lambda leaf, primitive: None
    term: Callable[[Shared], Array] | None = None
    inline: bool = False
    rule: Callable[[core.JaxprEqn], None] | None = None


def bind(equation: core.JaxprEqn, values: Sequence) -> list:
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        found = equation.primitive.bind(*values, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def raw(value: Any) -> Any:
    return value.value if isinstance(value, Param | Shared) else value


def is_data(value: Any) -> bool:
    """Whether no parameter is in a value, but for what units have made of it."""
    return not isinstance(value, Param | Shared)


# A rule is `(equation, values, hooks) -> results`, or None for a use it does not support.
def _dot_general(equation, values, hooks):
    own = 0 if isinstance(values[0], Param) else 1
    param, x = values[own], values[1 - own]
    if not is_data(x):
        return None
    contracted, batched = equation.params["dimension_numbers"]
    if any(batched):
        return _linear(equation, values, hooks)
    summed, over = contracted[own], contracted[1 - own]
    free = [i for i in range(param.value.ndim) if i not in summed]
    kept = [i for i in range(x.ndim) if i not in over]
    x = x.transpose((*kept, *over))
    multiply = product(equation.params["precision"], equation.params["preferred_element_type"])
    function = lambda w, x: multiply(x, w)  # noqa: E731
    shape = [*x.shape[: len(kept)], *(param.value.shape[i] for i in free)]
    columns = math.prod(x.shape[len(kept) :])
    y = _met("product", param, summed, free, function, (x.reshape(-1, columns),), hooks)
    y = y.reshape(shape)
    if own == 0:  # a product has the axes of its first factor first
        y = jnp.moveaxis(y, range(len(kept)), range(-len(kept), 0))
    return [y]


def _met(kind, param, rows, cols, function, data, hooks):
    """Hands a use to `site`; `rows` and `cols` are axes of the parameter's value."""
    row_dims, col_dims = (tuple(d for i in axes for d in param.dims[i]) for axes in (rows, cols))

    def as_matrix(w):
        w = w.transpose((*rows, *cols))
        return w.reshape(math.prod(w.shape[: len(rows)]), -1)

    param = param._replace(own=None if param.own is None else as_matrix(param.own))
    use = Use(kind, param, row_dims, col_dims, function, data)
    return hooks.site(use, as_matrix(param.value))


def _gather(equation, values, hooks):
    """Rows that are looked up, as by `table[indices]`."""
    param, indices = values
    if not any(isinstance(v, Param) for v in values):
        found = look_up(equation, param, indices)
        return None if found is None else [found]
    how, shape = equation.params["dimension_numbers"], jnp.shape(raw(param))
    batch = indices.ndim - 1
    known = (
        isinstance(param, Param)
        and (how.collapsed_slice_dims, how.start_index_map) == ((0,), (0,))
        and not how.operand_batching_dims
        and how.offset_dims == tuple(range(batch, batch + len(shape) - 1))
        and equation.params["slice_sizes"] == (1, *shape[1:])
    )
    if not known:
        return None
    mode = equation.params["mode"]

    def rows_of(table, places):
        return table.at[places].get(mode=mode, fill_value=equation.params["fill_value"])

    axes = range(1, len(shape))
    y = _met("look-up", param, (0,), axes, rows_of, (indices.reshape(-1),), hooks)
    return [y.reshape(*indices.shape[:-1], *shape[1:])]


def _convolution(equation, values, hooks):
    x, param = values
    if not any(isinstance(v, Param) for v in values):
        known = all(map(is_data, values))
        return [convolution(equation, bind)(x, param)] if known else None
    if not (is_data(x) and isinstance(param, Param)):
        return None
    params = equation.params
    if max(params["feature_group_count"], params["batch_group_count"]) > 1:
        return _linear(equation, values, hooks)
    numbers, kernel = params["dimension_numbers"], param.value.shape
    out, features = numbers.rhs_spec[0], numbers.out_spec[1]
    rows = [i for i in range(len(kernel)) if i != out]

    def convolve(w, x):
        w = w.reshape(*(kernel[i] for i in rows), w.shape[1])
        (y,) = bind(equation, [x, jnp.moveaxis(w, -1, out)])
        return jnp.moveaxis(y, features, -1).reshape(-1, w.shape[-1])

    y = _met("convolution", param, rows, (out,), convolve, (x,), hooks)
    shape = list(equation.outvars[0].aval.shape)
    channels = shape.pop(features)
    return [jnp.moveaxis(y.reshape(*shape, channels), -1, features)]


def _linear(equation, values, hooks):
    own = 0 if isinstance(values[0], Param) else 1
    param = values[own]
    shape = param.value.shape

    def function(w, x):
        w = w.reshape(shape)
        return bind(equation, [w, x] if own == 0 else [x, w])[0]

    return [_met("linear", param, range(len(shape)), (), function, (values[1 - own],), hooks)]


def _windows(equation, values, hooks):
    """A reduction over windows of data, without the axes of size 1, as that of a single example.

    On a CPU its backward pass has an index for every axis.
    """
    (x,), params = values, equation.params
    of_axes = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
    gone = [
        i for i, n in enumerate(jnp.shape(raw(x)))
        if n == params["window_dimensions"][i] == 1 and tuple(params["padding"][i]) == (0, 0)
    ]  # fmt: skip
    if not is_data(x) or not gone or len(gone) == x.ndim:
        return None
    kept = [i for i in range(x.ndim) if i not in gone]
    fewer = {name: tuple(params[name][i] for i in kept) for name in of_axes}
    found = equation.primitive.bind(jnp.squeeze(x, gone), **params | fewer)
    return [jnp.expand_dims(found, gone)]


RULES = {
    "dot_general": _dot_general,
    "gather": _gather,
    "conv_general_dilated": _convolution,
    "reduce_window_max": _windows,
    "reduce_window_sum": _windows,
}


@functools.cache
def product(precision: Any = None, preferred_element_type: Any = None) -> Callable:
    """`(x [T, K], w [K, N]) -> [T, N]`: on a CPU, under vmap of x, batch and rows are one axis.

    A CPU is slower at a product of three axes; a TPU's compiler does not join the
    gradient of a loss to a product of two, and writes it down.
    """

    def multiply(x, w):
        return jnp.matmul(x, w, precision=precision, preferred_element_type=preferred_element_type)

    def as_one(x, w):
        y = multiply(x.reshape(-1, x.shape[-1]), w)
        return y.reshape(x.shape[0], -1, y.shape[-1])

    @custom_vmap
    def merged(x, w):
        return multiply(x, w)

    @merged.def_vmap
    def _(size, batched, x, w):
        apart = jax.vmap(multiply, [0 if each else None for each in batched])
        if batched == [True, False]:
            return jax.lax.platform_dependent(x, w, cpu=as_one, default=apart), True
        return apart(x, w), True

    return merged


def look_up(equation: core.JaxprEqn, x: Array, indices: Int[Array, "..."]) -> Array | None:
    """A gather without the axes of size 1 that its slices go along; None where there are none.

    A batch of one example is such an axis. In the backward pass of a look-up of labels in logits, a
    TPU's compiler uses a comparison, which is free; with such an axis, it uses a large scatter.
    """
    how, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    used = {*how.collapsed_slice_dims, *how.start_index_map, *how.operand_batching_dims}
    gone = [i for i, n in enumerate(x.shape) if n == sizes[i] == 1 and i not in used]
    if not gone:
        return None
    kept = [i for i in range(x.ndim) if i not in gone]
    whole = {*how.collapsed_slice_dims, *how.operand_batching_dims}
    sliced = [i for i in range(x.ndim) if i not in whole]
    at = dict(zip(sliced, how.offset_dims, strict=True))  # where an axis is in the result
    lost = [at[i] for i in gone]

    def number(axes):
        return tuple(kept.index(i) for i in axes)

    numbers = how._replace(
        offset_dims=tuple(
            d - sum(other < d for other in lost) for d in how.offset_dims if d not in lost
        ),
        collapsed_slice_dims=number(how.collapsed_slice_dims),
        start_index_map=number(how.start_index_map),
        operand_batching_dims=number(how.operand_batching_dims),
    )
    params = equation.params | {
        "dimension_numbers": numbers, "slice_sizes": tuple(sizes[i] for i in kept)
    }  # fmt: skip
    found = equation.primitive.bind(jnp.squeeze(x, gone), indices, **params)
    return jnp.expand_dims(found, lost)
