"""Products and look-ups in the form that the machine compiled for is good at."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def platform() -> str:
    """ "cpu", "gpu" or "tpu": that of the mesh that is traced for, whose devices need not be there.

    Without a mesh, that of the devices that JAX uses.
    """
    devices = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(devices, "platform", None) or jax.default_backend()


@functools.cache
def product(precision=None, preferred_element_type=None) -> Callable:
    """`(x [T, K], w [K, N]) -> [T, N]`: on a CPU, under vmap of x, batch and rows are one axis.

    A CPU is slower at a product of three axes; a TPU's compiler does not join the
    gradient of a loss to a product of two, and writes it down.
    """

    def multiply(x, w):
        return jnp.matmul(x, w, precision=precision, preferred_element_type=preferred_element_type)

    def as_one(x, w):
        y = multiply(x.reshape(-1, x.shape[-1]), w)
        return y.reshape(x.shape[0], -1, y.shape[-1])

    @custom_vmap
    def merged(x, w):
        return multiply(x, w)

    @merged.def_vmap
    def _(size, batched, x, w):
        apart = jax.vmap(multiply, [0 if each else None for each in batched])
        if batched == [True, False]:
            return jax.lax.platform_dependent(x, w, cpu=as_one, default=apart), True
        return apart(x, w), True

    return merged


def look_up(equation, x, indices):
    """A gather without the axes of size 1 that its slices go along; None where there are none.

    A batch of one example is such an axis. Of the backward pass of a look-up of labels in logits
    a TPU's compiler makes a comparison, at no cost; with such an axis, a scatter of their size.

    Args:
      equation: of a gather; x, indices: its arrays.
    """
    how, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    used = {*how.collapsed_slice_dims, *how.start_index_map, *how.operand_batching_dims}
    gone = [i for i, n in enumerate(x.shape) if n == sizes[i] == 1 and i not in used]
    if not gone:
        return None
    kept = [i for i in range(x.ndim) if i not in gone]
    whole = {*how.collapsed_slice_dims, *how.operand_batching_dims}
    sliced = [i for i in range(x.ndim) if i not in whole]
    at = dict(zip(sliced, how.offset_dims, strict=True))  # where an axis is in the result
    lost = [at[i] for i in gone]

    def number(axes):
        return tuple(kept.index(i) for i in axes)

    numbers = how._replace(
        offset_dims=tuple(
            d - sum(other < d for other in lost) for d in how.offset_dims if d not in lost
        ),
        collapsed_slice_dims=number(how.collapsed_slice_dims),
        start_index_map=number(how.start_index_map),
        operand_batching_dims=number(how.operand_batching_dims),
    )
    params = equation.params | {
        "dimension_numbers": numbers, "slice_sizes": tuple(sizes[i] for i in kept)
    }  # fmt: skip
    found = equation.primitive.bind(jnp.squeeze(x, gone), indices, **params)
    return jnp.expand_dims(found, lost)
