"""An iterator over all epochs, which reads ahead across their boundaries."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ordering import base
from ordering.base import Ordering, State
from ordering.data.loader import Loader, LoadError, check_steps, prefetch_to_device
from ordering.data.sources import as_source, check_examples, step_indices
from syncopate import plans
from syncopate.workers import axis_of

Load = Callable[[np.ndarray, int, int], Loader]


class Epochs(Iterator, contextlib.AbstractContextManager):
    """Batches of all epochs; see `read_epochs`. As a context manager it closes its threads.

    `wait()` returns when `next` would return at once, and raises what it would raise.

    Attributes:
      epoch, step: position of the next batch; at an epoch's end `step` is the number of its steps.
    """

    def __init__(
        self, load: Load, live: Callable, *, num_units: int, units: int, batches: int, steps: int,
        num_epochs: int | None, ahead: int, first_load: int, first_epoch: int,
    ):  # fmt: skip
        # Each `units` of the `num_units` are read at once, and make `batches` steps.
        self._load, self._live = load, live
        self._num_units, self._units, self._batches = num_units, units, batches
        self._steps, self._num_epochs, self._ahead = steps, num_epochs, ahead
        self._first_epoch = first_epoch
        self.epoch, self.step = divmod(first_load, steps)
        self._followed = -1  # the last epoch whose end `after` has seen
        self._loaders: list[tuple[int, Loader]] = []  # and the first load of each
        self._opened = first_load  # those before it have a loader
        self._due = True  # this epoch's order is still to be checked and loaded
        self._order: Any = None  # a copy of it,
        self._early: Any = None  # and of what is known of the next one

    @property
    def load(self) -> int:
        """Number of the next batch over all epochs; `first_load` of a run that resumes here."""
        return self.epoch * self._steps + self.step

    @property
    def epoch_ended(self) -> bool:
        """Whether the last batch was the last of its epoch."""
        return self.step == self._steps

    def after(self, order: Ordering, orders: State, *, axis_name: str | None = None) -> State:
        """The orders after a step: once at the end of an epoch those of the next, else the same.

        Call it after every step, `orders = reads.after(order, orders)`.

        Args:
          order: whose `next_epoch` ends an epoch.
          orders: its state, of one worker or of all, simulated or with a device for each.
          axis_name: the workers' axis; None for the only one of their mesh, or "worker".
        """
        if not isinstance(order, Ordering) or not hasattr(orders, "current"):
            raise ValueError(
                f"after got a {type(order).__name__} and a {type(orders).__name__}: pass the order "
                "and its state, reads.after(order, orders)."
            )
        if not self.epoch_ended or self._followed == self.epoch:
            return orders
        self._followed = self.epoch
        sharding = getattr(orders.current, "sharding", None)  # NumPy's, as restored, have none
        names = getattr(getattr(sharding, "mesh", None), "axis_names", ())
        axis_name, devices = axis_of(axis_name, names), None
        if isinstance(sharding, NamedSharding) and sharding.spec[:1] == (axis_name,):
            devices = sharding.mesh
        with jax.transfer_guard("allow"):
            return _next_epoch(order, orders, axis_name, devices)

    def __next__(self) -> PyTree[jax.Array]:
        self.wait()
        batch = next(cast(Loader, self._loader()))
        self.step += 1
        return batch

    def wait(self) -> None:
        """Waits until `next` returns at once; raises what it would raise."""
        if self.epoch_ended:
            self._loaders = [(first, own) for first, own in self._loaders if first >= self.load]
            self._due, self._order, self._early = True, None, None
            self.epoch, self.step = self.epoch + 1, 0
        if self._num_epochs is not None and self.epoch >= self._num_epochs:
            raise StopIteration
        with jax.transfer_guard("allow"):
            self._begin_step()
        loader = cast(Loader, self._loader())
        try:
            loader.wait()
        except StopIteration:
            raise LoadError(
                self.load,
                f"is missing: the source ended in an epoch of {self._steps} steps, or was closed. "
                "Give one batch for each of them.",
            ) from None
        if loader.load != self.load:
            raise LoadError(
                self.load, "was lost, as next was interrupted: resume the run from this load."
            )

    def ready(self) -> bool:
        """Whether the next batch is on the device, or its loading has not begun."""
        loader = self._loader()
        return loader is None or loader.ready()

    def close(self) -> None:
        """Ends the threads that load."""
        for _, loader in self._loaders:
            loader.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loader(self) -> Loader | None:
        """The loader of the next batch, if there is one yet."""
        begun = [own for first, own in self._loaders if first <= self.load < self._opened]
        return begun[-1] if begun else None

    def _begin_step(self):
        if self._due and self._order is None:
            state = checked_state(self._live)
            if state.current.shape[-1] != self._num_units:
                raise ValueError(
                    f"live gives an order of {state.current.shape[-1]} units, after "
                    f"{self._num_units}: make another read_epochs for another order."
                )
            self._order = _copies(state.current, *epoch_of(state))
        # With two loads begun, wait for the order only when the device has the first to do.
        if self._due and (self.step or self._opened < self.load + 2):
            order, *epochs = map(np.asarray, self._order)
            self.check_order(self.epoch, *epochs)
            self._open(order, self.epoch, self._steps)
            self._due = False
        self._look_ahead()

    def check_order(self, epoch: int, *found: ArrayLike) -> None:
        """Raises ValueError unless the orders, which were `found` in an epoch, are in this one."""
        for orders_in in found:
            if (orders_in := np.unique(orders_in) - self._first_epoch).tolist() != [epoch]:
                raise ValueError(
                    f"epoch {epoch - 1} has been read, and the state has the order of epoch "
                    f"{', '.join(map(str, orders_in))}: call orders = reads.after(order, orders) "
                    "after every step, and next_epoch nowhere else."
                )

    def _look_ahead(self):
        """Copies what is known of the next epoch, and loads it a step later: no wait for either."""
        is_last = self._num_epochs is not None and self.epoch + 1 >= self._num_epochs
        if self._early is None:
            if self.step >= self._steps - 1 - self._ahead:
                state = self._live()
                self._early = _copies(state.left, state.next)
        elif self._opened == (self.epoch + 1) * self._steps and not is_last:
            left, following = map(np.asarray, self._early)
            windows = int(left.min()) // self._units  # that all workers have already decided
            if left.min() >= self._num_units:
                self._open(following, self.epoch + 1, self._steps)
            elif windows:
                known = following[..., : windows * self._units]
                self._open(known, self.epoch + 1, windows * self._batches)

    def _open(self, orders: np.ndarray, epoch: int, stop: int):
        """Loads the steps of an epoch before `stop` that have no loader yet."""
        first = self._opened - epoch * self._steps
        if first < stop:
            rest = orders[..., first // self._batches * self._units :]
            self._loaders.append((self._opened, self._load(rest, first, epoch)))
            self._opened = epoch * self._steps + stop


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _next_epoch(order: Ordering, orders: State, axis_name: str, mesh: Mesh | None) -> State:
    """The orders of the next epoch of one worker or of all, on their devices if they have some."""
    if orders.current.ndim == 1:
        return order.next_epoch(orders)
    if mesh is None:
        return jax.vmap(order.next_epoch, axis_name=axis_name)(orders)

    def on_device(orders):
        own = order.next_epoch(jax.tree.map(lambda x: x[0], orders))
        return jax.tree.map(lambda x: x[None], own)

    spec = PartitionSpec(axis_name)
    return jax.shard_map(
        on_device, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={axis_name},
        check_vma=False,
    )(orders)  # fmt: skip


def _copies(*arrays):
    """Copies on their way to the host, as a step may donate the state itself."""
    copies = [jnp.copy(array) for array in arrays]
    for copy in copies:
        copy.copy_to_host_async()
    return copies


def epoch_of(state: State) -> list[np.ndarray]:
    """The epoch in which the orders are; of an order of one's own that counts none, nothing."""
    return [state.epoch] if hasattr(state, "epoch") else []


