"""Runs that are kept in the repository: their records, rounded and compressed."""

import gzip
import json
import os
import pathlib
import shutil
from collections.abc import Iterable
from typing import NamedTuple

from experiments import records

FOLDER = pathlib.Path(__file__).parent / "runs"
METRICS, COMMAND = "metrics.jsonl.gz", "command.txt"
COPIED = ("settings.json", "versions.json")
DIGITS = 6  # significant ones


class Run(NamedTuple):
    """Fields:
    title: the task.
    scaled: what is smaller than published, in few words.
    details: more of it, or "".
    tables: where its tables are, seen from experiments/; "": below, for it compares orders.
    shown_from: first epoch of its picture, past spikes that would flatten the rest.
    """

    title: str
    scaled: str
    details: str = ""
    tables: str = ""
    shown_from: int = 0


_LENET = "4,096 images, 25 epochs for 100"
_RATES = "lr 1e-2 and 2e-2 for 1e-3 and 5e-3"
_IMAGES = "means of 2 x 2 pixels, 20,000 training images, batches of 4 x 32 for 4,096"
_FEW = "means of 2 x 2 pixels, 20,000 training images, two workers"
_STEPS, _ECHOING = "../docs/local_steps.md", "../docs/echoing.md"
RUNS = {
    "hmda": Run("HMDA, logistic regression, W = 4", "New Jersey for New York"),
    "hmda_cosine": Run("HMDA, cosine decay, W = 4", "New Jersey for New York"),
    "m4": Run(
        "M4 Weekly, W = 4", "15 epochs for 30", "decay every 5; 3 seeds for 5", shown_from=7
    ),
    "lstm": Run(
        "WikiText-2, LSTM, W = 4", "test.txt trains, 15 epochs for 50",
        "valid.txt tests: compares with no published perplexity; 4,096 words, decay every 5",
        shown_from=2,
    ),
    "gpt2": Run(
        "GPT-2, W = 64", "WikiText-2's test.txt, width 64, 8 epochs",
        "for WikiText-103, 128 and 30; valid.txt tests; 2,048 words, windows of 64 for 128, "
        "lr 1e-3 and 2e-3 for 5e-4", shown_from=3,
    ),
    "sst2": Run(
        "SST-2, linear head, W = 16", "features of the text for frozen BERT's",
        "TF-IDF in 256 dimensions; lr 1e-4 to 3e-2 for 1e-4", shown_from=3,
    ),
    "lenet_w4": Run("CIFAR-10, LeNet, W = 4", _LENET, _RATES),
    "lenet_w16": Run(
        "CIFAR-10, LeNet, W = 16", _LENET, "lr 1e-2 alone, the better at W = 4 and 64, for 1e-3"
    ),
    "lenet_w64": Run("CIFAR-10, LeNet, W = 64", _LENET, _RATES),
    "qsr_cifar10_vit": Run(
        "CIFAR-10, ViT, Local AdamW", "CIFAR-10 at 16 x 16 for ImageNet, 16 epochs for 300",
        f"{_IMAGES}, 60,586 parameters", _STEPS,
    ),
    "qsr_cifar10_resnet": Run(
        "CIFAR-10, ResNet-8, Local SGD", "CIFAR-10 at 16 x 16 for ImageNet, 16 epochs for 200",
        f"{_IMAGES}, 19,218 parameters", _STEPS,
    ),
    "echo_resnet": Run("CIFAR-10, ResNet-8", "16 x 16, to 38 %", _FEW, _ECHOING),
    "echo_mobilenet": Run("CIFAR-10, MobileNet-V2", "16 x 16, to 33 %", _FEW, _ECHOING),
    "echo_shakespeare": Run(
        "GPT", "characters of Shakespeare, width 64", "for WikiText-2; two workers", _ECHOING
    ),
}  # fmt: skip


def record(results: str, name: str, command: str, folder: os.PathLike = FOLDER) -> pathlib.Path:
    """Keeps a finished output folder of `cd_grab`, `qsr` or `echoing` as folder/name.

    Args:
      results: the output folder; name: of `RUNS`.
      command: what made it, as a user types it, DIR for the data.

    Raises:
      ValueError: for a run that has no row in `RUNS`, or that has not ended, or without a command.
    """
    if name not in RUNS:
        raise ValueError(
            f"--name is {name!r}: it must be one of {', '.join(RUNS)}. Add a row to RUNS in "
            "experiments/recorded.py for a new run."
        )
    if not (command or "").strip():
        raise ValueError(f"--command is {command!r}: pass what made the run, DIR for its data.")
    missing = [
        part
        for part in ("metrics.jsonl", "table.md", *COPIED)
        if not os.path.exists(os.path.join(results, part))
    ]
    if missing:
        raise ValueError(
            f"{results!r} has no {', '.join(missing)}: only runs that have ended are recorded. "
            "Give the run's command again, which goes on where it was stopped."
        )
    target = pathlib.Path(folder) / name
    target.mkdir(parents=True, exist_ok=True)
    for part in COPIED:
        shutil.copyfile(os.path.join(results, part), target / part)
    records.write_whole(str(target / COMMAND), command.strip() + "\n")
    packed = pack(records.read(os.path.join(results, "metrics.jsonl")))
    (target / METRICS).write_bytes(packed)
    return target


def pack(rows: Iterable[dict]) -> bytes:
    """JSON lines with rounded numbers, compressed; equal rows give equal bytes."""
    text = "".join(json.dumps(rounded(row)) + "\n" for row in rows)
    return gzip.compress(text.encode(), mtime=0)


def unpack(packed: bytes) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(packed).decode().splitlines()]


def rounded(value):
    """All floats of a record at six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return value


def load(folder: os.PathLike = FOLDER) -> dict[str, list[dict]]:
    """{name: records} of all recorded runs, in the order of `RUNS`."""
    found = {name: pathlib.Path(folder) / name / METRICS for name in RUNS}
    return {name: unpack(path.read_bytes()) for name, path in found.items() if path.exists()}


def text_of(name: str, part: str, folder: os.PathLike = FOLDER) -> str:
    """A text file of a recorded run."""
    return (pathlib.Path(folder) / name / part).read_text(encoding="utf-8")
