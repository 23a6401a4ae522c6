"""The factorial of decisions: main effects and interactions, and time on machines with prices."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.results import plots, statistics
from experiments.results.statistics import Chosen, Comparison, interval, last, spent, target_of
from experiments.results.tables import markdown, name_of, times
from experiments.tasks.metrics import METRICS

FACTORS = ("order", "sync", "echo")  # fields of the records
COSTS = {"step": "steps", "loads": "loads", "allreduces": "volume", "seconds": "seconds"}


class Response(NamedTuple):
    """What effects are estimated of."""

    label: str
    values: Callable[[Chosen], Sequence[float]]  # of an arm, one per seed
    relative: bool = True  # whether effects are factors; else differences


class Effect(NamedTuple):
    factors: tuple[str, ...]  # one for a main effect, more for an interaction
    mean: float
    half_width: float  # of the 95 % interval over seeds


def responses(comparison: Comparison) -> list[Response]:
    """The last objective and test metric, and every cost to the target."""
    scalar, metric = comparison.criterion.scalar, statistics.metric_of(comparison)
    points = metric == "accuracy"
    scale, unit = (100, " / points") if points else (1, "")

    def ends(name, scale=1):
        return lambda own: [scale * last(run, name) for run in own.runs.values()]

    def costs(name):
        return lambda own: [*spent(comparison, own.runs, name).values()]

    return [
        Response(f"last {name_of(scalar)}", ends(scalar)),
        Response(METRICS[metric].label + unit, ends(f"test/{metric}", scale), not points),
        *(Response(f"{label} to the target", costs(name)) for name, label in COSTS.items()),
    ]


def cells(comparison: Comparison) -> tuple[tuple[str, ...], list[Chosen]]:
    """(names of the factors, the arms by their levels, the last factor's changing fastest).

    Raises:
      ValueError: if the arms are no two-level factorial, one diverged at every rate, or one has
        fewer seeds than another.
    """
    arms = comparison.at(comparison.speeds[0])
    if lost := [own.label for own in arms if own.rate is None]:
        raise ValueError(
            f"{', '.join(lost)} has no learning rate at which it did not diverge: pass lower "
            "--learning_rates."
        )
    counts = {own.label: len(own.runs) for own in arms}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"the arms' best rates have runs of {counts} seeds, for others diverged: pass more and "
            "lower --learning_rates."
        )
    of = [next(iter(own.runs.values()))[-1] for own in arms]
    levels = {name: list(dict.fromkeys(r[name] for r in of)) for name in FACTORS}
    levels = {name: found for name, found in levels.items() if len(found) > 1}
    at = [tuple(found.index(r[name]) for name, found in levels.items()) for r in of]
    if set(at) != set(itertools.product((0, 1), repeat=len(levels))):
        raise ValueError(
            f"effects are of a full factorial of two levels, and the {len(arms)} arms have the "
            f"levels {levels}: run every combination of two levels each."
        )
    return tuple(levels), [arms[i] for i in sorted(range(len(at)), key=at.__getitem__)]


def effects(values: np.ndarray, factors: Sequence[str] = FACTORS) -> list[Effect]:
    """Main effects and interactions of a two-level factorial, paired by seed.

    effect(S) = 2 / 2^k sum over cells of y times the product over S of (-1 at the first level, +1
    at the second): for one factor the mean change from the first level to the second; for two, half
    the difference that the second makes to the change by the first.

    Args:
      values: float[2, ..., 2, seeds], an axis per factor.

    Returns:
      An effect per subset of the factors, the small ones first.
    """
    count, found = values.ndim - 1, []
    levels = 2 * np.indices(values.shape[:-1]) - 1.0  # of every factor in every cell
    for size in range(1, count + 1):
        for axes in itertools.combinations(range(count), size):
            signs = levels[list(axes)].prod(axis=0)
            per_seed = 2 / 2**count * np.tensordot(signs, values, count)
            found.append(Effect(tuple(factors[a] for a in axes), *interval(per_seed)))
    return found


def effects_of(comparison: Comparison) -> dict[Response, list[Effect]]:
    """The effects on every response, of logarithms where they are factors."""
    (factors, arms), found = cells(comparison), {}
    for response in responses(comparison):
        y = np.array([response.values(own) for own in arms])
        y = np.log(np.maximum(y, 1e-12)) if response.relative else y
        found[response] = effects(y.reshape(*[2] * len(factors), -1), factors)
    return found


def format_effect(effect: Effect, relative: bool) -> str:
    """As "× 0.88 (0.86 to 0.90)", or a difference; bold where the interval leaves no effect out."""
    low, high = effect.mean - effect.half_width, effect.mean + effect.half_width
    form = (lambda v: f"{math.exp(v):.2f}") if relative else (lambda v: f"{v:+.2f}")
    text = ("× " if relative else "") + form(effect.mean)
    if not math.isnan(low):
        text += f" ({form(low)} to {form(high)})"
    return f"**{text}**" if low * high > 0 else text


def late(comparison: Comparison) -> list[str]:
    """The arms that are not at the target with every seed: then no effect on what it takes."""
    arms = comparison.at(comparison.speeds[0])
    return [own.label for own in arms if math.inf in spent(comparison, own.runs, "step").values()]


def effects_table(comparison: Comparison) -> tuple[str, str]:
    """Section: a row per effect, a column per response."""
    if lost := late(comparison):
        return "table_effects.md", f"No effects: {', '.join(lost)} never arrive with some seed."
    found = effects_of(comparison)
    rows = [
        {"effect of": " × ".join(each[0].factors)}
        | {r.label: format_effect(e, r.relative) for r, e in zip(found, each, strict=True)}
        for each in zip(*found.values(), strict=True)
    ]
    text = (
        "Effects from the first level to the second, 95 % intervals over seeds, × for factors; "
        "bold: no effect lies outside."
    )
    return "table_effects.md", f"{text}\n\n{markdown(rows)}"


def effects_picture(comparison: Comparison) -> tuple[str, Callable]:
    """Section: a panel per response, a row per effect with its interval."""
    if late(comparison):
        return "table_effects.md", ""
    return "effects.png", functools.partial(plots.effects, effects_of(comparison))


def target_line(comparison: Comparison) -> str:
    """Section: the target of the main table."""
    text = f"Target: {target_of(comparison):.4g}"
    if lost := late(comparison):
        return f"{text}, which {', '.join(lost)} do not reach with every seed."
    return f"{text}, which every arm reaches with every seed."


def priced_table(machines: Sequence, price: Callable) -> Callable:
    """Section: priced time to the target as times faster than the first arm, paired by seed.

    Args:
      machines: each with a label; price: `(run, machine) -> time up to the run's last record`.
    """

    def section(comparison):
        arms = comparison.at(comparison.speeds[0])

        def priced(own, machine):
            steps = spent(comparison, own.runs, "step")
            return {
                seed: price([r for r in run if r["step"] <= steps[seed]], machine)
                if steps[seed] < math.inf else math.inf
                for seed, run in own.runs.items()
            }  # fmt: skip

        def faster(taken):
            each = [taken(own) for own in arms]
            return [
                "-" if math.inf in (*each[0].values(), *own.values())
                else times(statistics.log_ratios(each[0], own), exact=True)
                for own in each
            ]  # fmt: skip

        columns = {"arm": [own.label for own in arms]}
        columns |= {m.label: faster(lambda own, m=m: priced(own, m)) for m in machines}
        text = "Times faster to the target than the first arm, priced."
        if comparison.speeds[0] is not None:  # seconds are those of a slow machine
            columns["measured"] = faster(lambda own: spent(comparison, own.runs, "seconds"))
            text = f"{text} Measured: seconds, with the delays of the last machine."
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return "table_priced.md", f"{text}\n\n{markdown(rows)}"

    return section
