"""WikiText-2 and WikiText-103: the next word of Wikipedia articles, with an LSTM or GPT-2.

`wikitext2_small` IS NOT THE PUBLISHED TASK. It trains on the TEST text of WikiText-2 and tests on
the validation text, for machines without the training text; its perplexities are not comparable
with published ones. It also has a smaller vocabulary, and models that a CPU can train.

Recipes of Cooper et al. 2023. LSTM: four workers, four windows of 35 words per worker and step
whose mean gradient is ordered, lr 5 times 0.1 every ten epochs, momentum 0.9, 50 epochs. GPT-2:
64 workers, one window of 128 tokens per worker and step, AdamW at 5e-4 without decay, 30 epochs.
Differences: they cut the text into parallel streams before the windows (LSTM), and truncate every
line to 128 tokens and evaluate on the validation text (GPT-2).
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments.data.base import Recipe, Task, check_model, need_file, network
from experiments.data.sources import reading
from experiments.data.text import (
    END,
    Recut,
    abstract_windows,
    encode,
    vocabulary,
    windows,
    words,
)
from syncopate.refusals import UserError

SOURCES = {
    "wikitext2": "https://wikitext.smerity.com/wikitext-2-v1.zip",
    "wikitext103": "https://wikitext.smerity.com/wikitext-103-v1.zip",
}
RECIPES = {
    "lstm": Recipe(
        workers=4,
        units_per_step=1,
        unit_size=4,
        epochs=50,
        learning_rates=(5.0,),
        schedule="step",
        decay_every=10,
        decay_factor=0.1,
    ),
    "gpt2": Recipe(
        workers=64,
        units_per_step=1,
        unit_size=1,
        epochs=30,
        learning_rates=(5e-4,),
        optimizer="adamw",
    ),
}
RECIPES["gpt2_small"] = RECIPES["gpt2"]._replace(
    workers=8, unit_size=8, epochs=1, learning_rates=(6e-4,)
)
# NanoGPT Slowrun's tiny track: 256 sequences per step. The rates, of Muon, are ours.
RECIPES["slowrun"] = Recipe(
    workers=8,
    units_per_step=1,
    unit_size=32,
    epochs=15,
    learning_rates=(0.01, 0.02),
    optimizer="muon_valley",
    momentum=0.95,
    weight_decay=0.8,
    schedule="cycles",
    decay_every=1,
    average=("swa",),
    evaluations=5,
)


class Size(NamedTuple):
    """Size of a model, and of its vocabulary."""

    length: int  # window and context
    width: int
    max_words: int | None = None  # the most frequent; None: all
    depth: int = 2
    heads: int = 2
    dtype: str = "float32"
    metric: str = "perplexity"


class Corpus(NamedTuple):
    """A text: its files for training and testing, their numbers of tokens, its vocabulary."""

    source: str  # of `SOURCES`
    files: tuple[str, str]
    num_tokens: tuple[int, int]
    num_words: int
    sizes: dict


PUBLISHED = {
    "lstm": Size(35, 32),
    "gpt2": Size(128, 128),
    "gpt2_small": Size(1024, 768, depth=12, heads=12, dtype="bfloat16"),
    "slowrun": Size(2048, 1024, depth=16, heads=8, dtype="bfloat16", metric="loss"),
}
SMALL = {
    "lstm": Size(35, 32, 4096),
    "gpt2": Size(64, 64, 2048),
    "slowrun": Size(64, 64, 1024, metric="loss"),
}
CORPORA = {
    "wikitext2": Corpus("wikitext2", ("train", "test"), (2_088_628, 245_569), 33_278, PUBLISHED),
    "wikitext2_small": Corpus("wikitext2", ("test", "valid"), (245_569, 217_646), 14_143, SMALL),
    "wikitext103": Corpus(
        "wikitext103", ("train", "test"), (103_227_021, 245_569), 267_735, PUBLISHED
    ),
}
BPE_WORDS = 50_257  # GPT-2's own tokens, as in the paper for WikiText-103


def load(
    corpus: str,
    data_dir: str | None = None,
    model: str = "lstm",
    *,
    length: int | None = None,
    abstract: bool = False,
) -> Task:
    """Windows of words and the words after them: {"x": int32[N, L], "y": int32[N, L]}.

    Every line, even an empty one, is split at spaces and followed by "<eos>"; this gives 2,088,628
    training tokens for WikiText-2. The vocabulary is that of the training text; other words of the
    test text become "<unk>". Windows do not overlap, and the model keeps no state between them.

    If the folder has train.npy and test.npy, these are used instead: int[T], the ids of a text that
    is already tokenised. For GPT-2's byte pairs (package tiktoken), make both files like this:

      ids = tiktoken.get_encoding("gpt2").encode_ordinary_batch(list(open("wiki.train.raw")))
      np.save("train.npy", np.concatenate([np.array(line, np.int32) for line in ids]))

    Args:
      data_dir: folder of train.txt, valid.txt and test.txt; or of wiki.train.tokens and so on, as
        in the published archive; or of train.npy and test.npy, which "wikitext2_small" ignores.
      corpus: of `CORPORA`; model: one of its sizes.
      length: L >= 1, tokens of a window, instead of the model's.
      abstract: of the whole published text; of GPT-2 on "wikitext103" with the paper's byte pairs,
        though its number of windows is still counted in words, an assumption.
    """
    chosen = CORPORA[corpus]
    check_model(corpus, model, chosen.sizes)
    size, recut = chosen.sizes[model], None
    length = size.length if length is None else length
    if abstract:
        train, test = (abstract_windows(number, length) for number in chosen.num_tokens)
        byte_pairs = corpus == "wikitext103" and model != "lstm"
        num_words = BPE_WORDS if byte_pairs else chosen.num_words
        vocab_size = min(num_words, size.max_words or num_words)
    else:
        train, test, vocab_size, starts = _read_corpus(data_dir, corpus, size.max_words)
        recut = Recut(train, starts, length)
        train, test = windows(train, length), windows(test, length)
    if model == "lstm":
        net = network("lstm", vocab_size=vocab_size, width=size.width, depth=size.depth)
    else:
        net = network(
            "gpt2",
            vocab_size=vocab_size,
            context=length,
            width=size.width,
            depth=size.depth,
            heads=size.heads,
            dtype=size.dtype,
        )
    return Task(corpus, net, train, test, RECIPES[model], metric=size.metric, recut=recut)


def lines(data_dir: str | None, corpus: str, part: str) -> Iterator[str]:
    """The lines of one part ("train", "valid", "test") of a corpus."""
    how = (
        f"Download and unpack {SOURCES[CORPORA[corpus].source]} and pass the folder of "
        f"wiki.{part}.tokens as --data_dir."
    )
    if part == "train" and corpus == "wikitext2":
        how += " Or pass --task=wikitext2_small, which trains on the test text instead."
    path = need_file(corpus, data_dir, f"wiki.{part}.tokens", f"{part}.txt", how=how)
    with reading(path, how), open(path, encoding="utf-8", newline="\n") as file:
        yield from file


def _tokens(path):
    """The ids of a saved text."""
    with reading(path, "Save int[T], ids of at least 0, with np.save."):
        ids = np.load(path, mmap_mode="r")
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**31:
            raise UserError(f"{ids.dtype}{list(ids.shape)}, or ids out of range")
    return ids


def _read_corpus(data_dir, corpus, max_words):
    """Tokens of the training and the test text, their vocabulary size, and where documents begin.

    Of words these are sections, which begin with a heading, and of saved ids what begins with
    GPT-2's "<|endoftext|>".
    """
    files = CORPORA[corpus].files
    saved = [os.path.join(data_dir or "", f"{part}.npy") for part in files]
    if files[0] == "train" and all(map(os.path.exists, saved)):
        train, test = map(_tokens, saved)
        return train, test, 1 + int(max(train.max(), test.max())), _starts(train == BPE_WORDS - 1)
    listed = vocabulary(words(lines(data_dir, corpus, files[0])), max_words)
    train, test = (encode(words(lines(data_dir, corpus, part)), listed) for part in files)
    end, heading = (listed.index(word) if word in listed else -1 for word in (END, "="))
    return train, test, len(listed), _starts((train == heading) & (np.roll(train, 1) == end))


def _starts(begins):
    """The places of a text where documents begin, with 0."""
    return np.union1d(0, np.flatnonzero(begins))
