"""Programs compiled for TPU slices that are not there: collectives, loops, donation, what fits."""

import importlib.util
import re

import jax
import numpy as np
import pytest
from absl import flags as absl_flags

import ordering
from experiments import train
from experiments.compiled import hlo, slices
from experiments.compiled.chips import GIB, LIBTPU
from experiments.compiled.lowering import shapes_of
from experiments.compiled.programs import available_memory, compile_or_refuse, uncached
from experiments.studies.cost import order_traffic
from experiments.studies.dry_run import Assumed, calls_of, dry_run, run_of
from experiments.studies.on_slice import Use, cycles_of
from experiments.studies.study import Arm, Study
from experiments.studies.tables import ORDERS, SYNC_RULES
from experiments.tasks import Task
from experiments.tasks.base import abstract_set
from experiments.training.parts import num_params
from local_opt import runners
from ordering.exchange import slice_size
from syncopate import models
from tests.abstract_runs import (
    RECIPE,
    WORKERS,
    all_reduces,
    cells,
    check_page,
    compiled_by,
    kinds,
    programs_of,
    task,
)

tpu = compiled_by(LIBTPU)

# Refused before anything is compiled.


@pytest.mark.parametrize("name", ["v5e", "v9:2x2", "a100:8", "v5e:2x2x2x2", "4x4"])
def test_a_name_of_no_slice_is_refused(name):
    with pytest.raises(ValueError, match=rf"--topology is {name}: a slice is CHIP:SHAPE.* v5e:4x4"):
        slices.slice_of(name, 4)


def test_without_libtpu_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'not installed: pip install -e "\.\[topology\]"'):
        slices.slice_of("v5e:2x2", 4)


@pytest.mark.parametrize("more", [(), ("--dry_run", "--nocompile")])
def test_a_topology_is_of_dry_runs_alone(more):
    values = absl_flags.FlagValues()
    train.define_flags(values)
    values(["train", "--topology=v5e:2x2", "--task=digits", *more])
    with pytest.raises(ValueError, match="v5e:2x2 without a compiling dry run.*pass --dry_run"):
        train.run(values)


@pytest.mark.parametrize("sync,echo,reads,fresh,echoed", [
    ("parallel", "none", False, 1, 0),  # 40 loads to an epoch
    ("parallel", "none", True, 40, 0),
    ("parallel", "fixed", False, 10, 10),  # a load, then three echoes of it
    ("constant", "none", False, 10, 0),  # rounds of four steps
])  # fmt: skip
def test_a_call_holds_all_steps_between_two_events_of_the_host(sync, echo, reads, fresh, echoed):
    arm, recipe = Arm("one", "rr", sync, echo), RECIPE._replace(unit_size=1)
    run = run_of(task(), recipe, arm, None, step_seconds=1.0)
    found = calls_of(arm, run, reads)
    assert (found.fresh, found.echoed, found.steps) == (fresh, echoed, 40)


def test_cycles_weigh_steps_and_calls():
    contents = hlo.Contents((), (hlo.Loop(4, 3, 1, "inner"), hlo.Loop(None, 50, 1, "steps")), 80)
    assert cycles_of(contents, Use(None, steps=100, calls=2)) == 100 * 50 + 2 * (80 - 50)
    assert cycles_of(contents, Use(None, steps=0, calls=2)) == 2 * 80, "a sync has no steps"


@tpu
def test_a_slice_that_does_not_exist_or_has_other_devices_is_refused():
    with pytest.raises(ValueError, match="v5e:3x5, and there is no such slice.* 1, 2x2, 2x4, 4x4"):
        slices.slice_of("v5e:3x5", 15)
    with pytest.raises(ValueError, match="v5e:4, and there is no such slice.* 1, 2x2, 2x4, 4x4"):
        slices.slice_of("v5e:4", 4)
    with pytest.raises(ValueError, match="workers is 8 and v5e:2x2 has 4 .*=4, or .*=v5e:2x4"):
        slices.slice_of("v5e:2x2", 8)
    with pytest.raises(ValueError, match=r"Pass --workers=4\.$"):
        slices.slice_of("v5e:2x2", 3)


