"""Optax's wrappers that must not stand around steps that communicate."""

import sys

# {module and function of optax: why it cannot hold a sync}. A wrapper hides from what it wraps: of
# all that a transformation can see, the calls that have led to it alone tell.
REFUSED = {
    "apply_if_finite.<locals>.update": (
        "optax.apply_if_finite",
        "a worker whose gradient is not finite would skip the sync for which all others wait",
    ),
    "MultiSteps.update": (
        "optax.MultiSteps",
        "it would ask for a sync in every mini-step, or let a worker skip one",
    ),
}


def check_not_inside(name: str) -> None:
    """Raises ValueError where a transformation that communicates is called by one of REFUSED.

    Args:
      name: of the transformation, as in "local_steps".
    """
    frame = sys._getframe(1)
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        if module.partition(".")[0] == "optax" and function in REFUSED:
            wrapper, why = REFUSED[function]
            raise ValueError(
                f"{name} stands inside {wrapper}: {why}. Put it inside, around the workers' "
                f"optimizer: {name}({wrapper}(inner, ...), plan, ...)."
            )
        frame = frame.f_back
