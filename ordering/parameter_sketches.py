"""How the gradient of a parameter is sketched, and what that adds to the backward pass.

Every unit gets a sketch of zeros s[k] that the loss does not depend on. Where a parameter w meets
data, y = x w, the backward pass hands s the cotangent P^T (x^T dy) Q = (x P)^T (dy Q), with fixed
random signs P and Q: the gradient with respect to s is then the sum over all parameters of the
Kronecker sketches of this unit's gradient, and the gradients themselves are never formed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ordering import parameter_uses as uses_lib
from ordering.machine_forms import product
from ordering.parameter_uses import Use
from ordering.rows import as_float32
from ordering.sketches import fold, hash_signs

EXACT = 4  # gradients of up to EXACT k numbers are formed: that costs less than two products


class Leaf(NamedTuple):
    """How the gradient of a parameter is sketched.

    Fields:
      name: its path; shape: of it.
      how: "sketched" (never formed), "formed" (for each unit, in the backward pass alone), or
        "copied" (the parameter has a copy for each unit): the two cost memory for each unit.
      why: what made it so: kinds of uses, or the names of primitives.
      stack: leading dimensions that a scan goes through; rows, cols: the others, of a sketch of
        `sizes` (p, q).
    """

    name: str
    shape: tuple[int, ...]
    how: str
    why: str
    stack: int = 0
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()
    sizes: tuple[int, int] = (0, 0)


def leaf_of(name, shape, seen, unknown, size) -> Leaf:
    kinds = ", ".join(dict.fromkeys(use.kind for use in seen))
    stacks = {use.param.stack for use in seen}
    if unknown or len(stacks) != 1:
        why = ", ".join(dict.fromkeys(unknown)) or ("used at several depths" if seen else "unused")
        return Leaf(name, shape, "copied", why)
    (stack,) = stacks
    number = math.prod(shape[stack:])
    sides = {frozenset(_numbers(side) for side in (use.rows, use.cols)) for use in seen}
    if number <= EXACT * size or "linear" in kinds or len(sides) > 1:
        return Leaf(name, shape, "formed", kinds, stack)
    rows, cols = (_numbers(side) for side in (seen[0].rows, seen[0].cols))
    sizes = _sizes(math.prod(shape[i] for i in rows), math.prod(shape[i] for i in cols), size)
    return Leaf(name, shape, "sketched", kinds, stack, rows, cols, sizes)


def _numbers(side) -> tuple[int, ...]:
    return tuple(sorted(number for number, _ in side))


def _sizes(rows: int, cols: int, size: int) -> tuple[int, int]:
    """(p, q): as square as the matrix allows, p q <= k."""
    p = min(max(1, math.isqrt(size)), rows)
    q = min(size // p, cols)
    return min(size // q, rows), q


class Map(NamedTuple):
    """The random signs of one parameter: left [rows, p] and right [cols, q] of a sketch."""

    seed: jax.Array
    left: Any = None
    right: Any = None


def maps_of(plan, params, key, size) -> list[Map]:
    seeds = jax.random.bits(jax.random.clone(key), (len(plan),), jnp.uint32)
    return [_map_of(leaf, seed) for leaf, seed in zip(plan, seeds, strict=True)]


def _map_of(leaf: Leaf, seed) -> Map:
    if leaf.how != "sketched":
        return Map(seed)
    (p, q), shape = leaf.sizes, leaf.shape
    sides = ((leaf.rows, p, 1), (leaf.cols, q, 2))
    left, right = (
        hash_signs(seed + jnp.uint32(n), jnp.arange(math.prod(shape[i] for i in side) * width))
        .reshape(*(shape[i] for i in side), width)
        for side, width, n in sides
    )  # fmt: skip
    return Map(seed, left, right)


def _of_slice(of: Map, index) -> Map:
    """The map of a slice that a scan is at: all have signs of their own."""
    seed = of.seed ^ (jnp.uint32(0x85EBCA6B) * index)
    if of.left is None:
        return Map(seed)
    signs = hash_signs(seed, jnp.arange(math.prod(of.left.shape[:-1])))
    return Map(seed, of.left * signs.reshape(*of.left.shape[:-1], 1), of.right)


def sketch_whole(leaf: Leaf, of: Map, gradient, size) -> jax.Array:
    """The sketch of a whole parameter's gradient."""
    if not leaf.stack:
        return _of_matrix(leaf, of, gradient, size)
    places, index = leaf.shape[: leaf.stack], jnp.uint32(0)
    for axis, n in enumerate(places):
        at = jnp.arange(n).reshape([n if i == axis else 1 for i in range(leaf.stack)])
        index = uses_lib.slice_index(index, at)
    index = jnp.broadcast_to(index, places).reshape(-1)
    slices = gradient.reshape(-1, *leaf.shape[leaf.stack :])
    one = lambda g, i: _of_matrix(leaf, _of_slice(of, i), g, size)  # noqa: E731
    return jnp.sum(jax.vmap(one)(slices, index), axis=0)


