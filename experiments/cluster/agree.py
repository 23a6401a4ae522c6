"""Processes agree before they train, and no wait of one for the others is without end.

Processes whose settings differ would train together and write the settings of process 0, or wait
for each other for ever. So each says what it has, in the store of JAX's coordinator, and compares.

Collectives know no deadline, and no exception reaches a thread that waits in one. So a timer writes
what is known and ends the process; whoever has started the processes then ends the others.
"""

import contextlib
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import jaxlib
import numpy as np
from absl import flags

import ordering.input
from experiments.cluster import digest

# What differs by right: a process's number, its way to process 0, and where its data lie, which are
# compared themselves.
OWN = ("process_id", "coordinator_address", "data_dir")
CONFIG = ("jax_enable_x64", "jax_default_prng_impl", "jax_default_matmul_precision")
SETTINGS_SECONDS, DATA_SECONDS = 60.0, 600.0  # in which all must have spoken
PATIENCE = 1800.0  # seconds; a slow compilation elsewhere is waited for too
ASKING = 5.0  # seconds for the coordinator to say where the others stand
PLACES = "after"  # in the coordinator's store: how far each process has come

patience = PATIENCE  # of this process: see `processes.start`


def several() -> bool:
    """Whether there are other processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def check_settings(values: flags.FlagValues) -> None:
    """Compares flags, code and versions of all processes, right after they are connected.

    Raises:
      ValueError: on all of them, naming who differs in what, or who has said nothing.
    """
    check("settings", facts_of(values), SETTINGS_SECONDS)


def check_data(task) -> None:
    """Compares size and a hash of the task's training and test examples; raises the same."""
    if several():
        facts = {}
        for part, data in {"train": task.train, "test": task.test}.items():
            size, _ = ordering.input.reader(data)
            known = digest.set_hash(data)[:12]
            facts[part] = f"{part} data of {size} examples, hash {known}"
        check("data", facts, DATA_SECONDS)


def check(what: str, facts: Mapping[str, str], seconds: float) -> None:
    """Compares facts of all processes, {name: what is said of it}; raises as `check_settings`."""
    found = exchanged(store(), jax.process_index(), jax.process_count(), what, facts, seconds)
    if found:
        raise ValueError(
            f"the {what} of the processes differ: {'; '.join(found)}. They would train different "
            "things together, or wait for each other without end: start all of them with the same "
            "command, code and data."
        )


def exchanged(
    store, number: int, count: int, what: str, facts: Mapping[str, str], seconds: float
) -> list[str]:
    """How the facts of `count` processes differ from those of process 0, in sentences.

    Args:
      store: of JAX's coordinator, for keys and values; number: of this process; what: the name of
        the exchange; seconds: after which a process that has said nothing is named.
    """
    store.key_value_set(f"{what}/{number}", json.dumps(dict(facts)))
    until, first, found = time.monotonic() + seconds, None, []
    for process in range(count):
        text = _get(store, f"{what}/{process}", until - time.monotonic())
        if text is None:
            found.append(f"process {process} said nothing for {seconds:g} s: look at its output")
            continue
        its = json.loads(text)
        first = first or its
        for name in sorted(first.keys() | its):
            one, other = (said.get(name, f"no {name}") for said in (its, first))
            if one != other:
                found.append(f"process {process} has {one} where process 0 has {other}")
    return found


def store():
    # No public function of JAX reaches the coordinator's store, and its collectives know no
    # deadline: devices that run different programs would wait in them for ever.
    from jax._src.distributed import global_state

    return global_state.client


def _get(store, key, seconds) -> str | None:
    """What the store holds; None if nobody has put it there in time."""
    try:
        return store.blocking_key_value_get(key, max(1, round(1e3 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def facts_of(values: flags.FlagValues) -> dict[str, str]:
    """Flags as they would be given (but absl's own), code, versions, and JAX's settings."""
    found = {"program": f"the program {os.path.basename(sys.argv[0])}"}
    for module, defined in values.flags_by_module_dict().items():
        for flag in defined:
            if not module.startswith("absl") and flag.name not in OWN:
                found[flag.name] = flag.serialize() or f"--{flag.name} unset"
    facts = {name: getattr(jax.config, name) for name in CONFIG}
    facts |= {"code": digest.code_hash()[:12], "python": platform.python_version()}
    facts |= {module.__name__: module.__version__ for module in (jax, jaxlib, np)}
    return found | {name: f"{name} {fact}" for name, fact in facts.items()}


@contextlib.contextmanager
def limited(seconds: float, told: Callable[[], str]) -> Iterator[None]:
    """Ends this process with exit code 1, after what `told()` says, if the body takes longer."""

    def leave():
        sys.stderr.write(f"{told()}\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def for_others(what: str) -> Iterator[None]:
    """The body waits for other processes, to have `what`; nothing for a process alone."""
    if not several():
        yield
        return
    with limited(patience, lambda: told(jax.process_index(), what, patience, _places())):
        yield


def came_to(step: int) -> None:
    """Tells the others, by the coordinator, after which step this process is."""
    if several():
        place = f"{PLACES}/{jax.process_index()}"
        with for_others("process 0 to note how far this one is"):
            store().key_value_set(place, str(step), allow_overwrite=True)


def finished(tree, what: str):
    """`jax.block_until_ready`, of arrays that other processes have a part in."""
    with for_others(what):
        return jax.block_until_ready(tree)


def told(own: int, what: str, seconds: float, places: Mapping[int, int]) -> str:
    """
    Example:
      >>> told(0, "the mean loss", 60, {0: 40, 1: 24, 2: 40})  # doctest: +NORMALIZE_WHITESPACE
      'process 0 has waited 60 s for the mean loss. Last seen: process 1 after step 24: look at its
      output. Then give the command again, or a longer --patience.'
    """
    behind = {n: step for n, step in places.items() if step < places.get(own, 0)} or places
    seen = [f"process {n} after step {behind[n]}" for n in sorted(behind) if n != own]
    return (
        f"process {own} has waited {seconds:g} s for {what}. Last seen: "
        f"{', '.join(seen) or 'nobody, for process 0 does not answer'}: look at its output. Then "
        "give the command again, or a longer --patience."
    )


def _places() -> dict[int, int]:
    """{process: the step after which it was}; nothing where the coordinator does not answer."""
    if _get(store(), f"{PLACES}/0", ASKING) is None:
        return {}
    found = store().key_value_dir_get(PLACES)
    return {int(key.rpartition("/")[2]): int(value) for key, value in found}
