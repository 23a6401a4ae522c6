"""Orders from scores of the units: sorted, and the patterns of published curricula."""

import dataclasses
import inspect
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key

from ordering import base, trees
from ordering.base import Ordering
from ordering.shuffles import permutation
from syncopate import mesh, plans
from syncopate.unstable import axis_names
from syncopate.workers import AXIS, ONE, Workers, shared_key

SMALL = 1e-9  # .29 * 100 is slightly less than 29


class ScoredState(NamedTuple):
    """State of one worker; `places` is equal on all workers."""

    current: Int[Array, "M"]
    next: Int[Array, "M"]
    left: Int[Array, ""]
    epoch: Int[Array, ""]  # epochs finished
    key: Key[Array, ""]
    places: Int[Array, "N"]  # the units of all workers by the pattern, before any is moved


class Arranged(NamedTuple):
    """What a pattern makes of N units, which are numbered by rank: 0 has the lowest score."""

    ranks: np.ndarray  # int[N], a permutation of 0 .. N - 1
    bounds: tuple[int, ...] = ()  # places between the parts whose units get a random order


def _sorted(size: int) -> Arranged:
    return Arranged(np.arange(size))


def _folded(size: int, *, layers: int = 5) -> Arranged:
    return Arranged(_layers(np.arange(size), layers))


def _zigzag(size: int, *, layers: int = 5) -> Arranged:
    return Arranged(_layers(np.arange(size), layers, turns=True))


def _segments(size: int, *, ends: float = 0.1) -> Arranged:
    count = int(size * ends + SMALL)
    return Arranged(np.arange(size), (count, size - count))


def _stairs(size: int, *, layers: int = 3, sections: int = 2, radius: float = 0.225) -> Arranged:
    return _transitions(size, layers, sections, radius, turns=False)


def _saw(size: int, *, layers: int = 2, sections: int = 3, radius: float = 0.075) -> Arranged:
    return _transitions(size, layers, sections, radius, turns=True)


def _layers(ranks, layers, turns=False):
    """Every `layers`-th rank from 0 on, then from 1 on, ...; with `turns` odd layers fall."""
    parts = [ranks[first::layers] for first in range(layers)]
    if turns:
        parts[1::2] = [part[::-1] for part in parts[1::2]]
    return np.concatenate(parts)


def _transitions(size, layers, sections, radius, turns):
    """Sorted, but with layers within `radius` N places of the borders of equal sections."""
    ranks, end, half = np.arange(size), 0, round(size * radius)
    for section in range(1, sections):
        border = round(size * section / sections)
        begin, end = max(end, border - half), min(size, border + half)
        if begin < end:
            ranks[begin:end] = _layers(ranks[begin:end], layers, turns)
    return Arranged(ranks)


