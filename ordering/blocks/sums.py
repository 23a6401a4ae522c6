"""The gradients of whole blocks, added up over the batches of a window."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from ordering import trees
from ordering.base import Ordering, State
from syncopate import plans


class Sums(NamedTuple):
    """Sums over the records of each block of a window, of one worker.

    Attributes:
      gradients: float32 leaves [K, ...].
    """

    gradients: PyTree

    @property
    def window(self) -> int:
        """K."""
        return jax.tree.leaves(self.gradients)[0].shape[0]

    def add(self, gradients: PyTree, places: Int[Array, "b"]) -> "Sums":
        """Adds the gradients of a batch to those of their blocks.

            s_j <- s_j + sum of g_i over the records i of block j

        Args:
          gradients: of the b records, or their sketches, leaves [b, ...], of `per_example`,
            `sketched` or the like.
          places: int32[b], as `read_blocks` gives them: the place of each record's block in the
            window, -1 for records that only fill the batch.

        Returns:
          The new `Sums`. A gradient that is not finite changes the sum of its own block alone.

        Raises:
          ValueError: if there is not one place for each record, or for gradients of other shapes.

        Examples:
          >>> import jax.numpy as jnp
          >>> from syncopate import ordering
          >>> found = ordering.blocks.sums(jnp.zeros(1), window=2)
          >>> gradients = jnp.array([[1.0], [2.0], [5.0]])
          >>> found.add(gradients, jnp.array([1, 1, -1])).gradients.tolist()
          [[0.0], [3.0]]
        """
        size = trees.check_gradients(gradients)
        kind = getattr(places, "dtype", np.dtype(object))
        if np.shape(places) != (size,) or not jnp.issubdtype(kind, jnp.integer):
            raise ValueError(
                f"places has the shape {np.shape(places)} and the dtype {kind} for {size} "
                "gradients: pass the places of one worker's batch, and a gradient for each of its "
                "records."
            )
        of_records = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), self.gradients
        )
        plans.check_like("gradients", gradients, of_records, "sums")
        # Out of range: dropped. A negative place would count from the end.
        block = jnp.where(places < 0, self.window, places)

        def added(total, g):
            return total.at[block].add(trees.as_float32(g), mode="drop")

        return Sums(jax.tree.map(added, self.gradients, gradients))

    def observe(self, order: Ordering, state: State, *, units: int) -> tuple[State, "Sums"]:
        """Shows the order the blocks of a window that has ended, and begins the next sums.

        The gradient of a block is the sum over its records, so that a block with fewer of them
        weighs less, as it does in an epoch. Choose the bound of a sign rule for such sums.

        Args:
          order: with `units_per_step` equal to the window.
          state: of the order, of one worker.
          units: blocks in the window, `window_units` of the reader; static.

        Returns:
          `(state, sums)`, with empty sums.

        Raises:
          ValueError: if the order does not take so many units.

        Examples:
          >>> import jax, jax.numpy as jnp
          >>> from syncopate import ordering
          >>> order = ordering.pair_balance(4, units_per_step=2)
          >>> state = order.init(jax.random.key(0), jnp.zeros(3))
          >>> found = ordering.blocks.sums(jnp.zeros(3), window=2)
          >>> state, found = found.observe(order, state, units=2)
        """
        if not isinstance(order, Ordering):
            raise ValueError(f"order is {order!r}: pass the Ordering of the state.")
        units = plans.check_whole("units", units, 1, self.window)
        gradients = jax.tree.map(lambda x: x[:units], self.gradients)
        return order.observe(state, gradients), jax.tree.map(jnp.zeros_like, self)


def sums(params: PyTree, *, window: int) -> Sums:
    """Empty sums for the blocks of a window.

    Args:
      params: a tree of the shapes of one gradient; `jnp.zeros(size)` for sketches.
      window: K >= 1, blocks in a window.

    Returns:
      `Sums`, part of a worker's state beside that of its order. `add(gradients, places)` adds those
      of a batch, with the places that `read_blocks` gives; where `window_ended`,
      `observe(order, state, units=reads.window_units)` shows the order its blocks, and returns its
      new state and empty sums.

    Raises:
      ValueError: for a window below 1, or params without numbers.

    Examples:
      >>> import jax.numpy as jnp
      >>> from syncopate import ordering
      >>> ordering.blocks.sums(jnp.zeros(3), window=2).gradients.shape
      (2, 3)
    """
    window = plans.check_whole("window", window, 1)
    for leaf in jax.tree.leaves(params):
        trees.check_real(leaf if hasattr(leaf, "dtype") else np.asarray(leaf))
    if not trees.tree_size(params):
        raise ValueError(f"params is {params}: pass a tree of the shapes of one gradient.")
    return Sums(trees.zeros_like(params, (window,)))
