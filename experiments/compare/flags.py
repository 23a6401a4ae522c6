"""The flags of all experiments, in groups that can be defined in any `FlagValues`.

task      what is trained on: --task, --data_dir, and the choices of every task's loader
setting   hyper-parameters: the fields of a `Recipe`; the setting's own if a flag is unset
run       how a run is carried out, with those of its output and of its processes
output    where results are written: --output_dir, --overwrite
processes which processes it has
forecast  --dry_run and its assumptions

The flags of the three decisions are defined by `arms.define_decisions`.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping

from absl import flags

from experiments import distributed, entry
from experiments.compare import recipes, tiny
from experiments.data import TASKS, base
from experiments.data.base import COUNT, FROM_ZERO, Range, Recipe, Task
from experiments.data.schedules import SCHEDULES
from experiments.report.trackers import TRACKERS
from experiments.trainer.config import sizes_of
from syncopate.refusals import UserError

KINDS = {bool: flags.DEFINE_bool, str: flags.DEFINE_string}
EITHER = (("total_steps", "epochs"), ("evaluate_every", "evaluations"))  # the first one counts
# Fields of a recipe that only some rules and policies read, as their rows say.
OF_ROWS = {
    "h_base": "--sync=constant, qsr and others with a period",
    "growth": "--sync=qsr, inverse and cubic",
    "echo_factor": "--echo=fixed and others but none, and syncs by the factor",
    "horizon": "--p",
}
OF_DRY_RUNS = ("compile", "device_teraflops", "gigabits")
EXCLUSIVE = (*EITHER, ("learning_rate", "learning_rates"))  # the first one counts


class _Number(flags.ArgumentParser):
    """Parses the numbers of a range, and refuses all others."""

    def __init__(self, allowed: Range):
        self.allowed, self.syntactic_help = allowed, str(allowed)

    def parse(self, argument):
        try:
            number = self.allowed.kind(argument)
        except ValueError:
            number = float("nan")
        if number not in self.allowed:
            raise UserError(f"pass {self.allowed}")
        return number

    def flag_type(self):
        return self.allowed.kind.__name__


class _Several(flags.ListParser):
    """Parses a list of at least one number of a range, or of at least one of these words."""

    def __init__(self, allowed: Range | tuple[str, ...]):
        super().__init__()
        words = not isinstance(allowed, Range)
        self.each = flags.EnumParser([*allowed]) if words else _Number(allowed)
        message = f"one of {', '.join(allowed)}" if words else allowed
        self.syntactic_help = f"a list, each {message}"

    def parse(self, argument):
        return [self.each.parse(text) for text in super().parse(argument) or [""]]


def definer(values: flags.FlagValues, title: str = entry.THIS_COMMAND, **defaults) -> Callable:
    """`define(kind, name, default, text, *more, **options)`, which defines a flag of `absl.flags`.

    A kind is a function of `absl.flags`, such as DEFINE_string; a `Range`, whose numbers the flag
    takes; or a list of one of those, or of a tuple of words, for lists of these. --help shows the
    flags below the title. `defaults`, by name, go before the default given to `define`.
    """

    def define(kind, name, default, text, *more, **options):
        default = defaults.get(name, default)
        if isinstance(kind, Range):
            serializer = flags.ArgumentSerializer()
            flags.DEFINE(_Number(kind), name, default, text, values, serializer)
        elif isinstance(kind, list):
            serializer = flags.CsvListSerializer(",")
            flags.DEFINE(_Several(*kind), name, default, text, values, serializer)
        else:
            kind(name, default, *more, text, flag_values=values, **options)
        for module in (sys.argv[0], title):  # flags of the program, wherever they are defined
            values.register_key_flag_for_module(module, values[name])

    return define


def define(values: flags.FlagValues, *groups: str, **defaults) -> None:
    """Defines groups of flags; `defaults` replaces some defaults, as `task="digits_mlp"`."""
    for group in groups:
        GROUPS[group](definer(values, f"{entry.GROUP}the {group}", **defaults))


def _task(define):
    names = ", ".join([*recipes.RECIPES, *TASKS])
    define(flags.DEFINE_string, "task", "digits", f"what to train on and how: {names}")
    define(flags.DEFINE_string, "data_dir", None, "where the task's data lie")
    for name, (choice, tasks) in choices().items():
        text = choice.text or f"of {', '.join(tasks)}"
        define(choice.range or KINDS[choice.kind], name, None, text)


def _setting(define):
    for name, (kind, text, allowed) in base.FIELDS.items():
        if recipes.kind_of(kind) is tuple:
            define([allowed], name, None, text)
        elif isinstance(allowed, Range):
            define(allowed, name, None, text)
        else:
            define(flags.DEFINE_enum, name, None, text, [*allowed])


def _run(define):
    text = "a small network and set in place of the setting's, one seed and rate, some forty steps"
    define(flags.DEFINE_bool, "tiny", False, text)
    reads = ["device", "thread", "tfdata"]
    define(flags.DEFINE_enum, "input", "device", "data that stay there, or are read", reads)
    text = "steps; 0: where a signal asks; about every minute if unset"
    define(FROM_ZERO, "checkpoint_every", None, text)
    _output(define)
    text = f"who is given records too, some of {', '.join(TRACKERS)} (extras of these names)"
    define(flags.DEFINE_list, "track", [], text)
    _processes(define)


def _output(define):
    define(flags.DEFINE_string, "output_dir", None, "results/NAME_TASK or results/NAME if unset")
    define(flags.DEFINE_bool, "overwrite", False, "forget another run in the output folder")


def _processes(define):
    unset = "; unset for one process"
    address, number, process = distributed.PROCESSES
    text = f"host:port of process 0; {distributed.AUTO}: what SLURM or a TPU pod tells{unset}"
    define(flags.DEFINE_string, address, None, text)
    define(COUNT, number, None, "of the run" + unset)
    define(FROM_ZERO, process, None, f"0 .. {number} - 1" + unset)
    text = "seconds after which a process that waits for others, or for a batch, says so and leaves"
    define(base.WAIT, "timeout", distributed.TIMEOUT, text)


def _forecast(define):
    define(flags.DEFINE_bool, "dry_run", False, "print what it would cost, and stop")
    define(flags.DEFINE_bool, "compile", True, "compile the step in a dry run, to know its memory")
    assumed = "assumed by a dry run"
    define(base.SPEED, "device_teraflops", 50.0, f"per second, {assumed}")
    define(base.SPEED, "gigabits", 25.0, f"of a worker's link, {assumed}")


GROUPS = {
    "task": _task,
    "setting": _setting,
    "run": _run,
    "output": _output,
    "processes": _processes,
    "forecast": _forecast,
}


def choices() -> dict[str, tuple[recipes.Choice, list[str]]]:
    """{choice: (what it is, the tasks that have it)}, as the tasks' loaders say."""
    result = {name: (choice, []) for name, choice in recipes.EVERYWHERE.items()}
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
    chosen = given(values, choices())
    abstract = "dry_run" in values and values.dry_run  # its group of flags may not be defined
    small = "tiny" in values and values.tiny
    load = functools.partial(recipes.load, values.task, values.data_dir, **chosen)
    task, recipe = load(abstract=abstract or small)
    on_one_device = recipe.run
    recipe = recipe._replace(**recipe_fields(values))
    base.check_recipe(recipe)
    if small and recipe.run == "mesh":
        recipe = recipe._replace(run=on_one_device)
    if not small:
        return task, recipe
    sizes, place = sizes_of(task, recipe), (values.task, values.data_dir)
    return tiny.load(*place, recipe, sizes, abstract=abstract, **chosen)


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
    further = {name: values[name].value for name in ("input", "step_seconds") if name in values}
    shared |= fingerprints.jax_settings()
    if values.tiny:
        further["tiny"] = True
    return {"task": values.task, **given(values, choices()), **shared, **further}


