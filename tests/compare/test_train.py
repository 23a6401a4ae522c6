"""The three decisions in one loop: equal to a slow reference, however it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.compare.arms import row_of
from experiments.data.base import check_recipe
from experiments.trainer import config, program
from tests import reference
from tests.cases import mostly_slow
from tests.little_run import (
    PER_STEP,
    SETTING,
    STEPS,
    UNITS,
    WORKERS,
    assert_same,
    built,
    compiled,
    plans_of,
    task,
    timeless,
    trained,
)
from tests.refused import refuses
from tests.sources import EpochSource


def slow_run(plans, start):
    """The loop by hand, worker by worker: (parameters, all orders)."""
    model, train = task().model, task().train
    grad = jax.jit(jax.grad(lambda p, batch: jnp.mean(model.loss(p, batch, None))))
    units = np.arange(WORKERS * UNITS).reshape(WORKERS, UNITS)

    def flat(tree):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    first = jax.tree.map(lambda p: np.asarray(p[0], np.float64), start.params)
    shapes, treedef = jax.tree.flatten(first)
    params = [flat(first) for _ in range(WORKERS)]
    momentum = [np.zeros_like(params[0]) for _ in range(WORKERS)]
    current, load, orders, seen = np.asarray(start.orders.current), 0, [], None

    def gradient(vector, examples):
        parts = np.split(vector, np.cumsum([s.size for s in shapes])[:-1])
        leaves = [np.float32(p.reshape(s.shape)) for p, s in zip(parts, shapes, strict=True)]
        batch = {name: values[examples] for name, values in train.items()}
        return np.float64(flat(grad(jax.tree.unflatten(treedef, leaves), batch)))

    for t in range(STEPS):
        if plans.echo.fresh[t]:
            if load % 4 == 0:
                if load:
                    current = reference.cd_grab_epoch(current, seen)
                orders.append(current)
                seen = np.zeros((WORKERS, UNITS, params[0].size))
            places = slice(load % 4 * PER_STEP, (load % 4 + 1) * PER_STEP)
            load += 1
        for w in range(WORKERS):
            mine = current[w][places]
            examples = units[w][mine]
            if plans.echo.fresh[t]:
                seen[w, mine] = [gradient(params[w], [e]) for e in examples]
            g = gradient(params[w], examples) + SETTING.weight_decay * params[w]
            momentum[w] = SETTING.momentum * momentum[w] + g
            params[w] = params[w] - plans.rates[t] * momentum[w]
        if plans.sync.syncs_after(t):
            params = [np.mean(params, axis=0)] * WORKERS
    return params[0], np.stack(orders)


@pytest.mark.parametrize(
    "sync,echo",
    [
        ("qsr", "diffusion+cosine"),
        ("coins", "bernoulli+cosine"),  # the echoing paper's Algorithm 2
    ],
)
def test_the_loop_equals_a_slow_reference(sync, echo):
    plans, program, results = plans_of(sync, echo), built("cd_grab", sync), []
    params, orders = slow_run(plans, program.init(0))
    begun = plans.echo.load_steps[::4]  # before the first load of every epoch

    def keep(step, state):
        results.append(np.asarray(state.orders.current))
        return {}

    outcome, records = trained(program, plans, evaluate=keep, evaluate_at=begun)
    np.testing.assert_array_equal(results[: len(begun)], orders)
    assert len(np.unique(orders[:, 0], axis=0)) > 8  # so the orders do change
    flat = np.concatenate([np.ravel(leaf[1]) for leaf in jax.tree.leaves(outcome.state.params)])
    np.testing.assert_allclose(flat, params, rtol=2e-4, atol=2e-5)  # 60 steps of float32
    assert [r["step"] for r in records] == [*begun, STEPS]
    last, loads, rounds = records[-1], plans.echo.loads, plans.sync.rounds
    assert (last["loads"], last["rounds"], last["allreduces"]) == (loads, rounds, rounds)
    assert last["epoch"] == loads / 4 and last["ended"] and last["drift"] > 0


READS = [("cd_grab", "tfdata"), ("cd_grab+sketch16+dealt", "thread")]


@pytest.mark.parametrize("order,reads", mostly_slow(READS, quick=READS[:1]))
def test_streamed_batches_are_those_on_the_devices(order, reads):
    if reads == "tfdata":
        pytest.importorskip("tensorflow")
    outcome, records = trained(built(order), plans_of())
    other, same = trained(built(order, reads=reads), plans_of())
    assert_same(outcome.state, other.state)
    assert timeless(records) == timeless(same)


def test_workers_on_a_mesh_equal_simulated_ones_and_everything_is_compiled_once():
    outcome, records = trained(built(), plans_of())
    assert compiled(built()) == [1] * 6
    other, same = trained(built(mesh=True), plans_of())
    np.testing.assert_array_equal(outcome.state.orders.current, other.state.orders.current)
    for one, two in zip(records, same, strict=True):
        np.testing.assert_allclose(one["train/loss"], two["train/loss"], rtol=1e-5)
    outcome, records = trained(
        built(), plans_of(seed=1), seed=1, ends=lambda record: record["step"] >= 24
    )
    assert outcome.at.step == 24 and [r["ended"] for r in records] == [False, True]
    assert compiled(built()) == [1] * 6, "whatever the plan, the seed and the end"


@pytest.mark.parametrize("order", mostly_slow(("cd_grab", "rr+dealt"), quick=("cd_grab",)))
def test_a_source_trains_as_arrays_do(order):
    source = EpochSource(task().train)
    rounds = row_of("sync", "qsr").rounds
    read = program.build(task()._replace(train=source), SETTING, row_of("order", order), rounds)
    plans = plans_of()
    outcome, _ = trained(built(order), plans)
    other, _ = trained(read, plans)
    assert_same(outcome.state, other.state)
    per_epoch = read.sizes.loads_per_epoch
    assert set(range(-(-plans.echo.loads // per_epoch))) <= set(source.epochs)


def sizes_of(deals=None, **fields):
    return config.sizes_of(task(), SETTING._replace(**fields), deals=deals)


def built_of(**fields):
    rounds = row_of("sync", "qsr").rounds
    return program.build(task(), SETTING._replace(**fields), row_of("order", "cd_grab"), rounds)


def of_other_lengths():
    plans = plans_of()
    return trained(built(), plans._replace(rates=plans.rates[:-1]))


UNFIT = {
    "warmup": (lambda: plans_of(warmup_steps=60), "is 60 of 60 steps: .* lower the warmup"),
    "length": (lambda: check_recipe(SETTING._replace(total_steps=None)), "pass --epochs or"),
    "growth": (lambda: plans_of(growth=0.0), r"--growth is 0.0: pass a number in \(0, inf\)"),
    "steps": (lambda: plans_of(total_steps=0, warmup_steps=0), "--total_steps is 0: pass an int"),
    "seed": (lambda: built().init(1 << 40), r"--seed is 1099511627776: .* range \[0, 4294967295"),
    "coins": (lambda: plans_of(seed=-1), "--seed is -1: pass an integer in"),
    "plans": (of_other_lengths, "60 steps and the run 59"),
    "many": (lambda: plans_of(total_steps=10**9), "most --total_steps=10000000 or --epochs=2500"),
    "few": (lambda: sizes_of(workers=64), "64 workers with 3 units of 1 examples need at least"),
    "none": (lambda: sizes_of(workers=0), "--workers is 0: pass an integer in"),
    "units": (lambda: sizes_of(units_per_step=12), "4 workers with 12 units of 1 examples"),
    "dealt": (lambda: sizes_of("examples", workers=17), "at least 51 examples; the training set"),
    "turns": (lambda: built_of(run="turns"), "CD-GraB coordinates workers in every step, and work"),
}
test_what_cannot_run_is_named = refuses(UNFIT)
