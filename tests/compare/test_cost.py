"""What a run costs, before it: what is sent, prices, dry runs, programs of CPUs, TPUs and GPUs."""

import collections
import contextlib
import functools
import importlib.util
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
import models
import ordering
from experiments import train
from experiments.cluster.devices import worker_mesh, worker_sharding
from experiments.compare import cost
from experiments.compare.arms import COMPRESSORS, row_of
from experiments.compare.cost import (
    CHIPS,
    CUDA,
    GIB,
    LIBTPU,
    Refused,
    collectives_of,
    compile_or_refuse,
    dry_run,
    order_traffic,
    result_bytes,
    shapes_of,
    slice_of,
)
from experiments.compare.study import Arm, Study
from experiments.data import Recipe, Task
from experiments.data.base import abstract_set
from experiments.trainer.config import OrderSetting, Sizes
from local_opt import exchange
from local_opt.costs import sync_bytes
from tests.commands import parsed, rows_of
from tests.compiled_runs import CPU, compiled_by, donated, kinds, marks_of, operations, text_of

pytestmark = pytest.mark.usefixtures("optimised")  # what users compile
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "use" / "accelerators.md"
WORKERS, PARAMETERS = 4, 1024
RECIPE = Recipe(
    WORKERS, 2, 4, (0.1,), total_steps=40, schedule="cosine", floor=1e-3, h_base=4, metric="loss",
    target=0.5,
)  # fmt: skip
FOUR = {"v5e": "v5e:2x2", "h100": "h100:4"}  # a slice for each of both compilers
tpu, gpu = compiled_by(LIBTPU), compiled_by(CUDA)
ABSENT = [
    pytest.param("v5e", marks=marks_of(LIBTPU)), pytest.param("h100", marks=marks_of(CUDA)),
]  # fmt: skip
both = pytest.mark.parametrize("chip", ABSENT)


def task(width=64, classes=10):
    data = abstract_set(322, x=((width,), np.float32), y=((), np.int32))
    model = models.softmax_regression(num_features=width, num_classes=classes)
    return Task("shapes", model, data, data, RECIPE)


def study_of(arms, speeds=()):
    return Study("one", arms, "", None, (), (), speeds=speeds)


def programs_of(chip, order, sync, units_per_step=2):
    mesh = slice_of(FOUR[chip], WORKERS)[0] if chip in FOUR else worker_mesh(WORKERS)
    optimizer = "adamw" if row_of("order", order).scaled else RECIPE.optimizer
    recipe = RECIPE._replace(units_per_step=units_per_step, optimizer=optimizer)
    of = task(127, 8)  # D = 1,024 parameters, which four workers share in slices without padding
    return shapes_of(of, recipe, row_of("order", order), row_of("sync", sync).rounds, mesh=mesh)


# Refused before anything is compiled.


@pytest.mark.parametrize("name", ["v5e", "v9:2x2", "a100:8", "v5e:2x2x2x2", "4x4"])
def test_an_unknown_slice_is_refused(name):
    with pytest.raises(ValueError, match=rf"--topology is {name}: a slice is CHIP:SHAPE.* v5e:4x4"):
        slice_of(name, 4)


@pytest.mark.parametrize("name,extra", [("v5e:2x2", "topology"), ("h100:4", "topology_gpu")])
def test_the_error_for_a_missing_compiler_says_what_to_install(name, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"not installed: pip install 'syncopate-jax\[{extra}\]'"):
        slice_of(name, 4)


@pytest.mark.parametrize("more", [(), ("--dry_run", "--nocompile")])
def test_a_topology_needs_a_dry_run(more):
    values = parsed(train, "--topology=v5e:2x2", "--task=digits", *more)
    with pytest.raises(ValueError, match="v5e:2x2 without a compiling dry run.*pass --dry_run"):
        train.run(values)


