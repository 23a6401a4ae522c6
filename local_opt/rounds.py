"""Rounds: what a step does and a sync, of local steps and of those that average gradients."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from local_opt.drift import Correction, check_correction
from local_opt.outer import checked, outer_step
from local_opt.state import (
    LOCAL,
    MEAN,
    PARAMS,
    apart,
    check_floating,
    check_survives,
    checked_policies,
    distance,
    floating_as,
    in_place,
    placed,
    policy_of_leaves,
    wide_zeros,
)
from local_opt.sync import nothing_lost, synchronize, synchronize_changes
from local_opt.wires import Wire, check_wire
from syncopate import mesh


class Rounds(NamedTuple):
    """The steps and the sync of a round: pure functions for one worker.

    Fields:
      init: `params -> state`.
      update: `(grads, state, params, **extra) -> (updates, state)`, as optax's: one step of the
        worker's own, without any collective unless `in_step`.
      sync: `(params, state, **extra) -> (params, state)`, after the round's last step; overwrites,
        so that the parameters of all workers are bitwise equal after it.
      in_step: whether workers meet in every step, by their gradients, and a sync has nothing to do.
        Parameters and state are then equal on all workers, so one copy of them does.
      drift: `state -> float32[]`, how far the worker was from the mean at the last sync, or None.
    """

    init: Callable
    update: Callable
    sync: Callable
    in_step: bool = False
    drift: Callable | None = None


class LocalState(NamedTuple):
    """State of local steps of one worker."""

    since: jax.Array  # int32[], steps since the last sync
    inner: Any
    anchor: Any  # the parameters after the last sync; () where nothing needs them
    outer: Any  # of the outer optimizer; equal on all workers
    lost: Any  # what the wire has lost of this worker's changes; () for a wire without feedback
    drift: jax.Array  # float32[], |x_w - x_bar| / |x_bar| at the last sync
    correction: Any = ()  # of the correction; () without one


def local_rounds(
    inner: optax.GradientTransformation,
    *,
    axis_name,
    opt_state: str | Mapping[str, str] = LOCAL,
    outer: optax.GradientTransformation | None = None,
    wire: Wire | None = None,
    correction: Correction | None = None,
    specs=None,
) -> Rounds:
    """Steps of each worker's own, then the mean over the workers.

    x_w <- x_w + inner(g_w) in a step; x <- x_bar = 1/W sum_w x_w in the sync, or with an outer
    optimizer x <- a + outer(a - x_bar), where a are the parameters after the last sync.

    Args:
      inner: the workers' optimizer.
      axis_name: of the workers, bound by `jax.vmap` or `jax.shard_map`.
      opt_state: what becomes of the optimizer state at a sync: "local" (each worker keeps its own,
        as in the papers), "mean" or "reset" (to its first value), for all floating leaves, or by
        name of a field, as {"mu": "mean", "0.nu": "reset"}, where the longest name counts; fields
        without one stay local. Whole numbers, as counts, are only reset by name.
        `sync(..., parts=("params", "nu"))`, static, does what is due of these alone, by plans of
        their own, as in DES-LOC; a state under one policy is the part "opt_state".
      outer: any optax transformation, of the change a - x_bar as a gradient; None is plain
        averaging. It is passed the round's steps as the extra argument `period`.
      wire: the format in which the parameters' changes since the last sync travel, as
        `WIRES["int8"]`; None for no rounding. Fields of the optimizer state are never rounded.
      correction: of the drift between two syncs, `control_variates` or `proximal`; not with a
        wire.
      specs: for a worker that is several devices: how its parameters are split over them, a
        `jax.P` per leaf or one for all, without the workers' axis. Optimizer state is then split
        as they are. Needed by a wire, and for the drift where all axes are manual. See
        docs/use/devices.md.

    Returns:
      A `Rounds`.

    Raises:
      ValueError: for an option that is not known, or two that exclude each other; from `init`, for
        fields that the optimizer state lacks, fields that would undo a sync and stay local, or
        parameters that are not floating; from `sync`, for what the wire cannot carry.

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
      Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023,
      https://arxiv.org/abs/2311.08105
      Iacob et al., DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
      Models, 2025, https://arxiv.org/abs/2505.22549
    """
    policies = checked_policies(opt_state)
    inner = checked(inner)
    outer = None if outer is None else checked(outer, "outer")
    anchored = outer is not None or wire is not None
    if wire is not None:
        check_wire(wire)
    if correction is None:
        correction = Correction(init=lambda params: ())  # which changes nothing
    else:
        check_correction(correction, wire)
    mesh.check_specs(specs, axis_name)

    def init(params):
        check_floating(params)
        state = apart(inner.init(params), params)
        check_survives(state, policy_of_leaves(state, policies))
        state = LocalState(
            since=jnp.zeros((), jnp.int32),
            inner=floating_as(state, params, axis_name),
            # A copy: one buffer cannot be given away twice.
            anchor=jax.tree.map(jnp.copy, params) if anchored else (),
            outer=apart(outer.init(params), params) if outer else (),
            lost=floating_as(nothing_lost(params, wire), params, axis_name),
            drift=floating_as(jnp.zeros((), jnp.float32), params, axis_name),
            correction=floating_as(correction.init(params), params, axis_name),
        )
        return in_place(state, params, specs)

    def update(grads, state, params=None, **extra):
        grads = correction.gradient(grads, state.correction, params)
        updates, inner_state = inner.update(grads, state.inner, params, **extra)
        updates, own = correction.update(updates, state.correction, **extra)
        return updates, state._replace(inner=inner_state, since=state.since + 1, correction=own)

    def sync(params, state, *, parts=None, **extra):
        del extra
        given = params, state
        moves = parts is None or PARAMS in parts
        chosen = policy_of_leaves(state.inner, policies, parts)
        fields = [x for x, p in zip(jax.tree.leaves(state.inner), chosen, strict=True) if p == MEAN]
        exact = params if moves and wire is None else ()
        mean, fields = synchronize((exact, fields), axis_name=axis_name)
        if not moves:
            mean = params
        elif wire is not None:
            mean, lost = synchronize_changes(
                params, axis_name=axis_name, anchor=state.anchor, wire=wire, lost=state.lost,
                specs=specs,
            )  # fmt: skip
            state = state._replace(lost=lost)
        first = lambda: apart(inner.init(mean), mean)  # noqa: E731
        state = state._replace(inner=placed(state.inner, chosen, fields, first))
        new = renewed(params, mean, state) if moves else (params, state)
        return mesh.alike(in_place(new, params, specs), given)

    def renewed(params, mean, state):
        """The state of a round that has not begun, after what the outer optimizer makes of it."""
        new, outer_state = outer_step(outer, state.outer, state.anchor, mean, state.since)
        return new, state._replace(
            since=jnp.zeros_like(state.since),
            anchor=jax.tree.map(jnp.copy, new) if anchored else (),
            outer=outer_state,
            drift=distance(params, mean, specs),
            correction=correction.sync(state.correction, own=params, mean=mean, new=new),
        )

    return Rounds(init, update, sync, drift=lambda state: state.drift)


def parallel_rounds(inner: optax.GradientTransformation, *, axis_name) -> Rounds:
    """Steps with the mean gradient of all workers.

    x <- x + inner(1/W sum_w g_w) in a step; nothing in a sync.

    Workers that start equal stay bitwise equal, so a loop may keep one copy of parameters and
    state for all of them, where other rounds need one per worker.

    Args:
      inner: any optax optimizer; it sees the mean gradient, taken in float32.
      axis_name: of the workers, or a tuple of names; bound by `jax.vmap` or `jax.shard_map`.

    Returns:
      A `Rounds` whose state is the inner optimizer's and whose `sync` returns what it is given.

    Raises:
      ValueError: from `init`, for parameters that are not floating.

    Example:
      >>> import jax, jax.numpy as jnp, optax, local_opt
      >>> rounds = local_opt.parallel_rounds(optax.sgd(0.5), axis_name="worker")
      >>> x = jnp.array([1.0, 1.0])  # two workers
      >>> step = jax.vmap(rounds.update, axis_name="worker")
      >>> updates, state = step(jnp.array([2.0, -4.0]), jax.vmap(rounds.init)(x), x)
      >>> (x + updates).tolist()
      [1.5, 1.5]

    References:
      Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
      https://arxiv.org/abs/1706.02677
    """
    inner = checked(inner)

    def init(params):
        check_floating(params)
        return apart(inner.init(params), params)

    def update(grads, state, params=None, **extra):
        return inner.update(synchronize(grads, axis_name=axis_name), state, params, **extra)

    return Rounds(init, update, lambda params, state, **extra: (params, state), in_step=True)


class AccumulateState(NamedTuple):
    """State of one worker; all but `mean` is equal on all workers."""

    since: jax.Array  # int32[], steps since the last sync
    inner: Any
    mean: Any  # float32, this worker's mean gradient since the last sync


def accumulated_rounds(inner: optax.GradientTransformation, *, axis_name) -> Rounds:
    """One step of the inner optimizer per round, with the mean gradient of all its batches.

    x <- x + inner(1/W sum_w 1/H sum_h g_wh), all gradients at the round's first parameters.
    With a plan that synchronises after every step this is data-parallel training; one worker with
    constant H is `optax.MultiSteps`.

    Args:
      inner: any optax optimizer; its extra arguments are those of `sync`.
      axis_name: of the workers, bound by `jax.vmap` or `jax.shard_map`.

    Returns:
      A `Rounds` whose `update` returns zeros.

    Raises:
      ValueError: from `init`, for parameters that are not floating.

    Example:
      >>> import jax, jax.numpy as jnp, optax, local_opt
      >>> rounds = local_opt.accumulated_rounds(optax.sgd(0.5), axis_name="worker")
      >>> x = jnp.array([1.0, 1.0])  # two workers, of which each takes two batches
      >>> state = jax.vmap(rounds.init)(x)
      >>> for grads in jnp.array([[2.0, -4.0], [3.0, -5.0]]):
      ...     _, state = jax.vmap(rounds.update)(grads, state)
      >>> jax.vmap(rounds.sync, axis_name="worker")(x, state)[0].tolist()
      [1.5, 1.5]

    References:
      Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, 2020,
      https://arxiv.org/abs/1808.07217
    """
    inner = checked(inner)

    def init(params):
        check_floating(params)
        own = apart(inner.init(params), params)
        state = AccumulateState(jnp.zeros((), jnp.int32), own, wide_zeros(params))
        return floating_as(state, params, axis_name)

    def update(grads, state, params=None, **extra):
        del params, extra
        since = state.since + 1
        mean = jax.tree.map(
            lambda m, g: m + (g.astype(m.dtype) - m) / since.astype(m.real.dtype), state.mean, grads
        )
        return jax.tree.map(jnp.zeros_like, grads), AccumulateState(since, state.inner, mean)

    def sync(params, state, **extra):
        given, gradient = params, synchronize(state.mean, axis_name=axis_name)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params)
        updates, inner_state = inner.update(gradient, state.inner, params, **extra)
        params = optax.apply_updates(params, updates)
        zero = jnp.zeros_like(state.since)
        new = AccumulateState(zero, inner_state, jax.tree.map(jnp.zeros_like, state.mean))
        return mesh.alike((params, new), (given, state))

    return Rounds(init, update, sync)
