r"""Measures how the error of an order and that of local steps add up, where both are exact.

    python -m experiments.order_error                            # ten minutes on two slow cores
    python -m experiments.order_error --questions=averages --seeds=2

The losses (order_losses.py) separate the two errors, and x follows linear recursions, so nothing
is trained. Each question is a table of docs/results/orders_and_local_steps.md. For the same
questions about trained models, use `experiments.combined --arms=...`.
"""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from absl import flags

import local_opt
from experiments import order_formulas as formulas
from experiments import order_losses as losses
from experiments.cluster import entry, progress
from experiments.order_formulas import LONGEST
from experiments.order_losses import NEVER, ORDERS, Drift, Setting
from experiments.results import plots, report, tables
from experiments.study import flags as dialect
from experiments.tasks import TASKS, ranges

# As for digits: 64 units per step over all workers, 24 steps per epoch.
SETTINGS = (Setting(64, 1, 24), Setting(32, 2, 48), Setting(16, 4, 96), Setting(4, 16, 384))
ENDS = SETTINGS[1::2]
PERIODS = (2, 4, 8, 12, 24, 48, 96)
Cell = tuple[str, str, float | str]  # row, column, value


@functools.lru_cache(2)
def _start(setting: Setting, order: str, seed: int):
    """Returns (family, orders, rates, the paths of parallel SGD)."""
    family, total = losses.draw(setting, seed), setting.epochs * setting.steps
    made = losses.epochs_of(order, family.noise, setting.workers, setting.epochs, seed)
    factor = 0.5 + 0.5 * np.cos(np.pi * np.arange(total) / total) if setting.cosine else 1.0
    rates = np.broadcast_to(setting.rate * np.maximum(factor, 1e-3), total)
    return family, made, rates, losses.parallel(family, setting, made, rates)


def run(
    setting: Setting, order: str, period: int, seed: int, drift: Drift = NEVER, weights=(1.0,)
) -> losses.Errors:
    """Both errors of an order under syncs every `period` steps."""
    family, made, rates, plain = _start(setting, order, seed)
    syncs = local_opt.constant(period, total_steps=len(rates)).syncs_after(np.arange(len(rates)))
    own = plain if period == 1 else losses.paths(family, setting, made, syncs, rates, drift)
    return losses.errors(family, setting, plain, own, weights)


# Each question yields the cells of one seed.
def errors(seed: int) -> Iterator[Cell]:
    for setting, order in product(ENDS, ORDERS):
        row = f"{setting.label}, {ORDERS[order]}"
        found = {h: run(setting, order, h, seed) for h in PERIODS}
        yield row, "order's", found[4].order
        for h, own in found.items():
            yield row, f"local, H = {h}", own.local
        for h in (4, 24):
            yield row, f"total, H = {h}", found[h].total


def cosine(seed: int) -> Iterator[Cell]:
    for setting, order in product(ENDS, ("rr", "cd_grab", "id_pair", "dealt")):
        decayed = setting._replace(rate=0.5, cosine=True, epochs=100)
        for h in (1, 4, 24):
            total = run(decayed, order, h, seed).total
            yield f"{setting.label}, {ORDERS[order]}", f"H = {h}", total


DOUBLED = {  # (what is changed, H, the factor, exponents of the two errors)
    "rate": (dict(rate=0.06), 6, 2.0, (3, 4)),
    "H - 1": ({}, 12, 11 / 5, (0, 2)),
    "units per step, B": (dict(units_per_step=4, num_units=96), 6, 2.0, (-1, -2)),
    "workers, W": (dict(workers=16), 6, 2.0, (-1, 0)),
    "steps of an epoch, n": (dict(num_units=96), 6, 2.0, (2, 0)),
    "third derivative, k": (dict(cubic=2.0), 6, 2.0, (0, 2)),
}
POWER = Setting(8, 2, 48, rate=0.03, spread=0.0, least=0.3, epochs=200)


def powers(seed: int) -> Iterator[Cell]:
    """Exponents of D-RR's error and of the bias of local steps, changing one quantity at a time."""
    before = run(POWER, "dealt", 6, seed)
    for row, (changed, period, factor, (of_order, of_bias)) in DOUBLED.items():
        after = run(POWER._replace(**changed), "dealt", period, seed)
        yield row, "D-RR's error", np.log(after.order / before.order) / np.log(factor)
        yield row, "expected", str(of_order)
        yield row, "bias of local steps", np.log(after.bias / before.bias) / np.log(factor)
        yield row, "expected ", str(of_bias)


