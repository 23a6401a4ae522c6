"""What is compared between two arms of a recorded comparison, paired by seed.

A measure takes a comparison and gives an `Effect`, on which rule.py decides.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.results import statistics
from experiments.results.columns import fastest, spent
from experiments.results.statistics import LOSS, Criterion, compare, last
from experiments.results.tables import costs
from experiments.verdict_parts.rule import NOT_RUN, NOTHING, UNDECIDED, Effect

CONTROLS = ("unzip", "id_mean", "id_pair")  # of CD-GraB
NO_ECHO = ("local", "larger_lr", "accumulate")  # what might do the work of echoing


def _effect(comparison, found, pair, kind, *, runs, controls, rest, floor=1e-12) -> Effect:
    """How much better the first arm of a pair is than the second, of {arm: {seed: value}}.

    Args:
      kind: "points" more of an accuracy, "less" or "more" of a loss, or a unit of which it takes
        times less, where inf is a seed that never arrives.
      runs: as of `Effect`; controls: arms; rest: of the text, at its end.
      floor: values below count as this in ratios.
    """

    def better(arm):
        own, base = found[arm], found[pair[1]]
        if kind == "points":
            return 100 * -np.diff(statistics.paired(own, base))[:, 0]
        logs = statistics.log_ratios(base, own, floor=floor)
        return -logs if kind == "more" else logs

    pairs, values = statistics.paired(*(found[arm] for arm in pair)), better(pair[0])
    others = {comparison.arms[k]: better(k) for k in controls if k in found and k not in pair}
    return Effect(
        values,
        functools.partial(_text, pairs, kind, comparison.arms[pair[1]], rest),
        {"points": "points", "less": "loss", "more": "loss"}.get(kind, "cost"),
        {label: shown for label, shown in others.items() if len(shown)},
        bool(np.isinf(pairs).any()),
        tuple(runs),
        tuple(seed for seed in found[pair[0]] if seed in found[pair[1]]),
    )


def _text(pairs, kind, base, rest, of) -> str:
    """What was seen, of values in pairs [seeds, 2] and the interval of their effect."""
    arrived = np.isfinite(pairs).sum(axis=0)
    if not len(pairs):
        return "-"
    if (arrived < len(pairs)).any():
        text = f"{arrived[0]} of {len(pairs)} seeds arrive, of {base} {arrived[1]}"
        if of.low > -np.inf or of.high < np.inf:
            median = "; median: {:.2f} times less ({:.2f} to {:.2f})".format(*np.exp(of))
            text += median.replace("inf", "∞")
        return text + rest
    means = pairs.mean(axis=0)
    if kind == "points":
        text = "{:.2f} % against {:.2f} %: ".format(*(100 * means))
        return f"{text}{of.mean:+.2f} ± {of.high - of.mean:.2f} points{rest}"
    if kind in ("less", "more"):
        signed = of if kind == "more" else (-of.mean, -of.high, -of.low)
        change = 100 * np.expm1(signed)
        text = "{:#.4g} against {:#.4g}: {:+.3g} % ({:+.3g} to {:+.3g})".format(*means, *change)
        return text + rest
    text = "{:.3g} against {:.3g} ".format(*means)
    return f"{text}{kind}: {'{:.2f} times less ({:.2f} to {:.2f})'.format(*np.exp(of))}{rest}"


SHARED = NOTHING._replace(instead=(NOT_RUN, "seconds were not taken alone"))


def _at(rates) -> str:
    return f"; lr {' and '.join(f'{rate:g}' for rate in dict.fromkeys(rates))}"


def at_end(
    scalar: str, order="cd_grab", against="rr", *, rate=None, over_run: bool = False
) -> Callable:
    """How much better an order is at the last epoch.

    Args:
      scalar: "train/loss", or "test/NAME" of a metric.
      order, against: names of orders.
      rate: the learning rate of both; None: each at its own, where the mean train loss over seeds
        ends lowest.
      over_run: in the mean over all epochs.
    """
    pair, kind = (order, against), "points" if scalar == "test/accuracy" else "less"

    def measure(comparison):
        chosen = {k: _ending(comparison, k, rate) for k in (*pair, *CONTROLS)}
        chosen = {k: own for k, own in chosen.items() if own}
        if not set(pair) <= set(chosen):
            return _none(comparison, pair, rate)
        found = {}
        for k, (_, runs) in chosen.items():
            epochs = statistics.values([*runs.values()], scalar)
            ends = np.nanmean(epochs[:, 1:], axis=1) if over_run else epochs[:, -1]
            found[k] = dict(zip(runs, ends, strict=True))
        rates = [chosen[k][0] for k in pair]
        used = [(k, None, own) for k, own in zip(pair, rates, strict=True)]
        return _effect(
            comparison, found, pair, kind, runs=used, controls=_controls(pair), rest=_at(rates)
        )

    return measure


over_run = functools.partial(at_end, over_run=True)


def to_best(cost: str, order="cd_grab", against="rr", *, rate=None) -> Callable:
    """How many times less an order needs to the lowest point of D-RR's mean over seeds.

    A seed of D-RR that does not arrive there itself counts as one that never does, as of the order.

    Args:
      cost: "epochs" or "seconds"; order, against: names of orders.
      rate: the learning rate of both; None: each at its own fastest, and the target of D-RR's best.
    """
    name, unit, floor = ("epoch", "epochs", 1.0) if cost == "epochs" else ("seconds", "s", 1e-9)
    pair = (order, against)

    def measure(comparison):
        kept = [r for r in comparison.records if rate in (None, r["learning_rate"])]
        if not any(r["arm"] == "rr" for r in kept):
            return _none(comparison, pair, rate)
        here = compare(kept, comparison.arms, comparison.criterion)
        chosen = {k: fastest(here, k) for (k, _), own in here.chosen.items() if own.runs}
        if not set(pair) <= set(chosen):
            return _none(comparison, pair, rate)
        needed = {k: spent(here, own, name) for k, (_, own) in chosen.items()}
        if not all(needed[k] for k in pair):
            return SHARED
        rates = [chosen[k][0] for k in pair]
        used = [(k, None, own) for k, own in zip(pair, rates, strict=True)]
        return _effect(
            comparison, needed, pair, unit, runs=used, controls=_controls(pair), rest=_at(rates),
            floor=floor,
        )  # fmt: skip

    return measure


def _ending(comparison, arm, rate):
    """(rate, runs) at this learning rate, or at that whose mean train loss ends lowest, or None.

    Of those that ran with most seeds, as of `statistics.best_rate`.
    """
    tuned = statistics.tuned(comparison.records, arm)
    kept = {r: runs for r, runs in tuned.items() if rate in (None, r)}
    most = max(map(len, kept.values()), default=0)
    kept = {r: runs for r, runs in kept.items() if len(runs) == most}
    scores = {r: statistics.score([*runs.values()], Criterion(LOSS)) for r, runs in kept.items()}
    best = min(scores, key=scores.get, default=None)
    return None if best is None else (best, kept[best])


def _controls(pair) -> tuple[str, ...]:
    """The other orders, where it is CD-GraB that is compared with D-RR."""
    return CONTROLS if pair == ("cd_grab", "rr") else ()


def _none(comparison, orders, rate) -> Effect:
    """Not run, or diverged."""
    rates = {k: statistics.diverged(comparison.records, k) for k in sorted(orders)}
    lost = [comparison.arms[k] for k, out in rates.items() if (rate in out if rate else out)]
    return NOTHING._replace(instead=(UNDECIDED, f"{', '.join(lost)} diverges")) if lost else NOTHING


def points(
    rule: str, against: str, scalar: str = "test/accuracy", *, controls: Sequence[str] = ()
) -> Callable:
    """How many points more of an accuracy, or how many times more of a loss, a rule ends with.

    Args:
      rule, against, controls: names of rules, each at its own best peak rate.
      scalar: "test/accuracy" or "train/loss".
    """
    kind = "points" if scalar == "test/accuracy" else "more"

    def measure(comparison):
        own = _chosen(comparison, (rule, against, *controls))
        if not {rule, against} <= set(own):
            return NOTHING
        ends = {k: {s: last(r, scalar) for s, r in one.runs.items()} for k, one in own.items()}
        end = own[rule].runs[min(own[rule].runs)][-1]
        volume = f"; volume {100 * end['rounds'] / end['step']:.1f} %"
        used = [(k, None, own[k].rate) for k in (rule, against)]
        return _effect(
            comparison, ends, (rule, against), kind, runs=used, controls=controls, rest=volume
        )

    return measure


class Difference(NamedTuple):
    """How much more of an effect there is in one run than in another, paired by seed.

    Fields:
      measure: of the effect in either, `comparison -> Effect`; names: of the two, for people.
    """

    measure: Callable
    names: tuple[str, str]

    def __call__(self, comparison, other) -> Effect:
        found = [self.measure(one) for one in (comparison, other)]
        for effect in found:
            if effect.instead or not len(effect.values):
                return effect
            if effect.censored:
                return NOTHING._replace(instead=(UNDECIDED, "not all seeds arrive"))
        known = [dict(zip(effect.seeds, effect.values, strict=True)) for effect in found]
        one, base = statistics.paired(*known).T

        def text(of):
            means = np.exp([one.mean(), base.mean()])
            shown = "{:.2f} ({:.2f} to {:.2f})".format(*np.exp(of))
            parts = [f"{m:.2f} times less with {n}" for m, n in zip(means, self.names, strict=True)]
            return f"{' against '.join(parts)}: ratio {shown}"

        seeds = tuple(seed for seed in known[0] if seed in known[1])
        return found[0]._replace(values=one - base, text=text, controls={}, seeds=seeds)


def _chosen(comparison, arms, speed=None) -> dict:
    """Those of the arms that have runs at their own best rate."""
    own = {k: comparison.chosen.get((k, speed)) for k in arms}
    return {k: one for k, one in own.items() if one and one.runs}


def cheaper(cost: str, arm: str = "diffusion", against: str = "none", *, speed: float) -> Callable:
    """How many times less of a cost an arm needs to the target, each arm at its own best rate.

    Args:
      cost: "loads" or "seconds"; arm, against: names of arms; speed: R.
    """
    pair = (arm, against)

    def measure(comparison):
        own = _chosen(comparison, (*pair, *NO_ECHO), speed)
        if not set(pair) <= set(own):
            return NOTHING
        needed = {k: costs(comparison, one, cost) for k, one in own.items()}
        if not all(needed[k] for k in pair):
            return SHARED
        rest = _at([own[k].rate for k in pair])
        steps = [np.mean([*costs(comparison, own[k], "step").values()]) for k in pair]
        if cost == "loads" and np.isfinite(steps).all():
            rest = "; {:.3g} against {:.3g} steps".format(*steps) + rest
        free = NO_ECHO if against == "none" else ()
        unit = {"loads": "loads", "seconds": "s"}[cost]
        used = [(k, speed, own[k].rate) for k in pair]
        return _effect(comparison, needed, pair, unit, runs=used, controls=free, rest=rest)

    return measure
