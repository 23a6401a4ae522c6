r"""Simulates merges by a quorum: how much of the time of failing chips trains, and a loss.

    python -m experiments.quorum                    # both, in three to four minutes
    python -m experiments.quorum --notraining       # goodputs alone, in seconds
    python -m experiments.quorum --restart=600      # as long as a job waits for healthy machines

Douillard et al., Decoupled DiLoCo, 2026 (https://arxiv.org/abs/2604.21428), simulate up to 2.4
million chips that fail once a year each, and report a goodput of 27 % where all of them step
together and wait for a restart, 58 % if they go on with fewer chips, and 88 % for 8 learners of
which one is a quorum (Table 1, 1.2 million chips). The clocks are in `clocks.py`, their assumptions
in docs/results/quorum.md.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from experiments import clocks, quorum_losses
from experiments.cluster import entry, progress
from experiments.results import plots, report, tables
from experiments.results.statistics import interval
from experiments.study import flags as dialect
from experiments.tasks.ranges import COUNT, RATE, SECONDS, Range

YEAR = 365.25 * 86400.0  # seconds between two failures of a chip
PERIOD, OVERLAP = 24, 2  # steps of a round, H, and those during which a merge may wait: the paper's
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
PUBLISHED = {  # goodputs in %, Table 1, at these numbers of chips
    ("restart", 1): (72, 57, 38, 27, 18), ("elastic", 1): (88, 80, 69, 58, 40),
    ("quorum", 2): (94, 88, 80, 70, 54), ("quorum", 4): (96, 93, 89, 82, 73),
    ("quorum", 8): (98, 96, 94, 88, 80), ("quorum", 16): (99, 98, 96, 93, 86),
}  # fmt: skip
UNEQUAL = {"all": 84, "first": 100, "grace": 100}  # goodputs in %, two generations of chips
SLOWER, SPREAD = 1.18, 0.1  # half of the learners; standard deviation of a round's length
TITLE = "Goodput of chips that fail once a year"


class Rule(NamedTuple):
    label: str
    waits: bool = False  # for all learners
    elastic: bool = True  # goes on with fewer chips, after a pause


RULES = {
    "restart": Rule("all chips step together, restarted", elastic=False),
    "elastic": Rule("all chips step together, elastic"),
    "all": Rule("learners, waiting for all", waits=True),
    "quorum": Rule("learners, a quorum of 1"),
}


def cell(rule: str, learners: int, chips: int, values: flags.FlagValues) -> dict:
    """A record: shares of the chips' seconds over repetitions."""
    own, draw = RULES[rule], np.random.default_rng(chips)
    shape = values.rounds, values.repetitions, learners
    work = np.full(shape, float(PERIOD))  # a step takes one second
    # An elastic learner pauses where a slice leaves, and again where it returns.
    every = YEAR * learners / chips / (1 + own.elastic)
    # A learner steps for at most 26 seconds a round, those while it waits included.
    failures = clocks.drawn(draw, every, 2 * PERIOD * values.rounds, shape[1:])
    clock = clocks.run(
        work, failures, pause=values.resize if own.elastic else values.restart,
        least=learners if own.waits else 1, grace=values.grace, overlap=OVERLAP / PERIOD,
    )  # fmt: skip
    named = {"rule": rule, "learners": learners, "chips": chips}
    return named | shares(clock, work) | {"published": published(rule, learners, chips)}


def shares(clock: clocks.Clock, work: np.ndarray) -> dict[str, list[float]]:
    """Of the seconds, those of all steps and those of the rounds that were ready in time."""
    ready = np.sum(np.where(clock.done < 1, 0, work), axis=(0, 2))
    in_time = ready / (clock.seconds[-1] * work.shape[-1])
    return {"goodput": clock.goodput.tolist(), "in_time": in_time.tolist()}


def published(rule: str, learners: int, chips: int) -> int | None:
    known = PUBLISHED.get((rule, learners))
    return known[CHIPS.index(chips)] if known and chips in CHIPS else None


