r"""Prepares a set for random access, as tensorflow-datasets does: downloads, verifies, writes.

    python -m experiments.prepare --name=m4_weekly --data_dir=DIR
    python -m experiments.prepare --name=hmda/NY --data_dir=DIR --manual_dir=RAW
    python -m experiments.prepare --name=cifar100 --data_dir=DIR
    python -m experiments.prepare --name=imagenet2012 --data_dir=DIR --manual_dir=TARS

A name is one of ours (hmda/STATE, m4_weekly, wikitext/wikitext2, wikitext/wikitext103) or of the
library's own. What lies in --manual_dir under its published name is taken instead of a download;
imagenet2012 has no other way: its two archives need a registration at image-net.org. Records are
written as ArrayRecord, which the tasks read with --data_dir=DIR.
"""

from absl import app, flags

from experiments.tasks import builders

FLAGS = flags.FLAGS


def prepare(name: str, data_dir: str, manual_dir: str | None = None):
    """Downloads and prepares a set unless it is there; its `tensorflow_datasets` builder.

    Args:
      name: "NAME" or "NAME/CONFIG".
      data_dir: where the set goes, and downloads that it needs, in DIR/downloads.
      manual_dir: folder of files that need no download.
    """
    import tensorflow_datasets as tfds

    builders.register(name)
    builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
    config = tfds.download.DownloadConfig(manual_dir=manual_dir, try_download_gcs=False)
    builder.download_and_prepare(download_config=config, file_format="array_record")
    return builder


def main(_):
    builder = prepare(FLAGS.name, FLAGS.data_dir, FLAGS.manual_dir)
    for split, info in builder.info.splits.items():
        print(f"{builder.info.full_name}: {info.num_examples} examples in the split {split!r}")
    print(f"Pass --data_dir={FLAGS.data_dir}")


if __name__ == "__main__":
    flags.DEFINE_string("name", None, "the set, NAME or NAME/CONFIG", required=True)
    flags.DEFINE_string("data_dir", None, "where it goes", required=True)
    flags.DEFINE_string("manual_dir", None, "folder of files that were downloaded by hand")
    app.run(main)
