"""The step and the sync of a round, and local steps by a plan as one optax transformation."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from local_opt import opt_state as state_lib
from local_opt.corrections import Correction
from local_opt.exchange import no_residual, synchronize_changes
from local_opt.formats import Compressor, check_compressor
from local_opt.mean import averaged, check_scalar, check_varying, if_counted, moved_from, pmean
from local_opt.opt_state import LOCAL, check_call, check_state, checked
from local_opt.plans import SyncPlan, check_plan, syncs_after_traced
from local_opt.workers import AxisName, check_kind, in_scope, wide_type
from syncopate import mesh
from syncopate.plans import is_whole
from syncopate.workers import AXIS


class Rounds(NamedTuple):
    """The steps and the sync of a round: pure functions for one worker.

    Attributes:
      init: `params -> state`.
      update: `(grads, state, params, **extra) -> (updates, state)`, as in optax: one step of this
        worker, without any collective unless `in_step`.
      sync: `(params, state, *, weight=None, **extra) -> (params, state)`, after the round's last
        step. It overwrites the parameters, which are then bitwise equal on all workers. With an
        outer optimizer, a compressor or a correction, workers must start from equal parameters.
      in_step: whether every step averages gradients, and the sync does nothing. Parameters and
        state are then equal on all workers, so one copy of them is enough.
      drift: `state -> float32[]`, |x_w - x_bar| / |x_bar| at the last sync; None if not measured.
    """

    init: Callable
    update: Callable
    sync: Callable
    in_step: bool = False
    drift: Callable | None = None


class LocalState(NamedTuple):
    """The state of one worker in `local_rounds`."""

    since: Int[Array, ""]  # steps since the last sync
    inner: Any
    anchor: Any = ()  # the parameters after the last sync; float32 with `outer`; () if not needed
    outer: Any = ()  # state of the outer optimizer, equal on all workers
    residual: Any = ()  # what compression has lost of this worker's changes; () without feedback
    drift: Float[Array, ""] | tuple[()] = ()  # at the last sync; () if it is not measured
    correction: Any = ()  # state of the correction; () without one


def local_rounds(
    inner: optax.GradientTransformation,
    *,
    axis_name: AxisName = AXIS,
    sync_opt_state: str | Mapping[str, str] = LOCAL,
    outer: optax.GradientTransformation | None = None,
    compress: Compressor | None = None,
    correction: Correction | None = None,
    specs: PyTree[PartitionSpec] | None = None,
    drift: bool = False,
) -> Rounds:
    """Local steps: each worker steps alone, and a sync averages the parameters.

    Step: x_w <- x_w + inner(g_w). Sync: x_w <- x_bar = 1/W sum_v x_v, or with an outer optimizer
    x_w <- a + outer(a - x_bar), where the anchor a is the parameters after the last sync.

    With an outer optimizer, a compressor or a correction, x_bar = a + 1/W sum_v (x_v - a). So
    parameters that no worker has moved stay bitwise equal. With an outer optimizer, the anchor of
    narrow parameters is float32, because outer steps may be smaller than their rounding. Plain
    averaging has no anchor. Where nothing moves, it may add a rounding error, which stops growing
    at about 1e-6 |x|.

    `sync(params, state, weight=v_w)` weighs the workers, for example by tokens or steps, as in
    `pmean`; averaged optimizer state has the same weights. A worker with weight zero, such as one
    whose loss is not finite, gets the same mean as the others and keeps its local state. If all
    weights are zero, or one is negative or not finite, all parameters become NaN: a compiled
    program cannot raise an error, and skipping the sync would hide the wrong weights.

    Args:
      inner: any optax optimizer; it gets this worker's gradient.
      axis_name: the workers' axis, bound by `jax.vmap` or `jax.shard_map`; None for the only named
        axis in scope; () for one worker, under a plain `jax.jit`.
      sync_opt_state: what a sync does with the optimizer state. One word is for all floating
        leaves: "local" (each worker keeps its own, as in the papers), "mean" or "reset" (to the
        initial value). A dict has words for fields of optax' states, as {"mu": "mean", "0.nu":
        "mean"}: the longest matching name counts, and other fields stay local. Names of parameters
        do not match, and `mu` cannot be averaged without the `nu` that divides it. Integers, such
        as counts, are reset only by name.
      outer: an optax optimizer that takes a - x_bar as its gradient. Its extra argument `period`,
        float32[], is the number of steps in the round, a weighted mean over the workers. None is
        plain averaging.
      compress: the format in which the parameters' changes since the last sync are sent, as
        `quantize("int8")`; None for no rounding. The optimizer state is never rounded.
      correction: `scaffold` or `fedprox`, against drift between syncs; not with a compressor.
      specs: if a worker spans several devices, how its parameters are split over them: a `jax.P`
        per leaf, or one for all, without the workers' axis. The optimizer state is split in the
        same way. Needed with a compressor, and for the drift if all axes are manual; see
        docs/use/meshes.md.
      drift: whether a sync measures |x_w - x_bar| / |x_bar| for `Rounds.drift`, which reads the
        parameters two more times; 0 for a worker with weight zero.

    Returns:
      A `Rounds`.

    Raises:
      ValueError: for unknown or conflicting options. From `init`, for fields that the optimizer
        state lacks, local fields that would undo a sync, or parameters that are not floating. From
        `update` and `sync`, for gradients or states of other parameters or another optimizer, or
        for gradients whose types show that JAX has summed them over the workers.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from syncopate import local_opt
      >>> rounds = local_opt.local_rounds(optax.sgd(0.5))
      >>> x = jnp.array([1.0, 1.0])  # two workers
      >>> state = jax.vmap(rounds.init)(x)
      >>> updates, state = jax.vmap(rounds.update)(jnp.array([2.0, -4.0]), state, x)
      >>> x, state = jax.vmap(rounds.sync, axis_name="worker")(x + updates, state)
      >>> x.tolist()
      [1.5, 1.5]

    References:
      Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023,
      https://arxiv.org/abs/2311.08105
    """
    check_compressor(compress)
    if not isinstance(correction, Correction | None):
        raise ValueError(f"correction is {correction!r}: pass scaffold() or fedprox(0.1).")
    if correction and compress:
        raise ValueError(
            f"the compressor ({compress.rule}) rounds what workers send, and a correction would "
            "mistake the rounding for drift: leave out correction= or compress=."
        )
    if not isinstance(drift, bool):
        raise ValueError(f"drift is {drift!r}: pass True to measure it at every sync, or False.")
    mesh.check_specs(specs, axis_name)
    return rounds_of(
        Local(
            checked(inner),
            axis_name,
            state_lib.checked_policies(sync_opt_state),
            None if outer is None else checked(outer, "outer"),
            compress,
            correction or Correction(init=lambda params: ()),  # which changes nothing
            specs,
            drift,
            anchored=not (outer is None and compress is None and correction is None),
        )
    )


class Local(NamedTuple):
    """The checked options of `local_rounds`.

    With an anchor, a sync averages changes from it, so that unmoved parameters stay bitwise equal.
    """

    inner: optax.GradientTransformationExtraArgs
    axis_name: AxisName
    policies: Mapping[str, str]
    outer: optax.GradientTransformationExtraArgs | None
    compress: Compressor | None
    correction: Correction
    specs: PyTree[PartitionSpec] | None
    drift: bool
    anchored: bool


def rounds_of(of: Local) -> Rounds:
    """The pure functions of `local_rounds`."""
    init = functools.partial(_init, of)

    def update(grads, state, params=None, **extra):
        check_call(init, state, params, grads)
        check_varying(grads, of.axis_name)
        grads = of.correction.gradient(grads, state.correction, params, state.anchor)
        updates, inner = of.inner.update(grads, state.inner, params, **extra)
        updates, correction = of.correction.update(updates, state.correction, **extra)
        return updates, state._replace(inner=inner, since=state.since + 1, correction=correction)

    sync = functools.partial(_sync, of)
    return Rounds(init, update, sync, drift=(lambda state: state.drift) if of.drift else None)


@jax.transfer_guard("allow")
def _init(of: Local, params):
    check_kind(params)
    state = state_lib.without_aliases(of.inner.init(params), params)
    chosen = state_lib.policy_of_leaves(state, of.policies, params)
    state_lib.check_survives(state, chosen)
    state_lib.check_moments(state, chosen)
    anchor = state_lib.wide_copy(params) if of.outer else jax.tree.map(jnp.copy, params)
    typed = lambda tree: state_lib.floating_as(tree, params, of.axis_name)  # noqa: E731
    state = LocalState(
        since=jnp.zeros((), jnp.int32),
        inner=typed(state),
        anchor=anchor if of.anchored else (),
        outer=state_lib.without_aliases(of.outer.init(anchor), anchor) if of.outer else (),
        residual=typed(no_residual(params, of.compress)),
        drift=typed(jnp.zeros((), jnp.float32) if of.drift else ()),
        correction=typed(of.correction.init(params)),
    )
    return state_lib.in_place(state, params, of.specs)


def _sync(of: Local, params, state, *, weight=None, **extra):
    del extra
    check_call(functools.partial(_init, of), state, params, params)
    given, axis = (params, state), in_scope(of.axis_name)
    mesh.check_specs(of.specs, axis)
    check_varying(params, axis, all_of=True)
    params = jax.tree.map(jnp.asarray, params)
    chosen = state_lib.policy_of_leaves(state.inner, of.policies, params)
    pairs = zip(jax.tree.leaves(state.inner), chosen, strict=True)
    fields = [leaf for leaf, policy in pairs if policy == state_lib.MEAN]
    change = moved_from(state.anchor, params) if of.anchored else params
    steps = state.since.astype(jnp.float32) if of.outer else ()
    (mean, fields, steps), relative_weight, totals = averaged(
        (() if of.compress else change, fields, steps),
        axis,
        weight,
        of.correction.counts(state.correction),
    )
    residual = state.residual
    if of.compress is not None:
        mean, residual = synchronize_changes(
            params,
            axis_name=axis,
            anchor=state.anchor,
            compressor=of.compress,
            residual=residual,
            specs=of.specs,
            relative_weight=relative_weight,
        )
    change = if_counted(change, mean, relative_weight)
    anchor, outer = _after_round(of, state, mean, steps)
    new = jax.tree.map(lambda a, x: a.astype(x.dtype), anchor, params)
    of_mean = moved_by(state.anchor, mean) if of.anchored else mean
    state = LocalState(
        since=jnp.zeros_like(state.since),
        inner=state_lib.placed(
            state.inner, chosen, fields, lambda: state_lib.without_aliases(of.inner.init(new), new)
        ),
        anchor=jax.tree.map(jnp.copy, anchor) if of.anchored else (),
        outer=outer,
        residual=residual,
        drift=state_lib.distance(change, mean, of_mean, of.specs) if of.drift else (),
        correction=of.correction.sync(
            state.correction,
            change=change,
            mean=mean,
            totals=totals,
            axis_name=axis,
            relative_weight=relative_weight,
        ),
    )
    return mesh.varying_like(state_lib.in_place((new, state), params, of.specs), given)


def moved_by(anchor: PyTree, change: PyTree) -> PyTree:
    """a + d, added in float32 or wider, in the anchor's type."""

    def moved(a, d):
        wide = wide_type(a.dtype)
        return (a.astype(wide) + d.astype(wide)).astype(a.dtype)

    return jax.tree.map(moved, anchor, change)


