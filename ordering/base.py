"""The interface of an order: pure functions over one state, and helpers for all orders.

Shape letters of this package: W workers, M units per worker, B units per worker and step, P pairs,
D entries of a gradient. A unit is what is ordered: an example or a fixed microbatch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, Key, PyTree, UInt32

from ordering import trees
from ordering.indices import Indices
from ordering.signs import SignRule
from syncopate import mesh, plans
from syncopate.unstable import axis_names
from syncopate.workers import AXIS, axis_of, count_of

State = Any  # a NamedTuple of arrays, with at least the fields that `Ordering` names
COUNTERS = ("position", "left", "epoch")  # fields of a first state that are int32[] at zero
MOST_UNITS = 2**31 - 1  # units are numbered in int32


class Ordering(NamedTuple):
    """The order in which one worker visits its units, as a set of pure functions.

    Attributes:
      init: `(key, params) -> state`. `key` is this worker's own typed key. `params` gives the
        structure and the shapes of one gradient; its values are not used.
      observe: `(state, gradients) -> state`. Called in the jitted step with the gradients of the
        next n units of the current order, a tree with leaves [n, ...].
      next_epoch: `state -> state`. Makes the next order the current one.
      sync: `state -> state`. Optional: call it where workers communicate anyway, so that
        coordinated orders exchange deferred data there. `next_epoch` exchanges the rest.
      units_per_step: B, the units of a step, which readers read as a batch.
      is_global: whether `current` names units of all workers, instead of the worker's own.
      total: for a global order, the number of units of the data; None for W M.
      indices: `state -> Indices`, for an order whose units are computed: the units of this epoch,
        of all workers, step after step. All workers share its states, which need no arrays.

    Every other state has three arrays. `current`, int32[M], is the order of this epoch, and `next`,
    int32[M], the order of the next epoch as far as it is known. The entries `next[:left]` are
    final, where `left` is int32[], so that input can be read ahead across the end of the epoch. It
    may also have `epoch`, int32[], the number of finished epochs, and `position`, int32[], the
    number of units observed in this epoch. With a `position`, readers refuse to go on after a step
    whose gradients were not observed.

    Compile the functions with the step (`jax.jit`): one call of `observe` by itself takes a hundred
    times as long.

    Orders raise a ValueError at construction for sizes out of range. While tracing they raise one
    for the state of another order, or if the number of gradients is not that of a step.

    Examples:
      >>> import jax
      >>> from syncopate import ordering
      >>> order = ordering.random_reshuffling(4)
      >>> state = order.init(jax.random.key(0), params=None)
      >>> sorted(order.next_epoch(state).current.tolist())
      [0, 1, 2, 3]
    """

    init: Callable[[Key[Array, ""], PyTree], State]
    observe: Callable[[State, PyTree], State]
    next_epoch: Callable[[State], State]
    sync: Callable[[State], State] = lambda state: state
    units_per_step: int = 1
    is_global: bool = False
    total: int | None = None
    indices: Callable[[State], Indices] | None = None


Make = TypeVar("Make", bound=Callable)


def made_once(make: Make) -> Make:
    """Equal calls return one order, for which a program is compiled once."""
    cached = functools.lru_cache(256, typed=True)(make)

    @functools.wraps(make)
    def called(*args, **named):
        try:
            hash((args, tuple(named.items())))
        except TypeError:  # `make` raises a better error for such arguments
            return make(*args, **named)
        return cached(*args, **named)

    return cast(Make, called)


@jax.transfer_guard("allow")
def init_workers(
    order: Ordering,
    key: Key[Array, ""],
    like: PyTree = None,
    workers: int | Mesh | None = None,
    *,
    axis_name: str | None = None,
) -> State:
    """The states of all workers before their first step.

    s_w = init(fold_in(key, w), like) for w = 0 .. W - 1.

    Args:
      order: an order of one worker's units.
      key: one key, typed or legacy.
      like: a tree with the shapes of one unit's gradient, such as the parameters; for sketches
        `jnp.zeros(size)`; None for an order that uses no gradients.
      workers: W >= 1; or a mesh, whose devices then hold the states. None for the mesh in scope, or
        for one worker if that mesh has no such axis.
      axis_name: the workers' axis, which coordinated orders need; None for the only axis of the
        mesh, or "worker".

    Returns:
      A state with leaves [W, ...]; for one worker, and for an order with `indices`, whose state
      all workers share, `order.init(key, like)`.

    Raises:
      ValueError: if `like` has no shapes, or there are no such workers.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> order = ordering.cd_grab(8, units_per_step=2)
      >>> state = ordering.init_workers(order, jax.random.key(2), jnp.zeros(64), workers=4)
      >>> state.current.shape
      (4, 8)
    """
    check_order(order)
    if order.indices is not None:  # all workers share its state
        return order.init(key, like)
    leaves, structure = jax.tree.flatten(like)
    if not all(jnp.issubdtype(getattr(leaf, "dtype", object), np.number) for leaf in leaves):
        raise ValueError(
            f"like is {like!r:.200}: pass a tree of arrays of the shapes of one unit's gradient, "
            "such as the parameters, or for sketches jnp.zeros(size)."
        )
    canonical = jax.dtypes.canonicalize_dtype
    shapes = tuple((tuple(leaf.shape), canonical(leaf.dtype)) for leaf in leaves)
    return _init(order, structure, shapes, scope_of(workers, axis_name))(plans.check_key(key))


class Scope(NamedTuple):
    """All workers: their number (None for one without an axis), the axis, and the mesh if any."""

    workers: int | None
    axis_name: Any = None
    mesh: Any = None

    @property
    def of_process(self) -> np.ndarray:
        """The numbers of the workers whose devices belong to this process."""
        if self.mesh is None:
            return np.arange(self.workers or 1)
        axis, process = self.mesh.axis_names.index(self.axis_name), jax.process_index()
        devices = np.ndenumerate(self.mesh.devices)
        return np.unique([at[axis] for at, device in devices if device.process_index == process])

    @property
    def sharding(self) -> NamedSharding | None:
        """The sharding of arrays [W, ...] on the workers' devices; None for the default device."""
        if self.mesh is None:
            return None
        return NamedSharding(self.mesh, PartitionSpec(self.axis_name))

    def map(self, function: Callable) -> Callable:
        """Maps a function of one worker's trees over all workers, leaves [W, ...]."""
        if self.workers is None:
            return function
        if self.mesh is None:
            return jax.vmap(function, axis_name=self.axis_name)

        def on_device(*trees):
            result = function(*jax.tree.map(lambda x: x[0], trees))
            return jax.tree.map(lambda x: x[None], result)

        return self.shard_map(on_device, PartitionSpec(self.axis_name))

    def shard_map(self, function: Callable, in_specs: Any) -> Callable:
        """The function over the workers' axis of the mesh, with results [W, ...]."""
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=PartitionSpec(self.axis_name),
            axis_names={self.axis_name},
            check_vma=False,
        )


