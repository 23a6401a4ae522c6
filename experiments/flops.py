"""Operations of a function, as XLA counts them, with loops counted as often as they turn."""

from collections.abc import Callable, Iterator

import jax
from jax.extend import core


def operations(function: Callable, *shapes) -> float:
    """Floating-point operations of one call, before XLA optimises it.

    XLA counts the body of a loop once: the other turns of every scan are added here. A loop whose
    length the program does not know, a `lax.while_loop`, still counts as one turn.

    Args:
      function: anything that `jax.jit` takes; shapes: its arguments, of which only shapes and
        dtypes matter.

    Example:
      A product with a 3 x 3 matrix takes 18 operations.

      >>> import jax, jax.numpy as jnp
      >>> from experiments.flops import operations
      >>> step = lambda x: jnp.ones((3, 3)) @ x
      >>> scanned = lambda x: jax.lax.scan(lambda x, _: (step(x), None), x, length=10)[0]
      >>> operations(step, jnp.ones(3)), operations(scanned, jnp.ones(3)) >= 180
      (18.0, True)
    """
    return _counted(jax.make_jaxpr(function)(*shapes))


def _counted(program: core.ClosedJaxpr) -> float:
    total = _by_xla(program)
    for length, body in _scans(program.jaxpr):
        total += length * _counted(body) - _by_xla(body)
    return total


def _by_xla(program: core.ClosedJaxpr) -> float:
    function = core.jaxpr_as_fun(program)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.in_avals]
    return float(jax.jit(function).lower(*shapes).cost_analysis()["flops"])


def _scans(program: core.Jaxpr) -> Iterator[tuple[int, core.ClosedJaxpr]]:
    """(length, body) of the scans that are in no other scan."""
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            yield equation.params["length"], equation.params["jaxpr"]
            continue
        for value in equation.params.values():
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, core.ClosedJaxpr | core.Jaxpr):
                    yield from _scans(getattr(part, "jaxpr", part))
