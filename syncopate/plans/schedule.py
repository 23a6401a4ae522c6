"""Schedules evaluated on the host in float64, all steps at once, and the coins they weigh."""

from collections.abc import Callable

import jax
import numpy as np

MOST_STEPS = 10**9


def is_whole(value) -> bool:
    """Whether a value is a whole number (and no bool).

    Args:
      value: anything.

    Returns:
      A bool.

    Example:
      >>> from syncopate import plans
      >>> plans.is_whole(3), plans.is_whole(3.0), plans.is_whole(True)
      (True, False, False)
    """
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_total_steps(total_steps) -> None:
    """Raises ValueError unless there is a step to plan for.

    Args:
      total_steps: T, a whole number >= 1 and at most a billion, for plans are arrays.

    Raises:
      ValueError: for anything else.

    Example:
      >>> from syncopate import plans
      >>> plans.check_total_steps(0)
      Traceback (most recent call last):
      ValueError: total_steps is 0: a run has at least one whole step.
    """
    if not is_whole(total_steps) or total_steps < 1:
        raise ValueError(f"total_steps is {total_steps!r}: a run has at least one whole step.")
    if total_steps > MOST_STEPS:
        raise ValueError(
            f"total_steps is {total_steps}: plans hold a number for every step, of at most "
            f"{MOST_STEPS:,}. Plan a part of the run at a time."
        )


def check_key(key) -> None:
    """Raises ValueError unless it is a typed key.

    Args:
      key: one key, or an array of them.

    Raises:
      ValueError: for anything else, such as a whole number or the numbers of `jax.random.PRNGKey`.

    Example:
      >>> from syncopate import plans
      >>> plans.check_key(7)
      Traceback (most recent call last):
      ValueError: key is 7 (int): pass a typed key, as jax.random.key(0).
    """
    if not jax.dtypes.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key):
        raise ValueError(
            f"key is {key} ({type(key).__name__}): pass a typed key, as jax.random.key(0)."
        )


def evaluate_schedule(
    schedule: Callable | float | np.ndarray, total_steps: int, name: str
) -> np.ndarray:
    """float64[T], the values of a schedule, a number or an array at the steps 0 .. T - 1.

    A schedule of jax operations is called once, for all steps, in float64; one that Python alone
    can evaluate is called step by step.

    Args:
      schedule: from step to value (optax's are), a number, or float[T].
      total_steps: T >= 1.
      name: of the values, for messages.

    Returns:
      float64[T].

    Raises:
      ValueError: if a value is negative, not finite or complex, or an array has another length.

    Example:
      >>> import optax
      >>> from syncopate import plans
      >>> plans.evaluate_schedule(optax.linear_schedule(1.0, 0.0, 4), 5, "lr").tolist()
      [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    check_total_steps(total_steps)
    if callable(schedule):
        values = _real(_evaluated(schedule, total_steps), name).reshape(total_steps)
    else:
        values = _real(np.asarray(schedule), name)
        if values.shape not in ((), (total_steps,)):
            raise ValueError(
                f"{name} has the shape {values.shape}: an array holds one value for each of the "
                f"{total_steps} steps."
            )
        values = np.broadcast_to(values, (total_steps,))
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        raise ValueError(
            f"{name}({bad[0]}) is {values[bad[0]]:g}: the schedule must be finite and not "
            f"negative in all {total_steps} steps ({len(bad)} of them are not)."
        )
    return values


def probabilities(p: Callable | float | np.ndarray, total_steps: int, name: str) -> np.ndarray:
    """float64[T], the values of a schedule of probabilities, none of them 0.

    Args:
      p: a probability in (0, 1], a schedule of them, or float[T].
      total_steps: T >= 1.
      name: of the probability, for messages.

    Returns:
      float64[T] in (0, 1].

    Raises:
      ValueError: if a value is outside (0, 1].

    Example:
      >>> import optax
      >>> from syncopate import plans
      >>> plans.probabilities(optax.linear_schedule(1.0, 0.0, 4), 5, "p")
      Traceback (most recent call last):
      ValueError: p(4) is 0: a probability lies in (0, 1]. A schedule may fall, but not to 0.
    """
    values = evaluate_schedule(p, total_steps, name)
    bad = np.flatnonzero((values <= 0) | (values > 1))
    if len(bad):
        raise ValueError(
            f"{name}({bad[0]}) is {values[bad[0]]:g}: a probability lies in (0, 1]. A schedule may "
            "fall, but not to 0."
        )
    return values


def bernoulli_draws(probabilities: np.ndarray, key: jax.Array) -> np.ndarray:
    """bool[T], one coin per step: heads with the step's chance. The key alone decides.

    Args:
      probabilities: float64[T] in [0, 1].
      key: `jax.random.key` of the default kind, whose numbers do not depend on the hardware.

    Returns:
      bool[T].

    Example:
      >>> import jax, numpy as np
      >>> from syncopate import plans
      >>> plans.bernoulli_draws(np.array([1.0, 0.0]), jax.random.key(0)).tolist()
      [True, False]
    """
    check_key(key)
    with jax.ensure_compile_time_eval():  # now, even where the plan is made inside a trace
        return (
            np.asarray(jax.random.uniform(key, (len(probabilities),), np.float32)) < probabilities
        )


def describe_schedule(p) -> str:
    """A probability or its schedule in a rule's name.

    Args:
      p: a number, a schedule or an array.

    Returns:
      The number, or "p(t)".

    Example:
      >>> from syncopate import plans
      >>> plans.describe_schedule(0.25), plans.describe_schedule(lambda t: 0.25)
      ('0.25', 'p(t)')
    """
    return f"{p:g}" if isinstance(p, int | float) else "p(t)"


def _evaluated(schedule, total_steps):
    # Without a CPU backend the default device must do; accelerators emulate float64.
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = None
    # Evaluated now, even where the plan is made while a function is traced.
    with jax.enable_x64(True), jax.default_device(device), jax.ensure_compile_time_eval():
        try:
            # Not jitted: a compiler may rewrite t / 10 as t * 0.1, and plans, which are hashed,
            # must not depend on the machine.
            values = jax.vmap(schedule)(np.arange(total_steps))
        except (TypeError, jax.errors.JAXTypeError):
            values = [schedule(t) for t in range(total_steps)]
        return np.asarray(values)


def _real(values, name) -> np.ndarray:
    """float64; ValueError for complex numbers, and for what is no number."""
    try:
        if not np.iscomplexobj(values):
            return values.astype(np.float64)
    except (TypeError, ValueError):  # what is no number
        pass
    raise ValueError(f"{name} is {values.dtype}: the values of a schedule must be real numbers.")
