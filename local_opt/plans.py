"""Plans of when workers synchronise, made before the run.

A run of T steps has R rounds. A round is one or more steps and then a sync.
"""

import dataclasses
import functools
from array import array
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import PyTree

from local_opt.mapping import map_workers
from local_opt.mean import moved_from, pmean
from local_opt.workers import check_leading, joined, parted_modules
from syncopate import plans
from syncopate.workers import count_of


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class SyncPlan(plans.Plan):
    """The rounds of a run, fixed before it starts.

    Round r takes the steps starts[r] .. starts[r + 1] - 1 and then syncs; the last round ends with
    the run. Two plans are equal if they synchronise after the same steps.

    Args:
      starts: int64[R], first steps of the rounds; starts[0] = 0, strictly increasing, below T.
      total_steps: T in 1 .. 10^7.
      rule: a description.

    Raises:
      ValueError: for starts that are not as above.

    Examples:
      >>> import numpy as np
      >>> from syncopate import local_opt
      >>> plan = local_opt.SyncPlan(np.array([0, 4, 8]), total_steps=10)
      >>> plan.rounds, plan.periods.tolist(), plan.syncs_after(3)
      (3, [4, 4, 2], True)
    """

    _marks = "starts"
    _stretches = "rounds"

    def __init__(self, starts: np.ndarray, total_steps: int, rule: str = "given starts"):
        super().__init__(starts, total_steps, rule)

    @property
    def starts(self) -> np.ndarray:
        """int64[R], the first step of each round."""
        return self._marked

    @property
    def rounds(self) -> int:
        """R, the number of syncs of the run."""
        return len(self.starts)

    @property
    def periods(self) -> np.ndarray:
        """int64[R], H of each round."""
        return self._lengths

    def syncs_after(self, step: int | np.ndarray) -> bool | np.ndarray:
        """Whether workers synchronise after a step, or after each of an array of steps.

        Args:
          step: in 0 .. T - 1.

        Raises:
          ValueError: for a step outside of the plan, or one that is traced.
        """
        given, (step, kind) = step, plans.as_array(step)
        if step.dtype.kind not in "iu":
            where = plans.if_traced(given)
            raise ValueError(f"step is {given} ({kind}): pass whole numbers{where}.")
        if (step < 0).any() or (step >= self.total_steps).any():
            raise ValueError(
                f"step {step} is outside the plan's 0 .. {self.total_steps - 1}: make a plan for "
                "the whole run."
            )
        following = step.astype(np.int64) + 1
        syncs = self._bounds[np.searchsorted(self._bounds, following)] == following
        return syncs if syncs.ndim else bool(syncs)

    @jax.transfer_guard("allow")
    def after(
        self,
        step: int,
        tree: PyTree,
        workers: int | Mesh | None = None,
        *,
        axis_name: str | None = None,
        weight: ArrayLike | None = None,
    ) -> PyTree:
        """The tree after a step: its mean over the workers if the plan syncs there, else the tree.

        For loops without optax: call it between jitted steps. All syncs run one compiled program.
        On one device the mean of equal numbers is that number; elsewhere it is as in `pmean`. On a
        mesh over several processes the first call compares their plans.

        Args:
          step: in 0 .. T - 1, the step that was taken.
          tree: arrays [W, ...], as `replicate` makes them, or a module of equinox or flax.nnx with
            such arrays. Integers, booleans and keys are not averaged.
          workers, axis_name: as in `map_workers`.
          weight: [W], as in `pmean`.

        Returns:
          The tree itself if no sync is due; else new arrays, on the same devices as the old.

        Raises:
          ValueError: for a step, arrays or workers that do not fit, or processes with other plans.

        Examples:
          >>> import jax.numpy as jnp
          >>> from syncopate import local_opt
          >>> plan, x = local_opt.constant(2, total_steps=4), jnp.array([1.0, 3.0])
          >>> plan.after(0, x, 2).tolist(), plan.after(1, x, 2).tolist()
          ([1.0, 3.0], [2.0, 2.0])
        """
        count, axis_name, mesh = count_of(workers, axis_name)
        if isinstance(mesh, Mesh) and mesh.is_multi_process:
            _ = self._compared
        if not self.syncs_after(plans.check_whole("step", step, 0, self.total_steps - 1)):
            return tree
        arrays, rest = parted_modules(tree)
        check_leading({"tree": arrays, "weight": weight}, "worker")
        leaves, treedef = jax.tree.flatten(arrays)
        if mesh is None:
            traced = any(isinstance(x, Tracer) for x in leaves)
            alone = not traced and len(set().union(*map(_devices_of, leaves))) <= 1
            means = _mean_of_all(count, axis_name, alone)(leaves, weight)
        else:
            means = _mean_of_all(mesh, axis_name)(_on_mesh(leaves, mesh, axis_name), weight)
        return joined(jax.tree.unflatten(treedef, _where_they_were(means, leaves)), rest)

    def aligned(self, *, every: float, fresh: np.ndarray | None = None) -> "SyncPlan":
        """A plan whose rounds end after multiples of a number of loads, such as those of an epoch.

        Mark k = 1, 2, .. is after floor(k every + 1/2) loads. A round that ends between two marks
        is extended to the later one, or to the end of the run. Rounds that would then end together
        are merged. None is merged if each has at least `every` loads and the run ends at a mark.

        Args:
          every: >= 1, the loads between two marks, such as n for epochs of n loads; may be
            fractional.
          fresh: bool[T], the steps that load a batch, as `ordering.echo.EchoPlan.fresh`; a mark is
            then after the last use of a batch. None if every step loads.

        Returns:
          A plan of T steps; this plan if every round ends at a mark.

        Raises:
          ValueError: for `every` below 1 or not finite, or a `fresh` of another length.

        Examples:
          >>> from syncopate import local_opt
          >>> plan = local_opt.constant(5, total_steps=24)
          >>> plan.aligned(every=6).starts.tolist()
          [0, 6, 12, 18]
        """
        plans.check_number("every", every, "[1, inf)")
        total_steps = self.total_steps
        loads = None if fresh is None else _loads(fresh, total_steps)
        count = total_steps if loads is None else len(loads)
        marks = np.floor(every * np.arange(1, int(count / every) + 2) + 0.5).astype(np.int64)
        marks = marks[marks < count]
        ends = np.append(marks if loads is None else loads[marks], total_steps)
        ended = np.searchsorted(self._bounds[1:], ends, side="right")  # the rounds up to each mark
        kept = ends[np.diff(ended, prepend=0) > 0]
        if np.array_equal(kept, self._bounds[1:]):
            return self
        rule = f"{self.rule}, to the next {every:g} loads"
        return SyncPlan(np.append(0, kept[:-1]), total_steps, rule)

    @functools.cached_property
    def _compared(self) -> None:
        """Compares the plans of all processes, once."""
        self.check_same()

    @functools.cached_property
    def _bits(self):
        """uint8[T / 8], one bit per step: whether workers synchronise after it."""
        syncs = np.zeros(self.total_steps, bool)
        syncs[self._bounds[1:] - 1] = True
        return np.packbits(syncs, bitorder="little")

    def _summary(self):
        periods = self.periods
        changes = np.flatnonzero(np.diff(periods, prepend=0))
        lines = [f"{self.starts[r]:>11}{periods[r]:>6}" for r in changes]
        if len(lines) > 14:
            lines = [*lines[:7], "        ...", *lines[-6:]]
        volume = f"volume {self.rounds / self.total_steps:.3%}"
        sizes = f"{volume}, H from {periods.min()} to {periods.max()}"
        return sizes, ["  from step     H", *lines]


