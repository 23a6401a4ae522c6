"""Parameters whose entries have moved, are scaled by a number, or of which a part is taken.

Such a value is still a parameter: where it meets data, the gradient of the leaf is known from that
of the value, and its factors from those of the value.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array

from ordering.gradients.convolution import bind
from syncopate.mesh import varying


class Part(NamedTuple):
    """The entries start, start + step, ... of a dimension of this size."""

    start: int
    step: int
    whole: int


class Param(NamedTuple):
    """A parameter, or the slice of it that a scan or an index is at."""

    value: Any
    leaf: int  # its index among the leaves
    shape: tuple[int, ...]  # of the leaf
    # For every dimension of the value, the leaf's dimensions in it, (number, size), except size 1.
    dims: tuple[tuple[tuple[int, int], ...], ...]
    stack: int = 0  # how many leading dimensions of the leaf the scans and indices so far took
    place: Any = 0  # uint32[], slices of the leaf before this one
    copy: Any = None  # the example's copy of the value, if the parameter is copied
    factor: Any = None  # a constant number by which the leaf is multiplied
    parts: tuple[tuple[int, Part], ...] = ()  # of dimensions of which only a part is here
    varies: bool = False  # whether the example chose the slice, so that it is not shared

    @property
    def is_whole(self) -> bool:
        """Whether a rule can use it: no dimension is split in two or partly taken by scans."""
        each = [dim for group in self.dims for dim in group]
        sizes = {number: self.shape[number] for number, _ in each} | {
            number: size for number, size in each if number in dict(self.parts)
        }
        return dict(each) == sizes and len({number for number, _ in each}) == len(each)


def moved(equation: core.JaxprEqn, values: list, number: Callable) -> list | None:
    """The results of a move, which are parameters, or None. `number(v)` is that of a constant."""
    name = equation.primitive.name
    result: Any = equation.outvars[0].aval
    if not jnp.issubdtype(result.dtype, jnp.floating):
        return None
    if name in ("mul", "div", "neg"):
        return _scaled(equation, values, number)
    if not isinstance(values[0], Param):
        return None
    if name == "dynamic_slice":
        return _at_index(equation, values)
    if len(values) > 1:
        return None
    param, results = values[0], bind_of(equation, values[0])
    if name == "split":
        axis, sizes = equation.params["axis"], equation.params["sizes"]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        given = [[(axis, start, 1, size)] for start, size in zip(starts, sizes, strict=True)]
        parts = [_part(param, each) for each in given]
    elif name == "slice":
        parts = [_slices(equation, param)]
    elif name == "rev":
        shape = param.value.shape
        axes = [(axis, shape[axis] - 1, -1, shape[axis]) for axis in equation.params["dimensions"]]
        parts = [_part(param, axes)]
    else:
        parts = [_with_dims(param, _moved_dims(equation, param))]
    if not all(parts):
        return None
    return [
        part._replace(value=value, copy=copy)
        for part, (value, copy) in zip(parts, results, strict=True)
        if part is not None
    ]


def bind_of(equation: core.JaxprEqn, param: Param, *others: Any) -> list[tuple[Any, Any]]:
    """[(value, copy)] of all results for a parameter and its copy."""
    values = bind(equation, [param.value, *others])
    copied = param.copy is not None
    copies = bind(equation, [param.copy, *others]) if copied else [None] * len(values)
    return [*zip(values, copies, strict=True)]


def _scaled(equation, values, number):
    """A parameter times, or divided by, a constant number."""
    at = 0 if isinstance(values[0], Param) else 1
    param, others = values[at], [v for i, v in enumerate(values) if i != at]
    factors = [number(v) for v in others]
    divides = equation.primitive.name == "div"
    like = equation.outvars[0].aval
    if (
        any(factor is None for factor in factors)
        or (divides and at)
        or (param.value.shape, param.value.dtype) != (like.shape, like.dtype)
    ):
        return None
    factor = jnp.float32(-1) if not factors else jnp.asarray(factors[0], jnp.float32).reshape(())
    factor = 1 / factor if divides else factor
    factor = factor if param.factor is None else factor * param.factor

    def result(x):
        if x is None:
            return None
        given = [*factors[:at], x, *factors[at:]]
        return bind(equation, given)[0]

    return [param._replace(value=result(param.value), copy=result(param.copy), factor=factor)]


def _at_index(equation, values):
    """One slice along the leading axis, at an index that may differ between examples."""
    param, index, *others = values
    sizes, shape = equation.params["slice_sizes"], param.value.shape
    if sizes[0] != 1 or sizes[1:] != shape[1:] or not is_stacked(param) or _width(param) < 2:
        return None
    indices = [getattr(i, "value", i) for i in (index, *others)]
    if any(isinstance(i, Param) for i in (index, *others)):
        return None
    zero = varying(jnp.int32(0), param.value)
    indices = [zero if i is None else i for i in indices]  # nothing is evaluated
    place = jnp.clip(indices[0], 0, shape[0] - 1).astype(jnp.uint32)
    part = sliced(param, shape[0], place)._replace(varies=True)
    ((value, copy),) = bind_of(equation, param, *indices)
    return [part._replace(value=value, copy=copy, dims=((), *part.dims))]


def _slices(equation, param):
    """A slice along some axes; of one entry of the leading axis, as a scan would take it."""
    shape, starts = param.value.shape, equation.params["start_indices"]
    limits, strides = equation.params["limit_indices"], equation.params["strides"]
    strides = strides or (1,) * len(starts)
    counts = [-(-(end - start) // step) for start, end, step in zip(starts, limits, strides)]  # noqa: B905
    if counts[0] == 1 < shape[0] and tuple(counts[1:]) == shape[1:]:
        if not is_stacked(param) or _width(param) < 2:
            return None
        part = sliced(param, shape[0], jnp.uint32(starts[0]))
        return part._replace(dims=((), *part.dims))
    return _part(param, list(zip(range(len(shape)), starts, strides, counts, strict=True)))


def _width(param):
    """How many dimensions the slices of a parameter have."""
    return sum(map(len, param.dims[1:]))


def _part(param, axes):
    """The parameter with (axis, start, step, size) of some axes, each a dimension of the leaf."""
    dims, parts = list(param.dims), dict(param.parts)
    for axis, start, step, size in axes:
        if (start, step, size) == (0, 1, param.value.shape[axis]):
            continue
        if len(dims[axis]) != 1 or size < 2:
            return None
        ((number, before),) = dims[axis]
        first, by, whole = parts.get(number, (0, 1, param.shape[number]))
        if number not in parts and before != whole:
            return None
        parts[number] = Part(first + by * start, by * step, whole)
        dims[axis] = ((number, size),)
    return param._replace(dims=tuple(dims), parts=tuple(sorted(parts.items())))


def _with_dims(param, dims):
    return None if dims is None else param._replace(dims=dims)


def _moved_dims(equation, param):
    if equation.primitive.name != "transpose":
        return _regrouped(param, equation.outvars[0].aval.shape)
    dims = tuple(param.dims[i] for i in equation.params["permutation"])
    order = [dim for group in param.dims for dim in group if dim[0] == param.stack]
    kept = [dim for group in dims for dim in group if dim[0] == param.stack]
    split = len(order) > 1  # equal sizes would hide that they were exchanged
    return None if split and (order != kept or len({*order}) < len(order)) else dims


def _regrouped(param: Param, shape):
    """The leaf's dimensions within each one of a new shape; None if one would be split.

    The leading one may be, as layers are into pairs of layers.
    """
    left, dims = [dim for group in param.dims for dim in group], []
    for size in shape:
        group = []
        while math.prod(n for _, n in group) < size and left:
            number, n = left.pop(0)
            rest, over = divmod(n * math.prod(n for _, n in group), size)
            if rest > 1 and not over and number == param.stack and number not in dict(param.parts):
                left, n = [(number, rest), *left], n // rest
            if group and group[-1][0] == number:
                number, n = number, n * group.pop()[1]
            group.append((number, n))
        if math.prod(n for _, n in group) != size:
            return None
        dims.append(tuple(group))
    return None if left else tuple(dims)


def is_stacked(value: Any) -> bool:
    """Whether the leading axis of a value is the leaf's next dimension, so that a scan may loop."""
    if not isinstance(value, Param) or dict(value.parts).keys() & {value.stack}:
        return False
    return not value.dims[0] or [n for n, _ in value.dims[0]] == [_next(value)]


