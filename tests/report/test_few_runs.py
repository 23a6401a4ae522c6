"""Reports of studies with one seed, rate, arm or evaluation, with equal values, or divergence."""

import functools
import itertools
import math
import warnings

import pandas
import pytest

from experiments import cd_grab, combined, echoing, qsr
from experiments.compare import cost
from experiments.compare.arms import arm_of
from experiments.report import page, plots, statistics, tables
from experiments.report.records import open_folder
from experiments.report.statistics import Criterion
from tests.cases import mostly_slow

TARGET = Criterion("valid/accuracy", lower=False, when="target", target=0.15)
MACHINES = cost.machines(4, 2)
MODELLED = functools.partial(combined.modelled_table, machines=MACHINES)
STUDIES = {  # and its pictures
    "cd_grab": (cd_grab.STUDY, ["comparison.png"]),
    "qsr": (qsr.STUDY, ["comparison.png"]),
    "echoing": (echoing.STUDY._replace(criterion=TARGET), ["comparison_R2.png"]),
    "combined": (
        combined.STUDY._replace(sections=(*combined.STUDY.sections, MODELLED)),
        ["comparison.png", "effects.png"],
    ),
}
LOWER = "train/loss", "train/above_optimum", "drift", "bound/linf"
CASES = {
    "one of everything": {"seeds": [0], "rates": [0.1], "ends": [10]},
    "one arm": {"only": 1},
    "zero": {"value": 0.0},
    "not finite": {"value": None},
    "averaged": {"averaged": 0.7},
    "averages not finite": {"averaged": None},
    "the first diverges": {"diverged": [0]},
    "all diverge": {"diverged": range(99)},
}


def records(
    study,
    *,
    seeds=(0, 1),
    rates=(0.1, 0.2),
    ends=(10, 20, 30),
    only=None,
    diverged=(),
    value=math.nan,
    averaged=math.nan,
):
    """What the study would write; `value` of every scalar, one of its own if nan."""
    phases = {"speed": 2, "phases": ("tune", "report")} if study.speeds else {"phases": ("run",)}
    arms = [*study.arms.items()][:only]
    for (i, (name, arm)), rate, seed, phase, step in itertools.product(
        enumerate(arms), rates, seeds, phases["phases"], ends
    ):
        v = 0.9 - 0.02 * step - 0.01 * i - 1e-3 * seed if value != value else value
        out = i in diverged and step == ends[-1]
        result = dict.fromkeys(LOWER, v)
        result |= {f"{part}/accuracy": v and 1 - v for part in ("valid", "test")}
        if averaged is None or averaged == averaged:
            result |= {f"{k}/averaged": v and averaged and averaged * v for k, v in result.items()}
        yield {
            "study": study.name,
            "arm": name,
            "speed": phases.get("speed"),
            "learning_rate": rate,
            "seed": seed,
            "phase": phase,
            **arm.words,
            "step": step,
            "epoch": step / 10,
            "loads": step,
            "rounds": step,
            "allreduces": step,
            "seconds": step / 10 + i,
            "ended": step == ends[-1],
            "diverged": "x" if out else None,
            **({} if out else result),
        }


OTHERS = ("one of everything", "all diverge")  # what every study's report meets
GIVEN = {"cd_grab": CASES, "combined": (*OTHERS, "zero")}


ALL = [(name, case) for name in STUDIES for case in GIVEN.get(name, OTHERS)]
OFTEN = [("cd_grab", case) for case in ("one of everything", "zero")]
OFTEN += [("qsr", "all diverge"), ("echoing", "all diverge")]  # others are drawn as in these


