r"""Prints each published claim of the papers beside ours, with its interval and a verdict.

    python -m experiments.claims  # what docs/results/papers.md explains: ten seconds
    python -m experiments.claims --record=results/hmda  # keeps a study's output as run hmda

Nothing is trained: everything comes from the records in experiments/runs, in seconds. A claim is a
row of `claims`; its effect is that of two arms, paired by seed, with a 95 % interval, and positive
as claimed: points of an accuracy, logarithms of ratios of losses and costs.
"""

import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import entry
from experiments.compare import recipes
from experiments.compare.arms import arm_of
from experiments.compare.flags import shown
from experiments.report import statistics, tables
from experiments.report.statistics import ABOVE, COSTS, LOSS, Comparison, frame, named, paired
from experiments.trainer.config import plans_of

LEAST_SEEDS = 3
RUNS = {
    "hmda": "HMDA, logistic regression, W = 4",
    "hmda_cosine": "HMDA, cosine decay, W = 4",
    "digits_w64": "digits, softmax regression, W = 64",
    "sst2_w64": "SST-2, linear head, W = 64",
    "hmda_w64": "HMDA, logistic regression, W = 64",
    "m4_constant": "M4 Weekly, constant rate, W = 4",
    "lstm_constant": "WikiText-2, LSTM, constant rate, W = 4",
    "m4": "M4 Weekly, W = 4",
    "lstm": "WikiText-2, LSTM, W = 4",
    "gpt2": "GPT-2, W = 64",
    "lenet_w4": "CIFAR-10, LeNet, W = 4",
    "lenet_w16": "CIFAR-10, LeNet, W = 16",
    "lenet_w64": "CIFAR-10, LeNet, W = 64",
    "qsr_cifar10_vit": "CIFAR-10, ViT, Local AdamW",
    "qsr_cifar10_resnet": "CIFAR-10, ResNet-8, Local SGD",
    "qsr_digits_mlp": "150 digits, perceptron, Local SGD",
    "outer_gpt": "small GPT, Local AdamW",
    "outer_gpt_muon": "small GPT, Local Muon",
    "echo_resnet": "CIFAR-10, ResNet-8",
    "echo_resnet_gn": "CIFAR-10, ResNet-8 with group normalisation",
    "echo_digits": "digits, perceptron of two layers of 512",
    "algorithm2_digits": "digits, perceptron of two layers of 512, coins for syncs",
    "algorithm2_shakespeare": "GPT, coins for syncs",
    "algorithm2_resnet": "CIFAR-10, ResNet-8, coins for syncs",
    "echo_mobilenet": "CIFAR-10, MobileNet-V2",
    "echo_shakespeare": "GPT",
}
CONTROLS = {  # what should not have the effect of a pair of arms
    ("cd_grab", "rr"): ("unzip", "id_mean", "id_pair"),
    ("qsr", "parallel"): ("constant",),
    ("diffusion", "none"): ("local", "larger_lr", "accumulate"),
    ("algorithm2", "none"): ("local", "larger_lr", "accumulate"),
}


class Claim(NamedTuple):
    """One arm does better than another in a recorded run."""

    run: str  # of RUNS
    text: str  # after the run's title
    what: str  # a scalar at the end of the run, or a cost to the baseline's target
    paper: str = ""  # what was published; "": no paper says it, it is ours
    size: float = 0.0  # that was published, as an effect counts; 0: the direction alone
    arm: str = "cd_grab"
    base: str = "rr"
    rate: float | None = None  # the learning rate of both; None: each at its own best
    speed: float | None = None  # R of slow input
    averaged: bool = False  # of averaged weights, by which own rates and the target are chosen
    more_than: str = ""  # a run in which the effect is claimed to be smaller


def ratio(less: float, more: float) -> float:
    return math.log(more / less)


