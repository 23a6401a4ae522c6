"""What is compared between two arms of a recorded comparison, paired by seed.

A measure takes a comparison and gives an `Effect`, on which rule.py decides.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.results import statistics
from experiments.results.columns import fastest, spent
from experiments.results.statistics import LOSS, Criterion, compare, interval, last, log_ratios
from experiments.results.tables import costs
from experiments.verdict_parts.rule import NOTHING, Effect

CONTROLS = ("unzip", "id_mean", "id_pair")  # of CD-GraB
NO_ECHO = ("local", "larger_lr", "accumulate")  # what might do the work of echoing


def at_end(scalar: str, order: str = "cd_grab", against: str = "rr", *, rate=None) -> Callable:
    """How much better an order is at the last epoch.

    Args:
      scalar: "train/loss", or "test/NAME" of a metric.
      order, against: names of orders.
      rate: the learning rate of both; None: each at its own, where the mean train loss over seeds
        ends lowest.
    """
    return _better(scalar, order, against, rate, lambda values: values[:, -1])


def over_run(scalar: str, order: str = "cd_grab", against: str = "rr", *, rate=None) -> Callable:
    """How much better an order is in the mean over all epochs; arguments as of `at_end`."""
    return _better(scalar, order, against, rate, lambda v: np.nanmean(v[:, 1:], axis=1))


def _better(scalar, order, against, rate, summary):
    higher = not statistics.lower_of(scalar)

    def measure(comparison):
        chosen = {k: _ending(comparison, k, rate) for k in (order, against, *CONTROLS)}
        if not (chosen[order] and chosen[against]):
            return _none(comparison, (order, against), rate)
        ends = {k: summary(statistics.values(c[1], scalar)) for k, c in chosen.items() if c}
        base, text = ends[against], _accuracies if higher else _losses
        better = {
            k: 100 * (v - base) if higher else np.log(base) - np.log(v) for k, v in ends.items()
        }
        values = better[order]
        text = text([np.mean(ends[k]) for k in (order, against)], values if higher else -values)
        text += _at([chosen[order][0], chosen[against][0]], len(values))
        return Effect(values, text, _controls(comparison, order, against, better))

    return measure


def to_best(cost: str, order: str = "cd_grab", *, rate=None) -> Callable:
    """How many times less an order needs to the lowest point of D-RR's mean over seeds.

    A seed of D-RR that does not arrive there itself counts with all its epochs.

    Args:
      cost: "epochs" or "seconds"; order: its name.
      rate: the learning rate of both; None: each at its own fastest, and the target of D-RR's best.
    """
    name, unit, floor = {"epochs": ("epoch", "epochs", 1.0), "seconds": ("seconds", "s", 1e-9)}[
        cost
    ]

    def measure(comparison):
        kept = [r for r in comparison.records if rate in (None, r["learning_rate"])]
        if not any(r["arm"] == "rr" for r in kept):
            return _none(comparison, (order, "rr"), rate)
        here = compare(kept, comparison.arms, comparison.criterion)
        runs = {k: fastest(here, k) for (k, _), own in here.chosen.items() if own.runs}
        if not {order, "rr"} <= set(runs):
            return _none(comparison, (order, "rr"), rate)
        needed = {k: np.array([*spent(here, own, name).values()]) for k, (_, own) in runs.items()}
        own, late = needed[order], np.isinf(needed["rr"])
        if np.isinf(own).any():
            text = f"{np.isfinite(own).sum()} of {len(own)} seeds arrive, of D-RR {(~late).sum()}"
            return Effect(np.empty(0), text, missing="not all seeds arrive")
        base = np.where(late, [run[-1][name] for run in runs["rr"][1].values()], needed["rr"])
        fewer = {k: np.log(base) - np.log(np.maximum(v, floor)) for k, v in needed.items()}
        than = ("over " if late.any() else "") + f"{np.mean(base):.3g}"
        text = f"{np.mean(own):.3g} against {than} {unit}: {_times(fewer[order])}"
        text += _at([runs[order][0], runs["rr"][0]], len(own))
        return Effect(fewer[order], text, _controls(comparison, order, "rr", fewer))

    return measure


def _ending(comparison, arm, rate):
    """(rate, runs) at this learning rate, or at that whose mean train loss ends lowest, or None."""
    kept = {
        r: [*runs.values()]
        for r, runs in statistics.tuned(comparison.records, arm).items()
        if rate in (None, r)
    }
    best = min(kept, key=lambda r: statistics.score(kept[r], Criterion(LOSS)), default=None)
    return None if best is None else (best, kept[best])


def _controls(comparison, order, against, found: Mapping) -> dict:
    """The effect of the other orders, where it is CD-GraB that is compared with D-RR."""
    theirs = CONTROLS if (order, against) == ("cd_grab", "rr") else ()
    return {comparison.arms[k]: found[k] for k in theirs if k in found}


def _none(comparison, orders, rate) -> Effect:
    """Not run, or diverged."""
    rates = {k: statistics.diverged(comparison.records, k) for k in sorted(orders)}
    lost = [comparison.arms[k] for k, out in rates.items() if (rate in out if rate else out)]
    return NOTHING._replace(missing=f"{', '.join(lost)} diverges") if lost else NOTHING


def points(
    rule: str, against: str, scalar: str = "test/accuracy", *, controls: Sequence[str] = ()
) -> Callable:
    """How many points more of an accuracy, or how many times more of a loss, a rule ends with.

    Args:
      rule, against, controls: names of rules, each at its own best peak rate.
      scalar: "test/accuracy" or "train/loss".
    """
    accuracy = scalar == "test/accuracy"

    def measure(comparison):
        own = {k: comparison.chosen.get((k, None)) for k in (rule, against, *controls)}
        ends = {k: {s: last(run, scalar) for s, run in one.runs.items()}
                for k, one in own.items() if one and one.runs}  # fmt: skip
        if not {rule, against} <= set(ends):
            return NOTHING

        def difference(k):
            if not accuracy:
                return log_ratios(ends[k], ends[against])
            shared = [s for s in ends[k] if s in ends[against]]
            return 100 * np.array([ends[k][s] - ends[against][s] for s in shared])

        seen = [np.mean([*ends[k].values()]) for k in (rule, against)]
        values, end = difference(rule), own[rule].runs[min(own[rule].runs)][-1]
        text = (_accuracies if accuracy else _losses)(seen, values)
        text += f"; volume {100 * end['rounds'] / end['step']:.1f} %; {len(values)} seeds"
        return Effect(values, text, {own[k].label: difference(k) for k in controls if k in ends})

    return measure


def cheaper(cost: str, arm: str = "diffusion", against: str = "none", *, speed: float) -> Callable:
    """How many times less of a cost an arm needs to the target, each arm at its own best rate.

    Args:
      cost: "loads" or "seconds"; arm, against: names of arms; speed: R.
    """

    def measure(comparison):
        own = {k: comparison.chosen.get((k, speed)) for k in (arm, against, *NO_ECHO)}
        own = {k: one for k, one in own.items() if one and one.runs}
        if not {arm, against} <= set(own):
            return NOTHING
        needed = {k: costs(comparison, one, cost) for k, one in own.items()}
        for k in (arm, against):
            arrived = np.isfinite([*needed[k].values()])
            if not arrived.all():
                text = f"{own[k].label}: {arrived.sum()} of {len(arrived)} seeds arrive"
                return Effect(np.empty(0), text, missing="not all seeds arrive")
        fewer = {k: log_ratios(needed[against], found) for k, found in needed.items()}
        seen = [np.mean([*needed[k].values()]) for k in (arm, against)]
        unit = {"loads": "loads", "seconds": "s"}[cost]
        text = "{:.3g} against {:.3g} {}: ".format(*seen, unit) + _times(fewer[arm])
        if cost == "loads":
            steps = [costs(comparison, own[k], "step").values() for k in (arm, against)]
            text += "; {:.3g} against {:.3g} steps".format(*(np.mean([*s]) for s in steps))
        text += _at([own[k].rate for k in (arm, against)], len(fewer[arm]))
        free = [k for k in NO_ECHO if k in own and against == "none" and k != arm]
        return Effect(fewer[arm], text, {own[k].label: fewer[k] for k in free})

    return measure


def _bounds(found):
    mean, half = interval(found)
    return np.array([mean, mean - half, mean + half])


def _losses(seen, logs) -> str:
    change = "{:+.3g} % ({:+.3g} to {:+.3g})".format(*100 * np.expm1(_bounds(logs)))
    return "{:#.4g} against {:#.4g}: ".format(*seen) + change


def _accuracies(seen, found) -> str:
    mean, half = interval(found)
    pair = "{:.2f} % against {:.2f} %: ".format(*100 * np.array(seen))
    return f"{pair}{mean:+.2f} ± {half:.2f} points"


def _times(logs) -> str:
    return "{:.2f} times less ({:.2f} to {:.2f})".format(*np.exp(_bounds(logs)))


def _at(rates, seeds) -> str:
    return f"; lr {' and '.join(f'{rate:g}' for rate in dict.fromkeys(rates))}; {seeds} seeds"
