"""Sketches of the gradients of single units, out of the ordinary backward pass.

The loss is walked (walk.py). Every unit gets a sketch of zeros s[k] that it does not depend on.
Where a parameter w meets data, y = x w, the backward pass hands s the cotangents
P_f^T (x^T dy) Q_f = (x P_f)^T (dy Q_f), with fixed random signed sums P_f and Q_f: the gradient
with respect to s is then the sum over all parameters of the sketches of this unit's gradient, and
the gradients themselves are never formed.
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

from ordering.base import check_key
from ordering.gradients import check_params, loss_alone, per_example_grads, signed_as, units_of
from ordering.sketches import linear, walk
from ordering.sketches.linear import MOST, SIZE, Leaf, Map, times
from ordering.sketches.scale import scaled_maps, whole_scale
from ordering.sketches.walk import Hooks, Shared, Use
from ordering.trees import as_float32, leading_size, tree_size
from syncopate.mesh import automatic, varying
from syncopate.plans import check_whole

LEAST = 4  # p q, of a gradient of rank one: with fewer, transforms take longer
TABLE = 16  # groups for tables, at least
LOOK_UP = "look-up"  # the kind of use of a table of which a unit has few rows
EXACT = 4  # gradients of up to EXACT k numbers are formed, which costs less than projecting


def sketched_grads(
    loss: Callable, key: Key[Array, ""], *, size: int = SIZE, has_aux: bool = False
) -> Callable:
    """A sketch of every unit's gradient, out of one ordinary backward pass.

    s_i = sum over parameters of [P_f^T G_i Q_f / m^(1/2)] for f = 1 .. m

    G_i is the gradient of unit i, P_f and Q_f are sums of its rows and columns with random signs.
    A step takes little more time and memory than a plain one. E[s_i . s_j] = G_i . G_j: at k =
    1,024, squared norms on MLPs, LeNet and a small GPT-2 are off by 4.3 to 4.9 % (root mean square)
    and inner products by 0.031 to 0.038 |G_i| |G_j| (`python -m benchmarks.sketch_errors`), as by
    `make_sketch`. Gradients of low rank of very large matrices have up to six times the variance.

    The loss may come from any library: products, convolutions and look-ups are found in its
    program. The gradients of parameters that are used in another way are formed for every unit;
    `sketch_plan` lists them, and of large ones that must be copied a UserWarning tells.

    A number that all units share, such as a penalty on the parameters, costs one gradient for all
    of them; it cancels in the differences of pairs, and in GraB, which takes off the mean. Rules
    of `jax.custom_vjp` are treated as by `per_example_grads`.

    Args:
      loss: `(params, batch, key) -> losses[n]` that treats units separately, or their mean.
      key: typed, for the random signs; give all workers the same key.
      size: k, as of `make_sketch`. For models of at most k parameters, rows are the gradients
        themselves, padded with zeros.
      has_aux: whether the loss returns auxiliary data too, which is stacked, leaves [B, ...].

    Returns:
      `(params, batch, key=None, scale=None) -> (losses float32[B], mean gradient, sketches
      float32[B, k])` for batches with leaves [B, ...]; with `has_aux` (losses, aux) in place of
      losses. Build the order's state with `order.init(key, jnp.zeros(k))`. With a `scale`,
      from `second_moment_scale(..., leaves=sketch_plan(...))`, they are sketches of the
      gradients times the scale, at the same cost.

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

    @signed_as(loss)
    def gradients(params, batch, key=None, scale=None):
        if tree_size(params) <= size:
            whole = None if scale is None else whole_scale(scale, params)
            kept = linear.make_sketch(sketch_key, size=size)
            to_sketch = lambda g: kept(g if scale is None else jax.tree.map(times, g, whole))  # noqa: E731
            return per_example_grads(loss, has_aux=has_aux, to_sketch=to_sketch)(params, batch, key)
        units, keys = units_of(params, batch, key)
        first = jax.tree.map(lambda x: x[0], (batch, keys))
        plan, program, of_terms = _analyse(of_one, varying(params, batch), first, size)
        _warn_of_copies(plan.leaves, units)
        maps = linear.maps_of(plan.leaves, sketch_key)
        if scale is not None:
            maps = scaled_maps(plan.leaves, maps, params, varying(scale, batch))

        def total(params, zeros):
            params = varying(params, batch)  # typed as varying over devices, like the batch
            of_units = jax.vmap(functools.partial(program, params, maps))
            losses, aux = of_units(zeros, (batch, keys))
            return jnp.mean(losses), (losses, aux)

        zeros = varying(zeros_of(plan, units, size), batch)
        (_, (losses, aux)), (mean, found) = jax.value_and_grad(total, (0, 1), has_aux=True)(
            params, zeros
        )
        found = with_terms(plan, maps, found, of_terms(varying(params, batch), first, units))
        losses, rows = losses.astype(jnp.float32), units * added_up(maps, found)
        return (losses, aux) if has_aux else losses, mean, rows

    return gradients


