r"""The theory behind QSR, seen: how far SGD drifts along a manifold of minimisers under each rule.

    python -m experiments.slow_sde                            # two problems, K = 2 .. 16
    python -m experiments.slow_sde --problems=valley --workers=8 --rates=0.1,0.05

SGD that has reached a manifold of minimisers drifts along it, slowly, to where it is flatter. The
Slow SDEs of Gu et al. 2023 and 2024 (https://arxiv.org/abs/2303.01215,
https://arxiv.org/abs/2310.14423) say how far K workers get in S / eta^2 steps: as far with H = 4 as
with a sync in every step if eta is small, farther with H ~ 1 / eta, and with QSR, H ~ 1 / eta^2, as
if the drift were K times as strong. Every run is plain SGD at a constant rate under a plan of
`local_opt`; what it ends at is compared with the theory (`slow_sde_parts/theory.py`) at that rate
and in the limit, and with how strong a drift must have been to get there.
"""

import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from absl import app, flags
from tqdm import tqdm

from experiments.flags import definer, names_of, whole_numbers
from experiments.results import html, records, tables
from experiments.results.statistics import interval
from experiments.slow_sde_parts import pictures, runs, theory
from experiments.slow_sde_parts.problems import PROBLEMS

FLAGS = flags.FLAGS
TOLERANCE = 0.05  # of the limit, at the smallest rate
CURVE = 25  # rates at which the picture's theory is computed
COMPARED = (  # what a record has, with what
    ("1. ends at the smallest rate, the limit's", "end", "limit"),
    ("2. drifts at the smallest rate, the limit's", "drift", "limit_drift"),
    ("3. ends at all rates, theory's at that rate", "end", "theory"),
)
JUDGED = ("parallel", "qsr")  # the others are on their way to the limit for longer


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define, integer, names = definer(values), flags.DEFINE_integer, flags.DEFINE_list
    define(names, "problems", list(PROBLEMS), f"of {', '.join(PROBLEMS)}")
    define(names, "rules", list(runs.RULES), f"of {', '.join(runs.RULES)}")
    define(names, "workers", ["2", "4", "8", "16"], "numbers of workers, K")
    define(names, "rates", ["0.1", "0.05", "0.02", "0.01"], f"eta, at most {runs.LARGEST}")
    define(integer, "repetitions", 64, "of every run", lower_bound=2)
    define(integer, "seed", 0, "of the noise", lower_bound=0)
    define(flags.DEFINE_float, "slow_time", 4.0, "S: runs have S / eta^2 steps", lower_bound=1)
    define(flags.DEFINE_string, "output_dir", "results/slow_sde", "gets what is written")


def rates_of(values: flags.FlagValues) -> list[float]:
    """--rates, falling; UsageError where one is no number in range."""
    found = []
    for text in values.rates:
        try:
            found.append(float(text))
        except ValueError:
            found.append(0.0)
    if bad := [t for t, rate in zip(values.rates, found, strict=True)
               if not 0 < rate <= runs.LARGEST]:  # fmt: skip
        raise app.UsageError(
            f"--rates has {bad}: the theory is of small rates; pass numbers in 0 .. {runs.LARGEST}."
        )
    return sorted(set(found), reverse=True)


def measure(
    values: flags.FlagValues, worker_counts: Sequence[int], rates: Sequence[float]
) -> Iterator[list[dict]]:
    """The records of the runs of a problem, a number of workers and a rate: one per run."""
    rules = {name: runs.RULES[name] for name in values.rules}
    cells = list(itertools.product(values.problems, worker_counts, rates))
    longest = runs.plan_of(runs.RULES["parallel"], min(rates), values.slow_time).total_steps
    with tqdm(cells, unit="cell") as bar:
        for name, workers, rate in bar:
            bar.set_description(f"{name}, K = {workers}, rate {rate:g}")
            problem, start = PROBLEMS[name], time.perf_counter()
            plans = [runs.plan_of(rule, rate, values.slow_time) for rule in rules.values()]
            ends = runs.measure_ends(
                problem, plans, rate, workers=workers, repetitions=values.repetitions,
                seed=values.seed, longest=longest,
            )  # fmt: skip
            seconds = time.perf_counter() - start
            cell = {"problem": name, "workers": workers, "learning_rate": rate, "seconds": seconds}
            known = theory_of(problem, rules, plans, ends, rate, workers, values.slow_time)
            yield [
                cell
                | {"rule": key, "rounds": plan.rounds, "steps": plan.total_steps, "seed": i}
                | {"end": float(end), "drift": float(drift)}
                | told
                for key, plan, own, (drifts, told) in zip(rules, plans, ends, known, strict=True)
                for i, (end, drift) in enumerate(zip(own, drifts, strict=True))
            ]


