"""Losses, the mean gradient, and the rows for an order, from a loss function.

A loss is a function `(params, *batch) -> losses` with one loss per example, or the mean loss of the
batch. If it draws random numbers, it also has a parameter `key`. The functions here turn it into
`(params, *batch, key=None) -> (losses[B], mean gradient, rows)`. A row is the gradient of a unit:
an example, or a group of examples that is visited together. With `has_aux`, as in
`jax.value_and_grad`, the loss returns `(losses, aux)`, and the function returns this for losses.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import Array, Key, PyTree

from ordering import trees
from ordering.gradients.convolution import holds, split_safe
from ordering.gradients.interpret import RULE, has_rule_of_parameters
from ordering.gradients.linear import hash_signs
from syncopate import plans
from syncopate.mesh import is_key, names_of, varying_axes, varying_like, varying_over

DRAWS = ("random_bits", "threefry2x32", "rng_bit_generator")  # the primitives


def per_example_grads(
    loss: Callable,
    *,
    has_aux: bool = False,
    to_sketch: Callable[[PyTree], Array] | None = None,
    in_turn: bool = False,
) -> Callable:
    """One unit and one gradient per example.

    By default vmap computes all gradients at once, which takes memory for B gradients and the
    activations of B examples. With `in_turn` they are computed one by one, with the activations of
    one example, and with `to_sketch` only two gradients at a time. Use it if memory is short or one
    example keeps the device busy, and under `jax.jit`: without, every call compiles the loop anew.

    The mean gradient is that of the mean loss. With nonlinear rules of `jax.custom_vjp`, such as
    clipping, the row of unit i is B times the gradient of its part in the mean, loss_i / B. A rule
    gets the cotangent of one example. A rule of parameters alone gets, for the mean gradient, the
    sum over all examples, at the cost of a second backward pass.

    Args:
      loss: `(params, *batch) -> losses[n]` that treats examples separately (no BatchNorm;
        `check_separable` checks this). If the step is given a key, the loss is called with `key=`
        and needs a parameter of this name.
      has_aux: whether the loss returns auxiliary data too. They are stacked from batches of one
        example: an array [n, ...] for a batch of n becomes [B, 1, ...], a number [B].
      to_sketch: from `make_sketch`; rows are then sketches, float32[B, k].
      in_turn: whether to compute one gradient after another, by `jax.lax.scan`.

    Returns:
      `(params, *batch, key=None) -> (losses float32[B], mean gradient, rows)` for any number of
      trees with leaves [B, ...], such as x and y. The mean gradient is a tree like params, and the
      rows are the gradients of the B units, leaves [B, ...]. The key is split, one for each unit.

    Raises:
      ValueError: while tracing, for a batch without a common leading axis or split over an explicit
        axis of a mesh. Also if the loss lacks a parameter for the key or the step a key, for losses
        of another shape, or for a primitive without a rule for vmap, such as `jax.lax.ragged_dot`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> loss = lambda w, x, y: 0.5 * jnp.square(x @ w - y)
      >>> step = ordering.per_example_grads(loss)
      >>> losses, mean, rows = step(jnp.ones(2), jnp.eye(2), jnp.zeros(2))
      >>> mean.tolist(), rows.shape
      ([0.5, 0.5], (2, 2))
    """
    of_alone = loss_alone(loss, has_aux)
    row_of = (lambda gradient: gradient) if to_sketch is None else _checked_sketch(to_sketch)

    def gradients(params, *batch, key=None):
        size, keys = units_of(params, batch, key)
        units, first = (batch, keys), first_of((batch, keys))
        params, over_devices = of_this_device(params, axes_of_loss(of_alone, params, first))
        program, of_one = _traced(of_alone, params, first)
        has_rule = holds(program.jaxpr.eqns, RULE)
        seed = size if has_rule else 1  # a nonlinear rule gets the cotangent it has in a mean

        def part(params, unit):
            loss, aux = of_one(params, unit)
            return loss / seed, (loss, aux)

        of_part = split_safe(jax.value_and_grad(part, has_aux=True))

        def one(unit):
            (_, loss_and_aux), gradient = of_part(params, unit)
            gradient = jax.tree.map(lambda g: g * seed, gradient) if has_rule else gradient
            return loss_and_aux, gradient

        def add(total, unit):
            (value, aux), gradient = one(unit)
            total = jax.tree.map(lambda t, g: t + trees.as_wide(g), total, gradient)
            return total, (value, aux, row_of(gradient))

        if in_turn:
            start = jax.tree.map(lambda p: jnp.zeros_like(trees.as_wide(p)), params)
            start = varying_like(start, params)
            total, (losses, aux, rows) = jax.lax.scan(add, start, units)
            if to_sketch:
                trees.check_sketches(rows)
            mean = jax.tree.map(lambda t, p: (t / size).astype(p.dtype), total, params)
        else:
            with refuse_vmap("pass in_turn=True", one, first):
                (losses, aux), tree = jax.vmap(one)(units)
            mean = jax.tree.map(trees.mean_of, tree)
            rows = _sketches(tree, row_of) if to_sketch else tree
        if has_rule and has_rule_of_parameters(program, params):
            # The rule gets the sum over all examples, and must not be applied to each alone.
            again = jax.tree.map(lambda x: jax.random.clone(x) if is_key(x) else x, units)
            total = lambda p: jnp.sum(jax.vmap(functools.partial(part, p))(again)[0])  # noqa: E731
            with refuse_vmap("use jax.custom_vjp only on values of an example", one, first):
                mean = jax.grad(total)(params)
        mean = over_devices(mean)
        losses = losses.astype(jnp.float32)
        return (losses, aux) if has_aux else losses, mean, rows

    return gradients


def _checked_sketch(to_sketch):
    """`to_sketch`, whose results are arrays; raises ValueError for others."""
    plans.check_function("to_sketch", to_sketch, "gradient")

    def run(gradient):
        sketch = to_sketch(gradient)
        for leaf in jax.tree.leaves(sketch):
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise ValueError(
                    f"to_sketch returned a {type(leaf).__name__}: let it return float32[k], like "
                    "the result of ordering.make_sketch."
                )
        return sketch

    return run


def _sketches(rows, to_sketch):
    if trees.check_gradients(rows) == 1:  # without vmap, which would change the layout
        sketch = to_sketch(jax.tree.map(lambda g: g[0], rows))
        sketches = jax.tree.map(lambda x: x[None], sketch)
    else:
        sketches = jax.vmap(to_sketch)(rows)
    trees.check_sketches(sketches)
    return sketches


def first_of(units: PyTree) -> PyTree:
    """The shapes of the first unit; of values, a key would be used twice."""
    shapes = jax.eval_shape(lambda units: jax.tree.map(lambda x: x[0], units), units)
    mesh = jax.sharding.get_abstract_mesh()

    def on_mesh(x):  # JAX leaves it out over automatic axes, and then refuses axes that it has
        return x.update(sharding=jax.NamedSharding(mesh, jax.P())) if x.sharding is None else x

    return jax.tree.map(on_mesh, shapes) if mesh.manual_axes else shapes


def axes_of_loss(of_one: Callable, params: PyTree, first: PyTree) -> frozenset[str]:
    """The manual axes over which the loss of one example is typed as varying."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return frozenset()
    return varying_axes(jax.eval_shape(of_one, params, first)[0])


