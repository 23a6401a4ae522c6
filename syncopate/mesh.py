"""A worker that is several devices: what its arrays' specs say, for orders and syncs alike."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P


def axes_of(specs) -> tuple[str, ...]:
    """The names of the mesh axes in a tree of specs, each once, in their order."""
    leaves = jax.tree.leaves(specs)
    if wrong := [s for s in leaves if not isinstance(s, P)]:
        raise ValueError(
            f"specs holds {wrong[0]!r}: pass a tree of jax.P like the parameters, or one jax.P for "
            "all leaves; jax.P() where a leaf is whole on every device of a worker."
        )
    return tuple(dict.fromkeys(axis for spec in leaves for axis in axes_in(spec)))


def check_specs(specs, axis_name) -> tuple[str, ...]:
    """The axes inside a worker; raises ValueError for those of the workers among them."""
    axes = axes_of(specs)
    if both := sorted(set(axes) & set(names_of(axis_name))):
        raise ValueError(
            f"specs names {both}, the workers' axis: they are of one worker's arrays. Leave the "
            "leading worker axis out."
        )
    return axes


def axis_size(axis_name) -> int:
    """The number of workers on this axis; raises ValueError outside of it."""
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis {axis_name!r} is not in scope: this function runs on each worker. Call it under "
            f"jax.vmap(..., axis_name={axis_name!r}), jax.shard_map over a mesh with this axis, or "
            "local_opt.lift; if your workers' axis has another name, pass it as axis_name=."
        ) from None


def beside(axis_name, *, manual_only: bool = False) -> list[str]:
    """The axes of the mesh in scope that are not the workers', or the manual ones of these."""
    mesh = jax.sharding.get_abstract_mesh()
    names = mesh.manual_axes if manual_only else mesh.axis_names
    return [a for a in names if mesh.shape[a] > 1 and a not in names_of(axis_name)]


def over_shards(axes, function: Callable, in_specs, out_specs) -> Callable:
    """`function`, in which these axes are manual: by a shard_map over those that are not yet."""

    def run(*args):
        manual = jax.sharding.get_abstract_mesh().manual_axes
        left = {axis for axis in axes if axis not in manual}
        if not left:
            return function(*args)
        if len(left) < len(axes):
            raise ValueError(
                f"of the axes {list(axes)} in specs only {sorted(left)} are left to the compiler: "
                "make all of a worker's axes manual, or none."
            )
        return jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names=left, check_vma=False
        )(*args)

    return run


def like(specs, tree):
    """One spec for every leaf of a tree, from a tree of specs or from one for many leaves."""
    return jax.tree.broadcast(specs, tree)


def varying(tree, *others):
    """The tree, typed as varying over all manual axes over which it or the others vary."""
    over = [varying_axes(x) for x in jax.tree.leaves((tree, others))]
    every = frozenset().union(*over)
    return jax.tree.map(lambda x: varying_over(x, every), tree)


def varying_over(x, axes):
    """The array, typed as varying over these axes, too."""
    lacking = tuple(sorted(frozenset(axes) - varying_axes(x)))
    if not lacking:
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):  # a cast would count as a use
        data = jax.lax.pcast(jax.random.key_data(x), lacking, to="varying")
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.lax.pcast(x, lacking, to="varying")


def varying_as(tree, *others):
    """The tree, each leaf typed as varying over its own manual axes and all of the others'."""
    return jax.tree.map(lambda x: varying(x, others), tree)


def alike(tree, like):
    """The tree, each leaf typed as varying where that of another tree does: a loop's carry."""
    return jax.tree.map(varying, tree, like)


def varying_axes(x) -> frozenset:
    """The names of the manual axes over which a value, or its shape, is typed as varying."""
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return kind.manual_axis_type.varying if kind.manual_axis_type else frozenset()


def axes_in(spec) -> tuple[str, ...]:
    """The names of the axes in one spec."""
    return tuple(axis for names in spec for axis in names_of(names))


def names_of(names) -> tuple[Any, ...]:
    """The names of axes: of none, of one, or of several."""
    return () if names is None else names if isinstance(names, tuple) else (names,)


def platform() -> str:
    """ "cpu", "gpu" or "tpu": that of the mesh that is traced for, whose devices need not be there.

    Without a mesh, that of the devices that JAX uses.
    """
    devices = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(devices, "platform", None) or jax.default_backend()
