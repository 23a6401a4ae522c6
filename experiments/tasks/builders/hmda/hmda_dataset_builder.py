"""hmda: mortgage applications of 2017, one configuration per state."""

import numpy as np
import tensorflow_datasets as tfds

from experiments.tasks import builders, tabular

SOURCE = (
    "https://raw.githubusercontent.com/pasta41/hmda-data-2017/"
    "705d6571e8487b6d7b3d438397ce727e028783d5/2017"
)
STATES = (
    "NJ AK AL AR AZ CA CO CT DC DE FL GA HI IA ID IL IN KS KY LA MA MD ME MI MN MO MS MT NC ND NE "
    "NH NM NV NY OH OK OR PA RI SC SD TN TX UT VA VT WA WI WV WY"
).split()
NUM_COLUMNS = 23  # numeric ones


class Builder(tfds.core.GeneratorBasedBuilder):
    """One example is one application. Only New Jersey's files have known checksums."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=state) for state in STATES]
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "2017-STATE-features.zip and 2017-STATE-target.zip of the state, from "
        f"https://{tabular.HMDA}; only those of NJ are verified."
    )

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description="Mortgage applications of one state in 2017 under the Home Mortgage "
            "Disclosure Act: the 23 numeric columns in the order of the file, with nan for missing "
            "entries, and action_taken, which is 3 for a denied application.",
            features=tfds.features.FeaturesDict(
                {
                    "features": tfds.features.Tensor(
                        shape=(NUM_COLUMNS,), dtype=np.float64, encoding="bytes"
                    ),
                    "action_taken": np.int32,
                }
            ),
            homepage=f"https://{tabular.HMDA}",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        state = self.builder_config.name
        paths = {
            part: builders.fetch(self, dl_manager, f"{SOURCE}/{state}/2017-{state}-{part}.zip")
            for part in ("features", "target")
        }
        return {"train": self._generate_examples(state, **paths)}

    def _generate_examples(self, state, features, target):
        rows, actions = tabular.parse_hmda(features, target, state)
        for k, (row, action) in enumerate(zip(rows, actions, strict=True)):
            yield k, {"features": row, "action_taken": action}
