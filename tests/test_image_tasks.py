"""CIFAR and ImageNet: which models take them, and crops that can be read again by index."""

import jax
import numpy as np
import pytest

import ordering
from experiments.tasks import TASKS, cifar, cifar10, cifar100, image_source, imagenet2012, prepared
from experiments.tasks.image_source import ImageSource
from tests.test_data import need

SIDES = [(40, 60), (60, 40), (33, 33), (90, 31)]
NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 12, 5, 1


class Rows(list):
    """Examples in memory that are read as those of a prepared set are."""

    def __getitems__(self, indices):
        assert isinstance(indices, list)
        return [self[i] for i in indices]


def picture(i):
    """A smooth image that loses little as JPEG, of a size that depends on i."""
    height, width = SIDES[i % len(SIDES)]
    y, x = np.mgrid[:height, :width]
    planes = [np.sin(0.05 * x + i), np.cos(0.07 * y - i), np.sin(0.04 * (x + y))]
    return np.rint(127 + 110 * np.stack(planes, axis=-1)).astype(np.uint8)


def prepare(folder, name, version, splits):
    """A set of the features of a published one, prepared in the format that is read."""
    tfds = pytest.importorskip("tensorflow_datasets")
    builder = tfds.dataset_builders.AdhocBuilder(
        name=name,
        version=version,
        features=tfds.builder(name, data_dir=folder).info.features,
        split_datasets={part: list(enumerate(rows)) for part, rows in splits.items()},
        data_dir=folder,
        file_format="array_record",
        disable_shuffling=True,
    )
    builder.download_and_prepare()


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("imagenet2012"))

    def rows(part, labels):
        names = (f"{part}_{i}.jpeg" for i in range(len(labels)))
        return [
            {"image": picture(i), "label": label, "file_name": name}
            for i, (label, name) in enumerate(zip(labels, names, strict=True))
        ]

    labels = {"train": range(0, 84, 7), "validation": [3, 1, 2], "test": [-1]}
    prepare(folder, "imagenet2012", "5.1.0", {part: rows(part, y) for part, y in labels.items()})
    return folder


@pytest.fixture(scope="module")
def cifar100_folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("cifar100"))
    rows = [
        {
            "id": str(i),
            "image": np.full((32, 32, 3), 10 * i, np.uint8),
            "label": 99 - i,
            "coarse_label": i % 20,
        }
        for i in range(6)
    ]
    prepare(folder, "cifar100", "3.0.2", {"train": rows, "test": rows[:4]})
    return folder


def size_of(model):
    params = jax.eval_shape(model.init, jax.random.key(0))
    return sum(p.size for p in jax.tree.leaves(params))


def logits_of(task, n=2):
    """The shape of the logits of n images of the task."""
    x = jax.ShapeDtypeStruct((n, *task.train["x"].shape[1:]), np.float32)
    model = task.model

    def predict(key):
        params = model.init(key)
        images = np.zeros(x.shape, x.dtype)
        given = () if model.statistics is None else (model.statistics(params, images),)
        return model.predict(params, images, *given)

    return jax.eval_shape(predict, jax.random.key(0)).shape


LARGE = ("resnet18", "resnet18_gn", "mobilenet_v2")  # seconds each to trace


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=pytest.mark.slow if m in LARGE else ()) for m in cifar.CHOICES]
)
def test_every_model_of_cifar_has_a_logit_for_every_class(model):
    assert logits_of(TASKS["cifar100"](model=model, abstract=True)) == (2, 100)


def test_cifar10_has_ten_classes():
    assert logits_of(TASKS["cifar10"](abstract=True)) == (2, 10)


@pytest.mark.parametrize(
    "name,numbers,side", [("cifar10", (50_000, 10_000), 16), ("cifar10_small", (4_096, 2_000), 32),
                          ("cifar100", (50_000, 10_000), 16)]
)  # fmt: skip
def test_abstract_cifar_has_the_published_shapes_and_reads_nothing(name, numbers, side):
    task = TASKS[name](abstract=True)
    assert task.name == name and task.optimum is None
    for part, number in zip((task.train, task.test), numbers, strict=True):
        assert part["x"] == jax.ShapeDtypeStruct((number, side, side, 3), np.float32)
        assert part["y"] == jax.ShapeDtypeStruct((number,), np.int32)
    with pytest.raises(ValueError, match="num_train is 50001: the set holds 50000"):
        TASKS[name](abstract=True, num_train=50_001)


@pytest.mark.parametrize(
    "model,number",
    [
        ("lenet", 62_006),
        pytest.param("resnet18", 11_173_962, marks=pytest.mark.slow),
        # Of 1,000 classes it has 3,504,872.
        pytest.param("mobilenet_v2", 3_504_872 - 990 * 1281, marks=pytest.mark.slow),
    ],
)
def test_networks_on_cifar_have_the_published_widths(model, number):
    assert size_of(TASKS["cifar10"](model=model, abstract=True).model) == number


