"""The recorded runs, and what the papers claim of them, as data: a row of RUNS, claims of a run.

Published numbers: Cooper et al., CD-GraB, 2023, https://arxiv.org/abs/2302.00845; Gu et al., A
Quadratic Synchronization Rule, 2024, https://arxiv.org/abs/2310.14423; Sharper Analysis of Data
Echoing, submission to ICLR 2025; Choi et al., Data Echoing, 2019,
https://arxiv.org/abs/1907.05550. Those with ~ were read off plots.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from experiments.results import rule
from experiments.results.effects import Measure
from experiments.results.rule import Claim, Verdict, ratio


class Run(NamedTuple):
    title: str  # the task
    scaled: str  # what is smaller than published
    tables: str = ""  # where they are, seen from experiments/; "": below
    shown_from: int = 0  # first epoch of its picture, past spikes that would flatten the rest
    command: str = ""  # that makes it, DIR for the data, where it is not recorded yet


_LENET = "4,096 images, 25 epochs for 100; lr "
_RATES = "1e-2 and 2e-2 for 1e-3 and 5e-3"
_CIFAR = "means of 2 x 2 pixels, 20,000 training images, "
_SMALL = "CIFAR-10 at 16 x 16 for ImageNet, 16 epochs for "
_BATCHES = f"{_CIFAR}batches of 4 x 32 for 4,096"
_WIDE = "; 64 workers of one example per step; only the first orders differ between arms"
_FIT = "few images, fitted for 500 to 5,000 epochs; growth of alpha 4; batches of 8 x 4"
_JERSEY, _TEXTS = "New Jersey for New York", "features of the text for frozen BERT's"
_STEPS, _ECHOING = "local_steps.md", "echoing.md"
RUNS = {
    "hmda": Run("HMDA, logistic regression, W = 4", _JERSEY),
    "hmda_cosine": Run("HMDA, cosine decay, W = 4", _JERSEY),
    "digits_w64": Run("digits, softmax regression, W = 64", f"24 units per worker{_WIDE}"),
    "sst2_w64": Run("SST-2, linear head, W = 64", f"{_TEXTS}{_WIDE}"),
    "hmda_w64": Run("HMDA, logistic regression, W = 64", f"{_JERSEY}{_WIDE}"),
    "m4_constant": Run("M4 Weekly, constant rate, W = 4", "15 epochs for 30"),
    "lstm_constant": Run("WikiText-2, LSTM, constant rate, W = 4",
                         "test.txt trains, 10 epochs for 50; 4,096 words"),
    "m4": Run("M4 Weekly, W = 4", "15 epochs for 30; decay every 5; 3 seeds for 5", shown_from=7),
    "lstm": Run("WikiText-2, LSTM, W = 4",
                "test.txt trains, 15 epochs for 50; valid.txt tests: compares with no published "
                "perplexity; 4,096 words, decay every 5", shown_from=2),
    "gpt2": Run("GPT-2, W = 64",
                "WikiText-2's test.txt, width 64, 8 epochs; for WikiText-103, 128 and 30; "
                "valid.txt tests; 2,048 words, windows of 64 for 128, lr 1e-3 and 2e-3 for 5e-4",
                shown_from=3),
    "sst2": Run("SST-2, linear head, W = 16",
                f"{_TEXTS}; TF-IDF in 256 dimensions; lr 1e-4 to 3e-2 for 1e-4", shown_from=3),
    "lenet_w4": Run("CIFAR-10, LeNet, W = 4", f"{_LENET}{_RATES}"),
    "lenet_w16": Run("CIFAR-10, LeNet, W = 16",
                     f"{_LENET}1e-2 alone, the better at W = 4 and 64, for 1e-3"),
    "lenet_w64": Run("CIFAR-10, LeNet, W = 64", f"{_LENET}{_RATES}"),
    "lenet_full_w64": Run("CIFAR-10, LeNet, all 50,000 images, W = 64",
                          "10 epochs for 100; lr 2e-3 and 5e-3 for 1e-3 and 5e-3", command=(
        "python -m experiments.cd_grab --task=cifar10 --model=lenet --data_dir=DIR --workers=64 "
        "--unit_size=1 --arms=rr,cd_grab,id_pair --learning_rates=2e-3,5e-3 --epochs=10 --seeds=3 "
        "--bound_every=0")),
    "qsr_cifar10_vit": Run("CIFAR-10, ViT, Local AdamW",
                           f"{_SMALL}300; {_BATCHES}, 60,586 parameters", _STEPS),
    "qsr_cifar10_resnet": Run("CIFAR-10, ResNet-8, Local SGD",
                              f"{_SMALL}200; {_BATCHES}, 19,218 parameters", _STEPS),
    "qsr_digits_mlp": Run("150 digits, perceptron, Local SGD", _FIT),
    "qsr_digits_resnet": Run("150 digits, ResNet-8, Local SGD", _FIT),
    "qsr_digits_resnet_noisy": Run(
        "300 digits, three in ten labels noisy, ResNet-8, Local SGD", _FIT
    ),
    "qsr_cifar10_long": Run("2,048 images of CIFAR-10, ResNet-8, Local SGD, 1,000 epochs",
                            "means of 2 x 2 pixels; batches of 4 x 16; no augmentation", command=(
        "python -m experiments.qsr --task=cifar10_resnet8 --num_train=2048 --data_dir=DIR "
        "--units_per_step=16 --total_steps=32000 --warmup_steps=320 "
        "--learning_rates=0.05,0.1,0.2 --arms=parallel,constant,qsr --seeds=10 --evaluations=10 "
        "--widen=2")),
    "echo_resnet": Run("CIFAR-10, ResNet-8", f"16 x 16, to 38 %; {_CIFAR}two workers", _ECHOING),
    "echo_resnet_gn": Run("CIFAR-10, ResNet-8 with group normalisation",
                          f"16 x 16, to 38 %; {_CIFAR}two workers"),
    "echo_digits": Run("digits, perceptron of two layers of 512", "800 images, to 96 %"),
    "echo_mobilenet": Run("CIFAR-10, MobileNet-V2", f"16 x 16, to 33 %; {_CIFAR}two workers",
                          _ECHOING),
    "echo_shakespeare": Run("GPT",
                            "characters of Shakespeare, width 64; for WikiText-2; two workers",
                            _ECHOING),
}  # fmt: skip

LOSS, EPOCHS_LOSS = "train loss", "mean train loss of all epochs"
LENET = "~.65 against ~.69 to .70", ratio(0.65, 0.695)
SMAPE = "~8.51 against ~8.87", ratio(8.51, 8.87)
PERPLEXITY = "~224 against ~232", ratio(224, 232)
# Runs of orders: the published learning rate or the smallest that was run, the metric, and what was
# published, text and size.
ORDERED = {
    "hmda": (5e-3, "accuracy", {
        "loss": ("~.33545 against ~.3373", ratio(0.33545, 0.3373)),
        "epochs": ("~4 times fewer", ratio(1, 4)),
        "seconds": ("~4 times fewer epochs of ~1.9 times the time", ratio(1.9, 4)),
    }),
    "m4": (1e-3, "sMAPE", {"metric": SMAPE}),
    "lstm": (5.0, "perplexity", {"metric": PERPLEXITY}),
    "gpt2": (1e-3, "perplexity", {
        "loss": ("4.098 against 4.1045", ratio(4.098, 4.1045)),
        "epochs": ("~10 % fewer", ratio(0.9, 1)),
    }),
    "m4_constant": (1e-3, "sMAPE", {"metric": SMAPE}),
    "lstm_constant": (2.0, "perplexity", {"metric": PERPLEXITY}),
    "sst2": (1e-3, "accuracy", {}),
    "lenet_w4": (1e-2, "accuracy", {"loss": LENET}),
    "lenet_w16": (1e-2, "accuracy", {"loss": LENET}),
    "lenet_w64": (1e-2, "accuracy", {"loss": LENET}),
    "lenet_full_w64": (2e-3, "accuracy", {"loss": LENET}),
}  # fmt: skip


def _gain(run: str, text: str, measure: Measure, paper="-", size=0.0, setting="") -> Claim:
    """An effect in one run; size: as of `rule.judge`."""
    return Claim(text, paper, (run,), measure, size, setting=setting)


def _of_orders() -> Iterator[Claim]:
    """Of every run of orders, at one learning rate for all and at each one's own.

    Means over the run are compared at one rate; costs to D-RR's best at own rates, and at one rate
    where something was published of them.
    """
    for run, (one, metric, published) in ORDERED.items():
        for kind, text, measure in (
            ("loss", LOSS, Measure("train/loss")),
            ("mean", EPOCHS_LOSS, Measure("train/loss", over_run=True)),
            ("metric", f"test {metric}", Measure(f"test/{metric.lower()}")),
            ("epochs", "epochs to D-RR's best", Measure("epoch")),
            ("seconds", "seconds to D-RR's best", Measure("seconds")),
        ):
            at_one = [one] if kind in ("loss", "mean", "metric", *published) else []
            for rate in at_one + [None] * (kind != "mean"):
                title, at = f"{RUNS[run].title}: {text}", measure._replace(rate=rate)
                paper, size = published.get(kind, ("-", 0.0))
                yield _gain(run, title, at, paper, size, f"lr {rate:g}" if rate else "own lr")


def _of_controls() -> Iterator[Claim]:
    """The order of the released code, decaying rates, coordination: what the gain depends on."""
    loss = Measure("train/loss")
    for against, name in (("id_pair", "independent pair"), ("unzip", "unzip")):
        text = f"HMDA: CD-GraB against {name}, {LOSS} at own lr"
        yield _gain("hmda", text, loss._replace(against=against))
    for rate, setting in ((None, "own lr"), (5e-3, "lr 0.005")):
        text, gain = "HMDA with cosine decay: no gain is left", loss._replace(rate=rate)
        runs = "hmda_cosine", "hmda"
        yield Claim(f"{text}, {LOSS}, {setting}", "the gap shrinks", runs, gain, gone=gain)
    for run, name, metric, published in (
        ("m4", "M4", "sMAPE", SMAPE),
        ("lstm", "LSTM", "perplexity", PERPLEXITY),
    ):
        text = f"{name}: the unzip order, which the released code makes, against D-RR: {metric}"
        yield _gain(run, f"{text}, own lr", Measure(f"test/{metric.lower()}", "unzip"), *published)
    run, loss = "lenet_w64", loss._replace(rate=1e-2)
    for text, gain, level, published in (
        (LOSS, loss, "at ~.69 to .70", LENET),
        (EPOCHS_LOSS, loss._replace(over_run=True), "-", ()),
    ):
        start, alone = f"LeNet, W = 64, {text}, lr 0.01: ", gain._replace(arm="id_pair")
        text = f"{start}independent pair falls to D-RR's level"
        yield Claim(text, level, (run,), alone, gone=gain)
        text = f"{start}CD-GraB against independent pair"
        yield _gain(run, text, gain._replace(against="id_pair"), *published)
    for text, what, level, size in (
        (LOSS, "train/loss", "lr 5e-3: ~.755 against ~.845", ratio(0.755, 0.845)),
        ("epochs to D-RR's best", "epoch", "lr 5e-3: ~5 times fewer", ratio(1, 5)),
    ):
        text = f"LeNet, W = 64, the larger lr (2e-2): {text}"
        yield _gain(run, text, Measure(what, rate=2e-2), level, size)


FORECAST = "`python -m experiments.forecast`"
PLANNED = (  # (setting, the claim, published rounds and volume)
    ("imagenet_vit_b", "QSR, ViT-B, 300 epochs: rounds, volume against parallel",
     "9,711 rounds, 10.375 %"),
    ("imagenet_resnet152", "QSR, ResNet-152, 200 epochs: rounds, volume",
     "24,792 rounds, 39.731 %"),
)  # fmt: skip
HIGHER = ("higher", 0.0)
RULED = (  # (run, in words, published over constant H and over parallel, whether other powers ran)
    ("qsr_cifar10_vit", "ViT", ("+1.66 points", 1.66), ("~+1.1 points", 1.1), True),
    ("qsr_cifar10_resnet", "ResNet", HIGHER, HIGHER, True),
    ("qsr_digits_mlp", "perceptron on 150 digits", HIGHER, HIGHER, True),
    ("qsr_digits_resnet", "ResNet on 150 digits", HIGHER, HIGHER, False),
    ("qsr_digits_resnet_noisy", "ResNet on 300 digits with noisy labels", HIGHER, HIGHER, False),
    ("qsr_cifar10_long", "ResNet on 2,048 images, 1,000 epochs", HIGHER, HIGHER, False),
)  # fmt: skip


def _of_rules(plan_of: Callable) -> Iterator[Claim]:
    for setting, text, published in PLANNED:
        plan = plan_of(setting)
        ours = f"{plan.rounds:,} rounds, {100 * plan.volume:.3f} %"
        known = Verdict(rule.REPRODUCED if ours == published else rule.NONE, text=ours)
        yield Claim(text, published, known=known, command=FORECAST)
    for run, name, constant, parallel, powers in RULED:
        over, accuracy = f"QSR, {name}: test accuracy over ", Measure("test/accuracy", "qsr")
        yield _gain(run, f"{over}constant H", accuracy._replace(against="constant"), *constant)
        yield _gain(run, f"{over}parallel", accuracy._replace(against="parallel"), *parallel)
        text = f"QSR, {name}: training loss above parallel's (gains by generalising)"
        yield _gain(run, text, Measure("train/loss", "qsr", "parallel", more=True), *HIGHER)
        for other, label in (("inverse", "H ~ 1/η"), ("cubic", "H ~ 1/η³")) if powers else ():
            text = f"{over}{label}, as many syncs"
            yield _gain(run, text, accuracy._replace(against=other), *HIGHER)


def _of_coordination() -> Iterator[Claim]:
    """What it brings by itself, where there are many workers."""
    falls = "independent balance falls to D-RR's level (LeNet)"
    for run, name in (("digits_w64", "digits"), ("sst2_w64", "SST-2"), ("hmda_w64", "HMDA")):
        yield _gain(run, f"{name}, W = 64: epochs to D-RR's best", Measure("epoch"))
        for what, measure in (
            ("epochs to D-RR's best", Measure("epoch")),
            (EPOCHS_LOSS, Measure("train/loss", over_run=True)),
        ):
            text = f"{name}, W = 64: CD-GraB against independent pair, {what}"
            against = measure._replace(against="id_pair")
            yield _gain(run, text, against, falls, setting="own lr")


ECHOED = (  # (run, in words, speeds, costs, whether a falling p ran)
    ("echo_resnet", "ResNet", (2, 8), ("loads", "seconds"), False),
    ("echo_resnet_gn", "ResNet with group normalisation", (2,), ("loads",), False),
    ("echo_digits", "perceptron", (4,), ("loads",), True),
    ("echo_mobilenet", "MobileNet", (2, 8), ("loads", "seconds"), True),
    ("echo_shakespeare", "GPT", (2, 8), ("loads", "seconds"), True),
)


def _of_echoing() -> Iterator[Claim]:
    """Linear in the number of uses e = R: half or an eighth of the loads."""
    for run, name, speeds, costs, falling in ECHOED:
        for speed, cost in itertools.product(speeds, costs):
            text = f"Echoing, {name}, R = {speed}: {cost} to the target"
            measure = Measure(cost, "diffusion", "none", speed=speed)
            yield _gain(run, text, measure, f"linear: {speed} times less", ratio(1, speed))
        if run == "echo_resnet_gn":  # what batch normalisation does, no loss of single examples
            text = "Echoing, ResNet, R = 2: loads saved with group against batch normalisation"
            saved = Measure("loads", "diffusion", "none", speed=2, names=("groups", "batches"))
            yield Claim(text, "-", ("echo_resnet_gn", "echo_resnet"), saved)
        if falling:
            falls = Measure("loads", "diffusion+cosine", "diffusion", speed=speeds[0])
            text = f"Echoing, {name}, R = {speeds[0]}: a falling p (cosine) against a constant p"
            yield _gain(run, f"{text}, loads", falls, "less")


def _preset(*names):
    folder = "../../experiments/presets"
    return "presets " + ", ".join(f"[{name}]({folder}/{name}.flags)" for name in names)


# What is claimed, published, missing here, and what would show it.
UNTESTABLE_HERE = (
    ("GPT-2 on WikiText-103 at published size", "4.098 against 4.1045",
     "no training text here, 30 epochs need an accelerator", _preset("cd_grab_wikitext103_gpt2")),
    ("GLUE heads on frozen BERT, W = 16", "-", "no pretrained weights here",
     _preset("cd_grab_sst2_head")),
    ("QSR, ViT-B on ImageNet: accuracy", "80.98 % (constant H 79.32 %)", "no ImageNet, 16 GPUs",
     _preset("qsr_vit_b_4096", "qsr_vit_b_16384")),
    ("QSR, ResNet-152 on ImageNet: accuracy", "-", "no ImageNet, 16 GPUs",
     _preset("qsr_resnet152_4096", "qsr_resnet152_16384")),
    ("QSR, ViT-B: time on 16 GPUs, on 64", "26.7 h to 20.2 h, 8.6 h to 5.5 h",
     "no network between workers here", f"forecast: {FORECAST}"),
    ("Echoing, CIFAR-100 and GPT-2 on WikiText-2", "fewer loads", "no such data",
     _preset("echoing_cifar100_resnet18", "echoing_wikitext2_gpt2")),
    ("Echoing, ResNet-50 on ImageNet from network storage, e = 5", "up to 3.25 times less",
     "no ImageNet", ""),
)  # fmt: skip


def claims(plan_of: Callable) -> tuple[Claim, ...]:
    """All claims.

    Args:
      plan_of: name of a published setting -> QSR's SyncPlan there.
    """
    return (
        *_of_orders(), *_of_controls(), *_of_rules(plan_of), *_of_coordination(), *_of_echoing(),
        *(Claim(text, paper, known=Verdict(rule.UNTESTABLE, missing), command=command)
          for text, paper, missing, command in UNTESTABLE_HERE),
    )  # fmt: skip