def theory_of(problem, rules, plans, ends, rate, workers, slow_time) -> list[tuple]:
    """Of every rule: the drift of each of its ends [R]; where theory has the end, and its drift."""
    limits = [runs.limit(problem, rule, slow_time, workers) for rule in rules.values()]
    strengths = theory.strength(problem, slow_time, np.column_stack([ends, limits]))
    drifts = workers * np.asarray(strengths)
    found = []
    for plan, limit, (*of_runs, drift) in zip(plans, limits, drifts, strict=True):
        end = runs.expected(problem, slow_time, workers, rate, float(plan.periods[0]))
        found.append((of_runs, {"theory": end, "limit": limit, "limit_drift": float(drift)}))
    return found


def grouped(all_records: Sequence[Mapping]) -> dict[tuple, dict[float, list[Mapping]]]:
    """{(problem, K, rule): {rate: its runs}}, in the order of the records."""
    found = {}
    for r in all_records:
        own = found.setdefault((r["problem"], r["workers"], r["rule"]), {})
        own.setdefault(r["learning_rate"], []).append(r)
    return found


def table(all_records: Sequence[Mapping], name: str) -> str:
    """Markdown: a row per rule and number of workers, of one problem.

    "off" is what the measured mean is above the limit, and "drift" the strength that explains where
    runs ended, in those of parallel SGD, both at the smallest rate.
    """
    rows = []
    for (problem, workers, rule), own in grouped(all_records).items():
        if problem != name:
            continue
        last, least = own[min(own)], min(own)
        limit = last[0]["limit"]
        off = [100 * (r["end"] / limit - 1) for r in last]
        rows.append(
            {"K": workers, "rule": runs.RULES[rule].label}
            | {f"η = {k:g}": tables.show([r["end"] for r in v], "{:.4f}") for k, v in own.items()}
            | {f"theory at {least:g}": f"{last[0]['theory']:.4f}", "theory, η → 0": f"{limit:.4f}"}
            | {"off / %": tables.show(off, "{:+.1f}").replace("± +", "± ")}
            | {"drift": tables.show([r["drift"] for r in last], "{:.3f}")}
            | {"theory's drift": f"{last[0]['limit_drift']:.3f}"}
        )
    return tables.markdown(rows)


def verdict(all_records: Sequence[Mapping]) -> str:
    """How far from theory the farthest are: from the limit at the smallest rate, and at all rates.

    The limit is asked of parallel SGD and QSR alone, and theory at a rate of every rule.
    """
    found = {}
    for (problem, workers, rule), own in grouped(all_records).items():
        for rate, of_runs in own.items():
            where = f"{problem}, K = {workers}, {runs.RULES[rule].label}, η = {rate:g}"
            judged = rate == min(own) and rule in JUDGED
            for what, key, known in COMPARED if judged else COMPARED[2:]:
                mean, half = interval([r[key] / r[known] - 1 for r in of_runs])
                found.setdefault(what, []).append((abs(mean), mean, half, where))
    lines = []
    for what, each in sorted(found.items()):
        _, mean, half, where = max(each)
        within = sum(size + spread <= TOLERANCE for size, _, spread, _ in each)
        lines.append(
            f"{what}: {within} of {len(each)} within {TOLERANCE:.0%}, interval included; farthest "
            f"{100 * mean:+.1f} ± {100 * half:.1f} % ({where})"
        )
    return "\n".join(lines)


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    names_of(values, "problems", PROBLEMS)
    names_of(values, "rules", runs.RULES)
    counts, rates, folder = whole_numbers(values, "workers"), rates_of(values), values.output_dir
    settings = {k: values[k].value for k in ("repetitions", "seed", "slow_time")}
    records.open_folder(folder, settings, overwrite=True)
    all_records = [r for cell in measure(values, counts, rates) for r in cell]
    records.write_lines(os.path.join(folder, records.METRICS), all_records)
    for name in values.problems:
        text = table(all_records, name)
        records.write_whole(os.path.join(folder, f"table_{name}.md"), text + "\n")
        print(f"\n{PROBLEMS[name].title}: {PROBLEMS[name].measured} at the end\n\n{text}")
    titles = {name: (p.title, p.measured) for name, p in PROBLEMS.items()}
    labels = {name: runs.RULES[name].label for name in values.rules}
    title = f"Where SGD drifts in {values.slow_time:g} / η² steps, {values.repetitions} repetitions"
    path = os.path.join(folder, "slow_sde.png")
    grid = [rates[0] * i / CURVE for i in range(1, CURVE + 1)]
    curves = {
        (name, workers, rule): runs.curve(
            PROBLEMS[name], runs.RULES[rule], values.slow_time, workers, grid
        )
        for name, workers, rule in grouped(all_records)
    }
    pictures.drift_panels(all_records, curves, titles, labels, path, title)
    html.of_folder(folder, title=title, command=html.command_line())
    cells = {(r["problem"], r["workers"], r["learning_rate"]): r["seconds"] for r in all_records}
    print(f"\n{verdict(all_records)}\n{sum(cells.values()):.0f} s of runs. Written to {folder}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
