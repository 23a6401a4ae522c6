"""The protocol of all studies with a fake trainer, and interrupted runs."""

import signal
import types

import numpy as np
import pytest
from absl import flags as absl_flags

from experiments.compare import flags, runs, search
from experiments.compare.arms import Arm
from experiments.compare.study import Study
from experiments.data import TASKS
from experiments.report import plots, statistics, tables
from experiments.report.records import Run
from experiments.report.statistics import Criterion
from experiments.trainer import measure
from syncopate.refusals import UserError

RATES = (0.1, 0.2, 0.4)
ARMS = {"a": Arm("A"), "b": Arm("B", order="rr", sync="qsr")}
SLOW = {"speeds": (2, 8)}


def asked(**fields):
    given = {"recipe": "digits", "criterion": Criterion("valid/accuracy", lower=False)}
    return Study("fake", ARMS, **{"columns": (), "panels": (), **given, **fields})


def trainer_of(train):
    return types.SimpleNamespace(
        train=train, prepare=list, rates=lambda *_: RATES, steps=lambda *_: 10, examples=1
    )


def words_of(run):
    return {"study": "fake", **run._asdict(), **ARMS[run.arm].words}


def searched(accuracy, *, diverges=lambda run: False, of=None, **options):
    """(runs that were trained, each at once and with `accuracy(run)`; records; those written)."""
    trained, written = [], []

    def go(run, kept, on_record, on_step):
        trained.append(run)
        for i in range(len(kept), 2):
            on_record(
                words_of(run)
                | {
                    "step": 5 * (i + 1),
                    "seconds": 1.0,
                    "ended": i == 1,
                    "train/batch_loss": 1.0,
                    "valid/accuracy": accuracy(run),
                    "test/accuracy": accuracy(run),
                    "diverged": "at once" if i == 1 and diverges(run) else None,
                }
            )
        return types.SimpleNamespace(stopped=0)

    result, stopped = search.search(
        of or asked(), trainer_of(go), on_record=written.append, **options
    )
    assert not stopped and len(set(trained)) == len(trained), "no run is trained twice"
    return trained, result, written


def test_metrics_that_a_study_names_are_recorded_and_wrong_ones_refused():
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_string("metric", "accuracy", "", values)
    values(["test"])
    more = {"panels": (plots.Panel("metric"), plots.Panel("test/perplexity/averaged"))}
    columns = (tables.Column("smape", "{:.2f}", "test/smape"), *tables.SYNC_COLUMNS)
    named = flags.with_metrics(asked(columns=columns, **more), values)
    assert named.metrics == {"accuracy", "perplexity", "smape"}
    values(["test", "--metric=loss"])
    assert flags.with_metrics(asked(criterion=Criterion("train/loss")), values).metrics == {"loss"}
    with pytest.raises(UserError, match="'heard', which is not in METRICS: choose one of accuracy"):
        flags.with_metrics(asked(criterion=Criterion("valid/heard")), values)
    with pytest.raises(UserError, match="chooses the worst rate: pass lower=False"):
        flags.with_metrics(asked(criterion=Criterion("valid/accuracy")), values)
    task, recipe = TASKS["digits"](), TASKS["digits"](abstract=True).recipe
    _, measures = measure.sets_of(task, recipe, halves=True, metrics=("loss",))
    assert [*measures["valid"]] == [*measures["test"]] == ["accuracy", "loss"]
    with pytest.raises(UserError, match="sMAPE / % cannot be computed of digits's predictions"):
        measure.sets_of(task, recipe, halves=True, metrics=("smape",))
    with pytest.raises(UserError, match="'valid/loss', which no record of A has: choose one of"):
        searched(rate_of, of=asked(criterion=Criterion("valid/loss")), seeds=2)


def test_the_next_run_of_many_seeds_is_found_without_a_list_of_all():
    options = {"seeds": 10**9}
    assert search.next_run(asked(), "a", None, RATES, [], **options).learning_rate == RATES[0]
    _, recorded, _ = searched(rate_of, seeds=2)
    assert search.next_run(asked(), "a", None, RATES, recorded, **options).seed == 2


def rate_of(run):
    return run.learning_rate


def test_rates_of_an_earlier_call_get_no_further_seeds():
    of, options = asked(finalists=None), {"seeds": 2}
    _, recorded, _ = searched(rate_of, of=of, seeds=1)
    following = search.next_run(of, "a", None, [0.2], recorded, **options)
    assert (following.learning_rate, following.seed) == (0.2, 1)
    second = [r | {"seed": 1} for r in recorded if r["learning_rate"] == 0.2]
    assert search.next_run(of, "a", None, [0.2], recorded + second, **options) is None


def best_rate(records):
    """The best rate of the first arm."""
    rows = statistics.data_of([r for r in records if r["arm"] == "a"])
    return statistics.best_rate(rows, asked().criterion)


def near(rate):
    return lambda run: -abs(np.log(run.learning_rate / rate))


def test_progress_counts_runs_that_are_asked_for(monkeypatch):
    _, recorded, _ = searched(rate_of, seeds=2)
    first = [r for r in recorded if r["seed"] == 0]
    more = [r | {"seed": 7} for r in first]
    more += [r | {"learning_rate": 0.8} for r in first if r["learning_rate"] == RATES[0]]
    bar = search.progress.bar
    begun = []
    monkeypatch.setattr(search.progress, "bar", lambda **of: (begun.append(of), bar(**of))[1])
    searched(rate_of, seeds=2, done=[*recorded, *more, *[r | {"arm": "c"} for r in recorded]])
    assert begun[0]["initial"] == begun[0]["total"] == 2 * (3 + 2) * 10


