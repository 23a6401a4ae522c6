"""Evaluates a loss equation by equation, to find every product of a parameter with data.

The jaxpr of a loss is walked through nested jit, remat and scan. Parameters travel as `Param`,
through casts, transposes and reshapes that keep their dimensions apart. Where one meets data in a
matrix product, a convolution or a look-up, the hook `site` computes the result; any other use is
reported to the hook `unknown` and computed unchanged. `plan_of` decides how the gradient of each
parameter is sketched.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree, UInt32

from ordering import uses
from ordering.sketch import SMALL
from ordering.uses import Hooks, Param, Use, bind, raw

LEAST = 4  # p q, of a gradient of rank one: with fewer, transforms take longer
TABLE = 16  # groups for tables, at least
LOOK_UP = "look-up"  # the kind of use of a table of which a unit has few rows
EXACT = 4  # gradients of up to EXACT k numbers are formed, which costs less than projecting


def walk(jaxpr: core.Jaxpr, consts: Sequence, args: Sequence, hooks: Hooks) -> list:
    """Evaluates a jaxpr on values, some of which are `Param`."""
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
            found = bind(equation, values)
        env.update(zip(equation.outvars, found, strict=True))
    return [_plain(read(v), "the result", hooks) for v in jaxpr.outvars]


def entering(leaf: int, value: Array) -> Param:
    """The `Param` of a whole leaf."""
    dims = tuple(((i, n),) if n > 1 else () for i, n in enumerate(value.shape))
    return Param(value, leaf, dims, 0, jnp.uint32(0), jnp.uint32(0))


def slice_index(index: ArrayLike, place: ArrayLike) -> UInt32[Array, ""]:
    """The number of the slice at `place` within the slice that has the number `index`."""
    return jnp.asarray(index, jnp.uint32) * jnp.uint32(65599) + jnp.asarray(place, jnp.uint32) + 1


def _plain(value, name, hooks):
    if isinstance(value, Param):
        hooks.unknown(value, name)
        return value.value
    return value


def _cast(equation, values, hooks):
    (value,) = bind(equation, [values[0].value])
    return [values[0]._replace(value=value)] if jnp.issubdtype(value.dtype, jnp.floating) else None


def _transpose(equation, values, hooks):
    (param,) = values
    (value,) = bind(equation, [param.value])
    dims = tuple(param.dims[i] for i in equation.params["permutation"])
    return [param._replace(value=value, dims=dims)]


def _reshape(equation, values, hooks):
    """Dimensions may be merged and split again; those of size 1 may be added and removed."""
    param, *sizes = values
    dims = None if sizes else _regrouped(param, equation.outvars[0].aval.shape)
    if dims is None:
        return None
    (value,) = bind(equation, [param.value])
    return [param._replace(value=value, dims=dims)]


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

    def again(given):
        own = [
            v._replace(value=r) if isinstance(v, Param) else r
            for v, r in zip(values, given, strict=True)
        ]
        return walk(params["jaxpr"], (), own, hooks)

    again = jax.checkpoint(again, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return again([raw(v) for v in values])


def _scan(equation, values, hooks):
    """Parameters may be constants of the loop or stacked along its axis, but not carried."""
    params, inner = equation.params, equation.params["jaxpr"]
    # Of a stacked array the body has one axis less; versions of JAX count the others differently.
    is_stacked = [
        len(outer.aval.shape) > len(own.aval.shape)
        for outer, own in zip(
            (*equation.invars, *equation.outvars), (*inner.jaxpr.invars, *inner.jaxpr.outvars),
            strict=True,
        )
    ]  # fmt: skip
    first = len(values) - sum(is_stacked[: len(values)])
    constant = first - is_stacked[len(values) :].count(False)
    consts, carry, stacked = values[:constant], values[constant:first], values[first:]
    carry = [_plain(v, "scan", hooks) for v in carry]
    stacked = [
        v
        if isinstance(v, Param) and numbers_of(v.dims[0]) == (v.stack,)
        else _plain(v, "scan", hooks)
        for v in stacked
    ]

    def body(carry, at):
        place, slices = at
        own = [
            v._replace(
                value=s,
                dims=v.dims[1:],
                stack=v.stack + 1,
                index=slice_index(v.index, place),
                place=v.place * params["length"] + place,
            )
            if isinstance(v, Param)
            else s
            for v, s in zip(stacked, slices, strict=True)
        ]
        found = walk(inner.jaxpr, inner.consts, [*consts, *carry, *own], hooks)
        return found[: len(carry)], found[len(carry) :]

    places = jnp.arange(params["length"], dtype=jnp.uint32)
    carry, found = jax.lax.scan(
        body, carry, (places, [raw(v) for v in stacked]), length=params["length"],
        reverse=params["reverse"], unroll=params["unroll"],
    )  # fmt: skip
    return [*carry, *found]


class Leaf(NamedTuple):
    """How the gradient of a parameter is sketched.

    Attributes:
      name, shape: its path and shape.
      how: "sketched" (never formed), "formed" (for each unit, in the backward pass alone), or
        "copied" (the parameter is copied for each unit). The latter two cost memory for each unit.
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
    size: int,
) -> Leaf:
    """The plan for a parameter with these uses, whose gradients have at most this rank."""
    kinds = ", ".join(dict.fromkeys(use.kind for use in seen))
    stacks = {use.param.stack for use in seen}
    if unknown or len(stacks) != 1:
        why = ", ".join(dict.fromkeys(unknown)) or ("used at several depths" if seen else "unused")
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


def plan_of(closed: core.ClosedJaxpr, params: PyTree, args: tuple, size: int) -> list[Leaf]:
    """How every parameter is treated, from a walk that records all uses."""
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    shapes = [jnp.shape(leaf) for leaf in args[0]]
    seen = [[] for _ in shapes]
    unknown = [[] for _ in shapes]
    ranks = [0] * len(shapes)  # at most, of the gradient of one unit

    def note(use, w):
        y = use.function(w, *use.data)
        seen[use.param.leaf].append(use._replace(data=None, param=use.param._replace(value=None)))
        ranks[use.param.leaf] += y.shape[0] if y.ndim else 1
        return y

    def run(leaves, rest, key):
        own = [entering(i, value) for i, value in enumerate(leaves)]
        hooks = Hooks(note, lambda param, name: unknown[param.leaf].append(name))
        return walk(closed.jaxpr, closed.consts, [*own, *rest, key], hooks)

    jax.eval_shape(run, *args)
    each = zip(paths, shapes, seen, unknown, ranks, strict=True)
    return [leaf_of(*of_leaf, size) for of_leaf in each]


# Rules that also apply without a parameter.
ALWAYS = ("gather", "jit", "pjit", "reduce_window_max", "reduce_window_sum")
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