def test_gpus_are_on_hosts_of_eight():
    for shape, whole in {"1": "1x1x1", "8": "1x1x8", "16": "1x2x8"}.items():
        described = CUDA.topology("h100", shape, CHIPS["h100"])
        assert described["topology"] == whole
        assert "device_memory_size: 80000000000 }" in described["target_config"]
    for shape in ("12", "2x8", "0"):
        with pytest.raises(ValueError, match="GPUs are counted, and hosts have 8"):
            CUDA.topology("h100", shape, CHIPS["h100"])


@tpu
def test_slices_of_tpus():
    for name in ("v5e:3x5", "v5e:4"):
        with pytest.raises(ValueError, match=f"{name}: no such slice"):
            slice_of(name, 4)
    with pytest.raises(ValueError, match="workers is 8 and v5e:2x2 has 4 .*Pass --workers=4"):
        slice_of("v5e:2x2", 8)
    for name, workers, memory in (("v4:2x2x1", 8, 16), ("v4:1", 2, 16), ("v5e:1", 1, 16)):
        mesh, chip = slice_of(name, workers)
        assert (mesh.size, chip.memory) == (workers, memory * GIB)


@gpu
def test_sixteen_gpus_are_two_hosts():
    devices = slice_of("h100:16", 16)[0].devices
    assert [device.process_index for device in devices] == [0] * 8 + [1] * 8


# What the compiled programs hold.

