"""Evaluates a loss equation by equation, to find every product of a parameter with data.

The jaxpr of a loss is walked through nested jit, remat and scan. Parameters travel as `Param`,
through casts, transposes and reshapes that keep their dimensions apart. Where one meets data in a
matrix product, a convolution or a look-up, the hook `site` computes the result. What is made of
parameters alone is `Shared` until it meets data: a number, such as a penalty, is handed to the hook
`term`, any other use is reported to the hook `unknown`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend import core
from jaxtyping import Array, PyTree

from ordering.sketches.convolution import convolution


class Param(NamedTuple):
    """A parameter, or the slice of it that a scan is at."""

    value: Any
    leaf: int  # its index among the leaves
    # For every dimension of the value the leaf's in it, (number, size); those of size 1 in none.
    dims: tuple[tuple[tuple[int, int], ...], ...]
    stack: int  # leading dimensions of the leaf that scans have gone into
    place: Any  # uint32[], slices of the leaf before this one
    own: Any = None  # the unit's own copy of the value, where the parameter is copied


class Shared(NamedTuple):
    """What all units share: it is made of parameters and constants alone."""

    value: Any
    own: Any  # the value of this unit, made of copies of parameters, or None
    leaves: dict[int, str]  # for every parameter in it the primitive that has used it


class Use(NamedTuple):
    """Where a parameter meets data: y = function(w, *data), linear in w.

    w is [K, N], K and N in the order of rows and cols, and y [T, N]; of another linear function
    than a product, convolution or look-up, rows are all dimensions, N is 1 and y of any shape.
    """

    kind: str  # "product", "convolution", "look-up" or "linear"
    param: Param
    rows: tuple[tuple[int, int], ...]  # the leaf's dimensions that are summed over or looked up
    cols: tuple[tuple[int, int], ...]  # those that are in the result, also (number, size)
    function: Callable
    data: tuple


class Hooks(NamedTuple):
    """What a walk does where units meet parameters."""

    site: Callable[[Use, Array], Array] = lambda use, w: use.function(w, *use.data)
    unknown: Callable[[int, str], None] = lambda leaf, primitive: None  # another use of a parameter
    term: Callable[[Shared], Array] | None = None  # a number that all units share; not in loops
    inline: bool = False  # whether to compute what is in a `jax.checkpoint` only once
    # Told of every equation of parameters alone that has a backward rule of its own.
    rule: Callable[[core.JaxprEqn], None] | None = None


def results(
    closed: core.ClosedJaxpr, params: PyTree, rest: PyTree, hooks: Hooks, copies: Any = None
) -> list:
    """What the unit sees of the (loss, *others) of a program of (params, rest).

    `copies` are the unit's own, {number of the leaf: array}.
    """
    copies = copies or {}

    def entering(i, value):
        dims = tuple(((axis, n),) if n > 1 else () for axis, n in enumerate(value.shape))
        # What is empty has no gradient.
        return Param(value, i, dims, 0, jnp.uint32(0), copies.get(i)) if value.size else value

    own = [entering(i, leaf) for i, leaf in enumerate(jax.tree.leaves(params))]
    loss, *others = walk(closed.jaxpr, closed.consts, [*own, *jax.tree.leaves(rest)], hooks)
    return [data_of(loss, "the result", hooks), *map(raw, others)]


def walk(jaxpr: core.Jaxpr, consts: Sequence, args: Sequence, hooks: Hooks) -> list:
    """Evaluates a jaxpr on values, some of which are `Param` or `Shared`, as results may be."""
    values = [*map(constant, consts), *args]
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))
    evaluate(jaxpr.eqns, env, hooks)
    return [read(env, atom) for atom in jaxpr.outvars]


def evaluate(equations, env, hooks):
    for equation in equations:
        values = [read(env, atom) for atom in equation.invars]
        found = _by_rule(equation, values, hooks)
        if found is None and not any(map(is_data, values)):
            found = _shared(equation, values)
            is_rule = equation.primitive.name == RULE or _holds_within(equation, RULE)
            if hooks.rule and is_rule and not all(map(is_constant, values)):
                hooks.rule(equation)
        elif found is None:
            name = equation.primitive.name
            found = bind(_apart(equation), [data_of(v, name, hooks) for v in values])
        env.update(zip(equation.outvars, found, strict=True))


def read(env, atom):
    return constant(atom.val) if isinstance(atom, core.Literal) else env[atom]


def _by_rule(equation, values, hooks):
    """The results by the rule for this primitive; None where there is none, or it does not fit."""
    name = equation.primitive.name
    wanted = name in ALWAYS or any(isinstance(v, Param) for v in values)
    if name not in RULES or not wanted or all(map(is_constant, values)):
        return None
    return RULES[name](equation, values, hooks)


def constant(value):
    return Shared(value, None, {})


def is_constant(value: Any) -> bool:
    return isinstance(value, Shared) and not value.leaves


def raw(value: Any) -> Any:
    return value.value if isinstance(value, Param | Shared) else value


def is_data(value: Any) -> bool:
    """Whether no parameter is in a value, but for what units have made of it."""
    return not isinstance(value, Param | Shared)


def bind(equation: core.JaxprEqn, values: Sequence) -> list:
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        found = equation.primitive.bind(*values, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _shared(equation, values):
    """The results of what units share; of copies of parameters, too."""
    name = equation.primitive.name
    leaves = {}
    for v in values:
        leaves |= {v.leaf: name} if isinstance(v, Param) else v.leaves
    found = bind(equation, [raw(v) for v in values])
    own = [None] * len(found)
    if any(v.own is not None for v in values):
        own = bind(_apart(equation), [raw(v) if v.own is None else v.own for v in values])
    return [
        Shared(value, of_unit, leaves)
        if name != "stop_gradient" and jnp.issubdtype(value.dtype, jnp.inexact)
        else constant(value)
        for value, of_unit in zip(found, own, strict=True)
    ]


def data_of(value: Any, name: str, hooks: Hooks) -> Any:
    """A value as the unit sees it where the primitive `name` mixes it with data."""
    if is_data(value):
        return value
    leaves = {value.leaf: name} if isinstance(value, Param) else value.leaves
    if not leaves:
        return value.value
    if isinstance(value, Shared) and hooks.term and jnp.size(value.value) == 1:
        return hooks.term(value)
    for leaf, first in leaves.items():
        hooks.unknown(leaf, first)
    return value.value if value.own is None else as_own(value.value, value.own)


@jax.custom_vjp
def as_own(value, own):
    """The unit's own copy; its gradient is also that of what all units share."""
    return own


