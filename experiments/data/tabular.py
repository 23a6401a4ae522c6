"""Tabular data: HMDA's mortgage applications, and the weekly series of M4.

Recipes of Cooper et al. 2023, https://arxiv.org/abs/2302.00845.

HMDA 2017: logistic regression on one state's applications, to predict a denial. Four workers, four
examples per worker and step, lr 5e-3, momentum 0.9, 50 epochs. They train on New York; the files of
any state work.

M4 Weekly: a small perceptron predicts the next six weeks of 359 series from the last twenty. Four
workers, four windows per worker and step whose mean gradient is ordered, lr 1e-3 times 0.25 every
ten epochs, momentum 0.9, 30 epochs.
"""

import csv
import io
import os
import zipfile

import numpy as np

from experiments.data import base
from experiments.data.base import Recipe, Task, abstract_sets, check_model, need_file, network
from experiments.data.sources import check_unpacked, reading
from syncopate.refusals import UserError

HMDA = "github.com/pasta41/hmda-data-2017"
DENIED = 3  # action_taken of a denied application
NUM_TRAIN, NUM_FEATURES = 195_285, 20  # published for New York; ours
HMDA_RECIPE = Recipe(
    workers=4, units_per_step=4, unit_size=1, epochs=50, learning_rates=(5e-3,), bound_every=10
)
M4 = "https://github.com/Mcompetitions/M4-methods/tree/master/Dataset"
LAGS, HORIZON = 20, 6  # inputs and targets of a window
FUTURE = 13  # weeks in a series' test part
NUM_SERIES, NUM_WINDOWS = 359, 357_937
M4_RECIPE = Recipe(
    workers=4,
    units_per_step=1,
    unit_size=4,
    epochs=30,
    learning_rates=(1e-3,),
    schedule="step",
    decay_every=10,
    decay_factor=0.25,
)


