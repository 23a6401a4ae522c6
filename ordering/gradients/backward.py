"""Sketches of the gradients of single units, from the ordinary backward pass.

The loss is interpreted (interpret.py). Every unit gets a vector of zeros s[k], on which its loss
does not depend. Where a parameter w meets data, y = x w (rules.py), the backward pass assigns to s
the cotangents P_f^T (x^T dy) Q_f = (x P_f)^T (dy Q_f). P_f and Q_f are fixed sums with random
signs. So the gradient with respect to s is the sketch of this unit's gradient, summed over all
parameters. The gradients themselves are never formed.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32, Key, PyTree

from ordering.gradients import linear
from ordering.gradients.convolution import split_safe
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
from ordering.gradients.linear import MOST, SIZE, Map, SketchLeaf, times
from ordering.gradients.moves import filled
from ordering.gradients.rules import LINEAR, LOOK_UP, RULES, Use
from ordering.gradients.scale import scaled_maps, whole_scale
from ordering.trees import as_float32, tree_size
from syncopate.mesh import automatic, varying_over
from syncopate.plans import check_key, check_whole

LEAST = 4  # p q for a gradient of rank one: with fewer, transforms take longer
TABLE = 16  # the least number of groups for tables
IN_TURN = "use per_example_grads(loss, to_sketch=make_sketch(key), in_turn=True)"
EXACT = 4  # gradients of up to EXACT k numbers are formed, which costs less than projecting


def sketched_grads(
    loss: Callable, key: Key[Array, ""], *, size: int = SIZE, has_aux: bool = False
) -> Callable:
    """A sketch of every unit's gradient, from one ordinary backward pass.

    s_i = sum over parameters of [P_f^T G_i Q_f / m^(1/2)] for f = 1 .. m

    G_i is the gradient of unit i, P_f and Q_f are sums of its rows and columns with random signs.
    A step takes little more time and memory than a plain one. E[s_i . s_j] = G_i . G_j: at k =
    1,024, squared norms on MLPs, LeNet and a small GPT-2 are off by 4.3 to 4.9 % (root mean square)
    and inner products by 0.031 to 0.038 |G_i| |G_j| (`python -m benchmarks.sketch_errors`), as by
    `make_sketch`. Gradients of low rank of very large matrices have up to six times the variance.

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
            to_sketch = lambda g: kept(g if scale is None else jax.tree.map(times, g, whole))  # noqa: E731
            of_each = per_example_grads(loss, has_aux=has_aux, to_sketch=to_sketch)
            return of_each(params, *batch, key=key)
        units, keys = units_of(params, batch, key)
        first = first_of((batch, keys))
        axes = axes_of_loss(of_one, params, first)
        params, over_devices = of_this_device(params, axes)
        typed = functools.partial(jax.tree.map, lambda x: varying_over(x, axes))
        plan, program = _analyse(of_one, params, first, size)
        _warn_of_copies(plan.leaves, units)
        maps = linear.maps_of(plan.leaves, sketch_key)
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
        losses, rows = losses.astype(jnp.float32), units * added_up(maps, sums)
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
    large = [leaf for leaf in leaves if leaf.how == "copied" and not leaf.small]
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
    count = math.prod(shape[stack:])
    sides = {frozenset(numbers_of(side) for side in (use.rows, use.cols)) for use, _ in uses}
    if count <= EXACT * size or LINEAR in kinds or len(sides) > 1:
        return SketchLeaf(name, shape, "formed", kinds, stack)
    first = next((use for use, _ in uses if use.kind == LOOK_UP), uses[0][0])  # it has few rows
    rows, cols = (numbers_of(side) for side in (first.rows, first.cols))
    lengths = (math.prod(shape[i] for i in side) for side in (rows, cols))
    table, rank = first.kind == LOOK_UP, max(1, sum(use.rank for use, _ in uses))
    sizes = _sizes(lengths, rank, size, TABLE if table else 1)
    return SketchLeaf(name, shape, "sketched", kinds, stack, rows, cols, sizes, table)


