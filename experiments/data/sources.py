"""Random access to sets prepared by tensorflow-datasets, and crops of images too many for memory.

No TensorFlow pipeline is involved.
"""

import contextlib
import dataclasses
import glob
import os
import zipfile
from typing import Any

import numpy as np

from experiments.data.base import COUNT, check, need_file
from syncopate.refusals import UserError

# Further flags of the command that prepares a set, for archives that need a registration.
MANUAL = {"imagenet2012": " --manual_dir=DIR_WITH_ILSVRC2012_TARS"}
# Per channel, of ImageNet's training pixels in [0, 1]: the usual constants.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
AREAS = (0.08, 1.0)  # of a random crop, as a share of the image
ASPECTS = (3 / 4, 4 / 3)  # width over height of a random crop
ATTEMPTS = 10  # random crops tried until one fits into the image
SHORT = 256 / 224  # short side of a resized image over the side of its central crop
CHUNK = 16  # images decoded at full size at once
MOST_UNPACKED = 2**28  # bytes of the tables in an archive: six times New Jersey's of HMDA


def source(name: str, data_dir: str | None, split: str):
    """The random-access source of a prepared set; if missing, the error says how to prepare it."""
    how = (
        f"Prepare it with `tfds build {name} --data_dir=DIR --file_format=array_record"
        f"{MANUAL.get(name, '')}` (of tensorflow-datasets) and pass --data_dir=DIR."
    )
    path = need_file(name, data_dir, name, how=how)
    if not glob.glob(os.path.join(path, "*", f"*-{split}.array_record*")):
        raise UserError(f"{path!r} holds no split {split!r} as ArrayRecord. {how}")
    import tensorflow_datasets as tfds

    return tfds.data_source(name, split=split, data_dir=data_dir)


@contextlib.contextmanager
def reading(path: str, how: str):
    """Names the file, and how to get it, in every error that its reading raises."""
    try:
        yield
    except (OSError, EOFError, IndexError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path!r} is damaged or another file ({error}). {how}") from error


def check_unpacked(archive: zipfile.ZipFile, most: int = MOST_UNPACKED) -> None:
    """Raises ValueError, by the sizes in its header, for an archive of more than `most` bytes."""
    size = sum(member.file_size for member in archive.infolist())
    if size > most:
        raise UserError(f"it unpacks to {size / 1e6:,.0f} MB, and at most {most / 1e6:,.0f} fit")


def subset(examples, size: int, *, name: str) -> np.ndarray:
    """Sorted indices of `size` examples drawn without replacement; name: of it, in the error."""
    check_number(size, len(examples), name=name)
    return np.sort(np.random.default_rng(0).permutation(len(examples))[:size])


def check_number(number: int, held: int, *, name: str) -> None:
    """Raises ValueError unless `number`, called `name` in the error, is in [1, held]."""
    if not 1 <= number <= held:
        raise UserError(
            f"{name} is {number}: the set holds {held} examples; pass a number from 1 to that."
        )


def as_arrays(rows: list[dict]) -> dict:
    """Examples as arrays: {"x": float32[N, H, W, C] in [0, 1], "y": int32[N]}."""
    x = np.stack([row["image"] for row in rows]).astype(np.float32) / 255
    return {"x": x, "y": np.array([row["label"] for row in rows], np.int32)}


