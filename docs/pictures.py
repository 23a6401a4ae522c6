"""Draws pictures of docs/results again: of recorded runs, and of SGD's drift, which takes minutes.

    python -m docs.pictures outer.png machine_map.png  # into docs/results; without a name: all

The others are what the commands on their pages write.
"""

import argparse
import itertools
import json
import pathlib

import numpy as np

from docs import shards
from experiments import (
    advise,
    combined,
    echo_theory,
    echoing,
    order_rates,
    progress,
    slow_sde,
    slowrun,
)
from experiments.compare.cost import Machine
from experiments.report import archive, plots, statistics, tables

FOLDER = pathlib.Path(__file__).parent / "results"


def curves(path: str, run: str, title: str, panels, speed: float | None = None, arms=()) -> None:
    """The curves of a recorded run, of all its arms or of these."""
    record = archive.load(run)
    if arms:
        labels = {a: record.arms[a] for a in arms}
        record = statistics.compare(record.data, labels, record.criterion)
    plots.comparison(record, panels, path, title, speed)


def factorial(path: str) -> None:
    effects = combined.effects_of(archive.load("combined_shakespeare"))
    plots.effects(effects, path, "Shakespeare")


def differences(path: str, base: str, ending: str, title: str) -> None:
    """Test accuracies less those of an arm, paired by seed, of the arms with several seeds."""
    responses, styles = [], {}
    for run, name in (("outer_vit", "ViT"), ("outer_gpt", "GPT")):
        compared = archive.load(run + ending)
        values = statistics.frame(compared)
        arms = {arm.arm: arm.label for arm in compared.at() if arm.runs.seed.nunique() > 1}
        colours = plots.styles_of(arms)
        styles |= {label: colours[arm] for arm, label in arms.items()}
        effects = {
            label: statistics.interval(100 * statistics.paired(values, arm, base, "test/accuracy"))
            for arm, label in arms.items()
            if arm != base
        }
        responses.append(combined.Response(f"accuracy of the {name} / points", False, effects))
    plots.effects(responses, path, title, f"less {arms[base]}, paired by seed", styles)


def curricula(path: str) -> None:
    """Test losses of orders by scores less those of D-RR, paired by seed: last and averaged."""
    responses, names = [], scored_arms()
    for weights in ("last", "averaged"):
        for run in ("constant", "moderate", "linear"):
            compared = archive.load(f"scored_{run}")
            compared = compared if weights == "last" else compared.averaged
            values, scalar = statistics.frame(compared), statistics.named(compared, "test/loss")
            effects = {
                label: statistics.interval(statistics.paired(values, arm, "rr+dealt", scalar))
                for arm, label in names.items()
            }
            text = f"test loss, {weights} weights\n{SCHEDULES[run]}"
            responses.append(combined.Response(text, False, effects))
    plots.effects(responses, path, "Curricula on Tiny Shakespeare", "less D-RR, paired by seed")


SCHEDULES = {"constant": "constant rate", "moderate": "decay to 0.3", "linear": "decay to 0"}


def scored_arms() -> dict[str, str]:
    """The arms that all three runs have, but D-RR."""
    arms = archive.load("scored_constant").arms
    return {arm: label for arm, label in arms.items() if arm != "rr+dealt"}


# A colour of each decision, of two the mixture.
DECISIONS = {
    (False, False, False): ("none", "#EEEEEE"),
    (True, False, False): ("order", plots.BLUE),
    (False, True, False): ("local steps", plots.RED),
    (False, False, True): ("echo", plots.ORANGE),
    (True, True, False): ("order + local steps", plots.PINK),
    (True, False, True): ("order + echo", plots.GREEN),
    (False, True, True): ("local steps + echo", "#F0E442"),
    (True, True, True): ("all three", plots.SKY),
}
LOADS, SYNCS = np.geomspace(0.1, 30, 41), np.geomspace(0.03, 300, 49)  # in steps