@pytest.mark.parametrize("name,case", mostly_slow(ALL, quick=OFTEN))
def test_a_report_is_written_without_a_warning(name, case, tmp_path):
    (study, pictures), fields = STUDIES[name], CASES[case]
    labels = {arm: one.label for arm, one in [*study.arms.items()][: fields.get("only")]}
    comparison = statistics.compare(
        statistics.data_of(records(study, **fields)), labels, study.criterion
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = page.write(comparison, study, str(tmp_path), "title")
    assert not {"nan", "inf"} & {*text.split()}
    if case == "all diverge":
        assert not [*tmp_path.glob("comparison*.png")] and "all diverge" in text
    elif fields.keys() & {"seeds", "rates", "ends"}:
        assert all((tmp_path / picture).exists() for picture in pictures)


def test_a_scalar_that_no_table_names_has_a_panel_over_steps_and_its_name(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path, title: figures.append(figure))
    study, new = cd_grab.STUDY, {"sent/clipped": 0.5}
    labels = {name: arm.label for name, arm in study.arms.items()}
    for more in ({}, new):
        kept = [r | {k: v + 1e-3 * r["step"] for k, v in more.items()} for r in records(study)]
        compared = statistics.compare(statistics.data_of(kept), labels, study.criterion)
        plots.comparison(compared, study.panels, str(tmp_path / "x.png"), "title")
    for panels in [plots.Panel("sent/clipped", ("epoch",))], []:  # named, and a study of no panel
        plots.comparison(compared, panels, str(tmp_path / "x.png"), "title")
    seen = ([axis.get_ylabel() for axis in f.axes if axis.get_ylabel()] for f in figures)
    before, after, *alone = seen
    assert alone == [["sent clipped"]] * 2
    assert after == [*before, "sent clipped"] and figures[1].axes[-2].get_xlabel() == "steps"
    column = tables.Column("clipped", "{:.2f}", "sent/clipped")
    assert tables.table(compared, [column]).splitlines()[2] == "| 0.53 ± 0.00 |"


def test_a_curve_is_the_mean_over_seeds_up_to_the_end_of_the_shortest_run():
    rows = [
        {"arm": arm, "seed": seed, "step": step, "seconds": step + seed, "drift": step + 2.0 * seed}
        for arm in ("a", "b")
        for seed in (0, 1)
        for step in range(1, 4 if (arm, seed) == ("b", 1) else 5)
    ]
    _, ((axis,),) = plots.panes(1, 1, (4, 3))
    styles = plots.styles_of("ab")
    plots.curves(pandas.DataFrame(rows), "seconds", "drift", axis=axis, styles=styles)
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    points = [[step + 0.5, step + 1.0] for step in range(1, 5)]
    assert drawn["a"] == points and drawn["b"] == points[:3]
    assert len(axis.collections) == 2 and axis.get_xlabel() == "seconds of training"


def test_the_first_arm_is_black_and_no_two_arms_look_equal():
    arms = [f"arm {i}" for i in range(50)]
    styles = plots.styles_of(arms)
    assert [*styles] == arms and len({str(style) for style in styles.values()}) == len(arms)
    assert styles["arm 0"]["color"] == plots.BLACK
    assert len({styles[arm]["color"] for arm in arms[:8]}) == 8


def test_the_first_picture_shows_the_rates_and_epochs_of_its_table(tmp_path, monkeypatch):
    """CD-GraB ends lowest at 0.1, and is at D-RR's best, 0.3, after one epoch at 0.2."""
    losses = {
        ("rr", 0.1): (0.8, 0.6, 0.3),
        ("rr", 0.2): (0.8, 0.7, 0.5),
        ("cd_grab", 0.1): (0.7, 0.5, 0.1),
        ("cd_grab", 0.2): (0.25, 0.25, 0.25),
    }
    kept = []
    for r in records(cd_grab.STUDY):
        if result := losses.get((r["arm"], r["learning_rate"])):
            kept.append(r | {"train/loss": result[r["step"] // 10 - 1]})
    labels, figures = {"rr": "D-RR", "cd_grab": "CD-GraB"}, []
    compared = statistics.compare(statistics.data_of(kept), labels, cd_grab.STUDY.criterion)
    monkeypatch.setattr(plots, "save", lambda figure, path, title: figures.append(figure))
    plots.comparison(compared, [cd_grab.FIRST], str(tmp_path / "x.png"), "title")
    shown = {text.get_text() for text in figures[0].legends[0].get_texts()}
    assert shown == {"D-RR (lr 0.1)", "CD-GraB (lr 0.2)", "CD-GraB, lowest (lr 0.1)", "D-RR's best"}
    at = [bars.lines[0].get_xydata().tolist() for bars in figures[0].axes[0].containers]
    assert at == [[[3.0, 0.3]], [[1.0, 0.3]]]


def test_many_arms_are_drawn_in_groups_with_the_first_one():
    assert plots.groups(list("abcde")) == [list("abcde")]
    assert plots.groups(["a", "b", "c+x", "c+y", "d", "e"]) == [
        ["a", "b", "c+x", "c+y"],
        ["a", "d", "e"],
    ]
    arms = [*combined.STUDY.arms]
    assert plots.groups(arms) == [arms[:4], [arms[0], *arms[4:]]]


def test_a_page_shows_what_its_call_has_made(tmp_path, monkeypatch):
    """Pictures of an earlier call, and of others, are not in the page; stale ones of ours go."""

    def written(study):
        labels = {name: arm.label for name, arm in study.arms.items()}
        comparison = statistics.compare(statistics.data_of(records(study)), labels, study.criterion)
        page.write(comparison, study, str(tmp_path), "title")
        text = (tmp_path / "report.html").read_text()
        return text, text.count("data:image/png;base64,")

    text, pictures = written(combined.STUDY)
    assert pictures == 2 and ">Effects<" in text
    foreign = tmp_path / "zz.png"
    foreign.write_bytes((tmp_path / "effects.png").read_bytes())
    (tmp_path / "table<img src=x>.md").write_text("theirs")
    two = {name: arm_of(name) for name in ("rr+constant", "cd_grab+constant")}
    text, pictures = written(combined.STUDY._replace(arms=two))
    assert pictures == 1 and "theirs" not in text
    assert not (tmp_path / "effects.png").exists() and foreign.exists()
    assert "No effects: they are of the eight arms" in text
    monkeypatch.setattr(plots, "comparison", lambda *given, **more: None)  # all runs diverged
    assert written(combined.STUDY._replace(arms=two))[1] == 0
    assert not (tmp_path / "comparison.png").exists()


def compared(base, other, when="last"):
    """Of arms whose runs, one per seed, end with these train losses, or come there in one step."""
    results = [
        {
            "arm": arm,
            "speed": None,
            "phase": "run",
            "learning_rate": 0.1,
            "seed": seed,
            "step": step,
            "epoch": step,
            "loads": step,
            "rounds": step,
            "seconds": float(step),
            "allreduces": step,
            "train/loss": value,
        }
        for arm, values in {"rr": base, "other": other}.items()
        for seed, last in enumerate(values)
        for step, value in ([(0, 9.0), (1, last)] if when == "last" else [(0, 9.0), (last, 1.0)])
    ]
    criterion = statistics.Criterion("train/loss", when=when, target=1.0)
    return statistics.compare(
        statistics.data_of(results), {"rr": "D-RR", "other": "CD-GraB"}, criterion
    )


HALF = 4.302652729911275 * 0.1 / 3**0.5  # of the interval of three that deviate by 0.1


@pytest.mark.parametrize(
    "given,expected",
    [
        (
            ([2.0, 2.2, 2.4], [1.5, 1.6, 2.0]),
            "CD-GraB ends with a train loss that is 0.5 lower than "
            f"D-RR ({0.5 - HALF:.3g} to {0.5 + HALF:.3g}, 95 % over 3 seeds).",
        ),
        (
            ([2.0, 2.2, 2.4], [2.0, 2.1, 2.2]),
            "Nothing is shown to beat D-RR. The best: CD-GraB ends "
            "with a train loss that is 0.1 lower than D-RR "
            f"({0.1 - HALF:.3g} to {0.1 + HALF:.3g}, 95 % ",
        ),
        (
            ([2.0], [1.5]),
            "Nothing is shown to beat D-RR. The best: CD-GraB ends with a train loss that "
            "is 0.5 lower than D-RR (one seed, no interval).",
        ),
        (
            ([40, 40], [10, 10], "target"),
            "CD-GraB reaches the target in 4 times fewer steps than D-RR "
            "(4 to 4, 95 % over 2 seeds).",
        ),
        (([2.0], [math.inf]), "Nothing is shown to beat D-RR: no other arm comes to its end"),
    ],
)
def test_the_answer_is_a_sentence_with_its_interval(given, expected):
    assert tables.answer(compared(*given)).startswith(expected)


def test_the_report_starts_with_the_question_and_its_answer_and_folds_the_settings(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(plots, "comparison", lambda *given, **more: None)
    open_folder(str(tmp_path), {})
    study = cd_grab.STUDY._replace(columns=[tables.arm("order")], sections=[])
    page.write(compared([2.0, 2.2], [1.5, 1.6]), study, str(tmp_path), "digits, 4 workers")
    body = (tmp_path / "report.html").read_text().split("<body>")[1]
    question = cd_grab.__doc__.splitlines()[0]
    parts = [
        f"<h1>{question}</h1>",
        "<strong>",
        "digits, 4 workers",
        "<h2>Comparison</h2>",
        "<h2>Command</h2>",
        "<details><summary>Settings</summary>",
    ]
    places = [body.index(part) for part in parts]
    assert places == sorted(places) and ".md<" not in body and ".json<" not in body
