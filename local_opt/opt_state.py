"""Optimizers of workers: which are refused, what a sync does with their states, and types."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree
from optax import contrib

from local_opt.plans import SyncPlan
from local_opt.workers import AxisName, in_scope, wide_type
from syncopate import mesh
from syncopate.plans import check_like

# What a sync does with a field of the optimizer state.
LOCAL, MEAN, RESET = "local", "mean", "reset"

# {state: (its factory, the fields from which the next parameters are computed)}. If these fields
# stay local, the next step moves each worker back to where it was before the sync.
UNDOES = {
    contrib.SAMState: ("optax.contrib.sam", ("cache",)),
    contrib.ScheduleFreeState: ("optax.contrib.schedule_free", ("z",)),
    contrib.MadgradState: ("optax.contrib.madgrad", ("s", "grad_sum_sq")),
    contrib.COCOBState: (
        "optax.contrib.cocob",
        ("cumulative_gradients", "scale", "subgradients", "reward"),
    ),
}
# {state: why its fields have no mean, and what to do}
NOT_AVERAGED = {
    optax.ScaleByLBFGSState: (
        "optax.lbfgs keeps steps, differences of gradients and the inverses of their products, "
        "whose means are inconsistent: pass sync_opt_state='local' or 'reset'."
    ),
}
# {state: what its optimizer takes, and what to do}, if gradients are not like the parameters.
TAKES = {
    contrib.DifferentiallyPrivateAggregateState: (
        "optax.contrib.dpsgd takes the gradients of all examples, but a step here takes one "
        "gradient like the parameters: put optax.contrib.differentially_private_aggregate first, "
        "optax.chain(differentially_private_aggregate(..), local_steps(optax.sgd(..), plan))."
    ),
    optax.LookaheadState: (
        "optax.lookahead takes pairs of fast and slow parameters, but a step here takes one copy: "
        "pass its fast optimizer, and outer=optax.sgd(slow_step_size), which does the same at a "
        "sync; with one worker, also axis_name=()."
    ),
}


def checked(
    optimizer: optax.GradientTransformation, name: str = "inner"
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, with extra arguments; its init refuses the states in TAKES."""
    if not all(callable(getattr(optimizer, part, None)) for part in ("init", "update")):
        raise ValueError(f"{name} is {optimizer!r}: pass an optimizer, as optax.sgd(0.1).")
    update = optax.with_extra_args_support(optimizer).update
    parameters = inspect.signature(optimizer.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # optax.MultiSteps has another type
        update = optimizer.update

    def init(params):
        state = optimizer.init(params)
        for node in jax.tree.leaves(state, is_leaf=lambda node: type(node) in TAKES):
            if type(node) in TAKES:
                raise ValueError(f"{name}: {TAKES[type(node)]}")
        return state

    return optax.GradientTransformationExtraArgs(init, update)


def check_call(init: Callable, state: PyTree, params: PyTree, grads: PyTree) -> None:
    """Raises ValueError unless gradients (or None) are like params, and the state is init's."""
    if params is not None:
        check_like("gradient", grads, params, "the parameters")
    try:
        made = jax.eval_shape(init, grads if params is None else params)
    except jax.errors.JAXTypeError:  # this init depends on values
        return
    check_like("state", state, made, "init(params)")


def check_state(state: PyTree, kind: type) -> None:
    """Raises ValueError unless a state is of this type; its fields are checked later."""
    if not isinstance(state, kind):
        raise ValueError(
            f"state is a {type(state).__name__}: pass the {kind.__name__} that init(params) made."
        )


def placed(
    opt_state: optax.OptState, chosen: list[str], means: Iterable, initial: Callable
) -> optax.OptState:
    """The optimizer state with averaged and reset leaves in their places."""
    leaves, treedef = jax.tree.flatten(opt_state)
    first = jax.tree.leaves(initial()) if RESET in chosen else leaves
    means = iter(means)
    new = {LOCAL: lambda x, x0: x, MEAN: lambda x, x0: next(means), RESET: lambda x, x0: x0}
    leaves = [new[p](x, x0) for p, x, x0 in zip(chosen, leaves, first, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def checked_policies(sync_opt_state: str | Mapping[str, str]) -> dict[str, str]:
    """{name of a field: policy}; the empty name stands for all floating leaves."""
    policies = sync_opt_state if isinstance(sync_opt_state, Mapping) else {"": sync_opt_state}
    for name, policy in policies.items():
        if str(policy) not in (LOCAL, MEAN, RESET):
            of = f" for {name!r}" if name else ""
            advice = f"it must be {LOCAL!r}, {MEAN!r} or {RESET!r}."
            if isinstance(policy, SyncPlan):
                advice = (
                    "only local_steps counts steps. Pass 'mean' here, or plans of fields there."
                )
            raise ValueError(f"sync_opt_state is {policy!r}{of}: {advice}")
    return dict(policies)


def split_policies(
    sync_opt_state: str | Mapping[str, str | SyncPlan], plan: SyncPlan
) -> tuple[dict[str, str], list[tuple[SyncPlan, dict[str, str]]]]:
    """(policies of the parameters' syncs, the other plans with the policies of their syncs).

    At the syncs of another plan, its fields have the policy "mean" and all others "local". If any
    field has a plan, fields with "mean" follow `plan`: a mean of `mu` alone would be refused where
    `nu` has a plan.
    """
    given = sync_opt_state if isinstance(sync_opt_state, Mapping) else {"": sync_opt_state}
    has_plans = any(isinstance(policy, SyncPlan) for policy in given.values())
    words, planned = {}, {}
    for name, policy in given.items():
        of = plan if has_plans and name and policy == MEAN else policy
        if not isinstance(of, SyncPlan):
            words[name] = of
            continue
        if not name:
            raise ValueError(f"sync_opt_state has {of!r} for the empty name: name a field.")
        if of.total_steps != plan.total_steps:
            raise ValueError(
                f"sync_opt_state has a plan of {of.total_steps} steps for {name!r}, and the "
                f"parameters' plan has {plan.total_steps}: make both for the whole run."
            )
        words[name] = LOCAL
        planned.setdefault(of.digest(), (of, {}))[1][name] = MEAN
    # Every dict has all names, because the longest one that matches a field counts.
    others = dict.fromkeys(given, LOCAL)
    return words, [(of, others | fields) for of, fields in planned.values()]


def policy_of_leaves(
    opt_state: optax.OptState, policies: Mapping[str, str], params: PyTree
) -> list[str]:
    """One policy per leaf of the optimizer state, in order."""
    paths, used, chosen = jax.tree_util.tree_flatten_with_path(opt_state)[0], set(), []
    of_params = _types_in(params)
    fields = [_field_of(path, opt_state, of_params) for path, _ in paths]
    for text, (_, leaf) in zip(fields, paths, strict=True):
        names = [name for name in policies if not name or f".{name}." in text]
        names.sort(key=len, reverse=True)  # the most specific one
        policy = policies[names[0]] if names else LOCAL
        floating = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        if policy == MEAN and names[0] and not floating:
            raise ValueError(
                f"sync_opt_state averages {text.strip('.')!r}, which is {jnp.result_type(leaf)}: "
                "only floating leaves are averaged. Name a floating field, or reset this one."
            )
        used.update(names)
        chosen.append(policy if floating or (names and names[0]) else LOCAL)
    missing = [name for name in policies if name and name not in used]
    if missing:
        allowed = sorted({text.strip(".").rpartition(".")[2] for text in fields} - {""})
        raise ValueError(
            f"sync_opt_state names {missing}, which the optimizer state does not have: use one of "
            f"its fields {allowed}."
        )
    return chosen


def _nodes(tree: Any, path):
    """(node, key) along a path, as far as Python can follow it."""
    kinds = jax.tree_util
    for depth, key in enumerate(path, 1):
        yield tree, key
        if depth == len(path):  # leaves out the leaf itself
            return
        if isinstance(key, kinds.GetAttrKey):
            tree = getattr(tree, key.name, None)
        elif isinstance(key, kinds.SequenceKey | kinds.DictKey):
            tree = tree[key.idx if isinstance(key, kinds.SequenceKey) else key.key]
        else:
            return


def _types_in(params):
    """The types of the parameters' nodes; their fields are not fields of an optimizer's state."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    nodes = [node for path in paths for node, _ in _nodes(params, path)]
    return {*map(type, nodes)} - {dict, list, tuple}


def _field_of(path, opt_state, of_params) -> str:
    """A leaf's path up to the last field of a state, as ".0.mu.", without parameters' names."""
    names, end = [], 0
    for node, key in _nodes(opt_state, path):
        if type(node) in of_params:
            break
        names.append(jax.tree_util.keystr((key,), simple=True))
        end = len(names) if isinstance(key, jax.tree_util.GetAttrKey) else end
    return ".".join(["", *names[:end], ""])


def check_moments(opt_state: optax.OptState, chosen: list[str]) -> None:
    """Raises ValueError if an update would divide by a second moment of other gradients.

    A worker that has had no gradient has a `nu` of zero, by which it would divide a mean `mu`.
    Also raises if a field that has no mean is to be averaged.
    """
    has_nu = lambda node: "nu" in getattr(node, "_fields", ())  # noqa: E731
    policies = jax.tree.unflatten(jax.tree.structure(opt_state), chosen)
    for node in jax.tree.leaves(policies, is_leaf=lambda node: type(node) in NOT_AVERAGED):
        if type(node) in NOT_AVERAGED and MEAN in jax.tree.leaves(node):
            raise ValueError(NOT_AVERAGED[type(node)])
    states = jax.tree.leaves(opt_state, is_leaf=has_nu)
    for state, node in zip(states, jax.tree.leaves(policies, is_leaf=has_nu), strict=True):
        if not has_nu(state):
            continue
        of_nu = {*jax.tree.leaves(node.nu)}
        for name in state._fields:
            of = (jax.tree.leaves(getattr(tree, name)) for tree in (state, node))
            of_state = {
                p
                for x, p in zip(*of, strict=True)
                if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
            }
            needed = {MEAN: {MEAN}, LOCAL: {LOCAL, MEAN}, RESET: {LOCAL, MEAN, RESET}}
            if isinstance(state, optax.ScaleByRStdDevState):  # here nu - mu^2 is a variance
                needed = {policy: {policy} for policy in needed}
            wrong = [p for p in of_state if not of_nu <= needed[p]]
            if wrong:
                raise ValueError(
                    f"sync_opt_state has {wrong[0]!r} for {name!r} and {of_nu.pop()!r} for 'nu', "
                    f"so an update would divide {name!r} by a second moment of other gradients: "
                    f"name both, as {{{name!r}: 'mean', 'nu': 'mean'}}."
                )


def check_fields(opt_state, words, of_fields, params) -> None:
    """Raises ValueError for fields with plans that the state lacks, or that have no mean."""
    means = {name: MEAN for _, fields in of_fields for name in fields if fields[name] == MEAN}
    if means:
        check_moments(opt_state, policy_of_leaves(opt_state, words | means, params))


def check_survives(state: optax.OptState, chosen: list[str]) -> None:
    """Raises ValueError for optimizer state that would undo a sync."""
    policies = jax.tree.unflatten(jax.tree.structure(state), chosen)
    for node in _undoing(policies):
        factory, fields = UNDOES[type(node)]
        kept = [f for f in fields if LOCAL in jax.tree.leaves(getattr(node, f))]
        if kept:
            raise ValueError(
                f"{factory} computes the next parameters from {kept} of its state, which stay "
                "local to each worker, so every sync would be undone: pass sync_opt_state="
                f"{dict.fromkeys(fields, 'mean')}. Fragments do not sync the state: use "
                "local_rounds or local_steps, or another optimizer."
            )


def _undoing(tree):
    """Every node in a tree whose type is in UNDOES, nested ones too."""

    def undoes(node):
        return type(node) in UNDOES

    for node in jax.tree.leaves(tree, is_leaf=undoes):
        if undoes(node):
            yield node
            for field in node:
                yield from _undoing(field)


def without_aliases(tree: PyTree, *others: PyTree) -> PyTree:
    """The tree, with copies of arrays that occur twice in it or also in the others.

    Some optimizers start with the parameters themselves, and a buffer cannot be donated twice.
    """
    seen = {id(x) for x in jax.tree.leaves(others)}

    def copied(x):
        if id(x) in seen and isinstance(x, jax.Array):
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(copied, tree)


def wide_zeros(params: optax.Params) -> optax.Params:
    """Zeros like the parameters, in float32 or wider."""
    return jax.tree.map(lambda p: jnp.zeros(p.shape, wide_type(p.dtype)), params)


def wide_copy(params: optax.Params) -> optax.Params:
    """A copy in float32 or wider, in new buffers."""
    return jax.tree.map(lambda p: jnp.array(p, wide_type(p.dtype), copy=True), params)


def floating_as(state: PyTree, params: optax.Params, axis_name: AxisName) -> PyTree:
    """The state; if parameters are typed as varying over workers, so are its floating leaves."""
    over = [mesh.varying_axes(x) for x in jax.tree.leaves(params)]
    axes = {axis for axis in frozenset().union(*over) if axis in mesh.names_of(in_scope(axis_name))}

    def cast(x):
        floating = jnp.issubdtype(x.dtype, jnp.inexact)
        return mesh.varying_over(x, axes) if floating else x

    return jax.tree.map(cast, state)


def in_place(tree: PyTree, params: optax.Params, specs: PyTree[P] | None) -> PyTree:
    """The tree, in which subtrees like the parameters are split like them.

    Otherwise a compiler may keep zeros of the parameters' shapes whole on every device.
    """
    if not mesh.axes_of(specs):
        return tree
    treedef, shapes = jax.tree.structure(params), _shapes(params)

    def is_like(part):
        return jax.tree.structure(part) == treedef and _shapes(part) == shapes

    def put(x, spec):
        left = set(mesh.axes_in(spec)) & set(jax.sharding.get_abstract_mesh().auto_axes)
        return jax.lax.with_sharding_constraint(x, spec) if left else x

    def put_all(part):
        return jax.tree.map(put, part, mesh.like(specs, part)) if is_like(part) else part

    return jax.tree.map(put_all, tree, is_leaf=is_like)


def _shapes(tree):
    return [jax.numpy.shape(x) for x in jax.tree.leaves(tree)]


def distance(
    params_w: PyTree, mean: PyTree, params: optax.Params, specs: PyTree[P] | None
) -> Float[Array, ""]:
    """A worker's distance |x_w - x_bar| / |params| over all leaves; x may be changes."""

    def norm(tree):
        sums = {}  # {the axes over which a leaf is split on a worker's devices: sum}
        for x, spec in zip(jax.tree.leaves(tree), of, strict=True):
            axes = tuple(axis for axis in mesh.axes_in(spec) if axis in manual)
            square = jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32)))
            sums[axes] = sums[axes] + square if axes in sums else square
        sums = [jax.lax.psum(x, axes) if axes else x for axes, x in sums.items()]
        return jnp.sqrt(sum(sums) + jnp.zeros((), jnp.float32))

    manual = jax.sharding.get_abstract_mesh().manual_axes
    of = jax.tree.leaves(mesh.like(P() if specs is None else specs, params))
    distance = norm(jax.tree.map(jnp.subtract, params_w, mean))
    return distance / jnp.maximum(norm(params), jnp.finfo(jnp.float32).tiny)
