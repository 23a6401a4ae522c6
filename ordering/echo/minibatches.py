"""Minibatches of a batch that is used again, newly permuted in every use."""

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from syncopate import mesh, plans


class Cut(NamedTuple):
    """How a batch is cut: into `parts` parts of its units, each of `size` rows along `axis`."""

    parts: int = 1
    key: Key[Array, ""] | None = None
    axis: int = 0
    size: int = 1
    keeps_first: bool = False  # whether the first use is in the order of the batch

    def units(self, batch: PyTree) -> int:
        """The units in a minibatch; ValueError, which names the leaf, for a batch that has none."""
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        rows = sum(leaves[0][1].shape[self.axis : self.axis + 1])
        for path, leaf in leaves:
            if leaf.shape[self.axis : self.axis + 1] != (rows,):
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} has the shape {leaf.shape}, and others "
                    f"{rows} rows along axis {self.axis}: give all leaves equally many rows."
                )
        check_parts(rows, self.parts * self.size, "rows")
        for _, leaf in leaves:
            shape = [*leaf.shape]
            shape[self.axis] = rows // self.parts
            leaf.sharding.shard_shape(tuple(shape))  # JAX's error if it cannot be split so
        return rows // self.size // self.parts

    def order(self, batch: PyTree, load: int, use: int) -> list[Int[Array, "n"] | None]:
        """The rows of all minibatches of a use; None for a whole batch."""
        if self.parts == 1:
            return [None]
        units = self.units(batch)
        with jax.transfer_guard("allow"):  # two numbers
            shuffled = use > 0 or not self.keeps_first
            numbers = (load, use) if shuffled else ()
            return _order(self.key, numbers, units, self.parts, self.size)

    def take(self, batch: PyTree, rows: Int[Array, "n"] | None) -> PyTree:
        """These rows of a batch, with its sharding, gathered on its devices."""
        if rows is None:
            return batch
        leaves, structure = jax.tree.flatten(batch)
        places = (leaf.sharding for leaf in leaves)
        places = tuple(s if isinstance(s, jax.sharding.NamedSharding) else None for s in places)
        with jax.transfer_guard_device_to_device("allow"):  # the numbers of rows
            return structure.unflatten(_take(leaves, rows, self.axis, places))

    @jax.transfer_guard("allow")
    def digest(self) -> int:
        """A 32-bit digest of what the rows of a use depend on."""
        key = b"" if self.key is None else np.asarray(jax.random.key_data(self.key)).tobytes()
        return zlib.crc32(key, self.parts)


def cut_of(minibatches: int, key: Any, axis: int) -> Cut:
    """A `Cut` of these arguments of `repeat`."""
    parts = plans.check_whole("minibatches", minibatches, 1)
    axis = plans.check_whole("axis", axis, 0)
    if parts > 1 and key is None:
        raise ValueError(
            f"minibatches is {parts} and key is None: pass key=jax.random.key(seed), which "
            "permutes the rows in every use."
        )
    if key is not None:
        key = plans.check_key(key)
        with jax.transfer_guard("allow"):  # batches may be on other devices
            data = np.asarray(jax.random.key_data(key))
            key = jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(key))
    return Cut(parts, key, axis)


def check_parts(count: int, parts: int, what: str) -> None:
    """Raises ValueError unless minibatches have equally many of `count` rows or units."""
    if count % parts:
        raise ValueError(
            f"a batch has {count} {what}, which {parts} minibatches do not divide: pass a divisor "
            "of all batches, also an epoch's last."
        )


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _order(key, numbers, units, parts, size):
    if numbers:
        for number in numbers:
            key = jax.random.fold_in(key, number)
        order = jax.random.permutation(key, units * parts)
    else:
        order = jnp.arange(units * parts)
    rows = order[:, None] * size + jnp.arange(size)[None]
    return list(rows.reshape(parts, units * size))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _take(leaves, rows, axis, places):
    def take(leaf, place):
        explicit = jax.typeof(leaf).sharding
        out = explicit if mesh.axes_in(explicit.spec) else None
        leaf = leaf.at[(*[slice(None)] * axis, rows)].get(
            mode="promise_in_bounds", out_sharding=out
        )
        return jax.lax.with_sharding_constraint(leaf, place) if place and not out else leaf

    return [take(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
