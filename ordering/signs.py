"""Signs of vectors, one after the other: the computation behind every balanced order.

    for i in 1..n:  s_i = sign(<r, z_i>);  r += s_i z_i

A sign says to which end of the next order a vector goes. The rule that chooses it depends on the
products <r, z> and |z|^2 of the running sum r and the vector z, and on a random number.

On a CPU this is a plain scan. On accelerators, and if every product is a sum over devices, the
vectors are processed in blocks Z, float32[n, D]. The signs need only b = Z r and G = Z Z^T (sign
b_i, then b += s_i G_i), and at the end r += s^T Z. Two passes over Z replace n dependent passes,
with the same signs. In a loop of XLA, every operation of a sign would start a kernel, so on TPUs
and GPUs the whole loop is one Pallas kernel. A vector whose product with r is not finite gets a
plus and is not added, so that the running sum stays finite.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float32, Key, PyTree

from ordering import trees
from syncopate import mesh, unstable
from syncopate.unstable import pallas as pl

BLOCK = 64  # vectors, enough to fill a matrix unit and to need few sums over devices
UNROLL = 8  # signs per iteration of the scan, where each iteration starts kernels
OPERATIONS = 10  # of a greedy sign for each of n numbers, as XLA counts them in the scan
State = Any
Signs = tuple[State, Float32[Array, "n"]]
Signed = tuple[State, PyTree, Float32[Array, "n"], Bool[Array, "n"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignRule:
    """A rule that chooses the sign of each vector: a frozen record of pure functions of a state.

    A rule of one's own is a subclass with `sign`, and whatever else it needs of the methods.
    """

    def init(self, key: Key[Array, ""]) -> State:
        """The first state. Workers that share a running sum pass the same key."""
        del key
        return ()

    def sign(self, state: State, dot: Array, norm2: Array, coin: Array) -> tuple[State, Array]:
        """(state, +1 or -1) for dot = <r, c> and norm2 = |c|^2, all float32 scalars.

        It must be elementwise and use no keys: a kernel calls it with arrays of one element.
        """
        raise NotImplementedError

    def next_epoch(self, state: State) -> State:
        """The state at the beginning of the next epoch."""
        return state

    def coins(self, state: State, n: int) -> Float32[Array, "n"]:
        """Random numbers for the next n calls of `sign`; or zeros."""
        del state
        return jnp.zeros(n, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy(SignRule):
    """The sign that makes the running sum smaller: + iff <r, c> <= 0."""

    def sign(self, state, dot, norm2, coin):
        return state, plus_iff(dot <= 0)


def rule_of(rule: SignRule | None) -> SignRule:
    """The sign rule of an order, `Greedy()` for None; raises ValueError if it is not a rule."""
    if rule is not None and not isinstance(rule, SignRule):
        raise ValueError(
            f"rule is {rule!r:.200}: pass a SignRule, as "
            "ordering.baselines.self_balancing_walk(), or None."
        )
    return Greedy() if rule is None else rule


def check_rule_state(rule: SignRule, state: State) -> None:
    """Raises ValueError unless the state has the structure of those of the rule."""
    wanted = jax.tree.structure(jax.eval_shape(lambda: rule.init(jax.random.key(0))))
    if (given := jax.tree.structure(state)) != wanted:
        raise ValueError(
            f"state.rule is {given}, and that of {type(rule).__name__} {wanted}: pass a state that "
            "was made with this sign rule."
        )


def plus_iff(condition):
    """+1 where the condition holds, else -1, as float32."""
    return jnp.where(condition, 1.0, -1.0).astype(jnp.float32)


def block_size_of(axes: tuple[str, ...] = ()) -> int:
    """Vectors per block: 1 on a CPU, but `BLOCK` if products are summed over devices.

    Axes of `jax.vmap` do not count, since a sum over them sends nothing.
    """
    over_devices = set(axes) & set(jax.sharding.get_abstract_mesh().manual_axes)
    return BLOCK if over_devices or mesh.platform() != "cpu" else 1


def balance(
    rule: SignRule,
    rule_state: State,
    total: PyTree,
    vectors: PyTree,
    *,
    valid: Bool[Array, "n"],
    axes: tuple[str, ...] = (),
) -> Signed:
    """`balance_blocks` of one block of vectors, leaves [n, ...]."""
    dots, gram = trees.dot(vectors, total), trees.gram(vectors)
    products = _added(jnp.concatenate([dots[:, None], gram], axis=1), axes)
    rule_state, signs = signs_of(rule, rule_state, products[:, 0], products[:, 1:], valid)
    taken = signs != 0
    signs = jnp.where(taken, signs, 1.0)
    return rule_state, add_weighted(total, vectors, signs, taken), signs, taken


def balance_blocks(
    rule: SignRule,
    rule_state: State,
    total: PyTree,
    tree: PyTree,
    *,
    derive: Callable[[PyTree], PyTree] = lambda element: element,
    valid: Bool[Array, "n"] | None = None,
    axes: tuple[str, ...] = (),
    block_size: int | None = None,
) -> Signed:
    """Signs vectors one after the other, with the same signs for every block size.

    Args:
      total: the running sum r.
      tree: leaves [n, ...].
      derive: `element -> z_i`, by default the element itself. It runs inside the loop, so that pair
        differences and centred gradients are not written to memory.
      valid: which vectors count. The others get a plus, are not added, and the rule ignores them.
      axes: names of the axes over which the vectors are sharded; products are summed over them.
      block_size: vectors per block; 1 is the plain scan. By default `block_size_of(axes)`.

    Returns:
      (rule_state, r + sum of s_i z_i, signs in {-1, +1}, taken: those that are valid and finite).
    """
    size = jax.tree.leaves(tree)[0].shape[0]
    valid = jnp.ones(size, bool) if valid is None else valid
    block_size = min(block_size or block_size_of(axes), size)
    whole = size // block_size * block_size

    def of_block(carry, block):
        (rule_state, total), (elements, block_valid) = carry, block
        vectors = jax.vmap(derive)(elements)
        *new, signs, taken = balance(rule, rule_state, total, vectors, valid=block_valid, axes=axes)
        return mesh.varying_like(tuple(new), carry), (signs, taken)

    def of_one(carry, vector):
        (rule_state, total), (element, is_valid) = carry, vector
        new, out = _balance_one(rule, rule_state, total, derive(element), is_valid, axes)
        return mesh.varying_like(new, carry), out

    def cut(leaf):
        return leaf[:whole].reshape((whole // block_size, block_size, *leaf.shape[1:]))

    out: tuple[Array, Array]  # the vectors' signs, and which were taken
    carry: tuple[State, PyTree] = mesh.varying(rule_state, valid), mesh.varying(total, tree, valid)
    if size == 1:  # without a loop the compiler can fuse the vector with what computes it
        carry, out = of_one(carry, jax.tree.map(lambda leaf: leaf[0], (tree, valid)))
        return *carry, out[0][None], out[1][None]
    if block_size == 1:
        # In a shard_map with check_vma=False the sum loses its type, and a carry must keep it.
        carry = carry[0], jax.tree.map(lambda x: jnp.where(True, x, x), carry[1])
        carry, out = jax.lax.scan(of_one, carry, (tree, valid))
        return *carry, *out
    if whole == block_size:
        carry, out = of_block(carry, jax.tree.map(lambda leaf: leaf[:whole], (tree, valid)))
    else:
        carry, out = jax.lax.scan(of_block, carry, jax.tree.map(cut, (tree, valid)))
        out = jax.tree.map(lambda leaf: leaf.reshape(whole), out)
    if whole < size:
        carry, rest = of_block(carry, jax.tree.map(lambda leaf: leaf[whole:], (tree, valid)))
        out = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), out, rest)
    return *carry, *out


def _balance_one(rule: SignRule, rule_state, total, vector, valid, axes):
    """Signs one vector: ((rule_state, running sum), (sign, taken))."""
    # The compiler removes the norm if the rule does not use it.
    dot, norm2 = (_added(_product(vector, other), axes) for other in (total, vector))
    coin = rule.coins(rule_state, 1)[0]
    rule_state, sign, taken = one_sign(rule, rule_state, dot, norm2, coin, valid)
    total = jax.tree.map(lambda r, z: r + jnp.where(taken, sign * z, 0.0), total, vector)
    return (rule_state, total), (sign, taken)


def _product(vector, other):
    """This device's part of an inner product."""
    if mesh.platform() == "cpu" and not trees.is_split((vector, other)):
        # On a CPU a matrix product is vectorised and a sum is not. The barrier keeps the compiler
        # from merging the sum over simulated workers into the product.
        products = jax.tree.map(functools.partial(jnp.vdot, precision="highest"), vector, other)
        return jax.lax.optimization_barrier(jax.tree.reduce(operator.add, products))
    # A matrix product would need the vector in memory.
    products = jax.tree.map(lambda z, x: jnp.sum(z * x), vector, other)
    return jax.tree.reduce(operator.add, products)