@tpu
def test_a_chip_of_two_devices_shares_its_memory():
    assert slices.slice_of("v4:2x2x1", 8).chip.memory == 16 * GIB
    assert slices.slice_of("v5e:2x2", 4).chip.memory == 16 * GIB
    assert slices.slice_of("v2:2x2", 8).chip.memory == 8 * GIB


@tpu
def test_a_slice_may_be_one_chip():
    assert slices.slice_of("v5e:1", 1).mesh.size == 1
    assert slices.slice_of("v4:1", 2).mesh.size == 2, "of two devices"
    with pytest.raises(ValueError, match=r"Pass --workers=4, or --topology=v5e:1\."):
        slices.slice_of("v5e:2x2", 1)


# What the compiled programs hold.


@pytest.fixture(scope="module")
def mesh():
    return slices.slice_of("v5e:2x2", WORKERS).mesh


@tpu
@pytest.mark.parametrize("order,units_per_step", [
    ("rr", 2), ("id_pair", 2), ("cd_grab", 1), ("cd_grab", 2), ("cd_grab", 3), ("cd_grab", 4),
    ("sketch16", 2), ("sketch16", 4),
])  # fmt: skip
@pytest.mark.parametrize("sync", ["parallel", "qsr"])
def test_a_fresh_step_sends_what_the_plan_says(mesh, order, units_per_step, sync):
    shapes = programs_of(mesh, order, sync, units_per_step)
    compiled = compile_or_refuse(shapes.step(True))
    size = num_params(task().model)
    traffic = order_traffic(ORDERS[order], shapes.sizes, size, sync_in_step=shapes.sync_in_step)
    sent = traffic(2) / 2 + shapes.sync_in_step
    if ORDERS[order].sketch and not shapes.sync_in_step:
        sent = 0  # the gather waits for the sync
    assert size == 1024
    assert all_reduces(kinds(compiled), size) == pytest.approx(sent)


@tpu
def test_a_gather_that_is_spread_over_fusions_counts_once():
    """LeNet is large enough for libtpu to gather the mean gradient beside the inner products."""
    on, model = slices.slice_of("v5e:4x4", 16), models.lenet()
    data = abstract_set(640, x=((28, 28, 1), np.float32), y=((), np.int32))
    recipe = RECIPE._replace(workers=16, units_per_step=1)
    rounds = SYNC_RULES["parallel"].rounds
    shapes = shapes_of(
        Task("shapes", model, data, data, recipe), recipe, ORDERS["cd_grab"], rounds, mesh=on.mesh
    )
    found = compile_or_refuse(shapes.step(True)).contents.collectives
    padded = 4 * slice_size(num_params(model), 16) * 16
    assert {(c.kind, c.bytes, c.asynchronous, c.times) for c in found} == {
        ("all-to-all", padded, False, 1),
        ("all-reduce", 4 * 16 * 17, False, 1),
        ("all-gather", padded, True, 1),
    }
    assert len(found) == 3


@tpu
def test_an_echoed_step_sends_the_mean_gradient_alone(mesh):
    parallel, local = (
        compile_or_refuse(programs_of(mesh, "cd_grab", sync).step(False))
        for sync in ("parallel", "qsr")
    )
    assert kinds(parallel) == {"all-reduce": 4 * 1024} and kinds(local) == {}


@tpu
def test_a_sync_is_one_all_reduce_and_a_gather_where_sketches_wait(mesh):
    exact, sketched = (
        compile_or_refuse(programs_of(mesh, order, "qsr").end(True, False))
        for order in ("cd_grab", "sketch16")
    )
    assert kinds(exact) == {"all-reduce": 4 * 1024}
    assert sorted(kinds(sketched)) == ["all-gather", "all-reduce"]


