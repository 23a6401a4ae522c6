"""Outside of the repository, beside files of any name: imports, the command, presets.

pytest -m slow -n 0 tests/project/test_command.py    # in an environment of its own: two minutes
"""

import os
import pathlib
import subprocess
import sys
import types

import pytest

import local_opt
import ordering
import syncopate
from syncopate import command

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = ("plans.py", "models.py", "experiments.py", "ordering_utils.py")
SCRIPT = """
import jax, jax.numpy as jnp, optax
from syncopate import ordering, local_opt
import ordering as same
assert same is ordering

import plans, models, experiments, ordering_utils  # their own
assert {m.MINE for m in (plans, models, experiments, ordering_utils)} == {1}

order = ordering.cd_grab(4, units_per_step=2)
states = jax.vmap(order.init, (0, None), axis_name="worker")(
    jax.random.split(jax.random.key(0), 2), jnp.zeros(3)
)
sketch = ordering.sketch(jax.random.key(1), size=4)
plan = local_opt.qsr(optax.cosine_decay_schedule(0.1, 20), total_steps=20, alpha=0.2, h_base=2)
opt = local_opt.local_steps(optax.adam(1e-3), plan, axis_name="worker")
state = jax.vmap(opt.init)(jnp.zeros((2, 3)))
print(states.current.shape, plan.rounds)
"""


@pytest.fixture
def elsewhere(tmp_path):
    """A folder of a user's, with files of our names."""
    for name in NAMES:
        (tmp_path / name).write_text("MINE = 1\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def ran(arguments, folder, **environment):
    given = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(
        arguments, cwd=folder, env=given | environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_script_beside_files_of_any_name(elsewhere):
    printed = ran([sys.executable, "script.py"], elsewhere, PYTHONPATH=str(ROOT))
    assert printed.startswith("(2, 4) ")


def test_the_command_beside_files_of_any_name(elsewhere):
    """The console script is this module, without the folder in which it is called."""
    call = [sys.executable, "-P", "-m", "syncopate.command"]
    listed = ran(call, elsewhere, PYTHONPATH=str(ROOT))
    for name in ("cd_grab", "train", "qsr", "bench", "launch"):
        assert f"  {name} " in listed
    # A preset that begins as another one, which lies in the repository too.
    flags = ["--preset=tiny/cd_grab_hmda", "--dry_run", "--nocompile"]
    told = ran([*call, "cd_grab", *flags], elsewhere, PYTHONPATH=str(ROOT))
    assert "CD-GraB" in told and "16,384" in told


def test_every_experiment_has_a_line():
    found = command.experiments()
    assert {"cd_grab", "qsr", "echoing", "train", "bench"} <= found.keys()
    assert "flags" not in found and all(found.values())


def test_what_is_not_there_is_said():
    with pytest.raises(SystemExit, match="'cd_crab' is no experiment: pass one of these"):
        command.main(["cd_crab"])
    with pytest.raises(SystemExit, match="'tiny/none' is no preset: pass one of cd_grab_hmda, "):
        command.with_preset("--preset=tiny/none")
    whole, tiny = (command.with_preset(f"--preset={at}qsr_vit_b_4096") for at in ("", "tiny/"))
    assert tiny[: len(whole)] == whole and "--task=cifar10_vit" in tiny[len(whole) :]
    assert command.with_preset("--seeds=3") == ["--seeds=3"]


def test_one_package_and_two_are_the_same():
    assert syncopate.ordering is ordering and syncopate.local_opt is local_opt
    assert {"ordering", "local_opt"} <= set(dir(syncopate))
    with pytest.raises(AttributeError, match="no attribute 'orders'"):
        _ = syncopate.orders


def test_a_file_that_hides_the_package_is_named(monkeypatch):
    hiding = types.ModuleType("ordering")
    hiding.__file__ = "/somebody/ordering.py"
    monkeypatch.setitem(sys.modules, "ordering", hiding)
    with pytest.raises(ImportError, match="'/somebody/ordering.py', which hides the package"):
        _ = syncopate.ordering


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The folder of programs of an environment with the library alone, from a wheel."""
    folder = tmp_path_factory.mktemp("core")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    built = ["wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run([programs / "pip", *built], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([programs / "pip", "install", "--quiet", wheel], check=True)
    return programs


@pytest.mark.slow
def test_the_core_is_small_and_works(core, elsewhere):
    installed = {
        line.split("==")[0].lower() for line in ran([core / "pip", "freeze"], elsewhere).split()
    }
    large = {"flax", "matplotlib", "tensorflow", "tensorflow-cpu", "scikit-learn", "absl-py"}
    assert {"jax", "optax", "numpy", "syncopate"} <= installed
    assert not installed & (large - {"absl-py"})
    assert ran([core / "python", "script.py"], elsewhere).startswith("(2, 4) ")
    assert "cd_grab" in ran([core / "syncopate"], elsewhere)
    told = subprocess.run(
        [core / "syncopate", "cd_grab"], cwd=elsewhere, capture_output=True, text=True
    )
    assert told.returncode and "pip install 'syncopate[experiments]'" in told.stderr


@pytest.mark.slow
def test_the_command_trains_from_a_wheel(core, elsewhere):
    (wheel,) = core.parents[1].glob("*.whl")
    subprocess.run([core / "pip", "install", "--quiet", f"{wheel}[experiments]"], check=True)
    flags = ["--seeds=1", "--arms=rr,cd_grab", "--learning_rates=0.5", "--epochs=3"]
    assert "CD-GraB" in ran([core / "syncopate", "cd_grab", "--task=digits", *flags], elsewhere)
    preset = "from syncopate import command as c; print(c.with_preset('--preset=qsr_vit_b_4096'))"
    assert "--task=imagenet_vit_b" in ran([core / "python", "-c", preset], core)
