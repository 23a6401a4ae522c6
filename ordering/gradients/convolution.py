"""Convolutions of batches of examples and kernels, not grouped as vmap would make them.

Under vmap of data and kernel, as in gradients of single examples, JAX makes every example a group
of features. If the examples are split over an automatic axis of a mesh, XLA's partitioner returns
wrong numbers for these (docs/contributing/upstream.md). Slices and products over a batch are right
in either case. They are used only if the compiler may split the examples, because a large kernel
takes up to twice as long.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend import core
from jaxtyping import Array, PyTree

from syncopate.mesh import automatic, varying

CONVOLUTION = "conv_general_dilated"
UNROLLED = 64  # slices; more than these are taken in a loop


def bind(equation: core.JaxprEqn, values: Sequence, **changed: Any) -> list:
    """The results of an equation's primitive for other values and parameters."""
    params = equation.primitive.get_bind_params(equation.params | changed)
    with equation.ctx.manager:
        results = equation.primitive.bind(*values, **params)
    return [*results] if equation.primitive.multiple_results else [results]


def bind_split(equation: core.JaxprEqn, values: Sequence) -> list:
    """Like `bind`, also under a vmap over examples that the compiler may split."""
    if not may_be_split():
        return bind(equation, values)
    if equation.primitive.name == CONVOLUTION:
        return [convolution(equation)(*values)]
    if not holds([equation], CONVOLUTION):
        return bind(equation, values)
    changed = {name: _rewritten(param) for name, param in equation.params.items()}
    return bind(equation.replace(params=changed), values)


def split_safe(function: Callable) -> Callable:
    """The function, with convolutions that are right under such a vmap."""

    def run(*args):
        if not may_be_split():
            return function(*args)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        values = _values(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    return run


def may_be_split() -> bool:
    """Whether the compiler may split a batch over devices; it cannot if all axes are manual.

    While tracing it is unknown how arguments will be split, unless there is only one device.
    """
    if jax.sharding.get_abstract_mesh().axis_names:
        return bool(automatic())
    return jax.device_count() > 1


def holds(equations: Iterable[core.JaxprEqn], *names: str) -> bool:
    """Whether one of these primitives is in the equations, or in a program within them."""
    return any(
        equation.primitive.name in names
        or any(holds(inner.eqns, *names) for inner in core.jaxprs_in_params(equation.params))
        for equation in equations
    )


def _values(jaxpr, consts, args):
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for equation in jaxpr.eqns:
        results = bind_split(equation, [*map(read, equation.invars)])
        env.update(zip(equation.outvars, results, strict=True))
    return [*map(read, jaxpr.outvars)]


def _rewritten(param: PyTree):
    if isinstance(param, tuple | list):
        return type(param)(map(_rewritten, param))
    if not isinstance(param, core.Jaxpr | core.ClosedJaxpr):
        return param
    consts = getattr(param, "consts", ())
    inner: Any = getattr(param, "jaxpr", param)
    run = lambda *args: _values(inner, consts, args)  # noqa: E731
    closed = jax.make_jaxpr(run)(*(v.aval for v in inner.invars))
    return closed if isinstance(param, core.ClosedJaxpr) else closed.jaxpr


def convolution(equation: core.JaxprEqn) -> Callable[[Array, Array], Array]:
    """`(data, kernel) -> result` of a convolution; under vmap of both, by products."""
    result: Any = equation.outvars[0].aval

    def plain(x, w):
        return bind(equation, [x, w])[0]

    convolve = custom_vmap(plain)

    @convolve.def_vmap
    def _(size, batched, x, w):
        if all(batched):
            return side_by_side(x, w, equation.params, result.dtype), True
        return jax.vmap(plain, [0 if each else None for each in batched])(x, w), True

    return convolve


def side_by_side(x: Array, w: Array, params: dict, dtype: jnp.dtype) -> Array:
    """[B, ...] of x [B, ...] and w [B, ...]: B convolutions with these parameters."""
    lhs, rhs, out = params["dimension_numbers"]
    groups = max(params["feature_group_count"], params["batch_group_count"])
    x = _grouped(x, lhs, 0 if params["batch_group_count"] > 1 else 1, groups)
    w = _grouped(w, rhs, 0, groups)  # x [B, G, n, i, ...], w [B, G, o, i, ...]
    x = _padded(x, params["padding"], params["lhs_dilation"])
    steps, dilation, kernel = params["window_strides"], params["rhs_dilation"], w.shape[4:]
    places = [
        max(0, (n - (k - 1) * d - 1) // s + 1)
        for n, k, d, s in zip(x.shape[4:], kernel, dilation, steps, strict=True)
    ]
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype
    dot = {"precision": params["precision"], "preferred_element_type": wide}
    leading = (*x.shape[:3], w.shape[2])  # [B, G, n, o]

    def at_offset(offset):  # the kernel's entry there, at all places
        part = _slice(x, [o * d for o, d in zip(offset, dilation, strict=True)], places, steps)
        of_kernel = _slice(w, offset, [1] * len(kernel), steps).reshape(w.shape[:4])
        return jnp.einsum("bgni...,bgoi->bgno...", part, of_kernel, **dot)

    def at_place(place):  # the whole kernel, at one place
        part = _slice(x, [p * s for p, s in zip(place, steps, strict=True)], kernel, dilation)
        flat = (v.reshape(*v.shape[:3], -1) for v in (part, w))
        return jnp.einsum("bgnk,bgok->bgno", *flat, **dot)

    y = varying(jnp.zeros((*leading, *places), wide), x, w)
    if math.prod(kernel) <= math.prod(places):
        y = _added_up(at_offset, kernel, y)
    elif y.size:
        y = jnp.moveaxis(_stacked(at_place, places), 0, -1).reshape(y.shape)
    y = y.swapaxes(1, 2)  # [B, n, G, o, ...]
    y = y.reshape(*y.shape[:2], groups * w.shape[2], *places).astype(dtype)
    return jnp.moveaxis(y, range(1, y.ndim), [1 + axis for axis in out])


def _grouped(v, spec, axis, groups):
    """[B, G, n, i, ...] of [B, ...]: `axis`, of (n, i), is the one that has the groups."""
    v = v.transpose(0, *(1 + a for a in spec))
    v = v.reshape(*v.shape[: 1 + axis], groups, -1, *v.shape[2 + axis :])
    return jnp.moveaxis(v, 1 + axis, 1)


def _padded(x, padding, dilation):
    config = [(0, 0, 0)] * 4 + [(*ends, d - 1) for ends, d in zip(padding, dilation, strict=True)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), config)


def _slice(v, start, count, step):
    """Slices the last axes: `count` entries from `start` on, at distances of `step`."""
    lengths = [(n - 1) * s + 1 for n, s in zip(count, step, strict=True)]
    v = jax.lax.dynamic_slice(v, (0, 0, 0, 0, *start), (*v.shape[:4], *lengths))
    return v[(..., *(slice(None, None, s) for s in step))] if max(step, default=1) > 1 else v


def _added_up(function, sizes, start):
    """The sum of a function over all indices of an array of these sizes."""
    places = list(itertools.product(*map(range, sizes)))
    if len(places) <= UNROLLED:
        return sum(map(function, places), start=start)
    add = lambda total, place: (total + function(place), None)  # noqa: E731
    return jax.lax.scan(add, start, jnp.asarray(places))[0]


def _stacked(function, sizes):
    """A function of all indices of an array of these sizes."""
    places = list(itertools.product(*map(range, sizes)))
    if len(places) <= UNROLLED:
        return jnp.stack([function(place) for place in places])
    return jax.lax.map(function, jnp.asarray(places))
