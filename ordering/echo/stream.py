"""The batches of a run with echoing: loaded where the plan says so, used again elsewhere."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ordering.base import Ordering, PyTree
from ordering.echo.online import Measured, check_policy, ready_everywhere
from ordering.echo.plans import EchoPlan
from ordering.input.loader import LoadError, on_device
from syncopate import plans


class EchoStep(NamedTuple):
    """One step's batch."""

    step: int
    load: int  # the number of the load that brought it
    fresh: bool
    batch: PyTree


def echo_batches(
    loads: Iterable,
    policy: EchoPlan | Measured,
    *,
    first_step: int = 0,
    augment: Callable | None = None,
    key: jax.Array | None = None,
    agree: Callable[[bool], bool] = ready_everywhere,
    stop_with_loads: bool = False,
) -> Iterator[EchoStep]:
    """One batch per step: a fresh one from `loads` where the policy says so, else one used again.

    A batch is placed on the device once, when it is loaded; an echoed step moves nothing from the
    host and does not touch `loads`. Loads are counted here, where they are consumed, whatever has
    been read ahead. The first batch is taken at the call.

    `measured` asks whether a batch is ready at the time of the call of `next`: wait for the step
    before (`jax.block_until_ready`), or the host runs ahead of the device and sees input late.

    Args:
      loads: an iterable of batches, trees of arrays; a `load_ahead` for `measured`. Of a run
        resumed at a step it starts at load `policy.first_load(first_step)`, for `measured` that
        of the `EchoPlan` of its decisions.
      policy: an `EchoPlan`, or `measured`.
      first_step: where to go on; with `measured` at most the decisions it was given.
      augment: `(batch, key) -> batch`, applied on the device to fresh and echoed batches alike,
        with randomness of the step; what is kept for echoing is the batch before it.
      key: for augment; the step is folded in.
      agree: from this process's answer to that of all; asked by `measured` where time decides.
      stop_with_loads: the end of `loads` ends the run, as at the end of an epoch, instead of being
        an error.

    Returns:
      An iterator of `EchoStep`.

    Raises:
      ValueError: at the call, for an empty source, a missing key, or values out of range.
      LoadError: from `next`, naming the load, where one fails, hangs or is missing; after one that
        came late call `next` again.

    Example:
      >>> import numpy as np, ordering
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
    check_policy(policy)
    known = policy.known
    if policy.online and not hasattr(loads, "ready"):
        raise ValueError("measured asks whether a batch is ready: pass loads=load_ahead(...).")
    if not plans.is_whole(first_step) or not 0 <= first_step <= len(known.fresh):
        raise ValueError(
            f"first_step is {first_step!r}: the decisions known before are those of "
            f"{len(known.fresh)} steps."
        )
    if augment is not None and key is None:
        raise ValueError("an augmentation is random: pass key=jax.random.key(0).")
    if key is not None:
        plans.check_key(key)
    source, failed = iter(loads), []

    def fetch(load, step):
        if failed:  # a generator that has failed seems to have ended
            raise failed[0]
        try:
            return on_device(next(source))
        except StopIteration:
            if load == 0:
                raise ValueError("the source is empty: pass at least one batch.") from None
            why = f"is missing: the input ended, and step {step} of {policy.total_steps} needs it."
            raise _End(load, f"{why} Chain more epochs, or pass stop_with_loads=True.") from None
        except LoadError:
            raise
        except Exception as error:
            why = f"failed in step {step}: {type(error).__name__}: {error}. Resume from this step."
            failed.append(LoadError(load, why))
            raise failed[0] from error

    def advance(at):
        step, count, uses, batch, counter = at
        if step == policy.total_steps:
            raise StopIteration
        fresh = policy.decide(step, loads=count, uses=uses, ready=lambda: agree(loads.ready()))
        if fresh:
            try:
                batch = fetch(count, step)
            except _End:
                if stop_with_loads:
                    raise StopIteration from None
                raise
            count, uses = count + 1, 0
        used = batch
        if augment is not None:
            used, counter = _augmented(augment)(batch, key, counter)
        at = _At(step + 1, count, uses + 1, batch, counter)
        return EchoStep(step, count - 1, fresh, used), at

    count = int(known.fresh[:first_step].sum())
    batch = fetch(count - 1, first_step) if known.first_load(first_step) < count else None
    uses = first_step - (known.load_steps[count - 1] if count else 0)
    counter = None if augment is None else jnp.int32(first_step)
    stream = _Stream(advance, _At(first_step, count, uses, batch, counter))
    for first in stream:  # now, so that an empty source is an error of this call
        return itertools.chain([first], stream)
    return iter(())


# The compiled function outlives a call of `echo_batches`: there may be one per epoch.
@functools.lru_cache(maxsize=32)
def _augmented(augment):
    """`(batch, key, step) -> (batch, step + 1)`, jitted; the counter stays on the device."""

    def run(batch, key, step):
        return augment(batch, jax.random.fold_in(key, step)), step + 1

    return jax.jit(run, donate_argnums=2)


class _End(LoadError):
    pass


class _At(NamedTuple):
    """Between two steps."""

    step: int
    count: int  # loads so far
    uses: int  # of the last one
    batch: Any  # of the last one
    counter: Any  # the step on the device, or None where nothing needs it


class _Stream(Iterator):
    """No generator, for those end with their first error: after a late batch this one goes on."""

    def __init__(self, advance, at):
        self._advance, self._at = advance, at

    def __next__(self):
        use, self._at = self._advance(self._at)
        return use


def observe_fresh(order: Ordering) -> Ordering:
    """An ordering whose `observe` takes `fresh` too, and lets echoed batches pass unobserved.

    observe(state, rows, fresh): the state after the rows if fresh, else the state unchanged; so an
    epoch visits every unit once, however often its batches are used.

    A loop that knows `fresh` on the host does better with two jitted steps: an echoed one needs no
    gradients of single units at all.

    Args:
      order: any.

    Returns:
      An `Ordering`; `fresh` is a bool or bool[], equal on all workers.

    Example:
      >>> import jax, ordering
      >>> order = ordering.echo.observe_fresh(ordering.random_reshuffling(4))
      >>> state = order.init(jax.random.key(0), params=None)
      >>> int(order.observe(state, None, fresh=False).left) == int(state.left)
      True
    """

    def observe(state, rows, fresh):
        if isinstance(fresh, bool | np.bool_):
            return order.observe(state, rows) if fresh else state
        # Rows hold functions, so they are no operand.
        return jax.lax.cond(fresh, lambda s: order.observe(s, rows), lambda s: s, state)

    return order._replace(observe=observe)
