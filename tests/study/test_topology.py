"""Programs compiled for TPUs and GPUs that are not there: collectives, donation, what fits."""

import importlib.util
import re

import jax
import numpy as np
import pytest
from absl import flags as absl_flags

import local_opt
import models
import ordering
from experiments import train
from experiments.study import chips
from experiments.study.chips import CHIPS, CUDA, GIB, LIBTPU
from experiments.study.compile import Refused, compile_or_refuse, shapes_of, uncached
from experiments.study.cost import order_traffic
from experiments.study.dry_run import Assumed, dry_run
from experiments.study.study import Arm, Study
from experiments.study.tables import ORDERS, SYNC_RULES
from experiments.tasks import Task
from experiments.tasks.base import abstract_set
from experiments.training.config import num_params
from ordering.exchange import slice_size
from tests.compiled_runs import (
    RECIPE,
    WORKERS,
    all_reduces,
    cells,
    check_page,
    compiled_by,
    donated,
    kinds,
    marks_of,
    programs_of,
    task,
)

pytestmark = pytest.mark.usefixtures("optimised")  # what users compile
tpu, gpu = compiled_by(LIBTPU), compiled_by(CUDA)
FOUR = {"v5e": "v5e:2x2", "h100": "h100:4"}  # a slice for each of both compilers
both = pytest.mark.parametrize(
    "chip",
    [pytest.param("v5e", marks=marks_of(LIBTPU)), pytest.param("h100", marks=marks_of(CUDA))],
)


def mesh_of(chip):
    return chips.slice_of(FOUR[chip], WORKERS).mesh


def compiled(lowered, chip="v5e"):
    return compile_or_refuse(lowered, CHIPS[chip])


# Refused before anything is compiled.


@pytest.mark.parametrize("name", ["v5e", "v9:2x2", "a100:8", "v5e:2x2x2x2", "4x4"])
def test_a_name_of_no_slice_is_refused(name):
    with pytest.raises(ValueError, match=rf"--topology is {name}: a slice is CHIP:SHAPE.* v5e:4x4"):
        chips.slice_of(name, 4)


@pytest.mark.parametrize("name,extra", [("v5e:2x2", "topology"), ("h100:4", "topology_gpu")])
def test_without_its_compiler_the_error_says_what_to_install(name, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf'not installed: pip install -e "\.\[{extra}\]"'):
        chips.slice_of(name, 4)


@pytest.mark.parametrize("more", [(), ("--dry_run", "--nocompile")])
def test_a_topology_is_of_dry_runs_alone(more):
    values = absl_flags.FlagValues()
    train.define_flags(values)
    values(["train", "--topology=v5e:2x2", "--task=digits", *more])
    with pytest.raises(ValueError, match="v5e:2x2 without a compiling dry run.*pass --dry_run"):
        train.run(values)


def test_gpus_are_on_hosts_of_eight():
    shapes = {"1": "1x1x1", "4": "1x1x4", "8": "1x1x8", "16": "1x2x8"}
    for shape, whole in shapes.items():
        described = CUDA.topology("h100", shape, CHIPS["h100"])
        assert described["topology"] == whole
        assert "device_memory_size: 80000000000 }" in described["target_config"]
    for shape in ("12", "2x8", "0"):
        with pytest.raises(ValueError, match="GPUs are counted, and hosts have 8"):
            CUDA.topology("h100", shape, CHIPS["h100"])


@tpu
def test_a_slice_that_does_not_exist_or_has_other_devices_is_refused():
    for name in ("v5e:3x5", "v5e:4"):
        with pytest.raises(ValueError, match=f"{name}, and there is no such slice.* 1, 2x2, 2x4"):
            chips.slice_of(name, 4)
    with pytest.raises(ValueError, match="workers is 8 and v5e:2x2 has 4 .*Pass --workers=4"):
        chips.slice_of("v5e:2x2", 8)