def scope_of(workers: int | Mesh | None, axis_name: str | None) -> Scope:
    """The workers that `init_workers` is called for."""
    scope = jax.sharding.get_abstract_mesh()
    axes = {*scope.axis_names} - {*scope.manual_axes}
    if workers is None and axis_of(axis_name, scope.axis_names) not in axes:
        return Scope(None)
    return Scope(*count_of(workers, axis_name))


# A bounded cache, since jax.jit never frees programs for a function that is an argument.
@functools.lru_cache(64)
def _init(order, structure, shapes, scope):
    """`key -> state` of all workers, compiled."""

    def init(key, w=None):
        like = jax.tree.unflatten(structure, [jnp.zeros(*shape) for shape in shapes])
        return order.init(key if w is None else jax.random.fold_in(key, w), like)

    if scope.workers is None:
        return jax.jit(init)
    numbers = np.arange(scope.workers)
    if scope.mesh is None:
        of_all = jax.vmap(init, (None, 0), axis_name=scope.axis_name)
        return jax.jit(lambda key: of_all(key, numbers))

    def on_device(key):
        return jax.tree.map(lambda x: x[None], init(key, jax.lax.axis_index(scope.axis_name)))

    return jax.jit(scope.shard_map(on_device, PartitionSpec()))


@functools.lru_cache(64)
def compiled(order: Ordering, scope: Scope) -> Ordering:
    """The order of all workers; its compiled functions donate the state."""
    scope = Scope(None) if order.indices else scope  # all workers share its state
    names = ("observe", "next_epoch", "sync")
    of_all = {name: jax.jit(scope.map(getattr(order, name)), donate_argnums=0) for name in names}
    return order._replace(**of_all)


