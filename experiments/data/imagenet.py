"""ImageNet 2012 (1,000 classes) as prepared by tensorflow-datasets, read while training.

Recipes of Gu et al. 2023, https://arxiv.org/abs/2310.14423, with batches of 4096, 312 steps per
epoch. Those of ResNet-152 and ViT-B are published; the other ResNets and Vision Transformers reuse
them. Label smoothing (ResNets, 0.1) and RandAugment and mixup (Vision Transformers) are left out,
so expect lower accuracies than theirs.
"""

from functools import cache, partial

from experiments.data.base import Recipe, Task, abstract_sets, check_model, network
from experiments.data.images import Choice
from experiments.data.sources import ImageSource, source

SIDE = 224
NUM_CLASSES = 1000
NUM_TRAIN, NUM_TEST = 1_281_167, 50_000

RESNET = Recipe(
    workers=16,
    units_per_step=1,
    unit_size=256,
    epochs=200,
    learning_rates=(0.8,),
    weight_decay=1e-4,
    schedule="cosine",
    warmup_steps=1_560,
    floor=1e-6 / 0.8,
    h_base=2,
    growth=0.25,
)
VIT = RESNET._replace(
    epochs=300,
    learning_rates=(8e-3,),
    optimizer="adamw",
    weight_decay=0.05,
    warmup_steps=10_000,
    floor=1e-6 / 8e-3,
    h_base=4,
    growth=0.0175 / 8e-3,
)


# Networks of published size take seconds to trace, so each is built once.


def _resnet(depth, norm="batch"):
    return cache(partial(network, "resnet", depth=depth, norm=norm))


@cache
def _vit(name, **sizes):
    from models.vit import SIZES

    return network("vit", pool="class", gelu="exact", **SIZES[name], **sizes)


CHOICES = {
    "resnet50": Choice(_resnet(50), RESNET._replace(epochs=90)),
    "resnet152": Choice(_resnet(152), RESNET),
    "resnet152_gn": Choice(_resnet(152, norm="group"), RESNET),
    "vit_b": Choice(partial(_vit, "base"), VIT),
    "vit_s": Choice(partial(_vit, "small"), VIT),
    "vit_ti": Choice(partial(_vit, "tiny"), VIT),
}


def load(
    data_dir: str | None = None,
    model: str = "resnet50",
    *,
    abstract: bool = False,
    size: int = SIDE,
    dtype: str = "float32",
    augment: bool = True,
) -> Task:
    """1,281,167 training images, and the 50,000 of the validation split for testing.

    The split named test has no labels. Neither set is held in memory: `train` and `test` are
    random-access sources, see `sources.ImageSource`.

    Args:
      size: side of the images in pixels.
      dtype: "float32" or "bfloat16", of the model's computation; the images are float32.
      augment: train on random, mirrored crops; otherwise on central ones, as needed by orders that
        remember gradients.
    """
    check_model("imagenet2012", model, CHOICES)
    choice, shape = CHOICES[model], (size, size, 3)
    built = choice.build(image_shape=shape, num_classes=NUM_CLASSES, dtype=dtype)
    if abstract:
        train, test = abstract_sets((NUM_TRAIN, NUM_TEST), shape)
    else:
        train, test = (
            ImageSource(source("imagenet2012", data_dir, part), size=size, training=drawn)
            for part, drawn in (("train", augment), ("validation", False))
        )
    return Task("imagenet2012", built, train, test, choice.recipe)
