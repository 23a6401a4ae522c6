"""Imports, the console command and the wheel, in a folder whose files have the project's names.

pytest -m slow -n 0 tests/project/test_command.py    # in an environment of its own: two minutes
"""

import configparser
import json
import pathlib
import re
import runpy
import subprocess
import sys
import types

import pytest

import local_opt
import ordering
import syncopate
from syncopate import command
from tests.installed import BUNDLED, PACKAGES, ran

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = ("plans.py", "models.py", "experiments.py", "ordering_utils.py")
SCRIPT = """
import jax, jax.numpy as jnp, optax
from syncopate import ordering, local_opt
import ordering as same
assert same is ordering

import plans, models, experiments, ordering_utils  # the user's files
assert {m.MINE for m in (plans, models, experiments, ordering_utils)} == {1}

order = ordering.cd_grab(4, units_per_step=2)
states = jax.vmap(order.init, (0, None), axis_name="worker")(
    jax.random.split(jax.random.key(0), 2), jnp.zeros(3)
)
sketch = ordering.make_sketch(jax.random.key(1), size=4)
plan = local_opt.qsr(optax.cosine_decay_schedule(0.1, 20), total_steps=20, alpha=0.2, h_base=2)
opt = local_opt.local_steps(optax.adam(1e-3), plan, axis_name="worker")
state = jax.vmap(opt.init)(jnp.zeros((2, 3)))
print(states.current.shape, plan.rounds)
"""


