"""The weight of a worker in the mean of a sync, and the types in which means are taken."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
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
    floating = jnp.issubdtype(jnp.result_type(weight), jnp.floating)
    kind = wide_type(jnp.result_type(weight)) if floating else jnp.result_type(float)
    weight = jnp.asarray(weight, kind)
    return jnp.where((weight >= 0) & (weight < jnp.inf), weight, jnp.nan)


def scaled(weight: Float[Array, ""], axis_name: Any) -> Float[Array, ""]:
    """The weight by about the largest of all workers', so that only their ratios count.

    The divisor is a power of two, which rounds nothing.
    """
    kind = jnp.finfo(weight.dtype)
    high = kind.maxexp - 28  # 2^high weight is infinite for weights of 2^28 and more
    # Devices take the least numbers for zero, but their bits count them.
    bits = lax.bitcast_convert_type(weight, jnp.dtype(f"uint{kind.bits}"))
    least = bits.astype(weight.dtype) * 2.0 ** (high + kind.minexp - kind.nmant)
    raised = jnp.where(bits < 2**kind.nmant, least, weight * 2.0**high)
    both = jnp.stack([raised, weight])
    largest = lax.pmax(both, axis_name)
    power = lax.reduce_precision(jnp.minimum(largest, kind.max / 4), kind.nexp, 0)
    return jnp.where(largest[0] < jnp.inf, *(both / power))


def weighed(x: Array, weight: Float[Array, ""]) -> Array:
    """w x, and zeros for a weight of zero, even if x is not finite."""
    return lax.select(weight == 0, jnp.zeros_like(x), x * weight.astype(x.real.dtype))


def if_counted(tree: PyTree, other: PyTree, weight: Float[Array, ""] | None) -> PyTree:
    """The tree, or the other one where the weight is zero."""
    if weight is None:
        return tree
    return jax.tree.map(lambda x, y: lax.select(weight == 0, y, x), tree, other)


def wide_type(dtype: DTypeLike) -> Any:
    """float32 or int32 in place of a narrower type, and any other type itself."""
    if jnp.dtype(dtype).itemsize >= 4:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32 if jnp.issubdtype(dtype, jnp.inexact) else jnp.int32)
