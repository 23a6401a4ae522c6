"""Sketches of the gradients of single units, from the ordinary backward pass.

The loss is interpreted (interpret.py). Every unit gets a vector of zeros s[k], on which its loss
does not depend. Where a parameter w meets data, y = x w (rules.py), the backward pass assigns to s
the sketch of x^T dy (linear.py), computed from sums of x and of dy. So the gradient with respect to
s is the sketch of this unit's gradient, summed over all parameters. The gradients themselves are
never formed.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Key, PyTree

from ordering.gradients import linear
from ordering.gradients.convolution import CONVOLUTION, split_safe
from ordering.gradients.examples import (
    axes_of_loss,
    check_params,
    first_of,
    loss_alone,
    of_this_device,
    per_example_grads,
    refuse_vmap,
    size_of,
    units_of,
)
from ordering.gradients.interpret import Handler, as_copy, interpret
from ordering.gradients.linear import MOST, SIZE, Map, SketchLeaf
from ordering.gradients.moves import filled
from ordering.gradients.rules import LOOK_UP, RULES, Use
from ordering.gradients.scale import scaled_maps, whole_scale
from ordering.trees import as_float32, tree_size
from syncopate import mesh
from syncopate.mesh import automatic, varying_over
from syncopate.plans import check_key, check_whole

LARGE = 4096  # numbers of a parameter, of whose copies a warning tells
IN_TURN = "use per_example_grads(loss, to_sketch=make_sketch(key), in_turn=True)"


def sketched_grads(
    loss: Callable, key: Key[Array, ""], *, size: int = SIZE, has_aux: bool = False
) -> Callable:
    """A sketch of every unit's gradient, from one ordinary backward pass.

    s_i = S G_i, S being the map of `make_sketch(key, size=size)`

    G_i is the gradient of unit i. For a product y = x w it is sum_t x_t dy_t^T over positions t,
    and its sketch follows from sums of x_t and of dy_t with random signs. So a step takes little
    more time and memory than a plain one. A sketch depends on the gradient, the key, the shapes of
    the parameters and k alone: not on the number of positions, of units or on groups. Its errors
    are those of `make_sketch`.

    The loss may use any library: products, convolutions and look-ups are found in its jaxpr. If a
    parameter is used in another way, its gradients are formed for every unit. `sketch_plan` lists
    these parameters, and a UserWarning names large ones that must be copied.

    A number that all units share, such as a penalty on the parameters, costs one gradient for all
    of them. It cancels in the differences of pairs, and in GraB, which subtracts the mean. Rules of
    `jax.custom_vjp` are treated as in `per_example_grads`.

    The mean gradient has the precision and the types of the loss. Sketches are float32, and their
    products have the precision of the product that they sketch. If that is JAX's default, an
    accelerator rounds the factors to bfloat16 or TF32; the sketch's own error is larger.

    Args:
      loss: `(params, *batch) -> losses[n]` that treats units separately, or their mean, also with
        a key; as for `per_example_grads`.
      key: a random key for the signs, the same on all workers.
      size: k, as in `make_sketch`. For models of at most k parameters, rows are the gradients
        themselves, padded with zeros.
      has_aux: whether the loss returns auxiliary data too, stacked as in `per_example_grads`.

    Returns:
      `(params, *batch, key=None, scale=None) -> (losses float32[B], mean gradient, sketches
      float32[B, k])` for batches with leaves [B, ...]; with `has_aux`, (losses, aux) in place of
      losses. Build the order's state with `order.init(key, jnp.zeros(k))`. With a `scale`, from
      `second_moment_scale(..., leaves=sketch_plan(...))`, the gradients are multiplied by it before
      they are sketched, at the same cost.

    Raises:
      ValueError: if size is below 1; while tracing, as `per_example_grads`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> loss = lambda w, batch: jnp.tanh(jnp.square(batch @ w).sum(-1))
      >>> gradients = ordering.sketched_grads(loss, jax.random.key(0), size=64)
      >>> losses, mean, rows = gradients(jnp.ones((90, 70)), jnp.eye(3, 90))
      >>> mean.shape, rows.shape
      ((90, 70), (3, 64))

    References:
      Pham, Pagh, Fast and Scalable Polynomial Kernels via Explicit Feature Maps, 2013,
      https://doi.org/10.1145/2487575.2487591
    """
    size, sketch_key = check_whole("size", size, 1, MOST), check_key(key)
    of_one = loss_alone(loss, has_aux)

    def gradients(params, *batch, key=None, scale=None):
        check_params(params)
        whole = None if scale is None else whole_scale(scale, params)
        if tree_size(params) <= size:
            kept = linear.make_sketch(sketch_key, size=size)
            to_sketch = lambda g: kept(  # noqa: E731
                g if scale is None else jax.tree.map(jnp.multiply, g, whole)
            )
            of_each = per_example_grads(loss, has_aux=has_aux, to_sketch=to_sketch)
            return of_each(params, *batch, key=key)
        units, keys = units_of(params, batch, key)
        first = first_of((batch, keys))
        axes = axes_of_loss(of_one, params, first)
        params, over_devices = of_this_device(params, axes)
        typed = functools.partial(jax.tree.map, lambda x: varying_over(x, axes))
        plan, program = _analyse(of_one, params, first, size)
        _warn_of_copies(plan.leaves, units)
        *maps, of_small = linear.maps_of([leaf.shape for leaf in plan.leaves], sketch_key, size)
        if scale is not None:
            maps = scaled_maps(plan.leaves, maps, params, typed(scale))

        def total(params, zeros):
            of_unit = functools.partial(program, params, maps, plan.numbers(params))
            with refuse_vmap(IN_TURN, alone, params, first):
                losses, aux = jax.vmap(of_unit)(zeros, (batch, keys))
            return jnp.mean(losses), (losses, aux)

        alone = jax.grad(lambda params, unit: of_one(params, unit)[0])
        zeros = typed(zeros_of(plan, units, size))
        (_, (losses, aux)), (mean, sums) = jax.value_and_grad(total, (0, 1), has_aux=True)(
            params, zeros
        )
        of_numbers = gradients_of_numbers(plan, params, units)
        sums = with_numbers(plan, maps, sums, of_numbers)
        losses, rows = losses.astype(jnp.float32), units * added_up(maps, of_small, sums)
        return (losses, aux) if has_aux else losses, over_devices(mean), rows

    return gradients


def sketch_plan(
    loss: Callable,
    params: PyTree,
    *batch: PyTree,
    key: Key[Array, ""] | None = None,
    size: int = SIZE,
) -> list[SketchLeaf]:
    """How `sketched_grads` treats every parameter; computes no gradients.

    Args:
      loss, params, batch, key: as for `sketched_grads` and the function it returns; shapes are
        enough.
      size: k >= 1, the numbers of a sketch.

    Returns:
      A `SketchLeaf` for every parameter, in the order of `jax.tree.leaves`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> loss, w, x = lambda w, x: jnp.square(x @ w).sum(-1), jnp.ones((90, 70)), jnp.ones((3, 90))
      >>> (leaf,) = ordering.sketch_plan(loss, w, x, size=64)
      >>> leaf.how, leaf.why
      ('sketched', 'product')
    """
    check_params(params)
    key = None if key is None else check_key(key)
    size_of(batch)
    size = check_whole("size", size, 1, MOST)
    return _analyse(loss_alone(loss, False), params, (first_of(batch), key), size)[0].leaves


def _analyse(of_one, params, rest, size):
    """The plan of a loss of one example, and `(params, maps, numbers, zeros, rest) -> (loss, aux)`.

    `rest` is (example, key).
    """
    closed, shapes = jax.make_jaxpr(of_one, return_shape=True)(params, rest)
    plan = plan_of(closed, params, len(jax.tree.leaves(rest)), size)

    def program(params, maps, numbers, zeros, rest):
        copies = {
            i: copied(plan.leaves, maps, zeros, i, value)
            for i, value in enumerate(jax.tree.leaves(params))
            if plan.leaves[i].how == "copied"
        }

        def number(shared):
            i = plan.names.index(shared.name)
            of_unit = zeros.numbers[i].astype(numbers[i].dtype)
            return numbers[i] + of_unit.reshape(numbers[i].shape)

        use = functools.partial(use_of, plan.leaves, maps, zeros)
        handler = Handler(RULES, use, number=number)
        values = interpret(closed, params, jax.tree.leaves(rest), handler, copies)
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    return plan, program


def _warn_of_copies(leaves, units):
    copied = [leaf for leaf in leaves if leaf.how == "copied"]
    large = [leaf for leaf in copied if math.prod(leaf.shape) > LARGE]
    if large:
        copies = units * sum(math.prod(leaf.shape) for leaf in large)
        ratio = copies / sum(math.prod(leaf.shape) for leaf in leaves)
        names = ", ".join(f"params{leaf.name} ({leaf.why})" for leaf in large)
        warnings.warn(
            f"sketched_grads copies {names} for each of {units} units: the copies have {ratio:.3g} "
            "times as many numbers as all parameters, and a step takes longer accordingly. Use "
            "them in products, convolutions or look-ups with data, or wrap values computed from "
            "them in jax.lax.stop_gradient; ordering.sketch_plan lists all uses.",
            stacklevel=3,
        )


class Plan(NamedTuple):
    """How every parameter is treated, and which numbers all units share."""

    leaves: list[SketchLeaf]
    names: list[tuple[int, ...]]  # of the numbers, as of `interpret.Shared`
    parts: list[tuple[int, ...]]  # the parameters in each
    numbers: Callable[[PyTree], list[Array]]  # of the parameters


def plan_of(closed: core.ClosedJaxpr, params: PyTree, rest: int, size: int) -> Plan:
    """The plan, from a walk that only computes values of parameters alone."""
    each = jax.tree_util.tree_leaves_with_path(params)
    uses, other, shared = [[] for _ in each], [[] for _ in each], {}

    def values(leaves):
        numbers = {}  # here, as no tracer may leave the function

        def number(value):
            numbers.setdefault(value.name, value)

        handler = Handler(
            RULES,
            use=lambda use, param, data: uses[param.leaf].append((use, param.stack)),
            other=lambda leaf, name: other[leaf].append(name),
            number=number,
            evaluates=False,
        )
        interpret(closed, leaves, [None] * rest, handler)
        shared.update({name: tuple(value.leaves) for name, value in numbers.items()})
        return [value.value for value in numbers.values()]

    program = jax.make_jaxpr(values)(jax.tree.leaves(params))
    jaxpr = program.jaxpr.replace(eqns=_needed(program.jaxpr))
    run = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, program.consts))
    parts, leaves = [*shared.values()], []
    for i, (path, value) in enumerate(each):
        name, in_number = jax.tree_util.keystr(path), any(i in part for part in parts)
        leaves.append(leaf_of(name, jnp.shape(value), uses[i], other[i], in_number, size))
    return Plan(leaves, [*shared], parts, lambda params: run(*jax.tree.leaves(params)))


def _needed(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """The equations that the results depend on."""
    needed, kept = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}, []
    for equation in reversed(jaxpr.eqns):
        if needed & {*equation.outvars}:
            kept.append(equation)
            needed |= {atom for atom in equation.invars if not isinstance(atom, core.Literal)}
    return kept[::-1]


def leaf_of(
    name: str,
    shape: tuple[int, ...],
    uses: Sequence[tuple[Use, int]],
    other: Sequence[str],
    in_number: bool,
    size: int,
) -> SketchLeaf:
    """The plan for a parameter with these uses, each at a depth of scans."""
    kinds = ", ".join(dict.fromkeys(use.kind for use, _ in uses))
    stacks = {stack for _, stack in uses}
    if not (uses or other):
        return SketchLeaf(name, shape, "shared", "penalty" if in_number else "unused")
    if other or len(stacks) != 1:
        why = ", ".join(dict.fromkeys(other)) or "used at several depths"
        return SketchLeaf(name, shape, "copied", why)
    (stack,) = stacks
    rows, cols = sides = _sides(shape, stack)
    if linear.is_small(shape, size) or not all(
        _by_factors(use, sides, shape, size) for use, _ in uses
    ):
        is_vector = sum(n > 1 for n in shape) < 2
        if stack and is_vector and not linear.is_small(shape, size):
            return SketchLeaf(name, shape, "copied", kinds)
        return SketchLeaf(name, shape, "formed", kinds, stack)
    table = any(use.kind == LOOK_UP for use, _ in uses)
    return SketchLeaf(name, shape, "sketched", kinds, stack, rows, cols, table)


def _sides(shape, stack):
    """The axes of a leaf's rows and columns inside of scans, without those of size 1."""
    split = linear.split_of(shape) if len(shape) > 1 else 0
    sides = range(stack, split), range(max(stack, split), len(shape))
    rows, cols = (tuple(i for i in side if shape[i] > 1) for side in sides)
    return rows, cols


