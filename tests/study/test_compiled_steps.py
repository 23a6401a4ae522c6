"""What the compiled steps hold: collectives, conditionals, copies, bytes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
import models
from experiments.study.compile import collectives_of
from experiments.study.tables import ORDERS, SYNC_RULES
from experiments.tasks import Recipe, Task
from experiments.training import program
from local_opt.workers import worker_mesh
from tests.compiled_runs import conditionals, donated, operations, types_of
from tests.problems import NESTEROV, PLAN, SGD, copies, on_mesh

pytestmark = pytest.mark.usefixtures("optimised")  # what users compile

# What the compiled modules hold. Eight workers; the parameters are 24 numbers of two types.

TREE = {"w": jnp.ones((5, 3)), "b": jnp.zeros(9, jnp.bfloat16)}


def linear_step(opt, **options):
    """Parameters and state first: to be donated. The gradient belongs to this worker."""

    def step(params, state, scale):
        grads = jax.tree.map(lambda p: (scale * jnp.cos(p)).astype(p.dtype), params)
        updates, state = opt.update(grads, state, params, **options)
        return optax.apply_updates(params, updates), state

    return step


SCALES = jnp.arange(8.0)


def bytes_of(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compiled(opt, **options):
    """(compiled step, what it is called with), over eight devices, all but scales donated."""
    params = copies(TREE, 8)
    args = params, jax.eval_shape(on_mesh(opt.init, 8), params), SCALES
    function = on_mesh(linear_step(opt, **options), 8)
    return jax.jit(function, donate_argnums=(0, 1)).lower(*args).compile(), args


def compiled_sync(rounds):
    params = copies(TREE, 8)
    state = jax.eval_shape(on_mesh(rounds.init, 8), params)
    return jax.jit(on_mesh(rounds.sync, 8), donate_argnums=(0, 1)).lower(params, state).compile()


def test_the_hot_step_talks_to_nobody_and_copies_nothing():
    rounds = local_opt.local_rounds(
        optax.adamw(0.1),
        axis_name="worker",
        outer=NESTEROV,
        opt_state={"mu": "mean"},
    )
    planned = local_opt.local_steps(optax.adamw(0.1), PLAN, axis_name="worker")
    for opt, options in ((rounds, {}), (planned, {"sync": False})):
        module, (params, state, _) = compiled(opt, **options)
        assert operations(module.as_text()) == []
        own = bytes_of((params, state)) // 8  # on each device
        assert module.memory_analysis().alias_size_in_bytes == own
        assert donated(module.as_text()) == len(jax.tree.leaves((params, state)))


@pytest.mark.parametrize("opt_state", ["local", "mean"])
def test_a_sync_is_one_all_reduce(opt_state):
    rounds = local_opt.local_rounds(SGD, axis_name="worker", opt_state=opt_state)
    assert operations(compiled_sync(rounds).as_text()) == ["all-reduce"]


@pytest.mark.parametrize("make", [local_opt.control_variates, lambda: local_opt.proximal(0.1)])
def test_a_correction_of_drift_adds_no_collective_and_no_bytes(make):
    rounds = local_opt.local_rounds(SGD, axis_name="worker", correction=make())
    module, (params, state, _) = compiled(rounds)
    assert operations(module.as_text()) == []
    assert module.memory_analysis().alias_size_in_bytes == bytes_of((params, state)) // 8
    plain = local_opt.local_rounds(SGD, axis_name="worker")
    for each in (rounds, plain):
        (sync,) = collectives_of(compiled_sync(each).as_text())
        assert (sync.kind, sync.bytes, types_of(sync)) == ("all-reduce", 4 * 24, {"f32"})


def test_the_only_collective_of_a_planned_step_is_in_a_branch():
    plan = local_opt.constant(2, total_steps=8)
    opt = local_opt.local_steps(SGD, plan, axis_name="worker", opt_state="mean")
    module, (params, state, scales) = compiled(opt)
    (reduction,), (conditional,) = (f(module.as_text()) for f in (collectives_of, conditionals))
    branches = re.search(r"branch_computations=\{(.*?)\}|true_computation=(.*)", conditional)[0]
    assert reduction.kind == "all-reduce" and re.search(rf"%{reduction.where}\b", branches)
    assert module.memory_analysis().alias_size_in_bytes == bytes_of((params, state)) // 8
    step = jax.jit(on_mesh(linear_step(opt), 8))
    params, state = jax.jit(on_mesh(lambda p: (p, opt.init(p)), 8))(copies(TREE, 8))
    for _ in range(3):  # over a sync
        params, state = step(params, state, scales)
    assert step._cache_size() == 1
    assert state.round.tolist() == [1] * 8 and state.step.tolist() == [3] * 8


@pytest.mark.parametrize("name", [None, *local_opt.WIRES])
def test_a_sync_sends_the_bytes_of_the_forecast(name):
    """To the byte: eight workers, 24 numbers; half a float32 for bfloat16 but for whole rows."""
    wire = local_opt.WIRES.get(name)
    rounds = local_opt.local_rounds(SGD, axis_name="worker", wire=wire)
    total, kinds, names = 0, set(), []
    for one in collectives_of(compiled_sync(rounds).as_text()):
        # Of what a worker holds of all, an eighth is its own; an all-reduce does both halves.
        total += (2 if one.kind == "all-reduce" else 1) * one.bytes * 7 / 8
        kinds |= types_of(one)
        names.append(one.kind)
    if wire is None:
        assert (kinds, names) == ({"f32"}, ["all-reduce"])
    else:
        assert kinds == {"u16" if wire.dtype == jnp.uint16 else "u8"}
        assert names == (["all-gather"] if wire.gathers else ["all-to-all", "all-gather"])
    assert total == local_opt.sync_bytes(24, num_workers=8, wire=wire)


def test_only_the_start_of_a_fragment_talks_and_of_nothing_but_it():
    stream = local_opt.streaming_rounds(
        SGD,
        axis_name="worker",
        fragments={"b": 0, "w": 1},
        outer=NESTEROV,
    )
    params = copies(TREE, 8)
    state = jax.eval_shape(on_mesh(stream.init, 8), params)
    for fragment, size in ((0, 9), (1, 15)):

        def start(params, state, fragment=fragment):
            return stream.start(params, state, fragment=fragment)

        def finish(params, state, fragment=fragment):
            return stream.finish(params, state, fragment=fragment)

        text = jax.jit(on_mesh(start, 8)).lower(params, state).compile().as_text()
        (one,) = collectives_of(text)
        assert (one.kind, one.bytes, types_of(one)) == ("all-reduce", 4 * size, {"f32"})
        text = jax.jit(on_mesh(finish, 8)).lower(params, state).compile().as_text()
        assert operations(text) == []
    assert operations(compiled(stream)[0].as_text()) == []


# The loop's programs: four workers on a mesh, 14 parameters. A step is the body of a loop.

DATA = {"x": np.ones((48, 6), np.float32), "y": np.zeros(48, np.int32)}
RECIPE = Recipe(workers=4, units_per_step=1, unit_size=1, learning_rates=(0.1,), epochs=3)


def compiled_parts(order, sync, units_per_step):
    """(compiled steps of a segment, compiled sync or None); they give all their state away."""
    recipe = RECIPE._replace(units_per_step=units_per_step)
    model = models.softmax_regression(num_features=6, num_classes=2)
    task = Task("ones", model, DATA, DATA, recipe)
    row, rounds = ORDERS[order], SYNC_RULES[sync].rounds
    built = program.build(task, recipe, row, rounds, mesh=worker_mesh(4))
    state, zero, rates = built.init(0), np.int32(0), np.zeros(4, np.float32)
    steps = built.steps(True, units_per_step)
    steps = steps.lower(state, built.data, zero, zero, zero, rates).compile()
    assert donated(steps.as_text()) == len(jax.tree.leaves(state))
    assert not any("main" in one.where for one in collectives_of(steps.as_text()))
    if built.sync_in_step:
        return steps.as_text(), None
    return steps.as_text(), built.ends(True, False).lower(state, np.float32(0)).compile().as_text()


MEAN, PAIRS = ["all-reduce"], ["all-reduce", "all-to-all"]  # of gradients; and products of pairs
LOOPS = [  # order, rule, units per step, what a step sends, and what a sync does
    ("rr", "parallel", 2, MEAN, None),
    ("id_pair", "parallel", 2, MEAN, None),
    ("rr", "qsr", 2, [], MEAN),
    ("id_pair", "accumulate", 2, [], MEAN),
    # Coordination moves the differences of pairs beside other means,
    ("cd_grab", "parallel", 2, PAIRS, None),
    ("cd_grab", "qsr", 1, PAIRS, MEAN),
    ("cd_grab", "qsr", 2, PAIRS, MEAN),
    # but of sketches they wait, and ride with the sync.
    ("cd_grab+sketch1024", "qsr", 2, [], ["all-gather", "all-reduce"]),
    ("cd_grab+sketch1024", "accumulate", 2, [], ["all-gather", "all-reduce"]),
]


@pytest.mark.parametrize("order,sync,units_per_step,step,end", LOOPS)
def test_workers_in_local_rounds_meet_at_their_end_and_parallel_ones_in_a_step(
    order, sync, units_per_step, step, end
):
    found, at_end = compiled_parts(order, sync, units_per_step)
    assert sorted(operations(found)) == step
    assert (None if at_end is None else sorted(operations(at_end))) == end


def test_with_one_unit_per_step_coordination_moves_what_an_all_reduce_does():
    """An all-to-all and an all-gather of D entries are the two halves of a ring all-reduce."""
    found = collectives_of(compiled_parts("cd_grab", "parallel", 1)[0])
    padded = 16  # 6 x 2 weights and 2 biases, padded to a multiple of 4 workers
    assert sorted((one.kind, one.bytes) for one in found) == [
        ("all-gather", 4 * padded),
        ("all-reduce", 4 * 4 * 5),  # all inner products at once, W (W + 1)
        ("all-to-all", 4 * padded),
    ]


def test_gathered_coordination_sends_the_numbers_of_its_pairs_and_nothing_else():
    """14 parameters stand for themselves: a pair is 14 numbers, of four workers."""
    for units_per_step, pairs in ((1, 1), (4, 2)):
        steps, _ = compiled_parts("cd_grab+sketch1024", "parallel", units_per_step)
        gather, mean = sorted(collectives_of(steps))
        assert (gather.kind, mean.kind) == ("all-gather", "all-reduce")
        assert (gather.bytes, types_of(gather)) == (4 * 4 * pairs * 14, {"f32"})
