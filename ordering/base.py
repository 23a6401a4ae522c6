"""The interface of an order: pure functions over one state, and what all orders share.

Shape letters of this package: W workers, M units per worker, B units per worker and step, P pairs,
D entries of a gradient. A unit is what is ordered: an example or a fixed microbatch.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Int, Key, PyTree, UInt32

from ordering import trees
from ordering.signs import SignRule
from syncopate import mesh, plans
from syncopate.unstable import axis_names
from syncopate.workers import AXIS, axis_of, count_of

State = Any  # a NamedTuple of arrays, with at least the fields that `Ordering` names
COUNTERS = ("position", "left", "epoch")  # of a first state, int32[] at zero
MOST_UNITS = 2**31 - 1  # units are numbered in int32
LANES = 128  # of a TPU's vector unit


class Ordering(NamedTuple):
    """The order in which one worker visits its units, as a set of pure functions.

    Attributes:
      init: `(key, params) -> state`. `key` is this worker's own typed key. Of `params` only the
        structure and the shapes are used: those of one gradient.
      observe: `(state, gradients) -> state`. Called in the jitted step with the gradients of the
        next n units of the current order, a tree with leaves [n, ...].
      next_epoch: `state -> state`. Makes the next order the current one.
      sync: `state -> state`. Optional: call it where workers communicate anyway, and coordinated
        orders exchange then what they have put off. `next_epoch` exchanges the rest.

    Every state has `current`, int32[M], the order of this epoch; `next`, int32[M], the order of the
    next epoch as far as it is known; `left`, int32[]: the entries `next[:left]` are final, so that
    input can be read ahead across the end of the epoch; and `epoch`, int32[], the epochs that
    `next_epoch` has ended, by which readers know that it was called.

    Orders raise a ValueError at construction for sizes out of range, and while tracing for the
    state of another order or the gradients of another number of units than a step has.

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


@jax.transfer_guard("allow")
def start(
    order: Ordering,
    key: Key[Array, ""],
    gradients: Callable | None = None,
    args: tuple = (),
    *,
    workers: int | Mesh | None = None,
    axis_name: str | None = None,
) -> State:
    """The states of all workers before their first step, with the sizes that they will observe.

    s_w = init(fold_in(key, w), row) for w = 0 .. W - 1, where row has the shapes of one unit of
    `gradients(*args)`, which is not computed.

    Args:
      order: an order of one worker's units.
      key: one key, typed or legacy.
      gradients: what a step calls, as `per_example_grads(loss)` or `sketched_grads(loss, key)`;
        None for an order that looks at no gradients.
      args: what it is called with by one worker, or their shapes; the batch may have any size.
      workers: W >= 1; or a mesh, on whose devices they are put; None for the mesh in scope, and for
        one worker where that has no such axis.
      axis_name: the workers' axis, which coordinated orders have; None as in `map_workers`.

    Returns:
      A state with leaves [W, ...]; for one worker that of `order.init(key, row)`.

    Raises:
      ValueError: if `gradients` has no rows, or there are no such workers.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> order = ordering.cd_grab(8, units_per_step=2)
      >>> loss = lambda w, x: (x @ w) ** 2
      >>> gradients = ordering.sketched_grads(loss, jax.random.key(0), size=64)
      >>> args = jnp.ones(500), jnp.ones((2, 500))
      >>> ordering.start(order, jax.random.key(2), gradients, args, workers=4).current.shape
      (4, 8)
    """
    key, scope = check_key(key), jax.sharding.get_abstract_mesh()
    axes = {*scope.axis_names} - {*scope.manual_axes}
    alone = workers is None and axis_of(axis_name, scope.axis_names) not in axes
    if not alone:
        count, axis_name, devices = count_of(workers, axis_name)

    def row(args):  # of one unit, for its shapes
        found = gradients(*args) if callable(gradients) else None
        if not isinstance(found, tuple) or len(found) != 3:
            raise ValueError(
                f"gradients is {gradients!r}: pass a function that returns (losses, mean, rows), "
                "as ordering.per_example_grads(loss)."
            )
        return jax.tree.map(lambda x: x[0], found[2])

    params = None
    if gradients is not None:
        of_all = row if alone else jax.vmap(row, None, axis_size=count, axis_name=axis_name)
        zeros = lambda x: jnp.zeros(x.shape[not alone :], x.dtype)  # noqa: E731
        params = jax.tree.map(zeros, jax.eval_shape(of_all, args))
    if alone:
        return order.init(key, params)
    of_worker = lambda key, w: order.init(jax.random.fold_in(key, w), params)  # noqa: E731
    if devices is None:
        return jax.vmap(of_worker, (None, 0), axis_name=axis_name)(key, jnp.arange(count))

    def on_device(key):
        return jax.tree.map(lambda x: x[None], of_worker(key, jax.lax.axis_index(axis_name)))

    return jax.jit(jax.shard_map(
        on_device, mesh=devices, in_specs=PartitionSpec(), out_specs=PartitionSpec(axis_name),
        axis_names={axis_name}, check_vma=False,
    ))(key)  # fmt: skip


