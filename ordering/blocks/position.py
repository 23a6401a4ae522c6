"""Where a run stands in its data, also for another number of workers."""

from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Int, PyTree, UInt32

from ordering.base import Ordering, State
from ordering.blocks.split import Blocks
from ordering.blocks.windows import Share
from ordering.dealing import DealtShuffleState, DealtState
from ordering.resize import resize as resize_order
from syncopate import plans


class Position(NamedTuple):
    """Where a run stands in its data: a tree of arrays, to be saved beside the parameters.

    Attributes:
      orders: the state of the order, of one worker or of all of them.
      epoch, step: int64[], the next batch is that of this step of this epoch.
      sizes: int64[5], records in a block, blocks in a window, records in a batch, the seed, the
        digest of the filter.
      files: uint32[F, 3], the number of records and the digest of every file.
      broken: int32[W, M], the units of an epoch that began with W workers, for a run that goes on
        with another number; () otherwise.
    """

    orders: State
    epoch: Int[np.ndarray, ""]
    step: Int[np.ndarray, ""]
    sizes: Int[np.ndarray, "5"]
    files: UInt32[np.ndarray, "F 3"]
    broken: PyTree = ()


def first_position(blocks: Blocks, *, window: int, batch_size: int, seed: int) -> Position:
    """The beginning of a run, without a state of the order."""
    sizes = np.array((blocks.unit_size, window, batch_size, seed, blocks.filter_digest), np.int64)
    return Position((), np.array(0), np.array(0), sizes, blocks.digests)


def checked(
    position: Position, first: Position, blocks: Blocks, steps: int, current: np.ndarray
) -> Position:
    """The position on the host; ValueError if it is not one of these blocks, sizes and orders."""
    if not isinstance(position, Position):
        raise ValueError(f"position is a {type(position).__name__}: pass a saved Position.")
    position = Position(position.orders, *jax.tree.map(np.asarray, position[1:]))
    _check_form(position)
    names = ("records in a block", "blocks in a window", "records in a batch", "the seed")
    names += ("the digest of split's filter, 0 without keep=",)
    for name, saved, given in zip(names, position.sizes, first.sizes, strict=True):
        if saved != given:
            raise ValueError(f"{name}: the position was saved with {saved}, now it is {given}.")
    if len(position.files) != len(first.files):
        raise ValueError(
            f"the position was saved with {len(position.files)} files, now there are "
            f"{len(first.files)}: pass the same files in the same sequence."
        )
    for part, saved, given in zip(blocks.parts, position.files, first.files, strict=True):
        if saved[0] != given[0]:
            raise ValueError(
                f"{part.name} has {given[0]} records, and had {saved[0]} when the position was "
                "saved: restore the file."
            )
        if (saved != given).any():
            raise ValueError(
                f"{part.name} is not the file with which the position was saved: its bytes differ. "
                "Restore the file, or begin anew without a position."
            )
    if not 0 <= int(position.step) < steps or int(position.epoch) < 0:
        raise ValueError(
            f"step {position.step} of epoch {position.epoch} is not one of an epoch of "
            f"{steps} steps: pass the position unchanged."
        )
    _check_orders(position.orders, current)
    # Checkpoints may hold the same numbers in other types.
    return position._replace(sizes=first.sizes, files=first.files)


def _check_form(position):
    shapes = [np.shape(x) for x in position[1:]]
    numbers = all(x.dtype.kind in "iu" for x in jax.tree.leaves(position[1:]))
    broken = shapes.pop()
    shapes[-1] = shapes[-1][1:]
    if shapes != [(), (), (5,), (3,)] or not (broken == (0,) or len(broken) == 2) or not numbers:
        kinds = [plans.as_array(x)[1] for x in position[1:]]
        raise ValueError(
            f"position has epoch, step, sizes, files and broken of {', '.join(kinds)}: pass it as "
            "it was saved."
        )


def _check_orders(orders, current):
    """Raises ValueError unless the orders that are read, of this host, are among the saved ones."""
    saved = getattr(orders, "current", None)
    if saved is None or not getattr(saved, "is_fully_addressable", True):
        return
    rows, known = (np.atleast_2d(np.asarray(x, np.int32)) for x in (current, saved))
    if not {row.tobytes() for row in rows} <= {row.tobytes() for row in known}:
        raise ValueError(
            f"live gives other orders, of shape {current.shape}, than the position holds, of shape "
            f"{saved.shape}: begin with position.orders as the state, or its rows of this host's "
            "workers; for another number of workers, resize the position first."
        )


def share_of(position: Position, current: np.ndarray, share: Share | tuple | None) -> Share:
    """The workers of this host; ValueError if they and the others do not make up a broken epoch."""
    workers, num_units = (1, *current.shape)[-2:]
    found = Share(0, workers, workers) if share is None else Share.of(share)
    units = np.size(position.broken)
    if found.count != workers or units not in (0, found.workers * num_units):
        raise ValueError(
            f"share is {share!r}: pass (first, count, workers) with the {workers} workers of this "
            f"host as count and all workers, of {num_units} units each, as workers. They finish an "
            f"epoch of {units} units, which other workers began."
        )
    return found