as_own.defvjp(lambda value, own: (own, None), lambda _, gradient: (gradient, gradient))


def traced(function: Callable, *args: PyTree) -> tuple[core.ClosedJaxpr, Callable]:
    """The program of a function for arguments like these, and the function made of it."""
    closed, found = jax.make_jaxpr(function, return_shape=True)(*args)

    def run(*args):
        values = core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(found), values)

    return closed, run


def apart(function: Callable) -> Callable:
    """The function, whose convolutions stay right under vmap of data and kernels."""

    def run(*args):
        closed, found = jax.make_jaxpr(function, return_shape=True)(*args)
        args = jax.tree.leaves(args)
        if holds(closed.jaxpr, CONVOLUTION):
            # What a function has closed over need not be the same for all units.
            values = map(raw, walk(closed.jaxpr, (), [*closed.consts, *args], Hooks()))
        else:
            values = core.jaxpr_as_fun(closed)(*args)
        return jax.tree.unflatten(jax.tree.structure(found), values)

    return run


def holds(jaxpr: core.Jaxpr, name: str) -> bool:
    """Whether a primitive is in a program, or in one within it."""
    return any(e.primitive.name == name or _holds_within(e, name) for e in jaxpr.eqns)


def _holds_within(equation, name):
    return any(holds(inner, name) for inner in core.jaxprs_in_params(equation.params))


