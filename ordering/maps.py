"""The random signs by which the rows and columns of a parameter are added up, and their scale."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree, UInt32

from ordering.scaling import Factors, whole_scale
from ordering.sketch import hash_signs
from ordering.trace import Leaf


class Map(NamedTuple):
    """The random signs of one parameter: one for each row, and one for each column.

    Scaled, they are of the size of the scale; `scale` has that of parameters without rows and
    columns, or of all slices of a stacked one, leaves [slices, ...].
    """

    seed: UInt32[Array, ""]
    left: Any = None
    right: Any = None
    scale: Any = None


def maps_of(plan: list[Leaf], key: Key[Array, ""]) -> list[Map]:
    with jax.ensure_compile_time_eval():  # a generator is a loop in the program
        seeds = list(jax.random.bits(jax.random.clone(key), (len(plan),), jnp.uint32))
    return [_map_of(leaf, seed) for leaf, seed in zip(plan, seeds, strict=True)]


def _map_of(leaf: Leaf, seed) -> Map:
    if leaf.how != "sketched":
        return Map(seed)
    left, right = (
        hash_signs(seed + jnp.uint32(n), jnp.arange(math.prod(shape))).reshape(shape)
        for n, side in ((1, leaf.rows), (2, leaf.cols))
        for shape in [[leaf.shape[i] for i in side]]
    )
    return Map(seed, left, right)


def scaled_maps(plan: list[Leaf], maps: list[Map], params: PyTree, scale: PyTree) -> list[Map]:
    """The maps of gradients times a scale: signs of rows and columns are multiplied with it."""
    wholes = jax.tree.leaves(whole_scale(scale, params))
    found = jax.tree.structure(params).flatten_up_to(scale)
    return [_scaled_map(*each) for each in zip(plan, maps, found, wholes, strict=True)]


def _scaled_map(leaf: Leaf, of: Map, scale, whole) -> Map:
    slices = math.prod(leaf.shape[: leaf.stack])
    if leaf.how != "sketched":
        own = (slices, *leaf.shape[leaf.stack :]) if leaf.stack else leaf.shape
        return of._replace(scale=whole.reshape(own))
    if not isinstance(scale, Factors):
        raise ValueError(
            f"the scale of params{leaf.name} is one array, and its sketches need factors: pass "
            "scale_of(..., leaves=sketched_parameters(...))."
        )
    sides = (scale.rows, leaf.rows), (scale.cols, leaf.cols)
    rows, cols = (s.reshape(slices, *(leaf.shape[i] for i in side)) for s, side in sides)
    if leaf.stack:
        return of._replace(scale=(rows, cols))
    return of._replace(left=of.left * rows[0], right=of.right * cols[0])


def of_slice(of: Map, index, place=0) -> Map:
    """The map for one slice of a scanned parameter: every slice has its own signs."""
    seed = of.seed ^ (jnp.uint32(0x85EBCA6B) * index)
    scale = jax.tree.map(lambda s: s[place], of.scale)
    if of.left is None:
        return Map(seed, scale=scale)
    signs = hash_signs(seed, jnp.arange(of.left.size)).reshape(of.left.shape)
    rows, cols = (1.0, 1.0) if scale is None else scale
    return Map(seed, of.left * signs * rows, of.right * cols)


def times(gradient, scale):
    return gradient if scale is None else gradient * scale.reshape(gradient.shape)
