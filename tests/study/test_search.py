"""The one protocol of all studies against a fake trainer, and what a stopped run leaves."""

import signal
import types

import numpy as np
import pytest

from experiments.results import records, statistics
from experiments.results.statistics import Criterion
from experiments.study import search, trainer
from experiments.study.search import Run
from experiments.study.study import Arm, Study
from experiments.tasks import TASKS
from experiments.training import checkpoint, measure

RATES = (0.1, 0.2, 0.4)
ARMS = {"a": Arm("A"), "b": Arm("B", order="rr", sync="qsr")}


def asked(**fields):
    given = {"recipe": "digits", "criterion": Criterion("valid/accuracy", lower=False)}
    return Study("fake", ARMS, columns=(), panels=(), **given | fields)


def fake(accuracy, trained, *, diverges=lambda run: False, evaluations=2, trajectory=None):
    """A trainer whose runs end at once, with `accuracy(run)`; `trained` collects what it ran."""

    def go(run, kept, on_record):
        trained.append(run)
        for i in range(len(kept), evaluations):
            last = i + 1 == evaluations
            on_record({
                "step": 5 * (i + 1), "seconds": 1.0, "ended": last, "train/batch_loss": 1.0,
                "valid/accuracy": accuracy(run), "test/accuracy": accuracy(run),
                "diverged": "at once" if last and diverges(run) else None,
            })  # fmt: skip
        return 0

    return trainer_of(go, trajectory or (lambda run: None))


def trainer_of(train, trajectory=lambda run: None):
    return types.SimpleNamespace(
        train=train, trajectory=trajectory, rates=lambda *_: RATES, steps=lambda *_: 10, examples=1
    )


def test_all_rates_run_once_and_two_finalists_with_all_seeds():
    trained, written = [], []
    trainer = fake(lambda run: run.learning_rate, trained)
    found, stopped = search.search(asked(), trainer, seeds=3, on_record=written.append)
    assert found == written and not stopped
    for arm in ARMS:
        own = {(run.learning_rate, run.seed) for run in trained if run.arm == arm}
        assert own == {(r, 0) for r in RATES} | {(r, s) for r in (0.2, 0.4) for s in (1, 2)}
    assert len(trained) == 2 * search.planned(3, 3, 2, None) == len(set(trained))
    assert {r["phase"] for r in found} == {"run"}
    first = found[0]
    assert (first["study"], first["order"], first["sync"], first["speed"]) == (
        "fake", "rr+dealt", "parallel", None,
    )  # fmt: skip
    assert statistics.best_rate(found, "a", None, asked().criterion) == 0.4


def test_without_finalists_every_rate_runs_with_all_seeds():
    trained = []
    search.search(asked(finalists=None), fake(lambda run: 0.5, trained), seeds=4)
    assert len(set(trained)) == len(trained) == 2 * 3 * 4


def test_a_rate_at_which_a_later_seed_diverges_makes_place_for_the_next():
    trained = []
    trainer = fake(
        lambda run: run.learning_rate, trained,
        diverges=lambda run: run.seed == 1 and run.learning_rate > 0.1,
    )  # fmt: skip
    found, _ = search.search(asked(), trainer, seeds=2)
    assert sorted(r.learning_rate for r in trained if (r.arm, r.seed) == ("a", 1)) == [*RATES]
    assert statistics.best_rate(found, "a", None, asked().criterion) == 0.1


def test_where_all_rates_diverge_the_search_ends_and_reports_nothing():
    trained = []
    trainer = fake(lambda run: 0.5, trained, diverges=lambda run: True)
    search.search(asked(speeds=(2,)), trainer, seeds=3)
    assert {(r.seed, r.phase) for r in trained} == {(0, "tune")}


def test_slow_input_is_tuned_and_then_reported_with_all_seeds_at_the_best_rate():
    trained = []
    trainer = fake(lambda run: -abs(run.learning_rate - 0.2), trained)
    search.search(asked(speeds=(2, 8)), trainer, seeds=3)
    reported = [run for run in trained if run.phase == "report"]
    assert {(r.arm, r.speed, r.learning_rate, r.seed) for r in reported} == {
        (arm, speed, 0.2, seed) for arm in ARMS for speed in (2, 8) for seed in range(3)
    }
    assert len(trained) == 4 * search.planned(3, 3, 2, 2)
    # A reported run that diverges puts its rate out, and the next best is reported.
    again = []
    trainer = fake(
        lambda run: -abs(run.learning_rate - 0.2), again,
        diverges=lambda run: run.phase == "report" and run.learning_rate == 0.2,
    )  # fmt: skip
    search.search(asked(speeds=(2,)), trainer, seeds=1)
    assert {r.learning_rate for r in again if r.phase == "report"} == {0.1, 0.2}