MEAN, PAIRS = ["all-reduce"], ["all-reduce", "all-to-all"]  # of gradients; and products of pairs
GATHER = ["all-gather", "all-reduce"]
FRESH, ECHOED, SYNC, EPOCH = "fresh step", "echoed step", "sync", "epoch's end"
HELD = [  # order, rule, units per step, program: its collectives
    ("rr", "qsr", 2, FRESH, []),
    ("rr", "qsr", 2, SYNC, MEAN),
    ("id_pair", "accumulate", 2, FRESH, []),
    # Coordination moves the differences of pairs beside other means, of an odd number all units.
    ("cd_grab", "parallel", 2, FRESH, PAIRS),
    ("cd_grab", "parallel", 3, FRESH, PAIRS),
    ("cd_grab", "qsr", 1, FRESH, PAIRS),
    ("cd_grab", "parallel", 2, ECHOED, MEAN),
    ("cd_grab", "qsr", 2, ECHOED, []),
    # The numbers of sketches are gathered, in a step or with the sync.
    ("cd_grab+sketch16", "parallel", 4, FRESH, GATHER),
    ("cd_grab+sketch16", "qsr", 2, FRESH, []),
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
    actual = collectives_of(text)
    assert operations(text) == collectives or program == EPOCH and len(actual) == len(collectives)
    sent = kinds(actual)
    halves = sent.get("all-to-all", 0) + sent.get("all-gather", 0)
    allreduces = (sent.get("all-reduce", 0) + halves / 2) / (4 * PARAMETERS)
    if program == FRESH:
        row, in_step = row_of("order", order), shapes.sync_in_step
        traffic = order_traffic(row, shapes.sizes, PARAMETERS, sync_in_step=in_step)
        waits = row.sketch and not in_step  # the gather, for the sync
        expected = 0 if waits else traffic(2) / 2 + shapes.sync_in_step
        assert allreduces == pytest.approx(expected)
        assert donated(text) == len(jax.tree.leaves(shapes.state)), "all of the state"
        assert not any("main" in one.where for one in actual), "in a loop"
    elif program == EPOCH and row_of("order", order).scaled:
        assert allreduces == pytest.approx(1), "the second moments"
    elif program == EPOCH:
        assert sum(sent.values()) <= 4 * 128, "a bit for a pair, in a row of the chip's lanes"
    elif collectives == MEAN:
        assert allreduces == 1


@tpu
def test_blocks_of_pairs_are_those_of_the_target_chip():
    results = []

    def worker(x):
        results.append(ordering.kernel.block_size_of())
        return x

    mesh, _ = slice_of(FOUR["v5e"], WORKERS)
    run = local_opt.map_workers(worker, mesh, in_specs="worker", out_specs="worker")
    jax.eval_shape(run, jax.ShapeDtypeStruct((WORKERS, 2), np.float32))
    assert results == [ordering.kernel.BLOCK]
    assert ordering.kernel.block_size_of() == 1, "JAX uses the CPU"


def printed(of_task, topology, **arms):
    return dry_run(of_task, RECIPE, study_of(arms), parsed(train, f"--topology={topology}"))


@both
def test_a_program_that_does_not_fit_reports_the_missing_memory(chip):
    width, classes = (2**21, 1024) if chip == "v5e" else (2**21, 2048)  # 9 or 17 GB of parameters
    text = printed(task(width, classes), FOUR[chip], run=Arm("CD-GraB", "cd_grab", "qsr"))
    why = r"(Ran out of memory .*[\d.]+G|Its buffers take [\d.]+ GB of 80 GB)"
    assert re.search(rf"fresh step, CD-GraB: does not fit. {why}", text)
    assert "a sketch for an exact order" in text and "or another chip: " in text
    assert "does not fit" in text.split("\n\n")[1]


def test_memory_is_compared_if_the_compiler_accepts_any_size():
    lowered = programs_of("cpu", "cd_grab", "parallel").programs[FRESH]()
    result = compile_or_refuse(lowered, CPU).memory
    needed = result["arguments"] + result["outputs"] + result["temporaries"] - result["donated"]
    assert result["peak"] == needed, "all buffers are there at once"
    fits = functools.partial(compile_or_refuse, lowered)
    assert isinstance(fits(CPU._replace(memory=needed - 1)), Refused)
    assert fits(CPU._replace(memory=needed)).memory == result


def cells(text):
    """Tables as rows of cells; any other line is a row of one."""
    lines = [part.split("\n") for part in text.split("\n\n")]
    return [[[c.strip() for c in x.strip("|").split("|")] for x in part] for part in lines]


@tpu
def test_the_page_shows_the_output_of_its_command():
    """But for what another compiler may find otherwise: bytes, operations, seconds.

    So it lists all programs of a run, their collectives, and whether they fit.
    """
    page = PAGE.read_text()
    flags = re.search(r"^    python -m experiments.train (.* --topology=v5e:4x4)$", page, re.M)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train.run(parsed(train, *flags[1].split()))
    shown = page.split("## What it prints\n\n")[1].split("\n\n## How to read it")[0]
    exact = (None, 8, 2, None, None)  # columns of the tables; all of the last line
    for one, other, columns in zip(
        cells(shown), cells(out.getvalue().rstrip("\n")), exact, strict=True
    ):
        same = [row[:columns] for row in one if "---" not in row[0]]
        assert same == [row[:columns] for row in other if "---" not in row[0]]


def test_a_compressor_takes_memory_for_a_group_and_sends_the_bytes_of_all(monkeypatch):
    """Four workers with 2^22 numbers, in one group and in eight."""
    mesh = worker_mesh(WORKERS)
    compressor, results = local_opt.quantize("int8"), []
    rounds = local_opt.local_rounds(optax.sgd(0.1), compress=compressor)
    params = {f"w{i}": jax.ShapeDtypeStruct((256, 1024), np.float32) for i in range(16)}
    place = worker_sharding(mesh)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((WORKERS, *x.shape), x.dtype, sharding=place),
        (params, jax.eval_shape(rounds.init, params)),
    )
    for group in (2**22, 2**19):
        monkeypatch.setattr(exchange, "GROUP", group)
        monkeypatch.setattr(exchange, "GROUPS", 2**30)
        sync = local_opt.map_workers(rounds.sync, mesh, in_specs="worker", out_specs="worker")
        results.append(jax.jit(sync, donate_argnums=(0, 1)).lower(*args).compile())
    sent = local_opt.costs.sync_bytes(2**22, num_workers=WORKERS, compress=compressor)
    sent *= WORKERS / (WORKERS - 1)
    collectives = [collectives_of(one.as_text()) for one in results]
    assert [sum(c.bytes for c in each) for each in collectives] == [sent, sent]
    assert [len(each) for each in collectives] == [2, 16]
    whole, grouped = (one.memory_analysis().temp_size_in_bytes for one in results)
    assert grouped < 0.8 * whole