def check_order(order: object) -> None:
    """Raises ValueError unless it is an `Ordering`."""
    if not isinstance(order, Ordering):
        raise ValueError(
            f"order is {order!r:.200}: pass an Ordering, such as ordering.pair_balance(num_units)."
        )


def checked(
    order: Ordering,
    num_units: int,
    kind: type,
    *,
    observes: bool = True,
    rule: SignRule | None = None,
    **has: bool,
) -> Ordering:
    """Makes an order refuse empty params, and states of other orders, which could lose units.

    Its states are of type `kind`, and `has` says whether they have arrays in the named fields.
    """

    def check(state, called):
        fits = type(state) is kind and state.current.shape == (num_units,)
        for name in has if fits else ():
            fits = fits and bool(jax.tree.leaves(getattr(state, name))) == has[name]
        if fits and rule is not None:
            init_rule = rule.init
            coins = jax.eval_shape(lambda: init_rule(jax.random.key(0)))
            fits = jax.tree.structure(state.rule) == jax.tree.structure(coins)
        if not fits:
            shape = getattr(getattr(state, "current", None), "shape", "none")
            raise ValueError(
                f"{called} got a {type(state).__name__} with an order of shape {shape}, but this "
                f"order has a {kind.__name__} of {num_units} units, made with its sign rule, "
                "gathers and units_per_step: pass the state that init or the last call of this "
                "order returned; for several workers call it under jax.vmap or "
                "local_opt.map_workers."
            )

    def init(key, params=None):
        if observes and not trees.tree_size(params):
            raise ValueError(
                f"params holds no numbers ({jax.tree.structure(params)}): pass a tree of the "
                "shapes of one gradient (for sketches jnp.zeros(size)), or use random_reshuffling."
            )
        return order.init(key, params)

    def observe(state, gradients):
        check(state, "observe")
        return order.observe(on_device(state), gradients)

    def next_epoch(state):
        check(state, "next_epoch")
        return order.next_epoch(on_device(state))

    def sync(state):
        check(state, "sync")
        return order.sync(on_device(state))

    def on_device(state):  # NumPy's arrays, as from a checkpoint, cannot be updated
        return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, state)

    # Allowed even if a program forbids transfers: a few numbers, outside of a jit.
    allow = jax.transfer_guard("allow")
    return order._replace(
        init=allow(init), observe=allow(observe), next_epoch=allow(next_epoch), sync=allow(sync)
    )


def observe_nothing(state: State, gradients: PyTree) -> State:
    """The state, unchanged: the `observe` of orders that use no gradients."""
    if gradients is not None:
        trees.check_gradients(gradients)
    return state


def first_order(key: Key[Array, ""], num_units: int) -> Int[Array, "M"]:
    """The random order that every ordering starts from under `key`."""
    return permutation(jax.random.fold_in(check_key(key), 0), num_units)


def first_fields(key: Key[Array, ""], num_units: int, kind: type) -> dict[str, Array]:
    """The fields of a first state of this type: a random order, and its `COUNTERS` at zero."""
    current = first_order(key, num_units)
    # A copy, because a donated state must not hold a buffer twice.
    fields = {"current": current, "next": jnp.copy(current)}
    counters = [name for name in COUNTERS if name in kind._fields]
    return fields | {name: jnp.zeros((), jnp.int32) for name in counters}


def permutation(key: Key[Array, ""], size: int) -> Int[Array, "M"]:
    """`jax.random.permutation(key, size)` with a faster sort; varies over the axes of `key`.

    Random numbers are sorted, in as many rounds as make ties between them negligible.
    """
    order = jnp.arange(size, dtype=jnp.int32)
    for _ in range(math.ceil(3 * math.log(size) / math.log(2**32 - 1))):
        key, draw = jax.random.split(key)
        order = order[_argsort(jax.random.bits(draw, (size,), jnp.uint32))]
    return mesh.varying(order, key)


