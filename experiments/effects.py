"""What is compared between two arms of a run, paired by seed.

A measure takes the records of a run and gives an `Effect`, on which experiments/verdict_rule.py
decides.
"""

from collections.abc import Callable, Sequence

import numpy as np

from experiments import compare, echo_report, sync_report
from experiments.echo_arms import ARMS
from experiments.methods import METHODS
from experiments.metrics import METRICS
from experiments.sync_rules import RULES
from experiments.verdict_rule import NOTHING, Effect

CONTROLS = ("unzip", "id_mean", "id_pair")  # of CD-GraB
NO_ECHO = ("local", "larger_lr", "accumulate")  # what might do the work of echoing


def at_end(name: str, order: str = "cd_grab", against: str = "rr", *, rate=None) -> Callable:
    """How much better an order is at the last epoch.

    Args:
      name: "train_loss", or "test_..." of one of `METRICS`.
      order, against: names of `METHODS`.
      rate: the learning rate of both; None: each at its own, where the mean train loss over seeds
        ends lowest.
    """
    return _better(name, order, against, rate, lambda values: values[:, -1])


def over_run(name: str, order: str = "cd_grab", against: str = "rr", *, rate=None) -> Callable:
    """How much better an order is in the mean over all epochs; arguments as of `at_end`."""
    return _better(name, order, against, rate, lambda values: np.nanmean(values[:, 1:], axis=1))


def _better(name, order, against, rate, summary):
    metric = METRICS.get(name.removeprefix("test_"))
    higher = metric is not None and not metric.lower

    def measure(records):
        curves = compare.gather(records)
        chosen = {k: _ending(curves, k, rate) for k in (order, against, *CONTROLS)}
        own, base = chosen[order], chosen[against]
        if own is None or base is None:
            return _none(records, (order, against), rate)

        def better(curve):
            new, old = summary(curve.values[name]), summary(base.values[name])
            return 100 * (new - old) if higher else np.log(old) - np.log(new)

        values, seen = better(own), [np.mean(summary(c.values[name])) for c in (own, base)]
        text = _accuracies(seen, values) if higher else _losses(seen, -values)
        return Effect(values, text + _setting(own, base), _controls(chosen, order, against, better))

    return measure


def to_best(cost: str, order: str = "cd_grab", *, rate=None) -> Callable:
    """How many times less an order needs to the lowest point of D-RR's mean over seeds.

    A seed of D-RR that does not arrive there itself counts with all its epochs.

    Args:
      cost: "epochs" or "seconds".
      order: a name of `METHODS`.
      rate: the learning rate of both; None: each at its own fastest, and the target of D-RR's best.
    """

    def measure(records):
        kept = [r for r in records if rate in (None, r["learning_rate"])]
        curves = {(c.order, c.learning_rate): c for c in compare.gather(kept)}
        if not {"rr", order} <= {k[0] for k in curves}:
            return _none(records, (order, "rr"), rate)
        rows = {row.order: row for row in compare.summarise(kept)}

        def needed(name):
            row = rows[name]
            return row.fastest_epochs if cost == "epochs" else row.fastest_seconds

        fastest = {k: curves[k, row.fastest_rate] for k, row in rows.items()}
        all_of = fastest["rr"].epoch[-1:] if cost == "epochs" else fastest["rr"].seconds[:, -1]
        late = np.isinf(needed("rr"))
        base, own = np.where(late, all_of, needed("rr")), needed(order)
        if np.isinf(own).any():
            text = f"{np.isfinite(own).sum()} of {len(own)} seeds arrive, of D-RR {(~late).sum()}"
            return Effect(np.empty(0), text, missing="not all seeds arrive")
        floor = 1.0 if cost == "epochs" else 1e-9  # epoch 0 counts as one

        def fewer(name):
            return np.log(base) - np.log(np.maximum(needed(name), floor))

        values = fewer(order)
        unit = "epochs" if cost == "epochs" else "s"
        than = ("over " if late.any() else "") + f"{np.mean(base):.3g}"
        text = f"{np.mean(own):.3g} against {than} {unit}: {_times(values)}"
        text += _setting(fastest[order], fastest["rr"])
        controls = _controls(fastest, order, "rr", lambda curve: fewer(curve.order))
        return Effect(values, text, controls)

    return measure


def _ending(curves, order, rate):
    """The curves at this learning rate, or at that whose mean train loss ends lowest, or None."""
    own = [c for c in curves if c.order == order and rate in (None, c.learning_rate)]
    return min(own, key=lambda c: c.values["train_loss"][:, -1].mean(), default=None)


def _controls(curves, order, against, effect):
    """The effect of the other orders, where it is CD-GraB that is compared with D-RR."""
    if (order, against) != ("cd_grab", "rr"):
        return {}
    there = [k for k in CONTROLS if curves.get(k) is not None]
    return {METHODS[k].label: effect(curves[k]) for k in there}


