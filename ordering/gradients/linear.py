"""Sketches: k numbers that replace a gradient where only inner products are needed.

One random linear map, of gradients that were formed, of their slices, and of the factors of
gradients in the backward pass. A leaf is a matrix G [K, N], whose rows are its first axes. With the
places g of an entry in m groups, its sums p and q, and Hadamard's matrix H [m, m],

  s_fpq = m^(-1/2) sum_ab u_fp(a) G_ab v_fq(b),  u_fp(a) = sign(a) [p(a) = p] H[f, g(a)],

and likewise v. For G = sum_t x_t y_t^T this is sum_t (u_fp . x_t) (v_fq . y_t). By H, entries meet
at the exclusive or of the places of their row and their column, as in TensorSketch. So entries of
one row or column have m q or m p sums, although p q m <= k.

Signs and places are random, with one exception for speed. Entries of a row or column are first
added up into residues, a mod r, in each of a few groups; r is prime where there are more entries
than places. These groups are hashed places, too, and different for turns of r entries that follow
each other. Each residue then goes to a random one of the sums.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32, Int, Key, PyTree, UInt32

from ordering import trees
from syncopate import mesh, plans

SIZE = 1024
MOST = 2**31 - 1  # numbers of a sketch
SELDOM = 2  # of k, how probably two entries of one row or of one column are added up
UNROLLED = 512  # terms of sums that are written one by one into a program
EXACT = 4  # leaves of up to EXACT k numbers are sketched together, and never by factors


def make_sketch(
    key: Key[Array, ""], *, size: int = SIZE, specs: PyTree[P] | None = None
) -> Callable[[PyTree], Float32[Array, "k"]]:
    """A random linear map from gradients to k numbers that keeps inner products.

    E[S g . S h] = g . h

    Entries get random signs and places, and are added up into k sums; a gradient of at most k
    entries is kept unchanged. No array of the gradient's size is written. At k = 1,024, squared
    norms of gradients of many ranks are off by 4 to 5 % (root mean square over keys), and inner
    products by 0.03 |g| |h|. Gradients of rank one, sorted or diagonal ones reach 10 % and 0.11,
    and every 32nd entry of a vector 15 % and 0.08 (`python -m benchmarks.sketch_errors`).

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
      Pham, Pagh, Fast and Scalable Polynomial Kernels via Explicit Feature Maps, 2013,
      https://doi.org/10.1145/2487575.2487591
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
        *maps, of_small = maps_of([leaf.shape for leaf in leaves], key, size)
        small, sums = [], []
        for leaf, of in zip(leaves, maps, strict=True):
            if is_small(leaf.shape, size):
                small.append(leaf.reshape(-1))
            else:
                sums.append(sketch_of(leaf, of, leaf.shape, size))
        if small:
            sums.append(sketch_of_small(jnp.concatenate(small), of_small, size))
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


class Sizes(NamedTuple):
    """Into how many sums the rows and the columns of a matrix go."""

    groups: int  # m
    sums: tuple[int, int]  # p, q
    read: int  # of the m groups, those into which rows and columns are added while they are read
    residues: tuple[int, int]  # places in each of these

    @property
    def places(self) -> int:
        """Of the m groups, how many places a sum of residues has in each group that is read."""
        return self.groups // self.read


@functools.lru_cache(1024)
def sizes_of(rows: int, cols: int, size: int) -> Sizes:
    """The fewest groups with which two entries of one row, or of one column, seldom meet.

    The squared norm of a gradient of rank one then has a variance of (4 + 2 SELDOM) / k: entries
    that differ in row and column meet with a probability of 1 / k, two pairs at once.
    """
    ways = [_sizes(rows, cols, size, 1 << i) for i in range(size.bit_length())]
    meet = [
        sum(_meet(n, r, way.read) for n, r in zip((rows, cols), way.residues, strict=True))
        for way in ways
    ]
    seldom = [i for i, probability in enumerate(meet) if probability <= SELDOM / size]
    return ways[seldom[0] if seldom else meet.index(min(meet))]