def has_rule_of_parameters(closed: core.ClosedJaxpr, params: PyTree, rest: PyTree) -> bool:
    """Whether a `jax.custom_vjp` is used of parameters alone, without data."""
    found = []
    hooks = Hooks(rule=found.append)
    jax.eval_shape(lambda p, rest: results(closed, p, rest, hooks), params, rest)
    return bool(found)


def _apart(equation):
    """The equation; where programs in it hold convolutions, these programs are rewritten."""
    if not _holds_within(equation, CONVOLUTION):
        return equation
    return equation.replace(params={k: _rewritten(v) for k, v in equation.params.items()})


def _rewritten(param):
    if isinstance(param, tuple | list):
        return type(param)(map(_rewritten, param))
    if not isinstance(param, core.Jaxpr | core.ClosedJaxpr):
        return param
    consts = getattr(param, "consts", ())
    inner: Any = getattr(param, "jaxpr", param)
    run = lambda *args: [raw(v) for v in walk(inner, consts, args, Hooks())]  # noqa: E731
    closed = jax.make_jaxpr(run)(*(v.aval for v in inner.invars))
    return closed if isinstance(param, core.ClosedJaxpr) else closed.jaxpr


def _moved(equation, values, hooks):
    """A parameter of another dtype or shape. Dimensions may be swapped, merged and split again."""
    param, *sizes = values
    result: Any = equation.outvars[0].aval
    if equation.primitive.name == "transpose":
        dims = tuple(param.dims[i] for i in equation.params["permutation"])
    else:
        dims = _regrouped(param, result.shape)
    if sizes or dims is None or not jnp.issubdtype(result.dtype, jnp.floating):
        return None
    value, own = (x if x is None else bind(equation, [x])[0] for x in (param.value, param.own))
    return [param._replace(value=value, own=own, dims=dims)]


def _regrouped(param: Param, shape):
    """The leaf's dimensions in those of a new shape; None if one would be split."""
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
    return walk(inner.jaxpr, inner.consts, values, hooks)


def _remat(equation, values, hooks):
    params = equation.params
    if hooks.inline:
        return walk(params["jaxpr"], (), values, hooks)
    kinds = []

    def again(given):
        found = walk(params["jaxpr"], (), _filled(values, given), hooks)
        kinds[:] = found
        return _arrays(found)

    again = jax.checkpoint(again, prevent_cse=params["prevent_cse"], policy=params["policy"])
    found = again(_arrays(values))
    return _filled(kinds, found)


def _arrays(values):
    """(value, own) of all values; what else is in them is no array."""
    return [(v, None) if is_data(v) else (v.value, v.own) for v in values]


def _filled(values, arrays):
    return [
        value if is_data(v) else v._replace(value=value, own=own)
        for v, (value, own) in zip(values, arrays, strict=True)
    ]


def _scan(equation, values, hooks):
    """Parameters may be constants of the loop or stacked along its axis, but not carried."""
    if not any(map(is_data, values)):
        return None
    params, inner = equation.params, equation.params["jaxpr"]
    consts, carry, stacked = _parts_of_scan(equation, values)
    consts = [
        data_of(v, "scan", hooks) if isinstance(v, Shared) and jnp.size(v.value) == 1 else v
        for v in consts
    ]
    carry = [data_of(v, "scan", hooks) for v in carry]
    stacked = [
        v
        if isinstance(v, Param) and [n for n, _ in v.dims[0]] == [v.stack]
        else data_of(v, "scan", hooks)
        for v in stacked
    ]

    def body(carry, at):
        place, slices = at
        own = [
            v._replace(
                dims=v.dims[1:],
                stack=v.stack + 1,
                place=v.place * params["length"] + place,
            )
            if isinstance(v, Param)
            else v
            for v in stacked
        ]
        given = [*consts, *carry, *_filled(own, slices)]
        found = walk(inner.jaxpr, inner.consts, given, hooks._replace(term=None))
        found = [data_of(v, "scan", hooks._replace(term=None)) for v in found]
        return found[: len(carry)], found[len(carry) :]

    places = jnp.arange(params["length"], dtype=jnp.uint32)
    carry, found = jax.lax.scan(
        body, carry, (places, _arrays(stacked)), length=params["length"],
        reverse=params["reverse"], unroll=params["unroll"],
    )  # fmt: skip
    return [*carry, *found]


