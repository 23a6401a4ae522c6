"""The interface of an order: a frozen record of methods over one state, and checks for all orders.

Shape letters of this package: W workers, M units per worker, B units per worker and step, P pairs,
D entries of a gradient. A unit is what is ordered: an example or a fixed microbatch.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key, PyTree

from ordering import steps, trees
from ordering.indices import Indices
from ordering.signs import SignRule, check_rule_state
from syncopate import mesh, plans
from syncopate.workers import AXIS, Workers, count_of

State = Any  # a NamedTuple of arrays, with at least the fields that `Ordering` names
MOST_UNITS = 2**31 - 1  # units are numbered in int32
NOT_IN_DIGEST = ("units_per_step", "axis_name")  # a state goes on with others


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordering:
    """The order in which one worker visits its units: a frozen record of pure functions of a state.

    An order of one's own is a subclass with the methods `init`, `observe` and `next_epoch`. Equal
    fields make equal orders, which hash and pickle as other dataclasses do.

    Its state is a NamedTuple with the arrays `current`, int32[M], the order of this epoch; `next`,
    int32[M], the order of the next epoch as far as it is known; `left`, int32[], where the entries
    `next[:left]` are final, so that input can be read ahead across the end of the epoch; and
    `epoch`, int32[], the number of finished epochs. If it `observes`, it has `position`, int32[],
    too, the number of units observed in this epoch. States of several workers have leaves [W, ...].

    Compile the methods with the step (`jax.jit`): one call of `observe` by itself takes a hundred
    times as long.

    Attributes:
      num_units: M, the units of a worker's epoch; of all workers together where it is `computed`.
      units_per_step: B, the units of a worker's step, which readers read as a batch.
      observes: whether every step must call `observe`; readers then refuse to go on without.
      is_global: whether units are numbers of all workers' units, instead of the worker's own.
      computed: whether all workers share one state, and `units` are computed where they are read.
      total: for a global order, the number of units of the data; None for W M.
      step_units: the units of a step of all workers, if there is one number of workers for B.
      epoch_units: `(key, epoch) -> units`, if an epoch is known from its number, without others.

    Raises:
      ValueError: at construction for sizes out of range; while tracing for the state of another
        order, or if the number of gradients is not that of a step.

    Examples:
      >>> import jax
      >>> from syncopate import ordering
      >>> order = ordering.random_reshuffling(4)
      >>> state = order.init(jax.random.key(0), params=None)
      >>> sorted(order.next_epoch(state).current.tolist())
      [0, 1, 2, 3]
    """

    num_units: int
    units_per_step: int = 1

    observes: ClassVar[bool] = False
    is_global: ClassVar[bool] = False
    computed: ClassVar[bool] = False
    total = None
    step_units = None
    epoch_units: ClassVar[Any] = None

    def __post_init__(self):
        num_units, units_per_step = check_units(self.num_units, self.units_per_step)
        self._set(num_units=num_units, units_per_step=units_per_step)

    def _set(self, **fields: Any) -> None:
        """Sets fields while the order is made."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def init(self, key: Key[Array, ""], params: PyTree = None) -> State:
        """The state before the first step, from this worker's own key.

        `params` gives the structure and the shapes of one gradient; its values are not used.
        """
        raise NotImplementedError

    def observe(self, state: State, gradients: PyTree) -> State:
        """The state after the gradients of the next n units of the current order, leaves [n, ...].

        Called in the jitted step.
        """
        if gradients is not None:
            trees.check_gradients(gradients)
        return state

    def next_epoch(self, state: State) -> State:
        """The state in which the next order is the current one."""
        raise NotImplementedError

    def sync(self, state: State) -> State:
        """The state after coordinated orders exchanged deferred data.

        Call it where workers communicate anyway; `next_epoch` exchanges the rest.
        """
        return state

    def units(self, state: State, start: int = 0) -> Indices:
        """The units of this epoch of all workers, step after step: B of each worker, then B more.

        Units of a worker's own are numbered from w M on. The state has leaves [W, ...], or those of
        one worker. The order is copied, so that a step may donate the state. If all workers have
        read `start` units, with steps of any size, these are the units of the steps after them.
        """
        return self._in_steps(state, state.current, start)

    def next_units(self, state: State) -> tuple[Indices, Any]:
        """`units` of the next epoch, and how many units per worker are final in them now.

        The number may be on its way from the device: `int` waits for it.
        """
        return self._in_steps(state, state.next), steps.Least(state.left)

    def resize(self, state: State, fresh: State, current: Int[np.ndarray, "W2 M"], visited: int):
        """`fresh`, a first state of W' workers, with these orders; `ordering.resize` calls it."""
        if visited:
            raise ValueError(
                f"{type(self).__name__} has no method resize, for {visited} visited units: write "
                "one, or save at the end of an epoch."
            )
        epoch = kept(state.epoch, len(current))
        return fresh._replace(current=current, next=current.copy(), epoch=epoch)

    def digest(self, units: int = 0) -> np.uint32:
        """A hash of what a state of this order is a place in; independent of the machine.

        `units` of the epoch were read before that place, which matters for mixtures alone. Any
        `units_per_step` and `axis_name` have one digest.
        """
        del units
        fields = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        content = [
            (name, int(value.digest()) if isinstance(value, Ordering) else value)
            for name, value in fields
            if name not in NOT_IN_DIGEST
        ]
        return np.uint32(zlib.crc32(repr((type(self).__name__, content)).encode()))

    def programs(self, workers: Workers) -> "Programs":
        """The compiled methods for these workers, which live as long as the order."""
        made = self.__dict__.setdefault("_programs", {})  # not of a cache that outlives the order
        if workers not in made:
            made[workers] = _programs(self, Workers(None) if self.computed else workers)
        return made[workers]

    def __getstate__(self) -> dict[str, Any]:  # without compiled programs
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def _in_steps(self, state: State, orders: Any, start: int = 0) -> Indices:
        if np.shape(state.current)[-1:] != (self.num_units,):
            raise ValueError(
                f"{type(self).__name__} has {self.num_units} units, and its state an order of the "
                f"shape {np.shape(state.current)}: pass the state that its last call returned."
            )
        total = self.total or np.size(orders) if self.is_global else None
        return steps.in_steps(orders, self.units_per_step, total=total, start=start)


