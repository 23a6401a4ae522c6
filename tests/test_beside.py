"""Runs side by side are those that run alone, and one that ends leaves the others be."""

import jax
import numpy as np
import pytest

from experiments.training import beside
from tests.little_run import STEPS, STREAMED, built, plans_of, trained

SEEDS, RATES = (0, 1, 2, 1), (0.3, 0.3, 0.3, 0.1)
AT = range(0, STEPS, 12)


def scaled(plans, rate):
    return plans._replace(rates=plans.rates * rate / 0.3)


def measured(state):
    return {"train/loss": float(sum(np.abs(x).sum() for x in map(np.asarray, leaves(state))))}


def leaves(state):
    return jax.tree.leaves(jax.device_get(state.params))


def together(program, plans, *, ends=None, rates=RATES):
    found = [[] for _ in SEEDS]
    stopped = beside.train(
        program, beside.lifted(program), [scaled(plans, rate) for rate in rates], seeds=SEEDS,
        evaluate=lambda step, state: measured(state), evaluate_at=AT,
        on_record=lambda i, record: found[i].append(record),
        traffic=lambda rounds, loads: rounds, ends=ends or [lambda record: False] * len(SEEDS),
    )  # fmt: skip
    return stopped, found


@pytest.mark.parametrize(
    ("order", "sync"), [("cd_grab", "qsr"), ("dealt", "parallel"), ("sketch16_dealt", "constant")]
)
def test_runs_side_by_side_are_those_that_run_alone(order, sync):
    program, plans = built(order, sync), plans_of(sync)
    stopped, found = together(program, plans)
    assert not stopped
    for own, seed, rate in zip(found, SEEDS, RATES, strict=True):
        _, alone = trained(
            program, scaled(plans, rate), seed=seed, evaluate=measured, evaluate_at=AT
        )
        assert [r["step"] for r in own] == [r["step"] for r in alone] == [*AT, STEPS]
        for one, other in zip(own, alone, strict=True):
            assert one.pop("side_by_side") == len(SEEDS)
            assert one.pop("seconds") >= 0 and other.pop("seconds") >= 0
            assert one.keys() == other.keys()
            for name, value in other.items():
                if isinstance(value, float):
                    np.testing.assert_allclose(one[name], value, rtol=2e-5, err_msg=name)
                else:
                    assert one[name] == value, name


def test_a_run_that_ends_or_diverges_leaves_the_others_be():
    program, plans = built(), plans_of()
    ends = [lambda record: record["step"] == 24, *([lambda record: False] * 3)]
    _, usual = together(program, plans)
    stopped, found = together(program, plans, ends=ends, rates=(0.3, 1e30, 0.3, 0.1))
    assert not stopped
    assert [r["step"] for r in found[0]] == [0, 12, 24] and found[0][-1]["ended"]
    assert "not finite" in found[1][-1]["diverged"] and found[1][-1]["ended"]
    for i in (2, 3):
        assert [r["train/loss"] for r in found[i]] == [r["train/loss"] for r in usual[i]]


def test_what_cannot_run_side_by_side_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="side_by_side=1"):
        beside.lifted(built(**STREAMED))
    program = built()
    other = [plans_of(), plans_of(h_base=3)]
    with pytest.raises(ValueError, match="one plan of syncs"):
        beside.train(
            program, beside.lifted(program), other, seeds=(0, 1), evaluate=None, evaluate_at=(),
            on_record=None, traffic=None, ends=[],
        )  # fmt: skip
    assert beside.key_of(plans_of(echo="measured")) is None
