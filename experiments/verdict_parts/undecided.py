"""More seeds for what is undecided: the cheapest run first, until a budget of hours is spent.

A look has twice the seeds of the one before. Rates stay those that were chosen at the first look,
and all rates and arms that a run's claims ask of have equally many seeds, so that no later seed
chooses between them.
"""

import importlib
import math
import os
import pathlib
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import flags as absl_flags

from experiments import flags
from experiments.processes import distributed, lock
from experiments.results import archive, records, writers
from experiments.results.statistics import Comparison
from experiments.studies import search, study, trainer
from experiments.studies.search import Run
from experiments.tasks.digest import data_hash
from experiments.verdict_parts import looks, runs
from experiments.verdict_parts.claim import asked_of, decide
from experiments.verdict_parts.claims import CLAIMS
from experiments.verdict_parts.rule import UNDECIDED

DIR = "DIR"  # stands for the data in a recorded command
MODULE = "python -m experiments."


class Job(NamedTuple):
    """The next look at a recorded run.

    Fields:
      name: of `RUNS`; seeds: that it will have; runs: what is to be trained for it.
      hours: that it takes, as the seeds there are did, inf where there are none.
    """

    name: str
    seeds: int
    runs: tuple[Run, ...]
    hours: float


def jobs(recorded: Mapping[str, Comparison], *, most_hours: float) -> list[Job]:
    """The next looks that may decide something, the cheapest first, and last what never ran.

    Args:
      most_hours: of a look; dearer ones are left out.
    """
    found = [_job(name, recorded) for name in runs.RUNS if name in recorded]
    found = [job for job in found if job and job.runs and job.hours <= most_hours]
    new = [
        Job(name, 0, (), math.inf)
        for name, row in runs.RUNS.items() if name not in recorded and row.command
    ]  # fmt: skip
    return sorted(found, key=lambda job: job.hours) + new


def _job(name: str, recorded: Mapping[str, Comparison]) -> Job | None:
    compared = recorded[name]
    claims = [c for c in CLAIMS if name in c.runs and set(c.runs) <= set(recorded)]
    open_ones = [c for c in claims if decide(c, recorded).word == UNDECIDED]
    measured = {claim: asked_of(claim, name, recorded) for claim in claims}
    arms = {run[:2] for claim in open_ones for run in measured[claim]}
    asked = {run for runs in measured.values() for run in runs if run[:2] in arms}
    if not asked:
        return None
    seeds = 2 * looks.of(compared)[-1]["seeds"]
    ended = {records.run_of(r) for r in compared.records if r.get("ended", True)}
    wanted = [
        Run(arm, speed, rate, seed, "run" if speed is None else "report")
        for arm, speed, rate in sorted(asked, key=str)
        for seed in range(seeds)
    ]
    left = tuple(run for run in wanted if run not in ended)
    each = {ask: looks.seconds_per_seed(compared, {ask}) or 0.0 for ask in asked}
    hours = sum(each[run.arm, run.speed, run.learning_rate] for run in left) / 3600
    return Job(name, seeds, left, hours)


def run(
    *, hours: float, data: str, results: str, names: Sequence[str] = (), most_hours: float = 24.0,
    side_by_side: int = 1, delays: bool = False, folder: os.PathLike = archive.FOLDER,
) -> int:  # fmt: skip
    """Carries out looks until nothing is undecided, or the hours are spent.

    What was trained of a look that a signal or the budget ended is kept in its results folder, and
    the next call goes on there.

    Args:
      data: the folder that holds each task's own; names: of runs, all if empty.
      most_hours: of a look; results: for what is not yet recorded.
      delays: whether slow loads take their time; without, nothing new is seen of seconds.

    Returns:
      The signal that stopped it, or 0.
    """
    start = time.monotonic()
    while True:
        left = hours - (time.monotonic() - start) / 3600
        todo = jobs(runs.load(folder), most_hours=most_hours)
        todo = [job for job in todo if not names or job.name in names]
        may = [job for job in todo if left > 0 and (job.hours <= left or not job.seeds)]
        if not may:
            spent = "nothing is undecided that can be run" if not todo else (
                f"the next look, at {todo[0].name} with {todo[0].seeds} seeds, takes "
                f"{todo[0].hours:.2f} h, and {max(left, 0):.2f} h are left"
            )  # fmt: skip
            distributed.say(f"Done: {spent}.")
            return 0
        job = may[0]
        if not job.seeds:
            distributed.say(f"{job.name}: the first look")
            if stopped := _first_look(job, data, results, folder):
                return stopped
            continue
        distributed.say(
            f"{job.name}: {job.seeds} seeds, {len(job.runs)} runs, about {60 * job.hours:.0f} min"
        )
        if stopped := _look(job, data, results, side_by_side, delays, folder):
            return stopped