def map_of(measured: advise.Factorial, machine: Machine):
    """For all [loads, syncs]: the best's place in DECISIONS, if it is sure, its gain over none."""
    logs = advise.logs_of(machine, measured)
    kinds = np.array([[*DECISIONS].index((c.order, c.local, c.uses > 1)) for c in logs])
    times = np.stack([*logs.values()])
    best = times.mean(axis=-1).argmin(axis=0)
    behind = times - np.take_along_axis(times, best[None, ..., None], axis=0)
    mean, half = np.apply_along_axis(statistics.interval, -1, behind).transpose(3, 0, 1, 2)
    clear = (mean > half) | (kinds[:, None, None] == kinds[best])
    return kinds[best], clear.all(axis=0), np.exp(mean[[*logs].index(advise.NONE)])


def machine_map(path: str) -> None:
    """A map per task and size: the best combination over what a load and a sync cost."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke

    factorials = {
        (measured.task, f"{measured.sizes.workers} x {measured.sizes.units_per_step}"): measured
        for measured in advise.load()
    }
    tasks, sizes = (list(dict.fromkeys(part)) for part in zip(*factorials, strict=True))
    figure, axes = plots.panes(len(tasks), len(sizes), (9, 12), sharex=True, sharey=True)
    machine = Machine(
        load=LOADS[:, None, None], sync=SYNCS[None, :, None], ordered=1.05, parameters=1e8
    )
    labels, shown = zip(*DECISIONS.values(), strict=True)
    colours, seen = ListedColormap(shown), set()
    for axis, key in zip(axes.flat, itertools.product(tasks, sizes), strict=True):
        kind, sure, times = map_of(factorials[key], machine)
        axis.pcolormesh(SYNCS, LOADS, kind, cmap=colours, vmin=-0.5, vmax=7.5, shading="nearest")
        unsure = axis.contourf(SYNCS, LOADS, ~sure, [0.5, 1.5], colors="none", hatches=["//"])
        unsure.set(edgecolor="#444444", linewidth=0)
        lines = axis.contour(SYNCS, LOADS, times, [2, 4, 8, 16], colors="black", linewidths=1)
        for text in axis.clabel(lines, fmt="%g ×", fontsize=10):
            text.set(path_effects=[withStroke(linewidth=3, foreground="white")], rotation=0)
        axis.set(xscale="log", yscale="log", xlabel="a sync, in steps", ylabel="a load, in steps")
        axis.set_title("{}, {}".format(*key))
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_formatter("{x:g}")
        axis.label_outer()
        seen.update(kind.flat)
    handles = [Patch(facecolor=colours(k), label=labels[k]) for k in sorted(seen)]
    handles.append(Patch(facecolor="white", hatch="///", label="not sure (95 %)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    plots.save(figure, path, "The best combination of decisions\nlines: times as fast as none")


def slow_drift(path: str) -> None:
    """A row per problem, a column per number of workers; lines are theory, to its limit at 0."""
    rates, widths = (0.1, 0.05, 0.02, 0.01), (2, 4, 8, 16)
    names = {"valley": "x at the end", "label_noise": "trace of the Hessian at the end"}
    figure, axes = plots.panes(2, 4, (13, 7.5), sharex=True, sharey="row")
    styles = plots.styles_of(slow_sde.RULES)
    cells = progress.bar([*itertools.product(names, widths)])
    for axis, (name, workers) in zip(axes.flat, cells, strict=True):
        drifts = [r for rate in rates for r in slow_sde.measure(name, workers, rate, 64)]
        for rule, style in styles.items():
            of_rule = [r for r in drifts if r["rule"] == rule]
            theory = [*(r["theory"] for r in of_rule), of_rule[0]["limit"]]
            axis.plot([*rates, 0], theory, color=style["color"], linewidth=1)
            mean, half = np.transpose([statistics.interval(r["end"]) for r in of_rule])
            errorbar = {"fmt": style["marker"], "color": style["color"], "ms": 6, "capsize": 3}
            axis.errorbar(rates, mean, half, label=slow_sde.RULES[rule].label, **errorbar)
        axis.set_title(f"{name.replace('_', ' ')}, K = {workers}")
        axis.set(xlabel="learning rate η", ylabel=names[name])
        axis.grid(alpha=0.3)
        axis.label_outer()
    plots.legend(figure)
    title = "SGD after 4 / η² steps, mean and 95 % interval of 64 repetitions"
    plots.save(figure, path, f"{title}\nlines: theory, to its limit at η = 0")


def lags(path: str) -> None:
    """The mean |grad F|^2 of a quadratic under echoing over that of fresh batches; exact."""
    figure, axes = plots.panes(1, 3, (12, 4), sharey=True)
    shares, workers = echo_theory.SHARES, echo_theory.NOISY_WORKERS
    times, means = echo_theory.mean_squares(shares, workers, 2**14)
    colours = plots.styles_of([f"p = {p:g}" for p in shares])
    for axis, w, of in zip(axes.flat, workers, np.moveaxis(means, 2, 0), strict=True):
        for k, (p, (label, style)) in enumerate(zip(shares, colours.items(), strict=True)):
            axis.plot(times, of[:, k] / of[:, 0], label=label, color=style["color"])
            axis.axhline((2 / p - 1) ** 0.5, color=style["color"], linewidth=1, linestyle=":")
        axis.set(xscale="log", yscale="log", title=f"W = {w}", xlabel="steps T")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean |∇F|² over that of fresh batches")
    plots.legend(figure)
    plots.save(
        figure,
        path,
        "Quadratic, exact, the best of 27 rates (hence the waves)\ndotted: √(2 / p - 1), all noise",
    )


def exponents(path: str) -> None:
    """What orders reach over T, m and n, with 95 % intervals, on the regression."""
    import pandas as pd

    table = pd.DataFrame(archive.rows_of(archive.FOLDER / "order_rates"))
    table = table[table.problem == "regression"]
    figure, axes = plots.panes(2, 3, (12, 7), sharey="row")
    styles = plots.styles_of(order_rates.ORDERS)
    for row, (measure, label) in zip(axes, order_rates.MEASURES.items(), strict=True):
        of = table[table.measure == measure]
        parts = {
            "T": of[(of.m == 8) & (of.n == 32)],
            "m": of[(of.n == 32) & (of["T"] == 32)],
            "n": of[(of.m == 8) & (of["T"] == 32)],
        }
        for axis, (over, part) in zip(row, parts.items(), strict=True):
            for order, style in styles.items():
                logs = part[part.order == order].groupby(over)["value"].apply(np.log)
                rows = [(x, *statistics.interval(v)) for x, v in logs.groupby(level=0)]
                x, mean, half = np.transpose(rows)
                spread = np.exp(mean) - np.exp(mean - half), np.exp(mean + half) - np.exp(mean)
                axis.errorbar(x, np.exp(mean), spread, label=order, capsize=3, **style)
            axis.set(xscale="log", yscale="log", xlabel=NAMES[over])
            axis.set_xticks(x, [f"{value:g}" for value in x])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        row[0].set_ylabel(label)
    plots.legend(figure)
    plots.save(
        figure, path, f"Least squares, the best rate at each point, {table.seed.nunique()} seeds"
    )


NAMES = {"T": "epochs T", "m": "workers m", "n": "examples of a worker n"}


def uses(path: str, runs: dict[str, str], title: str) -> None:
    """Test accuracies less those of parallel training, paired by seed, of the uses of a plan."""
    responses = []
    for run, name in runs.items():
        compared = archive.load(run)
        values = statistics.frame(compared)
        effects = {
            label: statistics.interval(
                100 * statistics.paired(values, arm, "parallel", "test/accuracy")
            )
            for arm, label in compared.arms.items()
            if arm not in ("parallel", "qsr_outer")  # which is 48 points below
        }
        responses.append(combined.Response(f"accuracy{name} / points", False, effects))
    plots.effects(responses, path, title, "less parallel, paired by seed")


FAMILIES = {  # arms of the sweep of alpha by their first word
    "qsr": "QSR, alpha x 0.5, 1, 2, 4",
    "matched": "constant H of as many syncs",
    "post_local": "post-local, switch at 0.3 to 0.9",
    "swap": "SWAP, switch at 0.3 to 0.9",
}


def alpha(path: str) -> None:
    """Test accuracies less those of parallel training, over syncs, of rules by their parameter."""
    compared = archive.load("alpha_digits")
    values, styles = statistics.frame(compared), plots.styles_of(["parallel", *FAMILIES])
    figure, axes = plots.panes(1, 1, (8, 5))
    for family, label in FAMILIES.items():
        arms = [arm for arm in compared.arms if arm.split("+")[0] == family]
        points = []
        for arm in arms:
            gains = 100 * statistics.paired(values, arm, "parallel", "test/accuracy")
            points.append((values.loc[arm]["rounds"].mean(), *statistics.interval(gains)))
        syncs, mean, half = np.transpose(sorted(points))
        style = styles[family] | {"markevery": None, "label": label}
        axes[0][0].errorbar(syncs, mean, half, capsize=3, **style)
    axes[0][0].axhline(0, color=plots.BLACK, linewidth=1, label="parallel, 2,000 syncs")
    axes[0][0].set(xscale="log", xlabel="syncs in 2,000 steps", ylabel="accuracy / points")
    axes[0][0].grid(alpha=0.3)
    plots.legend(figure)
    title = "Digits, 4 workers: less parallel, paired by seed"
    plots.save(figure, path, f"{title}, 95 % intervals over 8 seeds")


WHOLE = {"full": "full shuffle", "file": "file order", "buffer": "file order, buffer of 1/16"}
READ = {  # how: a colour, a marker and a line
    "full shuffle": (plots.BLACK, "o"),
    "file order": (plots.GREY, "D"),
    "file order, buffer of 1/16": (plots.PINK, "v"),
    "blocks shuffled": (plots.SKY, "P-"),
    "blocks shuffled, 4 at once": (plots.GREEN, "X:"),
    "blocks balanced": (plots.BLUE, "s-"),
    "blocks balanced, 4 at once": (plots.RED, "^:"),
}


def blocks(path: str, schedule: str, ending: str = "") -> None:
    """A panel per task: the loss over the requests of an epoch."""
    rows = [r for r in archive.rows_of(archive.FOLDER / "blocks") if r["schedule"] == schedule]
    figure, axes = plots.panes(2, 3, (13.5, 8.8))
    for axis, task in zip(axes.flat, dict.fromkeys(r["task"] for r in rows), strict=False):
        of_task, curves = [r for r in rows if r["task"] == task], {}
        name, scale = ("loss", "linear") if task == "shakespeare" else ("above_optimum", "log")
        criterion = statistics.Criterion(f"train/{name}{ending}")
        arms = {r["arm"]: "" for r in of_task}
        for best in statistics.compare(statistics.data_of(of_task), arms, criterion).at():
            r, ends = best.runs.iloc[0], best.runs[criterion.scalar]
            several = ", 4 at once" if r["size"] > 1 and r["window"] > 1 else ""
            label = WHOLE.get(best.arm, f"blocks {r['order']}{several}")
            curves.setdefault(label, []).append((r["requests"], *statistics.interval(np.log(ends))))
        axis.axhline(np.exp(curves["full shuffle"][0][1]), color=plots.BLACK, linestyle="--")
        for label, points in curves.items():
            color, line = READ[label]
            x, mean, half = np.transpose(sorted(points))
            low, y, high = np.exp([mean - half, mean, mean + half])
            axis.errorbar(x, y, (y - low, high - y), fmt=line, color=color, capsize=3, label=label)
        axis.set(title=task, xscale="log", yscale=scale, xlabel="requests of an epoch")
        axis.set_ylabel(tables.name_of(criterion.scalar))
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.grid(alpha=0.3)
    axes[-1, -1].set_visible(False)
    plots.legend(figure)
    title = f"Blocks of sorted files, {schedule} learning rate{ending.replace('/', ', weights ')}"
    plots.save(figure, path, f"{title}\neach at its own best rate, geometric mean, 95 % interval")


def load_and_step(path: str) -> None:
    """R by the threads that decode, of each model; and the steps per second of whole loops."""
    file = FOLDER.parents[1] / "benchmarks" / "rows" / "h200.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    figure, (axes,) = plots.panes(1, 2, (12, 5))
    ratios, loops = ([r for r in rows if r["part"] == part] for part in ("ratio", "loop"))
    names = {"vit_small": "ViT-S/16", "resnet50": "ResNet-50"}
    keys = [*names, *dict.fromkeys(r["way"] for r in loops)]
    styles = dict(zip(keys, plots.styles_of(keys).values(), strict=True))
    for axis, of_all, key, y in (
        (axes[0], ratios, "model", "R"),
        (axes[1], loops, "way", "steps/s"),
    ):
        for name in dict.fromkeys(r[key] for r in of_all):
            of_name = sorted((r for r in of_all if r[key] == name), key=lambda r: r["threads"])
            values = np.array([[r["threads"], r[y]] for r in of_name]).T
            ends = [[float(x) for x in r["range"].split(" to ")] for r in of_name]
            bars = abs(np.transpose(ends) - values[1]) if key == "way" else None
            axis.errorbar(*values, bars, label=names.get(name, name), capsize=3, **styles[name])
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set(xlabel="threads that decode, of 16 cores", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].axhline(1, color=plots.GREY, linestyle="--")
    axes[0].set_ylabel("R, steps that a load takes")
    axes[1].set_ylabel("steps per second, ViT-S/16")
    plots.legend(figure)
    plots.save(figure, path, "Loads of JPEGs and steps on an H200, batches of 128\ncommit 7600ffc")


ROUNDS = (  # seconds of several calls do not compare
    plots.Panel("metric", ("rounds", "step")),
    plots.Panel("train/loss", ("step", "rounds")),
    plots.Panel("drift", ("step", "rounds")),
)
COUNTS = (plots.Panel("metric", ("loads", "step", "rounds")),)  # of runs without a delay
RACE = echoing.STUDY.panels
EPOCHS = plots.Panel("objective", ("epoch",)), plots.Panel("metric", ("epoch",))
COINS = (  # at e times the rates no echo is the same
    *("none", "accumulate", "local", "bernoulli", "algorithm2", "bernoulli_every"),
    *("diffusion", "diffusion_coins"),
)
SLOWRUN = "rr+documents", "rr", "rr+shifted", "cd_grab", "cd_grab+shifted"
PICTURES = {  # a function and its arguments after the path
    "algorithm2_digits.png": (curves, "algorithm2_digits", "digits", COUNTS, 4, COINS),
    "algorithm2_resnet.png": (curves, "algorithm2_resnet", "CIFAR-10, ResNet-8", COUNTS, 4),
    "algorithm2_shakespeare.png": (curves, "algorithm2_shakespeare", "GPT", COUNTS, 4),
    "alpha.png": (alpha,),
    "blocks_constant_rate.png": (blocks, "constant"),
    "blocks_constant_rate_averaged.png": (blocks, "constant", statistics.AVERAGED),
    "blocks_cosine.png": (blocks, "cosine"),
    "combined_digits_comparison.png": (
        curves,
        "combined_digits",
        "digits, 32 workers, 2400 steps",
        combined.STUDY.panels,
    ),
    "combined_shakespeare_effects.png": (factorial,),
    "echo_theory.png": (lags,),
    "echoing_digits_R4.png": (curves, "echo_digits", "digits", RACE[:1], 4),
    "echoing_shakespeare_R2.png": (curves, "echo_shakespeare", "Shakespeare", RACE, 2),
    "load_and_step.png": (load_and_step,),
    "machine_map.png": (machine_map,),
    "one_plan.png": (uses, {"one_plan_digits": ""}, "Digits"),
    "one_plan_networks.png": (
        uses,
        {"one_plan_gpt": " of the GPT", "one_plan_vit": " of the ViT"},
        "Networks under AdamW",
    ),
    "order_rates.png": (exponents,),
    "orders_digits_w64.png": (curves, "digits_w64", "digits, 64 workers", EPOCHS),
    "outer.png": (differences, "matched", "", "Outer momentum and fragments, AdamW"),
    "outer_muon.png": (differences, "parallel", "_muon", "Muon inside local steps"),
    "qsr_cifar10_resnet.png": (
        curves,
        "qsr_cifar10_resnet",
        "CIFAR-10, ResNet-8, 4 workers",
        ROUNDS,
    ),
    "qsr_cifar10_vit.png": (curves, "qsr_cifar10_vit", "CIFAR-10, ViT, 4 workers", ROUNDS),
    "scored.png": (curricula,),
    "slow_sde.png": (slow_drift,),
    "slowrun.png": (curves, "slowrun", "Slowrun", slowrun.STUDY.panels, None, SLOWRUN),
    "unequal_shards.png": (shards.picture,),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME.png", help="all if none is given")
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="docs/results if unset")
    given = parser.parse_args()
    if unknown := {*given.names} - {*PICTURES}:
        parser.error(f"there is no picture {', '.join(unknown)}: name one of {[*PICTURES]}.")
    for asked in given.names or PICTURES:
        function, *arguments = PICTURES[asked]
        function(str(given.folder / asked), *arguments)
