"""The table of tasks: a new task is one file and one row."""

from experiments.tasks import digits, hmda, mnist
from experiments.tasks.base import Recipe, Task

TASKS = {"digits": digits.load, "hmda": hmda.load, "mnist": mnist.load}

__all__ = ["TASKS", "Recipe", "Task"]
