"""Tiny Shakespeare: the next character of 1.1 MB of plays, a small GPT-2."""

import os

import numpy as np

import models
from experiments.tasks.base import Recipe, Task, need_file

SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
RECIPE = Recipe(
    workers=4,
    units_per_step=1,
    unit_size=8,
    epochs=5,
    learning_rates=(0.1,),
    momentum=0.9,
    bound_every=0,
)


def load(data_dir: str | None = None, model: str = "gpt2", *, length: int = 64) -> Task:
    """Windows of characters; the first nine tenths of the text train, the last tenth tests.

    The vocabulary is the sorted characters of the whole text, 65 of them. An example is a window
    of x and the same window one character further on, y: {"x": int32[N, L], "y": int32[N, L]}.
    Windows do not overlap; what does not fill one at the end is left out.

    Args:
      data_dir: folder of input.txt.
      model: "gpt2" only.
      length: L >= 1, characters of a window, and the context of the model.

    Raises:
      ValueError: for another model or length, and where the file is not there or is too short.
    """
    if model != "gpt2":
        raise ValueError(f"model is {model!r}: tinyshakespeare has the model 'gpt2' only.")
    if length < 1:
        raise ValueError(f"length is {length}: a window needs at least one character.")
    characters, tokens = np.unique(_read(data_dir), return_inverse=True)
    cut = len(tokens) * 9 // 10
    train, test = windows(tokens[:cut], length), windows(tokens[cut:], length)
    decoder = models.gpt2(vocab_size=len(characters), context=length, width=64, depth=2, heads=4)
    return Task("tinyshakespeare", decoder, train, test, RECIPE)


def windows(tokens: np.ndarray, length: int) -> dict:
    """Tokens [T] as {"x": int32[N, L], "y": int32[N, L]} with N = (T - 1) // L.

    Raises:
      ValueError: if they do not fill one window and its last target.
    """
    number = (len(tokens) - 1) // length
    if number < 1:
        raise ValueError(
            f"length is {length}: a part of the text has {len(tokens)} characters and needs one "
            "more than length. Take shorter windows or a longer text."
        )
    used = number * length
    x, y = (tokens[k : k + used].reshape(number, length).astype(np.int32) for k in (0, 1))
    return {"x": x, "y": y}


def _read(data_dir):
    """The code points of the text."""
    how = f"Download {SOURCE} and pass its folder as --data_dir."
    if data_dir is None:
        raise ValueError(f"the task reads input.txt from --data_dir, which is not set. {how}")
    path = need_file(os.path.join(data_dir, "input.txt"), how)
    with open(path, encoding="utf-8") as file:
        return np.frombuffer(file.read().encode("utf-32-le"), np.uint32)
