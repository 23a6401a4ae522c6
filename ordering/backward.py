"""Sketches of the gradients of single units, out of the ordinary backward pass.

The loss is walked (trace.py). Every unit gets a sketch of zeros s[k] that it does not depend on.
Where a parameter w meets data, y = x w, the backward pass hands s the cotangents
P_f^T (x^T dy) Q_f = (x P_f)^T (dy Q_f), with fixed random signed sums P_f and Q_f: the gradient
with respect to s is then the sum over all parameters of the sketches of this unit's gradient, and
the gradients themselves are never formed.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Key, PyTree

from ordering import trace
from ordering.base import check_key
from ordering.gradients import check_params, loss_alone, per_example, signed_as, units_of
from ordering.maps import Map, maps_of, of_slice, scaled_maps, times
from ordering.rows import Rows, as_float32, leading_size, tree_size
from ordering.scaling import whole_scale
from ordering.sketch import MOST, SIZE, fold, grouped_sums, sketch, table_of_sums
from ordering.trace import Leaf, numbers_of
from ordering.uses import Hooks, Use
from syncopate.mesh import varying
from syncopate.plans import check_whole


def sketched(
    loss: Callable, key: Key[Array, ""], *, size: int = SIZE, has_aux: bool = False
) -> Callable:
    """A sketch of every unit's gradient, out of one ordinary backward pass.

    s_i = sum over parameters of [P_f^T G_i Q_f / m^(1/2)] for f = 1 .. m

    G_i is the gradient of unit i, P_f and Q_f are sums of its rows and columns with random signs.
    A step takes little more time and memory than a plain one. E[s_i . s_j] = G_i . G_j, about as
    accurate as `sketch_rows(per_example(loss)(...))`: at k = 1,024, squared norms on MLPs, LeNet
    and a small GPT-2 are off by 4.3 to 4.9 % (root mean square) and inner products by 0.031 to
    0.038 |G_i| |G_j| (`python -m benchmarks.sketch_errors`). It is less accurate for gradients of
    low rank of very large matrices, with up to six times the variance, and for sums over many
    positions that nearly have rank one.

    The loss may come from any library: products, convolutions and look-ups are found in its
    program. The gradients of parameters that are used in another way are formed for every unit;
    `sketched_parameters` lists them.

    Args:
      loss: `(params, batch, key) -> losses[n]` that treats units separately, or their mean.
      key: typed, for the random signs; give all workers the same key.
      size: k; see `sketch_size`. For models of at most k parameters, rows are the gradients
        themselves, padded with zeros.
      has_aux: whether the loss returns auxiliary data too, as in `jax.value_and_grad`. That of all
        units is stacked, leaves [B, ...].

    Returns:
      `(params, batch, key, scale=None) -> (losses float32[B], mean gradient, Rows of size B)` for
      batches with leaves [B, ...]; with `has_aux` (losses, aux) in place of losses. The rows are
      float32[B, k]: build the order's state with `order.init(key, jnp.zeros(k))`. With a `scale`,
      from `scale_of(..., leaves=sketched_parameters(...))`, they are sketches of the gradients
      times the scale, at the same cost.

    Raises:
      ValueError: if size is below 1; while tracing, as `per_example`.

    Examples:
      >>> import jax, jax.numpy as jnp, ordering
      >>> loss = lambda w, batch, key: jnp.tanh(jnp.square(batch @ w).sum(-1))
      >>> gradients = ordering.sketched(loss, jax.random.key(0), size=64)
      >>> losses, mean, rows = gradients(jnp.ones((90, 70)), jnp.eye(3, 90), jax.random.key(1))
      >>> mean.shape, rows.tree.shape
      ((90, 70), (3, 64))

    References:
      Cooper et al., Coordinating Distributed Example Orders for Provably Accelerated Training,
      2023, https://arxiv.org/abs/2302.00845
      Pham, Pagh, Fast and Scalable Polynomial Kernels via Explicit Feature Maps, 2013,
      https://doi.org/10.1145/2487575.2487591
    """
    size, sketch_key = check_whole("size", size, 1, MOST), check_key(key)
    of_one = loss_alone(loss, has_aux)

    @signed_as(loss)
    def gradients(params, batch, key, scale=None):
        if tree_size(params) <= size:
            kept = sketch(sketch_key, size=size)

            def to_sketch(g):
                if scale is None:
                    return kept(g)
                return kept(jax.tree.map(times, g, whole_scale(scale, params)))

            return per_example(loss, has_aux=has_aux, to_sketch=to_sketch)(params, batch, key)
        units, keys = units_of(params, batch, key)
        example = jax.tree.map(lambda x: x[0], batch)
        plan, program = _analyse(of_one, varying(params, batch), example, keys[0], size)
        maps = maps_of(plan, sketch_key)
        if scale is not None:
            maps = scaled_maps(plan, maps, params, varying(scale, batch))

        def total(params, zeros):
            params = varying(params, batch)  # typed as varying over devices, like the batch
            losses, aux = jax.vmap(functools.partial(program, params, maps))(zeros, batch, keys)
            return jnp.mean(losses), (losses, aux)

        zeros = varying(jnp.zeros((units, size)), batch)
        (_, (losses, aux)), (mean, found) = jax.value_and_grad(total, (0, 1), has_aux=True)(
            params, zeros
        )
        losses = losses.astype(jnp.float32)
        return (losses, aux) if has_aux else losses, mean, Rows.of(units * found)

    return gradients


def sketched_parameters(
    loss: Callable, params: PyTree, batch: PyTree, key: Key[Array, ""], *, size: int = SIZE
) -> list[Leaf]:
    """How `sketched` treats every parameter. Nothing is computed.

    Args:
      loss, params, batch, key: as for `sketched` and the function it returns; shapes are enough.
      size: k.

    Returns:
      A `Leaf` for every parameter, in the order of `jax.tree.leaves`.

    Examples:
      >>> import jax, jax.numpy as jnp, ordering
      >>> loss = lambda w, batch, key: jnp.square(batch @ w).sum(-1)
      >>> (leaf,) = ordering.sketched_parameters(
      ...     loss, jnp.ones((90, 70)), jnp.ones((3, 90)), jax.random.key(0), size=64)
      >>> leaf.how, leaf.why
      ('sketched', 'product')
    """
    check_params(params)
    leading_size(batch, "the batch", "Pass arrays [B, ...], or their shapes.")
    size = check_whole("size", size, 1, MOST)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    params, example, key = jax.eval_shape(lambda *a: a, params, example, key)
    return _analyse(loss_alone(loss, False), params, example, key, size)[0]


def _analyse(of_one, params, example, key, size):
    """(plan, `(params, maps, s, example, key) -> (loss, aux)`) for a loss of one example."""

    def one(params, example, key):
        return of_one(params, jax.tree.map(lambda x: x[None], example), key)

    leaves, tree = jax.tree.flatten(params)
    flat_example, example_tree = jax.tree.flatten(example)
    closed, found = jax.make_jaxpr(
        lambda leaves, rest, key: one(
            jax.tree.unflatten(tree, leaves), jax.tree.unflatten(example_tree, rest), key
        ),
        return_shape=True,
    )(leaves, flat_example, key)
    results = jax.tree.structure(found)
    plan = trace.plan_of(closed, params, (leaves, flat_example, key), size)

    def program(params, maps, s, example, key):
        own = [
            copied(value, s, of) if leaf.how == "copied" else trace.entering(i, value)
            for i, (leaf, of, value) in enumerate(
                zip(plan, maps, jax.tree.leaves(params), strict=True)
            )
        ]
        site = functools.partial(site_of, plan, maps, s)
        hooks = Hooks(site, lambda param, name: None)
        own += [*jax.tree.leaves(example), key]
        found = trace.walk(closed.jaxpr, closed.consts, own, hooks)
        return jax.tree.unflatten(results, found)

    return plan, program


# What is added to the backward pass where a parameter is used. Arrays are passed as `data` because
# differentiation rules must not close over traced values.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(sketch_of_cotangent: Callable, y, s, data):
    # s is zero; y must not be shared by units whose cotangents differ.
    return y + s[0].astype(y.dtype)


def _tap_forward(sketch_of_cotangent, y, s, data):
    return _tap(sketch_of_cotangent, y, s, data), data


def _tap_backward(sketch_of_cotangent, data, dy):
    return dy, sketch_of_cotangent(dy, *data), None


_tap.defvjp(_tap_forward, _tap_backward)


def copied(value: Array, s: Float32[Array, "k"], of: Map) -> Array:
    """A parameter as seen by this unit alone, so that its gradient can be sketched."""
    size = s.size

    def sketch_of(dw, seed, scale):
        return fold(times(as_float32(dw), scale), seed, size)

    return _tap(sketch_of, value, s, (of.seed, of.scale))


def site_of(plan: list[Leaf], maps: list[Map], s: Float32[Array, "k"], use: Use, w: Array) -> Array:
    leaf, of = plan[use.param.leaf], maps[use.param.leaf]
    if use.param.stack:
        of = of_slice(of, use.param.index, use.param.place)
    if leaf.how == "formed":
        return _formed(use._replace(param=None, data=None), w, s, (of.seed, of.scale), use.data)
    rule = functools.partial(_of_product, use._replace(param=None, data=None), leaf, s.size)
    return _tap(rule, use.function(w, *use.data), s, (of.left, of.right, *use.data))


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
    w, s, (seed, scale), data = kept
    if use.kind == "product":
        gradient, to_data = data[0].T @ dy, (dy @ w.T,)
    else:
        _, pull = jax.vjp(use.function, w, *data)
        gradient, *to_data = pull(dy)
    dims = (*use.rows, *use.cols)
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    natural = as_float32(gradient).reshape([n for _, n in dims]).transpose(order)
    return gradient, fold(times(natural, scale), seed, s.size), None, tuple(to_data)


_formed.defvjp(_formed_forward, _formed_backward)