@tpu
def test_a_chip_of_two_devices_shares_its_memory():
    for name, workers, memory in (("v4:2x2x1", 8, 16), ("v5e:2x2", 4, 16), ("v2:2x2", 8, 8)):
        assert chips.slice_of(name, workers).chip.memory == memory * GIB
    assert chips.slice_of("v5e:1", 1).mesh.size == 1
    assert chips.slice_of("v4:1", 2).mesh.size == 2, "of two devices"


@gpu
def test_sixteen_gpus_are_two_hosts():
    devices = chips.slice_of("h100:16", 16).mesh.devices
    assert [device.process_index for device in devices] == [0] * 8 + [1] * 8
    with pytest.raises(ValueError, match="h100:12, and there is no such slice.* 1, 2, 4, 8, 16"):
        chips.slice_of("h100:12", 12)


# What the compiled programs hold.


@both
@pytest.mark.parametrize("order,units_per_step", [
    ("rr", 2), ("id_pair", 2), ("cd_grab", 1), ("cd_grab", 2), ("cd_grab", 3), ("cd_grab", 4),
    ("cd_grab+sketch16", 2), ("cd_grab+sketch16", 4),
])  # fmt: skip
@pytest.mark.parametrize("sync", ["parallel", "qsr"])
def test_a_fresh_step_sends_what_the_plan_says(chip, order, units_per_step, sync):
    shapes, size = programs_of(mesh_of(chip), order, sync, units_per_step), 1024
    assert num_params(task().model) == size
    found = compiled(shapes.step(True), chip)
    traffic = order_traffic(ORDERS[order], shapes.sizes, size, sync_in_step=shapes.sync_in_step)
    sent = traffic(2) / 2 + shapes.sync_in_step
    if ORDERS[order].sketch and not shapes.sync_in_step:
        sent = 0  # the gather waits for the sync
    assert all_reduces(kinds(found), size) == pytest.approx(sent)
    known = [name for name, count in found.counted.items() if count]
    assert known == (["flops", "bytes accessed", "cycles"] if chip == "v5e" else [])


@tpu
def test_a_gather_that_is_spread_over_fusions_counts_once():
    """LeNet is large enough for libtpu to gather the mean gradient beside the inner products."""
    on, model = chips.slice_of("v5e:4x4", 16), models.lenet()
    data = abstract_set(640, x=((28, 28, 1), np.float32), y=((), np.int32))
    recipe = RECIPE._replace(workers=16, units_per_step=1)
    rounds = SYNC_RULES["parallel"].rounds
    shapes = shapes_of(
        Task("shapes", model, data, data, recipe), recipe, ORDERS["cd_grab"], rounds, mesh=on.mesh
    )
    found = compiled(shapes.step(True)).collectives
    padded = 4 * slice_size(num_params(model), 16) * 16
    assert sorted((c.kind, c.bytes, c.asynchronous) for c in found) == [
        ("all-gather", padded, True),
        ("all-reduce", 4 * 16 * 17, False),
        ("all-to-all", padded, False),
    ]


@tpu
def test_other_programs_send_a_mean_a_gather_of_sketches_or_nothing():
    """An echoed step the mean gradient, a sync the parameters, and what waited with it."""
    mesh = mesh_of("v5e")
    parallel, local = (programs_of(mesh, "cd_grab", sync) for sync in ("parallel", "qsr"))
    assert kinds(compiled(parallel.step(False))) == {"all-reduce": 4 * 1024}
    assert kinds(compiled(local.step(False))) == {}
    assert kinds(compiled(local.end(True, False))) == {"all-reduce": 4 * 1024}
    sketched = kinds(compiled(programs_of(mesh, "cd_grab+sketch16", "qsr").end(True, False)))
    assert sorted(sketched) == ["all-gather", "all-reduce"]
    own, dealt = (
        kinds(compiled(programs_of(mesh, order, "qsr").end(False, True)))
        for order in ("id_pair", "id_pair+dealt")
    )
    # Units are dealt by a bit for a pair, in one small collective: a row of the chip's lanes.
    assert own == {} and len(dealt) == 1 and sum(dealt.values()) <= 4 * 128


