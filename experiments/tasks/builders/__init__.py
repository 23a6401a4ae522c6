"""Builders for sets that tensorflow-datasets lacks.

A builder is <name>/<name>_dataset_builder.py, in that library's form; its records keep the order of
the raw files. checksums.tsv beside it has the address, bytes, sha256 and name of each raw file.
A file of that name in the manual folder replaces the download. Both are verified.
"""

import importlib
import os

NAMES = ("hmda", "m4_weekly", "wikitext")


def register(name: str) -> None:
    """Registers a set of ours, "NAME" or "NAME/CONFIG", with `tensorflow_datasets.builder`."""
    name = name.split("/")[0].split(":")[0]
    if name in NAMES:
        importlib.import_module(f"{__name__}.{name}.{name}_dataset_builder")


def how_to_prepare(name: str) -> str:
    """A sentence for errors, with the command that prepares a set."""
    return (
        f"Or prepare it with `python -m experiments.prepare --name={name} --data_dir=DIR "
        "[--manual_dir=RAW]` and pass --data_dir=DIR."
    )


def fetch(builder, dl_manager, address: str) -> os.PathLike:
    """The local path of a file, from the manual folder or else the network.

    It is verified if its checksum is known. tensorflow-datasets looks only for such files in the
    manual folder; this function also looks for the others.

    Args:
      builder: the builder, whose checksums.tsv is read; dl_manager: its download manager.
      address: of the file.
    """
    manual = manual_file(dl_manager, os.path.basename(address))
    if manual is not None and address not in (builder.url_infos or {}):
        return manual
    return dl_manager.download(address)


def manual_file(dl_manager, *names: str) -> os.PathLike | None:
    """The first of the files that is in the manual folder, or None."""
    try:
        folder = dl_manager.manual_dir
    except AssertionError:  # tensorflow-datasets raises it for a missing or empty folder
        return None
    return next((folder / name for name in names if (folder / name).exists()), None)