def unequal(values: flags.FlagValues) -> list[dict]:
    """A record per rule: 8 learners without failures, half of them slower, rounds that vary."""
    draw, shape = np.random.default_rng(0), (values.rounds, values.repetitions, 8)
    slow = np.where(np.arange(8) < 4, 1.0, SLOWER)
    work = PERIOD * slow * np.maximum(1 + SPREAD * draw.normal(size=shape), 0.5)
    found = []
    for rule, (least, grace) in {"all": (8, 0), "first": (1, 0), "grace": (1, OVERLAP)}.items():
        never = np.full((*shape[1:], 1), np.inf)
        clock = clocks.run(
            work, never, pause=0.0, least=least, grace=grace, overlap=OVERLAP / PERIOD
        )
        named = {"rule": rule, "learners": 8, "chips": None, "published": UNEQUAL[rule]}
        found.append(named | shares(clock, work))
    return found


def percent(found: Sequence[float], known: int | None = None) -> str:
    text = tables.show([100 * x for x in found], "{:.1f}")
    return text if known is None else f"{text} ({known})"


def goodput_table(found: Sequence[Mapping], scalar: str, rules: Sequence[str]) -> str:
    """Markdown: a row per rule and number of learners, a column per number of chips."""
    rows = {}
    for r in found:
        if r["chips"] and r["rule"] in rules:
            row = rows.setdefault((r["rule"], r["learners"]), {})
            row |= {"rule": RULES[r["rule"]].label, "M": r["learners"]}
            known = r["published"] if scalar == "goodput" else None
            row[f"{r['chips']:,} chips"] = percent(r[scalar], known)
    return tables.markdown([*rows.values()])


def unequal_table(found: Sequence[Mapping]) -> str:
    labels = {"all": "waiting for all", "first": "quorum of 1", "grace": "quorum of 1, grace"}
    return tables.markdown([
        {"merge": labels[r["rule"]], "goodput / %": percent(r["goodput"], r["published"]),
         "in rounds that were in time / %": percent(r["in_time"])}
        for r in found if not r["chips"]
    ])  # fmt: skip


def verdict(found: Sequence[Mapping]) -> str:
    """How far the goodputs are from the published ones, and whether their order is the same."""
    known = [r for r in found if r["chips"] and r["published"] is not None]
    off = {id(r): 100 * np.mean(r["goodput"]) - r["published"] for r in known}
    # Rows of one number of chips whose published goodputs differ.
    pairs = [(a, b) for a, b in itertools.combinations(known, 2)
             if a["chips"] == b["chips"] and a["published"] != b["published"]]  # fmt: skip
    same = [(a["published"] < b["published"]) == (np.mean(a["goodput"]) < np.mean(b["goodput"]))
            for a, b in pairs]  # fmt: skip
    many = [abs(off[id(r)]) for r in known if r["learners"] > 1]
    alone = [abs(off[id(r)]) for r in known if r["learners"] == 1]
    return (
        f"in the published order: {sum(same)} of {len(same)} pairs at one number of chips\n"
        f"farthest from the published goodput: {max(alone, default=0):.1f} points with one learner,"
        f" {max(many, default=0):.1f} with several"
    )