def test_mobilenet_v2_on_cifar_reduces_the_image_eight_times():
    strides = [s for *_, s in cifar.MOBILENET_STAGES]
    assert strides == [1, 1, 2, 2, 1, 2, 1]


def test_the_order_experiments_on_cifar_follow_the_published_setting():
    recipe = TASKS["cifar10_small"](abstract=True).recipe
    assert recipe == TASKS["cifar10"](model="lenet", abstract=True).recipe
    assert recipe.workers * recipe.units_per_step * recipe.unit_size == 64
    assert (recipe.learning_rates, recipe.weight_decay, recipe.epochs) == ((1e-3,), 1e-2, 100)


def test_lenet_refuses_pooled_images_before_it_reads_any():
    with pytest.raises(ValueError, match="16, 16, 3"):
        TASKS["cifar10"](model="lenet", size=16)


def test_the_small_row_is_a_seeded_subset_of_cifar10():
    pytest.importorskip("tensorflow_datasets")
    folder = need("tfds")
    small = TASKS["cifar10_small"](folder, num_train=50, num_test=20)
    same = TASKS["cifar10"](folder, size=32, num_train=50, num_test=20)
    assert small.train["x"].shape == (50, 32, 32, 3) and small.test["y"].shape == (20,)
    jax.tree.map(np.testing.assert_array_equal, small.train, same.train)


def test_cifar100_has_its_fine_labels_and_its_own_normalisation(cifar100_folder):
    task = TASKS["cifar100"](cifar100_folder, num_train=6, num_test=4)
    np.testing.assert_array_equal(task.train["y"], 99 - np.arange(6))
    assert task.train["x"].shape == (6, 16, 16, 3) and task.test["x"].shape == (4, 16, 16, 3)
    pixel = (np.float32(50) / 255 - cifar100.MEAN) / cifar100.DEVIATION
    np.testing.assert_allclose(task.train["x"][5, 3, 4], pixel, rtol=1e-5)
    assert not np.allclose(cifar100.MEAN, cifar10.MEAN, atol=1e-3)


@pytest.mark.parametrize("name", ["cifar100", "imagenet2012"])
def test_a_set_that_is_not_there_says_with_which_command_to_prepare_it(name, tmp_path, any_model):
    for folder in (None, str(tmp_path)):
        with pytest.raises(ValueError, match=f"experiments.prepare --name={name} ") as error:
            TASKS[name](folder)
        assert ("--manual_dir=" in str(error.value)) == (name == "imagenet2012")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model,number",
    [
        ("resnet50", 25_557_032),
        ("resnet152", 60_192_808),
        ("resnet152_gn", 60_192_808),
        ("vit_b", 86_567_656),
        ("vit_s", 22_050_664),
        ("vit_ti", 5_717_416),
        ("mobilenet_v2", 3_504_872),
        ("mobilenet_v3", 5_483_032),
    ],
)
def test_networks_on_imagenet_have_the_published_sizes(model, number):
    task = TASKS["imagenet2012"](model=model, abstract=True, dtype="bfloat16")
    assert size_of(task.model) == number
    assert logits_of(task) == (2, 1000)


@pytest.fixture
def any_model(monkeypatch):
    """The networks are not built: that takes seconds, and only the images matter."""
    asked = {}

    def build(**settings):
        asked.update(settings)

    for name, choice in imagenet2012.CHOICES.items():
        monkeypatch.setitem(imagenet2012.CHOICES, name, choice._replace(build=build))
    return asked


@pytest.mark.parametrize("model", imagenet2012.CHOICES)
def test_abstract_imagenet_has_the_published_shapes_and_batches(model, any_model):
    task = TASKS["imagenet2012"](model=model, abstract=True, dtype="bfloat16")
    assert any_model == {"image_shape": (224, 224, 3), "num_classes": 1000, "dtype": "bfloat16"}
    for part, number in ((task.train, 1_281_167), (task.test, 50_000)):
        assert part["x"] == jax.ShapeDtypeStruct((number, 224, 224, 3), np.float32)
        assert part["y"] == jax.ShapeDtypeStruct((number,), np.int32)
    recipe = task.recipe
    assert recipe.workers * recipe.units_per_step * recipe.unit_size == 4096


def test_an_unknown_model_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match="'alexnet'.*'resnet50'"):
        TASKS["imagenet2012"](model="alexnet")


def test_imagenet_is_read_by_index_and_tests_on_the_validation_split(imagenet, any_model):
    task = TASKS["imagenet2012"](imagenet, size=32)
    assert (len(task.train), len(task.test)) == (12, 3)
    for i in (0, 3, 11):
        example = task.train[i]
        assert example["x"].shape == (32, 32, 3) and example["x"].dtype == np.float32
        assert example["y"] == 7 * i and example["y"].dtype == np.int32
    assert [int(task.test[i]["y"]) for i in range(3)] == [3, 1, 2]
    assert task.train.training and not task.test.training
    plain = TASKS["imagenet2012"](imagenet, size=32, augment=False)
    assert not plain.train.training


