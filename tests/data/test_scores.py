"""Scores of training examples: by the bigrams of a text, or by the distance from the mean."""

import jax
import numpy as np
import pytest

from experiments.data.scores import scores_of


def test_windows_are_scored_by_the_loss_of_their_bigrams():
    tokens = np.random.default_rng(0).integers(0, 4, (5, 7))
    x, y = tokens[:, :-1], tokens[:, 1:]
    expected = np.zeros(5)
    for n in range(5):
        for a, b in zip(x[n], y[n], strict=True):
            pairs = ((x == a) & (y == b)).sum()
            expected[n] -= np.log((pairs + (y == b).mean()) / ((x == a).sum() + 1)) / 6
    np.testing.assert_allclose(scores_of({"x": x, "y": y}, 1), expected, rtol=1e-12)
    units = scores_of({"x": x, "y": y}, 2)  # of two examples; the last example fills no unit
    np.testing.assert_allclose(units, expected[:4].reshape(2, 2).mean(axis=1), rtol=1e-12)


def test_other_examples_are_scored_by_their_distance_from_the_mean():
    x = np.array([[[0.0, 0.0]], [[2.0, 0.0]], [[4.0, 3.0]]], np.float32)
    assert scores_of({"x": x, "y": np.zeros(3, int)}, 1).tolist() == [5.0, 1.0, 8.0]


def test_shapes_have_no_scores_and_files_are_refused():
    shapes = {"x": jax.ShapeDtypeStruct((9, 4), np.int32), "y": None}
    assert scores_of(shapes, 2).tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="choose a task in memory"):
        scores_of([{"x": 1}], 1)