LENET = "~.65 against ~.69 to .70", ratio(0.65, 0.695)
BEST = "epochs to D-RR's best"
FALLS = "independent balance falls to D-RR's level (LeNet)"
RULES = {
    "constant": "constant H",
    "parallel": "parallel",
    "inverse": "H ~ 1/η, as many syncs",
    "cubic": "H ~ 1/η³, as many syncs",
}
RULED = (  # (run, published: over which rule, how much)
    ("qsr_cifar10_vit", {"constant": ("+1.66 points", 1.66), "parallel": ("~+1.1 points", 1.1)}),
    ("qsr_cifar10_resnet", dict.fromkeys(("constant", "parallel"), ("higher", 0.0))),
    ("qsr_digits_mlp", dict.fromkeys(RULES, ("higher", 0.0))),
)
ECHOED = {
    "echo_resnet": (2, 8),
    "echo_resnet_gn": (2,),
    "echo_digits": (4,),
    "echo_mobilenet": (2, 8),
    "echo_shakespeare": (2, 8),
}
PUBLISHED = (
    Claim("hmda", "train loss", LOSS, "~.33545 against ~.3373", ratio(0.33545, 0.3373), rate=5e-3),
    Claim("m4", "test sMAPE", "test/smape", "~8.51 against ~8.87", ratio(8.51, 8.87), rate=1e-3),
    Claim("lstm", "test perplexity", "test/perplexity", "~224 against ~232", ratio(224, 232),
          rate=5.0),
    Claim("gpt2", "train loss", LOSS, "4.098 against 4.1045", ratio(4.098, 4.1045), rate=1e-3),
    Claim("lenet_w4", "train loss", LOSS, *LENET, rate=5e-3),
    Claim("lenet_w16", "train loss", LOSS, *LENET, rate=5e-3),
    Claim("lenet_w64", "train loss", LOSS, *LENET, rate=1e-2),
    Claim("hmda", BEST, "epoch", "~4 times fewer", ratio(1, 4)),
    Claim("gpt2", BEST, "epoch", "~10 % fewer", ratio(0.9, 1)),
    Claim("lenet_w64", BEST, "epoch", "lr 5e-3: ~5 times fewer", ratio(1, 5)),
    *(Claim(run, f"{BEST} against independent pair", "epoch", FALLS, base="id_pair")
      for run in ("digits_w64", "sst2_w64", "hmda_w64")),
    Claim("lenet_w64", "train loss against independent pair", LOSS, *LENET, base="id_pair",
          rate=1e-2),
    Claim("hmda", "gain of train loss, against that with cosine decay", LOSS, "the gap shrinks",
          more_than="hmda_cosine"),
    *(Claim(run, f"QSR, test accuracy over {RULES[other]}", "test/accuracy", *effect, "qsr", other)
      for run, published in RULED for other, effect in published.items()),
    *(Claim(run, f"error diffusion, R = {speed}, loads to the target", "loads",
            f"linear: {speed} times less", ratio(1, speed), "diffusion", "none", speed=speed)
      for run, speeds in ECHOED.items() for speed in speeds),
    *(Claim(run, f"Algorithm 2, R = 4, {cost} to the target", cost, *published,
            "algorithm2", "none", speed=4)
      for run in ("algorithm2_digits", "algorithm2_shakespeare", "algorithm2_resnet")
      for cost, *published in (("loads", "linear: 4 times less", ratio(1, 4)),
                               ("rounds", "no more than one per load", 0.0))),
    Claim("echo_digits", "R = 4, a falling p (cosine) against a constant p, loads", "loads", "less",
          0.0, "diffusion+cosine", "diffusion", speed=4),
)  # fmt: skip
OURS = (
    *(
        Claim(run, BEST, "epoch")
        for run in ("digits_w64", "sst2_w64", "m4_constant", "lstm_constant")
    ),
    *(
        claim
        for run, scalar in (("digits_w64", ABOVE), ("hmda", ABOVE), ("sst2_w64", LOSS))
        for claim in (
            Claim(run, f"averaged weights, {tables.name_of(scalar)}", scalar, averaged=True),
            Claim(run, f"averaged weights, {BEST}", "epoch", averaged=True),
        )
    ),
    Claim("hmda", "train loss against unzip, which uses no gradients", LOSS, base="unzip"),
    *(
        Claim(
            run,
            f"QSR, test accuracy over {RULES['parallel']}",
            "test/accuracy",
            arm="qsr",
            base="parallel",
        )
        for run in ("outer_gpt", "outer_gpt_muon")
    ),
)
PLANNED = {  # settings whose plan needs no run
    "imagenet_vit_b": ("QSR, ViT-B, 300 epochs", "9,711 rounds, 10.375 %"),
    "imagenet_resnet152": ("QSR, ResNet-152, 200 epochs", "24,792 rounds, 39.731 %"),
}
OPEN = """\
*Spread*: the standard deviation over seeds of the effect, as it counts. *Hours*: what is missing,
of both arms, one run after the other on two cores, by the seconds of the recorded runs: the further
seeds, or all seeds in runs twice as long. Longer runs of D-RR have a lower best, so that such a
claim may stay open."""


