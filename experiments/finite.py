"""A loss or gradient that is not finite stops a run, and says where it was."""

import numpy as np


def stop_if_not_finite(metrics, first_step: int) -> None:
    """Raises FloatingPointError for the first step of `metrics` that was not finite."""
    bad = first_bad_step(metrics, first_step)
    if bad is not None:
        step, worker, unit, last = bad
        name = f"unit {unit}" if unit >= 0 else "one unit"
        raise FloatingPointError(
            f"the loss or gradient of {name} of worker {worker} is not finite in step {step} "
            f"(last finite mean loss: {last:.6g}). The orders are intact; the parameters are lost. "
            "Lower the learning rate or look at that unit."
        )


def first_bad_step(metrics, first_step: int):
    """(step, worker, unit, last finite loss) of the first step that was not finite, or None.

    Args:
      metrics: `StepMetrics` of an epoch with leaves [W, T], on the host.
      first_step: the number of the epoch's first step.
    """
    bad = (np.asarray(metrics.bad_unit) != -1).T  # [T, W]
    if not bad.any():
        return None
    step, worker = np.argwhere(bad)[0]
    losses = np.asarray(metrics.loss).mean(axis=0)[:step]
    last = float(losses[-1]) if step else float("nan")
    return first_step + int(step), int(worker), int(metrics.bad_unit[worker, step]), last
