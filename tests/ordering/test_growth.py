"""What a step of an order takes does not grow with its units, nor a program with the workers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import local_opt
import ordering

PER_STEP, NUMBERS = 8, 16
ORDERS = {
    "random_reshuffling": lambda m: ordering.random_reshuffling(m),
    "block_reshuffling": lambda m: ordering.baselines.block_reshuffling(m, block_size=PER_STEP),
    "pair_balance": lambda m: ordering.pair_balance(m, units_per_step=PER_STEP),
    "grab": lambda m: ordering.grab(m, units_per_step=PER_STEP),
    "cd_grab": lambda m: ordering.cd_grab(m, units_per_step=PER_STEP),
    "cd_grab, at syncs": lambda m: ordering.cd_grab(m, units_per_step=PER_STEP, gathers="sync"),
    "global": lambda m: ordering.global_order(
        ordering.cd_grab(m, units_per_step=PER_STEP, gathers="step"), m
    ),
}


def observed(name, units, workers):
    """(bytes of the state, the compiled step) of an order of so many units of each worker."""
    order = ORDERS[name](units)

    def init(key):
        return order.init(key, jnp.zeros(NUMBERS))

    def observe(state, rows):
        return order.observe(state, rows)

    init = local_opt.map_workers(init, workers, in_specs="key", out_specs="worker")
    observe = local_opt.map_workers(
        observe, workers, in_specs=("worker", "batch"), out_specs="worker"
    )
    state = jax.eval_shape(init, jax.random.key(0))
    rows = jax.ShapeDtypeStruct((workers * PER_STEP, NUMBERS), jnp.float32)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return held, jax.jit(observe, donate_argnums=0).lower(state, rows).compile()


@pytest.mark.parametrize("name", ORDERS)
def test_a_step_is_taken_in_place_and_needs_the_same_for_any_number_of_units(name):
    temporary = []
    for units in (1000, 100_000):
        held, program = observed(name, units, 2)
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == held  # the donated state, all of it
        temporary.append(memory.temp_size_in_bytes)
    assert max(temporary) < 10_000 and temporary[1] - temporary[0] < 200


@pytest.mark.parametrize("name", ["pair_balance", "cd_grab", "cd_grab, at syncs"])
def test_a_program_does_not_grow_with_the_workers(name):
    few, many = (len(observed(name, 64, workers)[1].as_text()) for workers in (8, 256))
    assert many < 1.1 * few


def test_the_order_of_many_units_is_read_without_a_sort(monkeypatch):
    order = np.random.default_rng(0).permutation(10_000)
    monkeypatch.setattr(np, "sort", None)
    indices, _ = ordering.data.step_indices(order, units_per_step=64)
    assert indices.tolist() == order.tolist()
