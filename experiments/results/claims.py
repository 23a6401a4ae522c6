"""The recorded runs, and what is claimed of them, as data: a row of RUNS, claims of a run.

A claim is here because a reader of a paper, or of this project, asks it, whatever its verdict:

- Of every task of a paper that ran here: what was published of it, at the published learning rate
  or the nearest that ran.
- Of every task, ours: how many epochs each order takes to D-RR's best, at its own constant rate;
  and the same, and the last train loss, of averaged weights, where last weights gain: what is
  left of it. Where a rate decays, the last epochs decide, whatever the order, and epochs to a
  target say nothing.
- What an effect depends on, once per paper, where it is cheapest; coordination, the point of
  CD-GraB, also where it was published and wherever 64 workers ran for it.

Of several numbers of workers or kinds of model that ask the same, the published one counts, else
the one with the most workers, else the cheapest. Seconds are no claim: other work shared the
machine when they were taken, and `benchmarks.bench` measures them side by side.

Published numbers: Cooper et al., CD-GraB, 2023, https://arxiv.org/abs/2302.00845; Gu et al., A
Quadratic Synchronization Rule, 2024, https://arxiv.org/abs/2310.14423; Sharper Analysis of Data
Echoing, submission to ICLR 2025; Choi et al., Data Echoing, 2019,
https://arxiv.org/abs/1907.05550. Those with ~ were read off plots.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from experiments.results import rule
from experiments.results.effects import Measure
from experiments.results.rule import Claim, Verdict, ratio
from experiments.results.statistics import ABOVE, LOSS


class Run(NamedTuple):
    title: str  # the task
    scaled: str  # what is smaller than published
    tables: str = ""  # where they are, seen from experiments/; "": below
    shown_from: int = 0  # first epoch of its picture, past spikes that would flatten the rest


_CIFAR = "means of 2 x 2 pixels, 20,000 training images, "
_SMALL = "CIFAR-10 at 16 x 16 for ImageNet, 16 epochs for "
_BATCHES = f"{_CIFAR}batches of 4 x 32 for 4,096"
_WIDE = "; 64 workers of one example per step; only the first orders differ between arms"
_JERSEY = "New Jersey for New York"
_STEPS, _ECHOING = "local_steps.md", "echoing.md"
RUNS = {
    "hmda": Run("HMDA, logistic regression, W = 4", _JERSEY),
    "hmda_cosine": Run("HMDA, cosine decay, W = 4", _JERSEY),
    "digits_w64": Run("digits, softmax regression, W = 64", f"24 units per worker{_WIDE}"),
    "sst2_w64": Run("SST-2, linear head, W = 64",
                    f"TF-IDF of the text in 256 dimensions for frozen BERT's features{_WIDE}"),
    "hmda_w64": Run("HMDA, logistic regression, W = 64", f"{_JERSEY}{_WIDE}"),
    "m4_constant": Run("M4 Weekly, constant rate, W = 4", "15 epochs for 30", shown_from=7),
    "lstm_constant": Run("WikiText-2, LSTM, constant rate, W = 4",
                         "test.txt trains, 10 epochs for 50; 4,096 words"),
    "m4": Run("M4 Weekly, W = 4", "15 epochs for 30; decay every 5", shown_from=7),
    "lstm": Run("WikiText-2, LSTM, W = 4",
                "test.txt trains, 15 epochs for 50; valid.txt tests: compares with no published "
                "perplexity; 4,096 words, decay every 5", shown_from=2),
    "gpt2": Run("GPT-2, W = 64",
                "WikiText-2's test.txt, width 64, 8 epochs; for WikiText-103, 128 and 30; "
                "valid.txt tests; 2,048 words, windows of 64 for 128, lr 1e-3 and 2e-3 for 5e-4",
                shown_from=3),
    "lenet_w64": Run("CIFAR-10, LeNet, W = 64",
                     "4,096 images, 25 epochs for 100; lr 1e-2 and 2e-2 for 1e-3 and 5e-3"),
    "qsr_cifar10_vit": Run("CIFAR-10, ViT, Local AdamW",
                           f"{_SMALL}300; {_BATCHES}, 60,586 parameters", _STEPS),
    "qsr_cifar10_resnet": Run("CIFAR-10, ResNet-8, Local SGD",
                              f"{_SMALL}200; {_BATCHES}, 19,218 parameters", _STEPS),
    "qsr_digits_mlp": Run(
        "150 digits, perceptron, Local SGD",
        "few images, fitted for 500 to 5,000 epochs; growth of alpha 4; batches of 8 x 4",
    ),
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

LENET = "~.65 against ~.69 to .70", ratio(0.65, 0.695)
# Runs of orders: the published learning rate or the nearest that ran, what was published at it and
# how large.
PUBLISHED = (
    ("hmda", 5e-3, LOSS, "train loss", ("~.33545 against ~.3373", ratio(0.33545, 0.3373))),
    ("m4", 1e-3, "test/smape", "test sMAPE", ("~8.51 against ~8.87", ratio(8.51, 8.87))),
    ("lstm", 5.0, "test/perplexity", "test perplexity", ("~224 against ~232", ratio(224, 232))),
    ("gpt2", 1e-3, LOSS, "train loss", ("4.098 against 4.1045", ratio(4.098, 4.1045))),
    ("lenet_w64", 1e-2, LOSS, "train loss", LENET),
)
# At constant rates: the fewer epochs that were published, at W = 64 for another rate of LeNet.
CONSTANT = {
    "digits_w64": (), "hmda": ("~4 times fewer", ratio(1, 4)), "sst2_w64": (), "m4_constant": (),
    "lstm_constant": (), "gpt2": ("~10 % fewer", ratio(0.9, 1)),
    "lenet_w64": ("lr 5e-3: ~5 times fewer", ratio(1, 5)),
}  # fmt: skip
AVERAGED = {  # recorded with --average: what is compared
    "digits_w64": ABOVE, "hmda": ABOVE, "sst2_w64": LOSS, "m4_constant": LOSS, "lenet_w64": LOSS,
}  # fmt: skip
LEFT = ("digits_w64", "hmda", "sst2_w64")  # of these, where last weights gain
LEFT_FOR = " (asked as last weights gain)"
EPOCHS, OWN = "epochs to D-RR's best", "own lr"


def _gain(run: str, text: str, measure: Measure, paper="-", size=0.0, setting="") -> Claim:
    """An effect in one run; size: as of `rule.judge`."""
    return Claim(text, paper, (run,), measure, size, setting=setting)


def _of_orders() -> Iterator[Claim]:
    """What was published of a task, and ours: epochs, averaged weights."""
    for run, rate, scalar, name, published in PUBLISHED:
        text, measure = f"{RUNS[run].title}: {name}", Measure(scalar, rate=rate)
        yield _gain(run, text, measure, *published, setting=f"lr {rate:g}")
    for run, published in CONSTANT.items():
        text = f"{RUNS[run].title}: {EPOCHS}"
        yield _gain(run, text, Measure("epoch"), *published, setting=OWN)
    for run in LEFT:
        scalar, text = AVERAGED[run], f"{RUNS[run].title}, averaged against averaged{LEFT_FOR}"
        loss = "train loss above the optimum" if scalar == ABOVE else "train loss"
        for what, name in ((scalar, loss), ("epoch", EPOCHS)):
            measure = Measure(what, averaged=True)
            yield _gain(run, f"{text}: {name}", measure, setting=OWN)


def _of_causes() -> Iterator[Claim]:
    """Coordination, the order without gradients, decaying rates: what the gain depends on."""
    for run in ("digits_w64", "sst2_w64", "hmda_w64"):
        text = f"{RUNS[run].title}: CD-GraB against independent pair, {EPOCHS}"
        falls = "independent balance falls to D-RR's level (LeNet)"
        yield _gain(run, text, Measure("epoch", against="id_pair"), falls, setting=OWN)
    loss = Measure(LOSS)
    text = f"{RUNS['lenet_w64'].title}: CD-GraB against independent pair, train loss"
    alone = loss._replace(against="id_pair", rate=1e-2)
    yield _gain("lenet_w64", text, alone, *LENET, setting="lr 0.01")
    text = f"{RUNS['hmda'].title}: CD-GraB against unzip, which uses no gradients, train loss"
    yield _gain("hmda", text, loss._replace(against="unzip"), setting=OWN)
    text, runs = (
        f"{RUNS['hmda_cosine'].title}: no gain is left, train loss",
        ("hmda_cosine", "hmda"),
    )
    yield Claim(text, "the gap shrinks", runs, loss, gone=loss, setting=OWN)


FORECAST = "`python -m experiments.forecast`"
PLANNED = (  # (setting, the claim, published rounds and volume)
    ("imagenet_vit_b", "QSR, ViT-B, 300 epochs: rounds, volume against parallel",
     "9,711 rounds, 10.375 %"),
    ("imagenet_resnet152", "QSR, ResNet-152, 200 epochs: rounds, volume",
     "24,792 rounds, 39.731 %"),
)  # fmt: skip
HIGHER = ("higher", 0.0)
RULED = (  # (run, in words, published: over which rule, how much)
    ("qsr_cifar10_vit", "ViT",
     {"constant": ("+1.66 points", 1.66), "parallel": ("~+1.1 points", 1.1)}),
    ("qsr_cifar10_resnet", "ResNet", {"constant": HIGHER, "parallel": HIGHER}),
    ("qsr_digits_mlp", "perceptron on 150 digits",
     {"constant": HIGHER, "parallel": HIGHER, "inverse": HIGHER, "cubic": HIGHER}),
)  # fmt: skip
RULES = {
    "constant": "constant H", "parallel": "parallel", "inverse": "H ~ 1/η, as many syncs",
    "cubic": "H ~ 1/η³, as many syncs",
}  # fmt: skip


def _of_rules(plan_of: Callable) -> Iterator[Claim]:
    for setting, text, published in PLANNED:
        plan = plan_of(setting)
        ours = f"{plan.rounds:,} rounds, {100 * plan.volume:.3f} %"
        known = Verdict(rule.REPRODUCED if ours == published else rule.NONE, text=ours)
        yield Claim(text, published, known=known, command=FORECAST)
    for run, name, published in RULED:
        for other, known in published.items():
            text, measure = f"QSR, {name}: test accuracy over {RULES[other]}", "test/accuracy"
            yield _gain(run, text, Measure(measure, "qsr", other), *known)


ECHOED = (  # (run, in words, speeds)
    ("echo_resnet", "ResNet", (2, 8)),
    ("echo_resnet_gn", "ResNet with group normalisation", (2,)),
    ("echo_digits", "perceptron", (4,)),
    ("echo_mobilenet", "MobileNet", (2, 8)),
    ("echo_shakespeare", "GPT", (2, 8)),
)


def _of_echoing() -> Iterator[Claim]:
    """Linear in the number of uses e = R: half or an eighth of the loads."""
    for run, name, speeds in ECHOED:
        for speed in speeds:
            text = f"Echoing, {name}, R = {speed}: loads to the target"
            measure = Measure("loads", "diffusion", "none", speed=speed)
            yield _gain(run, text, measure, f"linear: {speed} times less", ratio(1, speed))
    falls = Measure("loads", "diffusion+cosine", "diffusion", speed=4)
    text = "Echoing, perceptron, R = 4: a falling p (cosine) against a constant p, loads"
    yield _gain("echo_digits", text, falls, "less")


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
        *_of_orders(), *_of_causes(), *_of_rules(plan_of), *_of_echoing(),
        *(Claim(text, paper, known=Verdict(rule.UNTESTABLE, missing), command=command)
          for text, paper, missing, command in UNTESTABLE_HERE),
    )  # fmt: skip
