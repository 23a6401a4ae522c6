"""HMDA 2017: mortgage applications of one state, logistic regression (was it denied?).

Recipe of Cooper et al. 2023: four workers, four examples per worker and step, lr 5e-3, momentum
0.9, 50 epochs. They train on New York; any state's files work.
"""

import csv
import io
import os
import zipfile

import numpy as np

from experiments.tasks import builders
from experiments.tasks.base import Recipe, Task, abstract_set, need_file, split
from syncopate import models

SOURCE = "github.com/pasta41/hmda-data-2017"
DENIED = 3  # action_taken of a denied application
NUM_TRAIN, NUM_FEATURES = 195_285, 20  # published, of New York; ours
RECIPE = Recipe(
    workers=4,
    units_per_step=4,
    unit_size=1,
    epochs=50,
    learning_rates=(5e-3,),
    momentum=0.9,
    bound_every=10,
)


def load(
    data_dir: str | None = None,
    model: str = "logistic",
    *,
    state: str = "NJ",
    abstract: bool = False,
) -> Task:
    """Four fifths train, one fifth tests; features standardised, missing ones at the mean.

    Args:
      data_dir: folder of 2017-STATE-features.zip and 2017-STATE-target.zip, or of the prepared set
        hmda/STATE.
      model: "logistic" only.
      state: two letters.
      abstract: shapes only, of the published set: New York's 195,285 applications to train on,
        with the 20 features that we keep of New Jersey's, the bias among them (they report 19),
        and a fourth as many to test on; reads nothing.

    Raises:
      ValueError: for another model, and where a file is not there or is damaged.
    """
    if model != "logistic":
        raise ValueError(f"model is {model!r}: hmda has the model 'logistic' only.")
    if abstract:
        train, test = (
            abstract_set(number, x=((NUM_FEATURES,), np.float32), y=((), np.int32))
            for number in (NUM_TRAIN, NUM_TRAIN // 4)
        )
        return Task("hmda", _regression(train), train, test, RECIPE)
    columns, actions = read(data_dir, state)
    y = (actions != DENIED).astype(np.int32)
    train, test = split(_varying(columns), y, num_train=len(y) * 4 // 5)
    train, test = _standardise(train, test)
    regression = _regression(train)
    return Task("hmda", regression, train, test, RECIPE, lambda: models.optimum(regression, train))


def read(data_dir: str | None, state: str) -> tuple[np.ndarray, np.ndarray]:
    """The columns that are numbers, float64[N, d] with nan where one is missing, and action_taken,
    int32[N]; prepared or from the files.

    Raises:
      ValueError: where a file is not there or is damaged.
    """
    name = f"hmda/{state}"
    if builders.is_prepared(name, data_dir):
        rows = builders.examples(name, data_dir, "train")
        actions = np.array([row["action_taken"] for row in rows], np.int32)
        return np.stack([row["features"] for row in rows]), actions
    paths = []
    for part in ("features", "target"):
        file = f"2017-{state}-{part}.zip"
        how = (
            f"Download {file} from {SOURCE} and pass its folder as --data_dir. "
            f"{builders.how_to_prepare(name)}"
        )
        if data_dir is None:
            raise ValueError(f"hmda reads {file} from --data_dir, which is not set. {how}")
        paths.append(need_file(os.path.join(data_dir, file), how))
    return parse(*paths, state)


def parse(features: os.PathLike, target: os.PathLike, state: str) -> tuple[np.ndarray, np.ndarray]:
    """What `read` gives, out of the two zip files of a state.

    Raises:
      ValueError: if a zip file does not hold its table.
    """
    columns = np.array(_table(features, f"2017-{state}-features.csv")[1:]).T
    numbers = []
    for column in columns:
        try:
            numbers.append(np.where(column == "", "nan", column).astype(np.float64))
        except ValueError:  # the state's letters
            continue
    actions = [int(row[0]) for row in _table(target, f"2017-{state}-target.csv")[1:]]
    return np.stack(numbers, axis=1), np.array(actions, np.int32)


def _table(path, name):
    """Rows of a table in a zip file, the header first."""
    with zipfile.ZipFile(path) as archive:
        member = next((m for m in archive.namelist() if m.endswith(name)), None)
        if member is None:
            raise ValueError(
                f"{path!r} holds no {name}: the download is damaged. Take that of {SOURCE}."
            )
        with archive.open(member) as file:
            return list(csv.reader(io.TextIOWrapper(file, encoding="utf-8")))


def _varying(columns):
    """The columns that hold two numbers at least."""
    some = ~np.all(np.isnan(columns), axis=0)
    columns = columns[:, some]
    return columns[:, np.nanmin(columns, axis=0) < np.nanmax(columns, axis=0)]


def _regression(train):
    return models.logistic_regression(num_features=train["x"].shape[1])


def _standardise(train, test):
    """Mean 0 and deviation 1 on the training set, missing entries at the mean, and a bias."""
    mean, deviation = np.nanmean(train["x"], axis=0), np.nanstd(train["x"], axis=0)

    def apply(part):
        x = np.nan_to_num((part["x"] - mean) / deviation, nan=0.0)
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        return {"x": x.astype(np.float32), "y": part["y"]}

    return apply(train), apply(test)
