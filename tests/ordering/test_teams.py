"""CD-GraB in teams of workers, which sign side by side and share their sums at every gather."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from benchmarks.hlo import collectives_of
from ordering.gathered import WINDOW
from tests import reference, tables
from tests.cases import mostly_slow
from tests.problems import on_mesh

WORKERS = 8


def made(num_units, units_per_step, gathers, **options):
    return ordering.cd_grab(num_units, units_per_step=units_per_step, gathers=gathers, **options)


def gradients_of(num_units, seed=0):
    """No whole numbers: a mean of sums rounds, so that ties would not be real ones."""
    drawn = np.random.default_rng(seed).normal(size=(WORKERS, num_units, 5))
    return drawn.astype(np.float32)


def gathers_of(gathers, num_units, units_per_step):
    """After how many pairs of each worker there is a gather."""
    pairs = num_units // 2
    if gathers == "sync":  # there is none before the epoch ends
        return {*range(WINDOW, pairs, WINDOW), pairs}
    return {min(stop, num_units) // 2 for _, stop in tables.steps(num_units, units_per_step)}


CASES = [
    (9, 4, "step", 1),
    (10, 3, "step", 2),
    (7, 1, "step", 4),
    (9, 4, "step", WORKERS),
    (9, 4, "sync", WORKERS),
    (9, 4, "sync", 2),
    (75, 7, "sync", 1),
    (75, 7, "sync", 4),
]
RULES = [("sync", "greedy"), ("step", "self_balancing_walk"), ("sync", "kernel_halving")]


@pytest.mark.parametrize(
    "num_units,units_per_step,gathers,team_size", mostly_slow(CASES, quick=CASES[1:7:2])
)
def test_teams_equal_the_reference(num_units, units_per_step, gathers, team_size):
    order = made(num_units, units_per_step, gathers, team_size=team_size)
    gradients = gradients_of(num_units, seed=num_units)
    actual = tables.run_workers(order, gradients, units_per_step)
    after = gathers_of(gathers, num_units, units_per_step)
    for before, following in zip(actual, actual[1:], strict=False):
        expected = reference.cd_grab_epoch(before, gradients, team_size=team_size, gathers=after)
        np.testing.assert_array_equal(following, expected)


def test_many_pairs_that_waited_are_gathered_in_large_windows(monkeypatch):
    """60 pairs make 5 windows of 12 instead of 30 of 2, with the same orders."""
    order, gradients = made(120, 8, "sync"), gradients_of(120)
    expected = tables.run_workers(order, gradients, 8)
    monkeypatch.setattr("ordering.gathered.WINDOW", 2)
    monkeypatch.setattr("ordering.gathered.GATHERED", 12 * WORKERS * 5)
    sizes, signed = [], ordering.signs.balance_blocks
    monkeypatch.setattr(
        "ordering.signs.balance_blocks",
        lambda rule, state, total, stream, **options: (
            sizes.append(len(stream) // WORKERS) or signed(rule, state, total, stream, **options)
        ),
    )
    actual = tables.run_workers(made(120, 8, "sync"), gradients, 8)
    np.testing.assert_array_equal(actual, expected)
    assert {*sizes} == {2, 12}


@pytest.mark.parametrize("gathers,rule", mostly_slow(RULES, quick=RULES[:1]))
def test_teams_on_a_mesh_equal_simulated_ones(gathers, rule):
    order = made(10, 3, gathers, team_size=2, rule=tables.RULES[rule]())
    gradients = gradients_of(10)
    vmapped = tables.run_workers(order, gradients, 3)
    sharded = tables.run_workers(order, gradients, 3, run=tables.shard_map_workers)
    np.testing.assert_array_equal(vmapped, sharded)


def test_teams_draw_their_own_numbers():
    order = made(8, 4, "step", team_size=2, rule=ordering.baselines.self_balancing_walk())
    keys = jax.random.split(jax.random.key(0), WORKERS)
    state = tables.vmap_workers(lambda key: order.init(key, jnp.zeros(5)))(keys)
    coins = jax.random.key_data(state.rule.key)
    assert len(np.unique(coins, axis=0)) == WORKERS // 2


def test_a_team_gathers_its_own_pairs_alone():
    order, size = made(8, 4, "step", team_size=2), 128

    def init(key):
        return order.init(key, jnp.zeros(size))

    def observe(state, units):
        return order.observe(state, units)

    state = tables.shard_map_workers(init)(jax.random.split(jax.random.key(0), WORKERS))
    run = jax.jit(on_mesh(observe, WORKERS, check_vma=False))
    text = run.lower(state, jnp.zeros((WORKERS, 4, size))).compile().as_text()
    result = sorted((c.kind, c.bytes) for c in collectives_of(text))
    two_pairs_of_two_workers = 4 * 2 * 2 * size
    assert result == [("all-gather", two_pairs_of_two_workers), ("all-reduce", 4 * size)]
