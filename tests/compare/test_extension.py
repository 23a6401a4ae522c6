"""A new order, rule, echo policy or task is one file and one row, a scalar a row, a study a file.

The tree is copied, the new files and rows are put into it, and the new study runs there.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("ordering", "local_opt", "models", "syncopate", "experiments")
NEW = {
    "ordering/backwards.py": '''"""Every other epoch goes backwards."""
import jax.numpy as jnp

from ordering.base import Ordering, first_order
from ordering.shuffles import ShuffleState


def backwards(num_units):
    def init(key, params):
        current = first_order(key, num_units)
        size, none = jnp.int32(num_units), jnp.int32(0)
        return ShuffleState(current, current[::-1], size, none, key)

    def next_epoch(state):
        return state._replace(
            current=state.next, next=state.current, epoch=state.epoch + 1
        )

    return Ordering(init, lambda state, rows: state, next_epoch)
''',
    "local_opt/thirds.py": '''"""Three rounds, whatever the run."""
import numpy as np

from local_opt.plans import SyncPlan


def thirds(total_steps):
    return SyncPlan(np.array([0, total_steps // 3, 2 * total_steps // 3]), total_steps, "thirds")
''',
    "ordering/echo/late.py": '''"""No echo in the first half of a run, then every batch twice."""
import numpy as np

from ordering.echo.plans import EchoPlan


def late(total_steps):
    steps = np.arange(total_steps)
    return EchoPlan((steps < total_steps // 2) | (steps % 2 == 0), "late")
''',
    "experiments/data/blobs.py": '''"""Blobs."""
import numpy as np

import models
from experiments.data.base import Recipe, Task

RECIPE = Recipe(
    workers=2, units_per_step=2, unit_size=1, learning_rates=(0.1, 0.3), epochs=4, momentum=0.0
)


def load(data_dir=None, model="softmax", *, distance: float = 1.0, abstract=False):
    rng = np.random.default_rng(0)
    y = np.arange(40, dtype=np.int32) % 2
    x = (rng.normal(size=(40, 2)) + distance * y[:, None]).astype(np.float32)
    part = {"x": x, "y": y}
    net = models.softmax_regression(num_features=2, num_classes=2, l2=0.0)
    return Task("blobs", net, part, part, RECIPE)
''',
    "experiments/to_and_fro.py": '''"""Does going to and fro help?"""
from experiments.report import plots, tables
from experiments.report.statistics import Criterion
from experiments.compare import study
from experiments.compare.study import Arm, Study

STUDY = Study(
    "to_and_fro",
    {
        "rr": Arm("D-RR", order="rr"),
        "backwards": Arm("to and fro", order="backwards"),
        "all": Arm("all that is new", order="backwards", sync="thirds", echo="late"),
    },
    recipe="blobs",
    criterion=Criterion("train/loss"),
    columns=tables.SYNC_COLUMNS,
    panels=(plots.Panel("train/loss", ("step", "rounds")), plots.Panel("losses/spread")),
)

if __name__ == "__main__":
    study.main(STUDY)
''',
}
ROWS = {  # what each needs imported, and the row
    "experiments/compare/arms.py": """
from local_opt.thirds import thirds
from ordering.backwards import backwards
from ordering.echo.late import late
ORDERS["backwards"] = Order("to and fro", lambda s: backwards(s.num_units), observes=False)
SYNC_RULES["thirds"] = SyncRule("thirds", lambda config: thirds(config.total_steps))
ECHO_POLICIES["late"] = EchoPolicy("late", lambda config: late(config.total_steps))
""",
    "experiments/data/__init__.py": """
from experiments.data import blobs
TASKS["blobs"] = blobs.load
""",
    "experiments/trainer/step.py": """
SCALARS["losses/spread"] = Scalar("step", lambda worker, state, losses: jnp.std(losses))
""",
}
LINES = {  # of each kind of addition, with its row
    "ordering/backwards.py": 20, "local_opt/thirds.py": 10, "ordering/echo/late.py": 12,
    "experiments/data/blobs.py": 22, "experiments/to_and_fro.py": 27,
}  # fmt: skip


def test_new_decisions_and_tasks_take_one_file_and_one_row_and_a_study_one_file(tmp_path):
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "runs")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    assert len(ROWS) == 3, "rows of decisions, of tasks and of scalars"
    for path, text in NEW.items():
        assert not (tmp_path / path).exists() and text.count("\n") <= LINES[path]
        (tmp_path / path).write_text(text)
    for path, text in ROWS.items():
        (tmp_path / path).write_text((tmp_path / path).read_text() + text)
    command = [
        sys.executable, "-m", "experiments.to_and_fro", "--distance=3", "--total_steps=40",
        "--evaluations=2", "--seeds=2", "--output_dir=out",
    ]  # fmt: skip
    environment = {"PATH": "", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environment |= {k: v for k, v in os.environ.items() if k.startswith("JAX_")}  # of conftest.py
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    out = tmp_path / "out"
    results = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = next(r for r in reversed(results) if r["arm"] == "all")
    assert (last["step"], last["rounds"], last["loads"], last["epoch"]) == (40, 3, 30, 3.0)
    assert (last["order"], last["sync"], last["echo"]) == ("backwards", "thirds", "late")
    assert last["test/accuracy"] > 0.9 and 0 < last["losses/spread"] < 1
    assert len([r for r in results if r["ended"]]) == 3 * (2 + 2)
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["task"], settings["distance"]) == ("blobs", 3.0)
    assert "all that is new" in (out / "table.md").read_text()
    assert all((out / name).stat().st_size > 10_000 for name in ("comparison.png", "report.html"))