def sketch_plan(
    loss: Callable,
    params: PyTree,
    batch: PyTree,
    key: Key[Array, ""] | None = None,
    *,
    size: int = SIZE,
) -> list[Leaf]:
    """How `sketched_grads` treats every parameter. Nothing is computed.

    Args:
      loss, params, batch, key: as for `sketched_grads` and the function it returns; shapes are
        enough.
      size: k.

    Returns:
      A `Leaf` for every parameter, in the order of `jax.tree.leaves`.

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
    leading_size(batch, "the batch", "Pass arrays [B, ...], or their shapes.")
    size = check_whole("size", size, 1, MOST)
    example = jax.eval_shape(lambda batch: jax.tree.map(lambda x: x[0], batch), batch)
    return _analyse(loss_alone(loss, False), params, (example, key), size)[0].leaves


def _analyse(of_one, params, rest, size):
    """For a loss of one example, the rest being (example, key): its plan,
    `(params, maps, zeros, rest) -> (loss, aux)`, and the gradients of what all units share.
    """

    def of_unit(params, rest):
        example, key = rest
        return of_one(params, jax.tree.map(lambda x: x[None], example), key)

    closed, found = jax.make_jaxpr(of_unit, return_shape=True)(params, rest)
    plan = plan_of(closed, params, rest, size)

    def program(params, maps, zeros, rest):
        copies = {
            i: copied(plan.leaves, maps, zeros, i, value)
            for i, value in enumerate(jax.tree.leaves(params))
            if plan.leaves[i].how == "copied"
        }
        terms = Terms([])

        def term(shared):
            own = zeros.terms[terms.place(shared)].astype(shared.value.dtype)
            return shared.value + own.reshape(shared.value.shape)

        site = functools.partial(site_of, plan.leaves, maps, zeros)
        values = walk.results(closed, params, rest, Hooks(site, term=term), copies)
        return jax.tree.unflatten(jax.tree.structure(found), values)

    return plan, program, functools.partial(gradients_of_terms, closed, plan)


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
            "jax.lax.stop_gradient; ordering.sketch_plan lists all uses.",
            stacklevel=4,
        )


class Plan(NamedTuple):
    """How every parameter is treated, and the parameters in each number that all units share."""

    leaves: list[Leaf]
    terms: list[tuple[int, ...]]


def plan_of(closed: core.ClosedJaxpr, params: PyTree, rest: PyTree, size: int) -> Plan:
    """The plan from a walk that records all uses."""
    each = jax.tree_util.tree_leaves_with_path(params)
    seen, unknown, met = [[] for _ in each], [[] for _ in each], Terms([])
    ranks = [0] * len(each)  # at most, of the gradient of one unit

    def note(use, w):
        y = use.function(w, *use.data)
        seen[use.param.leaf].append(use._replace(data=None, param=use.param._replace(value=None)))
        ranks[use.param.leaf] += y.shape[0] if y.ndim else 1
        return y

    hooks = Hooks(note, lambda leaf, name: unknown[leaf].append(name), met.value)
    jax.eval_shape(lambda p, rest: walk.results(closed, p, rest, hooks), params, rest)
    terms, leaves = [tuple(term.leaves) for term in met.found], []
    for i, (path, value) in enumerate(each):
        name, in_term = jax.tree_util.keystr(path), any(i in term for term in terms)
        shape = jnp.shape(value)
        leaves.append(leaf_of(name, shape, seen[i], unknown[i], ranks[i], in_term, size))
    return Plan(leaves, terms)


def leaf_of(
    name: str,
    shape: tuple[int, ...],
    seen: Sequence[Use],
    unknown: Sequence[str],
    rank: int,
    in_term: bool,
    size: int,
) -> Leaf:
    """The plan for a parameter with these uses, whose gradients have at most this rank."""
    kinds = ", ".join(dict.fromkeys(use.kind for use in seen))
    stacks = {use.param.stack for use in seen}
    if not (seen or unknown):
        return Leaf(name, shape, "shared", "penalty" if in_term else "unused")
    if unknown or len(stacks) != 1:
        why = ", ".join(dict.fromkeys(unknown)) or "used at several depths"
        return Leaf(name, shape, "copied", why)
    (stack,) = stacks
    number = math.prod(shape[stack:])
    sides = {frozenset(numbers_of(side) for side in (use.rows, use.cols)) for use in seen}
    if number <= EXACT * size or "linear" in kinds or len(sides) > 1:
        return Leaf(name, shape, "formed", kinds, stack)
    first = next((use for use in seen if use.kind == LOOK_UP), seen[0])  # its rows are looked up
    rows, cols = (numbers_of(side) for side in (first.rows, first.cols))
    lengths = (math.prod(shape[i] for i in side) for side in (rows, cols))
    table = first.kind == LOOK_UP
    sizes = _sizes(lengths, rank, size, TABLE if table else 1)
    return Leaf(name, shape, "sketched", kinds, stack, rows, cols, sizes, table)


def numbers_of(side: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(sorted(number for number, _ in side))


def _sizes(lengths: Iterable[int], rank: int, size: int, least: int) -> tuple[int, int, int]:
    """(m, p, q), m p q <= k: groups in which no two entries share a sum, fewer for high ranks.

    For a high rank one group is enough, since the errors of its many terms average out. A table of
    tokens gets some groups whatever its rank may be: at first it is one, since all positions learn
    how frequent the tokens are.
    """
    rows, cols = lengths
    most = max(min(least, size), size // (LEAST * rank))
    wanted = math.ceil(rows * cols / size)
    groups = 1 << min(most.bit_length() - 1, (wanted - 1).bit_length())
    size, rows, cols = size // groups, math.ceil(rows / groups), math.ceil(cols / groups)
    p = min(max(1, math.isqrt(size)), rows)
    q = min(size // p, cols)
    return groups, min(size // q, rows), q


class Terms(NamedTuple):
    """The numbers that all units share, in the order in which a walk meets them."""

    found: list[Shared]

    def value(self, term: Shared) -> Array:
        self.place(term)
        return term.value

    def place(self, term: Shared) -> int:
        places = [i for i, known in enumerate(self.found) if known.value is term.value]
        if not places:
            self.found.append(term)
        return places[0] if places else len(self.found) - 1


def gradients_of_terms(
    closed: core.ClosedJaxpr, plan: Plan, params: PyTree, rest: PyTree, units: int
) -> list[dict[int, Array]]:
    """For each number that all units share its gradient with respect to the leaves in it.

    Taken of a unit's part in the mean, for rules that are not linear.
    """
    if not plan.terms:
        return []

    def values(leaves, rest):
        found = Terms([])
        walk.results(closed, leaves, rest, Hooks(term=found.value, inline=True))
        return [term.value.reshape(()) for term in found.found]

    leaves, rest = map(jax.tree.leaves, (params, rest))
    program = jax.make_jaxpr(values)(leaves, rest)
    jaxpr = program.jaxpr

    def value(own, out):
        args = [own.get(i, leaf) for i, leaf in enumerate(leaves)] + rest
        part = jaxpr.replace(eqns=_needed(jaxpr.eqns, out), outvars=[out])
        (found,) = core.jaxpr_as_fun(core.ClosedJaxpr(part, program.consts))(*args)
        return found / units

    found = [
        jax.grad(value)({i: leaves[i] for i in own}, out)
        for own, out in zip(plan.terms, jaxpr.outvars, strict=True)
    ]
    return jax.tree.map(lambda g: units * g, found)


def _needed(equations, out):
    """The equations that a variable depends on."""
    needed, found = {out}, []
    for equation in reversed(equations):
        if needed & {*equation.outvars}:
            found.append(equation)
            needed |= {atom for atom in equation.invars if not isinstance(atom, core.Literal)}
    return found[::-1]


class Zeros(NamedTuple):
    """What units do not depend on: the gradients with respect to it are their sketches."""

    sketch: Array  # float32[k] of one unit
    small: list[Array | None]  # float32[n] for the gradient of a `Leaf.small`; None for others
    terms: Array  # float32[m], for the numbers that all units share

    def of(self, leaf: int) -> Array:
        own = self.small[leaf]
        return self.sketch if own is None else own


def zeros_of(plan: Plan, units: int, size: int) -> Zeros:
    small = [
        jnp.zeros((units, math.prod(leaf.shape))) if leaf.small else None for leaf in plan.leaves
    ]
    return Zeros(jnp.zeros((units, size)), small, jnp.zeros((units, len(plan.terms))))


def with_terms(
    plan: Plan, maps: list[Map], found: Zeros, gradients: list[dict[int, Array]]
) -> Zeros:
    """The sketches, with the gradients of what all units share: a unit has its part of each."""
    small, sketch = [*found.small], found.sketch
    for of_unit, of_term in zip(found.terms.T, gradients, strict=True):
        for i, gradient in of_term.items():
            row = row_of(plan.leaves[i], maps[i], as_float32(gradient), sketch.shape[1])
            part = of_unit[:, None] * row[None]
            if plan.leaves[i].small:
                small[i] += part
            else:
                sketch += part
    return found._replace(sketch=sketch, small=small)


def row_of(leaf: Leaf, of: Map, gradient: Array, size: int) -> Float32[Array, "k"]:
    """The sketch of a gradient that is there: the sum over all slices that a scan loops over."""
    if not leaf.stack:
        return _row_of_slice(leaf, size, gradient, of)
    slices = gradient.reshape(-1, *leaf.shape[leaf.stack :])

    def of_one(place, own):
        return _row_of_slice(leaf, size, own, linear.of_slice(of, place))

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
    found = linear.sums_of_matrix(signed, *leaf.sizes)
    return jnp.pad(found.reshape(-1), (0, size - found.size))


def added_up(maps: list[Map], found: Zeros) -> Float32[Array, "B k"]:
    """All of the units' sketches."""
    kept = [(of, g) for of, g in zip(maps, found.small, strict=True) if g is not None and g.size]
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
    return jnp.roll(jnp.pad(linear.fold(flat, seed, odd), (0, size - odd)), seed % size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(sketch_of_cotangent: Callable, y, s, data):
    # s is zero; y must not be shared by units whose cotangents differ.
    return y + s[0].astype(y.dtype)


_tap.defvjp(
    lambda sketch_of_cotangent, y, s, data: (_tap(sketch_of_cotangent, y, s, data), data),
    lambda sketch_of_cotangent, data, dy: (dy, sketch_of_cotangent(dy, *data), None),
)


def copied(plan: list[Leaf], maps: list[Map], zeros: Zeros, leaf: int, value: Array) -> Array:
    """A parameter as seen by this unit alone, so that its gradient can be sketched."""
    rule = functools.partial(_row_of_slice, plan[leaf], zeros.sketch.size)
    return _tap(rule, jax.lax.stop_gradient(value), zeros.of(leaf), (maps[leaf],))


def site_of(plan: list[Leaf], maps: list[Map], zeros: Zeros, use: Use, w: Array) -> Array:
    number, rest = use.param.leaf, use._replace(param=None, data=None)
    leaf, of = plan[number], maps[number]
    if leaf.how == "copied":
        return walk.apart(use.function)(walk.as_own(w, use.param.own), *use.data)
    if use.param.stack:
        of = linear.of_slice(of, use.param.place)
    if leaf.how == "formed":
        rule = functools.partial(_row_of_slice, leaf, zeros.sketch.size)
        return _formed(rest, rule, w, zeros.of(number), of, use.data)
    rule = functools.partial(_of_product, rest, leaf, zeros.sketch.size)
    return _tap(rule, use.function(w, *use.data), zeros.sketch, (of.left, of.right, *use.data))


def _of_product(use: Use, leaf: Leaf, size, dy, left, right, *data):
    """The sketch of x^T dy, float32[k], without this product."""
    groups, p, q = leaf.sizes
    swapped = numbers_of(use.rows) != leaf.rows
    if swapped:
        left, right, p, q = right, left, q, p
    if use.kind == "product":
        of_x = linear.grouped_sums(_natural(data[0], use.rows), left, p, groups)
    else:  # convolutions and look-ups have no matrix x
        table = _as_used(linear.table_of_sums(left, p, groups), use.rows).astype(dy.dtype)
        of_x = as_float32(use.function(table, *data)).reshape(-1, p, groups)
    of_dy = linear.grouped_sums(_natural(dy, use.cols), right, q, groups)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _formed(use: Use, row_of_gradient: Callable, w, s, of, data):
    """y; its backward pass forms the gradient of this unit, which the mean gradient also uses."""
    y = use.function(w, *data)
    return y + s[0].astype(y.dtype)


def _formed_forward(use, row_of_gradient, w, s, of, data):
    return _formed(use, row_of_gradient, w, s, of, data), (w, of, data)


def _formed_backward(use, row_of_gradient, kept, dy):
    w, of, data = kept
    if use.kind == "product":
        gradient, to_data = data[0].T @ dy, (dy @ w.T,)
    else:
        _, pull = jax.vjp(use.function, w, *data)
        gradient, *to_data = walk.apart(pull)(dy)
    dims = (*use.rows, *use.cols)
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    natural = gradient.reshape([n for _, n in dims]).transpose(order)
    return gradient, row_of_gradient(natural, of), None, tuple(to_data)


_formed.defvjp(_formed_forward, _formed_backward)
