"""What AlgoPerf's own scorer says of the results that run.py has written, and by study."""

import contextlib
import pathlib
import sys
from unittest import mock

import numpy as np

from experiments.results import tables
from experiments.results.statistics import interval

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
            reached = property(lambda _: target)
            stack.enter_context(mock.patch.object(BaseMnistWorkload, name, reached))
        words = [f"--{name}={value}" for name, value in given.items()]
        score_submissions.FLAGS(
            ["score_submissions", *words, "--strict", "--compute_performance_profiles"]
        )
        score_submissions.main(None)
        found = {arm: scoring_utils.get_experiment_df(str(results.resolve() / arm)) for arm in arms}
        rows = [
            {"submission": arm} | by_study(performance_profile, of, target)
            for arm, of in found.items()
        ]
    print((output / "time_to_targets.csv").read_text())
    print((output / "scores.csv").read_text())
    print(tables.markdown(rows))


def by_study(performance_profile, found, target: float) -> dict:
    """Mean and 95 % interval over studies: steps and seconds to the target, and the ends."""
    steps, seconds, best, test = [], [], [], []
    for _, group in found.groupby("study"):
        trial, place = performance_profile.get_best_trial_index(group, METRIC, target)
        if place >= 0:
            steps.append(group["global_step"].loc[trial][place])
            seconds.append(group["score"].loc[trial][place])
        last = {i: row[METRIC][-1] for i, row in group.iterrows()}
        best.append(max(last.values()))
        test.append(group["test/accuracy"].loc[max(last, key=last.get)][-1])
    cells = {
        "studies that arrived": f"{len(steps)} of {len(best)}",
        f"steps to {target:g}": shown(steps, "{:.0f} ± {:.0f}"),
        "seconds": shown(seconds, "{:.1f} ± {:.1f}"),
        "validation accuracy at the end": shown(best, "{:.4f} ± {:.4f}"),
        "test accuracy": shown(test, "{:.4f} ± {:.4f}"),
    }
    return cells


def shown(values, form: str) -> str:
    return form.format(*interval(np.asarray(values, float))) if values else "-"