def _added(products, axes):
    return jax.lax.psum(products, axes) if axes else products


def add_weighted(
    total: PyTree, vectors: PyTree, weights: Float32[Array, "n"], taken: Bool[Array, "n"]
) -> PyTree:
    """total + sum of w_i z_i over the vectors taken, also where others are not finite."""
    weights = jnp.where(taken, weights, 0.0)

    def keep_taken(z):
        return jnp.where(taken.reshape((-1,) + (1,) * (z.ndim - 1)), z, 0)

    clean = jax.tree.map(keep_taken, vectors)
    return jax.tree.map(jnp.add, total, trees.combine(clean, weights))


def signs_of(
    rule: SignRule,
    state: State,
    dots: Float32[Array, "n"],
    gram: Float32[Array, "n n"],
    valid: Bool[Array, "n"],
) -> Signs:
    """(state, signs) from b and G; 0 for a vector that is not valid or has no finite product."""
    # The kernel holds the state of the rule in registers. Keys are not needed: coins are drawn.
    fits = all(mesh.is_key(leaf) or leaf.ndim == 0 for leaf in jax.tree.leaves(state))
    platform = mesh.platform()
    scan = functools.partial(signs_by_scan, rule)
    if not (fits and (platform == "tpu" or platform == "gpu" and _has_triton())):
        return scan(state, dots, gram, valid)
    # The compiler does not split a kernel over axes that are left to it: every device runs it.
    scope = jax.sharding.get_abstract_mesh()
    left = set(scope.axis_names) - set(scope.manual_axes)
    one = functools.partial(signs_in_kernel, rule, triton=platform == "gpu")
    on_each = mesh.over_shards(left, one, P(), P())

    def kernel(*args):
        return mesh.varying(on_each(*args), *args)  # as the scan's, where a shard_map checks it

    # A program for arrays on another platform than the default takes the scan.
    names = ("cuda", "rocm") if platform == "gpu" else ("tpu",)
    kernels = dict.fromkeys(names, kernel)
    return jax.lax.platform_dependent(state, dots, gram, valid, **kernels, default=scan)


