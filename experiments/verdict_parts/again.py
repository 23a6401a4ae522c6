"""Recorded runs trained again: does this code still give what the record says?"""

import os
import pathlib
import sys
from collections.abc import Sequence

from experiments.results import archive, records
from experiments.results.tables import markdown
from experiments.studies import search, trainer
from experiments.studies.search import Run
from experiments.verdict_parts.runs import RUNS
from experiments.verdict_parts.undecided import setting_of

SAME = ("step", "loads", "rounds")
SCALARS = ("train/loss", "valid/", "test/")


def compare(
    names: Sequence[str],
    *,
    data: str,
    arms: Sequence[str] = (),
    folder: os.PathLike = archive.FOLDER,
) -> str:
    """A table: the last record of the first seed of arms at their own rates, and that of today.

    Args:
      names: of recorded runs; data: the folder that holds each task's own.
      arms: names; the first one of every run if empty.
    """
    rows = []
    for name in names:
        compared = archive.load(name, folder)
        if compared is None:
            raise ValueError(f"{name!r} is not recorded in {os.fspath(folder)!r}: record it first.")
        for arm in arms or [next(iter(compared.arms))]:
            own = next((o for (k, _), o in compared.chosen.items() if k == arm and o.runs), None)
            if own is None:
                continue
            seed = min(own.runs)
            before = own.runs[seed][-1]
            now = trained(name, Run(*records.run_of(before)), data, folder)
            rows.append(_row(name, own, seed, before, now))
    return markdown(rows)


def trained(name: str, run: Run, data: str, folder) -> dict:
    """The last record of this run of the recorded ones, trained now, without waiting for loads."""
    path = pathlib.Path(folder) / name
    command = archive.commands_of((path / archive.COMMAND).read_text(encoding="utf-8"))[0]
    chosen, task, recipe, _ = setting_of(command, os.path.join(data, RUNS[name].data))
    trains = trainer.trainer_of(chosen, task, recipe, trainer.Setup())
    found, stopped = search.carry_out(chosen, trains, [run])
    if stopped:
        sys.exit(128 + stopped)
    return found[-1]


def _row(name, own, seed, before, now) -> dict:
    found = {
        k: (v, now.get(k)) for k, v in before.items()
        if v is not None and k.startswith(SCALARS) and isinstance(v, float)
    }  # fmt: skip
    farthest = max(found, key=lambda k: _apart(*found[k]))
    same = all(before.get(k) == now.get(k) for k in SAME if k in before)
    return {
        "run": name, "arm": own.label, "lr": f"{own.rate:g}", "seed": seed,
        "steps, loads, rounds": "equal" if same else "other",
        "farthest": farthest, "recorded": f"{found[farthest][0]:.6g}",
        "now": f"{found[farthest][1]:.6g}", "apart": f"{_apart(*found[farthest]):.1e}",
    }  # fmt: skip


def _apart(before: float, now: float) -> float:
    return abs(before - now) / max(abs(before), 1e-12)
