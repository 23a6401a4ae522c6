"""Tasks on texts, series and tables, from small files and from data beside the checkout."""

import csv
import io
import pathlib
import types
import zipfile

import jax
import numpy as np
import pytest

from experiments import prepare
from experiments.tasks import TASKS, builders, hmda, m4_weekly, sst2, text, wikitext
from tests.test_data import need

MODELS = {
    "digits": ("softmax",),
    "hmda": ("logistic",),
    "m4_weekly": ("mlp",),
    "mnist": ("softmax", "lenet"),
    "sst2": ("head",),
    "tinyshakespeare": ("gpt2",),
    "wikitext103": ("lstm", "gpt2"),
    "wikitext2": ("lstm", "gpt2"),
    "wikitext2_small": ("lstm", "gpt2"),
}


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), tree)


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for field in wanted:
        np.testing.assert_array_equal(got[field], wanted[field])


# Shapes without data.


@pytest.mark.parametrize("name,model", [(name, model) for name in MODELS for model in MODELS[name]])
def test_an_abstract_task_has_the_shapes_that_its_model_takes(name, model):
    task = TASKS[name](model=model, abstract=True)
    assert task.name == name and task.optimum is None
    for part in (task.train, task.test):
        few = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype), part
        )
        params, key = jax.eval_shape(task.model.init, jax.random.key(0)), jax.random.key(0)
        if name != "m4_weekly" or part is task.train:  # its test set is rolled out
            assert jax.eval_shape(task.model.loss, params, few, key).shape == (2,)


def test_abstract_tasks_are_of_the_published_size():
    sizes = {name: TASKS[name](abstract=True).train["x"].shape for name in MODELS}
    assert sizes["hmda"] == (195285, 20) and sizes["sst2"] == (67349, 768)
    assert sizes["wikitext2"] == ((2088628 - 1) // 35, 35)
    params = {
        name: jax.eval_shape(TASKS[name](model="gpt2", abstract=True).model.init, jax.random.key(0))
        for name in ("wikitext2", "wikitext103", "wikitext2_small")
    }
    assert params["wikitext2"]["tokens"].shape == (33278, 128)
    assert params["wikitext103"]["tokens"].shape == (50257, 128)
    assert params["wikitext2_small"]["tokens"].shape == (2048, 64)


@pytest.mark.parametrize(
    "name,folder,model",
    [
        ("digits", "", "softmax"),
        ("m4_weekly", "m4", "mlp"),
        ("tinyshakespeare", "tinyshakespeare", "gpt2"),
        ("wikitext2_small", "wikitext2", "lstm"),
        ("wikitext2_small", "wikitext2", "gpt2"),
    ],
)
def test_abstract_tasks_are_as_large_as_the_real_ones(name, folder, model):
    real = TASKS[name](need(folder), model)
    abstract = TASKS[name](model=model, abstract=True)
    assert shapes(abstract.train) == shapes(real.train)
    assert shapes(abstract.test) == shapes(real.test)
    inits = [jax.eval_shape(task.model.init, jax.random.key(0)) for task in (real, abstract)]
    assert shapes(inits[0]) == shapes(inits[1])


# M4 Weekly.


@pytest.fixture
def series(tmp_path):
    """Two series of 28 and 30 weeks: the shorter one's row is filled up with empty fields."""
    past = [np.arange(1, 29) * 0.5, np.arange(30) - 7.0]
    future = [np.arange(13) + 15.0, np.arange(13) * -1.0]
    for part, rows, quote in (("train", past, ""), ("test", future, '"')):
        lines = [",".join(f'"V{k}"' for k in range(1, 32))]
        for k, values in enumerate(rows):
            fields = [f"W{k + 1}", *values, *[""] * (30 - len(values))]
            lines.append(",".join(f"{quote}{field}{quote}" for field in fields))
        (tmp_path / f"Weekly-{part}.csv").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return str(tmp_path), past, future


def test_windows_of_series_are_all_of_them_divided_by_their_inputs_mean_size(series):
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


def test_a_series_at_zero_is_not_divided():
    zeros = m4_weekly.training_windows([np.zeros(26)])
    np.testing.assert_array_equal(zeros["x"], np.zeros((1, 20)))


@pytest.mark.parametrize(
    "old,new,word",
    [("W2", "W3", "not the same"), ("17.0", "", "series W1"), (',"25.0"', "", "series 1 has 12")],
)
def test_damaged_series_are_refused(series, old, new, word):
    path = pathlib.Path(series[0]) / "Weekly-test.csv"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=word):
        TASKS["m4_weekly"](series[0])


