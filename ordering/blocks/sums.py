"""The gradients of whole blocks, summed over the batches of a window."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from ordering import trees
from syncopate import plans


def add_gradients(sums: PyTree, gradients: PyTree, places: Int[Array, "b"]) -> PyTree:
    """Adds the gradients of a batch to the sums of the blocks of a window.

        s_j <- s_j + sum of g_i over the records i of block j

    If `window_ended`, call `order.observe(orders, sums)`, and begin the next window with zeros.
    The last window of an epoch may be shorter: pass the first `window_units` sums. A block with
    fewer records weighs less, as it does in an epoch.

    Args:
      sums: float32 leaves [K, ...] of one worker, shaped like K gradients. They are zeros at the
        start of a window of K blocks: `jnp.zeros((K, size))` for sketches.
      gradients: the gradients of the b records, or their sketches, leaves [b, ...], as from
        `per_example_grads` or `sketched_grads`.
      places: int32[b] from `read_blocks`: the place of each record's block in the window, or -1 for
        records that only fill up the batch.

    Returns:
      The new sums. A gradient that is not finite changes only the sum of its own block.

    Raises:
      ValueError: if there is not one place for each record, or for gradients of other shapes.

    Examples:
      >>> import jax.numpy as jnp
      >>> from syncopate import ordering
      >>> gradients = jnp.array([[1.0], [2.0], [5.0]])
      >>> places = jnp.array([1, 1, -1])
      >>> ordering.blocks.add_gradients(jnp.zeros((2, 1)), gradients, places).tolist()
      [[0.0], [3.0]]
    """
    window, size = trees.check_gradients(sums, "sums"), trees.check_gradients(gradients)
    kind = getattr(places, "dtype", np.dtype(object))
    if np.shape(places) != (size,) or not jnp.issubdtype(kind, jnp.integer):
        raise ValueError(
            f"places has the shape {np.shape(places)} and the dtype {kind} for {size} gradients: "
            "pass the places of one worker's batch, and a gradient for each of its records."
        )
    of_records = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), sums)
    plans.check_like("gradients", gradients, of_records, "sums")
    # Places out of range are dropped, where negative ones would count from the end.
    block = jnp.where(places < 0, window, places)
    return jax.tree.map(
        lambda s, g: s.at[block].add(trees.as_float32(g), mode="drop"), sums, gradients
    )
