"""Times epochs of CD-GraB beside the code that was published with the paper.

    git clone https://github.com/GarlGuo/CD-GraB DIR/CD-GraB
    pip install torch
    python -m benchmarks.published_cd_grab --repositories=DIR --data_dir=DATA

All workers are in one process. An epoch computes gradients of single examples, orders them by
`CD_GraB`, and takes steps of SGD on their mean, in a loop like that of the published script. Ours
are the public functions in a scan. First, on whole numbers, the orders of three epochs must be
equal, for as many workers, units and (up to 1,000) parameters as are timed. Then epochs take turns.
On HMDA's logistic regression and on LeNet there are also the epochs and seconds to the training
loss that a random order ends with.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator

import numpy as np
from absl import app, flags

from benchmarks import order_epochs, timing, torch_tasks
from benchmarks.order_epochs import Way
from benchmarks.torch_tasks import Problem


def published_class(folder: str) -> type:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("d_algo").CD_GraB


def published(problem: Problem, folder: str) -> Callable:
    """An epoch of the published class: () -> (params, orders)."""
    import torch

    workers, units = problem.y.shape
    sorter = published_class(folder)(
        0, None, n=workers, m=units, d=problem.parameters, microbatch=problem.step, device="cpu"
    )

    def begin():
        sorter.sort()
        return sorter.orders

    def observe(rows, places):
        flat = torch.cat([row.flatten(1) for row in rows.values()], 1)
        sorter.step(flat.reshape(workers, problem.step, -1), places)

    return torch_tasks.in_torch(problem, begin, observe)


def ways_of(problem: Problem, folder: str) -> dict[str, Way]:
    make, ours = functools.partial(published, folder=folder), order_epochs.way_of_ours
    peer = Way(make, "PyTorch, random order", "syncopate, cd_grab")
    table = order_epochs.random_ways() | {"PyTorch, CD_GraB as published": peer} | ours("cd_grab")
    return table | ours("cd_grab on sketches") if problem.name == "lenet" else table


def check(problem: Problem, folder: str) -> None:
    """Raises AssertionError if orders differ, or losses and gradients of the two frameworks."""
    torch_tasks.check_models(problem)
    shape = (*problem.y.shape, min(problem.parameters, 1000))
    whole = torch_tasks.whole_numbers(shape, problem.step)
    theirs, ours = published(whole, folder), order_epochs.ours(whole, "cd_grab")
    theirs()  # returns the orders it began with, and ours the next ones
    for _ in range(3):
        np.testing.assert_array_equal(ours()[1], theirs()[1])


def rows(repositories: str | None, data_dir: str | None, names: list[str]) -> Iterator[dict]:
    if repositories is None:
        return print("CD-GraB as published is left out: pass --repositories=DIR.")
    folder = os.path.join(repositories, "CD-GraB")
    try:
        published_class(folder)
    except ImportError as error:
        return print(f"CD-GraB as published is left out: {error}")
    for problem in torch_tasks.problems(names, data_dir):
        check(problem, folder)
        yield from order_epochs.rows_of(problem, ways_of(problem, folder))


def main(argv):
    del argv
    given = flags.FLAGS
    timing.print_rows(rows(given.repositories, given.data_dir, given.problems))


if __name__ == "__main__":
    flags.DEFINE_string("repositories", None, "has the clone CD-GraB")
    flags.DEFINE_string("data_dir", None, "has the folders hmda and tfds")
    flags.DEFINE_list("problems", list(torch_tasks.EPOCHS), "what is trained")
    app.run(main)
