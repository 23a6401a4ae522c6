"""Recorded runs, trained: more seeds of what is undecided, and a recorded seed once more.

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
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import flags as absl_flags

from experiments.cluster import files, lock, processes
from experiments.cluster.digest import data_hash
from experiments.results import archive, claims, records
from experiments.results.rule import UNDECIDED, Claim, history
from experiments.results.statistics import Comparison
from experiments.results.tables import markdown
from experiments.results.verdict_page import load
from experiments.study import flags, search, study, trainer
from experiments.study.search import Run

DIR = "DIR"  # stands for the data in a recorded command
MODULE = "python -m experiments."
SCALARS = ("train/loss", "valid/", "test/")
RESULTS = "results/verdicts"  # for what is not recorded yet


class Job(NamedTuple):
    """The next look at a recorded run.

    Fields:
      name: of `RUNS`; seeds: that it will have, 0 for the first look; runs: to be trained for it.
      hours: that it takes, as the seeds there are did, inf where there are none.
    """

    name: str
    seeds: int
    runs: tuple[Run, ...]
    hours: float


def jobs(recorded: Mapping[str, Comparison], claimed: Sequence[Claim]) -> list[Job]:
    """The next looks that may decide something, the cheapest first, and last what never ran."""
    found = [_job(name, recorded, claimed) for name in claims.RUNS if name in recorded]
    new = [
        Job(name, 0, (), math.inf)
        for name, row in claims.RUNS.items() if name not in recorded and row.command
    ]  # fmt: skip
    return sorted((job for job in found if job.runs), key=lambda job: job.hours) + new


def _job(name: str, recorded: Mapping[str, Comparison], claimed: Sequence[Claim]) -> Job:
    compared, asked, undecided = recorded[name], set(), set()
    for claim in claimed:
        if name in claim.runs and set(claim.runs) <= set(recorded):
            verdict = history(claim, recorded)[-1]
            for run, of in zip(claim.runs, verdict.runs, strict=False):
                asked |= set(of) if run == name else set()
                if run == name and verdict.word == UNDECIDED:
                    undecided |= {(arm, speed) for arm, speed, _ in of}
    asked = {run for run in asked if run[:2] in undecided}
    seeds = 2 * archive.seeds_at_looks([compared])[-1][0]
    ended = {records.run_of(r) for r in compared.records if r["ended"]}
    wanted = [
        Run(arm, speed, rate, seed, "run" if speed is None else "report")
        for arm, speed, rate in sorted(asked, key=str)
        for seed in range(seeds)
    ]
    left = tuple(run for run in wanted if run not in ended)
    each = {ask: archive.seconds_per_seed(compared, {ask}) or 0.0 for ask in asked}
    hours = sum(each[run.arm, run.speed, run.learning_rate] for run in left) / 3600
    return Job(name, seeds, left, hours)


def decide(
    claimed: Sequence[Claim], *, hours: float, data: str, names: Sequence[str] = (),
    delays: bool = False, results: str = RESULTS, folder: os.PathLike = archive.FOLDER,
) -> int:  # fmt: skip
    """Carries out looks until nothing is undecided, or the hours are spent.

    What was trained of a look that a signal ended is kept in its results folder, and the next call
    goes on there.

    Args:
      data: the folder that holds each task's own; names: of runs, all if empty.
      delays: whether slow loads take their time; without, nothing new is seen of seconds.
      results: for what is not yet recorded.

    Returns:
      The signal that stopped it, or 0.
    """
    start = time.monotonic()
    while True:
        left = hours - (time.monotonic() - start) / 3600
        todo = [job for job in jobs(load(folder), claimed) if not names or job.name in names]
        may = [job for job in todo if left > 0 and (job.hours <= left or not job.seeds)]
        if not may:
            spent = "nothing is undecided that can be run" if not todo else (
                f"the next look, at {todo[0].name} with {todo[0].seeds} seeds, takes "
                f"{todo[0].hours:.2f} h, and {max(left, 0):.2f} h are left"
            )  # fmt: skip
            processes.say(f"Done: {spent}.")
            return 0
        job, about = may[0], f"{may[0].seeds} seeds, {len(may[0].runs)} runs, about "
        about = f"{about}{60 * job.hours:.0f} min" if job.seeds else "the first look"
        processes.say(f"{job.name}: {about}")
        place, own = os.path.join(results, job.name), claims.RUNS[job.name]
        target, data_dir = pathlib.Path(folder) / job.name, os.path.join(data, own.data)
        if job.seeds:
            stopped = _look(job, target, place, data_dir, delays)
        else:
            stopped = _first_look(f"{MODULE}{own.command}", target, place, data_dir)
        if stopped:
            return stopped
        shutil.rmtree(place)


def _look(job: Job, target: pathlib.Path, place: str, data_dir: str, delays: bool) -> int:
    command = archive.command_of(target.name, target.parent)
    chosen, task, recipe, values = setting_of(command, data_dir)
    _check_data(target, task)
    with lock.held(place):
        settings = {"command": command, "seeds": job.seeds, "data": data_hash(task)}
        done = records.open_folder(place, settings)
        seconds = 0.0  # without delays, unless seconds are asked of
        if chosen.speeds and delays:
            seconds = trainer.step_seconds(chosen, task, recipe, None, place, done)
        about = {**flags.settings(values, recipe), "data": settings["data"]}
        trained = trainer.Trainer(
            chosen, task, recipe, folder=place, step_seconds=seconds, about=about
        )
        kept = trainer.kept_records(place, done)
        with records.writing(place, keep=kept) as write:
            found, stopped = search.carry_out(chosen, trained, job.runs, done=kept, on_record=write)
        if not stopped:
            archive.extend(target, found, [command])
    return stopped


def _first_look(command: str, target: pathlib.Path, place: str, data_dir: str) -> int:
    """Runs the study of a row that is not recorded, as its command does, and records it."""
    own, values = parsed(command, data_dir, f"--output_dir={place}")
    try:
        study.run(own.STUDY, values)
    except SystemExit as stop:  # saved, and the next call goes on
        if int(stop.code) <= 128:  # another run has the folder
            raise
        return int(stop.code) - 128
    archive.record(place, target, command)
    return 0


def setting_of(command: str, data_dir: str):
    """(study, task, recipe, flags) of a recorded command, `python -m experiments.NAME --FLAGS`."""
    own, values = parsed(command, data_dir)
    whole, chosen, task, recipe = study.asked(own.STUDY, values)
    return whole._replace(arms={**whole.arms, **chosen.arms}), task, recipe, values


def parsed(command: str, data_dir: str, *more: str):
    """(module of the study, its flags) of a recorded command."""
    _, _, module, *given = shlex.split(command.replace(f"--data_dir={DIR}", ""))
    own, values = importlib.import_module(module), absl_flags.FlagValues()
    study.define_flags(own.STUDY, values)
    values([module, *given, f"--data_dir={data_dir}", *more])
    return own, values


def _check_data(path: pathlib.Path, task) -> None:
    """Raises ValueError where the data are not those of the recorded run, as far as it says."""
    known = files.read_json(path / "settings.json", {}).get("data")
    if known is not None and known != data_hash(task):
        raise ValueError(
            f"{path.name} was recorded with other data: pass the --data that it was made of, or "
            "record it anew."
        )


def train_again(
    names: Sequence[str], *, data: str, arms: Sequence[str] = (), folder=archive.FOLDER
) -> str:
    """A table: the last record of the first seed of arms at their own rates, and that of today.

    Args:
      names: of recorded runs; data: the folder that holds each task's own.
      arms: names; the first one of every run if empty.
    """
    rows = []
    for name in names:
        if (compared := archive.load(name, folder)) is None:
            raise ValueError(f"{name!r} is not recorded in {os.fspath(folder)!r}: record it first.")
        asked = arms or [next(iter(compared.arms))]
        at = {own.arm: own for own in compared.at(compared.speeds[0]) if own.runs}
        for own in (at[arm] for arm in asked if arm in at):
            before = own.runs[min(own.runs)][-1]
            command, data_dir = archive.command_of(name, folder), claims.RUNS[name].data
            chosen, task, recipe, _ = setting_of(command, os.path.join(data, data_dir))
            trains = trainer.Trainer(chosen, task, recipe)  # without delays
            run = Run(*records.run_of(before))
            found, stopped = search.carry_out(chosen, trains, [run])
            if stopped:
                sys.exit(128 + stopped)
            rows.append({"run": name, "arm": own.label} | _apart(before, found[-1]))
    return markdown(rows)


def _apart(before: Mapping, now: Mapping) -> dict[str, str]:
    """How far two last records are from each other, where they are farthest."""
    scalars = [k for k, v in before.items() if k.startswith(SCALARS) and isinstance(v, float)]
    apart = {k: abs(before[k] - now[k]) / max(abs(before[k]), 1e-12) for k in scalars}
    farthest = max(apart, key=apart.get)
    same = all(before[k] == now[k] for k in ("step", "loads", "rounds") if k in before)
    return {
        "lr": f"{before['learning_rate']:g}", "seed": str(before["seed"]),
        "steps, loads, rounds": "equal" if same else "other",
        "farthest": farthest, "recorded": f"{before[farthest]:.6g}",
        "now": f"{now[farthest]:.6g}", "apart": f"{apart[farthest]:.1e}",
    }  # fmt: skip
