"""The notebooks run, and show what they promise.

With the installed package alone, in their folder. In the default suite with fewer steps; as they
are stored, from a fresh kernel:
`pytest -m slow tests/project/test_notebooks.py`.
"""

import fnmatch
import glob
import importlib.util
import json
import os
import pathlib
import shutil
import sys

import pytest

import syncopate
from tests.cases import FAST_XLA
from tests.installed import module_of, ran

nbformat = pytest.importorskip("nbformat", reason="to read notebooks: install '.[notebooks]'")

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURES = {"1_orders": 2, "2_local_steps": 3, "3_echoing": 3, "4_all_together": 1}
INSTALL = '%pip install -q "{JAX}" "{SOURCE}"'
LARGEST = 600_000  # bytes, for a code host to show it
# What a notebook computes for long, and less of it.
LESS = {
    "1_orders": {
        "8, 512, 16,": "4, 64, 16,",
        "10  # B: units": "3  # B: units",
        "range(3)": "range(2)",
        "32, 2, 1e-2, 40": "4, 2, 1e-2, 4",
        '"unzip control": trained(ordering.baselines.unzip(M)),': "",
    },
    "2_local_steps": {
        "600, 60, 0.1": "60, 12, 0.1",
        "range(3)": "range(2)",
        "(0.1, 0.05, 0.025), 60": "(0.1, 0.05), 8",
    },
    "3_echoing": {
        '"no echo": 80, "echo": 240': '"no echo": 12, "echo": 24',
        "range(5), 0.15": "range(2), 2.0",
        "R, T = 4, 2000": "R, T = 4, 200",
        "(64, 512, 512, 10)": "(64, 32, 10)",
    },
    "4_all_together": {
        "= 480, 0.1": "= 64, 0.1",
        "range(3), 20": "range(2), 8",
        '"CD-GraB alone": NONE | {"order": ALL["order"]},': "",
        '"QSR alone": NONE | {"sync": ALL["sync"]},': "",
        '"echo alone": NONE | {"echo": ALL["echo"]},': "",
    },
}

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def executed(path, package, *, devices):
    """The notebook, run in a kernel that finds the installed package and that many CPU devices."""
    pytest.importorskip("ipykernel", reason="it runs notebooks: install '.[notebooks]'")
    nbclient = pytest.importorskip("nbclient", reason="it starts kernels: install '.[notebooks]'")
    environment = os.environ | {
        "PYTHONPATH": str(package),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",  # all compute longer than compile
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources
    )
    return client.execute(env=environment)


def sources_of(name):
    """The sources of all its code cells but the first, which installs."""
    cells = read(ROOT / "notebooks" / f"{name}.ipynb").cells
    return [cell.source for cell in cells if cell.cell_type == "code"][1:]


def outputs(notebook):
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


def check_outputs(notebook, pictures):
    result = outputs(notebook)
    assert not [o for o in result if o.output_type == "error"]
    assert not [o.text for o in result if o.output_type == "stream" and o.name == "stderr"]
    assert sum("image/png" in o.get("data", {}) for o in result) == pictures


def text_of(notebook):
    printed = [o.text for o in outputs(notebook) if o.output_type == "stream"]
    return "\n".join([cell.source for cell in notebook.cells] + printed)


RUN = """
import json, sys
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt
sys.path.insert(0, "")  # as a kernel does
for cells in json.load(sys.stdin):
    namespace, shown = {"__name__": "__main__"}, 0
    for cell in cells:
        exec(compile(cell, "a cell", "exec"), namespace)
        shown += len(plt.get_fignums())
        plt.close("all")
    import ordering
    print(f"\\n{shown} pictures by {ordering.__file__}", end="\\0")
"""


