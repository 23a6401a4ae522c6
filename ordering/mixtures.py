"""Mixtures of sources: how many examples of each a step takes, planned before the run."""

import dataclasses
import functools
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from ordering import base
from ordering.base import Ordering
from ordering.blocks import sources as blocks
from ordering.data.sources import Source, as_source, check_indices
from ordering.indices import Indices
from ordering.permutations import MOST, Computed, counted
from ordering.shares import BLOCK, NO_END, fixed_bits, fixed_point, plan_counts
from syncopate import plans, schedules

if TYPE_CHECKING:
    import optax

EXHAUSTED = ("repeat", "stop", "end")


class ExamplesRead(dict[str, int]):
    """{name: examples that were read}, and in `owed` {name: examples that are due beyond them}."""

    def __init__(self, counts: Mapping[str, int], owed: Mapping[str, float]):
        super().__init__(counts)
        self.owed = dict(owed)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class MixturePlan(plans.Plan):
    """How many examples of each of S sources the T steps of a run take; what `mixture` returns.

    Two plans are equal if they take the same numbers from sources of the same names and sizes.

    Attributes:
      counts: int32[T, S], examples of each source in every step.
      sizes: {name: examples}.
      batch_size: examples of a step, of all workers.
      examples_read: {name: examples that were read before the first step}.
      shares: float64[T, S], the shares that the counts follow.
    """

    counts: np.ndarray
    sizes: dict[str, int]
    batch_size: int
    examples_read: ExamplesRead
    shares: np.ndarray

    def __init__(
        self,
        counts: Any,
        sizes: Any,
        batch_size: int,
        examples_read: ExamplesRead,
        rule: str,
        shares: Any,
    ):
        counts = np.asarray(counts)
        _check_sizes(sizes)
        wrong = counts.ndim != 2 or counts.shape[1] != len(sizes) or not counts.size
        if wrong or (counts < 0).any() or (counts.sum(axis=1) != batch_size).any():
            raise ValueError(
                f"counts is int{list(counts.shape)}: pass a number >= 0 for each of the sources, "
                f"which add up to {batch_size} in every row."
            )
        super().__init__([0], len(counts), rule)
        shares = np.broadcast_to(np.asarray(shares, np.float64), counts.shape)
        counts = counts.astype(np.int32)
        counts.setflags(write=False)
        vars(self).update(counts=counts, sizes=dict(sizes), batch_size=batch_size, shares=shares)
        vars(self).update(examples_read=examples_read)

    def digest(self) -> str:
        """A hash (64 hex digits) of names, sizes and all counts; independent of the machine."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        head = repr((self.sizes, self.batch_size, dict(self.examples_read))).encode()
        result = hashlib.sha256(head)
        for start in range(0, self.total_steps, BLOCK):
            result.update(self.counts[start : start + BLOCK].astype("<i8").tobytes())
        return result.hexdigest()

    def counts_before(self, step: int) -> ExamplesRead:
        """{name: examples of it that were read before a step}, since its first pass began.

        The result also has what each source is owed then, as `owed`, so that shares stay exact over
        any number of plans.

        Args:
          step: a step from 0 to T.

        Returns:
          What another plan takes as `examples_read`, to go on with other weights.

        Raises:
          ValueError: for a step outside.
        """
        step = plans.check_whole("step", step, 0, self.total_steps)
        bits = fixed_bits(self.batch_size, len(self.sizes))
        owed = self._starts[1][step // BLOCK] + self._due(step // BLOCK * BLOCK, step)
        owed = (owed * 2.0**-bits).tolist()
        before = self._before(np.array([step]))[0].tolist()
        read = dict(zip(self.sizes, before, strict=True))
        return ExamplesRead(read, dict(zip(self.sizes, owed, strict=True)))

    def _before(self, steps: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n S"]:
        """Examples of each source that were read before some steps."""
        block, rest = np.divmod(steps, BLOCK)
        before = self._starts[0][block]
        for number in np.unique(block).tolist():
            mine, start = block == number, number * BLOCK
            rows = self.counts[start : start + rest[mine].max()]
            sums = np.cumsum(np.pad(rows, ((1, 0), (0, 0))), axis=0, dtype=np.int64)
            before[mine] += sums[rest[mine]]
        return before

    def _due(self, start: int, stop: int) -> Int[np.ndarray, "S"]:
        """By how much more sources are owed after these steps, in fixed point."""
        bits = fixed_bits(self.batch_size, len(self.sizes))
        if start == stop:
            return np.zeros(len(self.sizes), np.int64)
        due = fixed_point(self.shares[start:stop] * self.batch_size, self.batch_size, bits)
        # The sums exceed int64; their difference modulo 2^64 is right.
        return (due - (self.counts[start:stop].astype(np.int64) << bits)).sum(axis=0)

    @functools.cached_property
    def _starts(self) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """(examples read, what is owed, a checksum of the plan) before every `BLOCK` steps."""
        bits = fixed_bits(self.batch_size, len(self.sizes))
        head = repr((self.sizes, self.batch_size, dict(self.examples_read))).encode()
        read, sums = [np.array([*self.examples_read.values()], np.int64)], [zlib.crc32(head)]
        owed = [fixed_point(np.array([[*self.examples_read.owed.values()]]), 0, bits)[0]]
        for start in range(0, self.total_steps, BLOCK):
            rows = self.counts[start : start + BLOCK]
            read.append(read[-1] + rows.sum(axis=0, dtype=np.int64))
            owed.append(owed[-1] + self._due(start, start + len(rows)))
            sums.append(zlib.crc32(rows.astype("<i4").tobytes(), sums[-1]))
        return np.stack(read), np.stack(owed), sums

    def checksum(self, steps: int) -> int:
        """A checksum of what the first steps read: plans that do not differ there have the same."""
        start = steps // BLOCK
        rows = self.counts[start * BLOCK : steps].astype("<i4")
        return zlib.crc32(rows.tobytes(), self._starts[2][start])

    @functools.cached_property
    def _first(self) -> np.ndarray:
        """int64[S + 1], the number of each source's first example, and the number of all."""
        return np.cumsum([0, *self.sizes.values()], dtype=np.int64)

    def locate(self, units: Int[ArrayLike, "n"]) -> tuple[np.ndarray, np.ndarray]:
        """(source, index) of the units of `order`, which number the examples of all sources.

        Args:
          units: whole numbers in [0, sum of the sizes).

        Returns:
          int64[n], numbers of sources in the sequence of `sizes`; int64[n], examples of them.

        Raises:
          ValueError: for numbers outside.
        """
        values, kind = plans.as_array(units)
        total = self._first[-1]
        whole = values.dtype.kind in "iu" or not values.size
        if not whole or ((values < 0) | (values >= total)).any():
            raise ValueError(f"units is {kind}: pass whole numbers in [0, {total - 1}].")
        number = np.searchsorted(self._first, values, side="right") - 1
        return number, values.astype(np.int64) - self._first[number]

    def source(self, sources: Mapping[str, PyTree | Sequence]) -> Source:
        """All sources as one, which `order` reads; see `ordering.data.as_source`.

        Args:
          sources: {name: data}, of the plan's names and sizes, with examples of one kind. Files of
            `ordering.blocks`, such as `tokens` gives, are sources of their records.

        Returns:
          A `Source` of the examples of all, one source after the other.

        Raises:
          ValueError: for other names or sizes, or examples of several kinds.
        """
        _check_names("sources", sources, self.sizes)
        parts = [as_source(_records(sources[name]), name=name) for name in self.sizes]
        for (name, size), part in zip(self.sizes.items(), parts, strict=True):
            if len(part) != size:
                raise ValueError(
                    f"{name} has {len(part)} examples, and the plan is for {size}: make the plan "
                    "for the lengths of the sources."
                )
        return Joined(parts, [*self.sizes], self._first)

    def order(self, *, workers: int = 1, orders: Mapping[str, Ordering] | None = None) -> Ordering:
        """The order of the run, whose one epoch has the T steps of the plan.

        In each step the sources are spread evenly, so that all workers have nearly the same mix.

        Args:
          workers: W, which divides batch_size; another number reads the same steps.
          orders: {name: order of the source's examples} for one worker, whose epochs are known from
            their numbers: `random_reshuffling`, `scored`, or `counted`, which all others have. A
            source's key is made of the run's key and the source's name.

        Returns:
          An `Ordering` for `read_epochs` and the other readers, over `source(...)`. Its state is a
          key and the number of runs; the next run continues the passes.

        Raises:
          ValueError: if W does not divide a step, or an order does not fit its source.
        """
        workers = plans.check_whole("workers", workers, 1)
        if self.batch_size % workers:
            raise ValueError(
                f"workers is {workers}, and a step has {self.batch_size} examples: let workers "
                "divide batch_size."
            )
        orders = {} if orders is None else orders
        if isinstance(orders, Ordering) or not isinstance(orders, Mapping):
            raise ValueError(f"orders is {orders!r:.200}: pass {{name: an Ordering}}.")
        if strange := [name for name in orders if name not in self.sizes]:
            raise ValueError(f"orders names {strange}, none of {[*self.sizes]}.")
        of_all = [
            _check_order(name, orders[name], size) if name in orders else counted(size)
            for name, size in self.sizes.items()
        ]
        return Mixture(
            num_units=self.total_steps * self.batch_size,
            units_per_step=self.batch_size // workers,
            plan=self,
            orders=tuple(of_all),
        )

    def _content(self):
        fields = ("rule", "sizes", "batch_size", "examples_read")
        constant = not self.shares.strides[0]
        return {name: getattr(self, name) for name in fields} | {
            "counts": self.counts.tolist(),
            "shares": self.shares[: 1 if constant else None].tolist(),
            "owed": self.examples_read.owed,
        }

    @classmethod
    def _of_content(cls, content) -> Self:
        read = ExamplesRead(content["examples_read"], content["owed"])
        names = ("counts", "sizes", "batch_size", "rule", "shares")
        return cls(examples_read=read, **{name: content[name] for name in names})

    def describe(self) -> str:
        """A summary that fits one screen: rule, sizes, hash, passes, and shares over the run."""
        end = self._before(np.array([self.total_steps]))[0]
        edges = np.unique(np.linspace(0, self.total_steps, 6).astype(int))
        head = f"{self.total_steps} steps of {self.batch_size} examples"
        lines = [self.rule, f"{head}, hash {self.digest()[:12]}"]
        lines += [f"{'source':>16}{'examples':>14}{'passes':>9}"]
        for i, (name, size) in enumerate(self.sizes.items()):
            lines.append(f"{name:>16}{end[i] - self.examples_read[name]:>14}{end[i] / size:>9.3f}")
        lines.append("".join([f"{'from step':>16}", *(f"{name:>14}" for name in self.sizes)]))
        for low, high in zip(edges, edges[1:], strict=False):
            shares = self.counts[low:high].sum(axis=0) / (self.batch_size * (high - low))
            lines.append("".join([f"{low:>16}", *(f"{share:>14.4f}" for share in shares)]))
        return "\n".join(lines)

    def __repr__(self):
        return f"MixturePlan({self.rule}: {self.total_steps} steps of {self.batch_size} examples)"


