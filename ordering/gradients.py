"""What a training step needs of a loss: losses, the mean gradient, and the rows for an order.

A loss is a function `(params, batch, key) -> losses` with one loss per example, or the mean loss of
the batch; one that draws nothing is a function of (params, batch). The functions here turn it into
`(params, batch, key=None) -> (losses[B], mean gradient, rows)`: a row is the gradient of a unit,
an example or a group of examples that is visited together. With `has_aux`, as in
`jax.value_and_grad`, the loss returns `(losses, aux)`, and so does the function instead of losses.
"""

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from ordering import trees
from ordering.sketches import walk
from ordering.sketches.linear import sketch_rows
from syncopate import plans
from syncopate.mesh import alike, names_of


def per_example_grads(
    loss: Callable,
    *,
    has_aux: bool = False,
    to_sketch: Callable[[PyTree], Array] | None = None,
    in_turn: bool = False,
) -> Callable:
    """One unit and one gradient per example.

    Gradients are computed side by side, by vmap, in memory for B gradients and the activations of
    B examples; or in turn, where memory is short or a single example keeps the device busy: with
    the activations of one example, and with `to_sketch` only two gradients at a time.

    The mean gradient is that of the mean loss, also by rules of `jax.custom_vjp` that are not
    linear, such as clipping: the row of unit i is B times the gradient of its part in the mean,
    loss_i / B. A rule gets what belongs to one example; one of parameters alone gets the sum over
    all examples for the mean gradient, at the cost of a second backward pass.

    Args:
      loss: `(params, batch, key) -> losses[n]` that treats examples separately (no BatchNorm;
        `check_separable` checks this).
      has_aux: whether the loss returns auxiliary data too, which is stacked, leaves [B, ...].
      to_sketch: from `make_sketch`; rows are then sketches, float32[B, k], as by `sketch_rows`.
      in_turn: whether to compute one gradient after another, by `jax.lax.scan`.

    Returns:
      `(params, batch, key=None) -> (losses float32[B], mean gradient, rows)` for batches with
      leaves [B, ...]: the mean gradient is a tree like params, and the rows are the gradients of
      the B units, leaves [B, ...].

    Raises:
      ValueError: while tracing, for a batch without a common leading axis or split over an explicit
        axis of a mesh, for a key that the loss does not take or lacks, or for other losses.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> loss = lambda w, batch: 0.5 * jnp.square(batch @ w)
      >>> losses, mean, rows = ordering.per_example_grads(loss)(jnp.ones(2), jnp.eye(2))
      >>> mean.tolist(), rows.shape
      ([0.5, 0.5], (2, 2))
    """
    if to_sketch is not None:
        plans.check_function("to_sketch", to_sketch, "gradient")
    of_alone = loss_alone(loss, has_aux)
    row_of = to_sketch or (lambda gradient: gradient)

    @signed_as(loss)
    def gradients(params, batch, key=None):
        size, keys = units_of(params, batch, key)
        first = jax.tree.map(lambda x: x[:1], batch), None if keys is None else keys[0]
        program, of_one = walk.traced(of_alone, params, *first)
        has_rule = walk.holds(program.jaxpr, walk.RULE)
        seed = size if has_rule else 1  # a rule need not be linear: it gets what it gets of a mean

        def part(params, unit):
            example, example_key = unit
            alone = jax.tree.map(lambda x: x[None], example)
            loss, aux = of_one(params, alone, example_key)
            return loss / seed, (loss, aux)

        of_part = walk.apart(jax.value_and_grad(part, has_aux=True))

        def one(unit):
            (_, found), gradient = of_part(params, unit)
            return found, jax.tree.map(lambda g: g * seed, gradient) if has_rule else gradient

        def add(total, unit):
            (value, aux), gradient = one(unit)
            total = jax.tree.map(lambda t, g: t + trees.as_float32(g), total, gradient)
            return total, (value, aux, row_of(gradient))

        units = batch, keys
        if in_turn:
            start = alike(trees.zeros_like(params), params)
            total, (losses, aux, rows) = jax.lax.scan(add, start, units)
            if to_sketch:
                trees.check_sketches(rows)
            mean = jax.tree.map(lambda t, p: (t / size).astype(jnp.result_type(p)), total, params)
        else:
            (losses, aux), tree = jax.vmap(one)(units)
            mean = jax.tree.map(trees.mean_of, tree)
            rows = sketch_rows(tree, to_sketch) if to_sketch else tree
        if has_rule and walk.has_rule_of_parameters(program, params, first):
            # The rule gets the sum over all examples, and must not be used of each alone.
            total = lambda p: jnp.sum(jax.vmap(functools.partial(part, p))(units)[0])  # noqa: E731
            mean = jax.grad(total)(params)
        losses = losses.astype(jnp.float32)
        return (losses, aux) if has_aux else losses, mean, rows

    return gradients