@tpu
def test_blocks_of_pairs_are_those_of_the_chip_that_is_traced_for():
    found = []

    def worker(x):
        found.append(ordering.kernel.block_size_of())
        return x

    run = local_opt.lift(worker, mesh_of("v5e"), inputs="owned", outputs="owned")
    jax.eval_shape(run, jax.ShapeDtypeStruct((WORKERS, 2), np.float32))
    assert found == [ordering.kernel.BLOCK]
    assert ordering.kernel.block_size_of() == 1, "JAX uses the CPU"


@both
@pytest.mark.parametrize("order,sync", [("rr", "parallel"), ("cd_grab", "qsr")])
def test_all_of_the_state_is_donated(chip, order, sync):
    shapes = programs_of(mesh_of(chip), order, sync)
    options = dict(CHIPS[chip].compiler.options) or None
    with uncached():
        text = shapes.step(True).compile(compiler_options=options).as_text()
    assert donated(text) == len(jax.tree.leaves(shapes.state))


def printed(of_task, topology, **arms):
    study = Study("one", arms, "", None, (), ())
    return dry_run(of_task, RECIPE, study, Assumed(topology=topology))


@both
def test_what_does_not_fit_says_how_much_is_missing(chip):
    width, classes = (2**21, 1024) if chip == "v5e" else (2**21, 2048)  # 9 or 17 GB of parameters
    text = printed(task(width, classes), FOUR[chip], run=Arm("CD-GraB", "cd_grab", "qsr"))
    start = r"fresh step, CD-GraB: does not fit. It needs [\d.]+ GB of [\d.]+ GB; [\d.]+ GB are mis"
    assert re.search(start, text) and "a sketch for an exact order" in text
    assert "or another chip: " in text and "does not fit: " in text.split("\n\n")[1]


@gpu
def test_memory_is_compared_where_the_compiler_refuses_nothing():
    lowered, chip = programs_of(mesh_of("h100"), "cd_grab", "parallel").step(True), CHIPS["h100"]
    found = compile_or_refuse(lowered, chip).memory
    needed = found["arguments"] + found["outputs"] + found["temporaries"] - found["donated"]
    assert found["peak"] == needed, "all buffers are there at once"
    assert compile_or_refuse(lowered, chip._replace(hbm=needed - 1)) == Refused(needed, needed - 1)
    assert compile_or_refuse(lowered, chip._replace(hbm=needed)).peak == needed


@both
def test_a_dry_run_tells_of_all_programs_and_whether_they_fit(chip):
    arm = Arm("all three", "cd_grab", "qsr", "fixed")
    text = printed(task(), FOUR[chip], run=arm, plain=Arm("none", "rr"))
    tables = cells(text)
    assert [row[:2] for row in tables[2][2:]] == [
        ["fresh step", "all three"], ["echoed step", "all three"], ["sync", "all three"],
        ["epoch's end", "all three"], ["fresh step", "none"],  # drawn on the host
    ]  # fmt: skip
    assert sorted(row[:4] for row in tables[3][2:]) == [
        ["fresh step", "all three", "all-reduce", "1"],
        ["fresh step", "all three", "all-to-all", "1"],
        ["fresh step", "none", "all-reduce", "1"],
        ["sync", "all three", "all-reduce", "1"],
    ]
    assert re.search(r"All programs fit: [\d.]+ [kM]B of [\d.]+ GB at most\.$", text)


@both
def test_the_page_shows_what_its_command_prints(chip):
    check_page(*{
        "v5e": ("v5e:4x4", "## What it prints\n\n", "\n\n## How to read it"),
        "h100": ("h100:8", "--topology=h100:8\n\n", "\n\nWhat differs"),
    }[chip])  # fmt: skip
