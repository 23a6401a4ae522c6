"""What an experiment trains on: data, model and recipe."""

import os
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import numpy as np
from absl import flags

from experiments.data.averages import AVERAGES
from experiments.data.metrics import METRICS
from experiments.data.optimizers import OPTIMIZERS
from experiments.data.schedules import SCHEDULES
from experiments.data.shards import SHARDS, WEIGHTS
from syncopate.refusals import UserError, inside


class Real(flags.FloatParser):
    """Numbers in an interval such as "(0, 1]", without NaN, which `flags.FloatParser` takes."""

    def __init__(self, interval: str):
        super().__init__()
        self.interval, self.syntactic_help = interval, f"a number in {interval}"

    def parse(self, argument: str | float) -> float:
        try:
            number = self.convert(argument)
        except ValueError:
            number = float("nan")
        if number not in self:
            raise UserError(f"pass {self.syntactic_help}")
        return number

    def __contains__(self, number: float) -> bool:
        return inside(number, self.interval)


MOST = 2**31 - 1  # int32, as steps and units are counted on the devices
COUNT, FROM_ZERO = flags.IntegerParser(1, MOST), flags.IntegerParser(0, MOST)
SEED = flags.IntegerParser(0, 2**32 - 1)  # a larger one would be taken modulo 2^32
SHARE, FACTOR, PART = Real("[0, 1]"), Real("(0, 1]"), Real("(0, 1)")
MOMENTUM = Real("[0, 0.9999999]")  # below 1 in float32 too
POSITIVE, FINITE = Real("(0, inf)"), Real("(-inf, inf)")
EPOCHS = Real("(0, 2147483647]")
# Up to the largest number of float32, in which steps compute.
RATE, DECAY = Real("(0, 3.4028235e38]"), Real("[0, 3.4028235e38]")
# In seconds and in steps: the longest wait of a timer is 9.2e9 seconds.
SECONDS, WAIT = Real("[0, 10000000]"), Real("[1, 10000000]")
STEPS, SLOWNESS = Real("[0, 1000000]"), Real("(0, 1000000]")
SPEED = Real("[0.001, inf)")  # in Gb/s or teraflops


def check(name: str, value, allowed: flags.ArgumentParser) -> Any:
    """What a flag makes of a value; ValueError, naming the flag, if it would not take it."""
    try:
        return allowed.parse(value)
    except (TypeError, ValueError) as error:
        rule = f"pass {allowed.syntactic_help}" if allowed.syntactic_help else error
        raise UserError(f"--{name} is {value}: {rule}.") from error


def words(table: Iterable[str]) -> flags.EnumParser:
    return flags.EnumParser([*table])


