"""Where an experiment's numbers live: metrics.jsonl, its flags and its versions in one folder.

Of several processes all read, and process 0 alone writes.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping

from experiments import processes

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "scikit-learn", "tensorflow-cpu")


def write_whole(path: str, text: str) -> None:
    """Writes a file under a temporary name, then renames it: never half a file."""
    if not processes.is_first():
        return
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def open_folder(folder: str, settings: Mapping, *, overwrite: bool = False) -> list[dict]:
    """Prepares an output folder and returns the records of an earlier, equal run in it.

    Args:
      folder: created if absent; gets settings.json (the flags) and versions.json.
      settings: what the run depends on, JSON values.
      overwrite: forget what an earlier run with other settings has left.

    Raises:
      ValueError: if the folder holds a run with other settings, or not the same for all processes.
    """
    settings = json.loads(json.dumps(dict(settings)))
    settings_path = os.path.join(folder, "settings.json")
    metrics_path = os.path.join(folder, "metrics.jsonl")
    kept = []
    if os.path.exists(settings_path) and not overwrite:
        with open(settings_path, encoding="utf-8") as file:
            before = json.load(file)
        if before != settings:
            changed = sorted(k for k in settings | before if settings.get(k) != before.get(k))
            raise ValueError(
                f"{folder!r} holds a run with other settings ({', '.join(changed)}): choose "
                "another --output_dir, or pass --overwrite to forget that run."
            )
        if os.path.exists(metrics_path):
            kept = read(metrics_path)
    processes.wait(f"read {folder}")  # before the first of them writes
    _check_same(folder, kept)
    os.makedirs(folder, exist_ok=True)
    write_whole(settings_path, json.dumps(settings, indent=1, sort_keys=True) + "\n")
    write_whole(os.path.join(folder, "versions.json"), json.dumps(versions(), indent=1) + "\n")
    return kept


def _check_same(folder, kept):
    first = processes.of_first(len(kept))
    if first != len(kept):
        raise ValueError(
            f"{folder!r} holds {len(kept)} records here and {first} for process 0: pass an "
            "--output_dir that all processes share."
        )


def versions() -> dict:
    import jax

    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    device = jax.devices()[0]
    return (
        found
        | {
            "python": platform.python_version(),
            "backend": jax.default_backend(),
            "device": device.device_kind,
            "devices": jax.device_count(),
            "cores": os.cpu_count(),
        }
        | ({"processes": jax.process_count()} if processes.several() else {})
    )


def read(path: str) -> list[dict]:
    """The records of a JSON-lines file; a last line that was cut off is left out."""
    records = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break
            records.append(json.loads(line))
    return records


def write_lines(path: str, records: Iterable[Mapping]) -> None:
    write_whole(path, "".join(json.dumps(r) + "\n" for r in records))


@contextlib.contextmanager
def appending(path: str):
    """Opens a JSON-lines file for appending; every record is on disk before the next."""
    if not processes.is_first():
        yield lambda record: None
        return
    with open(path, "a", encoding="utf-8") as file:

        def append(record: Mapping) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        yield append