def test_batches_of_imagenet_come_in_the_order_that_was_asked_for(imagenet, any_model):
    pytest.importorskip("tensorflow")
    source = TASKS["imagenet2012"](imagenet, size=32).train.at_epoch(2)
    order = np.random.default_rng(0).permutation(12)
    batches = list(ordering.input.batches(source, order, batch_size=5, num_parallel_calls=3))
    assert [len(batch["y"]) for batch in batches] == [5, 5, 2]
    np.testing.assert_array_equal(np.concatenate([b["y"] for b in batches]), 7 * order)
    one_by_one = np.stack([source[int(i)]["x"] for i in order])
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in batches]), one_by_one)


def in_memory(n=6, **settings):
    return ImageSource(Rows({"image": picture(i), "label": i} for i in range(n)), 16, **settings)


def test_a_crop_depends_on_seed_epoch_and_index_alone():
    source = in_memory(training=True, seed=1)
    there, back = source.__getitems__(range(6)), source.__getitems__(np.arange(6)[::-1])
    for i in range(6):
        for other in (there[i], back[5 - i], source.at_epoch(4).at_epoch(0)[i]):
            np.testing.assert_array_equal(source[i]["x"], other["x"])
    same = ImageSource(Rows([source.examples[0]] * 3), 16, training=True, seed=1)
    views = [same[0], same[1], same.at_epoch(1)[0], ImageSource(same.examples, 16, True, 2)[0]]
    for i, one in enumerate(views):
        for other in views[:i]:
            assert not np.array_equal(one["x"], other["x"])


def test_more_images_than_are_decoded_at_once_are_read_in_order(monkeypatch):
    monkeypatch.setattr(image_source, "CHUNK", 4)
    labels = [int(row["y"]) for row in in_memory(10).__getitems__([9, 0, 8, 1, 7, 2, 6, 3, 5])]
    assert labels == [9, 0, 8, 1, 7, 2, 6, 3, 5]


def triangles(length, number):
    """Weights [number, length] of bilinear resizing with antialiasing, from the definition."""
    scale = length / number
    centres = (np.arange(number) + 0.5) * scale
    distances = np.abs(np.arange(length) + 0.5 - centres[:, None]) / max(scale, 1)
    weights = np.maximum(0, 1 - distances)
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("sides", [*SIDES, (170, 130), (20, 90)])
@pytest.mark.parametrize("size", [16, 25])
def test_the_central_crop_is_that_of_the_whole_resized_image(sides, size):
    noise = np.random.default_rng(0).integers(0, 256, (*sides, 3), dtype=np.uint8)
    height, width = (round(side * round(size * 256 / 224) / min(sides)) for side in sides)
    rows, columns = triangles(sides[0], height), triangles(sides[1], width)
    whole = np.einsum("ih,hwc,jw->ijc", rows, noise / 255, columns)
    top, left = (height - size) // 2, (width - size) // 2
    crop = whole[top : top + size, left : left + size]
    x = ImageSource(Rows([{"image": noise, "label": 0}]), size)[0]["x"]
    pixels = x * np.array([[[0.229, 0.224, 0.225]]]) + np.array([[[0.485, 0.456, 0.406]]])
    np.testing.assert_allclose(pixels, crop, atol=1.02 / 255)  # rounded by rows and by columns


def test_drawn_crops_keep_to_their_areas_and_aspects():
    draws = np.random.default_rng(0)
    boxes = np.array([image_source.random_box(draws, 400, 500) for _ in range(2000)])
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


@pytest.mark.parametrize(
    "height,width,box", [(20, 400, (186, 0, 213, 20)), (400, 20, (0, 186, 20, 213))]
)
def test_a_long_thin_image_is_cropped_at_its_centre(height, width, box):
    boxes = {image_source.random_box(np.random.default_rng(s), height, width) for s in range(30)}
    assert box in boxes
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


def test_images_without_labels_are_refused(imagenet):
    source = ImageSource(prepared.source("imagenet2012", imagenet, "test"), 16)
    with pytest.raises(ValueError, match="label -1.*'validation'"):
        source[0]


@pytest.mark.parametrize("settings", [{"size": 0}, {"seed": -1}, {"epoch": -1}])
def test_a_source_says_what_is_wrong(settings):
    with pytest.raises(ValueError, match=f"{[*settings][0]} "):
        ImageSource(Rows(), **settings)


@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_out_of_range_is_an_error(index):
    with pytest.raises(IndexError, match=f"index {index}"):
        in_memory()[index]
    with pytest.raises(IndexError, match=f"index {index}"):
        in_memory().__getitems__([0, index])
    assert len(list(in_memory())) == 6
