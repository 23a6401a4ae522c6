"""Processes agree before they train, and no wait of one for the others is without end.

Processes whose settings differ would train together and write the settings of process 0, or wait
for each other for ever. So each says what it has, process 0 compares, and all hear what it found.

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
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jaxlib
import numpy as np
from absl import flags

from experiments.cluster import digest

# What differs by right: a process's number, its way to process 0, and where its data lie, which are
# compared themselves.
OWN = ("process_id", "coordinator_address", "data_dir")
CONFIG = ("jax_enable_x64", "jax_default_prng_impl", "jax_default_matmul_precision")
SETTINGS_SECONDS, DATA_SECONDS = 60.0, 600.0  # in which all must have spoken
SLACK = 10.0  # seconds more, in which process 0 has told the others what it found
PATIENCE = 1800.0  # seconds; a slow compilation elsewhere is waited for too
ASKING = 5.0  # seconds for the coordinator to say where the others stand
PLACES = "syncopate/after"  # of the coordinator's store: how far each process has come

patience = PATIENCE  # of this process: see `processes.start`


def several() -> bool:
    """Whether there are other processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def check_settings(values: flags.FlagValues) -> None:
    """Compares flags, code and versions of all processes, right after they are connected.

    Raises:
      ValueError: on all of them, naming who differs in what, or who has said nothing.
    """
    _check({**_flags(values), **_code()}, "settings", SETTINGS_SECONDS)


def check_data(task) -> None:
    """Compares size and a hash of the task's training and test examples; raises the same."""
    if several():
        facts = {part: f"{part} data {said_of(getattr(task, part))}" for part in ("train", "test")}
        _check(facts, "data", DATA_SECONDS)


def _check(facts, what, seconds):
    found = exchanged(_store(), jax.process_index(), jax.process_count(), what, facts, seconds)
    if found:
        raise ValueError(
            f"the {what} of the processes differ: {'; '.join(found)}. They would train different "
            "things together, or wait for each other without end: start all of them with the same "
            "command, code and data."
        )


def _store():
    # No public function of JAX reaches the coordinator's store, and its collectives know no
    # deadline: devices that run different programs would wait in them for ever.
    from jax._src.distributed import global_state

    return global_state.client


def exchanged(
    store, number: int, count: int, what: str, facts: Mapping[str, str], seconds: float
) -> list[str]:
    """How the facts of `count` processes differ, in sentences, the same on all of them.

    Args:
      store: of JAX's coordinator, for keys and values; number: of this process; what: the name of
        the exchange.
      facts: {name: what is said of it}.
      seconds: after which a process that has said nothing is named.
    """
    key = f"syncopate/{what}"
    store.key_value_set(f"{key}/{number}", json.dumps(dict(facts)))
    if number:
        found = _get(store, f"{key}/found", seconds + SLACK)
        nothing = f"process 0 has said nothing for {seconds + SLACK:g} s: look at its output"
        return [nothing] if found is None else json.loads(found)
    until = time.monotonic() + seconds
    said = [_get(store, f"{key}/{n}", until - time.monotonic()) for n in range(count)]
    found = differences([None if text is None else json.loads(text) for text in said])
    if silent := [n for n, text in enumerate(said) if text is None]:
        found.append(f"{_named(silent)} said nothing for {seconds:g} s: look at that output")
    store.key_value_set(f"{key}/found", json.dumps(found))
    return found


