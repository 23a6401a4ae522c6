"""Times epochs of GraB by one worker beside grab-sampler, a package for PyTorch.

    pip install torch && pip install --no-build-isolation torch-scatter torch-sparse
    pip install grab-sampler
    python -m benchmarks.grab_sampler --data_dir=DATA

The same problems as those of `published_cd_grab`, with all examples on one worker. The package's
sorters are called as its `GraBSampler` calls them, which PyTorch 2.13 refuses to construct.
Examples are taken from tensors, which is faster than the DataLoader that it is made for.

The sorters compute what `ordering.grab` and `ordering.pair_balance` do, but a product of zero gives
a minus; ours are timed with a sign rule that does so, too. First, the orders of three epochs must
be equal on whole numbers, whose sums are exact. Pairs are compared for as many units and (up to
1,000) parameters as are timed. Gradients less their mean are compared for 16 units, because
rounding decides in longer sums.
"""

import functools
from collections.abc import Callable, Iterator

import numpy as np
from absl import app, flags

from benchmarks import order_epochs, timing, torch_tasks
from benchmarks.order_epochs import Way
from benchmarks.torch_tasks import Problem

SAME = {"mean": "grab", "pair": "pair_balance"}  # {its name: ours}


def sorted_by(problem: Problem, kind: str) -> Callable:
    """An epoch of the package: () -> (params, orders)."""
    import torch
    from grabsampler import sorter

    _, units = problem.y.shape
    sorters = {"mean": sorter.MeanBalance, "pair": sorter.PairBalance}
    sort = sorters[kind](units, problem.parameters, random_first_epoch=False)

    def begin():
        sort.reset_epoch()
        return torch.clone(sort.orders)[None]

    return torch_tasks.in_torch(problem, begin, lambda rows, places: sort.step(rows))


def ways() -> dict[str, Way]:
    table = order_epochs.random_ways()
    for kind, name in SAME.items():
        peer = functools.partial(sorted_by, kind=kind)
        way = order_epochs.way_of_ours(name)
        (label,) = way
        table[f"PyTorch, grab-sampler {kind}"] = Way(peer, "PyTorch, random order", label)
        table |= way
    return table


def check(problem: Problem) -> None:
    """Raises AssertionError if orders differ, or losses and gradients of the two frameworks."""
    torch_tasks.check_models(problem)
    _, units = problem.y.shape
    for kind, shape, step in (
        ("pair", (1, units, min(problem.parameters, 1000)), problem.step),
        ("mean", (1, 16, 20), 4),
    ):
        whole = torch_tasks.whole_numbers(shape, step)
        theirs, ours = sorted_by(whole, kind), order_epochs.ours(whole, SAME[kind])
        theirs()  # returns the order it began with, and ours the next one
        for _ in range(3):
            np.testing.assert_array_equal(ours()[1], theirs()[1])


def rows(data_dir: str | None, names: list[str]) -> Iterator[dict]:
    try:
        from grabsampler import sorter  # noqa: F401
    except ImportError as error:
        return print(f"grab-sampler is left out: {error}")
    for problem in torch_tasks.problems(names, data_dir):
        problem = problem.alone()
        check(problem)
        yield from order_epochs.rows_of(problem, ways())


def main(argv):
    del argv
    timing.print_rows(rows(flags.FLAGS.data_dir, flags.FLAGS.problems))


if __name__ == "__main__":
    flags.DEFINE_string("data_dir", None, "has the folders hmda and tfds")
    flags.DEFINE_list("problems", list(torch_tasks.EPOCHS), "what is trained")
    app.run(main)
