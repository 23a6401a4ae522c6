"""Signs from products: the part of the kernel in which one vector waits for the other.

    for i in 1..n:  s_i = sign(b_i, G_ii);  b += s_i G_i        b = Z r, G = Z Z^T

A sign is a few operations, but in a loop of XLA each of them is a kernel of its own. On TPUs and
GPUs the whole loop is one Pallas kernel: on a TPU it holds G in vector memory, on a GPU it reads a
row of G at a time, and b stays in registers. Elsewhere the loop is a scan.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float32

from ordering.signs import SignRule, State
from syncopate import mesh

UNROLL = 8  # signs per turn of the scan where each turn starts kernels
OPERATIONS = 10  # of a greedy sign, for each of n numbers, as XLA counts them in the scan
Signs = tuple[State, Float32[Array, "n"]]


def signs_of(
    rule: SignRule, state: State, dots: Float32[Array, "n"], gram: Float32[Array, "n n"],
    valid: Bool[Array, "n"],
) -> Signs:  # fmt: skip
    """Signs n vectors, one after the other.

    Args:
      dots: b, the products with the running sum; gram: G, the products with each other.
      valid: which vectors count.

    Returns:
      (state, signs): -1, +1, or 0 for a vector that is not valid or whose product is not finite.
    """
    # The kernel holds the state of the rule in registers. Keys are not needed: coins are drawn.
    fits = all(mesh.is_key(leaf) or leaf.ndim == 0 for leaf in jax.tree.leaves(state))
    platform = mesh.platform()
    if fits and (platform == "tpu" or platform == "gpu" and _has_triton()):
        return signs_in_kernel(rule, state, dots, gram, valid, triton=platform == "gpu")
    return signs_by_scan(rule, state, dots, gram, valid)


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

    Args:
      triton: as Triton compiles it, whose arrays have powers of two of elements.
      interpret: as JAX interprets it, on any platform.
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
        sign_loop, out_shape=shapes, interpret=interpret,
        cost_estimate=_cost_of(size, every, shapes),
        compiler_params=_of_triton(gram.shape[0]) if triton else None,
    )  # fmt: skip
    *scalars, signs = call(*every)
    state = jax.tree.map(
        lambda new, old: old if new is None else new.reshape(()),
        structure.unflatten(scalars), state, is_leaf=lambda x: x is None,
    )  # fmt: skip
    return state, signs[0, :size]


def _has_triton() -> bool:
    """Whether Triton compiles for the GPUs at hand; if there are none, for those of a topology."""
    try:
        gpu = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return True
    capability = str(gpu.compute_capability)  # of an AMD GPU the name of its architecture
    return capability.startswith("gfx") or float(capability) >= 8


def _of_triton(size: int):
    from jax.experimental.pallas import triton  # a fifth of a second, which others need not wait

    # A sum within one warp needs no barrier; more than 32 numbers per thread leave its registers.
    return triton.CompilerParams(num_warps=min(32, max(1, size // 1024)))


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
