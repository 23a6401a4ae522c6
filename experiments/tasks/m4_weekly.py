"""M4 Weekly: the next six weeks of 359 series out of the last twenty, a small perceptron.

Recipe of Cooper et al. 2023: four workers, four windows per worker and step whose mean gradient is
ordered, lr 1e-3 times 0.25 every ten epochs, momentum 0.9, 30 epochs.
"""

import os

import numpy as np

from experiments.tasks import builders
from experiments.tasks.base import Recipe, Task, abstract_set, need_file
from syncopate import models

SOURCE = "https://github.com/Mcompetitions/M4-methods/tree/master/Dataset"
LAGS, HORIZON = 20, 6  # inputs and targets of a window
FUTURE = 13  # weeks that a series' test part holds
NUM_SERIES, NUM_WINDOWS = 359, 357_937
RECIPE = Recipe(
    workers=4,
    units_per_step=1,
    unit_size=4,
    epochs=30,
    learning_rates=(1e-3,),
    momentum=0.9,
    bound_every=0,
    schedule="step",
    decay_every=10,
    decay_factor=0.25,
)


def load(data_dir: str | None = None, model: str = "mlp", *, abstract: bool = False) -> Task:
    """Windows of 20 weeks and the next 6 over all training parts; tests on the 13 weeks after.

    Every window of every series trains, one for each first week: 357,937 of them. An example is
    divided by its scale, the mean absolute value of its 20 inputs:
    {"x": float32[N, 20], "y": float32[N, 6]}. The test set has one example per series: the last
    20 weeks of the training part and the 13 weeks that follow, {"x": float32[359, 20],
    "y": float32[359, 13]}, divided in the same way. The metric rolls the model out over them.

    Args:
      data_dir: folder of Weekly-train.csv and Weekly-test.csv, or of the prepared set m4_weekly.
      model: "mlp" only, the published one: three hidden layers of 64 units.
      abstract: shapes only, of the full set; reads nothing.

    Raises:
      ValueError: for another model, and where a file is not there or is damaged.
    """
    if model != "mlp":
        raise ValueError(f"model is {model!r}: m4_weekly has the model 'mlp' only.")
    if abstract:
        train, test = (
            abstract_set(number, x=((LAGS,), np.float32), y=((ahead,), np.float32))
            for number, ahead in ((NUM_WINDOWS, HORIZON), (NUM_SERIES, FUTURE))
        )
    else:
        past, future = read(data_dir)
        train, test = training_windows(past), test_windows(past, future)
    forecaster = models.forecaster(lags=LAGS, horizon=HORIZON, hidden=(64, 64, 64))
    return Task("m4_weekly", forecaster, train, test, RECIPE, metric="smape")


def read(data_dir: str | None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Training and test parts of all series, float64[length] each, prepared or from the files.

    Raises:
      ValueError: where a file is not there, or the two do not hold the same series.
    """
    if builders.is_prepared("m4_weekly", data_dir):
        rows = builders.examples("m4_weekly", data_dir, "train")
        return [row["past"] for row in rows], [row["future"] for row in rows]
    (names, past), (others, future) = (parse(_path(data_dir, part)) for part in ("train", "test"))
    if names != others:
        raise ValueError(
            f"Weekly-train.csv has {len(names)} series and Weekly-test.csv {len(others)}, not the "
            f"same in the same order: take both files of {SOURCE}."
        )
    return past, future


def parse(path: os.PathLike) -> tuple[list[str], list[np.ndarray]]:
    """Names and values, float64[length], of the series of a file; rows end with a last value.

    Raises:
      ValueError: for a row with a gap or a word among its values.
    """
    with open(path, encoding="utf-8") as file:
        lines = file.read().replace('"', "").splitlines()
    names, series = [], []
    for line in lines[1:]:  # the first one names the columns
        name, *values = line.rstrip(", ").split(",")
        if not name:  # an empty line
            continue
        try:
            series.append(np.array(values, np.float64))
        except ValueError as error:
            raise ValueError(
                f"{path!r} has a gap or a word among the values of series {name}: {error}. Take "
                f"the file of {SOURCE}."
            ) from error
        names.append(name)
    return names, series


def training_windows(series: list[np.ndarray]) -> dict:
    """All windows of 26 weeks of all series, {"x": float32[N, 20], "y": float32[N, 6]}, scaled."""
    _check_lengths(series, LAGS + HORIZON, "training part")
    windows = [np.lib.stride_tricks.sliding_window_view(s, LAGS + HORIZON) for s in series]
    return _scaled(np.concatenate(windows))


def test_windows(past: list[np.ndarray], future: list[np.ndarray]) -> dict:
    """The last 20 weeks of `past` and the first 13 of `future`, one example per series, scaled."""
    _check_lengths(past, LAGS, "training part")
    _check_lengths(future, FUTURE, "test part")
    pairs = zip(past, future, strict=True)
    return _scaled(np.stack([np.concatenate([p[-LAGS:], f[:FUTURE]]) for p, f in pairs]))


def _scaled(windows):
    """Windows [N, 20 + ahead] over the mean absolute value of their inputs, as x and y."""
    scale = np.abs(windows[:, :LAGS]).mean(axis=1, keepdims=True)
    scale[scale == 0] = 1.0  # a series that stands still at zero
    windows = (windows / scale).astype(np.float32)
    return {"x": windows[:, :LAGS].copy(), "y": windows[:, LAGS:].copy()}


def _check_lengths(series, least, part):
    short = [k for k, values in enumerate(series) if len(values) < least]
    if short:
        raise ValueError(
            f"the {part} of series {short[0] + 1} has {len(series[short[0]])} weeks: it needs "
            f"{least}. Take the whole files of {SOURCE}."
        )


def _path(data_dir, part):
    name = f"Weekly-{part}.csv"
    how = (
        f"Download Weekly-train.csv (in Train) and Weekly-test.csv (in Test) from {SOURCE} and "
        f"pass their folder as --data_dir. {builders.how_to_prepare('m4_weekly')}"
    )
    if data_dir is None:
        raise ValueError(f"m4_weekly reads {name} from --data_dir, which is not set. {how}")
    return need_file(os.path.join(data_dir, name), how)
