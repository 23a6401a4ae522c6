"""SST-2: is a sentence out of a film review positive? A linear head on frozen sentence features.

The first version of Cooper et al. 2023 trains heads on frozen BERT embeddings: 16 workers, lr 1e-4,
momentum 0.9; by the defaults of its program, eight sentences per worker and step and 30 epochs.
Give such embeddings in a file, or take the features made here out of the text alone: TF-IDF of
words and pairs of words, reduced to 256 dimensions. THEY STAND IN FOR BERT: training runs the same
way, on a problem of the same kind, but accuracies compare with nothing published.
"""

import os

import numpy as np
from sklearn import decomposition, feature_extraction

from experiments.tasks.base import Recipe, Task, abstract_set, need_file
from syncopate import models

SOURCE = "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip"
NUM_TRAIN, NUM_TEST = 67_349, 872
BERT_FEATURES = 768
RECIPE = Recipe(
    workers=16,
    units_per_step=8,
    unit_size=1,
    epochs=30,
    learning_rates=(1e-4,),
    momentum=0.9,
    bound_every=0,
)


def load(
    data_dir: str | None = None,
    model: str = "head",
    *,
    num_features: int = 256,
    abstract: bool = False,
) -> Task:
    """Features of 67,349 sentences and phrases to train on and of 872 sentences to test on.

    Where embeddings.npz lies in the folder, its arrays x_train and x_test, float[N, d], and
    y_train and y_test, int[N], are taken as they are: the output of a frozen encoder.

    Otherwise TF-IDF, fitted on the training sentences: log-scaled counts of words and pairs of
    neighbouring words that occur at least three times, times the logarithm of how rare they are,
    projected on `num_features` singular vectors (seeded) and normalised: every sentence's features
    have mean square 1, or are zero where none of its words is known.

    Args:
      data_dir: folder of train_full.tsv (or train.tsv) and dev.tsv, or of embeddings.npz.
      model: "head" only, softmax regression.
      num_features: d >= 1, of the features made here.
      abstract: shapes only, of all sentences in BERT's 768 dimensions; reads nothing.

    Raises:
      ValueError: for another model, and where a file is not there or is damaged.
    """
    if model != "head":
        raise ValueError(f"model is {model!r}: sst2 has the model 'head' only.")
    if abstract:
        train, test = (
            abstract_set(number, x=((BERT_FEATURES,), np.float32), y=((), np.int32))
            for number in (NUM_TRAIN, NUM_TEST)
        )
    elif os.path.exists(saved := os.path.join(data_dir or "", "embeddings.npz")):
        train, test = _embeddings(saved)
    else:
        (texts, y), (test_texts, test_y) = (_read(data_dir, part) for part in ("train", "dev"))
        x, test_x = features(texts, test_texts, num_features=num_features)
        train, test = {"x": x, "y": y}, {"x": test_x, "y": test_y}
    head = models.text_head(num_features=train["x"].shape[1], num_classes=2)
    return Task("sst2", head, train, test, RECIPE)


def features(
    train: list[str], test: list[str], *, num_features: int
) -> tuple[np.ndarray, np.ndarray]:
    """TF-IDF of words and pairs in `num_features` dimensions, fitted on the training sentences.

    Returns:
      float32[len(train), num_features] and float32[len(test), num_features].
    """
    counter = feature_extraction.text.TfidfVectorizer(
        ngram_range=(1, 2), min_df=3, sublinear_tf=True, token_pattern=r"\S+", dtype=np.float32
    )
    counts = counter.fit_transform(train)
    if not 1 <= num_features < counts.shape[1]:
        raise ValueError(
            f"num_features is {num_features}: the sentences have {counts.shape[1]} words and pairs "
            "that occur three times; take fewer, and at least 1."
        )
    reduce = decomposition.TruncatedSVD(num_features, n_iter=2, random_state=0)
    x, x_test = reduce.fit_transform(counts), reduce.transform(counter.transform(test))
    return _normalised(x), _normalised(x_test)


def _normalised(x):
    sizes = np.sqrt(np.mean(np.square(x), axis=1, keepdims=True))
    return (x / np.where(sizes > 0, sizes, 1)).astype(np.float32)


def _read(data_dir, part):
    """Sentences and labels int32[N] of a part: lines of a sentence, a tab and 0 or 1."""
    name = {"train": "train_full.tsv", "dev": "dev.tsv"}[part]
    how = f"Download and unpack {SOURCE} and pass the folder of train.tsv and dev.tsv as --data_dir"
    how += ", or of embeddings.npz."
    if data_dir is None:
        raise ValueError(f"sst2 reads {name} from --data_dir, which is not set. {how}")
    given = os.path.join(data_dir, f"{part}.tsv")
    path = given if os.path.exists(given) else need_file(os.path.join(data_dir, name), how)
    with open(path, encoding="utf-8") as file:
        rows = [line.rstrip("\n").rsplit("\t", 1) for line in file][1:]  # the first names columns
    if not rows or any(len(row) != 2 or row[1] not in ("0", "1") for row in rows):
        raise ValueError(f"{path!r} has a line without a sentence, a tab and 0 or 1. {how}")
    return [sentence.strip() for sentence, _ in rows], np.array([int(y) for _, y in rows], np.int32)


def _embeddings(path):
    """Train and test set out of an .npz file."""
    with np.load(path) as saved:
        missing = {"x_train", "y_train", "x_test", "y_test"} - set(saved.files)
        if missing:
            raise ValueError(f"{path!r} lacks {sorted(missing)}: save them with np.savez.")
        parts = [
            {"x": saved[f"x_{part}"].astype(np.float32), "y": saved[f"y_{part}"].astype(np.int32)}
            for part in ("train", "test")
        ]
    for part in parts:
        if part["x"].ndim != 2 or part["y"].shape != part["x"].shape[:1]:
            raise ValueError(
                f"{path!r} has x of shape {part['x'].shape} and y of {part['y'].shape}: they must "
                "be [N, d] and [N]."
            )
    if parts[0]["x"].shape[1] != parts[1]["x"].shape[1]:
        raise ValueError(f"{path!r} has training and test embeddings of different widths.")
    return parts
