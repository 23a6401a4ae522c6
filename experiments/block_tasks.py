"""What `experiments.blocks` compares: sorted files, and ways to read them."""

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

import models
from experiments.study import recipes
from experiments.tasks import text
from experiments.tasks.base import Recipe

BATCH = 4  # records of a worker in a step
PAGE = 4096  # bytes
BUFFER = 16  # the shuffle buffer has this part of all records
MOST = 4  # windows of several blocks have at most this part of all records
COUNTY = 8  # place of county_code among HMDA's features


class Sorted(NamedTuple):
    """Records in the sequence of a file."""

    model: models.Model
    train: dict  # arrays [N, ...]
    record_bytes: int  # as a file would hold them


class Setting(NamedTuple):
    """A task, the sequence of its records, and how it is trained."""

    label: str  # for people
    folder: str | None  # of the data; None: they come with scikit-learn
    load: Callable[[str | None, int], Sorted]  # from the folder, and N
    num_records: int  # N
    sizes: tuple[int, ...]  # S, records of a block
    recipe: Recipe
    convex: bool = True  # the optimum is known, and cheap runs of all rates and seeds go at once
    sketch: int | None = None  # numbers that balanced orders see of a gradient; None: all


def _sorted(train: dict, key: np.ndarray, count: int) -> dict:
    """`count` records, a seeded sample, sorted by their keys; equal ones in a random sequence."""
    chosen = np.random.default_rng(0).permutation(len(key))[:count]
    chosen = chosen[np.argsort(key[chosen], kind="stable")]
    return jax.tree.map(lambda x: x[chosen], train)


def _digits(folder, count):
    task, _ = recipes.load("digits")
    return Sorted(task.model, _sorted(task.train, task.train["y"], count), 64 + 1)


def _hmda(folder, count, *, by_target):
    task, _ = recipes.load("hmda", folder)
    key = task.train["y"] if by_target else task.train["x"][:, COUNTY]
    return Sorted(task.model, _sorted(task.train, key, count), 24 * 4)


def _sst2(folder, count):
    task, _ = recipes.load("sst2", folder)
    sentences, _ = text.sentences(folder, "train")
    key = np.array([len(sentence.split()) for sentence in sentences])
    model = models.softmax_regression(num_features=256, num_classes=2, l2=1e-3)
    size = round(np.mean([len(sentence.encode()) + 2 for sentence in sentences]))
    return Sorted(model, _sorted(task.train, key, count), size)


def _shakespeare(folder, count):
    """Windows of all plays in sequence: of so many as there are, one of each few."""
    length = 32
    task, _ = recipes.load("tinyshakespeare", folder, length=length)
    model = models.gpt2(vocab_size=text.VOCAB_SIZE, context=length, width=32, depth=1, heads=2)
    every = len(task.train["x"]) // count
    train = jax.tree.map(lambda x: x[: count * every : every], task.train)
    return Sorted(model, train, length)


SGD = Recipe(
    workers=4, units_per_step=BATCH, unit_size=1, epochs=10, momentum=0.0,
    learning_rates=(0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12),
)  # fmt: skip
SIZES = (1, 16, 64, 256, 1024)
SETTINGS = {
    "digits": Setting(
        "digits by class", None, _digits, 1024, (1, 8, 16, 32),
        SGD._replace(epochs=20, learning_rates=(0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0)),
    ),
    "hmda_county": Setting(
        "HMDA by county", "hmda", functools.partial(_hmda, by_target=False), 16_384, SIZES, SGD
    ),
    "hmda_denied": Setting(
        "HMDA, denied first", "hmda", functools.partial(_hmda, by_target=True), 16_384, SIZES, SGD
    ),
    "sst2": Setting(
        "SST-2 by length", "sst2", _sst2, 16_384, SIZES,
        SGD._replace(learning_rates=(0.001, 0.002, 0.004, 0.008, 0.016, 0.032)),
    ),
    "shakespeare": Setting(
        "Shakespeare in sequence", "tinyshakespeare", _shakespeare, 4096, (1, 64, 256),
        SGD._replace(
            epochs=4, optimizer="adamw", momentum=0.9, learning_rates=(4e-3, 8e-3, 1.6e-2),
            warmup_steps=128,
        ),
        convex=False, sketch=1024,
    ),
}  # fmt: skip


def load(name: str, data_root: str | None) -> Sorted:
    """The data of a setting; ValueError without the folder that holds the sets' folders."""
    setting = SETTINGS[name]
    if setting.folder is not None and data_root is None:
        raise ValueError(f"--tasks has {name}: pass --data_root=DIR, which holds {setting.folder}.")
    folder = setting.folder and os.path.join(data_root or "", setting.folder)
    return setting.load(folder, setting.num_records)


class Arm(NamedTuple):
    """How records are read."""

    order: str  # of ORDERS
    size: int  # S, records of a block
    window: int  # K, blocks of a worker whose records are shuffled together

    @property
    def name(self) -> str:
        return f"{self.order}_{self.size}x{self.window}"


def arms_of(setting: Setting, sizes: Sequence[int], windows: Sequence[int]) -> dict[str, Arm]:
    """{name: arm}, the full shuffle first, then the file as it lies.

    Raises:
      ValueError: for blocks that do not fill windows and batches.
    """
    batch, most = BATCH, setting.num_records // setting.recipe.workers
    found = {"full": Arm("shuffled", 1, batch), "file": Arm("file", batch, 1)}
    found["buffer"] = Arm("file", batch, max(2, most // BUFFER // batch))
    for order, window, size in itertools.product(("shuffled", "balanced"), windows, sizes):
        arm = Arm(order, size, max(window, batch // size))
        few = window > 1 and (size < batch or size * window * MOST > most)
        if not few and (order, size) != ("shuffled", 1):
            found[arm.name] = arm
    for arm in found.values():
        window = arm.size * arm.window
        if window % batch or most % window:
            raise ValueError(
                f"{most:,} records of a worker are not whole windows of {arm.window} blocks of "
                f"{arm.size}, or these not batches of {batch}: pass other --sizes or --windows."
            )
    return found


def label_of(name: str, arm: Arm) -> str:
    given = {
        "full": "full shuffle", "file": "file order",
        "buffer": f"file order, buffer of 1/{BUFFER}",
    }  # fmt: skip
    several = f", {arm.window} at once" * are_several(arm)
    return given.get(name, f"blocks of {arm.size:,}, {arm.order}{several}")


def are_several(arm: Arm) -> bool:
    """Whether more blocks are read at once than a batch takes."""
    return arm.window * arm.size > max(arm.size, BATCH)


def costs(name: str, arm: Arm, setting: Setting, record_bytes: int) -> dict:
    """Requests and bytes of an epoch, and the records that all workers hold at once."""
    requests, total = setting.num_records // arm.size, setting.num_records * record_bytes
    found = {"requests": requests, "bytes": requests * (PAGE - 1) + total}  # touched on average
    if arm.order == "file":  # one long read
        found = {"requests": 1, "bytes": total}
    return found | {"held": arm.size * arm.window * setting.recipe.workers}
