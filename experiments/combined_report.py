"""The factorial of order x sync x echo: from records to tables of costs and of effects."""

import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments import combined_plots, records
from experiments.compare import interval, markdown, show
from experiments.echo_policies import POLICIES
from experiments.methods import METHODS
from experiments.metrics import METRICS
from experiments.sync_rules import RULES

FINALISTS = 2
FACTORS = ("order", "sync", "echo")


class Arm(NamedTuple):
    order: str
    sync: str
    echo: str

    @property
    def label(self) -> str:
        names = METHODS[self.order].label, RULES[self.sync].label, POLICIES[self.echo].label
        return " + ".join(names)


class Run(NamedTuple):
    order: str
    sync: str
    echo: str
    learning_rate: float
    seed: int


class Price(NamedTuple):
    """A machine, in steps of computation: what a load and an all-reduce take on it."""

    label: str
    load: float
    sync: float


def prices(load: float, sync: float) -> list[Price]:
    """The four machines whose input or network may be slow."""
    return [
        Price("fast input, fast network", 0, 0),
        Price(f"load {load:g} steps", load, 0),
        Price(f"sync {sync:g} steps", 0, sync),
        Price(f"load {load:g}, sync {sync:g} steps", load, sync),
    ]


def run_of(record: dict) -> Run:
    return Run(*(record[field] for field in Run._fields))


def arm_of(record: dict) -> Arm:
    return Arm(*(record[field] for field in FACTORS))


def whole_runs(done: Sequence[dict], total_steps: int) -> list[dict]:
    """The records of runs that reached their last step."""
    ended = {run_of(r) for r in done if r["step"] == total_steps}
    return [r for r in done if run_of(r) in ended]


def runs_per_arm(rates: int, seeds: int) -> int:
    return rates + min(FINALISTS, rates) * (seeds - 1)


def objective(record: dict) -> float:
    """What is compared: the train loss, above its minimum where that is known."""
    return record.get("suboptimality", record["train_loss"])


def _ends(all_records, arm):
    """{learning rate: {seed: last record}} of an arm, without rates at which a run diverged."""
    last, out = {}, set()
    for r in all_records:
        if arm_of(r) != arm:
            continue
        if r["diverged"]:
            out.add(r["learning_rate"])
        last.setdefault(r["learning_rate"], {})[r["seed"]] = r
    return {rate: by_seed for rate, by_seed in last.items() if rate not in out}


def finalists(all_records: Sequence[dict], arm: Arm) -> list[float]:
    """The rates with which seed 0 ends lowest."""
    ends = {rate: objective(by_seed[0]) for rate, by_seed in _ends(all_records, arm).items()}
    return sorted(ends, key=ends.get)[:FINALISTS]


def best_rate(all_records: Sequence[dict], arm: Arm) -> float | None:
    """The rate whose mean over seeds ends lowest, of those that ran with most seeds."""
    ends = _ends(all_records, arm)
    most = max(map(len, ends.values()), default=0)
    means = {
        rate: np.mean([objective(r) for r in by_seed.values()])
        for rate, by_seed in ends.items()
        if len(by_seed) == most
    }
    return min(means, key=means.get, default=None)


def at_best(all_records: Sequence[dict], arms: Sequence[Arm]) -> dict[Arm, list[list[dict]]]:
    """{arm: one list of records per seed}, at every arm's own best rate.

    Raises:
      ValueError: where an arm diverged at every rate.
    """
    chosen = {}
    for arm in arms:
        rate = best_rate(all_records, arm)
        if rate is None:
            raise ValueError(
                f"{arm.label} has no learning rate at which it did not diverge: pass lower "
                "--learning_rates."
            )
        own = [r for r in all_records if arm_of(r) == arm and r["learning_rate"] == rate]
        seeds = sorted({r["seed"] for r in own})
        chosen[arm] = [[r for r in own if r["seed"] == seed] for seed in seeds]
    return chosen


def target_of(chosen: dict[Arm, list[list[dict]]]) -> float:
    """The highest of all last objectives: every arm gets there with every seed."""
    return max(objective(run[-1]) for runs in chosen.values() for run in runs)


def reached(run: Sequence[dict], target: float) -> dict:
    """The first record of a run at or below the target."""
    return next(r for r in run if objective(r) <= target)


