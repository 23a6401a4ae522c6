"""What all tests share. Hypothesis draws SYNCOPATE_CASES times as many cases, 1 if unset."""

import contextlib
import importlib.metadata
import os
import pathlib
import sys
import tempfile

from tests.cases import FAST_XLA, times

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count=8 {FAST_XLA}"
)
# Little programs that run once or twice: most of the time would go into optimising them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# With fewer threads, launches may take those for which a collective waits (docs/use/meshes.md).
os.environ.setdefault("PJRT_NPROC", "16")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Every process of the suite imports the same files: none compiles them again.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # What the tests have compiled once, with these versions, no later call compiles again.
    CACHE = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    VERSION = importlib.metadata.version("jaxlib")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(CACHE, "syncopate", f"jaxlib-{VERSION}")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import pytest
from absl import flags
from hypothesis import HealthCheck, settings

from tests import memory

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "syncopate",
    deadline=None,  # the first example of a shape compiles
    max_examples=times(25),
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("syncopate")


# Helpers, which have no tests, are imported where they are used: some of their rows compute.
collect_ignore = sorted(map(str, pathlib.Path(__file__).parent.glob("*.py")))


def pytest_configure(config):
    config.pluginmanager.register(memory)  # for the examples of docstrings, too


@pytest.fixture(autouse=True)
def empty_folder():
    """A test starts in a folder of its own: what others or commands have left changes nothing."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture
def parsed_flags():
    """Grain's processes ask for flags, which `absl.app.run` parses in a program."""
    before = flags.FLAGS.is_parsed()
    flags.FLAGS.mark_as_parsed()
    yield
    if not before:
        flags.FLAGS.unparse_flags()


@pytest.fixture
def optimised():
    """Programs are compiled as users compile them, for bits and bounds that hold of those alone."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a run of `train` that nothing disturbed, with checkpoints."""
    from tests.commands import SAVED, train_run

    folder = tmp_path_factory.mktemp("finished")
    train_run(SAVED, folder)
    return folder
