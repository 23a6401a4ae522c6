"""The protocol of all studies: which runs a comparison needs.

Every arm runs at all its learning rates with seed 0, and at the best of these, the finalists, with
all seeds. A rate at which a seed diverges is replaced by the next best. With slow input this is
phase "tune", without the delay unless the arm's policy depends on it. In phase "report" all seeds
run with the delay at the best rate.

With `widen`, the grid of rates grows: while an arm's best rate of seed 0 is the smallest or the
largest, the next rate beyond it is tried too. Where averaged weights are recorded, all this is done
for them too, except for phase "report": that has the best rate of the last weights.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.cluster import progress
from experiments.results import statistics
from experiments.results.records import run_of, whole_runs


class Run(NamedTuple):
    """The identity of a run: the `RUN_FIELDS` of its records."""

    arm: str
    speed: float | None  # R of slow input
    learning_rate: float
    seed: int
    phase: str  # "run"; where input is slow "tune" and then "report"

    @property
    def name(self) -> str:
        """The name of its folder."""
        return ",".join(f"{key}={value}" for key, value in self._asdict().items())


def next_run(
    study, arm: str, speed: float | None, rates: Sequence[float], records: Sequence[dict], *,
    seeds: int, widen: int,
) -> Run | None:  # fmt: skip
    """The next run that an arm needs at a speed; None if it is done.

    Args:
      rates: learning rates, with at most `widen` more at either end; records: of whole runs.
      seeds: 0 .. seeds - 1.
    """
    own = [r for r in records if (r["arm"], r["speed"]) == (arm, speed)]
    ended, phase = _by_run(own), "run" if speed is None else "tune"
    criteria = statistics.criteria(study.criterion, own)

    def missing(rates, seeds, phase):
        runs = (Run(arm, speed, rate, seed, phase) for rate in rates for seed in seeds)
        return next((run for run in runs if run not in ended), None)

    def finalists(criterion):  # records may be of further rates, that an earlier call asked for
        found = statistics.finalists(own, arm, speed, criterion, None)
        return [rate for rate in found if rate in rates]

    rates, left = sorted(rates), {0: widen, -1: widen}
    while not (first := missing(rates, [0], phase)) and len(rates) > 1:
        ends = {rates[0]: 0, rates[-1]: -1}
        best = [next(iter(finalists(c)), rates[0]) for c in criteria]  # all may diverge
        end = next((ends[rate] for rate in best if rate in ends and left[ends[rate]]), None)
        if end is None:
            break
        left[end] -= 1
        beyond = rates[end] ** 2 / rates[1 if end == 0 else -2]
        rates = sorted([*rates, float(f"{beyond:.6g}")])
    if first:
        return first
    best = dict.fromkeys(rate for c in criteria for rate in finalists(c)[: study.finalists])
    others = missing(best, range(seeds), phase)
    if others or speed is None:
        return others
    best = statistics.best_rate(own, arm, speed, study.criterion)
    return None if best is None else missing([best], range(seeds), "report")


def planned(rates: int, seeds: int, finalists: int | None, speed: float | None) -> int:
    """The number of runs of an arm at a speed, if none diverges."""
    last = rates if finalists is None else min(finalists, rates)
    return rates + last * (seeds - 1) + (seeds if speed is not None else 0)


def search(
    study, trainer, *, seeds: int, widen: int = 0, done: Sequence[dict] = (),
    on_record: Callable[[dict], None] = lambda record: None,
) -> tuple[list[dict], int]:  # fmt: skip
    """Trains the runs that the protocol needs.

    Args:
      study: a `Study`, its arms at its speeds; trainer: a `Trainer` of it.
      widen: number of rates that may be added at either end.
      done: records of an earlier call. Whole runs are not repeated; others continue.
      on_record: called with every new record.

    Returns:
      The records of whole runs, and the signal that stopped the search, or 0.
    """
    asked, steps, protocol = [], 0, {"seeds": seeds, "widen": widen}
    for speed in study.speeds or (None,):
        for arm in study.arms:
            rates = trainer.rates(arm, speed)
            asked.append((arm, speed, rates))
            steps += planned(len(rates), seeds, study.finalists, speed) * trainer.steps(arm, speed)
    records, stopped = list(done), 0
    trainer.prepare(g[:2] for g in asked if next_run(study, *g, whole_runs(records), **protocol))
    known = sum(r["step"] for r in done if r.get("ended") and _is_asked(r, asked, seeds))
    with progress.bar(total=steps, initial=known, unit="step", smoothing=0) as bar:
        for group in asked:
            while not stopped and (run := next_run(study, *group, whole_runs(records), **protocol)):
                new, stopped = _train(study, trainer, run, records, on_record, bar)
                records += new
    return whole_runs(records), stopped


def _is_asked(record, asked, seeds: int) -> bool:
    """Whether a record of an earlier call, which may have asked for others, counts in this one."""
    return record["seed"] < seeds and any(
        (record["arm"], record["speed"]) == (arm, speed) and record["learning_rate"] in rates
        for arm, speed, rates in asked
    )


def _train(study, trainer, run: Run, records, on_record, bar) -> tuple[list[dict], int]:
    """Trains a run; returns its new records, and the signal that stopped it or 0."""
    arm, new, before = study.arms[run.arm], [], bar.n
    known = {"study": study.name, **run._asdict(), **arm.words}
    slow = "" if run.speed is None else f", R {run.speed:g}, {run.phase}"
    bar.set_description(f"{arm.label}, lr {run.learning_rate:g}, seed {run.seed}{slow}")

    def write(record):
        new.append(known | record)
        on_record(new[-1])
        progress.note(bar, record, examples=trainer.examples)

    def came_to(step):
        bar.update(before + step - bar.n)

    stopped = trainer.train(run, _by_run(records).get(run, []), write, came_to)
    came_to(trainer.steps(run.arm, run.speed))  # if it ended early too
    return new, stopped


def _by_run(records) -> dict[Run, list[dict]]:
    found = {}
    for record in records:
        found.setdefault(Run(*run_of(record)), []).append(record)
    return found
