"""What the papers claim, as data: a new claim is a row of `CLAIMS`.

Published numbers: Cooper et al., CD-GraB, 2023, https://arxiv.org/abs/2302.00845; Gu et al., A
Quadratic Synchronization Rule, 2024, https://arxiv.org/abs/2310.14423; Sharper Analysis of Data
Echoing, submission to ICLR 2025; Choi et al., Data Echoing, 2019,
https://arxiv.org/abs/1907.05550. Those with ~ were read off plots.
"""

import functools
from collections.abc import Callable

from experiments.forecast_parts import rounds
from experiments.verdict_parts import rule
from experiments.verdict_parts.claim import Claim
from experiments.verdict_parts.effects import (
    Difference,
    at_end,
    cheaper,
    over_run,
    points,
    to_best,
)
from experiments.verdict_parts.rule import Gain, NoGain, Verdict, ratio
from experiments.verdict_parts.runs import RUNS


def _gain(run: str, text: str, measure: Callable, paper="-", size=0.0, setting="") -> Claim:
    """An effect in one run; size: as of `Gain`."""
    return Claim(text, paper, (run,), Gain(measure, size), setting=setting)


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


def _ordered(run: str) -> list[Claim]:
    """What is asked of every run of orders, at one learning rate for all and at each one's own.

    Means over the run are compared at one rate; costs to D-RR's best at own rates, and at one rate
    where something was published of them.
    """
    (one, metric, published), claims = ORDERED[run], []
    for kind, text, measure, what in (
        ("loss", LOSS, at_end, "train/loss"),
        ("mean", EPOCHS_LOSS, over_run, "train/loss"),
        ("metric", f"test {metric}", at_end, f"test/{metric.lower()}"),
        ("epochs", "epochs to D-RR's best", to_best, "epochs"),
        ("seconds", "seconds to D-RR's best", to_best, "seconds"),
    ):
        at_one = [one] if kind in ("loss", "mean", "metric", *published) else []
        for rate in at_one + [None] * (kind != "mean"):
            claims.append(_gain(
                run, f"{RUNS[run].title}: {text}", measure(what, rate=rate),
                *published.get(kind, ()), setting="own lr" if rate is None else f"lr {rate:g}",
            ))  # fmt: skip
    return claims


def _controls() -> list[Claim]:
    """The order of the released code, decaying rates, coordination: what the gain depends on."""
    hmda, unzip = "HMDA: CD-GraB against ", "which the released code makes, against D-RR: "
    claims = [
        _gain("hmda", f"{hmda}independent pair, {LOSS} at own lr",
              at_end("train/loss", against="id_pair")),
        _gain("hmda", f"{hmda}unzip, {LOSS} at own lr", at_end("train/loss", against="unzip")),
    ]  # fmt: skip
    for rate, setting in ((None, "own lr"), (5e-3, "lr 0.005")):
        loss = at_end("train/loss", rate=rate)
        text = f"HMDA with cosine decay: no gain is left, {LOSS}, {setting}"
        both = "hmda_cosine", "hmda"
        claims.append(Claim(text, "the gap shrinks", both, NoGain(loss, than=loss)))
    claims += [
        _gain("m4", f"M4: the unzip order, {unzip}sMAPE, own lr",
              at_end("test/smape", "unzip"), *SMAPE),
        _gain("lstm", f"LSTM: the unzip order, {unzip}perplexity, own lr",
              at_end("test/perplexity", "unzip"), *PERPLEXITY),
    ]  # fmt: skip
    run, at = "lenet_w64", {"rate": 1e-2}
    for text, measure, level, published in (
        (LOSS, at_end, "at ~.69 to .70", LENET),
        (EPOCHS_LOSS, over_run, "-", ()),
    ):
        start, loss = f"LeNet, W = 64, {text}, lr 0.01: ", measure("train/loss", **at)
        falls = NoGain(measure("train/loss", "id_pair", **at), than=loss)
        claims += [
            Claim(f"{start}independent pair falls to D-RR's level", level, (run,), falls),
            _gain(run, f"{start}CD-GraB against independent pair",
                  measure("train/loss", against="id_pair", **at), *published),
        ]  # fmt: skip
    larger = "LeNet, W = 64, the larger lr (2e-2): "
    return [
        *claims,
        _gain(run, f"{larger}{LOSS}", at_end("train/loss", rate=2e-2),
              "lr 5e-3: ~.755 against ~.845", ratio(0.755, 0.845)),
        _gain(run, f"{larger}epochs to D-RR's best", to_best("epochs", rate=2e-2),
              "lr 5e-3: ~5 times fewer", ratio(1, 5)),
    ]  # fmt: skip


@functools.cache  # of tens of thousands of rounds
def _plan(setting: str):
    return rounds.plans_of(rounds.run_of(setting).recipe, ["qsr"])["qsr"]


def _planned(setting: str, text: str, published: str) -> Claim:
    """Whether QSR's plan at published size has the published rounds and volume, to the digit."""

    def judge(look):
        plan = _plan(setting)
        ours = f"{plan.rounds:,} rounds, {100 * plan.volume:.3f} %"
        return Verdict(rule.REPRODUCED if ours == published else rule.NONE, ours)

    scaled = "nothing: a plan is known before training"
    return Claim(text, published, (), judge, scaled, command=FORECAST)


