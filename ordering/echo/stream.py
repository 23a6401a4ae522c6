"""The batches of a run with echoing."""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from ordering.data.loader import LoadError, check_batches, on_device, said
from ordering.echo.plans import EchoPlan, Measured
from syncopate import plans
from syncopate.unstable import multihost_utils


class EchoStep(NamedTuple):
    """One step's batch; see `echo_batches`."""

    step: int
    load: int
    fresh: bool
    batch: PyTree


def ready_everywhere(ready: bool) -> bool:
    """Whether the next batch of every process is ready, found by a small exchange."""
    if jax.process_count() == 1:
        return bool(ready)
    return bool(np.all(multihost_utils.process_allgather(np.uint8(ready))))


def echo_batches(
    loads: Iterable[PyTree],
    policy: EchoPlan | Measured,
    *,
    first_step: int = 0,
    stop_with_loads: bool = False,
) -> Iterator[EchoStep]:
    """One batch per step: a fresh one from `loads` if the policy loads, else the last one again.

    A batch is placed on the device once, when it is loaded. An echoed step moves nothing from the
    host and does not read `loads`. The first batch is taken at the call.

    `adaptive` asks whether a batch is ready when `next` is called. Wait for the step before
    (`jax.block_until_ready`), as a host that runs ahead of the device finds fewer batches ready.

    Args:
      loads: an iterable of batches, trees of arrays; for `adaptive`, `prefetch_to_device` or
        `read_epochs`. In a run that resumes it starts at load `policy.first_load(first_step)`; for
        `adaptive`, at that of the `EchoPlan` of its decisions.
      policy: an `EchoPlan`, or `adaptive`.
      first_step: the step at which to resume; `adaptive` must know the decisions before it.
      stop_with_loads: ends the run when `loads` ends, as after an epoch, instead of raising.

    Returns:
      An iterator of records: `step`, the number of the step; `load`, the number of the load that
      brought the batch; `fresh`, True in the first step with this load and False where it is used
      again; `batch`, its arrays on the device. Both numbers count from the start of the run.

    Raises:
      ValueError: at the call, for an empty source, or values out of range; from `next`, if a
        step donated a batch that is used again.
      LoadError: from `next`, with the number of a load that fails, is late or is missing; after a
        late one `next` may be called again.

    Examples:
      >>> import numpy as np
      >>> from syncopate import ordering
      >>> plan = ordering.echo.fixed(2, total_steps=4)
      >>> loads = (np.full(3, i) for i in range(2))
      >>> for use in ordering.echo.echo_batches(loads, plan):
      ...     print(use.step, use.load, use.fresh, use.batch)
      0 0 True [0 0 0]
      1 0 False [0 0 0]
      2 1 True [1 1 1]
      3 1 False [1 1 1]

    References:
      Choi, Passos, Shallue, Dahl, Faster Neural Network Training with Data Echoing, 2019,
      https://arxiv.org/abs/1907.05550
    """
    if not isinstance(policy, EchoPlan | Measured):
        raise ValueError(
            f"policy is a {type(policy).__name__}: make an EchoPlan, such as "
            "ordering.echo.fixed(4, total_steps=T), or ordering.echo.adaptive(...)."
        )
    check_batches("loads", loads)
    if policy.online and not hasattr(loads, "ready"):
        raise ValueError(
            "adaptive asks whether a batch is ready: pass loads=prefetch_to_device(...)."
        )
    # The steps whose decisions are known.
    plans.check_whole("first_step", first_step, 0, policy.known.total_steps)
    stream = _Stream(loads, policy, first_step, stop_with_loads)
    for first in stream:  # now, so that this call raises for an empty source
        return itertools.chain([first], stream)
    return iter(())


class _Stream(Iterator):
    """The iterator; unlike a generator it goes on after an error, as of a late batch."""

    def __init__(self, loads, policy, step, stop_with_loads):
        self._loads, self._source, self._policy = loads, iter(loads), policy
        self._step, self._stop_with_loads = step, stop_with_loads
        known = policy.known
        self._count = int(known.loads_before(step))  # loads so far
        self._uses = step - int(known.load_steps[self._count - 1]) if step else 0
        self._failed = self._batch = None
        # The run resumes at an echoed step. After the last step it needs no batch.
        if step < policy.total_steps and known.first_load(step) < self._count:
            self._batch = self._fetch(self._count - 1, may_end=False)

    def __next__(self):
        step, policy = self._step, self._policy
        if step == policy.total_steps:
            raise StopIteration
        fresh = policy.decide(
            step, uses=self._uses, ready=lambda: ready_everywhere(self._loads.ready())
        )
        if fresh:
            self._batch = self._fetch(self._count, may_end=self._stop_with_loads)
            self._count, self._uses = self._count + 1, 0
        elif any(leaf.is_deleted() for leaf in jax.tree.leaves(self._batch)):
            raise ValueError(
                f"step {step} uses load {self._count - 1} again, but step {step - 1} donated its "
                "arrays: do not donate the batch, or donate a copy, jax.tree.map(jnp.copy, batch)."
            )
        self._step, self._uses = step + 1, self._uses + 1
        return EchoStep(step, self._count - 1, fresh, self._batch)

    def _fetch(self, load, *, may_end):
        if self._failed:  # a generator that failed would now end
            raise self._failed
        try:
            return on_device(next(self._source))
        except StopIteration:
            if load == 0:
                raise ValueError("the source is empty: pass at least one batch.") from None
            if may_end:
                raise
            raise LoadError(
                load,
                f"is missing: the input ended, and step {self._step} of {self._policy.total_steps} "
                "needs it. Chain more epochs, or pass stop_with_loads=True.",
            ) from None
        except LoadError:
            raise
        except Exception as error:
            what = f"failed in step {self._step}: {said(error)}."
            self._failed = LoadError(load, f"{what} Resume from this step.")
            raise self._failed from error
