"""Sketches of the gradients of single units, out of the ordinary backward pass.

The loss is walked (parameter_uses.py), and what every use of a parameter adds to the backward pass
is in parameter_sketches.py.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ordering import parameter_uses as uses_lib
from ordering.gradients import loss_alone, per_example
from ordering.parameter_sketches import Leaf, copied, leaf_of, maps_of, site_of, sketch_whole
from ordering.parameter_uses import Hooks
from ordering.rows import Rows, as_float32, tree_size
from ordering.sketches import SIZE, check_size, sketch, sketch_rows
from syncopate.plans.specs import varying


def sketched(
    loss: Callable, key: jax.Array, *, size: int = SIZE, has_aux: bool = False
) -> Callable:
    """Every unit has a gradient of its own, and none is formed: a sketch of each, by one backward.

    s_i = sum over parameters of P^T G_i Q / (p q)^(1/2), for the gradient G_i of unit i: as good as
    `sketch_rows(per_example(loss)(...))`, without its memory, in about the time of a plain step.
    Any loss of any library will do: its products, convolutions and look-ups are found by
    themselves. Where a parameter is used in another way, its gradient is formed for every unit;
    `sketched_parameters` lists these.

    Args:
      loss: `(params, batch, key) -> losses[n]` that treats units separately, or their mean.
      key: of the sketches, typed; one key gives all workers the same map.
      size: k; see `sketch_size`. Models of at most k parameters are not sketched: their rows are
        the gradients, padded.
      has_aux: whether the loss returns something beside, as in `jax.value_and_grad`; of every unit,
        leaves [B, ...].

    Returns:
      `(params, batch, key) -> (losses float32[B], mean gradient, Rows of size B)` for batches with
      leaves [B, ...]; with `has_aux` (losses, aux) in place of losses. The rows are float32[B, k]:
      build the order's state with `order.init(key, jnp.zeros(k))`.

    Raises:
      ValueError: if size is below 1.

    Example:
      >>> import jax, jax.numpy as jnp, ordering
      >>> loss = lambda w, batch, key: jnp.tanh(jnp.square(batch @ w).sum(-1))
      >>> gradients = ordering.sketched(loss, jax.random.key(0), size=64)
      >>> losses, mean, rows = gradients(jnp.ones((90, 70)), jnp.eye(3, 90), jax.random.key(1))
      >>> mean.shape, rows.tree.shape
      ((90, 70), (3, 64))

    References:
      Cooper et al., Coordinating Distributed Example Orders for Provably Accelerated Training,
      2023, https://arxiv.org/abs/2302.00845
    """
    check_size(size)

    def gradients(params, batch, batch_key):
        if tree_size(params) <= size:
            found, mean, rows = per_example(loss, has_aux=has_aux)(params, batch, batch_key)
            return found, mean, sketch_rows(rows, sketch(key, size=size))
        units = jax.tree.leaves(batch)[0].shape[0]
        keys = jax.random.split(batch_key, units)
        example = jax.tree.map(lambda x: x[0], batch)
        of_one = loss_alone(loss, has_aux)
        plan, program = _analyse(of_one, varying(params, batch), example, keys[0], size)
        maps = maps_of(plan, params, key, size)

        def total(params, zeros):
            params = varying(params, batch)  # what devices differ in is of the type of the data
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
    loss: Callable, params, batch, key: jax.Array, *, size: int = SIZE
) -> list[Leaf]:
    """How `sketched` treats every parameter; nothing is computed.

    Args:
      loss, params, batch, key: as of `sketched` and what it returns; shapes will do.
      size: k.

    Returns:
      A `Leaf` for every parameter, in the order of `jax.tree.leaves`.

    Example:
      >>> import jax, jax.numpy as jnp, ordering
      >>> loss = lambda w, batch, key: jnp.square(batch @ w).sum(-1)
      >>> (leaf,) = ordering.sketched_parameters(
      ...     loss, jnp.ones((90, 70)), jnp.ones((3, 90)), jax.random.key(0), size=64)
      >>> leaf.how, leaf.why
      ('sketched', 'product')
    """
    shapes = jax.eval_shape(lambda *a: a, params, _first(batch), key)
    return _analyse(loss_alone(loss, False), *shapes, size)[0]


def sketch_of(loss: Callable, params, batch, key: jax.Array, *, size: int = SIZE) -> Callable:
    """The map by which `sketched(loss, key)` sketches, for gradients that are there.

    Args:
      as of `sketched`; params, batch: shapes will do.

    Returns:
      `tree -> float32[k]`.
    """
    plan = sketched_parameters(
        loss, params, batch, jax.eval_shape(lambda: jax.random.key(0)), size=size
    )
    maps = maps_of(plan, params, key, size)

    def apply(tree):
        return sum(
            sketch_whole(leaf, of, as_float32(g), size)
            for leaf, of, g in zip(plan, maps, jax.tree.leaves(tree), strict=True)
        )

    return apply


def _first(batch):
    """The shapes of one unit."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)


def _analyse(of_one, params, example, key, size):
    """(plan, `(params, maps, s, example, key) -> (loss, aux)`), of a loss of one example."""

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
    plan = _plan(closed, params, (leaves, flat_example, key), size)

    def program(params, maps, s, example, key):
        own = [
            copied(value, s, of) if leaf.how == "copied" else uses_lib.entering(i, value)
            for i, (leaf, of, value) in enumerate(
                zip(plan, maps, jax.tree.leaves(params), strict=True)
            )
        ]
        site = functools.partial(site_of, plan, maps, s)
        hooks = Hooks(site, lambda param, name: None)
        found = uses_lib.walk(closed, [*own, *jax.tree.leaves(example), key], hooks)
        return jax.tree.unflatten(results, found)

    return plan, program


def _plan(closed, params, args, size) -> list[Leaf]:
    """What becomes of every parameter, from a walk that notes all uses."""
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    shapes = [jnp.shape(leaf) for leaf in args[0]]
    seen = [[] for _ in shapes]
    unknown = [[] for _ in shapes]

    def note(use, w):
        seen[use.param.leaf].append(use._replace(data=None, param=use.param._replace(value=None)))
        return use.function(w, *use.data)

    def run(leaves, rest, key):
        own = [uses_lib.entering(i, value) for i, value in enumerate(leaves)]
        hooks = Hooks(note, lambda param, name: unknown[param.leaf].append(name))
        return uses_lib.walk(closed, [*own, *rest, key], hooks)

    jax.eval_shape(run, *args)
    return [leaf_of(*each, size) for each in zip(paths, shapes, seen, unknown, strict=True)]
