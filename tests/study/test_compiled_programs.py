"""Programs of runs, compiled for CPUs, TPUs and GPUs: collectives, donation, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
import models
import ordering
from experiments.cluster.devices import owned_sharding, worker_mesh
from experiments.study.cost import order_traffic, shapes_of
from experiments.study.tables import row_of
from experiments.tasks import Recipe, Task
from experiments.tasks.base import abstract_set
from local_opt import exchange
from tests.compiled_runs import (
    CUDA,
    LIBTPU,
    collectives_of,
    compiled_by,
    donated,
    kinds,
    marks_of,
    operations,
    result_bytes,
    slice_of,
    text_of,
    uncached,
)

pytestmark = pytest.mark.usefixtures("optimised")  # what users compile
WORKERS, PARAMETERS = 4, 1024
RECIPE = Recipe(WORKERS, 2, 4, (0.1,), total_steps=40, schedule="cosine", floor=1e-3, h_base=4)
FOUR = {"v5e": "v5e:2x2", "h100": "h100:4"}  # a slice for each of both compilers
tpu, gpu = compiled_by(LIBTPU), compiled_by(CUDA)
ABSENT = [
    pytest.param("v5e", marks=marks_of(LIBTPU)), pytest.param("h100", marks=marks_of(CUDA)),
]  # fmt: skip


def task(width=127, classes=8):
    """D = 1,024 parameters, which four workers share in slices without padding."""
    data = abstract_set(320, x=((width,), np.float32), y=((), np.int32))
    model = models.softmax_regression(num_features=width, num_classes=classes)
    return Task("shapes", model, data, data, RECIPE)


def programs_of(chip, order, sync, units_per_step=2):
    mesh = slice_of(FOUR[chip]) if chip in FOUR else worker_mesh(WORKERS)
    optimizer = "adamw" if row_of("order", order).scaled else RECIPE.optimizer
    recipe = RECIPE._replace(units_per_step=units_per_step, optimizer=optimizer)
    return shapes_of(task(), recipe, row_of("order", order), row_of("sync", sync).rounds, mesh=mesh)


# What the compiled programs hold.

MEAN, PAIRS = ["all-reduce"], ["all-reduce", "all-to-all"]  # of gradients; and products of pairs
GATHER = ["all-gather", "all-reduce"]
FRESH, ECHOED, SYNC, EPOCH = "fresh step", "echoed step", "sync", "epoch's end"
HELD = [  # order, rule, units per step, program: its collectives
    ("rr", "parallel", 2, FRESH, MEAN),
    ("rr", "qsr", 2, FRESH, []),
    ("rr", "qsr", 2, SYNC, MEAN),
    ("id_pair", "accumulate", 2, FRESH, []),
    # Coordination moves the differences of pairs beside other means, of an odd number all units.
    ("cd_grab", "parallel", 1, FRESH, PAIRS),
    ("cd_grab", "parallel", 2, FRESH, PAIRS),
    ("cd_grab", "parallel", 3, FRESH, PAIRS),
    ("cd_grab", "qsr", 1, FRESH, PAIRS),
    ("cd_grab", "qsr", 2, FRESH, PAIRS),
    ("cd_grab", "qsr", 2, SYNC, MEAN),
    ("cd_grab", "parallel", 2, ECHOED, MEAN),
    ("cd_grab", "qsr", 2, ECHOED, []),
    # The numbers of sketches are gathered, in a step or with the sync.
    ("cd_grab+sketch16", "parallel", 4, FRESH, GATHER),
    ("cd_grab+sketch16", "qsr", 2, FRESH, []),
    ("cd_grab+sketch16", "qsr", 2, SYNC, GATHER),
    ("cd_grab+sketch16", "accumulate", 2, SYNC, GATHER),
    # At an epoch's end of scaled orders workers mean their moments.
    ("cd_grab+scaled", "qsr", 2, EPOCH, MEAN),
    ("id_pair", "qsr", 2, EPOCH, []),
    ("id_pair+dealt", "qsr", 2, EPOCH, ["all-gather"]),  # or summed up, by libtpu
]


@pytest.mark.parametrize("chip", ["cpu", *ABSENT])
@pytest.mark.parametrize("order,sync,units_per_step,program,collectives", HELD)
def test_a_program_contains_the_collectives_of_its_plan(
    chip, order, sync, units_per_step, program, collectives
):
    shapes = programs_of(chip, order, sync, units_per_step)
    text = text_of(shapes.programs[program](), chip)
    found = collectives_of(text)
    assert operations(text) == collectives or program == EPOCH and len(found) == len(collectives)
    sent = kinds(found)
    halves = sent.get("all-to-all", 0) + sent.get("all-gather", 0)
    allreduces = (sent.get("all-reduce", 0) + halves / 2) / (4 * PARAMETERS)
    if program == FRESH:
        row, in_step = row_of("order", order), shapes.sync_in_step
        traffic = order_traffic(row, shapes.sizes, PARAMETERS, sync_in_step=in_step)
        waits = row.sketch and not in_step  # the gather, for the sync
        expected = 0 if waits else traffic(2) / 2 + shapes.sync_in_step
        assert allreduces == pytest.approx(expected)
        assert donated(text) == len(jax.tree.leaves(shapes.state)), "all of the state"
        assert not any("main" in one.where for one in found), "in a loop"
    elif program == EPOCH and row_of("order", order).scaled:
        assert allreduces == pytest.approx(1), "the second moments"
    elif program == EPOCH:
        assert sum(sent.values()) <= 4 * 128, "a bit for a pair, in a row of the chip's lanes"
    elif collectives == MEAN:
        assert allreduces == 1


@tpu
def test_a_gather_spread_over_fusions_counts_once():
    """libtpu starts one in a fusion, ends it in another, and computes beside it in between."""
    mesh = slice_of("v5e:4x4")
    split, size = jax.P("worker"), 1 << 16

    def gather(x, y, w):
        whole = jax.lax.all_gather(x, "worker", tiled=True)
        for _ in range(4):
            y = jnp.tanh(y @ w)
        return whole, y

    run = jax.shard_map(
        gather, mesh=mesh, in_specs=(split, split, jax.P()), out_specs=(split, split),
        check_vma=False,
    )  # fmt: skip
    like = lambda spec, *shape: jax.ShapeDtypeStruct(  # noqa: E731
        shape, np.float32, sharding=jax.NamedSharding(mesh, spec)
    )
    args = like(split, 16 * size), like(split, 16 * 512, 1024), like(jax.P(), 1024, 1024)
    (found,) = collectives_of(text_of(jax.jit(run).lower(*args)))
    assert (found.kind, found.bytes, found.asynchronous) == ("all-gather", 4 * 16 * size, True)


@tpu
def test_blocks_of_pairs_are_those_of_the_target_chip():
    found = []

    def worker(x):
        found.append(ordering.kernel.block_size_of())
        return x

    mesh = slice_of(FOUR["v5e"])
    run = local_opt.lift(worker, mesh, "owned -> owned")
    jax.eval_shape(run, jax.ShapeDtypeStruct((WORKERS, 2), np.float32))
    assert found == [ordering.kernel.BLOCK]
    assert ordering.kernel.block_size_of() == 1, "JAX uses the CPU"


@gpu
def test_a_wire_takes_memory_for_a_group_and_sends_the_bytes_of_all(monkeypatch):
    """Four workers with 2^22 numbers, in one group and in eight."""
    mesh = slice_of(FOUR["h100"])
    wire, found = local_opt.rounded_wire("int8"), []
    rounds = local_opt.local_rounds(optax.sgd(0.1), wire=wire)
    params = {f"w{i}": jax.ShapeDtypeStruct((256, 1024), np.float32) for i in range(16)}
    place = owned_sharding(mesh)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((WORKERS, *x.shape), x.dtype, sharding=place),
        (params, jax.eval_shape(rounds.init, params)),
    )
    for group in (2**22, 2**19):
        monkeypatch.setattr(exchange, "GROUP", group)
        monkeypatch.setattr(exchange, "GROUPS", 2**30)
        sync = local_opt.lift(rounds.sync, mesh, "owned owned -> owned owned")
        lowered = jax.jit(sync, donate_argnums=(0, 1)).lower(*args)
        with uncached():
            found.append(lowered.compile(compiler_options=dict(CUDA.options)))
    sent = local_opt.sync_bytes(2**22, num_workers=WORKERS, wire=wire) * WORKERS / (WORKERS - 1)
    collectives = [collectives_of(one.as_text()) for one in found]
    assert [sum(c.bytes for c in own) for own in collectives] == [sent, sent]
    assert [*map(len, collectives)] == [2, 16]
    temporaries = [one.memory_analysis().temp_size_in_bytes for one in found]
    assert temporaries[1] < temporaries[0]


# What their texts say, on small samples.

# As libtpu prints, with parameters left out: a loop with a reduction, and a gather in two halves.
OF_TPU = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%fused (p: f32[4,5]) -> f32[4,5] {
  ROOT %n = f32[4,5]{1,0} negate(%p), backend_config={"window_config":{"estimated_cycles":"999"}}
}

%body (state: (s32[], f32[4,5], /*index=2*/f32[])) -> (s32[], f32[4,5], f32[]) {
  %psum = (f32[4,5]{1,0:T(4,128)S(1)}, bf16[3]{0}) all-reduce(%x, %x), to_apply=%sum
  %g = f32[4,5]{1,0:T(4,128)S(1)} fusion(%x), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %out = (s32[]{:T(128)}, f32[4,5]{1,0}, f32[]{:T(128)}) tuple(%i, %g, %y)
}

%moves (m: f32[8]) -> f32[8] {
  ROOT %moved = f32[8]{0} all-to-all(%m), dimensions={0}
}

%begin (q: f32[1,2]) -> (f32[4,2], u32[]) {
  %all-gather.8 = f32[4,2]{1,0:T(1,128)} all-gather(%q), dimensions={0}
  ROOT %custom-call.12 = (f32[4,2]{1,0}, u32[]{:S(2)}) custom-call(%all-gather.8), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (r: f32[1,2]) -> f32[4,2] {
  %all-gather.10 = f32[4,2]{1,0:T(1,128)} all-gather(%r), dimensions={0}
  ROOT %product = f32[4,2]{1,0} convolution(%all-gather.10, %r)
}

%finish (v: f32[1,2]) -> f32[4,2] {
  %all-gather.12 = f32[4,2]{1,0:T(1,128)} all-gather(%v), dimensions={0}
  ROOT %custom-call.14 = f32[4,2]{1,0} custom-call(%all-gather.12), custom_call_target="AsyncCollectiveDone"
}

%scatters (z: f32[8]) -> f32[2] {
  %all-reduce.3 = f32[8]{0} all-reduce(%z), to_apply=%sum
  ROOT %slice = f32[2]{0} slice(%all-reduce.3), slice={[0:2]}
}

ENTRY %main (arg: (s32[], f32[4,5], f32[])) -> f32[8] {
  %gather = (f32[2]{0}, f32[8]{0}) all-gather-start(%part), dimensions={0}
  %w = (s32[]{:T(128)}, f32[4,5]{1,0}, f32[]{:T(128)}) while(%arg), condition=%condition, body=%body, metadata={op_name="jit(step)/while"}
  %gathered = f32[8]{0} all-gather-done(%gather), backend_config={"estimated_cycles":"3"}
  %named = f32[8]{0} all-gather(%part), frontend_attributes={async_collective_name="all-gather-start"}
  %start = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%gathered), calls=%moves
  %fusion.1 = (f32[4,2]{1,0}, u32[]{:S(2)}) fusion(%part), kind=kCustom, calls=%begin
  %fusion.2 = f32[4,2]{1,0} fusion(%fusion.1), kind=kCustom, calls=%async_collective_fusion.1, backend_config={"estimated_cycles":"5"}
  %fusion.3 = f32[4,2]{1,0} fusion(%fusion.2), kind=kCustom, calls=%finish
  %fusion.4 = f32[2]{0} fusion(%gathered), kind=kCustom, calls=%scatters
  ROOT %done = f32[8]{0} async-done(%start)
}
"""  # noqa: E501