def _of_matrix(leaf: Leaf, of: Map, gradient, size) -> jax.Array:
    """float32[k] of the gradient of one slice, in the leaf's own dimensions."""
    if leaf.how != "sketched":
        return fold(gradient, of.seed, size)
    axes = [i - leaf.stack for i in (*leaf.rows, *leaf.cols)]
    axes += [i for i in range(gradient.ndim) if i not in axes]  # of size 1
    left, right = (side.reshape(-1, side.shape[-1]) for side in (of.left, of.right))
    matrix = gradient.transpose(axes).reshape(left.shape[0], right.shape[0])
    return _padded(left.T @ matrix @ right / math.sqrt(math.prod(leaf.sizes)), size)


def _padded(found, size):
    return jnp.pad(found.reshape(-1), (0, size - found.size))


# What a site adds to the backward pass. `data` are arrays, for rules of differentiation may not
# close over what is traced.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(sketch_of_cotangent: Callable, y, s, data):
    # s is zero; y must not be shared by units whose cotangents differ.
    return y + s[0].astype(y.dtype)


def _tap_forward(sketch_of_cotangent, y, s, data):
    return _tap(sketch_of_cotangent, y, s, data), data


def _tap_backward(sketch_of_cotangent, data, dy):
    return dy, sketch_of_cotangent(dy, *data), None


_tap.defvjp(_tap_forward, _tap_backward)


def copied(value, s, of: Map):
    """A copy of a parameter for this unit."""
    return _tap(functools.partial(_folded, s.size), value, s, (of.seed,))


def _folded(size, dw, seed):
    return fold(as_float32(dw), seed, size)


def site_of(plan, maps, s, use: Use, w):
    leaf, of = plan[use.param.leaf], maps[use.param.leaf]
    if use.param.stack:
        of = _of_slice(of, use.param.index)
    if leaf.how == "formed":
        return _formed(use._replace(param=None, data=None), w, s, of.seed, use.data)
    sides = (of.left, of.right) if _numbers(use.rows) == leaf.rows else (of.right, of.left)
    first, second = (
        _in_order(side, dims) for side, dims in zip(sides, (use.rows, use.cols), strict=True)
    )
    swapped = sides[0] is of.right
    rule = functools.partial(_kronecker, use.function, swapped, leaf.sizes, s.size)
    return _tap(rule, use.function(w, *use.data), s, (first, second, *use.data))


def _in_order(signs, dims):
    """[K, p] with the leaf's dimensions as a use has them."""
    numbers = [number for number, _ in dims]
    order = [sorted(numbers).index(number) for number in numbers]
    return signs.transpose((*order, len(order))).reshape(-1, signs.shape[-1])


def _kronecker(function, swapped, sizes, size, dy, first, second, *data):
    """(x P)^T (dy Q)."""
    across = function(first.astype(dy.dtype), *data).astype(jnp.float32)
    along = product(None, jnp.float32)(dy, second.astype(dy.dtype))
    found = (along.T @ across if swapped else across.T @ along) / math.sqrt(math.prod(sizes))
    return _padded(found, size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _formed(use: Use, w, s, seed, data):
    """y, whose backward pass forms the gradient of this unit: the mean gradient is made of it."""
    y = use.function(w, *data)
    return y + s[0].astype(y.dtype)


def _formed_forward(use, w, s, seed, data):
    return _formed(use, w, s, seed, data), (w, s, seed, data)


def _formed_backward(use, kept, dy):
    w, s, seed, data = kept
    if use.kind == "product":
        gradient, to_data = data[0].T @ dy, (dy @ w.T,)
    else:
        _, pull = jax.vjp(use.function, w, *data)
        gradient, *to_data = pull(dy)
    dims = (*use.rows, *use.cols)
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    natural = as_float32(gradient).reshape([n for _, n in dims]).transpose(order)
    return gradient, fold(natural, seed, s.size), None, tuple(to_data)


_formed.defvjp(_formed_forward, _formed_backward)