def _get(store, key, seconds) -> str | None:
    """What the store holds; None if nobody has put it there in time."""
    try:
        return store.blocking_key_value_get(key, max(1, round(1e3 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def differences(said: Sequence[Mapping[str, str] | None]) -> list[str]:
    """Who differs from process 0 in what, in sentences.

    Args:
      said: by the processes, in their order: {name: what is said of it}; None for a silent one.

    Example:
      >>> differences([{"seed": "--seed=0"}, {"seed": "--seed=1"}])
      ['process 1 has --seed=1 where process 0 has --seed=0']
    """
    first, groups = said[0] or {}, {}
    for number, facts in enumerate(said):
        for name in {**first, **facts} if facts is not None else ():
            its, own = facts.get(name, f"no {name}"), first.get(name, f"no {name}")
            if its != own:
                groups.setdefault((its, own), []).append(number)
    return [
        f"{_named(numbers)} has {its} where process 0 has {own}"
        for (its, own), numbers in groups.items()
    ]


def _named(numbers: Sequence[int]) -> str:
    """process 1; each of processes 1, 2."""
    several = "each of processes" if len(numbers) > 1 else "process"
    return f"{several} {', '.join(map(str, numbers))}"


def _flags(values) -> dict[str, str]:
    """{flag: as it would be given}, but for absl's own, which change what is printed alone."""
    found = {"program": f"the program {os.path.basename(sys.argv[0])}"}
    for module, defined in values.flags_by_module_dict().items():
        for flag in defined:
            if not module.startswith("absl") and flag.name not in OWN:
                found[flag.name] = flag.serialize() or f"--{flag.name} unset"
    return found


def _code() -> dict[str, str]:
    """A hash of the source, the versions that compute, and JAX's settings that change numbers."""
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "numpy": np.__version__}
    versions["python"] = platform.python_version()
    return {
        "code": f"code {digest.code_hash()[:12]}",
        **{name: f"{name} {version}" for name, version in versions.items()},
        **{name: f"{name}={getattr(jax.config, name)}" for name in CONFIG},
    }


def said_of(examples) -> str:
    """How many examples there are, and a hash of them.

    Args:
      examples: {name: array[N, ...]}, shapes alone, or a random-access source.

    Example:
      >>> import numpy as np
      >>> said_of({"x": np.zeros((4, 2), np.float32)})
      'of 4 examples, hash ff754d490fac'
    """
    first = jax.tree.leaves(examples)[0] if isinstance(examples, dict) else examples
    if isinstance(first, jax.ShapeDtypeStruct):  # of a dry run
        return f"of the shapes {examples}"
    return f"of {len(first)} examples, hash {digest.set_hash(examples)[:12]}"


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
    with limited(patience, lambda: _told(jax.process_index(), what, patience, _places())):
        yield


def came_to(step: int) -> None:
    """Tells the others, by the coordinator, after which step this process is."""
    if several():
        place = f"{PLACES}/{jax.process_index()}"
        with for_others("process 0 to note how far this one is"):
            _store().key_value_set(place, str(step), allow_overwrite=True)


def finished(tree, what: str):
    """`jax.block_until_ready`, of arrays that other processes have a part in."""
    with for_others(what):
        return jax.block_until_ready(tree)


def _told(own: int, what: str, seconds: float, places: Mapping[int, int] | None) -> str:
    """
    Example:
      >>> _told(0, "the mean loss", 60, {0: 40, 1: 24, 2: 40})  # doctest: +NORMALIZE_WHITESPACE
      'process 0 has waited 60 s, after step 40, for the mean loss. Process 1 was last seen after
      step 24: look at its output. Then give the command again, or a longer --patience.'
    """
    again = "Then give the command again, or a longer --patience."
    if places is None:
        return (
            f"process {own} has waited {seconds:g} s for {what}. Process 0, where the others are "
            f"known, does not answer: look at its output. {again}"
        )
    where = f", after step {places[own]}," if own in places else ""
    behind = {n: step for n, step in places.items() if step < places.get(own, step)}
    others = behind or {n: step for n, step in places.items() if n != own}
    seen = ", ".join(f"{n} was last seen after step {step}" for n, step in sorted(others.items()))
    look = f"Process {seen}: look at its output." if seen else "Look at the others' output."
    return f"process {own} has waited {seconds:g} s{where} for {what}. {look} {again}"


def _places() -> dict[int, int] | None:
    """{process: the step after which it was}; None where the coordinator does not answer."""
    found = []

    def ask():
        found.append(_store().key_value_dir_get(PLACES))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ASKING)
    if not found:
        return None
    return {int(key.rpartition("/")[2]): int(value) for key, value in found[0]}
