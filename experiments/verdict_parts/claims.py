"""What the papers claim, as data: a new claim is a row of `CLAIMS`.

Published numbers: Cooper et al., CD-GraB, 2023, https://arxiv.org/abs/2302.00845; Gu et al., A
Quadratic Synchronization Rule, 2024, https://arxiv.org/abs/2310.14423; Sharper Analysis of Data
Echoing, submission to ICLR 2025; Choi et al., Data Echoing, 2019,
https://arxiv.org/abs/1907.05550. Those with ~ were read off plots.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import optax

import local_opt
from experiments.results.statistics import Comparison
from experiments.results.tables import markdown
from experiments.verdict_parts.effects import at_end, cheaper, over_run, points, to_best
from experiments.verdict_parts.rule import (
    NOT,
    NOT_RUN,
    REPRODUCED,
    UNTESTABLE,
    gain,
    no_gain,
    ratio,
)
from experiments.verdict_parts.runs import RUNS


class Claim(NamedTuple):
    """Fields:
    text: what is claimed; of CD-GraB against D-RR, where it does not say more.
    paper: the published numbers.
    runs: names of `RUNS` whose comparisons `judge` takes; the first one's command is shown.
    judge: `(*comparisons) -> (ours, verdict)`; None: not testable here.
    scaled: what was scaled down, or is missing, where it is not what the run says.
    setting: at which learning rate.
    command: what shows it, where no recorded run does.
    """

    text: str
    paper: str
    runs: tuple[str, ...] = ()
    judge: Callable | None = None
    scaled: str = ""
    setting: str = ""
    command: str = ""


def decide(claim: Claim, recorded: Mapping[str, Comparison]) -> tuple[str, str]:
    """(ours, verdict) from the comparisons of runs by name."""
    if claim.judge is None:
        return "-", UNTESTABLE
    if not set(claim.runs) <= set(recorded):
        return "-", NOT_RUN
    return claim.judge(*(recorded[name] for name in claim.runs))


class Ordered(NamedTuple):
    """A run of orders, and what was published of it: text and `gain`'s size, by measure."""

    run: str
    rate: float  # the published learning rate, or the smallest that was run
    metric: str
    published: Mapping[str, tuple[str, float]]


NONE = ("-", 0.0)
FORECAST = "python -m experiments.forecast"
_LOSS_LENET = ("~.65 against ~.69 to .70", ratio(0.65, 0.695))
ORDERED = (
    Ordered("hmda", 5e-3, "test/accuracy", {
        "loss": ("~.33545 against ~.3373", ratio(0.33545, 0.3373)),
        "epochs": ("~4 times fewer", ratio(1, 4)),
        "seconds": ("~4 times fewer epochs of ~1.9 times the time", ratio(1.9, 4)),
    }),
    Ordered("m4", 1e-3, "test/smape", {"metric": ("~8.51 against ~8.87", ratio(8.51, 8.87))}),
    Ordered("lstm", 5.0, "test/perplexity", {"metric": ("~224 against ~232", ratio(224, 232))}),
    Ordered("gpt2", 1e-3, "test/perplexity", {
        "loss": ("4.098 against 4.1045", ratio(4.098, 4.1045)),
        "epochs": ("~10 % fewer", ratio(0.9, 1)),
    }),
    Ordered("sst2", 1e-3, "test/accuracy", {}),
    Ordered("lenet_w4", 1e-2, "test/accuracy", {"loss": _LOSS_LENET}),
    Ordered("lenet_w16", 1e-2, "test/accuracy", {"loss": _LOSS_LENET}),
    Ordered("lenet_w64", 1e-2, "test/accuracy", {"loss": _LOSS_LENET}),
)  # fmt: skip
WORDS = {"test/accuracy": "test accuracy", "test/smape": "test sMAPE",
         "test/perplexity": "test perplexity"}  # fmt: skip


def _ordered(row: Ordered) -> list[Claim]:
    """What is asked of every run of orders, at one learning rate for all and at each one's own.

    Means over the run are compared at one rate; costs to D-RR's best at own rates, and at one rate
    where something was published of them.
    """
    metric, claims = WORDS[row.metric], []
    for kind, text, measure, *arguments in (
        ("loss", "train loss", at_end, "train/loss"),
        ("mean", "mean train loss of all epochs", over_run, "train/loss"),
        ("metric", metric, at_end, row.metric),
        ("epochs", "epochs to D-RR's best", to_best, "epochs"),
        ("seconds", "seconds to D-RR's best", to_best, "seconds"),
    ):
        paper, size = row.published.get(kind, NONE)
        for rate in (row.rate, None):
            if kind in ("loss", "metric", *row.published) or (rate is None) != (kind == "mean"):
                judge = gain(measure(*arguments, rate=rate), size)
                claims.append(_of_run(row.run, text, paper, judge, rate))
    return claims


