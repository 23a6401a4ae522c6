"""A stranger's order, rule and task: one new file and one table row each, and all runs."""

import json
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("ordering", "local_opt", "models", "plans", "experiments")

# The new file; the table; its row and what the row needs imported.
ORDER = (
    "ordering/backwards.py",
    '''"""Every other epoch goes backwards."""
import jax.numpy as jnp

from ordering.base import Ordering, first_order
from ordering.shuffles import ShuffleState


def backwards(num_units):
    def init(key, params):
        current = first_order(key, num_units)
        size, none = jnp.int32(num_units), jnp.int32(0)
        return ShuffleState(current, current[::-1], size, none, key)

    def next_epoch(state):
        return state._replace(current=state.next, next=state.current)

    return Ordering(init, lambda state, rows: state, next_epoch)
''',
    "experiments/methods.py",
    "from ordering.backwards import backwards\n",
    'METHODS["backwards"] = Method("to and fro", lambda s: backwards(s.num_units), False)\n',
)
RULE = (
    "local_opt/thirds.py",
    '''"""Three rounds, whatever the run."""
import numpy as np

from local_opt.plan import SyncPlan


def thirds(total_steps):
    return SyncPlan(np.array([0, total_steps // 3, 2 * total_steps // 3]), total_steps, "thirds")
''',
    "experiments/sync_rules.py",
    "from local_opt.thirds import thirds\n",
    'RULES["thirds"] = Rule("thirds", lambda s: thirds(s.total_steps))\n',
)
TASK = (
    "experiments/tasks/blobs.py",
    '''"""Two blobs."""
import numpy as np

import models
from experiments.tasks.base import Recipe, Task

RECIPE = Recipe(2, 2, 1, 4, (0.1,), 0.0, 0)


def load(data_dir=None, model="logistic", *, abstract=False):
    rng = np.random.default_rng(0)
    y = np.arange(40, dtype=np.int32) % 2
    x = (rng.normal(size=(40, 2)) + 3 * y[:, None]).astype(np.float32)
    part = {"x": x, "y": y}
    net = models.softmax_regression(num_features=2, num_classes=2, l2=0.0)
    return Task("blobs", net, part, part, RECIPE)
''',
    "experiments/tasks/__init__.py",
    "from experiments.tasks import blobs\n",
    'TASKS["blobs"] = blobs.load\n',
)


def test_an_order_a_rule_and_a_task_take_one_file_and_one_row_each(tmp_path):
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "runs")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    for new, text, table, needed, row in (ORDER, RULE, TASK):
        assert not (tmp_path / new).exists()
        (tmp_path / new).write_text(text)
        before = (tmp_path / table).read_text()
        (tmp_path / table).write_text(before + needed + row)
    command = [
        sys.executable, "-m", "experiments.train", "--task=blobs", "--order=backwards",
        "--sync=thirds", "--total_steps=40", "--evaluations=2", "--output_dir=out",
    ]  # fmt: skip
    environment = {"PATH": "", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert (last["step"], last["rounds"], last["epoch"]) == (40, 3, 4.0)
    assert last["test_accuracy"] > 0.9
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert (settings["task"], settings["order"], settings["sync"]) == (
        "blobs", "backwards", "thirds",
    )  # fmt: skip