def _argsort(numbers: UInt32[Array, "M"]) -> Int[Array, "M"]:
    """The stable argsort; a CPU sorts single numbers several times faster than pairs."""

    def packed(numbers):  # the number in the upper 32 bits, the index in the lower ones
        with jax.enable_x64(True):
            place = jnp.arange(numbers.shape[0], dtype=jnp.uint64)
            both = jax.lax.sort((numbers.astype(jnp.uint64) << jnp.uint64(32)) | place)
            return (both & jnp.uint64(2**32 - 1)).astype(jnp.int32)

    def pairs(numbers):
        return mesh.varying(jnp.argsort(numbers).astype(jnp.int32), numbers)

    return jax.lax.platform_dependent(numbers, cpu=packed, default=pairs)


def begin_epoch(state: State, order: Int[Array, "M"], *cleared: str) -> State:
    """The next epoch's state, with this order and the fields named in `cleared` set to zero."""
    zeros = {name: jax.tree.map(jnp.zeros_like, getattr(state, name)) for name in cleared}
    return with_order(state, order)._replace(epoch=state.epoch + 1, **zeros)


def with_order(state: State, order: Int[Array, "M"]) -> State:
    """The state with this order for this epoch and, until pairs are placed, for the next."""
    # A copy, because a donated state must not hold a buffer twice.
    return state._replace(current=order, next=jnp.copy(order))


def fill_middle(next_order: Array, current: Array, left: Array, placed: Array) -> Array:
    """`next_order` with `current[placed:]` in its free slots, `[left, left + M - placed)`."""
    num_units = current.shape[0]
    slot = jnp.arange(num_units)
    free = (slot >= left) & (slot < left + num_units - placed)
    return jnp.where(free, current[jnp.clip(slot - left + placed, 0, num_units - 1)], next_order)


def align_pairs(pending: Array, units: Array, *, waiting: Array, num_pairs: int) -> Array:
    """The 2 P vectors to pair up: `pending`, if one is `waiting`, followed by `units`."""
    units = units.astype(pending.dtype)
    around = jnp.concatenate([pending[None], units, jnp.zeros_like(pending)[None]])
    return jax.lax.dynamic_slice_in_dim(around, 1 - waiting, 2 * num_pairs)


def place_pairs(state: State, pair: Array, valid: Array, plus: Array) -> Int[Array, "M"]:
    """The next order with the `valid` pairs, int32[P], placed at both ends by their signs."""
    num_units = state.current.shape[0]
    first, second = state.current[2 * pair], state.current[2 * pair + 1]
    front = jnp.where(valid, pair, num_units)  # out of range: dropped
    back = jnp.where(valid, num_units - 1 - pair, num_units)
    filled = state.next.at[front].set(jnp.where(plus, first, second), mode="drop")
    return filled.at[back].set(jnp.where(plus, second, first), mode="drop")


def signs_of(state: State, following: Int[Array, "M"]) -> Bool[Array, "P"]:
    """Whether `place_pairs` gave each pair a plus; arbitrary for pairs that it did not place."""
    count = state.current.shape[0] // 2
    return following[:count] == state.current[: 2 * count : 2]


def check_units(num_units: int, units_per_step: int = 1) -> tuple[int, int]:
    """(M, B) as Python integers; raises ValueError unless a step of B units fits in an epoch of M.

    Integers of NumPy would overflow in products.
    """
    if plans.is_whole(num_units) and num_units > MOST_UNITS:
        raise ValueError(
            f"num_units is {num_units}, and an order that is stored has at most {MOST_UNITS}: use "
            "ordering.counted, whose units are computed."
        )
    num_units = plans.check_whole("num_units", num_units, 1, MOST_UNITS)
    return num_units, plans.check_whole("units_per_step", units_per_step, 1, num_units)


