"""Sign rules: which end of the next order a vector goes to.

A rule depends on the products <r, c> and |c|^2 of the running sum r and the vector c, and on a
random number. So a whole block of vectors can be signed from one Gram matrix.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Key

State = Any


class SignRule(NamedTuple):
    """A rule that chooses the sign of each vector, as a set of pure functions.

    Attributes:
      init: `key -> state`. Workers that share a running sum pass the same key.
      sign: `(state, dot, norm2, coin) -> (state, sign)`, with dot = <r, c>, norm2 = |c|^2 and the
        sign +1 or -1, float32 scalars. It must be elementwise and use no keys: a kernel calls it
        with arrays of one element.
      next_epoch: `state -> state`.
      coins: `(state, n) -> float32[n]`, random numbers for the next n calls of sign; or zeros.
    """

    init: Callable[[Key[Array, ""]], State]
    sign: Callable[..., tuple[State, Float32[Array, ""]]]
    next_epoch: Callable[[State], State]
    coins: Callable[[State, int], Float32[Array, "n"]] = lambda state, n: jnp.zeros(n)


def rule_of(rule: SignRule | None) -> SignRule:
    """The sign rule of an order, `greedy()` for None; raises ValueError if it is not a rule."""
    if rule is not None and not isinstance(rule, SignRule):
        raise ValueError(
            f"rule is {rule!r}: pass a SignRule, as rule=ordering.baselines.self_balancing_walk() "
            "with its parentheses, or None for the greedy one."
        )
    return greedy() if rule is None else rule


def greedy() -> SignRule:
    """The sign that makes the running sum smaller: + iff <r, c> <= 0."""
    return SignRule(
        init=lambda key: (),
        sign=lambda state, dot, norm2, coin: (state, plus_iff(dot <= 0)),
        next_epoch=lambda state: state,
    )


def plus_iff(condition):
    """+1 where the condition holds, else -1, as float32."""
    return jnp.where(condition, 1.0, -1.0).astype(jnp.float32)
