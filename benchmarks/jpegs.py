"""JPEG files in a folder, and batches that threads decode, crop and resize from them.

    pip install opencv-python-headless pillow
    python -m benchmarks.jpegs --folder=DIR --seconds=3

prints how many images per second this process decodes with one thread. Files are made in DIR if it
has none: shapes of random colours under noise, 500 x 375 pixels and about 100 kB, like photographs
of ImageNet. Only what the pictures show is synthetic; decoding and augmentation are real.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import math
import pathlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
from absl import app, flags

WIDTH, HEIGHT, QUALITY, NOISE = 500, 375, 90, 20.0
SHAPES = 12  # of a picture
PART = 16  # images of a batch that a thread decodes at a time
AHEAD = 3  # batches that are decoded at a time


def make_files(folder: pathlib.Path, count: int) -> list[pathlib.Path]:
    """The files of a folder, which are made unless they are there."""
    paths = [folder / f"{i}.jpg" for i in range(count)]
    missing = [path for path in paths if not path.exists()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(_write, missing, range(len(missing))))
    return paths


def _write(path, seed):
    from PIL import Image, ImageDraw

    generator = np.random.default_rng(seed)
    corners = generator.integers((0, 0), (WIDTH, HEIGHT), (SHAPES, 2, 2))
    colours = generator.integers(0, 256, (SHAPES + 1, 3)).tolist()
    picture = Image.new("RGB", (WIDTH, HEIGHT), tuple(colours[0]))
    draw = ImageDraw.Draw(picture)
    for i, box in enumerate(np.sort(corners, axis=1)):
        shape = draw.ellipse if i % 2 else draw.rectangle
        shape(box.ravel().tolist(), fill=tuple(colours[i + 1]))
    pixels = np.asarray(picture) + generator.normal(0, NOISE, (HEIGHT, WIDTH, 3))
    whole = np.clip(pixels, 0, 255).astype(np.uint8)
    Image.fromarray(whole).save(path, quality=QUALITY)


def random_box(
    width: int, height: int, generator: np.random.Generator
) -> tuple[int, int, int, int]:
    """(left, top, width, height): 8 to 100 % of the area, sides 3:4 to 4:3, as Inception's crop."""
    for _ in range(10):
        area = width * height * generator.uniform(0.08, 1)
        ratio = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = generator.integers(0, (width - wide + 1, height - high + 1))
            return int(left), int(top), wide, high
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def decode(paths: Sequence[pathlib.Path], seed: object, out: np.ndarray) -> None:
    """Fills uint8[n, side, side, 3] with random crops of n files, every second one mirrored."""
    import cv2

    generator = np.random.default_rng(seed)
    for path, place in zip(paths, out, strict=True):
        pixels = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
        if pixels is None:
            raise ValueError(f"{path} is not an image that OpenCV reads: empty the folder.")
        left, top, wide, high = random_box(*pixels.shape[1::-1], generator)
        crop = cv2.resize(pixels[top : top + high, left : left + wide], place.shape[1::-1])
        if generator.random() < 0.5:
            crop = cv2.flip(crop, 1)
        place[...] = cv2.cvtColor(crop, cv2.COLOR_BGR2RGB)


@contextlib.contextmanager
def reading(
    paths: Sequence[pathlib.Path], *, size: int, side: int, threads: int
) -> Iterator[Iterator[dict[str, np.ndarray]]]:
    """Endless batches {"x": uint8[size, side, side, 3], "y": int32[size]}, decoded by threads.

    OpenCV decodes and resizes without Python's lock. Threads share the images of a batch, so that
    batches come at even distances.
    """
    import cv2

    cv2.setNumThreads(1)
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    try:
        yield _batches(pool, paths, size, side)
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(pool, paths, size, side):
    generator, pending = np.random.default_rng(0), collections.deque()
    for load in itertools.count():
        x, chosen = np.empty((size, side, side, 3), np.uint8), generator.choice(len(paths), size)
        jobs = [
            pool.submit(
                decode, [paths[i] for i in chosen[at : at + PART]], (load, at), x[at : at + PART]
            )
            for at in range(0, size, PART)
        ]
        pending.append(({"x": x, "y": np.int32(chosen % 10)}, jobs))
        if len(pending) == AHEAD:
            batch, jobs = pending.popleft()
            for job in jobs:
                job.result()
            yield batch


def rate(paths: Sequence[pathlib.Path], side: int, seconds: float) -> float:
    """Images per second of this thread alone."""
    out, chosen = np.empty((PART, side, side, 3), np.uint8), np.random.default_rng(0)
    decode(paths[:1], 0, out[:1])  # warms up
    start = time.perf_counter()
    for count in itertools.count(1):
        decode([paths[i] for i in chosen.choice(len(paths), PART)], count, out)
        if (spent := time.perf_counter() - start) >= seconds:
            return count * PART / spent
    raise AssertionError("unreachable")


def main(argv):
    import cv2

    del argv
    cv2.setNumThreads(1)
    folder = pathlib.Path(flags.FLAGS.folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = make_files(folder, flags.FLAGS.files)
    print(f"{rate(paths, flags.FLAGS.side, flags.FLAGS.seconds):.1f}")


if __name__ == "__main__":
    flags.DEFINE_string("folder", None, "folder of the files", required=True)
    flags.DEFINE_integer("files", 1024, "number of files")
    flags.DEFINE_integer("side", 224, "pixels of a side of what is cropped")
    flags.DEFINE_float("seconds", 3.0, "how long to decode")
    app.run(main)