# What their texts say, on small samples.

# As libtpu prints, with parameters left out: a loop with a reduction, and a gather in two halves.
OF_TPU = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%fused (p: f32[4,5]) -> f32[4,5] {
  ROOT %n = f32[4,5]{1,0} negate(%p)
}

%body (state: (s32[], f32[4,5], /*index=2*/f32[])) -> (s32[], f32[4,5], f32[]) {
  %psum = (f32[4,5]{1,0:T(4,128)S(1)}, bf16[3]{0}) all-reduce(%x, %x), to_apply=%sum
  %g = f32[4,5]{1,0:T(4,128)S(1)} fusion(%x), kind=kLoop, calls=%fused
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
  %gathered = f32[8]{0} all-gather-done(%gather)
  %named = f32[8]{0} all-gather(%part), frontend_attributes={async_collective_name="all-gather-start"}
  %start = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%gathered), calls=%moves
  %fusion.1 = (f32[4,2]{1,0}, u32[]{:S(2)}) fusion(%part), kind=kCustom, calls=%begin
  %fusion.2 = f32[4,2]{1,0} fusion(%fusion.1), kind=kCustom, calls=%async_collective_fusion.1
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
    actual = collectives_of(text)
    assert [(one.where, one.kind, one.bytes, one.asynchronous) for one in actual] == expected


def test_bytes_of_a_type():
    assert result_bytes("(u32[]{:S(2)}, pred[7]{0}, s4[3], f8e4m3fn[2,2], token[])") == 17


# What is sent, and what a dry run tells without a topology.


def over_mesh(function):
    """A worker's function over devices."""
    mesh = worker_mesh(WORKERS)
    return local_opt.map_workers(function, mesh, in_specs="worker", out_specs="worker")


@pytest.mark.parametrize("per_step,size", [(3, 2), (4, 3)])
def test_the_cost_of_an_order_equals_the_collectives_of_its_step(per_step, size):
    units = 2 * per_step + size % per_step  # the last step of an epoch may be the shorter one
    order = row_of("order", "cd_grab").make(OrderSetting(units, per_step))
    params = jnp.zeros(18)

    def step(state, rows):
        return order.observe(state, rows)

    init = over_mesh(lambda key: order.init(key, params))
    state = jax.eval_shape(init, jax.random.split(jax.random.key(0), WORKERS))
    rows = jax.ShapeDtypeStruct((WORKERS, size, 18), jnp.float32)
    observe = over_mesh(step)
    result = kinds(collectives_of(jax.jit(observe).lower(state, rows).compile().as_text()))
    # Of n numbers an all-to-all sends (W - 1) / W n, an all-reduce 2 (W - 1) / W n.
    sent = (result.get("all-to-all", 0) / 2 + result.get("all-reduce", 0)) / 4 / 18
    sizes, total = Sizes(WORKERS, units, per_step, 1), 2 + bool(size % per_step)  # loads
    traffic = order_traffic(row_of("order", "cd_grab"), sizes, 18)
    assert traffic(total) - traffic(total - 1) == pytest.approx(sent)
    assert traffic(2 * total + 1) == pytest.approx(2 * traffic(total) + traffic(1))
    assert order_traffic(row_of("order", "id_pair"), sizes, 18)(7) == 0
    assert order_traffic(row_of("order", "cd_grab"), sizes._replace(workers=1), 18)(7) == 0


