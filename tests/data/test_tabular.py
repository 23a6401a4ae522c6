"""Tabular tasks, from small files, and data beside the checkout."""

import csv
import io
import pathlib
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

import models
from experiments.data import TASKS, metrics, tabular
from experiments.data.metrics import METRICS
from tests.shared_data import need

COLUMNS = 23


@pytest.fixture
def series(tmp_path):
    """Two series of 28 and 30 weeks: the row of the shorter one is padded with empty fields."""
    past = [np.arange(1, 29) * 0.5, np.arange(30) - 7.0]
    future = [np.arange(13) + 15.0, np.arange(13) * -1.0]
    for part, rows, quote in (("train", past, ""), ("test", future, '"')):
        lines = [",".join(f'"V{k}"' for k in range(1, 32))]
        for k, values in enumerate(rows):
            fields = [f"W{k + 1}", *values, *[""] * (30 - len(values))]
            lines.append(",".join(f"{quote}{field}{quote}" for field in fields))
        (tmp_path / f"Weekly-{part}.csv").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return str(tmp_path), past, future


def test_all_windows_of_series_are_scaled_by_their_inputs(series):
    folder, past, future = series
    task = TASKS["m4_weekly"](folder)
    expected = [s[k : k + 26] for s in past for k in range(len(s) - 25)]
    assert len(expected) == 3 + 5 and task.train["x"].shape == (8, 20)
    for k, window in enumerate(expected):
        scale = np.mean(np.abs(window[:20]))
        np.testing.assert_allclose(task.train["x"][k], window[:20] / scale, rtol=1e-6)
        np.testing.assert_allclose(task.train["y"][k], window[20:] / scale, rtol=1e-6)
    for k in range(2):
        scale = np.mean(np.abs(past[k][-20:]))
        np.testing.assert_allclose(task.test["x"][k], past[k][-20:] / scale, rtol=1e-6)
        np.testing.assert_allclose(task.test["y"][k], future[k] / scale, rtol=1e-6)
    assert task.train["y"].dtype == task.test["y"].dtype == np.float32
    assert task.metric == "smape"
    zeros = tabular.training_windows([np.zeros(26)])  # a series at zero is not divided
    np.testing.assert_array_equal(zeros["x"], np.zeros((1, 20)))


@pytest.mark.parametrize(
    "old,new,word",
    [
        ("W2", "W3", "do not hold the same"),
        ("17.0", "", "series W1"),
        (',"25.0"', "", "series 1 has 12"),
    ],
)
def test_damaged_series_are_refused(series, old, new, word):
    path = pathlib.Path(series[0]) / "Weekly-test.csv"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=word):
        TASKS["m4_weekly"](series[0])


def test_the_weekly_series_of_m4_are_the_published_ones():
    raw = need("m4")
    past, future = tabular.read_m4(raw)
    assert (len(past), min(map(len, past)), max(map(len, past))) == (359, 80, 2597)
    assert {len(values) for values in future} == {13}
    np.testing.assert_array_equal(future[358][[0, -1]], [4458, 3965])


@pytest.fixture
def applications(tmp_path):
    """Ten applications of Wyoming; one column has letters."""
    generator = np.random.default_rng(0)
    features = generator.normal(size=(10, COLUMNS)).round(6).astype(str).tolist()
    features[2][4] = ""
    features = [[*row[:9], "WY", *row[9:]] for row in features]
    tables = {"features": features, "target": [[1 + k % 3, ""] for k in range(10)]}
    for part, rows in tables.items():
        table = io.StringIO()
        csv.writer(table).writerows([["column"] * len(rows[0]), *rows])
        with zipfile.ZipFile(tmp_path / f"2017-WY-{part}.zip", "w") as archive:
            archive.writestr(f"data/2017/WY/2017-WY-{part}.csv", table.getvalue())
    return str(tmp_path)


def test_applications_are_standardised_and_missing_entries_set_to_the_mean(applications):
    columns, actions = tabular.read_hmda(applications, "WY")
    assert columns.shape == (10, COLUMNS) and np.argwhere(np.isnan(columns)).tolist() == [[2, 4]]
    task = tabular.hmda(applications, state="WY")
    assert task.train["x"].shape == (8, COLUMNS + 1) and task.test["x"].shape == (2, COLUMNS + 1)
    np.testing.assert_allclose(task.train["x"][:, :COLUMNS].mean(axis=0), 0, atol=1e-6)
    assert sorted([*task.train["y"], *task.test["y"]]) == [0] * 3 + [1] * 7
    assert (actions == 3).sum() == 3


@pytest.mark.slow
def test_hmda_has_twenty_standardised_features():
    task = TASKS["hmda"](need("hmda"))
    assert task.train["x"].shape == (238666, 20) and task.test["x"].shape == (59667, 20)
    np.testing.assert_allclose(task.train["x"][:, :19].mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(task.train["x"][:, 19], 1)
    assert 0.8 < task.train["y"].mean() < 0.9


@pytest.mark.parametrize("horizon", [1, 2, 5])
def test_smape_rolls_a_forecast_out(horizon, monkeypatch):
    """Each forecast is the sum of the last two known values: Fibonacci."""
    monkeypatch.setattr(metrics, "CHUNK", 4)

    def predict(params, x):
        ahead = [x]
        for _ in range(horizon):
            ahead.append(
                ahead[-1][:, -1:]
                + (ahead[-1][:, -2:-1] if ahead[-1].shape[1] > 1 else ahead[-2][:, -1:])
            )
        return jnp.concatenate(ahead[1:], axis=1)

    x = np.array([[1.0, 1.0], [0.0, 2.0]], np.float32)
    y = np.array([[2.0, 2.0, 5.0, 8.0], [2.0, 4.0, -6.0, 10.0]], np.float32)
    forecast = np.array([[2.0, 3.0, 5.0, 8.0], [2.0, 4.0, 6.0, 10.0]])
    expected = np.mean(200 * np.abs(y - forecast) / (np.abs(y) + np.abs(forecast)))
    model = models.Model(None, None, predict)
    actual = METRICS["smape"].measure(model)(None, None, {"x": x, "y": y})
    assert float(actual) == pytest.approx(expected, rel=1e-6)
