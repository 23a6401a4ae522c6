"""One comparison of all processes before they train.

Processes with different settings would train together and record only those of process 0, or wait
in collectives of different programs for ever. So they compare through the store of JAX's
coordinator, which has timeouts.
"""

import json
import time
from collections.abc import Mapping

import jax

from experiments.distributed import deadlines
from syncopate.refusals import UserError
from syncopate.unstable import coordination_client


def check(facts: Mapping[str, str]) -> None:
    """Compares facts of all processes, {name: description}; once in a run.

    Raises:
      ValueError: on all processes; it names those that differ or do not answer, and how.
    """
    if not deadlines.several():
        return
    store, place, count = coordination_client(), jax.process_index(), jax.process_count()
    if unequal := differences(store, place, count, facts, deadlines.timeout):
        raise UserError(
            f"the processes differ: {'; '.join(unequal)}. Start all of them with the same command, "
            "code and data."
        )


def differences(store, number: int, count: int, facts: Mapping, seconds: float) -> list[str]:
    """Sentences on how the facts of `count` processes differ from those of process 0."""
    store.key_value_set(f"facts/{number}", json.dumps(facts))
    until, first, sentences = time.monotonic() + seconds, None, []
    for process in range(count):
        text = deadlines.value_of(store, f"facts/{process}", until - time.monotonic())
        if text is None:
            sentences.append(
                f"process {process} did not answer within {seconds:g} s: look at its output"
            )
            continue
        its = json.loads(text)
        first = first or its
        for name in sorted(first.keys() | its):
            one, other = (given.get(name, f"no {name}") for given in (its, first))
            if one != other:
                sentences.append(f"process {process} has {one} where process 0 has {other}")
    return sentences
