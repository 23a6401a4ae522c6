"""`train --elastic` itself, from its flags to its records.

pytest -m slow -n 0 tests/test_elastic_train.py     # digits, two processes, a kill: minutes
"""

import os
import re
import shutil
import signal

import numpy as np
import pytest

from experiments.results import records as results
from experiments.training import checkpoint
from tests.elastic_run import asked_to_stop
from tests.test_studies import train_run
from tests.test_train_processes import RUN, finish, records, stop_in_the_middle

MEAN = ["--elastic=mean"]
SMALL = [
    "--num_train=203", "--num_test=20", "--total_steps=24", "--evaluations=4", "--h_base=5",
    "--learning_rate=0.2", "--checkpoint_every=0",
]  # fmt: skip


def split(workers, together):
    return [f"--workers={workers}", f"--units_per_step={together // workers}"]


def go(folder, *arguments, stop=None):
    """Runs `train` from where it stands; `stop`: to be asked to stop after that step."""
    folder = str(folder)
    with asked_to_stop(checkpoint.latest(os.path.join(folder, "checkpoints")), stop):
        if stop is None:
            return train_run([*SMALL, *arguments], folder)
        with pytest.raises(SystemExit) as ended:
            train_run([*SMALL, *arguments], folder)
    assert ended.value.code == 143
    return None


def test_the_flag_goes_from_eight_workers_to_four(tmp_path, capsys):
    rule = ["--order=rr", "--sync=parallel"]
    go(tmp_path, *rule, *split(8, 8), stop=8)
    with pytest.raises(ValueError, match=r"workers: 8 there, 4 here.* pass --elastic=mean or"):
        go(tmp_path, *rule, *split(4, 8))
    capsys.readouterr()
    go(tmp_path, *rule, *split(4, 8), *MEAN)
    said = capsys.readouterr().out
    assert (
        "Goes on from step 8 with 4 workers instead of 8: 136 of 200 units of epoch 1 are left, "
        "dealt anew; parameters and optimizer state are of all workers, and stay." in said
    )
    found = records(tmp_path)
    assert [r["step"] for r in found] == [6, 12, 18, 24]
    assert [len(r.get("elastic", [])) for r in found] == [0, 1, 1, 1]
    settings = results.read_json(str(tmp_path / "settings.json"))
    assert settings["elastic"] == found[-1]["elastic"] and settings["workers"] == 4
    assert [r["allreduces"] for r in found] == [6, 12, 18, 24]


@pytest.mark.slow
@pytest.mark.parametrize("before,after,together", [(8, 4, 16), (4, 8, 16), (4, 8, 8), (8, 2, 8)])
def test_digits_go_on_in_mid_epoch_and_mid_round(tmp_path, before, after, together):
    """With QSR and CD-GraB, from both inputs, with a further stop, bitwise the same."""
    told, ends = [], []
    for name, reads, further in (("a", [], None), ("b", ["--input=thread"], 19)):
        folder = tmp_path / name
        go(folder, *split(before, together), *reads, stop=9)
        if further:
            go(folder, *split(after, together), *MEAN, *reads, stop=further)
            go(folder, *split(after, together), *reads)
        else:
            go(folder, *split(after, together), *MEAN, *reads)
        told.append(records(folder))
        ends.append(checkpoint.manifest.read(str(folder / "checkpoints" / "24"))["leaves"])
    assert told[0] == told[1] and [r["step"] for r in told[0]] == [6, 12, 18, 24]
    # Hashes of all that there is.
    assert ends[0] == ends[1]
    sent = [r["allreduces"] for r in told[0]]
    assert sent == sorted(sent)


@pytest.mark.slow
def test_one_device_goes_on_as_a_mesh(tmp_path):
    go(tmp_path / "a", *split(8, 16), stop=9)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    go(tmp_path / "a", *split(4, 16), *MEAN)
    go(tmp_path / "b", *split(4, 16), *MEAN, "--run=mesh")
    one, two = records(tmp_path / "a"), records(tmp_path / "b")
    for a, b in zip(one, two, strict=True):
        assert (a["step"], a["rounds"], a.get("elastic")) == (
            b["step"],
            b["rounds"],
            b.get("elastic"),
        )
        np.testing.assert_allclose(a["train/loss"], b["train/loss"], rtol=1e-5)
    # And back, with the same workers.
    settings = results.read_json(str(tmp_path / "b" / "settings.json"))
    with pytest.raises(ValueError, match="run: 'mesh' there, 'vmap' here"):
        go(tmp_path / "b", *split(4, 16))
    go(tmp_path / "b", *split(4, 16), *MEAN)
    found = results.read_json(str(tmp_path / "b" / "settings.json"))
    assert found == settings | {"run": "vmap"} and len(found["elastic"]) == 1


FOUR, TWO = ["--workers=4", "--run=mesh"], ["--workers=2", "--run=mesh", "--units_per_step=6"]


@pytest.mark.slow
def test_two_processes_go_on_where_four_workers_were_killed(tmp_path):
    code, output = stop_in_the_middle([*RUN, *FOUR], tmp_path / "a", signal.SIGKILL, devices=4)
    assert code == -9, output
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    said = finish([*RUN, *TWO, *MEAN], tmp_path / "a", devices=2)
    assert re.search(r"Goes on from step \d+ with 2 workers instead of 4: \d+ of 1536", said)
    together = ["experiments.launch", "--processes=2", "--", *RUN, *TWO, *MEAN]
    assert said.splitlines()[0] in finish(together, tmp_path / "b")
    one, two = records(tmp_path / "a"), records(tmp_path / "b")
    assert len(one) == 12
    for a, b in zip(one, two, strict=True):
        assert [a[n] for n in ("step", "loads", "rounds", "allreduces")] == [
            b[n] for n in ("step", "loads", "rounds", "allreduces")
        ]
        assert a.get("elastic") == b.get("elastic")
        np.testing.assert_allclose(a["train/loss"], b["train/loss"], rtol=1e-5)
