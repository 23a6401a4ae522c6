"""Scaled rows: gradients in the units in which an optimizer such as Adam applies them.

Adam moves the parameters by g / v^(1/2), v being its second moment. An order that balances the
scaled gradients of its units balances what moves the parameters.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32, PyTree

from ordering import trees
from ordering.gradients.examples import check_params
from ordering.gradients.linear import Map, SketchLeaf
from syncopate import mesh, plans

STEPS = 128  # of an optimizer that is tried out


class Factors(NamedTuple):
    """The scale of a parameter, rows * cols, as arrays that broadcast to its shape."""

    rows: Float32[Array, "..."]
    cols: Float32[Array, "..."]


def second_moment_scale(
    optimizer: optax.GradientTransformation,
    opt_state: PyTree,
    params: PyTree,
    *,
    leaves: Sequence[SketchLeaf] | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    power: float = 0.5,
    eps: float = 1e-3,
) -> PyTree:
    """A scale for gradients, so that an order balances the updates that the optimizer applies.

    scale = 1 / ((v / mean(v))^power + eps)

    v is the second moment in an optax state (Adam and its relatives, RMSProp), and mean(v) its mean
    over all parameters. Compute the scale once per epoch or per sync, outside of the steps. It is
    one before the first step, and where a moment is not finite.

    For the sketches of `sketched_grads`, the moment of a matrix is factored as in Adafactor: v_rc
    is about mean_c(v_rc) mean_r(v_rc) / mean_rc(v_rc), so the scale is a product of rows and
    columns. All rows of a look-up table get the same scale (docs/results/orders.md). Muon and Lion
    have no second moment. For these, keep one beside the optimizer by `optax.scale_by_rms`, without
    applying its updates.

    Args:
      optimizer: an optax optimizer, also chained, masked, frozen in part or in `optax.MultiSteps`,
        that has one second moment `nu` for every parameter and divides by its root. Updates of
        small arrays check this.
      opt_state: the state of `optimizer`.
      params: the parameters; shapes are enough.
      leaves: from `sketch_plan`; parameters that are "sketched" then get `Factors`.
      axis_name: the workers' axis, if each worker has its own state: v is then the mean over the
        workers, and all get the same scale.
      power: in (0, 1/2]. 1/2 balances the optimizer's updates; 1/4 is half way to the gradients. It
        suits losses whose curvature is large where gradients are, and sketches of parameters with
        many small gradients, such as embeddings.
      eps: in (0, 1]; the scale, or each of its factors, is at most 1 / eps, so that entries without
        a gradient so far do not outweigh all others.

    Returns:
      A float32 tree like params, or with `Factors` in place of leaves.

    Raises:
      ValueError: if a parameter has no second moment, several, or one of another shape; for an
        optimizer that divides by another value, such as Adamax, AMSGrad, a centred RMSProp and Adam
        of a large `eps`, or clips entries of what it divided.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from syncopate import ordering
      >>> params, optimizer = jnp.ones(2), optax.adam(1e-3)
      >>> state = optimizer.init(params)
      >>> ordering.second_moment_scale(optimizer, state, params).tolist()
      [1.0, 1.0]
      >>> _, state = optimizer.update(jnp.array([1.0, 3.0]), state)
      >>> [round(float(x), 2) for x in ordering.second_moment_scale(optimizer, state, params)]
      [2.23, 0.74]

    References:
      Kingma, Ba, Adam: A Method for Stochastic Optimization, 2015, https://arxiv.org/abs/1412.6980
      Shazeer, Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
      https://arxiv.org/abs/1804.04235
    """
    eps = plans.check_number("eps", eps, "(0, 1]")
    power = plans.check_number("power", power, "(0, 0.5]")
    moments = _moments(opt_state, params)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            f"optimizer is {optimizer!r}: pass the optimizer of the state, as optax.adam(1e-3)."
        )
    _check_divides(optimizer, jax.tree.structure(params), tuple(v.shape for v in moments))
    plan: Sequence[SketchLeaf | None] = [None] * len(moments)
    if leaves is not None:
        _check_leaves(leaves, moments)
        plan = leaves
    means = [_means(v, leaf) for v, leaf in zip(moments, plan, strict=True)]
    if axis_name is not None:
        mesh.axis_size(axis_name)
        means = jax.lax.pmean(means, axis_name)
    each = [(v.size, jax.tree.leaves(m)[0]) for v, m in zip(moments, means, strict=True) if v.size]
    common = sum(size * jnp.mean(m) for size, m in each) / trees.tree_size(params)
    usable = (common > 0) & jnp.isfinite(common)
    scales = [_inverse(m, leaf, common, power, eps) for m, leaf in zip(means, plan, strict=True)]
    scales = jax.tree.map(lambda s: jnp.where(usable, s, 1.0), scales)
    return jax.tree.unflatten(jax.tree.structure(params), scales)


def scaled(gradients: PyTree, scale: PyTree) -> PyTree:
    """Gradients of units, leaves [n, ...], times a scale, float32."""
    trees.check_gradients(gradients)
    whole = whole_scale(scale, jax.tree.map(lambda g: g[0], gradients))
    return jax.tree.map(lambda g, s: trees.as_float32(g) * s[None], gradients, whole)


def whole_scale(scale: PyTree, like: PyTree) -> PyTree:
    """The scale as one array for every leaf; raises ValueError unless it fits."""
    leaf = lambda x: isinstance(x, Factors)  # noqa: E731
    full = jax.tree.map(lambda s: s.rows * s.cols if leaf(s) else s, scale, is_leaf=leaf)
    plans.check_like("scale", full, like, "one gradient", "pass what second_moment_scale returns.")
    return full


def scaled_maps(
    plan: list[SketchLeaf], maps: list[Map], params: PyTree, scale: PyTree
) -> list[Map]:
    """The maps for scaled gradients, with the scale of each slice that a scan loops over."""
    wholes = jax.tree.leaves(whole_scale(scale, params))
    scales = jax.tree.structure(params).flatten_up_to(scale)
    return [_scaled_map(*each) for each in zip(plan, maps, scales, wholes, strict=True)]


def _scaled_map(leaf: SketchLeaf, of: Map, scale, whole) -> Map:
    slices = math.prod(leaf.shape[: leaf.stack])
    if leaf.how != "sketched":
        return of._replace(scale=whole.reshape(slices, *leaf.shape[leaf.stack :]))
    if not isinstance(scale, Factors):
        raise ValueError(
            f"the scale of params{leaf.name} is one array, and its sketches need factors: pass "
            "second_moment_scale(..., leaves=sketch_plan(...))."
        )
    sides = (scale.rows, leaf.rows), (scale.cols, leaf.cols)
    rows, cols = (s.reshape(slices, *(leaf.shape[i] for i in side)) for s, side in sides)
    return of._replace(scale=(rows, cols))


def _moments(opt_state, params) -> list[Array]:
    """float32 second moments, one for each leaf of params."""
    check_params(params)
    if not trees.tree_size(params):
        raise ValueError(f"params holds no numbers ({params!r}): pass the model's parameters.")
    by_path, moments = {}, []
    of_states = lambda path, _: isinstance(path[-1], optax.tree_utils.NamedTupleKey)  # noqa: E731
    for _, moment in optax.tree_utils.tree_get_all_with_path(opt_state, "nu", of_states):
        for path, leaf in jax.tree_util.tree_leaves_with_path(moment):
            by_path.setdefault(path, []).append(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        shapes = [jnp.shape(moment) for moment in by_path.get(path, ())]
        if shapes != [jnp.shape(leaf)]:
            holds = f"second moments `nu` of the shapes {shapes}" if shapes else "no second moment"
            raise ValueError(
                f"opt_state has {holds} for params{jax.tree_util.keystr(path)} of shape "
                f"{jnp.shape(leaf)}: keep one beside the optimizer: moment = optax.scale_by_rms(), "
                "in every step _, state = moment.update(mean_gradient, state), and pass both."
            )
        moments.append(trees.as_float32(by_path[path][0]))
    return moments


@functools.lru_cache(64)
def _check_divides(optimizer, structure, shapes) -> None:
    """Raises ValueError unless updates are divided by the root of `nu`, which is tried out.

    After steps on small arrays of this structure, every entry of nu is multiplied by c^2. An update
    that divides by its root becomes c times smaller, up to one factor per leaf, as in LAMB; with
    momentum behind the division, the part that the last gradient adds does. Adamax divides by nu,
    AMSGrad by the largest nu so far, a centred RMSProp by nu - mu^2. The last step counts in which
    the gradient changes the update: rates may be zero at first or at the end, updates may come in
    every few steps, RAdam divides from the sixth step on. Frozen parameters have none.
    """
    random, small = np.random.default_rng(0), [tuple(min(n, 2) for n in s) for s in shapes]
    factors = [np.linspace(2, 8, math.prod(s)).reshape(s) for s in small]

    def tree(make):
        arrays = [jnp.asarray(make(s), jnp.float32) for s in small]
        return jax.tree.unflatten(structure, arrays)

    def raised(path, x):
        named = any(isinstance(key, jax.tree_util.GetAttrKey) and key.name == "nu" for key in path)
        at = [f for end, f in ends if path[len(path) - len(end) :] == end and f.shape == x.shape]
        return x * at[0] ** 2 if named and at else x

    @jax.jit
    def trial(state, gradient):
        """The next state, and updates [2, 2, ...]: nu as it is or larger, a gradient or zero."""
        states = state, jax.tree_util.tree_map_with_path(raised, state)
        last = jax.tree.map(lambda x: jnp.stack([jnp.full_like(x, 1e-3), 0 * x]), params)
        both = [jax.vmap(lambda g: update(g, s, params)[0])(last) for s in states]  # noqa: B023
        return update(gradient, state, params)[1], jax.tree.map(lambda *x: jnp.stack(x), *both)

    with mesh.at_once():
        params, update = tree(np.zeros), optax.with_extra_args_support(optimizer).update
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        ends, state, tried = list(zip(paths, factors, strict=True)), optimizer.init(params), []
        for _ in range(STEPS):
            state, updates = trial(state, tree(lambda s: 0.3 + random.normal(size=s)))
            tried.append(jax.device_get(jax.tree.leaves(updates)))
    for path, factor, *each in zip(paths, factors, *tried, strict=True):
        moved = [x for x in each if (x[0, 0] != x[0, 1]).any()]
        if moved and not _is_divided(np.float64(moved[-1]), factor):
            raise ValueError(
                f"the optimizer does not divide updates of params{jax.tree_util.keystr(path)} by "
                "the root of its nu, as Adam does: keep a second moment beside it: moment = "
                "optax.scale_by_rms(), in every step _, state = moment.update(mean_gradient, "
                "state), and pass moment and that state."
            )


def _is_divided(updates, factor):
    """Whether updates, or their change by a gradient, are `factor` times smaller, but for one."""
    for before, after in (updates[:, 0], updates[:, 0] - updates[:, 1]):
        ratio = after * factor / np.where(before == 0, np.nan, before)
        if np.allclose(ratio, ratio.mean(), rtol=0.05):
            return True
    return False


def _check_leaves(leaves, moments):
    shapes = [v.shape for v in moments]
    listed = isinstance(leaves, list | tuple) and all(
        isinstance(leaf, SketchLeaf) for leaf in leaves
    )
    if not listed or shapes != [leaf.shape for leaf in leaves]:
        raise ValueError(
            f"leaves are {leaves!r} and params have the shapes {shapes}: pass what "
            "sketch_plan returns for these params."
        )


def _means(v, leaf: SketchLeaf | None):
    """The moment; for a sketched leaf its means over columns and over rows, for every slice.

    All rows of a look-up table get the table's mean.
    """
    if leaf is None or leaf.how != "sketched":
        return v
    rows, cols = ((*range(leaf.stack), *side) for side in (leaf.rows, leaf.cols))
    means = Factors(_mean(v, rows), _mean(v, cols))
    if leaf.table:
        equal_rows = jnp.broadcast_to(_mean(v, range(leaf.stack)), means.rows.shape)
        return means._replace(rows=equal_rows)
    return means


def _mean(v, kept):
    return jnp.mean(v, [i for i in range(v.ndim) if i not in kept], keepdims=True)


def _inverse(moment, leaf, common, power, eps):
    if not isinstance(moment, Factors):
        return _over(moment, common, power, eps)
    mean = _mean(moment.rows, range(leaf.stack))  # v_rc = rows_r cols_c / mean
    of_rows = _over(moment.rows, mean, power, eps)
    return Factors(of_rows, _over(moment.cols, common, power, eps))


def _over(v, common, power, eps):
    """The scale from a moment; one where the common mean is zero or not finite."""
    size = (v / jnp.where(common > 0, common, 1.0)) ** power
    return jnp.where(common > 0, 1 / (size + eps), 1.0)
