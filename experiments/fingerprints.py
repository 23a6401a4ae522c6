"""What decides the numbers of a run, in short: hashes of data and code, settings, versions.

Processes compare it before they train, and checkpoints keep it.
"""

import functools
import hashlib
import importlib.util
import os
import pathlib
import platform
import sys

import jax
import jaxlib
import numpy as np
from absl import flags

import ordering.data
from experiments.entry import DEVICES

# Flags that may differ: a process's number, its address of process 0, and its data's folder (the
# data themselves are compared).
PER_PROCESS = ("process_id", "coordinator_address", "data_dir")
# Settings of JAX that affect a run's numbers.
CONFIG = (
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_high_dynamic_range_gumbel",
    "jax_default_matmul_precision",
)
WHOLE = 2**28  # bytes up to which a set is hashed as a whole: about a second
PACKAGES = ("experiments", "local_opt", "models", "ordering", "syncopate")
SAMPLED = 1000  # examples of larger arrays and of sources, evenly spaced


def facts(values: flags.FlagValues, data: str) -> dict[str, str]:
    """All flags but absl's own, hashes of the code and of the data, versions, JAX's settings."""
    result = {"program": f"the program {os.path.basename(sys.argv[0])}"}
    for module, defined in values.flags_by_module_dict().items():
        for flag in defined:
            if not module.startswith("absl") and flag.name not in PER_PROCESS:
                result[flag.name] = flag.serialize() or f"--{flag.name} unset"
    more = jax_settings() | {"code": code_hash()[:12], "python": platform.python_version()}
    more |= {module.__name__: module.__version__ for module in (jax, jaxlib, np)}
    more["data"] = f"of hash {data[:12]}"
    return result | {name: f"{name} {fact}" for name, fact in more.items()}


def jax_settings() -> dict:
    """The settings of JAX that decide a run's numbers."""
    return {name: getattr(jax.config, name) for name in CONFIG}


def data_hash(task) -> str:
    """Hash of both sets: lengths, shapes, types and examples; a sample if large or a source."""
    total = hashlib.sha256()
    recut = [] if task.recut is None else [{"text": task.recut.tokens}, {"at": task.recut.starts}]
    for data in (task.train, task.test, *recut):
        total.update(set_hash(data).encode())
    return total.hexdigest()[:32]


def set_hash(data) -> str:
    """Hash of one set: arrays by name, or a random-access source."""
    examples = ordering.data.as_source(data)
    size = len(examples)
    some = np.unique(np.linspace(0, size - 1, min(size, SAMPLED)).astype(int))
    small = isinstance(data, dict) and sum(x.nbytes for x in jax.tree.leaves(data)) <= WHOLE
    total = hashlib.sha256(f"{size} {small}".encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(data if small else examples[some]):
        leaf = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        total.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
    return total.hexdigest()


def conditions() -> dict[str, str]:
    """What may change between two calls of a run, and decides the last digits of its numbers."""
    xla = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICES)]
    return {
        "code": code_hash()[:12],
        "cores": str(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "XLA_FLAGS": " ".join(sorted(xla)),
    }


@functools.cache
def code_hash() -> str:
    """Hash of the repository's source files, the same in a clone and in a wheel."""
    total = hashlib.sha256()
    for package in PACKAGES:
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        root = pathlib.Path(folder).parent
        paths = sorted(path.relative_to(root) for path in root.glob(f"{package}/**/*.py"))
        for path in paths:
            if "_bundled" not in path.parts:  # in a wheel: experiments and models
                total.update(str(path).encode() + b"\0" + (root / path).read_bytes())
    return total.hexdigest()
