"""An iterator over all epochs of a source, which keeps the state of the order."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Int, Key, PyTree

from ordering import base
from ordering.base import Ordering, Scope, State
from ordering.data.batches import Load, Reader, Sizes, epoch_of, of_process
from ordering.data.loader import check_batches, check_steps, prefetch_to_device, representable
from ordering.data.sources import as_source, check_units_of, step_indices
from syncopate import mesh, plans

Count = int | Int[np.ndarray, ""] | Int[jax.Array, ""]


class ReadState(NamedTuple):
    """A place in the data and the order's state there; see `Epochs.state`."""

    order: State  # of all workers
    epoch: Count = 0
    units: Count = 0  # of this epoch, that all workers together have read
    loads: Count = 0  # batches that were read since the run began
    steps: Count = 0  # as many, or with echoing the uses of all batches
    uses: Count = 0  # of the batch after these units, which is used again; 0: none is


class Epochs(Reader):
    """Batches of all epochs; see `read_epochs`. As a context manager it closes its threads.

    `wait()` returns when `next` would return at once, and raises what it would raise.

    Attributes:
      order_state: state of the order after the last step, for a step that observes by itself.
      observed: whether the last batch needs no `observe` any more.
      epoch: of the last batch; loads: batches that were given since the run began.
      epoch_ended: whether the last batch was the last of its epoch.
    """

    def __init__(self, load: Load, sizes: Sizes, order: Ordering, scope: Scope, state: ReadState,
                 num_epochs: int | None, ahead: int):  # fmt: skip
        epoch, units, loads, self.steps, self.uses = map(int, state[1:])
        unit = units // (scope.workers or 1)
        super().__init__(
            load, sizes, epoch=epoch, unit=unit, loads=loads, num_epochs=num_epochs, ahead=ahead
        )
        self.order_state, self._scope = state.order, scope
        self._order_of_all = base.compiled(order, scope)
        self._observes = hasattr(state.order, "position")  # each step, or the next is refused
        self.observed = True  # the last batch
        self._shift = min((int(np.min(of_process(x))) for x in epoch_of(state.order)), default=0)
        self._shift -= epoch  # of an order that had been used before
        self._again = bool(self.uses)  # the next batch was observed before the run was saved
        self._before = epoch, unit, loads  # the place of the last batch

    def observe(self, rows: PyTree) -> None:
        """Observes the gradients of the last batch's units.

        Args:
          rows: as `per_example_grads` or `sketched_grads` gave them, leaves [B, ...]; of several
            workers [W, B, ...].

        Raises:
          ValueError: if the batch has been observed, or for other gradients than of its units.
        """
        if self._observes and self.observed:
            raise ValueError(
                "observe was called before a batch was read, or twice for one: call it once after "
                "each step."
            )
        if not all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(rows)):
            raise ValueError(
                f"rows is {rows!r:.200}: pass the tree of arrays that per_example_grads or "
                "sketched_grads gave."
            )
        with jax.transfer_guard("allow"):
            self.advance(self._order_of_all.observe(self.order_state, rows))

    def advance(self, order_state: State) -> None:
        """Takes the state over from a step that observed the last batch by itself.

        Args:
          order_state: what `order.observe`, and `order.sync`, made of `order_state`.

        Raises:
          ValueError: for a state of another order.
        """
        own = jax.tree.structure(self.order_state)
        if jax.tree.structure(order_state) != own:
            raise ValueError(
                f"advance got a {type(order_state).__name__}: pass what order.observe made of "
                "reads.order_state."
            )
        self.order_state, self.observed = order_state, True

    def sync(self) -> None:
        """Exchanges what a coordinated order has put off; call it where workers communicate."""
        with jax.transfer_guard("allow"):
            self.order_state = self._order_of_all.sync(self.order_state)

    def state(self) -> ReadState:
        """Where to go on: `read_epochs(..., state=)` of the same order reads on from there.

        A batch that has not been observed yet is read again. Keys are saved as their data.

        Returns:
          A tree of arrays of its own: the order's state, epoch and units, and the run's counts.
        """
        return self.state_at(self.steps - (not self.observed), 0)

    def state_at(self, steps: int, uses: int) -> ReadState:
        """`state` after so many steps, so many of which used the last batch, which comes again."""
        epoch, unit, loads = self._before
        if self.observed and not uses or self.epoch > epoch:  # whose order is gone
            epoch, unit, loads = self.epoch, self._batches.unit, self.loads
        with jax.transfer_guard("allow"):
            order = jax.tree.map(lambda x: jnp.copy(key_data(x)), self.order_state)
        counts = epoch, unit * (self._scope.workers or 1), loads, steps, uses
        return ReadState(order, *map(np.asarray, counts))

    def __next__(self) -> PyTree[jax.Array]:
        self.wait()
        before = self.epoch, self._batches.unit, self.loads
        batch = next(self._batches)
        self._before, self.steps = before, self.steps + 1
        self.observed, self._again = self._again or not self._observes, False
        return batch

    def live(self) -> State:
        return self.order_state

    def end_epoch(self) -> None:
        self.order_state = self._order_of_all.next_epoch(self.order_state)

    def check_order(self, *found: np.ndarray) -> None:
        for epochs in found:
            if (np.asarray(epochs) != self._shift + self.epoch).any():
                raise ValueError(
                    f"epoch {self.epoch} begins, and the order is in epoch {np.max(epochs)}: "
                    "leave next_epoch to the reader, which calls it between two epochs."
                )

    def check_step(self) -> None:
        if not self.observed:
            raise ValueError(
                f"batch {self.loads - 1} was not observed: call reads.observe(rows) after its step "
                "(or reads.advance(order_state)), or read with an order that looks at no gradients."
            )


