"""Sets that tensorflow-datasets prepared, read without a TensorFlow pipeline."""

import os

import numpy as np

from experiments.tasks.base import need_file

# What else the command that prepares a set needs: what its owners let nobody download unasked.
MANUAL = {"imagenet2012": " --manual_dir=DIR_WITH_ILSVRC2012_TARS"}


def source(name: str, data_dir: str | None, split: str):
    """The random-access source of a prepared set; an error that says how to prepare it."""
    manual = MANUAL.get(name, "")
    how = (
        f"Prepare it with `python -m experiments.prepare --name={name} --data_dir=DIR{manual}` "
        "(tensorflow-datasets' download_and_prepare) and pass --data_dir=DIR."
    )
    if data_dir is None:
        raise ValueError(f"{name} reads a prepared set from --data_dir, which is not set. {how}")
    need_file(os.path.join(data_dir, name), how)
    import tensorflow_datasets as tfds

    return tfds.data_source(name, split=split, data_dir=data_dir)


def read_all(examples) -> list[dict]:
    """All examples of a source, in one batched read."""
    return examples.__getitems__(range(len(examples)))


def subset(examples, size: int, *, name: str, seed: int = 0) -> np.ndarray:
    """Indices of `size` examples drawn without replacement, in the order of the source.

    Args:
      examples: the source; size: from 1 to its length; name: what `size` is called in the error.
      seed: of the draw.
    """
    check_number(size, len(examples), name=name)
    return np.sort(np.random.default_rng(seed).permutation(len(examples))[:size])


def check_number(number: int, held: int, *, name: str) -> None:
    """Raises unless `number`, called `name` in the error, is from 1 to what a set holds."""
    if not 1 <= number <= held:
        raise ValueError(f"{name} is {number}: the set holds {held} examples; take 1 to it.")


def as_arrays(rows: list[dict]) -> dict:
    """Examples as arrays: {"x": float32[N, H, W, C] in [0, 1], "y": int32[N]}."""
    x = np.stack([row["image"] for row in rows]).astype(np.float32) / 255
    return {"x": x, "y": np.array([row["label"] for row in rows], np.int32)}
