r"""The theory behind QSR, seen: how far SGD drifts along a manifold of minimisers under each rule.

    python -m experiments.slow_sde                            # two problems, K = 2 .. 16
    python -m experiments.slow_sde --problems=valley --workers=8 --rates=0.1,0.05

SGD that has reached a manifold of minimisers drifts along it, slowly, to where it is flatter. The
Slow SDEs of Gu et al. 2023 and 2024 (slow_drift.py) say how far K workers get in S / eta^2 steps:
as far with H = 4 as with a sync in every step if eta is small, farther with H ~ 1 / eta, and with
QSR, H ~ 1 / eta^2, as if the drift were K times as strong. Every run is plain SGD at a constant
rate under a plan of `local_opt`; what it ends at is compared with the theory at that rate and in
the limit, and with how strong a drift must have been to get there.
"""

import functools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

import local_opt
from experiments import slow_drift as theory
from experiments.cluster import files
from experiments.results import plots, records, report, tables
from experiments.results.statistics import interval
from experiments.slow_drift import PROBLEMS, Problem
from experiments.study.flags import definer, names_of, positive_numbers, whole_numbers

FLAGS = flags.FLAGS
TOLERANCE = 0.05  # of the limit, at the smallest rate
CURVE = 25  # rates at which the picture's theory is computed
COMPARED = (  # what a record has, with what
    ("1. ends at the smallest rate, the limit's", "end", "limit"),
    ("2. drifts at the smallest rate, the limit's", "drift", "limit_drift"),
    ("3. ends at all rates, theory's at that rate", "end", "theory"),
)
JUDGED = ("parallel", "qsr")  # the others are on their way to the limit for longer


class Rule(NamedTuple):
    """When workers meet: every floor(c / eta^power) steps."""

    label: str
    power: int
    coefficient: float
    beta: float  # lim eta H


RULES = {
    "parallel": Rule("parallel", 0, 1, 0.0),
    "constant": Rule("H = 4", 0, 4, 0.0),
    "inverse": Rule("H = 1 / η", 1, 1.0, 1.0),
    "qsr": Rule("QSR, H = 0.5 / η²", 2, 0.5, math.inf),
}
LARGEST = 0.25  # a rate, at which H = 8 in a round of QSR, and steps are far from diverging


def plan_of(rule: Rule, rate: float, slow_time: float) -> local_opt.SyncPlan:
    """The library's plan of S / eta^2 steps at a constant rate."""
    if not 0 < rate <= LARGEST:
        raise ValueError(
            f"the rate is {rate!r}: the theory is of small ones; pass some in 0 .. {LARGEST}."
        )
    steps = round(slow_time / rate**2)
    if not rule.power:
        return local_opt.constant(int(rule.coefficient), total_steps=steps)
    # The margin keeps what should be a whole number from ending a float's width below it.
    alpha = rule.coefficient ** (1 / rule.power) * (1 + 1e-12)
    return local_opt.power_rule(rate, total_steps=steps, alpha=alpha, h_base=1, power=rule.power)


def limit(problem: Problem, rule: Rule, slow_time: float, workers: int) -> float:
    """What the theory has at the end of a run as the rate goes to 0."""
    return float(theory.flow(problem, theory.in_the_limit, slow_time, workers, rule.beta)[-1])


def expected(problem: Problem, slow_time: float, workers: int, rate: float, period: float) -> float:
    """What the theory has at the end of a run at a rate, with rounds of `period` steps."""
    return float(theory.flow(problem, theory.at_a_rate, slow_time, workers, rate, period)[-1])


