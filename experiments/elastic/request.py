"""What is asked of a folder whose run had another number of workers, and what the run then keeps.

All changes so far stand in the settings, as "elastic", and so in every checkpoint, which is what
counts: settings.json is written after it.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from experiments.processes import distributed
from experiments.results import manifest, records
from experiments.tasks.base import Recipe, Task
from experiments.training import checkpoint, config
from experiments.training.config import Sizes
from local_opt.elastic import POLICIES

NAME = "elastic"  # of the flag, and of the changes in settings
SPLIT = ("workers", "units_per_step")
MAY_DIFFER = {NAME, "run", *SPLIT}


class Request(NamedTuple):
    """Fields:
    step: of the newest whole checkpoint; 0: there is none.
    first, before, now: (W, B) that the run began with, of the checkpoint, and asked for.
    ran: how the workers of the checkpoint ran, as --run.
    settings: of this call, with all changes so far; changed: whether the checkpoint has others.
    """

    step: int
    first: tuple[int, int]
    before: tuple[int, int]
    now: tuple[int, int]
    ran: str
    settings: dict
    changed: bool = False

    @property
    def changes(self) -> list[dict]:
        return self.settings.get(NAME, [])

    def began(self, recipe: Recipe) -> Recipe:
        """The recipe that the run began with, which says what its units are."""
        return recipe._replace(workers=self.first[0], units_per_step=self.first[1])

    @property
    def splits(self) -> bool:
        """Whether there are other workers than those of the checkpoint."""
        return self.before != self.now


def asked(folder: str, settings: Mapping, *, policy: str | None, overwrite: bool) -> Request:
    """What a folder holds, beside what is asked of it. A collective; settles the checkpoints.

    Raises:
      ValueError: where the folder's run had other workers, and no policy says that it may, or other
        settings besides.
    """
    settings = json.loads(json.dumps(dict(settings)))
    now = _split_of(settings)
    path, checkpoints = (os.path.join(folder, name) for name in ("settings.json", "checkpoints"))
    stood = None if overwrite else records.read_json(path)
    if stood is None:  # new, or not for us to judge
        return Request(0, now, now, now, settings["run"], settings)
    step = checkpoint.settled(checkpoints)
    held = manifest.read(os.path.join(checkpoints, str(step)))["about"] if step else stood
    changes = held.get(NAME, []) if step else []
    settings |= {NAME: changes} if changes else {}
    differs, others = (
        {k for k in there | settings if there.get(k) != settings.get(k)} - {NAME}
        for there in (held, stood)
    )
    known = {"run", *SPLIT} <= held.keys()
    if not known or not differs | others <= MAY_DIFFER:
        # Whoever opens the folder, or restores the checkpoint, says what else differs.
        return Request(step, now, now, now, settings["run"], settings)
    if differs and policy is None:
        raise ValueError(
            f"{folder!r} holds a run with other settings "
            f"({', '.join(records.differences(held, settings))}): choose another --output_dir, or "
            "pass --overwrite to forget that run; to go on with other workers pass "
            f"--{NAME}={' or '.join(POLICIES)}."
        )
    before = _split_of(held) if step else now
    first = (changes[0]["workers"][0], changes[0][SPLIT[1]][0]) if changes else before
    if not (step and differs) and stood != settings:  # the checkpoint was ahead, or there is none
        records.write_json(path, settings)
        distributed.wait(f"settings of {folder}")
    return Request(step, first, before, now, held["run"], settings, bool(step and differs))


def _split_of(settings: Mapping) -> tuple[int, int]:
    return tuple(settings[name] for name in SPLIT)


def sizes_of(task: Task, recipe: Recipe, request: Request, *, deals: str | None) -> list[Sizes]:
    """Of the run where it was saved, and as it goes on: of the units that it began with.

    Raises:
      ValueError: where these do not fit the workers, or steps would have other units.
    """
    sizes = config.sizes_of(task, request.began(recipe), deals=deals)
    return [_split(sizes, request.first, split) for split in (request.before, request.now)]


def _split(sizes: Sizes, first, split) -> Sizes:
    if first == split:
        return sizes
    (workers, each), (units, step) = split, (sizes.workers * sizes.num_units, math.prod(first))
    fit = [w for w in range(1, step + 1) if not step % w and not units % w]
    if workers not in fit or workers * each != step:
        choices = [workers] if workers in fit else fit
        told = ", ".join(f"--workers={w} --units_per_step={step // w}" for w in choices)
        raise ValueError(
            f"{workers} workers with {each} units per step cannot go on with the {units} units of "
            f"this run, {step} of them in every step of all workers: pass {told}."
        )
    each = sizes.workers * sizes.units_per_step // workers  # of dealt examples, examples
    return sizes._replace(workers=workers, num_units=units // workers, units_per_step=each)


def traffic_of(changes: list[dict], sizes: Sizes, of: Callable) -> Callable[[int, int], float]:
    """`(rounds, loads) -> what a worker has sent`, where there have been other numbers of them.

    Args:
      sizes: now; of: `Sizes -> the same of a run without changes`.
    """
    first, before = (sizes.workers, sizes.units_per_step), 0.0
    for change in changes:
        splits = zip(*(change[name] for name in SPLIT), strict=True)
        one, other = (of(_split(sizes, first, split)) for split in splits)
        at = change["rounds"], change["loads"]
        before += one(*at) - other(*at)
    now = of(sizes)
    return lambda rounds, loads: before + now(rounds, loads)


def units_of(folder: str, changes: list[dict], sizes: Sizes) -> np.ndarray | None:
    """int32[W, M], the units that every worker owns after the last change; None: its neighbours.

    Raises:
      ValueError: where their file is not what was written.
    """
    known = changes[-1]["units"] if changes else None
    if known is None:
        return None
    path = _path(folder, known)
    try:
        units = np.load(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path!r} cannot be read ({error}): bring it back.") from error
    if units.shape != (sizes.workers, sizes.num_units) or manifest.hash_of(units) != known:
        raise ValueError(f"{path!r} is {manifest.CHANGED}: bring it back from a copy.")
    return units


def keep_units(folder: str, units: np.ndarray | None) -> str | None:
    """Writes what every worker owns beside the checkpoints; its hash. None where it need not."""
    if units is None or (units.reshape(-1) == np.arange(units.size)).all():
        return None
    known = manifest.hash_of(units)
    if distributed.is_first():
        path = _path(folder, known)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.tmp", "wb") as file:
            np.save(file, units)
        os.replace(f"{path}.tmp", path)
    return known


def _path(folder: str, known: str) -> str:
    return os.path.join(folder, "units", f"{known[:16]}.npy")
