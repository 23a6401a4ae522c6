"""What all processes of a run must have in common, compared before anything is trained.

Processes whose settings differ train together and write the settings of process 0, or wait for
each other without end. So each says what it has, process 0 compares, and all hear what it found.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import jaxlib
import numpy as np
from absl import flags

from experiments.tasks import digest

# What differs by right: a process's number, its way to process 0, and where its data lie, which are
# compared themselves.
OWN = ("process_id", "coordinator_address", "data_dir")
CONFIG = ("jax_enable_x64", "jax_default_prng_impl", "jax_default_matmul_precision")
SETTINGS_SECONDS, DATA_SECONDS = 60.0, 600.0  # in which all must have spoken
SLACK = 10.0  # seconds more, in which process 0 has told the others what it found
NAMED = 8  # processes that one sentence names


class Store(Protocol):
    """What is used of the key-value store of JAX's coordinator."""

    def key_value_set(self, key: str, value: str) -> None: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


def check_settings(values: flags.FlagValues) -> None:
    """Compares flags, code and versions of all processes, right after they are connected.

    Raises:
      ValueError: on all of them, naming who differs in what, or who has said nothing.
    """
    _check({**_flags(values), **_code()}, "settings", SETTINGS_SECONDS)


def check_data(task) -> None:
    """Compares size and a hash of the task's training and test examples; raises the same."""
    facts = {part: f"{part} data {said_of(getattr(task, part))}" for part in ("train", "test")}
    _check(facts, "data", DATA_SECONDS)


def _check(facts, what, seconds):
    # No public function of JAX reaches the coordinator's store, and its collectives know no
    # deadline: devices that run different programs would wait in them for ever.
    from jax._src.distributed import global_state as state

    found = exchanged(state.client, state.process_id, state.num_processes, what, facts, seconds)
    if found:
        raise ValueError(
            f"the {what} of the processes differ: {'; '.join(found)}. They would train different "
            "things together, or wait for each other without end: start all of them with the same "
            "command, code and data."
        )


def exchanged(
    store: Store, number: int, count: int, what: str, facts: Mapping[str, str], seconds: float
) -> list[str]:
    """How the facts of `count` processes differ, in sentences, the same on all of them.

    Args:
      store: that all of them reach; number: of this process; what: the name of the exchange.
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
    silent = [n for n, text in enumerate(said) if text is None]
    found = differences([None if text is None else json.loads(text) for text in said])
    if silent:
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
                groups.setdefault((name, its, own), []).append(number)
    return [
        f"{_named(numbers)} has {its} where process 0 has {own}"
        for (_, its, own), numbers in groups.items()
    ]


def _named(numbers: Sequence[int]) -> str:
    """process 1; each of processes 1, 2."""
    shown = ", ".join(map(str, numbers[:NAMED]))
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return f"process {shown}" if len(numbers) == 1 else f"each of processes {shown}{more}"


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
    """How many examples there are, of which shapes, and a hash of them.

    Args:
      examples: {name: array[N, ...]}, shapes alone, or a random-access source.

    Example:
      >>> import numpy as np
      >>> said_of({"x": np.zeros((4, 2), np.float32)})
      'of 4 examples (x float32[4, 2]), hash ff754d490fac'
    """
    if not isinstance(examples, dict):
        return f"of {len(examples)} examples, hash {digest.set_hash(examples)[:12]}"
    leaves = sorted(examples.items())
    shapes = ", ".join(f"{k} {np.dtype(x.dtype)}{list(x.shape)}" for k, x in leaves)
    text = f"of {leaves[0][1].shape[0]} examples ({shapes})"
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in examples.values()):  # of a dry run
        return text
    return f"{text}, hash {digest.set_hash(examples)[:12]}"
