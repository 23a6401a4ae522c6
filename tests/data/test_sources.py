"""Prepared sets that are read by index, and reproducible crops of images."""

import numpy as np
import pytest

import ordering
from experiments.data import TASKS, sources
from experiments.data.sources import ImageSource
from experiments.trainer import step
from tests.sources import Examples

SIDES = [(40, 60), (60, 40), (33, 33), (90, 31)]


class Rows(list):
    """Examples in memory, with the interface of a prepared set."""

    def __getitems__(self, indices):
        assert isinstance(indices, list)
        return [self[i] for i in indices]


def picture(i):
    """A smooth image, which loses little as JPEG, with a size that depends on i."""
    height, width = SIDES[i % len(SIDES)]
    y, x = np.mgrid[:height, :width]
    planes = [np.sin(0.05 * x + i), np.cos(0.07 * y - i), np.sin(0.04 * (x + y))]
    return np.rint(127 + 110 * np.stack(planes, axis=-1)).astype(np.uint8)


@pytest.fixture(scope="module")
def imagenet_folder(tmp_path_factory):
    """A prepared set with the features of the published one."""
    tfds = pytest.importorskip("tensorflow_datasets")
    folder = str(tmp_path_factory.mktemp("imagenet2012"))

    def rows(part, labels):
        return [
            (i, {"image": picture(i), "label": label, "file_name": f"{part}_{i}.jpeg"})
            for i, label in enumerate(labels)
        ]

    labels = {"train": range(0, 84, 7), "validation": [3, 1, 2], "test": [-1]}
    tfds.dataset_builders.AdhocBuilder(
        name="imagenet2012",
        version="5.1.0",
        data_dir=folder,
        file_format="array_record",
        features=tfds.builder("imagenet2012", data_dir=folder).info.features,
        split_datasets={part: rows(part, y) for part, y in labels.items()},
        disable_shuffling=True,
    ).download_and_prepare()
    return folder


def test_a_subset_is_seeded_and_in_order():
    chosen = sources.subset(range(100), 30, name="num_train")
    np.testing.assert_array_equal(chosen, sources.subset(range(100), 30, name="num_train"))
    assert len(set(chosen)) == 30 and np.all(np.diff(chosen) > 0)
    with pytest.raises(ValueError, match="num_train is 101"):
        sources.subset(range(100), 101, name="num_train")


def test_imagenet_is_read_by_index_in_the_requested_order(imagenet_folder, any_model):
    task = TASKS["imagenet2012"](imagenet_folder, size=32)
    assert (len(task.train), len(task.test)) == (12, 3)
    for i in (0, 3, 11):
        example = task.train[i]
        assert example["x"].shape == (32, 32, 3) and example["x"].dtype == np.float32
        assert example["y"] == 7 * i and example["y"].dtype == np.int32
    assert [int(task.test[i]["y"]) for i in range(3)] == [3, 1, 2]
    assert task.train.training and not task.test.training
    plain = TASKS["imagenet2012"](imagenet_folder, size=32, augment=False)
    assert not plain.train.training
    unlabelled = ImageSource(sources.source("imagenet2012", imagenet_folder, "test"), 16)
    with pytest.raises(ValueError, match="label -1.*'validation'"):
        unlabelled[0]
    pytest.importorskip("tensorflow")
    source = task.train.at_epoch(2)
    order = np.random.default_rng(0).permutation(12)
    batches = [*ordering.data.tf_dataset(source, order).batch(5).as_numpy_iterator()]
    assert [len(batch["y"]) for batch in batches] == [5, 5, 2]
    np.testing.assert_array_equal(np.concatenate([b["y"] for b in batches]), 7 * order)
    one_by_one = np.stack([source[int(i)]["x"] for i in order])
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in batches]), one_by_one)


def in_memory(n=6, **settings):
    return ImageSource(Rows({"image": picture(i), "label": i} for i in range(n)), 16, **settings)


def test_a_crop_depends_only_on_seed_epoch_and_index():
    source = in_memory(training=True, seed=1)
    there, back = source.__getitems__(range(6)), source.__getitems__(np.arange(6)[::-1])
    for i in range(6):
        views = source.at_epoch(4).at_epoch(0), source.of_seed(2).of_seed(1)
        for other in (there[i], back[5 - i], *(same[i] for same in views)):
            np.testing.assert_array_equal(source[i]["x"], other["x"])
    same = ImageSource(Rows([source.examples[0]] * 3), 16, training=True, seed=1)
    views = [same[0], same[1], same.at_epoch(1)[0], ImageSource(same.examples, 16, True, 2)[0]]
    for i, one in enumerate(views):
        for other in views[:i]:
            assert not np.array_equal(one["x"], other["x"])


