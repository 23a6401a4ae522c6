"""What a sync does with every field of the optimizer state."""

import jax
import jax.numpy as jnp

# What a sync can do with a field of the optimizer state.
LOCAL, MEAN, RESET = "local", "mean", "reset"
PARAMS, OPT_STATE = "params", "opt_state"  # names of parts, the second of a state without names


def placed(opt_state, chosen, means, initial):
    """The optimizer state with averaged and reset leaves in their places."""
    leaves, treedef = jax.tree.flatten(opt_state)
    first = jax.tree.leaves(initial()) if RESET in chosen else leaves
    means = iter(means)
    new = {LOCAL: lambda x, x0: x, MEAN: lambda x, x0: next(means), RESET: lambda x, x0: x0}
    leaves = [new[p](x, x0) for p, x, x0 in zip(chosen, leaves, first, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def checked_policies(opt_state):
    """{name of a field: policy}, where the empty name stands for all floating leaves."""
    policies = {"": opt_state} if isinstance(opt_state, str) else dict(opt_state)
    for name, policy in policies.items():
        if policy not in (LOCAL, MEAN, RESET):
            raise ValueError(
                f"opt_state is {policy!r}{f' for {name!r}' if name else ''}: it must be "
                f"{LOCAL!r}, {MEAN!r} or {RESET!r}."
            )
    return policies


def policy_of_leaves(opt_state, policies):
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


def policies_of_parts(policies, parts):
    """The policies of the fields that are among the parts; those of the others are local."""
    if parts is None:
        return policies
    parts, known = tuple(parts), [PARAMS, *(name or OPT_STATE for name in policies)]
    unknown = [part for part in parts if part not in known]
    if unknown:
        raise ValueError(
            f"parts has {unknown}, which no sync is told of: use some of {known}, or name the "
            "field in opt_state."
        )
    return {n: policy if (n or OPT_STATE) in parts else LOCAL for n, policy in policies.items()}
