"""The advice: times by hand, choices beyond the intervals, and their records."""

import functools
import re

import jax
import numpy as np
import pytest

from experiments import advise, timing
from experiments.advise import Combination, Factorial
from experiments.compare import flags
from experiments.compare.arms import row_of
from experiments.compare.cost import Machine, order_traffic
from experiments.report import archive, statistics
from experiments.trainer.config import Sizes
from syncopate.refusals import UserError
from tests.commands import TWO_DEVICES, parsed

SIZES = Sizes(workers=4, num_units=32, units_per_step=16, unit_size=1)
PLAIN, ORDER = Combination(), Combination(order=True)
LOCAL, ECHO = Combination(local=True), Combination(uses=4)
ALL = Combination(True, True, 4)


def taken(steps, loads, rounds, spread=(0.9, 1.0, 1.1)):
    """Three seeds, which differ by the same factors in all combinations."""
    return np.outer((steps, loads, rounds), spread)


def factorial(task="a", **changes):
    of = {
        PLAIN: taken(1000, 1000, 1000),
        ORDER: taken(400, 400, 400),
        LOCAL: taken(1000, 1000, 50),
        ECHO: taken(2000, 500, 2000),
        ALL: taken(1200, 300, 60),
    } | changes.get("taken", {})
    return Factorial(task, SIZES, of)


def test_times_equal_a_sum_by_hand():
    actual = factorial()
    machine = Machine(step=2.0, load=16.0, sync=20.0, parameters=10**6, latency=4.0, ordered=1.1)
    times = {c: np.exp(log) for c, log in advise.logs_of(machine, actual).items()}
    np.testing.assert_allclose(times[PLAIN], [0.9, 1.0, 1.1] * np.array(2e3 + 20e3))
    traffic = order_traffic(row_of("order", "cd_grab+sketch256+dealt"), SIZES, 10**6)
    for place, loads in enumerate((270, 300, 330)):
        computing = 2.0 * (4 * loads + 0.1 * loads)  # four uses, and the order's share of loads
        expected = max(computing + 20.0 * loads / 5 + 16.0 * traffic(loads), 16.0 * loads)
        assert times[ALL][place] == pytest.approx(expected)


def test_the_best_has_no_rivals_only_beyond_the_interval():
    same = np.log([1.0, 1.2, 0.9])
    logs = {PLAIN: same + 1, ORDER: same, LOCAL: same + np.array([0.1, -0.1, 0.05])}
    assert advise.best_of(logs) == (ORDER, [LOCAL])
    # Of equal ones the one with fewer decisions.
    assert advise.best_of({ALL: same, PLAIN: same})[0] == PLAIN


@pytest.mark.parametrize(
    "load,sync,best", [(0.0, 0.0, ORDER), (8.0, 10.0, ALL), (0.0, 10.0, LOCAL)]
)
def test_the_best_depends_on_the_machine(load, sync, best):
    results = factorial(taken={ORDER: taken(990, 990, 990)} if best == LOCAL else {})
    machine = Machine(1.0, load, sync, parameters=10**8)
    assert advise.best_of(advise.logs_of(machine, results))[0] == best


def test_only_combinations_of_all_tasks_are_predicted():
    few = Factorial("b", SIZES, {PLAIN: taken(9, 9, 9), ORDER: taken(3, 3, 3)})
    result = advise.predict(Machine(parameters=10**6), [factorial(), few])
    assert set(result) == {PLAIN, ORDER}


def test_the_table_of_factorials_is_that_of_the_recorded_runs():
    """Steps, loads and rounds to the target, at each arm's best rate."""
    (digits,) = (f for f in advise.load() if f.task == "digits" and f.sizes.units_per_step == 16)
    for uses in (2, 4):
        comparison = archive.load(f"map_digits_4x16_e{uses}")
        runs = statistics.frame(comparison)
        for arm in comparison.arms:
            echoed = uses if arm.endswith("+fixed") else 1
            combination = Combination(arm.startswith(advise.ORDER), "+constant+" in arm, echoed)
            to = runs.loc[arm, ["to step", "to loads", "to rounds"]].to_numpy(float).T
            np.testing.assert_array_equal(digits.taken[combination], to)