def loss_alone(loss: Callable, has_aux: bool) -> Callable:
    """`(params, batch, key) -> (loss of the batch's only example, aux or None)`."""

    of_batch = checked_loss(loss, has_aux)

    def one(params, alone, key):
        losses, aux = of_batch(params, alone, key)
        if jnp.size(losses) != 1:
            raise ValueError(
                f"the losses of a batch of one example have the shape {jnp.shape(losses)}: return "
                "one loss per example, shape [n], for instance the mean over its other axes."
            )
        return jnp.reshape(losses, ()), aux

    return one


def checked_loss(loss: Callable, has_aux: bool) -> Callable:
    """`(params, batch, key) -> (losses, aux or None)`; raises ValueError for other results."""
    try:
        plans.check_function("loss", loss, "params", "batch")
    except ValueError:
        plans.check_function("loss", loss, "params", "batch", "key")

    def run(params, batch, key):
        given = {"params": params, "batch": batch} | ({} if key is None else {"key": key})
        what = "without a key" if key is None else "with a key"
        plans.check_function(f"{what}, the loss", loss, *given)
        found = loss(*given.values())
        if not has_aux:
            losses, aux = found, None
        elif isinstance(found, tuple | list) and len(found) == 2:
            losses, aux = found
        else:
            raise ValueError(
                f"the loss returned a {type(found).__name__}: with has_aux=True return a tuple "
                "(losses, aux)."
            )
        is_array = isinstance(losses, jax.Array | np.ndarray | np.generic | float)
        what = jax.typeof(losses).str_short() if is_array else f"a {type(losses).__name__}"
        is_real = is_array and jnp.issubdtype(jnp.result_type(losses), jnp.floating)
        if not (is_real and jnp.size(losses)):
            raise ValueError(
                f"the loss returned {what} as losses: return real numbers, one for each example, "
                "or their mean. If it returns (losses, aux), pass has_aux=True."
            )
        return losses, aux

    return run


def units_of(
    params: PyTree, batch: PyTree, key: Key[Array, ""] | None
) -> tuple[int, Key[Array, "B"] | None]:
    """(B, one key per unit or None) of a batch; raises ValueError if a unit has no gradient."""
    check_params(params)
    size = size_of(batch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if axes := names_of(jax.typeof(leaf).sharding.spec[0]):
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is split over {list(axes)}, explicit axes, "
                "along which JAX takes no gradients of single examples: make the mesh with "
                "axis_types of jax.sharding.AxisType.Auto, run the step in jax.sharding.auto_axes, "
                "jax.shard_map or local_opt.map_workers, or use ordering.microbatch_grads."
            )
    try:
        return size, None if key is None else jax.random.split(key, size)
    except (TypeError, ValueError):
        plans.check_key(key)
        raise


def size_of(batch: PyTree) -> int:
    """B of a batch with leaves [B, ...]; raises ValueError for any other."""
    act = "For a single example add the axis, as x[None]."
    return trees.leading_size(batch, "the batch", act)


def check_params(params: PyTree) -> None:
    """Raises ValueError unless all leaves are floating arrays, of which a loss has a gradient."""
    for leaf in jax.tree.leaves(params):
        trees.check_real(leaf if hasattr(leaf, "dtype") else np.asarray(leaf), jnp.floating)


def signed_as(loss: Callable) -> Callable[[Callable], Callable]:
    """Gives a function of (params, batch, key, ...) a loss's signature, name and docstring."""

    def decorate(function):
        ours = inspect.signature(function)
        try:
            named = list(inspect.signature(loss).parameters.values())[:3]
        except (TypeError, ValueError):  # some callables have no signature
            named = []
        own = list(ours.parameters.values())[len(named) :]
        taken = {p.name for p in named} & {p.name for p in own}
        if len(named) > 1 and not taken and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in named):
            defaults = inspect.Parameter.empty, inspect.Parameter.empty, None
            named = [p.replace(default=d) for p, d in zip(named, defaults, strict=False)]
            ours = inspect.Signature([*named, *own])

        def signed(*args, **kwargs):
            given = ours.bind(*args, **kwargs)
            return function(*given.args, **given.kwargs)  # what follows a key that is left out

        kept = ("__module__", "__name__", "__qualname__", "__doc__")
        named_as = loss if hasattr(loss, "__name__") else function
        functools.update_wrapper(signed, named_as, assigned=kept, updated=())
        vars(signed)["__signature__"] = ours
        return signed

    return decorate