def signs_by_scan(rule: SignRule, state, dots, gram, valid) -> Signs:
    """`signs_of`, for every platform and rule."""
    step = _step_of(rule, jnp.arange(valid.size), rule.coins(state, valid.size), jnp.sum)
    carry = mesh.varying((state, dots, jnp.zeros_like(dots)), gram, valid)
    vectors = jnp.arange(valid.size), gram, valid
    unroll = 1 if mesh.platform() == "cpu" else UNROLL
    (state, _, signs), _ = jax.lax.scan(
        lambda carry, vector: (step(carry, *vector), None), carry, vectors, unroll=unroll
    )
    return state, signs


def signs_in_kernel(
    rule: SignRule, state, dots, gram, valid, *, triton: bool = False, interpret: bool = False
) -> Signs:
    """`signs_of` as one Pallas kernel, for rules with scalars and keys in their state.

    Triton only compiles arrays whose sizes are powers of two. With `interpret`, JAX runs the kernel
    on any platform.
    """
    size = valid.size
    arrays = gram, dots, valid.astype(jnp.float32), rule.coins(state, size)
    if triton:
        added = (1 << (size - 1).bit_length()) - size
        arrays = [jnp.pad(x, (0, added)) for x in arrays]
    gram, *rows = arrays
    no_keys = jax.tree.map(lambda x: None if mesh.is_key(x) else x.reshape(1, 1), state)
    scalars, structure = jax.tree.flatten(no_keys)

    def sign_loop(gram, dots, valid, coins, *refs):
        numbers, (*new_numbers, signs) = refs[: len(scalars)], refs[len(scalars) :]
        state = structure.unflatten(ref[...] for ref in numbers)
        dots, valid, coins = dots[...], valid[...], coins[...]
        places = jax.lax.broadcasted_iota(jnp.int32, dots.shape, 1)
        pick = functools.partial(jnp.sum, axis=1, keepdims=True)
        step = _step_of(rule, places, coins, pick)

        def one(i, carry):
            is_valid = pick(jnp.where(places == i, valid, 0.0)) > 0
            return step(carry, i, gram[pl.ds(i, 1), :], is_valid)

        carry = state, dots, jnp.zeros(dots.shape, jnp.float32)
        state, _, signs[...] = jax.lax.fori_loop(0, size, one, carry)
        for ref, number in zip(new_numbers, jax.tree.leaves(state), strict=True):
            ref[...] = number

    every = mesh.varying([gram, *(x[None] for x in rows), *scalars])
    shapes = [jax.typeof(x) for x in (*every[4:], every[1])]
    call = pl.pallas_call(
        sign_loop,
        out_shape=shapes,
        interpret=interpret,
        cost_estimate=_cost_of(size, every, shapes),
        compiler_params=_of_triton(gram.shape[0]) if triton else None,
    )
    *scalars, signs = call(*every)
    state = jax.tree.map(
        lambda new, old: old if new is None else new.reshape(()),
        structure.unflatten(scalars),
        state,
        is_leaf=lambda x: x is None,
    )
    return state, signs[0, :size]