def read_epochs(
    source: PyTree[ArrayLike] | Sequence | Callable[[np.ndarray, int, int], Iterable],
    order: Ordering,
    key: Key[jax.Array, ""],
    *,
    like: PyTree = None,
    workers: int | Mesh | None = None,
    axis_name: str | None = None,
    unit_size: int = 1,
    num_epochs: int | None = None,
    state: ReadState | PyTree | None = None,
    ahead: int = 2,
    depth: int = 2,
    timeout: float | None = None,
    sharding: jax.sharding.Sharding | PyTree | None = None,
) -> Epochs:
    """Batches of one epoch after the other, in an order that the iterator keeps.

    Call `reads.observe(rows)` after every step, with the gradients of its units. An order that
    looks at no gradients needs no call. Between two epochs the next order becomes the current one;
    `ahead` steps before, its steps that are already decided begin to load.

    Args:
      source: as in `as_source`; or a function `(indices, first_step, epoch) -> batches`: a pipeline
        of your own that reads the examples `indices`, int64[n], from `first_step` of that epoch on,
        and gives an iterable of one batch per step, of W B S examples. A thread reads it and copies
        to the device (`prefetch_to_device`).
      order: of which `units_per_step` units, B, make a worker's batch.
      key: one key, of the first order.
      like, workers, axis_name: as in `init_workers`.
      unit_size: S >= 1, consecutive examples per unit. Worker w owns the units w M to w M + M - 1.
      num_epochs: number of epochs of the whole run; None for no end.
      state: where to go on, as `Epochs.state` gave it, or in the dicts and lists that a checkpoint
        makes of it. The order may have another units_per_step.
      ahead: >= 1, steps before an epoch's end at which the next one begins to load.
      depth, timeout: as in `prefetch_to_device`.
      sharding: as there; None for the default device, and with a mesh for its workers' devices.

    Returns:
      An `Epochs` iterator. Batches of several workers have leaves [W, B S, ...]; in several
      processes each reads the rows of its own workers.

    Raises:
      ValueError: for a source, an order or a state that do not fit each other; from `next`, if the
        last batch was not observed.
      LoadError: from `next`, with the number of the load that failed, hangs or is missing.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> order = ordering.pair_balance(6, units_per_step=4)
      >>> reads = ordering.data.read_epochs(
      ...     jnp.arange(6.0), order, jax.random.key(0), like=jnp.zeros(1), num_epochs=2
      ... )
      >>> for batch in reads:
      ...     print(batch.shape)  # a step of the training
      ...     reads.observe(batch[:, None])  # the gradients of its units
      (4,)
      (2,)
      (4,)
      (2,)
    """
    plans.check_whole("ahead", ahead, 1)
    if num_epochs is not None:
        plans.check_whole("num_epochs", num_epochs, 0)
    base.check_order(order)
    scope = base.scope_of(workers, axis_name)
    first = base.init_workers(order, key, like, workers, axis_name=axis_name)
    check_state(first)
    num_units, window = base.check_units(first.current.shape[-1], order.units_per_step)
    source = source if callable(source) else as_source(source)
    with jax.transfer_guard("allow"):
        place = ReadState(first)
        if state is not None:
            place = restored(place, state)
            check_place(place, num_units, scope.workers or 1, window)
        read = reading(source, order, scope, num_units, unit_size)
        if not callable(source):
            steps = {window, num_units % window or window}  # of an epoch's last step, too
            lead = () if scope.workers is None else (scope.workers,)
            check_steps(source, [(*lead, n * unit_size) for n in steps], sharding)
        if scope.mesh is not None and sharding is None and not callable(source):
            sharding = NamedSharding(scope.mesh, PartitionSpec(scope.axis_name))

    def load(orders, first_step, epoch, number):
        batches = read(orders, first_step, epoch)
        if getattr(sharding, "is_fully_addressable", True):
            options = {"sharding": sharding}
        else:
            batches, options = map(functools.partial(_of_processes, sharding), batches), {}
        return prefetch_to_device(
            batches, depth=depth, timeout=timeout, first_load=number, **options
        )

    return Epochs(load, Sizes(num_units, window), order, scope, place, num_epochs, ahead)


