"""The batches of a run with echoing."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Key, PyTree

from ordering.base import State
from ordering.data.epochs import Epochs, check_rows
from ordering.data.loader import LoadError, check_batches, describe_error, on_device
from ordering.data.place import ReadState
from ordering.echo.minibatches import Cut, check_parts, cut_of
from ordering.echo.plans import EchoPlan, Factor, Measured
from syncopate import plans
from syncopate.unstable import multihost_utils


def ready_everywhere(ready: bool) -> bool:
    """Whether the next batch of every process is ready, found by a small exchange."""
    if jax.process_count() == 1:
        return bool(ready)
    return bool(np.all(multihost_utils.process_allgather(np.uint8(ready))))


class Place(NamedTuple):
    """Where a run begins or goes on."""

    begun: int = 0  # steps of the plan
    loads: int = 0
    uses: int = 0  # uses of the last load that have begun
    done: int = 0  # minibatches of a use that has begun; 0 if the next one begins
    again: bool = False  # whether the first batch that is read is that of the last load


class Repeated(Iterator):
    """One batch per step; see `repeat`. After an error, such as a late batch, call `next` again.

    Attributes:
      step: number of the last step, -1 before the first.
      load: number of the load of its batch.
      fresh: whether it was in the first use of this load.
    """

    def __init__(self, loads: Any, plan: Any, cut: Cut, place: Place, stop_with_loads: bool):
        self._loads, self._source, self._plan, self._cut = loads, iter(loads), plan, cut
        self._begun, self._uses, self._done = place.begun, place.uses, place.done or cut.parts
        self.load, self.fresh = place.loads - 1, False
        self._stop_with_loads = stop_with_loads
        self._failed: Exception | None = None
        self._rows: list[PyTree] = []  # gradients that wait for those of further minibatches
        self._seen = cut.parts  # minibatches of the load's first use that were observed
        self._left: Any = collections.deque()  # rows of the further minibatches of this use
        self._batch: Any = None
        if place.again:
            self._batch = self._fetch(place.begun, self.load, may_end=False)
            inside = place.done or getattr(loads, "used", 0)
            self._left = self._resume(place) if inside else self._left
        self.step = (self._begun - 1) * cut.parts + self._done - 1

    def _resume(self, place):
        """The minibatches that are left of a use in which the run was saved."""
        self.fresh, left = self._uses == 1, self._minibatches(self._batch, self.load, self._uses)
        if not place.done:
            units = self._cut.units(self._batch)
            self._done, rest = divmod(self._loads.used, units)
            if rest or self._done >= self._cut.parts:
                raise ValueError(
                    f"minibatches is {self._cut.parts}, of {units} units, and the state was saved "
                    f"after {self._loads.used} units of a use: pass minibatches as before."
                )
            if self.fresh and self._loads.observes:
                self._rows, self._seen = [self._loads.rows], self._done
        return collections.deque([*left][self._done :])

    @property
    def age(self) -> int:
        """How many steps used minibatches of this load before the last step."""
        return (self._uses - 1) * self._cut.parts + self._done - 1

    def __next__(self) -> PyTree[jax.Array]:
        if self._cut.parts > 1 and not self._is_observed():
            raise ValueError(
                f"step {self.step} was not observed: call observe(rows) after each step of a "
                "first use, or read with an order that looks at no gradients."
            )
        if not self._left:
            self._begin_use()
        rows = self._left.popleft()
        self.step, self._done = self.step + 1, self._done + 1
        return self._batch if rows is None else self._cut.take(self._batch, rows)

    def _begin_use(self):
        use, load = self._begun, self.load
        if use == self._plan.total_steps:
            raise StopIteration
        fresh = self._plan.decide(
            use, uses=self._uses, ready=lambda: ready_everywhere(self._loads.ready())
        )
        if fresh:
            load += 1
            batch = self._fetch(use, load, may_end=self._stop_with_loads)
        elif any(leaf.is_deleted() for leaf in jax.tree.leaves(self._batch)):
            raise ValueError(
                f"step {self.step + 1} uses load {load} again, but step {self.step} donated its "
                "arrays: do not donate the batch, or donate a copy, jax.tree.map(jnp.copy, batch)."
            )
        else:
            batch = self._batch
        uses = 1 if fresh else self._uses + 1
        self._left = self._minibatches(batch, load, uses)
        self._batch, self.load, self.fresh = batch, load, fresh
        self._begun, self._uses, self._done = use + 1, uses, 0
        self._seen = 0 if fresh else self._cut.parts

    def _minibatches(self, batch, load, uses):
        """The rows of every minibatch of a use; None for a whole batch."""
        if self._cut.parts == 1:
            return collections.deque([None])
        try:
            return self._cut.order(self._cut.units(batch), load, uses - 1)
        except ValueError as error:
            self._failed = error  # the load is gone
            raise

    def _fetch(self, use, load, *, may_end):
        step, total = (x and x * self._cut.parts for x in (use, self._plan.total_steps))
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
                f"is missing: the input ended, and step {step} of {total} needs it. Chain more "
                "epochs, or pass stop_with_loads=True.",
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
        """The state of the order after the last step, as of `Epochs`."""
        return self._reads().order_state

    def observe(self, rows: PyTree) -> None:
        """Observes the gradients of a step in a first use; those of later uses are ignored.

        With minibatches, the order observes them at the end of the use.
        """
        if not self.fresh:
            return
        reads = self._reads()
        if self._cut.parts > 1 and reads.observes:
            self._rows.append(self._checked(rows))
            self._seen += 1
            if self._seen < self._cut.parts:
                return
            rows, self._rows = self._waiting(), []
        reads.observe(rows)

    def _checked(self, rows):
        check_rows(rows)
        axis, units = self._loads.unit_axis, self._cut.units(self._batch)
        if self._seen == self._done or any(x.shape[axis] != units for x in jax.tree.leaves(rows)):
            raise ValueError(
                f"observe got rows {jax.tree.map(jnp.shape, rows)} after {self._seen} of "
                f"{self._done} minibatches: call it once after each step, with {units} rows."
            )
        return jax.tree.map(lambda x: x.astype(jnp.float32), rows)

    def _waiting(self):
        """The gradients of this use that the order has not observed, in new arrays."""
        axis = self._reads().unit_axis
        joined = lambda *parts: jnp.copy(jnp.concatenate(parts, axis))  # noqa: E731
        return jax.tree.map(joined, *self._rows) if self._rows else ()

    def advance(self, order_state: State) -> None:
        """Adopts the state from a step that observed a fresh batch itself, without minibatches."""
        if self._cut.parts > 1:
            raise ValueError(
                f"advance takes the state after a whole batch, and minibatches is "
                f"{self._cut.parts}: pass the rows of each step to observe."
            )
        self._reads().advance(order_state)

    def sync(self) -> None:
        """Exchanges data that a coordinated order has deferred, as `Epochs.sync`."""
        self._reads().sync()

    def state(self) -> ReadState:
        """The state to resume from, also in the middle of a use; the batch is then read again.

        `repeat(read_epochs(..., state=), plan)` continues there.
        """
        reads, uses, observed = self._reads(), self._uses, self._is_observed()
        begun, done = divmod(self.step + 1 - (not observed), self._cut.parts)
        if done:
            used = done * self._cut.units(self._batch)
            return reads.state_at(begun, uses - 1, used, self._waiting())
        again = observed and uses and self._plan.again(begun, uses)
        return reads.state_at(begun, uses if again else 0)

    def _is_observed(self):
        """Whether the last step needs no further `observe`."""
        if self._cut.parts == 1 or not isinstance(self._loads, Epochs):
            return getattr(self._loads, "observed", True)
        return not self._loads.observes or self._seen >= self._done

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
    minibatches: int = 1,
    key: Key[jax.Array, ""] | None = None,
    axis: int = 0,
    first_step: int = 0,
    stop_with_loads: bool = False,
) -> Repeated:
    """One batch per step: a fresh one from `loads` if the plan loads, else the last one again.

    With minibatches, each of the plan's steps is one use of a batch, cut into N steps. Use u of
    load l goes through `permutation(fold_in(fold_in(key, l), u), rows)` from its beginning to its
    end, as PPO does, so a run that resumes needs no state but its step.

    A batch is placed on the device once, when it is loaded. An echoed step moves nothing from the
    host and does not read `loads`.

    `adaptive` checks whether a batch is ready when `next` is called. Wait for the previous step
    first (`jax.block_until_ready`): a host that runs ahead of the device finds fewer batches ready.

    Args:
      loads: `read_epochs`, which resumes from its own state; or an iterable of batches, trees of
        arrays. `adaptive` needs `read_epochs` or `prefetch_to_device`.
      plan: a plan or policy of `ordering.echo`; without total_steps the run ends with the loads.
      minibatches: N >= 1, a divisor of the rows of every batch.
      key: one random key, the same for all workers, which minibatches need.
      axis: >= 0, the axis of the rows in every leaf of an iterable's batches.
      first_step: the step at which to resume, for an iterable, which must start at load
        `plan.first_load(first_step // minibatches)`. `adaptive` must have the decisions before it.
      stop_with_loads: ends the run when `loads` ends, as after an epoch, instead of raising.

    Returns:
      A `Repeated` iterator of batches. Its `step`, `load`, `fresh` and `age`, the steps since the
      load, describe the last batch; numbers count from the start of the run. `observe`, `advance`
      and `state` work as in `read_epochs`, whose order observes each batch once. Units stay whole,
      and the first use follows the order.

    Raises:
      ValueError: for values out of range; from `next`, for an empty source, for a batch that
        cannot be cut, or if a step donated a batch that is used again.
      LoadError: from `next`, with the number of a load that fails, is late or is missing; after a
        late load, `next` may be called again.

    Examples:
      >>> import jax, numpy as np
      >>> from syncopate import ordering
      >>> plan = ordering.echo.fixed(2, total_steps=4)
      >>> batches = ordering.echo.repeat((np.full(3, i) for i in range(2)), plan)
      >>> for batch in batches:
      ...     print(batches.step, batches.load, batches.fresh, batch)
      0 0 True [0 0 0]
      1 0 False [0 0 0]
      2 1 True [1 1 1]
      3 1 False [1 1 1]
      >>> rollouts, key = (np.arange(6) for _ in range(2)), jax.random.key(0)
      >>> batches = ordering.echo.repeat(rollouts, plan, minibatches=3, key=key)
      >>> steps = [(batches.load, batches.age, batch.shape) for batch in batches]
      >>> len(steps), steps[5:7]
      (12, [(0, 5, (2,)), (1, 0, (2,))])

    References:
      Schulman et al., Proximal Policy Optimization Algorithms, 2017,
      https://arxiv.org/abs/1707.06347
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
            "plan is ordering.echo.adaptive, which asks whether a batch is ready: pass "
            "loads=prefetch_to_device(...)."
        )
    cut = cut_of(minibatches, key, axis)
    stop_with_loads = stop_with_loads or plan.total_steps is None
    if isinstance(loads, Epochs):
        cut, place = _of_reads(loads, cut, first_step)
        return Repeated(loads, plan, cut, place, stop_with_loads)
    first_step = plans.check_whole("first_step", first_step, 0, plan.most_steps * cut.parts)
    use, done = divmod(first_step, cut.parts)
    begun = use + (done > 0)
    count, uses = plan.place(begun)
    again = done > 0 or use != plan.total_steps and plan.first_load(use) < count
    return Repeated(loads, plan, cut, Place(begun, count, uses, done, again), stop_with_loads)


def _of_reads(reads: Epochs, cut: Cut, first_step: int) -> tuple[Cut, Place]:
    """How to cut the batches of a reader, and where its state is."""
    if first_step:
        raise ValueError(
            f"first_step is {first_step}, but read_epochs resumes from its own state: "
            "leave first_step out."
        )
    if cut.axis:
        raise ValueError(f"axis is {cut.axis}, but read_epochs knows its own: leave axis out.")
    if reads.used and cut.parts == 1:
        raise ValueError(
            f"minibatches is 1, and the state was saved after {reads.used} units of a use: pass "
            "minibatches as before."
        )
    for units in reads.units_of_batches() if cut.parts > 1 else ():
        check_parts(units, cut.parts, "units")
    inside = reads.used > 0
    uses = reads.uses + inside
    place = Place(reads.steps + inside, reads.loads + (uses > 0), uses, 0, uses > 0)
    return cut._replace(axis=reads.unit_axis, size=reads.unit_size, keeps_first=True), place
