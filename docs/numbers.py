"""The numbers of the pages that sum up results, from the recorded runs.

    python -m docs.numbers  # what the pages must say; and fails if one does not

A page of PHRASES says each of its phrases, with the numbers of `values` in their places: `{x}` is a
mean, `{x:i}` a mean and its 95 % interval, `{x:s}` the same with its sign, `{x:e}` and a mark where
a rate is at an edge of those tried.
"""

import functools
import itertools
import json
import pathlib
import re
import sys
from typing import Any, NamedTuple

import numpy as np

from experiments import claims, combined
from experiments.compare.cost import machines
from experiments.report import archive, statistics, tables

ROOT = pathlib.Path(__file__).parents[1]
load = functools.cache(archive.load)  # many numbers are of one run
TASKS, SIZES = ("digits", "hmda", "sst2", "mlp"), ("32x2", "4x16")  # of the runs map_*


class Effects(NamedTuple):
    """By seed: logarithms of ratios, or differences in so many digits."""

    values: Any
    digits: int | None = None  # None: ratios
    edge: bool = False  # whether a rate is the least or largest of those tried

    def __format__(self, form: str) -> str:
        mean, half = statistics.interval(self.values)
        if self.digits is None:
            interval = tables.times(self.values) + " *(edge)*" * (form == "e" and self.edge)
            return interval if form else f"{np.exp(mean):.2f}"
        text = tables.rounded(mean, f"{{:+.{self.digits}f}}")
        text = text if form == "s" else text.lstrip("+-")
        return f"{text} ± {half:.{self.digits}f}" if form else text


def times(run, arm="cd_grab", base="rr", cost="epoch", **options) -> Effects:
    """How many times less an arm takes."""
    claim = claims.Claim(run, "", cost, arm=arm, base=base, **options)
    effect = claims.effect_of(claim, {run: load(run)})
    return Effects(effect.values, edge="(edge)" in effect.text)


def points(run, arm="qsr", base="parallel") -> Effects:
    """Points of test accuracy."""
    claim = claims.Claim(run, "", "test/accuracy", arm=arm, base=base)
    return Effects(claims.effect_of(claim, {run: load(run)}).values, 2)


def less(run, arm, base, scalar) -> Effects:
    """A difference of losses."""
    table = statistics.frame(load(run))
    return Effects(statistics.paired(table, arm, base, scalar), 4)


def cell(table: str, row: str, head: str) -> str:
    """A cell of a printed table, of the row that begins so."""
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()]
    heads = next(line for line in lines if head in line)
    words = row.split(" | ")
    line = next(line for line in lines if line[: len(words)] == words)
    return line[heads.index(head)].lstrip("+-")


def values() -> dict[str, Effects | str]:
    """The numbers by their names in PHRASES."""
    results = _of_orders() | _of_local_steps() | _of_echoing() | _of_all_three()
    return results | _of_undecided() | _of_gpu()