def borders(seed: int) -> Iterator[Cell]:
    """The longest period at which local steps add less than D-RR's error: formula and runs."""
    for shape, rate in product(SETTINGS, (0.5, 0.25, 0.1)):
        setting, last, longest = shape._replace(rate=rate), 1, LONGEST
        formula = formulas.border(losses.draw(setting, seed), setting)
        yield shape.label, f"rate {rate:g}, formula", formula
        for period in PERIODS:
            found = run(setting, "dealt", period, seed)
            if found.local >= found.order:
                longest = last
                break
            last = period
        yield shape.label, f"rate {rate:g}, run", longest


CORRECTIONS = {
    "none": NEVER,
    "control variates": Drift(gain=1.0),
    "control variates, gain 1/4": Drift(gain=0.25),
    "proximal 0.1": Drift(pull=0.1),
    "proximal 1": Drift(pull=1.0),
}
KINDS = {
    "": {},
    "unlike workers, ": {"between": 1.0},
    "curvature with gradient, ": {"correlation": -1.0},
}


def corrections(seed: int) -> Iterator[Cell]:
    for setting, kind, order, h in product(ENDS, KINDS, ("rr", "cd_grab"), (4, 24)):
        changed = setting._replace(**KINDS[kind])
        for name, drift in CORRECTIONS.items():
            total = run(changed, order, h, seed, drift).total
            yield f"{setting.label}, {kind}{ORDERS[order]}, H = {h}", name, total


def signs(seed: int) -> Iterator[Cell]:
    """Where digits lie in the family: its correlation of g with z has the sign of the cosine."""
    task = TASKS["digits"]()
    found = losses.sign(losses.optimum(task.model, task.train, seed=seed), seed=seed)
    yield task.name, "cosine", found[0]
    yield task.name, "noise", found[1]


CONDITIONS = {"lambda from 0.3": 0.3, "lambda from 0.002": 0.002}


def averages(seed: int) -> Iterator[Cell]:
    """What averaging leaves of an order's error, and of a start at a distance of 1 in x_c."""
    for (kind, least), name in product(CONDITIONS.items(), formulas.AVERAGES):
        setting, own = ENDS[0]._replace(least=least, epochs=100), {}
        weights, family = formulas.AVERAGES[name](setting.steps), losses.draw(setting, seed)
        for order in ("rr", "cd_grab", "id_pair"):
            expected = formulas.order_formula(family, setting, order, weights)
            found = run(setting, order, 1, seed, weights=weights).order
            own[ORDERS[order]] = np.array([found, expected])
        left = formulas.start_formula(family, setting, 1.0, weights)
        own["left of the start"] = left, left
        own["gain of CD-GraB"] = (own["D-RR"] + left) / (own["CD-GraB"] + left)
        for row, (found, expected) in own.items():
            yield f"{kind}, {row}", name, found
            yield f"{kind}, {row}", f"{name}, formula", expected


def sizes(seed: int) -> Iterator[Cell]:
    """Gains of balanced orders of 1,536 units, against the numbers to be balanced."""
    for dimension in (16, 64, 256, 1024):
        setting = ENDS[0]._replace(dimension=dimension, least=0.3, epochs=24)
        for order in ("cd_grab", "id_pair"):
            found = formulas.gains(losses.draw(setting, seed), setting, order, seed)
            for column, value in found.items():
                yield f"D = {dimension}, {ORDERS[order]}", column, value


SCALED = {"g": 0.0, "g / v^(1/4)": 0.25, "g / v^(1/2)": 0.5}


def scales(seed: int) -> Iterator[Cell]:
    """Adam's frozen preconditioner: which rows to balance, g over which power of v."""
    for dimension, power in product((16, 256), (0, 1, 2)):
        setting = ENDS[0]._replace(dimension=dimension, epochs=40)
        family, p = losses.adam(losses.draw(setting._replace(least=1.0), seed), power)
        for name, root in SCALED.items():
            scale = p ** (2 * root - 0.5)
            for column, value in formulas.gains(family, setting, "cd_grab", seed, scale).items():
                yield f"D = {dimension}, curvature as scale^{power}, {name}", column, value