def checked(
    order: Ordering, num_units: int, kind: type, *, observes: bool = True,
    rule: SignRule | None = None, **has: bool,
) -> Ordering:  # fmt: skip
    """The order, which then refuses empty params, and states of other orders: they may lose units.

    Its states are of this kind, and `has` says whether they have arrays in the fields named.
    """

    def check(state, called):
        own = type(state) is kind and state.current.shape == (num_units,)
        own = own and all(bool(jax.tree.leaves(getattr(state, name))) == has[name] for name in has)
        if own and rule is not None:
            init_rule = rule.init
            coins = jax.eval_shape(lambda: init_rule(jax.random.key(0)))
            own = jax.tree.structure(state.rule) == jax.tree.structure(coins)
        if not own:
            shape = getattr(getattr(state, "current", None), "shape", "none")
            raise ValueError(
                f"{called} got a {type(state).__name__} with an order of shape {shape}, and this "
                f"order has a {kind.__name__} of {num_units} units, a sign rule, gathers and "
                "units_per_step: pass a state of this order, as init or its last call returned it, "
                "under jax.vmap or local_opt.map_workers those of all workers."
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
        return order.observe(state, gradients)

    def next_epoch(state):
        check(state, "next_epoch")
        return order.next_epoch(state)

    def sync(state):
        check(state, "sync")
        return order.sync(state)

    # Where a program forbids transfers, ours are of a few numbers, outside of a jit.
    allow = jax.transfer_guard("allow")
    return Ordering(allow(init), allow(observe), allow(next_epoch), allow(sync))


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
    """The stable argsort. A CPU sorts plain numbers several times faster than pairs."""

    def packed(numbers):  # the number in the upper 32 bits, the index in the lower
        with jax.enable_x64(True):
            place = jnp.arange(numbers.shape[0], dtype=jnp.uint64)
            both = jax.lax.sort((numbers.astype(jnp.uint64) << jnp.uint64(32)) | place)
            return (both & jnp.uint64(2**32 - 1)).astype(jnp.int32)

    pairs = lambda numbers: mesh.varying(jnp.argsort(numbers), numbers)  # noqa: E731
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
    """The next order with the `valid` pairs, int32[P], placed at both ends, as their signs say."""
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

    NumPy's would overflow in products.
    """
    num_units = plans.check_whole("num_units", num_units, 1, MOST_UNITS)
    return num_units, plans.check_whole("units_per_step", units_per_step, 1, num_units)


def check_key(key: Any) -> Key[Array, ""]:
    """The key, typed; raises ValueError unless it is that of one worker."""
    return plans.check_key(
        key,
        "init takes one worker's key. Call it under jax.vmap or local_opt.map_workers, which give "
        "each worker its own; in jax.shard_map pass key[0].",
    )


def check_gradients(gradients: PyTree, num_units: int, units_per_step: int) -> int:
    """The number of units in `gradients`; raises ValueError if no step can have so many."""
    size, tail = trees.check_gradients(gradients), num_units % units_per_step
    if size not in (units_per_step, tail):
        last = f", the last one {tail}" if tail else ""
        raise ValueError(
            f"observe got gradients of {size} units; a step has {units_per_step}{last} (of "
            f"{num_units}). Slice the order so, or build it with another units_per_step."
        )
    return size


def check_shapes(tree: PyTree, like: PyTree, what: str = "gradients") -> None:
    """Raises ValueError unless leaves [n, ...] have the shapes of `like` after the leading axis."""
    unit = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)
    plans.check_like(
        f"one unit of {what}", unit, like, "the state",
        "call init with params shaped like one gradient (for sketches jnp.zeros(size)), and both "
        "under jax.vmap for several workers.",
    )  # fmt: skip


def of_only_axis(make: Callable[[str], Ordering]) -> Ordering:
    """The order of workers whose axis is the only one in scope where a function is called."""
    make(AXIS)  # refuses bad arguments

    def called(name):
        def function(*args, **named):
            return getattr(make(axis_of(None, axis_names(), alone=True)), name)(*args, **named)

        return function

    return Ordering(*map(called, Ordering._fields))


def shared_key(key: Key[Array, ""], axis_name: str) -> Key[Array, ""]:
    """Worker 0's key, on every worker, for random numbers that are equal on all workers."""
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
    """A tree that is equal on all workers; where they are simulated one copy, so not batched."""
    if not simulated(axis_name):
        return tree
    return jax.tree.map(lambda x: _of_first(x, axis_name), tree)


def check_equal(axis_name: str, rows: Array | None = None) -> None:
    """Raises ValueError if devices of one worker might see other gradients, and sign otherwise.

    That is so under any mesh axis beside the workers', but not of rows that are whole: over axes
    that are left to the compiler, and where types say that they are equal.
    """
    others = mesh.beside(axis_name, manual_only=rows is not None)
    if rows is not None:
        equal = mesh.typed_axes(tuple(others)) - mesh.varying_axes(rows)
        others = [axis for axis in others if axis not in equal]
    if others:
        raise ValueError(
            f"cd_grab observes under the mesh axes {others} beside the workers' {axis_name!r}, and "
            "all devices of a worker need the same numbers. Observe sketches, which "
            'ordering.make_sketch(specs=) makes equal, with gathers="sync", in a '
            "jax.shard_map with check_vma=True if these axes are manual; if they hold workers, "
            "too, name all of them in axis_name."
        )