def test_all_rates_run_once_then_two_finalists_with_all_seeds_and_it_resumes():
    trained, recorded, written = searched(rate_of, seeds=3)
    assert recorded == written
    for arm in ARMS:
        pairs = {(run.learning_rate, run.seed) for run in trained if run.arm == arm}
        assert pairs == {(r, 0) for r in RATES} | {(r, s) for r in (0.2, 0.4) for s in (1, 2)}
    assert len(trained) == 2 * search.planned(3, 3, 2, None)
    first = recorded[0]
    assert (first["study"], first["order"], first["sync"], first["speed"], first["phase"]) == (
        "fake",
        "rr+dealt",
        "parallel",
        None,
        "run",
    )
    assert best_rate(recorded) == 0.4
    again, same, new = searched(rate_of, seeds=3, done=recorded[:7])
    assert same == recorded and new == recorded[7:]
    assert len(again) == len(trained) - 3, "three runs were whole, and one had a record"
    assert searched(rate_of, seeds=3, done=recorded)[0] == []
    every, _, _ = searched(rate_of, of=asked(finalists=None), seeds=4)
    assert len(every) == 2 * 3 * 4


def test_a_diverging_rate_is_replaced_by_the_next_best():
    def later(run):
        return run.seed == 1 and run.learning_rate > 0.1

    trained, recorded, _ = searched(rate_of, diverges=later, seeds=2)
    assert sorted(r.learning_rate for r in trained if (r.arm, r.seed) == ("a", 1)) == [*RATES]
    assert best_rate(recorded) == 0.1
    trained, _, _ = searched(rate_of, diverges=lambda run: True, of=asked(**SLOW), seeds=3)
    assert {(r.seed, r.phase) for r in trained} == {(0, "tune")}, "nothing is left to report"


def test_slow_input_is_tuned_and_then_reported_with_all_seeds_at_the_best_rate():
    trained, _, _ = searched(near(0.2), of=asked(**SLOW), seeds=3)
    reported = [run for run in trained if run.phase == "report"]
    assert {(r.arm, r.speed, r.learning_rate, r.seed) for r in reported} == {
        (arm, speed, 0.2, seed) for arm in ARMS for speed in (2, 8) for seed in range(3)
    }
    assert len(trained) == 4 * search.planned(3, 3, 2, 2)

    def reported_and_best(run):
        return run.phase == "report" and run.learning_rate == 0.2

    again, _, _ = searched(near(0.2), diverges=reported_and_best, of=asked(**SLOW), seeds=1)
    assert {r.learning_rate for r in again if r.phase == "report"} == {0.1, 0.2}


def test_finalists_are_those_of_averaged_weights_too():
    def go(run, kept, on_record, on_step):
        scalars = {"valid/accuracy": near(0.1)(run), "valid/accuracy/averaged": near(0.4)(run)}
        ended = {"step": 10, "seconds": 1.0, "ended": True, "diverged": None}
        on_record(words_of(run) | ended | scalars)
        return types.SimpleNamespace(stopped=0)

    result, _ = search.search(asked(finalists=1), trainer_of(go), seeds=2)
    tried = {(r["learning_rate"], r["seed"]) for r in result if r["arm"] == "a"}
    assert {rate for rate, seed in tried if seed == 1} == {0.1, 0.4}


def test_a_signal_stops_a_search_and_a_killed_one_is_cleaned_up(tmp_path):
    stopping = trainer_of(lambda *_: types.SimpleNamespace(stopped=signal.SIGTERM))
    assert search.search(asked(), stopping, seeds=2) == ([], signal.SIGTERM)
    ended, cut = Run("a", None, 0.1, 0, "run"), Run("a", None, 0.1, 1, "run")
    whole = [{**ended._asdict(), "step": 9, "ended": True}]
    rest = [{**cut._asdict(), "step": step, "ended": False} for step in (0, 4, 6)]
    assert runs.kept_records(str(tmp_path), whole + rest) == whole
    for run in (ended, cut):
        (tmp_path / "checkpoints" / run.name / "4").mkdir(parents=True)
    assert runs.kept_records(str(tmp_path), whole + rest) == whole + rest[:2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [cut.name]


def test_a_run_ends_once_both_halves_reach_the_target():
    criterion = Criterion("valid/accuracy", False, "target", 0.5)
    first = {"step": 1, "valid/accuracy": 0.6, "test/accuracy": 0.4}
    later = {"step": 2, "valid/accuracy": 0.4, "test/accuracy": 0.5}
    ends = runs.ends_at(criterion)
    assert not ends(first) and ends(later)
    assert runs.ends_at(criterion, [first])(later)
    assert not runs.ends_at(Criterion())(later)


def test_a_run_is_evaluated_as_the_recipe_says():
    recipe = TASKS["digits"](abstract=True).recipe
    sizes = types.SimpleNamespace(loads_per_epoch=4)

    def steps(total=10, **fields):
        return measure.evaluation_steps(recipe._replace(**fields), sizes, total)

    assert steps() == [0, 4, 8, 10]
    assert steps(evaluations=3) == [3, 6, 10]
    assert steps(evaluate_every=4, evaluations=3) == [4, 8, 10]
    assert steps(3, evaluations=10**12) == [1, 2, 3], "more than there are steps"
