"""The programs of a run, lowered from shapes alone: nothing is read, placed or allocated."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.tasks.base import Recipe, Task
from experiments.training.config import Order, Sizes, size_of, sizes_of
from experiments.training.parts import ends_of, parts_of, state_shapes, steps_of
from experiments.training.step import TrainState
from local_opt import runners


class Shapes(NamedTuple):
    """A run as the compiler sees it.

    Fields:
      state: all there is of it, as `jax.ShapeDtypeStruct`s that say where they live.
      step: fresh -> its steps between two events of the host, lowered: one loop of a length that
        the compiler does not know, so that it counts one step.
      end: (sync, epoch_end) -> what follows them, lowered.
      owned: which fields of the state have a worker axis; sizes: of the run.
      sync_in_step: workers meet in every step; on_host: the host draws the orders, and no epoch's
        end is compiled.
    """

    state: TrainState
    step: Callable[[bool], jax.stages.Lowered]
    end: Callable[[bool, bool], jax.stages.Lowered]
    owned: tuple[bool, ...]
    sizes: Sizes
    sync_in_step: bool
    on_host: bool


def shapes_of(
    task: Task,
    recipe: Recipe,
    row: Order,
    rounds: Callable,
    *,
    proximal: float = 0.0,
    mesh: jax.sharding.Mesh | None = None,
    reads: bool = True,
) -> Shapes:
    """The programs of a run of all workers.

    Args:
      task: may be abstract; recipe: in which setting.
      row: of ORDERS; rounds: `(inner optimizer, axis_name=) -> local_opt.Rounds`.
      proximal: strength of the pull back to the parameters at the last load; 0 for none.
      mesh: a device per worker, which need not be there; None simulates all on one device.
      reads: batches are handed over by the host; False: the data stay on the devices.
    """
    sizes = sizes_of(task, recipe, deals=row.deals)
    parts = parts_of(task, recipe, row, rounds, sizes, proximal=proximal, mesh=mesh)
    run = runners.simulate if mesh is None else runners.over_mesh(mesh)
    owned, shared = runners.owned_sharding(mesh), runners.shared_sharding(mesh)
    workers = sizes.workers

    def placed(tree, own):
        where = owned if own else shared
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)

    def number(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=shared)

    state = TrainState(*map(placed, state_shapes(parts, task.model, run), parts.owned))
    example = jax.tree.map(_one, dict(task.train))
    if reads or not row.deals:
        units = sizes.units_per_step if reads else sizes.num_units
        batch = placed(_with_axes(example, workers, units, sizes.unit_size), True)
    else:
        units = size_of(task.train) // sizes.unit_size
        batch = placed(_with_axes(example, units, sizes.unit_size), False)
    place, rate = number(jnp.int32), number(jnp.float32)
    steps, ends = steps_of(parts, run, reads=reads), ends_of(parts, run)
    # One rate: how many there are does not change the step.
    handed = (batch, place, place, place, number(jnp.float32, 1))
    return Shapes(
        state=state,
        step=lambda fresh: steps(fresh, sizes.units_per_step, False).lower(state, *handed),
        end=lambda sync, epoch_end: ends(sync, epoch_end).lower(state, rate),
        owned=parts.owned,
        sizes=sizes,
        sync_in_step=not parts.owned[0],
        on_host=row.on_host is not None,
    )


def _with_axes(tree, *axes):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), tree)


def lower_step(
    task: Task, recipe: Recipe, row: Order, rounds: Callable, *, proximal: float = 0.0
) -> jax.stages.Lowered:
    """A fresh step of one worker on a device of its own, with what its order does, from shapes."""
    share = size_of(task.train) // recipe.workers
    train = {name: _with_axes(_one(x), share) for name, x in task.train.items()}
    one = task._replace(train=train)
    return shapes_of(one, recipe._replace(workers=1), row, rounds, proximal=proximal).step(True)


def _one(leaf):
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def tree_bytes(tree) -> int:
    """Of arrays or their shapes, without PRNG keys."""
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if not keys(x))
