"""The predicted cost of a run: what an order sends, prices, and the dry run."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
import models
from experiments import train
from experiments.cluster.devices import worker_mesh
from experiments.study import cost
from experiments.study.arms import WIRES, Arm, row_of
from experiments.study.cost import dry_run
from experiments.tasks import Recipe, Task
from experiments.tasks.base import abstract_set
from experiments.training.config import OrderSetting, Sizes
from local_opt import sync_bytes
from tests.commands import parsed
from tests.compiled_runs import kinds

WORKERS = 4


def over_mesh(function, inputs):
    """A worker's function over devices, with owned inputs and outputs."""
    mesh = worker_mesh(WORKERS)
    return local_opt.lift(function, mesh, f"{inputs} -> owned")


@pytest.mark.parametrize("per_step,size", [(1, 1), (2, 2), (3, 2), (4, 3)])
def test_the_cost_of_an_order_equals_the_collectives_of_its_step(per_step, size):
    units = 2 * per_step + size % per_step  # the last step of an epoch may be the shorter one
    order = row_of("order", "cd_grab").make(OrderSetting(units, per_step))
    params = jnp.zeros(18)

    def step(state, rows):
        return order.observe(state, rows)

    init = over_mesh(lambda key: order.init(key, params), "owned")
    state = jax.eval_shape(init, jax.random.split(jax.random.key(0), WORKERS))
    rows = jax.ShapeDtypeStruct((WORKERS, size, 18), jnp.float32)
    observe = over_mesh(step, "owned owned")
    found = kinds(cost.collectives_of(jax.jit(observe).lower(state, rows).compile().as_text()))
    # Of n numbers an all-to-all sends (W - 1) / W n, an all-reduce 2 (W - 1) / W n.
    sent = (found.get("all-to-all", 0) / 2 + found.get("all-reduce", 0)) / 4 / 18
    sizes, total = Sizes(WORKERS, units, per_step, 1), 2 + bool(size % per_step)  # loads
    traffic = cost.order_traffic(row_of("order", "cd_grab"), sizes, 18)
    assert traffic(total) - traffic(total - 1) == pytest.approx(sent)
    assert traffic(2 * total + 1) == pytest.approx(2 * traffic(total) + traffic(1))
    assert cost.order_traffic(row_of("order", "id_pair"), sizes, 18)(7) == 0
    assert cost.order_traffic(row_of("order", "cd_grab"), sizes._replace(workers=1), 18)(7) == 0


def test_dealt_orders_send_their_signs_at_the_end_of_an_epoch():
    sizes, size = Sizes(WORKERS, 20, 4, 1), 18
    order = row_of("order", "id_pair+dealt").make(OrderSetting(20, 4))
    keys = jax.random.split(jax.random.key(0), WORKERS)
    init = over_mesh(lambda key: order.init(key, jnp.zeros(size)), "owned")
    end = over_mesh(order.next_epoch, "owned")
    state = jax.eval_shape(init, keys)
    found = kinds(cost.collectives_of(jax.jit(end).lower(state).compile().as_text()))
    assert found == {"all-gather": 2 * WORKERS}, "10 pairs in 2 bytes"
    # Of n bytes of every worker an all-gather sends (W - 1) n, an all-reduce 2 (W - 1) / W n.
    sent = cost.order_traffic(row_of("order", "id_pair+dealt"), sizes, size)
    per_epoch = found["all-gather"] / 2 / (4 * size)
    assert sent(4) == 0 and sent(5) == sent(9) == pytest.approx(per_epoch)
    exact, dealt = (
        cost.order_traffic(row_of("order", n), sizes, size) for n in ("cd_grab", "cd_grab+dealt")
    )
    assert dealt(12) == pytest.approx(exact(12) + 2 * per_epoch)


def test_a_price_takes_the_slower_of_steps_and_loads():
    run = [{"step": 50, "loads": 40, "allreduces": 5}, {"step": 100, "loads": 45, "allreduces": 10}]
    # 40 loads of 4 steps hold the first 50 steps up, syncs too; 5 hide behind the others.
    found = [cost.price(run, machine) for machine in cost.machines(4.0, 2.0)]
    assert found == [100, 160 + 50, 100 + 20, 160 + 50 + 10]


class Arms(collections.namedtuple("Arms", "arms speeds")):
    """The part of a study that a dry run needs."""


RECIPE = Recipe(
    WORKERS, 2, 4, (0.1,), total_steps=40, schedule="cosine", floor=1e-3, h_base=4, metric="loss",
    target=0.5,
)  # fmt: skip