class Recipe(NamedTuple):
    """The setting of a run, in any study. Every field is a flag, with this text and parser."""

    workers: Annotated[int, "number of workers, W", COUNT]
    units_per_step: Annotated[int, "units per worker and step, B", COUNT]
    unit_size: Annotated[int, "examples per unit; 1 orders single examples", COUNT]
    learning_rates: Annotated[tuple[float, ...], "peak rates; each arm takes its own best", RATE]
    epochs: Annotated[int | None, "epochs without echoing; or total_steps", COUNT] = None
    total_steps: Annotated[int | None, "number of steps, T; or epochs", COUNT] = None
    optimizer: Annotated[str, "optimizer of every worker", words(OPTIMIZERS)] = "momentum"
    momentum: Annotated[float, "momentum of SGD, b1 of AdamW", MOMENTUM] = 0.9
    weight_decay: Annotated[float, "weight decay of the optimizer", DECAY] = 0.0
    schedule: Annotated[str, "learning rate schedule after the warmup", words(SCHEDULES)] = (
        "constant"
    )
    warmup_steps: Annotated[int, "steps of learning rate warmup", FROM_ZERO] = 0
    floor: Annotated[float, "last rate / peak rate of cosine and linear", SHARE] = 0.0
    decay_every: Annotated[float, "epochs of a step schedule's steps, or of a cycle", EPOCHS] = 10.0
    decay_factor: Annotated[float, "factor of a step schedule's drops", FACTOR] = 0.1
    h_base: Annotated[int, "smallest number of steps per round, H", COUNT] = 4
    growth: Annotated[float, "alpha / peak rate, of QSR", POSITIVE] = 2.0
    echo_factor: Annotated[int, "uses of a batch, e; a falling p ends at 1 / e", COUNT] = 4
    horizon: Annotated[int | None, "steps over which p falls; T if unset", COUNT] = None
    evaluations: Annotated[int | None, "evaluations of a run; every epoch if unset", COUNT] = None
    evaluate_every: Annotated[int | None, "steps between them; or evaluations", COUNT] = None
    bound_every: Annotated[int, "epochs between herding bounds; 0 for none", FROM_ZERO] = 0
    average: Annotated[
        tuple[str, ...], "averages of the weights, measured too", words(AVERAGES)
    ] = ()
    ema_epochs: Annotated[
        tuple[float, ...], "time constants of --average=ema, one average each", EPOCHS
    ] = (0.5,)
    shards: Annotated[
        str,
        "examples of a worker: equally many at random, of few classes, or 1/2, 1/4, 1/8 and 1/8 of "
        "four workers'; not of --deal",
        words(SHARDS),
    ] = "equal"
    weights: Annotated[
        str, "of workers in means: equal, or their numbers of examples", words(WEIGHTS)
    ] = "equal"
    metric: Annotated[str, "test metric recorded too, and that of the target", words(METRICS)] = (
        "accuracy"
    )
    target: Annotated[float | None, "metric to reach on both test halves", FINITE] = None
    run: Annotated[
        str,
        "vmap or turns: workers share a device; mesh: a device each",
        words(["vmap", "turns", "mesh"]),
    ] = "vmap"


FIELDS = {  # of a recipe: (type, what it is, what parses it or each of several)
    name: (hint.__origin__, *hint.__metadata__)
    for name, hint in typing.get_type_hints(Recipe, include_extras=True).items()
}


class Task(NamedTuple):
    """Data, model and recipe.

    Sets in memory are {"x": array[N, ...] or a tree of such, "y": array[N] or [N, L]}, and may have
    more arrays for the loss; larger ones are random-access sources of such examples. An abstract
    task has `jax.ShapeDtypeStruct` leaves with the published shapes, for dry runs.
    """

    name: str  # as in `TASKS`
    model: Any  # a `models.Model`
    train: dict
    test: dict
    recipe: Recipe  # the default setting
    optimum: Callable[[], float] | None = None  # the minimum of the training loss, if it is known
    metric: str = "accuracy"  # a name of `tasks.metrics.METRICS`
    recut: Any = None  # `text.Recut` of a text whose windows may be cut anew


