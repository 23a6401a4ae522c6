"""Evaluates a loss equation by equation, to find every product of a parameter with data.

The jaxpr of a loss is walked through nested jit, remat and scan. Parameters travel as `Param`,
through casts, transposes and reshapes that keep their dimensions apart. Where one meets data in a
matrix product, a convolution or a look-up, the hook `site` computes the result. What is made of
parameters alone is `Shared` until it meets data: a number, such as a penalty, is handed to the hook
`term`, any other use is reported to the hook `unknown`. `plan_of` decides how the gradient of each
parameter is sketched.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree, UInt32

from ordering import uses
from ordering.sketch import SMALL
from ordering.uses import Hooks, Param, Shared, Use, bind, is_data, raw

LEAST = 4  # p q, of a gradient of rank one: with fewer, transforms take longer
TABLE = 16  # groups for tables, at least
LOOK_UP = "look-up"  # the kind of use of a table of which a unit has few rows
EXACT = 4  # gradients of up to EXACT k numbers are formed, which costs less than projecting


def walk(jaxpr: core.Jaxpr, consts: Sequence, args: Sequence, hooks: Hooks) -> list:
    """Evaluates a jaxpr on values, some of which are `Param` or `Shared`, as results may be."""
    return _results(jaxpr, [*map(_constant, consts), *args], hooks)


def _results(jaxpr, values, hooks):
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))
    _evaluate(jaxpr.eqns, env, hooks)
    return [_read(env, atom) for atom in jaxpr.outvars]


def _evaluate(equations, env, hooks):
    for equation in equations:
        values = [_read(env, atom) for atom in equation.invars]
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


def _read(env, atom):
    return _constant(atom.val) if isinstance(atom, core.Literal) else env[atom]


def _by_rule(equation, values, hooks):
    """The results by the rule for this primitive; None where there is none, or it does not fit."""
    name, known = equation.primitive.name, [v for v in values if not is_constant(v)]
    if not known or not (name in ALWAYS or any(isinstance(v, Param) for v in known)):
        return None
    if name == "gather":  # constant places are data: positions of tokens
        values = [raw(v) if is_constant(v) else v for v in values]
    elif name in uses.RULES and len(known) < len(values):
        return None
    return RULES[name](equation, values, hooks) if name in RULES else None


def _constant(value):
    return Shared(value, None, {})


def is_constant(value: Any) -> bool:
    return isinstance(value, Shared) and not value.leaves


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
        else _constant(value)
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
            values = map(raw, _results(closed.jaxpr, [*closed.consts, *args], Hooks()))
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

    def run(leaves, rest):
        own = [entering(i, value) for i, value in enumerate(leaves)]
        walk(closed.jaxpr, closed.consts, [*own, *rest], Hooks(rule=found.append))

    jax.eval_shape(run, *map(jax.tree.leaves, (params, rest)))
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


def entering(leaf: int, value: Array, own: Array | None = None) -> Param:
    """The `Param` of a whole leaf."""
    dims = tuple(((i, n),) if n > 1 else () for i, n in enumerate(value.shape))
    return Param(value, leaf, dims, 0, jnp.uint32(0), jnp.uint32(0), own)


def slice_index(index: ArrayLike, place: ArrayLike) -> UInt32[Array, ""]:
    """The number of the slice at `place` within the slice that has the number `index`."""
    return jnp.asarray(index, jnp.uint32) * jnp.uint32(65599) + jnp.asarray(place, jnp.uint32) + 1


def _cast(equation, values, hooks):
    (param,) = values
    is_real = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
    return [_each(param, lambda value: bind(equation, [value])[0])] if is_real else None


def _each(param, function, **changes):
    own = None if param.own is None else function(param.own)
    return param._replace(value=function(param.value), own=own, **changes)


def _transpose(equation, values, hooks):
    (param,) = values
    dims = tuple(param.dims[i] for i in equation.params["permutation"])
    return [_each(param, lambda value: bind(equation, [value])[0], dims=dims)]


def _reshape(equation, values, hooks):
    """Dimensions may be merged and split again; those of size 1 may be added and removed."""
    param, *sizes = values
    dims = None if sizes else _regrouped(param, equation.outvars[0].aval.shape)
    if dims is None:
        return None
    return [_each(param, lambda value: bind(equation, [value])[0], dims=dims)]


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
    params = equation.params
    inner = params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"]
    return walk(inner.jaxpr, inner.consts, values, hooks)


def _remat(equation, values, hooks):
    params = equation.params
    if not any(isinstance(v, Param) for v in values):
        return None
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
        if isinstance(v, Param) and numbers_of(v.dims[0]) == (v.stack,)
        else data_of(v, "scan", hooks)
        for v in stacked
    ]

    def body(carry, at):
        place, slices = at
        own = [
            v._replace(
                dims=v.dims[1:],
                stack=v.stack + 1,
                index=slice_index(v.index, place),
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


class Leaf(NamedTuple):
    """How the gradient of a parameter is sketched.

    Attributes:
      name, shape: its path and shape.
      how: "sketched" (never formed), "formed" (for each unit, in the backward pass alone),
        "copied" (the parameter is copied for each unit), or "shared" (used in numbers that all
        units share, as penalties are, or not at all). Copies cost memory for each unit, as formed
        gradients do; a shared gradient is formed once.
      why: the reason: kinds of uses, or the names of primitives.
      stack: the number of leading dimensions that scans loop over; rows, cols: the others.
      sizes: (m, p, q) of a sketch by m groups of products of p sums of rows and q sums of columns.
      table: whether rows are looked up, so that a unit may have few of them.
    """

    name: str
    shape: tuple[int, ...]
    how: str
    why: str
    stack: int = 0
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()
    sizes: tuple[int, int, int] = (0, 0, 0)
    table: bool = False

    @property
    def small(self) -> bool:
        """Whether the gradients of units are kept to the end, and folded with other small ones."""
        return self.how != "sketched" and not self.stack and math.prod(self.shape) <= SMALL


def leaf_of(
    name: str,
    shape: tuple[int, ...],
    seen: Sequence[Use],
    unknown: Sequence[str],
    rank: int,
    in_term: bool,
    size: int,
) -> Leaf:
    """The plan for a parameter with these uses, whose gradients have at most this rank."""
    kinds = ", ".join(dict.fromkeys(use.kind for use in seen))
    stacks = {use.param.stack for use in seen}
    if not (seen or unknown):
        return Leaf(name, shape, "shared", "penalty" if in_term else "unused")
    if unknown or len(stacks) != 1:
        why = ", ".join(dict.fromkeys(unknown)) or "used at several depths"
        return Leaf(name, shape, "copied", why)
    (stack,) = stacks
    number = math.prod(shape[stack:])
    sides = {frozenset(numbers_of(side) for side in (use.rows, use.cols)) for use in seen}
    if number <= EXACT * size or "linear" in kinds or len(sides) > 1:
        return Leaf(name, shape, "formed", kinds, stack)
    first = next((use for use in seen if use.kind == LOOK_UP), seen[0])  # its rows are looked up
    rows, cols = (numbers_of(side) for side in (first.rows, first.cols))
    lengths = (math.prod(shape[i] for i in side) for side in (rows, cols))
    table = first.kind == LOOK_UP
    sizes = _sizes(lengths, rank, size, TABLE if table else 1)
    return Leaf(name, shape, "sketched", kinds, stack, rows, cols, sizes, table)


def numbers_of(side: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(sorted(number for number, _ in side))


def _sizes(lengths: Iterable[int], rank: int, size: int, least: int) -> tuple[int, int, int]:
    """(m, p, q), m p q <= k: groups in which no two entries share a sum, fewer for high ranks.

    For a high rank one group is enough, since the errors of its many terms average out. A table of
    tokens gets some groups whatever its rank may be: at first it is one, since all positions learn
    how frequent the tokens are.
    """
    rows, cols = lengths
    most = max(min(least, size), size // (LEAST * rank))
    wanted = math.ceil(rows * cols / size)
    groups = 1 << min(most.bit_length() - 1, (wanted - 1).bit_length())
    size, rows, cols = size // groups, math.ceil(rows / groups), math.ceil(cols / groups)
    p = min(max(1, math.isqrt(size)), rows)
    q = min(size // p, cols)
    return groups, min(size // q, rows), q


class Plan(NamedTuple):
    """How every parameter is treated, and the parameters in each number that all units share."""

    leaves: list[Leaf]
    terms: list[tuple[int, ...]]


def plan_of(closed: core.ClosedJaxpr, params: PyTree, args: tuple, size: int) -> Plan:
    """The plan from a walk that records all uses."""
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    shapes = [jnp.shape(leaf) for leaf in args[0]]
    seen, met = [[] for _ in shapes], Terms([])
    unknown = [[] for _ in shapes]
    ranks = [0] * len(shapes)  # at most, of the gradient of one unit

    def note(use, w):
        y = use.function(w, *use.data)
        seen[use.param.leaf].append(use._replace(data=None, param=use.param._replace(value=None)))
        ranks[use.param.leaf] += y.shape[0] if y.ndim else 1
        return y

    def run(leaves, rest, key):
        own = [entering(i, value) for i, value in enumerate(leaves)]
        hooks = Hooks(note, lambda leaf, name: unknown[leaf].append(name), met.value)
        loss = walk(closed.jaxpr, closed.consts, [*own, *rest, key], hooks)[0]
        return data_of(loss, "the result", hooks)

    jax.eval_shape(run, *args)
    terms = [tuple(term.leaves) for term in met.found]
    in_term = [any(i in term for term in terms) for i in range(len(shapes))]
    each = zip(paths, shapes, seen, unknown, ranks, in_term, strict=True)
    leaves = [
        leaf_of(path, shape, own, other, rank, shared, size)
        for path, shape, own, other, rank, shared in each
    ]
    return Plan(leaves, terms)


class Terms(NamedTuple):
    """The numbers that all units share, in the order in which a walk meets them."""

    found: list[Shared]

    def value(self, term: Shared) -> Array:
        self.place(term)
        return term.value

    def place(self, term: Shared) -> int:
        places = [i for i, known in enumerate(self.found) if known.value is term.value]
        if not places:
            self.found.append(term)
        return places[0] if places else len(self.found) - 1


def gradients_of_terms(
    closed: core.ClosedJaxpr, leaves: list[Array], rest: list, plan: Plan, units: int
) -> list[dict[int, Array]]:
    """For each number that all units share its gradient with respect to the leaves in it.

    Taken of a unit's part in the mean, for rules that are not linear.
    """
    if not plan.terms:
        return []

    def values(leaves, rest):
        found = Terms([])
        own = [entering(i, value) for i, value in enumerate(leaves)]
        hooks = Hooks(term=found.value, inline=True)
        loss = walk(closed.jaxpr, closed.consts, [*own, *rest], hooks)[0]
        data_of(loss, "the result", hooks)
        return [term.value.reshape(()) for term in found.found]

    program = jax.make_jaxpr(values)(leaves, rest)
    jaxpr = program.jaxpr

    def value(own, equations, out):
        args = [own.get(i, leaf) for i, leaf in enumerate(leaves)] + rest
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*program.consts, *args), strict=True))
        _evaluate(equations, env, Hooks())
        return raw(_read(env, out)) / units

    found = [
        jax.grad(value)({i: leaves[i] for i in own}, _needed(jaxpr.eqns, out), out)
        for own, out in zip(plan.terms, jaxpr.outvars, strict=True)
    ]
    return jax.tree.map(lambda g: units * g, found)


def _needed(equations, out):
    """The equations that a variable depends on."""
    needed, found = {out}, []
    for equation in reversed(equations):
        if needed & {*equation.outvars}:
            found.append(equation)
            needed |= {atom for atom in equation.invars if not isinstance(atom, core.Literal)}
    return found[::-1]


# Rules that also apply without a parameter.
CONVOLUTION, RULE = "conv_general_dilated", "custom_vjp_call"
ALWAYS = (CONVOLUTION, "gather", "jit", "pjit", "reduce_window_max", "reduce_window_sum")
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
    **uses.RULES,
}
