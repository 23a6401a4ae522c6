"""The sweeps behind the pages of theory equal loops that are written out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from experiments import echo_theory, one_plan, order_rates
from experiments.compare import recipes
from experiments.compare.arms import arm_of
from experiments.data import optimizers
from experiments.trainer.config import plans_of
from tests.commands import parsed


@pytest.mark.parametrize("p", [1.0, 0.25])
def test_moments_of_a_quadratic_equal_all_outcomes(p, monkeypatch):
    """Three steps of x' = x - eta (lambda x + xi), summed over which of them load."""
    rate, curve = 0.3, 0.8
    monkeypatch.setattr(echo_theory, "FINE_RATES", np.array([rate]))
    monkeypatch.setattr(echo_theory, "CURVATURES", np.array([curve]))
    *_, (loss, square) = echo_theory.moments(np.array([p]), np.array([4]), 3)
    kept, expected = 1 - rate * curve, 0.0
    for loads in ([1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 0, 0]):
        chance = np.prod([p if load else 1 - p for load in loads[1:]])
        batch = np.cumsum(loads) - 1
        weights = np.zeros(3)  # of each batch's noise in x
        for t in range(3):
            weights = kept * weights
            weights[batch[t]] -= rate
        expected += chance * (kept**6 + np.sum(weights**2) / 4)
    np.testing.assert_allclose([loss, square], np.full((2, 1, 1, 1), expected), rtol=1e-12)
    times, means = echo_theory.mean_squares((p,), (4,), 4)  # of 0 to 3 steps
    by_step = [square.min() for _, square in echo_theory.moments(np.array([p]), np.array([4]), 3)]
    assert times[-1] == 4
    np.testing.assert_allclose(means[-1], [[np.mean(by_step)]], rtol=1e-12)


def test_coins_say_when_workers_load_and_synchronise():
    batches, ends = echo_theory.decisions("per load", 0.25, 3, 64, 0)
    assert (batches == batches[:, :1]).all() and ends[:-1].sum() == batches[-1, 0] and ends[-1]
    separate, every = echo_theory.decisions("own coins, every step", 0.25, 3, 64, 0)
    assert (separate != separate[:, :1]).any() and every.all()
    _, coins = echo_theory.decisions("algorithm 2", 0.25, 3, 64, 0)
    assert 1 < coins.sum() < 64 and (coins != ends).any()


def test_levels_are_found_between_two_evaluations():
    curve = np.array([1.0, 0.1, 0.001])[:, None, None]
    rows = echo_theory._rows(
        {"p": 1.0}, np.array([0, 8, 16]), curve, np.arange(1, 17)[:, None], np.arange(16)[:, None]
    )
    steps = {round(row["level"], 4): row["steps"] for row in rows if "level" in row}
    np.testing.assert_allclose([steps[0.1], steps[0.01]], [8, 12], rtol=1e-6)
    assert {row["loads"] for row in rows if row.get("level") == 0.01} == {12}


def test_a_burn_in_ends_where_every_doubling_has_the_exponent_of_the_bound():
    times = 2.0 ** np.arange(8)
    assert echo_theory.burn_in(times, np.where(times < 8, 1 / times, 8**-0.5 / times**0.5)) == 8
    assert echo_theory.burn_in(times, times**-0.5) == 1
    assert np.isinf(echo_theory.burn_in(times, 1 / times))


def test_the_mean_square_of_a_run_equals_its_loop(monkeypatch):
    """Two workers, an average in every step, one rate; the gradient is written out."""
    monkeypatch.setattr(echo_theory, "RATES", np.array([1.0]))
    rows = echo_theory.trained_rows("interpolated", "every step", 0.5, 2, 8, 1)
    (row,) = [row for row in rows if row.get("T") == 8]
    problem = echo_theory.problem_of("interpolated")
    a, b = (np.float64(problem.examples[k]) for k in "ab")
    batches, _ = echo_theory.decisions("every step", 0.5, 2, 8, 0)
    (key,), x, squares = jax.random.split(jax.random.key(1), 1), np.zeros(a.shape[1]), []
    for t in range(9):
        squares.append(np.sum(((a @ x - b) @ a / len(a)) ** 2))
        if t < 8:
            folded = [jax.random.fold_in(key, batches[t, 0]) for _ in range(2)]
            keys = [jax.random.fold_in(k, w) for w, k in enumerate(folded)]
            units = [np.asarray(jax.random.randint(k, (4,), 0, len(a))) for k in keys]
            x = x - 0.1 * np.mean([(a[u] @ x - b[u]) @ a[u] / 4 for u in units], axis=0)
    np.testing.assert_allclose(row["square"], np.trapezoid(squares) / 8, rtol=1e-4)


