"""HMDA 2017: mortgage applications of one state, logistic regression (was it denied?).

Recipe of Cooper et al. 2023: four workers, four examples per worker and step, lr 5e-3, momentum
0.9, 50 epochs. They train on New York; any state's files work.
"""

import csv
import io
import os
import zipfile

import numpy as np

import models
from experiments.tasks.base import Recipe, Task, need_file, split

SOURCE = "github.com/pasta41/hmda-data-2017"
DENIED = 3  # action_taken of a denied application
RECIPE = Recipe(
    workers=4,
    units_per_step=4,
    unit_size=1,
    epochs=50,
    learning_rates=(5e-3,),
    momentum=0.9,
    bound_every=10,
)


def load(data_dir: str | None = None, model: str = "logistic", state: str = "NJ") -> Task:
    """Four fifths train, one fifth tests; features standardised, missing ones at the mean."""
    if model != "logistic":
        raise ValueError(f"model is {model!r}: hmda has the model 'logistic' only.")
    features, target = (_read(data_dir, state, part) for part in ("features", "target"))
    x = _numeric(features)
    y = np.array([int(row[0]) != DENIED for row in target[1:]], np.int32)
    train, test = split(x, y, num_train=len(x) * 4 // 5)
    train, test = _standardise(train, test)
    regression = models.logistic_regression(num_features=train["x"].shape[1])
    return Task("hmda", regression, train, test, RECIPE, lambda: models.optimum(regression, train))


def _read(data_dir, state, part):
    """Rows of 2017-STATE-PART.csv out of its zip file, the header first."""
    name = f"2017-{state}-{part}"
    how = f"Download {name}.zip from {SOURCE} and pass its folder as --data_dir."
    if data_dir is None:
        raise ValueError(f"hmda reads {name}.zip from --data_dir, which is not set. {how}")
    path = need_file(os.path.join(data_dir, f"{name}.zip"), how)
    with zipfile.ZipFile(path) as archive:
        member = next((m for m in archive.namelist() if m.endswith(f"{name}.csv")), None)
        if member is None:
            raise ValueError(f"{path!r} holds no {name}.csv: the download is damaged. {how}")
        with archive.open(member) as file:
            return list(csv.reader(io.TextIOWrapper(file, encoding="utf-8")))


def _numeric(rows):
    """Columns that are numbers and vary: float64[N, d], missing entries nan."""
    columns = np.array(rows[1:]).T
    kept = []
    for column in columns:
        try:
            values = np.where(column == "", "nan", column).astype(np.float64)
        except ValueError:  # the state's letters
            continue
        if not np.all(np.isnan(values)) and np.nanmin(values) < np.nanmax(values):
            kept.append(values)
    return np.stack(kept, axis=1)


def _standardise(train, test):
    """Mean 0 and deviation 1 on the training set, missing entries at the mean, and a bias."""
    mean, deviation = np.nanmean(train["x"], axis=0), np.nanstd(train["x"], axis=0)

    def apply(part):
        x = np.nan_to_num((part["x"] - mean) / deviation, nan=0.0)
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        return {"x": x.astype(np.float32), "y": part["y"]}

    return apply(train), apply(test)