@pytest.fixture
def elsewhere(tmp_path):
    """A user's folder, with files that have the project's names."""
    for name in NAMES:
        (tmp_path / name).write_text("MINE = 1\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def test_a_script_imports_the_library_beside_files_with_its_names(elsewhere):
    printed = ran([sys.executable, "script.py"], elsewhere, PYTHONPATH=str(ROOT))
    assert printed.startswith("(2, 4) ")


@pytest.mark.parametrize(
    "name,home",
    [
        ("cd_grab", "ordering.cd_grab"),
        ("repeat", "ordering.echo.repeat"),
        ("step_indices", "ordering.data.step_indices"),
        ("qsr", "local_opt.qsr"),
    ],
)
def test_a_name_of_another_package_is_found_there(name, home):
    library = home.partition(".")[0]
    with pytest.raises(AttributeError, match=f"it is {home}, after .*import {library}"):
        getattr(syncopate, name)


def test_the_package_tells_its_version_and_nothing_that_is_not(monkeypatch):
    assert re.fullmatch(r"\d+\.\d+\.\d+", syncopate.__version__)
    assert syncopate.ordering is ordering and syncopate.local_opt is local_opt
    assert {"ordering", "local_opt"} <= set(dir(syncopate))
    with pytest.raises(AttributeError, match="'nothing'$"):
        syncopate.nothing  # noqa: B018
    monkeypatch.setitem(sys.modules, "ordering", types.ModuleType("ordering"))  # a user's own
    assert not hasattr(syncopate, "nothing")


def test_the_command_runs_beside_files_with_its_names(elsewhere):
    """As the console script, which does not put the current folder on the path."""
    call = [sys.executable, "-P", "-m", "syncopate.command"]
    text = ran([*call, "--version"], elsewhere, PYTHONPATH=str(ROOT))
    assert text == f"syncopate {syncopate.__version__}\n"
    listed = ran(call, elsewhere, PYTHONPATH=str(ROOT))
    for name in ("cd_grab", "train", "qsr", "launch"):
        assert f"  {name} " in listed
    flags = ["--preset=cd_grab_hmda", "--tiny", "--dry_run", "--nocompile"]
    text = ran([*call, "cd_grab", *flags], elsewhere, PYTHONPATH=str(ROOT))
    assert "CD-GraB" in text and re.search(r"training examples +\| 512 ", text)


@pytest.mark.parametrize(
    "module,extra",
    [
        ("tensorflow_datasets", "experiments,data"),
        ("pyarrow.parquet", "experiments,data"),
        ("flax", "experiments"),
        ("matplotlib.pyplot", "experiments"),
    ],
)
def test_the_extra_that_installs_a_missing_module_is_named(module, extra, monkeypatch):
    def run_module(*args, **options):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(SystemExit, match=rf"train needs .*pip install 'syncopate-jax\[{extra}\]'"):
        command.main(["train"])


def test_modules_of_the_extra_data_are_those_of_the_metadata():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = re.findall(r"^([\w-]+)", config["options.extras_require"]["data"], re.M)
    modules = {name.replace("-cpu", "").replace("-", "_") for name in listed}
    assert {"PIL" if name == "pillow" else name for name in modules} == set(command.OF_DATA)


def test_every_experiment_is_listed_with_its_purpose():
    result = command.experiments()
    assert {"cd_grab", "qsr", "echoing", "train"} <= result.keys()
    assert "flags" not in result and all(result.values())
    assert result["qsr"].endswith("on one task. (a minute)") and "(" not in result["launch"]


def test_an_unknown_experiment_or_preset_is_refused_with_the_known_ones():
    with pytest.raises(SystemExit, match="'cd_crab' is not an experiment: pass one of these"):
        command.main(["cd_crab"])
    with pytest.raises(SystemExit, match=r"these\. Did you mean train\?"):
        command.main(["trian"])
    with pytest.raises(SystemExit, match=r"\. Did you mean qsr_vit_b_4096"):
        command.preset("qsr_vit_b_409")
    with pytest.raises(SystemExit, match="'none' is not a preset: pass one of cd_grab_hmda, "):
        command.with_presets(["--seeds=3", "--preset=none"])
    whole, larger = (command.preset(f"qsr_vit_b_{batch}") for batch in (4096, 16384))
    assert larger[: len(whole)] == whole and "--workers=64" in larger[len(whole) :]
    for given in (["--preset=qsr_vit_b_4096"], ["--preset", "qsr_vit_b_4096"]):
        assert command.with_presets([*given, "--seeds=3"]) == [*whole, "--seeds=3"]


@pytest.mark.parametrize(
    "word,expected",
    [
        ("lr", " Did you mean --learning_rate?"),
        ("worker", " Did you mean --workers?"),
        ("cats", ""),
    ],
)
def test_near_words_are_told(word, expected):
    assert command.meant(word, ("workers", "learning_rate", "seed"), "--") == expected


def test_a_file_that_hides_a_package_is_named_in_the_error(monkeypatch):
    hiding = types.ModuleType("ordering")
    hiding.__file__ = "/somebody/ordering.py"
    monkeypatch.setitem(sys.modules, "ordering", hiding)
    with pytest.raises(ImportError, match="'/somebody/ordering.py', which hides Syncopate's"):
        _ = syncopate.ordering


CARRIED = re.compile(r".*\.(css|flags|py|tsv|typed)|experiments/runs/map\.json")


def test_a_wheel_has_every_file_and_three_top_level_names(unpacked):
    actual = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    (info,) = unpacked.glob("*.dist-info")
    assert {name.split("/")[0] for name in actual} == {*PACKAGES, info.name}
    assert (info / "top_level.txt").read_text().split() == sorted(PACKAGES)
    files = [
        str(path.relative_to(ROOT))
        for name in (*PACKAGES, *BUNDLED)
        for path in (ROOT / name).rglob("*")
        if path.is_file()
    ]
    expected = {
        name if name.startswith(PACKAGES) else f"syncopate/_bundled/{name}"
        for name in filter(CARRIED.fullmatch, files)
    }
    assert {name for name in actual if not name.startswith(info.name)} == expected
    assert {f"{name}/py.typed" for name in PACKAGES} <= actual


LARGE = {
    "flax",
    "grain",
    "matplotlib",
    "orbax",
    "pandas",
    "pyarrow",
    "sklearn",
    "tensorflow",
    "torch",
}


def test_the_command_of_a_wheel_finds_experiments_that_no_import_finds(unpacked, elsewhere):
    """The hash of its code is that of the clone."""
    from experiments import fingerprints

    listed = ran([sys.executable, "-P", "-m", "syncopate.command"], elsewhere, PYTHONPATH=unpacked)
    assert "  cd_grab " in listed and "pip install 'syncopate-jax[experiments]'" in listed
    assert "  claims " not in listed and "claims" in command.experiments()
    code = f"""
import os, runpy, sys
from importlib.machinery import PathFinder
import ordering, local_opt, syncopate
from syncopate import command
for module in (ordering, local_opt, syncopate):
    assert module.__file__.startswith({str(unpacked)!r})
assert not {LARGE} & {{*sys.modules}}
assert not any(map(PathFinder.find_spec, {BUNDLED}))
runpy.run_module = lambda name, **options: print(name)
command.main(["cd_grab", "--seeds=1"])
import models
from experiments import fingerprints
assert "--task=imagenet_vit_b" in command.preset("qsr_vit_b_16384")
assert sys.argv[1:] == ["--seeds=1"] and os.environ["PYTHONPATH"].startswith(sys.path[0])
print(models.__file__, fingerprints.code_hash())
"""
    printed = ran([sys.executable, "-P", "-c", code], elsewhere, PYTHONPATH=unpacked).split()
    of_models = unpacked / "syncopate" / "_bundled" / "models" / "__init__.py"
    assert printed == ["experiments.cd_grab", str(of_models), fingerprints.code_hash()]


@pytest.fixture(scope="module")
def core(wheel):
    """The `bin` folder of an environment in which only the wheel is installed."""
    subprocess.run([sys.executable, "-m", "venv", wheel.parent / "venv"], check=True)
    programs = wheel.parent / "venv" / "bin"
    subprocess.run([programs / "pip", "install", "--quiet", wheel], check=True)
    return programs


@pytest.mark.slow
def test_the_core_is_small_and_works(core, elsewhere):
    installed = {
        line.split("==")[0].lower() for line in ran([core / "pip", "freeze"], elsewhere).split()
    }
    large = {"flax", "matplotlib", "tensorflow", "tensorflow-cpu", "scikit-learn"}
    assert {"jax", "optax", "numpy", syncopate.DISTRIBUTION} <= installed
    assert not installed & large
    assert ran([core / "python", "script.py"], elsewhere).startswith("(2, 4) ")
    assert "cd_grab" in ran([core / "syncopate"], elsewhere)
    done = subprocess.run(
        [core / "syncopate", "cd_grab"], cwd=elsewhere, capture_output=True, text=True
    )
    assert done.returncode and "pip install 'syncopate-jax[experiments]'" in done.stderr


@pytest.mark.slow
def test_a_wheel_trains_launches_and_advises(wheel, core, elsewhere):
    subprocess.run([core / "pip", "install", "--quiet", f"{wheel}[experiments]"], check=True)
    command = core / "syncopate"
    flags = ["--seeds=1", "--arms=rr,cd_grab", "--learning_rates=0.5", "--epochs=3"]
    assert "CD-GraB" in ran([command, "cd_grab", "--task=digits", *flags], elsewhere)
    launch = [command, "launch", "--processes=2", "--", "experiments.train", "--run=mesh"]
    ran([*launch, "--workers=2", "--total_steps=20", "--output_dir=two"], elsewhere, XLA_FLAGS="")
    assert (elsewhere / "two" / "report.html").is_file()
    versions = json.loads((elsewhere / "two" / "versions.json").read_text())
    assert versions["syncopate"] == syncopate.__version__ and versions["commit"] is None
    # From the recorded runs: over so slow a network rounds help, whatever times are measured.
    slow = [command, "advise", "--task=digits", "--gigabits=0.001"]
    assert "times as fast as none" in ran(slow, elsewhere)


def test_the_distribution_has_one_name():
    """Another project has the import's name on the index."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["name"] == syncopate.DISTRIBUTION
    cells = [path.read_text() for path in (ROOT / "notebooks").glob("*.ipynb")]
    pages = [path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]]
    for text in cells + pages:
        assert not re.search(r"(pip install .?|\")syncopate[\[' @]", text)


@pytest.mark.parametrize(
    "typed,expected",
    [
        (["python", "/bin/syncopate", "cd_grab"], "syncopate cd_grab --seeds=3"),
        (["python", "-m", "experiments.cd_grab"], "python -m experiments.cd_grab --seeds=3"),
    ],
)
def test_a_report_names_the_command_as_it_was_typed(typed, expected, monkeypatch):
    pytest.importorskip("absl")
    from experiments import entry

    main = types.SimpleNamespace(__spec__=types.SimpleNamespace(name="experiments.cd_grab"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "orig_argv", [*typed, "--seeds=3"])
    monkeypatch.setattr(sys, "argv", ["cd_grab", "--seeds=3"])
    assert entry.command_line() == expected
