"""Sketches: k numbers that replace a gradient where only inner products are needed.

These are linear maps with random signs for every parameter, of gradients that were formed and of
the factors of gradients in the backward pass.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32, Key, PyTree, UInt32

from ordering import trees
from ordering.trees import LANES
from syncopate import mesh, plans

SIZE = 1024
MOST = 2**31 - 1  # numbers of a sketch
BLOCK = 8192  # entries of a leaf that are summed at once, so that they stay in a cache
TILE = 8  # rows of numbers that a TPU keeps together
SMALL = 4096  # leaves up to this size are folded together


def make_sketch(
    key: Key[Array, ""], *, size: int = SIZE, specs: PyTree[P] | None = None
) -> Callable[[PyTree], Float32[Array, "k"]]:
    """A random linear map from gradients to k numbers that keeps inner products.

    E[S g . S h] = g . h, with a variance of about 2 |g|^2 |h|^2 / k.

    Entries get random signs and are summed into k sums; a gradient of at most k entries is kept
    unchanged. The gradient is read once, and no array of its size is written.

    Args:
      key: a random key, the same on all workers, so that all have the same map.
      size: k >= 1. By Johnson and Lindenstrauss, k = 4 ln N / (e^2 / 2 - e^3 / 3) keeps the norms
        of N given vectors, such as the prefix sums of an epoch, within a factor of (1 +- e)^(1/2)
        with high probability: 1024 for N = 10^4 and e = 0.3. docs/results/orders.md has
        measurements.
      specs: for a worker that spans several devices (docs/use/meshes.md), how one gradient is split
        over them: a `jax.P` per leaf or one for all, without the workers' axis. Each device
        sketches its part with different signs, so another split gives another map.

    Returns:
      `tree -> float32[k]`, for trees of floating leaves.

    Raises:
      ValueError: if size is below 1, or specs are not PartitionSpecs.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> to_sketch = ordering.make_sketch(jax.random.key(0), size=256)
      >>> g = {"w": jnp.ones((100, 30)), "b": jnp.ones(30)}
      >>> s = to_sketch(g)
      >>> s.shape, bool(jnp.allclose(to_sketch(jax.tree.map(lambda x: 3 * x, g)), 3 * s))
      ((256,), True)

    References:
      Charikar, Chen, Farach-Colton, Finding Frequent Items in Data Streams, 2004,
      https://doi.org/10.1016/S0304-3975(03)00400-6
      Dasgupta, Gupta, An Elementary Proof of a Theorem of Johnson and Lindenstrauss, 2003,
      https://doi.org/10.1002/rsa.10073
    """
    size, key = plans.check_whole("size", size, 1, MOST), plans.check_key(key)
    axes = () if specs is None else mesh.axes_of(specs)

    def apply(tree):
        if not axes:
            return mapped(tree, jax.random.clone(key))
        of = mesh.like(specs, tree)
        return mesh.over_shards(axes, added, (of,), P())(tree)

    def added(tree):
        """The sum of the sketches of all parts; gradients of few entries are concatenated."""
        tree = parts(tree, specs, axes)
        count, mine = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
        sketch = mapped(tree, jax.random.fold_in(jax.random.clone(key), mine), count)
        entries = trees.tree_size(tree)
        sketch = jnp.roll(sketch, mine * entries) if entries * count <= size else sketch
        return jax.lax.psum(sketch, axes)

    def mapped(tree, key, count=1):
        leaves = [trees.as_float32(leaf) for leaf in jax.tree.leaves(tree)]
        if not leaves:
            raise ValueError(f"there is nothing to sketch in {tree!r}: pass a tree of gradients.")
        if count * sum(leaf.size for leaf in leaves) <= size:
            flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
            return jnp.pad(flat, (0, size - flat.size))
        large = [leaf for leaf in leaves if leaf.size > SMALL]
        small = [leaf.reshape(-1) for leaf in leaves if leaf.size <= SMALL]
        arrays = large + ([jnp.concatenate(small)] if small else [])
        seeds = jax.random.bits(key, (len(arrays),), jnp.uint32)
        sums = [fold(array, seed, size) for array, seed in zip(arrays, seeds, strict=True)]
        return functools.reduce(operator.add, sums)

    return apply


def parts(tree: PyTree, specs: PyTree, axes: tuple[str, ...]) -> PyTree:
    """This device's parts of a worker's arrays, so that no entry is on two devices.

    A shard is unchanged; a leaf that is replicated over some of the worker's `axes` becomes a flat
    part of ceil(size / devices) entries.
    """

    def part(leaf, spec):
        whole = [axis for axis in axes if axis not in mesh.axes_in(spec)]
        if not whole:
            return leaf
        count = jax.lax.axis_size(tuple(whole))
        each = -(-leaf.size // count)
        flat = jnp.pad(leaf.reshape(-1), (0, each * count - leaf.size))
        return jax.lax.dynamic_slice_in_dim(flat, jax.lax.axis_index(tuple(whole)) * each, each)

    return jax.tree.map(part, tree, mesh.like(specs, tree))


def fold(leaf: Array, seed: UInt32[Array, ""], size: int) -> Float32[Array, "k"]:
    """float32[k] of one array: entry (b, n), the n-th of block b, has the sign t_b r_(n + b).

    First blocks of whole slices are summed, then every k-th entry of the resulting block, with
    other signs. The products of the signs of two entries in a sum are uncorrelated between pairs.
    """
    block = max(BLOCK, size)  # else some of the k places would have no entries
    slices = leaf.reshape(-1, *_slice_shape(leaf.shape, block))
    in_block = _slices_in_block(len(slices), math.prod(slices.shape[1:]), block)
    if len(slices) >= 2 * in_block:
        slices = _add_blocks(slices, seed, in_block)
    flat = slices.reshape(-1)
    flat = flat * hash_signs(seed ^ jnp.uint32(0x5BD1E995), jnp.arange(flat.size))
    sums = jnp.sum(jnp.pad(flat, (0, -flat.size % size)).reshape(-1, size), axis=0)
    # Small arrays start at random places, or all would share the first sums.
    return jnp.roll(sums, seed % size) if flat.size < size else sums


def _slice_shape(shape, block) -> tuple[int, ...]:
    """As many of the last axes as fit a block, at least one; for a vector, a vector unit's size.

    Without merging axes the layout stays: a TPU keeps the last two in tiles of 8 x 128.
    """
    if len(shape) < 2 or math.prod(shape) == shape[-1]:
        return (LANES if math.prod(shape) % LANES == 0 else 1,)
    fitting = (i for i in range(1, len(shape)) if math.prod(shape[i:]) <= block)
    return tuple(shape[next(fitting, -1) :])


def _slices_in_block(length: int, width: int, block: int) -> int:
    """How many tiles make a block; up to twice as many if they then divide evenly."""
    least = TILE * math.ceil(block / width / TILE)
    whole = (n for n in range(least, 2 * least, TILE) if length % n == 0)
    return min(length, next(whole, least))


def _add_blocks(slices, seed, in_block):
    """The sum of the signed blocks, float32[in_block, ...]; the last may be shorter."""
    shape = (in_block, *slices.shape[1:])
    blocks, rest = divmod(len(slices), in_block)

    def one_by_one(slices):
        """For CPUs: adds block after block to a sum in the cache, and slides along the signs."""
        flat, size = slices.reshape(-1), math.prod(shape)
        signs = hash_signs(seed, jnp.arange(size + blocks))
        of_blocks = hash_signs(~seed, jnp.arange(blocks))

        def add(b, total):
            block = jax.lax.dynamic_slice_in_dim(flat, b * size, size)
            return total + of_blocks[b] * jax.lax.dynamic_slice_in_dim(signs, b, size) * block

        start = mesh.varying(jnp.zeros(size), flat)
        return jax.lax.fori_loop(0, blocks, add, start).reshape(shape)

    def at_once(slices):
        """For accelerators: computes the signs while reading."""
        b = jnp.arange(blocks, dtype=jnp.uint32)
        cut = slices[: blocks * in_block].reshape(blocks, *shape)
        of_blocks = hash_signs(~seed, b).reshape(-1, *[1] * len(shape))
        return jnp.sum(cut * _signs_at(seed, shape, b) * of_blocks, axis=0)

    total = jax.lax.platform_dependent(slices, cpu=one_by_one, default=at_once)
    if not rest:
        return total
    last = slices[blocks * in_block :]
    signed = last * _signs_at(seed, last.shape, jnp.uint32([blocks]))[0] * hash_signs(~seed, blocks)
    return total.at[:rest].add(signed)


def _signs_at(seed, shape, blocks):
    """[B, *shape]: the signs r of B blocks, uint32[B]."""
    n = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return hash_signs(seed, jax.vmap(lambda block: n + block)(blocks))


def grouped_sums(
    x: Float[Array, "T K"],
    signs: Float32[Array, "..."],
    sums: int,
    groups: int,
    precision: Any = None,
) -> Float32[Array, "T p m"]:
    """float32[T, p, m] of x [T, K]: in each of m groups, p sums of its entries with random signs.

    The products of a group's sums of x_t and of y_t, summed over t, sketch x^T y. This is
    TensorSketch with Hadamard's transform in place of Fourier's: entries are summed with signs into
    p m sums, and x_ta y_tb goes to place (a xor b) of the transform over m. Entry n is in sum
    n mod p and has place n / p mod m. So the first entries, the most frequent ones in a table of
    tokens, do not share sums.
    """
    added = functools.partial(_added_up, sums=sums, groups=groups, precision=precision)

    def multiplied(x, signs):
        """Without this, an accelerator would write the signed x in float32 and another layout."""
        table = table_of_sums(signs, sums, groups).astype(x.dtype)
        products = jnp.matmul(x, table, precision=precision, preferred_element_type=jnp.float32)
        return products.reshape(len(x), sums, groups)

    return jax.lax.platform_dependent(x, signs, cpu=added, default=multiplied)


def _added_up(x, signs, *, sums, groups, precision):
    """For CPUs: with one group it takes no products, which is faster."""
    x = trees.as_float32(x) * signs.reshape(1, -1)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (sums * groups))))
    x = jnp.sum(x.reshape(len(x), -1, groups, sums), 1)
    if groups <= 64:
        whole = hadamard(groups)
        return jnp.einsum("tap,ab->tpb", x, whole, precision=precision) if groups > 1 else x.mT
    inner = 1 << (groups.bit_length() - 1) // 2  # two small products are cheaper than a large one
    parted = x.reshape(len(x), -1, inner, sums)
    both = hadamard(groups // inner), hadamard(inner)
    products = jnp.einsum("tabp,ac,bd->tpcd", parted, *both, precision=precision)
    return products.reshape(len(x), sums, groups)


def table_of_sums(signs: Float32[Array, "..."], sums: int, groups: int) -> Float32[Array, "K pm"]:
    """[K, p m]: `grouped_sums` of the unit vectors."""
    i = jnp.arange(signs.size)
    places = i % sums * groups + i // sums % groups
    return signs.reshape(-1, 1) * jnp.kron(jnp.eye(sums), hadamard(groups))[places]


def sums_of_matrix(
    matrix: Float32[Array, "K N"], groups: int, p: int, q: int
) -> Float32[Array, "p q m"]:
    """For a given signed matrix x^T y, the sums that `grouped_sums` of x and y would give."""
    sums = _wrapped(_wrapped(matrix, p * groups).T, q * groups).T
    sums = sums.reshape(groups, p, groups, q)
    at = jnp.arange(groups)
    products = sums.transpose(0, 2, 1, 3)[at[:, None], at[:, None] ^ at[None]]
    products = jnp.sum(products, axis=0)
    sums = jnp.einsum("cpq,cm->pqm", products, hadamard(groups), precision="highest")
    return sums / math.sqrt(groups)


def _wrapped(x, size):
    """[size, ...]: the sums of every size-th slice; no slice is padded before it is read."""
    whole = len(x) // size * size
    wrapped = jnp.sum(x[:whole].reshape(-1, size, *x.shape[1:]), axis=0)
    return wrapped.at[: len(x) - whole].add(x[whole:])


def hadamard(size: int) -> Float32[np.ndarray, "n n"]:
    """[n, n], n a power of two: -1 where i and j have an odd number of binary ones in common."""
    i = np.arange(size)
    return 1 - 2 * (np.bitwise_count(i[:, None] & i) % 2).astype(np.float32)


def hash_signs(seed: UInt32[Array, "..."], places: ArrayLike) -> Float32[Array, "..."]:
    """float32 signs for these places, by a hash that any backend computes while reading."""
    x = jnp.asarray(places).astype(jnp.uint32) * jnp.uint32(0x9E3779B1) ^ seed
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return 1.0 - 2.0 * (x >> 31).astype(jnp.float32)


class SketchLeaf(NamedTuple):
    """How the gradient of a parameter is sketched.

    It is "sketched" (never formed), "formed" (for each unit, only during the backward pass),
    "copied" (the parameter is copied for each unit), or "shared". A shared gradient is formed once,
    as the parameter is used only in numbers that all units share, such as penalties, or not at all.
    Copies and formed gradients take memory per unit.
    """

    name: str  # its path
    shape: tuple[int, ...]
    how: str
    why: str  # the kinds of uses, or the names of primitives
    stack: int = 0  # leading dimensions that scans loop over; rows and cols are the rest
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()
    sizes: tuple[int, int, int] = (0, 0, 0)  # m groups of products of p sums of rows and q of cols
    table: bool = False  # whether rows are looked up, so that a unit may use few of them

    @property
    def small(self) -> bool:
        """Whether gradients of units are kept until the end, and folded with other small ones."""
        return self.how != "sketched" and not self.stack and math.prod(self.shape) <= SMALL


class Map(NamedTuple):
    """The random signs of one parameter: one for each row, and one for each column.

    With a scale they are multiplied by it. `scale` is for parameters without rows and columns, or
    for all slices of a stacked parameter, leaves [slices, ...].
    """

    seed: UInt32[Array, ""]
    left: Any = None
    right: Any = None
    scale: Any = None


def maps_of(plan: list[SketchLeaf], key: Key[Array, ""]) -> list[Map]:
    with mesh.at_once():  # a generator is a loop in the program
        seeds = list(jax.random.bits(jax.random.clone(key), (len(plan),), jnp.uint32))
    return [_map_of(leaf, seed) for leaf, seed in zip(plan, seeds, strict=True)]


def _map_of(leaf: SketchLeaf, seed) -> Map:
    if leaf.how != "sketched":
        return Map(seed)
    left, right = (
        hash_signs(seed + jnp.uint32(n), jnp.arange(math.prod(shape))).reshape(shape)
        for n, side in ((1, leaf.rows), (2, leaf.cols))
        for shape in [[leaf.shape[i] for i in side]]
    )
    return Map(seed, left, right)


def of_slice(of: Map, place: ArrayLike) -> Map:
    """The map for one slice of a scanned parameter: every slice has its own signs."""
    place = jnp.asarray(place, jnp.uint32)
    seed = of.seed ^ (jnp.uint32(0x85EBCA6B) * (place + 1))
    scale = jax.tree.map(lambda s: s[place], of.scale)
    if of.left is None:
        return Map(seed, scale=scale)
    signs = hash_signs(seed, jnp.arange(of.left.size)).reshape(of.left.shape)
    rows, cols = (1.0, 1.0) if scale is None else scale
    return Map(seed, of.left * signs * rows, of.right * cols)


def times(gradient, scale):
    return gradient if scale is None else gradient * scale.reshape(gradient.shape)
