"""Checks of arguments: each raises ValueError with the value and what to pass instead."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from syncopate.plans import check_like

ARRAYS = "pass arrays alone, without texts and the arrays of other libraries."
TRAINED = "only floating parameters can be trained and averaged. Keep it outside the parameters."


def check_scalar(name: str, value: Any, *kinds: Any) -> None:
    """Raises ValueError unless a value, which may be traced, is one number of these kinds."""
    try:
        kind = jax.typeof(value)
        fits = not kind.shape and any(jnp.issubdtype(kind.dtype, k) for k in kinds)
    except (TypeError, OverflowError):  # not an array
        fits = False
    if not fits:
        known = " or ".join(k.__name__ for k in kinds)
        raise ValueError(f"{name} is {value!r}: pass one number of type {known}.")


def check_call(init: Callable, state: PyTree, params: PyTree, grads: PyTree) -> None:
    """Raises ValueError unless gradients are like the parameters, and the state as init makes it.

    Without parameters (None) the gradients stand in for them.
    """
    if params is not None:
        check_like("gradient", grads, params, "the parameters")
    try:
        made = jax.eval_shape(init, grads if params is None else params)
    except jax.errors.JAXTypeError:  # an init that looks at values
        return
    check_like("state", state, made, "init(params)")


def checked_calls(rounds: Any) -> Any:
    """The rounds, which refuse gradients and states that do not fit the parameters."""

    @functools.wraps(rounds.update)
    def update(grads, state, params=None, **extra):
        check_call(rounds.init, state, params, grads)
        return rounds.update(grads, state, params, **extra)

    @functools.wraps(rounds.sync)
    def sync(params, state, **extra):
        check_call(rounds.init, state, params, params)
        return rounds.sync(params, state, **extra)

    return rounds._replace(update=update, sync=sync)


def unchecked_calls(rounds: Any) -> Any:
    """The rounds of `checked_calls` without its checks, for a caller that has made them."""
    update, sync = inspect.unwrap(rounds.update), inspect.unwrap(rounds.sync)
    return rounds._replace(update=update, sync=sync)


def check_kind(params: PyTree, kind: Any = jnp.inexact, why: str = TRAINED) -> None:
    """Raises ValueError for a leaf of another kind, and says why."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        try:
            found = jax.typeof(leaf).dtype
            fits = jnp.issubdtype(found, kind)
        except TypeError:  # not an array
            found, fits = type(leaf).__name__, False
        if not fits:
            raise ValueError(f"leaf {jax.tree_util.keystr(path)} is {found}: {why}")


def check_leading(tree: PyTree, of: str) -> int:
    """The length of the leading axis, one and the same of all leaves; else raises ValueError."""
    check_kind(tree, np.generic, ARRAYS)
    paths = jax.tree_util.tree_leaves_with_path(tree)
    count = np.shape(paths[0][1])[:1] if paths else (1,)
    for path, x in paths:
        if np.shape(x)[:1] != count or count in ((), (0,)):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} has the shape {np.shape(x)}: pass arrays with "
                f"a leading axis of at least one {of}, and of one length in all leaves."
            )
    return count[0]
