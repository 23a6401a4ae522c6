"""The batches of a run with echoing."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ordering.base import State
from ordering.data.epochs import Epochs
from ordering.data.loader import LoadError, check_batches, describe_error, on_device
from ordering.data.place import ReadState
from ordering.echo.plans import EchoPlan, Factor, Measured
from syncopate import plans
from syncopate.unstable import multihost_utils


def ready_everywhere(ready: bool) -> bool:
    """Whether the next batch of every process is ready, found by a small exchange."""
    if jax.process_count() == 1:
        return bool(ready)
    return bool(np.all(multihost_utils.process_allgather(np.uint8(ready))))


class Repeated(Iterator):
    """One batch per step; see `repeat`. After an error, such as a late batch, call `next` again.

    Attributes:
      step: number of the last step, -1 before the first.
      load: number of the load of its batch.
      fresh: whether it was the first step with this load.
    """

    def __init__(
        self,
        loads: Any,
        plan: Any,
        steps: int,
        count: int,
        uses: int,
        again: bool,
        stop_with_loads: bool,
    ):
        self._loads, self._source, self._plan = loads, iter(loads), plan
        self.step, self.load, self.fresh = steps - 1, count - 1, False
        self._uses, self._stop_with_loads = uses, stop_with_loads
        self._failed: LoadError | None = None
        self._batch: Any = self._fetch(steps, count - 1, may_end=False) if again else None

    def __next__(self) -> PyTree[jax.Array]:
        step, total = self.step + 1, self._plan.total_steps
        if step == total:
            raise StopIteration
        fresh = self._plan.decide(
            step, uses=self._uses, ready=lambda: ready_everywhere(self._loads.ready())
        )
        if fresh:
            self._batch = self._fetch(step, self.load + 1, may_end=self._stop_with_loads)
        elif any(leaf.is_deleted() for leaf in jax.tree.leaves(self._batch)):
            raise ValueError(
                f"step {step} uses load {self.load} again, but step {step - 1} donated its "
                "arrays: do not donate the batch, or donate a copy, jax.tree.map(jnp.copy, batch)."
            )
        self.step, self.load, self.fresh = step, self.load + fresh, fresh
        self._uses = 1 if fresh else self._uses + 1
        return self._batch

    def _fetch(self, step, load, *, may_end):
        if self._failed:  # a generator that has failed would now end
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
                f"is missing: the input ended, and step {step} of {self._plan.total_steps} "
                "needs it. Chain more epochs, or pass stop_with_loads=True.",
            ) from None
        except LoadError:
            raise
        except Exception as error:
            if isinstance(self._loads, Epochs):
                raise
            what = f"failed in step {step}: {describe_error(error)}."
            self._failed = LoadError(load, f"{what} Resume from this step.")
            raise self._failed from error

    @property
    def order_state(self) -> State:
        """That of `Epochs`."""
        return self._reads().order_state

    def observe(self, rows: PyTree) -> None:
        """Observes the gradients of a fresh batch; those of a repeated batch are ignored."""
        if self.fresh:
            self._reads().observe(rows)

    def advance(self, order_state: State) -> None:
        """Adopts the state from a step that observed a fresh batch itself."""
        self._reads().advance(order_state)

    def sync(self) -> None:
        """That of `Epochs`."""
        self._reads().sync()

    def state(self) -> ReadState:
        """The state to resume from, also between two uses of a batch, which is then read again.

        `repeat(read_epochs(..., state=), plan)` continues there.
        """
        reads, uses = self._reads(), self._uses
        if not reads.observed:
            return reads.state_at(self.step, 0)
        again = uses and self._plan.again(self.step + 1, uses)
        return reads.state_at(self.step + 1, uses if again else 0)

    def _reads(self) -> Epochs:
        if not isinstance(self._loads, Epochs):
            raise ValueError(
                f"the loads are a {type(self._loads).__name__}, which keeps no order: pass the "
                "result of ordering.data.read_epochs."
            )
        return self._loads


def repeat(
    loads: Iterable[PyTree],
    plan: EchoPlan | Factor | Measured,
    *,
    first_step: int = 0,
    stop_with_loads: bool = False,
) -> Repeated:
    """One batch per step: a fresh one from `loads` if the plan loads, else the last one again.

    A batch is placed on the device once, when it is loaded. An echoed step moves nothing from the
    host and does not read `loads`.

    `adaptive` checks whether a batch is ready when `next` is called. Wait for the previous step
    first (`jax.block_until_ready`): a host that runs ahead of the device finds fewer batches ready.

    Args:
      loads: `read_epochs`, which resumes from its own state; or an iterable of batches, trees of
        arrays. `adaptive` needs `read_epochs` or `prefetch_to_device`.
      plan: a plan or policy of `ordering.echo`; without total_steps the run ends with the loads.
      first_step: the step at which to resume, for an iterable, which must start at load
        `plan.first_load(first_step)`. `adaptive` must have the decisions before it.
      stop_with_loads: ends the run when `loads` ends, as after an epoch, instead of raising.

    Returns:
      A `Repeated` iterator of batches. Its `step`, `load` and `fresh` describe the last batch; both
      numbers count from the start of the run. `observe`, `advance` and `state` are those of
      `read_epochs`, which gets each batch once.

    Raises:
      ValueError: for values out of range; from `next`, for an empty source, or if a step donated a
        batch that is used again.
      LoadError: from `next`, with the number of a load that fails, is late or is missing; after a
        late load, `next` may be called again.

    Examples:
      >>> import numpy as np
      >>> from syncopate import ordering
      >>> plan = ordering.echo.fixed(2, total_steps=4)
      >>> batches = ordering.echo.repeat((np.full(3, i) for i in range(2)), plan)
      >>> for batch in batches:
      ...     print(batches.step, batches.load, batches.fresh, batch)
      0 0 True [0 0 0]
      1 0 False [0 0 0]
      2 1 True [1 1 1]
      3 1 False [1 1 1]

    References:
      Choi, Passos, Shallue, Dahl, Faster Neural Network Training with Data Echoing, 2019,
      https://arxiv.org/abs/1907.05550
    """
    if not isinstance(plan, EchoPlan | Factor | Measured):
        raise ValueError(
            f"plan is a {type(plan).__name__}: pass a plan, such as ordering.echo.fixed(4) or "
            "ordering.echo.adaptive(max_factor=4)."
        )
    check_batches("loads", loads)
    if plan.online and not hasattr(loads, "ready"):
        raise ValueError(
            "adaptive asks whether a batch is ready: pass loads=prefetch_to_device(...)."
        )
    stop_with_loads = stop_with_loads or plan.total_steps is None
    if isinstance(loads, Epochs):
        if first_step:
            raise ValueError(
                f"first_step is {first_step}, but read_epochs resumes from its own state: "
                "leave first_step out."
            )
        again = loads.uses > 0
        place = loads.steps, loads.loads + again, loads.uses
    else:
        first_step = plans.check_whole("first_step", first_step, 0, plan.most_steps)
        count, uses = plan.place(first_step)
        place = first_step, count, uses
        again = first_step != plan.total_steps and plan.first_load(first_step) < count
    return Repeated(loads, plan, *place, again, stop_with_loads)
