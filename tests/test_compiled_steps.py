"""What the compiled steps hold: collectives, conditionals, copies, bytes."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import local_opt
from experiments.studies.tables import ORDERS, SYNC_RULES
from experiments.tasks import Recipe, Task
from experiments.training import program
from local_opt import runners
from syncopate import models
from tests.problems import PLAN, RATE, SGD, copies, on_mesh

pytestmark = pytest.mark.usefixtures("optimised")  # what users compile

# What the compiled modules hold. Eight workers; the parameters are 24 numbers of two types.

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
TREE = {"w": jnp.ones((5, 3)), "b": jnp.zeros(9, jnp.bfloat16)}


def instructions(text):
    """(operation, computation, line) of the collectives and conditionals of a module."""
    pattern = re.compile(rf" = .*?\b({'|'.join(COLLECTIVES)}|conditional)(-start)?\(")
    found, computation = [], None
    for line in text.splitlines():
        if line and not line[0].isspace() and line.endswith("{"):
            computation = line.removeprefix("ENTRY ").split(" ")[0]
        elif match := pattern.search(line):
            found.append((match[1], computation, line))
    return found


def operations(text):
    return [name for name, _, _ in instructions(text)]


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
        optax.adamw(0.1), axis_name="worker", outer=local_opt.nesterov(), opt_state={"mu": "mean"}
    )
    planned = local_opt.local_steps(optax.adamw(0.1), PLAN, axis_name="worker")
    for opt, options in ((rounds, {}), (planned, {"sync": False})):
        module, (params, state, _) = compiled(opt, **options)
        assert operations(module.as_text()) == []
        donated = bytes_of((params, state)) // 8  # on each device
        assert module.memory_analysis().alias_size_in_bytes == donated
        aliases = re.search(r"input_output_alias=\{(.*?) \}", module.as_text())[1]
        assert aliases.count("alias)") == len(jax.tree.leaves((params, state)))


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
    ((name, _, line),) = instructions(compiled_sync(rounds).as_text())
    plain = local_opt.local_rounds(SGD, axis_name="worker")
    ((_, _, other),) = instructions(compiled_sync(plain).as_text())
    assert name == "all-reduce" and shapes_of(line) == shapes_of(other) == (4 * 24, {"f32"})


def test_the_only_collective_of_a_planned_step_is_in_a_branch():
    plan = local_opt.constant(2, total_steps=8)
    opt = local_opt.local_steps(SGD, plan, axis_name="worker", opt_state="mean")
    module, (params, state, scales) = compiled(opt)
    found = instructions(module.as_text())
    assert sorted(name for name, _, _ in found) == ["all-reduce", "conditional"]
    reduction = next(computation for name, computation, _ in found if name == "all-reduce")
    conditional = next(line for name, _, line in found if name == "conditional")
    branches = re.search(r"branch_computations=\{(.*?)\}|true_computation=(.*)", conditional)[0]
    assert reduction.startswith("%") and re.search(rf"{reduction}\b", branches)
    donated = bytes_of((params, state)) // 8
    assert module.memory_analysis().alias_size_in_bytes == donated
    step = jax.jit(on_mesh(linear_step(opt), 8))
    params, state = jax.jit(on_mesh(lambda p: (p, opt.init(p)), 8))(copies(TREE, 8))
    for _ in range(3):  # over a sync
        params, state = step(params, state, scales)
    assert step._cache_size() == 1
    assert state.round.tolist() == [1] * 8 and state.step.tolist() == [3] * 8


def shapes_of(line):
    """Bytes and types of an instruction's results."""
    result = line.split(" = ", 1)[1]
    result = re.split(rf"\b(?:{'|'.join(COLLECTIVES)})", result)[0]
    found = re.findall(r"\b([a-z]+)(\d+)\[([\d,]*)\]", result)
    sizes = [math.prod(int(n) for n in dims.split(",") if n) for _, _, dims in found]
    types = {kind + bits for kind, bits, _ in found}
    return sum(s * int(b) // 8 for s, (_, b, _) in zip(sizes, found, strict=True)), types


@pytest.mark.parametrize("name", [None, *local_opt.WIRES])
def test_a_sync_sends_the_bytes_of_the_forecast(name):
    """To the byte: eight workers, 24 numbers; half a float32 for bfloat16 but for whole rows."""
    wire = local_opt.WIRES.get(name)
    rounds = local_opt.local_rounds(SGD, axis_name="worker", wire=wire)
    total, kinds, names = 0, set(), []
    for operation, _, line in instructions(compiled_sync(rounds).as_text()):
        size, types = shapes_of(line)
        # Of what a worker holds of all, an eighth is its own; an all-reduce does both halves.
        total += (2 if operation == "all-reduce" else 1) * size * 7 / 8
        kinds |= types
        names.append(operation)
    if wire is None:
        assert (kinds, names) == ({"f32"}, ["all-reduce"])
    else:
        assert kinds == {"u16" if wire.dtype == jnp.uint16 else "u8"}
        assert names == (["all-gather"] if wire.gathers else ["all-to-all", "all-gather"])
    assert total == local_opt.sync_bytes(24, num_workers=8, wire=wire)


def test_only_the_start_of_a_fragment_talks_and_of_nothing_but_it():
    stream = local_opt.streaming_rounds(
        SGD, axis_name="worker", fragments={"b": 0, "w": 1}, outer=local_opt.nesterov()
    )
    params = copies(TREE, 8)
    state = jax.eval_shape(on_mesh(stream.init, 8), params)
    for fragment, size in ((0, 9), (1, 15)):

        def start(params, state, fragment=fragment):
            return stream.start(params, state, fragment=fragment)

        def finish(params, state, fragment=fragment):
            return stream.finish(params, state, fragment=fragment)

        text = jax.jit(on_mesh(start, 8)).lower(params, state).compile().as_text()
        ((name, _, line),) = instructions(text)
        assert name == "all-reduce" and shapes_of(line) == (4 * size, {"f32"})
        text = jax.jit(on_mesh(finish, 8)).lower(params, state).compile().as_text()
        assert operations(text) == []
    assert operations(compiled(stream)[0].as_text()) == []


def groups_of(line):
    """Replica groups of a collective, in the three ways in which XLA prints them.

    Written out, as [shape]<=[iota]T(permutation), or as mesh['a'=2,'b'=4] {'b'}.
    """
    if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        axes = re.findall(r"'(\w+)'=(\d+)", match[1])
        reduced = re.findall(r"'(\w+)'", match[2])
        ids = np.arange(8).reshape([int(size) for _, size in axes])
        places = [i for i, (name, _) in enumerate(axes) if name in reduced]
        ids = np.moveaxis(ids, places, range(-len(places), 0))
        members = math.prod(ids.shape[-len(places) :])
        return sorted(sorted(row) for row in ids.reshape(-1, members).tolist())
    if match := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        rows = re.findall(r"\{([\d,]+)\}", match[1])
        return sorted(sorted(int(n) for n in row.split(",")) for row in rows)
    shape, iota, order = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line
    ).groups()
    ints = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    ids = np.arange(8).reshape(ints(iota))
    ids = ids.transpose(ints(order)) if order else ids
    return sorted(sorted(row) for row in ids.reshape(ints(shape)).tolist())