def syncs_after_traced(plan: SyncPlan, step: jax.Array) -> jax.Array:
    """Like `plan.syncs_after`, for a traced step; true beyond the plan."""
    # The host's array is converted here, since a traced array could not leave its trace.
    byte = jnp.asarray(plan._bits)[jnp.minimum(step, plan.total_steps - 1) // 8]
    return ((byte >> (step % 8).astype(jnp.uint8)) % 2 == 1) | (step >= plan.total_steps)


@functools.lru_cache(maxsize=16)
def _mean_of_all(workers, axis_name, alone=False):
    """(arrays, weight) of all workers -> the mean arrays, compiled once.

    If all are on one device (`alone`), differences from one worker's arrays are averaged, so that
    equal numbers stay bitwise equal. Over several devices that would take a second collective.
    """
    mean = lambda tree, weight: pmean(tree, axis_name=axis_name, weight=weight)  # noqa: E731
    run = map_workers(mean, workers, in_specs="worker", out_specs="worker", axis_name=axis_name)

    def from_one(leaves, weight):
        one = 0 if weight is None else jnp.argmax(weight != 0)  # with weight 0 it may be NaN
        floating = {i: x for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)}
        first = {i: x[one][None] for i, x in floating.items()}
        first = {i: jnp.where(jnp.isfinite(x), x, 0) for i, x in first.items()}  # inf - inf is NaN
        changes = run(moved_from(first, floating), weight)
        means = {i: (x + changes[i]).astype(x.dtype) for i, x in first.items()}
        return [means.get(i, x) for i, x in enumerate(leaves)]

    return jax.jit(from_one if alone else run)