def of_this_device(params: PyTree, axes: frozenset[str]) -> tuple[PyTree, Callable]:
    """The parameters for rows, and the function that makes a mean of rows that of `jax.grad`.

    Under `jax.shard_map` with check_vma, the gradient of a value that is equal on all devices is
    the sum over the devices. Rows are of this device alone, so the parameters must be typed as
    varying over the axes of the loss.
    """
    vary = lambda params: jax.tree.map(lambda x: varying_over(x, axes), params)  # noqa: E731
    typed, pull = jax.vjp(vary, jax.tree.map(jnp.asarray, params))
    return typed, lambda mean: pull(mean)[0]


def _traced(function, *args):
    """The jaxpr of a function for arguments like these, and a function that evaluates it."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)

    def run(*args):
        values = core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    return closed, run


@contextlib.contextmanager
def refuse_vmap(act: str, one: Callable, *args: PyTree) -> Iterator[None]:
    """Raises ValueError, with the advice `act`, for a primitive without a rule for vmap.

    `one` of these arguments is computed without vmap: what fails there as well is JAX's error.
    """
    try:
        yield
    except NotImplementedError as error:
        jax.eval_shape(one, *args)
        raise ValueError(
            f"JAX has no rule for gradients of examples side by side ({error}): {act}."
        ) from error


def example_of(unit: PyTree) -> PyTree:
    """The batch with only this example."""
    return jax.tree.map(lambda x: x[None], unit)


def loss_alone(loss: Callable, has_aux: bool) -> Callable:
    """`(params, (example, key)) -> (its loss, aux or None)`."""

    of_batch = checked_loss(loss, has_aux)

    def one(params, unit):
        example, key = unit
        losses, aux = of_batch(params, example_of(example), key)
        if jnp.size(losses) != 1:
            raise ValueError(
                f"the losses of a batch of one example have the shape {jnp.shape(losses)}: return "
                "one loss per example, shape [n], for instance the mean over its other axes."
            )
        return jnp.reshape(losses, ()), aux

    return one


def checked_loss(loss: Callable, has_aux: bool) -> Callable:
    """`(params, batch, key) -> (losses, aux or None)`, where the batch is a tuple of trees.

    Raises ValueError for a loss with other arguments or results.
    """
    if not _takes(loss, inspect.Signature.bind_partial, "params", "batch"):
        name = getattr(loss, "__name__", f"a {type(loss).__name__}")
        raise ValueError(
            f"loss is {name}: pass a function of (params, *batch), or (params, *batch, key)."
        )

    def run(params, batch, key):
        _check_takes(loss, len(batch), key is not None)
        result = loss(params, *batch) if key is None else loss(params, *batch, key=key)
        if not has_aux:
            losses, aux = result, None
        elif isinstance(result, tuple | list) and len(result) == 2:
            losses, aux = result
        else:
            raise ValueError(
                f"the loss returned a {type(result).__name__}: with has_aux=True return a tuple "
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


def _takes(function, binds, *args, **kwargs):
    try:
        binds(inspect.signature(function), *args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a built-in function has no signature
        pass
    return True


def _check_takes(loss, count, keyed):
    """Raises ValueError unless a loss takes params, `count` trees, and a key if `keyed`."""
    named = {"key": None} if keyed else {}
    args = ["params", *(["batch"] if count == 1 else [f"batch[{i}]" for i in range(count)])]
    if not _takes(loss, inspect.Signature.bind, *args, **named):
        what = "with a key" if keyed else "without a key"
        name = getattr(loss, "__name__", f"a {type(loss).__name__}")
        raise ValueError(
            f"{what}, the loss is {name}: pass a function of ({', '.join([*args, *named])})."
        )


def units_of(
    params: PyTree, batch: tuple, key: Key[Array, ""] | None
) -> tuple[int, Key[Array, "B"] | None]:
    """(B, one key per unit or None) of a batch; raises ValueError if a unit has no gradient."""
    check_params(params)
    size = size_of(batch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(_alone(batch)):
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


def size_of(batch: tuple) -> int:
    """B of a batch, trees with leaves [B, ...]; raises ValueError for any other."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(_alone(batch)):
        if is_key(leaf) and not jnp.ndim(leaf):
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is a key, and keys are not examples: pass it "
                "as key=, or pass one for each example."
            )
    act = "For a single example add the axis, as x[None]."
    return trees.leading_size(_alone(batch), "the batch", act)