def _after_round(of: Local, state: LocalState, mean: PyTree, period: Any) -> tuple:
    """(parameters, outer state) after a round of `period` steps, from its mean (change)."""
    if not of.anchored:
        return mean, ()
    if of.outer is None:
        return moved_by(state.anchor, mean), ()
    outer = of.outer

    def step(state, anchor, mean):
        change = jax.tree.map(lambda a, d: -d.astype(a.dtype), anchor, mean)
        updates, state = outer.update(change, state, anchor, period=_snapped(period))
        return optax.apply_updates(anchor, updates), state

    if not jax.sharding.get_abstract_mesh().manual_axes:
        return step(state.outer, state.anchor, mean)
    # Devices hold arrays [1, ...]. In that shape XLA updates momentum and anchor in place. Without
    # the leading axis it would copy them and compute momentum twice.
    rows = jax.tree.map(lambda x: jnp.expand_dims(x, 0), (state.outer, state.anchor, mean))
    return jax.tree.map(lambda x: jnp.squeeze(x, 0), jax.vmap(step)(*rows))


def _snapped(period):
    """The mean number of steps, rounded to a whole number if it is within rounding of one."""
    whole = jnp.round(period)
    return jnp.where(jnp.abs(period - whole) <= 1e-6 * whole, whole, period)


