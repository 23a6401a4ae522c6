"""The flags of all experiments, in groups that can be defined in any `FlagValues`.

task      what is trained on: --task, --data_dir, and the choices of every task's loader
setting   hyper-parameters: the fields of a `Recipe`; the setting's own if a flag is unset
run       how a run is carried out, with those of its output and of its processes
output    where results are written: --output_dir, --overwrite
processes which processes it has
forecast  --dry_run and its assumptions
decisions which arm is trained: --order, --sync, --echo and the options of their rows

Numbers are parsed by absl, with bounds; `base.Real` refuses nan, too.
"""

import contextlib
import inspect
import os
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping

from absl import flags

from experiments import distributed, entry
from experiments.compare import recipes, tiny
from experiments.compare.arms import Arm, choices_of, options_of, row_of
from experiments.compare.rows import TABLES
from experiments.data import TASKS, base
from experiments.data.base import COUNT, FROM_ZERO, Recipe, Task
from experiments.data.metrics import METRICS
from experiments.report.trackers import TRACKERS
from experiments.trainer.config import sizes_of
from syncopate.refusals import UserError

EITHER = (("total_steps", "epochs"), ("evaluate_every", "evaluations"))  # the first one counts


class _Several(flags.ListParser):
    """Parses a list of at least one value of a parser."""

    def __init__(self, each: flags.ArgumentParser):
        super().__init__()
        self.each = each
        words = f"one of {', '.join(each.enum_values)}" if hasattr(each, "enum_values") else ""
        self.syntactic_help = f"a list, each {words or each.syntactic_help}"

    def parse(self, argument):
        return [self.each.parse(text) for text in super().parse(argument) or [""]]