@dataclasses.dataclass(frozen=True)
class ImageSource:
    """A random-access source of normalised square crops of images of any size.

    For training, an image is cropped at random to 8 to 100 % of its area with a width of 3/4 to 4/3
    of its height, resized to `size`, and mirrored with probability 1/2. The crop depends only on
    (seed, epoch, index), not on earlier reads, threads or restarts. For evaluation, the short side
    is resized to 256/224 of `size` and the centre is cropped. Resizing is bilinear with
    antialiasing.

    A source is immutable: `of_seed` returns that of another run, and `at_epoch` that of another
    epoch. An order that compares an example's gradients between epochs would compare different
    crops: for such orders use `training=False` on the training images too.

    Args:
      examples: a random-access source with `__getitem__`, `__getitems__` and `len`, such as
        `tfds.data_source`, of {"image": uint8[H, W, 3], "label": int}.
      size: side of the crops in pixels, >= 1.
      training: random crops; otherwise central ones.
      seed, epoch: >= 0, of the random crops.

    `source[i]` is {"x": float32[size, size, 3], "y": int32}, `source.__getitems__(indices)` a list.

    References:
      Szegedy et al., Going Deeper with Convolutions, 2015, https://arxiv.org/abs/1409.4842
    """

    examples: Any
    size: int = 224
    training: bool = False
    seed: int = 0
    epoch: int = 0

    def __post_init__(self):
        check("size", self.size, COUNT)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices) -> list[dict]:
        views, indices = [], [int(index) for index in indices]
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"index {index} is out of range: there are {len(self)} examples.")
        for start in range(0, len(indices), CHUNK):
            part = indices[start : start + CHUNK]
            rows = self.examples.__getitems__(part)
            views += [self._view(index, row) for index, row in zip(part, rows, strict=True)]
        return views

    def of_seed(self, seed: int) -> "ImageSource":
        """The source of the run with this seed, with other crops of the same images."""
        return dataclasses.replace(self, seed=seed)

    def at_epoch(self, epoch: int) -> "ImageSource":
        """The source of another epoch, with other crops of the same images."""
        return dataclasses.replace(self, epoch=epoch)

    def _view(self, index, row):
        image, label = row["image"], row["label"]
        if label < 0:
            raise UserError(
                f"example {index} has the label {label}: this split has no labels. Read one that "
                "has, such as 'validation' of imagenet2012."
            )
        if self.training:
            draws = np.random.default_rng((self.seed, self.epoch, int(index)))
            x = resized(image, random_box(draws, *image.shape[:2]), self.size)
            x = x[:, ::-1] if draws.random() < 0.5 else x
        else:
            x = resized(image, central_box(*image.shape[:2], self.size), self.size)
        return {"x": (x / np.float32(255) - MEAN) / DEVIATION, "y": np.int32(label)}


def random_box(draws: np.random.Generator, height: int, width: int) -> tuple:
    """(left, top, right, bottom) in pixels of a random crop, with area and aspect in their ranges.

    The logarithm of the aspect is uniform. If no attempt fits, because the image is long and thin,
    the crop is the largest central one with an allowed aspect.
    """
    area = height * width * draws.uniform(*AREAS, ATTEMPTS)
    aspect = np.exp(draws.uniform(*np.log(ASPECTS), ATTEMPTS))
    wide, high = np.rint(np.sqrt([area * aspect, area / aspect])).astype(int).clip(1)
    fits = np.flatnonzero((wide <= width) & (high <= height))
    if fits.size:
        w, h = int(wide[fits[0]]), int(high[fits[0]])
        left, top = int(draws.integers(width - w + 1)), int(draws.integers(height - h + 1))
    else:
        w, h = min(width, round(height * ASPECTS[1])), min(height, round(width / ASPECTS[0]))
        left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def central_box(height: int, width: int, size: int) -> tuple:
    """(left, top, right, bottom) of a central crop of `size` pixels, before it is resized."""
    short = round(SHORT * size)
    edges = []
    for side in (width, height):
        whole = round(side * short / min(height, width))
        first = (whole - size) // 2
        # Integers until the division, so that the box cannot leave the image.
        edges.append((first * side / whole, (first + size) * side / whole))
    (left, right), (top, bottom) = edges
    return left, top, right, bottom


def resized(image: np.ndarray, box: tuple, size: int) -> np.ndarray:
    """The box of an image [H, W, 3], resized to uint8[size, size, 3]; bilinear."""
    from PIL import Image

    resize = Image.fromarray(image).resize
    return np.asarray(resize((size, size), Image.Resampling.BILINEAR, box=box))
