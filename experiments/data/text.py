"""Text tasks: the next character of Tiny Shakespeare, and sentiment of SST-2's sentences.

Tiny Shakespeare is 1.1 MB of plays, for a small GPT-2.

SST-2 asks whether a sentence of a film review is positive, with a linear head on frozen sentence
features. The first version of Cooper et al. 2023 trains heads on frozen BERT embeddings with 16
workers, lr 1e-4 and momentum 0.9; its program's defaults are eight sentences per worker and step
and 30 epochs. Provide such embeddings in a file, or use the features made here from the text:
TF-IDF of words and pairs of words, reduced to 256 dimensions. THEY REPLACE BERT: training runs the
same way on a problem of the same kind, but accuracies are not comparable with published ones.
"""

import collections
import dataclasses
import functools
import itertools
import os
import zipfile
from collections.abc import Iterable, Iterator

import numpy as np

from experiments.data import base
from experiments.data.base import COUNT, Recipe, Task, check_model, need_file, network
from experiments.data.sources import check_unpacked, reading
from syncopate.refusals import UserError

END, UNKNOWN = "<eos>", "<unk>"  # end of a line; a word outside the vocabulary


def words(lines: Iterable[str]) -> Iterator[str]:
    """The words of all lines, split at spaces, with `END` after every line, even an empty one."""
    return itertools.chain.from_iterable((*line.split(), END) for line in lines)


def vocabulary(tokens: Iterable[str], max_words: int | None = None) -> list[str]:
    """The `max_words` most frequent words of a text, most frequent first; None keeps all.

    `END` and `UNKNOWN` are always included and counted. Ties are in alphabetical order.
    """
    counts = collections.Counter(tokens)
    special = [(word, counts.pop(word, 0)) for word in (END, UNKNOWN)]
    ranked = sorted(counts.items(), key=_rank)[: max_words and max_words - len(special)]
    return [word for word, _ in sorted(ranked + special, key=_rank)]


def _rank(item):
    word, count = item
    return -count, word


def encode(tokens: Iterable[str], listed: list[str]) -> np.ndarray:
    """Words as int32[T] places in the vocabulary `listed`; others become `UNKNOWN`."""
    places = {word: place for place, word in enumerate(listed)}
    unknown = places[UNKNOWN]
    return np.fromiter((places.get(word, unknown) for word in tokens), np.int32)


def windows(tokens: np.ndarray, length: int) -> dict:
    """Tokens [T] as {"x": int32[N, L], "y": int32[N, L]} with N = (T - 1) // L.

    x is a window of the text, and y the window one token later. Windows do not overlap; an
    incomplete last one is dropped.
    """
    base.check("length", length, COUNT)
    number = (len(tokens) - 1) // length
    if number < 1:
        raise UserError(
            f"length is {length}: a part of the text has {len(tokens)} tokens and needs at least "
            "length + 1. Use shorter windows or a longer text."
        )
    used = number * length
    x, y = (tokens[k : k + used].reshape(number, length).astype(np.int32) for k in (0, 1))
    return {"x": x, "y": y}


def _permuted(text: "Recut", draw: np.random.Generator) -> np.ndarray:
    documents = np.split(text.tokens, text.starts[1:])
    return np.concatenate([documents[i] for i in draw.permutation(len(documents))])


def _shifted(text: "Recut", draw: np.random.Generator) -> np.ndarray:
    return np.roll(text.tokens, -draw.integers(text.length))


# The tokens of an epoch, before they are cut. "documents" puts documents in another order;
# "shifted" rotates the text by up to a window, so that every window holds most of its text.
CUTS = {"documents": _permuted, "shifted": _shifted}


@dataclasses.dataclass(frozen=True)
class Recut:
    """The windows of a text that is cut anew in every epoch of a run, as many each time."""

    tokens: np.ndarray  # int[T]
    starts: np.ndarray  # int[d], where its documents begin, with 0 first
    length: int  # L, of a window
    how: str = "documents"  # a name of CUTS
    seed: int = 0
    epoch: int = 0

    @functools.cached_property
    def windows(self) -> dict:
        draw = np.random.default_rng((self.seed, self.epoch))
        return windows(CUTS[self.how](self, draw), self.length)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, i: int) -> dict:
        return {name: part[i] for name, part in self.windows.items()}

    def of_seed(self, seed: int) -> "Recut":
        return dataclasses.replace(self, seed=seed)

    def at_epoch(self, epoch: int) -> "Recut":
        return dataclasses.replace(self, epoch=epoch)

    def by(self, how: str) -> "Recut":
        return dataclasses.replace(self, how=how)

    def first(self, number: int) -> "Recut":
        """The same for the text of the first windows alone."""
        end = number * self.length + 1
        starts = self.starts[self.starts < end]
        return dataclasses.replace(self, tokens=self.tokens[:end], starts=starts)


