"""Refuses flags that a command would not use, and says what uses them."""

from collections.abc import Iterable

import numpy as np
from absl import flags

from experiments.cluster import processes
from experiments.study.flags import EITHER
from experiments.study.tables import rows_of
from experiments.tasks.base import Recipe
from experiments.training import config
from syncopate.refusals import UserError

# Fields of a recipe that only some rules and policies read.
OF_ROWS = {
    "h_base": "--sync=constant, qsr and others with a period",
    "growth": "--sync=qsr, inverse and cubic",
    "echo_factor": "--echo=fixed and others but none, and syncs by the factor",
    "horizon": "--p",
}
OF_SCHEDULES = {
    "floor": ("cosine", "linear"), "decay_every": ("step", "cycles"), "decay_factor": ("step",),
}  # fmt: skip
OF_DRY_RUNS = ("compile", "device_teraflops", "gigabits", "topology")
EXCLUSIVE = (*EITHER, ("learning_rate", "learning_rates"))  # the first one counts


def check(values: flags.FlagValues, recipe: Recipe, arms: Iterable, *, study=None) -> None:
    """Raises ValueError for a flag that is set and changes nothing.

    The flags of a study may come from a preset, and later ones override these. So its own arms
    count besides those that run, its --schedule may leave the floor of another one unused, and of
    two flags that exclude each other it is only told which counts.

    Args:
      arms: that run; study: a `Study`; None: a run alone.
    """
    rows = [rows_of(arm) for arm in arms]
    read = set().union(*(fields_of(rule, policy) for _, rule, policy in rows))
    if study is not None and study.speeds and study.paced:
        read -= {"echo_factor"}
    unused = {name: by for name, by in OF_ROWS.items() if name not in read}
    if study is None or not values["schedule"].present:
        for name, schedules in OF_SCHEDULES.items():
            if recipe.schedule not in schedules:
                unused[name] = f"--schedule={' and '.join(schedules)}"
    if "ema" not in recipe.average:
        unused["ema_epochs"] = "--average=ema"
    if all(order.deals for order, *_ in rows):
        unused["bound_every"] = "orders of each worker's own units, as cd_grab without --deal"
    if study is None or study.criterion.when != "target":
        unused |= {"target": "echoing and combined", "metric": "echoing and combined --target"}
    if study is not None and values.widen and len(recipe.learning_rates) < 2:
        unused["widen"] = "a grid of --learning_rates, and this is one"
    if "dry_run" in values and not values.dry_run:
        unused |= dict.fromkeys(OF_DRY_RUNS, "--dry_run")
    for name, by in unused.items():
        flag = values[name]
        if flag.present and flag.value != Recipe._field_defaults.get(name):
            raise UserError(
                f"--{name} is {flag.value} and changes nothing: it is for {by}. Leave it out."
            )
    for one, other in EXCLUSIVE:
        if all(name in values and values[name].present for name in (one, other)):
            told = f"--{one} is {values[one].value} and --{other} is {values[other].value}: "
            if study is None:
                raise UserError(f"{told}pass only one of them.")
            processes.say(f"{told}the first counts.")


class _Noting:
    """A `RunConfig` that notes which of its fields are read."""

    def __init__(self, given: config.RunConfig):
        self.given, self.read = given, set()

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.given, name)


def fields_of(rule, policy) -> set[str]:
    """The fields of a `RunConfig` that the plans of a short run are made from."""
    short = _Noting(config.RunConfig(np.ones(8), 0, fresh=np.ones(8, bool), loads_per_epoch=4))
    rule.plan(short)
    policy.make(short)
    return short.read