# To add a pattern, add a row: a function of N, whose keywords are arguments of `scored`.
PATTERNS: dict[str, Callable[..., Arranged]] = {
    "sorted": _sorted,
    "folded": _folded,
    "zigzag": _zigzag,
    "segments": _segments,
    "stairs": _stairs,
    "saw": _saw,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored(Ordering):
    """What `scored` returns."""

    places: bytes = dataclasses.field(repr=False)  # int32[N], which compare and hash as bytes
    bounds: tuple[int, ...]  # places between parts whose units get a random order
    workers: int
    jitter: int
    fixed: bool
    axis_name: str = AXIS

    is_global = True

    def __post_init__(self):
        super().__post_init__()
        if self.bounds and self.jitter:
            raise ValueError(
                f"jitter is {self.jitter}, and the pattern shuffles its parts as a whole: leave "
                "jitter out."
            )
        if not isinstance(self.fixed, bool):
            raise ValueError(
                f"fixed is {self.fixed!r}: pass True for one order in all epochs, or False."
            )

    @property
    def total(self) -> int:
        return len(self.places) // 4

    def digest(self, units: int = 0) -> np.uint32:
        """As of other orders, but of any scores, as a state goes on with its own."""
        kept = self.num_units, self.total, self.bounds, self.workers, self.jitter, self.fixed
        return np.uint32(zlib.crc32(repr(("Scored", kept)).encode()))

    def init(self, key, params=None):
        key = self._key_of_all(plans.check_key(key, ONE))
        of_all = mesh.varying(jnp.asarray(np.frombuffer(self.places, np.int32)), key)
        left, epoch = jnp.full((), self.num_units, jnp.int32), jnp.zeros((), jnp.int32)
        state = ScoredState(of_all, of_all, left, epoch, jax.random.clone(key), of_all)
        current, following = (self._draw(key, of_all, e) for e in (epoch, epoch + 1))
        return state._replace(current=current, next=following)

    def observe(self, state, gradients):
        base.check_state(self, state, ScoredState)
        return super().observe(state, gradients)

    def next_epoch(self, state):
        state = base.check_state(self, state, ScoredState)
        epoch = state.epoch + 1
        following = self._draw(state.key, state.places, epoch + 1)
        return state._replace(current=state.next, next=following, epoch=epoch)

    def epoch_units(self, key, epoch):
        return self._draw(key, jnp.asarray(np.frombuffer(self.places, np.int32)), epoch)

    def resize(self, state, fresh, current, visited):
        # The key and the ranking are equal on all workers, and stay; the rest is as in a shuffle.
        key, first = state.key, np.zeros(len(current), int)
        drawn = fresh._replace(
            current=current,
            next=current.copy(),
            epoch=base.kept(state.epoch, len(current)) - 1,
            key=key[first],
            places=np.asarray(state.places)[first],
        )
        return Workers(len(current), self.axis_name).map(self.next_epoch)(drawn)

    def _draw(self, key, places, epoch):
        key = jax.random.fold_in(key, jnp.zeros_like(epoch) if self.fixed else epoch)
        common = self._move(key, places)
        if spare := self.total - self.workers * self.num_units:
            common = common[_visited(jax.random.fold_in(key, 1), self.total, spare)]
        worker = jax.lax.axis_index(self.axis_name) if self.workers > 1 else 0
        return common.reshape(self.num_units, self.workers)[:, worker]

    def _move(self, key, places):
        """The places with the units of each part, or of each window, in a random order."""
        if not self.bounds and self.jitter < 2:
            return places
        drawn = permutation(jax.random.fold_in(key, 0), self.total)
        bounds = jnp.array(self.bounds, jnp.int32)
        part = (
            jnp.searchsorted(bounds, drawn, side="right") if self.bounds else drawn // self.jitter
        )
        return places[drawn[jnp.argsort(part, stable=True)]]

    def _key_of_all(self, key):
        """Worker 0's key on every worker; raises ValueError for another number of workers."""
        if self.workers == 1 and self.axis_name not in axis_names():
            return key
        if (here := mesh.axis_size(self.axis_name)) != self.workers:
            raise ValueError(
                f"the order is of {self.workers} workers, and axis {self.axis_name!r} has {here}: "
                f"make it with workers={here}."
            )
        return shared_key(key, self.axis_name)


def scored(
    scores: ArrayLike,
    *,
    pattern: str = "sorted",
    workers: int = 1,
    units_per_step: int = 1,
    jitter: int = 0,
    fixed: bool = False,
    layers: int | None = None,
    sections: int | None = None,
    radius: float | None = None,
    ends: float | None = None,
    axis_name: str = AXIS,
) -> Ordering:
    """An order of all workers' units by their scores, from low to high, in a published pattern.

    Unit u has the rank r(u) in the sorted scores; equal scores keep the sequence of their units.
    Place p of the common order has the unit of rank pattern(p):

    - "sorted": 0, 1, .., N - 1, the plain curriculum.
    - "folded" (FO): every `layers`-th rank from 0 on, then from 1 on, and so on.
    - "zigzag" (ZIG): as folded, with every second layer from high to low.
    - "segments" (SEG): the lowest `ends` N, the middle and the highest `ends` N, each in a random
      order.
    - "stairs" (STR): sorted, but folded within `radius` N places of the borders of equal sections.
    - "saw" (SAW): as stairs, with zigzags.

    Worker q mod W gets the unit in place q, as its unit q // W. So a step has the same W B units
    for any number of workers, and every worker sees the same mix of scores.

    Args:
      scores: float[N], one number per unit of all workers; pass -scores to begin with the highest.
      pattern: one of the names above.
      workers: W in 1 .. N; each worker visits M = N // W units per epoch. The N mod W units that
        are left out are spread evenly over the common order, other ones in every epoch.
      units_per_step: B in [1, M], the units of a worker's step.
      jitter: in 0 .. N, the size of windows of the common order in which units have a random order
        (JIT); 0 for none, and for segments.
      fixed: whether all epochs have one order, instead of new random numbers.
      layers: in 1 .. N; by default 5 for folded and zigzag, 3 for stairs, 2 for saw.
      sections: in 1 .. N; by default 2 for stairs, 3 for saw.
      radius: in [0, 1]; by default 0.225 for stairs, 0.075 for saw.
      ends: in [0, 0.5]; by default 0.1 for segments.
      axis_name: as in `cd_grab`; not used for one worker.

    Returns:
      An `Ordering` whose `current` holds units in [0, N); `observe` ignores the gradients. Each
      worker's state keeps the common order, 4 N bytes: a run that resumes goes on with the scores
      that it began with.

    Raises:
      ValueError: for scores that are not N finite numbers, for sizes out of range, and for an
        argument that the pattern does not take; from `init`, outside of the axis, or if it has
        another number of workers.

    Examples:
      >>> import jax
      >>> from syncopate import ordering
      >>> order = ordering.scored([0.3, 0.1, 0.9, 0.2, 0.5], pattern="folded", layers=2)
      >>> order.init(jax.random.key(0), params=None).current.tolist()
      [1, 0, 2, 3, 4]

    References:
      Dai et al., Data Efficacy for Language Model Training, 2025,
      https://arxiv.org/abs/2506.21545 (folded); Dai et al., Demystifying Data Organization for
      Enhanced LLM Training, 2026, https://arxiv.org/abs/2605.30334 (the others, and the defaults
      of https://github.com/microsoft/data-efficacy)
    """
    given = {"layers": layers, "sections": sections, "radius": radius, "ends": ends}
    places, bounds = _places(scores, pattern, given)
    workers = plans.check_whole("workers", workers, 1, len(places))
    return Scored(
        num_units=len(places) // workers,
        units_per_step=units_per_step,
        places=places.astype(np.int32).tobytes(),
        bounds=bounds,
        workers=workers,
        jitter=plans.check_whole("jitter", jitter, 0, len(places)),
        fixed=fixed,
        axis_name=axis_name,
    )


def _places(scores: Any, pattern: str, given: dict[str, Any]) -> tuple[np.ndarray, tuple]:
    """(the unit in every place, the bounds of parts to shuffle); refuses bad arguments."""
    values, kind = plans.as_array(scores)
    real = any(jnp.issubdtype(values.dtype, kind) for kind in trees.REAL)
    if values.ndim != 1 or not real or not len(values):
        raise ValueError(f"scores is {kind}: pass one number per unit, of all workers.")
    if values.dtype.kind not in "biu":  # also bfloat16, which NumPy cannot test or sort
        values = values.astype(np.float64)
    if len(bad := np.flatnonzero(~np.isfinite(values))):
        raise ValueError(
            f"scores[{bad[0]}] is {values[bad[0]]} ({len(bad)} of {len(values)} are not finite): "
            "give every unit a finite score."
        )
    base.check_units(len(values))
    if not isinstance(pattern, str) or pattern not in PATTERNS:
        raise ValueError(f"pattern is {pattern!r}: choose one of {', '.join(PATTERNS)}.")
    takes = inspect.signature(PATTERNS[pattern]).parameters
    given = {name: value for name, value in given.items() if value is not None}
    if strange := [name for name in given if name not in takes]:
        raise ValueError(
            f"{strange[0]} is {given[strange[0]]!r}, and pattern is {pattern!r}, which takes "
            f"{', '.join([*takes][1:]) or 'none of its kind'}: leave {strange[0]} out."
        )
    for name, value in given.items():
        if name in ("layers", "sections"):
            given[name] = plans.check_whole(name, value, 1, len(values))
        else:
            given[name] = plans.check_number(
                name, value, "[0, 0.5]" if name == "ends" else "[0, 1]"
            )
    arranged = PATTERNS[pattern](len(values), **given)
    return np.argsort(values, kind="stable")[arranged.ranks], arranged.bounds


def _visited(key, total, spare):
    """int32[total - spare], the places that an epoch visits: all but `spare`, evenly apart."""
    first = jax.random.randint(key, (), 0, total, jnp.int32)
    offsets = jnp.asarray(total * np.arange(spare, dtype=np.int64) // spare, jnp.int32)
    # The sum of both may exceed int32.
    out = jnp.sort(jnp.where(first < total - offsets, first + offsets, first - (total - offsets)))
    kept = jnp.arange(total - spare, dtype=jnp.int32)
    before = jnp.searchsorted(out - jnp.arange(spare, dtype=jnp.int32), kept, side="right")
    return kept + before.astype(jnp.int32)
