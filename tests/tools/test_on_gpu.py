"""The script for a GPU runs at toy size on a CPU, and compares results before it times anything."""

import pytest

import models
from benchmarks import local_timing, on_gpu
from tests.cases import mostly_slow

PARTS = {"signs": 6, "reads": 5, "gpt2_small": 3, "sync": 2, "local_steps": 10, "syncs": 5}


@pytest.mark.parametrize("part", mostly_slow(PARTS, quick=("signs",)))
def test_every_part_has_rows(part, monkeypatch):
    mlp = (lambda: models.mlp(num_features=6, hidden=(4,), num_classes=10), (6,), 8, 2)
    monkeypatch.setattr(local_timing, "MODELS", dict.fromkeys(on_gpu.TOY.local, mlp))
    rows = list(on_gpu.rows(True, [part]))
    assert len(rows) >= PARTS[part]
    assert {row["device"] for row in rows} == {"cpu"} and {row["part"] for row in rows} == {part}
