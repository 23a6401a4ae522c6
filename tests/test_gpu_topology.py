"""Programs compiled for GPUs that are not there: collectives, loops, donation, what fits."""

import importlib.util
import re

import jax
import pytest

from experiments.compiled import slices
from experiments.compiled.chips import CHIPS, CUDA
from experiments.compiled.programs import Refused, compile_or_refuse, uncached
from experiments.studies.cost import order_traffic
from experiments.studies.dry_run import Assumed, dry_run
from experiments.studies.study import Arm, Study
from experiments.studies.tables import ORDERS
from experiments.training.parts import num_params
from tests.abstract_runs import (
    RECIPE,
    WORKERS,
    all_reduces,
    check_page,
    compiled_by,
    kinds,
    programs_of,
    task,
)

gpu = compiled_by(CUDA)


@pytest.fixture(scope="module")
def mesh():
    return slices.slice_of("h100:4", WORKERS).mesh


def compiled(lowered, **more):
    return compile_or_refuse(lowered, options=CUDA.options, **more)


def test_without_the_plugin_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'cuda12.* not installed: .*"\.\[topology_gpu\]"'):
        slices.slice_of("h100:8", 8)


@pytest.mark.parametrize("shape,whole", [("1", "1x1x1"), ("4", "1x1x4"), ("8", "1x1x8"),
                                         ("16", "1x2x8")])  # fmt: skip
def test_gpus_are_on_hosts_of_eight(shape, whole):
    described = CUDA.topology("h100", shape, CHIPS["h100"])
    assert described["topology"] == whole
    assert "device_memory_size: 80000000000 }" in described["target_config"]


@pytest.mark.parametrize("shape", ["12", "2x8", "0"])
def test_other_numbers_of_gpus_are_refused(shape):
    with pytest.raises(ValueError, match="GPUs are counted, and hosts have 8"):
        CUDA.topology("h100", shape, CHIPS["h100"])


@gpu
def test_a_slice_that_does_not_exist_or_has_other_devices_is_refused():
    with pytest.raises(ValueError, match="h100:12, and there is no such slice.* 1, 2, 4, 8, 16"):
        slices.slice_of("h100:12", 12)
    with pytest.raises(ValueError, match="workers is 16 and h100:8 has 8 .*=8, or .*=h100:16"):
        slices.slice_of("h100:8", 16)


@gpu
def test_sixteen_gpus_are_two_hosts():
    devices = slices.slice_of("h100:16", 16).mesh.devices
    assert [device.process_index for device in devices] == [0] * 8 + [1] * 8


@gpu
@pytest.mark.parametrize("order,units_per_step", [("rr", 2), ("cd_grab", 1), ("cd_grab", 2),
                                                  ("cd_grab", 4), ("sketch16", 2)])  # fmt: skip
@pytest.mark.parametrize("sync", ["parallel", "qsr"])
def test_a_fresh_step_sends_what_the_plan_says(mesh, order, units_per_step, sync):
    shapes = programs_of(mesh, order, sync, units_per_step)
    found, size = compiled(shapes.step(True)), num_params(task().model)
    traffic = order_traffic(ORDERS[order], shapes.sizes, size, sync_in_step=shapes.sync_in_step)
    sent = traffic(2) / 2 + shapes.sync_in_step
    if ORDERS[order].sketch and not shapes.sync_in_step:
        sent = 0  # the gather waits for the sync
    assert all_reduces(kinds(found), size) == pytest.approx(sent)
    assert (found.flops, found.contents.cycles) == (None, None)


@gpu
def test_an_order_adds_an_exchange_and_a_loop_of_signs(mesh):
    plain, ordered = (
        compiled(programs_of(mesh, order, "parallel").step(True)).contents
        for order in ("rr", "cd_grab")
    )
    assert [(c.kind, c.times, c.bytes) for c in plain.collectives] == [("all-reduce", 1, 4096)]
    assert sorted((c.kind, c.times, c.bytes) for c in ordered.collectives) == [
        ("all-reduce", 1, 4 * (1024 + 4 * 5)),  # the inner products of four pairs with it
        ("all-to-all", 1, 4096),
    ]
    assert [loop.trips for loop in plain.loops] == [None]
    assert [loop.trips for loop in ordered.loops] == [None, WORKERS]


@gpu
@pytest.mark.parametrize("order,sync", [("rr", "parallel"), ("cd_grab", "qsr")])
def test_all_of_the_state_is_donated(mesh, order, sync):
    shapes = programs_of(mesh, order, sync)
    with uncached():
        text = shapes.step(True).compile(compiler_options=dict(CUDA.options)).as_text()
    aliases = re.search(r"input_output_alias=\{(.*?) \}", text)[1]
    assert aliases.count("alias)") == len(jax.tree.leaves(shapes.state))


@gpu
def test_a_program_that_the_memory_does_not_hold_is_refused(mesh):
    lowered = programs_of(mesh, "cd_grab", "parallel").step(True)
    found = compiled(lowered, memory=CHIPS["h100"].memory)
    needed = found.arguments + found.outputs + found.temporaries - found.donated
    assert found.peak == needed, "all buffers are there at once"
    assert compiled(lowered, memory=needed - 1) == Refused(needed, needed - 1)
    assert compiled(lowered, memory=needed).peak == needed


@gpu
def test_a_dry_run_says_what_gpus_lack():
    wide = task(width=2**22, classes=2048)  # 34 GB of parameters, and as much for momentum
    one = Study("one", {"run": Arm("CD-GraB", "cd_grab", "qsr")}, "", None, (), ())
    text = dry_run(wide, RECIPE, one, Assumed(topology="h100:4"))
    assert re.search(r"does not fit. It needs [\d.]+ GB of 80 GB; [\d.]+ GB are missing", text)
    assert "the order sketch1024" in text


@gpu
def test_a_dry_run_for_gpus_shows_memory_and_collectives_and_no_cycles():
    one = Study("one", {"run": Arm("CD-GraB", "cd_grab", "qsr")}, "", None, (), ())
    text = dry_run(task(), RECIPE, one, Assumed(topology="h100:4"))
    assert "| h100:4, 4 x H100, a worker each |" in text
    assert re.search(r"\| fresh step +\| CD-GraB .*\| - +\| - +\| - +\| [\d.]+ s", text)
    assert re.search(r"\| fresh step +\| CD-GraB .*\| all-to-all \| 1 +\| 4.1 kB", text)
    assert re.search(r"All programs fit: [\d.]+ MB of 80 GB at most\.$", text)


@gpu
def test_the_page_shows_what_its_command_prints():
    check_page("h100:8", "--topology=h100:8\n\n", "\n\nWhat differs")