def _of_processes(sharding, batch):
    """Arrays [W, ...] from the rows of each process's own workers."""
    make = functools.partial(jax.make_array_from_process_local_data, sharding)
    return jax.tree.map(lambda x: make(np.asarray(x)), representable(batch))


def reading(
    source: Any, order: Ordering, scope: Scope, num_units: int, unit_size: int
) -> Callable[[np.ndarray, int, int], Iterable]:
    """`(orders, first step, epoch) -> batches` of this process's workers."""
    unit_size = plans.check_whole("unit_size", unit_size, 1)
    workers, window = scope.workers or 1, order.units_per_step
    total = order.total if order.is_global and order.total else workers * num_units
    owned = _workers_of_process(scope)
    first = 0 if order.is_global else num_units * owned[:, None]  # of each worker's own units

    def pipeline(orders, first_step, epoch):
        orders = np.atleast_2d(orders) + first
        indices, size = step_indices(
            orders, num_units=num_units, units_per_step=window, unit_size=unit_size, total=total
        )
        sizes = [min(size, indices.size - i) for i in range(0, indices.size, size)]
        found = source(indices, first_step, epoch)
        check_batches("batches", found)
        return _in_full(found, sizes)

    if callable(source):
        plans.check_function("source", source, "indices", "first_step", "epoch")
        return pipeline
    examples = as_source(source)
    if not 0 <= len(examples) - total * unit_size < workers * window * unit_size:
        raise ValueError(
            f"the source has {len(examples)} examples, and the orders name {total} units of "
            f"{unit_size}: make orders for all of them, pass a source of the examples of all "
            "workers, or another unit_size; leave out of the source what is not to be read."
        )

    def batches(orders, first_step, epoch):
        if order.is_global:
            check_units_of(orders.reshape(-1), total)
        else:
            check_units_of(orders, num_units)
        rows = np.atleast_2d(orders)
        for start in range(0, rows.shape[1], window):
            units = rows[:, start : start + window].astype(np.int64) + first
            indices = units[..., None] * unit_size + np.arange(unit_size)
            batch = examples[indices.reshape(-1)]
            shape = indices.shape[:1] if orders.ndim == 2 else ()
            yield jax.tree.map(lambda x: x.reshape(*shape, -1, *x.shape[1:]), batch)  # noqa: B023

    return batches


def _workers_of_process(scope: Scope) -> np.ndarray:
    """The numbers of the workers whose devices belong to this process."""
    if scope.mesh is None:
        return np.arange(scope.workers or 1)
    axis, process = scope.mesh.axis_names.index(scope.axis_name), jax.process_index()
    devices = np.ndenumerate(scope.mesh.devices)
    return np.unique([at[axis] for at, device in devices if device.process_index == process])


