"""Files that are damaged, or others: each is refused by its path and what to do."""

import io
import zipfile

import numpy as np
import pytest

from experiments.data import TASKS


def table(part, text):
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr(f"2017-NJ-{part}.csv", text)
    return {f"2017-NJ-{part}.zip": zipped.getvalue()}


def claiming(name, size):
    """An archive whose header says that its file unpacks to so many bytes."""
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("x.csv", "t\n1\n")
        archive.getinfo("x.csv").file_size = size
    return {name: zipped.getvalue()}


def ids(array):
    saved = io.BytesIO()
    np.save(saved, array)
    return {"train.npy": saved.getvalue(), "test.npy": saved.getvalue()}


def weekly(train):
    return {"Weekly-train.csv": train, "Weekly-test.csv": b"V1,V2\n"}


X, Y = table("features", "a,b\n1,2\n3,4\n5,7\n"), table("target", "t\n1\n3\n1\n")
NUMBERS = b",".join(b"%d" % n for n in range(40))
WRONG = {  # {what: (task, files, message)}
    "no zip": ("hmda", {**X, **Y, "2017-NJ-features.zip": b"<html>"}, "Get it again from github"),
    "half": ("hmda", {**X, "2017-NJ-target.zip": Y["2017-NJ-target.zip"][:60]}, "target.zip'.*Get"),
    "no rows": ("hmda", table("features", "a,b\n") | Y, "features.zip'.*no rows.*Get it again"),
    "ragged": ("hmda", table("features", "a,b\n1,2\n3\n") | Y, "rows of different lengths.*Get it"),
    "words": ("hmda", table("features", "a\nx\ny\nz\n") | Y, "features.zip'.*Get it again"),
    "infinite": ("hmda", table("features", "a\ninf\n1\n2\n") | Y, "a number is infinite.*Get it"),
    "a bomb": ("hmda", X | claiming("2017-NJ-target.zip", 2**29), "target.zip'.*to 537 MB"),
    "a bomb, npz": ("sst2", claiming("embeddings.npz", 2**50), "npz'.*unpacks to 1,125,899,907 MB"),
    "no action": ("hmda", X | table("target", "t\nyes\n1\n1\n"), "target.zip'.*'yes'.*Get it"),
    "fewer": ("hmda", X | table("target", "t\n1\n3\n"), "2 rows for 3 of features.*Get it again"),
    "empty": ("m4_weekly", weekly(b""), "train.csv'.*no series.*Get it again from https"),
    "nan": ("m4_weekly", weekly(b'h\n"W1",nan,' + NUMBERS + b"\n"), "train.csv'.*not finite.*Get"),
    "no text": ("tinyshakespeare", {"input.txt": b"\xff\xfe"}, "input.txt'.*utf-8.*Download https"),
    "no words": ("wikitext2", {"train.txt": b"\xff\xfe"}, "train.txt'.*utf-8.*Download and unpack"),
    "junk": ("wikitext2", ids(0) | {"train.npy": b"junk"}, "train.npy'.*Save int.T., ids"),
    "no ids": ("wikitext2", ids(np.zeros(99)), r"train.npy'.*float64\[99\].*np.save"),
    "negative": ("wikitext2", ids(np.arange(99) - 1), "train.npy'.*out of range.*np.save"),
    "none": ("wikitext2", ids(np.zeros(0, int)), "train.npy'.*np.save"),
    "bytes": ("sst2", {"embeddings.npz": b"junk"}, "embeddings.npz'.*Save it with np.savez"),
    "no label": ("sst2", {"train.tsv": b"sentence\tlabel\ngood\n"}, "train.tsv'.*a tab and 0 or 1"),
    "an array": ("sst2", {"embeddings.npz": ids(np.zeros(9))["train.npy"]}, "npz'.*Save it with"),
    "unprepared": ("mnist", {"mnist/dataset_info.json": b""}, "mnist' holds no split .train. .*Pr"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_damaged_file_is_refused_by_its_path(what, tmp_path):
    task, files, message = WRONG[what]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/.*{message}"):
        TASKS[task](str(tmp_path))