def priced(record: dict, price: Price) -> float:
    """Time in steps of computation: input beside the steps, what is sent between them."""
    return max(record["step"], price.load * record["loads"]) + price.sync * record["sent"]


class Response(NamedTuple):
    """What effects are estimated of.

    Fields:
      label: for people.
      value: `(run, target) -> float`, of all records of one seed.
      relative: whether effects are factors; else differences.
    """

    label: str
    value: Callable[[Sequence[dict], float], float]
    relative: bool = True


def test_metric(all_records: Sequence[dict]) -> str:
    """The name of the metric that the test set measures."""
    return next(name for name in METRICS if f"test_{name}" in all_records[0])


def responses(all_records: Sequence[dict]) -> list[Response]:
    metric = test_metric(all_records)
    points = metric == "accuracy"
    above = " above the optimum" if "suboptimality" in all_records[0] else ""

    def tested(run, target):
        return run[-1][f"test_{metric}"] * (100 if points else 1)

    return [
        Response(f"last train loss{above}", lambda run, target: objective(run[-1])),
        Response(METRICS[metric].label + (" / points" if points else ""), tested, not points),
        *(
            Response(f"{label} to the target", lambda run, target, n=name: reached(run, target)[n])
            for name, label in (
                ("step", "steps"), ("loads", "loads"), ("sent", "volume"), ("seconds", "seconds"),
            )
        ),
    ]  # fmt: skip


class Effect(NamedTuple):
    factors: tuple[str, ...]  # one for a main effect, more for an interaction
    mean: float
    half_width: float  # of the 95 % interval over seeds


