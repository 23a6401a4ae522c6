"""A run stops by one order and goes on by another: every unit once per epoch, or a refusal.

Longer: SYNCOPATE_CASES=20 pytest -m "slow or not slow" tests/ordering/test_states_of_others.py
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.data import LoadError, read_epochs
from tests.cases import times

KEY, EPOCHS = jax.random.key(0), 2
BASELINES = ordering.baselines
STORED = {
    "cd_grab": ordering.cd_grab,
    "cd_grab, at syncs": functools.partial(ordering.cd_grab, gathers="sync"),
    "global_order": lambda m, **how: ordering.global_order(ordering.cd_grab(m, **how), m),
    "global_reshuffling": ordering.global_reshuffling,
    "grab": ordering.grab,
    "pair_balance": ordering.pair_balance,
    "walk": functools.partial(ordering.pair_balance, rule=BASELINES.self_balancing_walk(bound=9.0)),
    "walk, farther": functools.partial(
        ordering.pair_balance, rule=BASELINES.self_balancing_walk(bound=99.0)
    ),
    "random_reshuffling": ordering.random_reshuffling,
    "shuffle_once": BASELINES.shuffle_once,
    "unzip": BASELINES.unzip,
    "blocks of 2": functools.partial(BASELINES.block_reshuffling, block_size=2),
    "blocks of 3": functools.partial(BASELINES.block_reshuffling, block_size=3),
    "greedy_herding": BASELINES.greedy_herding,
    "sorted": lambda m, **how: ordering.scored(np.arange(m) % 7, **how),
    "sorted otherwise": lambda m, **how: ordering.scored(np.arange(m) % 5, **how),
    "zigzag": lambda m, **how: ordering.scored(np.arange(m) % 7, pattern="zigzag", **how),
}
GROUPS = {
    "counted": {},
    "together": {"groups": "together", "group_size": 2},
    "together, by 3": {"groups": "together", "group_size": 3},
    "spread": {"groups": "spread", "group_size": 2},
}


@dataclasses.dataclass(frozen=True)
class Given:
    """What reads a run: an order or a plan, and how many workers with how many units."""

    kind: str
    total: int  # units of all workers' epoch
    workers: int | None
    step: int  # units of a worker's step
    unit_size: int = 1
    weight: float = 1.0  # of one source of a plan
    read: int = 0  # examples of each source before the plan

    @functools.cached_property
    def plan(self) -> Any:
        batch = (self.workers or 1) * self.step
        return ordering.mixture(
            {"a": 10, "b": 14},
            weights={"a": self.weight, "b": 1},
            batch_size=batch,
            total_steps=max(1, self.total // batch),
            examples_read={"a": self.read, "b": self.read},
        )

    @functools.cached_property
    def order(self) -> Any:
        if self.kind == "mixture":
            return self.plan.order(workers=self.workers or 1)
        if self.kind in GROUPS:
            return ordering.counted(self.total, units_per_step=self.step, **GROUPS[self.kind])
        return STORED[self.kind](self.total // (self.workers or 1), units_per_step=self.step)

    @functools.cached_property
    def source(self) -> np.ndarray:
        units = 24 if self.kind == "mixture" else self.total
        return np.arange(units * self.unit_size)

    def run(self, state: Any = None, stop: int | None = None) -> tuple[list[list[int]], Any]:
        """(examples of every step, the state then)."""
        options = {"like": jnp.zeros(3), "workers": self.workers, "num_epochs": EPOCHS}
        options |= {"unit_size": self.unit_size, "state": state}
        with read_epochs(self.source, self.order, KEY, **options) as reads:
            batches = []
            while len(batches) != stop and (batch := next(reads, None)) is not None:
                batches.append(np.ravel(batch).tolist())
                rows = batch.reshape(*batch.shape[: reads.unit_axis], -1, self.unit_size)[..., :1]
                vectors = np.arange(1.0, 4.0, dtype=np.float32).reshape(
                    (1,) * (rows.ndim - 1) + (3,)
                )
                reads.observe(jnp.sin(rows * vectors))
            return batches, reads.state()


def draw_given(draw: np.random.Generator) -> Given:
    kind = draw.choice(["mixture", *GROUPS, *STORED])
    workers = draw.choice([None, 1, 2, 3, 4])
    if "global" in kind or "cd_grab" in kind:
        workers = workers or 2
    if kind.startswith(("sorted", "zigzag")):
        workers = None  # of one worker
    return Given(
        str(kind),
        total=int(draw.choice([12, 24, 24, 24, 36])),
        workers=workers and int(workers),
        step=int(draw.choice([1, 2, 3, 3, 4])),
        unit_size=int(draw.choice([1, 1, 1, 2])),
        weight=float(draw.choice([1.0, 3.0])),
        read=int(draw.choice([0, 0, 5])),
    )


def neighbour(one: Given, draw: np.random.Generator) -> Given:
    """Another one in a single argument that matters, or in all."""
    names = ["all", "kind", "total", "workers", "step", "unit_size"]
    names += ["weight", "read"] * (one.kind == "mixture")
    name, other = draw.choice(names), one
    while other == one:
        other = draw_given(draw)
        if name != "all":
            other = dataclasses.replace(one, **{name: getattr(other, name)})
    return other


def check_reads(one: Given, other: Given, seen: list, rest: list) -> None:
    """Asserts that a run of both reads what it must."""
    every = [*seen, *rest]
    if {one.kind, other.kind} & {"mixture"}:
        assert every == other.run()[0], "the decisions of the plan"
        return
    size = other.total * other.unit_size
    counts = collections.Counter(i for batch in every for i in batch)
    assert max(counts.values()) <= EPOCHS and set(counts) <= set(range(size)), counts
    # An epoch of a computed order leaves out fewer units than there are workers.
    most = max(one.workers or 1, other.workers or 1) - 1 if other.order.computed else 0
    assert EPOCHS * size - sum(counts.values()) <= EPOCHS * most * other.unit_size, counts


@functools.cache
def whole_run(one: Given) -> list:
    return one.run()[0]


def check_pair(seed: int) -> str:
    """How a run that is stopped by A goes on by B; raises AssertionError if it reads wrongly."""
    draw = np.random.default_rng(seed)
    try:
        one = draw_given(draw)
        other = one if draw.random() < 0.1 else neighbour(one, draw)
        whole, _ = one.order and whole_run(one), other.order
    except ValueError as error:  # sizes that do not fit
        assert any(word in str(error) for word in ("units_per_step", "divide", "workers")), error
        return "no order"
    stop = int(draw.integers(0, len(whole) + 1))
    seen, state = one.run(stop=stop)
    assert seen == whole[:stop]
    state = draw.choice([0, 1]) and jax.tree.map(np.asarray, state) or state
    try:
        rest, _ = other.run(state)
    except ValueError as error:
        assert one != other, f"the same order is refused: {error}"
        assert any(word in str(error) for word in ("state", "units", "source", "workers")), error
        return "refused"
    if one == other:
        assert seen + rest == whole
        return "the same"
    check_reads(one, other, seen, rest)
    return "goes on"


def check_pairs(seeds: range) -> collections.Counter:
    outcomes = collections.Counter()
    for seed in seeds:
        try:
            outcomes[check_pair(seed)] += 1
        except (AssertionError, LoadError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return outcomes


def test_random_pairs_of_orders_read_each_unit_once_or_refuse():
    outcomes = check_pairs(range(30))
    assert outcomes["goes on"] and outcomes["refused"], outcomes


@pytest.mark.slow
def test_three_hundred_random_pairs_of_orders_read_each_unit_once_or_refuse():
    outcomes = check_pairs(range(30, 30 + times(300)))
    assert min(outcomes["goes on"], outcomes["refused"], outcomes["the same"]) > 9, outcomes
