"""What is added to a backward pass where a parameter is used: the sketch of a unit's gradient.

Arrays are passed as `data` because differentiation rules must not close over traced values.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32

from ordering.maps import Map, of_slice, times
from ordering.rows import as_float32
from ordering.sketch import fold, grouped_sums, sums_of_matrix, table_of_sums
from ordering.trace import Leaf, Plan, apart, as_own, numbers_of, slice_index
from ordering.uses import Use
from syncopate.mesh import automatic


class Zeros(NamedTuple):
    """What units do not depend on: the gradients with respect to it are their sketches.

    Attributes:
      sketch: float32[k] of one unit, for the sketches.
      small: for every leaf float32[n], for the gradient itself, or None: see `Leaf.small`. Those of
        all leaves are folded at once.
      terms: float32[m], for the numbers that all units share.
    """

    sketch: Array
    small: list[Array | None]
    terms: Array


def zeros_of(plan: Plan, units: int, size: int) -> Zeros:
    small = [
        jnp.zeros((units, math.prod(leaf.shape))) if leaf.small else None for leaf in plan.leaves
    ]
    return Zeros(jnp.zeros((units, size)), small, jnp.zeros((units, len(plan.terms))))


def with_terms(
    plan: Plan, maps: list[Map], found: Zeros, gradients: list[dict[int, Array]]
) -> Zeros:
    """The sketches, with the gradients of what all units share: a unit has its part of each."""
    size, small, sketch = found.sketch.shape[1], [*found.small], found.sketch
    for of_unit, of_term in zip(found.terms.T, gradients, strict=True):
        for i, gradient in of_term.items():
            if plan.leaves[i].small:
                small[i] += of_unit[:, None] * as_float32(gradient).reshape(1, -1)
            else:
                row = sketch_of_gradient(plan.leaves[i], maps[i], as_float32(gradient), size)
                sketch += of_unit[:, None] * row[None]
    return found._replace(sketch=sketch, small=small)


def sketch_of_gradient(leaf: Leaf, of: Map, gradient: Array, size: int) -> Float32[Array, "k"]:
    """The sketch of a gradient that is there: the sum over all slices that a scan loops over."""
    if not leaf.stack:
        return _sketch_of_slice(leaf, of, gradient, size)
    index = jnp.zeros(1, jnp.uint32)
    for length in leaf.shape[: leaf.stack]:
        index = slice_index(index[:, None], jnp.arange(length)[None]).reshape(-1)
    slices = gradient.reshape(len(index), *leaf.shape[leaf.stack :])

    def of_one(index, place, own):
        return _sketch_of_slice(leaf, of_slice(of, index, place), own, size)

    return jnp.sum(jax.vmap(of_one)(index, jnp.arange(len(index)), slices), axis=0)


def _sketch_of_slice(leaf, of, gradient, size):
    if leaf.how != "sketched":
        shape = gradient.shape if leaf.how != "formed" else [n for n in gradient.shape if n > 1]
        return fold(times(gradient, of.scale).reshape(shape), of.seed, size)
    axes = [i - leaf.stack for i in (*leaf.rows, *leaf.cols)]
    axes += [i for i in range(gradient.ndim) if i not in axes]  # of size 1
    matrix = gradient.transpose(axes).reshape(of.left.size, of.right.size)
    found = sums_of_matrix(matrix * of.left.reshape(-1, 1) * of.right.reshape(1, -1), *leaf.sizes)
    return jnp.pad(found.reshape(-1), (0, size - found.size))


def added_up(maps: list[Map], found: Zeros) -> Float32[Array, "B k"]:
    """All of the units' sketches."""
    kept = [(of, g) for of, g in zip(maps, found.small, strict=True) if g is not None]
    if not kept:
        return found.sketch
    small = [jax.vmap(times, (0, None))(g, of.scale) for of, g in kept]
    size = found.sketch.shape[1]
    fold_all = functools.partial(fold_small, seed=kept[0][0].seed, size=size)
    if not automatic():
        return found.sketch + jax.vmap(fold_all)(jnp.concatenate(small, 1))
    # The compiler may split these gradients over devices, and would move parts of them to put them
    # together. A product with the matrix of `fold_all` only adds up.
    ends = list(itertools.accumulate(g.shape[1] for g in small))
    fold_back = jax.linear_transpose(fold_all, jnp.zeros(ends[-1]))
    known = jnp.ones(size), jnp.arange(size, dtype=jnp.float32)
    on_all = functools.partial(jax.lax.with_sharding_constraint, shardings=P())
    signs, places = (on_all(fold_back(x)[0]) for x in known)
    rows = found.sketch
    for g, end in zip(small, ends, strict=True):
        sign, place = (on_all(x[end - g.shape[1] : end]) for x in (signs, places))
        table = jnp.where(place[:, None] == sign[:, None] * known[1][None], sign[:, None], 0.0)
        rows = rows + jnp.matmul(g, table, precision="highest")
    return rows