def test_short_notebooks_run_without_a_warning_and_show_their_pictures(unpacked):
    """In their folder, with the installed package, on one device; warnings are errors."""
    sources = []
    for path in NOTEBOOKS:
        source = "\0".join(sources_of(path.stem))
        for old, new in LESS[path.stem].items():
            assert old in source
            source = source.replace(old, new)
        sources.append(source)
    printed = ran(
        [sys.executable, "-P", "-W", "error", "-c", RUN],
        ROOT / "notebooks",
        PYTHONPATH=unpacked,
        JAX_PLATFORMS="cpu",
        JAX_NUMPY_RANK_PROMOTION="raise",
        XLA_FLAGS=FAST_XLA,
        given=json.dumps([source.split("\0") for source in sources]),
    ).split("\0")[:-1]
    for path, source, text in zip(NOTEBOOKS, sources, printed, strict=True):
        assert f"\n{PICTURES[path.stem]} pictures by {unpacked}" in text
        assert "bitwise" not in source + text or ": True" in text


@pytest.mark.slow
@pytest.mark.parametrize("name,devices", [*((name, 1) for name in PICTURES), ("2_local_steps", 4)])
def test_a_notebook_runs_from_a_fresh_kernel(name, devices, unpacked):
    notebook = executed(ROOT / "notebooks" / f"{name}.ipynb", unpacked, devices=devices)
    check_outputs(notebook, PICTURES[name])
    text = text_of(notebook)
    assert "bitwise" not in text or ": True" in text
    assert devices == 1 or "4 workers, one per device" in text


def installed(path, monkeypatch, *, folder, variables=(), devices=(), modules=(), programs=()):
    """(JAX, SOURCE) that the set-up cell installs on a machine with these."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in modules or None)
    monkeypatch.setattr(glob, "glob", lambda pattern: fnmatch.filter(devices, pattern))
    monkeypatch.setattr(shutil, "which", lambda name: name if name in programs else None)
    monkeypatch.setattr(os, "environ", dict.fromkeys(variables, "1"))
    monkeypatch.chdir(folder)
    namespace = {}
    source = read(path).cells[1].source
    exec(source.replace(INSTALL, "chosen = JAX, SOURCE"), namespace)
    return namespace.get("chosen")


@pytest.mark.parametrize(
    "machine,jax",
    [
        ({"modules": ["libtpu"]}, "jax[tpu]"),
        ({"devices": ["/dev/accel0"]}, "jax[tpu]"),
        ({"variables": ["COLAB_TPU_ADDR"]}, "jax[tpu]"),
        ({"programs": ["nvidia-smi"], "devices": ["/dev/nvidia0"]}, "jax[cuda12]"),
        ({}, "jax"),
        ({"modules": ["ordering"]}, "jax"),
        ({"modules": ["ordering", "local_opt"]}, None),  # the project is there
    ],
)
def test_set_up_installs_jax_for_the_machine_that_it_finds(machine, jax, monkeypatch):
    result = installed(NOTEBOOKS[0], monkeypatch, folder=ROOT / "notebooks", **machine)
    assert result == (jax and (jax, "..[experiments]"))


def test_set_up_outside_the_project_takes_its_one_address(monkeypatch, tmp_path):
    """That of docs/address.ini, once there is one; before, it says what is missing."""
    if address := module_of(ROOT / "docs" / "address.py").read(ROOT):
        source = f"{syncopate.DISTRIBUTION}[experiments] @ git+{address.url}"
        assert installed(NOTEBOOKS[0], monkeypatch, folder=tmp_path) == ("jax", source)
    else:
        with pytest.raises(ValueError, match="not the folder.*: set REPOSITORY above"):
            installed(NOTEBOOKS[0], monkeypatch, folder=tmp_path)


@by_name
def test_a_stored_notebook_has_results_a_set_up_cell_an_exercise_and_nothing_of_a_machine(path):
    notebook, content = read(path), path.read_text()
    nbformat.validate(notebook)
    check_outputs(notebook, PICTURES[path.stem])
    assert len(content) < LARGEST and "## Exercise" in content
    assert not [word for word in ("/tmp", "/home", "/root", "site-packages") if word in content]
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.colab == {"provenance": []}
    first, second, third = notebook.cells[:3]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert INSTALL in second.source and second.source == read(NOTEBOOKS[0]).cells[1].source
    assert "jax.__version__" in third.source and "jax.devices()" in third.source
    code = "".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert "experiments" not in code.replace("[experiments]", "")  # the extra
