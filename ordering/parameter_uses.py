"""A loss evaluated equation by equation, so that every product of a parameter with data is seen.

The jaxpr of a loss is walked through nested jit, remat and scan. Parameters travel as `Param`,
through casts, transposes and reshapes that keep their dimensions apart. Where one meets data in a
matrix product, a convolution or a look-up, `site` says what becomes of the result; any other use
is reported to `unknown`, and computed as it stands.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from ordering.machine_forms import look_up, product


class Param(NamedTuple):
    """A parameter, or the slice of it that a scan is at.

    Fields:
      value: as it is used; leaf: its number among the leaves.
      dims: for every dimension of `value` the leaf's dimensions in it, as (number, size); those of
        size 1 are in none.
      stack: how many leading dimensions of the leaf scans have gone into.
      index: which slice of them, uint32[].
    """

    value: Any
    leaf: int
    dims: tuple[tuple[tuple[int, int], ...], ...]
    stack: int
    index: Any


class Use(NamedTuple):
    """Where a parameter meets data: y = function(w, *data), linear in w.

    Fields:
      kind: "product", "convolution", "look-up", or "linear" for another such function.
      param: which.
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
    """Fields:
    site: `(use, w) -> y`, where y is function(w, *data) of the use.
    unknown: `(param, name of the primitive) -> None`.
    """

    site: Callable
    unknown: Callable


def walk(closed: core.ClosedJaxpr, args, hooks: Hooks) -> list:
    """The results of a jaxpr on values of which some are `Param`."""
    return _evaluate(closed.jaxpr, closed.consts, args, hooks)


def entering(leaf: int, value) -> Param:
    """A whole leaf."""
    dims = tuple(((i, n),) if n > 1 else () for i, n in enumerate(value.shape))
    return Param(value, leaf, dims, 0, jnp.uint32(0))


def slice_index(index, place) -> jax.Array:
    """uint32: the slice at this place of the slice that was at `index`."""
    return jnp.asarray(index, jnp.uint32) * jnp.uint32(65599) + jnp.asarray(place, jnp.uint32) + 1


def _evaluate(jaxpr, consts, args, hooks):
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        found, name = None, equation.primitive.name
        if any(isinstance(v, Param) for v in values) or name in ALWAYS:
            rule = RULES.get(name)
            found = rule(equation, values, hooks) if rule else None
            values = [_plain(v, name, hooks) for v in values] if found is None else values
        if found is None:
            found = _bind(equation, values)
        env.update(zip(equation.outvars, found, strict=True))
    return [_plain(read(v), "the result", hooks) for v in jaxpr.outvars]