def _parts_of_scan(equation, values):
    """What is constant in a scan, carried, and stacked."""
    inner = equation.params["jaxpr"].jaxpr
    # Of a stacked array the body has one axis less; versions of JAX count the others differently.
    is_stacked = [
        len(outer.aval.shape) > len(own.aval.shape)
        for outer, own in zip(
            (*equation.invars, *equation.outvars), (*inner.invars, *inner.outvars), strict=True
        )
    ]
    first = len(values) - sum(is_stacked[: len(values)])
    constant = first - is_stacked[len(values) :].count(False)
    return values[:constant], values[constant:first], values[first:]


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
    param, indices = [raw(v) if is_constant(v) else v for v in values]  # places may be constants
    if not any(isinstance(v, Param) for v in values):
        return _look_up(equation, param, indices)
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


@functools.cache
def product(precision: Any, preferred_element_type: Any) -> Callable:
    """`(x [T, K], w [K, N]) -> [T, N]`: on a CPU, under vmap of x, batch and rows are one axis.

    A CPU takes a fifth longer for the step of a GPT with products of three axes; a TPU's compiler
    does not join the gradient of a loss to a product of two, and writes it down.
    """

    @custom_vmap
    def multiply(x, w):
        return jnp.matmul(x, w, precision=precision, preferred_element_type=preferred_element_type)

    def as_one(x, w):
        return multiply.fun(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:2], -1)

    @multiply.def_vmap
    def _(size, batched, x, w):
        each = jax.vmap(multiply.fun, [0 if own else None for own in batched])
        if batched == [True, False]:
            return jax.lax.platform_dependent(x, w, cpu=as_one, default=each), True
        return each(x, w), True

    return multiply


def _look_up(equation, x, indices):
    """A gather from data without the axes of size 1 that its slices go along.

    A batch of one example is such an axis. In the backward pass of a look-up of labels in logits, a
    TPU's compiler uses a comparison, which is free; with such an axis, it uses a large scatter.
    """
    how, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    whole = {*how.collapsed_slice_dims, *how.operand_batching_dims}
    sliced = [i for i in range(jnp.ndim(raw(x))) if i not in whole]
    at = dict(zip(sliced, how.offset_dims, strict=True))  # where an axis is in the result
    gone = [
        i for i in sliced if jnp.shape(raw(x))[i] == sizes[i] == 1 and i not in how.start_index_map
    ]
    if not gone or not (is_data(x) and is_data(indices)):
        return None
    kept = [i for i in range(x.ndim) if i not in gone]
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
    fewer = {"dimension_numbers": numbers, "slice_sizes": tuple(sizes[i] for i in kept)}
    found = equation.primitive.bind(jnp.squeeze(x, gone), indices, **equation.params | fewer)
    return [jnp.expand_dims(found, lost)]


# Rules that also apply without a parameter.
CONVOLUTION, RULE = "conv_general_dilated", "custom_vjp_call"

ALWAYS = (CONVOLUTION, "gather", "jit")
MOVES = (
    "broadcast_in_dim", "convert_element_type", "copy", "name", "reshape", "squeeze", "transpose"
)  # fmt: skip
RULES = dict.fromkeys(MOVES, _moved) | {
    "jit": _jit,
    "remat2": _remat,
    "scan": _scan,
    "dot_general": _dot_general,
    "gather": _gather,
    CONVOLUTION: _convolution,
}
