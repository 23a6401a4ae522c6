"""The batches of a run with echoing."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Key, PyTree

from ordering.base import State
from ordering.data.batches import Position
from ordering.data.epochs import Epochs, check_rows
from ordering.data.loader import LoadError, check_batches, describe_error, on_device
from ordering.data.place import LOST, SAVED, Count, copied, counts_of, part_of, restore
from ordering.echo.minibatches import Cut, check_parts, cut_of
from ordering.echo.plans import Policy, digest_decisions
from syncopate import plans
from syncopate.unstable import multihost_utils


def ready_everywhere(ready: bool) -> bool:
    """Whether the next batch of every process is ready, found by a small exchange."""
    if jax.process_count() == 1:
        return bool(ready)
    return bool(np.all(multihost_utils.process_allgather(np.uint8(ready))))


class EchoState(NamedTuple):
    """The place of a run that uses batches again; see `Repeated.state`."""

    reads: Any  # the reader's state; if the order has still to observe the last batch, before it
    steps: Count = 0  # finished uses of all batches, which are steps of the plan
    uses: Count = 0  # those of the last batch; 0 if it cannot be read again
    done: Count = 0  # finished minibatches of one more use
    unit: Count = 0  # where the last batch began
    batch: Count = 0  # its number in a window of blocks
    decisions: Count = 0  # digest of the plan's decisions up to here
    cut: Count = 0  # digest of what the minibatches of one more use depend on
    rows: PyTree = ()  # gradients of finished minibatches that the order has still to observe


class Repeated(Iterator):
    """One batch per step; see `repeat`. After an error, such as a late batch, call `next` again.

    Attributes:
      step: number of the last step, -1 before the first.
      load: number of the load of its batch.
      fresh: whether it was in the first use of this load.
    """

    def __init__(
        self,
        loads: Any,
        plan: Policy,
        cut: Cut,
        source: Iterator,
        may_end: bool,
        counts: Sequence[int],
        rows: PyTree,
        load: int,
        again: Iterator | None,
    ):
        """Goes on where a state has these counts and rows, if need be `again` with a `load`."""
        self._loads, self._plan, self._cut, self._source = loads, plan, cut, source
        self._may_end, self._again, self._batch, self._left = may_end, again, None, []
        steps, uses, done, unit, number, decisions, _ = counts
        inside = done > 0
        # Steps of the plan and uses of the load that have begun, and minibatches of the last use.
        self._begun, self._uses, self._done = steps + inside, uses + inside, done or cut.parts
        self.step, self.load = (self._begun - 1) * cut.parts + self._done - 1, load
        self.fresh = inside and self._uses == 1
        self._fresh_next: bool | None = None  # what is decided for the next use
        self._digests = [decisions] * 2  # of all decisions, and of those before the last
        self._failed: Exception | None = None
        self._observes = cut.parts > 1 and getattr(loads, "observes", False)
        # The minibatches of the first use that were observed, and gradients that wait for the rest.
        self._seen = self._done if self.fresh and self._observes else cut.parts
        self._rows: list[PyTree] = []
        self._saved_rows = rows if self._seen < cut.parts else None
        self._where: Position | None = None
        if isinstance(loads, Epochs) and self._uses:
            self._where = Position(loads.epoch, unit, number)

    @property
    def age(self) -> int:
        """How many steps used minibatches of this load before the last step."""
        return (self._uses - 1) * self._cut.parts + self._done - 1

    def __next__(self) -> PyTree[jax.Array]:
        if self._seen < self._done:
            raise ValueError(
                f"step {self.step} was not observed: call observe(rows) after each step of a "
                "first use."
            )
        if not self._left:
            self._begin_use()
        rows = self._left.pop(0)
        self.step, self._done = self.step + 1, self._done + 1
        return self._cut.take(self._batch, rows)

    def _begin_use(self):
        """Reads the next use's batch, or that of the use in which the run was saved."""
        if self._done == self._cut.parts and self._begun == self._plan.total_steps:
            raise StopIteration
        if self._again is not None:
            batch = self._read(self._again, self.load, may_end=False)
            if self._done < self._cut.parts:
                self._left = self._order(batch, self.load, self._uses)[self._done :]
            self._batch, self._again = batch, None
            if self._left:
                return
        step, uses = self._begun, self._uses
        if self._fresh_next is None:  # if its batch was late, the use is decided already
            ready = lambda: ready_everywhere(self._loads.ready())  # noqa: E731
            self._fresh_next = self._plan.decide(step, uses=uses, ready=ready)
        fresh = self._fresh_next
        load, uses = (self.load + 1, 1) if fresh else (self.load, uses + 1)
        if fresh:
            batch = self._read(self._source, load, may_end=self._may_end)
        elif any(leaf.is_deleted() for leaf in jax.tree.leaves(self._batch)):
            raise ValueError(
                f"step {self.step + 1} uses load {load} again, but step {self.step} donated it: "
                "donate a copy, jax.tree.map(jnp.copy, batch)."
            )
        else:
            batch = self._batch
        self._left = self._order(batch, load, uses)
        self._batch, self.load, self.fresh, self._fresh_next = batch, load, fresh, None
        self._begun, self._uses, self._done = step + 1, uses, 0
        self._seen = 0 if fresh and self._observes else self._cut.parts
        self._digests = [digest_decisions([fresh], self._digests[0]), self._digests[0]]

    def _order(self, batch, load, uses):
        """The rows of every minibatch of a use."""
        try:
            return self._cut.order(batch, load, uses - 1)
        except ValueError as error:
            self._failed = error  # the load is gone
            raise

    def _read(self, source, load, *, may_end):
        step, total = (x and x * self._cut.parts for x in (self._begun, self._plan.total_steps))
        if self._failed:  # a generator that has failed would now end
            raise self._failed
        try:
            batch = on_device(next(source))
            if source is self._source:
                self._where = getattr(self._loads, "last", None)
            return batch
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
        if self._observes:
            rows = self._checked(rows)
            if self._saved_rows is not None:
                several = lambda x: jnp.concatenate([x] * self._seen, reads.unit_axis)  # noqa: E731
                saved = restore(jax.tree.map(several, rows), self._saved_rows)
                self._rows, self._saved_rows = [saved], None
            self._rows, self._seen = [*self._rows, rows], self._seen + 1
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
        if self._saved_rows is not None:
            return copied(self._saved_rows)
        axis = self._reads().unit_axis
        joined = lambda *parts: jnp.copy(jnp.concatenate(parts, axis))  # noqa: E731
        return jax.tree.map(joined, *self._rows) if self._rows else ()

    def advance(self, order_state: State) -> None:
        """Adopts the state from a step that observed a fresh batch itself, without minibatches."""
        if self._cut.parts > 1:
            raise ValueError(
                f"minibatches is {self._cut.parts}, and advance takes whole batches: pass rows to "
                "observe."
            )
        self._reads().advance(order_state)

    def sync(self) -> None:
        """Exchanges data that a coordinated order has deferred, as `Epochs.sync`."""
        self._reads().sync()

    def state(self) -> EchoState:
        """The state to resume from, also in the middle of a use; the batch is then read again.

        `repeat(read_epochs(..., state=), plan)` continues there: by this plan, or by another that
        has decided the same so far, such as a longer one.
        """
        reads, parts = self._reads(), self._cut.parts
        saved = reads.state()
        waits = int(saved.loads) < reads.loads  # the order has still to observe the batch
        if self._observes:
            waits = self._seen < self._done
        steps, done = divmod(self.step + 1 - waits, parts)
        # Once its epoch has ended, a batch cannot be read again.
        where = self._where if self._where and self._where.epoch == reads.epoch else None
        unit, batch = (where.unit, where.batch) if where else (0, 0)
        uses = self._uses - (steps < self._begun) if where else 0
        digests = self._digests[steps + (done > 0) < self._begun], self._cut.digest() if done else 0
        counts = map(np.asarray, (steps, uses, done, unit, batch, *map(np.uint32, digests)))
        return EchoState(saved, *counts, rows=self._waiting() if done else ())

    def _reads(self) -> Epochs:
        if not isinstance(self._loads, Epochs):
            raise ValueError(
                f"the loads are a {type(self._loads).__name__}, which keeps no order: pass the "
                "result of ordering.data.read_epochs."
            )
        return self._loads


