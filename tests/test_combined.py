"""The factorial: its effects by hand, its tables and pictures, and a comparison that goes on."""

import json
import pathlib

import numpy as np
import pytest

from experiments import (
    combined,
    combined_effects,
    combined_report,
    combined_runs,
    html_report,
    loads,
    recorded,
    volume,
)
from experiments.combined_effects import effects
from experiments.combined_runs import Arm
from experiments.methods import METHODS
from tests.test_train import PER_STEP, RECIPE, STEPS, UNITS, WORKERS, plans_of, task

DECISIONS = dict(
    sync="qsr", echo="diffusion_cosine", total_steps=STEPS, schedule="cosine", floor=0.01,
    warmup_steps=3, h_base=2, growth=1.5, h_max=None, echo_factor=3,
)  # fmt: skip
ROOT = pathlib.Path(__file__).parents[1]
SIZES = loads.Sizes(WORKERS, UNITS, PER_STEP, 1)
FACTORS = combined.Factors("cd_grab", "qsr", "diffusion_cosine")


def test_effects_are_those_that_were_put_in():
    rng = np.random.default_rng(0)
    a, b, c = np.meshgrid([-1, 1], [-1, 1], [-1, 1], indexing="ij")
    y = 3 + 0.5 * a - 2 * b + 0.25 * a * b - 0.125 * a * b * c
    noise = rng.normal(scale=1e-9, size=(2, 2, 2, 4))
    found = {e.factors: e for e in effects(y[..., None] + noise)}
    expected = {
        ("order",): 1, ("sync",): -4, ("echo",): 0, ("order", "sync"): 0.5, ("order", "echo"): 0,
        ("sync", "echo"): 0, ("order", "sync", "echo"): -0.25,
    }  # fmt: skip
    assert {k: round(e.mean, 6) for k, e in found.items()} == expected
    assert all(0 < e.half_width < 1e-8 for e in found.values())


def test_a_main_effect_is_the_mean_change_and_its_interval_is_over_seeds():
    y = np.zeros((2, 2, 2, 3))
    y[1, 0, 0], y[1, 0, 1], y[1, 1, 0], y[1, 1, 1] = 1, 2, 3, 4
    y += np.array([10.0, 20.0, 30.0])  # a seed that is worse in all cells changes no effect
    order = effects(y)[0]
    assert order.mean == pytest.approx(2.5) and order.half_width == pytest.approx(0, abs=1e-9)
    y[1, ..., 1] += 3  # of one seed alone
    order = effects(y)[0]
    assert order.mean == pytest.approx(3.5)
    assert order.half_width == pytest.approx(4.3027 * np.sqrt(3) / np.sqrt(3), rel=1e-4)


def test_effects_are_shown_as_factors_and_bold_where_there_is_one():
    effect = combined_effects.Effect(("order",), np.log(0.5), np.log(1.25))
    assert combined_effects.shown(effect, relative=True) == "**× 0.50 (0.40 to 0.62)**"
    unclear = combined_effects.Effect(("order",), 0.1, 0.2)
    assert combined_effects.shown(unclear, relative=False) == "+0.10 (-0.10 to +0.30)"
    single = combined_effects.Effect(("order",), np.log(2), float("nan"))
    assert combined_effects.shown(single, relative=True) == "× 2.00"


def test_a_price_takes_the_slower_of_steps_and_loads():
    run = [{"step": 50, "loads": 40, "sent": 5}, {"step": 100, "loads": 45, "sent": 10}]
    machines = combined_report.prices(4.0, 2.0)
    # 40 loads of 4 steps hold the first 50 steps up; 5 of them hide behind the next 50.
    found = [combined_report.priced(run, machine) for machine in machines]
    assert found == [100, 160 + 50, 100 + 20, 160 + 50 + 20]


@pytest.fixture(scope="module")
def compared():
    options = dict(seeds=2, evaluations=4)
    decisions = combined.Decisions(**DECISIONS)
    recipe = RECIPE._replace(learning_rates=(0.1, 0.3))
    arms = FACTORS.arms
    written = []
    found = combined.compare_arms(
        task(), recipe, decisions, arms, **options, on_record=written.append
    )
    return recipe, decisions, arms, options, found, written


def test_every_arm_runs_and_a_comparison_goes_on_where_it_was(compared):
    recipe, decisions, arms, options, found, written = compared
    assert found == written
    runs = {combined_runs.run_of(r) for r in found}
    assert len(runs) == 8 * 4 == len(arms) * combined_runs.runs_per_arm(2, 2)
    assert {combined_runs.arm_of(r) for r in found} == set(arms)
    again = []
    cut = found[:-6]  # the last run and half of the one before are missing
    same = combined.compare_arms(
        task(), recipe, decisions, arms, **options, done=cut, on_record=again.append
    )
    assert len(again) == 8

    def timeless(records):
        lines = [{k: v for k, v in r.items() if k != "seconds"} for r in records]
        return sorted(json.dumps(line, sort_keys=True) for line in lines)

    assert timeless(same) == timeless(found)