def of_broken(position: Position, done: int, share: Share) -> tuple[np.ndarray, dict]:
    """The orders of a broken epoch, and the sizes that its workers had, for `windows`.

    `done` counts the units that each of the new workers has read.
    """
    orders = cast(np.ndarray, position.broken)
    _, window, batch_size, *_ = position.sizes.tolist()
    old = len(orders)
    words = {
        "window": window * share.workers // old,
        "batch_size": batch_size * share.workers // old,
    }
    orders = orders[:, done * share.workers // old :]
    return orders, words | {"num_units": position.broken.shape[1], "share": share}


def as_position(tree: PyTree, orders: State) -> Position:
    """The position out of the dicts that a checkpoint restores without a template.

    Args:
      tree: `{"orders": {...}, "epoch": ..., ...}`, or a `Position`.
      orders: a state of the order, of any number of workers, for the types.

    Returns:
      The `Position`.

    Raises:
      ValueError: if the dicts are not those of a position with such an order.

    Examples:
      >>> import jax, numpy as np, ordering
      >>> blocks = ordering.blocks.split(np.arange(12), unit_size=3)
      >>> state = ordering.random_reshuffling(4).init(jax.random.key(0), None)
      >>> reads = ordering.blocks.read_blocks(blocks, lambda: state, window=2, batch_size=3)
      >>> saved = reads.position()
      >>> restored = ordering.blocks.as_position(saved._asdict(), state)
      >>> int(restored.step), type(restored.orders).__name__
      (0, 'ShuffleState')
    """
    if isinstance(tree, Position):
        return tree
    if not isinstance(tree, dict):
        raise ValueError(f"tree is a {type(tree).__name__}: pass the dicts of a saved position.")
    like = Position(orders, *(np.array(0) for _ in Position._fields[1:]))
    return _typed(tree, like, "tree")


def _typed(tree: Any, like: Any, name: str) -> Any:
    if not isinstance(tree, dict):
        return tree
    fields = getattr(like, "_fields", ())
    if set(fields) != set(tree):
        raise ValueError(
            f"{name} has {sorted(tree)}, and a {type(like).__name__} has {sorted(fields)}: pass "
            "what was saved, and a state of the same order."
        )
    return type(like)(*(_typed(tree[k], getattr(like, k), f"{name}.{k}") for k in fields))


def resize(
    position: Position, fresh: State, order: Ordering, *, axis_name: str = "worker"
) -> Position:
    """The position for another number of workers: each record is still visited once per epoch.

    The rest of the epoch keeps its batches: the W b records of each step are shared by the W' new
    workers. What the order has observed of this epoch is dropped, so that the next epoch has the
    same order again, or a new one of a shuffle; from then on it observes as before.

    Args:
      position: of all W workers, with orders that deal blocks (`dealt`, `dealt_reshuffling`).
      fresh: a first state of `order` for W' workers with M' = W M / W' units each.
      order: the order for W' workers, with windows of K' = W K / W' blocks.
      axis_name: the workers' axis, by which `order` was made.

    Returns:
      The position for W' workers, for `read_blocks(window=K', batch_size=W b / W')`.

    Raises:
      ValueError: for orders with fixed shards, or numbers that do not divide.

    Examples:
      >>> import jax, numpy as np, ordering
      >>> blocks = ordering.blocks.split(np.arange(16), unit_size=2)
      >>> def orders_of(workers):
      ...     order = ordering.dealt_reshuffling(8 // workers)
      ...     keys = jax.random.split(jax.random.key(0), workers)
      ...     return order, jax.vmap(order.init, (0, None), axis_name="worker")(keys, None)
      >>> (_, two), (order, four) = orders_of(2), orders_of(4)
      >>> reads = ordering.blocks.read_blocks(blocks, lambda: two, window=2, batch_size=2)
      >>> before = next(reads)[0].ravel().tolist()
      >>> position = ordering.blocks.resize(reads.position(), four, order)
      >>> state = position.orders
      >>> reads = ordering.blocks.read_blocks(
      ...     blocks, lambda: state, window=1, batch_size=1, num_epochs=1, position=position
      ... )
      >>> after = [i for records, _ in reads for i in records.ravel().tolist()]
      >>> sorted(before + after) == list(range(16))
      True
    """
    if not isinstance(position, Position):
        raise ValueError(f"position is a {type(position).__name__}: pass a saved Position.")
    state = position.orders
    if not isinstance(state, DealtState | DealtShuffleState) or np.ndim(state.current) != 2:
        raise ValueError(
            f"the position's orders are a {type(state).__name__}: pass those of all workers, of an "
            "order that deals blocks, as dealt or dealt_reshuffling."
        )
    if type(fresh) is not type(state) or np.ndim(fresh.current) != 2:
        raise ValueError(
            f"fresh is a {type(fresh).__name__} and the position's orders are a "
            f"{type(state).__name__}: pass the first state of all new workers of the same order."
        )
    if not isinstance(order, Ordering):
        raise ValueError(f"order is {order!r}: pass the Ordering of which fresh is a state.")
    old, new = len(state.current), len(fresh.current)
    unit_size, window, batch_size, *rest = np.asarray(position.sizes).tolist()
    if old * window % new or old * batch_size % new:
        raise ValueError(
            f"fresh has {new} workers, who cannot share the windows of {old}, of {window} blocks "
            f"and batches of {batch_size}: pass a number that divides {old * window} and "
            f"{old * batch_size}."
        )
    after = old * window // new
    batches = -(-window * unit_size // batch_size)
    done = min(int(position.step) // batches * after, fresh.current.shape[1])
    # Half a window is a broken epoch, too.
    visited = max(done, 1) if int(position.step) else 0
    state, _ = resize_order(
        state, fresh, order, units_per_step=window, visited=visited, axis_name=axis_name
    )
    broken = position.broken
    if visited and not jax.tree.leaves(broken):
        broken = np.asarray(position.orders.current)
    sizes = np.array([unit_size, after, old * batch_size // new, *rest], np.int64)
    return position._replace(orders=state, sizes=sizes, broken=broken)
