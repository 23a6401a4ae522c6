"""A jaxpr interpreter that knows which values are parameters, and which all examples share.

The loss of one example is evaluated equation by equation, as in JAX's tutorial on custom
interpreters, by `equation.primitive.bind` with the equation's own parameters. There are three kinds
of values. A `Param` is a parameter, possibly with moved dimensions. A `Shared` value is computed
only from parameters and constants. All others are plain arrays, which belong to the example. Where
a parameter meets an array of the example in a linear primitive, a rule of `rules.py` describes the
use, and the handler computes it. The handler also gets numbers that all examples share, such as a
penalty, and is told about other uses of parameters.

Values are named by their place in the program, not by the identity of tracers. So every walk of a
program gives the same names, also in the bodies of `jax.checkpoint` and scans.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import PyTree

from ordering.gradients import convolution
from ordering.gradients.convolution import bind, holds
from ordering.gradients.moves import MOVES, Param, is_stacked, moved, sliced

RULE = "custom_vjp_call"


class Shared(NamedTuple):
    """A value that all examples share: it is computed only from parameters and constants."""

    value: Any
    copy: Any  # the value computed from the example's copies of parameters, or None
    leaves: dict[int, str]  # {parameter in it: the primitive that used the parameter}
    name: tuple[int, ...] = ()  # the places of the outer equations, this one, and the result
    linear: bool = True  # whether its gradient is linear in its cotangent: no `jax.custom_vjp`

    @property
    def is_number(self) -> bool:
        """Whether it is one real number, whose gradient is formed once for all examples."""
        real = jnp.issubdtype(jnp.result_type(self.value), jnp.floating)
        return self.linear and real and jnp.size(self.value) == 1


class Handler(NamedTuple):
    """What to do where an example meets parameters.

    Without `evaluates`, arrays of the example are not computed, but replaced by None.
    """

    rules: Mapping[str, Callable] = {}  # (equation, values, handler) -> results, None if not linear
    use: Callable[..., Any] = lambda use, param, data: use.apply(param.value, *data)
    other: Callable[[int, str], None] = lambda leaf, primitive: None  # another use of a parameter
    number: Callable[[Shared], Any] | None = None  # a number that all share; not in loops
    rule: Callable[[], None] = lambda: None  # a `jax.custom_vjp` of parameters alone
    evaluates: bool = True


def interpret(
    closed: core.ClosedJaxpr, params: PyTree, rest: Sequence, handler: Handler, copies: Any = None
) -> list:
    """The example's (loss, *others) of a program of the leaves of (params, rest).

    `copies` are the example's copies of parameters, {number of the leaf: array}.
    """
    _check_names()
    copies = copies or {}

    def entering(i, value):
        dims = tuple(((axis, n),) if n > 1 else () for axis, n in enumerate(value.shape))
        # Empty parameters have no gradient.
        if not value.size:
            return value
        return Param(value, i, value.shape, dims, place=jnp.uint32(0), copy=copies.get(i))

    leaves = [entering(i, leaf) for i, leaf in enumerate(jax.tree.leaves(params))]
    loss, *others = _walk(closed.jaxpr, closed.consts, [*leaves, *rest], handler, ())
    return [_seen(loss, "the result", handler), *map(raw, others)]


@functools.cache
def _check_names() -> None:
    """Raises RuntimeError if JAX has other names for the primitives that contain programs."""
    rule = jax.custom_vjp(lambda x: x)
    rule.defvjp(lambda x: (x, None), lambda _, g: (g,))

    def program(x):
        x = jax.checkpoint(jnp.sin)(jax.jit(jnp.sin)(rule(x)))
        return jax.lax.scan(lambda x, _: (x, None), x, None, length=2)[0]

    names = {equation.primitive.name for equation in jax.make_jaxpr(program)(1.0).jaxpr.eqns}
    if names != {RULE, *PROGRAMS}:
        raise RuntimeError(
            f"JAX {jax.__version__} has the primitives {sorted(names)}, and {RULE, *PROGRAMS} are "
            "known here: use the newest syncopate-jax, or an older JAX."
        )


def has_rule_of_parameters(closed: core.ClosedJaxpr, params: PyTree) -> bool:
    """Whether a `jax.custom_vjp` is applied to parameters alone, without data."""
    calls = []
    handler = Handler(rule=lambda: calls.append(True), evaluates=False)

    def run(params):
        rest = [None] * (len(closed.jaxpr.invars) - len(jax.tree.leaves(params)))
        interpret(closed, params, rest, handler)

    jax.eval_shape(run, params)
    return bool(calls)


def _walk(jaxpr, consts, args, handler, path):
    """Evaluates a jaxpr on values of all kinds; its results may be of all kinds, too."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*map(constant, consts), *args), strict=True))

    def read(atom):
        return constant(atom.val) if isinstance(atom, core.Literal) else env[atom]

    for number, equation in enumerate(jaxpr.eqns):
        results = _evaluate(equation, [*map(read, equation.invars)], handler, (*path, number))
        env.update(zip(equation.outvars, results, strict=True))
    return [*map(read, jaxpr.outvars)]


