"""Sketches of the gradients of single units, out of the ordinary backward pass.

The loss is walked (trace.py). Every unit gets a sketch of zeros s[k] that it does not depend on.
Where a parameter w meets data, y = x w, the backward pass hands s the cotangents
P_f^T (x^T dy) Q_f = (x P_f)^T (dy Q_f), with fixed random signed sums P_f and Q_f: the gradient
with respect to s is then the sum over all parameters of the sketches of this unit's gradient, and
the gradients themselves are never formed.
"""

import functools
import math
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from ordering import trace
from ordering.base import check_key
from ordering.gradients import check_params, loss_alone, per_example, signed_as, units_of
from ordering.maps import maps_of, scaled_maps, times
from ordering.rows import Rows, leading_size, tree_size
from ordering.scaling import whole_scale
from ordering.sketch import MOST, SIZE, sketch
from ordering.taps import added_up, copied, site_of, with_terms, zeros_of
from ordering.trace import Leaf
from ordering.uses import Hooks, raw
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
    `sketched_parameters` lists them, and of large ones that must be copied a UserWarning tells.

    A number that all units share, such as a penalty on the parameters, costs one gradient for all
    of them. It is in the mean gradient and in every row, as it is in rows of `per_example`: it
    cancels in the differences of pairs, and in GraB, which takes off the mean. Rules of
    `jax.custom_vjp` are treated as by `per_example`.

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
        plan, program, of_terms = _analyse(of_one, varying(params, batch), example, keys[0], size)
        _warn_of_copies(plan.leaves, units)
        maps = maps_of(plan.leaves, sketch_key)
        if scale is not None:
            maps = scaled_maps(plan.leaves, maps, params, varying(scale, batch))

        def total(params, zeros):
            params = varying(params, batch)  # typed as varying over devices, like the batch
            losses, aux = jax.vmap(functools.partial(program, params, maps))(zeros, batch, keys)
            return jnp.mean(losses), (losses, aux)

        zeros = varying(zeros_of(plan, units, size), batch)
        (_, (losses, aux)), (mean, found) = jax.value_and_grad(total, (0, 1), has_aux=True)(
            params, zeros
        )
        of_each = of_terms(varying(params, batch), example, keys[0], units)
        found = with_terms(plan, maps, found, of_each)
        losses, rows = losses.astype(jnp.float32), units * added_up(maps, found)
        return (losses, aux) if has_aux else losses, mean, Rows.of(rows)

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
    params, example, key = jax.eval_shape(
        lambda params, batch, key: (params, jax.tree.map(lambda x: x[0], batch), key),
        params, batch, key,
    )  # fmt: skip
    return _analyse(loss_alone(loss, False), params, example, key, size)[0].leaves


def _analyse(of_one, params, example, key, size):
    """For a loss of one example: its plan, `(params, maps, zeros, example, key) -> (loss, aux)`,
    and the gradients of what all units share.
    """

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

    def program(params, maps, zeros, example, key):
        own = [
            trace.entering(i, value, copied(i, value, maps[i], zeros))
            if leaf.how == "copied"
            else trace.entering(i, value)
            for i, (leaf, value) in enumerate(
                zip(plan.leaves, jax.tree.leaves(params), strict=True)
            )
        ]
        terms = trace.Terms([])

        def term(shared):
            own = zeros.terms[terms.place(shared)].astype(shared.value.dtype)
            return shared.value + own.reshape(shared.value.shape)

        site = functools.partial(site_of, plan.leaves, maps, zeros)
        hooks = Hooks(site, term=term)
        own += [*jax.tree.leaves(example), key]
        loss, *aux = trace.walk(closed.jaxpr, closed.consts, own, hooks)
        found = [trace.data_of(loss, "the result", hooks), *map(raw, aux)]
        return jax.tree.unflatten(results, found)

    def of_terms(params, example, key, units):
        rest = [*jax.tree.leaves(example), key]
        return trace.gradients_of_terms(closed, jax.tree.leaves(params), rest, plan, units)

    return plan, program, of_terms


def _warn_of_copies(leaves, units):
    large = [leaf for leaf in leaves if leaf.how == "copied" and not leaf.small]
    if large:
        copies = units * sum(math.prod(leaf.shape) for leaf in large)
        ratio = copies / sum(math.prod(leaf.shape) for leaf in leaves)
        names = ", ".join(f"params{leaf.name} ({leaf.why})" for leaf in large)
        warnings.warn(
            f"sketched copies {names} for each of {units} units: the copies have {ratio:.3g} times "
            "as many numbers as all parameters, and a step takes longer accordingly. Use them in "
            "products, convolutions or look-ups with data, or pass in what is made of them by "
            "jax.lax.stop_gradient; ordering.sketched_parameters lists all uses.",
            stacklevel=4,
        )