def _look(job: Job, data: str, results: str, side_by_side: int, delays: bool, folder) -> int:
    path = pathlib.Path(folder) / job.name
    command = archive.commands_of((path / archive.COMMAND).read_text(encoding="utf-8"))[0]
    place = os.path.join(results, job.name)
    chosen, task, recipe, values = setting_of(command, os.path.join(data, runs.RUNS[job.name].data))
    _check_data(path, task)
    with lock.held(place):
        settings = {"command": command, "seeds": job.seeds, "data": data_hash(task)}
        done = records.open_folder(place, settings)
        seconds = 0.0  # without delays, unless seconds are asked of
        if chosen.speeds and delays:
            seconds = study.known_step_seconds(chosen, task, recipe, None, place, done)
        about = {**flags.settings(values, recipe), "data": settings["data"]}
        setup = trainer.Setup(place, step_seconds=seconds, about=about)
        trained = trainer.trainer_of(chosen, task, recipe, setup)
        trainer.forget_ended(place, done)
        kept = trainer.before_checkpoints(place, done)
        with writers.open_writers(place, keep=kept) as write:
            found, stopped = search.carry_out(
                chosen, trained, job.runs, side_by_side=side_by_side, done=kept, on_record=write
            )
        if not stopped:
            archive.extend(path, found, [command])
    if not stopped:
        shutil.rmtree(place)
    return stopped


def _first_look(job: Job, data: str, results: str, folder) -> int:
    """Runs the study of a row that is not recorded, as its command does, and records it."""
    place, row = os.path.join(results, job.name), runs.RUNS[job.name]
    command = f"{MODULE}{row.command}"
    own, values = parsed(command, os.path.join(data, row.data), f"--output_dir={place}")
    try:
        study.run(own.STUDY, values, **({"fit": own.fit} if hasattr(own, "fit") else {}))
    except SystemExit as stop:  # saved, and the next call goes on
        if int(stop.code) <= 128:  # another run has the folder
            raise
        return int(stop.code) - 128
    archive.record(place, pathlib.Path(folder) / job.name, command)
    shutil.rmtree(place)
    return 0


def setting_of(command: str, data_dir: str):
    """(study, task, recipe, flags) of a recorded command, `python -m experiments.NAME --FLAGS`."""
    own, values = parsed(command, data_dir)
    task, recipe = flags.setting_from_flags(values)
    fit = getattr(own, "fit", lambda study, task, recipe, values: study)
    return fit(own.STUDY, task, recipe, values), task, recipe, values


def parsed(command: str, data_dir: str, *more: str):
    """(module of the study, its flags) of a recorded command."""
    _, _, module, *given = shlex.split(command.replace(f"--data_dir={DIR}", ""))
    own, values = importlib.import_module(module), absl_flags.FlagValues()
    study.define_flags(own.STUDY, values)
    values([module, *given, f"--data_dir={data_dir}", *more])
    return own, values


def _check_data(path: pathlib.Path, task) -> None:
    """Raises ValueError where the data are not those of the recorded run, as far as it says."""
    known = records.read_json(path / "settings.json", {}).get("data")
    if known is not None and known != data_hash(task):
        raise ValueError(
            f"{path.name} was recorded with other data: pass the --data that it was made of, or "
            "record it anew."
        )