def mixture(
    sizes: Mapping[str, int],
    *,
    weights: "Mapping[str, float | optax.Schedule]",
    batch_size: int,
    total_steps: int,
    tokens: Mapping[str, ArrayLike] | None = None,
    exhausted: str = "repeat",
    examples_read: Mapping[str, int] | None = None,
) -> MixturePlan:
    """How many examples of each source every step takes, so that shares follow the weights.

    a_s <- a_s + batch_size p_s(t); the examples of a step go, one by one, to the source with the
    largest a_s, which falls by 1; the first of those that are equal within 2^-20. Here p_s = (w_s /
    l_s) / sum of all of them, with mean lengths l_s if tokens are given, else l_s = 1.

    While no source has stopped, none is ever a whole example ahead of the sum of its shares, and so
    none is S - 1 examples behind. Each pass over a source reads every example of it once.

    Args:
      sizes: {name: examples}, each at least 1.
      weights: {name: weight >= 0}, numbers or schedules of the step; they need not add up to 1.
      batch_size: >= 1, the examples of a step of all workers.
      total_steps: T in 1 .. 10^7.
      tokens: {name: tokens of an example, or of each}, for weights of tokens instead of examples.
      exhausted: after the last example of a source, "repeat" begins another pass, "stop" leaves it
        out and gives its weight to the others, and "end" ends the run before that step.
      examples_read: {name: examples that were read before}; from `MixturePlan.counts_before` also
        with what sources are owed.

    Returns:
      A `MixturePlan`: `plan.order(workers=W)` over `plan.source(sources)` reads it.

    Raises:
      ValueError: for names, sizes, weights or lengths that do not fit each other, or for a step
        that no source with a weight can fill.

    Examples:
      >>> import jax, numpy as np
      >>> from syncopate import ordering
      >>> plan = ordering.mixture(
      ...     {"web": 90, "code": 10}, weights={"web": 3, "code": 1}, batch_size=8, total_steps=6
      ... )
      >>> plan.counts_before(6)
      {'web': 36, 'code': 12}
      >>> source = plan.source({"web": np.arange(90), "code": np.arange(900, 910)})
      >>> for batch in ordering.data.read_epochs(
      ...     source, plan.order(), jax.random.key(0), num_epochs=1
      ... ):
      ...     assert (batch >= 900).sum() == 2

    References:
      Tijdeman, The chairman assignment problem, 1980,
      https://doi.org/10.1016/0012-365X(80)90269-1
    """
    names = _check_sizes(sizes)
    batch_size = plans.check_whole("batch_size", batch_size, 1, base.MOST_UNITS)
    total_steps = plans.check_total_steps(total_steps)
    if not isinstance(exhausted, str) or exhausted not in EXHAUSTED:
        raise ValueError(f"exhausted is {exhausted!r}: choose one of {', '.join(EXHAUSTED)}.")
    _check_names("weights", weights, sizes)
    values = [schedules.evaluate_schedule(weights[n], total_steps, f"weights[{n}]") for n in names]
    constant = not any(any(value.strides) for value in values)
    table = np.stack([value[: 1 if constant else None] for value in values], axis=1)
    if tokens is not None:
        _check_names("tokens", tokens, sizes)
        table = table / [_mean_length(name, tokens[name], sizes[name]) for name in names]
    total = table.sum(axis=1)
    if (empty := np.flatnonzero(~((total > 0) & np.isfinite(total)))).size:
        raise ValueError(f"weights at step {empty[0]} add up to {total[empty[0]]}: pass some > 0.")
    read = dict.fromkeys(names, 0) if examples_read is None else examples_read
    _check_names("examples_read", read, sizes)
    owed = read.owed if isinstance(read, ExamplesRead) else {}
    counts = {name: plans.check_whole(f"examples_read[{name}]", read[name], 0) for name in names}
    left = [NO_END if exhausted == "repeat" else max(0, sizes[n] - counts[n]) for n in names]
    shares = np.broadcast_to(table / total[:, None], (total_steps, len(names)))
    read = ExamplesRead(counts, {name: owed.get(name, 0.0) for name in names})
    behind = np.array([*read.owed.values()])
    planned, shares = plan_counts(shares, batch_size, behind, np.array(left), exhausted)
    if not len(planned):
        raise ValueError(f"exhausted is {exhausted!r}, and there are no examples for step 0.")
    described = ", ".join(f"{n} {schedules.describe_schedule(weights[n])}" for n in names)
    unit = "tokens" if tokens is not None else "examples"
    rule = f"mixture by {unit}: {described}; {exhausted}"
    return MixturePlan(planned, {n: int(sizes[n]) for n in names}, batch_size, read, rule, shares)


