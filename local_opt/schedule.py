"""Schedules evaluated on the host in float64, all steps at once."""

from collections.abc import Callable

import jax
import numpy as np

from local_opt.plan import check_total_steps


def rates_of(
    schedule: Callable | float | np.ndarray, total_steps: int, name: str = "lr"
) -> np.ndarray:
    """float64[T], the values of a schedule, a number or an array at the steps 0 .. T - 1.

    A schedule of jax operations is called once, for all steps, in float64; one that Python alone
    can evaluate is called step by step.

    Raises:
      ValueError: if a value is negative or not finite, or an array has another length.
    """
    check_total_steps(total_steps)
    if callable(schedule):
        values = _evaluated(schedule, total_steps)
    else:
        values = np.asarray(schedule, np.float64)
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


def _evaluated(schedule, total_steps):
    # Without a CPU backend the default device must do; accelerators emulate float64.
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = None
    with jax.enable_x64(True), jax.default_device(device):
        try:
            # Not jitted: a compiler may rewrite t / 10 as t * 0.1, and plans, which are hashed,
            # must not depend on the machine.
            values = jax.vmap(schedule)(np.arange(total_steps))
        except (TypeError, jax.errors.JAXTypeError):
            values = [float(schedule(t)) for t in range(total_steps)]
        return np.asarray(values, np.float64).reshape(total_steps)