FORECAST = "`python -m experiments.forecast`"
HIGHER = ("higher", 0.0)
POWERS = ("qsr_cifar10_vit", "qsr_cifar10_resnet", "qsr_digits_mlp")  # ran other powers too


def _synced() -> list[Claim]:
    claims = [
        _planned("imagenet_vit_b", "QSR, ViT-B, 300 epochs: rounds, volume against parallel",
                 "9,711 rounds, 10.375 %"),
        _planned("imagenet_resnet152", "QSR, ResNet-152, 200 epochs: rounds, volume",
                 "24,792 rounds, 39.731 %"),
    ]  # fmt: skip
    for run, name, constant, parallel in (
        ("qsr_cifar10_vit", "ViT", ("+1.66 points", 1.66), ("~+1.1 points", 1.1)),
        ("qsr_cifar10_resnet", "ResNet", HIGHER, HIGHER),
        ("qsr_digits_mlp", "perceptron on 150 digits", HIGHER, HIGHER),
        ("qsr_digits_resnet", "ResNet on 150 digits", HIGHER, HIGHER),
        ("qsr_digits_resnet_noisy", "ResNet on 300 digits with noisy labels", HIGHER, HIGHER),
        ("qsr_cifar10_long", "ResNet on 2,048 images, 1,000 epochs", HIGHER, HIGHER),
    ):
        accuracy = f"QSR, {name}: test accuracy over "
        claims += [
            _gain(run, f"{accuracy}constant H", points("qsr", "constant"), *constant),
            _gain(run, f"{accuracy}parallel", points("qsr", "parallel", controls=["constant"]),
                  *parallel),
            _gain(run, f"QSR, {name}: training loss above parallel's (gains by generalising)",
                  points("qsr", "parallel", "train/loss"), *HIGHER),
        ]  # fmt: skip
        powers = (("inverse", "H ~ 1/η"), ("cubic", "H ~ 1/η³")) if run in POWERS else ()
        claims += [
            _gain(run, f"{accuracy}{label}, as many syncs", points("qsr", rule), *HIGHER)
            for rule, label in powers
        ]
    return claims


FALLS = "independent balance falls to D-RR's level (LeNet)"
WIDE = {"digits_w64": "digits", "sst2_w64": "SST-2", "hmda_w64": "HMDA"}


def _wide() -> list[Claim]:
    """What coordination itself brings, where there are many workers."""
    claims = []
    for run, name in WIDE.items():
        claims += [
            _gain(run, f"{name}, W = 64: epochs to D-RR's best", to_best("epochs")),
            _gain(run, f"{name}, W = 64: CD-GraB against independent pair, epochs to D-RR's best",
                  to_best("epochs", against="id_pair"), FALLS, setting="own lr"),
            _gain(run, f"{name}, W = 64: CD-GraB against independent pair, {EPOCHS_LOSS}",
                  over_run("train/loss", against="id_pair"), FALLS, setting="own lr"),
        ]  # fmt: skip
    return claims


def _echoed(
    run: str, name: str, *, falling: bool, speeds=(2, 8), costs=("loads", "seconds")
) -> list[Claim]:
    """Linear in the number of uses e = R: half or an eighth of the loads."""
    claims = [
        _gain(run, f"Echoing, {name}, R = {speed}: {cost} to the target",
              cheaper(cost, speed=speed), f"linear: {speed} times less", ratio(1, speed))
        for speed in speeds for cost in costs
    ]  # fmt: skip
    if falling:
        speed = speeds[0]
        text = f"Echoing, {name}, R = {speed}: a falling p (cosine) against a constant p, loads"
        falls = cheaper("loads", "diffusion_cosine", "diffusion", speed=speed)
        claims.append(_gain(run, text, falls, "less"))
    return claims


def _normalised() -> list[Claim]:
    """What batch normalisation does to echoing, which a loss of single examples does not have."""
    measure = Difference(cheaper("loads", speed=2), ("groups", "batches"))
    text = "Echoing, ResNet, R = 2: loads saved with group against batch normalisation"
    return [Claim(text, "-", ("echo_resnet_gn", "echo_resnet"), Gain(measure))]


def _preset(*names):
    return "presets " + ", ".join(f"[{name}](presets/{name}.flags)" for name in names)


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
CLAIMS = (
    *(claim for run in ORDERED for claim in _ordered(run)),
    *_controls(),
    *_synced(),
    *_wide(),
    *_echoed("echo_resnet", "ResNet", falling=False),
    *_echoed("echo_resnet_gn", "ResNet with group normalisation", falling=False, speeds=(2,),
             costs=("loads",)),
    *_normalised(),
    *_echoed("echo_digits", "perceptron", falling=True, speeds=(4,), costs=("loads",)),
    *_echoed("echo_mobilenet", "MobileNet", falling=True),
    *_echoed("echo_shakespeare", "GPT", falling=True),
    *(Claim(text, paper, scaled=scaled, command=command)
      for text, paper, scaled, command in UNTESTABLE_HERE),
)  # fmt: skip