class Effect(NamedTuple):
    """How much better one arm is than another.

    Fields:
      values: positive as claimed, by seed.
      text: what was seen, with the interval; note: what else there is to say.
      late: how many seeds of the arm, of its base, never reach the target: they count as if they
        did at the end of the run.
      seconds: of a run of each of the two arms, together, as recorded.
    """

    values: Any = ()
    text: str = "-"
    note: str = ""
    late: tuple[int, int] = (0, 0)
    seconds: float = math.nan


def verdict(size: float, effect: Effect) -> str:
    """The verdict on an effect, from its 95 % interval.

    Reproduced is an effect whose interval excludes 0 and whose mean is at least half of the
    published size. A seed that never reaches the target counts as if it did at the end of its run.
    With such a seed of the arm the effect may be smaller than it seems, so that it never counts as
    positive; with one of the base it may be larger, and never counts as negative or absent.
    """
    seeds, (late, late_base) = len(effect.values), effect.late
    if seeds < LEAST_SEEDS:
        return f"not run: {seeds} of {LEAST_SEEDS} seeds"
    mean, half = statistics.interval(effect.values)
    if mean - half > 0 and not late:
        if not size:
            return "same direction"
        return "reproduced" if mean >= size / 2 else "undecided" if late_base else "smaller"
    if mean + half < 0 and not late_base:
        return "opposite"
    none = size and mean - half <= 0 and mean + half < size / 2 and not late_base
    return "none of that size" if none else "undecided"