class RowParser(flags.ArgumentParser):
    """Takes the words of a row of a table, such as "qsr+int8" of "sync"."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.syntactic_help = kind, f"words of --{kind}: {choices_of(kind)}"

    def parse(self, argument: str) -> str:
        row_of(self.kind, argument)
        return argument


def define_value(values, allowed: flags.ArgumentParser, name: str, default, text: str) -> None:
    """Defines a flag by what parses it."""
    if isinstance(allowed, flags.BooleanParser):
        flags.DEFINE_bool(name, default, text, values)
    elif isinstance(allowed, flags.EnumParser):
        flags.DEFINE_enum(name, default, allowed.enum_values, text, values)
    else:
        flags.DEFINE(allowed, name, default, text, values, flags.ArgumentSerializer())


def define_list(values, each: flags.ArgumentParser, name: str, default, text: str) -> None:
    """Defines a flag that takes a list of at least one value of a parser."""
    serializer = flags.CsvListSerializer(",")
    flags.DEFINE(_Several(each), name, default, text, values, serializer)


@contextlib.contextmanager
def shown(values: flags.FlagValues, title: str = entry.THIS_COMMAND) -> Iterator[None]:
    """--help shows the flags that are defined inside below a title."""
    before = {*values}
    yield
    for name in [name for name in values if name not in before]:
        for module in (sys.argv[0], title):  # flags of the program, wherever they are defined
            values.register_key_flag_for_module(module, values[name])


def define(values: flags.FlagValues, *groups: str, **defaults) -> None:
    """Defines groups of flags; `defaults` replaces some defaults, as `task="digits_mlp"`."""
    for group in groups:
        with shown(values, f"{entry.GROUP}the {group}"):
            GROUPS[group](values)
    for name, default in defaults.items():
        values.set_default(name, default)


def _task(values):
    names = ", ".join([*recipes.RECIPES, *TASKS])
    flags.DEFINE_string("task", "digits", f"what to train on and how: {names}", values)
    flags.DEFINE_string("data_dir", None, "where the task's data lie", values)
    for name, (choice, tasks) in choices().items():
        text = f"of {', '.join(tasks)}"
        if name in recipes.EVERYWHERE:
            text = "first examples alone, of every task"
        define_value(values, choice.parser, name, None, text)


def _setting(values):
    for name, (hint, text, allowed) in base.FIELDS.items():
        several = typing.get_origin(hint) is tuple
        (define_list if several else define_value)(values, allowed, name, None, text)


def _run(values):
    text = "a small network and set in place of the setting's, one seed and rate, some forty steps"
    flags.DEFINE_bool("tiny", False, text, values)
    reads = ["device", "thread", "tfdata"]
    flags.DEFINE_enum("input", "device", reads, "data that stay there, or are read", values)
    text = "steps; 0: where a signal asks; about every minute if unset"
    define_value(values, FROM_ZERO, "checkpoint_every", None, text)
    _output(values)
    text = f"who is given records too, some of {', '.join(TRACKERS)} (extras of these names)"
    flags.DEFINE_list("track", [], text, values)
    _processes(values)


def _output(values):
    text = "results/NAME_TASK or results/NAME if unset"
    flags.DEFINE_string("output_dir", None, text, values)
    flags.DEFINE_bool("overwrite", False, "forget another run in the output folder", values)


def _processes(values):
    unset = "; unset for one process"
    address, number, process = distributed.PROCESSES
    text = f"host:port of process 0; {distributed.AUTO}: what SLURM or a TPU pod tells{unset}"
    flags.DEFINE_string(address, None, text, values)
    define_value(values, COUNT, number, None, "of the run" + unset)
    define_value(values, FROM_ZERO, process, None, f"0 .. {number} - 1" + unset)
    text = "seconds after which a process that waits for others, or for a batch, says so and leaves"
    define_value(values, base.WAIT, "timeout", distributed.TIMEOUT, text)


def _forecast(values):
    flags.DEFINE_bool("dry_run", False, "print what it would cost, and stop", values)
    text = "compile the step in a dry run, to know its memory"
    flags.DEFINE_bool("compile", True, text, values)
    assumed = "assumed by a dry run"
    define_value(values, base.SPEED, "device_teraflops", 50.0, f"per second, {assumed}")
    define_value(values, base.SPEED, "gigabits", 25.0, f"of a worker's link, {assumed}")


def _decisions(values):
    texts = "which unit comes next", "when workers meet", "when a batch is used again"
    for kind, text in zip(TABLES, texts, strict=True):
        flags.DEFINE_string(kind, None, f"{text}: {choices_of(kind)}", values)
    for kind in TABLES:
        for flag, option in options_of(kind).items():
            define_value(values, option.parser, flag, None, f"of --{kind}: {option.text}")


GROUPS = {
    "task": _task,
    "setting": _setting,
    "run": _run,
    "output": _output,
    "processes": _processes,
    "forecast": _forecast,
    "decisions": _decisions,
}


def choices() -> dict[str, tuple[recipes.Choice, list[str]]]:
    """{choice: (what it is, the tasks that have it)}, as the tasks' loaders say."""
    result = {name: (recipes.Choice(COUNT), []) for name in recipes.EVERYWHERE}
    for task, loader in TASKS.items():
        for name, choice in recipes.choices_of(loader).items():
            result.setdefault(name, (choice, []))[1].append(task)
    return result