def test_two_levels_reduce_inside_hosts_in_a_step_and_between_them_at_a_sync():
    mesh = jax.make_mesh((2, 4), ("host", "device"), (AxisType.Auto,) * 2)
    spec = PartitionSpec(("host", "device"))
    rounds = local_opt.local_rounds(SGD, axis_name="host", gradient_axis="device")

    def run(function):
        def per_device(*args):
            return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))

        return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec))

    params = copies(TREE, 8)
    state = run(rounds.init)(params)
    step, sync = run(linear_step(rounds)), run(rounds.sync)
    found = instructions(step.lower(params, state, SCALES).compile().as_text())
    hosts, pairs = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert found and {name for name, _, _ in found} == {"all-reduce"}
    assert all(groups_of(line) == hosts for _, _, line in found)
    ((name, _, line),) = instructions(sync.lower(params, state).compile().as_text())
    assert name == "all-reduce" and groups_of(line) == pairs
    params, state = step(params, state, SCALES)
    moved = 1 - np.asarray(params["w"])[:, 0, 0]
    np.testing.assert_allclose(moved, RATE * np.cos(1.0) * np.repeat([1.5, 5.5], 4), rtol=1e-5)
    params, _ = sync(params, state)
    np.testing.assert_allclose(
        1 - params["w"], RATE * np.cos(1.0) * 3.5 * np.ones((8, 5, 3)), rtol=1e-5
    )