def effect_of(claim: Claim, recorded: Mapping[str, Comparison]) -> Effect:
    """The effect of a claim in the recorded runs, by their names."""
    if claim.more_than:
        more, less = (
            effect_of(claim._replace(run=run, more_than=""), recorded)
            for run in (claim.run, claim.more_than)
        )
        ran = len(more.values) and len(less.values)
        both = (more.values - less.values).dropna() if ran else ()
        return Effect(both, f"{more.text}; with decay {less.text}")
    compared = recorded.get(claim.run)
    compared = compared.averaged if compared and claim.averaged else compared
    if compared is None:
        return Effect()
    cost, accuracy = claim.what in COSTS, claim.what == "test/accuracy"
    lowest = compared.criterion.when == "lowest"
    rate = claim.rate or ("best" if not lowest else "fastest" if cost else "end")
    table, scalar, late = frame(compared, rate, claim.speed), named(compared, claim.what), (0, 0)
    if cost:
        scalar = f"to {claim.what}"
        taken = table.get(scalar, table[claim.what])  # all are late where there is no target
        never = np.isinf(taken) | (scalar not in table)
        table = table.assign(**{scalar: taken.where(~never, table[claim.what])})

    def better(arm):
        values = paired(table, arm, claim.base, scalar, ratio=not accuracy)
        return 100 * values if accuracy else values

    values = better(claim.arm)
    if not len(values):
        lost = [
            f"{compared.arms[arm]} diverges"
            for arm in (claim.arm, claim.base)
            if (one := compared.chosen.get((arm, claim.speed))) and one.diverged
        ]
        return Effect(note=", ".join(lost))
    rows = [table.loc[arm].loc[values.index] for arm in (claim.arm, claim.base)]
    # The means of what is compared by ratios are geometric, as that of the ratios is.
    mean_of = (lambda x: x.mean()) if accuracy else lambda x: np.exp(np.log(x.clip(1e-12)).mean())
    pair, (mean, half) = [mean_of(of[scalar]) for of in rows], statistics.interval(values)
    if accuracy:
        text = "{:.2f} % against {:.2f} %: ".format(*(100 * m for m in pair))
        text += f"{mean:+.2f} ± {half:.2f} points"
    elif cost:
        text = "{:.3g} against {:.3g} ".format(*pair) + tables.name_of(claim.what)
        text += f": {tables.times(values)} times less"
    else:
        change = 100 * np.expm1((-mean, -mean - half, half - mean))
        text = "{:#.4g} against {:#.4g}: {:+.3g} % ({:+.3g} to {:+.3g})".format(*pair, *change)
    rates = []
    for arm, of in zip((claim.arm, claim.base), rows, strict=True):
        tried = () if claim.rate else compared.chosen[arm, claim.speed].tried
        rates.append(tables.marked(of["learning_rate"].iloc[0], tried))
    text += "; lr " + " and ".join(dict.fromkeys(rates))
    if cost:
        late = tuple(int(never[arm][values.index].sum()) for arm in (claim.arm, claim.base))
    if any(late):
        n = len(values)
        text += f"; {n - late[0]} of {n} seeds arrive, of {compared.arms[claim.base]} {n - late[1]}"
    controls = CONTROLS.get((claim.arm, claim.base), ()) if mean - half > 0 else ()
    also = [f"{compared.arms[arm]} as well" for arm in controls if better(arm).mean() >= mean / 2]
    seconds = sum(float(of["seconds"].mean()) for of in rows if "seconds" in of)
    return Effect(values, text, ", ".join(also), late, seconds)


def enough(claim: Claim, effect: Effect) -> int:
    """The seeds that would decide a claim which is undecided, as far as its spread tells.

    With so many the half width of the interval is half of the published size, or the effect.
    """
    goal = claim.size / 2 or abs(np.mean(effect.values))
    seeds = math.ceil((1.96 * np.std(effect.values, ddof=1) / goal) ** 2)
    return max(seeds, len(effect.values) + 1)


def undecided(claim: Claim, effect: Effect) -> str:
    """What would decide a claim that is not: longer runs where a seed never arrives, else seeds."""
    if any(effect.late):
        return "longer runs would decide"
    return f"about {enough(claim, effect):,} seeds would decide"


def remaining(claim: Claim, effect: Effect) -> dict:
    """The row of an undecided claim in the table of what would decide it, and in which time."""
    seeds, late = len(effect.values), any(effect.late)
    more = 2 * seeds if late else enough(claim, effect) - seeds
    spread = np.std(effect.values, ddof=1)
    points = claim.what == "test/accuracy"
    return {
        "claim": f"{RUNS[claim.run]}: {claim.text}",
        "seeds": seeds,
        "spread": f"{spread:.2f} points" if points else f"{100 * spread:.3g} %",
        "would decide": "runs twice as long" if late else f"{enough(claim, effect):,} seeds",
        "hours": "-" if np.isnan(effect.seconds) else f"{more * effect.seconds / 3600:.1f}",
    }