def check_key(key: Any) -> Key[Array, ""]:
    """The typed key; raises ValueError unless it is one worker's key."""
    return plans.check_key(
        key,
        "init takes one worker's key. Call it under jax.vmap or local_opt.map_workers, which pass "
        "each worker its key; in jax.shard_map pass key[0].",
    )


def check_gradients(gradients: PyTree, num_units: int, units_per_step: int) -> int:
    """The number of units in `gradients`; raises ValueError if no step can have so many."""
    size, tail = trees.check_gradients(gradients), num_units % units_per_step
    if size not in (units_per_step, tail):
        last = f", the last one {tail}" if tail else ""
        raise ValueError(
            f"observe got gradients of {size} units; a step has {units_per_step}{last} (of "
            f"{num_units} units). Pass as many, or build the order with another units_per_step."
        )
    return size


def check_shapes(tree: PyTree, like: PyTree, what: str = "gradients") -> None:
    """Raises ValueError unless leaves [n, ...] have the shapes of `like` after the leading axis."""
    unit = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)
    plans.check_like(
        f"one unit of {what}",
        unit,
        like,
        "the state",
        "call init with params shaped like one gradient (for sketches jnp.zeros(size)), and both "
        "under jax.vmap for several workers.",
    )


def of_only_axis(make: Callable[[str], Ordering]) -> Ordering:
    """An order over the only axis that is in scope where its functions are called.

    If no axis is in scope, it is the order of a single worker.
    """
    order = make(AXIS)  # refuses bad arguments

    def called(name):
        def function(*args, **named):
            if names := axis_names():
                return getattr(make(axis_of(None, names, alone=True)), name)(*args, **named)
            # Binds an axis of one worker without batching the arguments.
            one = lambda _: getattr(order, name)(*args, **named)  # noqa: E731
            single = jax.vmap(one, axis_name=AXIS, axis_size=1, in_axes=None)
            return jax.tree.map(lambda x: x[0], single(None))

        return function

    functions = ("init", "observe", "next_epoch", "sync")
    return order._replace(**{name: called(name) for name in functions})


def shared_key(key: Key[Array, ""], axis_name: str) -> Key[Array, ""]:
    """Worker 0's key on every worker, for random numbers that are equal on all of them."""
    mesh.axis_size(axis_name)  # raises outside of the axis
    return _of_first(check_key(key), axis_name)


def _of_first(x, axis_name):
    """Worker 0's array, on every worker."""
    if mesh.is_key(x):
        data = _of_first(jax.random.key_data(x), axis_name)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    mine = jnp.where(jax.lax.axis_index(axis_name) == 0, x, jnp.zeros_like(x))
    return jax.lax.psum(mine, axis_name).astype(x.dtype)


def simulated(axis_name: str) -> bool:
    """Whether the workers are on one device, under `jax.vmap`."""
    return not {*mesh.names_of(axis_name)} & {*jax.sharding.get_abstract_mesh().manual_axes}


def equal_once(tree: PyTree, axis_name: str) -> PyTree:
    """A tree that is equal on all workers; for simulated workers one unbatched copy."""
    if not simulated(axis_name):
        return tree
    return jax.tree.map(lambda x: _of_first(x, axis_name), tree)


def check_equal(axis_name: str, rows: Array | None = None) -> None:
    """Raises ValueError if the devices of one worker might see different gradients and signs.

    They might under any mesh axis beside the workers'. Rows are exempt if every device has them
    whole: over axes that are left to the compiler, or if their types show that they are equal.
    """
    others = mesh.beside(axis_name, manual_only=rows is not None)
    if rows is not None:
        equal = mesh.typed_axes(tuple(others)) - mesh.varying_axes(rows)
        others = [axis for axis in others if axis not in equal]
    if others:
        raise ValueError(
            f"cd_grab observes under the mesh axes {others} beside the workers' {axis_name!r}, and "
            "all devices of a worker need the same numbers. Observe sketches, which "
            'ordering.make_sketch(specs=) makes equal, with gathers="sync". If these axes are '
            "manual, use jax.shard_map with check_vma=True. If they hold workers, too, name all of "
            "them in axis_name."
        )