def hmda(
    data_dir: str | None = None,
    model: str = "logistic",
    *,
    state: str = "NJ",
    abstract: bool = False,
) -> Task:
    """Four fifths train, one fifth test. Features are standardised, missing ones set to the mean.

    Args:
      data_dir: folder of 2017-STATE-features.zip and 2017-STATE-target.zip.
      state: two letters.
      abstract: New York's published 195,285 training applications and a fourth as many for testing,
        with the 20 features that we keep of New Jersey's, including the bias (they report 19).
    """
    check_model("hmda", model, ("logistic",))
    if abstract:
        train, test = abstract_sets((NUM_TRAIN, NUM_TRAIN // 4), (NUM_FEATURES,))
    else:
        columns, actions = read_hmda(data_dir, state)
        y = (actions != DENIED).astype(np.int32)
        train, test = _standardise(*base.split(_varying(columns), y, num_train=len(y) * 4 // 5))
    regression = network("logistic_regression", num_features=train["x"].shape[1])
    optimum = None if abstract else lambda: base.minimum(regression, train)
    return Task("hmda", regression, train, test, HMDA_RECIPE, optimum)


def read_hmda(data_dir: str | None, state: str) -> tuple[np.ndarray, np.ndarray]:
    """Numeric columns, float64[N, d] with nan for missing entries, and action_taken, int32[N]."""
    paths = []
    for part in ("features", "target"):
        file = f"2017-{state}-{part}.zip"
        how = f"Download {file} from {HMDA} and pass its folder as --data_dir."
        paths.append(need_file("hmda", data_dir, file, how=how))
    features, target = paths
    again, numbers = f"Get it again from {HMDA}.", []
    with reading(features, again):
        for column in zip(*_table(features, f"2017-{state}-features.csv"), strict=True):
            try:
                numbers.append(np.array([entry or "nan" for entry in column], np.float64))
            except ValueError:  # the column of the state's name
                continue
        columns = np.stack(numbers, axis=1)
        if np.isinf(columns).any():
            raise UserError("a number is infinite")
    with reading(target, again):
        actions = np.array([int(row[0]) for row in _table(target, f"2017-{state}-target.csv")])
        if len(actions) != len(columns):
            raise UserError(f"{len(actions)} rows for {len(columns)} of features")
    return columns, actions.astype(np.int32)


def _table(path, name):
    """Rows of a table in a zip file, after the header."""
    with zipfile.ZipFile(path) as archive:
        check_unpacked(archive)
        member = next((m for m in archive.namelist() if m.endswith(name)), None)
        if member is None:
            raise UserError(f"it holds no {name}")
        with archive.open(member) as file:
            _, *rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8"))
    if len(set(map(len, rows))) != 1:
        raise UserError("it has no rows, or rows of different lengths")
    return rows


def _varying(columns):
    """The columns with at least two different numbers."""
    some = ~np.all(np.isnan(columns), axis=0)
    columns = columns[:, some]
    return columns[:, np.nanmin(columns, axis=0) < np.nanmax(columns, axis=0)]


def _standardise(train, test):
    """Scales to mean 0 and deviation 1 on the training set, fills in the mean, adds a bias."""
    mean, deviation = np.nanmean(train["x"], axis=0), np.nanstd(train["x"], axis=0)

    def apply(part):
        x = np.nan_to_num((part["x"] - mean) / deviation, nan=0.0)
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        return {"x": x.astype(np.float32), "y": part["y"]}

    return apply(train), apply(test)


def m4_weekly(data_dir: str | None = None, model: str = "mlp", *, abstract: bool = False) -> Task:
    """All windows of 20 weeks and the next 6; tests on the 13 weeks after every series' last 20.

    An example is divided by the mean absolute value of its 20 inputs. The metric rolls the model
    out over the 13 weeks.

    Args:
      data_dir: folder of Weekly-train.csv and Weekly-test.csv.
    """
    check_model("m4_weekly", model, ("mlp",))
    if abstract:
        train, test = (
            base.abstract_set(number, x=((LAGS,), np.float32), y=((ahead,), np.float32))
            for number, ahead in ((NUM_WINDOWS, HORIZON), (NUM_SERIES, FUTURE))
        )
    else:
        past, future = read_m4(data_dir)
        train, test = training_windows(past), test_windows(past, future)
    forecaster = network("forecaster", lags=LAGS, horizon=HORIZON, hidden=(64, 64, 64))
    return Task("m4_weekly", forecaster, train, test, M4_RECIPE, metric="smape")


def read_m4(data_dir: str | None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Training and test parts of all series, float64[length] each."""
    how = (
        f"Download Weekly-train.csv (in Train) and Weekly-test.csv (in Test) from {M4} and pass "
        "their folder as --data_dir."
    )
    files = "Weekly-train.csv", "Weekly-test.csv"
    paths = (need_file("m4_weekly", data_dir, file, how=how) for file in files)
    (names, past), (others, future) = map(parse_m4, paths)
    if names != others:
        raise UserError(
            f"Weekly-train.csv ({len(names)} series) and Weekly-test.csv ({len(others)}) do not "
            f"hold the same series in the same order: get both files from {M4}."
        )
    return past, future


def parse_m4(path: os.PathLike) -> tuple[list[str], list[np.ndarray]]:
    """Names and values, float64[length], of the series in a file."""
    names, series = [], []
    with reading(path, f"Get it again from {M4}."), open(path, encoding="utf-8") as file:
        for line in file.read().replace('"', "").splitlines()[1:]:  # after the header
            name, *values = line.rstrip(", ").split(",")
            if not name:  # an empty line
                continue
            try:
                series.append(np.array(values, np.float64))
            except ValueError as error:
                raise UserError(f"a gap or a word in series {name}: {error}") from error
            names.append(name)
        if not series or not all(np.isfinite(values).all() for values in series):
            raise UserError("it has no series, or a value that is not finite")
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
    """Windows [N, 20 + ahead] divided by the mean absolute value of their inputs, as x and y."""
    scale = np.abs(windows[:, :LAGS]).mean(axis=1, keepdims=True)
    scale[scale == 0] = 1.0  # a series that is zero throughout
    windows = (windows / scale).astype(np.float32)
    return {"x": windows[:, :LAGS].copy(), "y": windows[:, LAGS:].copy()}


def _check_lengths(series, least, part):
    short = [k for k, values in enumerate(series) if len(values) < least]
    if short:
        raise UserError(
            f"the {part} of series {short[0] + 1} has {len(series[short[0]])} weeks: it needs "
            f"{least}. Get the whole files from {M4}."
        )