def _alone(batch):
    return batch[0] if len(batch) == 1 else batch


def check_params(params: PyTree) -> None:
    """Raises ValueError unless all leaves are floating arrays, which have gradients."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if callable(leaf):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is a function: pass the arrays alone, as "
                "eqx.partition(model, eqx.is_inexact_array)[0]."
            )
        trees.check_real(leaf if hasattr(leaf, "dtype") else np.asarray(leaf), jnp.floating)


def microbatch_grads(loss: Callable, *, has_aux: bool = False) -> Callable:
    """One unit for the worker's whole microbatch: B = 1, at the cost of a plain gradient.

    If the loop computes the gradient anyway, observe `jax.tree.map(lambda g: g[None], grad)`.

    Args:
      loss: `(params, *batch) -> losses[n]`, or their mean; with a key, as for `per_example_grads`.
      has_aux: whether the loss returns auxiliary data too.

    Returns:
      `(params, *batch, key=None) -> (mean loss float32[1], its gradient, rows)` for batches with
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

    def gradients(params, *batch, key=None):
        check_params(params)
        axes = axes_of_loss(lambda params, unit: mean(params, *unit), params, (batch, key))
        params, over_devices = of_this_device(params, axes)
        (value, aux), grad = jax.value_and_grad(mean, has_aux=True)(params, batch, key)
        losses = value[None].astype(jnp.float32)
        rows = jax.tree.map(lambda g: g[None], grad)
        return (losses, aux) if has_aux else losses, over_devices(grad), rows

    return gradients