def test_advice_measures_and_recommends(capsys, monkeypatch):
    monkeypatch.setattr(advise, "REPEATS", 2)
    few = functools.partial(timing.measure, rounds=2, per_round=2)
    monkeypatch.setattr(timing, "measure", few)
    given = ("--task=digits", "--workers=4", "--units_per_step=16", "--gigabits=1,100")
    advise.run(parsed(advise, *given))
    out = capsys.readouterr().out
    assert out.count("Use ") + out.count("Nothing is shown to help") == 2
    assert "1 Gb/s: a load takes" in out and "100 Gb/s: a load takes" in out


def test_the_network_of_a_mesh_is_an_all_reduce_of_the_parameters(monkeypatch):
    monkeypatch.setattr(advise, "order_ratio", lambda *_: 1.0)
    monkeypatch.setattr(timing, "measure", lambda *_: Machine())
    timed = []

    def medians(calls, _):  # the first call is of the parameters, the second of one number
        sent = re.findall(r"f32\[(\d+)\] = psum", str(jax.make_jaxpr(calls["sync"])()))
        timed.append(int(*sent))
        return {"sync": 3.0 if timed[-1] > 1 else 0.5}

    monkeypatch.setattr(timing, "medians", medians)
    values = parsed(advise, *TWO_DEVICES)
    (machine,) = advise.machines_of(*flags.setting_from_flags(values), values)
    assert (machine.label, machine.sync, machine.latency) == ("measured", 3.0, 0.5)
    assert timed == [machine.parameters, 1] == [650, 1]  # 10 classes of 64 pixels and a bias
    for name in ("gigabits", "efficiency", "latency", "maxtext"):
        values = parsed(advise, *TWO_DEVICES, f"--{name}=1")
        with pytest.raises(UserError, match=f"--{name} is unused"):
            advise.machines_of(*flags.setting_from_flags(values), values)


def test_a_network_has_an_efficiency_and_a_latency(monkeypatch):
    monkeypatch.setattr(advise, "order_ratio", lambda *_: 1.0)
    monkeypatch.setattr(timing, "measure", lambda *_: Machine())
    given = ("--workers=4", "--units_per_step=16", "--gigabits=1,2", "--efficiency=0.5")
    values = parsed(advise, *given, "--latency=0.25")
    machines = advise.machines_of(*flags.setting_from_flags(values), values)
    sent = 8 * 4 * 650 * 1.5 / 1e9  # a ring of four
    assert [m.sync for m in machines] == pytest.approx([0.25 + 2 * sent, 0.25 + sent], rel=1e-12)
    assert [m.latency for m in machines] == [0.25, 0.25]


def test_a_config_of_maxtext_is_a_network_and_a_period(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(advise, "order_ratio", lambda *_: 1.0)
    monkeypatch.setattr(timing, "measure", lambda *_: Machine(step=1e-6))
    path = tmp_path / "base.yml"
    path.write_text("dcn_bandwidth_limit: '10gbit'\ndiloco_sync_period: 36\n")
    given = ("--workers=4", "--units_per_step=16", "--latency=0", f"--maxtext={path}")
    advise.run(parsed(advise, *given))
    sync = 8 * 4 * 650 * 1.5 / 1e10
    share = 36e-6 / (36e-6 + sync)
    out = capsys.readouterr().out
    assert "10 Gb/s: a load takes" in out
    assert f"With diloco_sync_period = 36, {share:.1%} of the time is computation" in out


@pytest.mark.parametrize(
    "taken_by_order,expected",
    [
        ([400] * 3, "Use order: 2.5 times as fast as none (2.5 to 2.5, 95 % over 3 tasks). No"),
        (
            [100, 400, 1600],
            "Nothing is shown to help: order is 2.5 times as fast as none (0.1 to 7",
        ),
        ([2000] * 3, "Nothing is shown to help.\n"),
    ],
)
def test_what_may_be_slower_is_not_recommended(taken_by_order, expected):
    """Without: 1,000 steps. The interval of three tasks is wide, and may include 1."""
    counts = [{ORDER: taken(n, n, n), ALL: taken(9e9, 1, 1)} for n in taken_by_order]
    tasks = [factorial(name, taken=times) for name, times in zip("abc", counts, strict=True)]
    text = advise.advice(Machine(), tasks)
    assert expected in text and ("--order=" in text) == expected.startswith("Use"), text