def digits(seed: int) -> Iterator[Cell]:
    """The formulas for digits' own curvatures and noise, and their recursions."""
    task = TASKS["digits"]()
    at = losses.optimum(task.model, task.train)
    for rate in (0.0625, 0.25, 1.0):
        setting = ENDS[0]._replace(rate=rate, epochs=100, dimension=len(at.params))
        (family, start, turn), total = losses.family_of(at), setting.epochs * setting.steps
        for order in ("rr", "cd_grab"):
            made = losses.epochs_of(order, family.noise, setting.workers, setting.epochs, seed)
            path = losses.parallel(family, setting, made, np.full(total, rate))
            row = f"rate {rate:g}, {ORDERS[order]}"
            for name, weights in formulas.AVERAGES.items():
                w = weights(setting.steps)
                yield row, name, losses.errors(family, setting, path, path, w).order
                yield row, f"{name}, formula", formulas.order_formula(family, setting, order, w)
            yield row, "third derivative", losses.floor(at, path[0, total // 2 :: 6] @ turn.T)
            yield row, "left of the start", formulas.start_formula(family, setting, start)


class Question(NamedTuple):
    cells: Callable[[int], Iterator[Cell]]  # from a seed
    show: Callable[[Sequence[float]], str]  # from the values of all seeds
    head: str = ""  # name of the first column
    left_out: tuple[str, ...] = ()  # columns shown only in the picture


def means(form: str) -> Callable[[Sequence[float]], str]:
    return lambda values: tables.show(values, form)


def median(values: Sequence[int]) -> str:
    middle = statistics.median_low(values)
    return str(middle) if middle < LONGEST else "any"


LEFT_OUT = tuple(f"local, H = {h}" for h in PERIODS if h not in (4, 24))
QUESTIONS = {
    "errors": Question(errors, means("{:.1e}"), left_out=LEFT_OUT),
    "cosine": Question(cosine, means("{:.1e}")),
    "powers": Question(powers, means("{:+.2f}"), "the exponent of"),
    "borders": Question(borders, median, "workers x units"),
    "corrections": Question(corrections, means("{:.1e}")),
    "averages": Question(averages, means("{:.3g}")),
    "sizes": Question(sizes, means("{:.3g}"), "gain over D-RR"),
    "scales": Question(scales, means("{:.3g}"), "gain over D-RR"),
    "digits": Question(digits, means("{:.1e}")),
    "signs": Question(signs, means("{:.2f}")),
}


def table(question: Question, found: Sequence[dict]) -> str:
    """Markdown; cells that are words are copied."""
    cells = {}
    for r in found:
        if r["column"] not in question.left_out:
            cells.setdefault(r["row"], {}).setdefault(r["column"], []).append(r["value"])
    return tables.markdown([
        {question.head: row}
        | {k: v[0] if isinstance(v[0], str) else question.show(v) for k, v in own.items()}
        for row, own in cells.items()
    ])  # fmt: skip


def picture(found: Sequence[dict], path: str) -> None:
    """Writes a PNG: both errors against H, one panel per setting."""
    cells = {}
    for r in found:
        if r["question"] == "errors":
            cells.setdefault((r["row"], r["column"]), []).append(r["value"])
    figure, (axes,) = plots.panes(1, 2, (12, 5), sharey=True)
    for axis, setting in zip(axes, ENDS, strict=True):
        for i, name in enumerate(("rr", "cd_grab", "id_pair", "round_robin", "chunks")):
            label, style = ORDERS[name], {"color": plots.look(i)["color"]}
            row = f"{setting.label}, {label}"
            at = [np.mean(cells[row, f"local, H = {h}"]) for h in PERIODS]
            level = np.mean(cells[row, "order's"])
            axis.plot(PERIODS, at, marker="o", ms=4, **style, label=f"{label}, local")
            axis.axhline(level, linestyle="--", label=f"{label}, order's", **style)
        axis.set(xscale="log", yscale="log", xlabel="H, steps between two syncs")
        axis.set_title(f"{setting.workers} workers, {setting.units_per_step} units a step")
        axis.set_xticks(PERIODS, [str(h) for h in PERIODS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("expected loss above the minimum")
    plots.legend(figure)
    plots.save(
        figure, path, "Two errors of local steps under an order: rate 0.25, 24 steps an epoch"
    )


def define_flags(values: flags.FlagValues) -> None:
    define = dialect.definer(values)
    define(flags.DEFINE_list, "questions", [*QUESTIONS], f"which tables, of {', '.join(QUESTIONS)}")
    define(ranges.COUNT, "seeds", 5, "number of draws of the units")
    dialect.define(values, "output")


def main(values: flags.FlagValues) -> None:
    found, made, asked = [], {}, dialect.names_of(values, "questions", QUESTIONS)
    with report.opened("order_error", values) as folder:
        for name in asked:
            cells = ((s, *c) for s in range(values.seeds) for c in QUESTIONS[name].cells(s))
            own = [
                {"question": name, "seed": seed, "row": row, "column": column, "value": value}
                for seed, row, column, value in progress.bar(cells, desc=name, unit="cell")
            ]
            made[name] = table(QUESTIONS[name], own)
            found += own
        drawn = {"order_error.png": functools.partial(picture, found)} if "errors" in asked else {}
        report.write_tables(folder, "Two errors", found, made, drawn)


if __name__ == "__main__":
    entry.main(define_flags, main)