def looked(claim: Claim, effect: Effect, looks: int) -> str:
    """How often a run was looked at before its seeds were enough, and the interval that allows it.

    By Bonferroni: each of k looks is taken at the level 1 - 0.05 / k.
    """
    if looks <= 1 or len(effect.values) < 2:
        return str(looks)
    level = 1 - 0.05 / looks
    mean, half = statistics.interval(effect.values, level)
    at = f"at {100 * level:.1f} %"
    if claim.what == "test/accuracy":
        return f"{looks}: ± {half:.2f} {at}"
    if claim.what in COSTS:
        return f"{looks}: {np.exp(mean - half):.2f} to {np.exp(mean + half):.2f} {at}"
    low, high = 100 * np.expm1((-mean - half, half - mean))
    return f"{looks}: {low:+.3g} to {high:+.3g} {at}"


def judged(claims, recorded: Mapping[str, Comparison], folder) -> tuple[list, list, list]:
    """(rows of the table of these claims, their verdicts, rows of those that are undecided)."""
    from experiments.report import archive

    rows, words, missing = [], [], []
    for claim in claims:
        effect = effect_of(claim, recorded)
        words.append(verdict(claim.size, effect))
        more = ""
        if words[-1] == "undecided":
            more = undecided(claim, effect)
            missing.append(remaining(claim, effect))
        notes = words[-1], effect.note, more
        at = f", lr {claim.rate:g}" if claim.rate else ""
        rows.append(
            {
                "claim": f"[{RUNS[claim.run]}](#{claim.run}): {claim.text}{at}",
                **({"published": claim.paper} if claim.paper else {}),
                "ours": effect.text,
                "verdict": "; ".join(filter(None, notes)),
                "seeds": len(effect.values) or "-",
                "looks": looked(claim, effect, archive.looks(claim.run, folder)),
            }
        )
    return rows, words, missing


def of_plans() -> list[dict]:
    """Rows of the table of plans, which need no run."""
    rows = []
    for name, (text, published) in PLANNED.items():
        plan = plans_of(*recipes.planned(name), arm_of("qsr")).sync
        ours = f"{plan.rounds:,} rounds, {100 * plan.rounds / plan.total_steps:.3f} %"
        rows.append(
            {
                "claim": f"{text}: rounds, volume against parallel",
                "published": published,
                "ours": ours,
                "verdict": "reproduced" if ours == published else "none of that size",
            }
        )
    return rows


def page(folder=None) -> str:
    """The Markdown of all claims: docs/results/papers.md between its head and its runs."""
    from experiments.report import archive

    folder = folder or archive.FOLDER
    recorded = {name: archive.load(name, folder) for name in RUNS}
    recorded = {name: run for name, run in recorded.items() if run}
    parts, tested, missing = [], 0, []
    for head, claims in (("Published", PUBLISHED), ("Ours", OURS)):
        rows, words, more = judged(claims, recorded, folder)
        missing += more
        verdicts = [word for word in words if not word.startswith("not run")]
        tested += len(verdicts)
        counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        parts += [f"## {head}", f"{len(rows)} claims, {len(verdicts)} tested: {counts}."]
        parts += [tables.markdown(rows)]
    chance = (
        f"{tested} claims were tested, each at the level of 95 %: about {0.05 * tested:.0f} of "
        "these intervals may miss by chance."
    )
    parts += ["## Undecided", OPEN, tables.markdown(missing)] if missing else []
    parts += ["## Plans, which need no run", tables.markdown(of_plans())]
    return "\n\n".join([chance, *parts])


def define_flags(values: flags.FlagValues) -> None:
    text = "output folder of a study, to keep as the recorded run of that name"
    with shown(values):
        flags.DEFINE_string("record", None, text, values)


def main(values: flags.FlagValues) -> None:
    from experiments.report import archive

    if values.record is not None:
        target = archive.FOLDER / pathlib.Path(values.record).resolve().name
        archive.record(values.record, target)
        return print(f"Recorded in {target}", file=sys.stderr)
    print(page())


if __name__ == "__main__":
    entry.main(define_flags, main)
