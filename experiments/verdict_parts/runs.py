"""The recorded runs, and what the page of experiments says of them."""

import importlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from experiments.results import archive, columns, plots, statistics, tables
from experiments.results.statistics import Comparison


class Run(NamedTuple):
    title: str  # the task
    scaled: str  # what is smaller than published, in few words
    details: str = ""  # more of it
    tables: str = ""  # where they are, seen from experiments/; "": below
    shown_from: int = 0  # first epoch of its picture, past spikes that would flatten the rest
    data: str = ""  # folder of its task among all tasks' data
    command: str = ""  # that makes it, DIR for the data, where it is not recorded yet


_LENET = "4,096 images, 25 epochs for 100"
_RATES = "lr 1e-2 and 2e-2 for 1e-3 and 5e-3"
_SMALL = "CIFAR-10 at 16 x 16 for ImageNet, 16 epochs for "
_IMAGES = "means of 2 x 2 pixels, 20,000 training images, batches of 4 x 32 for 4,096"
_FEW = "means of 2 x 2 pixels, 20,000 training images, two workers"
_WIDE = "64 workers of one example per step; only the first orders differ between arms"
_FIT = "few images, fitted for 500 to 5,000 epochs; growth of alpha 4; batches of 8 x 4"
_STEPS, _ECHOING = "../docs/local_steps.md", "../docs/echoing.md"
RUNS = {
    "hmda": Run("HMDA, logistic regression, W = 4", "New Jersey for New York", data="hmda"),
    "hmda_cosine": Run("HMDA, cosine decay, W = 4", "New Jersey for New York", data="hmda"),
    "digits_w64": Run("digits, softmax regression, W = 64", "24 units per worker", _WIDE),
    "sst2_w64": Run("SST-2, linear head, W = 64", "features of the text for frozen BERT's", _WIDE,
                    data="sst2"),
    "hmda_w64": Run("HMDA, logistic regression, W = 64", "New Jersey for New York", _WIDE,
                    data="hmda"),
    "m4_constant": Run("M4 Weekly, constant rate, W = 4", "15 epochs for 30", data="m4"),
    "lstm_constant": Run("WikiText-2, LSTM, constant rate, W = 4",
                         "test.txt trains, 10 epochs for 50", "4,096 words", data="wikitext2"),
    "m4": Run("M4 Weekly, W = 4", "15 epochs for 30", "decay every 5; 3 seeds for 5",
              shown_from=7, data="m4"),
    "lstm": Run("WikiText-2, LSTM, W = 4", "test.txt trains, 15 epochs for 50",
                "valid.txt tests: compares with no published perplexity; 4,096 words, decay every "
                "5", shown_from=2, data="wikitext2"),
    "gpt2": Run("GPT-2, W = 64", "WikiText-2's test.txt, width 64, 8 epochs",
                "for WikiText-103, 128 and 30; valid.txt tests; 2,048 words, windows of 64 for "
                "128, lr 1e-3 and 2e-3 for 5e-4", shown_from=3, data="wikitext2"),
    "sst2": Run("SST-2, linear head, W = 16", "features of the text for frozen BERT's",
                "TF-IDF in 256 dimensions; lr 1e-4 to 3e-2 for 1e-4", shown_from=3, data="sst2"),
    "lenet_w4": Run("CIFAR-10, LeNet, W = 4", _LENET, _RATES, data="tfds"),
    "lenet_w16": Run("CIFAR-10, LeNet, W = 16", _LENET,
                     "lr 1e-2 alone, the better at W = 4 and 64, for 1e-3", data="tfds"),
    "lenet_w64": Run("CIFAR-10, LeNet, W = 64", _LENET, _RATES, data="tfds"),
    "lenet_full_w64": Run("CIFAR-10, LeNet, all 50,000 images, W = 64", "10 epochs for 100",
                          "lr 2e-3 and 5e-3 for 1e-3 and 5e-3", data="tfds", command=(
        "cd_grab --task=cifar10 --model=lenet --data_dir=DIR --workers=64 --unit_size=1 "
        "--arms=rr,cd_grab,id_pair --learning_rates=2e-3,5e-3 --epochs=10 --seeds=3 "
        "--bound_every=0")),
    "qsr_cifar10_vit": Run("CIFAR-10, ViT, Local AdamW", f"{_SMALL}300",
                           f"{_IMAGES}, 60,586 parameters", _STEPS, data="tfds"),
    "qsr_cifar10_resnet": Run("CIFAR-10, ResNet-8, Local SGD", f"{_SMALL}200",
                              f"{_IMAGES}, 19,218 parameters", _STEPS, data="tfds"),
    "qsr_digits_mlp": Run("150 digits, perceptron, Local SGD", _FIT),
    "qsr_digits_resnet": Run("150 digits, ResNet-8, Local SGD", _FIT),
    "qsr_digits_resnet_noisy": Run(
        "300 digits, three in ten labels noisy, ResNet-8, Local SGD", _FIT
    ),
    "qsr_cifar10_long": Run("2,048 images of CIFAR-10, ResNet-8, Local SGD, 1,000 epochs",
                            "means of 2 x 2 pixels; batches of 4 x 16; no augmentation",
                            data="tfds", command=(
        "qsr --task=cifar10_resnet8 --num_train=2048 --data_dir=DIR --units_per_step=16 "
        "--total_steps=32000 --warmup_steps=320 --learning_rates=0.05,0.1,0.2 "
        "--arms=parallel,constant,qsr --seeds=10 --evaluations=10 --widen=2")),
    "echo_resnet": Run("CIFAR-10, ResNet-8", "16 x 16, to 38 %", _FEW, _ECHOING, data="tfds"),
    "echo_resnet_gn": Run("CIFAR-10, ResNet-8 with group normalisation", "16 x 16, to 38 %", _FEW,
                          data="tfds"),
    "echo_digits": Run("digits, perceptron of two layers of 512", "800 images, to 96 %"),
    "echo_mobilenet": Run("CIFAR-10, MobileNet-V2", "16 x 16, to 33 %", _FEW, _ECHOING,
                          data="tfds"),
    "echo_shakespeare": Run("GPT", "characters of Shakespeare, width 64",
                            "for WikiText-2; two workers", _ECHOING, data="tinyshakespeare"),
}  # fmt: skip