def microbatch_grads(loss: Callable, *, has_aux: bool = False) -> Callable:
    """One unit for the worker's whole microbatch: B = 1, at the cost of a plain gradient.

    If the loop computes the gradient anyway, observe `jax.tree.map(lambda g: g[None], grad)`.

    Args:
      loss: `(params, batch, key) -> losses[n]`, or their mean.
      has_aux: whether the loss returns auxiliary data too.

    Returns:
      `(params, batch, key=None) -> (mean loss float32[1], its gradient, rows)` for batches with
      leaves [n, ...]: the rows are the gradient with leaves [1, ...].

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> loss = lambda w, batch: 0.5 * jnp.square(batch @ w)
      >>> losses, mean, rows = ordering.microbatch_grads(loss)(jnp.ones(2), jnp.eye(2))
      >>> mean.tolist(), rows.shape
      ([0.5, 0.5], (1, 2))
    """

    of_batch = checked_loss(loss, has_aux)

    def mean(params, batch, key):
        losses, aux = of_batch(params, batch, key)
        return jnp.mean(losses), aux

    @signed_as(loss)
    def gradients(params, batch, key=None):
        check_params(params)
        (value, aux), grad = jax.value_and_grad(mean, has_aux=True)(params, batch, key)
        losses = value[None].astype(jnp.float32)
        of_unit = jax.tree.map(lambda g: g[None], grad)
        return (losses, aux) if has_aux else losses, grad, of_unit

    return gradients


def group_loss(loss: Callable, *, has_aux: bool = False) -> Callable:
    """A loss of groups, the mean over the examples of each: every group is a unit.

    Args:
      loss: `(params, batch, key) -> losses[n]`, or their mean; it may mix the examples of a group.
      has_aux: whether the loss returns auxiliary data too, as the result then does.

    Returns:
      `(params, batch, key=None) -> losses[B]` for leaves [B, n, ...]: B groups per step,
      for `per_example_grads` and `sketched_grads`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> loss = ordering.group_loss(lambda w, batch: batch @ w)
      >>> loss(jnp.ones(2), jnp.ones((4, 8, 2))).tolist()
      [2.0, 2.0, 2.0, 2.0]
    """

    of_batch = checked_loss(loss, has_aux)

    @signed_as(loss)
    def of_groups(params, batch, key=None):
        def of_group(group):
            losses, aux = of_batch(params, group, key)
            return (jnp.mean(losses), aux) if has_aux else jnp.mean(losses)

        trees.leading_size(batch, "the groups", "Pass a batch with leaves [B, n, ...].")
        return jax.vmap(of_group)(batch)

    return of_groups


def check_separable(
    loss: Callable, params: PyTree, batch: PyTree, key: Key[Array, ""] | None = None
) -> None:
    """Raises ValueError for a loss that mixes the examples of a batch (BatchNorm, contrastive).

    Args:
      loss: `(params, batch, key) -> losses[n]`.
      params, batch, key: as for the loss; two or three examples are enough.

    Raises:
      ValueError: if the loss of an example depends on the others, or is not one per example.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> loss = lambda w, batch: jnp.cumsum(batch @ w)
      >>> ordering.check_separable(loss, jnp.ones(2), jnp.eye(2))
      Traceback (most recent call last):
      ...
      ValueError: the loss of example 1 is 2 in a batch of 2 and 1 alone: ...
    """
    check_params(params)
    size, batch = size_of(batch), jax.device_get(batch)  # what NumPy cuts need not be compiled
    of_batch = jax.jit(lambda batch: checked_loss(loss, False)(params, batch, key)[0])
    together = np.asarray(of_batch(batch), np.float64)
    if together.shape != (size,):
        raise ValueError(
            f"the losses of a batch of {size} examples have the shape {together.shape}: return one "
            "loss per example."
        )
    for i, within in enumerate(together):
        alone = jax.tree.map(lambda x: x[i : i + 1], batch)  # noqa: B023
        copies = jax.tree.map(lambda x: np.repeat(x, size, axis=0), alone)
        for others in (alone, copies):
            found = np.asarray(of_batch(others), np.float64)[i % len(jax.tree.leaves(others)[0])]
            if not np.isclose(found, within, rtol=1e-3, atol=1e-3, equal_nan=True):
                raise ValueError(
                    f"the loss of example {i} is {within:.6g} in a batch of {size} and {found:.6g} "
                    "alone: the model mixes the examples, as BatchNorm does. Use "
                    "ordering.microbatch_grads or grouped, or a normalisation that treats them "
                    "separately."
                )
