"""Memory of its own for every leaf, so that a whole state may be donated to a step."""

import jax
import jax.numpy as jnp


def apart(tree, *others):
    """The tree, with a copy in place of every array that is in it twice, or in the others.

    Optimizers start some fields as the parameters themselves; given away with these, one buffer
    would be given away twice.

    Example:
      >>> import jax.numpy as jnp
      >>> from local_opt.buffers import apart
      >>> x = jnp.ones(2)
      >>> a, b = apart((x, jnp.zeros(1)), x)
      >>> a is x
      False
    """
    seen = {id(x) for x in jax.tree.leaves(others)}

    def own(x):
        if id(x) in seen and isinstance(x, jax.Array):
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(own, tree)
