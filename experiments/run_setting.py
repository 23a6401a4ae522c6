"""The setting of a run with all three decisions: its flags, and the plans that follow from them."""

from typing import NamedTuple

import jax
from absl import flags

from experiments import loop, optimizers, processes
from experiments.echo_policies import POLICIES
from experiments.echo_policies import Setting as EchoSetting
from experiments.flag_values import definer
from experiments.sync_rules import RULES
from experiments.sync_rules import Setting as SyncSetting
from experiments.tasks import TASKS, Recipe
from experiments.whole import Setup

FLAGS = flags.FLAGS


class Decisions(NamedTuple):
    """What `plans_of` needs to know beside the task."""

    sync: str  # a name of RULES
    echo: str  # a name of POLICIES
    total_steps: int
    schedule: str
    floor: float  # of the schedule, a factor of the peak rate
    warmup_steps: int
    h_base: int
    growth: float  # alpha / peak rate of QSR
    h_max: int | None
    echo_factor: int


def plans_of(decisions: Decisions, recipe: Recipe, loads_per_epoch: int, *, rate, seed):
    """The plans of a run, made before it: when to meet, when to load, and the learning rates."""
    d = decisions
    if d.total_steps < 1 or not 0 <= d.warmup_steps < d.total_steps:
        raise ValueError(
            f"--warmup_steps is {d.warmup_steps} of {d.total_steps} steps: a run has at least one "
            "step after its warmup. Raise --total_steps (or --epochs), or lower the warmup."
        )
    if not d.growth > 0:
        raise ValueError(f"--growth is {d.growth}: alpha / peak rate of QSR must be positive.")
    shape = optimizers.shape(
        d.schedule,
        total_steps=d.total_steps,
        warmup_steps=d.warmup_steps,
        floor=d.floor,
        decay_steps=recipe.decay_every * loads_per_epoch,
        decay_factor=recipe.decay_factor,
    )
    setting = SyncSetting.of(
        shape,
        total_steps=d.total_steps,
        warmup_steps=d.warmup_steps,
        h_base=d.h_base,
        alpha=d.growth,
        h_max=d.h_max,
    )
    coins = jax.random.fold_in(jax.random.key(seed), 3)
    policy = POLICIES[d.echo].make(EchoSetting(d.echo_factor, d.total_steps, d.total_steps, coins))
    return loop.Plans(RULES[d.sync].plan(setting), policy, rate * setting.rates)


def setup_of(recipe: Recipe) -> Setup:
    return Setup(*(getattr(recipe, field) for field in Setup._fields))


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    """The flags of a task and of what is decided, but for the names of the decisions."""
    own = "; the task's own if unset"

    define = definer(values)
    define(flags.DEFINE_enum, "task", "digits", "what to train on", sorted(TASKS))
    define(flags.DEFINE_string, "model", None, "the model" + own)
    define(flags.DEFINE_string, "data_dir", None, "where the task's data lie")
    define(flags.DEFINE_integer, "num_train", None, "first examples alone", lower_bound=1)
    define(flags.DEFINE_integer, "epochs", None, "passes over the data without echoing" + own)
    define(flags.DEFINE_integer, "total_steps", None, "T, instead of --epochs", lower_bound=1)
    define(flags.DEFINE_integer, "workers", None, "W" + own)
    define(flags.DEFINE_integer, "units_per_step", None, "B, per worker" + own)
    define(flags.DEFINE_integer, "unit_size", None, "examples per unit" + own)
    choices = list(optimizers.OPTIMIZERS)
    define(flags.DEFINE_enum, "optimizer", None, "of every worker" + own, choices)
    define(flags.DEFINE_float, "momentum", None, "of SGD; first moment of AdamW" + own)
    define(flags.DEFINE_float, "weight_decay", None, "of the optimizer" + own)
    shapes = list(optimizers.SHAPES)
    define(flags.DEFINE_enum, "schedule", "cosine", "of the learning rate", shapes)
    define(flags.DEFINE_float, "floor", 1e-3, "last rate / peak rate")
    define(flags.DEFINE_integer, "warmup_steps", 0, "of the learning rate", lower_bound=0)
    define(flags.DEFINE_integer, "h_base", 4, "least steps per round", lower_bound=1)
    define(flags.DEFINE_float, "growth", 2.0, "alpha / peak rate of QSR")
    define(flags.DEFINE_integer, "h_max", None, "most steps per round of growing rules")
    define(flags.DEFINE_integer, "echo_factor", 4, "uses of a batch, at the end", lower_bound=1)
    define(flags.DEFINE_enum, "run", "vmap", "on one device, or one each", ["vmap", "mesh"])
    define(flags.DEFINE_bool, "overwrite", False, "forget another run in the output folder")
    define(flags.DEFINE_bool, "dry_run", False, "print the plans and what they cost, and leave")
    processes.define_flags(values)


def decisions_from_flags(
    recipe: Recipe, loads_per_epoch: int, *, sync: str, echo: str, values: flags.FlagValues = FLAGS
) -> Decisions:
    given = {name: values[name].value for name in Decisions._fields if name in values}
    given["total_steps"] = values.total_steps or recipe.epochs * loads_per_epoch
    return Decisions(**given | {"sync": sync, "echo": echo})
