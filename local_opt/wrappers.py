"""What of optax may stand around steps that communicate, and what inside them undoes a sync."""

import sys

import jax

from local_opt.policies import LOCAL

SKIPS = "a worker that skips a step would skip the sync for which all others wait"

# {factory of optax: (its name, why it cannot hold a sync)}. A wrapper hides from what it wraps: of
# all that a transformation can see, the calls that have led to it alone tell.
REFUSED = {
    "apply_if_finite": ("optax.apply_if_finite", SKIPS),
    "conditionally_mask": ("optax.conditionally_mask", SKIPS),
    "conditionally_transform": ("optax.conditionally_transform", SKIPS),
    "MultiSteps": (
        "optax.MultiSteps",
        "it would ask for a sync in every mini-step, or let a worker skip one",
    ),
    "lookahead": (
        "optax.lookahead",
        "its slow parameters would never be averaged, and workers would go back to them",
    ),
    "sam": ("optax.contrib.sam", "it drops the updates of some steps, and a sync with them"),
    "schedule_free": (
        "optax.contrib.schedule_free",
        "it would add the way to the mean to a sequence z of each worker's own",
    ),
    "mechanize": ("optax.contrib.mechanize", "it scales updates, and a sync with them"),
    "scale_by_galore": (
        "optax.contrib.galore",
        "its parameters are projections, of each worker's own gradient",
    ),
}

# {state of optax: (its factory, fields from which the next parameters are computed)}: what is each
# worker's own there takes it back to where it was before the sync.
UNDOES = {
    "SAMState": ("optax.contrib.sam", ("cache",)),
    "ScheduleFreeState": ("optax.contrib.schedule_free", ("z",)),
    "MadgradState": ("optax.contrib.madgrad", ("s", "grad_sum_sq")),
    "COCOBState": (
        "optax.contrib.cocob",
        ("cumulative_gradients", "scale", "subgradients", "reward"),
    ),
}


def check_not_inside(name: str) -> None:
    """Raises ValueError where a transformation that communicates is called by one of REFUSED.

    Or by a chain in which another transformation follows: that would change the mean.

    Args:
      name: of the transformation, as in "local_steps".
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "optax":
            _check_frame(name, frame)
        frame = frame.f_back


def _check_frame(name, frame) -> None:
    factory = frame.f_code.co_qualname.partition(".")[0]
    if factory in REFUSED:
        wrapper, why = REFUSED[factory]
        raise ValueError(
            f"{name} stands inside {wrapper}: {why}. Put it inside, around the workers' "
            f"optimizer: {name}({wrapper}(inner, ...), plan, ...)."
        )
    if factory in ("chain", "named_chain"):
        links = frame.f_locals.get("update_fns", frame.f_locals.get("transforms", ()))
        after = len(links) - 1 - len(frame.f_locals.get("new_state", links))
        if after > 0:
            raise ValueError(
                f"{after} of {len(links)} transformations follow {name} in an optax.{factory}: "
                "they would change the mean of the parameters. Put them before it, or inside: "
                f"{name}(optax.chain(inner, ...), plan, ...)."
            )


def check_survives(state, chosen, *, act: str = "Pass opt_state={fields}.") -> None:
    """Raises ValueError for optimizer state that would undo a sync at the next step.

    Args:
      state: of the workers' optimizer; chosen: a policy per leaf, in order.
      act: what to do, for the message.
    """
    policies = jax.tree.unflatten(jax.tree.structure(state), chosen)
    for node in _named(policies):
        factory, fields = UNDOES[type(node).__name__]
        kept = [f for f in fields if LOCAL in jax.tree.leaves(getattr(node, f))]
        if kept:
            raise ValueError(
                f"{factory} computes the next parameters from {kept} of its state, which are each "
                "worker's own: every sync would be undone. "
                + act.format(fields=dict.fromkeys(fields, "mean"))
            )


def _named(tree):
    """Every node of UNDOES in a tree, also inside another one."""

    def known(node):
        return type(node).__name__ in UNDOES

    for node in jax.tree.leaves(tree, is_leaf=known):
        if known(node):
            yield node
            for field in node:
                yield from _named(field)
