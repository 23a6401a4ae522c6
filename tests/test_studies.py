"""Studies: the one protocol against a fake trainer, and every entrypoint from flags to its page."""

import json
import os
import signal
import types

import jax.numpy as jnp
import numpy as np
import pytest
from absl import app
from absl import flags as absl_flags

import local_opt
from experiments import cd_grab, combined, echoing, order_rounds, qsr, train
from experiments.measures import metrics
from experiments.results import records, statistics
from experiments.results.statistics import Criterion
from experiments.studies import evaluations, search, study, trainer
from experiments.studies.search import Run, Trainer
from experiments.studies.study import Arm, Study
from experiments.studies.tables import ECHO_POLICIES, SYNC_RULES
from experiments.tasks import TASKS
from experiments.training import checkpoint, config

RATES = (0.1, 0.2, 0.4)
ARMS = {"a": Arm("A"), "b": Arm("B", order="rr", sync="qsr")}


def asked(**fields):
    given = {"recipe": "digits", "criterion": Criterion("valid/accuracy", lower=False)}
    return Study("fake", ARMS, columns=(), panels=(), **given | fields)


def fake(accuracy, trained, *, diverges=lambda run: False, evaluations=2, **options):
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

    return Trainer(go, lambda arm, speed: RATES, lambda arm, speed: 10, **options)


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
        "fake", "dealt", "parallel", None,
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


def test_runs_that_differ_in_seed_and_rate_alone_are_trained_side_by_side():
    trained, groups = [], []
    alone = fake(lambda run: run.learning_rate, trained)

    def several(runs, on_record):
        groups.append(runs)
        for run in runs:
            alone.train(run, [], lambda record, run=run: on_record(run, record))
        return 0

    trainer = alone._replace(
        train_several=several, beside=lambda run: None if run.arm == "b" else run.seed < 3
    )
    found, stopped = search.search(asked(), trainer, seeds=5, side_by_side=4)
    assert not stopped
    usual, _ = search.search(asked(), fake(lambda run: run.learning_rate, []), seeds=5)
    by_run = lambda rows: sorted(map(str, rows))  # noqa: E731
    assert by_run(found) == by_run(usual)
    assert [len(runs) for runs in groups] == [3, 2, 2, 2, 2]
    assert all({run.arm for run in runs} == {"a"} for runs in groups)
    # Further seeds of what was chosen, without a search.
    more = [Run("a", None, 0.4, seed, "run") for seed in range(8)]
    groups.clear()
    found, _ = search.carry_out(asked(), trainer, more, side_by_side=2, done=found)
    assert [len(runs) for runs in groups] == [2] and len(trained) == len(set(trained))
    assert {r["seed"] for r in found if r["learning_rate"] == 0.4 and r["arm"] == "a"} == {
        *range(8)
    }


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
    trainer = Trainer(lambda *_: signal.SIGTERM, lambda *_: RATES, lambda *_: 10)
    assert search.search(asked(), trainer, seeds=2) == ([], signal.SIGTERM)


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
    ends = evaluations.ends_at(criterion)
    assert not ends(first) and ends(later)
    assert evaluations.ends_at(criterion, [first])(later)
    assert not evaluations.ends_at(Criterion())(later)


def test_a_run_is_evaluated_where_the_recipe_says():
    recipe = TASKS["digits"](abstract=True).recipe
    sizes = types.SimpleNamespace(loads_per_epoch=4)

    def steps(total=10, **fields):
        return evaluations.evaluation_steps(recipe._replace(**fields), sizes, total)

    assert steps() == [0, 4, 8, 10]
    assert steps(evaluations=3) == [3, 6, 10]
    assert steps(evaluate_every=4, evaluations=3) == [4, 8, 10]


@pytest.mark.parametrize("name", SYNC_RULES)
def test_every_rule_has_a_plan_for_the_run(name):
    recipe = TASKS["digits"](abstract=True).recipe._replace(
        total_steps=60, schedule="cosine", floor=0.01, warmup_steps=5, h_base=2, growth=1.5
    )
    own = config.config_of(recipe, config.Sizes(4, 8, 2, 1), seed=0, speed=4)
    assert (own.total_steps, own.echo_factor) == (120, 4), "more steps, for echoed ones are shorter"
    rule = SYNC_RULES[name]
    plans = config.plans_of(own, rule, ECHO_POLICIES["diffusion"], rate=0.1)
    plans.check()
    assert plans.sync.syncs_after(119) and plans.sync.total_steps == 120
    online = config.plans_of(own, rule, ECHO_POLICIES["measured"], rate=0.1)
    assert (online.sync is None) == (name == "every_load")


def test_rules_of_other_powers_communicate_as_much_as_qsr():
    recipe = TASKS["digits"](abstract=True).recipe._replace(
        total_steps=2500, schedule="cosine", floor=1e-3, warmup_steps=125
    )
    own = config.config_of(recipe, config.Sizes(4, 8, 2, 1), seed=0)
    found = {name: SYNC_RULES[name].plan(own).rounds for name in ("qsr", "inverse", "cubic")}
    assert found["inverse"] == found["cubic"] == found["qsr"] < 2500 / 4


