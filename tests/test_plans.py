"""Plans: the published schedules to the digit, one table of rules, and what they refuse."""

import dataclasses
import hashlib
import json
import math
import pathlib
import struct

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import local_opt
from tests import reference, tables
from tests.cases import times
from tests.refused import refuses

VECTORS = (
    pathlib.Path(__file__).resolve().parents[1].parent / "shared" / "reference" / "qsr_vectors.json"
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A published run; the last four are facts about its rounds."""

    total_steps: int
    warmup_steps: int
    peak_lr: float
    alpha: float
    h_base: int
    rounds: int
    percent: float
    first_step_of: tuple  # (H, first step of the first round with that H)
    last: tuple  # (H, first step of the last round)

    @property
    def schedule(self):
        return optax.warmup_cosine_decay_schedule(
            0.0, self.peak_lr, self.warmup_steps, self.total_steps, 1e-6
        )

    @property
    def settings(self):
        return dict(
            total_steps=self.total_steps,
            alpha=self.alpha,
            h_base=self.h_base,
            warmup_steps=self.warmup_steps,
        )


RECIPES = {
    "vit_b": Recipe(
        93600, 10000, 0.008, 0.0175, 4, 9711, 10.375, (30, 57213), (8142, 85458)
    ),
    "resnet152": Recipe(62400, 1560, 0.8, 0.2, 2, 24792, 39.731, (3, 47306), (829, 61571)),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_published_schedules(name):
    """And the starts of another cosine, another loop and another order of the clamps."""
    recipe = RECIPES[name]
    plan = local_opt.qsr(recipe.schedule, **recipe.settings)
    assert plan.rounds == recipe.rounds
    assert round(100 * plan.volume, 3) == recipe.percent
    h, step = recipe.first_step_of
    assert plan.starts[plan.periods == h][0] == step
    assert (plan.periods[-1], plan.starts[-1]) == recipe.last
    assert plan.period_at(recipe.last[1]) == recipe.last[0]
    lr = reference.warmup_cosine(recipe.peak_lr, recipe.warmup_steps, recipe.total_steps, 1e-6)
    np.testing.assert_array_equal(plan.starts, reference.qsr_rounds(lr, **recipe.settings))


def test_every_row_of_the_vectors():
    if not VECTORS.exists():
        pytest.skip("no ../shared/reference/qsr_vectors.json")
    rows = json.loads(VECTORS.read_text())
    assert rows
    for row in rows:
        lr = optax.warmup_cosine_decay_schedule(
            0.0, row["peak_lr"], row["warmup_steps"], row["total_steps"], row["floor_lr"]
        )
        names = ("total_steps", "alpha", "h_base", "power", "warmup_steps")
        plan = local_opt.power_rule(lr, **{name: row[name] for name in names})
        assert plan.rounds == row["rounds"]
        assert round(100 * plan.volume, 4) == row["comm_pct"]
        assert int(plan.starts.sum()) == row["sum_starts"]
        for h, step in row["first_occurrence"].items():
            assert plan.starts[plan.periods == int(h)][0] == step
        tail = np.stack([plan.starts, plan.periods], axis=1)[-len(row["tail"]) :]
        assert tail.tolist() == row["tail"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_rule_in_float32_inside_a_graph_gives_the_same_rounds(name):
    recipe = RECIPES[name]
    schedule = recipe.schedule

    @jax.jit
    def in_graph():
        def body(carry):
            starts, r, t = carry
            lr = schedule(t)
            assert lr.dtype == jnp.float32
            left = (recipe.total_steps - t).astype(jnp.float32)
            # Clamped in floating point: (alpha / lr)^2 passes int32 where lr is 0.
            grown = jnp.minimum(jnp.square(jnp.float32(recipe.alpha) / lr), left)
            h = jnp.maximum(jnp.floor(grown).astype(jnp.int32), recipe.h_base)
            h = jnp.where(t < recipe.warmup_steps, recipe.h_base, h)
            return starts.at[r].set(t), r + 1, t + h

        first = jnp.full(recipe.rounds + 1, -1, jnp.int32), jnp.int32(0), jnp.int32(0)
        return jax.lax.while_loop(lambda c: c[2] < recipe.total_steps, body, first)

    starts, rounds, _ = in_graph()
    plan = local_opt.qsr(schedule, **recipe.settings)
    assert rounds == plan.rounds
    np.testing.assert_array_equal(starts[:-1], plan.starts)


@pytest.mark.parametrize("name", tables.PLANS)
@settings(max_examples=times(4))
@given(st.integers(1, 60))
@example(1)
@example(2)  # fewer steps than any round has
@example(41)
def test_every_plan_is_rounds_of_the_run(name, total_steps):
    plan = tables.PLANS[name](total_steps)
    assert plan.total_steps == total_steps
    rounds = plan.rounds
    assert plan.starts.dtype == np.int64 and plan.starts[0] == 0
    assert (plan.periods >= 1).all() and plan.periods.sum() == total_steps
    assert plan.ends[-1] == total_steps and plan.syncs_after(total_steps - 1)
    assert plan.volume == rounds / total_steps
    steps = np.arange(total_steps)
    assert plan.syncs_after(steps).sum() == rounds
    assert (plan.starts[plan.round_at(steps)] <= steps).all()
    # A loop over steps, as a training run sees the plan.
    r, since = 0, 0
    for t in range(total_steps):
        since += 1
        assert plan.round_at(t) == r and plan.period_at(t) == plan.periods[r]
        assert plan.syncs_after(t) == (since == plan.periods[r])
        if plan.syncs_after(t):
            r, since = r + 1, 0
    assert (r, since) == (rounds, 0)


@pytest.mark.parametrize("name", tables.PLANS)
def test_a_run_resumes_at_any_step_with_the_same_round_ends(name):
    plan = tables.PLANS[name](41)
    whole = list(plan.rounds_from(0))
    assert whole == list(zip(plan.starts.tolist(), plan.periods.tolist(), strict=True))
    for step in range(41):
        left = list(plan.rounds_from(step))
        assert left[0][0] == step
        assert [s + h for s, h in left] == [end for end in plan.ends if end > step]
        assert all(a + h == b for (a, h), (b, _) in zip(left, left[1:], strict=False))
    assert list(plan.rounds_from(41)) == []


@pytest.mark.parametrize("name", tables.PLANS)
def test_description_fits_one_screen(name):
    plan = tables.PLANS[name](400)
    lines = plan.describe().splitlines()
    assert len(lines) <= 24
    assert f"{plan.rounds} rounds" in lines[1] and f"{plan.volume:.3%}" in lines[1]
    assert plan.rule in lines[0] and plan.digest()[:12] in lines[1]
    assert f"H from {plan.periods.min()} to {plan.periods.max()}" in lines[1]
    rows = [[int(x) for x in line.split()] for line in lines[3:] if "..." not in line]
    assert rows[0] == [0, plan.periods[0]]
    assert rows[-1][1] == plan.periods[-1]
    assert all(plan.period_at(t) == h and t in plan.starts for t, h in rows)


def test_equal_rounds_are_equal_plans_however_they_were_made():
    plans = [
        local_opt.every_step(9),
        local_opt.constant(1, total_steps=9),
        local_opt.qsr(0.1, total_steps=9, alpha=0.01, h_base=1),
        local_opt.bernoulli(1.0, total_steps=9, key=jax.random.key(0)),
        local_opt.bernoulli(1.0, total_steps=9, key=jax.random.key(1)),
        local_opt.post_local(3, switch_step=9, total_steps=9),
        local_opt.from_schedule(1.9, total_steps=9),
        local_opt.SyncPlan(list(range(9)), 9),
    ]
    assert len({plan.digest() for plan in plans}) == 1 and len(set(plans)) == 1
    # The same on every machine: int64, least byte first.
    assert plans[0].digest() == hashlib.sha256(struct.pack("<10q", *range(9), 9)).hexdigest()
    others = [
        local_opt.every_step(8),
        local_opt.every_step(10),
        local_opt.constant(2, total_steps=9),
    ]
    assert len({plan.digest() for plan in (*others, plans[0])}) == 4
    assert plans[0] != others[0] and plans[0] != "every step"


def test_one_round_to_the_end():
    expected = local_opt.SyncPlan([0], 9)
    assert local_opt.constant(100, total_steps=9) == expected
    assert local_opt.swap(2, switch_step=0, total_steps=9) == expected
    assert local_opt.qsr(0.1, total_steps=9, alpha=1e30, h_base=1) == expected
    assert local_opt.power_rule(1e-300, total_steps=9, alpha=1e300, h_base=1, power=3) == expected
    assert local_opt.qsr(0.1, total_steps=9, alpha=0.1, h_base=100) == expected
    assert local_opt.constant(100, total_steps=1) == local_opt.every_step(1)


def test_a_plan_cannot_be_changed_by_accident():
    starts = np.array([0, 4])
    plan = local_opt.SyncPlan(starts, 10)
    starts[1] = 5
    assert plan.starts.tolist() == [0, 4]
    with pytest.raises(ValueError, match="read-only"):
        plan.starts[1] = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.total_steps = 11


def python_cosine(t):
    if t < 4:
        return 0.1 * t / 4
    return 0.1 * 0.5 * (1 + math.cos(math.pi * (t - 4) / 36))


@pytest.mark.parametrize("power", [1, 2, 3])
def test_rates_as_schedule_as_python_function_and_as_number(power):
    rule = dict(total_steps=40, alpha=0.12, h_base=2, power=power, warmup_steps=4)
    expected = reference.qsr_rounds(python_cosine, **rule)
    assert len(expected) < 20  # the rule grows here
    optax_cosine = optax.warmup_cosine_decay_schedule(0.0, 0.1, 4, 40, 0.0)
    for lr in (python_cosine, optax_cosine, lambda t: np.float64(python_cosine(int(t)))):
        assert local_opt.power_rule(lr, **rule).starts.tolist() == expected
    array = np.array([python_cosine(t) for t in range(40)])
    assert local_opt.power_rule(array, **rule).starts.tolist() == expected
    with pytest.raises(ValueError, match=r"lr has the shape \(39,\).*each of the 40 steps"):
        local_opt.power_rule(array[1:], **rule)
    numbers = dict(total_steps=40, alpha=0.25, h_base=2, power=power)
    for lr in (0.1, lambda t: 0.1, optax.constant_schedule(0.1)):
        plan = local_opt.power_rule(lr, **numbers)
        assert plan.periods[0] == math.floor((0.25 / 0.1) ** power)
        assert plan.starts.tolist() == reference.qsr_rounds(lambda t: 0.1, **numbers)


def test_the_rule_holds_from_the_first_step_after_the_warmup():
    rule = dict(total_steps=15, alpha=0.25, h_base=2)  # (0.25 / 0.1)^2 is 6.25
    assert local_opt.qsr(0.1, warmup_steps=4, **rule).periods.tolist() == [2, 2, 6, 5]
    assert local_opt.qsr(0.1, warmup_steps=5, **rule).periods.tolist() == [2, 2, 2, 6, 3]
    assert local_opt.qsr(0.1, warmup_steps=15, **rule).periods.tolist() == [2] * 7 + [1]


def test_numbers_that_float32_would_round_to_the_other_side_of_a_whole_one():
    """alpha / lr = 3 - 1e-9 is 3 in float32: the rule is evaluated in float64."""
    rule = dict(total_steps=100, alpha=3 - 1e-9, h_base=1)
    for lr in (1.0, optax.constant_schedule(1.0), lambda t: jnp.cos(0.0 * t)):
        assert local_opt.qsr(lr, **rule).periods[0] == 8
    rule["alpha"] = 3.0
    for lr in (1 + 1e-9, lambda t: jnp.float64(1e-9) + jnp.cos(0.0 * t)):
        assert local_opt.qsr(lr, **rule).periods[0] == 8


def test_evaluating_a_schedule_leaves_the_precision_of_jax_alone():
    local_opt.qsr(optax.cosine_decay_schedule(0.1, 10), total_steps=10, alpha=0.1, h_base=1)
    assert jnp.zeros(()).dtype == jnp.float32 and not jax.config.jax_enable_x64


def test_h_max_bounds_every_round():
    lr = optax.cosine_decay_schedule(0.1, 200)
    rule = dict(total_steps=200, alpha=0.2, h_base=2)
    free, bound = local_opt.qsr(lr, **rule), local_opt.qsr(lr, h_max=7, **rule)
    assert free.periods.max() > 7 == bound.periods.max()
    expected = reference.qsr_rounds(reference.warmup_cosine(0.1, 0, 200, 0.0), **rule, h_max=7)
    assert bound.starts.tolist() == expected
    grow = local_opt.from_schedule(
        optax.linear_schedule(1, 50, 200), total_steps=200, h_max=7, h_base=3
    )
    assert (grow.periods[:-1].min(), grow.periods.max()) == (3, 7)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_a_rate_that_falls_to_zero_does_not_overflow(power):
    lr = optax.linear_schedule(0.1, 0.0, 30)  # 0 in all of the last steps
    # Not 0.1: alpha / lr would be whole numbers, which rounding may put on either side.
    rule = dict(total_steps=50, alpha=0.103, h_base=1, power=power)
    plan = local_opt.power_rule(lr, **rule)
    starts = reference.qsr_rounds(lambda t: 0.1 * max(0, 1 - t / 30), **rule)
    assert plan.starts.tolist() == starts and plan.ends[-1] == 50
    bound = local_opt.power_rule(lr, h_max=4, **rule)
    zeros = bound.periods[bound.starts >= 30]
    assert len(zeros) > 1 and (zeros[:-1] == 4).all() and zeros[-1] <= 4


def test_bernoulli_has_its_rate_and_its_key():
    p, total_steps = 0.25, 10_000
    plan = local_opt.bernoulli(p, total_steps=total_steps, key=jax.random.key(0))
    deviation = math.sqrt(total_steps * p * (1 - p))  # binomial, 4 deviations: 1 in 16000
    assert abs(plan.rounds - p * total_steps) < 4 * deviation
    same = local_opt.bernoulli(p, total_steps=total_steps, key=jax.random.key(0))
    other = local_opt.bernoulli(p, total_steps=total_steps, key=jax.random.key(1))
    assert plan == same != other
    rises = local_opt.bernoulli(
        lambda t: 0.05 + 0.9 * t / total_steps, total_steps=total_steps, key=jax.random.key(0)
    )
    # p(t) is the chance of a sync after step t.
    once = local_opt.bernoulli(
        lambda t: 1.0 if t == 4 else 1e-9, total_steps=10, key=jax.random.key(0)
    )
    assert once.ends.tolist() == [5, 10]
    late = np.sum(rises.starts > total_steps // 2)
    expected, deviation = total_steps / 2 * 0.725, math.sqrt(total_steps / 2 * 0.25)
    assert abs(late - expected) < 4 * deviation


@pytest.mark.parametrize("name", tables.PLANS)
@settings(max_examples=times(12))
@given(st.data())
def test_aligned_rounds_wait_for_the_next_mark(name, data):
    total_steps = data.draw(st.integers(1, 60))
    every = data.draw(st.sampled_from([1, 2, 3, 2.5, 6.5, 12, 25 / 3, 100]))
    fresh = data.draw(st.none() | st.lists(st.booleans(), min_size=total_steps - 1,
                                           max_size=total_steps - 1))  # fmt: skip
    loaded = np.array([True, *(fresh if fresh is not None else [True] * (total_steps - 1))])
    plan = tables.PLANS[name](total_steps)
    found = local_opt.aligned(plan, every=every, fresh=None if fresh is None else loaded)
    ends = reference.aligned_ends(set(plan.ends.tolist()), loaded, every)
    assert found.ends.tolist() == ends
    assert found.total_steps == total_steps and 1 <= found.rounds <= plan.rounds
    again = local_opt.aligned(found, every=every, fresh=None if fresh is None else loaded)
    assert again is found
    if every == 1 and fresh is None:
        assert found is plan


@pytest.mark.parametrize("every", [1, 2, 6, 12.5])
def test_rounds_that_take_as_long_as_the_marks_stay_apart(every):
    plan = local_opt.constant(15, total_steps=300)
    found = local_opt.aligned(plan, every=every)
    assert found.rounds == plan.rounds
    moved = found.ends - plan.ends
    assert (moved >= 0).all() and (moved < every + 1).all()
    # Half epochs of an odd number of loads: each second mark is a whole epoch's end.
    marks = {math.floor(k * every + 0.5) for k in range(1, 301)}
    assert set(found.ends.tolist()) <= marks


RULE = dict(total_steps=10, alpha=0.2, h_base=2)


def qsr(lr=0.1, **changes):
    return local_opt.qsr(lr, **RULE | changes)


BAD = {
    "alpha 0": (lambda: qsr(alpha=0), r"alpha is 0: it must be a positive, finite"),
    "alpha < 0": (lambda: qsr(alpha=-0.1), r"alpha is -0.1: .*positive"),
    "alpha nan": (lambda: qsr(alpha=math.nan), r"alpha is nan: .*finite"),
    "alpha inf": (lambda: qsr(alpha=math.inf), r"alpha is inf: .*finite"),
    "h_base 0": (lambda: qsr(h_base=0), r"h_base is 0: it must be a whole number >= 1"),
    "h_base 1.5": (lambda: qsr(h_base=1.5), r"h_base is 1.5: it must be a whole number"),
    "h_base True": (lambda: qsr(h_base=True), r"h_base is True: it must be a whole number"),
    "power 0": (
        lambda: local_opt.power_rule(0.1, power=0, **RULE), r"power is 0: it must be a positive"
    ),
    "h_max < h_base": (lambda: qsr(h_max=1), r"h_max is 1: it must be a whole number >= 2"),
    "warmup < 0": (lambda: qsr(warmup_steps=-1), r"warmup_steps is -1: .*in 0 \.\. 10"),
    "warmup > T": (lambda: qsr(warmup_steps=11), r"warmup_steps is 11: .*in 0 \.\. 10"),
    "T 0": (lambda: qsr(total_steps=0), r"total_steps is 0: a run has at least one whole step"),
    "T 2.5": (lambda: local_opt.every_step(2.5), r"total_steps is 2.5: a run has at least one"),
    "T < 0": (lambda: local_opt.constant(2, total_steps=-3), r"total_steps is -3: a run has"),
    "lr < 0": (lambda: qsr(lambda t: 0.55 - t / 10), r"lr\(6\) is -0.05: .*not negative.*\(4 of"),
    "lr nan": (lambda: qsr(lambda t: jnp.where(t == 3, jnp.nan, 0.1)),
        r"lr\(3\) is nan: .*finite.*10 steps \(1 of"),
    "lr inf": (lambda: qsr(lambda t: 1 / (5.0 - t) if t != 5 else math.inf), r"lr\(5\) is inf"),
    "lr number": (lambda: qsr(-0.1), r"lr\(0\) is -0.1: .*not negative"),
    "no warmup": (lambda: qsr(optax.linear_schedule(0.0, 0.1, 5)),
        r"learning rate at step 0 is 0, .*without end: pass warmup_steps"),
    "warmup too short": (lambda: qsr(lambda t: 0.0 if t < 4 else 0.1, warmup_steps=3),
        r"learning rate at step 3 is 0, .*pass warmup_steps"),
    "p 0": (lambda: local_opt.bernoulli(0.0, total_steps=5, key=jax.random.key(0)),
        r"p\(0\) is 0: a probability lies in \(0, 1\]"),
    "p 1.5": (
        lambda: local_opt.bernoulli(
            lambda t: 1.5 if t == 3 else 0.1, total_steps=5, key=jax.random.key(0)
        ),
        r"p\(3\) is 1.5: a probability lies in",
    ),
    "period 0": (lambda: local_opt.constant(0, total_steps=5), r"period is 0: .*>= 1"),
    "period True": (lambda: local_opt.constant(True, total_steps=5), r"period is True: .*whole"),
    "period of a function": (lambda: local_opt.from_function(lambda t: 2 - t, total_steps=5),
        r"period\(2\) is 0: a round has a whole number of steps, >= 1"),
    "period not whole": (lambda: local_opt.from_function(lambda t: 1.5, total_steps=5),
        r"period\(0\) is 1.5: a round has a whole number"),
    "switch after the end": (lambda: local_opt.post_local(2, switch_step=6, total_steps=5),
        r"switch_step is 6: .*in 0 \.\. 5"),
    "switch before the start": (lambda: local_opt.swap(2, switch_step=-1, total_steps=5),
        r"switch_step is -1: .*in 0 \.\. 5"),
    "from_schedule < 0": (lambda: local_opt.from_schedule(lambda t: 2.0 - t, total_steps=5),
        r"period\(3\) is -1: .*not negative"),
    "starts not increasing": (lambda: local_opt.SyncPlan([0, 4, 4], 10),
        r"from 0 to 4: they must begin at 0, increase strictly"),
    "starts not at 0": (lambda: local_opt.SyncPlan([1, 4], 10), r"from 1 to 4: .*begin at 0"),
    "starts beyond T": (
        lambda: local_opt.SyncPlan([0, 10], 10), r"from 0 to 10: .*end below the 10 steps"
    ),
    "starts empty": (lambda: local_opt.SyncPlan([], 10), r"starts is float64\[0\]: .*whole"),
    "starts not whole": (lambda: local_opt.SyncPlan([0.0, 2.5], 10), r"starts is float64\[2\]"),
    "step -1": (lambda: local_opt.every_step(5).round_at(-1), r"step -1 is outside .*0 \.\. 4"),
    "step T": (lambda: local_opt.every_step(5).period_at(5), r"step 5 is outside .*0 \.\. 4"),
    "steps": (lambda: local_opt.every_step(5).syncs_after([0, 7]), r"outside .*0 \.\. 4"),
    "resume": (lambda: list(local_opt.every_step(5).rounds_from(6)), r"step 6 is outside"),
    "every 0": (lambda: local_opt.aligned(local_opt.every_step(5), every=0),
        r"every is 0: it must be a number of loads >= 1"),
    "every inf": (lambda: local_opt.aligned(local_opt.every_step(5), every=math.inf),
        r"every is inf: .*loads"),
    "every True": (lambda: local_opt.aligned(local_opt.every_step(5), every=True),
        r"every is True: .*number of loads"),
    "fresh of another run": (
        lambda: local_opt.aligned(local_opt.every_step(5), every=2, fresh=[True] * 4),
        r"fresh is bool\[4\]: .*each of the plan's 5 steps"),
    "run longer": (lambda: local_opt.constant(2, total_steps=5).check_run(6),
        r"constant, H = 2\) has 5 steps and the run 6: make the plan with the run's"),
    "run shorter": (lambda: local_opt.every_step(5).check_run(4), r"has 5 steps and the run 4"),
}  # fmt: skip

test_bad_input = refuses(BAD)


OTHER_FILES = ["garbage", "", "[]", "null", '{"starts": [0]}', json.dumps(
    {"rule": None, "total_steps": 1, "starts": [0], "digest": local_opt.every_step(1).digest()}),
               '{"total_steps": 4, "rule": "", "digest": ""}']  # fmt: skip


@pytest.mark.parametrize("content", OTHER_FILES)
def test_a_file_without_a_plan(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="plan.json' holds no saved plan .*: save it again"):
        local_opt.read_sync_plan(str(path))


def test_no_half_file_stays_under_the_name(tmp_path, monkeypatch):
    plan, path = local_opt.every_step(5), tmp_path / "plan.json"
    plan.save(path)
    monkeypatch.setattr(json, "dump", lambda content, file: file.write("{") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        local_opt.constant(2, total_steps=5).save(path)
    assert local_opt.read_sync_plan(path) == plan