def draw(found: Sequence[Mapping], path: str) -> None:
    """Writes a PNG: goodputs over chips beside the published ones, and what is merged."""
    figure, ((left, right),) = plots.panes(1, 2, (11.5, 5.0), sharey=True)
    own = [r for r in found if r["chips"]]
    lines = dict.fromkeys((r["rule"], r["learners"]) for r in own)
    # Of the learners that wait for all, those in the middle.
    lines = [(rule, m) for rule, m in lines if rule != "all" or m == 8]
    for axis, scalar in ((left, "goodput"), (right, "in_time")):
        for place, (rule, learners) in enumerate(lines):
            row = [r for r in own if (r["rule"], r["learners"]) == (rule, learners)]
            mean, half = 100 * np.array([interval(r[scalar]) for r in row]).T
            chips, style = [r["chips"] for r in row], plots.look(place)
            label = RULES[rule].label if learners == 1 else f"{learners} {RULES[rule].label}"
            axis.errorbar(chips, mean, yerr=half, capsize=3, label=label, **style)
            seen = [(r["chips"], r["published"]) for r in row if r["published"] is not None]
            if scalar == "goodput" and seen:
                axis.plot(*zip(*seen, strict=True), "o", mfc="none", ms=7, color=style["color"])
        axis.set(xscale="log", xlabel="chips", ylim=(0, 103))
        axis.set_xticks(sorted({r["chips"] for r in own}), minor=False)
        axis.xaxis.set_major_formatter(lambda n, _: f"{n / 1e6:g} M")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    left.set(ylabel="share of the chips' seconds / %", title="stepping (circles: published)")
    right.set(title="stepping, in rounds that are ready in time")
    plots.legend(figure)
    plots.save(figure, path, f"{TITLE}\nmean and 95 % interval over repetitions")


def define_flags(values: flags.FlagValues) -> None:
    define = dialect.definer(values)
    define([COUNT], "learners", [2, 4, 8, 16], "numbers of learners, M")
    define([COUNT], "chips", [*CHIPS], "numbers of chips of all learners")
    define(SECONDS, "restart", 75.0, "seconds of a restart of all chips; assumed, see the page")
    define(SECONDS, "resize", 12.0, "seconds for which a learner stops where a slice leaves or "
           "returns; assumed")  # fmt: skip
    define(SECONDS, "grace", 1.0, "seconds of grace, of 24 steps of a second")
    define(Range(int, "[1, 100000]"), "rounds", 400, "rounds of 24 steps, simulated")
    define(Range(int, "[2, 10000]"), "repetitions", 10, "repetitions of every simulation")
    define(flags.DEFINE_bool, "training", True, "train digits under such clocks, too")
    define(flags.DEFINE_bool, "shared", False, "all workers of it draw from all examples")
    define([RATE], "learning_rates", [0.0125, 0.025, 0.05, 0.1, 0.2, 0.4], "of that training")
    define(Range(int, "[2, 1000]"), "seeds", 10, "of that training")
    dialect.define(values, "output")


def main(values: flags.FlagValues) -> None:
    if max(values.learners) > min(values.chips):
        raise ValueError(
            f"--learners has {max(values.learners)}, and --chips {min(values.chips)}: a learner "
            "needs a chip. Raise --chips or lower --learners."
        )
    with report.opened("quorum", values) as folder:
        found = carry_out(values, folder)
    print("\n" + verdict([r for r in found if "chips" in r]))


def carry_out(values: flags.FlagValues, folder: str) -> list[dict]:
    """Simulates and trains what the flags say, and writes it; returns its records."""
    lines = [("restart", 1), ("elastic", 1), *itertools.product(("all", "quorum"), values.learners)]
    cells = list(itertools.product(lines, values.chips))
    found = [cell(*line, chips, values) for line, chips in progress.bar(cells, unit="cell")]
    found += unequal(values)
    made = {
        "goodput": goodput_table(found, "goodput", tuple(RULES)),
        "in_time": goodput_table(found, "in_time", ("elastic", "quorum")),
        "unequal": unequal_table(found),
    }
    pictures = {"quorum.png": functools.partial(draw, found)}
    if values.training:
        trained = quorum_losses.measure(values.learning_rates, values.seeds, shared=values.shared)
        made["losses"] = quorum_losses.table(trained)
        pictures["quorum_losses.png"] = functools.partial(quorum_losses.draw, trained)
        found = [*found, *trained]
    report.write_tables(folder, TITLE, found, made, pictures)
    return found


if __name__ == "__main__":
    entry.main(define_flags, main)