def parallel_rounds(inner: optax.GradientTransformation, *, axis_name: AxisName = AXIS) -> Rounds:
    """Data-parallel training: every step takes the mean gradient of all workers.

    x <- x + inner(1/W sum_w g_w) in a step; a sync does nothing. `update(..., weight=v_w)` weighs
    the gradients, as `pmean` does. Workers that start equal stay bitwise equal.

    Args:
      inner: any optax optimizer; it gets the mean gradient, computed in float32.
      axis_name: the workers' axis or axes, bound by `jax.vmap` or `jax.shard_map`.

    Returns:
      A `Rounds` whose state is the inner optimizer's and whose `sync` returns its arguments.

    Raises:
      ValueError: from `init`, for parameters that are not floating; from `sync`, for a weight.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from syncopate import local_opt
      >>> rounds = local_opt.parallel_rounds(optax.sgd(0.5))
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

    @jax.transfer_guard("allow")
    def init(params):
        check_kind(params)
        return state_lib.without_aliases(inner.init(params), params)

    def update(grads, state, params=None, *, weight=None, **extra):
        check_call(init, state, params, grads)
        check_varying(grads, axis_name)
        mean = averaged(grads, axis_name, weight).mean
        return inner.update(mean, state, params, **extra)

    def sync(params, state, *, weight=None, **extra):
        del extra
        check_call(init, state, params, params)
        if weight is not None:
            raise ValueError(
                f"weight is {weight!r} at a sync of parallel_rounds, where every step averages "
                "gradients: pass it to update, or leave it out."
            )
        return params, state

    return Rounds(init, update, sync, in_step=True)


class AccumulateState(NamedTuple):
    """The state of one worker in `accumulated_rounds`; all but `mean` is equal on all workers."""

    since: Int[Array, ""]  # steps since the last sync
    inner: Any
    mean: Any  # float32, this worker's mean gradient since the last sync


def accumulated_rounds(
    inner: optax.GradientTransformation, *, axis_name: AxisName = AXIS
) -> Rounds:
    """Gradient accumulation: one inner step per round, with the mean gradient of its batches.

    x <- x + inner(1/W sum_w 1/H sum_h g_wh), all gradients at the round's first parameters. With
    H = 1 this is data-parallel training; with one worker and constant H it is `optax.MultiSteps`.
    `sync(..., weight=v_w)` weighs the workers' mean gradients, as `pmean` does.

    Args:
      inner: any optax optimizer; it gets the extra arguments of `sync`.
      axis_name: the workers' axis, bound by `jax.vmap` or `jax.shard_map`.

    Returns:
      A `Rounds` whose `update` returns zeros.

    Raises:
      ValueError: from `init`, for parameters that are not floating.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from syncopate import local_opt
      >>> rounds = local_opt.accumulated_rounds(optax.sgd(0.5))
      >>> x = jnp.array([1.0, 1.0])  # two workers, with two batches each
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

    @jax.transfer_guard("allow")
    def init(params):
        check_kind(params)
        inner_state = state_lib.without_aliases(inner.init(params), params)
        state = AccumulateState(jnp.zeros((), jnp.int32), inner_state, state_lib.wide_zeros(params))
        return state_lib.floating_as(state, params, axis_name)

    def update(grads, state, params=None, **extra):
        del extra
        check_call(init, state, params, grads)
        check_varying(grads, axis_name)
        since = state.since + 1
        mean = jax.tree.map(
            lambda m, g: m + (g.astype(m.dtype) - m) / since.astype(m.real.dtype), state.mean, grads
        )
        return jax.tree.map(jnp.zeros_like, grads), AccumulateState(since, state.inner, mean)

    def sync(params, state, *, weight=None, **extra):
        check_call(init, state, params, params)
        given, gradient = params, pmean(state.mean, axis_name=axis_name, weight=weight)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params)
        updates, inner_state = inner.update(gradient, state.inner, params, **extra)
        params = optax.apply_updates(params, updates)
        zero = jnp.zeros_like(state.since)
        new = AccumulateState(zero, inner_state, jax.tree.map(jnp.zeros_like, state.mean))
        return mesh.varying_like((params, new), (given, state))

    return Rounds(init, update, sync)