def group_loss(loss: Callable, *, has_aux: bool = False) -> Callable:
    """A loss of groups, the mean over the examples of each group, which is then a unit.

    Args:
      loss: `(params, *batch) -> losses[n]`, or their mean; it may mix the examples of a group. With
        a key, as for `per_example_grads`.
      has_aux: whether the loss returns auxiliary data too; the result then returns them stacked.

    Returns:
      `(params, *batch, key=None) -> losses[B]` for leaves [B, n, ...]: B groups per step,
      for `per_example_grads` and `sketched_grads`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> loss = ordering.group_loss(lambda w, batch: batch @ w)
      >>> loss(jnp.ones(2), jnp.ones((4, 8, 2))).tolist()
      [2.0, 2.0, 2.0, 2.0]
    """

    of_batch = checked_loss(loss, has_aux)

    def of_groups(params, *batch, key=None):
        def of_group(group):
            losses, aux = of_batch(params, group, key)
            return (jnp.mean(losses), aux) if has_aux else jnp.mean(losses)

        act = "Pass a batch with leaves [B, n, ...]."
        trees.leading_size(_alone(batch), "the groups", act)
        return jax.vmap(of_group)(batch)

    return of_groups


def check_separable(
    loss: Callable, params: PyTree, *batch: PyTree, key: Key[Array, ""] | None = None
) -> None:
    """Raises ValueError for a loss that mixes the examples of a batch (BatchNorm, contrastive).

    Losses and gradients of the batch are compared with those of its examples alone, also beside the
    parameters, since a head of zeros hides what is below. A loss that returns its mean must return
    the mean of its examples' losses, which one that depends on their number or places does not.

    A loss that draws random numbers with the shape of the batch, such as a mask for dropout, cannot
    be checked; the error says so. Check it without the draws, as in evaluation. It is right in
    `per_example_grads`, which calls it with one example and a key at a time.

    Args:
      loss: `(params, *batch) -> losses[n]`, or their mean; or with a key.
      params, batch, key: as for the loss. Two or three examples are enough, if there are none of
        another kind, such as padding.

    Raises:
      ValueError: if the loss of an example depends on the others, is not finite alone, or is not
        one per example, or if the batch has one example only.

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
    params = jax.tree.map(jnp.asarray, params)
    size, batch = size_of(batch), jax.device_get(batch)  # slices of NumPy are not compiled
    if size == 1:
        raise ValueError("a batch of one example mixes none: pass two or three examples.")
    losses_of = lambda params, batch: checked_loss(loss, False)(params, batch, key)[0]  # noqa: E731
    program = jax.make_jaxpr(losses_of)(params, batch)
    shape = program.out_avals[0].shape
    if shape not in ((size,), ()):
        raise ValueError(
            f"the losses of a batch of {size} examples have the shape {shape}: return one loss per "
            "example, or their mean."
        )
    why, tolerance = _why_they_differ(program), _tolerance(program)
    compare = jax.jit(functools.partial(_compared, losses_of, size, shape))
    with jax.default_matmul_precision("highest"):
        at_params, beside = (jax.device_get(compare(params, batch, noise)) for noise in (0.0, 0.1))
    losses, alone, off, sizes = at_params
    _check_losses(losses, alone, {"rtol": 1e-3, "atol": 1e-3}, why)
    if np.isfinite(beside[0]).all():
        losses, alone, off, sizes = beside
        largest = np.max(np.abs(losses))
        _check_losses(losses, alone, {"rtol": tolerance, "atol": tolerance * largest}, why)
    if not (holds(program.jaxpr.eqns, RULE) and has_rule_of_parameters(program, params)):
        _check_gradients(params, off, sizes, tolerance, why)


def _compared(losses_of, size, shape, params, batch, noise):
    """The losses of a batch, those of its examples alone, and the norms by leaf of two gradients.

    First that of the difference between weighted sums of all gradients in a batch and alone, then
    those of the examples. With noise no layer is zero.
    """
    params = jax.tree.map(functools.partial(_noisy, noise), params)

    def weighted(params, batch, weights):
        losses = losses_of(params, batch)
        return jnp.sum(losses * weights.reshape(losses.shape).astype(losses.dtype)), losses

    def norms(tree):
        return jnp.stack([jnp.linalg.norm(jnp.ravel(trees.as_wide(g))) for g in tree])

    def add(total, unit):
        gradient, losses = gradient_of(params, *example_of(unit))
        each = jax.tree.leaves(gradient)
        return [t + g for t, g in zip(total, each, strict=True)], (losses.reshape(()), norms(each))

    gradient_of = jax.grad(weighted, has_aux=True)
    weights = np.linspace(0.5, 1.5, size) if shape else np.full(size, 1 / size)
    together, within = gradient_of(params, batch, jnp.asarray(weights if shape else 1.0))
    start = [-trees.as_wide(g) for g in jax.tree.leaves(together)]
    off, (alone, sizes) = jax.lax.scan(add, start, (batch, jnp.asarray(weights)))
    return within, alone, norms(off), jnp.linalg.norm(sizes, axis=0)


def _noisy(noise, p):
    signs = hash_signs(jnp.uint32(1), jnp.arange(p.size)).reshape(p.shape)
    return p + (noise * signs * jnp.maximum(jnp.std(p), 0.2)).astype(p.dtype)


def _check_losses(within, alone, near, why):
    """Raises ValueError unless the losses of a batch, or their mean, are those of its examples."""
    within, alone = np.asarray(within, np.float64), np.asarray(alone, np.float64)
    size, each = len(alone), np.broadcast_to(within, len(alone))
    broken = np.isfinite(each) & ~np.isfinite(alone)
    if broken.any():
        i = int(np.argmax(broken))
        raise ValueError(
            f"the loss of example {i} alone is {alone[i]}: divide by an argument that is equal for "
            "all examples, or by at least 1 (docs/use/losses.md, Weighed by tokens)."
        )
    same = np.isclose(alone, within, **near, equal_nan=True)
    if within.ndim and not same.all():
        i = int(np.argmin(same))
        raise ValueError(
            f"the loss of example {i} is {within[i]:.6g} in a batch of {size} and {alone[i]:.6g} "
            f"alone: {why}"
        )
    mean = np.mean(alone)
    if not within.ndim and not np.isclose(mean, within, **near, equal_nan=True):
        is_sum = np.isclose(size * mean, within, **near)
        raise ValueError(
            f"the loss of a batch of {size} is {within:.6g}, and the mean of its examples' losses "
            f"{mean:.6g}: {'it is their sum: return the mean.' if is_sum else why}"
        )


def _check_gradients(params, off, sizes, tolerance, why):
    """Raises ValueError unless gradients of examples, of these sizes, differ little from a batch's.

    A leaf whose gradient is zero but for rounding is compared with the size of all others.
    """
    whole = np.linalg.norm(sizes)
    wrong = np.isfinite(whole) & ~(off <= tolerance * (sizes + 0.1 * whole))
    if wrong.any():
        i = int(np.argmax(wrong))
        path, _ = jax.tree_util.tree_leaves_with_path(params)[i]
        raise ValueError(
            f"the gradient of the loss for params{jax.tree_util.keystr(path)} is {off[i]:.2g} off "
            f"in a batch, and gradients of examples have the size {whole:.2g}: {why}"
        )


def _tolerance(program):
    """1e-3, or more for a program that rounds to few bits."""
    kinds = {a.dtype for a in _arrays_in(program.jaxpr) if jnp.issubdtype(a.dtype, jnp.floating)}
    return max([1e-3, *(min(0.1, 8 * float(jnp.finfo(kind).eps)) for kind in kinds)])


def _arrays_in(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v.aval for v in equation.outvars if hasattr(v.aval, "dtype"))
        for inner in core.jaxprs_in_params(equation.params):
            yield from _arrays_in(inner)


def _why_they_differ(program):
    if holds(program.jaxpr.eqns, *DRAWS):
        return (
            "the loss draws random numbers with the shape of the batch, such as a mask for "
            "dropout, or mixes the examples. ordering.per_example_grads gives each example its "
            "own key: pass key= there, and check the loss without draws here; or draw from keys "
            "that are a part of the batch, one for each example."
        )
    return (
        "the model mixes the examples, as BatchNorm does, or looks at their number or places. Use "
        "a normalisation that treats them separately, pass what depends on the batch as an "
        "argument, or use ordering.microbatch_grads or group_loss."
    )