def _of_run(run, text, paper, judge, rate):
    setting = "own lr" if rate is None else f"lr {rate:g}"
    return Claim(f"{RUNS[run].title}: {text}", paper, (run,), judge, setting=setting)


def _controls() -> list[Claim]:
    """Coordination, the order of the released code, decaying rates: what the gain depends on."""
    unzip = "the unzip order, which the released code makes, against D-RR: "
    cosine = "no gain is left, train loss, "
    return [
        Claim("HMDA: CD-GraB against independent pair, train loss at own lr", "-", ("hmda",),
              gain(at_end("train/loss", against="id_pair"))),
        Claim("HMDA: CD-GraB against unzip, train loss at own lr", "-", ("hmda",),
              gain(at_end("train/loss", against="unzip"))),
        Claim(f"HMDA with cosine decay: {cosine}own lr", "the gap shrinks", ("hmda_cosine", "hmda"),
              no_gain(at_end("train/loss"), than=at_end("train/loss"))),
        Claim(f"HMDA with cosine decay: {cosine}lr 0.005", "the gap shrinks",
              ("hmda_cosine", "hmda"),
              no_gain(at_end("train/loss", rate=5e-3), than=at_end("train/loss", rate=5e-3))),
        Claim(f"M4: {unzip}sMAPE, own lr", "~8.51 against ~8.87", ("m4",),
              gain(at_end("test/smape", "unzip"), ratio(8.51, 8.87))),
        Claim(f"LSTM: {unzip}perplexity, own lr", "~224 against ~232", ("lstm",),
              gain(at_end("test/perplexity", "unzip"), ratio(224, 232))),
        *(claim for kind, measure, sizes in (
            ("train loss", at_end, ("at ~.69 to .70", *_LOSS_LENET)),
            ("mean train loss of all epochs", over_run, ("-", "-", 0.0)),
        ) for claim in _coordination(kind, measure, *sizes)),
        Claim("LeNet, W = 64, the larger lr (2e-2): train loss", "lr 5e-3: ~.755 against ~.845",
              ("lenet_w64",), gain(at_end("train/loss", rate=2e-2), ratio(0.755, 0.845))),
        Claim("LeNet, W = 64, the larger lr (2e-2): epochs to D-RR's best",
              "lr 5e-3: ~5 times fewer", ("lenet_w64",),
              gain(to_best("epochs", rate=2e-2), ratio(1, 5))),
    ]  # fmt: skip


def _coordination(kind, measure, at_level, paper, size) -> list[Claim]:
    """What independent balance loses at 64 workers."""
    run, rate, start = ("lenet_w64",), 1e-2, f"LeNet, W = 64, {kind}, lr 0.01: "
    independent = measure("train/loss", "id_pair", rate=rate)
    return [
        Claim(f"{start}independent pair falls to D-RR's level", at_level, run,
              no_gain(independent, than=measure("train/loss", rate=rate))),
        Claim(f"{start}CD-GraB against independent pair", paper, run,
              gain(measure("train/loss", against="id_pair", rate=rate), size)),
    ]  # fmt: skip


class Published(NamedTuple):
    """A published run with QSR: its rate rises to the peak, then falls as a cosine to 1e-6."""

    total_steps: int
    warmup_steps: int
    peak: float
    alpha: float
    h_base: int


VIT_B = Published(93_600, 10_000, 0.008, 0.0175, 4)
RESNET152 = Published(62_400, 1_560, 0.8, 0.2, 2)


def _planned(run: Published, rounds: int, volume: str) -> Callable:
    """Whether QSR's plan at published size has the published rounds and volume, to the digit."""

    def judge():
        rate = optax.warmup_cosine_decay_schedule(
            0.0, run.peak, run.warmup_steps, run.total_steps, 1e-6
        )
        plan = local_opt.qsr(
            rate, total_steps=run.total_steps, alpha=run.alpha, h_base=run.h_base,
            warmup_steps=run.warmup_steps,
        )  # fmt: skip
        ours = f"{100 * plan.volume:.3f} %"
        equal = (plan.rounds, ours) == (rounds, volume)
        return f"{plan.rounds:,} rounds, {ours}", REPRODUCED if equal else NOT

    return judge