def test_the_weekly_series_of_m4():
    past, future = m4_weekly.read(need("m4"))
    assert (len(past), min(map(len, past)), max(map(len, past))) == (359, 80, 2597)
    assert {len(values) for values in future} == {13}
    np.testing.assert_array_equal(future[358][[0, -1]], [4458, 3965])


# Words.

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
    found = list(text.words(["b b b c c a a d\n"]))
    assert text.vocabulary(found, 4) == ["b", "a", "<eos>", "<unk>"]
    assert text.vocabulary(found) == ["b", "a", "c", "<eos>", "d", "<unk>"]
    assert text.vocabulary([*found, *["<unk>"] * 3], 3) == ["<unk>", "b", "<eos>"]
    np.testing.assert_array_equal(text.encode("abcde", ["b", "a", "<unk>"]), [1, 0, 2, 2, 2])
    with pytest.raises(ValueError, match="max_words is 2"):
        text.vocabulary(found, 2)


def test_the_small_task_trains_on_the_test_text(words):
    task = TASKS["wikitext2_small"](str(words), length=1)
    assert task.train["x"].shape == (3, 1) and task.test["x"].shape == (2, 1)
    np.testing.assert_array_equal(task.test["x"], [[4], [4]])  # neither word is in the test text


def test_the_files_of_the_archive_are_read_too(words):
    plain = TASKS["wikitext2"](str(words), length=2).train
    for part in LINES:
        (words / f"{part}.txt").rename(words / f"wiki.{part}.tokens")
    assert_same(TASKS["wikitext2"](str(words), length=2).train, plain)


def test_saved_tokens_are_taken_instead_of_a_text(words):
    np.save(words / "train.npy", np.arange(9))
    np.save(words / "test.npy", np.array([11, 3, 5, 0, 7]))
    task = TASKS["wikitext103"](str(words), "gpt2", length=4)
    np.testing.assert_array_equal(task.train["y"], [[1, 2, 3, 4], [5, 6, 7, 8]])
    params = jax.eval_shape(task.model.init, jax.random.key(0))
    assert params["tokens"].shape == (12, 128) and params["positions"].shape == (4, 128)
    with pytest.raises(ValueError, match="max_words is 5"):
        TASKS["wikitext103"](str(words), max_words=5)


@pytest.mark.parametrize(
    "settings,word",
    [
        ({"model": "vit"}, r"\['gpt2', 'gpt2_small', 'lstm'\]"),
        ({"corpus": "enwik8"}, "wikitext103"),
        ({"length": 0}, "length is 0"),
        ({"length": 8}, "has 8 tokens"),
        ({"max_words": 1}, "max_words is 1"),
    ],
)
def test_wikitext_says_what_is_wrong(settings, word, words):
    with pytest.raises(ValueError, match=word):
        wikitext.load(str(words), **settings)


def test_a_missing_training_text_says_where_it_is_and_what_else_there_is(words):
    (words / "train.txt").unlink()
    for folder in (None, str(words)):
        for word in (wikitext.SOURCES["wikitext2"], "--task=wikitext2_small", "--manual_dir"):
            with pytest.raises(ValueError, match=word):
                TASKS["wikitext2"](folder)


