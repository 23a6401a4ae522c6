"""Texts as windows of tokens: words, their vocabulary, and the windows that are examples."""

import collections
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from experiments.tasks.base import abstract_set

END, UNKNOWN = "<eos>", "<unk>"  # of a line; for a word that is not in the vocabulary


def words(lines: Iterable[str]) -> Iterator[str]:
    """The words of all lines, split at spaces, and `END` after every line, empty ones too."""
    return itertools.chain.from_iterable((*line.split(), END) for line in lines)


def vocabulary(found: Iterable[str], max_words: int | None = None) -> list[str]:
    """The words of a text, the most frequent first, at most `max_words` of them; None keeps all.

    `END` and `UNKNOWN` are always among them and count. Equally frequent words are in the order of
    the alphabet.

    Raises:
      ValueError: if `max_words` leaves no room for a word beside those two.
    """
    if max_words is not None and max_words < 3:
        raise ValueError(
            f"max_words is {max_words}: {END}, {UNKNOWN} and one more word are the least."
        )
    counts = collections.Counter(found)
    special = [(word, counts.pop(word, 0)) for word in (END, UNKNOWN)]
    ranked = sorted(counts.items(), key=_rank)[: max_words and max_words - len(special)]
    return [word for word, _ in sorted(ranked + special, key=_rank)]


def _rank(item):
    word, count = item
    return -count, word


def encode(found: Iterable[str], known: list[str]) -> np.ndarray:
    """Words as int32[T], their places in the vocabulary `known`; others are `UNKNOWN`."""
    places = {word: place for place, word in enumerate(known)}
    unknown = places[UNKNOWN]
    return np.fromiter((places.get(word, unknown) for word in found), np.int32)


def windows(tokens: np.ndarray, length: int) -> dict:
    """Tokens [T] as {"x": int32[N, L], "y": int32[N, L]} with N = (T - 1) // L.

    An example is a window of x and the same window one token further on, y. Windows do not
    overlap; what does not fill one at the end is left out.

    Raises:
      ValueError: for a length below 1, or if the tokens do not fill one window and its last target.
    """
    check_length(length)
    number = (len(tokens) - 1) // length
    if number < 1:
        raise ValueError(
            f"length is {length}: a part of the text has {len(tokens)} tokens and needs one more "
            "than length. Take shorter windows or a longer text."
        )
    used = number * length
    x, y = (tokens[k : k + used].reshape(number, length).astype(np.int32) for k in (0, 1))
    return {"x": x, "y": y}


def abstract_windows(num_tokens: int, length: int) -> dict:
    """The shapes of `windows` of a text of so many tokens."""
    check_length(length)
    window = ((length,), np.int32)
    return abstract_set((num_tokens - 1) // length, x=window, y=window)


def check_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"length is {length}: a window needs at least one token.")
