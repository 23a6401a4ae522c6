"""A folder is damaged in every way: the run ends bitwise the same, or is refused by name.

pytest -m slow -n 0 -s tests/training/test_attacks.py      # prints what became of the attacks
"""

import collections
import pathlib
import shutil

import numpy as np
import pytest

from experiments.cluster import progress
from tests.commands import SAVED, ended, train_run

RUN = [*SAVED, "--order=cd_grab"]


class Stopped(Exception):
    pass


@pytest.fixture(scope="module", params=("finished", "interrupted"))
def folders(request, tmp_path_factory):
    """(the folder that is attacked, those of a run with another seed and of an older one, ends)."""
    base = tmp_path_factory.mktemp("runs")
    train_run(RUN, base / "run")
    train_run([*RUN, "--seed=1"], base / "other")
    whole = ended(base / "run")
    with pytest.MonkeyPatch.context() as patch:

        def stop(bar, record, *, examples):
            if record["step"] == at:
                raise Stopped

        patch.setattr(progress, "note", stop)
        for name, at in {"older": 12, "interrupted": 18}.items():  # noqa: B007
            with pytest.raises(Stopped):
                train_run(RUN, base / name)
    attacked = base / ("run" if request.param == "finished" else "interrupted")
    return attacked, base / "other", base / "older", whole


def groups_of(folder):
    """Files by what they are part of, so that each part is hit as often."""
    found = collections.defaultdict(list)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size:
            parts = path.relative_to(folder).parts
            found[parts[0] if parts[0] != "checkpoints" else parts[2]].append(path)
    return list(found.values())


def flip(path, generator, *_):
    content = bytearray(path.read_bytes())
    content[generator.integers(len(content))] ^= 1 << generator.integers(8)
    path.write_bytes(content)


def truncate(path, generator, *_):
    path.write_bytes(path.read_bytes()[: generator.integers(path.stat().st_size)])


def remove(path, *_):
    path.unlink()


def swap(path, generator, folder, *_):
    files = [p for group in groups_of(folder) for p in group]
    other = files[generator.integers(len(files))]
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two), other.write_bytes(one)


def taken_from(number):
    def act(path, generator, folder, *others):
        """A file, or all of that name at its place, of another folder."""
        source = others[number] / path.relative_to(folder)
        if source.exists():
            shutil.copyfile(source, path)

    return act


def checkpoints_of(number):
    def act(path, generator, folder, *others):
        shutil.rmtree(folder / "checkpoints")
        shutil.copytree(others[number] / "checkpoints", folder / "checkpoints")

    return act


ATTACKS = {
    "a bit": (flip, 24), "a cut": (truncate, 10), "a file gone": (remove, 14),
    "two files exchanged": (swap, 8), "a file of another run": (taken_from(0), 14),
    "an old file": (taken_from(1), 14), "checkpoints of another run": (checkpoints_of(0), 1),
    "old checkpoints": (checkpoints_of(1), 1),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_ends_silently_wrong(folders, tmp_path, attack):
    attacked, other, older, whole = folders
    (act, count), landed = ATTACKS[attack], collections.Counter()
    generator = np.random.default_rng(len(attack))
    for number in range(count):
        folder = pathlib.Path(shutil.copytree(attacked, tmp_path / str(number)))
        groups = groups_of(folder)
        group = groups[number % len(groups)]
        path = group[generator.integers(len(group))]
        act(path, generator, folder, other, older)
        try:
            train_run(RUN, folder)
        except (ValueError, OSError) as error:
            assert str(folder) in str(error) or "the checkpoint of step" in str(error), error
            assert "--output_dir" in str(error), error
            landed["refused"] += 1
        else:
            assert ended(folder) == whole, path
            landed["the same"] += 1
        shutil.rmtree(folder)
    print(f"\n{attacked.name}, {attack}: {dict(landed)}")
