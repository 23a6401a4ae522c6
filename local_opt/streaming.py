"""Streaming: fragments of the parameters are synchronised while the next steps are computed."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PyTree

from local_opt.corrections import Correction
from local_opt.formats import Compressor, check_compressor
from local_opt.mean import checked_weight, if_counted
from local_opt.opt_state import check_call, check_state, checked, wide_copy
from local_opt.plans import SyncPlan
from local_opt.rounds import Local, LocalState, local_rounds, rounds_of
from local_opt.workers import AxisName, wide_type
from syncopate import mesh
from syncopate.plans import check_number, check_whole, is_whole
from syncopate.workers import AXIS

__all__ = ["Event", "Segment", "Streaming", "stream_segments", "streaming_rounds"]


class Event(NamedTuple):
    """A communication that is due between two steps."""

    action: str  # "start" or "finish"
    fragment: Any  # its key in the plans
    last: bool  # whether this is the fragment's last sync in the run


class Segment(NamedTuple):
    """Steps begin .. end - 1, and the events that are due before them."""

    begin: int
    end: int
    due: tuple[Event, ...]


class Streaming(NamedTuple):
    """The steps and the syncs of fragments: pure functions for one worker.

    Attributes:
      init: `params -> state`.
      update: `(grads, state, params, **extra) -> (updates, state)`, as in optax: one step of this
        worker, without any collective.
      start: `(params, state, *, fragment, weight=None) -> state`: sends a fragment. All collectives
        are here. The result is not used before `finish`, so steps can be computed meanwhile.
      finish: `(params, state, *, fragment, last=False, weight=None) -> (params, state)`: merges the
        fragment into the parameters. With `last` it does not mix, so workers end bitwise equal.
      communicate: `(params, state, due, *, weight=None) -> (params, state)`: does the starts and
        finishes that are due before a segment of `stream_segments`; `due` is static.
    """

    init: Callable
    update: Callable
    start: Callable
    finish: Callable
    communicate: Callable


class StreamingState(NamedTuple):
    """The state of one worker, with F fragments."""

    since: Int[Array, "F"]  # steps since the last start of each fragment
    inner: Any
    anchor: Any  # the common parameters; after a fragment's start, what its `finish` merges
    outer: Any  # F states of the outer optimizer, each () without one
    residual: Any  # F residuals of the compressor, each () without feedback


def streaming_rounds(
    inner: optax.GradientTransformation,
    *,
    axis_name: AxisName = AXIS,
    fragments: int | PyTree[int],
    mixing: float = 0.5,
    outer: optax.GradientTransformation | None = None,
    compress: Compressor | None = None,
    specs: PyTree[PartitionSpec] | None = None,
) -> Streaming:
    """Streaming DiLoCo: syncs are spread over fragments and hidden behind the next steps.

    At a fragment's start, a <- a + outer(a - 1/W sum_w x_w), or without an outer optimizer
    a <- a + 1/W sum_w (x_w - a). At its finish, some steps later, x_w <- m x_w + (1 - m) a. Workers
    must start from equal parameters.

    Every fragment has its own plan; `stream_segments` lists when it starts and finishes.
    Collectives and steps only overlap inside one compiled program: put `communicate` and the steps
    of a segment under one `jax.jit`.

    `weight` weighs the workers in the mean of every fragment that starts, as in `local_rounds`. At
    a finish, a worker with weight zero takes the anchor a, without mixing; its other fragments do
    not change.

    Args:
      inner: the workers' optimizer; its state stays local.
      axis_name: the workers' axis, bound by `jax.vmap` or `jax.shard_map`.
      fragments: F >= 1, the number of fragments, which then hold neighbouring leaves and have
        similar sizes; or a tree like the parameters with the number of each leaf's fragment. In
        the paper a fragment holds every F-th layer.
      mixing: m in [0, 1), the weight of a worker's own parameters; 0.5 in the paper.
      outer: as in `local_rounds`, with one state per fragment, in which the leaves of other
        fragments are `optax.MaskedNode`.
      compress, specs: as in `local_rounds`.

    Returns:
      A `Streaming`.

    Raises:
      ValueError: for values out of range; from `init`, for fragments that do not fit the
        parameters, optimizer state that would undo a sync, or parameters that are not floating.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from syncopate import local_opt
      >>> stream = local_opt.streaming.streaming_rounds(optax.sgd(1.0), fragments=2)
      >>> x = {"a": jnp.array([2.0, 2.0]), "b": jnp.array([2.0, 2.0])}  # two workers
      >>> state = jax.vmap(stream.init)(x)
      >>> x = {"a": jnp.array([0.0, 4.0]), "b": jnp.array([0.0, 4.0])}  # after their steps
      >>> start = jax.vmap(lambda x, s: stream.start(x, s, fragment=0), axis_name="worker")
      >>> x, _ = jax.vmap(lambda x, s: stream.finish(x, s, fragment=0))(x, start(x, state))
      >>> {name: leaf.tolist() for name, leaf in x.items()}
      {'a': [1.0, 3.0], 'b': [0.0, 4.0]}

    References:
      Douillard et al., Streaming DiLoCo with Overlapping Communication: Towards a Distributed
      Free Lunch, 2025, https://arxiv.org/abs/2501.18512
    """
    check_number("mixing", mixing, "[0, 1)")
    outer = None if outer is None else checked(outer, "outer")
    check_compressor(compress)
    # One `Rounds` takes the steps. Each fragment has another one, whose sync is its start.
    steps = local_rounds(inner, axis_name=axis_name, specs=specs)

    def rounds_of_part(params, part):
        cut = None if specs is None else _pick(mesh.like(specs, params), part)
        nothing = checked(optax.identity()), Correction(init=lambda params: ())
        return rounds_of(
            Local(nothing[0], axis_name, {}, outer, compress, nothing[1], cut, False, anchored=True)
        )

    def part_of(params, state, fragment):
        check_call(init, state, params, params)
        fragment = check_whole("fragment", fragment, 0, len(state.residual) - 1)
        return parts_of(params, fragments)[fragment]

    @jax.transfer_guard("allow")
    def init(params):
        whole, parts = steps.init(params), parts_of(params, fragments)
        states = [rounds_of_part(params, part).init(_pick(params, part)) for part in parts]
        return StreamingState(
            since=jnp.zeros(len(parts), jnp.int32),
            inner=whole.inner,
            anchor=wide_copy(params) if outer else jax.tree.map(jnp.copy, params),
            outer=tuple(state.outer for state in states),
            residual=tuple(state.residual for state in states),
        )

    def update(grads, state, params=None, **extra):
        check_state(state, StreamingState)
        # The steps belong to no fragment, so this count is not used.
        step_state = LocalState(jnp.zeros((), jnp.int32), state.inner)
        updates, step_state = steps.update(grads, step_state, params, **extra)
        return updates, state._replace(inner=step_state.inner, since=state.since + 1)

    def start(params, state, *, fragment: int, weight: ArrayLike | None = None):
        part = part_of(params, state, fragment)
        round_state = LocalState(
            since=state.since[fragment],
            inner=optax.EmptyState(),
            anchor=_pick(state.anchor, part),
            outer=state.outer[fragment],
            residual=state.residual[fragment],
        )
        _, round_state = rounds_of_part(params, part).sync(
            _pick(params, part), round_state, weight=weight
        )
        outers, residuals = list(state.outer), list(state.residual)
        outers[fragment], residuals[fragment] = round_state.outer, round_state.residual
        return state._replace(
            since=state.since.at[fragment].set(round_state.since),
            anchor=_placed(state.anchor, part, round_state.anchor),
            outer=tuple(outers),
            residual=tuple(residuals),
        )

    def finish(
        params, state, *, fragment: int, last: bool = False, weight: ArrayLike | None = None
    ):
        part = part_of(params, state, fragment)
        picked = _pick(params, part)
        new = jax.tree.map(lambda a, x: a.astype(x.dtype), _pick(state.anchor, part), picked)
        weight = None if weight is None else checked_weight(weight)
        if mixing and not last:

            def mixed(x, common):
                # As a difference from the common value, so that equal numbers stay bitwise equal.
                wide = common.astype(wide_type(x.dtype))
                return (wide + mixing * (x.astype(wide.dtype) - wide)).astype(x.dtype)

            new = jax.tree.map(mixed, if_counted(picked, new, weight), new)
        return mesh.varying_like(_placed(params, part, jax.tree.map(jnp.copy, new)), params), state

    def communicate(params, state, due: Iterable[Event], *, weight: ArrayLike | None = None):
        if not isinstance(due, tuple | list) or not all(isinstance(e, Event) for e in due):
            raise ValueError(f"due is {due}: pass `due` of a segment from stream_segments.")
        for action, fragment, last in due:
            if action == "start":
                state = start(params, state, fragment=fragment, weight=weight)
            else:
                params, state = finish(params, state, fragment=fragment, last=last, weight=weight)
        return params, state

    return Streaming(init, update, start, finish, communicate)


def parts_of(params: PyTree, fragments: int | PyTree[int]) -> list[list[int]]:
    """The leaves of every fragment: of similar sizes, or by their labels."""
    leaves, treedef = jax.tree.flatten(params)
    if is_whole(fragments):
        labels = _even_labels([x.size for x in leaves], int(fragments))
    else:
        labels, structure = jax.tree.flatten(fragments)
        if structure != treedef or not all(is_whole(label) for label in labels):
            raise ValueError(
                f"fragments is {fragments!r}: pass a number, or a tree like the parameters with "
                "the number of the fragment of each leaf."
            )
    labels = [int(label) for label in labels]
    if sorted(set(labels)) != list(range(max(labels) + 1)):
        raise ValueError(
            f"fragments are numbered {sorted(set(labels))}: number them 0, 1, 2, ... without a gap."
        )
    return [[i for i, f in enumerate(labels) if f == n] for n in range(max(labels) + 1)]


def _even_labels(sizes, fragments):
    """The fragment of every leaf: which of F equal parts contains the middle of the leaf."""
    if not 1 <= fragments <= len(sizes):
        raise ValueError(
            f"fragments is {fragments} and the parameters have {len(sizes)} leaves: a "
            "fragment holds whole leaves, so pass 1 .. the number of leaves, or split them."
        )
    labels, total, seen = [], sum(sizes), 0
    for left, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
        now = labels[-1] if labels else 0
        full = labels and (2 * seen + size) * fragments > 2 * (now + 1) * total
        needed = labels and left <= fragments - 1 - now
        labels.append(min(now + 1, fragments - 1) if full or needed else now)
        seen += size
    return labels


def _pick(tree, part):
    """The tree with only these leaves, under their names; `optax.MaskedNode` for the others."""
    leaves, treedef = jax.tree.flatten(tree)
    chosen = set(part)
    kept = [x if i in chosen else optax.MaskedNode() for i, x in enumerate(leaves)]
    return jax.tree.unflatten(treedef, kept)


def _placed(tree, part, new):
    leaves, treedef = jax.tree.flatten(tree)
    for i, x in zip(part, jax.tree.leaves(new), strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def stream_segments(
    plans_of: Mapping[Any, SyncPlan],
    *,
    delay: int = 0,
    start: int = 0,
    before: Mapping[Any, SyncPlan] | None = None,
) -> list[Segment]:
    """Cuts a run, in which each fragment has its own plan, into segments between communications.

    A fragment is started at the end of its round and finished `delay` steps later, or when it
    starts again if that is earlier. The last rounds of the run are finished at once.

    Args:
      plans_of: {fragment: its plan}, all for the same run.
      delay: >= 0, steps from start to finish; 0 if workers wait for each sync.
      start: in 0 .. T, the steps taken so far, to resume there; events at that step are still due.
      before: the plans of the steps before `start`, if other plans with the same delay were used
        there: fragments that they have started are finished. They may be for runs of other lengths.

    Returns:
      (begin, end, due) of each segment, in order: first `communicate(params, state, due)`, then the
      steps begin .. end - 1. The last segment has no steps.

    Raises:
      ValueError: for plans that do not fit each other, a start out of range, or a round shorter
        than the delay (other than a fragment's first and last).

    Examples:
      >>> from syncopate import local_opt
      >>> turns = {f: local_opt.constant(4, total_steps=9, offset=2 * f) for f in range(2)}
      >>> for begin, end, due in local_opt.streaming.stream_segments(turns, delay=1)[:4]:
      ...     print(begin, end, [event[:2] for event in due])
      0 2 []
      2 3 [('start', 1)]
      3 4 [('finish', 1)]
      4 5 [('start', 0)]

    References:
      Douillard et al., Streaming DiLoCo with Overlapping Communication: Towards a Distributed
      Free Lunch, 2025, https://arxiv.org/abs/2501.18512
    """
    total = check_turns(plans_of, delay)
    start, delay = check_whole("start", start, 0, total), int(delay)
    before = plans_of if before is None else before
    check_turns(before, delay)
    if set(before) != set(plans_of):
        raise ValueError(
            f"plans_of has the fragments {[*plans_of]} and before {[*before]}: give both a plan "
            "for every fragment of the state."
        )
    events = []
    for place, (name, plan) in enumerate(plans_of.items()):
        ends = [end for end in _ends_of(before[name]) if end < start]
        ends += [end for end in _ends_of(plan) if end >= start]
        for end, following in zip(ends, [*ends[1:], total], strict=True):
            arrives, last = min(end + delay, following), end == total
            # Finish fragments in transit before others start, and those without a delay at once.
            events.append((end, 1, place, Event("start", name, last)))
            events.append((arrives, 2 if arrives == end else 0, place, Event("finish", name, last)))
    due_at = {start: []}
    for step, _, _, event in sorted(events, key=lambda event: event[:3]):
        if step >= start:
            due_at.setdefault(step, []).append(event)
    ends = [*due_at, total][1:]
    return [Segment(at, end, tuple(due_at[at])) for at, end in zip(due_at, ends, strict=True)]


def _ends_of(plan) -> list[int]:
    """One past the last step of each round."""
    return (plan.starts + plan.periods).tolist()


def check_turns(plans_of: Mapping[Any, SyncPlan], delay: int) -> int:
    """The number of steps, one for all plans; raises ValueError for plans that do not fit."""
    named = plans_of.values() if isinstance(plans_of, Mapping) else [None]
    if not named or any(not isinstance(plan, SyncPlan) for plan in named):
        raise ValueError(
            f"the plans are {plans_of!r}: pass one SyncPlan for each fragment, as {{0: plan}}."
        )
    check_whole("delay", delay, 0)
    total_steps, *others = {plan.total_steps: None for plan in plans_of.values()}
    if others:
        raise ValueError(
            f"the plans have {total_steps} and {others[0]} steps: make all for the same run."
        )
    for name, plan in plans_of.items():
        between = plan.periods[1:-1]  # the first and the last round may be shorter
        if len(between) and between.min() < delay:
            raise ValueError(
                f"delay is {delay} and fragment {name!r} has a round of {between.min()} steps: a "
                "mean must arrive before the next one starts. Lower the delay, or raise the period."
            )
    return total_steps
