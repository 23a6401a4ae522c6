"""Plans of 10^9 steps take bytes, not arrays; their answers are those of short plans, continued."""

import jax
import numpy as np
import optax
import pytest

import local_opt
from ordering import echo
from tests import tables

T = 10**9


# T -> plan, and the most runs that it holds for any T.
LONG = {
    "every_step": (local_opt.every_step, 1),
    "constant": (lambda t: local_opt.constant(4, total_steps=t, offset=3), 3),
    "post_local": (lambda t: local_opt.post_local(4, switch_step=t // 2, total_steps=t), 3),
    "swap": (lambda t: local_opt.swap(7, switch_step=t // 2, total_steps=t), 2),
    "from_function": (
        lambda t: local_opt.from_function(lambda s: 10**6 + s % 3, total_steps=t), 4000,
    ),
    "aligned": (
        lambda t: local_opt.aligned(local_opt.constant(4, total_steps=t), every=5e5), 4000,
    ),
    "fixed": (lambda t: echo.fixed(4, total_steps=t), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_a_plan_of_a_billion_steps(name, tmp_path):
    make, most = LONG[name]
    plan = make(T)
    assert (
        plan.total_steps == T
        and plan == make(np.int32(T))
        and plan.runs.counts.sum() == plan.runs.num_stretches
    )
    assert (plan.runs.counts * plan.runs.lengths).sum() == T
    held = sum(numbers.nbytes for numbers in plan.runs[:3])
    assert held == 12 * len(plan.runs.starts) <= 12 * most
    plan.save(tmp_path / "plan.json")
    assert type(plan).read(tmp_path / "plan.json") == plan
    assert (tmp_path / "plan.json").stat().st_size < 200 + 30 * most
    assert f"{plan.runs.num_stretches} {plan.stretches}" in plan.describe()
    middle = np.array([0, 1, T // 2, T - 1])
    if isinstance(plan, local_opt.SyncPlan):
        costs = dict(num_params=10, num_workers=2, step_seconds=1.0, gigabits_per_second=1.0)
        assert local_opt.forecast(plan, **costs).rounds == plan.rounds
        assert plan.syncs_after(T - 1) and plan.round_at(T - 1) == plan.rounds - 1
        starts, lengths = plan.start_at(middle), plan.period_at(middle)
        assert ((starts <= middle) & (middle < starts + lengths)).all()
        assert plan.syncs_after(starts + lengths - 1).all()
        assert next(plan.rounds_from(T // 2)) == (T // 2, int((starts + lengths)[2]) - T // 2)
    else:
        assert [plan.decide(t) for t in middle.tolist()] == (middle % 4 == 0).tolist()
        assert plan.loads_before(middle).tolist() == (-(-middle // 4)).tolist()


def test_values_of_a_long_run_are_refused():
    for make in (
        lambda: local_opt.qsr(0.1, total_steps=T, alpha=1.0, h_base=1),
        lambda: local_opt.bernoulli(0.5, total_steps=T, key=jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match="total_steps is 1000000000: .* in 1 .. 10000000"):
            make()
    with pytest.raises(ValueError, match="read-only"):
        local_opt.every_step(T).runs.starts[0] = 1


@pytest.mark.parametrize("name", [*tables.PLANS, *tables.ECHO_PLANS])
def test_runs_answer_like_arrays(name):
    plan = (tables.PLANS | tables.ECHO_PLANS)[name](60)
    steps, starts = np.arange(60), plan.marked
    number = np.searchsorted(starts, steps, side="right") - 1
    assert plan.runs.num_stretches == len(starts) == plan.runs.counts.sum()
    np.testing.assert_array_equal(plan.runs.number_at(steps), number)
    np.testing.assert_array_equal(plan.runs.start_at(steps), starts[number])
    np.testing.assert_array_equal(plan.runs.length_at(steps), plan.lengths[number])
    assert (np.diff(plan.runs.lengths) != 0).all()


def test_a_compiled_step_of_a_long_plan_is_that_of_a_short_one():
    def program(total_steps):
        plan = local_opt.constant(4, total_steps=total_steps)
        optimizer = local_opt.local_steps(optax.sgd(0.1), plan)

        def step(x, state):
            updates, state = optimizer.update(x, state, x)
            return x + updates, state

        x = jax.numpy.zeros((2, 3))
        init = local_opt.lift(optimizer.init, 2, inputs="owned", outputs="owned")
        step = local_opt.lift(step, 2, inputs="owned owned", outputs=("owned", "owned"))
        text = jax.jit(step).lower(x, init(x)).as_text()
        return len(text)

    assert abs(program(T) - program(1000)) < 100