def test_several_chunks_of_images_are_read_in_order(monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 4)
    labels = [int(row["y"]) for row in in_memory(10).__getitems__([9, 0, 8, 1, 7, 2, 6, 3, 5])]
    assert labels == [9, 0, 8, 1, 7, 2, 6, 3, 5]


def triangles(length, number):
    """Weights [number, length] of bilinear resizing with antialiasing, from the definition."""
    scale = length / number
    centres = (np.arange(number) + 0.5) * scale
    distances = np.abs(np.arange(length) + 0.5 - centres[:, None]) / max(scale, 1)
    weights = np.maximum(0, 1 - distances)
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    "sides,size", [(SIDES[0], 16), (SIDES[1], 25), (SIDES[2], 16), ((170, 130), 25), ((20, 90), 16)]
)
def test_the_central_crop_equals_that_of_the_resized_image(sides, size):
    noise = np.random.default_rng(0).integers(0, 256, (*sides, 3), dtype=np.uint8)
    height, width = (round(side * round(size * 256 / 224) / min(sides)) for side in sides)
    rows, columns = triangles(sides[0], height), triangles(sides[1], width)
    whole = np.einsum("ih,hwc,jw->ijc", rows, noise / 255, columns)
    top, left = (height - size) // 2, (width - size) // 2
    crop = whole[top : top + size, left : left + size]
    x = ImageSource(Rows([{"image": noise, "label": 0}]), size)[0]["x"]
    pixels = x * np.array([[[0.229, 0.224, 0.225]]]) + np.array([[[0.485, 0.456, 0.406]]])
    np.testing.assert_allclose(pixels, crop, atol=1.02 / 255)  # rounded by rows and by columns


def test_random_crops_stay_within_their_areas_and_aspects():
    draws = np.random.default_rng(0)
    boxes = np.array([sources.random_box(draws, 400, 500) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    wide, high = right - left, bottom - top
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= 500 and bottom.max() <= 400
    area, aspect = wide * high / (400 * 500), wide / high
    assert 0.078 < area.min() < 0.09 and 0.93 < area.max() <= 1
    assert 0.74 < aspect.min() < 0.76 and 1.31 < aspect.max() < 1.35
    # The position is uniform, and for crops that always fit so are the area and log aspect.
    small = area < 0.5
    np.testing.assert_allclose(np.mean(area[small]), (0.08 + 0.5) / 2, atol=0.02)
    np.testing.assert_allclose(np.mean(np.log(aspect[small])), 0, atol=0.03)
    places = (left / np.maximum(1, 500 - wide))[small]
    np.testing.assert_allclose(np.quantile(places, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.05)
    for height, width, box in ((20, 400, (186, 0, 213, 20)), (400, 20, (0, 186, 20, 213))):
        seeds = map(np.random.default_rng, range(30))
        boxes = {sources.random_box(draws, height, width) for draws in seeds}
        assert box in boxes  # a long thin image is cropped at its centre
        for left, top, right, bottom in boxes:
            assert 0.7 < (right - left) / (bottom - top) < 1.4


def test_half_of_the_training_crops_are_mirrored():
    image = np.zeros((40, 40, 3), np.uint8) + np.arange(40, dtype=np.uint8)[None, :, None]
    source = ImageSource(Rows([{"image": image, "label": 0}]), 8, training=True)
    views = [source.at_epoch(e)[0]["x"] for e in range(200)]
    mirrored = [view[4, 0, 0] > view[4, -1, 0] for view in views]
    assert 70 < sum(mirrored) < 130
    central = ImageSource(source.examples, 8)[0]["x"]
    assert central[4, 0, 0] < central[4, -1, 0]


def test_a_source_refuses_invalid_arguments():
    with pytest.raises(ValueError, match="--size is 0: pass"):
        ImageSource(Rows(), 0)
    for index in (-1, 6):
        with pytest.raises(IndexError, match=f"index {index}"):
            in_memory()[index]
    assert len(list(in_memory())) == 6


def test_the_unit_of_a_source_has_the_shapes_of_its_examples():
    examples = Examples({"x": np.zeros((6, 3, 2), np.float32), "y": np.zeros(6, np.int32)})
    unit = step.unit_of(examples, 4)
    assert (unit["x"].shape, unit["y"].shape) == ((1, 4, 3, 2), (1, 4))