def test_echoed_batches_of_a_quadratic_never_catch_up():
    times, means = echo_theory.mean_squares((1.0, 0.25), (1, 16), 1024)
    lag = means[:, 1] / means[:, 0]
    assert (lag[times >= 128] > 2).all() and (lag < (2 / 0.25 - 1) ** 0.5).all()


@pytest.mark.parametrize("order", order_rates.ORDERS)
def test_an_epoch_of_an_order_equals_a_loop_in_numpy(order):
    problems = [order_rates.regression(seed, 2, 4) for seed in range(2)]
    losses, squares, orders = order_rates.trained(problems, order, 1, np.array([0.1]))
    keys = [jax.random.split(jax.random.key(seed), 2) for seed in range(2)]
    for seed, problem in enumerate(problems):
        made = order_rates.order_of(order, 4)
        start = jax.vmap(lambda key, o=made: o.init(key, jnp.zeros(16)), axis_name="worker")
        units, x = np.asarray(start(keys[seed]).current), np.zeros(16)
        a, b = problem.examples["a"], problem.examples["b"]
        for t in range(4):
            rows = [(a[w, units[w, t]], b[w, units[w, t]]) for w in range(2)]
            x = x - 0.1 * np.mean([(a @ x - b) * a for a, b in rows], axis=0)
        expected = np.mean((a @ x - b) ** 2) / 2
        np.testing.assert_allclose(losses[1, 0, seed], expected, rtol=1e-4)
        assert (np.sort(orders[seed]) == np.arange(4)).all()
    assert squares.shape == (2, 1, 2)


def test_slopes_and_where_they_begin():
    import pandas as pd

    epochs = np.array([4, 8, 16, 32, 64])
    values = np.where(epochs < 16, 1 / epochs, 16 / epochs**2.0)
    table = pd.DataFrame({"T": epochs, "value": values, "seed": 0})
    np.testing.assert_allclose(order_rates.slope(table[table["T"] >= 16], "T"), [-2])
    assert order_rates.begins(table, "above") == "16"
    assert order_rates.begins(table.assign(value=1.0), "above") == "never"
    values = np.where(epochs < 16, 16 / epochs, 16 ** (2 / 3) / epochs ** (2 / 3))
    assert order_rates.begins(table.assign(value=values), "square") == "16"


@pytest.mark.parametrize("distance", [order_rates.NEAR, order_rates.FAR])
def test_the_robust_regression_begins_at_a_distance_from_a_minimum(distance):
    problem = order_rates.robust(0, 2, 32, distance)
    rows, targets = problem.examples["a"].reshape(64, -1), problem.examples["b"].reshape(64)
    away = np.random.default_rng(0)
    away.standard_normal(64 * 17)  # the examples
    away = away.standard_normal(16)
    minimum = jnp.asarray(problem.init - distance * away / np.linalg.norm(away), jnp.float32)

    def mean(x):
        of = jax.vmap(problem.loss, (None, 0))
        return jnp.mean(of(x, {"a": rows, "b": targets}))

    assert jnp.linalg.norm(jax.grad(mean)(minimum)) < 1e-4
    assert jnp.linalg.eigvalsh(jax.hessian(mean)(minimum)).min() > 0


def test_momentum_begins_anew_after_every_second_update():
    optimizer = one_plan.restarted(optax.sgd(1.0, 0.5), 2)
    state, moved = optimizer.init(jnp.zeros(())), []
    for _ in range(4):
        update, state = optimizer.update(jnp.ones(()), state)
        moved.append(float(update))
    assert moved == [-1.0, -1.5, -1.0, -1.5]


def test_one_plan_has_equal_syncs_and_seesaw_is_qsr_of_the_root():
    task, recipe = recipes.load("digits_mlp")
    made = {name: one_plan.plan_of(use, task, recipe) for name, use in one_plan.USES.items()}
    rounds = made["qsr"][0].rounds
    same = {"qsr_gradients", "qsr_outer", "qsr_restart", "root", "seesaw"}
    assert {made[name][0].rounds for name in same} <= {rounds, rounds - 1, rounds - 2}
    rates = plans_of(task, recipe, arm_of("qsr")).rates
    np.testing.assert_allclose(made["qsr"][1], rates)
    plan, root = made["seesaw"]
    np.testing.assert_allclose(root[plan.starts], np.sqrt(rates)[plan.starts])
    assert plan == plans_of(task, recipe, arm_of("inverse")).sync
    after = plan.starts >= recipe.warmup_steps  # H times the square of the root hardly changes
    grown = (plan.periods * root[plan.starts] ** 2)[after][:-1]
    long = plan.periods[after][:-1] > 2 * recipe.h_base
    assert np.ptp(grown[long]) / grown[long].mean() < 0.15


