"""Comparisons of two arms of a recorded run, paired by seed, as an `Effect` for rule.py."""

from typing import NamedTuple

import numpy as np

from experiments.results import statistics
from experiments.results.rule import UNDECIDED, Again, Effect
from experiments.results.statistics import AVERAGED, Comparison, compare, fastest, last, spent

COSTS = {"epoch": "epochs", "loads": "loads"}  # with their units
LEAST = {"epoch": 1.0}  # in ratios, less counts as this
CONTROLS = {  # what should not have the effect of a pair
    ("cd_grab", "rr"): ("unzip", "id_mean", "id_pair"),
    ("qsr", "parallel"): ("constant",),
    ("diffusion", "none"): ("local", "larger_lr", "accumulate"),
}


class Measure(NamedTuple):
    """How much better an arm is than another, `comparison -> Effect`.

    Every arm is at its own best rate, which the study's criterion chose. Of orders it is that whose
    mean train loss over seeds ends lowest; of a cost that with the least, to the lowest point of
    the baseline's mean. A seed of the baseline may not arrive there itself.

    Fields:
      what: a cost to the target, of `COSTS`, or a scalar at the end of the run.
      arm, against: names of arms; rate: the learning rate of both, None: each at its own.
      speed: R; averaged: of averaged weights, by which own rates and the target are chosen, too.
    """

    what: str
    arm: str = "cd_grab"
    against: str = "rr"
    rate: float | None = None
    speed: float | None = None
    averaged: bool = False

    def __call__(self, comparison: Comparison) -> Effect:
        comparison = comparison.averaged if self.averaged else comparison
        if comparison is None:
            return Effect()
        pair, chosen = (self.arm, self.against), {}
        controls = CONTROLS.get(pair, ())
        here = comparison if self.rate is None else _at_rate(comparison, self.rate)
        for arm in (*pair, *controls):
            rate, runs = self._chosen(here, arm)
            if runs:
                chosen[arm] = rate, runs
        if not set(pair) <= set(chosen):
            lost = [comparison.arms[arm] for arm in sorted(pair) if self._diverged(comparison, arm)]
            return Effect(instead=(UNDECIDED, f"{', '.join(lost)} diverges") if lost else None)
        values = {arm: self._values(here, runs) for arm, (_, runs) in chosen.items()}
        one, base = (values.pop(arm) for arm in pair)
        pairs, label = statistics.paired(one, base), comparison.arms[self.against]
        controls = {comparison.arms[arm]: self._better(own, base) for arm, own in values.items()}
        end = self._end(comparison, *(chosen[arm] for arm in pair))
        return Effect(
            self._better(one, base),
            lambda interval: self._text(pairs, label, interval) + end,
            "cost" if self.what in COSTS else "points" if self._is_accuracy else "loss",
            {label: _middle([*own.values()]) for label, own in controls.items() if own},
            bool(np.isinf(pairs).any()),
            again=_again(*(chosen[arm] for arm in pair)),
        )

    @property
    def _is_accuracy(self) -> bool:
        return self.what == "test/accuracy"

    def _chosen(self, comparison, arm) -> tuple[float | None, dict]:
        """(learning rate, runs by seed)"""
        own = comparison and comparison.chosen.get((arm, self.speed))
        if not own or not own.runs:
            return None, {}
        if comparison.criterion.when != "lowest":
            return own.rate, own.runs
        if self.what in COSTS:
            return fastest(comparison, arm)
        at_end = comparison.criterion._replace(when="last")
        best = statistics.best_rate(comparison.records, arm, None, at_end)
        return best, statistics.tuned(comparison.records, arm)[best]

    def _diverged(self, comparison, arm) -> bool:
        out = statistics.diverged(comparison.records, arm, self.speed)
        return bool(out) if self.rate is None else self.rate in out

    def _values(self, comparison, runs) -> dict[int, float]:
        if self.what in COSTS:
            return spent(comparison, runs, self.what)
        scalar = f"{self.what}{AVERAGED * self.averaged}"
        return {seed: last(run, scalar) for seed, run in runs.items()}

    def _better(self, own, base) -> dict[int, float]:
        """How much, of each seed that both have."""
        shared = [seed for seed in own if seed in base]
        if self._is_accuracy:
            return {seed: 100 * (own[seed] - base[seed]) for seed in shared}
        logs = statistics.log_ratios(base, own, floor=LEAST.get(self.what, 1e-12))
        return dict(zip(shared, logs, strict=True))

    def _text(self, pairs, base, of) -> str:
        """What was seen, of values in pairs [seeds, 2] and the interval of their effect."""
        arrived, means = np.isfinite(pairs).sum(axis=0), pairs.mean(axis=0)
        times = "{:.2f} times less ({:.2f} to {:.2f})".format(*np.exp(of)).replace("inf", "∞")
        if (arrived < len(pairs)).any():
            text = f"{arrived[0]} of {len(pairs)} seeds arrive, of {base} {arrived[1]}"
            return text + f"; median: {times}" * ((of.low, of.high) != (-np.inf, np.inf))
        if self.what in COSTS:
            return "{:.3g} against {:.3g} ".format(*means) + f"{COSTS[self.what]}: {times}"
        if self._is_accuracy:
            change = f"{of.mean:+.2f} ± {of.high - of.mean:.2f} points"
            return "{:.2f} % against {:.2f} %: ".format(*(100 * means)) + change
        change = 100 * np.expm1((-of.mean, -of.high, -of.low))
        return "{:#.4g} against {:#.4g}: {:+.3g} % ({:+.3g} to {:+.3g})".format(*means, *change)

    def _end(self, comparison, one, base) -> str:
        """Of what was chosen, (rate, runs) of both arms: volume of rules, steps beside loads."""
        if comparison.criterion.when == "last":
            at = one[1][min(one[1])][-1]
            return f"; volume {100 * statistics.volume(at):.1f} %"
        text = "; lr " + " and ".join(f"{rate:g}" for rate in dict.fromkeys((one[0], base[0])))
        if self.what != "loads":
            return text
        steps = [np.mean([*spent(comparison, runs, "step").values()]) for _, runs in (one, base)]
        shown = "; {:.3g} against {:.3g} steps".format(*steps) if np.isfinite(steps).all() else ""
        return shown + text


def _at_rate(comparison, rate) -> Comparison | None:
    """Of the runs at this learning rate; None without any of the baseline."""
    kept = [r for r in comparison.records if r["learning_rate"] == rate]
    ran = any(r["arm"] == next(iter(comparison.arms)) for r in kept)
    return compare(kept, comparison.arms, comparison.criterion) if ran else None


def _again(*chosen) -> Again:
    """What a further seed of both arms takes; chosen: (rate, runs) of each."""
    rates = tuple(dict.fromkeys(rate for rate, _ in chosen))
    seconds = (np.mean([run[-1]["seconds"] for run in runs.values()]) for _, runs in chosen)
    return Again(rates, len(rates) * float(sum(seconds)))


def _middle(values) -> float:
    return statistics.median(values) if np.isinf(values).any() else float(np.mean(values))