@pytest.mark.parametrize(
    ("best", "widen", "tried"),
    [
        (0.2, 3, RATES),  # in the middle: nothing is tried beyond
        (0.4, 0, RATES),
        (0.8, 3, (*RATES, 0.8, 1.6)),
        (99, 2, (*RATES, 0.8, 1.6)),  # as far as was allowed
        (0.05, 1, (0.05, *RATES)),
    ],
)
def test_a_grid_widens_while_the_best_rate_is_at_its_end(best, widen, tried):
    trained = []
    trainer = fake(lambda run: -abs(np.log(run.learning_rate / best)), trained)
    search.search(asked(), trainer, seeds=2, widen=widen)
    for arm in ARMS:
        assert sorted({r.learning_rate for r in trained if r.arm == arm}) == list(tried)
    assert len(set(trained)) == len(trained)


def test_a_grid_ends_where_a_rate_diverges():
    trained = []
    trainer = fake(
        lambda run: run.learning_rate, trained, diverges=lambda run: run.learning_rate > 0.5
    )
    search.search(asked(), trainer, seeds=1, widen=9)
    assert sorted({r.learning_rate for r in trained}) == [*RATES, 0.8]


def test_runs_of_one_trajectory_are_trained_once():
    def trajectory(run):
        return (run.learning_rate, run.seed) if run.phase == "tune" else None

    trained = []
    trainer = fake(lambda run: run.learning_rate, trained, trajectory=trajectory)
    given = asked(speeds=(1, 2))
    found, _ = search.search(given, trainer, seeds=2)
    tuned = [run for run in trained if run.phase == "tune"]
    assert {(run.arm, run.speed) for run in tuned} == {("a", 1)} and len(tuned) == 3 + 2
    ran = {records.run_of(r) for r in found}
    assert len(ran) == 4 * search.planned(3, 2, 2, 1)
    copied = next(r for r in found if (r["arm"], r["speed"]) == ("b", 2))
    assert (copied["order"], copied["sync"], copied["learning_rate"]) == ("rr", "qsr", 0.1)
    # So does a search that goes on.
    first = [r for r in found if (r["arm"], r["speed"], r["phase"]) == ("a", 1, "tune")]
    trained.clear()
    search.search(given, trainer, seeds=2, done=first)
    assert {run.phase for run in trained} == {"report"}


def test_a_search_goes_on_where_it_was_stopped():
    trained = []
    trainer = fake(lambda run: run.learning_rate, trained)
    whole, _ = search.search(asked(), trainer, seeds=2)
    count, new = len(trained), []
    trained.clear()
    again, _ = search.search(asked(), trainer, seeds=2, done=whole[:7], on_record=new.append)
    assert again == whole and new == whole[7:]
    assert len(trained) == count - 3, "three runs were whole, and one had a record"
    trained.clear()
    search.search(asked(), trainer, seeds=2, done=whole)
    assert not trained


def test_a_signal_stops_the_search():
    stopping = trainer_of(lambda *_: signal.SIGTERM)
    assert search.search(asked(), stopping, seeds=2) == ([], signal.SIGTERM)


def test_records_of_a_run_that_was_cut_are_kept_up_to_its_checkpoint(tmp_path, monkeypatch):
    run = Run("a", None, 0.1, 1, "run")
    cut = [{**run._asdict(), "step": step, "ended": False} for step in (0, 4, 6)]
    other = [{**run._replace(seed=0)._asdict(), "step": 9, "ended": True}]
    assert trainer.before_checkpoints(str(tmp_path), other + cut) == other
    (tmp_path / "checkpoints" / run.name / "4").mkdir(parents=True)
    monkeypatch.setattr(checkpoint, "damage", lambda path: None)
    assert trainer.before_checkpoints(str(tmp_path), other + cut) == other + cut[:2]


def test_checkpoints_of_a_whole_run_that_a_crash_has_left_go(tmp_path):
    """Killed after its last record, before it removes them."""
    ended, cut = Run("a", None, 0.1, 0, "run"), Run("a", None, 0.1, 1, "run")
    for run in (ended, cut):
        (tmp_path / "checkpoints" / run.name / "4").mkdir(parents=True)
    done = [{**run._asdict(), "step": 4, "ended": run is ended} for run in (ended, cut)]
    trainer.forget_ended(str(tmp_path), done)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [cut.name]


def test_a_run_ends_where_both_halves_have_reached_the_target():
    criterion = Criterion("valid/accuracy", False, "target", 0.5)
    first = {"step": 1, "valid/accuracy": 0.6, "test/accuracy": 0.4}
    later = {"step": 2, "valid/accuracy": 0.4, "test/accuracy": 0.5}
    ends = trainer.ends_at(criterion)
    assert not ends(first) and ends(later)
    assert trainer.ends_at(criterion, [first])(later)
    assert not trainer.ends_at(Criterion())(later)


def test_a_run_is_evaluated_where_the_recipe_says():
    recipe = TASKS["digits"](abstract=True).recipe
    sizes = types.SimpleNamespace(loads_per_epoch=4)

    def steps(total=10, **fields):
        return measure.evaluation_steps(recipe._replace(**fields), sizes, total)

    assert steps() == [0, 4, 8, 10]
    assert steps(evaluations=3) == [3, 6, 10]
    assert steps(evaluate_every=4, evaluations=3) == [4, 8, 10]
