"""Text tasks, from small files, and data beside the checkout."""

import itertools

import jax
import numpy as np
import pytest

from experiments import cd_grab, slowrun
from experiments.data import TASKS, text, wikitext
from experiments.report import records
from tests import commands
from tests.shared_data import need


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for field in wanted:
        np.testing.assert_array_equal(got[field], wanted[field])


@pytest.fixture
def characters(tmp_path):
    (tmp_path / "input.txt").write_text("to be\nor not" * 10, encoding="utf-8")
    return str(tmp_path)


def test_targets_are_the_next_characters_of_a_window(characters):
    task = TASKS["tinyshakespeare"](characters, length=4)
    letters = np.array(sorted(set("to be\nor not")))
    assert "".join(letters[task.train["x"][:3].ravel()]) == "to be\nor not"
    assert "".join(letters[task.train["y"][:3].ravel()]) == "o be\nor nott"
    assert task.train["x"].shape == (26, 4) and task.test["x"].shape == (2, 4)


LINES = {"train": "the cat\n\nthe dog sat\n", "valid": "a cat\n", "test": "the bird sat\n"}


@pytest.fixture
def words(tmp_path):
    for part, content in LINES.items():
        (tmp_path / f"{part}.txt").write_text(content, encoding="utf-8")
    return tmp_path


def test_every_line_ends_with_eos_and_unknown_words_are_unk(words):
    task = TASKS["wikitext2"](str(words), length=2)
    names = ["<eos>", "the", "cat", "dog", "sat", "<unk>"]  # by number of occurrences, then a to z

    def spell(tokens):
        return " ".join(names[k] for k in tokens.ravel())

    assert spell(task.train["x"]) == "the cat <eos> <eos> the dog"
    assert spell(task.train["y"]) == "cat <eos> <eos> the dog sat"
    np.testing.assert_array_equal(task.test["x"], [[1, 5]])
    assert task.train["x"].dtype == task.train["y"].dtype == np.int32
    params = jax.eval_shape(task.model.init, jax.random.key(0))
    assert params["tokens"].shape == (6, 32) and task.metric == "perplexity"


def test_the_most_frequent_words_are_kept():
    results = list(text.words(["b b b c c a a d\n"]))
    assert text.vocabulary(results, 4) == ["b", "a", "<eos>", "<unk>"]
    assert text.vocabulary(results) == ["b", "a", "c", "<eos>", "d", "<unk>"]
    assert text.vocabulary([*results, *["<unk>"] * 3], 3) == ["<unk>", "b", "<eos>"]
    np.testing.assert_array_equal(text.encode("abcde", ["b", "a", "<unk>"]), [1, 0, 2, 2, 2])


def test_the_small_task_trains_on_the_test_text_and_files_of_the_archive_are_read_too(words):
    task = TASKS["wikitext2_small"](str(words), length=1)
    assert task.train["x"].shape == (3, 1) and task.test["x"].shape == (2, 1)
    np.testing.assert_array_equal(task.test["x"], [[4], [4]])  # neither word is in the test text
    plain = TASKS["wikitext2"](str(words), length=2).train
    for part in LINES:
        (words / f"{part}.txt").rename(words / f"wiki.{part}.tokens")
    assert_same(TASKS["wikitext2"](str(words), length=2).train, plain)


def test_saved_tokens_replace_a_text(words):
    np.save(words / "train.npy", np.arange(9))
    np.save(words / "test.npy", np.array([11, 3, 5, 0, 7]))
    task = TASKS["wikitext103"](str(words), "gpt2", length=4)
    np.testing.assert_array_equal(task.train["y"], [[1, 2, 3, 4], [5, 6, 7, 8]])
    params = jax.eval_shape(task.model.init, jax.random.key(0))
    assert params["tokens"].shape == (12, 128) and params["positions"].shape == (4, 128)


def test_documents_are_permuted_and_a_text_is_cut_anew_in_every_epoch():
    length = 4
    tokens, starts = np.arange(41), np.array([0, 3, 4, 17, 30])
    cut = text.Recut(tokens, starts, length)
    documents = [list(range(a, b)) for a, b in zip(starts, [*starts[1:], 41], strict=True)]
    seen = set()
    for epoch in range(5):
        windows = cut.at_epoch(epoch)
        x, y = windows.windows["x"], windows.windows["y"]
        assert len(windows) == len(x) == 10 and windows[3]["x"].tolist() == x[3].tolist()
        stream = [*x.ravel(), y[-1, -1]]  # the whole text, of 10 * 4 + 1 tokens
        assert y.ravel().tolist() == stream[1:]
        order = sorted(range(5), key=lambda i: stream.index(starts[i]))
        assert stream == sum((documents[i] for i in order), []), "each document once, whole"
        seen.add(tuple(order))
        shifted = cut.by("shifted").at_epoch(epoch).windows["x"]
        offset = shifted[0, 0]
        assert offset < length
        np.testing.assert_array_equal(shifted.ravel(), (np.arange(40) + offset) % 41)
    assert len(seen) > 1
    runs = {tuple(cut.of_seed(seed).windows["x"].ravel().tolist()) for seed in range(5)}
    assert len(runs) > 1
    few = cut.first(4)
    assert few.tokens.tolist() == list(range(17)) and few.starts.tolist() == [0, 3, 4]