def numbers_of(side: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(sorted(number for number, _ in side))


def _sizes(lengths: Iterable[int], rank: int, size: int, least: int) -> tuple[int, int, int]:
    """(m, p, q), m p q <= k: groups in which no two entries share a sum, fewer for high ranks.

    For a high rank one group is enough, since the errors of its many terms average out. A table of
    tokens always gets some groups: at first its gradient has rank one, since all positions learn
    the frequencies of the tokens.
    """
    rows, cols = lengths
    most = max(min(least, size), size // (LEAST * rank))
    wanted = math.ceil(rows * cols / size)
    groups = 1 << min(most.bit_length() - 1, (wanted - 1).bit_length())
    size, rows, cols = size // groups, math.ceil(rows / groups), math.ceil(cols / groups)
    p = min(max(1, math.isqrt(size)), rows)
    q = min(size // p, cols)
    return groups, min(size // q, rows), q


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
    small: list[Array | None]  # float32[n] for gradients that are `SketchLeaf.small`, or None
    numbers: Array  # float32[m], for the numbers that all units share

    def of(self, leaf: int) -> Array:
        of_leaf = self.small[leaf]
        return self.sketch if of_leaf is None else of_leaf


def zeros_of(plan: Plan, units: int, size: int) -> Zeros:
    small = [
        jnp.zeros((units, math.prod(leaf.shape))) if leaf.small else None for leaf in plan.leaves
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
            if plan.leaves[i].small:
                small[i] += part
            else:
                sketch += part
    return sums._replace(sketch=sketch, small=small)


def row_of(leaf: SketchLeaf, of: Map, gradient: Array, size: int) -> Float32[Array, "k"]:
    """The sketch of a gradient that was formed: the sum over all slices that a scan loops over."""
    if not leaf.stack:
        return _row_of_slice(leaf, size, gradient, of)
    slices = gradient.reshape(-1, *leaf.shape[leaf.stack :])

    def of_one(place, gradient_slice):
        return _row_of_slice(leaf, size, gradient_slice, linear.of_slice(of, place))

    return jnp.sum(jax.vmap(of_one)(jnp.arange(len(slices)), slices), axis=0)


def _row_of_slice(leaf, size, gradient, of):
    if leaf.small:
        return as_float32(gradient).reshape(-1)
    if leaf.how != "sketched":
        shape = gradient.shape if leaf.how != "formed" else [n for n in gradient.shape if n > 1]
        return linear.fold(times(as_float32(gradient), of.scale).reshape(shape), of.seed, size)
    axes = [i - leaf.stack for i in (*leaf.rows, *leaf.cols)]
    axes += [i for i in range(gradient.ndim) if i not in axes]  # of size 1
    matrix = gradient.transpose(axes).reshape(of.left.size, of.right.size)
    signed = matrix * of.left.reshape(-1, 1) * of.right.reshape(1, -1)
    sums = linear.sums_of_matrix(signed, *leaf.sizes)
    return jnp.pad(sums.reshape(-1), (0, size - sums.size))


def added_up(maps: list[Map], sums: Zeros) -> Float32[Array, "B k"]:
    """The sketches of all units."""
    kept = [(of, g) for of, g in zip(maps, sums.small, strict=True) if g is not None and g.size]
    if not kept:
        return sums.sketch
    small = [jax.vmap(times, (0, None))(g, of.scale) for of, g in kept]
    size = sums.sketch.shape[1]
    fold_all = functools.partial(fold_small, seed=kept[0][0].seed, size=size)
    if not automatic():
        return sums.sketch + jax.vmap(fold_all)(jnp.concatenate(small, 1))
    # The compiler may split these gradients over devices, and would move parts to concatenate them.
    # A product with the matrix of `fold_all` only needs sums.
    ends = list(itertools.accumulate(g.shape[1] for g in small))
    fold_back = jax.linear_transpose(fold_all, jnp.zeros(ends[-1]))
    markers = jnp.ones(size), jnp.arange(size, dtype=jnp.float32)
    on_all = functools.partial(jax.lax.with_sharding_constraint, shardings=P())
    signs, places = (on_all(fold_back(x)[0]) for x in markers)
    rows = sums.sketch
    for g, end in zip(small, ends, strict=True):
        sign, place = (on_all(x[end - g.shape[1] : end]) for x in (signs, places))
        table = jnp.where(place[:, None] == sign[:, None] * markers[1][None], sign[:, None], 0.0)
        rows = rows + jnp.matmul(g, table, precision="highest")
    return rows


def fold_small(flat: Array, seed: Array, size: int) -> Float32[Array, "k"]:
    """Folds a flat gradient, starting at a random sum: a table's largest entries come first.

    The number of sums is odd; otherwise equal channels of several parameters would share sums.
    """
    odd = size - (size + 1) % 2
    return jnp.roll(jnp.pad(linear.fold(flat, seed, odd), (0, size - odd)), seed % size)


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
    if param.stack:
        of = linear.of_slice(of, param.place)
    if leaf.how == "formed":
        rule = functools.partial(_row_of_use, leaf, zeros.sketch.size, param.dims, param.parts)
        return _formed(use, rule, param.value, zeros.of(param.leaf), (param.factor, of), data)
    rule = functools.partial(_of_factors, use, leaf, zeros.sketch.size)
    y = use.apply(param.value, *data)
    return _tap(rule, y, zeros.sketch, (param.factor, of.left, of.right, *data))


def _of_factors(use: Use, leaf: SketchLeaf, size, dy, factor, left, right, *data):
    """The sketch of x^T dy, float32[k], without forming this product."""
    dy = dy if factor is None else (dy * factor).astype(dy.dtype)
    groups, p, q = leaf.sizes
    swapped = numbers_of(use.rows) != leaf.rows
    if swapped:
        left, right, p, q = right, left, q, p
    of_x = use.sums(left, p, groups, *data)
    of_dy = linear.grouped_sums(use.columns(dy, *data), right, q, groups, use.precision)
    both = "tpm,tqm->qpm" if swapped else "tpm,tqm->pqm"
    sums = jnp.einsum(both, of_x, of_dy, precision=use.precision)
    return jnp.pad(sums.reshape(-1) / math.sqrt(groups), (0, size - sums.size))


def _row_of_use(leaf: SketchLeaf, size, dims, parts, gradient, factor, of):
    """The row of a gradient that has the shape in which the parameter is used."""
    gradient = gradient if factor is None else (gradient * factor).astype(gradient.dtype)
    each = [dim for group in dims for dim in group]
    order = sorted(range(len(each)), key=lambda i: each[i])
    natural = gradient.reshape([n for _, n in each]).transpose(order)
    natural = filled(natural, {each[i][0]: axis for axis, i in enumerate(order)}, parts)
    return _row_of_slice(leaf, size, natural, of)


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
