"""From flags to a task and the recipe that it is trained by."""

from absl import flags

from experiments import training
from experiments.tasks import TASKS, Recipe, Task
from experiments.tasks.base import with_first

FLAGS = flags.FLAGS


def task_from_flags(values: flags.FlagValues = FLAGS) -> tuple[Task, Recipe]:
    """The task of --task, --model and --num_train, its shapes alone for --dry_run; its recipe.

    Raises:
      ValueError: for a recipe that cannot run.
    """
    chosen = {"model": values.model} if values.model else {}
    task = TASKS[values.task](values.data_dir, abstract=values.dry_run, **chosen)
    task = with_first(task, values.num_train)
    return task, recipe_from_flags(task, values)


def recipe_from_flags(task: Task, values: flags.FlagValues = FLAGS) -> Recipe:
    """The task's recipe with the flags that are set in place of its fields."""
    given = {name: values[name].value for name in Recipe._fields if name in values}
    if given.get("learning_rates"):
        given["learning_rates"] = tuple(float(r) for r in given["learning_rates"])
    recipe = task.recipe._replace(**{k: v for k, v in given.items() if v is not None})
    training.check_recipe(recipe)
    return recipe