def test_rules_that_know_the_order_end_rounds_with_its_epochs():
    recipe = TASKS["digits"](abstract=True).recipe._replace(
        total_steps=120, schedule="cosine", floor=1e-3, growth=1.0
    )
    own = config.config_of(recipe, config.Sizes(4, 14, 2, 1), seed=0)  # epochs of 7 loads
    halves = {*range(7, 120, 7), *range(4, 120, 7), 120}
    ends = SYNC_RULES["constant_half"].plan(own).ends.tolist()
    assert set(ends) < halves and ends[:6] == [4, 11, 14, 18, 21, 25]  # of 4, 8, 12, 16, 20, 24
    for name in ("qsr", "constant"):
        ends = SYNC_RULES[f"{name}_epoch"].plan(own).ends
        assert not (ends[:-1] % 7).any() and len(ends) < SYNC_RULES[name].plan(own).rounds
    # Of an echoed run, seven loads: no round ends before the last use of the seventh.
    plan = ECHO_POLICIES["fixed"].make(own)
    ends = SYNC_RULES["qsr_epoch"].plan(own._replace(fresh=plan.fresh)).ends
    assert own.echo_factor == 4 and not (ends[:-1] % 28).any()
    with pytest.raises(
        ValueError, match="QSR to the half epoch needs an epoch's loads: use a study"
    ):
        SYNC_RULES["qsr_half"].plan(own._replace(loads_per_epoch=None))


@pytest.mark.parametrize("name", ECHO_POLICIES)
def test_every_policy_is_of_the_length_of_the_run(name):
    recipe = TASKS["digits"](abstract=True).recipe._replace(total_steps=40, horizon=20)
    own = config.config_of(recipe, config.Sizes(4, 8, 2, 1), seed=3)
    policy = ECHO_POLICIES[name].make(own)
    assert policy.total_steps == 40 and policy.online == ECHO_POLICIES[name].online


# From flags to the page. What every command says; and of each study a few arms.
SMALL = [
    "--num_train=96", "--num_test=200", "--workers=2", "--units_per_step=4", "--unit_size=1",
    "--seeds=2", "--learning_rates=0.1,0.4", "--checkpoint_every=0",
]  # fmt: skip
RUN = ["--total_steps=24", "--evaluations=4", "--warmup_steps=2", "--h_base=2"]
STUDIES = {
    "cd_grab": (cd_grab, ["--epochs=4", "--bound_every=2", "--arms=rr,cd_grab"]),
    "qsr": (qsr, [*RUN, "--width=8", "--arms=parallel,qsr"]),
    "echoing": (echoing, [
        "--width=8", "--arms=none,diffusion", "--speeds=2", "--total_steps=40",
        "--evaluate_every=5", "--target=0.5", "--horizon=20", "--step_seconds=0.001",
    ]),
    "combined": (combined, [*RUN, "--echo_factor=2"]),
    "order_rounds": (order_rounds, [*RUN, "--rules=parallel,constant_control"]),
}  # fmt: skip
PICTURES = {
    "cd_grab": ["comparison.png"], "qsr": ["comparison.png"],
    "echoing": ["comparison_R2.png", "time_to_target.png"],
    "combined": ["comparison.png", "effects.png"], "order_rounds": ["comparison.png"],
}  # fmt: skip


def start(module, arguments, folder):
    """What `study.main` does, in flags of its own."""
    values = absl_flags.FlagValues()
    study.define_flags(module.STUDY, values)
    getattr(module, "define_flags", lambda values: None)(values)
    values([module.__name__, *arguments, f"--output_dir={folder}"])
    study.run(module.STUDY, values, fit=getattr(module, "fit", lambda study, *_: study))


def written(folder):
    """The records of a folder, without what a clock says."""
    lines = records.read(os.path.join(folder, "metrics.jsonl"))
    return sorted(
        json.dumps({k: v for k, v in r.items() if k != "seconds"}, sort_keys=True) for r in lines
    )


def share_of_ones(model):
    """A metric of a stranger: what it adds must be in every study by its one row."""

    def measure(params, statistics, batch):
        del statistics
        return jnp.mean((jnp.argmax(model.predict(params, batch["x"]), axis=-1) == 1).astype(float))

    return measure