def abstract_windows(num_tokens: int, length: int) -> dict:
    """The shapes of `windows` for a text of `num_tokens` tokens."""
    base.check("length", length, COUNT)
    window = ((length,), np.int32)
    return base.abstract_set((num_tokens - 1) // length, x=window, y=window)


SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
NUM_CHARACTERS, VOCAB_SIZE = 1_115_394, 65
SHAKESPEARE_RECIPE = Recipe(
    workers=4, units_per_step=1, unit_size=8, epochs=5, learning_rates=(0.1,)
)


def tinyshakespeare(
    data_dir: str | None = None, model: str = "gpt2", *, length: int = 64, abstract: bool = False
) -> Task:
    """`windows` of characters; the first nine tenths of the text train, the last tenth tests.

    The vocabulary is the sorted characters of the whole text, 65 of them.

    Args:
      data_dir: folder of input.txt.
      length: L >= 1, characters of a window, and the context of the model.
    """
    check_model("tinyshakespeare", model, ("gpt2",))
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
    decoder = network("gpt2", vocab_size=vocab_size, context=length, width=64, depth=2, heads=4)
    return Task("tinyshakespeare", decoder, train, test, SHAKESPEARE_RECIPE)


def _read(data_dir):
    """The code points of the text."""
    how = f"Download {SHAKESPEARE} and pass its folder as --data_dir."
    path = need_file("tinyshakespeare", data_dir, "input.txt", how=how)
    with reading(path, how), open(path, encoding="utf-8") as file:
        return np.frombuffer(file.read().encode("utf-32-le"), np.uint32)


SST2 = "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip"
NUM_SENTENCES = 67_349, 872
BERT_FEATURES, TEXT_FEATURES = 768, 256
SST2_RECIPE = Recipe(workers=16, units_per_step=8, unit_size=1, epochs=30, learning_rates=(1e-4,))


def sst2(
    data_dir: str | None = None,
    model: str = "head",
    *,
    abstract: bool = False,
) -> Task:
    """Features of 67,349 training sentences and phrases, and of 872 test sentences.

    If the folder has embeddings.npz, its arrays x_train and x_test, float[N, d], and y_train and
    y_test, int[N], are used as they are: the output of a frozen encoder.

    Otherwise the features are TF-IDF, fitted on the training sentences: log-scaled counts of words
    and pairs of neighbouring words that occur at least three times, times their log inverse
    frequency, projected on 256 singular vectors (seeded). Every sentence's features are
    normalised to mean square 1, or zero if it has no known word.

    Args:
      data_dir: folder of train_full.tsv (or train.tsv) and dev.tsv, or of embeddings.npz.
      abstract: with BERT's 768 dimensions.
    """
    check_model("sst2", model, ("head",))
    if abstract:
        train, test = base.abstract_sets(NUM_SENTENCES, (BERT_FEATURES,))
    elif os.path.exists(saved := os.path.join(data_dir or "", "embeddings.npz")):
        train, test = _embeddings(saved)
    else:
        (texts, y), (test_texts, test_y) = (sentences(data_dir, part) for part in ("train", "dev"))
        x, test_x = features(texts, test_texts, num_features=TEXT_FEATURES)
        train, test = {"x": x, "y": y}, {"x": test_x, "y": test_y}
    head = network("mlp", num_features=train["x"].shape[1], hidden=(), num_classes=2)
    return Task("sst2", head, train, test, SST2_RECIPE)


def features(
    train: list[str], test: list[str], *, num_features: int
) -> tuple[np.ndarray, np.ndarray]:
    """TF-IDF of words and pairs, float32[N, num_features], fitted on the training sentences."""
    from sklearn import decomposition, feature_extraction

    counter = feature_extraction.text.TfidfVectorizer(
        ngram_range=(1, 2), min_df=3, sublinear_tf=True, token_pattern=r"\S+", dtype=np.float32
    )
    counts = counter.fit_transform(train)
    if counts.shape[1] <= num_features:
        raise UserError(
            f"{counts.shape[1]} words and pairs of train.tsv occur three times, and more than "
            f"{num_features} are needed: get the whole file from {SST2}."
        )
    reduce = decomposition.TruncatedSVD(num_features, n_iter=2, random_state=0)
    x, x_test = reduce.fit_transform(counts), reduce.transform(counter.transform(test))
    return _normalised(x), _normalised(x_test)


def _normalised(x):
    sizes = np.sqrt(np.mean(np.square(x), axis=1, keepdims=True))
    return (x / np.where(sizes > 0, sizes, 1)).astype(np.float32)


def sentences(data_dir, part):
    """Sentences and labels, int32[N], of a part; lines are a sentence, a tab and 0 or 1."""
    how = f"Download and unpack {SST2} and pass the folder of train.tsv and dev.tsv as --data_dir"
    how += ", or that of embeddings.npz."
    whole = {"train": "train_full.tsv", "dev": "dev.tsv"}[part]
    path = need_file("sst2", data_dir, f"{part}.tsv", whole, how=how)
    with reading(path, how), open(path, encoding="utf-8") as file:
        rows = [line.rstrip("\n").rsplit("\t", 1) for line in file][1:]  # after the header
        if not rows or any(len(row) != 2 or row[1] not in ("0", "1") for row in rows):
            raise UserError("a line is not a sentence, a tab and 0 or 1")
    return [sentence.strip() for sentence, _ in rows], np.array([int(y) for _, y in rows], np.int32)


def _embeddings(path):
    """Train and test set from an .npz file."""
    how = "Save it with np.savez."
    with reading(path, how), open(path, "rb") as file:
        if zipfile.is_zipfile(file):
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            check_unpacked(zipfile.ZipFile(file), memory // 2)
        file.seek(0)
        saved = np.load(file)  # an array, of another file
        if missing := {"x_train", "y_train", "x_test", "y_test"} - {*getattr(saved, "files", ())}:
            raise UserError(f"it lacks {sorted(missing)}")
        parts = [
            {"x": saved[f"x_{part}"].astype(np.float32), "y": saved[f"y_{part}"].astype(np.int32)}
            for part in ("train", "test")
        ]
        width = parts[0]["x"].shape[-1:]
        for x, y in (part.values() for part in parts):
            if x.ndim != 2 or x.shape[1:] != width or y.shape != x.shape[:1]:
                raise UserError(f"x {x.shape} and y {y.shape} must be [N, d] and [N], d of both")
    return parts
