"""Collectives, conditionals, copies and bytes of the library's compiled steps and syncs.

Eight workers; the parameters are 24 numbers of two types.
"""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from benchmarks.hlo import collectives_of
from experiments.distributed.devices import worker_mesh, worker_sharding
from local_opt import exchange
from tests.compiled_runs import conditionals, donated, operations, types_of
from tests.problems import COMPRESSORS, NESTEROV, PLAN, SGD, copies, on_mesh

pytestmark = pytest.mark.usefixtures("optimised")  # what users compile

TREE = {"w": jnp.ones((5, 3)), "b": jnp.zeros(9, jnp.bfloat16)}
SCALES = jnp.arange(8.0)


def rounds_of(opt=SGD, **options):
    return local_opt.local_rounds(opt, axis_name="worker", **options)


STREAM = local_opt.streaming.streaming_rounds(
    SGD, axis_name="worker", fragments={"b": 0, "w": 1}, outer=NESTEROV
)
HOT = {
    "an outer step, a mean moment": (
        rounds_of(optax.adamw(0.1), outer=NESTEROV, sync_opt_state=dict(mu="mean", nu="mean")),
        {},
    ),
    "planned": (local_opt.local_steps(optax.adamw(0.1), PLAN, axis_name="worker"), {"sync": False}),
    "control variates": (rounds_of(correction=local_opt.corrections.scaffold()), {}),
    "proximal": (rounds_of(correction=local_opt.corrections.fedprox(0.1)), {}),
    "streaming": (STREAM, {}),
}
SYNCS = {
    "plain": {},
    "mean": {"sync_opt_state": "mean"},
    "control variates": {"correction": local_opt.corrections.scaffold()},
    "proximal": {"correction": local_opt.corrections.fedprox(0.1)},
    "outer": {"outer": NESTEROV},
    **{name: {"compress": compressor} for name, compressor in COMPRESSORS.items()},
}
NARROW = [(name, "bfloat16") for name in ("plain", "int8")]  # sent as wide ones


def linear_step(opt, **options):
    """Parameters and state come first, to be donated; the gradient is this worker's."""

    def step(params, state, scale):
        grads = jax.tree.map(lambda p: (scale * jnp.cos(p)).astype(p.dtype), params)
        updates, state = opt.update(grads, state, params, **options)
        return optax.apply_updates(params, updates), state

    return step


def started(opt, kind="float32"):
    """Parameters and the shapes of a state, of eight workers."""
    params = jax.tree.map(lambda x: x.astype(kind), copies(TREE, 8))
    return params, jax.eval_shape(on_mesh(opt.init, 8), params)


def compiled(function, *args):
    """Over eight devices; everything but the scales is donated."""
    return jax.jit(on_mesh(function, 8), donate_argnums=(0, 1)).lower(*args).compile()


