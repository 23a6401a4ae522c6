"""The tables and the picture of docs/results/unequal_shards.md, from the recorded runs.

python -m docs.shards
"""

import functools
from typing import NamedTuple

import numpy as np

from experiments import combined
from experiments.report import archive, plots, statistics, tables

KINDS = {  # the end of a record's name, and what it is called
    "equal": "equal",
    "by_class": "by class",
    "sizes": "sizes",
    "weighted": "sizes, weighted",
}
SHOWN = {"orders": "cd_grab", "qsr": "rr+qsr", "echo": "rr+diffusion"}  # in the picture


class Study(NamedTuple):
    """What is shown of an arm, and of its difference from another, seed by seed."""

    base: str  # the arm of the same shards with which others are compared
    column: str  # of `statistics.frame`
    form: str
    label: str
    ratio: bool  # whether arms differ by factors
    unit: float = 1.0  # in which it is shown
    speed: float | None = None  # of the input


STUDIES = {
    "orders": Study("rr", "lowest", "{:.1e}", "train loss above the optimum", True),
    "qsr": Study("rr+parallel", "test/accuracy", "{:.2f}", "test accuracy / %", False, 100),
    "echo": Study("rr+none", "to loads", "{:.0f}", "loads to 95 %", True, speed=4),
}
load = functools.cache(lambda study, kind: archive.load(f"shards_{study}_{kind}"))


def frame(study: str, kind: str):
    return statistics.frame(load(study, kind), speed=STUDIES[study].speed)


def arms_of(study: str) -> dict[str, str]:
    """Those that shards change; the record of equal shards has others too."""
    return load(study, "by_class").arms


def values_table(study: str) -> str:
    """Markdown: every arm at its own best rate, which is in brackets, by shards."""
    of = STUDIES[study]

    def cell(arm, kind):
        chosen = load(study, kind).chosen[arm, of.speed]
        sample = of.unit * statistics.column(frame(study, kind), arm, of.column)
        return f"{tables.show(sample, of.form, 'arrive')} ({chosen.rate:g})"

    return _table(study, of.label, cell)


def effects(study: str, kind: str) -> dict[str, np.ndarray]:
    """{arm: by seed, less the base or the logarithm of how many times less}."""
    of, values = STUDIES[study], frame(study, kind)
    paired = functools.partial(statistics.paired, values, base=of.base, scalar=of.column)
    others = [arm for arm in load(study, kind).arms if arm != of.base]
    return {arm: of.unit * paired(arm, ratio=of.ratio).to_numpy() for arm in others}


def effects_table(study: str) -> str:
    """Markdown: every arm against the base, paired by seed, by shards."""
    of = STUDIES[study]
    base = arms_of(study)[of.base]

    def cell(arm, kind):
        sample = effects(study, kind)[arm]
        if not np.isfinite(sample).all():
            return "-"
        return tables.times(sample) if of.ratio else tables.show(sample, "{:+.2f}")

    head = f"times less than {base}" if of.ratio else f"points against {base}"
    return _table(study, head, cell, without=of.base)


def _table(study, head, cell, *, without=None) -> str:
    return tables.markdown(
        [
            {head: label} | {name: cell(arm, kind) for kind, name in KINDS.items()}
            for arm, label in arms_of(study).items()
            if arm != without
        ]
    )


def picture(path: str) -> None:
    """A panel per study: an arm of it against the base, under all shards."""
    responses = []
    for study, arm in SHOWN.items():
        of, names = STUDIES[study], arms_of(study)
        shown = {
            name: statistics.interval((-1 if of.ratio else 1) * effects(study, kind)[arm])
            for kind, name in KINDS.items()
        }
        text = f"{of.label}\n{names[arm]} against {names[of.base]}"
        responses.append(combined.Response(text, of.ratio, shown))
    plots.effects(responses, path, "Unequal shards of digits", "paired by seed")


if __name__ == "__main__":
    for name in STUDIES:
        print(values_table(name), effects_table(name), sep="\n\n", end="\n\n")