def test_a_run_of_one_plan_equals_its_loop():
    task, recipe = recipes.load("digits_mlp", num_train=64)
    recipe = recipe._replace(
        workers=2, units_per_step=4, total_steps=6, warmup_steps=0, learning_rates=(0.1,), h_base=2
    )
    use = one_plan.USES["qsr"]
    train, measures = one_plan.trainer(task, recipe, use), one_plan.measures_of(task)
    (row,) = one_plan.rows_of(task, recipe, "qsr", 1, train, measures)
    plan, rates = one_plan.plan_of(use, task, recipe)
    inner = optax.chain(optax.add_decayed_weights(recipe.weight_decay), optax.trace(0.9))
    start = task.model.init(jax.random.key(0))
    workers = [(start, inner.init(start)) for _ in range(2)]
    order = one_plan.order_of(task, recipe, 0)
    for t in range(6):
        for w, (params, state) in enumerate(workers):
            batch = jax.tree.map(lambda x, w=w, t=t: x[order[t, w]], task.train)
            grads = jax.grad(lambda p, b=batch: jnp.mean(task.model.loss(p, b, None)))(params)
            updates, state = inner.update(grads, state, params)
            updates = jax.tree.map(lambda u, t=t: -0.1 * rates[t] * u, updates)
            workers[w] = optax.apply_updates(params, updates), state
        if t + 1 in {*(plan.starts + plan.periods)}:
            mean = jax.tree.map(lambda a, b: (a + b) / 2, workers[0][0], workers[1][0])
            workers = [(mean, state) for _, state in workers]
    stacked = jax.tree.map(lambda p: p[None], workers[0][0])
    for scalar, of in measures.items():
        np.testing.assert_allclose(row[scalar], float(of(stacked)[0]), rtol=2e-4)


def test_moments_are_averaged_by_plans_of_their_own(monkeypatch):
    """Plans of all rounds are what `local_rounds` does with moments that are averaged."""
    task, recipe = recipes.load("digits_mlp", num_train=64)
    small = {"workers": 2, "units_per_step": 4, "total_steps": 12, "warmup_steps": 0, "h_base": 2}
    recipe = recipe._replace(optimizer="adamw", momentum=0.9, learning_rates=(0.01,), **small)
    measures = {"test/loss": one_plan.measures_of(task)["train/loss"]}

    def loss(use):
        train = one_plan.trainer(task, recipe, use)
        (row,) = one_plan.rows_of(task, recipe, "desloc", 1, train, measures)
        return row["test/loss"]

    use = one_plan.USES["desloc"]
    rarely, always = loss(use), loss(use._replace(moments=(1, 1)))
    means = {"mu": "mean", "nu": "mean"}
    rounds = local_opt.local_rounds(optimizers.inner(recipe), sync_opt_state=means)
    monkeypatch.setattr(one_plan, "rounds_of", lambda *_: rounds)
    together = loss(use._replace(rounds="local_rounds", moments=None))
    np.testing.assert_allclose(always, together, rtol=1e-5)
    assert abs(rarely - always) > 1e-4


def test_an_arm_may_be_the_words_of_a_rule():
    task, recipe = recipes.load("digits_mlp")
    use = one_plan.use_of("qsr+alpha2")
    assert (use.label, use.rounds) == ("QSR, 2 x alpha", "local_rounds")
    double = recipe._replace(growth=2 * recipe.growth)
    assert (
        one_plan.plan_of(use, task, recipe)[0]
        == one_plan.plan_of(one_plan.USES["qsr"], task, double)[0]
    )


def test_commands_print_their_tables(tmp_path, capsys):
    flags = [
        "--toy",
        "--seeds=2",
        "--problems=regression,static",
        f"--output_dir={tmp_path / 'orders'}",
    ]
    order_rates.main(parsed(order_rates, *flags))
    assert "begins at" in capsys.readouterr().out
    flags = ["--problems=interpolated", "--shares=1,0.5,0.25", "--workers=1,2", "--steps=16"]
    flags += ["--seeds=2", f"--output_dir={tmp_path / 'echo'}"]
    echo_theory.main(parsed(echo_theory, *flags))
    assert "equal loads" in capsys.readouterr().out
    flags = ["--task=digits_mlp", "--arms=parallel,seesaw", "--total_steps=20", "--seeds=2"]
    flags += ["--warmup_steps=2", "--learning_rates=0.1", f"--output_dir={tmp_path / 'plan'}"]
    one_plan.main(parsed(one_plan, *flags))
    assert "Seesaw" in capsys.readouterr().out
