"""What is compared between two arms of a recorded run, paired by seed: an `Effect` for rule.py."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from experiments.results import statistics
from experiments.results.rule import NOT_RUN, NOTHING, UNDECIDED, Effect
from experiments.results.statistics import Comparison, Criterion, compare, fastest, last, spent

CONTROLS = ("unzip", "id_mean", "id_pair")  # of CD-GraB
NO_ECHO = ("local", "larger_lr", "accumulate")  # what might do the work of echoing


class Measure(NamedTuple):
    """How much better the first arm of a pair is than the second, `comparison -> Effect`.

    Fields:
      kind: "points" more of an accuracy, "less" or "more" of a loss, or a unit of which it takes
        times less, where inf is a seed that never arrives.
      choose: `(comparison, arm, speed) -> (learning rate, runs by seed)`, None without runs.
      value: `(comparison, runs) -> {seed: value}`.
      controls: arms; floor: values below it count as this in ratios.
      rate: at which all are compared, None: each at its own; speed: R.
      rest: `(comparison, first, second) -> text` at the end; None: the learning rates.
    """

    pair: tuple[str, str]
    kind: str
    choose: Callable
    value: Callable
    controls: tuple[str, ...] = ()
    floor: float = 1e-12
    rate: float | None = None
    speed: float | None = None
    rest: Callable | None = None

    def __call__(self, comparison: Comparison) -> Effect:
        here, chosen = _at_rate(comparison, self.rate), {}
        for arm in (*self.pair, *self.controls) if here else ():
            if own := self.choose(here, arm, self.speed):
                chosen[arm] = own
        if not set(self.pair) <= set(chosen):
            return self._missing(comparison)
        found = {arm: self.value(here, runs) for arm, (_, runs) in chosen.items()}
        one, base = (found[arm] for arm in self.pair)
        if not (one and base):
            return NOTHING._replace(instead=(NOT_RUN, "seconds were not taken alone"))
        both = [chosen[arm] for arm in self.pair]
        rest = self.rest(comparison, *both) if self.rest else _rates(comparison, *both)
        pairs, label = statistics.paired(one, base), comparison.arms[self.pair[1]]
        others = [k for k in self.controls if k in found and k not in self.pair]
        others = {comparison.arms[k]: self._better(found[k], base) for k in others}
        return Effect(
            dict(zip((s for s in one if s in base), self._better(one, base), strict=True)),
            functools.partial(_text, pairs, self.kind, label, rest),
            {"points": "points", "less": "loss", "more": "loss"}.get(self.kind, "cost"),
            {label: better for label, better in others.items() if len(better)},
            bool(np.isinf(pairs).any()),
            (tuple((arm, self.speed, chosen[arm][0]) for arm in self.pair),),
        )

    def _better(self, own, base) -> np.ndarray:
        if self.kind == "points":
            return 100 * -np.diff(statistics.paired(own, base))[:, 0]
        logs = statistics.log_ratios(base, own, floor=self.floor)
        return -logs if self.kind == "more" else logs

    def _missing(self, comparison) -> Effect:
        """Not run, or diverged."""
        out = {k: statistics.diverged(comparison.records, k, self.speed) for k in sorted(self.pair)}
        out = {k: of for k, of in out.items() if (self.rate in of if self.rate else of)}
        lost = [comparison.arms[k] for k in out]
        why = f"{', '.join(lost)} diverges"
        return NOTHING._replace(instead=(UNDECIDED, why)) if lost else NOTHING


def _rates(comparison, *chosen) -> str:
    return f"; lr {' and '.join(f'{rate:g}' for rate in dict.fromkeys(rate for rate, _ in chosen))}"


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


# Of orders.
def at_end(
    scalar: str, order="cd_grab", against="rr", *, rate=None, over_run: bool = False
) -> Measure:
    """How much better an order is at the last epoch.

    Args:
      scalar: "train/loss", or "test/NAME" of a metric.
      order, against: names of orders.
      rate: the learning rate of both; None: each at its own, where the mean train loss over seeds
        ends lowest.
      over_run: in the mean over all epochs.
    """

    def value(comparison, runs):
        epochs = statistics.values([*runs.values()], scalar)
        ends = np.nanmean(epochs[:, 1:], axis=1) if over_run else epochs[:, -1]
        return dict(zip(runs, ends, strict=True))

    kind = "points" if scalar == "test/accuracy" else "less"
    controls = _controls(order, against)
    return Measure((order, against), kind, _ending_lowest, value, controls, rate=rate)


over_run = functools.partial(at_end, over_run=True)


def to_best(cost: str, order="cd_grab", against="rr", *, rate=None) -> Measure:
    """How many times less an order needs to the lowest point of D-RR's mean over seeds.

    A seed of D-RR that does not arrive there itself counts as one that never does, as of the order.

    Args:
      cost: "epochs" or "seconds"; order, against: names of orders.
      rate: the learning rate of both; None: each at its own fastest, and the target of D-RR's best.
    """
    name, unit, floor = ("epoch", "epochs", 1.0) if cost == "epochs" else ("seconds", "s", 1e-9)

    return Measure(
        (order, against), unit, _fastest, functools.partial(spent, name=name),
        _controls(order, against), floor, rate,
    )  # fmt: skip


def _ending_lowest(comparison, arm, speed):
    """At the rate whose mean train loss ends lowest, of those that ran with most seeds."""
    best = statistics.best_rate(comparison.records, arm, speed, Criterion())
    tuned = statistics.tuned(comparison.records, arm, speed)
    return None if best is None else (best, tuned[best])


def _fastest(comparison, arm, speed):
    return fastest(comparison, arm) if _own_best(comparison, arm, speed) else None


def _at_rate(comparison, rate) -> Comparison | None:
    """Of the runs at this learning rate; None without any of the baseline."""
    if rate is None:
        return comparison
    kept = [r for r in comparison.records if r["learning_rate"] == rate]
    ran = any(r["arm"] == next(iter(comparison.arms)) for r in kept)
    return compare(kept, comparison.arms, comparison.criterion) if ran else None


def _controls(order, against) -> tuple[str, ...]:
    """The other orders, where it is CD-GraB that is compared with D-RR."""
    return CONTROLS if (order, against) == ("cd_grab", "rr") else ()


# Of rules and of echoing.
def points(rule: str, against: str, scalar: str = "test/accuracy", *, controls=()) -> Measure:
    """How many points more of an accuracy, or how many times more of a loss, a rule ends with.

    Args:
      rule, against, controls: names of rules, each at its own best peak rate.
      scalar: "test/accuracy" or "train/loss".
    """

    def value(comparison, runs):
        return {seed: last(run, scalar) for seed, run in runs.items()}

    def volume(comparison, own, base):
        end = own[1][min(own[1])][-1]
        return f"; volume {100 * end['rounds'] / end['step']:.1f} %"

    kind = "points" if scalar == "test/accuracy" else "more"
    return Measure((rule, against), kind, _own_best, value, tuple(controls), rest=volume)


def cheaper(cost: str, arm: str = "diffusion", against: str = "none", *, speed: float) -> Measure:
    """How many times less of a cost an arm needs to the target, each arm at its own best rate.

    Args:
      cost: "loads" or "seconds"; arm, against: names of arms; speed: R.
    """

    def rest(comparison, *both):
        steps = [np.mean([*spent(comparison, runs, "step").values()]) for _, runs in both]
        said = cost == "loads" and np.isfinite(steps).all()
        text = "; {:.3g} against {:.3g} steps".format(*steps) if said else ""
        return text + _rates(comparison, *both)

    return Measure(
        (arm, against), "loads" if cost == "loads" else "s",
        _own_best, functools.partial(spent, name=cost), NO_ECHO if against == "none" else (),
        speed=speed, rest=rest,
    )  # fmt: skip


def _own_best(comparison, arm, speed):
    own = comparison.chosen.get((arm, speed))
    return (own.rate, own.runs) if own and own.runs else None


class Difference(NamedTuple):
    """How much more of an effect there is in one run than in another, paired by seed.

    Fields:
      measure: of the effect in either, `comparison -> Effect`; names: of the two, for people.
    """

    measure: Callable[[Comparison], Effect]
    names: tuple[str, str]

    def __call__(self, *both) -> Effect:
        found = [self.measure(one) for one in both]
        runs = found[0].runs + found[1].runs
        for effect in found:
            if effect.instead or not effect.values:
                return effect._replace(runs=runs)
            if effect.censored:
                return NOTHING._replace(instead=(UNDECIDED, "not all seeds arrive"), runs=runs)
        one, base = (effect.values for effect in found)
        pairs = statistics.paired(one, base)

        def text(of):
            shown = "{:.2f} ({:.2f} to {:.2f})".format(*np.exp(of))
            means = np.exp(pairs.mean(axis=0))
            parts = [f"{m:.2f} times less with {n}" for m, n in zip(means, self.names, strict=True)]
            return f"{' against '.join(parts)}: ratio {shown}"

        values = {seed: one[seed] - base[seed] for seed in one if seed in base}
        return found[0]._replace(values=values, text=text, controls={}, runs=runs)