def _by_factors(use, sides, shape, size):
    """Whether the factors of a use are rows and columns of its leaf, and worth adding up.

    The sums of a convolution's rows are convolutions, and take longer than few columns.
    """
    of_use = tuple(numbers_of(side) for side in (use.rows, use.cols))
    if of_use not in (sides, sides[::-1]) or not all(sides):
        return False
    side, sizes = of_use.index(sides[0]), linear.sizes_of(*linear.matrix_of(shape), size)
    cols = math.prod(shape[i] for i in of_use[1])
    return use.kind != CONVOLUTION or sizes.read * sizes.residues[side] <= cols


def numbers_of(side: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(sorted(number for number, _ in side))


def gradients_of_numbers(plan: Plan, params: PyTree, units: int) -> list[dict[int, Array]]:
    """For each number that all units share, its gradient with respect to the leaves in it.

    It is the gradient of a unit's part in the mean, which matters for nonlinear rules.
    """
    leaves = jax.tree.leaves(params)

    def value(part, i):
        return plan.numbers([part.get(n, leaf) for n, leaf in enumerate(leaves)])[i].sum() / units

    parts = [{n: leaves[n] for n in part} for part in plan.parts]
    grads = [jax.grad(value)(part, i) for i, part in enumerate(parts)]
    return jax.tree.map(lambda g: units * g, grads)


class Zeros(NamedTuple):
    """Zeros that the losses do not depend on; gradients with respect to them are the sketches."""

    sketch: Array  # float32[k] for one unit
    small: list[Array | None]  # float32[n] for gradients of small leaves, or None
    numbers: Array  # float32[m], for the numbers that all units share

    def of(self, leaf: int) -> Array:
        of_leaf = self.small[leaf]
        return self.sketch if of_leaf is None else of_leaf


def zeros_of(plan: Plan, units: int, size: int) -> Zeros:
    shapes = [leaf.shape for leaf in plan.leaves]
    small = [
        jnp.zeros((units, math.prod(shape))) if linear.is_small(shape, size) else None
        for shape in shapes
    ]
    return Zeros(jnp.zeros((units, size)), small, jnp.zeros((units, len(plan.parts))))


def with_numbers(
    plan: Plan, maps: list[Map], sums: Zeros, gradients: list[dict[int, Array]]
) -> Zeros:
    """The sketches, plus each unit's part in the gradients of the numbers that all units share."""
    small, sketch = [*sums.small], sums.sketch
    for of_unit, of_number in zip(sums.numbers.T, gradients, strict=True):
        for i, gradient in of_number.items():
            row = row_of(plan.leaves[i], maps[i], as_float32(gradient), sketch.shape[1])
            part = of_unit[:, None] * row[None]
            if small[i] is None:
                sketch += part
            else:
                small[i] += part
    return sums._replace(sketch=sketch, small=small)


def row_of(leaf: SketchLeaf, of: Map, gradient: Array, size: int) -> Float32[Array, "k"]:
    """The sketch of a gradient that was formed: the sum over all slices that a scan loops over."""
    if not leaf.stack or linear.is_small(leaf.shape, size):
        return _row_of_slice(leaf._replace(stack=0), size, gradient, of)
    slices = gradient.reshape(-1, *leaf.shape[leaf.stack :])
    rows = jax.vmap(functools.partial(_row_of_slice, leaf, size), (0, None, 0))
    return jnp.sum(rows(slices, of, jnp.arange(len(slices))), axis=0)


def _row_of_slice(leaf, size, gradient, of, place: ArrayLike = 0):
    """The sketch of a slice, or if the leaf is small, its gradient that is zero elsewhere."""
    if not linear.is_small(leaf.shape, size):
        return linear.sketch_of(gradient, of, leaf.shape, size, leaf.stack, place)
    flat = as_float32(gradient).reshape(-1)
    if not leaf.stack:
        return flat
    whole = mesh.varying(jnp.zeros(math.prod(leaf.shape)), flat)
    at = jnp.asarray(place, jnp.int32) * flat.size
    return jax.lax.dynamic_update_slice(whole, flat, (at,))


def added_up(maps: list[Map], of_small: Map, sums: Zeros) -> Float32[Array, "B k"]:
    """The sketches of all units."""
    kept = [(of, g) for of, g in zip(maps, sums.small, strict=True) if g is not None and g.size]
    if not kept:
        return sums.sketch
    small = [g if of.scale is None else g * of.scale.reshape(1, -1) for of, g in kept]
    size, ends = sums.sketch.shape[1], [*itertools.accumulate(g.shape[1] for g in small)]
    if not automatic():
        of_all = functools.partial(linear.sketch_of_small, of=of_small, size=size)
        return sums.sketch + jax.vmap(of_all)(jnp.concatenate(small, 1))
    # The compiler may split these gradients over devices, and would move parts to concatenate them.
    # A product with the matrix of the map only needs sums.
    rows = sums.sketch
    for g, end in zip(small, ends, strict=True):
        table = linear.table_of_small(of_small, ends[-1], end - g.shape[1], end, size)
        table = jax.lax.with_sharding_constraint(table, P())
        rows = rows + jnp.matmul(g, table, precision="highest")
    return rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(sketch_of_cotangent: Callable, y, s, data):
    # s is zero; it keeps units with different cotangents from sharing y.
    return y + s[0].astype(y.dtype)


_tap.defvjp(
    lambda sketch_of_cotangent, y, s, data: (_tap(sketch_of_cotangent, y, s, data), data),
    lambda sketch_of_cotangent, data, dy: (dy, sketch_of_cotangent(dy, *data), None),
)


def copied(plan: list[SketchLeaf], maps: list[Map], zeros: Zeros, leaf: int, value: Array) -> Array:
    """This unit's copy of a parameter, so that its gradient can be sketched."""
    rule = functools.partial(_row_of_slice, plan[leaf], zeros.sketch.size)
    return _tap(rule, jax.lax.stop_gradient(value), zeros.of(leaf), (maps[leaf],))


def use_of(leaves: list[SketchLeaf], maps: list[Map], zeros: Zeros, use: Use, param, data) -> Array:
    """The result of a use; its backward pass sketches the gradient of the parameter."""
    leaf, of = leaves[param.leaf], maps[param.leaf]
    if leaf.how == "copied":
        return split_safe(use.plain)(as_copy(param.value, param.copy), *data)
    if leaf.how == "formed":
        rule = functools.partial(_row_of_use, leaf, zeros.sketch.size, param.dims, param.parts)
        extra = param.factor, of, param.place
        return _formed(use, rule, param.value, zeros.of(param.leaf), extra, data)
    rule = functools.partial(_of_factors, use, leaf, zeros.sketch.size)
    y = use.apply(param.value, *data)
    return _tap(rule, y, zeros.sketch, (param.factor, of, param.place, *data))


def _of_factors(use: Use, leaf: SketchLeaf, size, dy, factor, of, place, *data):
    """The sketch of x^T dy, float32[k], without forming this product."""
    dy = dy if factor is None else (dy * factor).astype(dy.dtype)
    sides = left, right = linear.sides_of(of, leaf.shape, size, leaf.stack, place)
    swapped = numbers_of(use.rows) != leaf.rows
    of_x, of_dy = sides[::-1] if swapped else sides
    read = linear.sizes_of(*linear.matrix_of(leaf.shape), size).read
    x = use.sums(of_x, read, *data)
    dy = use.columns(dy, *data)
    dy = linear.residue_sums(dy, of_dy, read)
    x, dy = (dy, x) if swapped else (x, dy)
    return linear.row_of_sums(linear.sums_of_factors(x, dy, left, right, use.precision), size)


def _row_of_use(leaf: SketchLeaf, size, dims, parts, gradient, factor, of, place):
    """The row of a gradient that has the shape in which the parameter is used."""
    gradient = gradient if factor is None else (gradient * factor).astype(gradient.dtype)
    each = [dim for group in dims for dim in group]
    order = sorted(range(len(each)), key=lambda i: each[i])
    natural = gradient.reshape([n for _, n in each]).transpose(order)
    natural = filled(natural, {each[i][0]: axis for axis, i in enumerate(order)}, parts)
    return _row_of_slice(leaf, size, natural, of, place)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _formed(use: Use, row_of_gradient: Callable, w, s, of, data):
    """y; its backward pass forms the gradient of this unit, which the mean gradient also uses."""
    y = use.apply(w, *data)
    return y + s[0].astype(y.dtype)


def _formed_forward(use, row_of_gradient, w, s, of, data):
    return _formed(use, row_of_gradient, w, s, of, data), (w, of, data)


def _formed_backward(use, row_of_gradient, kept, dy):
    w, of, data = kept
    _, pull = jax.vjp(use.plain, w, *data)
    gradient, *to_data = split_safe(pull)(dy)
    return gradient, row_of_gradient(gradient, *of), None, tuple(to_data)


_formed.defvjp(_formed_forward, _formed_backward)
