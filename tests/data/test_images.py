"""Image tasks: their models, and the published sets."""

import jax
import numpy as np
import pytest

from experiments.compare import recipes
from experiments.data import TASKS, imagenet, images, sources
from experiments.trainer.config import num_params
from tests.shared_data import need


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


LARGE = ("resnet18", "resnet18_gn", "mobilenet", "mobilenet_v2", "vit")  # seconds each to trace
SIZES = {
    "lenet": 62_006,
    "resnet18": 11_173_962,
    "mobilenet_v2": 3_504_872 - 990 * 1281,  # of 1,000 classes it has 3,504,872
}


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=pytest.mark.slow if m in LARGE else ()) for m in images.CHOICES]
)
def test_models_of_cifar_have_the_published_widths_and_a_logit_for_every_class(model):
    assert logits_of(TASKS["cifar100"](model=model, abstract=True)) == (2, 100)
    if model in SIZES:
        task = TASKS["cifar10"](model=model, abstract=True)
        assert num_params(task.model) == SIZES[model] and logits_of(task) == (2, 10)
    # The image is reduced eight times.
    assert [s for *_, s in images.mobilenet_stages()] == [1, 1, 2, 2, 1, 2, 1]


@pytest.mark.parametrize(
    "name,numbers,side",
    [
        ("cifar10", (50_000, 10_000), 16),
        ("cifar10_small", (4_096, 2_000), 32),
        ("cifar100", (50_000, 10_000), 16),
    ],
)
def test_abstract_cifar_has_the_published_shapes_and_reads_nothing(name, numbers, side):
    task, _ = recipes.load(name, abstract=True)
    for part, number in zip((task.train, task.test), numbers, strict=True):
        assert part["x"] == jax.ShapeDtypeStruct((number, side, side, 3), np.float32)
        assert part["y"] == jax.ShapeDtypeStruct((number,), np.int32)
    with pytest.raises(ValueError, match="num_train is 50001: the set holds 50000"):
        recipes.load(name, abstract=True, num_train=50_001)


@pytest.mark.parametrize(
    "name,settings,word",
    [
        ("cifar10", {"model": "alexnet"}, "'alexnet'.*'mobilenet'"),
        ("cifar10", {"size": 8}, "side 32"),
        ("digits", {"model": "lenet"}, "model is 'lenet'"),
        ("digits", {"num_train": 1797}, "num_train is 1797"),
        ("cifar10", {"model": "lenet", "size": 16}, "16, 16, 3"),  # before any image is read
        ("imagenet2012", {"model": "alexnet"}, "'alexnet'.*'resnet50'"),
    ],
)
def test_invalid_settings_are_refused(name, settings, word):
    with pytest.raises(ValueError, match=word):
        TASKS[name](**settings)


def test_sets_of_images_as_tensorflow_datasets_prepared_them():
    pytest.importorskip("tensorflow_datasets")
    folder = need("tfds")
    source = sources.source("mnist", folder, "test")
    arrays = sources.as_arrays([source[i] for i in range(20)])
    assert arrays["x"].shape == (20, 28, 28, 1) and arrays["x"].max() <= 1
    assert arrays["y"].dtype == np.int32
    task = TASKS["cifar10"](folder, "vit", num_train=500, num_test=100)
    assert task.train["x"].shape == (500, 16, 16, 3) and task.test["x"].shape == (100, 16, 16, 3)
    assert task.train["x"].dtype == np.float32 and task.train["y"].dtype == np.int32
    np.testing.assert_allclose(task.train["x"].mean(axis=(0, 1, 2)), 0, atol=0.15)
    assert set(task.test["y"]) == set(range(10))
    source = sources.source("cifar10", folder, "test")
    first = sources.subset(source, 100, name="num_test")[0]
    published = images.CIFAR10
    image = (source[int(first)]["image"] / 255 - published.mean) / published.deviation
    corner = image[:2, :2].mean(axis=(0, 1))
    np.testing.assert_allclose(task.test["x"][0, 0, 0], corner, atol=1e-4)
    whole = images.read(published, source, 100, 32)
    np.testing.assert_allclose(whole["x"][0], image, atol=1e-5)


@pytest.mark.parametrize("name", ["cifar100", "imagenet2012", "mnist"])
def test_the_error_for_a_missing_set_has_the_command_that_prepares_it(name, tmp_path, any_model):
    for folder in (None, str(tmp_path)):
        with pytest.raises(ValueError, match=f"tfds build {name} --data_dir") as error:
            TASKS[name](folder)
        assert (" --manual_dir=" in str(error.value)) == (name == "imagenet2012")


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
    ],
)
def test_networks_on_imagenet_have_the_published_sizes(model, number):
    task = TASKS["imagenet2012"](model=model, abstract=True, dtype="bfloat16")
    assert num_params(task.model) == number
    assert logits_of(task) == (2, 1000)


@pytest.mark.parametrize("model", imagenet.CHOICES)
def test_abstract_imagenet_has_the_published_shapes_and_batches(model, any_model):
    task = TASKS["imagenet2012"](model=model, abstract=True, dtype="bfloat16")
    assert any_model == {"image_shape": (224, 224, 3), "num_classes": 1000, "dtype": "bfloat16"}
    for part, number in ((task.train, 1_281_167), (task.test, 50_000)):
        assert part["x"] == jax.ShapeDtypeStruct((number, 224, 224, 3), np.float32)
        assert part["y"] == jax.ShapeDtypeStruct((number,), np.int32)
    recipe = task.recipe
    assert recipe.workers * recipe.units_per_step * recipe.unit_size == 4096


def test_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    table = images._digits_table()
    np.testing.assert_array_equal(table[:, :-1], x)
    np.testing.assert_array_equal(table[:, -1], y)