def kept(leaf: Any, workers: int, fresh: Any = None) -> Any:
    """A leaf [W, ...] for W' workers: each takes it from the worker whose units it takes first.

    Keys are those of `fresh`, since workers without a common sum draw different numbers.
    """
    if fresh is not None and mesh.is_key(fresh):
        return fresh
    old = np.asarray(leaf)
    return old[np.arange(workers) * len(old) // workers]


def resize_balanced(
    rule: SignRule, state: State, fresh: State, current: np.ndarray, next_order, visited: int
) -> State:
    """`fresh` with these orders, and in the middle of an epoch as if it had observed all units."""
    check_rule_state(rule, state.rule)
    workers = len(current)
    return fresh._replace(
        current=current,
        next=next_order,
        position=np.full(workers, current.shape[1] if visited else 0, np.int32),
        epoch=kept(state.epoch, workers),
        rule=jax.tree.map(lambda x, new: kept(x, workers, new), state.rule, fresh.rule),
    )


class Programs(NamedTuple):
    """An order's compiled methods, for states of all workers; all but `init` donate the state."""

    init: Callable[..., State]  # (key, structure and shapes of a gradient) -> state
    observe: Callable[[State, PyTree], State]
    next_epoch: Callable[[State], State]
    sync: Callable[[State], State]


def _programs(order: Ordering, workers: Workers) -> Programs:
    def init(key, structure, shapes):
        like = jax.tree.unflatten(structure, [jnp.zeros(*shape) for shape in shapes])
        if workers.count is None:
            return order.init(key, like)
        numbers = jax.device_put(np.arange(workers.count), workers.sharding)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        return workers.map(lambda key: order.init(key, like))(keys)

    methods = order.observe, order.next_epoch, order.sync
    of_all = (jax.jit(workers.map(method), donate_argnums=0) for method in methods)
    return Programs(jax.jit(init, static_argnums=(1, 2)), *of_all)


def init_workers(
    order: Ordering,
    key: Key[Array, ""],
    like: PyTree = None,
    workers: int | Mesh | None = None,
    *,
    axis_name: str = AXIS,
) -> State:
    """The states of all workers before their first step.

    s_w = init(fold_in(key, w), like) for w = 0 .. W - 1.

    Args:
      order: an order of one worker's units.
      key: one key, typed or legacy.
      like: a tree with the shapes of one unit's gradient, such as the parameters; for sketches
        `jnp.zeros(size)`; None for an order that uses no gradients.
      workers: W >= 1; or a mesh, whose devices then hold the states. None for the mesh in scope if
        it has the workers' axis, or else for one worker.
      axis_name: the workers' axis, which coordinated orders need.

    Returns:
      A state with leaves [W, ...]; for one worker, and for a computed order, whose state all
      workers share, `order.init(key, like)`.

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
    leaves, structure = jax.tree.flatten(like)
    if not all(jnp.issubdtype(getattr(leaf, "dtype", object), np.number) for leaf in leaves):
        raise ValueError(
            f"like is {like!r:.200}: pass arrays of one gradient's shapes, or for sketches "
            "jnp.zeros(size)."
        )
    canonical = jax.dtypes.canonicalize_dtype
    shapes = tuple((tuple(leaf.shape), canonical(leaf.dtype)) for leaf in leaves)
    of_all, key = workers_of(workers, axis_name), plans.check_key(key)
    if isinstance(of_all.mesh, Mesh):
        whole = NamedSharding(of_all.mesh, PartitionSpec())
        key = jax.device_put(key, whole) if whole.is_fully_addressable else key  # by name
    return order.programs(of_all).init(key, structure, shapes)


def workers_of(workers: int | Mesh | None, axis_name: str) -> Workers:
    """The workers that `init_workers` is called for; without a count for one without an axis."""
    scope = jax.sharding.get_abstract_mesh()
    if workers is None and axis_name not in {*scope.axis_names} - {*scope.manual_axes}:
        return Workers(None, axis_name)
    return count_of(workers, axis_name)


def check_order(order: object) -> None:
    """Raises ValueError unless it is an `Ordering`."""
    if not isinstance(order, Ordering):
        raise ValueError(
            f"order is {order!r:.200}: pass an Ordering, such as ordering.pair_balance(num_units)."
        )


def check_state(
    order: Ordering, state: State, kind: type, *, rule: SignRule | None = None, **has: bool
) -> State:
    """The state with JAX's arrays; raises ValueError unless it is one of this order.

    `has` says for some fields of a state of this `kind` whether they hold arrays.
    """
    name, advice = type(order).__name__, "pass the state that its last call returned."
    if type(state) is not kind:
        raise ValueError(
            f"{name} got a {type(state).__name__}, and its state is a {kind.__name__}: {advice}"
        )
    if state.current.shape != (order.num_units,):
        raise ValueError(
            f"state.current has the shape {state.current.shape}, and {name} has {order.num_units} "
            "units: pass its own state, of several workers under jax.vmap or local_opt.map_workers."
        )
    for field, wanted in has.items():
        if bool(jax.tree.leaves(getattr(state, field))) != wanted:
            raise ValueError(
                f"state.{field} is {'empty' if wanted else 'not empty'}, and {name} was made with "
                f"another gathers or units_per_step: {advice}"
            )
    if rule is not None:
        check_rule_state(rule, state.rule)
    return on_device(state)


def on_device(state: State) -> State:
    """The state, with arrays of NumPy, as checkpoints have them, put on the device."""
    put = lambda x: jax.device_put(x) if isinstance(x, np.ndarray | np.generic) else x  # noqa: E731
    return jax.tree.map(put, state)


def check_params(params: PyTree) -> None:
    """Raises ValueError unless a tree holds numbers, as a gradient does."""
    if not trees.tree_size(params):
        raise ValueError(
            f"params holds no numbers ({jax.tree.structure(params)}): pass a tree of one "
            "gradient's shapes (for sketches jnp.zeros(size)), or use random_reshuffling."
        )


def begin_epoch(state: State, order: Int[Array, "M"], *cleared: str) -> State:
    """The next epoch's state, with this order and the fields named in `cleared` set to zero."""
    zeros = {name: jax.tree.map(jnp.zeros_like, getattr(state, name)) for name in cleared}
    return with_order(state, order)._replace(epoch=state.epoch + 1, **zeros)


def with_order(state: State, order: Int[Array, "M"]) -> State:
    """The state with this order for this epoch and, until pairs are placed, for the next."""
    # A copy, because a donated state must not hold a buffer twice.
    return state._replace(current=order, next=jnp.copy(order))


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