def check_recipe(recipe: Recipe) -> None:
    """Raises ValueError for a recipe that cannot run, before anything is compiled."""
    if recipe.epochs is None and recipe.total_steps is None:
        raise UserError("a recipe needs epochs or total_steps: pass --epochs or --total_steps.")
    for name, (_, _, allowed) in FIELDS.items():
        value = getattr(recipe, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None:
                check(name, number, allowed)


def network(kind: str, **sizes):
    """A model, by the name of its function in `models`, which needs JAX."""
    import models

    return getattr(models, kind)(**sizes)


def minimum(model, train: dict) -> float:
    """The minimum of a regression's training loss."""
    import models

    return models.optimum(model, train)


def abstract_set(number: int, **fields) -> dict:
    """Shapes of `number` examples; each field is (shape of one example, dtype)."""
    import jax

    return {
        name: jax.ShapeDtypeStruct((number, *shape), dtype)
        for name, (shape, dtype) in fields.items()
    }


def abstract_sets(numbers: Iterable[int], shape: tuple[int, ...]) -> list[dict]:
    """Shapes of sets of these sizes: examples x, float32, and classes y, int32."""
    return [abstract_set(n, x=(shape, np.float32), y=((), np.int32)) for n in numbers]


def check_model(task: str, model: str, choices: Iterable[str]) -> None:
    if model not in choices:
        raise UserError(f"model is {model!r}: {task} has the models {sorted(choices)}.")


def first_of(data: dict, number: int) -> dict:
    """The first `number` examples, of arrays or of their shapes."""
    import jax

    def first(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            size = min(number, leaf.shape[0])
            return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)
        return leaf[:number]

    return jax.tree.map(first, data)


def with_first(task: Task, *, num_train: int | None = None, num_test: int | None = None) -> Task:
    """The task restricted to its first examples; None keeps all."""
    given = {"train": num_train, "test": num_test}
    given = {part: number for part, number in given.items() if number is not None}
    for part, number in given.items():
        if not isinstance(task.train, dict):
            raise UserError(
                f"--num_{part} is {number}: {task.name} reads its sets from disk, and has no first "
                "examples in memory. Leave it out."
            )
    parts = {part: first_of(getattr(task, part), number) for part, number in given.items()}
    if task.recut is not None and num_train is not None:
        parts["recut"] = task.recut.first(num_train)
    # The optimum was that of all training examples.
    return task._replace(**parts, **({"optimum": None} if "train" in parts else {}))


def size_of(data) -> int:
    """Examples of arrays, of their shapes, or of a random-access source."""
    if isinstance(data, dict):
        return size_of(next(iter(data.values())))
    return data.shape[0] if hasattr(data, "shape") else len(data)


def check_task(task: Task) -> Task:
    """The task; raises ValueError for a set that a run cannot read."""
    import jax

    for part in ("train", "test"):
        data = getattr(task, part)
        is_source = not isinstance(data, dict | list | tuple) and hasattr(data, "__getitem__")
        example = data[0] if is_source and len(data) else data
        leaves, lengths = jax.tree.leaves(example), {len(data)} if is_source else set()
        if isinstance(example, dict) and not is_source:
            lengths = {(*getattr(x, "shape", ()), 0)[0] for x in leaves}
        if not isinstance(example, dict) or not {"x", "y"} <= example.keys() or len(lengths) != 1:
            given = sorted(example) if isinstance(example, dict) else f"a {type(example).__name__}"
            raise UserError(
                f"the loader of {task.name} gives a {part} set of {given}, of lengths "
                f"{sorted(lengths)}: give a dict of arrays x and y of one length, or a source "
                "(len(source) and source[i]) of such examples."
            )
        kinds = [getattr(x, "dtype", np.asarray(x).dtype) for x in leaves]
        if words := [str(kind) for kind in kinds if kind.kind in "OSUMm"]:
            raise UserError(
                f"the loader of {task.name} gives a {part} set with an array of {words[0]}: give "
                "numbers, and pad series of unequal length, with a mask among the features of x."
            )
        if not min(lengths):
            raise UserError(f"the loader of {task.name} gives a {part} set without an example.")
    return task


def split(x, y, *, num_train: int, seed: int = 0) -> tuple[dict, dict]:
    """Train and test set: a seeded shuffle, whose first `num_train` examples are for training."""
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = order[:num_train], order[num_train:]
    return {"x": x[train], "y": y[train]}, {"x": x[test], "y": y[test]}


def need_file(task: str, data_dir: str | None, *names: str, how: str) -> str:
    """The path of the first of these files or folders that exists."""
    if data_dir is None:
        raise UserError(f"{task} reads {names[-1]} from --data_dir, which is not set. {how}")
    paths = [os.path.join(data_dir, name) for name in names]
    path = next(filter(os.path.exists, paths), None)
    if path is None:
        raise UserError(f"{paths[-1]!r} does not exist. {how}")
    return path
