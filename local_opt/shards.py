"""A worker that is several devices: syncs of shards, each with its like on the other workers."""

import jax

from syncopate.plans import specs as specs_lib


def check_alone(axis_name, wire) -> None:
    """Raises where the mesh in scope has axes beside the workers', of which nothing was said."""
    if others := specs_lib.beside(axis_name):
        raise ValueError(
            f"the wire ({wire.rule}) puts leaves in one vector, under the mesh axes {others} "
            f"beside the workers' {axis_name!r}: a compiler would gather shards for it, and what "
            "devices of a worker both hold would be rounded apart. Pass specs=, how one worker's "
            "parameters are split over these axes, or specs=jax.P() if they are not."
        )


def alike(specs) -> list[list[int]]:
    """The places of the specs that name the same axes."""
    groups = {}
    for i, spec in enumerate(specs):
        groups.setdefault(frozenset(specs_lib.axes_in(spec)), []).append(i)
    return list(groups.values())


def in_place(tree, params, specs):
    """The tree, with whatever is like the parameters split as they are.

    Zeros that are made of parameters do not tell a compiler where to keep them, and it would keep
    all of them on every device.
    """
    if not specs_lib.axes_of(specs):
        return tree
    treedef, shapes = jax.tree.structure(params), _shapes(params)

    def is_like(part):
        return jax.tree.structure(part) == treedef and _shapes(part) == shapes

    def put(x, spec):
        left = set(specs_lib.axes_in(spec)) & set(jax.sharding.get_abstract_mesh().auto_axes)
        return jax.lax.with_sharding_constraint(x, spec) if left else x

    def put_all(part):
        return jax.tree.map(put, part, specs_lib.like(specs, part)) if is_like(part) else part

    return jax.tree.map(put_all, tree, is_leaf=is_like)


def _shapes(tree):
    return [jax.numpy.shape(x) for x in jax.tree.leaves(tree)]


def added_up(values, specs):
    """The sum of one number per leaf, those of shards over all devices that hold the others."""
    manual, sums = jax.sharding.get_abstract_mesh().manual_axes, {}
    for value, spec in zip(values, specs, strict=True):
        axes = tuple(axis for axis in specs_lib.axes_in(spec) if axis in manual)
        sums[axes] = sums[axes] + value if axes in sums else value
    return sum(jax.lax.psum(value, axes) if axes else value for axes, value in sums.items())
