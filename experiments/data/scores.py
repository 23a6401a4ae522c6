"""A score of every training example, from the data alone, for orders that sort by scores."""

import numpy as np

from syncopate.refusals import UserError


def scores_of(train, unit_size: int) -> np.ndarray:
    """float64[N], how hard each unit is: the mean of its examples' scores.

    Of windows of tokens it is the loss of a bigram model of these windows; of other arrays the
    squared distance from the mean example. Shapes alone have the score zero.
    """
    if not isinstance(train, dict):
        raise UserError(
            "--order is scored, and this task reads its examples from disk: choose a task in "
            "memory, or another order."
        )
    x, y = train["x"], train["y"]
    number = x.shape[0] // unit_size
    if not isinstance(x, np.ndarray):
        return np.zeros(number)
    is_text = x.dtype.kind in "iu" and x.shape == y.shape
    scores = bigram_losses(x, y) if is_text else distances(x)
    return scores[: number * unit_size].reshape(number, unit_size).mean(axis=1)


def bigram_losses(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """float64[N], means over windows [N, L] of -log p(y | x).

    p(y | x) = (pairs of x and y + p(y)) / (tokens x + 1), counted in the windows themselves, with
    the share p(y) of y.
    """
    size = int(max(x.max(), y.max())) + 1
    pairs, places, counts = np.unique(
        x.astype(np.int64) * size + y, return_inverse=True, return_counts=True
    )
    before, after = np.divmod(pairs, size)
    share = np.bincount(y.ravel(), minlength=size) / y.size
    chance = (counts + share[after]) / (np.bincount(x.ravel(), minlength=size)[before] + 1)
    return -np.log(chance)[places.reshape(x.shape)].mean(axis=1)


def distances(x: np.ndarray) -> np.ndarray:
    """float64[N], squared distances from the mean of the examples."""
    rows = x.reshape(len(x), -1).astype(np.float64)
    return np.square(rows - rows.mean(axis=0)).sum(axis=1)
