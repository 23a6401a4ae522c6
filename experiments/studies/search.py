"""One protocol for all studies: which runs a comparison needs.

Every arm runs at all its learning rates with seed 0, and at the finalists with all seeds; a rate at
which any seed diverges is out, and the next best takes its place. Where input is slow that is phase
"tune", without the delay unless the arm decides by it, and all seeds run with the delay at the best
rate: phase "report".
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from experiments.processes import distributed
from experiments.results import statistics
from experiments.results.records import run_of, whole_runs
from experiments.results.statistics import Criterion


class Run(NamedTuple):
    """What tells a run apart: the `RUN_FIELDS` of its records."""

    arm: str
    speed: float | None  # R of slow input
    learning_rate: float
    seed: int
    phase: str  # "run"; where input is slow "tune" and then "report"

    @property
    def name(self) -> str:
        """Of its folder."""
        return ",".join(f"{key}={value}" for key, value in self._asdict().items())


class Trainer(NamedTuple):
    """What the protocol asks for.

    Fields:
      train: `(run, its records so far, on_record) -> signal that stopped it, or 0`.
      rates: `(arm, speed) -> learning rates`; steps: `(arm, speed) -> T`.
      trajectory: run -> all that its numbers depend on; of equal ones the first is trained and the
        others copy its records. None: trained in any case.
      examples: of a step, of all workers.
    """

    train: Callable[[Run, Sequence[dict], Callable], int]
    rates: Callable[[str, float | None], Sequence[float]]
    steps: Callable[[str, float | None], int]
    trajectory: Callable[[Run], Hashable | None] = lambda run: None
    examples: int = 1


def lacking(
    own: Sequence[dict], arm: str, speed: float | None, rates: Sequence[float], *,
    seeds: int, criterion: Criterion, finalists: int | None,
) -> list[Run]:  # fmt: skip
    """The runs that an arm still needs at a speed, as far as its records tell; [] where it is done.

    Args:
      own: the records of its whole runs; rates: tried with it.
      seeds: 0 .. seeds - 1; finalists: rates that run with all of them, None for all.
    """
    ended, phase = _by_run(own), "run" if speed is None else "tune"

    def missing(rates, seeds, phase):
        runs = (Run(arm, speed, rate, seed, phase) for rate in rates for seed in seeds)
        return [run for run in runs if run not in ended]

    if first := missing(rates, [0], phase):
        return first
    best = statistics.finalists(own, arm, speed, criterion, finalists)
    if (others := missing(best, range(seeds), phase)) or speed is None:
        return others
    best = statistics.best_rate(own, arm, speed, criterion)
    return [] if best is None else missing([best], range(seeds), "report")


def planned(rates: int, seeds: int, finalists: int | None, speed: float | None) -> int:
    """How many runs an arm takes at a speed, if none diverges."""
    last = rates if finalists is None else min(finalists, rates)
    return rates + last * (seeds - 1) + (seeds if speed is not None else 0)


def search(
    study,
    trainer: Trainer,
    *,
    seeds: int,
    done: Sequence[dict] = (),
    on_record: Callable[[dict], None] = lambda record: None,
) -> tuple[list[dict], int]:
    """Trains what the protocol asks for.

    Args:
      study: a `Study`: its arms at its speeds.
      done: records of an earlier call: whole runs are not repeated, others go on after theirs.
      on_record: called with every new record.

    Returns:
      The records of whole runs, and the signal that stopped the search, or 0.
    """
    records, stopped = list(done), 0
    before = _by_run(whole_runs(done)).items()
    twins = {trainer.trajectory(run): known for run, known in before if run.arm in study.arms}
    groups = [(arm, speed) for speed in study.speeds or (None,) for arm in study.arms]
    counts = {
        group: planned(len(trainer.rates(*group)), seeds, study.finalists, group[1])
        * trainer.steps(*group)
        for group in groups
    }
    protocol = {"seeds": seeds, "criterion": study.criterion, "finalists": study.finalists}
    total, ready = sum(counts.values()), 0
    with distributed.bar(total=total, unit="step", mininterval=0.5, smoothing=0) as bar:
        for group in groups:
            own = [r for r in records if (r["arm"], r["speed"]) == group]
            rates = trainer.rates(*group)
            while runs := lacking(whole_runs(own), *group, rates, **protocol):
                new, stopped = _train(study, trainer, runs[0], own, twins, on_record, bar)
                own += new
                records += new
                if stopped:
                    return whole_runs(records), stopped
            ready += counts[group]
            bar.update(ready - bar.n)  # runs of an earlier call, and those that ended early
    return whole_runs(records), 0


def _train(study, trainer, run: Run, own, twins, on_record, bar) -> tuple[list[dict], int]:
    """The new records of a run, trained or copied from its twin, and the signal that stopped it."""
    arm, new, before = study.arms[run.arm], [], bar.n
    bar.set_description(", ".join([
        arm.label, f"lr {run.learning_rate:g}", f"seed {run.seed}",
        *([] if run.speed is None else [f"R {run.speed:g}", run.phase]),
    ]))  # fmt: skip
    known = {"study": study.name, **run._asdict()}
    known |= {"order": arm.order, "sync": arm.sync, "echo": arm.echo}

    def write(record):
        new.append(known | record | known)
        on_record(new[-1])
        if record.get("train/batch_loss") is not None:
            speed = record["step"] * trainer.examples / max(record["seconds"], 1e-9)
            loss = f"{record['train/batch_loss']:.4f}"
            bar.set_postfix(loss=loss, examples_per_s=f"{speed:,.0f}", refresh=False)
        bar.update(before + record["step"] - bar.n)

    kept = _by_run(own).get(run, [])
    trajectory = trainer.trajectory(run)
    if trajectory is not None and trajectory in twins:
        for record in twins[trajectory]:
            write(record)
        return new, 0
    stopped = trainer.train(run, kept, write)
    if not stopped:
        twins[trajectory] = kept + new
    return new, stopped


def _by_run(records) -> dict[Run, list[dict]]:
    found = {}
    for record in records:
        found.setdefault(Run(*run_of(record)), []).append(record)
    return found