def _layouts(counts: Int[np.ndarray, "n S"]) -> tuple[np.ndarray, np.ndarray]:
    """(source, number in that source) of every place of some steps, [n, B]; spread evenly."""
    each, shape = counts.reshape(-1), (len(counts), -1)
    number = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    source = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), each).reshape(shape)
    place = ((number + 0.5) / np.repeat(each, each)).reshape(shape)
    order = np.argsort(place, axis=1, kind="stable")
    return np.take_along_axis(source, order, 1), np.take_along_axis(number.reshape(shape), order, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(Computed):
    """What `MixturePlan.order` returns."""

    others = "sizes, orders or examples_read, or after a run other counts"

    plan: MixturePlan
    orders: tuple[Ordering, ...]  # of all sources

    def __post_init__(self):
        pass  # the plan has checked it

    @property
    def total(self) -> int:
        return int(self.plan._first[-1])

    @property
    def step_units(self) -> int:
        return self.plan.batch_size

    def digest(self, units: int = 0) -> np.uint32:
        """A hash of the sources, and of what the plan takes of them before these units."""
        checksum = self.plan.checksum(-(-int(units) // self.plan.batch_size))
        return np.uint32(zlib.crc32(self._sources, checksum))

    @functools.cached_property
    def _sources(self) -> bytes:
        content: list[Any] = [type(self).__name__]
        for order in self.orders:  # also of the scores, which its own digest leaves out
            names = {field.name for field in dataclasses.fields(order)} - {*base.NOT_IN_DIGEST}
            fields = [getattr(order, name) for name in sorted(names)]
            content.append((type(order).__name__, *fields))
        return repr(content).encode()

    @functools.cached_property
    def epoch_programs(self) -> list[Any]:
        """`(key, epoch) -> units` of each source, compiled for orders that are stored."""
        return [x.epoch_units if x.computed else jax.jit(x.epoch_units) for x in self.orders]

    def epoch_units(self, key, epoch):
        words = jax.device_get(jax.random.key_data(key))
        run = Run(self, words, jax.random.key_impl(key), int(epoch))
        return Indices(run, self.num_units)


class Run:
    """`places -> units` in a run of a plan, also in other threads and processes."""

    def __init__(self, order: Mixture, key_data: Int[np.ndarray, "k"], impl: Any, number: int):
        self._of = order, key_data, impl, number
        self._order, self._words, self._impl, self._number = self._of
        # A thread may be a pass behind another one.
        self._pass = functools.lru_cache(4 * len(order.orders))(self._units_of_pass)

    def __reduce__(self):
        return Run, self._of

    def _units_of_pass(self, source: int, number: int) -> Any:
        name = [*self._order.plan.sizes][source]
        key = jax.random.wrap_key_data(jax.device_put(self._words), impl=self._impl)
        of_source, number = jax.device_put((np.uint32(zlib.crc32(name.encode())), np.int32(number)))
        units = self._order.epoch_programs[source](jax.random.fold_in(key, of_source), number)
        return units if isinstance(units, Indices) else jax.device_get(units)

    def __call__(self, places: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        plan, flat = self._order.plan, places.reshape(-1)
        steps, which = np.unique(flat // plan.batch_size, return_inverse=True)
        place = which, flat % plan.batch_size
        source, number = (x[place] for x in _layouts(plan.counts[steps]))
        number = number + plan._before(steps)[which, source]
        units = np.empty(flat.size, np.int64)
        before = plan._before(np.array([0, plan.total_steps]))
        number += self._number * (before[1] - before[0])[source]
        for s in np.unique(source).tolist():
            at = np.flatnonzero(source == s)
            pass_of, place = np.divmod(number[at], [*plan.sizes.values()][s])
            for p in np.unique(pass_of).tolist():
                mine = pass_of == p
                units[at[mine]] = plan._first[s] + self._pass(s, p)[place[mine]]
        return units.reshape(places.shape)


class Records(Sequence):
    """The records of files of `ordering.blocks`, one file after the other."""

    def __init__(self, files: Sequence[blocks.Source]):
        self._files, self._first = files, np.cumsum([0, *map(len, files)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, i: int) -> PyTree:
        file = int(np.searchsorted(self._first, i, side="right")) - 1
        record = i - int(self._first[file])
        records = self._files[file].read(record, record + 1)
        return records[0] if isinstance(records, list) else jax.tree.map(lambda x: x[0], records)


def _records(data: Any) -> Any:
    """The data, as `Records` if it is files."""
    is_files = isinstance(data, list | tuple) and data and isinstance(data[0], blocks.Source)
    return Records(data) if is_files else data


class Joined(Source):
    """The examples of several sources, one source after the other."""

    def __init__(self, parts: list[Source], names: list[str], first: np.ndarray):
        super().__init__(None, int(first[-1]))
        self._parts, self._names, self._first = parts, names, first
        trees = [jax.tree.map(lambda x: (x.dtype, x.shape[1:]), part[:1]) for part in parts]
        # A tuple equals a NamedTuple of the same values.
        kinds = [(tree, jax.tree.structure(tree)) for tree in trees]
        for name, kind in zip(names, kinds, strict=True):
            if kind != kinds[0]:
                raise ValueError(
                    f"the examples of {name} are {kind[0]}, and those of {names[0]} {trees[0]}: "
                    "give all sources examples of one structure, type and shape."
                )

    def __getitem__(self, indices: Int[ArrayLike, "n"] | slice) -> PyTree[np.ndarray]:
        if isinstance(indices, slice):
            indices = np.arange(*indices.indices(len(self)))
        indices = np.asarray(check_indices(indices, len(self)))
        source = np.searchsorted(self._first, indices, side="right") - 1
        of_all = [
            self._parts[s][indices[source == s] - self._first[s]]
            for s in np.unique(source).tolist() or [0]
        ]
        back = np.argsort(np.argsort(source, kind="stable"))
        return jax.tree.map(lambda *parts: _concatenated(parts)[back], *of_all)

    def example(self, i: int) -> PyTree:
        """Example i, unchanged."""
        s = int(np.searchsorted(self._first, i, side="right")) - 1
        return self._parts[s].example(int(i - self._first[s]))

    def __reduce__(self):
        return Joined, (self._parts, self._names, self._first)


def _concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
    if len(shapes := {x.shape[1:] for x in parts}) > 1:
        raise ValueError(
            f"examples of a batch have the shapes {sorted(shapes)}: pad or cut them in the source."
        )
    return np.concatenate(parts)


def _check_sizes(sizes: Any) -> list[str]:
    """The names; raises ValueError unless it is {name: whole number of at least 1}."""
    if not isinstance(sizes, Mapping) or not sizes or {*map(type, sizes)} != {str}:
        raise ValueError(f"sizes is {sizes!r:.200}: pass {{name: number of examples}}.")
    for name, size in sizes.items():
        plans.check_whole(f"sizes[{name}]", size, 1, MOST)
    if (total := sum(map(int, sizes.values()))) > MOST:
        raise ValueError(f"sizes add up to {total}: at most {MOST} examples can be numbered.")
    return [*sizes]


def _check_names(called: str, given: Any, sizes: Mapping) -> None:
    if not isinstance(given, Mapping) or {*given} != {*sizes}:
        names = [*given] if isinstance(given, Mapping) else f"{given!r:.100}"
        raise ValueError(
            f"{called} is for {names}: pass one value for each name of sizes, {[*sizes]}."
        )


def _mean_length(name: str, tokens: Any, size: int) -> float:
    """l, from a number or the lengths of all examples."""
    values, kind = plans.as_array(tokens)
    real = values.dtype.kind in "iuf" and values.shape in ((), (size,))
    mean = float(values.mean()) if real else np.nan
    if not 0 < mean < np.inf:
        raise ValueError(
            f"tokens[{name}] is {kind}: pass the mean tokens of an example, above 0, or the "
            f"lengths of its {size} examples."
        )
    return mean


def _check_order(name: str, order: Any, size: int) -> Ordering:
    """An order of one source; raises ValueError for one that does not fit."""
    base.check_order(order)
    if isinstance(order, Mixture) or order.epoch_units is None:
        raise ValueError(
            f"orders[{name}] is a {type(order).__name__}, whose epochs follow from each other: "
            "pass counted, random_reshuffling or scored."
        )
    if order.num_units != size:
        raise ValueError(
            f"orders[{name}] has {order.num_units} units, and its source {size} examples: pass an "
            f"order of one worker for all of them, as ordering.random_reshuffling({size})."
        )
    return order