def first_epoch_of(state: State, units: int, first_load: int, num_epochs: int | None) -> int:
    """The epoch of the orders in the first epoch of a reader; ValueError for another place."""
    num_units = state.current.shape[-1]
    epoch, step = divmod(first_load, -(-num_units // units))
    is_over = num_epochs is not None and epoch >= num_epochs
    for found in map(np.unique, map(np.asarray, epoch_of(state))):
        if not first_load:  # the orders may have been used before
            return int(found[0])
        position, read = np.unique(getattr(state, "position", 0)), step * units
        # None where orders rest, and all where workers were resized.
        is_part = (position > 0) & (position < num_units)
        other = is_part & (position != read) & (position != read + units)  # read to be used again
        if not is_over and ((found != epoch).any() or other.any()):
            raise ValueError(
                f"first_load is {first_load}, unit {read} of epoch {epoch} with {units} "
                f"units per step, and live gives the orders of epoch {found[0]}, of which "
                f"{position[0]} units were observed: pass the load that was saved with this state, "
                "or, after another units_per_step, the one before which as many units are read."
            )
    return 0


def checked_state(live) -> State:
    """The state that `live` returns; ValueError if it is none."""
    plans.check_function("live", live)
    state = live()
    if not hasattr(state, "current"):
        raise ValueError(f"live gives a {type(state).__name__}: pass lambda: state.")
    return cast(State, state)


def read_epochs(
    source: PyTree[ArrayLike] | Sequence | Callable[[np.ndarray, int, int], Iterable],
    live: Callable[[], State],
    *,
    units_per_step: int,
    unit_size: int = 1,
    total: int | None = None,
    num_epochs: int | None = None,
    first_load: int = 0,
    ahead: int = 2,
    depth: int = 2,
    timeout: float | None = None,
    sharding: jax.sharding.Sharding | PyTree | None = None,
) -> Epochs:
    """Batches of one epoch after the other, read ahead across the boundaries.

    `ahead` steps before an epoch ends, the steps of the next epoch that are already decided begin
    to load. The others follow when `after` has made their order.

    Args:
      source: as in `as_source`; or a function `(indices, first_step, epoch) -> batches`: a pipeline
        of your own that reads the examples `indices`, int64[n], from `first_step` of that epoch on,
        and gives an iterable of one batch per step, as of W B S examples. A thread reads it and
        copies to the device (`prefetch_to_device`).
      live: returns the newest state of the orders, of one worker or of all, from the loop.
      units_per_step: B in [1, M], units per worker and step.
      unit_size, total: as in `step_indices`.
      num_epochs: number of epochs; None for no end.
      first_load: >= 0, for a run that resumes: the `load` that was saved, behind `after`, with the
        orders' state. With another units_per_step, the load before which as many units are read:
        n A / B after n loads of A units.
      ahead: >= 1, steps before an epoch's end at which the next one begins to load.
      depth, timeout, sharding: as in `prefetch_to_device`.

    Returns:
      An `Epochs` iterator. `after(order, orders)` belongs behind every step. `load` is the number
      of the next batch over all epochs, `ready()` tells whether it is on the device, and `close()`
      ends the threads. From a source, batches of several workers have leaves [W, B S, ...].

    Raises:
      ValueError: for a source or size that does not fit, or orders that are not at `first_load`;
        from `next`, if `after` was not called, which an order of one's own shows by `epoch`.
      LoadError: from `next`, with the number of the load that failed, hangs or is missing.

    Examples:
      >>> import jax, numpy as np
      >>> from syncopate import ordering
      >>> order = ordering.random_reshuffling(6)
      >>> state = order.init(jax.random.key(0), None)
      >>> reads = ordering.data.read_epochs(
      ...     np.arange(6), lambda: state, units_per_step=4, num_epochs=2
      ... )
      >>> for batch in reads:
      ...     print(batch.shape)  # a step of the training
      ...     state = reads.after(order, state)
      (4,)
      (2,)
      (4,)
      (2,)
    """
    plans.check_whole("ahead", ahead, 1)
    plans.check_whole("first_load", first_load, 0)
    if num_epochs is not None:
        plans.check_whole("num_epochs", num_epochs, 0)
    state = checked_state(live)
    num_units, units = base.check_units(state.current.shape[-1], units_per_step)
    with jax.transfer_guard("allow"):
        first_epoch = first_epoch_of(state, units, first_load, num_epochs)
    num_steps = -(-num_units // units)
    sizes = {"units_per_step": units_per_step, "unit_size": unit_size, "total": total}
    if callable(source):
        plans.check_function("source", source, "indices", "first_step", "epoch")
    else:
        examples = as_source(source)
        steps = {units, num_units % units or units}  # of an epoch's last step, too
        shapes = [(*state.current.shape[:-1], n * unit_size) for n in steps]
        check_steps(examples, shapes, sharding)
        check_examples(len(examples), state.current.shape, **sizes)

    def load(orders, first_step, epoch):
        indices, size = step_indices(orders, num_units=num_units, **sizes)
        if callable(source):
            batches: Any = source(indices, first_step, epoch)
        else:
            steps = (examples[indices[i : i + size]] for i in range(0, indices.size, size))
            batches = map(of_workers, steps) if orders.ndim == 2 else steps
        first = epoch * num_steps + first_step
        return prefetch_to_device(
            batches, depth=depth, timeout=timeout, sharding=sharding, first_load=first
        )

    def of_workers(batch):
        return jax.tree.map(lambda x: x.reshape(len(state.current), -1, *x.shape[1:]), batch)

    return Epochs(
        load, live, num_units=num_units, units=units, batches=1, steps=num_steps, ahead=ahead,
        num_epochs=num_epochs, first_load=first_load, first_epoch=first_epoch,
    )  # fmt: skip
