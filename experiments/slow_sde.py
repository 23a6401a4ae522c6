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

from absl import app, flags
from tqdm import tqdm

from experiments.flags import definer, names_of, whole_numbers
from experiments.results import drift_plots, html, records, tables
from experiments.results.statistics import interval
from experiments.slow_sde_parts import runs, theory
from experiments.slow_sde_parts.problems import PROBLEMS

FLAGS = flags.FLAGS
TOLERANCE = 0.05  # of the limit, at the smallest rate
CURVE = 25  # rates at which the picture's theory is computed
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
            drifts = workers * theory.strength(problem, values.slow_time, ends)
            known = theory_of(problem, plans, rules, rate, workers, values.slow_time)
            cell = {"problem": name, "workers": workers, "learning_rate": rate}
            cell |= {"seconds": time.perf_counter() - start}
            yield [
                cell
                | {"rule": key, "rounds": plan.rounds, "steps": plan.total_steps, "seed": i}
                | {"end": float(end), "drift": float(drift)}
                | told
                for key, plan, told, *found in zip(rules, plans, known, ends, drifts, strict=True)
                for i, (end, drift) in enumerate(zip(*found, strict=True))
            ]


def theory_of(problem, plans, rules, rate, workers, slow_time) -> list[dict]:
    """Of every rule: where it ends in theory, at the rate and in the limit, and that drift."""
    found = []
    for plan, rule in zip(plans, rules.values(), strict=True):
        limit = runs.limit(problem, rule, slow_time, workers)
        end = runs.expected(problem, slow_time, workers, rate, float(plan.periods[0]))
        drift = workers * float(theory.strength(problem, slow_time, limit))
        found.append({"theory": end, "limit": limit, "limit_drift": drift})
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
    """What parallel SGD and QSR are farthest off at the smallest rate, in the end and in drift."""
    ends, drifts = [], []
    for (problem, workers, rule), own in grouped(all_records).items():
        if rule in JUDGED:
            last = own[min(own)]
            where = f"{problem}, K = {workers}, {runs.RULES[rule].label}"
            for found, key, limit in ((ends, "end", "limit"), (drifts, "drift", "limit_drift")):
                mean, half = interval([r[key] / r[limit] - 1 for r in last])
                found.append((abs(mean), mean, half, where))
    if not ends:
        return ""
    lines = []
    for what, found in (("end", ends), ("drift", drifts)):
        _, mean, half, where = max(found)
        within = sum(f[0] + f[2] <= TOLERANCE for f in found)
        lines.append(
            f"{what}: {within} of {len(found)} are within {TOLERANCE:.0%} of theory, interval "
            f"included; farthest {100 * mean:+.1f} ± {100 * half:.1f} % ({where})"
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
    drift_plots.drift_panels(all_records, curves, titles, labels, path, title)
    html.of_folder(folder, title=title, command=html.command_line())
    cells = {(r["problem"], r["workers"], r["learning_rate"]): r["seconds"] for r in all_records}
    print(f"\n{verdict(all_records)}\n{sum(cells.values()):.0f} s of work. Written to {folder}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
