"""Tiny Shakespeare: the next character of 1.1 MB of plays, a small GPT-2."""

import os

import numpy as np

from experiments.tasks.base import Recipe, Task, need_file
from experiments.tasks.text import abstract_windows, check_length, windows
from syncopate import models

SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
NUM_CHARACTERS, VOCAB_SIZE = 1_115_394, 65
RECIPE = Recipe(
    workers=4,
    units_per_step=1,
    unit_size=8,
    epochs=5,
    learning_rates=(0.1,),
    momentum=0.9,
    bound_every=0,
)


def load(
    data_dir: str | None = None, model: str = "gpt2", *, length: int = 64, abstract: bool = False
) -> Task:
    """Windows of characters; the first nine tenths of the text train, the last tenth tests.

    The vocabulary is the sorted characters of the whole text, 65 of them. An example is a window
    of x and the same window one character further on, y: {"x": int32[N, L], "y": int32[N, L]}.
    Windows do not overlap; what does not fill one at the end is left out.

    Args:
      data_dir: folder of input.txt.
      model: "gpt2" only.
      length: L >= 1, characters of a window, and the context of the model.
      abstract: shapes only, of the whole text of 1,115,394 characters; reads nothing.

    Raises:
      ValueError: for another model or length, and where the file is not there or is too short.
    """
    if model != "gpt2":
        raise ValueError(f"model is {model!r}: tinyshakespeare has the model 'gpt2' only.")
    check_length(length)
    if abstract:
        num_train = NUM_CHARACTERS * 9 // 10
        train, test = (
            abstract_windows(number, length) for number in (num_train, NUM_CHARACTERS - num_train)
        )
        vocab_size = VOCAB_SIZE
    else:
        characters, tokens = np.unique(_read(data_dir), return_inverse=True)
        cut, vocab_size = len(tokens) * 9 // 10, len(characters)
        train, test = windows(tokens[:cut], length), windows(tokens[cut:], length)
    decoder = models.gpt2(vocab_size=vocab_size, context=length, width=64, depth=2, heads=4)
    return Task("tinyshakespeare", decoder, train, test, RECIPE)


def _read(data_dir):
    """The code points of the text."""
    how = f"Download {SOURCE} and pass its folder as --data_dir."
    if data_dir is None:
        raise ValueError(f"the task reads input.txt from --data_dir, which is not set. {how}")
    path = need_file(os.path.join(data_dir, "input.txt"), how)
    with open(path, encoding="utf-8") as file:
        return np.frombuffer(file.read().encode("utf-32-le"), np.uint32)
