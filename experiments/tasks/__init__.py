"""The table of tasks: a new task is one file and one row."""

from experiments.tasks import cifar10, digits, hmda, mnist, tinyshakespeare
from experiments.tasks.base import Recipe, Task

TASKS = {
    "cifar10": cifar10.load,
    "digits": digits.load,
    "hmda": hmda.load,
    "mnist": mnist.load,
    "tinyshakespeare": tinyshakespeare.load,
}

__all__ = ["TASKS", "Recipe", "Task"]
