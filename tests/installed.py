"""The package as a user has it: a wheel of this clone, and calls that find nothing of the clone."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("ordering", "local_opt", "syncopate")
BUNDLED = ("experiments", "models")


def built(folder):
    """A wheel, built in a folder from a copy: setuptools leaves files beside its sources."""
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    module_of(ROOT / "docs" / "address.py").write_package(folder)
    for name in (*PACKAGES, *BUNDLED):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "."]
    subprocess.run(build, cwd=folder, check=True)
    return next(folder.glob("*.whl"))


def unpacked(wheel):
    """The folder that a wheel of pure Python becomes in site-packages."""
    folder = wheel.parent / "site-packages"
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def ended(arguments, folder=ROOT, *, given=None, **environment):
    """A call in a folder that has ended; `given`: to its standard input."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    environment = inherited | {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        [*map(str, arguments)],
        cwd=folder,
        env=environment,
        input=given,
        capture_output=True,
        text=True,
        timeout=600,
    )


def ran(arguments, folder, **options):
    """What such a call prints, which ends well."""
    done = ended(arguments, folder, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def module_of(path):
    """A file that no package has, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