def _in_full(batches: Iterable, sizes: Sequence[int]) -> Iterator:
    """The batches; ValueError for others than one per step, which would lose examples."""
    batches, more = iter(batches), object()
    for number, size in enumerate(sizes):
        batch = next(batches, more)
        if batch is more:
            return
        shapes = {np.shape(leaf) for leaf in jax.tree.leaves(batch)}
        if not any(size in itertools.accumulate(shape, operator.mul) for shape in shapes):
            raise ValueError(
                f"the source gave a batch of shapes {shapes} for a step of {size} examples: give "
                "one batch per step, with all of its examples."
            )
        if number + 1 == len(sizes) and next(batches, more) is not more:
            raise ValueError(
                f"the source gave more than {len(sizes)} batches for as many steps: give one batch "
                "per step, with all of its examples."
            )
        yield batch


def check_state(state: State) -> None:
    """Raises ValueError unless a state has what a reader looks at."""
    missing = [name for name in ("current", "next", "left") if not hasattr(state, name)]
    if missing:
        raise ValueError(
            f"the order's state, a {type(state).__name__}, has no {' and no '.join(missing)}: give "
            "it all that ordering.Ordering names; where nothing of the next order is known, a copy "
            "of current as next and zero as left."
        )


def check_place(place: ReadState, num_units: int, workers: int, window: int) -> None:
    """Raises ValueError for a place that is none of the order's, or from which no step begins."""
    unit, rest = divmod(int(place.units), workers)
    if rest or not 0 <= unit <= num_units:
        raise ValueError(
            f"{int(place.units)} units of the epoch were read, and {workers} workers have "
            f"{num_units} units each: pass a state of this order, after another number of workers "
            "with the order that ordering.resize made."
        )
    aligned = (num_units - unit) % window in (0, num_units % window)
    if hasattr(place.order, "position") and not aligned:
        raise ValueError(
            f"{unit} of {num_units} units were read, which leaves no whole steps of {window} units "
            "for the order to observe: go on with another units_per_step until the epoch ends."
        )


def restored(like: ReadState, saved: PyTree) -> ReadState:
    """`saved` in the structure, types and places of `like`; ValueError if it has other arrays."""
    advice = "pass what Epochs.state gave of an order with the same arguments, units and workers."

    def pick(path, leaf):
        found = saved
        for part in path:
            name = getattr(part, "name", getattr(part, "key", getattr(part, "idx", None)))
            try:
                found = _part(found, name)
            except (KeyError, IndexError, AttributeError, TypeError):
                where = jax.tree_util.keystr(path)
                raise ValueError(f"state has no {where}: {advice}") from None
        data, found = key_data(leaf), key_data(found)
        if np.shape(found) != np.shape(data):
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"state{where} has the shape {np.shape(found)}, and the order's {np.shape(data)}: "
                f"{advice}"
            )
        return _placed(found, leaf)

    found = jax.tree_util.tree_map_with_path(pick, like)
    if len(jax.tree.leaves(saved)) != len(jax.tree.leaves(like)):
        raise ValueError(f"state has arrays that this order does not have: {advice}")
    return found


def _part(tree, name):
    """An item or field, by its name or place, of a tree or of what a checkpoint made of it."""
    if isinstance(tree, Mapping):
        return tree[name] if name in tree else tree[str(name)]
    if isinstance(name, str) and hasattr(tree, name):
        return getattr(tree, name)
    return tree[name]


def key_data(x: Any) -> Any:
    """The uint32 data of typed keys; other arrays as they are."""
    return jax.random.key_data(x) if isinstance(x, jax.Array) and mesh.is_key(x) else x


def _placed(x, like):
    """A copy of an array, typed as `like` and where it is."""
    if not isinstance(like, jax.Array):
        return np.asarray(x)
    if mesh.is_key(like):
        data = _placed(key_data(x), jax.random.key_data(like))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    if not like.committed:
        return jnp.array(x, like.dtype)
    if isinstance(x, jax.Array) and x.is_fully_addressable == like.is_fully_addressable:
        return jnp.copy(jax.device_put(x.astype(like.dtype), like.sharding))
    x = np.asarray(x, like.dtype)
    return jax.make_array_from_callback(x.shape, like.sharding, lambda index: x[index])