def _of_gpu():
    lines = (ROOT / "benchmarks" / "rows" / "h200.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    gpt = {row["way"]: float(row["times_plain"]) for row in rows if row["part"] == "gpt2_small"}
    times = gpt["ordering.sketched_grads"]
    results = {
        "gpu_percent": f"{100 * times - 100:.1f}",
        "gpu_times": f"{times:.2f}",
        "gpu_micro_grad": f"{gpt['optax micro_grad, microbatches 1']:.2f}",
    }
    for row in rows:
        if row["part"] == "ratio":
            results[f"R_{row['model']}_{row['threads']}"] = f"{row['R']:.2f}"
        if row["part"] == "loop":
            name = f"{row['way'].split('(')[0]}_{row['threads']}".replace(" ", "_")
            results[name] = f"{row['steps/s']:.2f} ({row['range']})"
    return results


def _of_undecided():
    page = (ROOT / "docs" / "results" / "papers.md").read_text(encoding="utf-8")
    seeds = [int(n) for n in re.findall(r"about (\d+) seeds would", page.partition("## Ours")[0])]
    return {"seeds_least": min(seeds), "seeds_most": max(seeds)}


def _of_orders():
    results = {}
    for task, size in itertools.product(TASKS, SIZES):
        for sync in ("parallel", "constant"):
            pair = f"cd_grab+sketch256+dealt+{sync}+none", f"rr+dealt+{sync}+none"
            results[f"{task}_{size}_{sync}"] = times(f"map_{task}_{size}_e4", *pair, "loads")
    fewer = [results[f"{task}_4x16_parallel"] for task in TASKS[:-1]]
    fewer.append(times("combined_digits", "cd_grab+parallel+none", "rr+parallel+none", "step"))
    on_the_way = sorted(f"{one}" for one in fewer)
    results |= {"way_least": on_the_way[0], "way_most": on_the_way[-1]}
    for run in ("digits_w64", "hmda", "sst2_w64", "m4_constant"):
        name = run.partition("_")[0]
        results |= {name: times(run), f"{name}_averaged": times(run, averaged=True)}
    for run in ("digits_w64", "hmda_w64", "sst2_w64"):
        results[f"{run.partition('_')[0]}_pair"] = times(run, base="id_pair")
    results["hmda_published"] = times("hmda", rate=5e-3)
    for ending, averaged in (("", False), ("_averaged", True)):
        results[f"closer{ending}"] = times("digits_w64", cost=statistics.ABOVE, averaged=averaged)
    fewer, gpt = "times fewer epochs at this lr", tables.gains(load("shakespeare_adamw"))
    vit = tables.gains(load("vit_adamw"))
    for name, row in (("gpt", "CD-GraB"), ("gpt_scaled", "CD-GraB, scaled")):
        for which in ("last", "averaged"):
            results[f"{name}_{which}"] = cell(gpt, f"{row} | {which}", "less D-RR")
        results[f"{name}_times"] = cell(gpt, f"{row} | averaged", fewer)
    results["vit_times"] = cell(vit, "CD-GraB | averaged", fewer)
    for name, arm in (("exact", "cd_grab+shifted"), ("sketched", "cd_grab+sketch1024+shifted")):
        results[f"slowrun_{name}"] = less("slowrun", arm, "rr+documents", "test/loss/averaged")
    return results


def _of_local_steps():
    results = {}
    for kind, rule in (("vit", "cifar10_vit"), ("resnet", "cifar10_resnet")):
        compared = load(f"qsr_{rule}")
        printed = tables.table(compared, tables.SYNC_COLUMNS)
        results[f"{kind}_volume"] = cell(printed, "QSR", "volume").replace("%", " %")
        results[f"{kind}_over_constant"] = points(f"qsr_{rule}", "qsr", "constant")
        for arm in ("qsr", "accumulate", "swap", "cubic"):
            results[f"{kind}_{arm}"] = points(f"qsr_{rule}", arm)
    for arm in ("constant", "inverse", "cubic"):
        results[f"digits_{arm}"] = points("qsr_digits_mlp", arm, "qsr")
    results["digits_qsr"] = points("qsr_digits_mlp")
    for name in ("vit", "gpt"):
        of = f"outer_{name}"
        results |= {f"{name}_adamw": points(of), f"{name}_muon": points(f"{of}_muon")}
        results[f"{name}_muon_matched"] = points(f"{of}_muon", "matched")
        results[f"{name}_over_matched"] = points(of, "qsr", "matched")
        outer = "qsr+nesterov0.7_0.5"
        results[f"{name}_nesterov"] = points(of, outer, "qsr")
        results[f"{name}_normalized"] = points(of, "qsr+normalized0.7_0.5", outer)
        results[f"{name}_fragments"] = points(of, "qsr+fragments2", "qsr")
    return results


def _of_echoing():
    results, pair = {}, ("diffusion", "none")
    for run, speeds in claims.ECHOED.items():
        for speed in speeds:
            name = f"{run.removeprefix('echo_')}_r{speed}"
            results[name] = times(run, *pair, "loads", speed=speed)
    results["mobilenet_r8_more"] = Effects(-results["mobilenet_r8"].values)
    results["shakespeare_r8_seconds"] = times("echo_shakespeare", *pair, "seconds", speed=8)
    results["cosine"] = times("echo_digits", "diffusion", "diffusion+cosine", "loads", speed=4)
    for name, arm, base, cost in (
        ("coins", "algorithm2", "bernoulli", "loads"),
        ("every", "bernoulli", "bernoulli_every", "loads"),
        ("evenly", "diffusion", "bernoulli", "loads"),
        ("both_coins", "diffusion", "algorithm2", "loads"),
        ("average_per_load", "diffusion", "diffusion_coins", "rounds"),
    ):
        results[name] = times("algorithm2_digits", arm, base, cost, speed=4)
    pair = "algorithm2", "bernoulli"
    for cost in ("loads", "rounds"):
        more = times("algorithm2_shakespeare", *pair, cost, speed=4)
        results[f"gpt_coins_{cost}"] = Effects(-more.values)
    return results


def _of_all_three():
    results = {}
    for name, echo in (("", "error diffusion, cosine p"), ("_constant", "error diffusion")):
        compared = load(f"combined_digits{name}")
        modelled = combined.modelled_table(compared, machines(4.0, 2.0))[1]
        for arm, row in (
            ("order", "CD-GraB + parallel + no echo"),
            ("qsr", "D-RR + QSR + no echo"),
            ("echo", f"D-RR + parallel + {echo}"),
            ("both", "CD-GraB + QSR + no echo"),
            ("order_echo", f"CD-GraB + parallel + {echo}"),
        ):
            results[f"modelled{name}_{arm}"] = cell(modelled, row, "load 4 steps")
    pair = combined.effects_table(load("combined_digits_pair"))[1]
    results["pair_steps"] = cell(pair, "order", "steps to the target").strip("*× ")
    constant = combined.effects_table(load("combined_digits_constant"))[1]
    results["hinder_steps"] = cell(constant, "sync × echo", "steps to the target").strip("*× ")
    results["hinder_points"] = cell(constant, "sync × echo", "test accuracy / points").strip("*-")
    text = combined.effects_table(load("combined_shakespeare"))[1]
    results["text_points"] = cell(text, "sync", "test accuracy / points").strip("*-")
    return results


_LOST = "A ResNet loses {resnet_qsr} points. A small GPT loses {gpt_muon} under Muon, {gpt_adamw}"
_LOADS = "{shakespeare_r2} times fewer loads to its target. A ResNet takes {resnet_r2} times fewer"
_WAY = "{way_least} to {way_most} times fewer steps on the way"
PHRASES = {
    "README.md": (
        "of {digits} times [{digits_averaged} are left]", _LOST, _LOADS, _WAY,
        "a perceptron takes {digits_r4} times fewer", "projections cost [{gpu_percent} %]",
    ),
    "docs/index.md": (_LOST, _LOADS),
    "docs/start.md": (
        "{shakespeare_r2} times fewer loads on a small GPT, {resnet_r2} on a ResNet",
        "a ResNet {resnet_qsr} points, a small GPT {gpt_muon} to {gpt_adamw}",
        "{mobilenet_r2} to {resnet_r2} times the loads at R = 2",
    ),
    "docs/results/index.md": (
        "About {seeds_least} to {seeds_most} seeds would decide six of the undecided",
        "{hmda} times fewer on HMDA, {digits} on digits, at least {sst2} on SST-2", _WAY,
        "at least {hmda_averaged}, {digits_averaged} and {sst2_averaged} times fewer.",
        "{gpt_times:.4} times fewer on a small GPT",
        "({vit_qsr:s} points)", "a ResNet {resnet_qsr:i}, a GPT {gpt_adamw:i} under AdamW",
        "{gpt_muon:i} under Muon", "{digits_qsr:i}, and three other rules more",
        "end {digits_constant:i}, {digits_inverse:i} and {digits_cubic:i} above it",
        "a GPT {shakespeare_r2} times fewer at R = 2 and {shakespeare_r8} at R = 8",
        "a perceptron {digits_r4} at R = 4",
        "a ResNet {resnet_r2} at R = 2 with batch normalisation and {resnet_gn_r2} with group",
        "a MobileNet {mobilenet_r2} |",
        "{slowrun_exact:i} below NanoGPT Slowrun's loader; {slowrun_sketched:i} on sketches",
    ),
    "docs/results/found_orders.md": (
        "| {digits:e} | {digits_averaged:e} |", "| {hmda:e} | at least {hmda_averaged:e} |",
        "| at least {sst2:e} | {sst2_averaged:e} |",
        "CD-GraB needs {digits_pair}, {sst2_pair} and {hmda_pair} times fewer",
        "{hmda_published:i} times fewer epochs at the published rate",
        "{closer_averaged:i} times closer", "{closer:i} times with last weights",
        "{gpt_last} less training loss, and {gpt_averaged} less with averaged weights",
        "scaled {gpt_scaled_last} and {gpt_scaled_averaged}, which is {gpt_scaled_times} times",
        "which is {vit_times} times fewer epochs",
    ),
    "docs/results/found_local_steps.md": (
        "QSR with {vit_volume} of the syncs", "({vit_qsr:s} points)", "({vit_accumulate:s} points)",
        "With {resnet_volume} of the syncs QSR ends {resnet_qsr:i}", "SWAP is {resnet_swap:i}",
        "1/η³ {resnet_cubic:i} points", "QSR ends {digits_qsr:i} points above parallel",
        "{digits_constant:i} points below a constant H",
        "{digits_inverse:i} and {digits_cubic:i} below 1/η",
        "not half is there: {vit_over_constant:s} (six seeds)",
        "{vit_muon:i} and {gpt_muon:i} points below", "AdamW's is {vit_adamw:i} and {gpt_adamw:i}",
    ),
    "docs/results/found_echoing.md": (
        "has {digits_r4} times fewer loads", "ResNet {resnet_r2:i} times fewer",
        "MobileNet {mobilenet_r2:i} over 12", "ResNet {resnet_r8:i} over 6",
        "needs {resnet_gn_r2:i} times fewer loads", "took {cosine:i} times the loads",
        "({digits_r4} times at e = 4)", "{shakespeare_r8_seconds} (Shakespeare)",
    ),
    "docs/results/algorithm2.md": (
        "{coins:i} times fewer loads than with one coin", "({every:i}, with one coin for loads)",
        "needs {evenly:i} times fewer loads", "Algorithm 2, {both_coins:i}, nothing",
        "{average_per_load:i} times as many",
        "{gpt_coins_loads:i} times the loads and {gpt_coins_rounds:i} times the averages",
    ),
    "docs/results/found_together.md": (
        "CD-GraB with echo is {modelled_constant_order_echo} times as fast",
        "CD-GraB alone {modelled_constant_order}, echo alone {modelled_constant_echo}",
        "CD-GraB alone reached the target {modelled_order} times", "QSR alone {modelled_qsr} times",
        "both {modelled_both} times", "takes {pair_steps} times the steps",
        "({modelled_order_echo:.4} against {modelled_order:.4})", "× {hinder_steps:.4} steps",
    ),
    "docs/results/load_and_step.md": (
        *(f"| {{R_vit_small_{n}}} | {{R_resnet50_{n}}} |" for n in (1, 2, 4, 8, 16)),
        *(f"{{{way}_{n}}}" for way in ("no_load", "a_load_per_step", "error_diffusion", "adaptive")
          for n in (4, 8, 16)),
    ),
    "docs/peers.md": ("took {gpu_times} plain steps, and {gpu_micro_grad} by optax",),
    "docs/use/gradients.md": ("| H200 | | {gpu_times} | optax `micro_grad` {gpu_micro_grad} |",),
    "docs/results/machine_map.md": tuple(
        f"| {task} | {size.replace('x', ' x ')} | {{{task}_{size}_parallel:i}} | "
        f"{{{task}_{size}_constant:i}} |" for task in TASKS for size in SIZES
    ),
    "docs/results/negative.md": (
        "of {digits}, {hmda} and at least {sst2} times fewer epochs {digits_averaged}, at least "
        "{hmda_averaged} and {sst2_averaged} are left; on M4 Weekly {m4_averaged:i} of {m4}",
        "gives {hmda} times fewer epochs", "| {gpt_times} times fewer epochs on the GPT |",
        "not half of it: {vit_over_constant:s} points, six seeds",
        "none: {vit_qsr:s} points, with {vit_volume} of the syncs", "loses {resnet_qsr:i} points",
        "loses {gpt_adamw} to {text_points:.4} points; under Muon {gpt_muon}",
        "end {digits_constant}, {digits_inverse} and {digits_cubic} points above it",
        "{modelled_both} times faster, where CD-GraB alone gives {modelled_order:.4}",
        "{shakespeare_r8_seconds} times faster", "{resnet_r2} times fewer loads",
        "a MobileNet {mobilenet_r2:i}", "with group normalisation {resnet_gn_r2} |",
        "arrives in {mobilenet_r8_more} times the loads",
        "{cosine} times the loads of a constant share",
        "{hinder_steps:.4} times the steps, and {hinder_points:.4} points",
    ),
    "docs/results/outer.md": (
        "{vit_over_matched:i} points above it on the ViT, {gpt_over_matched:i} on the GPT",
        "by {vit_nesterov:s} points on the ViT and {gpt_nesterov:s} on the GPT",
        "{vit_normalized:s} and {gpt_normalized:s} points with momentum 0.5",
        "{vit_fragments:s} points on the ViT, {gpt_fragments:s} on the GPT",
        "{vit_muon:i} points below parallel training on the ViT and {gpt_muon:i} on the GPT",
        "it was {vit_adamw:i} and {gpt_adamw:i}",
        "A constant H ends {vit_muon_matched:i} and {gpt_muon_matched:i} below",
    ),
}  # fmt: skip


def plain(text: str) -> str:
    """A page without its bold face and its lines."""
    return re.sub(r"\s+", " ", text.replace("**", ""))


def phrases() -> dict[str, list[str]]:
    """PHRASES with their numbers."""
    numbers = values()
    return {page: [text.format(**numbers) for text in texts] for page, texts in PHRASES.items()}


def main() -> None:
    lost = False
    for page, texts in phrases().items():
        whole = plain((ROOT / page).read_text(encoding="utf-8"))
        print(page)
        for text in texts:
            lost |= (missing := text not in whole)
            print("  is missing:" if missing else "  ", text)
    sys.exit(lost)


if __name__ == "__main__":
    main()
