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
        counts = set()
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            name = f"batch{jax.tree_util.keystr(path)}"
            if leaf.ndim <= self.axis:
                raise ValueError(
                    f"{name} has the shape {leaf.shape}, and minibatches={self.parts} cuts axis "
                    f"{self.axis}: give it as many rows as the others, as by jnp.full(rows, x)."
                )
            counts.add(leaf.shape[self.axis])
            if len(counts) > 1:
                raise ValueError(
                    f"{name} has {leaf.shape[self.axis]} rows along axis {self.axis}, and other "
                    f"leaves have {min(counts - {leaf.shape[self.axis]})}: give all equally many."
                )
        (rows,) = counts
        check_parts(rows, self.parts * self.size, "rows")
        for leaf in jax.tree.leaves(batch):
            self._check_sharding(leaf, rows // self.parts)
        return rows // self.size // self.parts

    def _check_sharding(self, leaf, rows):
        place = leaf.sharding
        if isinstance(place, jax.sharding.NamedSharding):
            try:
                place.shard_shape((*leaf.shape[: self.axis], rows, *leaf.shape[self.axis + 1 :]))
            except ValueError:
                raise ValueError(
                    f"minibatches={self.parts} makes minibatches of {rows} rows, which "
                    f"sharding={place.spec} cannot split over {dict(place.mesh.shape)}: pass fewer "
                    "minibatches, or batches whose minibatches hold a multiple of the devices."
                ) from None

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
        places = (s if isinstance(s, jax.sharding.NamedSharding) else None for s in places)
        with jax.transfer_guard_device_to_device("allow"):  # the numbers of rows
            return structure.unflatten(_taking(self.axis, tuple(places))(leaves, rows))

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
            f"a batch has {count} {what}, which {parts} minibatches do not divide: pass a divisor, "
            "or make all batches, also the last of an epoch, a multiple of it."
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


@functools.lru_cache(64)
def _taking(axis, places):
    def take(leaves, rows):
        return [_rows(leaf, rows, axis) for leaf in leaves]

    return jax.jit(take, out_shardings=list(places))


def _rows(leaf, rows, axis):
    place = jax.typeof(leaf).sharding  # of explicit axes alone
    out = place if mesh.axes_in(place.spec) else None
    index = (*[slice(None)] * axis, rows)
    return leaf.at[index].get(mode="promise_in_bounds", out_sharding=out)