def _next(param):
    """The first dimension of the leaf, except of size 1, that no scan has taken."""
    numbers = range(param.stack, len(param.shape))
    return next((n for n in numbers if param.shape[n] > 1), len(param.shape))


def sliced(value: Any, length: int, place: Any) -> Any:
    """The kind of a slice along the leading axis, without its array."""
    if not isinstance(value, Param):
        return value
    taken, *dims = value.dims
    if not taken:
        return value._replace(dims=tuple(dims))
    number, place = _next(value), value.place * length + place
    goes_on = any(n == number for group in dims for n, _ in group)
    stack = value.stack if goes_on else number + 1
    return value._replace(dims=tuple(dims), stack=stack, place=place)


def filled(x: Array, axes: dict[int, int], parts: tuple[tuple[int, Part], ...]) -> Array:
    """Zeros where a part of a parameter has no entries; {number of a dimension: axis of x}."""
    for number, (start, step, whole) in parts:
        axis = axes[number]
        if step < 0:
            x, start, step = jnp.flip(x, axis), start + (x.shape[axis] - 1) * step, -step
        config = [(0, 0, 0)] * x.ndim
        config[axis] = (start, whole - start - (x.shape[axis] - 1) * step - 1, step - 1)
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), config)
    return x


# Linear functions of one parameter whose results are parameters.
MOVES = (
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "div",
    "dynamic_slice",
    "mul",
    "name",
    "neg",
    "reduce_precision",
    "reshape",
    "rev",
    "slice",
    "split",
    "squeeze",
    "transpose",
)
