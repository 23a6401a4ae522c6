"""Rounds of local steps: what a step does, and what becomes of every field at the sync."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from local_opt.synchronize import check_wire, nothing_lost, synchronize, synchronize_changes
from local_opt.wires import Wire


class Rounds(NamedTuple):
    """The steps and the sync of a round, three pure functions for one worker.

    Fields:
      init: `params -> state`.
      update: `(grads, state, params, **extra) -> (updates, state)`, as optax's: one step of the
        worker's own, without any collective but in `parallel_rounds` and two levels.
      sync: `(params, state, **extra) -> (params, state)`, after the round's last step; overwrites,
        so that the parameters of all workers are bitwise equal after it.
    """

    init: Callable
    update: Callable
    sync: Callable


class LocalState(NamedTuple):
    """State of local steps of one worker."""

    since: jax.Array  # int32[], steps since the last sync
    inner: Any
    anchor: Any  # the parameters after the last sync; () where nothing needs them
    outer: Any  # of the outer optimizer; equal on all workers
    lost: Any  # what the wire has lost of this worker's changes; () for a wire without feedback
    drift: jax.Array  # float32[], |x_w - x_bar| / |x_bar| at the last sync


# What a sync can do with a field of the optimizer state.
LOCAL, MEAN, RESET = "local", "mean", "reset"


def local_rounds(
    inner: optax.GradientTransformation,
    *,
    axis_name,
    opt_state: str | Mapping[str, str] = LOCAL,
    outer: optax.GradientTransformation | None = None,
    wire: Wire | None = None,
    gradient_axis=None,
) -> Rounds:
    """Steps of each worker's own, then the mean over the workers.

    x_w <- x_w + inner(g_w) in a step; x <- x_bar = 1/W sum_w x_w in the sync, or with an outer
    optimizer x <- a + outer(a - x_bar), where a are the parameters after the last sync.

    Args:
      inner: the workers' optimizer.
      axis_name: of the workers, bound by `jax.vmap` or `jax.shard_map`.
      opt_state: what becomes of the optimizer state at a sync: "local" (each worker keeps its own,
        as in the papers), "mean" or "reset" (to its first value), for all floating leaves, or by
        name of a field, as {"mu": "mean", "nu": "reset"}; fields without a name stay local. A
        dotted name is part of a path, as "0.trace"; of several the longest counts. Whole numbers,
        as counts, are only reset by name.
      outer: any optax transformation, of the change a - x_bar as a gradient; None is plain
        averaging. It is passed the round's steps as the extra argument `period`.
      wire: the format in which the parameters' changes travel, as `WIRES["int8"]`; see
        `synchronize_changes`. None for no rounding. Averaged fields of the optimizer state are
        never rounded.
      gradient_axis: for two levels on a mesh with two axes: gradients are averaged over this axis
        (the devices of a host) in every step, parameters over `axis_name` (the hosts) at a sync.
        None for one level, without a collective in the step.

    Returns:
      A `Rounds`.

    Raises:
      ValueError: for a policy that is not known, or a wire that is none; from `init`, for a name
        that no field of the optimizer state has, or parameters that are not floating.

    Example:
      >>> import jax, jax.numpy as jnp, optax, local_opt
      >>> rounds = local_opt.local_rounds(optax.sgd(0.5), axis_name="worker")
      >>> x = jnp.array([1.0, 1.0])  # two workers
      >>> state = jax.vmap(rounds.init)(x)
      >>> updates, state = jax.vmap(rounds.update)(jnp.array([2.0, -4.0]), state, x)
      >>> x, state = jax.vmap(rounds.sync, axis_name="worker")(x + updates, state)
      >>> x.tolist()
      [1.5, 1.5]

    References:
      Gu et al., A Quadratic Synchronization Rule for Distributed Deep Learning, 2024,
      https://arxiv.org/abs/2310.14423
      Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023,
      https://arxiv.org/abs/2311.08105
    """
    policies = _checked_policies(opt_state)
    inner = optax.with_extra_args_support(inner)
    outer = outer and optax.with_extra_args_support(outer)
    anchored = outer is not None or wire is not None
    if wire is not None:
        check_wire(wire)

    def init(params):
        check_floating(params)
        state = inner.init(params)
        _policy_of_leaves(state, policies)
        return LocalState(
            since=jnp.zeros((), jnp.int32),
            inner=state,
            # A copy: both are donated to the step, and one buffer cannot be given away twice.
            anchor=jax.tree.map(jnp.copy, params) if anchored else (),
            outer=outer.init(params) if outer else (),
            lost=nothing_lost(params, wire),
            drift=jnp.zeros((), jnp.float32),
        )

    def update(grads, state, params=None, **extra):
        if gradient_axis is not None:
            grads = mean_gradient(grads, gradient_axis)
        updates, inner_state = inner.update(grads, state.inner, params, **extra)
        return updates, state._replace(inner=inner_state, since=state.since + 1)

    def sync(params, state, **extra):
        del extra
        chosen = _policy_of_leaves(state.inner, policies)
        fields = [x for x, p in zip(jax.tree.leaves(state.inner), chosen, strict=True) if p == MEAN]
        lost = state.lost
        if wire is None:
            mean, fields = synchronize((params, fields), axis_name=axis_name)
        else:
            fields = synchronize(fields, axis_name=axis_name)
            mean, lost = synchronize_changes(
                params, axis_name=axis_name, anchor=state.anchor, wire=wire, lost=lost
            )
        drift = relative_distance(params, mean)
        inner_state = _placed(state.inner, chosen, fields, lambda: inner.init(mean))
        outer_state = state.outer
        if outer:
            change = jax.tree.map(jnp.subtract, state.anchor, mean)
            updates, outer_state = outer.update(
                change, outer_state, state.anchor, period=state.since
            )
            mean = optax.apply_updates(state.anchor, updates)
        anchor = jax.tree.map(jnp.copy, mean) if anchored else ()
        zero = jnp.zeros_like(state.since)
        return mean, LocalState(zero, inner_state, anchor, outer_state, lost, drift)

    return Rounds(init, update, sync)


def _placed(opt_state, chosen, means, initial):
    """The optimizer state with averaged and reset leaves in their places."""
    leaves, treedef = jax.tree.flatten(opt_state)
    first = jax.tree.leaves(initial()) if RESET in chosen else leaves
    means = iter(means)
    new = {LOCAL: lambda x, x0: x, MEAN: lambda x, x0: next(means), RESET: lambda x, x0: x0}
    leaves = [new[p](x, x0) for p, x, x0 in zip(chosen, leaves, first, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def _checked_policies(opt_state):
    """{name of a field: policy}, where the empty name stands for all floating leaves."""
    policies = {"": opt_state} if isinstance(opt_state, str) else dict(opt_state)
    for name, policy in policies.items():
        if policy not in (LOCAL, MEAN, RESET):
            raise ValueError(
                f"opt_state is {policy!r}{f' for {name!r}' if name else ''}: it must be "
                f"{LOCAL!r}, {MEAN!r} or {RESET!r}."
            )
    return policies


def relative_distance(params, mean) -> jax.Array:
    """How far a worker has drifted, in one number: |x_w - x_bar| / |x_bar| over all leaves.

    Args:
      params: x_w, this worker's tree before a sync.
      mean: x_bar, the tree after it.

    Returns:
      float32[], at least 0. `LocalState.drift` holds it for the last sync.

    Example:
      >>> import jax.numpy as jnp, local_opt
      >>> float(local_opt.relative_distance(jnp.array([3.0, 4.5]), jnp.array([3.0, 4.0])))
      0.10000000149011612
    """

    def norm(tree):
        squares = [jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32))) for x in tree]
        return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))

    leaves = [(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(mean), strict=True)]
    distance = norm([a - b for a, b in leaves])
    return distance / jnp.maximum(norm([b for _, b in leaves]), jnp.finfo(jnp.float32).tiny)


def _policy_of_leaves(opt_state, policies):
    """One policy per leaf of the optimizer state, in order."""
    paths = jax.tree_util.tree_flatten_with_path(opt_state)[0]
    used, chosen = set(), []
    for path, leaf in paths:
        text = "." + jax.tree_util.keystr(path, simple=True, separator=".") + "."
        names = [name for name in policies if not name or f".{name}." in text]
        names.sort(key=len, reverse=True)  # the most specific one
        policy = policies[names[0]] if names else LOCAL
        floating = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        if policy == MEAN and names[0] and not floating:
            raise ValueError(
                f"opt_state averages {text.strip('.')!r}, which is {jnp.result_type(leaf)}: only "
                "floating leaves have a mean. Name a floating field, or reset this one."
            )
        used.update(names)
        chosen.append(policy if floating or (names and names[0]) else LOCAL)
    missing = [name for name in policies if name and name not in used]
    if missing:
        known = sorted({p for path, _ in paths for p in _names(path)})
        raise ValueError(
            f"opt_state names {missing}, which the optimizer state does not have: use one of "
            f"{known}."
        )
    return chosen


def _names(path):
    return [str(part.name) for part in path if hasattr(part, "name")]


def mean_gradient(grads, axis_name):
    """The mean over an axis, or a tuple of axes, in float32 or wider, and cast back."""
    wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
    mean = jax.lax.pmean(wide, axis_name)
    return jax.tree.map(lambda m, g: m.astype(g.dtype), mean, grads)


def check_floating(params) -> None:
    """Raises ValueError for parameters that cannot be trained and averaged."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path)} is {jnp.result_type(leaf)}: only floating "
                "parameters can be trained and averaged. Keep it outside the parameters."
            )