def folder_of(values: flags.FlagValues, name: str) -> str:
    """The output folder: of the flag, or by the command and its setting."""
    tiny = "_tiny" * values.tiny
    return values.output_dir or os.path.join("results", f"{name}_{values.task}{tiny}")


def check_used(values: flags.FlagValues, recipe: Recipe, arms: Iterable, *, study=None) -> None:
    """Refuses a flag that is set and changes nothing for these arms, of a study or a run alone.

    The flags of a study may come from a preset, and later ones override these. So its own arms
    count besides those that run, its --schedule may leave the floor of another one unused, and of
    two flags that exclude each other it is only told which counts.
    """
    rows = [arm.rows for arm in arms]
    read = {name for _, rule, policy in rows for name in (*rule.reads, *policy.reads)}
    if study is not None and study.speeds and study.paced:
        read -= {"echo_factor"}
    unused = {name: by for name, by in OF_ROWS.items() if name not in read}
    if study is None or not values["schedule"].present:
        for name in {name for row in SCHEDULES.values() for name in row.reads}:
            readers = [word for word, row in SCHEDULES.items() if name in row.reads]
            if recipe.schedule not in readers:
                unused[name] = f"--schedule={' and '.join(readers)}"
    if "ema" not in recipe.average:
        unused["ema_epochs"] = "--average=ema"
    if all(order.deals for order, *_ in rows):
        unused["bound_every"] = "orders of each worker's own units, as cd_grab without --deal"
    if study is None or study.criterion.when != "target":
        unused |= {"target": "echoing and combined", "metric": "echoing and combined --target"}
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
            both = f"--{one} is {values[one].value} and --{other} is {values[other].value}: "
            if study is None:
                raise UserError(f"{both}pass only one of them.")
            from experiments.distributed import processes

            processes.say(f"{both}the first counts.")
