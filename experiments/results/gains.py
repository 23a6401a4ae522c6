"""What arms gain over the baseline at the end of their runs, paired by seed."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.results import statistics, tables
from experiments.results.statistics import Chosen, Comparison, last
from experiments.results.tables import Column, markdown, name_of, show


def arrival(at: Sequence[float], values: Sequence[float], target: float) -> float:
    """Where a curve first is at most `target`, linearly between its points; inf: nowhere."""
    values = np.asarray(values, float)
    if not (values <= target).any():
        return math.inf
    i = int(np.argmax(values <= target))
    if i == 0 or not math.isfinite(values[i - 1]):
        return float(at[i])
    return float(np.interp(-target, -values[i - 1 : i + 1], at[i - 1 : i + 1]))


def less(scalar: str, form: str) -> Column:
    """The last value of a scalar less the baseline's."""

    def cell(comparison, own):
        base = comparison.baseline()
        pairs = statistics.paired(_ends(own, scalar), _ends(base, scalar))
        if own.arm == base.arm or not len(pairs) or not np.isfinite(pairs).all():
            return "-"
        return show(pairs[:, 0] - pairs[:, 1], form)

    return Column(lambda c: f"less {c.baseline().label}", cell)


def section(comparison: Comparison) -> str:
    """Section: the end of the baseline's runs, and what every other arm gains there.

    Times fewer epochs are those to the value with which the baseline's run of the same seed ends.
    """
    both = [c for c in (comparison, comparison.averaged) if c and c.baseline().runs]
    rows = [_row(c, own) for c in both for own in c.at() if own.runs]
    return markdown(rows) if len(rows) > len(both) else ""


def _row(comparison: Comparison, own: Chosen) -> Mapping[str, str]:
    scalar, base = comparison.criterion.scalar, comparison.baseline()
    form = _form(scalar)
    gain = less(scalar, form.replace(":", ":+"))
    weights = "averaged" if scalar.endswith(statistics.AVERAGED) else "last"
    return {
        "at the end": own.label, "weights": weights, "lr": f"{own.rate:g}",
        "seeds": f"{len(own.runs)}",
        name_of(scalar): show(_ends(own, scalar).values(), form),
        gain.head(comparison): gain.cell(comparison, own),
        "times fewer epochs at this lr (geometric mean)": _fewer(own.runs, base.runs, scalar),
    }  # fmt: skip


def _form(scalar: str) -> str:
    """Distances from an optimum are of any size."""
    return "{:.2e}" if scalar.removesuffix(statistics.AVERAGED) == statistics.ABOVE else "{:.4f}"


def _ends(own: Chosen, scalar: str) -> dict[int, float]:
    return {seed: last(run, scalar) for seed, run in own.runs.items()}


def _fewer(runs: Mapping, base: Mapping, scalar: str) -> str:
    def epochs(of):
        return {
            seed: _arrival(run, scalar, last(base[seed], scalar))
            for seed, run in of.items() if seed in base
        }  # fmt: skip

    own, before = epochs(runs), epochs(base)
    late = sum(map(math.isinf, own.values()))
    if late:
        return f"{len(own) - late} of {len(own)} arrive"
    return tables.times(statistics.log_ratios(before, own))


def _arrival(run, scalar: str, target: float) -> float:
    known = [r for r in run if r.get(scalar) is not None]
    return arrival([r["epoch"] for r in known], [r[scalar] for r in known], target)