def _none(records, orders, rate):
    """Not run, or diverged."""
    lost = {o for o, r in compare.diverged(records) if o in orders and rate in (None, r)}
    if not lost:
        return NOTHING
    return NOTHING._replace(missing=f"{', '.join(METHODS[o].label for o in sorted(lost))} diverges")


def points(
    rule: str, against: str, name: str = "test_accuracy", *, controls: Sequence[str] = ()
) -> Callable:
    """How many points more of an accuracy, or how many times more of a loss, a rule ends with.

    Each rule is at its own best peak rate, chosen on the validation half.

    Args:
      rule, against, controls: names of `RULES`.
      name: "test_accuracy" or "train_loss".
    """

    def measure(records):
        ends = {
            k: {r["seed"]: r for r in sync_report.finals(own)}
            for k, own in sync_report.at_best(records).items()
        }
        if not (ends.get(rule) and ends.get(against)):
            return NOTHING

        def difference(k):
            seeds = sorted(set(ends[k]) & set(ends[against]))
            pairs = np.array([(ends[k][s][name], ends[against][s][name]) for s in seeds])
            new, old = pairs.reshape(-1, 2).T
            return 100 * (new - old) if name == "test_accuracy" else np.log(new / old)

        seen = [np.mean([r[name] for r in ends[k].values()]) for k in (rule, against)]
        values, last = difference(rule), next(iter(ends[rule].values()))
        text = (_accuracies if name == "test_accuracy" else _losses)(seen, values)
        text += f"; volume {100 * last['volume']:.1f} %; {len(values)} seeds"
        there = [k for k in controls if ends.get(k)]
        return Effect(values, text, {RULES[k].label: difference(k) for k in there})

    return measure


def cheaper(cost: str, arm: str = "diffusion", against: str = "none", *, speed: float) -> Callable:
    """How many times less of a cost an arm needs to the target, each arm at its own best rate.

    Args:
      cost: "loads" or "seconds".
      arm, against: names of `ARMS`.
      speed: R.
    """

    def measure(records):
        runs = {k: echo_report.timed(records, k, speed) for k in (arm, against, *NO_ECHO)}
        if not (runs[arm] and runs[against]):
            return NOTHING
        base, own = (echo_report.to_target(runs[k], cost) for k in (against, arm))
        for k, spent in ((arm, own), (against, base)):
            if arrived := [np.isfinite(v) for v in spent.values()]:
                if not all(arrived):
                    text = f"{ARMS[k].label}: {sum(arrived)} of {len(arrived)} seeds arrive"
                    return Effect(np.empty(0), text, missing="not all seeds arrive")

        def fewer(spent):
            seeds = sorted(set(base) & set(spent))
            return np.log([base[s] for s in seeds]) - np.log([spent[s] for s in seeds])

        values, unit = fewer(own), {"loads": "loads", "seconds": "s"}[cost]
        seen = [np.mean(list(spent.values())) for spent in (own, base)]
        text = "{:.3g} against {:.3g} {}: ".format(*seen, unit) + _times(values)
        if cost == "loads":
            steps = [echo_report.to_target(runs[k], "step").values() for k in (arm, against)]
            text += "; {:.3g} against {:.3g} steps".format(*(np.mean([*s]) for s in steps))
        text += _at([runs[k][0]["rate"] for k in (arm, against)])
        controls = {
            ARMS[k].label: fewer(echo_report.to_target(runs[k], cost))
            for k in NO_ECHO
            if runs[k] and against == "none" and k != arm
        }
        return Effect(values, text + f"; {len(values)} seeds", controls)

    return measure


def _bounds(values):
    mean, half = compare.interval(values)
    return np.array([mean, mean - half, mean + half])


def _losses(seen, logs) -> str:
    change = "{:+.3g} % ({:+.3g} to {:+.3g})".format(*100 * np.expm1(_bounds(logs)))
    return "{:#.4g} against {:#.4g}: ".format(*seen) + change


def _accuracies(seen, points) -> str:
    mean, half = compare.interval(points)
    pair = "{:.2f} % against {:.2f} %: ".format(*100 * np.array(seen))
    return f"{pair}{mean:+.2f} ± {half:.2f} points"


def _times(logs) -> str:
    return "{:.2f} times less ({:.2f} to {:.2f})".format(*np.exp(_bounds(logs)))


def _setting(own, base) -> str:
    return f"{_at([own.learning_rate, base.learning_rate])}; {len(own.seeds)} seeds"


def _at(rates) -> str:
    return f"; lr {' and '.join(f'{rate:g}' for rate in dict.fromkeys(rates))}"
