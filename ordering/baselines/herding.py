"""Herding: how large the partial sums along an order become, and the greedy order."""

import contextlib
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ordering import base, trees
from ordering.base import Ordering
from ordering.shuffles import first_fields
from syncopate import mesh, plans


def herding_bound(
    vectors: Float[Array, "*W M D"], orders: Int[Array, "*W M"], *, norm: float = jnp.inf
) -> Float[Array, ""]:
    """The herding bound of an order, a measure of its quality: lower is better.

    max over k of |sum_{j <= k} sum_w (z_{w, order_w(j)} - mean z)|

    Args:
      vectors: z, float[W, M, D]; for one worker float[M, D].
      orders: int[W, M], one permutation per worker, or int[M]. Traced orders are not checked.
      norm: `jnp.inf` or 2.

    Returns:
      float32 scalar, >= 0.

    Raises:
      ValueError: if the shapes do not match, the orders are not permutations, or for another norm.

    Examples:
      >>> import jax.numpy as jnp
      >>> from syncopate import ordering
      >>> z = jnp.array([[1.0], [1.0], [-1.0], [-1.0]])
      >>> float(ordering.baselines.herding_bound(z, jnp.arange(4)))
      2.0
      >>> orders = jnp.array([[0, 2, 1, 3], [2, 0, 3, 1]])
      >>> float(ordering.baselines.herding_bound(jnp.stack([z, z]), orders))
      0.0

    References:
      Lu, Guo, De Sa, GraB: Finding Provably Better Data Permutations than Random Reshuffling,
      2022, https://arxiv.org/abs/2205.10733; over workers: Cooper et al., Coordinating Distributed
      Example Orders for Provably Accelerated Training, 2023, https://arxiv.org/abs/2302.00845
    """
    shape, of_orders = (tuple(getattr(x, "shape", ())) for x in (vectors, orders))
    if len(shape) not in (2, 3) or of_orders != shape[:-1] or 0 in shape:
        raise ValueError(
            f"vectors have shape {shape} and orders {of_orders}: the bound needs arrays [W, M, D] "
            "and [W, M] (for one worker [M, D] and [M]), of at least one unit and one entry."
        )
    num_units, are_orders = orders.shape[-1], jnp.issubdtype(orders.dtype, jnp.integer)
    with contextlib.suppress(jax.errors.TracerArrayConversionError, RuntimeError):  # no values
        are_orders = are_orders and (np.sort(orders) == np.arange(num_units)).all()
    if not are_orders:
        raise ValueError(
            f"orders are no permutations of the units 0 .. {num_units - 1}: each row must hold "
            "every unit once, as an integer. Pass the `current` of a state."
        )
    if not plans.is_number(norm) or norm not in (2, jnp.inf):
        raise ValueError(f"norm is {norm!r}: pass 2 or jnp.inf.")
    vectors = trees.as_float32(vectors).reshape(-1, *shape[-2:])
    orders = orders.reshape(vectors.shape[:2])
    mean = jnp.mean(vectors, axis=(0, 1), keepdims=True)
    ordered = jnp.take_along_axis(vectors - mean, orders[:, :, None], axis=1)
    prefixes = jnp.cumsum(jnp.sum(ordered, axis=0), axis=0)
    return jnp.max(jnp.linalg.norm(prefixes, float(norm), axis=1))


class GreedyHerdingState(NamedTuple):
    """State of one worker. The next order is known only at the end of the epoch."""

    current: Int[Array, "M"]
    next: Int[Array, "M"]
    position: Int[Array, ""]  # units observed in this epoch
    left: Int[Array, ""]  # always 0
    epoch: Int[Array, ""]  # epochs finished
    gradients: Float[Array, "M D"]  # the last gradient of every unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class GreedyHerding(Ordering):
    """What `greedy_herding` returns."""

    observes = True

    def init(self, key, params=None):
        base.check_params(params)
        gradients = jnp.zeros((self.num_units, trees.tree_size(params)), jnp.float32)
        fields = first_fields(key, self.num_units, GreedyHerdingState)
        return mesh.varying_as(GreedyHerdingState(**fields, gradients=gradients), key)

    def observe(self, state, gradients):
        state = base.check_state(self, state, GreedyHerdingState)
        size = base.check_gradients(gradients, self.num_units, self.units_per_step)
        flat = trees.as_float32(trees.flat(gradients))
        base.check_shapes(flat, state.gradients[0], "flattened gradients")
        flat = jnp.where(jnp.isfinite(flat), flat, 0.0)
        place = state.position + jnp.arange(size, dtype=jnp.int32)
        unit = jnp.where(place < self.num_units, state.current[place], self.num_units)
        kept = state.gradients.at[unit].set(flat, mode="drop")
        return state._replace(position=state.position + size, gradients=kept)

    def next_epoch(self, state):
        state = base.check_state(self, state, GreedyHerdingState)
        return base.begin_epoch(state, greedy_order(state.gradients), "position")

    def resize(self, state, fresh, current, visited):
        position, epoch = (
            np.full(len(current), visited, np.int32),
            base.kept(state.epoch, len(current)),
        )
        return fresh._replace(current=current, next=current.copy(), position=position, epoch=epoch)


def greedy_herding(num_units: int, *, units_per_step: int = 1) -> Ordering:
    """Greedy herding, for small M: always takes the unit that keeps the partial sum smallest.

    Let z be the centred gradients of the epoch and s = 0. Repeatedly append the remaining unit u
    that minimises |s + z_u|, and add z_u to s. This takes O(M D) memory and O(M^2 D) time per
    epoch. Gradients that are not finite count as 0.

    Args:
      num_units: M >= 1.
      units_per_step: B in [1, M].

    Returns:
      An `Ordering` with `GreedyHerdingState`.

    Raises:
      ValueError: at construction if sizes are out of range; while tracing if the number of
        gradients is not that of a step.

    Examples:
      >>> from syncopate import ordering
      >>> order = ordering.baselines.greedy_herding(16, units_per_step=4)

    References:
      Lu, Meng, De Sa, A General Analysis of Example-Selection for Stochastic Gradient Descent,
      2022, https://openreview.net/forum?id=7gWSJrP3opB
    """
    return GreedyHerding(num_units=num_units, units_per_step=units_per_step)


def greedy_order(vectors: Float[Array, "M D"]) -> Int[Array, "M"]:
    """The greedy herding order of these vectors; ties go to the smaller index."""
    vectors = jnp.where(jnp.isfinite(vectors), vectors, 0.0)
    # Scaled by a power of two, which is exact, so that squares of large vectors stay finite.
    exponent = jnp.frexp(jnp.max(jnp.abs(vectors), initial=0.0))[1]
    vectors = jnp.ldexp(vectors, -exponent)
    centred = vectors - jnp.mean(vectors, axis=0, keepdims=True)
    norms = jnp.sum(jnp.square(centred), axis=1)

    def append(carry, _):
        total, used = carry
        growth = norms + 2 * jnp.matmul(centred, total, precision="highest")
        unit = jnp.argmin(jnp.where(used, jnp.inf, growth)).astype(jnp.int32)
        return (total + centred[unit], used.at[unit].set(True)), unit

    start = (jnp.zeros_like(centred[0]), jnp.zeros_like(norms, dtype=bool))
    return jax.lax.scan(append, start, length=centred.shape[0])[1]
