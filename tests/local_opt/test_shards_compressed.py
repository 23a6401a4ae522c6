"""Compressors of workers that are several devices carry shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import local_opt
from tests.cases import mostly_slow
from tests.compiled_runs import lines_of
from tests.problems import COMPRESSORS, assert_bitwise_equal, assert_workers_bitwise_equal, copies
from tests.shards import (
    SGD,
    SPECS,
    WAYS,
    assert_in_their_places,
    mesh_of,
    network,
    on_one_device,
    per_worker,
    placed,
    rounds_of,
    state_specs,
)


def a_sync(way, compressor, specs=SPECS):
    """(parameters, state) of workers that differ, before and after two syncs."""
    rounds = rounds_of(specs, compress=compressor)
    state = state_specs(rounds)

    def twice(params, state, moved):
        for _ in range(2):
            params = jax.tree.map(jnp.add, params, moved)
            params, state = rounds.sync(params, state)
        return params, state

    over, _ = way
    init = over(lambda p: rounds.init(p), (SPECS,), state)
    return init, over(twice, (SPECS, state, SPECS), (SPECS, state))


def moves(workers):
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda x: rng.normal(size=(workers, *x.shape)).astype(np.float32), network()
    )


def part_of(tree, specs, device, model):
    """What a device of a worker holds, of arrays with a worker axis."""

    def cut(x, spec):
        if "model" not in spec:
            return x
        return jnp.split(x, model, axis=1 + spec.index("model"))[device]

    return jax.tree.map(lambda spec, x: cut(x, tuple(spec)), specs, tree)


SENT = [("int4", 2, "compiler"), ("top_k", 4, "by hand")]


@pytest.mark.parametrize("name,workers,way", mostly_slow(SENT, quick=SENT[:1]))
def test_a_compressor_sends_shards_as_it_sends_whole_arrays(name, workers, way):
    """Every device's sync is bitwise that of its shards alone, and of the whole leaves alone."""
    compressor, mesh = COMPRESSORS[name], mesh_of(workers)
    init, twice = a_sync(WAYS[way](workers), compressor)
    params = placed(copies(network(), workers), SPECS, mesh)
    moved = placed(moves(workers), SPECS, mesh)
    actual, state = twice(params, init(params), moved)
    for tree in (actual, state.residual, state.anchor):
        if tree != ():
            assert_in_their_places(tree, per_worker(SPECS))
    init, twice = a_sync(on_one_device(workers), compressor, specs=None)
    for device in range(mesh.shape["model"]):
        for names in (["b1", "w1", "w2"], ["b2"]):
            specs = {n: SPECS[n] for n in names}
            of = lambda tree, specs=specs, device=device: part_of(  # noqa: E731
                {n: tree[n] for n in specs}, specs, device, mesh.shape["model"]
            )
            args = of(copies(network(), workers))
            expected, lost = twice(args, init(args), of(moves(workers)))
            assert_bitwise_equal(of(actual), expected)
            if compressor.feedback:
                assert_bitwise_equal(of(state.residual), lost.residual)
    assert_workers_bitwise_equal(actual)


def test_a_compressor_gathers_over_the_workers_alone(optimised):
    mesh, compressor = mesh_of(2), COMPRESSORS["top_k"]
    init, twice = a_sync(WAYS["compiler"](2), compressor)
    params = placed(copies(network(), 2), SPECS, mesh)
    result = lines_of(twice.lower(params, init(params), params).compile(), mesh)
    assert {axes for name, _, axes in result if name != "all-reduce"} == {"worker"}
    assert {axes for name, _, axes in result if name == "all-reduce"} == {"model"}  # the drift


def test_fragments_are_sent_in_shards():
    """A mean in bfloat16 is within 2^-7 of the largest change of the exact one."""
    stream = local_opt.streaming.streaming_rounds(
        SGD, axis_name="worker", fragments=2, compress=COMPRESSORS["bfloat16"], specs=SPECS
    )

    def fragments(params, moved):
        state = stream.init(params)
        params = jax.tree.map(jnp.add, params, moved)
        for f in range(2):
            state = stream.start(params, state, fragment=f)
            params, state = stream.finish(params, state, fragment=f, last=True)
        return params

    over, _ = WAYS["compiler"](2)
    first, moved = copies(network(), 2), moves(2)
    args = (placed(tree, SPECS, mesh_of(2)) for tree in (first, moved))
    result = over(fragments)(*args)
    assert_workers_bitwise_equal(result)
    assert_in_their_places(result, per_worker(SPECS))
    for name, x in result.items():
        mean = np.asarray(first[name]) + moved[name].mean(axis=0)
        assert np.abs(x - mean).max() <= 2**-7 * np.abs(moved[name]).max()
