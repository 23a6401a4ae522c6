"""The map and the advice: times by hand, choices that can be told, and the records behind them."""

import numpy as np
import pytest
from absl import app, flags

from experiments import advise, machine_map
from experiments.advice_parts import machines, maps, recorded
from experiments.advice_parts.machines import Machine
from experiments.advice_parts.recorded import Combination, Factorial, Taken
from experiments.studies.cost import order_traffic
from experiments.studies.tables import ORDERS
from experiments.training.config import Sizes

SIZES = Sizes(workers=4, num_units=32, units_per_step=16, unit_size=1)
PLAIN, ORDER = Combination(), Combination(order=True)
LOCAL, ECHO = Combination(local=True), Combination(uses=4)
ALL = Combination(True, True, 4)


def taken(steps, loads, rounds, spread=(0.9, 1.0, 1.1)):
    """Three seeds, which differ by the same factors in all combinations."""
    return Taken(*(x * np.array(spread) for x in (steps, loads, rounds)), rate=0.5)


def factorial(task="a", **changes):
    of = {
        PLAIN: taken(1000, 1000, 1000),
        ORDER: taken(400, 400, 400),
        LOCAL: taken(1000, 1000, 50),
        ECHO: taken(2000, 500, 2000),
        ALL: taken(1200, 300, 60),
    } | changes.get("taken", {})
    return Factorial(task, changes.get("sizes", SIZES), "sketch256_dealt", 0.1, of)


def test_times_are_those_of_a_hand_made_sum():
    found = factorial()
    machine = Machine(step=2.0, load=16.0, sync=20.0, parameters=10**6, latency=4.0, ordered=1.1)
    times = machines.times(machine, found)
    np.testing.assert_allclose(times[PLAIN], [0.9, 1.0, 1.1] * np.array(2e3 + 20e3))
    traffic = order_traffic(ORDERS["sketch256_dealt"], SIZES, 10**6)
    for place, loads in enumerate((270, 300, 330)):
        computing = 2.0 * (4 * loads + 0.1 * loads)  # four uses, and the order's share of loads
        expected = max(computing + 20.0 * loads / 5 + 16.0 * traffic(loads), 16.0 * loads)
        assert times[ALL][place] == pytest.approx(expected)


def test_the_best_is_told_from_others_only_beyond_the_interval():
    same = np.log([1.0, 1.2, 0.9])
    logs = {PLAIN: same + 1, ORDER: same, LOCAL: same + np.array([0.1, -0.1, 0.05])}
    choice = machines.best_of(logs)
    assert choice.best == ORDER and choice.rivals == (LOCAL,)
    assert choice.times == pytest.approx((np.e, np.e, np.e))
    # Of equal ones the one with fewer decisions.
    assert machines.best_of({ALL: same, PLAIN: same}).best == PLAIN


@pytest.mark.parametrize(
    "load,sync,best", [(0.0, 0.0, ORDER), (8.0, 10.0, ALL), (0.0, 10.0, LOCAL)]
)
def test_the_map_is_what_each_machine_chooses(load, sync, best):
    found = factorial(taken={ORDER: taken(990, 990, 990)} if best == LOCAL else {})
    machine = Machine(1.0, load, sync, 10**8)
    assert machines.choose(machine, found).best == best
    drawn = maps.draw(found, 10**8)
    assert drawn.kind.shape == drawn.sure.shape == (len(maps.LOADS), len(maps.SYNCS))
    for i, j in ((0, 0), (30, 30), (40, 10)):
        own = Machine(1.0, maps.LOADS[i], maps.SYNCS[j], 10**8)
        choice = machines.choose(own, found)
        assert drawn.kind[i, j] == maps.kind_of(choice.best)
        assert drawn.times[i, j] == pytest.approx(choice.times[0])
        told = all(maps.kind_of(c) == maps.kind_of(choice.best) for c in choice.rivals)
        assert drawn.sure[i, j] == told


def test_what_is_advised_comes_from_other_tasks():
    known = [factorial("a"), factorial("b"), factorial("c", taken={ALL: taken(5000, 1250, 250)})]
    rows = maps.regrets(known, Machine(1.0, 8.0, 10.0, 10**8))
    by_task = {row["task"]: row for row in rows}
    assert by_task["c"]["advised"] == "order + local steps + 4 uses"
    assert by_task["c"]["best"] != by_task["c"]["advised"] and by_task["c"]["regret"] > 0.5
    alone = maps.regrets([factorial("a")], Machine(1.0, 8.0, 10.0, 10**8))
    assert alone == []


def test_a_combination_that_not_all_have_is_not_predicted():
    few = Factorial(
        "b", SIZES, "sketch256_dealt", 0.1, {PLAIN: taken(9, 9, 9), ORDER: taken(3, 3, 3)}
    )
    assert set(machines.predict(Machine(1.0, 0.0, 0.0, 10**6), [factorial(), few])) == {
        PLAIN,
        ORDER,
    }


def test_the_nearest_size_of_a_batch_is_taken():
    small = factorial("s", sizes=SIZES._replace(workers=32, units_per_step=2))
    assert [f.task for f in machines.near([factorial(), small], 12)] == ["a"]
    assert [f.task for f in machines.near([factorial(), small], 1)] == ["s"]


def test_the_recorded_factorials_hold_every_combination():
    known = recorded.load()
    assert {found.size for found in known} == {"4 x 16", "32 x 2"}
    assert len({found.task for found in known}) >= 4
    for found in known:
        assert {PLAIN, ORDER, LOCAL, ECHO} <= set(found.taken), found.task
        for own in found.taken.values():
            assert len(own.steps) == 5 and (own.rounds <= own.steps).all()
            assert (own.loads <= own.steps).all()


def test_networks_and_their_seconds():
    assert machines.sync_seconds(10**6, 4, gbps=10, latency=1e-5) == pytest.approx(
        1e-5 + 8 * 6e6 / 1e10
    )
    assert machines.sync_seconds(10**6, 1, gbps=10, latency=1e-5) == 0


def flags_of(define, *argv):
    values = flags.FlagValues()
    define(values)
    values(["program", *argv])
    return values


def test_the_map_is_written(tmp_path, capsys):
    argv = ("--parameters=1e6", "--gbps=10", "--loaders=7400", f"--output_dir={tmp_path / 'map'}")
    machine_map.main([], flags_of(machine_map.define_flags, *argv))
    out = capsys.readouterr().out
    assert "regret" in out and "7400" in out
    written = {path.name for path in (tmp_path / "map").iterdir()}
    assert {"map.png", "map.jsonl", "table_choices.md", "report.html"} <= written


def test_advice_measures_and_recommends(capsys):
    values = flags_of(
        advise.define_flags, "--task=digits", "--workers=4", "--units_per_step=16", "--gbps=1,100"
    )
    advise.run(values)
    out = capsys.readouterr().out
    assert out.count("times as fast as none (") == 2 and "--order=" in out
    assert "1 Gb/s: a load is" in out and "100 Gb/s: a load is" in out


@pytest.mark.parametrize(
    "program,argv,message",
    [
        (machine_map, ["--gbps=fast"], "--gbps has .'fast'.: pass positive, finite numbers"),
        (machine_map, ["--runs=docs"], "which holds no map_TASK_WxB_eUSES: record factorials"),
    ],
)
def test_bad_input_is_refused(program, argv, message):
    with pytest.raises((app.UsageError, ValueError), match=message):
        program.main([], flags_of(program.define_flags, *argv))
