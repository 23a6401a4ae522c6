"""The table of tasks: to add a task, add a file and a row.

A row is a loader, `(data_dir, model, *, abstract, ...) -> Task`; its further keywords are flags.
With `abstract` it gives shapes and reads nothing. Otherwise it raises ValueError for a file that is
missing or damaged, which says how to get it.
"""

import functools

from experiments.data import imagenet, images, tabular, text, wikitext
from experiments.data.base import Recipe, Task

TASKS = {
    "cifar10": functools.partial(images.cifar, images.CIFAR10),
    "cifar100": functools.partial(images.cifar, images.CIFAR100),
    "digits": images.digits,
    "hmda": tabular.hmda,
    "imagenet2012": imagenet.load,
    "m4_weekly": tabular.m4_weekly,
    "mnist": images.mnist,
    "sst2": text.sst2,
    "tinyshakespeare": text.tinyshakespeare,
    "wikitext103": functools.partial(wikitext.load, "wikitext103"),
    "wikitext2": functools.partial(wikitext.load, "wikitext2"),
    "wikitext2_small": functools.partial(wikitext.load, "wikitext2_small"),
}

__all__ = ["TASKS", "Recipe", "Task"]