def test_dealt_orders_send_their_signs_at_the_end_of_an_epoch():
    sizes, size = Sizes(WORKERS, 20, 4, 1), 18
    order = row_of("order", "id_pair+dealt").make(OrderSetting(20, 4))
    keys = jax.random.split(jax.random.key(0), WORKERS)
    init = over_mesh(lambda key: order.init(key, jnp.zeros(size)))
    end = over_mesh(order.next_epoch)
    state = jax.eval_shape(init, keys)
    result = kinds(collectives_of(jax.jit(end).lower(state).compile().as_text()))
    assert result == {"all-gather": 2 * WORKERS}, "10 pairs in 2 bytes"
    # Of n bytes of every worker an all-gather sends (W - 1) n, an all-reduce 2 (W - 1) / W n.
    sent = order_traffic(row_of("order", "id_pair+dealt"), sizes, size)
    per_epoch = result["all-gather"] / 2 / (4 * size)
    assert sent(4) == 0 and sent(5) == sent(9) == pytest.approx(per_epoch)
    exact, moved = (
        order_traffic(row_of("order", n), sizes, size) for n in ("cd_grab", "cd_grab+dealt")
    )
    assert moved(12) == pytest.approx(exact(12) + 2 * per_epoch)


def test_a_price_takes_the_slower_of_steps_and_loads():
    run = [{"step": 50, "loads": 40, "allreduces": 5}, {"step": 100, "loads": 45, "allreduces": 10}]
    # 40 loads of 4 steps hold the first 50 steps up, syncs too; 5 hide behind the others.
    results = [cost.recorded_run_time(run, machine) for machine in cost.machines(4.0, 2.0)]
    assert results == [100, 160 + 50, 100 + 20, 160 + 50 + 10]


def test_a_dry_run_covers_every_arm():
    arms = {
        "rr": Arm("D-RR", "rr"),
        "cd_grab": Arm("CD-GraB", "cd_grab"),
        "constant": Arm("constant H", "rr", "constant"),
        "all": Arm("all three", "cd_grab", "constant", "fixed"),
    }
    text = dry_run(task(), RECIPE, study_of(arms), parsed(train, "--nocompile"))
    assert re.search(r"\| parameters +\| 650 \(2.6 kB\)", text)
    assert re.search(r"\| training examples +\| 322 ", text) and "| loss 0.5 " in text
    rows = dict(zip(arms, rows_of(text.split("\n\n")[1]), strict=True))
    assert {r["steps"] for r in rows.values()} == {"40"}
    assert [r["loads"] for r in rows.values()] == ["40", "40", "40", "10"]
    assert [r["rounds"] for r in rows.values()] == ["40", "40", "10", "10"]
    ring = sync_bytes(650, num_workers=WORKERS)
    assert rows["rr"]["sent per worker"] == f"{40 * ring / 1e3:.3g} kB"
    assert rows["constant"]["sent per worker"] == f"{10 * ring / 1e3:.3g} kB"
    traffic = order_traffic(row_of("order", "cd_grab"), Sizes(WORKERS, 20, 2, 4), 650)(40)
    assert rows["cd_grab"]["sent per worker"] == f"{(40 + traffic) * ring / 1e3:.3g} kB"
    assert [rows[name]["volume"] for name in ("rr", "constant")] == ["100.000%", "25.000%"]
    assert rows["cd_grab"]["volume"] == f"{(40 + traffic) / 40:.3%}", "what orders send counts"
    assert {r["memory of a worker"] for r in rows.values()} == {"not compiled"}


