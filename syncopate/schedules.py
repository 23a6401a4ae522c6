"""Schedules evaluated on the host, for plans."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Key

from syncopate import mesh, plans

SLOW = 10.0  # seconds; a slower schedule gives a warning


def evaluate_schedule(schedule: Callable | ArrayLike, total_steps: int, name: str) -> np.ndarray:
    """float64[T], the values of a schedule, a number or an array at the steps 0 .. T - 1.

    A schedule of JAX operations is called once for all steps, in float64; any other is called step
    by step. Raises ValueError, with the `name` of the values, if one is negative, not finite or
    complex, or if an array has another length than T.
    """
    total_steps = plans.check_total_steps(total_steps)
    if isinstance(schedule, int | float) and type(schedule) is not bool and 0 <= schedule <= 1e300:
        return np.broadcast_to(np.float64(schedule), total_steps)  # plans may have thousands
    with jax.transfer_guard("allow"):
        return _evaluate(schedule, np.arange(total_steps), name)


def _evaluate(schedule, steps, name):
    if callable(schedule):
        plans.check_function(name, schedule, "step")
        values = _real(_evaluated(schedule, steps, name), name)
        values = values.reshape(-1) if values.size == steps.size else values
    else:
        values = _real(schedule, name)
    if values.shape not in ((), steps.shape):
        raise ValueError(
            f"{name} has the shape {values.shape}: pass one value for each of the {len(steps)} "
            "steps, or a schedule that returns a single number."
        )
    values = np.broadcast_to(values, steps.shape)
    rule = f"the schedule must be finite and not negative at all {len(steps)} steps"
    _check_all(np.isfinite(values) & (values >= 0), values, name, rule, steps)
    return values


def probabilities(p: Callable | ArrayLike, total_steps: int, name: str) -> np.ndarray:
    """float64[T], the values of `evaluate_schedule`; raises ValueError unless all are in (0, 1]."""
    values = evaluate_schedule(p, total_steps, name)
    rule = "a probability lies in (0, 1]. Keep the schedule above 0"
    _check_all((values > 0) & (values <= 1), values, name, rule, np.arange(total_steps))
    return values


def _check_all(good, values, name, rule, steps):
    bad = np.flatnonzero(~good)
    if len(bad):
        count = f"{len(bad)} of its values violate this"
        raise ValueError(f"{name}({steps[bad[0]]}) is {values[bad[0]]:g}: {rule} ({count}).")


def bernoulli_draws(p: Callable | ArrayLike, total_steps: int, key: Key[Array, ""]) -> np.ndarray:
    """bool[T], true with probability p(t); equal on all machines with JAX's default keys."""
    chances = probabilities(p, total_steps, "p")
    with mesh.at_once(), jax.transfer_guard("allow"):
        key = plans.check_key(key)
        if isinstance(key, Tracer):
            raise ValueError(f"key is {key}, traced: make it before jax.jit.")
        coins = np.asarray(jax.random.uniform(key, (len(chances),), np.float32))
        return coins < chances


def describe_schedule(p: Any) -> str:
    """A number as it appears in a rule's name, or "p(t)" for a schedule."""
    return f"{float(p):g}" if type(p) in (int, float) or plans.is_number(p) else "p(t)"


def _evaluated(schedule, steps, name):
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = None  # the default one; accelerators emulate float64
    with jax.enable_x64(True), jax.default_device(device), mesh.at_once():
        try:
            # Not jitted: a compiler may rewrite t / 10 as t * 0.1, and the hash of a plan must not
            # depend on the machine.
            return jax.vmap(schedule)(steps)
        except (TypeError, jax.errors.JAXTypeError):
            return _step_by_step(schedule, steps, name)


def _step_by_step(schedule, steps, name):
    """The values of a schedule that takes one step at a time; warns if this takes long."""
    values, begin = [], 0.0
    for i, step in enumerate(steps.tolist()):
        if i == 10:  # the first calls compile
            begin = time.monotonic()
        elif i == 110 and (left := (time.monotonic() - begin) * len(steps) / 100) > SLOW:
            warnings.warn(
                f"{name} is evaluated step by step, in about {left:.0f} s: write it with jax.numpy "
                "and without float() and if, to evaluate all steps at once, or pass their values.",
                stacklevel=2,
            )
        values.append(schedule(step))
    return values


def _real(values, name) -> np.ndarray:
    """The values in float64; raises ValueError unless they are real numbers."""
    array, kind = plans.as_array(values)
    try:
        missing = array.dtype == object and None in array.ravel().tolist()
        if array.dtype.kind not in "bcmMSU" and not missing:
            return array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):  # not numbers, or too large
        pass
    raise ValueError(f"{name} is {kind}: the values of a schedule must be real numbers.")
