"""Rounds of local steps: what a step does, and what becomes of every field at the sync."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from local_opt.drift import Correction, check_correction
from local_opt.state import (
    LOCAL,
    MEAN,
    PARAMS,
    added_up,
    apart,
    check_floating,
    check_survives,
    checked_policies,
    floating_as,
    in_place,
    placed,
    policies_of_parts,
    policy_of_leaves,
)
from local_opt.sync import nothing_lost, synchronize, synchronize_changes
from local_opt.wires import Wire, check_wire
from syncopate import mesh


class Rounds(NamedTuple):
    """The steps and the sync of a round, three pure functions for one worker.

    Fields:
      init: `params -> state`.
      update: `(grads, state, params, **extra) -> (updates, state)`, as optax's: one step of the
        worker's own, without any collective unless `in_step`.
      sync: `(params, state, **extra) -> (params, state)`, after the round's last step; overwrites,
        so that the parameters of all workers are bitwise equal after it.
      in_step: whether workers meet in every step, by their gradients, and a sync has nothing to do.
        Parameters and state are then equal on all workers, so one copy of them does.
      drift: `state -> float32[]`, how far the worker was from the mean at the last sync; None
        where its parameters are never apart.
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
        name of a field, as {"mu": "mean", "nu": "reset"}; fields without a name stay local. A
        dotted name is part of a path, as "0.trace"; of several the longest counts. Whole numbers,
        as counts, are only reset by name.
        `sync(..., parts=("params", "nu"))`, static, does what is due of these alone, by plans of
        their own (`{"params": plan, "nu": other}`, as in DES-LOC); a state under one policy is the
        part "opt_state".
      outer: any optax transformation, of the change a - x_bar as a gradient; None is plain
        averaging. It is passed the round's steps as the extra argument `period`.
      wire: the format in which the parameters' changes since the last sync travel, as
        `WIRES["int8"]`; None for no rounding. Averaged fields of the optimizer state are never
        rounded.
      correction: of the drift between two syncs, `control_variates` or `proximal`; no collective
        is added. None for none, and with a wire.
      specs: for a worker that is several devices: how its parameters are split over them, a
        `jax.P` per leaf or one for all, without the workers' axis. Optimizer state is then split
        as they are. Needed by a wire, and for the drift where all axes are manual. See
        docs/your_own_loop.md.

    Returns:
      A `Rounds`.

    Raises:
      ValueError: for a policy that is not known, a wire or a correction that is none, or both, or
        specs that name the workers' axis; from `init`, for a name that no field of the optimizer
        state has, for fields that would undo a sync and stay local, or parameters that are not
        floating; from `sync`, for parameters that the wire cannot carry, or a mesh with axes
        beside the workers', without specs.

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
      Iacob et al., DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
      Models, 2025, https://arxiv.org/abs/2505.22549
    """
    policies = checked_policies(opt_state)
    inner = optax.with_extra_args_support(inner)
    outer = outer and optax.with_extra_args_support(outer)
    anchored = outer is not None or wire is not None
    if wire is not None:
        check_wire(wire)
    if correction is not None:
        check_correction(correction, wire)
    mesh.check_specs(specs, axis_name)

    def init(params):
        check_floating(params)
        state = apart(inner.init(params), params)
        check_survives(state, policy_of_leaves(state, policies))
        state = LocalState(
            since=jnp.zeros((), jnp.int32),
            inner=floating_as(state, params, axis_name),
            # A copy: both are donated to the step, and one buffer cannot be given away twice.
            anchor=jax.tree.map(jnp.copy, params) if anchored else (),
            outer=apart(outer.init(params), params) if outer else (),
            lost=floating_as(nothing_lost(params, wire), params, axis_name),
            drift=floating_as(jnp.zeros((), jnp.float32), params, axis_name),
            correction=floating_as(correction.init(params), params, axis_name)
            if correction
            else (),
        )
        return in_place(state, params, specs)

    def update(grads, state, params=None, **extra):
        own = state.correction
        if correction:
            grads = correction.gradient(grads, own, params)
        updates, inner_state = inner.update(grads, state.inner, params, **extra)
        if correction:
            updates, own = correction.update(updates, own, **extra)
        state = state._replace(inner=inner_state, since=state.since + 1, correction=own)
        return updates, state

    def sync(params, state, *, parts=None, **extra):
        del extra
        given = params, state
        moves = parts is None or PARAMS in parts
        chosen = policy_of_leaves(state.inner, policies_of_parts(policies, parts))
        fields = [x for x, p in zip(jax.tree.leaves(state.inner), chosen, strict=True) if p == MEAN]
        exact = params if moves and wire is None else ()
        mean, fields = synchronize((exact, fields), axis_name=axis_name)
        lost = state.lost
        if not moves:
            mean = params
        elif wire is not None:
            mean, lost = synchronize_changes(
                params, axis_name=axis_name, anchor=state.anchor, wire=wire, lost=lost, specs=specs
            )
        state = state._replace(
            inner=placed(state.inner, chosen, fields, lambda: apart(inner.init(mean), mean)),
            lost=lost,
        )
        new = renewed(params, mean, state) if moves else (params, state)
        return mesh.alike(in_place(new, params, specs), given)

    def renewed(params, mean, state):
        """The state of a round that has not begun, after what the outer optimizer makes of it."""
        drift, outer_state = _distance(params, mean, specs), state.outer
        new = mean
        if outer:
            change = jax.tree.map(jnp.subtract, state.anchor, mean)
            updates, outer_state = outer.update(
                change, outer_state, state.anchor, period=state.since
            )
            new = optax.apply_updates(state.anchor, updates)
        state = state._replace(
            since=jnp.zeros_like(state.since),
            anchor=jax.tree.map(jnp.copy, new) if anchored else (),
            outer=outer_state,
            drift=drift,
        )
        if correction:
            own = correction.sync(state.correction, own=params, mean=mean, new=new)
            state = state._replace(correction=own)
        return new, state

    return Rounds(init, update, sync, drift=lambda state: state.drift)


def _distance(params, mean, specs) -> jax.Array:
    """How far a worker has drifted: |x_w - x_bar| / |x_bar| over all leaves."""

    def norm(leaves):
        squares = [jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32))) for x in leaves]
        return jnp.sqrt(added_up(squares, of) + jnp.zeros((), jnp.float32))

    of = jax.tree.leaves(mesh.like(P() if specs is None else specs, params))
    leaves = [(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(mean), strict=True)]
    distance = norm([a - b for a, b in leaves])
    return distance / jnp.maximum(norm([b for _, b in leaves]), jnp.finfo(jnp.float32).tiny)
