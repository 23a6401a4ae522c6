"""Sign rules of the papers: the self-balancing walk and kernel halving."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Key

from ordering.signs import SignRule, plus_iff
from syncopate import plans


class WalkState(NamedTuple):
    key: Key[Array, ""]
    signed: Int[Array, ""]  # vectors signed so far, over all epochs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk(SignRule):
    """What `self_balancing_walk` returns."""

    bound: float

    def init(self, key):
        return WalkState(key, jnp.zeros((), jnp.int32))

    def coins(self, state, n):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(
            state.key, state.signed + jnp.arange(n, dtype=jnp.int32)
        )
        return jax.vmap(_uniform)(keys)

    def sign(self, state, dot, norm2, coin):
        plus = jnp.clip(0.5 - dot / (2.0 * self.bound), 0.0, 1.0)
        return state._replace(signed=state.signed + 1), plus_iff(coin < plus)


def self_balancing_walk(*, bound: float = 30.0) -> SignRule:
    """The self-balancing walk: P(s = +) = 1/2 - <r, c> / (2 C), clipped to [0, 1].

    Args:
      bound: C > 0, the largest |<r, c>| for which the sign is random. The theory assumes vectors
        of norm at most 1.

    Returns:
      A randomised `SignRule`. The i-th sign depends on the key, i and <r, c> alone.

    Raises:
      ValueError: if bound is not positive and finite.

    Examples:
      >>> from syncopate import ordering
      >>> rule = ordering.baselines.self_balancing_walk(bound=30.0)

    References:
      Alweiss, Liu, Sawhney, Discrepancy Minimization via a Self-Balancing Walk, 2021,
      https://arxiv.org/abs/2006.14009
    """
    # float32 holds numbers of this range
    return Walk(bound=plans.check_number("bound", bound, "(1e-37, 1e37)"))


class HalvingState(NamedTuple):
    key: Key[Array, ""]
    epoch: Int[Array, ""]
    pair: Int[Array, ""]  # pairs signed in this epoch
    scale: Float32[Array, ""]  # S of the algorithm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halving(SignRule):
    """What `kernel_halving` returns."""

    num_epochs: float
    num_pairs: float
    delta: float

    def init(self, key):
        epoch, pair = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return HalvingState(key, epoch, pair, scale=jnp.zeros((), jnp.float32))

    def coins(self, state, n):
        key = jax.random.fold_in(state.key, state.epoch)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(
            key, state.pair + jnp.arange(n, dtype=jnp.int32)
        )
        return jax.vmap(functools.partial(_uniform, minval=-1.0))(keys)

    def sign(self, state, dot, norm2, coin):
        # Python numbers: a rule made while tracing must not hold a traced array.
        penalty = (4 / self.delta) * (math.log(self.num_epochs) + 1)
        penalty *= math.log(self.num_pairs) + 1
        pair, epoch = state.pair.astype(jnp.float32), state.epoch.astype(jnp.float32)
        log_penalty = jnp.log(penalty * (pair + 1)) + jnp.log(epoch + 1)
        # S does not change for a pair of equal gradients, whose norm and dot are 0 (so it gets a
        # plus), or for a pair whose squared norm overflows float32.
        usual = (norm2 > 0) & (norm2 < jnp.inf)
        safe_norm2 = jnp.where(usual, norm2, 1.0)
        ratio = state.scale * log_penalty / safe_norm2
        grown = state.scale + 2 * norm2 * (
            jnp.maximum(0.0, log_penalty + 0.5 - jnp.sqrt(ratio)) / log_penalty
        )
        threshold = norm2 * jnp.where(ratio <= 1, 1.0, jnp.sqrt(ratio))
        scale = jnp.where(ratio <= 1, 2 * norm2, grown)
        state = state._replace(pair=state.pair + 1, scale=jnp.where(usual, scale, state.scale))
        return state, plus_iff(dot <= coin * threshold)

    def next_epoch(self, state):
        pair, scale = jnp.zeros_like(state.pair), jnp.zeros_like(state.scale)
        return state._replace(epoch=state.epoch + 1, pair=pair, scale=scale)


def kernel_halving(*, num_epochs: int, num_pairs: int, delta: float = 0.5) -> SignRule:
    """Kernel halving with a linear kernel, the sign rule of KH-SGD.

    For pair i of epoch e (both from 1), l = ln(4/delta (ln K + 1)(ln N + 1) i) + ln e and
    q = S l / |c|^2.  If q <= 1, t = |c|^2 and S = 2 |c|^2.  Else t = |c|^2 sqrt(q) and
    S += 2 |c|^2 max(0, l + 1/2 - sqrt(q)) / l.  Then + iff <r, c> <= U t, U ~ Unif[-1, 1].

    Args:
      num_epochs: K >= 1, epochs of the run.
      num_pairs: N >= 1, pairs per epoch that enter one running sum; for `cd_grab`, the pairs of all
        workers.
      delta: failure probability in (0, 1).

    Returns:
      A randomised `SignRule`.

    Raises:
      ValueError: for arguments out of range.

    Examples:
      >>> from syncopate import ordering
      >>> rule = ordering.baselines.kernel_halving(num_epochs=10, num_pairs=500)

    References:
      Carrell et al., Low-Rank Thinning, 2025, https://arxiv.org/abs/2502.12063
    """
    return Halving(
        num_epochs=plans.check_number("num_epochs", num_epochs, "[1, inf)"),
        num_pairs=plans.check_number("num_pairs", num_pairs, "[1, inf)"),
        delta=plans.check_number("delta", delta, "(1e-20, 1)"),
    )


_uniform = functools.partial(jax.random.uniform, dtype=jnp.float32)