def check_donated(module, held):
    """No copies of the state, of which each device holds an eighth."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))
    assert module.memory_analysis().alias_size_in_bytes == size // 8
    assert donated(module.as_text()) == len(jax.tree.leaves(held))


@pytest.mark.parametrize("name", HOT)
def test_a_step_without_a_sync_has_no_collective_and_no_copy(name):
    opt, options = HOT[name]
    held = started(opt)
    module = compiled(linear_step(opt, **options), *held, SCALES)
    assert operations(module.as_text()) == []
    check_donated(module, held)


@pytest.mark.parametrize("name,kind", [*((n, "float32") for n in SYNCS), *NARROW])
def test_a_sync_sends_the_bytes_of_the_forecast(name, kind):
    """To the byte. Control variates add the bits of a rate, and compressors send whole rows."""
    rounds, compressor = rounds_of(**SYNCS[name]), SYNCS[name].get("compress")
    text = compiled(rounds.sync, *started(rounds, kind)).as_text()
    collectives = collectives_of(text)
    if name == "control variates":  # whose workers took different numbers of steps in a branch
        (conditional,) = conditionals(text)
        collectives = [one for one in collectives if one.where not in conditional]
    types = set.union(*map(types_of, collectives))
    if compressor is None:
        assert ([one.kind for one in collectives], types) == (["all-reduce"], {"f32"})
    else:
        kinds = ["all-gather"] if compressor.gathers else ["all-to-all", "all-gather"]
        assert [one.kind for one in collectives] == kinds
        assert types == {"u16" if compressor.dtype == jnp.uint16 else "u8"}
    # An eighth of what a worker gathers is its own; an all-reduce does both halves.
    total = sum((2 if one.kind == "all-reduce" else 1) * one.bytes * 7 / 8 for one in collectives)
    numbers = 24 * (2 if name == "mean" else 1) + (33 if name == "control variates" else 0)
    assert total == local_opt.costs.sync_bytes(numbers, num_workers=8, compress=compressor)


def test_the_only_collective_of_a_planned_step_is_in_a_branch():
    plan = local_opt.constant(2, total_steps=8)
    opt = local_opt.local_steps(SGD, plan, axis_name="worker", sync_opt_state="mean")
    held = started(opt)
    module = compiled(linear_step(opt), *held, SCALES)
    (reduction,), (conditional,) = (f(module.as_text()) for f in (collectives_of, conditionals))
    branches = re.search(r"branch_computations=\{(.*?)\}|true_computation=(.*)", conditional)[0]
    assert reduction.kind == "all-reduce" and re.search(rf"%{reduction.where}\b", branches)
    check_donated(module, held)
    step = jax.jit(on_mesh(linear_step(opt), 8))
    params, state = jax.jit(on_mesh(lambda p: (p, opt.init(p)), 8))(copies(TREE, 8))
    for _ in range(3):  # over a sync
        params, state = step(params, state, SCALES)
    assert step._cache_size() == 1
    assert state.num_syncs.tolist() == [1] * 8 and state.num_steps.tolist() == [3] * 8


@pytest.mark.parametrize("fragment,size", [(0, 9), (1, 15)])
def test_only_the_start_of_a_fragment_communicates_and_only_that_fragment(fragment, size):
    def start(params, state):
        return STREAM.start(params, state, fragment=fragment)

    def finish(params, state):
        return STREAM.finish(params, state, fragment=fragment)

    (one,) = collectives_of(compiled(start, *started(STREAM)).as_text())
    assert (one.kind, one.bytes, types_of(one)) == ("all-reduce", 4 * size, {"f32"})
    assert operations(compiled(finish, *started(STREAM)).as_text()) == []


def test_a_compressor_takes_memory_for_a_group_and_sends_the_bytes_of_all(monkeypatch):
    """Four workers with 2^22 numbers, in one group and in eight."""
    mesh = worker_mesh(4)
    compressor, results = local_opt.quantize("int8"), []
    rounds = local_opt.local_rounds(optax.sgd(0.1), compress=compressor)
    params = {f"w{i}": jax.ShapeDtypeStruct((256, 1024), np.float32) for i in range(16)}
    place = worker_sharding(mesh)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype, sharding=place),
        (params, jax.eval_shape(rounds.init, params)),
    )
    for group in (2**22, 2**19):
        monkeypatch.setattr(exchange, "GROUP", group)
        monkeypatch.setattr(exchange, "GROUPS", 2**30)
        sync = local_opt.map_workers(rounds.sync, mesh, in_specs="worker", out_specs="worker")
        results.append(jax.jit(sync, donate_argnums=(0, 1)).lower(*args).compile())
    sent = local_opt.costs.sync_bytes(2**22, num_workers=4, compress=compressor)
    sent *= 4 / 3
    collectives = [collectives_of(one.as_text()) for one in results]
    assert [sum(c.bytes for c in each) for each in collectives] == [sent, sent]
    assert [len(each) for each in collectives] == [2, 16]
    whole, grouped = (one.memory_analysis().temp_size_in_bytes for one in results)
    assert grouped < 0.8 * whole


def test_collectives_of_a_step_are_counted():
    mesh = worker_mesh(4)
    around = [(w, (w + 1) % 4) for w in range(4)]

    def step(x):
        x = jnp.sin(jax.lax.pmean(x, "worker"))  # each after the other, so that none are combined
        x = jnp.sin(jax.lax.pmean(x, "worker"))
        x = jax.lax.all_gather(jax.lax.ppermute(x, "worker", around), "worker").sum(0)
        return jax.lax.cond(x.sum() > 0, lambda x: jax.lax.pmax(x, "worker"), jnp.sin, x)

    def over_workers(step):
        return local_opt.map_workers(step, mesh, in_specs="worker", out_specs="worker")

    def count(step):
        result = local_opt.costs.count_collectives(over_workers(step), rows)
        compiled = jax.jit(over_workers(step)).lower(rows).compile().as_text()
        assert result == collections.Counter(one.kind for one in collectives_of(compiled))
        return result

    rows = local_opt.replicate(jnp.ones(3), mesh)
    assert count(step) == {"all-reduce": 3, "all-gather": 1, "collective-permute": 1}
    assert count(jnp.sin) == {}
    simulated = local_opt.map_workers(step, 4, in_specs="worker", out_specs="worker")
    assert local_opt.costs.count_collectives(jax.jit(simulated), jnp.ones((4, 3))) == {}
    rounds = local_opt.local_rounds(optax.sgd(0.1))
    assert count(lambda x: rounds.update(x, rounds.init(x), x)[0]) == {}
    assert count(lambda x: rounds.sync(x, rounds.init(x))[0]) == {"all-reduce": 1}
    with pytest.raises(ValueError, match=r"step is .*: pass a function of \(args.0.\)"):
        local_opt.costs.count_collectives(lambda: 0, rows)