@tpu
@pytest.mark.parametrize("pairs", [1, 2])
def test_the_signs_are_the_one_loop_with_known_turns(mesh, pairs):
    """One turn per pair of every worker; the steps of a segment are not known."""
    compiled = compile_or_refuse(programs_of(mesh, "cd_grab", "parallel", 2 * pairs).step(True))
    steps, signs = compiled.contents.loops
    assert (steps.trips, signs.trips) == (None, pairs * WORKERS)
    assert compiled.contents.cycles > steps.cycles > signs.trips * signs.cycles > 0
    plain = compile_or_refuse(programs_of(mesh, "rr", "parallel", 2 * pairs).step(True))
    assert [loop.trips for loop in plain.contents.loops] == [None]
    assert plain.flops < compiled.flops and plain.contents.cycles < compiled.contents.cycles


@tpu
def test_blocks_of_pairs_are_those_of_the_chip_that_is_traced_for(mesh):
    found = []

    def worker(x):
        found.append(ordering.balance.default_block_size(1024))
        return (x,)

    run = runners.over_mesh(mesh)(worker, owned_in=(True,), owned_out=(True,))
    jax.eval_shape(run, jax.ShapeDtypeStruct((WORKERS, 2), np.float32))
    assert found == [ordering.balance.default_block_size(1024, backend="tpu")]
    assert ordering.balance.default_block_size(1024) != found[0], "JAX uses the CPU"


@tpu
@pytest.mark.parametrize("order,sync", [("rr", "parallel"), ("cd_grab", "qsr")])
def test_all_of_the_state_is_donated(mesh, order, sync):
    shapes = programs_of(mesh, order, sync)
    with uncached():
        text = shapes.step(True).compile().as_text()
    aliases = re.search(r"input_output_alias=\{(.*?) \}", text)[1]
    assert aliases.count("alias)") == len(jax.tree.leaves(shapes.state))


@tpu
def test_what_does_not_fit_says_how_much_is_missing(mesh):
    available = available_memory(mesh)
    assert 0.9 < available / (16 * GIB) < 1
    wide = task(width=2**21, classes=1024)  # 8 GiB of parameters
    one = Study("one", {"run": Arm("CD-GraB", "cd_grab", "qsr")}, "", None, (), ())
    text = dry_run(wide, RECIPE, one, Assumed(topology="v5e:2x2"))
    start = r"fresh step, CD-GraB, local rounds: does not fit. It needs [\d.]+ GB of 16.9 GB"
    assert re.search(start, text) and "GB are missing" in text
    assert "the order sketch1024" in text and "smaller model" in text
    assert re.search(r"another chip: v5p", text) and "--unit_size" not in text


@tpu
def test_a_dry_run_compares_the_run_with_itself_without_each_decision():
    arm = Arm("all three", "cd_grab", "qsr", "fixed")
    one = Study("one", {"run": arm, "plain": Arm("none", "rr")}, "", None, (), ())
    text = dry_run(task(), RECIPE, one, Assumed(topology="v5e:2x2"))
    tables = cells(text)
    run, plain = (dict(zip(tables[1][0], row, strict=True)) for row in tables[1][2:])
    assert {plain[f"{name} costs"] for name in ("order", "plan", "echo")} == {"-"}
    order, echo = (
        [float(n) for n in re.findall(r"([\d.]+) x", run[f"{name} costs"])]
        for name in ("order", "echo")
    )
    assert len(order) == len(echo) == 3 and min(order) > 1 > max(echo)
    programs = {tuple(row[:3]) for row in tables[2][2:]}
    assert ("echoed step", "CD-GraB", "local rounds") in programs
    assert ("fresh step", "CD-GraB", "parallel rounds") in programs
    assert ("epoch's end", "D-RR", "local rounds") not in programs, "drawn on the host"
    assert re.search(r"All programs fit: [\d.]+ kB of 16.9 GB at most\.$", text)


@tpu
def test_the_page_shows_what_its_command_prints():
    check_page("v5e:4x4", "## What it prints\n\n", "\n\n## How to read it")


@tpu
def test_units_are_dealt_by_their_signs(mesh):
    """A bit for a pair, in one small collective beside what CD-GraB's own epoch's end has."""
    own, dealt = (
        kinds(compile_or_refuse(programs_of(mesh, order, "qsr").end(False, True)))
        for order in ("id_pair", "id_pair_dealt")
    )
    assert own == {}
    assert len(dealt) == 1 and sum(dealt.values()) <= 4 * 128  # a row of the chip's lanes