def test_arms_begin_alike_and_differ_in_what_they_decide(compared):
    _, _, arms, _, found, _ = compared
    ends = {(a, s): r for r in found for a, s in [(combined_runs.arm_of(r), r["seed"])]}
    plans = plans_of()
    for arm in arms:
        end = ends[arm, 0]
        assert end["step"] == STEPS
        assert end["loads"] == (STEPS if arm.echo == "none" else plans.echo.loads)
        assert end["rounds"] == (STEPS if arm.sync == "parallel" else plans.sync.rounds)
        sent = volume.order_sent(METHODS[arm.order], SIZES, 18)
        assert end["sent"] == end["rounds"] + sent(end["loads"])
        assert (sent(end["loads"]) > 0) == (arm.order == "cd_grab")


def test_the_report_has_tables_pictures_and_one_page(compared, tmp_path):
    _, _, arms, _, found, _ = compared
    machines = combined_report.prices(4.0, 2.0)
    text = combined_report.report(found, arms, str(tmp_path), "random", machines)
    html_report.of_folder(str(tmp_path), title="random", command="python -m experiments.combined")
    names = {path.name for path in tmp_path.iterdir()}
    tables = {"table.md", "table_effects.md", "table_priced.md"}
    assert names == tables | {"comparison.png", "effects.png", "report.html"}
    for arm in arms:
        assert text.count(arm.label + " ") >= 2
    assert "order × sync × echo" in text
    first = next(line for line in text.splitlines() if "1.00 (1.00 to 1.00)" in line)
    assert arms[0].label in first  # relative to itself
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2


def test_a_diverged_rate_is_out(compared):
    recipe, decisions, arms, options, _, _ = compared
    recipe = recipe._replace(learning_rates=(0.3, 1e30))
    found = combined.compare_arms(task(), recipe, decisions, arms[:1], **options)
    assert [r["learning_rate"] for r in found if r["diverged"]] == [1e30]
    assert combined_runs.best_rate(found, arms[0]) == 0.3
    lost = [r for r in found if r["learning_rate"] == 1e30]
    assert combined_runs.metric_of(lost + found) == "accuracy"
    with pytest.raises(ValueError, match="D-RR . parallel . no echo has no learning rate"):
        combined_runs.at_best(lost, arms[:1])


def test_what_arms_cost_is_known_before(compared):
    recipe, decisions, arms, _, found, _ = compared
    machines = combined_report.prices(4.0, 2.0)
    text = combined.forecast(task(), arms, decisions, recipe, machines)
    line = next(line for line in text.splitlines() if line.startswith(f"| {arms[-1].label} "))
    end = next(r for r in found if combined_runs.arm_of(r) == arms[-1] and r["step"] == STEPS)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:3] == [str(end["loads"]), str(end["rounds"])]
    assert cells[4] == str(STEPS)


def test_arms_with_unequal_seeds_are_not_compared(compared):
    _, _, arms, _, found, _ = compared
    first = [r for r in found if (combined_runs.arm_of(r), r["seed"]) != (arms[0], 1)]
    with pytest.raises(ValueError, match="the arms' best rates have runs of"):
        combined_runs.at_best(first, arms)


def test_a_rate_at_which_a_later_seed_diverges_makes_place_for_the_next(compared, monkeypatch):
    recipe, decisions, arms, options, _, _ = compared
    recipe = recipe._replace(learning_rates=(0.1, 0.2, 0.3))

    def trained(program, plans, run, evaluations, optimum):
        bad = run.seed == 1 and run.learning_rate != 0.1
        loss = 1 / run.learning_rate
        yield run._asdict() | {
            "step": STEPS, "loads": 1, "rounds": 1, "sent": 1, "seconds": 0.1, "batch_loss": loss,
            "train_loss": loss, "test_accuracy": 0.5, "diverged": "at once" if bad else None,
        }  # fmt: skip

    monkeypatch.setattr(combined, "trained", trained)
    found = combined.compare_arms(task(), recipe, decisions, arms[:1], **options)
    assert sorted(r["learning_rate"] for r in found if r["seed"] == 1) == [0.1, 0.2, 0.3]
    assert [len(runs) for runs in combined_runs.at_best(found, arms[:1]).values()] == [2]


def test_arms_are_the_factorial():
    assert FACTORS.arms[0] == Arm("rr", "parallel", "none")
    assert FACTORS.arms[-1] == Arm("cd_grab", "qsr", "diffusion_cosine")
    assert len(set(FACTORS.arms)) == 8


@pytest.mark.parametrize(
    "name", ["digits", "digits_pair", "digits_growth", "digits_constant", "shakespeare"]
)
def test_the_tables_of_the_page_are_those_of_the_recorded_runs(name):
    page = (ROOT / "docs" / "combined.md").read_text()
    folder = recorded.FOLDER / f"combined_{name}"
    found = recorded.unpack((folder / recorded.METRICS).read_bytes())
    arms = list(dict.fromkeys(map(combined_runs.arm_of, found)))
    assert len(arms) == 8
    chosen = combined_runs.at_best(found, arms)
    for text in combined_report.tables(found, chosen, combined_report.prices(4.0, 2.0)).values():
        assert text in page
    assert (folder / recorded.COMMAND).read_text().strip() in page