# Runs: parameters are [P, G, R, K], G rules by R repetitions by K workers, and the noises
# [N, R, K], for all rules see the same.
def worker_steps(problem: Problem, params, noises, rate, syncs):
    """One step of every worker, and the mean of those who meet: bool[G], the rules' workers."""
    gradient = jax.grad(problem.loss)
    for axis, over in ((-1, -1), (-1, -1), (1, None)):
        gradient = jax.vmap(gradient, in_axes=(axis, over), out_axes=axis)
    params = params - rate * gradient(params, noises)
    mean = jnp.mean(params, axis=3, keepdims=True)
    return jnp.where(syncs[None, :, None, None], mean, params)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _ends(problem, workers, repetitions, syncs, steps, rate, seed):
    """[G, R]: what is measured of the workers' mean, brought to the manifold without noise."""
    # The generator is the fast one, on a CPU: noises are most of the work otherwise.
    key = jax.random.fold_in(jax.random.key(seed, impl="unsafe_rbg"), steps)
    start = jnp.array(problem.start)[:, None, None, None]
    params = jnp.broadcast_to(start, (len(start), syncs.shape[1], repetitions, workers))

    def step(t, params):
        shape = problem.num_noises, repetitions, workers
        noises = jax.random.normal(jax.random.fold_in(key, t), shape)
        return worker_steps(problem, params, noises, rate, syncs[t])

    params = jax.lax.fori_loop(0, steps, step, params)
    mean = jnp.mean(params, axis=3, keepdims=True)
    silent, apart = jnp.zeros((problem.num_noises, repetitions, 1)), jnp.zeros(len(syncs[0]), bool)
    settle = jnp.int32(20 / rate)  # steps, in which a distance of curvature 0.5 shrinks to exp(-10)
    mean = jax.lax.fori_loop(
        0, settle, lambda t, p: worker_steps(problem, p, silent, rate, apart), mean
    )
    return problem.measure(mean[..., 0])


def measure_ends(
    problem: Problem, plans: Sequence[local_opt.SyncPlan], rate: float, *,
    workers: int, repetitions: int, seed: int, longest: int | None = None,
) -> np.ndarray:  # fmt: skip
    """float32[G, R]: what is measured where runs end, of G plans of equally many steps.

    Args:
      longest: steps for which a program is compiled that shorter runs share; the plans' if None.
    """
    steps = plans[0].total_steps
    syncs = np.zeros((max(longest or steps, steps), len(plans)), bool)
    for column, plan in zip(syncs.T, plans, strict=True):
        column[plan.ends - 1] = True  # workers meet after the last step of all
    return np.asarray(_ends(problem, workers, repetitions, syncs, steps, rate, seed))


# What the runs say.
def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define, integer, names = definer(values), flags.DEFINE_integer, flags.DEFINE_list
    define(names, "problems", list(PROBLEMS), f"of {', '.join(PROBLEMS)}")
    define(names, "rules", list(RULES), f"of {', '.join(RULES)}")
    define(names, "workers", ["2", "4", "8", "16"], "numbers of workers, K")
    define(names, "rates", ["0.1", "0.05", "0.02", "0.01"], f"eta, at most {LARGEST}")
    define(integer, "repetitions", 64, "of every run", lower_bound=2)
    define(integer, "seed", 0, "of the noise", lower_bound=0)
    define(flags.DEFINE_float, "slow_time", 4.0, "S: runs have S / eta^2 steps", lower_bound=1)
    define(flags.DEFINE_string, "output_dir", "results/slow_sde", "gets what is written")


def measure(values, name: str, workers: int, rate: float, longest: int) -> Iterator[dict]:
    """A record per run of a problem, a number of workers and a rate: ends, drifts, and theory."""
    problem, start, slow_time = PROBLEMS[name], time.perf_counter(), values.slow_time
    rules = {key: RULES[key] for key in values.rules}
    plans = [plan_of(rule, rate, slow_time) for rule in rules.values()]
    ends = measure_ends(
        problem, plans, rate, workers=workers, repetitions=values.repetitions, seed=values.seed,
        longest=longest,
    )  # fmt: skip
    cell = {"problem": name, "workers": workers, "learning_rate": rate}
    cell["seconds"] = time.perf_counter() - start
    limits = [limit(problem, rule, slow_time, workers) for rule in rules.values()]
    strengths = theory.strength(problem, slow_time, np.column_stack([ends, limits]))
    drifts = workers * np.asarray(strengths)
    for key, plan, own, at_zero, (*of_runs, of_limit) in zip(
        rules, plans, ends, limits, drifts, strict=True
    ):
        told = expected(problem, slow_time, workers, rate, float(plan.periods[0]))
        known = {"theory": told, "limit": at_zero, "limit_drift": float(of_limit)}
        made = {"rule": key, "rounds": plan.rounds, "steps": plan.total_steps}
        for i, (end, drift) in enumerate(zip(own, of_runs, strict=True)):
            yield cell | made | {"seed": i, "end": float(end), "drift": float(drift)} | known


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
            {"K": workers, "rule": RULES[rule].label}
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
            where = f"{problem}, K = {workers}, {RULES[rule].label}, η = {rate:g}"
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