def repeat(
    loads: Iterable[PyTree],
    plan: Policy,
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
    In several processes it asks all of them on their devices, which waits for that step anyway.

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
    if not isinstance(plan, Policy):
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
    may_end = stop_with_loads or plan.total_steps is None
    if isinstance(loads, Epochs):
        return _of_reads(loads, plan, cut, first_step, may_end)
    most = None if plan.total_steps is None else plan.total_steps * cut.parts
    steps, done = divmod(plans.check_whole("first_step", first_step, 0, most), cut.parts)
    count, uses = plan.place(steps + (done > 0))
    counts = steps, uses - (done > 0), done, 0, 0, 0, 0
    again, source = None, iter(loads)
    if done or plan.first_load(steps) < count:
        again = source
    return Repeated(loads, plan, cut, source, may_end, counts, (), count - 1, again)


def _of_reads(reads: Epochs, plan: Policy, cut: Cut, first_step: int, may_end: bool) -> Repeated:
    """The batches of a reader, from its place on."""
    if first_step:
        raise ValueError(
            f"first_step is {first_step}, but read_epochs resumes from its own state: "
            "leave first_step out."
        )
    if cut.axis:
        raise ValueError(f"axis is {cut.axis}, but read_epochs knows its own: leave axis out.")
    for units in reads.units_of_batches() if cut.parts > 1 else ():
        check_parts(units, cut.parts, "units")
    cut = cut._replace(axis=reads.unit_axis, size=reads.unit_size, keeps_first=True)
    counts = _counts_of(reads)
    _, uses, done, unit, batch, *_ = counts
    again, rows = None, ()
    # If the order has still to observe the batch in use, it is the next one of the reader.
    is_next = done > 0 and not uses and reads.observes
    if _check_plan(plan, cut, *counts):
        again = reads if is_next else reads.load_again(unit, batch)
    if is_next:
        try:
            rows = part_of(reads.around, "rows")
        except LOST:
            raise ValueError(f"state has no rows: {SAVED}") from None
    reads.around, load = None, reads.loads - (not is_next)
    return Repeated(reads, plan, cut, reads, may_end, counts, rows, load, again)


def _counts_of(reads: Epochs) -> list[int]:
    """The counts of a saved state; with a reader alone, every batch was used once."""
    if reads.around is None:
        return [reads.loads, 0, 0, 0, 0, digest_decisions([True] * reads.loads), 0]
    return [*counts_of(reads.around, EchoState._fields[1:-1]).values()]


def _check_plan(plan, cut, steps, uses, done, unit, batch, decisions, digest) -> bool:
    """Whether the last batch is used again; ValueError for another plan than that of the state."""
    begun = steps + (done > 0)
    fresh = plan.before(begun)
    ended = plan.total_steps is not None and begun > plan.total_steps
    if ended or len(fresh) == begun and digest_decisions(fresh) != decisions:
        raise ValueError(
            f"the plan's first {begun} decisions are not the state's: pass the run's plan or a "
            "longer one."
        )
    if done and cut.digest() != digest:
        raise ValueError(
            f"minibatches is {cut.parts}, and the state is inside a use with another number or "
            "key: pass both as before."
        )
    if done:
        return True
    again = steps != plan.total_steps and plan.again(
        steps, uses if plan.online else plan.place(steps)[1]
    )
    if again and not uses:
        raise ValueError(
            f"step {steps} of the plan uses a batch again, which this state lost: pass the run's "
            "plan."
        )
    return again
