"""Runs compiled for TPUs and GPUs that are not there, and what the text of a program holds."""

import functools
import importlib.util
import pathlib
import re
import shlex

import jax
import numpy as np
import pytest

import local_opt
import ordering
from benchmarks import topologies
from benchmarks.hlo import collectives_of, result_bytes
from benchmarks.topologies import (
    CHIPS,
    CUDA,
    GIB,
    LIBTPU,
    Refused,
    compile_or_refuse,
    slice_of,
)
from experiments import train
from experiments.compare.arms import Arm, row_of
from experiments.compare.cost import order_traffic, shapes_of
from experiments.distributed.devices import worker_mesh
from tests.cases import mostly_slow
from tests.commands import parsed
from tests.compare.test_cost import RECIPE, WORKERS, study_of, task
from tests.compiled_runs import CPU, compiled_by, donated, kinds, marks_of, operations, text_of

pytestmark = pytest.mark.usefixtures("optimised")  # what users compile
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "use" / "accelerators.md"
PARAMETERS = 1024
FOUR = {"v5e": "v5e:2x2", "h100": "h100:4"}  # a slice for each of both compilers
tpu, gpu = compiled_by(LIBTPU), compiled_by(CUDA)
ABSENT = [pytest.param("v5e", marks=marks_of(LIBTPU)), pytest.param("h100", marks=marks_of(CUDA))]
both = pytest.mark.parametrize("chip", ABSENT)


def programs_of(chip, order, sync, units_per_step=2):
    mesh = slice_of(FOUR[chip], WORKERS)[0] if chip in FOUR else worker_mesh(WORKERS)
    optimizer = "adamw" if row_of("order", order).scaled else RECIPE.optimizer
    recipe = RECIPE._replace(units_per_step=units_per_step, optimizer=optimizer)
    of = task(127, 8)  # D = 1,024 parameters, which four workers share in slices without padding
    return shapes_of(of, recipe, row_of("order", order), row_of("sync", sync).rounds, mesh=mesh)


# Refused before anything is compiled.


@pytest.mark.parametrize("name", ["v5e", "v9:2x2", "a100:8", "v5e:2x2x2x2", "4x4"])
def test_an_unknown_slice_is_refused(name):
    with pytest.raises(ValueError, match=rf"--topology is {name}: pass CHIP:SHAPE.* v5e:4x4"):
        slice_of(name, 4)


@pytest.mark.parametrize("name,extra", [("v5e:2x2", "topology"), ("h100:4", "topology_gpu")])
def test_the_error_for_a_missing_compiler_says_what_to_install(name, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"not installed: pip install 'syncopate-jax\[{extra}\]'"):
        slice_of(name, 4)


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


OFTEN = [HELD[i] for i in (0, 1, 2, 6, 7, 9, 10, 11, 12)]  # one of each list, and of each kind


@pytest.mark.parametrize("chip", ["cpu", *ABSENT])
@pytest.mark.parametrize(
    "order,sync,units_per_step,program,collectives", mostly_slow(HELD, quick=OFTEN)
)
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
        results.append(ordering.signs.block_size_of())
        return x

    mesh, _ = slice_of(FOUR["v5e"], WORKERS)
    run = local_opt.map_workers(worker, mesh, in_specs="worker", out_specs="worker")
    jax.eval_shape(run, jax.ShapeDtypeStruct((WORKERS, 2), np.float32))
    assert results == [ordering.signs.BLOCK]
    assert ordering.signs.block_size_of() == 1, "JAX uses the CPU"


def printed(of_task, topology, **arms):
    return topologies.report(of_task, RECIPE, study_of(arms), parsed(train, "--dry_run"), topology)


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
    pattern = r"^    python -m benchmarks.topologies --topology=v5e:4x4 -- (.*)$"
    name, *arguments = shlex.split(re.search(pattern, page, re.M)[1])
    text = topologies.report(*topologies.planned(name, arguments), "v5e:4x4")
    shown = page.split("## What it prints\n\n")[1].split("\n\n## How to read it")[0]
    exact = (None, 8, 2, None, None)  # columns of the tables; all of the last line
    for one, other, columns in zip(cells(shown), cells(text), exact, strict=True):
        same = [row[:columns] for row in one if "---" not in row[0]]
        assert same == [row[:columns] for row in other if "---" not in row[0]]


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


@pytest.mark.parametrize(
    "text,expected",
    [
        (
            OF_TPU,
            [
                ("body", "all-reduce", 4 * 5 * 4 + 3 * 2, False),  # in a loop
                ("moves", "all-to-all", 32, True),  # in a computation of its own
                ("finish", "all-gather", 32, True),  # in three fusions
                ("scatters", "all-reduce", 32, False),  # in one
                ("main", "all-gather", 32, True),  # two halves are one
                ("main", "all-gather", 32, False),  # was one, as its name remembers
            ],
        ),
        (OF_CUDA, [("body", "all-reduce", 32, True), ("main", "all-to-all", 32, False)]),
    ],
)
def test_every_collective_counts_once(text, expected):
    actual = collectives_of(text)
    assert [(one.where, one.kind, one.bytes, one.asynchronous) for one in actual] == expected


def test_bytes_of_a_type():
    assert result_bytes("(u32[]{:S(2)}, pred[7]{0}, s4[3], f8e4m3fn[2,2], token[])") == 17