def _synced() -> list[Claim]:
    nothing, forecast = "nothing: a plan is known before training", f"`{FORECAST}`"
    rows = [
        Claim("QSR, ViT-B, 300 epochs: rounds, volume against parallel", "9,711 rounds, 10.375 %",
              (), _planned(VIT_B, 9711, "10.375 %"), nothing, command=forecast),
        Claim("QSR, ResNet-152, 200 epochs: rounds, volume", "24,792 rounds, 39.731 %",
              (), _planned(RESNET152, 24792, "39.731 %"), nothing, command=forecast),
    ]  # fmt: skip
    for run, name, points_published in (
        ("qsr_cifar10_vit", "ViT", ("+1.66 points", "~+1.1 points", 1.66, 1.1)),
        ("qsr_cifar10_resnet", "ResNet", ("higher", "higher", 0.0, 0.0)),
    ):
        over_constant, over_parallel, *sizes = points_published
        rows += [
            Claim(f"QSR, {name}: test accuracy over constant H", over_constant, (run,),
                  gain(points("qsr", "constant"), sizes[0])),
            Claim(f"QSR, {name}: test accuracy over parallel", over_parallel, (run,),
                  gain(points("qsr", "parallel", controls=["constant"]), sizes[1])),
            *(Claim(f"QSR, {name}: test accuracy over {label}, as many syncs", "higher", (run,),
                    gain(points("qsr", rule)))
              for rule, label in (("inverse", "H ~ 1/η"), ("cubic", "H ~ 1/η³"))),
            Claim(f"QSR, {name}: training loss above parallel's (gains by generalising)", "higher",
                  (run,), gain(points("qsr", "parallel", "train/loss"))),
        ]  # fmt: skip
    return rows


def _echoed() -> list[Claim]:
    """Linear in the number of uses e = R: half or an eighth of the loads."""
    rows = []
    for run, name in (("echo_resnet", "ResNet"), ("echo_mobilenet", "MobileNet"),
                      ("echo_shakespeare", "GPT")):  # fmt: skip
        for speed in (2, 8):
            for cost in ("loads", "seconds"):
                judge = gain(cheaper(cost, speed=speed), ratio(1, speed))
                text = f"Echoing, {name}, R = {speed}: {cost} to the target"
                rows.append(Claim(text, f"linear: {speed} times less", (run,), judge))
        if run != "echo_resnet":
            judge = gain(cheaper("loads", "diffusion_cosine", "diffusion", speed=2))
            text = f"Echoing, {name}, R = 2: a falling p (cosine) against a constant p, loads"
            rows.append(Claim(text, "less", (run,), judge))
    return rows


def _preset(*names):
    return "presets " + ", ".join(f"[{name}](presets/{name}.flags)" for name in names)


def _untestable() -> list[Claim]:
    return [
        Claim("GPT-2 on WikiText-103 at published size", "4.098 against 4.1045",
              scaled="no training text here, 30 epochs need an accelerator",
              command=_preset("cd_grab_wikitext103_gpt2")),
        Claim("GLUE heads on frozen BERT, W = 16", "-", scaled="no pretrained weights here",
              command=_preset("cd_grab_sst2_head")),
        Claim("QSR, ViT-B on ImageNet: accuracy", "80.98 % (constant H 79.32 %)",
              scaled="no ImageNet, 16 GPUs",
              command=_preset("qsr_vit_b_4096", "qsr_vit_b_16384")),
        Claim("QSR, ResNet-152 on ImageNet: accuracy", "-", scaled="no ImageNet, 16 GPUs",
              command=_preset("qsr_resnet152_4096", "qsr_resnet152_16384")),
        Claim("QSR, ViT-B: time on 16 GPUs, on 64", "26.7 h to 20.2 h, 8.6 h to 5.5 h",
              scaled="no network between workers here", command=f"forecast: `{FORECAST}`"),
        Claim("Echoing, CIFAR-100 and GPT-2 on WikiText-2", "fewer loads", scaled="no such data",
              command=_preset("echoing_cifar100_resnet18", "echoing_wikitext2_gpt2")),
        Claim("Echoing, ResNet-50 on ImageNet from network storage, e = 5", "up to 3.25 times less",
              scaled="no ImageNet"),
    ]  # fmt: skip


CLAIMS = (
    *(claim for row in ORDERED for claim in _ordered(row)),
    *_controls(),
    *_synced(),
    *_echoed(),
    *_untestable(),
)


def table(runs: Mapping[str, Comparison], claims: Sequence[Claim] = CLAIMS) -> str:
    """One row per claim; of one thing at several learning rates one row, where all is equal."""
    rows = {}
    for claim in claims:
        scaled = claim.scaled or (RUNS[claim.runs[0]].scaled if claim.runs else "-")
        command = claim.command or "-"
        if claim.runs and claim.runs[0] in runs:
            command = f"[{claim.runs[0]}](#{claim.runs[0]})"
        ours, verdict = decide(claim, runs)
        row = (claim.text, claim.paper, ours, scaled, verdict, command)
        rows.setdefault(row, []).append(claim.setting)
    head = ("claim", "paper's number", "ours", "scaled down", "verdict", "command")
    lines = []
    for row, settings in rows.items():
        text = ", ".join(filter(None, (row[0], " and ".join(filter(None, settings)))))
        lines.append(dict(zip(head, (text, *row[1:]), strict=True)))
    return markdown(lines)