def _evaluate(equation, values, handler, path):
    name, results = equation.primitive.name, None
    if all(map(is_constant, values)):
        return _shared(equation, values, handler, path)
    if name in PROGRAMS and (name == "jit" or not all(is_plain(v) for v in values)):
        results = PROGRAMS[name](equation, values, handler, path)
    elif name in MOVES and any(isinstance(v, Param) for v in values):
        results = moved(equation, values, _constant_number)
    elif name in handler.rules and all(v.is_whole for v in values if isinstance(v, Param)):
        shapes = [atom.aval.shape for atom in equation.invars]
        if any(of_example(v) and 0 in shape for v, shape in zip(values, shapes, strict=True)):
            return bind_of_example(equation, [*map(raw, values)], handler)  # no gradient
        results = handler.rules[name](equation, values, handler)
    if results is not None:
        return results
    if not any(of_example(v) or getattr(v, "varies", False) for v in values):
        return _shared(equation, values, handler, path)
    return bind_of_example(equation, [_seen(v, name, handler) for v in values], handler)


def constant(value: Any) -> Shared:
    return Shared(value, None, {})


def is_constant(value: Any) -> bool:
    return isinstance(value, Shared) and not value.leaves


def of_example(value: Any) -> bool:
    return not isinstance(value, Param | Shared)


def is_plain(value: Any) -> bool:
    return of_example(value) or is_constant(value)


def _constant_number(value):
    """The value of a constant number, else None."""
    return value.value if is_constant(value) and jnp.size(value.value) == 1 else None


def raw(value: Any) -> Any:
    return value if of_example(value) else value.value


def bind_of_example(equation: core.JaxprEqn, values: Sequence, handler: Handler) -> list:
    """The results of an equation for arrays of the example."""
    if not handler.evaluates:
        return [None] * len(equation.outvars)
    return convolution.bind_split(equation, values)


def _shared(equation, values, handler, path):
    """The results of an equation for shared values, also for copies of parameters."""
    name, leaves, values = equation.primitive.name, {}, [*values]
    for v in values:
        leaves |= {v.leaf: name} if isinstance(v, Param) else v.leaves
    has_rule = bool(leaves) and holds([equation], RULE)
    if has_rule:
        handler.rule()
    linear = not has_rule and all(v.linear for v in values if isinstance(v, Shared))
    results = bind(equation, [v.value for v in values])
    copies = [None] * len(results)
    if any(v.copy is not None for v in values):
        each = [v.value if v.copy is None else v.copy for v in values]
        copies = convolution.bind_split(equation, each)
    return [
        Shared(value, copy, leaves, (*path, i), linear)
        if name != "stop_gradient" and jnp.issubdtype(value.dtype, jnp.inexact)
        else constant(value)
        for i, (value, copy) in enumerate(zip(results, copies, strict=True))
    ]


def _seen(value, name, handler):
    """The example's array for a value that the primitive `name` mixes with its other arrays."""
    if of_example(value):
        return value
    if is_constant(value):
        return value.value
    if _is_number(value) and handler.number:
        return handler.number(value)
    for leaf, first in ({value.leaf: name} if isinstance(value, Param) else value.leaves).items():
        handler.other(leaf, first)
    return value.value if value.copy is None else as_copy(value.value, value.copy)