def draw(all_records: Sequence[Mapping], slow_time: float, path: str, title: str) -> None:
    """Writes a PNG: a row per problem, a column per K, a colour per rule; theory as lines."""
    groups = grouped(all_records)
    problems, widths, rules = (list(dict.fromkeys(k)) for k in zip(*groups, strict=True))
    size = 1 + 3.3 * len(widths), 1.3 + 3.4 * len(problems)
    figure, axes = plots.panes(len(problems), len(widths), size, sharex=True, sharey="row")
    for (name, workers, rule), own in groups.items():
        problem, axis = PROBLEMS[name], axes[problems.index(name)][widths.index(workers)]
        style, ends = (
            plots.look(rules.index(rule)),
            [limit(problem, RULES[rule], slow_time, workers)],
        )
        grid = max(own) * np.arange(1, CURVE + 1) / CURVE
        for rate in grid:  # with periods that need not be whole, to be drawn
            period = RULES[rule].coefficient / rate ** RULES[rule].power
            ends.append(expected(problem, slow_time, workers, rate, period))
        mean, half = np.array([interval([r["end"] for r in of]) for of in own.values()]).T
        axis.plot([0, *grid], ends, **style, linewidth=1.2)
        axis.plot(0, ends[0], "D", color=style["color"], ms=4, clip_on=False)
        axis.errorbar([*own], mean, yerr=half, fmt="o", ms=4, capsize=3, color=style["color"])
        axis.plot([], [], marker="o", ms=4, label=RULES[rule].label, **style)
        axis.set_title(f"{problem.title}\nK = {workers}", fontsize="medium")
        axis.set(xlim=(-0.004, None), xlabel="learning rate η")
        axis.set_ylabel(f"{problem.measured} at the end")
        axis.grid(alpha=0.3)
        axis.label_outer()
    plots.legend(figure)
    lines = "points: mean and 95 % interval; lines: theory, its limit at 0"
    plots.save(figure, path, f"{title}\n{lines}")


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    names_of(values, "problems", PROBLEMS)
    names_of(values, "rules", RULES)
    counts, folder = whole_numbers(values, "workers"), values.output_dir
    rates = sorted(set(positive_numbers(values, "rates")), reverse=True)
    longest = plan_of(RULES["parallel"], min(rates), values.slow_time).total_steps
    settings = {k: values[k].value for k in ("repetitions", "seed", "slow_time")}
    records.open_folder(folder, settings, overwrite=True)
    cells = [(name, k, rate) for name in values.problems for k in counts for rate in rates]
    all_records = [r for cell in tqdm(cells, unit="cell") for r in measure(values, *cell, longest)]
    records.write_lines(os.path.join(folder, records.METRICS), all_records)
    for name in values.problems:
        text = table(all_records, name)
        files.write_whole(os.path.join(folder, f"table_{name}.md"), text + "\n")
        print(f"\n{PROBLEMS[name].title}: {PROBLEMS[name].measured} at the end\n\n{text}")
    title = f"Where SGD drifts in {values.slow_time:g} / η² steps, {values.repetitions} repetitions"
    draw(all_records, values.slow_time, os.path.join(folder, "slow_sde.png"), title)
    report.write_page(folder, title)
    seconds = {(r["problem"], r["workers"], r["learning_rate"]): r["seconds"] for r in all_records}
    print(f"\n{verdict(all_records)}\n{sum(seconds.values()):.0f} s of runs. Written to {folder}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