def task(width=64):
    data = abstract_set(322, x=((width,), np.float32), y=((), np.int32))
    model = models.softmax_regression(num_features=width, num_classes=10)
    return Task("shapes", model, data, data, RECIPE)


def rows_of(text):
    """{head: cell} of the lines of the second table."""
    lines = [
        [c.strip() for c in x.strip("|").split("|")] for x in text.split("\n\n")[1].split("\n")
    ]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def test_a_dry_run_covers_every_arm():
    arms = {
        "rr": Arm("D-RR", "rr"),
        "cd_grab": Arm("CD-GraB", "cd_grab"),
        "constant": Arm("constant H", "rr", "constant"),
        "all": Arm("all three", "cd_grab", "constant", "fixed"),
    }
    text = dry_run(task(), RECIPE, Arms(arms, ()), parsed(train, "--nocompile"))
    assert re.search(r"\| parameters +\| 650 \(2.6 kB\)", text)
    assert re.search(r"\| training examples +\| 322 ", text) and "| loss 0.5 " in text
    rows = dict(zip(arms, rows_of(text), strict=True))
    assert {r["steps"] for r in rows.values()} == {"40"}
    assert [r["loads"] for r in rows.values()] == ["40", "40", "40", "10"]
    assert [r["rounds"] for r in rows.values()] == ["40", "40", "10", "10"]
    ring = sync_bytes(650, num_workers=WORKERS)
    assert rows["rr"]["sent per worker"] == f"{40 * ring / 1e3:.3g} kB"
    assert rows["constant"]["sent per worker"] == f"{10 * ring / 1e3:.3g} kB"
    traffic = cost.order_traffic(row_of("order", "cd_grab"), Sizes(WORKERS, 20, 2, 4), 650)(40)
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
    rows = rows_of(dry_run(task(10_000), RECIPE, Arms(arms, (1.0, 4.0)), parsed(train)))
    assert [r["R"] for r in rows] == ["1"] * 3 + ["4"] * 3
    slow = rows[3:]
    assert {r["steps"] for r in slow} == {"80"}
    assert [r["loads"] for r in slow] == [r["rounds"] for r in slow] == ["80", "20", "20"]
    model = 4e-6 * 10_001 * 10  # in MB; parameters, momentum and batch lie in memory at least
    assert all(2 * model < float(r["memory of a worker"].removesuffix(" MB")) for r in slow)


@pytest.mark.parametrize("sync,waiting", [("parallel", 0), ("qsr", 10 * 64)])
def test_the_state_of_a_sketched_order_has_the_size_of_its_numbers(sync, waiting):
    """Two orders of 20, at most three counters, and a sum; under local rounds also pairs."""
    shapes = cost.shapes_of(
        task(400), RECIPE, row_of("order", "cd_grab+sketch64"), row_of("sync", sync).rounds
    )
    found = shapes.bytes_of("orders")
    assert shapes.sizes == Sizes(4, 20, 2, 4) and shapes.sync_in_step == (sync == "parallel")
    assert 4 * (2 * 20 + 64 + waiting) <= found <= 4 * (2 * 20 + 64 + waiting + 3)


@pytest.mark.parametrize("wire", WIRES)
def test_a_compressed_wire_sends_its_share_of_an_all_reduce(wire):
    sizes = Sizes(workers=8, num_units=10, units_per_step=1, unit_size=16)
    given = task(99_999), row_of("order", "rr")  # of 10^6 parameters
    sent = cost.traffic(*given, row_of("sync", f"qsr+{wire}"), sizes, False)
    narrow = sync_bytes(10**6, num_workers=8, wire=WIRES[wire]())
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
        found = local_opt.count_collectives(over_mesh(step, "owned"), rows)
        compiled = jax.jit(over_mesh(step, "owned")).lower(rows).compile().as_text()
        assert found == collections.Counter(one.kind for one in cost.collectives_of(compiled))
        return found

    rows = local_opt.owned(jnp.ones(3), worker_mesh(WORKERS))
    assert count(step) == {"all-reduce": 3, "all-gather": 1, "collective-permute": 1}
    assert count(jnp.sin) == {}
    simulated = local_opt.lift(step, WORKERS, "owned -> owned")
    assert local_opt.count_collectives(jax.jit(simulated), jnp.ones((WORKERS, 3))) == {}
    rounds = local_opt.local_rounds(optax.sgd(0.1))
    assert count(lambda x: rounds.update(x, rounds.init(x), x)[0]) == {}
    assert count(lambda x: rounds.sync(x, rounds.init(x))[0]) == {"all-reduce": 1}
    with pytest.raises(ValueError, match=r"step is .*: pass a function of \(args.0.\)"):
        local_opt.count_collectives(lambda: 0, rows)
