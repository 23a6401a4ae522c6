"""m4_weekly: the weekly series of the M4 competition."""

import numpy as np
import tensorflow_datasets as tfds

from experiments.tasks import tabular

SOURCE = "https://raw.githubusercontent.com/Mcompetitions/M4-methods/master/Dataset"
FILES = {"past": f"{SOURCE}/Train/Weekly-train.csv", "future": f"{SOURCE}/Test/Weekly-test.csv"}


class Builder(tfds.core.GeneratorBasedBuilder):
    """One example is one series: its name, its training part and the 13 weeks after it."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    MANUAL_DOWNLOAD_INSTRUCTIONS = f"Weekly-train.csv and Weekly-test.csv, from {SOURCE}."

    def _info(self):
        series = tfds.features.Tensor(shape=(None,), dtype=np.float64, encoding="bytes")
        return tfds.core.DatasetInfo(
            builder=self,
            description="The 359 weekly series of the M4 competition: 80 to 2597 training "
            "weeks, and the 13 weeks that follow. Both are in the split 'train'.",
            features=tfds.features.FeaturesDict(
                {"name": tfds.features.Text(), "past": series, "future": series}
            ),
            homepage=tabular.M4,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(**dl_manager.download(FILES))}

    def _generate_examples(self, past, future):
        names, pasts = tabular.parse_m4(past)
        _, futures = tabular.parse_m4(future)
        for k, (name, before, after) in enumerate(zip(names, pasts, futures, strict=True)):
            yield k, {"name": name, "past": before, "future": after}
