"""The weight of a worker in the mean of a sync."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from local_opt.checks import check_scalar
from syncopate.plans import check_number, is_number


def checked_weight(weight: Any) -> Float[Array, ""]:
    """The weight as a floating number, NaN if it is below zero or not finite.

    Raises ValueError for anything but one number, and for a number out of range that is known while
    a program is traced. Others cannot be refused there: their NaN makes every mean NaN.
    """
    check_scalar("weight", weight, jnp.bool_, jnp.integer, jnp.floating)
    if is_number(weight):  # not while it is traced
        check_number("weight", weight, "[0, inf)")
    weight = jnp.asarray(weight, jnp.result_type(float))
    return jnp.where((weight >= 0) & (weight < jnp.inf), weight, jnp.nan)


def weighed(x: Array, weight: Float[Array, ""]) -> Array:
    """w x, and zeros for a weight of zero, even if x is not finite."""
    return lax.select(weight == 0, jnp.zeros_like(x), x * weight.astype(x.real.dtype))


def if_counted(tree: PyTree, other: PyTree, weight: Float[Array, ""] | None) -> PyTree:
    """The tree, or the other one where the weight is zero."""
    if weight is None:
        return tree
    return jax.tree.map(lambda x, y: lax.select(weight == 0, y, x), tree, other)
