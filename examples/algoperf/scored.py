"""What AlgoPerf's own scorer says of the results that run.py has written, and by study."""

import contextlib
import pathlib
import sys
from unittest import mock

import measure
import numpy as np

METRIC = "validation/accuracy"


def main(checkout: pathlib.Path, results: pathlib.Path, *, trials: int, target: float) -> None:
    """Runs `score_submissions`, then prints a table of every study's fastest trial."""
    sys.path.insert(0, str(checkout / "scoring"))
    import performance_profile
    import score_submissions
    import scoring_utils
    from algoperf.workloads.mnist.workload import BaseMnistWorkload

    arms = sorted(p.name for p in results.resolve().iterdir())
    studies = {arm: len(list((results / arm).iterdir())) for arm in arms}
    if len(set(studies.values())) != 1:
        raise ValueError(f"studies are {studies}: train every arm with the same --seeds first.")
    output = results.with_name(results.name + "_score")
    counts = {
        "BASE_WORKLOADS": ["mnist"],
        "NUM_BASE_WORKLOADS": 1,
        "NUM_TRIALS": trials,
        "NUM_STUDIES": studies[arms[0]],
    }
    given = {"submission_directory": results.resolve(), "output_dir": output}
    with contextlib.ExitStack() as stack:
        for name, value in counts.items():
            stack.enter_context(mock.patch.object(performance_profile, name, value))
        for name in ("validation_target_value", "test_target_value"):
            aim = property(lambda _: target)
            stack.enter_context(mock.patch.object(BaseMnistWorkload, name, aim))
        words = [f"--{name}={value}" for name, value in given.items()]
        score_submissions.FLAGS(
            ["score_submissions", *words, "--strict", "--compute_performance_profiles"]
        )
        score_submissions.main(None)
        found = {arm: scoring_utils.get_experiment_df(str(results.resolve() / arm)) for arm in arms}
        reached = {arm: by_study(performance_profile, of, target) for arm, of in found.items()}
    first = "plain" if "plain" in arms else arms[0]
    rows = [
        {"submission": arm} | row(reached[arm], reached[first], target)
        for arm in sorted(arms, key=lambda arm: arm != first)
    ]
    print((output / "time_to_targets.csv").read_text())
    print((output / "scores.csv").read_text())
    print(measure.table(rows))


def by_study(performance_profile, found, target: float) -> dict:
    """[studies] of the fastest trial's steps and seconds to the target, and of the best end."""
    names, scorer = ("steps", "seconds", METRIC, "test/accuracy"), performance_profile
    values = {name: [] for name in names}
    for _, group in sorted(found.groupby("study")):
        trial, place = scorer.get_best_trial_index(group, METRIC, target)
        for name, column in (("steps", "global_step"), ("seconds", "score")):
            values[name].append(group[column].loc[trial][place] if place >= 0 else np.nan)
        best = max(group.index, key=lambda trial: group[METRIC].loc[trial][-1])
        for name in names[2:]:
            values[name].append(group[name].loc[best][-1])
    return {name: np.array(of, float) for name, of in values.items()}


def row(own: dict, first: dict, target: float) -> dict:
    """Means and 95 % intervals; differences are study by study, which share a seed."""
    arrived = np.isfinite(own["steps"])
    both = arrived & np.isfinite(first["steps"])
    return {
        "arrived": f"{arrived.sum()} of {len(arrived)}",
        f"steps to {target:g}": shown(own["steps"][arrived], "{:.0f} ± {:.0f}"),
        "less the first's": shown((own["steps"] - first["steps"])[both], "{:+.0f} ± {:.0f}"),
        "seconds": shown(own["seconds"][arrived], "{:.1f} ± {:.1f}"),
        "validation accuracy at the end": shown(own[METRIC], "{:.4f} ± {:.4f}"),
        "test accuracy": shown(own["test/accuracy"], "{:.4f} ± {:.4f}"),
    }


def shown(values, form: str) -> str:
    return form.format(*measure.interval(values)) if len(values) else "-"