def _bind(equation, values) -> list:
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        found = equation.primitive.bind(*values, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _plain(value, name, hooks):
    if isinstance(value, Param):
        hooks.unknown(value, name)
        return value.value
    return value


# A rule is `(equation, values, hooks) -> results`, or None for a use that it does not know.
def _cast(equation, values, hooks):
    (value,) = _bind(equation, [values[0].value])
    return [values[0]._replace(value=value)] if jnp.issubdtype(value.dtype, jnp.floating) else None


def _transpose(equation, values, hooks):
    (param,) = values
    (value,) = _bind(equation, [param.value])
    dims = tuple(param.dims[i] for i in equation.params["permutation"])
    return [param._replace(value=value, dims=dims)]


def _reshape(equation, values, hooks):
    """Dimensions may be merged and split again, and some of size 1 come and go."""
    param, *sizes = values
    dims = None if sizes else _regrouped(param, equation.outvars[0].aval.shape)
    if dims is None:
        return None
    (value,) = _bind(equation, [param.value])
    return [param._replace(value=value, dims=dims)]


def _regrouped(param: Param, shape):
    """The leaf's dimensions in those of a new shape; None where one would be cut or repeated."""
    left, found = [dim for group in param.dims for dim in group], []
    for size in shape:
        group = []
        while math.prod(n for _, n in group) < size and left:
            group.append(left.pop(0))
        if math.prod(n for _, n in group) != size:
            return None
        found.append(tuple(group))
    return None if left else tuple(found)


def _jit(equation, values, hooks):
    inner = equation.params["jaxpr"]
    return _evaluate(inner.jaxpr, inner.consts, values, hooks)


def _remat(equation, values, hooks):
    params = equation.params

    def again(raw):
        own = [
            v._replace(value=r) if isinstance(v, Param) else r
            for v, r in zip(values, raw, strict=True)
        ]
        return _evaluate(params["jaxpr"], (), own, hooks)

    again = jax.checkpoint(again, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return again([_raw(v) for v in values])


def _raw(value):
    return value.value if isinstance(value, Param) else value


def _scan(equation, values, hooks):
    """Parameters may be constants of the loop, or stacked along its axis; not carried."""
    params, inner = equation.params, equation.params["jaxpr"]
    first = params["num_consts"] + params["num_carry"]
    consts, carry, stacked = (
        values[: params["num_consts"]], values[params["num_consts"] : first], values[first:],
    )  # fmt: skip
    carry = [_plain(v, "scan", hooks) for v in carry]
    stacked = [
        v if not isinstance(v, Param) or _is_stacked(v) else _plain(v, "scan", hooks)
        for v in stacked
    ]

    def body(carry, at):
        place, slices = at
        own = [
            v._replace(
                value=s, dims=v.dims[1:], stack=v.stack + 1, index=slice_index(v.index, place)
            )
            if isinstance(v, Param)
            else s
            for v, s in zip(stacked, slices, strict=True)
        ]
        found = _evaluate(inner.jaxpr, inner.consts, [*consts, *carry, *own], hooks)
        return found[: len(carry)], found[len(carry) :]

    places = jnp.arange(params["length"], dtype=jnp.uint32)
    carry, found = jax.lax.scan(
        body, carry, (places, [_raw(v) for v in stacked]), length=params["length"],
        reverse=params["reverse"], unroll=params["unroll"],
    )  # fmt: skip
    return [*carry, *found]


def _is_stacked(param: Param) -> bool:
    return [number for number, _ in param.dims[0]] == [param.stack]


def _dot_general(equation, values, hooks):
    if all(isinstance(v, Param) for v in values):
        return None
    own = 0 if isinstance(values[0], Param) else 1
    param, x = values[own], values[1 - own]
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
    """What becomes of a use of which `rows` and `cols` are the axes of the parameter's value."""
    row_dims, col_dims = (tuple(d for i in axes for d in param.dims[i]) for axes in (rows, cols))
    w = param.value.transpose((*rows, *cols))
    w = w.reshape(math.prod(w.shape[: len(rows)]), -1)
    use = Use(kind, param, row_dims, col_dims, function, data)
    return hooks.site(use, w)


def _gather(equation, values, hooks):
    """Rows that are looked up, as by `table[indices]`."""
    param, indices = values
    if not any(isinstance(v, Param) for v in values):
        found = look_up(equation, param, indices)
        return None if found is None else [found]
    how, shape = equation.params["dimension_numbers"], jnp.shape(_raw(param))
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
    if isinstance(x, Param):
        return None
    params = equation.params
    if max(params["feature_group_count"], params["batch_group_count"]) > 1:
        return _linear(equation, values, hooks)
    numbers, kernel = params["dimension_numbers"], param.value.shape
    out, features = numbers.rhs_spec[0], numbers.out_spec[1]
    rows = [i for i in range(len(kernel)) if i != out]

    def convolve(w, x):
        w = w.reshape(*(kernel[i] for i in rows), w.shape[1])
        (y,) = _bind(equation, [x, jnp.moveaxis(w, -1, out)])
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
        return _bind(equation, [w, x] if own == 0 else [x, w])[0]

    return [_met("linear", param, range(len(shape)), (), function, (values[1 - own],), hooks)]


ALWAYS = ("gather", "jit", "pjit")  # these are looked into without a parameter too
RULES = {
    "convert_element_type": _cast,
    "copy": _cast,
    "name": _cast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _reshape,
    "broadcast_in_dim": _reshape,
    "jit": _jit,
    "pjit": _jit,
    "closed_call": _jit,
    "remat2": _remat,
    "checkpoint": _remat,
    "scan": _scan,
    "dot_general": _dot_general,
    "gather": _gather,
    "conv_general_dilated": _convolution,
}
