"""wikitext: WikiText-2 and WikiText-103, one configuration each."""

import os

import tensorflow_datasets as tfds

from experiments.tasks import builders, wikitext

SPLITS = {"train": "train", "validation": "valid", "test": "test"}


class Builder(tfds.core.GeneratorBasedBuilder):
    """One example is one article; the joined articles of a split are its file.

    The checksums of the two archives are those that huggingface/datasets recorded
    (datasets/wikitext/dataset_infos.json) for the publisher's address, which no longer exists. The
    address here is the first author's copy.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in wikitext.SOURCES]
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "The archive wikitext-2-v1.zip or wikitext-103-v1.zip, which is verified; or the unpacked "
        "files wiki.train.tokens and so on (or train.txt and so on), which are not verified. Then "
        "there is a split for every file present."
    )

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description="Articles of Wikipedia as lines of words, with rare words as <unk>.",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage="https://arxiv.org/abs/1609.07843",
            license="CC BY-SA",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        names = {split: wikitext.file_names(part) for split, part in SPLITS.items()}
        paths = {split: builders.manual_file(dl_manager, *names[split]) for split in SPLITS}
        paths = {split: path for split, path in paths.items() if path is not None}
        if not paths:
            archive = dl_manager.download_and_extract(wikitext.SOURCES[self.builder_config.name])
            (folder,) = archive.iterdir()  # wikitext-2 or wikitext-103
            paths = {split: folder / names[split][0] for split in SPLITS}
        return {split: self._generate_examples(os.fspath(path)) for split, path in paths.items()}

    def _generate_examples(self, path):
        with open(path, encoding="utf-8", newline="\n") as lines:
            for k, text in enumerate(wikitext.articles(lines)):
                yield k, {"text": text}
