"""The pace of a run with echoing, simulated from that of its input."""

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from ordering.echo.plans import EchoPlan, Measured

# A batch that is late by fewer steps than this is on time: R steps of t_load / R seconds take as
# long as a load only up to rounding.
ROUNDING = 1e-6


def pace_of(
    policy: EchoPlan | Measured, load: Float[ArrayLike, "*n"], *, depth: int = 2
) -> tuple[EchoPlan, float]:
    """What a policy decides, and for how many steps' time it waits, if `load_ahead` loads for it.

    F_j = max(F_j-1, S_j-depth-1) + L_j;  S_j = max(F_j, S_j-1 + uses_j-1), in steps, where load j
    ends at F_j and is first used at S_j. `load` is L, a number or one for each load. The thread
    loads one batch at a time while the queue has a place, and holds one batch more. `measured`
    finds a batch ready in a step that starts at F_j or later. All steps take the same time.
    """
    fresh, each = np.empty(policy.total_steps, bool), np.broadcast_to(load, policy.total_steps)
    starts = []  # S_j
    finished = stall = 0.0  # F of the next load; F_0 = 0 starts the clock
    uses = 0
    for step in range(policy.total_steps):
        late = finished - (step + stall)
        ready = late <= ROUNDING
        fresh[step] = policy.decide(
            step, loads=len(starts), uses=uses, ready=lambda ready=ready: ready
        )
        if fresh[step]:
            stall += 0.0 if ready else late
            starts.append(step + stall)
            uses, freed = 0, len(starts) - depth - 1  # the load whose place the next one takes
            begin = max(finished, starts[freed]) if freed >= 0 else finished
            if len(starts) < len(each):
                finished = begin + each[len(starts)]
        uses += 1
    plan = policy if isinstance(policy, EchoPlan) else EchoPlan(fresh, "measured, simulated")
    return plan, float(stall)
