"""The table of tasks: a new task is one file and one row."""

import functools

from experiments.tasks import (
    cifar10,
    cifar100,
    digits,
    hmda,
    imagenet2012,
    m4_weekly,
    mnist,
    sst2,
    tinyshakespeare,
    wikitext,
)
from experiments.tasks.base import Recipe, Task

TASKS = {
    "cifar10": cifar10.load,
    "cifar10_small": cifar10.load_small,
    "cifar100": cifar100.load,
    "digits": digits.load,
    "hmda": hmda.load,
    "imagenet2012": imagenet2012.load,
    "m4_weekly": m4_weekly.load,
    "mnist": mnist.load,
    "sst2": sst2.load,
    "tinyshakespeare": tinyshakespeare.load,
    "wikitext103": functools.partial(wikitext.load, corpus="wikitext103"),
    "wikitext2": functools.partial(wikitext.load, corpus="wikitext2"),
    "wikitext2_small": functools.partial(wikitext.load, corpus="wikitext2_small"),
}

__all__ = ["TASKS", "Recipe", "Task"]
