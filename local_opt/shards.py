"""A worker that is several devices: syncs of shards, each with its like on the other workers."""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P


def axes_of(specs) -> tuple[str, ...]:
    """The names of the mesh axes in a tree of specs, each once; none of None.

    Example:
      >>> import jax, local_opt
      >>> local_opt.shards.axes_of({"w": jax.P(None, "model"), "b": jax.P()})
      ('model',)
    """
    leaves = jax.tree.leaves(specs)
    if wrong := [spec for spec in leaves if not isinstance(spec, P)]:
        raise ValueError(
            f"specs holds {wrong[0]!r}: pass a tree of jax.P like the parameters, or one jax.P for "
            "all leaves; jax.P() where a leaf is whole on every device of a worker."
        )
    return tuple(dict.fromkeys(axis for spec in leaves for axis in _axes(spec)))


def check_specs(specs, axis_name) -> tuple[str, ...]:
    """The axes inside a worker; raises ValueError for those of the workers among them."""
    axes = axes_of(specs)
    if both := sorted(set(axes) & set(_names(axis_name))):
        raise ValueError(
            f"specs names {both}, the workers' axis: they are of one worker's parameters. Leave "
            "the leading worker axis out."
        )
    return axes


def check_alone(axis_name, wire) -> None:
    """Raises where the mesh in scope has axes beside the workers', of which nothing was said."""
    mesh = jax.sharding.get_abstract_mesh()
    beside = [a for a in mesh.axis_names if mesh.shape[a] > 1 and a not in _names(axis_name)]
    if beside:
        raise ValueError(
            f"the wire ({wire.rule}) puts leaves in one vector, under the mesh axes {beside} "
            f"beside the workers' {axis_name!r}: a compiler would gather shards for it, and what "
            "devices of a worker both hold would be rounded apart. Pass specs=, how one worker's "
            "parameters are split over these axes, or specs=jax.P() if they are not."
        )


def alike(specs) -> list[list[int]]:
    """The places of the specs that name the same axes."""
    groups = {}
    for i, spec in enumerate(specs):
        groups.setdefault(frozenset(_axes(spec)), []).append(i)
    return list(groups.values())


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


def in_place(tree, params, specs):
    """The tree, with whatever is like the parameters split as they are.

    Zeros that are made of parameters do not tell a compiler where to keep them, and it would keep
    all of them on every device.
    """
    if not axes_of(specs):
        return tree
    treedef, shapes = jax.tree.structure(params), _shapes(params)

    def is_like(part):
        return jax.tree.structure(part) == treedef and _shapes(part) == shapes

    def put(x, spec):
        left = set(_axes(spec)) & set(jax.sharding.get_abstract_mesh().auto_axes)
        return jax.lax.with_sharding_constraint(x, spec) if left else x

    def put_all(part):
        return jax.tree.map(put, part, like(specs, part)) if is_like(part) else part

    return jax.tree.map(put_all, tree, is_leaf=is_like)


def _shapes(tree):
    return [jax.numpy.shape(x) for x in jax.tree.leaves(tree)]


def added_up(values, specs):
    """The sum of one number per leaf, those of shards over all devices that hold the others."""
    manual, sums = jax.sharding.get_abstract_mesh().manual_axes, {}
    for value, spec in zip(values, specs, strict=True):
        axes = tuple(axis for axis in _axes(spec) if axis in manual)
        sums[axes] = sums[axes] + value if axes in sums else value
    return sum(jax.lax.psum(value, axes) if axes else value for axes, value in sums.items())


def _axes(spec) -> tuple[str, ...]:
    return tuple(axis for names in spec if names is not None for axis in _names(names))


def _names(names) -> tuple:
    return names if isinstance(names, tuple) else (names,)