def _devices_of(x):
    """The devices that hold an array; none for an array of NumPy or a traced one."""
    return x.devices() if isinstance(x, jax.Array) and not isinstance(x, Tracer) else set()


def _on_mesh(leaves, mesh, axis_name):
    """The leaves, moved to the workers' devices if they are on others."""
    if not isinstance(mesh, Mesh):  # an abstract mesh, while tracing
        return leaves
    devices = {*mesh.devices.flat}
    away = [i for i, x in enumerate(leaves) if _devices_of(x) not in (set(), devices)]
    put = NamedSharding(mesh, PartitionSpec(axis_name))
    moved = dict(zip(away, jax.device_put([leaves[i] for i in away], put), strict=True))
    return [moved.get(i, x) for i, x in enumerate(leaves)]


def _where_they_were(arrays, leaves):
    """Moves the arrays to where the leaves were, the only place where `jax.pmap` accepts them.

    Arrays that are already there are not copied: steps would compile again for committed copies.
    """
    now, places = ([getattr(x, "sharding", None) for x in xs] for xs in (arrays, leaves))
    away = [i for i, place in enumerate(places) if place is not None and place != now[i]]
    put = jax.device_put([arrays[i] for i in away], [places[i] for i in away])
    moved = dict(zip(away, put, strict=True))
    return [moved.get(i, y) for i, y in enumerate(arrays)]


def from_function(period: Callable[[int], int], *, total_steps: int, rule: str = "") -> SyncPlan:
    """A plan whose round lengths are any function of a round's first step.

    H(t) = period(t), cut at the end of the run. Post-local SGD is `lambda t: 1 if t < t0 else H`,
    and SWAP is `lambda t: H if t < t0 else T`.

    Args:
      period: maps the first step of a round, in 0 .. T - 1, to its number of steps >= 1.
      total_steps: T in 1 .. 10^7.
      rule: a description.

    Returns:
      The plan.

    Raises:
      ValueError: if a period is not a whole number >= 1, or `total_steps` is out of range.

    Examples:
      >>> from syncopate import local_opt
      >>> local_opt.from_function(lambda t: 1 + t, total_steps=10).periods.tolist()
      [1, 2, 4, 3]

    References:
      Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, 2020,
      https://arxiv.org/abs/1808.07217
      Gupta, Serrano, DeCoste, Stochastic Weight Averaging in Parallel, 2020,
      https://arxiv.org/abs/2001.02312
    """
    plans.check_total_steps(total_steps)
    plans.check_function("period", period, "step")
    starts, t = array("q"), 0
    while t < total_steps:
        starts.append(t)
        h = period(t)
        if not plans.is_whole(h) or h < 1:
            raise ValueError(f"period({t}) is {h!r}: a round has a whole number of steps, >= 1.")
        t += int(h)
    name = rule or f"H = {getattr(period, '__name__', 'function')}(t)"
    return SyncPlan(np.array(starts), total_steps, name)


def _loads(fresh, total_steps) -> np.ndarray:
    """int64[n], the steps that load."""
    fresh, text = plans.as_array(fresh)
    if fresh.dtype != bool or fresh.shape != (total_steps,) or not fresh[0]:
        raise ValueError(
            f"fresh is {text}: pass one bool for each of the plan's {total_steps} steps, True for "
            "those that load. The first step must load."
        )
    return np.flatnonzero(fresh)


def check_plan(plan: SyncPlan) -> None:
    """Raises ValueError unless this is a plan."""
    if not isinstance(plan, SyncPlan):
        raise ValueError(
            f"plan is a {type(plan).__name__}: make a SyncPlan, such as local_opt.constant(4, "
            "total_steps=T)."
        )
