"""Checks that processes agree before they train, and gives every wait between them a timeout.

Processes with different settings would train together and record only those of process 0, or wait
for each other for ever. So each process writes its own into the store of JAX's coordinator, and all
compare them.

Collectives have no timeout, and a thread that waits in one receives no exception. So a timer prints
what is known and ends the process; whatever started the processes then ends the others.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import pathlib
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import jaxlib
import numpy as np
from absl import flags

import ordering.data
from experiments.cluster import strict
from experiments.cluster.entry import TIMEOUT
from syncopate import unstable
from syncopate.refusals import UserError

# Flags that may differ: a process's number, its address of process 0, and its data's folder (the
# data themselves are compared).
PER_PROCESS = ("process_id", "coordinator_address", "data_dir")
# Of JAX: they decide a run's numbers.
CONFIG = (
    "jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset",
    "jax_high_dynamic_range_gumbel", "jax_default_matmul_precision",
)  # fmt: skip
SETTINGS_SECONDS, DATA_SECONDS = 60.0, 600.0  # timeouts of the comparisons
WHOLE = 2**28  # bytes up to which a set is hashed as a whole: about a second
PACKAGES = ("experiments", "local_opt", "models", "ordering", "syncopate")
SAMPLED = 1000  # examples of larger arrays and of sources, evenly spaced
DEVICES = "--xla_force_host_platform_device_count"  # splits a CPU, and computes the same
ASKING = 5.0  # seconds to ask the coordinator for the progress of the others
PLACES = "after"  # key of each process's progress in the coordinator's store

timeout = TIMEOUT  # of this process: see `processes.start`


def several() -> bool:
    """Whether there are other processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def check_data(task) -> None:
    """Compares size and hash of the task's training and test sets."""
    if several():
        facts = {}
        for part, data in {"train": task.train, "test": task.test}.items():
            size = len(ordering.data.as_source(data))
            digest = set_hash(data)[:12]
            facts[part] = f"{part} data of {size} examples, hash {digest}"
        check("data", facts, DATA_SECONDS)


def check(what: str, facts: Mapping[str, str], seconds: float) -> None:
    """Compares facts of all processes, {name: description}.

    Raises ValueError on all of them, naming the processes that differ or do not answer, and how.
    """
    differences = exchanged(store(), jax.process_index(), jax.process_count(), what, facts, seconds)
    if differences:
        raise UserError(
            f"the {what} of the processes differ: {'; '.join(differences)}. Start all of them with "
            "the same command, code and data."
        )


def exchanged(
    store, number: int, count: int, what: str, facts: Mapping[str, str], seconds: float
) -> list[str]:
    """Sentences on how the facts of `count` processes differ from those of process 0.

    A process that has not answered in time is named too.
    """
    store.key_value_set(f"{what}/{number}", strict.dumps(facts))
    until, first, differences = time.monotonic() + seconds, None, []
    for process in range(count):
        text = _get(store, f"{what}/{process}", until - time.monotonic())
        if text is None:
            differences.append(
                f"process {process} did not answer within {seconds:g} s: look at its output"
            )
            continue
        its = strict.loads(text, f"what process {process} says")
        first = first or its
        for name in sorted(first.keys() | its):
            one, other = (given.get(name, f"no {name}") for given in (its, first))
            if one != other:
                differences.append(f"process {process} has {one} where process 0 has {other}")
    return differences


def store():
    # JAX's collectives have no timeout: devices of different programs would wait for ever.
    return unstable.coordination_client()


def _get(store, key, seconds) -> str | None:
    """The value of a key in the store; None after the timeout."""
    try:
        return store.blocking_key_value_get(key, max(1, round(1e3 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def facts_of(values: flags.FlagValues) -> dict[str, str]:
    """All flags but absl's own, hash of the code, versions, and JAX's settings."""
    result = {"program": f"the program {os.path.basename(sys.argv[0])}"}
    for module, defined in values.flags_by_module_dict().items():
        for flag in defined:
            if not module.startswith("absl") and flag.name not in PER_PROCESS:
                result[flag.name] = flag.serialize() or f"--{flag.name} unset"
    facts = jax_settings() | {"code": code_hash()[:12], "python": platform.python_version()}
    facts |= {module.__name__: module.__version__ for module in (jax, jaxlib, np)}
    return result | {name: f"{name} {fact}" for name, fact in facts.items()}


def jax_settings() -> dict:
    """The settings of JAX that decide a run's numbers."""
    return {name: getattr(jax.config, name) for name in CONFIG}


@contextlib.contextmanager
def limited(seconds: float, explain: Callable[[], str]) -> Iterator[None]:
    """If the body takes longer, prints `explain()` and ends this process with exit code 1."""

    def leave():
        sys.stderr.write(f"{explain()}\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def for_others(what: str) -> contextlib.AbstractContextManager:
    """Puts a timeout on the body, which waits for `what` of other processes, if there are any."""
    if not several():
        return contextlib.nullcontext()
    return limited(timeout, lambda: waited(jax.process_index(), what, timeout, _places()))


def for_disk(what: str, path: str) -> contextlib.AbstractContextManager:
    """`for_others`, also for a single process: a disk may never answer."""
    alone = f"{what} has taken {timeout:g} s in {path!r}: look at that disk. Then give the command"
    advice = f"{alone} again, or pass a longer --timeout."
    return for_others(what) if several() else limited(timeout, lambda: advice)


def came_to(step: int) -> None:
    """Records in the coordinator's store that this process has finished a step."""
    if several():
        place = f"{PLACES}/{jax.process_index()}"
        with for_others("process 0 to record the progress of this one"):
            store().key_value_set(place, str(step), allow_overwrite=True)


def finished(tree, what: str):
    """`jax.block_until_ready` with a timeout, for arrays that depend on other processes."""
    with for_others(what):
        return jax.block_until_ready(tree)


def waited(process: int, what: str, seconds: float, places: Mapping[int, int]) -> str:
    """The message after a timeout, naming the processes that are behind in {process: step}."""
    behind = {n: step for n, step in places.items() if step < places.get(process, 0)} or places
    seen = [f"process {n} after step {behind[n]}" for n in sorted(behind) if n != process]
    return (
        f"process {process} has waited {seconds:g} s for {what}. Last seen: "
        f"{', '.join(seen) or 'none, as process 0 does not answer'}: look at its output. Then "
        "give the command again, or pass a longer --timeout."
    )


def _places() -> dict[int, int]:
    """{process: last step}; empty if the coordinator does not answer."""
    if _get(store(), f"{PLACES}/0", ASKING) is None:
        return {}
    entries = store().key_value_dir_get(PLACES)
    return {int(key.rpartition("/")[2]): int(value) for key, value in entries}


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