def test_wikitext2_has_the_published_number_of_tokens():
    folder = need("wikitext2")
    numbers = [
        len(list(text.words(wikitext.lines(folder, "wikitext2", part))))
        for part in ("valid", "test")
    ]
    assert numbers == [217646, 245569]


def test_articles_begin_with_their_title_and_lose_no_line():
    lines = [" \n", " = A B = \n", " x = 1 \n", " = = C = = \n", " = = \n", " = D = \n", "y"]
    found = list(wikitext.articles(lines))
    assert found == ["".join(lines[:5]), "".join(lines[5:])]


# SST-2.


def test_features_of_sentences_are_normalised_and_do_not_look_at_the_test_set(tmp_path):
    generator = np.random.default_rng(0)
    sentences = [" ".join(generator.choice(list("abcdefgh"), 6)) for _ in range(40)]
    rows = "".join(f"{s} \t{k % 2}\n" for k, s in enumerate(sentences))
    (tmp_path / "train_full.tsv").write_text("sentence\tlabel\n" + rows, encoding="utf-8")
    (tmp_path / "dev.tsv").write_text(f"sentence\tlabel\n{sentences[3]}\t1\nzz\t0\n")
    task = TASKS["sst2"](str(tmp_path), num_features=5)
    assert task.train["x"].shape == (40, 5) and task.train["x"].dtype == np.float32
    np.testing.assert_allclose(np.mean(task.train["x"] ** 2, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(task.test["x"][0], task.train["x"][3], rtol=1e-4)
    np.testing.assert_array_equal(task.test["x"][1], 0)
    np.testing.assert_array_equal(task.train["y"], np.arange(40) % 2)
    with pytest.raises(ValueError, match="num_features is 1000"):
        TASKS["sst2"](str(tmp_path), num_features=1000)


def test_embeddings_are_taken_where_they_lie(tmp_path):
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


def test_sst2_says_what_is_wrong(tmp_path):
    for folder in (None, str(tmp_path)):
        with pytest.raises(ValueError, match=sst2.SOURCE):
            TASKS["sst2"](folder)
    (tmp_path / "train.tsv").write_text("sentence\tlabel\ngood\n")
    with pytest.raises(ValueError, match="a tab and 0 or 1"):
        TASKS["sst2"](str(tmp_path))


@pytest.mark.slow
def test_features_of_sst2_tell_good_reviews_from_bad_ones():
    task = TASKS["sst2"](need("sst2"))
    assert task.train["x"].shape == (67349, 256) and task.test["x"].shape == (872, 256)
    centres = [task.train["x"][task.train["y"] == y].mean(axis=0) for y in (0, 1)]
    axis, middle = centres[1] - centres[0], (centres[1] + centres[0]) / 2
    right = ((task.test["x"] - middle[None]) @ axis > 0) == (task.test["y"] == 1)
    assert right.mean() > 0.65


# Prepared sets.

COLUMNS = 23


@pytest.fixture
def applications(tmp_path):
    """Ten applications of Wyoming, whose files have no checksum: one column is letters."""
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


def test_applications_are_standardised_and_missing_ones_are_at_the_mean(applications):
    columns, actions = hmda.read(applications, "WY")
    assert columns.shape == (10, COLUMNS) and np.argwhere(np.isnan(columns)).tolist() == [[2, 4]]
    task = hmda.load(applications, state="WY")
    assert task.train["x"].shape == (8, COLUMNS + 1) and task.test["x"].shape == (2, COLUMNS + 1)
    np.testing.assert_allclose(task.train["x"][:, :COLUMNS].mean(axis=0), 0, atol=1e-6)
    assert sorted([*task.train["y"], *task.test["y"]]) == [0] * 3 + [1] * 7
    assert (actions == 3).sum() == 3


def test_prepared_applications_equal_the_files(applications, tmp_path):
    pytest.importorskip("tensorflow_datasets")
    prepare.prepare("hmda/WY", str(tmp_path / "set"), applications)
    for got, wanted in zip(
        hmda.read(str(tmp_path / "set"), "WY"), hmda.read(applications, "WY"), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
        assert got.dtype == wanted.dtype
    assert not builders.is_prepared("hmda/NJ", str(tmp_path / "set"))


def test_prepared_texts_equal_the_files(words, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorflow_datasets")
    content = " \n = Eins = \n \n ein\u2028 <unk> Hund \n\n = Zwei = \n ja"
    (words / "train.txt").write_text(content, encoding="utf-8")
    chosen = {"name": "wikitext/wikitext2", "data_dir": str(tmp_path / "set")}
    monkeypatch.setattr(prepare, "FLAGS", types.SimpleNamespace(**chosen, manual_dir=str(words)))
    prepare.main(None)
    assert "wikitext/wikitext2/1.0.0: 2 examples in the split 'train'" in capsys.readouterr().out
    got, wanted = (
        TASKS["wikitext2"](str(folder), length=2) for folder in (tmp_path / "set", words)
    )
    assert_same(got.train, wanted.train)
    assert_same(got.test, wanted.test)
    got = "".join(wikitext.lines(str(tmp_path / "set"), "wikitext2_small", "valid"))
    assert got == LINES["valid"]


def test_without_files_the_archive_is_downloaded_and_unpacked(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    builders.register("wikitext")
    folder = tmp_path / "unpacked" / "wikitext-103"
    folder.mkdir(parents=True)
    for part, content in LINES.items():
        (folder / f"wiki.{part}.tokens").write_text(content, encoding="utf-8")

    class Downloads:
        @property
        def manual_dir(self):
            raise AssertionError("Manual directory not enabled.")

        def download_and_extract(self, address):
            self.address = address
            return folder.parent

    downloads = Downloads()
    builder = tfds.builder("wikitext/wikitext103", data_dir=str(tmp_path))
    splits = builder._split_generators(downloads)
    assert downloads.address == wikitext.SOURCES["wikitext103"]
    assert {name: next(rows)[1]["text"] for name, rows in splits.items()} == {
        "train": LINES["train"],
        "validation": LINES["valid"],
        "test": LINES["test"],
    }


def test_prepared_series_equal_the_files(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    raw = need("m4")
    prepare.prepare("m4_weekly", str(tmp_path), raw)
    for got, wanted in zip(m4_weekly.read(str(tmp_path)), m4_weekly.read(raw), strict=True):
        assert len(got) == len(wanted) == 359
        for k in range(359):
            np.testing.assert_array_equal(got[k], wanted[k])


def test_a_damaged_file_is_not_prepared(series, tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    error = tfds.core.download.download_manager.NonMatchingChecksumError
    with pytest.raises(error, match="Weekly-t"):
        prepare.prepare("m4_weekly", str(tmp_path / "set"), series[0])


@pytest.mark.parametrize("name", builders.NAMES)
def test_checksums_are_of_the_addresses_that_the_builder_reads(name):
    tfds = pytest.importorskip("tensorflow_datasets")
    builders.register(name)
    infos = tfds.builder_cls(name).url_infos
    module = __import__(f"{builders.__name__}.{name}.{name}_dataset_builder", fromlist=["Builder"])
    addresses = {
        "hmda": lambda: {
            f"{module.SOURCE}/NJ/2017-NJ-{part}.zip" for part in ("features", "target")
        },
        "m4_weekly": lambda: set(module.FILES.values()),
        "wikitext": lambda: set(wikitext.SOURCES.values()),
    }
    assert set(infos) == addresses[name]()
    for address, info in infos.items():
        assert info.filename == address.rsplit("/", 1)[1] and len(info.checksum) == 64


@pytest.mark.slow
def test_prepared_applications_of_new_jersey_equal_the_files(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    raw = need("hmda")
    prepare.prepare("hmda/NJ", str(tmp_path), raw)
    for got, wanted in zip(hmda.read(str(tmp_path), "NJ"), hmda.read(raw, "NJ"), strict=True):
        np.testing.assert_array_equal(got, wanted)
