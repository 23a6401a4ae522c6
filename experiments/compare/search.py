"""The protocol of a study: which runs its comparison needs, one after the other.

Every arm runs at all its learning rates with seed 0, and at the best of these, the finalists, with
all seeds. A rate at which a seed diverges is replaced by the next best. With slow input this is
phase "tune", without the delay unless the arm's policy depends on it. In phase "report" all seeds
run with the delay at the best rate.

Where averaged weights are recorded, all this is done for them too, except for phase "report": that
has the best rate of the last weights.
"""

from collections.abc import Callable, Sequence

from experiments import progress
from experiments.report import statistics
from experiments.report.records import Run, run_of, whole_runs
from syncopate.refusals import UserError


def next_run(
    study,
    arm: str,
    speed: float | None,
    rates: Sequence[float],
    records: Sequence[dict],
    seeds: int,
) -> Run | None:
    """The next run that an arm needs at a speed, after these whole runs; None if it is done."""
    of_arm = [r for r in records if (r["arm"], r["speed"]) == (arm, speed)]
    ended, phase = _by_run(of_arm), "run" if speed is None else "tune"

    def missing(rates, seeds, phase):
        runs = (Run(arm, speed, rate, seed, phase) for rate in rates for seed in seeds)
        return next((run for run in runs if run not in ended), None)

    if first := missing(sorted(rates), [0], phase):
        return first
    data = statistics.data_of(of_arm)
    if (scalar := study.criterion.scalar) not in data and data.diverged.isna().any():
        names = ", ".join(sorted({name for r in of_arm for name in r if "/" in name}))
        raise UserError(
            f"the criterion of the study {study.name} is {scalar!r}, which no record of "
            f"{study.arms[arm].label} has: choose one of {names}, and valid/ in place of test/."
        )
    best = {}  # in their order; records may be of further rates, that an earlier call asked for
    for criterion in statistics.criteria(study.criterion, data):
        finalists = statistics.finalists(data, criterion)
        best |= dict.fromkeys([rate for rate in finalists if rate in rates][: study.finalists])
    others = missing(best, range(seeds), phase)
    if others or speed is None:
        return others
    best = statistics.best_rate(data, study.criterion)
    return None if best is None else missing([best], range(seeds), "report")


def planned(rates: int, seeds: int, finalists: int | None, speed: float | None) -> int:
    """The number of runs of an arm at a speed, if none diverges."""
    last = rates if finalists is None else min(finalists, rates)
    return rates + last * (seeds - 1) + (seeds if speed is not None else 0)


def search(
    study,
    trainer,
    *,
    seeds: int,
    done: Sequence[dict] = (),
    on_record: Callable[[dict], None] = lambda record: None,
) -> tuple[list[dict], int]:
    """Trains the runs that the protocol needs, of a study's arms at its speeds, by a `Trainer`.

    Args:
      done: records of an earlier call. Whole runs are not repeated; others continue.

    Returns:
      The records of whole runs, and the signal that stopped the search, or 0.
    """
    asked = [
        (arm, speed, trainer.rates(arm, speed))
        for speed in study.speeds or (None,)
        for arm in study.arms
    ]
    records, stopped, steps, before = list(done), 0, 0, 0
    for arm, speed, rates in asked:
        steps += planned(len(rates), seeds, study.finalists, speed) * trainer.steps(arm, speed)
        before += sum(  # an earlier call may have asked for others
            r["step"]
            for r in done
            if r.get("ended")
            and (r["arm"], r["speed"]) == (arm, speed)
            and r["learning_rate"] in rates
            and r["seed"] < seeds
        )
    trainer.prepare(g[:2] for g in asked if next_run(study, *g, whole_runs(records), seeds))
    with progress.bar(total=steps, initial=before, unit="step", smoothing=0) as bar:
        for group in asked:
            while not stopped and (run := next_run(study, *group, whole_runs(records), seeds)):
                new, stopped = _train(study, trainer, run, records, on_record, bar)
                records += new
    return whole_runs(records), stopped


def _train(study, trainer, run: Run, records, on_record, bar) -> tuple[list[dict], int]:
    """Trains a run; returns its new records, and the signal that stopped it or 0."""
    new, before = [], bar.n
    slow = "" if run.speed is None else f", R {run.speed:g}, {run.phase}"
    label = study.arms[run.arm].label
    bar.set_description(f"{label}, lr {run.learning_rate:g}, seed {run.seed}{slow}")

    def write(record):
        new.append(record)
        on_record(record)
        progress.note(bar, record, examples=trainer.examples)

    def came_to(step):
        bar.update(before + step - bar.n)

    outcome = trainer.train(run, _by_run(records).get(run, []), write, came_to)
    came_to(trainer.steps(run.arm, run.speed))  # if it ended early too
    return new, outcome.stopped


def _by_run(records) -> dict[Run, list[dict]]:
    runs = {}
    for record in records:
        runs.setdefault(run_of(record), []).append(record)
    return runs