# The loop's programs: four workers on a mesh, 14 parameters. A step is the body of a loop.

DATA = {"x": np.ones((48, 6), np.float32), "y": np.zeros(48, np.int32)}
RECIPE = Recipe(workers=4, units_per_step=1, unit_size=1, learning_rates=(0.1,), epochs=3)


def compiled_parts(order, sync, units_per_step):
    """(compiled steps of a segment, compiled sync or None); they give all their state away."""
    recipe = RECIPE._replace(units_per_step=units_per_step)
    model = models.softmax_regression(num_features=6, num_classes=2)
    task = Task("ones", model, DATA, DATA, recipe)
    row, rounds = ORDERS[order], SYNC_RULES[sync].rounds
    built = program.build(task, recipe, row, rounds, mesh=runners.worker_mesh(4))
    state, zero, rates = built.init(0), np.int32(0), np.zeros(4, np.float32)
    steps = built.steps(True, units_per_step, False)
    steps = steps.lower(state, built.data, zero, zero, zero, rates).compile()
    aliases = re.search(r"input_output_alias=\{(.*?) \}", steps.as_text())[1]
    assert aliases.count("alias)") == len(jax.tree.leaves(state))
    assert not any("main" in where for _, where, _ in instructions(steps.as_text()))
    if built.sync_in_step:
        return steps.as_text(), None
    return steps.as_text(), built.ends(True, False).lower(state, np.float32(0)).compile().as_text()


@pytest.mark.parametrize("order", ["rr", "id_pair"])
@pytest.mark.parametrize("sync", ["qsr", "accumulate"])
def test_workers_in_local_rounds_meet_at_their_end_alone(order, sync):
    steps, end = compiled_parts(order, sync, 2)
    assert operations(steps) == []
    assert operations(end) == ["all-reduce"]


@pytest.mark.parametrize("order", ["rr", "id_pair"])
def test_a_parallel_step_is_one_all_reduce(order):
    steps, _ = compiled_parts(order, "parallel", 2)
    assert operations(steps) == ["all-reduce"]


def test_with_one_unit_per_step_coordination_moves_what_an_all_reduce_does():
    """An all-to-all and an all-gather of D entries are the two halves of a ring all-reduce."""
    found = {
        name: line for name, _, line in instructions(compiled_parts("cd_grab", "parallel", 1)[0])
    }
    assert sorted(found) == ["all-gather", "all-reduce", "all-to-all"]
    padded = 16  # 6 x 2 weights and 2 biases, padded to a multiple of 4 workers
    assert [shapes_of(found[n]) for n in ("all-to-all", "all-gather")] == [
        (4 * padded, {"f32"})
    ] * 2
    assert shapes_of(found["all-reduce"])[0] == 4 * 4 * 5  # all inner products at once, W (W + 1)


def test_coordination_beside_other_means_moves_the_differences_of_pairs():
    steps, _ = compiled_parts("cd_grab", "parallel", 2)
    assert sorted(operations(steps)) == ["all-reduce", "all-to-all"]  # gradients and products
    for units_per_step in (1, 2):
        steps, end = compiled_parts("cd_grab", "qsr", units_per_step)
        assert sorted(operations(steps)) == ["all-reduce", "all-to-all"]
        assert operations(end) == ["all-reduce"]


def test_gathered_coordination_sends_the_numbers_of_its_pairs_and_nothing_else():
    """14 parameters stand for themselves: a pair is 14 numbers, of four workers."""
    for units_per_step, pairs in ((1, 1), (2, 1), (4, 2)):
        steps, _ = compiled_parts("sketch1024", "parallel", units_per_step)
        found = {name: line for name, _, line in instructions(steps)}
        assert sorted(operations(steps)) == ["all-gather", "all-reduce"]
        assert shapes_of(found["all-gather"]) == (4 * 4 * pairs * 14, {"f32"})


@pytest.mark.parametrize("sync", ["qsr", "accumulate"])
def test_under_local_rounds_the_gather_rides_with_the_sync(sync):
    steps, end = compiled_parts("sketch1024", sync, 2)
    assert operations(steps) == []
    assert sorted(operations(end)) == ["all-gather", "all-reduce"]
    assert operations(compiled_parts("rr", sync, 2)[1]) == ["all-reduce"]
