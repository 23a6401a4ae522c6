"""What JAX can hold of the values of a batch, before they go to the device."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

ADVICE = {
    "M": "pass times as numbers, such as the seconds since a first one",
    "m": "pass times as numbers, such as seconds",
    "V": "pass the fields of structured arrays as a dict, and bytes as x.view(np.uint8)",
}


def representable(batch: PyTree) -> PyTree:
    """The batch in the types that JAX has, with the same values.

    JAX would cut integers to 32 bits while its x64 mode is off, and make large floats infinite.

    Args:
      batch: a tree of arrays and numbers. JAX arrays are left as they are.

    Returns:
      The tree, whose arrays have the types that they will have on the device.

    Raises:
      ValueError: for a value that the type does not hold, and for what is no array of numbers.
    """
    return jax.tree_util.tree_map_with_path(_representable, batch)


def _representable(path, value):
    if isinstance(value, jax.Array):
        return value
    array, name = np.asanyarray(value), f"the batch{jax.tree_util.keystr(path)}"
    if isinstance(array, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array: fill its missing values in, by x.filled().")
    dtype = array.dtype.newbyteorder("=")
    numbers = any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))
    if dtype.kind == "m" or not numbers:  # to NumPy a time span is a number, too
        example = f", as {array.flat[0]!r:.60}" if array.size else ""
        advice = ADVICE.get(dtype.kind, "leave texts and other objects out of the batches")
        raise ValueError(f"{name} is of {dtype}{example}, which JAX does not have: {advice}.")
    target = jax.dtypes.canonicalize_dtype(dtype)
    if target != array.dtype:
        with np.errstate(over="ignore"):
            found = array.astype(target)
        lost = found != array if target.kind in "iu" else np.isinf(found) & ~np.isinf(array)
        if lost.any():
            raise ValueError(
                f"{name} has {array[lost][0]}, and JAX makes {target} of {dtype}, which does not "
                "hold it: leave it out of the batches, scale or split it, or set JAX_ENABLE_X64=1."
            )
        array = found
    # Python's numbers keep their weak types.
    return value if isinstance(value, bool | int | float | complex) else array