def test_documents_of_wikitext_begin_with_headings_or_with_the_token_before_a_text(words):
    lines = " = A = \n b b = \n = = C = = \n b \n\n = D = \n b \n" * 3
    (words / "train.txt").write_text(lines, encoding="utf-8")
    task = TASKS["wikitext2"](str(words), "gpt2", length=2)
    spelled = [w for line in lines.split("\n")[:-1] for w in [*line.split(), text.END]]
    begins = [
        i for i, w in enumerate(spelled) if w == "=" and (not i or spelled[i - 1] == text.END)
    ]
    assert task.recut.starts.tolist() == begins and len(begins) == 9
    np.save(words / "train.npy", [7, 50256, 3, 50256, 5, 6, 1])
    np.save(words / "test.npy", np.arange(9))
    assert TASKS["wikitext2"](str(words), length=2).recut.starts.tolist() == [0, 1, 3]


def test_slowrun_trains_on_windows_that_are_cut_anew(words, tmp_path, monkeypatch):
    drawn = np.random.default_rng(0).choice(list("abcde="), 400)
    for part in ("test", "valid"):
        whole = " ".join(drawn).replace("=", "\n =")
        (words / f"{part}.txt").write_text(whole, encoding="utf-8")
    epochs, cut = {}, text.CUTS["documents"]

    def noted(of, draw):
        return epochs.setdefault((of.seed, of.epoch), cut(of, draw))

    monkeypatch.setitem(text.CUTS, "documents", noted)
    arguments = [
        f"--data_dir={words}",
        "--num_train=10",
        "--workers=2",
        "--length=5",
        "--epochs=5",
        "--arms=rr+documents",
        "--learning_rates=0.02",
        "--seeds=2",
        "--optimizer=momentum",
    ]
    commands.study_run(slowrun, arguments, tmp_path)
    assert {*itertools.product(range(2), range(5))} <= {*epochs}
    for seed in range(2):
        assert len({tuple(text) for (of, _), text in epochs.items() if of == seed}) > 1
    recorded = records.read(str(tmp_path / "metrics.jsonl"))
    assert [r["step"] for r in recorded] == 2 * [5, 10, 15, 20, 25]
    assert {r["average"] for r in recorded} == {"swa"}
    assert all("valid/loss/averaged" in r for r in recorded), "what chooses a rate is not reported"
    table = (tmp_path / "table.md").read_text()
    assert "D-RR, documents permuted" in table and "| validation loss, averaged |" in table
    with pytest.raises(ValueError, match="digits has none in memory with known documents"):
        commands.study_run(cd_grab, ["--arms=rr+documents", "--num_train=96"], tmp_path / "digits")


REFUSED = {  # {message: (task, keywords of its loader)}
    r"\['gpt2', 'gpt2_small', 'lstm', 'slowrun'\]": ("wikitext2", {"model": "vit"}),
    "length is 0": ("wikitext2", {"length": 0}),
    "has 8 tokens": ("wikitext2", {"length": 8}),
    r"models \['gpt2'\]": ("tinyshakespeare", {"model": "vit"}),
    "has 12 tokens": ("tinyshakespeare", {"length": 12}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_settings_are_refused(message, words, characters):
    task, settings = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        TASKS[task](str(words), **settings)


def test_the_error_for_a_missing_text_names_its_source(words):
    (words / "train.txt").unlink()
    for folder in (None, str(words)):
        for task, expected in {
            "wikitext2": f"{wikitext.SOURCES['wikitext2']}.* Or pass --task=wikitext2_small",
            "tinyshakespeare": text.SHAKESPEARE,
            "sst2": text.SST2,
        }.items():
            with pytest.raises(ValueError, match=expected):
                TASKS[task](folder)


def test_wikitext2_has_the_published_number_of_tokens():
    folder = need("wikitext2")
    numbers = [
        len(list(text.words(wikitext.lines(folder, "wikitext2", part))))
        for part in ("valid", "test")
    ]
    assert numbers == [217646, 245569]


def test_features_of_sentences_are_normalised_and_independent_of_the_test_set(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(text, "TEXT_FEATURES", 5)
    generator = np.random.default_rng(0)
    sentences = [" ".join(generator.choice(list("abcdefgh"), 6)) for _ in range(40)]
    rows = "".join(f"{s} \t{k % 2}\n" for k, s in enumerate(sentences))
    (tmp_path / "train_full.tsv").write_text("sentence\tlabel\n" + rows, encoding="utf-8")
    (tmp_path / "dev.tsv").write_text(f"sentence\tlabel\n{sentences[3]}\t1\nzz\t0\n")
    task = TASKS["sst2"](str(tmp_path))
    assert task.train["x"].shape == (40, 5) and task.train["x"].dtype == np.float32
    np.testing.assert_allclose(np.mean(task.train["x"] ** 2, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(task.test["x"][0], task.train["x"][3], rtol=1e-4)
    np.testing.assert_array_equal(task.test["x"][1], 0)
    np.testing.assert_array_equal(task.train["y"], np.arange(40) % 2)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="more than 256 are needed"):
        TASKS["sst2"](str(tmp_path))


def test_embeddings_in_the_folder_are_used(tmp_path):
    arrays = {"x_train": np.ones((3, 7)), "y_train": [0, 1, 1], "x_test": np.zeros((2, 7))}
    np.savez(tmp_path / "embeddings.npz", **arrays)
    with pytest.raises(ValueError, match="y_test"):
        TASKS["sst2"](str(tmp_path))
    np.savez(tmp_path / "embeddings.npz", **arrays, y_test=[1, 0])
    task = TASKS["sst2"](str(tmp_path))
    assert_same(task.train, {"x": np.ones((3, 7)), "y": np.array([0, 1, 1])})
    assert task.train["x"].dtype == np.float32 and task.test["y"].dtype == np.int32
    np.savez(tmp_path / "embeddings.npz", **arrays, y_test=[1, 0, 0])
    with pytest.raises(ValueError, match="must be"):
        TASKS["sst2"](str(tmp_path))
