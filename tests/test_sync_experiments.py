"""Synchronisation rules compared: the loop over rounds, resuming, the table and the picture."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import flags

import local_opt
import models
from experiments import local_training, qsr, sync_report
from experiments.local_training import Setup
from experiments.sync_rules import RULES, Setting
from experiments.tasks import Task
from local_opt import runners

SETUP = Setup(
    workers=3, batch_size=2, optimizer="momentum", weight_decay=1e-3, total_steps=12, evaluations=4
)


def tiny_task():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(64, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32) + 2 * (x[:, 1] > 0)
    half = {"x": x[:40], "y": y[:40]}, {"x": x[40:], "y": y[40:]}
    return Task("tiny", models.mlp(num_features=4, hidden=(5,), num_classes=4), *half, None)


def setting(**fields):
    given = {"warmup_steps": 2, "h_base": 2, "alpha": 1.2} | fields
    return Setting.of(lambda t: 1 - t / 14, total_steps=12, **given)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_a_plan_for_the_run(name):
    plan = RULES[name].plan(setting())
    plan.check_run(12)
    assert plan.syncs_after(11)


def test_rules_of_other_powers_communicate_as_much_as_qsr():
    rates = optax.warmup_cosine_decay_schedule(0.0, 1.0, 125, 2500, 1e-3)
    s = Setting.of(rates, total_steps=2500, warmup_steps=125, h_base=4, alpha=2.0)
    found = {name: RULES[name].plan(s).rounds for name in ("qsr", "inverse", "cubic")}
    assert found["inverse"] == found["cubic"] == found["qsr"] < 2500 / 4


def by_hand(task, plan, rates, seed):
    """The same run in plain Python: a list of workers, local momentum, means at the syncs."""
    inner = optax.chain(optax.add_decayed_weights(1e-3), optax.trace(0.9))
    params = task.model.init(jax.random.fold_in(jax.random.key(seed), 0))
    workers = [(params, inner.init(params)) for _ in range(SETUP.workers)]
    indices = local_training.sample(40, SETUP, seed)

    @jax.jit
    def gradient(params, batch):
        return jax.grad(lambda p: jnp.mean(task.model.loss(p, batch, None)))(params)

    for t in range(12):
        for w, (params, state) in enumerate(workers):
            batch = jax.tree.map(lambda x, w=w, t=t: x[indices[w, t]], task.train)
            updates, state = inner.update(gradient(params, batch), state, params)
            params = jax.tree.map(lambda p, u, t=t: p - rates[t] * u, params, updates)
            workers[w] = params, state
        if plan.syncs_after(t):
            mean = jax.tree.map(lambda *p: sum(p) / len(p), *[p for p, _ in workers])
            workers = [(mean, state) for _, state in workers]
    return workers[0][0]


NOTHING = dict.fromkeys(("train", "valid", "test"), (0.0, 0.0))


@pytest.mark.parametrize("mesh", [False, True])
def test_the_loop_is_local_sgd(mesh):
    task, plan = tiny_task(), local_opt.SyncPlan(np.array([0, 1, 3, 8]), 12)
    rates = 0.3 * np.linspace(1, 0.2, 12)
    program = local_training.build(
        task, RULES["qsr"], SETUP, runners.worker_mesh(3) if mesh else None
    )
    seen = []
    watched = program._replace(evaluate=lambda p: seen.append(jax.device_get(p)) or NOTHING)
    found = list(local_training.train(task, SETUP, watched, plan, rates=rates, seed=4))
    assert [r["step"] for r in found] == [3, 6, 9, 12]
    assert [r["rounds"] for r in found] == [2, 2, 3, 4]
    assert found[-1]["volume"] == plan.volume and found[-1]["drift"] > 0
    for leaf, expected in zip(
        jax.tree.leaves(seen[-1]), jax.tree.leaves(by_hand(task, plan, rates, 4)), strict=True
    ):
        assert (leaf == leaf[:1]).all(), "all workers end equal, to the bit"
        # float32 rounding over twelve steps of numbers of the order of 1
        np.testing.assert_allclose(leaf[0], expected, atol=1e-5)


class Rows:
    """A random-access source over arrays, which notes what epochs it was asked for."""

    def __init__(self, data, epochs):
        self.data, self.epochs = data, epochs

    def __len__(self):
        return len(self.data["y"])

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.data.items()}

    def at_epoch(self, epoch):
        self.epochs.append(epoch)
        return self


@pytest.mark.parametrize("mesh", [False, True])
def test_a_streamed_source_trains_as_arrays_do(mesh):
    task, plan, epochs = tiny_task(), local_opt.SyncPlan(np.array([0, 1, 3, 8]), 12), []
    streamed = task._replace(train=Rows(task.train, epochs), test=Rows(task.test, []))
    found = [
        list(
            local_training.train(
                t,
                SETUP,
                local_training.build(
                    t, RULES["qsr"], SETUP, runners.worker_mesh(3) if mesh else None
                ),
                plan,
                rates=np.full(12, 0.2),
                seed=4,
            )
        )
        for t in (task, streamed)
    ]
    for record, expected in zip(found[1], found[0], strict=True):
        for name in ("batch_loss", "train_loss", "valid_accuracy", "test_accuracy"):
            assert record[name] == pytest.approx(expected[name], rel=1e-4), name
    assert set(epochs) == {0, 1}  # 40 examples, 6 a step


def test_a_streamed_loss_that_is_not_finite_names_step_and_worker():
    task = tiny_task()
    task.train["x"][local_training.sample(40, SETUP, 0)[1, 7, 0]] = np.nan
    task = task._replace(train=Rows(task.train, []))
    program = local_training.build(task, RULES["qsr"], SETUP)
    plan = local_opt.SyncPlan(np.arange(0, 12, 4), 12)
    with pytest.raises(FloatingPointError, match="step"):
        list(local_training.train(task, SETUP, program, plan, rates=np.full(12, 0.1), seed=0))


def test_records_table_picture_and_resuming(tmp_path):
    task, s = tiny_task(), setting()
    rules = ("parallel", "accumulate", "constant", "qsr")
    given = {"rules": rules, "peak_rates": (0.1, 0.4), "seeds": 3}
    found = qsr.compare_rules(task, SETUP, s, **given)
    assert len(sync_report.finals(found)) == len(rules) * qsr.runs(("one",), (0.1, 0.4), 3)
    plans = {name: RULES[name].plan(s) for name in rules}
    text = sync_report.report(found, plans, str(tmp_path), "tiny")
    assert "gradient accumulation" in text and (tmp_path / "comparison.png").stat().st_size > 10_000
    for line in text.split("\n")[2:6]:
        assert line.count("±") >= 2 and "nan" not in line
    json.dumps(found)

    # A run that was cut is repeated, whole ones are kept as they are.
    cut = [r for r in found if not (r["rule"] == "qsr" and r["seed"] == 2 and r["step"] > 6)]
    again = qsr.compare_rules(task, SETUP, s, **given, done=cut)
    key = ("rule", "peak_rate", "seed", "step", "train_loss", "test_accuracy", "drift", "rounds")
    rows = [sorted(str([r[k] for k in key]) for r in records) for records in (found, again)]
    assert rows[0] == rows[1]


def test_a_rate_that_diverges_is_out_and_the_comparison_goes_on():
    task = tiny_task()
    found = qsr.compare_rules(
        task, SETUP, setting(), rules=("constant",), peak_rates=(0.1, 1e30), seeds=2
    )
    ends = {(r["peak_rate"], r["seed"]): r for r in sync_report.finals(found)}
    assert set(ends) == {(0.1, 0), (1e30, 0), (0.1, 1)}, "no other seed at a rate that diverged"
    message = ends[1e30, 0]["diverged"]
    assert "worker" in message and "is not finite in step" in message
    assert ends[0.1, 0]["diverged"] is None
    assert "1e+30" in sync_report.table(found, {"constant": RULES["constant"].plan(setting())})


def test_plans_and_data_that_do_not_fit():
    task = tiny_task()
    program = local_training.build(task, RULES["constant"], SETUP)
    plan = local_opt.constant(2, total_steps=13)
    with pytest.raises(ValueError, match="13 steps and the run 12"):
        next(local_training.train(task, SETUP, program, plan, rates=np.ones(12), seed=0))
    with pytest.raises(ValueError, match="do not fill one step of 3 workers"):
        local_training.sample(5, SETUP, 0)


def test_every_epoch_deals_every_example_at_most_once():
    dealt = local_training.sample(13, SETUP._replace(total_steps=5), seed=1)
    assert dealt.shape == (3, 5, 2)
    for epoch in (dealt[:, :2], dealt[:, 2:4]):
        assert len(np.unique(epoch)) == 12


def test_moments_are_measured_on_the_averaged_model():
    """A model whose prediction is its statistic shows which parameters it was measured at."""

    def statistics(params, x):
        return params["scale"] * jnp.mean(x)

    def predict(params, x, moment):
        return jnp.stack([jnp.full(x.shape[0], moment), jnp.zeros(x.shape[0])], axis=1)

    model = models.Model(None, None, predict, statistics)
    data = {"x": np.ones((12, 1), np.float32), "y": np.zeros(12, np.int32)}
    task = Task("moments", model, data, data, None)
    measure = local_training.evaluator(task, SETUP.batch_size)
    found = measure({"scale": jnp.array([1.0, 2.0, 6.0])})
    # The mean scale is 3.
    assert found["train"][0] == pytest.approx(math.log1p(math.exp(-3.0)), rel=1e-5)
    assert found["valid"][1] == found["test"][1] == 1.0


def test_flags_make_a_recipe():
    values = flags.FlagValues()
    qsr.define_flags(values)
    values(["qsr", "--recipe=mnist", "--growth=3", "--peak_rates=0.1,0.5", "--workers=2"])
    recipe = qsr.recipe_from_flags(values)
    assert recipe == qsr.RECIPES["mnist"]._replace(growth=3.0, peak_rates=(0.1, 0.5), workers=2)
    values["peak_rates"].parse("0")
    with pytest.raises(ValueError, match="a peak rate is 0.0"):
        qsr.recipe_from_flags(values)


def test_the_mean_over_seeds_chooses_between_the_best_two_rates():
    def end(rate, seed, accuracy, diverged=None):
        common = {"rule": "qsr", "step": 12, "train_loss": 0.0, "diverged": diverged}
        return common | {"peak_rate": rate, "seed": seed, "valid_accuracy": accuracy}

    first = [end(0.1, 0, 0.5), end(0.2, 0, 0.7), end(0.4, 0, 0.6), end(0.8, 0, 0.9, "nan")]
    assert sync_report.finalists(first, "qsr") == [0.2, 0.4]
    assert sync_report.best_rate(first, "qsr") == 0.2
    others = [end(0.2, 1, 0.3), end(0.4, 1, 0.6)]
    assert sync_report.best_rate(first + others, "qsr") == 0.4
    assert "0.5000 (2)" in sync_report.sweep(first + others)
    assert sync_report.best_rate(first, "constant") is None
