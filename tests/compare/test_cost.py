"""What a run costs, before it: what is sent, prices, and dry runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import local_opt
import models
from benchmarks.hlo import collectives_of
from experiments import train
from experiments.compare import cost
from experiments.compare.arms import Arm, row_of
from experiments.compare.cost import dry_run, order_traffic, shapes_of
from experiments.compare.rows import COMPRESSORS
from experiments.compare.study import Study
from experiments.data import Recipe, Task
from experiments.data.base import abstract_set
from experiments.distributed.devices import worker_mesh
from experiments.trainer.config import OrderSetting, Sizes
from local_opt.costs import sync_bytes
from tests.commands import parsed, rows_of
from tests.compiled_runs import kinds

pytestmark = pytest.mark.usefixtures("optimised")  # what users compile
WORKERS = 4
RECIPE = Recipe(
    WORKERS,
    2,
    4,
    (0.1,),
    total_steps=40,
    schedule="cosine",
    floor=1e-3,
    h_base=4,
    metric="loss",
    target=0.5,
)


def task(width=64, classes=10):
    data = abstract_set(322, x=((width,), np.float32), y=((), np.int32))
    model = models.softmax_regression(num_features=width, num_classes=classes)
    return Task("shapes", model, data, data, RECIPE)


def study_of(arms, speeds=()):
    return Study("one", arms, "", None, (), (), speeds=speeds)


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
    text = dry_run(task(), RECIPE, study_of(arms), parsed(train, "--dry_run", "--nocompile"))
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