def fold_small(flat: Array, seed: Array, size: int) -> Float32[Array, "k"]:
    """The sums begin anywhere: the largest of a table's, those of frequent rows, come first.

    Their number is odd, or a channel of one parameter would meet its own in others.
    """
    odd = size - (size + 1) % 2
    return jnp.roll(jnp.pad(fold(flat, seed, odd), (0, size - odd)), seed % size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(sketch_of_cotangent: Callable, y, s, data):
    # s is zero; y must not be shared by units whose cotangents differ.
    return y + s[0].astype(y.dtype)


def _tap_forward(sketch_of_cotangent, y, s, data):
    return _tap(sketch_of_cotangent, y, s, data), data


def _tap_backward(sketch_of_cotangent, data, dy):
    return dy, sketch_of_cotangent(dy, *data), None


_tap.defvjp(_tap_forward, _tap_backward)


def copied(leaf: int, value: Array, of: Map, zeros: Zeros) -> Array:
    """A parameter as seen by this unit alone, so that its gradient can be sketched."""
    value = jax.lax.stop_gradient(value)
    if (own := zeros.small[leaf]) is not None:
        return value + own.reshape(value.shape).astype(value.dtype)
    size = zeros.sketch.size

    def sketch_of(dw, seed, scale):
        return fold(times(as_float32(dw), scale), seed, size)

    return _tap(sketch_of, value, zeros.sketch, (of.seed, of.scale))


def site_of(plan: list[Leaf], maps: list[Map], zeros: Zeros, use: Use, w: Array) -> Array:
    number, rest = use.param.leaf, use._replace(param=None, data=None)
    leaf, of = plan[number], maps[number]
    if leaf.how == "copied":
        return apart(use.function)(as_own(w, use.param.own), *use.data)
    if leaf.small:
        return _formed(rest, w, zeros.small[number], None, use.data)
    if use.param.stack:
        of = of_slice(of, use.param.index, use.param.place)
    if leaf.how == "formed":
        return _formed(rest, w, zeros.sketch, (of.seed, of.scale), use.data)
    rule = functools.partial(_of_product, rest, leaf, zeros.sketch.size)
    return _tap(rule, use.function(w, *use.data), zeros.sketch, (of.left, of.right, *use.data))


def _of_product(use: Use, leaf: Leaf, size, dy, left, right, *data):
    """The sketch of x^T dy, float32[k], without this product."""
    groups, p, q = leaf.sizes
    swapped = numbers_of(use.rows) != leaf.rows
    if swapped:
        left, right, p, q = right, left, q, p
    if use.kind == "product":
        of_x = grouped_sums(_natural(data[0], use.rows), left, p, groups)
    else:  # convolutions and look-ups have no matrix x
        table = _as_used(table_of_sums(left, p, groups), use.rows).astype(dy.dtype)
        of_x = as_float32(use.function(table, *data)).reshape(-1, p, groups)
    of_dy = grouped_sums(_natural(dy, use.cols), right, q, groups)
    found = jnp.einsum("tpm,tqm->qpm" if swapped else "tpm,tqm->pqm", of_x, of_dy)
    return jnp.pad(found.reshape(-1) / math.sqrt(groups), (0, size - found.size))


def _natural(x, dims):
    """[T, K] with its columns in the order of the parameter; `dims` are in the order of the use."""
    order = [1 + dims.index(dim) for dim in sorted(dims)]
    return x.reshape(-1, *(n for _, n in dims)).transpose(0, *order).reshape(len(x), -1)


def _as_used(table, dims):
    """[K, N] with its rows in the order of the use, of one in the order of the parameter."""
    order = [sorted(dims).index(dim) for dim in dims]
    table = table.reshape(*(n for _, n in sorted(dims)), -1)
    return table.transpose(*order, len(order)).reshape(-1, table.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _formed(use: Use, w, s, of, data):
    """y; its backward pass forms the gradient of this unit, which the mean gradient also uses."""
    y = use.function(w, *data)
    return y + s[0].astype(y.dtype)


def _formed_forward(use, w, s, of, data):
    return _formed(use, w, s, of, data), (w, s, of, data)


def _formed_backward(use, kept, dy):
    w, s, of, data = kept
    if use.kind == "product":
        gradient, to_data = data[0].T @ dy, (dy @ w.T,)
    else:
        _, pull = jax.vjp(use.function, w, *data)
        gradient, *to_data = apart(pull)(dy)
    dims = (*use.rows, *use.cols)
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    natural = as_float32(gradient).reshape([n for _, n in dims]).transpose(order)
    if of is None:  # of a small parameter
        return gradient, natural.reshape(-1), None, tuple(to_data)
    seed, scale = of
    return gradient, fold(times(natural, scale), seed, s.size), None, tuple(to_data)


_formed.defvjp(_formed_forward, _formed_backward)
