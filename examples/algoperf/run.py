"""AlgoPerf's own runner and scorer, on the submissions of this folder.

    python examples/algoperf/run.py --algoperf=DIR --mnist=DIR --results=DIR --max_steps=2343
    python examples/algoperf/run.py --algoperf=DIR --results=DIR --score

The first trains every submission (--arm) with every rate of tuning_search_space.json, a trial each,
in one study per seed; the second has AlgoPerf score what lies in the results. Replaced from outside
are `tfds.load`, which cannot read MNIST as ArrayRecord; the seconds between two evaluations, of
which AlgoPerf's 10 would leave two or three in a run; and, for the scorer, the target. It is told
how many workloads, trials and studies there are, as its source asks.
"""

import argparse
import contextlib
import copy
import functools
import json
import pathlib
import re
import sys
from unittest import mock

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
import checkouts  # noqa: E402

ADDRESS = "https://github.com/mlcommons/algorithmic-efficiency"
ARMS = ("plain", "echo", "reshuffled", "cd_grab", "local_steps")
SPACE = FOLDER / "tuning_search_space.json"


def choices():
    """argparse, since AlgoPerf's modules define absl flags of these names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--algoperf", help="checkout of github.com/mlcommons/algorithmic-efficiency")
    add("--mnist", help="data_dir of tensorflow-datasets, with MNIST as ArrayRecord")
    add("--results", default="results/algoperf", help="AlgoPerf's experiment_dir")
    add("--arm", default=",".join(ARMS), help="submissions of this folder")
    add("--seeds", type=int, default=3, help="studies of every submission")
    add("--eval_period", type=float, default=1.0, help="seconds; AlgoPerf's is 10")
    add("--max_steps", type=int, default=None, help="of a trial; AlgoPerf has a time limit alone")
    add("--profile", action="store_true", help="have AlgoPerf print where the time goes")
    add("--score", action="store_true", help="score instead of training")
    add("--target", type=float, default=0.9, help="to score by; AlgoPerf's is 0.97")
    return parser.parse_args()


@functools.cache
def arrays_of(split: str, data_dir: str) -> dict:
    import numpy as np
    import tensorflow_datasets as tfds

    source = tfds.data_source("mnist", split=split, data_dir=data_dir)
    rows = [source[i] for i in range(len(source))]
    return {name: np.stack([row[name] for row in rows]) for name in ("image", "label")}


def load(name, *, split, shuffle_files, data_dir):
    """What `tfds.load` gives of MNIST, from ArrayRecord."""
    import tensorflow as tf

    found = re.fullmatch(r"(\w+)(?:\[(\d*):(\d*)\])?", split)
    if name != "mnist" or shuffle_files or found is None:
        raise ValueError(f"{name} of {split!r}: only MNIST in its own order is read here.")
    whole, start, stop = found.groups()
    part = slice(int(start) if start else None, int(stop) if stop else None)
    arrays = {k: a[part] for k, a in arrays_of(whole, data_dir).items()}
    return tf.data.Dataset.from_tensor_slices(arrays)


def train(c, arm: str, seed: int, workloads: dict) -> None:
    """One study: AlgoPerf's `main`, with flags as on its command line."""
    import submission_runner as runner

    trials = len(json.loads(SPACE.read_text()))
    given = {
        "framework": "jax", "workload": "mnist", "submission_path": f"{arm}.py",
        "tuning_search_space": SPACE, "num_tuning_trials": trials, "data_dir": c.mnist,
        "experiment_dir": pathlib.Path(c.results).resolve() / arm, "rng_seed": seed + 1,
        "experiment_name": f"study_{seed}", "save_checkpoints": False, "overwrite": True,
    }  # fmt: skip
    if c.max_steps:
        given["max_global_steps"] = c.max_steps
    if c.profile:
        given |= {"profile": True, "verbosity": 0}  # the profile is logged as information
    given["experiment_dir"].mkdir(parents=True, exist_ok=True)
    runner.FLAGS(["submission_runner", *(f"--{name}={value}" for name, value in given.items())])
    runner.WORKLOADS.update(copy.deepcopy(workloads))  # `main` writes into it
    runner.main(None)


def train_all(c) -> None:
    import submission_runner as runner
    import tensorflow_datasets as tfds
    from algoperf.workloads.mnist.workload import BaseMnistWorkload

    workloads = copy.deepcopy(runner.WORKLOADS)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(tfds, "load", load))
        period = property(lambda _: c.eval_period)
        stack.enter_context(mock.patch.object(BaseMnistWorkload, "eval_period_time_sec", period))
        for seed in range(c.seeds):
            for arm in c.arm.split(","):
                train(c, arm, seed, workloads)


def main() -> None:
    c = choices()
    unknown = set(c.arm.split(",")) - set(ARMS)
    if unknown:
        raise ValueError(f"--arm has {sorted(unknown)}: pass some of {','.join(ARMS)}.")
    folder = checkouts.use(
        c.algoperf, flag="--algoperf", address=ADDRESS, holds="submission_runner.py"
    )
    if c.score:
        import scored

        trials = len(json.loads(SPACE.read_text()))
        scored.main(folder, pathlib.Path(c.results), trials=trials, target=c.target)
        return
    checkouts.files(c.mnist, ["mnist"], flag="--mnist")
    train_all(c)


if __name__ == "__main__":
    main()