def _has_triton() -> bool:
    """Whether Triton compiles for the GPUs at hand; True without any, as for a topology."""
    try:
        gpu = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return True
    capability = str(gpu.compute_capability)  # of an AMD GPU the name of its architecture
    return capability.startswith("gfx") or float(capability) >= 8


def _of_triton(size: int):
    # A sum within one warp needs no barrier; more than 32 numbers per thread leave its registers.
    return unstable.triton().CompilerParams(num_warps=min(32, max(1, size // 1024)))


def _cost_of(size: int, read, written) -> pl.CostEstimate:
    """What XLA counts for the kernel: operations as it counts those of the scan."""
    moved = sum(x.size * x.dtype.itemsize for x in (*read, *written))
    return pl.CostEstimate(flops=OPERATIONS * size**2, bytes_accessed=moved, transcendentals=0)


def _step_of(rule: SignRule, places, coins, pick: Callable) -> Callable:
    """One turn of the loop; `pick` sums what a mask leaves, as indexing is slow on accelerators."""

    def step(carry, index, row, is_valid):
        state, dots, signs = carry
        here = places == index
        dot, norm2 = (pick(jnp.where(here, x, 0.0)) for x in (dots, row))
        taken_before = pick(jnp.abs(signs)).astype(jnp.int32)
        coin = pick(jnp.where(places == taken_before, coins, 0.0))
        state, sign, taken = one_sign(rule, state, dot, norm2, coin, is_valid)
        dots = dots + jnp.where(taken, sign * row, 0.0)
        return state, dots, jnp.where(here & taken, sign, signs)

    return step


def one_sign(rule: SignRule, state, dot, norm2, coin, valid):
    """(state, sign, taken); a vector that is not taken leaves the rule's state as it was."""
    taken = valid & jnp.isfinite(dot)
    new_state, sign = rule.sign(state, dot, norm2, coin)
    # Keys cannot be selected by jnp.where; rules never change theirs.
    state = jax.tree.map(
        lambda new, old: new if mesh.is_key(new) else jnp.where(taken, new, old), new_state, state
    )
    return state, jnp.where(taken, sign, 1.0), taken