def defaults(values: flags.FlagValues) -> dict:
    """By name of a flag, what the setting of --task gives where it is unset."""
    setting, recipe = recipes.setting_of(values.task), recipes.recipe_of(values.task)
    parameters = inspect.signature(TASKS[setting.task]).parameters
    rate = recipe.learning_rates[len(recipe.learning_rates) // 2]
    result = {name: choice.default for name, choice in parameters.items()} | {"learning_rate": rate}
    return result | dict(setting.choices) | recipe._asdict()


def setting_from_flags(values: flags.FlagValues) -> tuple[Task, Recipe]:
    """The task of --task and its recipe, whose fields are replaced by the flags that are set.

    In a dry run the task has shapes only.
    """
    from experiments.distributed import processes

    processes.say(f"Preparing {values.task}: data", file=sys.stderr)
    for one, other in EITHER:  # one of them may come from a preset
        if values[one].present and values[other].present:
            both = f"--{one} is {values[one].value} and --{other} is {values[other].value}"
            processes.say(f"{both}: the first counts.")
    chosen = given(values, choices())
    recipes.check_choices(values.task, chosen)
    # Their groups of flags may not be defined.
    abstract, small = (name in values and values[name].value for name in ("dry_run", "tiny"))
    place, fields = (values.task, values.data_dir), recipe_fields(values)
    task, recipe = recipes.load(*place, abstract=abstract or small, **chosen)
    if not small:
        return task, recipe._replace(**fields)
    if fields.get("run") == "mesh":  # it stays on one device
        del fields["run"]
    recipe = recipe._replace(**fields)
    return tiny.load(*place, recipe, sizes_of(task, recipe), abstract=abstract, **chosen)


def arm_from_flags(values: flags.FlagValues, label: str | None = None) -> Arm:
    """The arm that the flags of the decisions say."""
    texts = {}
    for kind in TABLES:
        words = [values[kind].value]
        for flag, option in options_of(kind).items():
            if (value := values[flag].value) is not None:
                words.append(value if option.words else f"{flag}{value}")
        texts[kind] = "+".join(words)
    return Arm(label, **texts)


def recipe_fields(values: flags.FlagValues) -> dict:
    """The fields of a recipe whose flags are set. A field that excludes one of them is None."""
    fields = given(values, Recipe._fields)
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    for one, other in EITHER:
        if one in fields or other in fields:
            fields = {one: None, other: None} | fields
    return fields


def given(values: flags.FlagValues, names: Iterable[str]) -> dict:
    """The flags of these names that are set."""
    return {name: values[name].value for name in names if values[name].value is not None}


def settings(values: flags.FlagValues, recipe: Recipe) -> Mapping:
    """The settings that all runs in a folder share; arms, rates and seeds may differ."""
    from experiments import fingerprints

    shared = {k: v for k, v in recipe._asdict().items() if k != "learning_rates"}
    shared |= fingerprints.jax_settings()
    shared |= {name: values[name].value for name in ("input", "step_seconds") if name in values}
    shared |= {"tiny": True} if values.tiny else {}
    return {"task": values.task, **given(values, choices()), **shared}


def folder_of(values: flags.FlagValues, name: str) -> str:
    """The output folder: of the flag, or by the command and its setting."""
    tiny = "_tiny" * values.tiny
    return values.output_dir or os.path.join("results", f"{name}_{values.task}{tiny}")


def check_shards(shards: str | None, arms: Iterable = ()) -> None:
    """Refuses unequal shards where no arm's order is of a worker's own units."""
    if shards not in (None, "equal") and all(arm.rows[0].deals for arm in arms):
        raise UserError(
            f"--shards is {shards}, and here every order gives units anew to all workers in every "
            "epoch: take one of each worker's own units, as cd_grab without --deal, or leave "
            "--shards out."
        )


def with_metrics(study, values: flags.FlagValues):
    """The study with all metrics that its records must have: those that it or --metric names."""
    criterion = study.criterion
    named = [criterion.scalar, *(panel.scalar for panel in study.panels)]
    named += [value for c in study.columns if isinstance(value := getattr(c, "value", None), str)]
    parts = [name.split("/") for name in named]
    metrics = {*study.metrics, *(words[1] for words in parts if words[0] in ("valid", "test"))}
    if unknown := sorted(metrics - METRICS.keys()):
        raise UserError(
            f"the study {study.name} names the metric {unknown[0]!r}, which is not in METRICS: "
            f"choose one of {', '.join(METRICS)}, or add a row to experiments/data/metrics.py."
        )
    of, name = (criterion.scalar.split("/") + [""])[:2]
    if of == "valid" and criterion.lower != METRICS[name].lower:
        raise UserError(
            f"the criterion of the study {study.name} is {criterion.scalar} with "
            f"lower={criterion.lower}, which chooses the worst rate: pass "
            f"lower={METRICS[name].lower}."
        )
    given = {values.metric} if values["metric"].present else set()
    return study._replace(metrics=metrics | given)