def panels_of(picture):
    """Rows of panels in a PNG, from its height."""
    height = int.from_bytes(picture.read_bytes()[20:24], "big")
    return round((height / 110 - 0.9) / 3.7)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_written_killed_in_a_run_and_goes_on_as_if_it_had_not_been(
    name, tmp_path, monkeypatch, capsys
):
    module, arguments = STUDIES[name]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    new = metrics.Metric("share of ones", False, share_of_ones, everywhere=True)
    monkeypatch.setitem(metrics.METRICS, "ones", new)
    start(module, [*SMALL, *arguments], whole)
    text = capsys.readouterr().out
    assert (whole / "table.md").read_text().strip() in text
    for picture in PICTURES[name]:
        assert (whole / picture).stat().st_size > 10_000
    found = records.read(str(whole / "metrics.jsonl"))
    assert all(0 <= r["test/ones"] <= 1 for r in found), "a new metric is in every record,"
    assert "| share of ones" in (whole / "table.md").read_text(), "every table"
    assert panels_of(whole / PICTURES[name][0]) == len(module.STUDY.panels) + 1, "and picture"
    for r in found:
        plan = whole / f"plan_{r['arm']}.json"
        if r["ended"] and plan.exists():
            assert r["rounds"] == local_opt.read_sync_plan(str(plan)).rounds <= r["allreduces"]
            assert (r["allreduces"] > r["rounds"]) == (r["order"] == "cd_grab")
    page = (whole / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(PICTURES[name])
    assert not list((whole / "checkpoints").glob("*"))

    seen, real = [], search.search

    def killed(*args, on_record, **options):
        def record_and_kill(record):
            on_record(record)
            seen.append(record)
            if len(seen) == 6:
                os.kill(os.getpid(), signal.SIGTERM)

        return real(*args, on_record=record_and_kill, **options)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit_code:
        patch.setattr(study.search, "search", killed)
        start(module, [*SMALL, *arguments], cut)
    assert exit_code.value.code == 128 + signal.SIGTERM
    assert not (cut / "table.md").exists()
    assert not seen[-1]["ended"] and list((cut / "checkpoints").glob("*")), "saved in a run"
    start(module, [*SMALL, *arguments], cut)
    assert written(cut) == written(whole)


def test_arms_and_speeds_that_are_not_there(tmp_path):
    with pytest.raises(app.UsageError, match="--arms has .'qr'"):
        start(cd_grab, ["--arms=rr,qr"], tmp_path)
    with pytest.raises(app.UsageError, match="--speeds is .'0'"):
        start(echoing, ["--speeds=0"], tmp_path)
    with pytest.raises(app.UsageError, match="has no target"):
        start(echoing, ["--task=digits"], tmp_path)
    with pytest.raises(app.UsageError, match="that is the first level"):
        start(combined, ["--order=rr"], tmp_path)
    with pytest.raises(app.UsageError, match="--echo is measured"):
        start(combined, ["--echo=measured"], tmp_path)


def test_arms_of_a_factorial():
    arms = list(combined.STUDY.arms)
    assert len(set(arms)) == 8
    assert (arms[0], arms[-1]) == ("rr+parallel+none", "cd_grab+qsr+diffusion_cosine")


def train_run(arguments, folder):
    values = absl_flags.FlagValues()
    train.define_flags(values)
    values(["train", *arguments, f"--output_dir={folder}"])
    train.run(values)


def test_one_run_is_written_with_its_plans_and_its_model(tmp_path):
    import orbax.checkpoint as ocp

    short = [a for a in SMALL if "seeds" not in a and "rates" not in a]
    arguments = [*short, *RUN, "--echo=diffusion", "--echo_factor=2", "--learning_rate=0.2"]
    train_run(arguments, tmp_path)
    found = records.read(str(tmp_path / "metrics.jsonl"))
    assert [r["step"] for r in found] == [6, 12, 18, 24]
    last = found[-1]
    assert last["ended"] and (last["order"], last["sync"], last["echo"]) == (
        "cd_grab", "qsr", "diffusion",
    )  # fmt: skip
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert (settings["task"], settings["seed"], settings["learning_rate"]) == (
        "digits_cosine", 0, 0.2,
    )  # fmt: skip
    assert (tmp_path / "sync_plan.json").exists() and (tmp_path / "echo_plan.json").exists()
    with ocp.StandardCheckpointer() as checkpointer:
        model = checkpointer.restore(os.path.abspath(tmp_path / "model"))
    assert all(np.isfinite(leaf).all() for leaf in model.values())
    with pytest.raises(ValueError, match="other settings .echo_factor."):
        train_run([a.replace("echo_factor=2", "echo_factor=3") for a in arguments], tmp_path)
    before = written(tmp_path)
    train_run(arguments, tmp_path)  # nothing is left to do
    assert written(tmp_path) == before


def test_a_folder_keeps_studies_apart(tmp_path):
    folder = str(tmp_path / "run")
    assert records.open_folder(folder, {"task": "a"}) == []
    records.write_lines(folder + "/metrics.jsonl", [{"epoch": 1}])
    with open(folder + "/metrics.jsonl", "a") as file:
        file.write('{"epoch": 2')  # cut off while it was written
    assert records.open_folder(folder, {"task": "a"}) == [{"epoch": 1}]
    with pytest.raises(ValueError, match="other settings .task."):
        records.open_folder(folder, {"task": "b"})
    assert records.open_folder(folder, {"task": "b"}, overwrite=True) == []
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["jax"]