def _meet(length, residues, read):
    """How probably two of a number of rows are added up: never two of those in `read` turns."""
    turns, more = divmod(length, residues)

    def pairs(n):
        return (math.comb(n, 2) - n // read * math.comb(read, 2) - math.comb(n % read, 2)) / read

    both = more * pairs(turns + 1) + (residues - more) * pairs(turns)
    return 2 * both / max(1, length) ** 2


def _sizes(rows, cols, size, groups):
    each = size // groups
    most = [max(1, -(-n // groups)) for n in (rows, cols)]
    pairs = [(p, min(each // p, most[1])) for p in range(1, min(each, most[0]) + 1)]

    def meet(pair):
        of_each = zip(pair, (rows, cols), strict=True)
        return sum(max(0, 1 / (groups * sums) - 1 / max(1, n)) for sums, n in of_each)

    sums = min(pairs, key=lambda pair: (meet(pair), -pair[0] * pair[1]))
    # Adding up rows and columns then takes about as long as products of their residues.
    read = round(math.log2(max(1, size * groups / (2.5 * (rows + cols)))) / 2)
    read = min(groups, 1 << read)
    places = [n * groups // read for n in sums]
    residues = [
        -(-n // read) if n <= read * most else _prime_below(most)
        for n, most in zip((rows, cols), places, strict=True)
    ]
    if residues[0] == residues[1] < places[1] and cols <= read * places[1]:
        residues[1] += 1  # else two entries of the diagonal would share both residues
    return Sizes(groups, sums, read, (residues[0], residues[1]))


def _prime_below(n: int) -> int:
    """The largest prime up to n, or 1."""
    return next((i for i in range(n, 1, -1) if all(i % d for d in range(2, math.isqrt(i) + 1))), 1)


class Map(NamedTuple):
    """What is random about the sketch of a parameter, and the scale of its gradients."""

    seed: UInt32[Array, ""]
    places: tuple[Int[Array, "r"], Int[Array, "s"]] | None = None  # of residues, among p m or q m
    # An array like the parameter, or those of rows and of columns for each slice of a scan.
    scale: Any = None


class Side(NamedTuple):
    """u or v as two linear maps, of rows or columns to residues, and of these to sums."""

    signs: Float32[Array, "n"]
    turns: Int[Array, "n"]  # the place of each one's turn among the groups that are read
    shifts: Int[Array, "r"]  # and of its residue: its place is the exclusive or of both
    sums: Float32[Array, "r e p"]  # with signs, for places e
    begun: Any  # how many of the first turn are of the slice before

    def in_groups(self, read: int) -> Float32[Array, "g n"]:
        """The signs in each group that is read."""
        # A product, as a compiler would compute hashes again for every row that it reads.
        places = self.turns ^ self.shifts[np.arange(len(self.turns)) % len(self.shifts)]
        signs = jnp.where(_equal(jnp.arange(read), places), self.signs[None], 0.0)
        return jnp.matmul(_hadamard(read), signs, precision="highest")


def is_small(shape: Sequence[int], size: int) -> bool:
    """Whether a leaf's gradient is kept until the end, and sketched with all small ones as one."""
    return math.prod(shape) <= EXACT * size


def split_of(shape: Sequence[int]) -> int:
    """How many first axes of a leaf are its rows: so that it is as square as possible."""
    ways = [(math.prod(shape[:i]), math.prod(shape[i:]), i) for i in range(1, len(shape))]
    return min(ways, key=lambda way: (max(way[:2]) / max(1, min(way[:2])), way[2]))[2]


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """[K, N]. A vector has a last row with zeros at its end."""
    if sum(n > 1 for n in shape) < 2:
        cols = 1 << math.isqrt(math.prod(shape)).bit_length()
        return -(-math.prod(shape) // cols), cols
    split = split_of(shape)
    return math.prod(shape[:split]), math.prod(shape[split:])


def maps_of(shapes: Sequence[Sequence[int]], key: Key[Array, ""], size: int) -> list[Map]:
    """The maps of leaves of these shapes; the last is that of all small ones."""
    small = sum(math.prod(shape) for shape in shapes if is_small(shape, size))
    with mesh.at_once():  # a generator is a loop in the program
        seeds = list(jax.random.bits(jax.random.clone(key), (len(shapes) + 1,), jnp.uint32))

    def of(seed, shape):
        sizes = sizes_of(*matrix_of(shape), size)
        return Map(seed, (_places(seed, 0, sizes), _places(seed, 1, sizes)))

    each = [Map(s) if is_small(n, size) else of(s, n) for s, n in zip(seeds, shapes, strict=False)]
    return [*each, of(seeds[-1], (small,)) if small else Map(seeds[-1])]


def _places(seed, side, sizes):
    """A random one of p m / g places for each residue; no two have the same."""
    places = jnp.arange(sizes.sums[side] * sizes.places)
    order = jnp.argsort(hash_bits(seed + jnp.uint32(2 + side), places))
    return order[: sizes.residues[side]]


def side_of(
    of: Map, side: int, sizes: Sizes, length: int, first: ArrayLike = 0, scale: Any = None
) -> Side:
    """Of `length` rows (side 0) or columns (side 1) of a leaf, from the given first one on."""
    assert of.places is not None
    residues, whole = sizes.residues[side], isinstance(first, int) and first == 0
    first = jnp.asarray(first).astype(jnp.uint32)
    at = jnp.arange(length, dtype=jnp.uint32) + first
    seeds = [of.seed + jnp.uint32(n + side) for n in (4, 6, 8)]
    turns = _ranks(seeds[0], at // residues, sizes.read)
    signs = hash_signs(seeds[1], at)
    signs = signs if scale is None else signs * scale.reshape(-1)
    order = (jnp.arange(residues, dtype=jnp.uint32) + first) % residues
    shifts = hash_bits(seeds[2], order) % sizes.read
    sum_of, place = jnp.divmod(of.places[side][order], sizes.places)
    is_in = _equal(sum_of, jnp.arange(sizes.sums[side]))[:, None]
    transform = _hadamard(sizes.places)[place][..., None]
    sums, begun = jnp.where(is_in, transform, 0.0), 0 if whole else first % residues
    return Side(signs, turns, shifts.astype(jnp.int32), sums, begun)


def _ranks(seed, turn, read):
    """The places of turns; those that follow each other have different ones."""
    others = (turn // read * read)[None] + jnp.arange(read, dtype=jnp.uint32)[:, None]
    return jnp.sum(hash_bits(seed, others) < hash_bits(seed, turn)[None], axis=0)


def _equal(x, y):
    """[x, y]: where two vectors have equal numbers."""
    return x[:, None] == y[None]


def _hadamard(size: int) -> Float32[Array, "n n"]:
    """[n, n], n a power of two: -1 where i and j have an odd number of binary ones in common."""
    i = np.arange(size)
    return jnp.asarray(1 - 2 * (np.bitwise_count(i[:, None] & i) % 2).astype(np.float32))


def residue_sums(x: Float[Array, "T n"], side: Side, read: int) -> Float32[Array, "g T r"]:
    """x, with signs, added up modulo the number of residues, in each group that is read."""
    residues = len(side.sums)
    if mesh.automatic():  # a product adds up what devices have; slices would gather x
        ones = _equal(jnp.arange(x.shape[1]) % residues, jnp.arange(residues))
        table = side.in_groups(read)[..., None] * ones[None]
        return jnp.einsum("tn,gnr->gtr", trees.as_float32(x), table, precision="highest")

    def in_turns(x, begun):
        """[T, turns, r], of n numbers of which the first turn lacks those that had begun."""
        whole = isinstance(begun, int)
        size = -(-(x.shape[1] + (0 if whole else residues - 1)) // residues) * residues
        x = jnp.pad(x, ((0, 0), (0, size - x.shape[1])))
        x = x if whole else jnp.roll(x, begun, axis=1)
        return x.reshape(len(x), -1, residues)

    def at_once(x, signs):
        """For accelerators: reads x in each group."""
        signs = in_turns(signs, side.begun)
        return jnp.sum(in_turns(trees.as_float32(x), side.begun)[None] * signs[:, None], 2)

    def added(x, signs):
        """For CPUs: signs of turns and of residues apart, and the sums of a group in one loop."""
        del signs
        turns = in_turns(side.turns[None], side.begun)[0]
        # All entries of a turn have its place, and the zeros beside them are not above it.
        table = _hadamard(read)[:, jnp.max(turns, axis=1)]
        shifts = _hadamard(read)[:, side.shifts]
        shifts = shifts if isinstance(side.begun, int) else jnp.roll(shifts, side.begun, axis=1)
        x = in_turns(trees.as_float32(x) * side.signs[None], side.begun)
        if table.size > UNROLLED:
            return jnp.einsum("gu,tur->gtr", table, x, precision="highest") * shifts[:, None]
        each = [x[:, u] for u in range(x.shape[1])]
        groups = zip(table, shifts, strict=True)
        return jnp.stack([sum(map(operator.mul, each, of)) * shift[None] for of, shift in groups])

    sums = jax.lax.platform_dependent(x, side.in_groups(read), cpu=added, default=at_once)
    return sums if isinstance(side.begun, int) else jnp.roll(sums, -side.begun, axis=2)


def sums_of_factors(
    x: Float32[Array, "g T r"],
    y: Float32[Array, "g T s"],
    left: Side,
    right: Side,
    precision: Any = None,
) -> Float32[Array, "g e p q"]:
    """The sketch of sum_t x_t y_t^T, by the order of products that is shorter."""
    (_, rank, of_x), of_y = x.shape, y.shape[-1]
    of_left, of_right = (math.prod(side.sums.shape[1:]) for side in (left, right))
    formed = (rank + of_right) * of_x * of_y
    if formed <= rank * (of_x * of_left + of_y * of_right):
        return sums_of_residues(
            jnp.einsum("gtr,gts->grs", x, y, precision=precision), left, right, precision
        )
    x = jnp.einsum("gtr,rep->gtep", x, left.sums, precision=precision)
    y = jnp.einsum("gts,seq->gteq", y, right.sums, precision=precision)
    return jnp.einsum("gtep,gteq->gepq", x, y, precision=precision)


def sums_of_residues(x: Float32[Array, "g r s"], left: Side, right: Side, precision: Any = None):
    x = jnp.einsum("grs,seq->greq", x, right.sums, precision=precision)
    return jnp.einsum("greq,rep->gepq", x, left.sums, precision=precision)


def row_of_sums(sums: Float32[Array, "g e p q"], size: int) -> Float32[Array, "k"]:
    return jnp.pad(
        sums.reshape(-1) / math.sqrt(sums.shape[0] * sums.shape[1]), (0, size - sums.size)
    )


def sketch_of(
    gradient: Array,
    of: Map,
    shape: Sequence[int],
    size: int,
    stack: int = 0,
    place: ArrayLike = 0,
) -> Float32[Array, "k"]:
    """The sketch of a leaf's gradient, or of its slice number `place` along the first axes."""
    gradient = _scaled(trees.as_float32(gradient), of.scale, place)
    if sum(n > 1 for n in shape) < 2:
        return _sketch_of_vector(gradient.reshape(-1), of, size)
    sizes, starts = sizes_of(*matrix_of(shape), size), _starts(shape, stack, place)
    lengths = [n for n, _ in starts]
    matrix, firsts = gradient.reshape(lengths), [first for _, first in starts]
    if stack:  # its first turns began in the slice before
        each = [*zip(firsts, sizes.residues, strict=True)]
        lengths = [-(-(n + r - 1) // r) * r for n, r in zip(lengths, sizes.residues, strict=True)]
        begun = [first % r for first, r in each]
        zeros = mesh.varying(jnp.zeros(lengths, jnp.float32), matrix)
        matrix = jax.lax.dynamic_update_slice(zeros, matrix, begun)
        firsts = [first - n for first, n in zip(firsts, begun, strict=True)]
    left, right = (side_of(of, i, sizes, lengths[i], firsts[i]) for i in range(2))
    return _sketch_of_matrix(matrix, left, right, sizes.read, size)


def _scaled(gradient, scale, place):
    if scale is None:
        return gradient
    if isinstance(scale, tuple):
        rows, cols = (s[place] for s in scale)
        scale = rows.reshape(-1, 1) * cols.reshape(1, -1)
    else:
        scale = scale[place]
    return gradient * scale.reshape(gradient.shape)


def _starts(shape, stack, place):
    """(length, the first one) of the rows and of the columns of a slice."""
    split = split_of(shape)
    rows, cols = math.prod(shape[stack:split]), math.prod(shape[max(stack, split) :])
    if not stack:
        return (rows, 0), (cols, 0)
    place = jnp.asarray(place, jnp.int32)
    if stack <= split:
        return (rows, place * rows), (cols, 0)
    of_row, of_col = jnp.divmod(place, math.prod(shape[split:stack]))
    return (rows, of_row * rows), (cols, of_col * cols)


def _sketch_of_matrix(matrix, left, right, read, size):
    sums = sums_of_residues(_residues_of(matrix, left, right, read), left, right, "highest")
    return row_of_sums(sums, size)


def sides_of(
    of: Map, shape: Sequence[int], size: int, stack: int = 0, place: ArrayLike = 0
) -> tuple[Side, Side]:
    """For a leaf, or for its slice number `place` along the first axes."""
    sizes, starts = sizes_of(*matrix_of(shape), size), _starts(shape, stack, place)
    scales = (None, None) if of.scale is None else [s[place] for s in of.scale]
    left, right = (
        side_of(of, i, sizes, length, first, scale)
        for i, ((length, first), scale) in enumerate(zip(starts, scales, strict=True))
    )
    return left, right


def sketch_of_small(flat: Float32[Array, "n"], of: Map, size: int) -> Float32[Array, "k"]:
    """The sketch of all small leaves, one after another."""
    return _sketch_of_vector(flat, of, size)


def _sketch_of_vector(flat, of, size):
    rows, cols = matrix_of(flat.shape)
    sizes = sizes_of(rows, cols, size)
    right, whole = side_of(of, 1, sizes, cols), flat.size // cols * cols
    rows = [flat[:whole].reshape(-1, cols)]
    if whole < flat.size:
        rows.append(jnp.pad(flat[whole:], (0, cols - flat.size + whole))[None])
    sums = [
        _sketch_of_matrix(x, side_of(of, 0, sizes, len(x), first), right, sizes.read, size)
        for x, first in zip(rows, (0, whole // cols), strict=False)
        if x.size
    ]
    return sum(sums[1:], sums[0])


def _residues_of(matrix, left, right, read):
    """[g, r, s]: sums of a signed matrix by the residues of its rows and columns."""
    sides = left, right
    residues = [len(side.sums) for side in sides]
    turns, rest = zip(*map(divmod, matrix.shape, residues), strict=True)

    def block(matrix, starts, shape):
        """A signed block, and its group: the exclusive or of the places of its turns."""
        x = jax.lax.dynamic_slice(matrix, starts, shape)
        signs = [
            jax.lax.dynamic_slice_in_dim(side.signs, start, n)
            for side, start, n in zip(sides, starts, shape, strict=True)
        ]
        group = functools.reduce(
            operator.xor, (side.turns[start] for side, start in zip(sides, starts, strict=True))
        )
        x = x * signs[0][:, None] * signs[1][None]
        return jnp.pad(x, [(0, size - n) for size, n in zip(residues, shape, strict=True)]), group

    def one_by_one(matrix):
        """For CPUs: adds block after block to sums that stay in a cache."""
        total = mesh.varying(jnp.zeros((read, *residues), jnp.float32), matrix)
        pieces = [
            [(0, turns[i], residues[i]), (turns[i] * residues[i], 1, rest[i])] for i in range(2)
        ]
        for (row, row_turns, height), (col, col_turns, width) in itertools.product(*pieces):

            def add(i, total, at=(row, col), turns=col_turns, shape=(height, width)):
                i, j = jnp.divmod(i, turns)
                starts = at[0] + i * shape[0], at[1] + j * shape[1]
                x, group = block(matrix, starts, shape)
                return total.at[group].add(x)

            if row_turns * height * col_turns * width:
                total = jax.lax.fori_loop(0, row_turns * col_turns, add, total)
        total = jnp.einsum("fg,grs->frs", _hadamard(read), total, precision="highest")
        rows, cols = (_hadamard(read)[:, side.shifts] for side in sides)
        return total * rows[:, :, None] * cols[:, None]

    def at_once(matrix):
        """For accelerators: reads the matrix in each group."""
        rows, cols = (side.in_groups(read) for side in sides)
        x = jnp.pad(
            matrix, [(0, -n % size) for n, size in zip(matrix.shape, residues, strict=True)]
        )
        rows, cols = (
            jnp.pad(s, ((0, 0), (0, -s.shape[1] % size))).reshape(read, -1, size)
            for s, size in zip((rows, cols), residues, strict=True)
        )
        x = x.reshape(rows.shape[1], residues[0], cols.shape[1], residues[1])[None]
        return jnp.sum(x * rows[:, :, :, None, None] * cols[:, None, None], (1, 3))

    if mesh.automatic():  # a loop over blocks would gather the matrix
        return at_once(matrix)
    return jax.lax.platform_dependent(matrix, cpu=one_by_one, default=at_once)


def table_of_small(of: Map, total: int, start: int, stop: int, size: int) -> Float32[Array, "n k"]:
    """[n, k]: the sketches of the unit vectors from `start` to `stop` of all small leaves."""
    rows, cols = matrix_of((total,))
    sizes = sizes_of(rows, cols, size)
    at = np.arange(start, stop)
    left, right = (
        side.in_groups(sizes.read).T[i][:, :, None, None] * side.sums[i % len(side.sums)][:, None]
        for side, i in (
            (side_of(of, 0, sizes, rows), at // cols),
            (side_of(of, 1, sizes, cols), at % cols),
        )
    )
    products = left[..., :, None] * right[..., None, :]
    return jax.vmap(lambda x: row_of_sums(x, size))(products)


def hash_bits(seed: UInt32[Array, "..."], places: ArrayLike) -> UInt32[Array, "..."]:
    """Random bits for these places, by a hash that any backend computes while reading."""
    x = jnp.asarray(places).astype(jnp.uint32) * jnp.uint32(0x9E3779B1) ^ seed
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 15)


def hash_signs(seed: UInt32[Array, "..."], places: ArrayLike) -> Float32[Array, "..."]:
    """float32 signs for these places."""
    return 1.0 - 2.0 * (hash_bits(seed, places) >> 31).astype(jnp.float32)


class SketchLeaf(NamedTuple):
    """How the gradient of a parameter is sketched: the ways differ in cost alone.

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
    table: bool = False  # whether rows are looked up, so that a unit may use few of them