# As XLA prints for CUDA: pairs everywhere, and whether they block beside them.
OF_CUDA = """HloModule jit_step, is_scheduled=true

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %all-reduce-start = f32[8]{0} all-reduce-start(%x), to_apply=%sum, backend_config={"collective_backend_config":{"is_sync":false}}
  %g = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
}

ENTRY %main (a: f32[8]) -> f32[2] {
  %w = (s32[], f32[8]{0}) while(%a), condition=%less, body=%body, metadata={op_name="signs"}
  %all-to-all-start = ((f32[8]{0}), f32[8]{0}) all-to-all-start(%a), backend_config={"collective_backend_config":{"is_sync":true}}
  ROOT %all-to-all-done = f32[8]{0} all-to-all-done(%all-to-all-start), backend_config={"collective_backend_config":{"is_sync":false}}
}
"""  # noqa: E501


@pytest.mark.parametrize("text,expected", [
    (OF_TPU, [
        ("body", "all-reduce", 4 * 5 * 4 + 3 * 2, False),  # in a loop
        ("moves", "all-to-all", 32, True),  # in a computation of its own
        ("finish", "all-gather", 32, True),  # in three fusions
        ("scatters", "all-reduce", 32, False),  # in one
        ("main", "all-gather", 32, True),  # two halves are one
        ("main", "all-gather", 32, False),  # was one, as its name remembers
    ]),
    (OF_CUDA, [("body", "all-reduce", 32, True), ("main", "all-to-all", 32, False)]),
])  # fmt: skip
def test_every_collective_counts_once(text, expected):
    found = collectives_of(text)
    assert [(one.where, one.kind, one.bytes, one.asynchronous) for one in found] == expected


def test_bytes_of_a_type():
    assert result_bytes("f32[64,10]{1,0:T(8,128)S(1)}") == 2560
    assert result_bytes("(u32[]{:S(2)}, pred[7]{0}, s4[3], f8e4m3fn[2,2], token[])") == 17