def test_a_dry_run_has_a_row_per_speed():
    """A load in four steps at R = 4, where a run has twice the steps."""
    arms = {
        "none": Arm("no echo", "rr"),
        "diffusion": Arm("error diffusion", "rr", "every_load", "diffusion"),
        "measured": Arm("measured", "rr", "every_load", "measured"),
    }
    text = dry_run(task(10_000), RECIPE, study_of(arms, (1.0, 4.0)), parsed(train))
    rows = rows_of(text.split("\n\n")[1])
    assert [r["R"] for r in rows] == ["1"] * 3 + ["4"] * 3
    slow = rows[3:]
    assert {r["steps"] for r in slow} == {"80"}
    assert [r["loads"] for r in slow] == [r["rounds"] for r in slow] == ["80", "20", "20"]
    model = 4e-6 * 10_001 * 10  # in MB; parameters, momentum and batch lie in memory at least
    assert all(2 * model < float(r["memory of a worker"].removesuffix(" MB")) for r in slow)


@pytest.mark.parametrize("sync,waiting", [("parallel", 0), ("qsr", 10 * 64)])
def test_the_state_of_a_sketched_order_has_the_size_of_its_numbers(sync, waiting):
    """Two orders of 20, at most three counters, and a sum; under local rounds also pairs."""
    shapes = shapes_of(
        task(400), RECIPE, row_of("order", "cd_grab+sketch64"), row_of("sync", sync).rounds
    )
    result = shapes.bytes_of("orders")
    assert shapes.sizes == Sizes(4, 20, 2, 4) and shapes.sync_in_step == (sync == "parallel")
    assert 4 * (2 * 20 + 64 + waiting) <= result <= 4 * (2 * 20 + 64 + waiting + 3)


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_compressed_changes_are_their_share_of_an_all_reduce(compressor):
    sizes = Sizes(workers=8, num_units=10, units_per_step=1, unit_size=16)
    given = task(99_999), row_of("order", "rr")  # of 10^6 parameters
    sent = cost.traffic(*given, row_of("sync", f"qsr+{compressor}"), sizes, False)
    narrow = sync_bytes(10**6, num_workers=8, compress=COMPRESSORS[compressor]())
    assert sent(5, 100) == pytest.approx(5 * narrow / sync_bytes(10**6, num_workers=8))
    alone = cost.traffic(*given, row_of("sync", "qsr"), sizes, False)
    assert alone(5, 100) == 5 > sent(5, 100)


def test_collectives_of_a_step_are_counted():
    around = [(w, (w + 1) % WORKERS) for w in range(WORKERS)]

    def step(x):
        x = jnp.sin(jax.lax.pmean(x, "worker"))  # each after the other, so that none are combined
        x = jnp.sin(jax.lax.pmean(x, "worker"))
        x = jax.lax.all_gather(jax.lax.ppermute(x, "worker", around), "worker").sum(0)
        return jax.lax.cond(x.sum() > 0, lambda x: jax.lax.pmax(x, "worker"), jnp.sin, x)

    def count(step):
        result = local_opt.costs.count_collectives(over_mesh(step), rows)
        compiled = jax.jit(over_mesh(step)).lower(rows).compile().as_text()
        assert result == collections.Counter(one.kind for one in collectives_of(compiled))
        return result

    rows = local_opt.replicate(jnp.ones(3), worker_mesh(WORKERS))
    assert count(step) == {"all-reduce": 3, "all-gather": 1, "collective-permute": 1}
    assert count(jnp.sin) == {}
    simulated = local_opt.map_workers(step, WORKERS, in_specs="worker", out_specs="worker")
    assert local_opt.costs.count_collectives(jax.jit(simulated), jnp.ones((WORKERS, 3))) == {}
    rounds = local_opt.local_rounds(optax.sgd(0.1))
    assert count(lambda x: rounds.update(x, rounds.init(x), x)[0]) == {}
    assert count(lambda x: rounds.sync(x, rounds.init(x))[0]) == {"all-reduce": 1}
    with pytest.raises(ValueError, match=r"step is .*: pass a function of \(args.0.\)"):
        local_opt.costs.count_collectives(lambda: 0, rows)
