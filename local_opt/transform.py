"""Local steps as one optax transformation, whose update synchronises where a plan says."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PyTree

from local_opt.corrections import Correction
from local_opt.formats import Wire
from local_opt.mean import check_scalar
from local_opt.opt_state import LOCAL
from local_opt.outer import check_call
from local_opt.plans import SyncPlan, check_plan
from local_opt.rounds import local_rounds, unchecked_calls
from local_opt.workers import AXIS, AxisName
from syncopate import mesh
from syncopate.plans import is_whole


class PlannedState(NamedTuple):
    """The state of one worker; the counters are equal on all workers."""

    num_steps: Int[Array, ""]  # taken, by which the plan decides
    num_syncs: Int[Array, ""]  # made; nothing depends on it
    rounds: Any  # of the `Rounds`


def local_steps(
    inner: optax.GradientTransformation,
    plan: SyncPlan,
    *,
    axis_name: AxisName = AXIS,
    opt_state: str | Mapping[str, str] = LOCAL,
    outer: optax.GradientTransformation | None = None,
    wire: Wire | None = None,
    correction: Correction | None = None,
    specs: PyTree[PartitionSpec] | None = None,
    drift: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Local steps with any optax optimizer: workers average their parameters after each round.

    x_w <- x_w + inner(g_w); after the last step of a round, x_w <- 1/W sum_v x_v.

    Put it last in an `optax.chain`, as what follows would change the mean, and inside nothing that
    skips or changes a step (docs/use/optax.md has a table). It cannot see what is around it; use
    `check_synced` after a step that ends a round to test a loop.

    The update is x_bar - x_w, so workers agree up to the rounding of x_w + (x_bar - x_w), which
    does not accumulate. For bitwise equal workers, and no conditional in the step, use
    `local_rounds` and call its `sync` where `plan.syncs_after(step)`.

    With H = 1 and SGD, with or without momentum, this is data-parallel training. With Adam it is
    not, as each worker divides by the second moment of its own gradients.

    Args:
      inner: any optax optimizer; it gets this worker's gradient.
      plan: when to synchronise; equal on all workers (see `check_same_plan`). A state may go on
        under another plan, which decides from that step on. A step beyond the plan's end is refused
        where its number is known; a compiled step cannot refuse it and synchronises.
      axis_name: the workers' axis, bound by `jax.vmap` or `jax.shard_map`; () for one worker, under
        a plain `jax.jit`.
      opt_state, outer, wire, correction, specs, drift: see `local_rounds`.

    Returns:
      A GradientTransformationExtraArgs. Its `update` needs `params` and takes `sync`: None (the
      plan decides, by a conditional that holds the only collective), or a static bool (the host
      has decided, without a conditional). The plan counts the steps of the state, or follows
      `step`, int32[], the loop's: one number for all workers, which keeps the conditional under
      `jax.vmap`. `weight` is this worker's in the mean of a sync, as in `local_rounds`; other steps
      do not read it. An update is added and cannot replace parameters that are NaN already: for
      those take `local_rounds`, or keep them finite by `optax.apply_if_finite`, as `inner`.
      Other extra arguments go to `inner`, whose state is read as in optax, by
      `optax.tree_utils.tree_get(state, "nu")`. It is `state.rounds.inner`, if an outer optimizer
      has fields of the same names.

    Raises:
      ValueError: for anything but a plan, or an unknown policy; from `init` for parameters that are
        not floating, or optimizer state that would undo a sync; from `update` without params, or
        for a step beyond the plan.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, local_opt
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
    """
    check_plan(plan)
    rounds = local_rounds(
        inner, axis_name=axis_name, opt_state=opt_state, outer=outer, wire=wire,
        correction=correction, specs=specs, drift=drift,
    )  # fmt: skip
    rounds, overwrites = unchecked_calls(rounds), outer is not None or wire is not None

    def init(params):
        return PlannedState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), rounds.init(params))

    def update(updates, state, params=None, *, sync=None, step=None, weight=None, **extra):
        if params is None:
            raise ValueError("a sync averages parameters: call update(grads, state, params).")
        if sync is not None and step is not None:
            raise ValueError("sync and step are both given: the plan decides at a step, or you do.")
        for name, value, kind in (("sync", sync, jnp.bool_), ("step", step, jnp.integer)):
            if value is not None:
                check_scalar(name, value, kind)
        check_call(init, state, params, updates)
        step = state.num_steps if step is None else step
        if sync is None and is_whole(step):  # not while it is traced
            plan.round_at(step)  # refuses a step beyond the plan
        updates, own = rounds.update(updates, state.rounds, params, **extra)
        # A sync's update needs the precision of the parameters, whatever that of the gradients.
        updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)

        def synced(updates, own):
            mean, own = rounds.sync(
                optax.apply_updates(params, updates), own, weight=weight, **extra
            )
            if lax.axis_size(axis_name) == 1 and not overwrites and weight is None:
                return updates, own  # one worker's inner update, without rounding
            back = jax.tree.map(lambda m, p, u: (m - p).astype(u.dtype), mean, params, updates)
            return back, own

        step = jnp.asarray(step, jnp.int32)
        now = plan.ends_after(step) if sync is None else sync
        updates, own = _decide(now, synced, updates, own)
        counts = step + 1, state.num_syncs + jnp.asarray(now, jnp.int32)
        num_steps, num_syncs = mesh.varying(counts, state.num_steps)  # typed as they were
        return updates, PlannedState(num_steps, num_syncs, own)

    return optax.GradientTransformationExtraArgs(init, update)


def _decide(sync, synced, *operands):
    """`synced` if there is a sync, else the operands; a conditional unless the host decides."""
    if isinstance(sync, bool | np.bool_):
        return synced(*operands) if sync else operands
    # Under shard_map a mean is typed as equal on all workers, and a worker's own value as varying:
    # cast both branches to one type.
    after = jax.eval_shape(synced, *operands)
    return lax.cond(
        sync,
        lambda *args: mesh.alike(synced(*args), operands),
        lambda *args: mesh.alike(args, after),
        *operands,
    )