ORDERS = "cd_grab"  # the study of orders


def study_of(comparison: Comparison) -> str:
    """Its name; of records that do not say it, the first."""
    return comparison.records[0].get("study", ORDERS)


def load(folder: os.PathLike = archive.FOLDER) -> dict[str, Comparison]:
    """{name: comparison} of the recorded runs of `RUNS`, in their order."""
    found = {name: archive.load(name, folder) for name in RUNS}
    return {name: compared for name, compared in found.items() if compared}


def section(name: str, comparison: Comparison, folder: os.PathLike = archive.FOLDER) -> str:
    """A recorded run: its command, versions, table and picture, or where these are."""
    run, path = RUNS[name], pathlib.Path(folder) / name
    versions = json.loads((path / "versions.json").read_text(encoding="utf-8"))
    command = (path / archive.COMMAND).read_text(encoding="utf-8").rstrip()
    parts = [
        f"### {name}",
        f"{run.title}. Scaled down: {'; '.join(filter(None, (run.scaled, run.details)))}. JAX "
        f"{versions['jax']} on {versions['device']}.",
        "\n".join(f"    {line}" for line in command.splitlines()),
    ]
    if run.tables:
        return "\n\n".join([*parts, f"Tables and pictures: [{run.tables}]({run.tables})."])
    study = study_of(comparison)
    shown = importlib.import_module(f"experiments.{study}").STUDY.columns
    parts += [tables.table(comparison, shown, speed) for speed in comparison.speeds]
    parts += [columns.diverged_rates(comparison)]
    if study == ORDERS:
        parts += [f"![{run.title}](../docs/orders_{name}.png)"]
    return "\n\n".join(filter(None, parts))


def draw(runs: Mapping[str, Comparison], folder: pathlib.Path) -> None:
    """Every run of orders against epochs and against seconds."""
    for name, compared in runs.items():
        run = RUNS[name]
        if study_of(compared) == ORDERS:
            kept = [r for r in compared.records if r["epoch"] >= run.shown_from]
            shown = statistics.compare(kept, compared.arms, compared.criterion)
            title = f"{run.title}, from epoch {run.shown_from}" if run.shown_from else run.title
            plots.comparison(shown, plots.ORDER_PANELS, str(folder / f"orders_{name}.png"), title)