@jax.custom_vjp
def as_copy(value, copy):
    """The example's copy; its gradient includes that of the shared value."""
    return copy


as_copy.defvjp(lambda value, copy: (copy, None), lambda _, gradient: (gradient, gradient))


def _jit(equation, values, handler, path):
    inner = equation.params["jaxpr"]
    return _walk(inner.jaxpr, inner.consts, values, handler, path)


def _remat(equation, values, handler, path):
    params = equation.params
    if not handler.evaluates:
        return _walk(params["jaxpr"], (), values, handler, path)
    kinds = []

    def again(arrays):
        results = _walk(params["jaxpr"], (), _filled(values, arrays), handler, path)
        kinds[:] = [_kind(v) for v in results]
        return _arrays(results), [_numbers(v) for v in results]

    again = jax.checkpoint(again, prevent_cse=params["prevent_cse"], policy=params["policy"])
    arrays, numbers = again(_arrays(values))
    filled = zip(_filled(kinds, arrays), numbers, strict=True)
    return [v._replace(**of) if isinstance(v, Param) else v for v, of in filled]


def _numbers(value):
    """The numbers of a parameter beside its arrays."""
    return {"place": value.place, "factor": value.factor} if isinstance(value, Param) else {}


def _kind(value):
    """The value without arrays, which must not leave the trace that they belong to."""
    if of_example(value):
        return None
    empty = value._replace(value=None, copy=None)
    return empty._replace(**dict.fromkeys(_numbers(value)))


def _arrays(values):
    """(value, copy) of all values, which are their only arrays beside `_numbers`."""
    return [(v, None) if of_example(v) else (v.value, v.copy) for v in values]


def _filled(values, arrays):
    return [
        value if of_example(v) else v._replace(value=value, copy=copy)
        for v, (value, copy) in zip(values, arrays, strict=True)
    ]


def _scan(equation, values, handler, path):
    """Parameters may be constants of the loop or stacked along its axis, but not carried."""
    if not any(map(of_example, values)):
        return None
    params, inside = equation.params, handler._replace(number=None)
    consts, carry, stacked = _parts_of_scan(equation, values)
    consts = [_seen(v, "scan", handler) if _is_number(v) else v for v in consts]
    carry = [_seen(v, "scan", handler) for v in carry]
    stacked = [v if is_stacked(v) else _seen(v, "scan", handler) for v in stacked]

    def body(carry, at):
        place, slices = at
        slices = _filled([sliced(v, params["length"], place) for v in stacked], slices)
        given, inner = [*consts, *carry, *slices], params["jaxpr"]
        results = _walk(inner.jaxpr, inner.consts, given, inside, path)
        results = [_seen(v, "scan", inside) for v in results]
        return results[: len(carry)], results[len(carry) :]

    if not handler.evaluates:
        first = [(None if of_example(v) else v.value[0], None) for v in stacked]
        body([None] * len(carry), (0, first))
        return [None] * len(equation.outvars)
    places = jnp.arange(params["length"], dtype=jnp.uint32)
    how = {k: params[k] for k in ("length", "reverse", "unroll", "_split_transpose") if k in params}
    carry, results = jax.lax.scan(body, carry, (places, _arrays(stacked)), **how)
    return [*carry, *results]


def _parts_of_scan(equation, values):
    """The constants of a scan, its carry, and its stacked arrays.

    JAX 0.10 counts them in the parameters `num_consts` and `num_carry`, and later versions do not.
    In the body stacked arrays have one axis less in all versions.
    """
    inner = equation.params["jaxpr"].jaxpr
    pairs = (
        zip(equation.invars, inner.invars, strict=True),
        zip(equation.outvars, inner.outvars, strict=True),
    )
    of_args, of_results = (
        [len(outer.aval.shape) > len(each.aval.shape) for outer, each in pair] for pair in pairs
    )
    second = of_args.count(False)
    first = second - of_results.count(False)
    return values[:first], values[first:second], values[second:]


def _is_number(value):
    return isinstance(value, Shared) and value.is_number


# Primitives that contain a jaxpr.
PROGRAMS = {"jit": _jit, "remat2": _remat, "scan": _scan}