class PlannedState(NamedTuple):
    """The state of one worker; the counters are equal on all workers."""

    num_steps: Int[Array, ""]  # steps taken, by which the plan decides
    num_syncs: Int[Array, ""]  # syncs so far; nothing depends on it
    rounds: Any  # the state of the `Rounds`


def local_steps(
    inner: optax.GradientTransformation,
    plan: SyncPlan,
    *,
    axis_name: AxisName = AXIS,
    sync_opt_state: str | Mapping[str, str | SyncPlan] = LOCAL,
    outer: optax.GradientTransformation | None = None,
    compress: Compressor | None = None,
    correction: Correction | None = None,
    specs: PyTree[PartitionSpec] | None = None,
    drift: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Local steps with any optax optimizer: workers average their parameters after each round.

    x_w <- x_w + inner(g_w); after the last step of a round, x_w <- 1/W sum_v x_v.

    Put it last in an `optax.chain`, because transformations after it would change the mean. Do not
    wrap it in a transformation that skips or changes steps (docs/use/optax.md has a table).
    `local_steps` cannot detect such a wrapper. To test a loop, call `check_synced` after a step
    that ends a round.

    The update at a sync is x_bar - x_w, so workers are equal up to its rounding, which does not
    accumulate. For bitwise equal workers, and no conditional in the step, use `local_rounds` and
    call its `sync` if `plan.syncs_after(step)`. With H = 1 and SGD this is data-parallel training.
    With Adam it is not, because each worker divides by the second moment of its own gradients.

    Args:
      inner: any optax optimizer; it gets this worker's gradient.
      plan: when to synchronise; equal on all workers (`plan.check_same()`). A state may continue
        under another plan, which decides from that step on. A step beyond the plan's end is refused
        if its number is concrete; a compiled step cannot refuse it and synchronises.
      axis_name: the workers' axis, bound by `jax.vmap` or `jax.shard_map`; None for the only named
        axis in scope; () for one worker, under a plain `jax.jit`.
      sync_opt_state: see `local_rounds`. Here a field may have its own plan, as {"mu": plan_u,
        "nu": plan_v}: it is averaged where that plan syncs (DES-LOC). "mean" then stands for
        `plan`.
      outer, compress, correction, specs, drift: see `local_rounds`.

    Returns:
      A GradientTransformationExtraArgs. Its `update` needs `params` and takes these arguments.
      `sync` is None (the plan decides, by a conditional that holds the only collective), or a
      static bool (the host has decided, without a conditional). `step`, int32[], is the loop's
      count of steps, in place of the state's: one number for all workers, so that `jax.vmap`
      computes a sync only where one is due. `weight` is as in the sync of `local_rounds`. An update
      is added, so it cannot replace parameters that are NaN: pass `optax.apply_if_finite` as
      `inner` to keep them finite. Other extra arguments go to `inner`, whose state is
      `state.rounds.inner`.

    Raises:
      ValueError: as `local_rounds`; if `plan` is not a plan; from `update`, without params or for
        a step beyond the plan.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from syncopate import local_opt
      >>> plan = local_opt.constant(2, total_steps=4)
      >>> opt = local_opt.local_steps(optax.sgd(1.0), plan)
      >>> x, target = jnp.zeros(2), jnp.array([1.0, 3.0])  # two workers
      >>> state = jax.vmap(opt.init)(x)
      >>> step = jax.vmap(lambda x, s, t: opt.update(0.5 * (x - t), s, x), axis_name="worker")
      >>> for _ in range(2):
      ...     update, state = step(x, state, target)
      ...     x = x + update
      >>> x.tolist(), state.num_syncs.tolist()
      ([1.5, 1.5], [1, 1])

    References:
      Stich, Local SGD Converges Fast and Communicates Little, 2019,
      https://arxiv.org/abs/1805.09767
      Gu et al., A Quadratic Synchronization Rule for Distributed Deep Learning, 2024,
      https://arxiv.org/abs/2310.14423
      Iacob et al., DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
      Models, 2025, https://arxiv.org/abs/2505.22549
    """
    check_plan(plan)
    sync_opt_state, of_fields = state_lib.split_policies(sync_opt_state, plan)
    rounds = local_rounds(
        inner,
        axis_name=axis_name,
        sync_opt_state=sync_opt_state,
        outer=outer,
        compress=compress,
        correction=correction,
        specs=specs,
        drift=drift,
    )
    overwrites = outer is not None or compress is not None

    @jax.transfer_guard("allow")
    def init(params):
        state = rounds.init(params)
        state_lib.check_fields(state.inner, sync_opt_state, of_fields, params)
        return PlannedState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), state)

    def update(updates, state, params=None, *, sync=None, step=None, weight=None, **extra):
        if params is None:
            raise ValueError("a sync averages parameters: call update(grads, state, params).")
        if sync is not None and step is not None:
            raise ValueError("sync and step are both given: pass step to let the plan decide.")
        if sync is not None and of_fields:
            raise ValueError(
                f"sync is {sync}, but fields of the state have their own plans: pass step instead."
            )
        for name, value, kind in (("sync", sync, jnp.bool_), ("step", step, jnp.integer)):
            if value is not None:
                check_scalar(name, value, kind)
        check_state(state, PlannedState)
        step = state.num_steps if step is None else step
        if sync is None and is_whole(step):  # not while it is traced
            plan.syncs_after(step)  # refuses a step beyond the plan
        updates, round_state = rounds.update(updates, state.rounds, params, **extra)
        # A sync's update needs the parameters' precision, which may differ from the gradients'.
        updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)

        def synced(updates, new_state):
            mean, new_state = rounds.sync(
                optax.apply_updates(params, updates), new_state, weight=weight, **extra
            )
            if lax.axis_size(in_scope(axis_name)) == 1 and not overwrites and weight is None:
                return updates, new_state  # one worker: the inner update, without rounding
            back = jax.tree.map(lambda m, p, u: (m - p).astype(u.dtype), mean, params, updates)
            return back, new_state

        step = jnp.asarray(step, jnp.int32)
        now = syncs_after_traced(plan, step) if sync is None else sync
        updates, round_state = _decide(now, synced, updates, round_state)
        for of, policies in of_fields:

            def averages(state, policies=policies):
                chosen = state_lib.policy_of_leaves(state, policies, params)
                pairs = zip(jax.tree.leaves(state), chosen, strict=True)
                fields = [leaf for leaf, policy in pairs if policy == state_lib.MEAN]
                means = averaged(fields, axis_name, weight).mean
                return (state_lib.placed(state, chosen, means, lambda: state),)

            now_of = syncs_after_traced(of, step)
            (inner_state,) = _decide(now_of, averages, round_state.inner)
            round_state = round_state._replace(inner=inner_state)
        counts = step + 1, state.num_syncs + jnp.asarray(now, jnp.int32)
        num_steps, num_syncs = mesh.varying(counts, state.num_steps)  # typed as they were
        return updates, PlannedState(num_steps, num_syncs, round_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _decide(sync, synced, *operands):
    """`synced(operands)` at a sync, else the operands; no conditional for a bool `sync`."""
    if isinstance(sync, bool | np.bool_):
        return synced(*operands) if sync else operands
    # Under shard_map a mean is typed as equal on all workers, and a worker's own value as varying.
    # Cast both branches to one type.
    after = jax.eval_shape(synced, *operands)
    return lax.cond(
        sync,
        lambda *args: mesh.varying_like(synced(*args), operands),
        lambda *args: mesh.varying_like(args, after),
        *operands,
    )
