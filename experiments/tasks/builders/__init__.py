"""Builders for sets that tensorflow-datasets does not have, and reading what they prepared.

A builder is <name>/<name>_dataset_builder.py, in that library's form; its records keep the order
of the raw files. Beside it, checksums.tsv: address, bytes, sha256 and file name of what it reads. A
file of that name in the manual folder is taken before the network, and either one is verified.
"""

import glob
import importlib
import os

from experiments.tasks.sources import read_all, source

NAMES = ("hmda", "m4_weekly", "wikitext")


def register(name: str) -> None:
    """Makes `tensorflow_datasets.builder` know a set of ours, "NAME" or "NAME/CONFIG"."""
    name = name.split("/")[0].split(":")[0]
    if name in NAMES:
        importlib.import_module(f"{__name__}.{name}.{name}_dataset_builder")


def is_prepared(name: str, data_dir: str | None, split: str = "train") -> bool:
    """Whether a split of "NAME" or "NAME/CONFIG" lies in the folder, in any version."""
    records = os.path.join(data_dir or "", *name.split("/"), "*", f"*-{split}.array_record*")
    return data_dir is not None and bool(glob.glob(records))


def examples(name: str, data_dir: str, split: str) -> list[dict]:
    """All examples of a prepared set, in the order of the raw files."""
    return read_all(source(name, data_dir, split))


def how_to_prepare(name: str) -> str:
    """For errors: the command that prepares a set."""
    return (
        f"Or prepare it with `python -m experiments.prepare --name={name} --data_dir=DIR "
        "[--manual_dir=RAW]` and pass --data_dir=DIR."
    )


def fetch(builder, dl_manager, address: str) -> os.PathLike:
    """The local path of a file, from the manual folder or else the network.

    Where its checksum is known it is verified. The library looks into the manual folder for such
    files alone; here the others are looked for there too.

    Args:
      builder: whose checksums.tsv is read; dl_manager: as it gets it; address: of the file.
    """
    manual = manual_file(dl_manager, os.path.basename(address))
    if manual is not None and address not in (builder.url_infos or {}):
        return manual
    return dl_manager.download(address)


def manual_file(dl_manager, *names: str) -> os.PathLike | None:
    """The first of the files that lies in the manual folder, or None."""
    try:
        folder = dl_manager.manual_dir
    except AssertionError:  # how the library says that it is not there, or is empty
        return None
    return next((folder / name for name in names if (folder / name).exists()), None)