def effects(values: np.ndarray) -> list[Effect]:
    """Main effects and interactions of a two-level factorial, paired by seed.

    effect(S) = 2 / 2^k sum over cells of y times the product over S of (-1 at the first level, +1
    at the second): for one factor the mean change from the first level to the second; for two, half
    the difference that the second makes to the change by the first.

    Args:
      values: float[2, ..., 2, seeds], an axis per factor of `FACTORS`.

    Returns:
      An effect per subset of the factors, the small ones first.

    Example:
      >>> import numpy as np
      >>> y = np.zeros((2, 2, 2, 3))
      >>> y[1] = 1.0  # the order alone matters
      >>> [e.mean for e in effects(y)]
      [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    count, found = values.ndim - 1, []
    for size in range(1, count + 1):
        for axes in itertools.combinations(range(count), size):
            signs = np.ones(values.shape[:-1])
            for axis in axes:
                shape = [2 if a == axis else 1 for a in range(count)]
                signs = signs * np.array([-1.0, 1.0]).reshape(shape)
            per_seed = 2 / 2**count * np.tensordot(signs, values, count)
            found.append(Effect(tuple(FACTORS[a] for a in axes), *interval(per_seed)))
    return found


def effects_of(chosen: dict[Arm, list[list[dict]]], response: Response) -> list[Effect]:
    """The effects on a response, of logarithms where it is relative; arms in factorial order."""
    target = target_of(chosen)
    y = np.array([[response.value(run, target) for run in runs] for runs in chosen.values()])
    y = np.log(np.maximum(y, 1e-12)) if response.relative else y
    return effects(y.reshape(2, 2, 2, -1))


def shown(effect: Effect, relative: bool) -> str:
    """As "× 0.88 (0.86 to 0.90)", or a difference; bold where the interval leaves no effect out."""
    low, high = effect.mean - effect.half_width, effect.mean + effect.half_width
    if relative:
        text = f"× {math.exp(effect.mean):.2f}"
        if not math.isnan(low):
            text += f" ({math.exp(low):.2f} to {math.exp(high):.2f})"
    else:
        text = f"{effect.mean:+.2f}"
        if not math.isnan(low):
            text += f" ({low:+.2f} to {high:+.2f})"
    return f"**{text}**" if low * high > 0 else text


def table(all_records: Sequence[dict], chosen: dict[Arm, list[list[dict]]]) -> str:
    """Markdown: every arm at its own best rate, and what it takes to the target."""
    target, metric, rows = target_of(chosen), test_metric(all_records), []
    tried = sorted({r["learning_rate"] for r in all_records})
    above = " above the optimum" if "suboptimality" in all_records[0] else ""
    for arm, runs in chosen.items():
        rate = runs[0][-1]["learning_rate"]
        edge = " (edge)" if rate in (tried[0], tried[-1]) and len(tried) > 1 else ""
        at = [reached(run, target) for run in runs]
        last = [run[-1] for run in runs]
        tested = [r[f"test_{metric}"] for r in last]
        rows.append(
            {
                "arm": arm.label,
                "best lr": f"{rate:g}{edge}",
                f"last train loss{above}": show(interval(list(map(objective, last))), "{:.3g}"),
                METRICS[metric].label: show(interval(tested), "{:.4g}"),
                "steps to the target": show(interval([r["step"] for r in at]), "{:.0f}"),
                "loads": show(interval([r["loads"] for r in at]), "{:.0f}"),
                "sent, in all-reduces": show(interval([r["sent"] for r in at]), "{:.0f}"),
                "seconds": show(interval([r["seconds"] for r in at]), "{:.2f}"),
            }
        )
    return markdown(rows)


def effects_table(all_records: Sequence[dict], chosen: dict[Arm, list[list[dict]]]) -> str:
    """Markdown: a row per effect, a column per response."""
    columns = {
        r.label: [shown(e, r.relative) for e in effects_of(chosen, r)]
        for r in responses(all_records)
    }
    names = [" × ".join(e.factors) for e in effects(np.zeros((2, 2, 2, 1)))]
    return markdown(
        [
            {"effect of": name} | {label: cells[i] for label, cells in columns.items()}
            for i, name in enumerate(names)
        ]
    )


def priced_table(chosen: dict[Arm, list[list[dict]]], machines: Sequence[Price]) -> str:
    """Markdown: priced time to the target on every machine, as times faster than the first arm.

    Geometric means over seeds, paired; the interval is theirs.
    """
    target = target_of(chosen)
    first = next(iter(chosen.values()))

    def times(runs, price):
        return np.log([priced(reached(run, target), price) for run in runs])

    rows = []
    for arm, runs in chosen.items():
        row = {"arm": arm.label}
        for price in machines:
            mean, half = interval(times(first, price) - times(runs, price))
            text = f"{math.exp(mean):.2f}"
            if not math.isnan(half):
                text += f" ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})"
            row[price.label] = text
        rows.append(row)
    return markdown(rows)


def report(
    all_records: Sequence[dict],
    arms: Sequence[Arm],
    folder: str,
    title: str,
    machines: Sequence[Price],
) -> str:
    """Writes the tables and pictures into the folder and returns the text."""
    chosen = at_best(all_records, arms)
    target = target_of(chosen)
    texts = {
        "table.md": f"Target: {target:.4g}, which every arm reaches with every seed.\n\n"
        + table(all_records, chosen),
        "table_effects.md": "Effects from the first level to the second, 95 % intervals over "
        "seeds, × for factors; bold: no effect lies outside.\n\n"
        + effects_table(all_records, chosen),
        "table_priced.md": "Times faster to the target than the first arm, priced.\n\n"
        + priced_table(chosen, machines),
    }
    for name, text in texts.items():
        records.write_whole(os.path.join(folder, name), text + "\n")
    combined_plots.comparison(all_records, chosen, os.path.join(folder, "comparison.png"), title)
    combined_plots.effects(
        {r: effects_of(chosen, r) for r in responses(all_records)},
        os.path.join(folder, "effects.png"),
        title,
    )
    return "\n\n".join(texts.values())


def forecast(arms, plans: dict, machines: Sequence[Price], order_volumes: dict) -> str:
    """What the arms cost, known before a run: loads, rounds, what is sent, and priced time."""
    rows = []
    for arm in arms:
        plan = plans[arm]
        end = {
            "step": plan.total_steps,
            "loads": plan.echo.loads,
            "sent": plan.sync.rounds + order_volumes[arm] * plan.echo.loads,
        }
        rows.append(
            {"arm": arm.label, "loads": end["loads"], "rounds": plan.sync.rounds}
            | {"sent, in all-reduces": f"{end['sent']:.0f}"}
            | {price.label: f"{priced(end, price):.0f}" for price in machines}
        )
    return markdown(rows)
