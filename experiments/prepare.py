r"""Prepares a data set for random access with tensorflow-datasets: downloads, verifies, writes.

    python -m experiments.prepare --name=m4_weekly --data_dir=DIR
    python -m experiments.prepare --name=hmda/NY --data_dir=DIR --manual_dir=RAW
    python -m experiments.prepare --name=cifar100 --data_dir=DIR
    python -m experiments.prepare --name=imagenet2012 --data_dir=DIR --manual_dir=TARS

A name is one of ours (hmda/STATE, m4_weekly, wikitext/wikitext2, wikitext/wikitext103) or one of
tensorflow-datasets' own. A file in --manual_dir under its published name replaces the download.
imagenet2012 needs this: its two archives require a registration at image-net.org. Records are
written as ArrayRecord, which the tasks read with --data_dir=DIR.
"""

import sys

from absl import flags

from experiments.cluster import entry
from experiments.tasks import builders


def prepare(name: str, data_dir: str, manual_dir: str | None = None):
    """Downloads and prepares a set unless it exists, and returns its `tensorflow_datasets` builder.

    Args:
      name: "NAME" or "NAME/CONFIG".
      data_dir: folder for the set, and for its downloads in DIR/downloads.
      manual_dir: folder of files that were downloaded by hand.

    Raises:
      ValueError: for a set that does not exist, or without files that need to be in `manual_dir`.
    """
    import tensorflow_datasets as tfds

    if not sys.stderr.isatty():  # its bars would fill a log
        tfds.disable_progress_bar()
        print(f"Preparing {name}: downloads, then writes to {data_dir}", flush=True)
    builders.register(name)
    try:
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
    except (ValueError, AssertionError) as error:
        told = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--name is {name!r}: pass one of {', '.join(builders.NAMES)}, or of "
            f"tensorflow-datasets' own sets, as NAME or NAME/CONFIG ({told})."
        ) from error
    config = tfds.download.DownloadConfig(manual_dir=manual_dir, try_download_gcs=False)
    try:
        builder.download_and_prepare(download_config=config, file_format="array_record")
    except AssertionError as error:  # files that only people can download are missing
        told = " ".join(str(error).split())
        raise ValueError(f"--manual_dir is {manual_dir}: {told}") from error
    return builder


def define_flags(values: flags.FlagValues) -> None:
    own = {"flag_values": values}
    flags.DEFINE_string("name", None, "the data set, NAME or NAME/CONFIG", required=True, **own)
    flags.DEFINE_string("data_dir", None, "folder to write it to", required=True, **own)
    flags.DEFINE_string("manual_dir", None, "folder of files that were downloaded by hand", **own)


def main(values: flags.FlagValues) -> None:
    builder = prepare(values.name, values.data_dir, values.manual_dir)
    for split, info in builder.info.splits.items():
        print(f"{builder.info.full_name}: {info.num_examples} examples in the split {split!r}")
    print(f"Pass --data_dir={values.data_dir}")


if __name__ == "__main__":
    entry.main(define_flags, main)
